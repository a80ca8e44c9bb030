"""What setup.cfg cannot say: loops in C for the CPU, without which the package works, too."""

from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("lightning_sparse", "kernels", "cpu")

setup(
    ext_modules=[
        Extension(
            "lightning_sparse.kernels._cpu",
            sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            # None by which the compiler may change results.
            extra_compile_args=["-std=c99", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)
