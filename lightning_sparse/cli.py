"""The command line: Lightning's own, with our names known and with typing errors put right.

    python -m lightning_sparse fit --config configs/base.yaml --config configs/digits_topk.yaml
    python -m lightning_sparse fit --help
    python -m lightning_sparse fit --trainer.strategy.help SparseDDPStrategy
    python -m lightning_sparse fit --config ... --print_config=comments  # every option, with its text

In YAML the strategy is a name, a class with options, or a class with own parts:

    strategy: topk_ddp

    strategy:
      class_path: SparseDDPStrategy
      init_args: {method: topk, density: 0.01}

    strategy:
      class_path: SparseDDPStrategy
      init_args:
        method:
          compressor: {class_path: TopK, init_args: {density: 0.01}}
          memory: {class_path: Residual}
          aggregator: {class_path: Mean}

A part that refuses its options ends the program with what it says; JSONARGPARSE_DEBUG=true shows where that was raised.
The command line is for the Lightning that `lightning_sparse.SparseDDPStrategy` is for.
"""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from lightning_utilities.core.imports import RequirementCache

import lightning_sparse.callbacks  # noqa: F401  # so that their names are known, too
from lightning_sparse._lightning import CHOSEN
from lightning_sparse.methods import METHODS

if TYPE_CHECKING:
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
    from pytorch_lightning.strategies import StrategyRegistry
else:
    LightningArgumentParser = import_module(f"{CHOSEN}.cli").LightningArgumentParser
    LightningCLI = import_module(f"{CHOSEN}.cli").LightningCLI
    StrategyRegistry = import_module(f"{CHOSEN}.strategies").StrategyRegistry

NO_TYPE_FITS = "Does not validate against any of the Union subtypes"
"""How jsonargparse begins when none of an option's types takes a value, for whatever reason."""


class Parser(LightningArgumentParser):
    """Lightning's parser; its errors also name the known option that is nearest to a mistyped one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Complain about the command line or a file, and exit with status 2."""
        # What stands inside a class is parsed by a parser of its own, whose error becomes part of the outer one's.
        if "Did you mean" not in message:
            message += self._hint(message)
        super().error(message, ex)

    def _hint(self, message: str) -> str:
        if found := re.search(r"[Oo]ption '([\w.]+)'|arguments: --([\w.]+)", message):
            subparsers = {n: p for a in self._actions if isinstance(a.choices, dict) for n, p in a.choices.items()}
            known = {key for parser in (self, *subparsers.values()) for key in parser.get_defaults().keys()}  # noqa: SIM118
            group = re.search(r"Group '([\w.]+)'", message)
            prefix = f"{group[1]}." if group and group[1] not in subparsers else ""
            return did_you_mean(prefix + (found[1] or found[2]), {*known, "init_args"})
        # Class names, and the keys beside them.
        if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
            return did_you_mean(found[2], dir(sys.modules[found[1]]))
        if found := re.search(r"'class_path': '[\w.]+', '(?!init_args|dict_kwargs)(\w+)'", message):
            return did_you_mean(found[1], {"init_args"})
        return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest of `known`, or nothing if none is near."""

    def likeness(key: str) -> float:
        # As much of the name as the key is long: what hangs on a mistyped key says nothing of it.
        return difflib.SequenceMatcher(None, key, ".".join(name.split(".")[: key.count(".") + 1])).ratio()

    nearest = max(sorted(known), key=likeness)
    return f"\nDid you mean {nearest!r}?" if likeness(nearest) > 0.6 else ""


class CLI(LightningCLI):
    """Lightning's command line, which checks the strategy's name and says in one line what is wrong with an option."""

    def before_instantiate_classes(self) -> None:
        name = self._get(self.config, "trainer.strategy")
        options = getattr(name, "init_args", None) or {}
        if not isinstance(options.get("method"), str | None) and options.get("density") is not None:
            self.parser.error(
                f"density: {options['density']} stands beside own parts of a method, which have their own density: it "
                f"comes from the command line or from an earlier file. Put `density: null` beside `method:`."
            )
        if isinstance(name, str) and name.lower() not in ("auto", *StrategyRegistry):
            self.parser.error(
                f"Strategy {name!r} is not known; choose from ddp, {', '.join(f'{method}_ddp' for method in METHODS)}, "
                f"the same with _spawn, _fork, _notebook or _find_unused_parameters_true, and Lightning's others. "
                f"For a class write `class_path:`." + did_you_mean(name.lower(), StrategyRegistry)
            )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, OSError) as error:
            cause: BaseException = error
            while cause.__cause__ and str(cause).startswith(NO_TYPE_FITS):
                cause = cause.__cause__
            if not isinstance(cause, ValueError | OSError):
                raise  # a mistake in the code rather than in the options: where it was raised matters
            self.parser.error(reasons(str(error)), error)


def reasons(message: str) -> str:
    """Return what objects said when they were made, without jsonargparse's list of the types that do not fit."""
    if not message.startswith(NO_TYPE_FITS):
        return message
    listed: list[str] = re.findall(r"^  - (?!Expected a )(.*(?:\n    .*)*)", message, re.MULTILINE)
    return "\n".join(reasons(textwrap.dedent("    " + reason)) for reason in listed) or message


def main(args: ArgsType = None) -> None:
    """Run the command line.

    Args:
        args: what to parse instead of `sys.argv[1:]`.
    """
    if not RequirementCache("jsonargparse[signatures]>=4.52"):
        raise SystemExit("The command line needs jsonargparse, 4.52 or later: pip install 'lightning_sparse[cli]'")
    CLI(
        parser_class=Parser,
        parser_kwargs={
            "prog": "python -m lightning_sparse",
            "description": "Train with PyTorch Lightning over slow links. "
            f"Besides Lightning's own strategies there are {', '.join(f'{method}_ddp' for method in METHODS)}. "
            "Which of them pays on your link: python -m lightning_sparse advise --help.",
        },
        # With a logger each run has a folder of its own; without one, a second run would fail over the first's file.
        save_config_kwargs={"overwrite": True},
        args=args,
    )
