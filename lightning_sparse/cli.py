r"""Lightning's command line with this package's names registered, and with suggestions for mistyped options.

    python -m lightning_sparse fit --config configs/base.yaml --config configs/digits.yaml \
        --config configs/digits/topk.yaml
    python -m lightning_sparse fit --help
    python -m lightning_sparse fit --trainer.strategy.help SparseDDPStrategy
    python -m lightning_sparse fit --config ... --print_config=comments  # every option with its description

In YAML the strategy is a name, a class with options, or a class with custom parts:

    strategy: topk_ddp

    strategy:
      class_path: SparseDDPStrategy
      init_args: {method: topk, density: 0.01}
      dict_kwargs: {value_format: bfloat16}  # the method's own options

    strategy:
      class_path: SparseDDPStrategy
      init_args:
        method:
          compressor: {class_path: TopK, init_args: {density: 0.01}}
          memory: {class_path: Residual}
          aggregator: {class_path: Mean}

If a part raises an error about its options, the program prints the message and exits. To see the traceback, set
JSONARGPARSE_DEBUG=true. The command line uses the same Lightning namespace as `lightning_sparse.SparseDDPStrategy`.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_utilities.core.imports import RequirementCache

import lightning_sparse.callbacks  # noqa: F401  # so that their names are known
from lightning_sparse._lightning import CHOSEN
from lightning_sparse.methods import METHODS, options_by_method

if TYPE_CHECKING:
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
    from pytorch_lightning.strategies import StrategyRegistry
else:
    LightningArgumentParser = import_module(f"{CHOSEN}.cli").LightningArgumentParser
    LightningCLI = import_module(f"{CHOSEN}.cli").LightningCLI
    StrategyRegistry = import_module(f"{CHOSEN}.strategies").StrategyRegistry


PROGRAM = "python -m lightning_sparse"
NAMES = ("auto", *METHODS)
"""The starts of the names of strategies, before _ddp or _hsdp."""


class Parser(LightningArgumentParser):
    """Lightning's parser. Its errors also suggest the known option closest to a mistyped one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"prog": PROGRAM, **kwargs})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help text. For this package's strategy it includes the options of all methods."""
        text = super().format_help(*args, **kwargs)
        if "Help for --trainer.strategy.help=lightning_sparse." not in text:
            return text
        own = (
            f"Pass further options of a method under dict_kwargs, such as --trainer.strategy.dict_kwargs.levels=7 "
            f"with --trainer.strategy.method=qsgd: {options_by_method()}."
        )
        return f"{text}\n{textwrap.fill(own, 80)}\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report an error in the command line or a file, and exit with status 2."""
        if "subcommand" in message:
            message += (
                "\nA further command is `advise`; see `advise --help`. To reproduce findings of papers, run "
                "`python -m reproductions` in a clone of the repository."
            )
        if "has no option 'density'" in message:
            message += "\nIf an earlier file gives the density, write `density: null` next to `method:`."
        named = re.search(r"Expected a dot import path string: (\w+)", message)
        if named and named[1].lower() in StrategyRegistry:
            entry = StrategyRegistry[named[1].lower()]
            same = {"class_path": entry["strategy"].__name__, **entry["init_params"]}
            message += f"\nStrategy {named[1]!r} is a name, which has no options. To set options, write its class: "
            message += " ".join(f"--trainer.strategy.{option}={value}" for option, value in same.items())
        beside = re.search(r"Given value: \{'class_path': '[^']*', '(?!init_args|dict_kwargs)(\w+)'", message)
        if beside:
            message += f"\n{beside[1]!r} is an option of a class: put it under `init_args:`, beside `class_path:`."
        # Errors of our constructors contain "has no option", and already name the remedy.
        unknown = re.search(r"(?<!has no )option '([\w.]+)'|arguments: --([\w.]+)", message, re.IGNORECASE)
        # A nested parser parses the options of a nested class, and the outer parser quotes its message.
        if unknown and not beside and "Did you mean" not in message and "dict_kwargs" not in message:
            subparsers = [p for a in self._actions if isinstance(a.choices, dict) for p in a.choices.values()]
            known = {key for parser in (self, *subparsers) for key in parser.get_defaults().keys()}  # noqa: SIM118
            name = unknown[1] or unknown[2]
            near = did_you_mean(name.rpartition(".")[0], known)  # an earlier part of the name is mistyped
            of_method = any(name.rpartition(".")[2] in spec.options for spec in METHODS.values())
            if not near and of_method and "method" in known:  # an option of our strategies
                message += f"\n{name!r} is an option of a method: put it under `dict_kwargs:`, beside `init_args:`."
            else:
                message += did_you_mean(name, {*known, "init_args"})
        super().error(message, ex)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the name in `known` closest to a dotted name; "" if none is close."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):  # parts after a mistyped part are unknown too
        candidates = [key for key in known if key.count(".") == depth - 1]
        nearest = difflib.get_close_matches(prefix := ".".join(parts[:depth]), candidates, n=1)
        if nearest and nearest[0] != prefix:
            return f"\nDid you mean {nearest[0]!r}?"
    return ""


class CLI(LightningCLI):
    """Lightning's command line. It also checks the strategy's name, and reports a wrong option in one line."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        parser.__class__ = Parser  # it adds no state; Lightning 2.5 has no argument parser_class
        return parser

    def before_instantiate_classes(self) -> None:
        name = self._get(self.config, "trainer.strategy")
        options = getattr(name, "init_args", None) or {}
        if not isinstance(options.get("method"), str | None) and options.get("density") is not None:
            self.parser.error(
                f"density: {options['density']} is set together with custom parts of a method, which have their own "
                f"density. It comes from the command line or from an earlier file. Add `density: null` next to "
                f"`method:`."
            )
        if isinstance(name, str) and name.lstrip().startswith("{"):
            self.parser.error(
                f"Strategy {name}: the class is not known, or one of its options is wrong. To see the error, write it "
                f"in a file, or as `--trainer.strategy.class_path SparseDDPStrategy --trainer.strategy.density 0.01`."
            )
        if isinstance(name, str) and name.endswith("Strategy"):
            self.parser.error(
                f"Strategy {name!r} is the name of a class: write `--trainer.strategy.class_path {name}`, or in a file "
                f"`class_path: {name}` under `strategy:`."
            )
        if isinstance(name, str) and name.lower() not in ("auto", *StrategyRegistry):
            self.parser.error(
                f"Strategy {name!r} is not known; choose from ddp, {', '.join(f'{start}_ddp' for start in NAMES)}, "
                f"the same with _spawn, _fork, _notebook, _find_unused_parameters_true or _false, auto and most "
                f"methods with _hsdp in place of _ddp, and Lightning's others. For a class write `class_path:`."
                + did_you_mean(name.lower(), StrategyRegistry)
            )

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, OSError) as error:
            cause: BaseException = error
            while cause.__cause__ and str(cause).startswith(NO_TYPE_FITS):
                cause = cause.__cause__
            if not isinstance(cause, ValueError | OSError):
                raise  # a bug: its traceback matters
            self.parser.error(constructor_errors(str(error)), error)


NO_TYPE_FITS = "Does not validate against any of the Union subtypes"
"""First words of jsonargparse's message after a constructor's error; a list of the tried types follows."""


def constructor_errors(message: str) -> str:
    """Return the constructors' own error messages, without jsonargparse's list of types that do not match."""
    if not message.startswith(NO_TYPE_FITS):
        return message
    listed: list[str] = re.findall(r"^  - (?!Expected a )(.*(?:\n    .*)*)", message, re.MULTILINE)
    return "\n".join(constructor_errors(textwrap.dedent("    " + text)) for text in listed) or message


def main(args: ArgsType = None) -> None:
    """Run the command line.

    Args:
        args: arguments to parse instead of `sys.argv[1:]`.
    """
    if not RequirementCache("jsonargparse[signatures]>=4.52"):
        raise SystemExit("The command line needs jsonargparse: pip install 'jsonargparse[ruamel,signatures]>=4.52'")
    CLI(
        parser_kwargs={
            "prog": PROGRAM,
            "description": "Train with PyTorch Lightning over slow links. "
            f"Besides Lightning's own strategies there are {', '.join(f'{start}_ddp' for start in NAMES)}. "
            "To find out which is fastest on your link: python -m lightning_sparse advise --help.",
        },
        # With a logger each run has its own folder. Without one, a second run would fail because the file exists.
        save_config_kwargs={"overwrite": True},
        args=args,
    )
