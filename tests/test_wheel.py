"""The wheel declares its requirements: processor and glibc if it contains the C kernels, otherwise none."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from lightning_sparse.kernels import native
from tests.support.tiers import exhaustive, full, tiers

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('made'))"
LOAD = """
import logging; logging.basicConfig(level=logging.WARNING)
from lightning_sparse.kernels import native
import lightning_sparse
print(lightning_sparse.__file__, native.library() is not None)
native.library()
"""
ROUND = """
import hashlib, torch
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
u = torch.randn(9000, generator=torch.Generator().manual_seed(0))
(scales, codes, _), update = Blocks(8).compress(u, Context(Segment(0, ("w",), ((9, 1000),), 0)))
print([hashlib.sha256(x.view(torch.uint8).numpy()).hexdigest() for x in (scales, codes, update + 0)])  # -0 + 0 is 0
print(torch.tensor(1e-40) * 1)  # fast maths flushes it to 0 in the whole process
"""
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tags of other systems are others")


def copy_of_tree(folder: Path) -> Path:
    """Return a copy of the files from which a wheel is built, without compiled ones."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "lightning_sparse", tree / "lightning_sparse", ignore=ignored)
    return tree


def run(folder: Path, code: str, **environment: str) -> str:
    """Run code in a folder, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(tree: Path, **environment: str) -> str:
    """Build a wheel in a copy of the tree, and return its name."""
    return run(tree, BUILD, **environment).splitlines()[-1]


@full
@on_linux
@pytest.mark.parametrize("compiler", tiers([True, False], [False]))
def test_the_tags_of_a_wheel_are_right_and_its_loops_work(compiler, tmp_path):
    tree = copy_of_tree(tmp_path)
    wheel = tree / "made" / build(tree, **({} if compiler else {"CC": "/bin/false"}))
    system = sysconfig.get_platform().removeprefix("linux-")
    tag = f"py3-none-manylinux_2_17_{system}" if compiler else "py3-none-any"
    assert wheel.name.endswith(f"-{tag}.whl")

    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    libraries = [path.name for path in (tmp_path / "site").rglob("*.so")]
    assert libraries == ["_cpu.so"] * compiler
    (metadata,) = (tmp_path / "site").glob("*.dist-info/WHEEL")
    assert f"Root-Is-Purelib: {str(not compiler).lower()}\nTag: {tag}\n" in metadata.read_text()
    about = email.message_from_string(metadata.with_name("METADATA").read_text())
    assert all(about[name] for name in ("Author", "Keywords", "License-File", "Requires-Python", "Summary"))
    assert (about["License-Expression"] or about["License"]) == "Apache-2.0"
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert about.get_all("Provides-Extra") == ["cli", "cuda", "examples"]
    assert "# lightning_sparse" in about.get_payload()
    assert not re.findall(r"\]\((?!https?:).*\)|<!--", about.get_payload())  # they lead nowhere on a package index

    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "site/lightning_sparse/__init__.py"), str(compiler)]
    assert done.stderr.count("The loops in C were not compiled, so work on the CPU takes") == (not compiler)


@full
@on_linux
def test_a_library_of_earlier_sources_is_not_packed(tmp_path):
    """It stays in the build folder, and an installed package has no sources to compare it with."""
    tree = copy_of_tree(tmp_path)
    assert build(tree).endswith(f"{sysconfig.get_platform().removeprefix('linux-')}.whl")
    source = tree / "lightning_sparse" / "kernels" / "cpu" / "select.c"
    source.write_text(source.read_text() + "\n")
    wheel = build(tree, CC="/bin/false")
    assert wheel.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(tree / "made" / wheel) as opened:
        assert not [name for name in opened.namelist() if name.endswith(".so")]


@exhaustive
@on_linux
@pytest.mark.parametrize("flags", ["-ffast-math", "-Ofast"])
def test_flags_of_the_environment_do_not_change_results(flags, tmp_path):
    tree = copy_of_tree(tmp_path)
    assert not build(tree, CFLAGS=flags).endswith("-any.whl")
    assert run(tree, ROUND) == run(tree, ROUND, LIGHTNING_SPARSE_KERNELS="torch")


@pytest.mark.parametrize(("rank", "said"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_rank_says_that_the_loops_are_missing(rank, said, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert native.library.__wrapped__() is None
    assert len(caplog.records) == said
