"""The options of the strategy, and the choice between gradients and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.hooks.optimizer_kinds import reason_against_updates, reason_for_gradients, share_parameters
from lightning_sparse.hooks.update_exchange import check_updates
from lightning_sparse.methods import Method, resolve_method, resolve_updates
from lightning_sparse.options import ExchangeMode, Overlap, ReducerOptions, check, check_optional


@dataclass(frozen=True)
class StrategyOptions:
    """The options of `SparseDDPStrategy`, without Lightning's. They are checked here only.

    Attributes:
        given, density: the method and the density as the user gave them.
        own: the further options of a method that is given by name.
        reducer: the options of the reducer.
        hierarchical, exchange, local_steps, overlap: see `SparseDDPStrategy`.
        method: the method of these options, for an exchange of gradients.

    Raises:
        ValueError: a value is out of range, or options exclude each other.
    """

    given: str | Method
    density: float | None
    own: Mapping[str, Any]
    reducer: ReducerOptions
    hierarchical: bool = False
    exchange: ExchangeMode = "auto"
    local_steps: int | None = None
    overlap: Overlap = "backward"
    method: Method = field(init=False)

    def __post_init__(self) -> None:
        for name in ("hierarchical", "exchange", "overlap"):
            check(name, getattr(self, name))
        object.__setattr__(self, "local_steps", check_optional("local_steps", self.local_steps))
        method = resolve_method(self.given, self.density, **self.own)
        object.__setattr__(self, "method", _two_level(method) if self.hierarchical else method)
        self.reducer.check_method(self.method)
        if self.exchange == "gradient":
            self._check_gradients()
        if self.local_steps is not None or self.overlap == "next_step":  # raises an error if they exclude each other
            replace(self.method, update_rule=self.method.rule.changed(self.local_steps, self.overlap))
        if self.choose(())[0] == "update":  # whatever the optimizers, which do not exist yet
            check_updates(self.method, ())

    def _check_gradients(self) -> None:
        """Raise ValueError for options that an exchange of gradients does not support."""
        if self.method.update_rule is not None:
            raise ValueError(
                f"exchange='gradient' with {self.method}: it is made to exchange updates. Leave exchange out, or take "
                f"another method, such as 'topk'."
            )
        if (self.local_steps or 1) > 1:
            raise ValueError(
                f"local_steps={self.local_steps!r} with exchange='gradient': gradients are exchanged in every step. "
                f"Set exchange='update' to let each rank take {self.local_steps} steps before each exchange."
            )
        if self.overlap == "next_step":
            raise ValueError(
                "overlap='next_step' with exchange='gradient': every step waits for its gradients. Set "
                "exchange='update', and the next step goes on while ranks exchange."
            )

    def choose(self, optimizers: Sequence[Optimizer]) -> tuple[str, str]:
        """Return the exchanged quantity, "update" or "gradient", and the reason for it."""
        if self.exchange != "auto":
            return self.exchange, f"exchange={self.exchange!r}"
        if self.method.update_rule is not None:
            return "update", "the method"
        if (self.local_steps or 1) > 1:
            return "update", f"local_steps={self.local_steps}"
        if self.overlap == "next_step":
            return "update", "overlap='next_step'"
        if not self.method.is_sparse:
            return "gradient", "the method"
        if share_parameters(optimizers):
            names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            return "gradient", f"the optimizers: {names} share parameters"
        if barred := next(filter(reason_against_updates, optimizers), None):
            return "gradient", f"the optimizer: {type(barred).__name__} {reason_against_updates(barred)}"
        stepping = [optimizer for optimizer in optimizers if optimizer.param_groups]  # Lightning's stand-in has none
        reasons = [(type(optimizer).__name__, reason_for_gradients(optimizer)) for optimizer in stepping]
        if others := [name for name, reason in reasons if reason is None]:
            return "update", f"the optimizer, {others[0]}"
        return "gradient", "the optimizer" + "".join(f": {name} {reason}" for name, reason in reasons[:1])

    def with_nodes(self, ranks_per_node: int) -> Method:
        """Return the method of a fit with `ranks_per_node` ranks on each node."""
        return _two_level(self.method, ranks_per_node) if self.hierarchical else self.method

    def for_updates(self, method: Method, ranks: int) -> tuple[Method, ReducerOptions]:
        """Return the method and the reducer's options for an exchange of updates.

        Args:
            method: the method of this fit, see `with_nodes`.
        """
        # The strategy clips and checks each rank's own gradient before the optimizer's step.
        options = replace(self.reducer, on_nonfinite="raise", clip_norm=None)
        senders = ranks // method.aggregator.ranks_per_link  # a node sends once
        found, options = resolve_updates(self.given, self.density, options, ranks=senders, **self.own)
        return replace(found, aggregator=method.aggregator), options


def _two_level(method: Method, *ranks_per_node: int) -> Method:
    """Return a method that aggregates densely within nodes."""
    aggregator = method.aggregator
    inter_node = aggregator.inter_node if isinstance(aggregator, TwoLevel) else aggregator
    return replace(method, aggregator=TwoLevel(inter_node, *ranks_per_node))
