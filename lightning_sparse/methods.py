"""The table of methods, one row per method with its citation. Each row becomes a strategy name, `<row>_ddp`.

method("gaussiank", density=0.01)                  # Method(GaussianK(density=0.01), Residual(), Mean())
Method(TopK(density=0.01), memory=NoMemory())      # custom parts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from lightning_sparse.aggregators import (
    Aggregator,
    AllReduceMean,
    GlobalTopK,
    Mean,
    OkTopK,
    PowerSGD,
    TwoLevel,
    TwoPass,
)
from lightning_sparse.compressors import Compressor, GaussianK, Identity, TopK
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.compressors.chunktopk import ChunkTopK
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.contrib.methods import CONTRIB
from lightning_sparse.memory import DecayingResidual, Memory, NoMemory, Residual
from lightning_sparse.method_spec import MethodSpec, Traits
from lightning_sparse.options import ReducerOptions, listed, suggestion
from lightning_sparse.update_rule import DEFAULT_RULE, UpdateRule


@dataclass(frozen=True)
class Method:
    """A compression method: a compressor, a memory and an aggregator.

    Attributes:
        compressor: selects and encodes a rank's payload.
        memory: keeps the part that a rank did not send.
        aggregator: combines the payloads of all ranks into one result.
        update_rule: rule for the exchange of optimizer updates. A method with a rule never exchanges gradients. None
            leaves the choice to the user: gradients, or updates with `UpdateRule()`.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: the aggregator cannot aggregate the compressor's payloads.
    """

    compressor: Compressor
    memory: Memory = Residual()
    aggregator: Aggregator = Mean()  # type: ignore[type-arg]  # the command line finds no classes for Aggregator[Any]
    update_rule: UpdateRule | None = None

    def __post_init__(self) -> None:
        for part, kind in (("compressor", Compressor), ("memory", Memory), ("aggregator", Aggregator)):
            if not isinstance(getattr(self, part), kind):
                raise TypeError(f"Method({part}={getattr(self, part)!r}): {part} must be a {kind.__name__}.")
            # Ranks compare configurations by their repr, and threads share them.
            value: Any = getattr(self, part)
            if not is_dataclass(value) or not value.__dataclass_params__.frozen:  # type: ignore[union-attr]
                raise TypeError(f"Method({part}={value!r}): make {type(value).__name__} a @dataclass(frozen=True).")
        if self.update_rule is not None and not isinstance(self.update_rule, UpdateRule):
            raise TypeError(f"Method(update_rule={self.update_rule!r}): update_rule must be an UpdateRule, or None.")
        if not self.aggregator.supports(self.compressor):
            instead = "Use Mean(), which gathers all payloads and takes any."
            if isinstance(self.aggregator, TwoLevel):
                instead = "Leave hierarchical out, or take another method: a node's ranks cut a segment, and matrices."
                by_option = self.aggregator == TwoLevel(self.aggregator.inter_node)
                if by_option and (name := _name_of(self)):
                    raise ValueError(f"hierarchical=True with {name!r}, which is not made for it. {instead}")
            if isinstance(self.aggregator, TwoPass) and TwoPass().supports(self.compressor):
                instead = "Leave second out: it is for compressors with a density."
            raise ValueError(f"{self.aggregator!r} cannot aggregate what {self.compressor!r} sends. {instead}")
        if self.delayed and not self.aggregator.applies_all_sent:
            what, remedy = repr(_name_of(self) or self.aggregator), "Leave overlap out, or take topk or gaussiank."
            if isinstance(self.aggregator, TwoLevel) and self.aggregator.inter_node.applies_all_sent:
                what, remedy = "hierarchical", "Leave hierarchical out, or take another overlap."
            raise ValueError(
                f"overlap='next_step' with {what}: a rank cannot go on by the entries that it has sent, as other ranks "
                f"decide which of them count. {remedy}"
            )
        if self.memory.error_feedback and not self.compressor.contracts:
            raise ValueError(
                f"{self.memory!r} keeps the errors of {self.compressor!r}, which may be larger than what is sent, so "
                f"they would grow from step to step. Use NoMemory()."
            )

    def __str__(self) -> str:
        """The parts with their non-default options; `repr` shows all options."""
        parts = (self.compressor, self.memory, self.aggregator, self.update_rule)
        return " + ".join(_short_repr(part) for part in parts if part is not None)

    @property
    def density(self) -> float | None:
        """Fraction of entries to send; None if the compressor has no such option."""
        return getattr(self.compressor, "density", None)

    @property
    def rule(self) -> UpdateRule:
        """The rule for exchanged updates: `update_rule`, or the default."""
        return self.update_rule or DEFAULT_RULE

    @property
    def local_steps(self) -> int:
        """H, the number of optimizer steps between exchanges; 1 unless the update rule sets another number."""
        return self.rule.local_steps

    @property
    def delayed(self) -> bool:
        """Whether the exchange of updates overlaps with the next step."""
        return self.rule.delayed

    @property
    def compresses(self) -> bool:
        """Whether it sends anything but the dense gradient."""
        return not isinstance(self.compressor, Identity)

    @property
    def sends_few(self) -> bool:
        """Whether ranks send only a part of the entries."""
        return (self.density or 1) < 1

    @property
    def is_sparse(self) -> bool:
        """Whether most entries stay in a residual. If so, adaptive optimizers should exchange updates instead."""
        return self.memory.error_feedback and self.sends_few


def _name_of(given: Method) -> str | None:
    """Return a method's name in `METHODS`, regardless of its options; None if no row has the same types of parts."""
    aggregator = given.aggregator.inter_node if isinstance(given.aggregator, TwoLevel) else given.aggregator
    kinds = [type(part) for part in (given.compressor, given.memory, aggregator)]
    named = [
        (name, compressor)
        for name, spec in METHODS.items()
        if [type(compressor := spec.make()), type(spec.memory), type(spec.aggregator)] == kinds
    ]
    names = [name for name, compressor in named if compressor == given.compressor] or [name for name, _ in named]
    return next(iter(names), None)


def _short_repr(part: Any) -> str:
    said = [
        f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value!r}"
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default or field.name == "density"
    ]
    return f"{type(part).__name__}({', '.join(said)})"


TWO_PASS = "Dettmers et al. 2022, arXiv 2110.02861; Tang et al. 2019, arXiv 1905.05957"

METHODS: Mapping[str, MethodSpec] = MappingProxyType(
    {
        "dense": MethodSpec(
            Identity, NoMemory(), AllReduceMean(), "DistributedDataParallel: all-reduce.", Traits(True, {})
        ),
        "topk": MethodSpec(TopK, Residual(), Mean(), "Aji & Heafield 2017, arXiv 1704.05021"),
        "gaussiank": MethodSpec(GaussianK, Residual(), Mean(), "Shi et al. 2019, arXiv 1911.08772"),
        "chunktopk": MethodSpec(ChunkTopK, Residual(), Mean(), "Peng et al. 2024, arXiv 2411.19870"),
        "gtopk": MethodSpec(TopK, Residual(), GlobalTopK(), "Shi et al. 2019, arXiv 1901.04359"),
        "oktopk": MethodSpec(TopK, Residual(), OkTopK(), "Li & Hoefler 2022, arXiv 2201.07598"),
        "doublesqueeze": MethodSpec(TopK, Residual(), TwoPass(), "Tang et al. 2019, arXiv 1905.05957"),
        "int8": MethodSpec(partial(Blocks, 8), Residual(), TwoPass(), TWO_PASS, Traits(True, None)),
        "int4": MethodSpec(partial(Blocks, 4), Residual(), TwoPass(), TWO_PASS, Traits(True, None)),
        "powersgd": MethodSpec(
            LowRank, Residual(), PowerSGD(), "Vogels et al. 2019, arXiv 1905.13727", Traits(True, None, {"rank": 2})
        ),
        "memsgd": MethodSpec(
            TopK,
            Residual(),
            Mean(),
            "Stich et al. 2018, arXiv 1809.07599",
            update_rule=UpdateRule(momentum="keep", rescale=False),
        ),
        "local_sgd": MethodSpec(
            Identity,
            NoMemory(),
            AllReduceMean(),
            "Stich 2019, arXiv 1805.09767",
            Traits(True, {}),
            UpdateRule(local_steps=8, momentum="keep", rescale=False),
        ),
        "diloco": MethodSpec(
            Identity,
            NoMemory(),
            AllReduceMean(),
            "Douillard et al. 2023, arXiv 2311.08105",
            Traits(True, {}),
            UpdateRule(local_steps=500, momentum="keep", rescale=False, outer_lr=0.7, outer_momentum=0.9),
        ),
        "sparseloco": MethodSpec(
            partial(ChunkTopK, density=64 / 4096, value_format="int2"),
            DecayingResidual(),
            Mean(),
            "Sarfi et al. 2025, arXiv 2508.15706",
            Traits(conserves=False, exact={"density": 1.0, "value_format": "float32"}, test_options={"density": 0.05}),
            UpdateRule(local_steps=30, momentum="keep", rescale=False),
        ),
        **CONTRIB,
    }
)


def method_options(owner: str, known: Iterable[str], method: str | Method, options: Iterable[str]) -> list[str]:
    """Return the user's options that belong to a method given by name.

    Args:
        owner: name of the function or class that received the options, such as "attach".
        known: names of the owner's own options.
        method: the method, by name or made of parts.
        options: names of the user's options.

    Raises:
        TypeError: an option belongs neither to the owner nor to the method.
    """
    own = METHODS[method].options if isinstance(method, str) and method in METHODS else []
    for option in options:
        if option not in known and option not in own:
            by_name = isinstance(method, str)
            nor = f", nor has method {method!r}" if by_name else ", and options of a Method are set in its parts"
            nor += f", which has {', '.join(own)}" if own else ""
            raise TypeError(f"{owner} has no option {option!r}{nor}.{option_hint(option, [*known, *own])}")
    return [option for option in options if option in own]


def options_by_method() -> str:
    """Return a text that lists the options of all methods, except their density."""
    having: dict[str, list[str]] = {}
    for name, spec in METHODS.items():
        for option in spec.options:
            if option != "density":
                having.setdefault(option, []).append(name)
    by_methods: dict[str, list[str]] = {}
    for option, names in having.items():
        by_methods.setdefault(", ".join(names), []).append(option)
    return "; ".join(f"{', '.join(options)} ({names})" for names, options in by_methods.items())


def option_hint(option: str, known: Iterable[str] = ()) -> str:
    """Return a hint for an unknown option: the methods that have it, or the closest known name."""
    having = [name for name, spec in METHODS.items() if option in spec.options]
    if not having:
        return suggestion(option, known)
    hint = f" {option!r} is an option of {listed(having)}"
    if option in {field.name for field in fields(UpdateRule)}:
        rest = ", local_steps=..." if option == "outer_momentum" else ""  # which has no use without local steps
        hint += f"; any method that makes a mean takes it as Method(..., update_rule=UpdateRule({option}=...{rest}))"
    return f"{hint}."


def method(name: str, *, density: float | None = None, **options: Any) -> Method:
    """Create a method by its name in `METHODS`.

    Args:
        name: a key of `METHODS`.
        density: fraction of entries to send, in (0, 1]; None selects the method's default, 0.001.
        **options: further options of the method's parts: compressor, memory, aggregator and update rule.

    Raises:
        ValueError: the name is unknown, or a value is out of range.
        TypeError: the method does not have an option.
    """
    if name not in METHODS:
        raise ValueError(f"Method {name!r} is not known; choose from {', '.join(METHODS)}.{suggestion(name, METHODS)}")
    spec = METHODS[name]
    if density is not None:
        options["density"] = density
    known = spec.options
    if unknown := [option for option in options if option not in known]:
        has = f"Method {name!r} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}."
        raise TypeError(has + option_hint(unknown[0]))
    momentum = options.get("momentum", "keep")
    memory, aggregator = _taking(options, spec.memory), _taking(options, spec.aggregator)
    rule = spec.update_rule and _taking(options, spec.update_rule)
    made = Method(spec.make(**options), memory, aggregator, rule)
    if momentum != "keep" and not made.is_sparse:
        raise ValueError(
            f"momentum={momentum!r} of {name!r} has no effect: it sends every element, so no entry's momentum "
            f"is delayed. Leave momentum out."
        )
    return made


def _taking(options: dict[str, Any], part: Any) -> Any:
    """Return a part with the options that belong to it, and remove these from `options`."""
    return replace(part, **{field.name: options.pop(field.name) for field in fields(part) if field.name in options})


UPDATE_DENSITY = 0.003
"""Default density of updates with up to `FEW_RANKS` ranks, see docs/frontier.md. Methods with an update rule use the
density of their papers."""
FEW_RANKS = 4
"""With more ranks, each rank sends more entries, because dense training then reaches a loss that 0.003 does not."""
WARMUP_FACTORS, WARMUP_STEPS = (8, 4, 2), 15
"""Factors on the density of the first exchanges, when weights change fastest; and the number of exchanges for each."""


def update_density(ranks: int) -> float:
    """Return the default density of updates for a number of sending ranks."""
    return min(1.0, UPDATE_DENSITY * math.sqrt(max(1.0, ranks / FEW_RANKS)))


def resolve_updates(
    given: str | Method,
    density: float | None,
    options: ReducerOptions = ReducerOptions(),
    *,
    ranks: int = FEW_RANKS,
    **own: Any,
) -> tuple[Method, ReducerOptions]:
    """Return the method, and the reducer's options with their density warm-up, for an exchange of updates.

    A sparse method that is given by name and without a density gets defaults: `update_density`, and a density warm-up
    if none is given. It also gets two-bit values if its aggregator supports rounded values. In all other cases the
    user's options are unchanged.

    Args:
        given, density, own: as `given`, `density` and `options` of `resolve_method`.
        options: the user's options; if `density_warmup` is None, the default is used.
    """
    chosen = resolve_method(given, density, **own)
    if not isinstance(given, str) or density is not None or chosen.update_rule is not None or not chosen.is_sparse:
        return chosen, replace(options, density_warmup=options.density_warmup or ())
    spec, rounded = METHODS[given], {"value_format": "int2", **own}
    takes_rounded = "value_format" in spec.options and spec.aggregator.supports(spec.make(value_format="int2"))
    chosen = method(given, density=update_density(ranks), **(rounded if takes_rounded else own))
    if options.density_warmup is not None:
        return chosen, options
    assert chosen.density is not None
    densities = [min(1.0, factor * chosen.density) for factor in WARMUP_FACTORS]
    return chosen, replace(options, density_warmup=densities, density_warmup_steps=WARMUP_STEPS)


def resolve_method(given: str | Method, density: float | None, **options: Any) -> Method:
    """Return the method for a user's options. `options` are options of the parts of a method given by name."""
    if isinstance(given, str):
        return method(given, density=density, **options)
    if not isinstance(given, Method):
        raise TypeError(f"method={given!r}: give a method's name, or a Method.")
    if density is not None:
        raise ValueError(f"density={density!r} beside method={given!r}: set the density of its compressor instead.")
    return given
