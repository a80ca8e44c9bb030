"""Creates Triton's cache for a GPU on another machine, so that no GPU time is spent on compiling.

    python -m tests.triton_cache           # creates .gpu/cache.tgz in about 3 minutes, downloads 400 MB the first time
    python -m tests.triton_cache --check   # prints how many kernels and launchers would be found

The cache contains the kernels that the tests and benchmarks of `tests.gpu quick` launch most, for compute capability
9.0. It also contains the small C extension that Triton builds to launch a kernel, one for each signature. `tests.gpu`
unpacks it.

Triton finds a kernel by its source, arguments and options, and by the files of Triton itself. These include the
compiled library in the wheel for the GPU machine's Python. The cache must have the same absolute path. So this script
needs Triton's wheel for Python 3.12 in addition to the wheel that compiles, and the headers of Python 3.12. If kernels
are not found on the GPU machine, they are compiled there, which only costs time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".gpu"
CACHE = Path("/tmp/lightning_sparse_triton")
"""Path of the cache, here and on the GPU machine."""
ARCHIVE = FOLDER / "cache.tgz"
TRITON, PYTHON, CAPABILITY = "3.6.0", "3.12", 90
"""Versions on the GPU machine, and its compute capability."""
SUFFIX = ".cpython-312-x86_64-linux-gnu.so"
"""Suffix of extensions on the GPU machine."""
WITHIN = "LIGHTNING_SPARSE_TRITON_CACHE"
"""Environment variable by which this program knows that it runs with the right Triton: "compile" or "check"."""


def unpack() -> str:
    """Unpack the archive if it exists and the cache does not. Return a description; empty if nothing was unpacked."""
    if not ARCHIVE.exists() or CACHE.exists():
        return ""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(CACHE.parent, filter="data")
    return f"A cache of Triton's was unpacked into {CACHE}."


@contextlib.contextmanager
def hits() -> Iterator[Counter[str]]:
    """Yield a counter of the kernels that Triton finds in its cache, and of the kernels that it compiles."""
    from triton import knobs

    found: Counter[str] = Counter()

    def listen(**said: Any) -> None:
        found["hits" if said["cache_hit"] else "misses"] += 1

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before


# On this machine.


def headers() -> Path:
    """Return the folder of Python 3.12's headers; exit if there is none."""
    places = [
        Path(f"/usr/include/python{PYTHON}"),
        *Path.home().glob(f".pyenv/versions/{PYTHON}.*/include/python{PYTHON}"),
    ]
    if python := shutil.which(f"python{PYTHON}"):
        script = "import sysconfig; print(sysconfig.get_paths()['include'])"
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
        places.insert(0, Path(asked.stdout.strip() or "/nowhere"))
    for place in places:
        if (place / "Python.h").exists():
            return place
    sys.exit(f"Python {PYTHON}'s headers are not installed: install python{PYTHON}-dev, or pyenv's Python {PYTHON}.")


def download(target: Path, *options: str) -> None:
    """Have pip fetch Triton's wheel, unless it was fetched before."""
    if target.exists():
        return
    target.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *options, "--no-deps", f"triton=={TRITON}"], check=False)
    if done.returncode:
        shutil.rmtree(target)
        sys.exit(f"Triton {TRITON} cannot be downloaded.")


def prepare() -> dict[str, str]:
    """Fetch both wheels; return the environment in which this program compiles."""
    site, wheel = FOLDER / "site", FOLDER / "wheel"
    download(site, "install", "--target", str(site))
    download(wheel, "download", "--only-binary=:all:", f"--python-version={PYTHON}", "--dest", str(wheel))
    library = wheel / "libtriton.so"
    if not library.exists():
        with zipfile.ZipFile(next(wheel.glob("*.whl"))) as opened:
            library.write_bytes(opened.read("triton/_C/libtriton.so"))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    return clean | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(CACHE)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compile nothing, print how much would be found")
    given = parser.parse_args()
    headers()
    if given.check and not ARCHIVE.exists():
        sys.exit(f"There is no {ARCHIVE.relative_to(ROOT)} yet: python -m tests.triton_cache makes it.")
    if given.check:
        shutil.rmtree(CACHE, ignore_errors=True)  # so that only the archive's content counts
        unpack()
    variables = prepare() | {WITHIN: "check" if given.check else "compile"}
    done = subprocess.run([sys.executable, "-m", "tests.triton_cache"], cwd=ROOT, env=variables, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if not given.check:
        with tarfile.open(ARCHIVE, "w:gz") as archive:
            archive.add(CACHE, CACHE.name)
        print(f"{ARCHIVE.relative_to(ROOT)}: {ARCHIVE.stat().st_size / 2**20:.1f} MiB")


# With the right Triton.


def use_library_of_312() -> None:
    """Use the wheel for Python 3.12 in Triton's part of all keys. Its other files are the same."""
    from triton.runtime import cache

    real, own = cache.triton_key, FOLDER / "wheel" / "libtriton.so"

    def opened(path: Any, *args: Any) -> Any:
        return open(own if str(path).endswith("libtriton.so") else path, *args)

    with mock.patch.object(cache, "open", opened, create=True):
        key = real()
    cache.triton_key = lambda: key


def compile_steps() -> dict[str, Any]:
    """Compile the kernels of training steps; return the compiled kernels by hash."""
    import torch

    from benchmarks.launches import SHAPES
    from benchmarks.selection import Step, sparsifiers
    from lightning_sparse import Reducer, method
    from tests.compile_steps import STEPS, compile_only, exchange_updates
    from tests.support.kernels import Echo

    torch.set_num_threads(1)
    compiled: dict[str, Any] = {}
    compile_only(lambda kernel, constants: compiled.update({kernel.hash: kernel}), CAPABILITY)

    def gradients(name: str, options: dict[str, Any], dtype: torch.dtype, shapes: dict[str, Any], ranks: int) -> None:
        reducer = Reducer(method(name, **options), Echo(ranks), granularity="model")
        numel = sum(torch.Size(shape).numel() for shape in shapes.values())
        reducer.setup({key: torch.empty(shape, dtype=dtype) for key, shape in shapes.items()})
        (segment,) = reducer.layout.segments  # type: ignore[union-attr]
        for shift in (0, 1):  # gradients whose memory is aligned, and others
            reducer.reduce_segment_(segment, segment.views(torch.ones(numel + shift, dtype=dtype)[shift:]))
            reducer.finish_step()

    # A block of GPT-2 in small: Triton asks whether numbers are 1 or multiples of 16, and not how large they are.
    block = {key: [max(16, size // 4) for size in shape] for key, shape in SHAPES.items()}
    net = {"w": (300, 1024), "b": (300,), "v": (32, 300), "c": (32,)}  # of tests.wired
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 2, 8):
            for name in ("topk", "gaussiank", "randk", "chunktopk"):
                gradients(name, {"density": 0.001}, dtype, block, ranks)
            for name in ("int4", "int8", "powersgd"):
                gradients(name, {}, dtype, block, ranks)
            exchange_updates(dtype, block, ranks, steps=2)
        gradients("topk", {"density": 0.01}, dtype, net, 1)
    for name, options, dtype, shapes in STEPS:
        for ranks in (1, 2):
            gradients(name, options, dtype, shapes, ranks)
    for density in (0.001, 0.01):
        for name in ("TopK", "GaussianK"):
            step = Step(torch.randn(1_000_000), density, sparsifiers(density)[name])
            step()
            step.select.select(step.residual)  # type: ignore[union-attr]
    return compiled


def launchers(compiled: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return name and C source of the extensions that Triton builds for these kernels, by key of the cache."""
    from triton.backends.nvidia import driver
    from triton.runtime.build import platform_key

    sources = {("cuda_utils", Path(driver.dirname, "driver.c").read_text())}
    for kernel in compiled.values():
        source = kernel.src
        number = lambda index, source=source: (  # noqa: E731
            (source.fn.arg_names.index(index),) if isinstance(index, str) else index
        )
        constants = {number(index): value for index, value in source.constants.items()}
        meta = getattr(kernel.metadata, "tensordesc_meta", None)
        sources.add(("__triton_launcher", driver.make_launcher(constants, dict(source.signature), meta)))
    return {hashlib.sha256((text + platform_key()).encode()).hexdigest(): (name, text) for name, text in sources}


def build(source: str, folder: Path, include: list[Path], stub: Path) -> bytes:
    """Compile an extension as Triton does, against Python 3.12; return its bytes."""
    folder.mkdir(parents=True)
    (folder / "main.c").write_text(source)
    out = folder / f"main{SUFFIX}"
    command = ["gcc", str(folder / "main.c"), "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(out)]
    # An empty library has no symbols that would make a linker keep it by itself.
    command += [f"-L{stub}", "-Wl,--no-as-needed", "-l:libcuda.so.1", *(f"-I{path}" for path in include)]
    subprocess.run(command, check=True)
    return out.read_bytes()


def work(check: bool) -> None:
    """Compile kernels and launchers into the cache, or count its kernels and launchers."""
    from triton.backends.nvidia import driver
    from triton.runtime.cache import get_cache_manager

    if importlib.metadata.version("triton") != TRITON:
        sys.exit(f"Triton {importlib.metadata.version('triton')} was imported in place of {TRITON}.")
    use_library_of_312()
    with hits() as found:
        compiled = compile_steps()
    extensions = launchers(compiled)
    lacking = {
        key: named for key, named in extensions.items() if not get_cache_manager(key).get_file(f"{named[0]}{SUFFIX}")
    }
    if not check:
        scratch = FOLDER / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        # The driver's library is linked by name, and loaded on the GPU machine.
        stub = [str(scratch / "libcuda.so.1"), "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", *stub], check=True)
        include = [*map(Path, driver.include_dirs), headers()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = {
                key: pool.submit(build, text, scratch / key, include, scratch) for key, (_, text) in lacking.items()
            }
        for key, built in made.items():
            get_cache_manager(key).put(built.result(), f"{lacking[key][0]}{SUFFIX}", binary=True)
        shutil.rmtree(scratch)
    kernels = f"{found['hits']} of {sum(found.values())} kernels"
    print(f"Triton {TRITON} for Python {PYTHON}, compute capability {CAPABILITY / 10}:")
    print(f"{kernels} and {len(extensions) - len(lacking)} of {len(extensions)} launchers were there")
    if check and (found["misses"] or lacking):
        sys.exit("The archive is older than the kernels: python -m tests.triton_cache makes it anew.")


if __name__ == "__main__":
    if os.environ.get(WITHIN):
        work(os.environ[WITHIN] == "check")
    else:
        main()
