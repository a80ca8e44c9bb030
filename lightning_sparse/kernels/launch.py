"""Chooses between plain torch and Triton, and imports Triton only when the first kernel is launched."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KERNELS = "LIGHTNING_SPARSE_KERNELS"
"""Environment variable that forces the choice: "torch", or "triton" (on CPU only with TRITON_INTERPRET=1)."""

OPTIONS = {"enable_fp_fusion": True}
"""Triton compiler options: fuse a product and a sum into one instruction (the default up to 3.9, off from 3.10)."""

CHUNK = 1 << 17
"""Number of elements to process at a time on the CPU, so that they stay in cache between operations."""

tl: Any = None
"""A placeholder. The first launch of a module's kernel puts `triton.language` in its place in that module."""

REORDERS: Any = None
"""Another placeholder: whether `tl.reshape` takes `can_reorder=True`. Triton 3.9 warns of it; 3.10 will remove it."""

_loading = threading.Lock()


def uses_triton(x: Tensor) -> bool:
    """Return whether to use Triton kernels for `x`: on CUDA if Triton is installed, unless the environment decides.

    Triton needs compute capability 7.0.

    Raises:
        ValueError: the environment variable `LIGHTNING_SPARSE_KERNELS` is neither "torch" nor "triton".
    """
    forced = os.environ.get(KERNELS)
    if forced is None:
        return x.is_cuda and _has_triton() and _is_able(x.device.index or 0)
    if forced not in ("torch", "triton"):
        raise ValueError(f"{KERNELS}={forced!r}: choose torch or triton, or leave it unset.")
    return forced == "triton"


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if found:
        log.info(f"Selection on CUDA by Triton kernels; {KERNELS}=torch turns them off.")
    else:
        log.warning("Selection on CUDA by plain torch, which is slower: Triton is missing (the extra `cuda`).")
    return found


@functools.cache
def _is_able(device: int) -> bool:
    if not torch.cuda.is_available():
        return True  # a tensor that only claims to be on CUDA
    able = torch.cuda.get_device_capability(device) >= (7, 0)
    if not able:
        log.warning("Selection on CUDA by plain torch, which is slower: the device is too old for Triton's kernels.")
    return able


def at_a_time(x: Tensor) -> int:
    """Return the number of elements of `x` to process at a time, a multiple of 8."""
    return -(-CHUNK // 8) * 8 if x.device.type == "cpu" else sys.maxsize // 8 * 8


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; the host does not wait for the copy."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(pinned, non_blocking=True)


def same_dtype(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors, at least one, have the same dtype."""
    return len({x.dtype for x in tensors}) == 1


KEPT = 1 << 26
"""Most bytes of cached constant tensors. If a new tensor exceeds the limit, the cache is cleared first."""
KEEPS: tuple[type[Tensor], ...] = (Tensor,)
"""Types of tensors that are cached. Others, such as torch's fake tensors, belong to a mode that ends."""


class Cache:
    """Constant tensors, and the number of bytes that they take on the device, at least 512 each."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, Tensor] = {}
        self.nbytes = 0

    def add(self, key: Hashable, x: Tensor) -> None:
        """Add a tensor; first clear the cache if it would exceed `KEPT`."""
        self.nbytes += max(512, x.nbytes)
        if self.nbytes > KEPT:
            self.tensors.clear()
            self.nbytes = max(512, x.nbytes)
        self.tensors[key] = x


_kept = Cache()


class _Capture(threading.local):
    """The capture of a CUDA graph by this thread.

    Attributes:
        stream: the stream whose constants the graph reads; None if nothing is captured.
        constants: the constants that it reads.
    """

    stream: int | None = None
    constants: list[Tensor]


_capture = _Capture()


@contextlib.contextmanager
def constants_of(stream: torch.cuda.Stream) -> Iterator[list[Tensor]]:
    """Let `kept` return constants that the given stream has, and no others. Yields the list of returned constants."""
    _capture.stream, _capture.constants = stream.cuda_stream, []
    try:
        yield _capture.constants
    finally:
        _capture.stream = None


def kept(key: Hashable, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return the result of `make` from a cache, with one tensor for each key, device and stream. Do not change it.

    Args:
        key: all values on which the tensor depends, except its device.
        like: a tensor of the type and on the device of the result.
        make: function that makes the tensor if the cache does not have it.

    Raises:
        RuntimeError: within `constants_of`, if the cache does not have it.
    """
    if type(like) not in KEEPS:
        return make()
    if _capture.stream is not None:
        if (found := _kept.tensors.get((key, like.device, _capture.stream))) is None:
            raise RuntimeError("A constant has not been copied to the device before.")
        _capture.constants.append(found)
        return found
    # Streams have separate tensors: another stream may run before the copy to the device, or after the free.
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    found = _kept.tensors.get((key, like.device, stream))
    if found is None:
        found = make()
        # During the capture of a CUDA graph nothing is copied. The copy happens when the graph is replayed, if ever.
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            _kept.add((key, like.device, stream), found)
    return found


class Kernel:
    """Stands in for a Triton kernel in its module until the first of them is launched.

    The first launch replaces every stand-in in the module by the compiled kernel, and adds `tl` to the globals. It does
    so first in modules from which this module imports stand-ins, so that kernels can call each other. All names of a
    module change at once: another thread compiles no kernel that still calls a stand-in.
    """

    def __init__(self, function: Callable[..., Any], plain: tuple[str, ...]) -> None:
        self.function = function
        self.plain = plain

    def load(self) -> Any:
        """Return the Triton kernel."""
        scope, name = self.function.__globals__, self.function.__name__
        if isinstance(scope[name], Kernel):
            with _loading:
                self._load_module(scope)
        return scope[name]

    @staticmethod
    def _load_module(scope: dict[str, Any]) -> None:
        import triton

        reorders = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
        made = {"tl": triton.language, "REORDERS": triton.language.constexpr(reorders)}
        for name, value in list(scope.items()):
            if isinstance(value, Kernel):
                home = value.function.__globals__
                if home is scope:
                    made[name] = triton.jit(value.function, do_not_specialize=value.plain)
                else:
                    Kernel._load_module(home)
                    made[name] = home[value.function.__name__]
        scope.update(made)


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on the device of its first argument, a tensor."""
    kernel = kernel.load() if isinstance(kernel, Kernel) else kernel
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, **OPTIONS, **constants)


def kernel(*plain: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a module's function as a Triton kernel.

    Args:
        plain: names of arguments for which Triton compiles no variants. By default it compiles one for the
            number 1, and one for multiples of 16.
    """
    return lambda function: Kernel(function, plain)
