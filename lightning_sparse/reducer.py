"""The algorithm, once: compensate, aggregate, hand out, keep the rest, count.

def rank(comm: Comm) -> Tensor:
    reducer = Reducer(method("topk", density=0.25), comm)
    grads = {"w": torch.tensor([1.0, 0.0, 0.0, -3.0])}
    reducer.reduce_(grads)
    return grads["w"]

simulate(2, rank)  # both ranks: tensor([0., 0., 0., -3.]); the 1.0 waits in each rank's residual
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.aggregators import Aggregator, AllReduceMean
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.compressors.base import Agreed, Entries, check_density
from lightning_sparse.context import Context, Entry, State
from lightning_sparse.kernels.write_back import write_dense_, write_entries_
from lightning_sparse.layout import Granularity, Layout, Segment, check_partition
from lightning_sparse.methods import Method
from lightning_sparse.methods import method as make_method
from lightning_sparse.observer import Observer

log = logging.getLogger(__name__)
DENSE: tuple[Compressor, Aggregator] = (Identity(), AllReduceMean())


class Reducer:
    """One rank's side of compressed gradient averaging: a method, a wire and the state.

    Args:
        method: a `Method`, or the name of one.
        comm: this rank's wire.
        seed: of all random choices; equal on all ranks.
        granularity: what is compressed together: "layer", "bucket" or "model" (see `Layout.of`).
        bucket_cap_mb: size of a "bucket" in MiB.
        warmup: densities to use in turn before the method's own, from dense to sparse.
        warmup_steps: number of steps for each density of `warmup`; None: one epoch each, counted by `epoch`.
        lr: learning rate, or a function that returns the present one, for methods that need it.

    Attributes:
        step: reductions done so far.
        epoch: the present epoch, set from outside; it matters only for a warm-up by epochs.
        seconds: time spent so far per phase, "compensate", "aggregate" (selection and exchange; `comm.seconds` is the
            exchange alone), "write" and "keep"; "exposed" is how long training has waited for all this after
            backward, where a communication thread does it.
        observers: who is shown the segments; empty on most steps.
    """

    def __init__(
        self,
        method: Method | str,
        comm: Comm,
        *,
        seed: int = 0,
        granularity: Granularity = "bucket",
        bucket_cap_mb: float = 25,
        warmup: Sequence[float] = (),
        warmup_steps: int | None = None,
        lr: float | Callable[[], float] | None = None,
    ) -> None:
        self.method = make_method(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise TypeError(f"Reducer(method={method!r}): method must be a Method or the name of one.")
        check_warmup(self.method, warmup, warmup_steps)
        check_partition(granularity, bucket_cap_mb)
        if self.method.memory.needs_lr and lr is None:
            raise ValueError(f"{self.method!r} needs the learning rate: pass lr, a number or a function.")
        self.comm = comm
        self.seed = seed
        self.granularity = granularity
        self.bucket_cap_mb = bucket_cap_mb
        self.warmup = tuple(warmup)
        self.warmup_steps = warmup_steps
        self.lr = lr
        self.step = 0
        self.epoch = 0
        self.seconds = dict.fromkeys(("compensate", "aggregate", "write", "keep", "exposed"), 0.0)
        self.observers: list[Observer] = []
        self.layout: Layout | None = None
        self.states: list[State] = []
        self._saved: Mapping[str, Any] | None = None
        self._reported: set[float | None] = set()
        kept = [
            entry
            for part in (self.method.memory, self.method.aggregator, self.method.compressor)
            for entry in part.entries
        ]
        self._entries: dict[str, Entry] = {entry.name: entry for entry in kept}
        if len(self._entries) < len(kept):
            raise ValueError(f"{self.method!r}: two of its parts keep a state under the same name.")

    @property
    def density(self) -> float | None:
        """The density of the present step; None where the method has none."""
        phase = self.epoch if self.warmup_steps is None else self.step // self.warmup_steps
        return self.warmup[phase] if phase < len(self.warmup) else self.method.density

    def setup(self, params: Mapping[str, Tensor]) -> None:
        """Lay out the state for these parameters (or gradients), given in registration order.

        Raises:
            ValueError: there are none, or a segment is too long.
            TypeError: a parameter is not a dense fp32, fp16 or bf16 tensor.
        """
        for name, param in params.items():
            check_tensor(name, param)
        self.layout = Layout.of(
            {name: tuple(param.shape) for name, param in params.items()},
            self.granularity,
            self.bucket_cap_mb,
            dtypes={name: param.dtype for name, param in params.items()},
        )
        self._digest = self.layout.digest
        device = self._device = next(iter(params.values())).device
        self.states = [{} for _ in self.layout.segments]
        for entry in self._entries.values():
            if entry.per != "segment":
                flat = torch.zeros(self.layout.numel, device=device)
                for segment, state in zip(self.layout.segments, self.states, strict=True):
                    state[entry.name] = flat[segment.start : segment.start + segment.numel]
        if self._saved is not None:
            self._restore(self.layout, self._saved)
            self._saved = None

    def reduce_(self, grads: dict[str, Tensor]) -> None:
        """Replace this rank's gradients by the agreed result, in place, all segments in turn.

        The first call fixes the layout; later ones must bring the same names and shapes. All ranks call together.

        Args:
            grads: parameter name to gradient, in registration order.
        """
        if self.layout is None:
            self.setup(grads)
        assert self.layout is not None
        if set(grads) != set(self.layout.names):
            missing, new = set(self.layout.names) - set(grads), set(grads) - set(self.layout.names)
            raise ValueError(
                f"reduce_ got other gradients than at first: missing {sorted(missing)}, new {sorted(new)}. Pass the "
                f"same parameters in every step."
            )
        for segment in self.layout.segments:
            for name, shape in zip(segment.names, segment.shapes, strict=True):
                check_tensor(name, grads[name])
                if tuple(grads[name].shape) != shape:
                    raise ValueError(f"The gradient of {name!r} has shape {tuple(grads[name].shape)}, before {shape}.")
            flat = [grads[name].contiguous().view(-1) for name in segment.names]
            self.reduce_segment_(segment, flat)
            for name, result in zip(segment.names, flat, strict=True):
                if result.data_ptr() != grads[name].data_ptr():
                    grads[name].copy_(result.view_as(grads[name]))
        self.finish_step()

    def reduce_segment_(self, segment: Segment, grads: list[Tensor], unused: Collection[str] = ()) -> None:
        """Replace one segment's gradients by the agreed result, in place. All ranks go through segments in one order.

        Args:
            segment: one of the layout's.
            grads: one 1-D gradient per parameter, in the segment's order.
            unused: parameters that took no part in this backward pass: their gradients are not looked at, and what
                was kept of them waits for a step in which they do.
        """
        state, density = self.states[segment.index], self.density
        memory = self.method.memory
        compressor, aggregator = self._path(density, segment)
        lr = None
        if memory.needs_lr:
            lr = self.lr() if callable(self.lr) else self.lr
        ctx = Context(
            step=self.step,
            density=density,
            lr=lr,
            state=state,
            seed=self.seed,
            segment=segment.index,
            rank=self.comm.rank,
            fingerprint=zlib.crc32(repr((self.method, self.seed, self.step, density, lr, segment.index)).encode())
            ^ self._digest,
        )
        gain = memory.gain(ctx)
        if gain == 0:
            # With the learning rate inside the memory and at zero, u is what it was, and nothing may leave it.
            torch._foreach_zero_(grads)
            return
        aside = self._set_aside(segment, grads, unused) if unused else []
        for observer in self.observers:
            observer.gradients(segment, grads, ctx)
        with self._timed("compensate"):
            u = memory.compensate(grads, segment, ctx)
        for observer in self.observers:
            observer.compensated(segment, u, ctx)
        with self._timed("aggregate"):
            agreed, used = aggregator(u, segment, compressor, self.comm, ctx)
        for observer in self.observers:
            observer.aggregated(segment, u, used, compressor, ctx)
        with self._timed("write"):
            lost = write_(grads, segment, agreed, 1 / gain, memory.keeps)
        with self._timed("keep"):
            memory.keep(u, used, lost, compressor, segment, ctx)
            for kept, value in aside:
                kept.add_(value)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def reset(self) -> None:
        """Forget all steps: as after `setup`."""
        self.step = 0
        for state in self.states:
            for name in list(state):
                if self._entries[name].per == "segment":
                    del state[name]
                else:
                    state[name].zero_()

    def finish_step(self) -> None:
        """Count a step; to be called when all segments have been reduced."""
        self.step += 1

    def _path(self, density: float | None, segment: Segment) -> tuple[Compressor, Aggregator]:
        """Choose the method's own way for a segment, or the dense one where that sends less."""
        compressor, aggregator = self.method.compressor, self.method.aggregator
        if self._sends_less(density, segment):
            return compressor, aggregator
        if density not in self._reported:
            self._reported.add(density)
            assert self.layout is not None
            dense = [s for s in self.layout.segments if not self._sends_less(density, s)]
            if self.comm.rank == 0 and self.method.density is not None:
                log.info(
                    f"{compressor!r} at density {density:g} would send no less than dense gradients do among "
                    f"{self.comm.size} ranks: {sum(s.numel for s in dense):,} of {self.layout.numel:,} elements go "
                    f"dense ({len(dense)} of {len(self.layout.segments)} segments)."
                )
        return DENSE

    def _sends_less(self, density: float | None, segment: Segment) -> bool:
        size, compressor = self.comm.size, self.method.compressor
        if size == 1 or segment.numel == 0:
            return True
        dense = DENSE[1].nbytes(DENSE[0], segment, None, size)
        return self.method.aggregator.nbytes(compressor, segment, density, size) < dense

    def _set_aside(self, segment: Segment, grads: list[Tensor], unused: Collection[str]) -> list[tuple[Tensor, Tensor]]:
        """Empty the gradients and the per-element state of unused parameters; return the state to add again later."""
        aside = []
        for entry in self._entries.values():
            # What is equal on all ranks must stay so, whoever used the parameter.
            if entry.per == "element" and entry.resize == "sum":
                views = segment.views(self.states[segment.index][entry.name])
                for name, kept in zip(segment.names, views, strict=True):
                    if name in unused:
                        aside.append((kept, kept.clone()))
                        kept.zero_()
        for name, grad in zip(segment.names, grads, strict=True):
            if name in unused:
                grad.zero_()
        return aside

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must keep to go on, as copies.

        Returns:
            Tensors and primitives only: "step"; "elements", entry name to parameter name to a tensor of the parameter's
            shape; "segments", names of a segment's parameters to entry name to tensor; and what it belongs to.
        """
        if self._saved is not None:
            return dict(self._saved)  # loaded, but the parameters are not known yet
        state: dict[str, Any] = {
            "version": 1,
            "method": repr(self.method),
            "rank": self.comm.rank,
            "size": self.comm.size,
            "step": self.step,
            "elements": {name: {} for name, entry in self._entries.items() if entry.per == "element"},
            "segments": {},
        }
        for segment, kept in zip(self.layout.segments if self.layout else (), self.states, strict=True):
            for name, per_param in state["elements"].items():
                for param, shape, view in zip(segment.names, segment.shapes, segment.views(kept[name]), strict=True):
                    per_param[param] = view.reshape(shape).clone()
            state["segments"]["\n".join(segment.names)] = {
                name: value.clone()
                for name, value in kept.items()
                if name in self._entries and self._entries[name].per == "segment"
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on the same rank; another granularity is fine.

        Raises:
            ValueError: it belongs to another method, rank, number of ranks or set of parameters.
        """
        for key, mine in (
            ("version", 1),
            ("method", repr(self.method)),
            ("rank", self.comm.rank),
            ("size", self.comm.size),
        ):
            if state.get(key) != mine:
                raise ValueError(f"Reducer state is of {key} {state.get(key)!r}, here it is {mine!r}: cannot load it.")
        if self.layout is None:
            self._saved = state  # there is no place for it before the parameters are known
        else:
            self._restore(self.layout, state)
        self.step = int(state["step"])

    def _restore(self, layout: Layout, state: Mapping[str, Any]) -> None:
        for name, per_param in state["elements"].items():
            if set(per_param) != set(layout.names):
                odd = sorted(set(per_param) ^ set(layout.names))
                raise ValueError(f"Reducer state and model differ in their parameters: {', '.join(odd)}.")
            for segment, kept in zip(layout.segments, self.states, strict=True):
                for param, shape, view in zip(segment.names, segment.shapes, segment.views(kept[name]), strict=True):
                    saved = per_param[param]
                    if tuple(saved.shape) != shape:
                        raise ValueError(f"Reducer state of {param!r} has shape {tuple(saved.shape)}, not {shape}.")
                    view.copy_(saved.reshape(-1))
        for segment, kept in zip(layout.segments, self.states, strict=True):
            saved_here = state["segments"].get("\n".join(segment.names), {})
            for name in (name for name, entry in self._entries.items() if entry.per == "segment"):
                kept.pop(name, None)
                if name in saved_here:
                    kept[name] = saved_here[name].to(self._device, copy=True)


def write_(grads: Sequence[Tensor], segment: Segment, agreed: Agreed, scale: float, keeps: bool) -> Agreed | None:
    """Overwrite a segment's gradients with scale × the agreed result.

    Returns:
        What rounding to 16-bit gradients took away, in units of `agreed`; None where nothing was rounded.
    """
    if isinstance(agreed, Tensor):
        lost = write_dense_(grads, segment.bounds, agreed if scale == 1 else agreed * scale, keeps)
        return lost if lost is None or scale == 1 else lost.div_(scale)
    terms = agreed if scale == 1 else tuple((indices, values * scale) for indices, values in agreed)
    entries = write_entries_(grads, segment.bounds, terms)
    return None if entries is None else (Entries(entries[0], entries[1] / scale),)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a parameter or gradient can be reduced."""
    if tensor.layout != torch.strided:
        raise TypeError(
            f"The gradient of {name!r} is sparse ({tensor.layout}). Set sparse=False on its embedding layer, or train "
            f"with strategy='ddp'."
        )
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"{name!r} is {tensor.dtype}; gradients of torch.float32, torch.float16 and torch.bfloat16 can be reduced. "
            f"Convert the parameter, or freeze it with requires_grad_(False)."
        )


def check_warmup(method: Method, warmup: Sequence[float], warmup_steps: int | None) -> None:
    """Raise ValueError unless the warm-up makes sense for the method."""
    for density in warmup:
        check_density("warmup", density)
    if warmup and method.density is None:
        raise ValueError(f"warmup={tuple(warmup)!r}: {method!r} has no density to warm up.")
    if warmup_steps is not None and (warmup_steps < 1 or not warmup):
        raise ValueError(
            f"warmup_steps={warmup_steps!r} is the number of steps for each density of warmup={tuple(warmup)!r}: give "
            f"at least one density and one step, or leave both out."
        )
