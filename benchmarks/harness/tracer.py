"""Records which functions of a package run, and counts files, crossings, functions, classes and calls."""

import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple


class Call(NamedTuple):
    """One call of a function of the package."""

    file: str
    function: str  # its qualified name
    caller: str | None  # the file of the function that called it, if that belongs to the package as well
    type: str | None  # of its first argument, if it is named `self` or `cls`


class Tracer:
    """Records the calls of a package's functions, in this thread and in all threads that Python starts later.

    It needs Python 3.11 or later for the qualified names of functions.
    """

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package.resolve()}{os.sep}"
        self.calls: list[Call] | None = None

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def begin(self) -> None:
        self.calls = []

    def end(self) -> list[Call]:
        """Return the calls since `begin`."""
        calls, self.calls = self.calls, None
        assert calls is not None
        return calls

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        calls, code = self.calls, frame.f_code
        if calls is None or event != "call" or not code.co_filename.startswith(self.prefix):
            return
        called_by = frame.f_back.f_code.co_filename if frame.f_back else ""
        caller = called_by.removeprefix(self.prefix) if called_by.startswith(self.prefix) else None
        owner = None
        if code.co_argcount and code.co_varnames[0] in ("self", "cls"):
            first = frame.f_locals[code.co_varnames[0]]
            cls = first if isinstance(first, type) else type(first)
            owner = f"{cls.__module__}.{cls.__qualname__}"
        calls.append(Call(code.co_filename.removeprefix(self.prefix), code.co_qualname, caller, owner))  # type: ignore[attr-defined]


def typical(windows: Sequence[Sequence[Call]]) -> Counter[Call]:
    """Return the median number of each call over several windows. Threads that poll call in few of them."""
    counted = [Counter(window) for window in windows]
    return Counter({call: int(statistics.median_low(c[call] for c in counted)) for call in set().union(*counted)})


def counts(calls: Counter[Call]) -> dict[str, int]:
    """Return the columns of a trip: files, crossings, functions, classes, bodies and calls."""
    calls = +calls
    return {
        "files": len({call.file for call in calls}),
        "crossings": sum(n for call, n in calls.items() if call.caller not in (None, call.file)),
        "functions": len({(call.file, call.function) for call in calls}),
        "classes": len({call.type for call in calls if call.type}),
        "bodies": len({(call.file, call.function.rpartition(".")[0]) for call in calls if call.type}),
        "calls": sum(calls.values()),
    }
