"""`python -m reproductions` reproduces a finding of a paper in minutes, on this machine.

    python -m reproductions --list
    python -m reproductions memsgd
    python -m reproductions memsgd --figure   # only draw the figure from existing runs
    python -m reproductions memsgd --help     # with the finding's own options

Output in the folder `--out`: NAME.csv, with a row for each run and its config, and NAME.png. A run is written when it
ends, so after Ctrl-C the same command continues. At the end, a sentence says whether the finding held.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sparse.options import suggestion
from reproductions import FINDINGS, PACKAGES

if TYPE_CHECKING:
    from reproductions.frame import Finding


def finding(name: str) -> Finding:
    """Return a finding by its name in `FINDINGS`.

    Raises:
        SystemExit: a package is missing.
    """
    if absent := [package for package in PACKAGES if find_spec(package) is None]:
        raise SystemExit(f"reproductions need {' and '.join(absent)}: pip install '.[examples]' in a clone")
    found: Finding = import_module(f"reproductions.{name.replace('-', '_')}").FINDING
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, and list, run or draw findings."""
    parser = argparse.ArgumentParser(
        prog="python -m reproductions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(FINDINGS)}")
    parser.add_argument("--list", action="store_true", help="print all findings")
    parser.add_argument(
        "--out", type=Path, default=Path("reproduced"), help="folder of the results. Default: reproduced"
    )
    parser.add_argument("--figure", action="store_true", help="only draw the figure from existing runs")
    parser.add_argument("-h", "--help", action="store_true", help="print this help, with the options of NAME")
    args, _ = parser.parse_known_args(argv)
    if args.list:
        width = max(map(len, FINDINGS))
        print("\n".join(f"{name:<{width}}  {says}" for name, says in FINDINGS.items()))
        return
    if args.name is None:
        if args.help:
            parser.print_help()
            return
        parser.error(f"give the NAME of a finding, one of {', '.join(FINDINGS)}, or --list")
    if args.name not in FINDINGS:
        known = ", ".join(FINDINGS)
        parser.error(f"{args.name!r} is not known; choose from {known}.{suggestion(args.name, FINDINGS)}")
    chosen = finding(args.name)
    own = parser.add_argument_group(f"options of {args.name}")
    for option, default in chosen.config.items():
        own.add_argument(f"--{option}", type=type(default), default=default, help=f"default: {default!r}")
    if args.help:
        parser.print_help()
        return
    given = vars(parser.parse_args(argv))
    from reproductions import frame

    if args.figure:
        frame.redraw(chosen, args.out)
    else:
        frame.reproduce(chosen, {option: given[option] for option in chosen.config}, args.out)
