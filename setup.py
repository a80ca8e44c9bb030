"""The parts of the package's metadata that setup.cfg cannot contain: loops in C for the CPU, and the description.

The loops are a library for ctypes and do not use Python. So one wheel serves all versions of Python, on all systems
with the same processor and a glibc that is not older. Without a compiler, the wheel serves every system, and the
package uses plain torch.
"""

import re
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDERS = [Path("lightning_sparse", *parts, "kernels", "cpu") for parts in ((), ("contrib",))]
SOURCES = sorted(path for folder in FOLDERS for path in folder.glob("*.[ch]"))
LIBRARY = "lightning_sparse.kernels._cpu"
FLAGS = ["-std=c99", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"]
"""None lets the compiler change results. They follow, and so override, the user's CFLAGS."""
OLDEST_GLIBC = 17  # 2.17, the oldest that pip of Python 3.10 looks for


def description() -> str:
    """Return README for a package index, where relative links lead nowhere: links and pictures become their text."""
    text = re.sub(r"<!--.*?-->\n", "", Path("README.md").read_text(encoding="utf-8"))
    return re.sub(r"!?\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildLibrary(build_ext):
    """Names the library without a version of Python, and also puts it beside its source.

    In a clone, Python imports the source, and not the installed package.
    """

    def run(self) -> None:
        super().run()
        if not self.inplace:
            self.copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        # An earlier build's library would stay if the compilation fails, and be packed.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class BuildWheel(bdist_wheel):
    """Tags the wheel by what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(LIBRARY))
        self.root_is_pure = not library.exists()
        platform = super().get_tag()[-1]
        needed = [] if self.root_is_pure else re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
        if needed and platform.startswith("linux_"):
            glibc = max(OLDEST_GLIBC, *map(int, needed))
            platform = platform.replace("linux_", f"manylinux_2_{glibc}_", 1)
        return "py3", "none", platform


setup(
    long_description=description(),
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": BuildWheel},
    ext_modules=[
        Extension(
            LIBRARY,
            [str(path) for path in SOURCES if path.suffix == ".c"],
            depends=[str(path) for path in SOURCES if path.suffix == ".h"],
            include_dirs=[*map(str, FOLDERS)],
            # kernels/native.py computes the same number.
            define_macros=[("SOURCES", str(zlib.crc32(b"".join(path.read_bytes() for path in SOURCES))))],
            extra_compile_args=FLAGS,
            extra_link_args=FLAGS,  # fast maths in CFLAGS would link code that rounds subnormal numbers to 0
            optional=True,
        )
    ],
)
