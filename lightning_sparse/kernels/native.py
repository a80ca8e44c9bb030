"""The C loops of cpu/, compiled when the package is installed; dispatch.py decides when they run.

The loops run in one thread, as ranks on CPUs do, and release Python's lock. Without them plain torch does the same work
in a dozen operations or more, and one log line reports that.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import zlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from lightning_sparse.kernels.launch import KERNELS

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_cpu.so")
"""The library that setup.py builds, for `ctypes`."""
FOLDERS = [Path(__file__).parents[1].joinpath(*parts, "kernels", "cpu") for parts in ((), ("contrib",))]
"""The folders of its sources, which only a clone has."""


def uses_native(x: Tensor) -> bool:
    """Return whether to use the loops of cpu/ for `x`: on the CPU, if compiled, unless the environment decides.

    Tensors of other types, such as torch's fake ones, may have no memory.
    """
    return x.device.type == "cpu" and type(x) is Tensor and KERNELS not in os.environ and library() is not None


def takes(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether the loops of cpu/ can use tensors without a copy: contiguous ones of fp32 on the CPU.

    None entries are ignored.
    """
    there = (x for x in tensors if x is not None)
    return all(type(x) is Tensor and x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in there)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled loops, or None."""
    if not LIBRARY.exists():
        _warn(
            "The loops in C were not compiled, so work on the CPU takes at least twice as long. Install the package "
            "where there is a C compiler."
        )
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError as error:  # built on another machine
        _warn(f"The loops in C cannot be loaded, so work on the CPU takes at least twice as long: {error}.")
        return None
    if not _is_current(found):
        _warn("The loops in C are of an older version, so the CPU is slower. Install the package again.")
        return None
    return found


def _is_current(found: ctypes.CDLL) -> bool:
    """Return whether a library was compiled from the present sources; an installed package has none to compare."""
    sources = sorted(path for folder in FOLDERS for path in folder.glob("*.[ch]"))
    present = zlib.crc32(b"".join(path.read_bytes() for path in sources))
    return not sources or (hasattr(found, "sources") and ctypes.c_uint32.in_dll(found, "sources").value == present)


def _warn(text: str) -> None:
    """Warn on rank 0, or in a process without a rank."""
    if os.environ.get("RANK", "0") == "0" and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning(text)


def table(tensors: Sequence[Tensor | None], bounds: Sequence[int]) -> Tensor:
    """Return a table for cpu/segment.h, int64: offsets of parameters in a segment, and their addresses, 0 for None.

    Unlike a `gradient_table` it is not cached: new gradients have other addresses in each step, and a table takes
    microseconds to make.

    Args:
        tensors: one per parameter, contiguous; the caller keeps them alive while the table is in use.
        bounds: offset of each parameter in the segment, and the segment's length as the last one.

    Raises:
        ValueError: a tensor does not have its parameter's length.
    """
    for x, start, stop in zip(tensors, bounds[:-1], bounds[1:], strict=True):
        if x is not None and x.numel() != stop - start:
            raise ValueError(f"Of a parameter with {stop - start} elements there is a tensor with {x.numel()}.")
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    return torch.tensor([*bounds[:-1], *addresses], dtype=torch.int64, device="cpu")


def run(name: str, *args: Tensor | float | None) -> None:
    """Call a function of cpu/.

    Args:
        name: name of the function, which returns nothing.
        args: contiguous tensors on the CPU, which are passed as pointers; None, as the null pointer; integers, as
            int64_t; and floats, as double.

    Raises:
        TypeError: a tensor holds floats that are not fp32, which C would misread, or may have no memory.
        ValueError: a tensor is on another device, or is not contiguous.
    """
    getattr(library(), name)(*[_argument(name, x) for x in args])


def check_part(name: str, part: Tensor, least: int, dtype: torch.dtype) -> None:
    """Raise an error if a part of a payload is too short or has another dtype, because kernels would misread it.

    Raises:
        TypeError: the part has another dtype than `dtype`.
        ValueError: the part has fewer elements than `least`.
    """
    if part.dtype is not dtype:
        raise TypeError(f"The payload's {name} are {dtype}, but got {part.dtype}: decode the payload of compress.")
    if part.numel() < least:
        raise ValueError(
            f"The payload's {name} have {part.numel()} elements, but the segment takes {least}: decode a payload in "
            f"the context of the segment that it was made of."
        )


def _argument(name: str, x: Tensor | float | None) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double:
    if x is None:
        return ctypes.c_void_p()
    if isinstance(x, Tensor):
        if type(x) is not Tensor:
            raise TypeError(f"{name} in C takes plain tensors, but got a {type(x).__name__}.")
        if x.dtype is not torch.float32 and (x.is_floating_point() or x.is_complex()):
            raise TypeError(
                f"{name} in C takes floats as torch.float32, but got a tensor of {x.dtype}: convert it with .float()."
            )
        if not (x.is_cpu and x.is_contiguous()):
            raise ValueError(
                f"{name} in C takes contiguous tensors on the CPU, but got one of shape {tuple(x.shape)} with strides "
                f"{x.stride()} on {x.device}: convert it with .cpu().contiguous()."
            )
        return ctypes.c_void_p(x.data_ptr())
    return ctypes.c_int64(int(x)) if isinstance(x, Integral) else ctypes.c_double(x)  # NumPy's integers are Integral
