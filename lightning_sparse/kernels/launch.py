"""The choice between plain torch and Triton, and kernels that import Triton only when the first is launched."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KERNELS = "LIGHTNING_SPARSE_KERNELS"
"""Environment variable that forces the choice: "torch", or "triton" (on CPU only with TRITON_INTERPRET=1)."""

OPTIONS = {"enable_fp_fusion": True}
"""Triton compiler options: fuse a product and a sum into one instruction (the default up to 3.9, off from 3.10)."""

CHUNK = 1 << 17
"""Elements that are worked on at a time on the CPU, where they stay in cache from one operation to the next."""

_loading = threading.Lock()


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton kernels work on `x`: on CUDA where Triton is installed, unless the environment says else.

    Triton needs compute capability 7.0.

    Raises:
        ValueError: the environment variable `LIGHTNING_SPARSE_KERNELS` holds something else than "torch" or "triton".
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
        return True  # a tensor that only says that it is there
    able = torch.cuda.get_device_capability(device) >= (7, 0)
    if not able:
        log.warning("Selection on CUDA by plain torch, which is slower: the device is too old for Triton's kernels.")
    return able


def at_a_time(x: Tensor) -> int:
    """Return how many elements of `x` to work on at a time, a multiple of 8."""
    return -(-CHUNK // 8) * 8 if x.device.type == "cpu" else sys.maxsize // 8 * 8


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without the host waiting until it is there."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(pinned, non_blocking=True)


def same_dtype(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors, of which there is one at least, have one dtype."""
    return len({x.dtype for x in tensors}) == 1


KEPT = 1 << 26
"""The most bytes of constant tensors that are cached; then the cache is emptied."""
KEEPS: tuple[type[Tensor], ...] = (Tensor,)
"""Types of tensors that are cached: others, such as torch's fake tensors, belong to a mode that ends."""


class Cache:
    """Constant tensors, and the bytes that they take on the device: 512 or more each."""

    def __init__(self) -> None:
        self.tensors: dict[Hashable, Tensor] = {}
        self.nbytes = 0

    def add(self, key: Hashable, x: Tensor) -> None:
        """Keep a tensor; none of the others if they would be too many."""
        self.nbytes += max(512, x.nbytes)
        if self.nbytes > KEPT:
            self.tensors.clear()
            self.nbytes = max(512, x.nbytes)
        self.tensors[key] = x


_kept = Cache()


def kept(key: Hashable, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return the tensor that `make` returns, made once for each key, device and stream; nobody may change it.

    Args:
        key: what the tensor depends on, beside its device.
        like: a tensor of the kind and on the device that it shall have.
        make: called where it is not there yet.
    """
    if type(like) not in KEEPS:
        return make()
    # A cache for each stream: another one is not ordered after the copy to the device, nor before the memory is freed.
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    found = _kept.tensors.get((key, like.device, stream))
    if found is None:
        found = make()
        # Within a CUDA graph's capture the copy to the device only happens when that graph is replayed, if ever.
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            _kept.add((key, like.device, stream), found)
    return found


class Kernel:
    """Stands in for a Triton kernel in its module until the first of them is launched.

    The first launch replaces every stand-in in the module, and in modules that it imports stand-ins from, by the
    compiled kernel, and adds `tl` to their globals, so that kernels can call each other.
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

        scope["tl"] = triton.language
        for name, value in list(scope.items()):
            if isinstance(value, Kernel):
                home = value.function.__globals__
                if home is scope:
                    scope[name] = triton.jit(value.function, do_not_specialize=value.plain)
                else:
                    Kernel._load_module(home)
                    scope[name] = home[value.function.__name__]


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run as many programs of a kernel as are asked for, on the device of its first argument, a tensor."""
    kernel = kernel.load() if isinstance(kernel, Kernel) else kernel
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, **OPTIONS, **constants)


def kernel(*plain: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a module's function as a Triton kernel.

    Args:
        plain: arguments of which it does not matter whether they are 1 or a multiple of 16: no variant is compiled for
            these cases.
    """
    return lambda function: Kernel(function, plain)
