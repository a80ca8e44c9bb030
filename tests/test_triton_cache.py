"""Triton's cache for a GPU on another machine. Creating it downloads 400 MB, so the test creates it by hand."""

import subprocess
import sys
import tarfile

import pytest

from tests import triton_cache


def test_an_archive_is_unpacked_once(tmp_path, monkeypatch):
    made, archive, cache = tmp_path / "made" / "cache", tmp_path / "cache.tgz", tmp_path / "there" / "cache"
    made.mkdir(parents=True)
    (made / "kernel.cubin").write_bytes(b"code")
    monkeypatch.setattr(triton_cache, "ARCHIVE", archive)
    monkeypatch.setattr(triton_cache, "CACHE", cache)
    assert triton_cache.unpack() == ""  # there is no archive
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(made, made.name)
    cache.parent.mkdir()
    assert triton_cache.unpack() == f"A cache of Triton's was unpacked into {cache}."
    assert (cache / "kernel.cubin").read_bytes() == b"code"
    (cache / "kernel.cubin").write_bytes(b"newer")
    assert triton_cache.unpack() == ""  # Triton has gone on to use it
    assert (cache / "kernel.cubin").read_bytes() == b"newer"


def test_what_is_lacking_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_cache.sys, "argv", ["triton_cache", "--check"])
    monkeypatch.setattr(triton_cache, "headers", lambda: tmp_path)
    monkeypatch.setattr(triton_cache, "ARCHIVE", triton_cache.ROOT / "none.tgz")
    with pytest.raises(SystemExit, match=r"There is no none\.tgz yet: python -m tests\.triton_cache makes it\."):
        triton_cache.main()


def test_headers_of_another_python_are_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_cache, "PYTHON", "3.99")
    monkeypatch.setattr(triton_cache.Path, "home", lambda: tmp_path)
    with pytest.raises(SystemExit, match=r"Python 3\.99's headers are not installed"):
        triton_cache.headers()


def test_another_version_of_triton_compiles_nothing():
    ran = subprocess.run(
        [sys.executable, "-c", "from tests import triton_cache as it; it.TRITON = '0.0'; it.work(check=False)"],
        cwd=triton_cache.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "was imported in place of 0.0." in ran.stderr
