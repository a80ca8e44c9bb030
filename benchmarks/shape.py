"""Counts the files, classes and calls of a training step, and measures their sizes.

    python -m benchmarks.shape                 # this checkout
    python -m benchmarks.shape --package DIR   # the package of another checkout
    python -m benchmarks.shape --csv FILE      # writes the table, too

- Trips: the package's functions that run while a gradient, an update or a checkpoint passes through the package.
  They are traced in all threads of rank 0, in a `Trainer.fit` of two processes. The model is one segment.
  Each call counts with its median number in batches six to ten, so that rare calls of polling threads do not count.
  A crossing is a call from one file of the package directly into another.
  Classes are the types of the objects whose methods run; bodies are the classes that define these methods.
- Folders: Python files, classes, and lines of Python and of C.
- Classes: the ten with the most instance attributes. `levels` counts classes on the longest way up to a third party's.
- Words: sentences that are hard to read, if this checkout has `tests.words`.

Comprehensions and generator expressions count as functions. Python 3.12 and later inline most comprehensions, so
compare tables of one interpreter. Build the loops in C in both checkouts: without them, other functions run.
"""

import argparse
import ast
import builtins
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.harness.table import Row, save, text

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_sparse"
MOST = 10
"""Number of classes in the table."""

C = {".c", ".h"}
TIMEOUT = 300
"""Seconds after which the traced training counts as hanging."""


class Shape(NamedTuple):
    """The shape of a class.

    Its instance attributes are the names that its methods assign to `self` and the annotated names of its body.
    An instance holds the attributes of its bases as well, so they count if the bases are in the package.
    Properties, `ClassVar` annotations and class attributes that no method assigns do not count.
    """

    name: str  # module and qualified name, without the package
    attributes: frozenset[str]
    own: frozenset[str]  # the attributes that no base in the package has
    levels: int  # classes of the package on the longest way up, itself included; 0 without a third party's class
    frozen: bool  # a frozen dataclass


class Module:
    """The classes and imports of a file, by name."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, str] = {}
        tree = ast.parse(path.read_text())
        self._add(tree, "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.imports.setdefault(alias.asname or top, alias.name if alias.asname else top)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")

    def _add(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, ast.ClassDef):
                self.classes[prefix + node.name] = node
            self._add(node, f"{prefix}{node.name}." if named else prefix)


class Classes:
    """All classes of a package, read from its source without importing it."""

    def __init__(self, package: Path) -> None:
        self.package = package.name
        self.modules: dict[str, Module] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path)

    def shapes(self) -> list[Shape]:
        """Return the shapes of all classes."""
        return [self._shape(module, name) for module in self.modules.values() for name in module.classes]

    def _shape(self, module: Module, name: str) -> Shape:
        node = module.classes[name]
        bases, third = self._bases(module, name)
        lines = [self._shape(*base) for base in bases]
        inherited = frozenset().union(*(line.attributes for line in lines))
        properties = set().union(*(_properties(m.classes[n]) for m, n in self._ancestors(module, name)))
        own = frozenset(_attributes(node)) - inherited - properties - {"__class__", "__dict__"}
        below_third = third or any(line.levels for line in lines)
        full = f"{module.name}.{name}".removeprefix(f"{self.package}.")
        return Shape(full, inherited | own, own, self._height(module, name) if below_third else 0, _is_frozen(node))

    def _bases(self, module: Module, name: str) -> tuple[list[tuple[Module, str]], bool]:
        """Return the bases in the package, and whether another base belongs to a third party."""
        mine: list[tuple[Module, str]] = []
        third = False
        for base in module.classes[name].bases:
            found = self._find(module, ast.unparse(base.value if isinstance(base, ast.Subscript) else base))
            if isinstance(found, tuple):
                mine.append(found)
            else:
                third |= found.partition(".")[0] not in {*sys.stdlib_module_names, self.package, ""}
        return mine, third

    def _find(self, module: Module, name: str) -> tuple[Module, str] | str:
        """Return the class that a name denotes in a module, its full name if it is external, or "" for a variable."""
        if name in module.classes:
            return module, name
        first, _, rest = name.partition(".")
        if first not in module.imports:
            return f"builtins.{name}" if hasattr(builtins, first) else ""
        full = ".".join(filter(None, (module.imports[first], rest)))
        home = next((x for x in _prefixes(full) if x in self.modules), None)
        if home is None:
            return full
        rest = full.removeprefix(home).lstrip(".")
        return self._find(self.modules[home], rest) if rest and (home, rest) != (module.name, name) else ""

    def _ancestors(self, module: Module, name: str) -> Iterator[tuple[Module, str]]:
        yield module, name
        for base in self._bases(module, name)[0]:
            yield from self._ancestors(*base)

    def _height(self, module: Module, name: str) -> int:
        return 1 + max((self._height(*base) for base in self._bases(module, name)[0]), default=0)


def _prefixes(name: str) -> Iterator[str]:
    """Yield "a.b.c", "a.b" and "a" of "a.b.c"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        yield ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [child for child in _inside(node) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a body, but not the nodes inside its functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _inside(child)


def _properties(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's properties."""
    return {f.name for f in _methods(node) if any(d == "property" or d.endswith(".setter") for d in _decorators(f))}


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class's methods assign to `self`, or that its body declares."""
    for child in _inside(node):
        match child:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if not ast.unparse(annotation).removeprefix("typing.").startswith("ClassVar"):
                    yield name
    for method in _methods(node):
        decorators = set(_decorators(method))
        if any(decorator.endswith("cached_property") for decorator in decorators):
            yield method.name
        arguments = [*method.args.posonlyargs, *method.args.args]
        if arguments and not decorators & {"staticmethod", "classmethod"}:
            yield from _assigned(method, arguments[0].arg)


def _assigned(node: ast.AST, own: str) -> Iterator[str]:
    """Yield the names that a method assigns to `self`, also in functions within it."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef():
                continue
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()) if name == own:
                yield attribute
            case ast.Call(args=[ast.Name(id=name), ast.Constant(value=str(attribute)), _]) if name == own:
                if ast.unparse(child.func) in ("setattr", "object.__setattr__"):
                    yield attribute
        yield from _assigned(child, own)


def _is_frozen(node: ast.ClassDef) -> bool:
    """Return whether a class is decorated as a frozen dataclass."""
    return any(
        isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func).endswith("dataclass")
        and any(word.arg == "frozen" and ast.unparse(word.value) == "True" for word in decorator.keywords)
        for decorator in node.decorator_list
    )


def largest(shapes: Iterable[Shape]) -> list[Shape]:
    """Sort classes by their number of attributes; leave out subclasses that add none."""
    return sorted((x for x in shapes if x.own), key=lambda x: (-len(x.attributes), x.name))


def folders(package: Path) -> list[Row]:
    """Return a row for each top folder of a package, subfolders included, and two rows of totals."""
    classes = Classes(package).shapes()
    parts: dict[str, Row] = {}
    for path in sorted(path for path in package.rglob("*") if path.suffix in {".py", *C}):
        name, *rest = path.relative_to(package).parts
        row = parts.setdefault(
            f"{name}/" if rest else "modules of no folder", {"files": 0, "classes": 0, "Python lines": 0, "C lines": 0}
        )
        lines = len(path.read_text().splitlines())
        if path.suffix in C:
            row["C lines"] += lines
        else:
            row["files"] += 1
            row["Python lines"] += lines
    for shape in classes:
        name, _, rest = shape.name.partition(".")
        parts[f"{name}/" if f"{name}/" in parts else "modules of no folder"]["classes"] += 1
    core = [row for name, row in parts.items() if name != "contrib/"]
    totals = {f"{package.name} without contrib/": core, package.name: [*parts.values()]}
    parts |= {name: {column: sum(row[column] for row in rows) for column in rows[0]} for name, rows in totals.items()}
    return [{"of": name, **row} for name, row in parts.items()]


def classes(package: Path) -> list[Row]:
    """Return rows for the classes with the most attributes, and for that with the longest inheritance."""
    shapes = Classes(package).shapes()
    deepest = max(shapes, key=lambda shape: shape.levels)
    columns = {shape: {"attributes": len(shape.attributes), "levels": shape.levels} for shape in shapes}
    rows = [{"of": shape.name, **columns[shape]} for shape in largest(shapes)[:MOST]]
    return [*rows, {"of": f"longest inheritance: {deepest.name}", **columns[deepest]}]


def words(checkout: Path) -> list[Row]:
    """Return a row for each pattern of `tests.words`, counted in a checkout; no rows without that module."""
    try:
        module: Any = importlib.import_module("tests.words")
    except ModuleNotFoundError:
        return []
    module.ROOT = checkout
    return [
        {"of": f"{pattern}, in {kind}", "sentences": number}
        for pattern, kinds in module.counts().items()
        for kind, number in kinds.items()
    ]


def trips(checkout: Path) -> list[Row]:
    """Train in two new processes that trace the trips, and return a row for each trip."""
    if not any((checkout / PACKAGE).rglob("*.so")):
        print(f"The loops in C of {checkout} are not built, so its trips are those of plain torch.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.harness.trips", str(checkout), folder]
        output = Path(folder, "output")
        with output.open("w") as file:
            process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            if status := process.wait(TIMEOUT):
                raise SystemExit(f"{output.read_text()}\nThe traced training ended with exit status {status}.")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # both ranks
        found = json.loads(Path(folder, "trips.json").read_text())
    return [{"of": name, **row} for name, row in found.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT, metavar="DIR", help="checkout, default: this one")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="file to write the table to")
    args = parser.parse_args()
    checkout = args.package.resolve()
    package = checkout / PACKAGE
    if not package.is_dir():
        parser.error(f"--package {args.package}: there is no folder {PACKAGE} in it; give a checkout.")
    if sys.version_info < (3, 11):
        parser.error("Python 3.11 or later is needed: older ones do not tell a function's qualified name.")
    rows = [*trips(checkout), *folders(package), *classes(package), *words(checkout)]
    table = pd.DataFrame([{column: text(value) for column, value in row.items()} for row in rows]).fillna("")
    print(table.to_string(index=False))
    if args.csv is not None:
        save(args.csv, rows)
