"""The shape of the code: no class holds too much, no inheritance is too long, and `benchmarks.shape` counts right."""

import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pandas")

from benchmarks import shape
from benchmarks.harness.tracer import Tracer, counts, typical

PACKAGE = Path(__file__).parents[1] / "lightning_sparse"
ATTRIBUTES, LEVELS = 12, 3


@pytest.fixture(scope="module")
def shapes():
    return shape.Classes(PACKAGE).shapes()


def check(found, limit):
    assert {name: number for name, number in found.items() if number > limit} == {}, f"more than {limit}"


def test_no_class_has_more_than_12_instance_attributes(shapes):
    """An instance also holds the attributes of its bases. Subclasses that add none do not count again.

    Frozen dataclasses do not count either: their fields are documented options or results, and never change.
    """
    found = {x.name: len(x.attributes) for x in shape.largest(shapes) if not x.frozen}
    check(found, ATTRIBUTES)


def test_no_class_is_more_than_three_levels_below_a_third_partys(shapes):
    check({x.name: x.levels for x in shapes}, LEVELS)


TOY = {
    "__init__.py": "from toy.parts import Thing",
    "base.py": """
        from typing import TYPE_CHECKING, ClassVar
        if TYPE_CHECKING:
            from torch.nn import Module
        else:
            Module = object

        class Base(Module):
            shared = 0
            kind: ClassVar[str] = "toy"
            declared: int

            def __init__(self):
                self.a, (self.b, *self.c) = 1, (2, 3)
                self.declared = 4

            @property
            def seen(self):
                return self.a

            @seen.setter
            def seen(self, value):
                def later():
                    self.d = value
                later()
    """,
    "parts/__init__.py": "from toy.parts.thing import Thing",
    "parts/thing.py": """
        import threading
        from dataclasses import dataclass
        from functools import cached_property
        from toy import base as home

        class Thing(home.Base):
            def __init__(self):
                super().__init__()
                self.a = self.seen = 5
                object.__setattr__(self, "e", 6)

            @cached_property
            def f(self):
                return 7

            @classmethod
            def make(cls):
                cls.shared = 8
                return cls()

        class Same(Thing):
            pass

        @dataclass(frozen=True)
        class Options:
            x: int = 0
            y: int = 1

        class Failure(RuntimeError):
            pass
    """,
    "parts/loops.c": "int one;\nint two;\n",
    "contrib/more.py": "from toy import Thing\nclass More(Thing): z: int\n",
}


@pytest.fixture
def toy(tmp_path):
    for name, source in TOY.items():
        path = tmp_path / "toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return tmp_path / "toy"


def test_an_instance_holds_what_methods_assign_and_bodies_declare(toy):
    found = {x.name: x for x in shape.Classes(toy).shapes()}
    base = {"a", "b", "c", "d", "declared"}
    assert found["base.Base"].attributes == base
    assert found["parts.thing.Thing"].attributes == base | {"e", "f"}
    assert found["parts.thing.Thing"].own == {"e", "f"}
    assert found["parts.thing.Options"].attributes == {"x", "y"}
    assert [x.name for x in found.values() if x.frozen] == ["parts.thing.Options"]
    # A subclass that adds nothing is not among the largest, as its base is.
    order = ["contrib.more.More", "parts.thing.Thing", "base.Base", "parts.thing.Options"]
    assert [x.name for x in shape.largest(found.values())] == order


def test_levels_are_classes_of_the_package_below_a_third_partys(toy):
    found = {x.name.rpartition(".")[2]: x.levels for x in shape.Classes(toy).shapes()}
    assert found == {"Base": 1, "Thing": 2, "Same": 3, "More": 3, "Options": 0, "Failure": 0}


def test_lines_and_classes_are_counted_by_folder(toy):
    rows = {row.pop("of"): row for row in shape.folders(toy)}
    lines = {name: len((toy / name).read_text().splitlines()) for name in TOY}
    assert rows["modules of no folder"] == {
        "files": 2,
        "classes": 1,
        "C lines": 0,
        "Python lines": lines["__init__.py"] + lines["base.py"],
    }
    assert rows["parts/"] == {"files": 2, "classes": 4, "Python lines": lines["parts/thing.py"] + 1, "C lines": 2}
    assert rows["toy"]["Python lines"] == sum(lines.values()) - 2
    assert rows["toy"]["classes"] == rows["toy without contrib/"]["classes"] + 1 == 6
    assert rows["toy"]["Python lines"] == rows["toy without contrib/"]["Python lines"] + 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="qualified names of code")
def test_calls_are_traced_in_all_threads(toy, monkeypatch):
    monkeypatch.syspath_prepend(toy.parent)
    from toy import Thing

    tracer, before = Tracer(toy), sys.getprofile()
    tracer.install()
    try:
        thread = threading.Thread(target=Thing.make)
        tracer.begin()
        Thing.make()
        thread.start()
        thread.join()
        calls = tracer.end()
        Thing.make()
    finally:
        tracer.remove()
        sys.setprofile(before)
        for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
            del sys.modules[name]
    # Each time make, Thing.__init__, Base.__init__, the setter `seen`, and `later` in it.
    assert counts(Counter(calls)) == {
        "files": 2,
        "crossings": 4,  # to Base.__init__ and to the setter
        "functions": 5,
        "classes": 1,  # Thing
        "bodies": 2,  # Thing, Base
        "calls": 10,
    }


def test_of_several_windows_each_call_counts_as_often_as_in_the_middle_one():
    assert typical(["aab", "ab", "aaabc"]) == Counter("aab")
