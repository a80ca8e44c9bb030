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
import math
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_sparse.aggregators import Aggregator, AllReduceMean, NonFiniteGradient
from lightning_sparse.aggregators.checks import NOT_FINITE
from lightning_sparse.comm import Comm, RankFailure
from lightning_sparse.compressors import Compressor, Identity
from lightning_sparse.compressors.base import Agreed, Entries, check_density
from lightning_sparse.context import Context, Entry, State
from lightning_sparse.kernels.write_back import write_dense_, write_entries_
from lightning_sparse.layout import Granularity, Layout, Segment, check_partition
from lightning_sparse.methods import Method
from lightning_sparse.methods import method as make_method
from lightning_sparse.observer import Observer

log = logging.getLogger(__name__)
OnNonFinite = Literal["raise", "skip"]
VERSION = 2
"""Of `Reducer.state_dict`."""
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
        loss_scale: a function that returns what the loss is multiplied with, as `GradScaler.get_scale` does. What is
            kept is unscaled; where a gradient overflows, all ranks get NaN and nothing else changes.
        on_nonfinite: what a gradient with a NaN or an infinity means without a loss scale: "raise" NonFiniteGradient on
            all ranks, or "skip": all ranks get NaN, and the step is left out.
        clip_norm: largest 2-norm of this rank's own gradient, all parameters together; a longer one is shortened
            before anything is added. None leaves it as it is.

    Attributes:
        step: reductions done so far.
        skipped: steps that were left out because a gradient was not finite.
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
        loss_scale: Callable[[], float] | None = None,
        on_nonfinite: OnNonFinite = "raise",
        clip_norm: float | None = None,
    ) -> None:
        self.method = make_method(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise TypeError(f"Reducer(method={method!r}): method must be a Method or the name of one.")
        check_warmup(self.method, warmup, warmup_steps)
        check_partition(granularity, bucket_cap_mb)
        check_foresight(on_nonfinite, clip_norm)
        if self.method.memory.needs_lr and lr is None:
            raise ValueError(f"{self.method!r} needs the learning rate: pass lr, a number or a function.")
        self.method.aggregator.check_size(comm.size)
        self.comm = comm
        self.seed = seed
        self.granularity = granularity
        self.bucket_cap_mb = bucket_cap_mb
        self.warmup = tuple(warmup)
        self.warmup_steps = warmup_steps
        self.lr = lr
        self.loss_scale = loss_scale
        self.on_nonfinite = on_nonfinite
        self.clip_norm = clip_norm
        self.step = 0
        self.skipped = 0
        self.epoch = 0
        self.seconds = dict.fromkeys(("compensate", "aggregate", "write", "keep", "exposed"), 0.0)
        self.observers: list[Observer] = []
        self.layout: Layout | None = None
        self.states: list[State] = []
        self._settled: dict[int, Aggregator] = {}  # segment, and what it was exchanged by the last time
        self._saved: Mapping[str, Any] | None = None
        self._reported: set[float | None] = set()
        self._later: list[tuple[int, Callable[[], None]]] = []  # step, and what is to be looked at after it
        self._scale = self._loss_scale = 1.0
        parts = (self.method.memory, self.method.aggregator, self.method.compressor)
        kept = [(entry, repr(part)) for part in parts for entry in part.entries]
        self._entries: dict[str, Entry] = {entry.name: entry for entry, _ in kept}
        self._owners = {entry.name: owner for entry, owner in kept if entry.per != "scratch"}
        if len(self._entries) < len(kept):
            raise ValueError(f"{self.method!r}: two of its parts keep a state under the same name.")

    @property
    def density(self) -> float | None:
        """The density of the present step; None where the method has none."""
        phase = self.epoch if self.warmup_steps is None else self.step // self.warmup_steps
        return self.warmup[phase] if phase < len(self.warmup) else self.method.density

    @property
    def looks_ahead(self) -> bool:
        """Whether a step needs all gradients before the first is added, so that nothing overlaps with backward."""
        return self.loss_scale is not None or self.on_nonfinite == "skip" or self.clip_norm is not None

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
        self._settled.clear()
        for entry in self._entries.values():
            if entry.per != "segment":
                # A buffer for each segment: where one for all is cut, it is not aligned as wide loads need it.
                for segment, state in zip(self.layout.segments, self.states, strict=True):
                    state[entry.name] = torch.zeros(segment.numel, dtype=torch.float32, device=device)
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
        try:
            if self.looks_ahead and not self.look_ahead(grads):
                return
            for segment in self.layout.segments:
                flat = [grads[name].contiguous().view(-1) for name in segment.names]
                self.reduce_segment_(segment, flat)
                for name, result in zip(segment.names, flat, strict=True):
                    if result.data_ptr() != grads[name].data_ptr():
                        grads[name].copy_(result.view_as(grads[name]))
        except Exception as error:
            self.comm.mark_failed(self.described(error))
            raise
        self.finish_step()

    def described(self, error: BaseException) -> str:
        """Return what the other ranks are told about an error on this one."""
        if isinstance(error, RankFailure):
            return str(error)  # somebody else's reason, or a finding about all ranks
        return f"Rank {self.comm.rank} failed at step {self.step}: {type(error).__name__}: {error}"

    def look_ahead(self, grads: Mapping[str, Tensor], unused: Collection[str] = ()) -> bool:
        """Agree on whether a step can be taken, before anything is added. To be called first where `looks_ahead`.

        Args:
            grads: parameter name to gradient, all of them. Where the step is left out they are filled with NaN, as a
                GradScaler expects it.
            unused: parameters that took no part in this backward pass.

        Returns:
            Whether the step is taken. Equal on all ranks.

        Raises:
            NonFiniteGradient: a gradient is not finite on some rank, there is no loss scale, and `on_nonfinite` is
                "raise".
        """
        self._loss_scale = 1.0 if self.loss_scale is None else self.loss_scale()
        assert self.layout is not None
        # Parameters are counted in the order of the layout, which is the same on all ranks.
        names = [name for name in self.layout.names if name not in unused]
        # In fp32: norms of 16-bit gradients would be rounded to 16 bit, and in fp16 overflow early.
        norms = torch._foreach_norm([grads[name] for name in names], 2, torch.float32) if names else ()
        norm = math.hypot(*self.comm.to_host_async(torch.stack(norms))()) if norms else 0.0
        wrong: str | None = None
        if not math.isfinite(norm):
            # The norm of finite numbers may overflow, so it only raises the suspicion.
            wrong = next((name for name in names if not grads[name].isfinite().all()), None)
            norm = math.sqrt(sum(float(grads[name].double().norm()) ** 2 for name in names))
        word = torch.tensor([0 if wrong is None else 1 + self.layout.names.index(wrong), self.step])
        words = self.comm.to_host_async(torch.stack(self.comm.all_gather(word.to(self._device))))()
        for rank, (_, step) in enumerate(words):
            if step != self.step:
                raise RankFailure(f"Ranks are out of step: rank {rank} is at step {step}, this one at {self.step}.")
        broken = {rank: self.layout.names[index - 1] for rank, (index, _) in enumerate(words) if index}
        if not broken:
            clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm * self._loss_scale / max(norm, 1e-30))
            self._scale = clip / self._loss_scale
            return True
        if self.loss_scale is None:
            # As the segments' headers would tell, one segment after the other: of the first one the lowest rank.
            rank, name = next(
                (rank, name)
                for segment in self.layout.segments
                for rank, name in broken.items()
                if name in segment.names
            )
            what = f"The gradient of {name!r} is not finite on rank {rank} at step {self.step}."
            if self.on_nonfinite == "raise":
                raise NonFiniteGradient(f"{what} {NOT_FINITE}")
            if self.comm.rank == 0:
                log.warning(f"{what} All ranks leave this step out, the {self.skipped + 1}. so far.")
        self.skipped += 1
        torch._foreach_mul_(list(grads.values()), math.nan)
        return False

    def reduce_segment_(self, segment: Segment, grads: list[Tensor], unused: Collection[str] = ()) -> None:
        """Replace one segment's gradients by the agreed result, in place. All ranks go through segments in one order.

        Args:
            segment: one of the layout's.
            grads: one 1-D gradient per parameter, in the segment's order.
            unused: parameters that took no part in this backward pass: their gradients are not looked at, and what
                was kept of them waits for a step in which they do.
        """
        if self._later and self._later[0][0] < self.step:
            self.catch_up()
        state, density = self.states[segment.index], self.density
        memory = self.method.memory
        compressor, aggregator = self._path(density, segment)
        lr = None
        if memory.needs_lr:
            lr = self.lr() if callable(self.lr) else self.lr
        settled = self._settled.get(segment.index) is aggregator
        facts = (self.method, self.seed, self.step, density, lr, segment.index, settled)
        ctx = Context(
            step=self.step,
            density=density,
            lr=lr,
            scale=self._scale,
            # Where ranks divide a segment among them, it is their sum that is selected from.
            scan=compressor.scan(segment.numel, density) if aggregator.sharing == 1 else None,
            state=state,
            seed=self.seed,
            segment=segment.index,
            rank=self.comm.rank,
            fingerprint=zlib.crc32(repr(facts).encode()) ^ self._digest,
            settled=settled,
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
        self._settled[segment.index] = aggregator
        for observer in self.observers:
            observer.aggregated(segment, u, used, compressor, ctx)
        with self._timed("write"):
            lost = write_(grads, segment, agreed, self._loss_scale / gain, memory.keeps, ctx.sound)
        with self._timed("keep"):
            memory.keep(u, used, lost, compressor, segment, ctx)
            for kept, value in aside:
                kept.add_(value)
        self._later += [(self.step, check) for check in ctx.later]

    def catch_up(self) -> None:
        """Raise what the host has not looked at yet, for it would have had to wait: on CUDA, that of the last step.

        Raises:
            NonFiniteGradient, RankFailure: as `reduce_segment_` does where nobody waits.
        """
        while self._later:
            self._later[0][1]()  # an error stays there, so that nobody takes the state for a good one
            del self._later[0]

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def reset(self) -> None:
        """Forget all steps: as after `setup`."""
        self.step = self.skipped = 0
        self._saved = None
        self._clear()

    def _clear(self) -> None:
        self._later.clear()
        self._settled.clear()
        for state in self.states:
            for name in list(state):
                if self._entries[name].per == "segment":
                    del state[name]
                else:
                    state[name].zero_()

    def finish_step(self) -> None:
        """Count a step; to be called when all segments have been reduced."""
        self.step += 1

    @property
    def dense_nbytes(self) -> float:
        """Bytes that a rank sends in a step where everything goes by ring all-reduce in fp32.

        Its share of them, where several ranks divide the work of one network card among them.
        """
        assert self.layout is not None
        return sum(map(self._dense_nbytes, self.layout.segments))

    def _dense_nbytes(self, segment: Segment) -> float:
        return DENSE[1].nbytes(DENSE[0], segment, None, self.comm.size) / self.method.aggregator.sharing

    def nbytes(self, density: float | None) -> float:
        """Return the bytes that a rank sends in a step at a density, without counts and headers."""
        assert self.layout is not None
        ways = [
            (segment, (self.method.compressor, self.method.aggregator) if self._sends_less(density, segment) else DENSE)
            for segment in self.layout.segments
        ]
        return sum(
            aggregator.nbytes(compressor, segment, density, self.comm.size)
            for segment, (compressor, aggregator) in ways
        )

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
        return self.method.aggregator.nbytes(compressor, segment, density, size) < self._dense_nbytes(segment)

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
        """Return what this rank must keep to go on, as copies, on the host.

        Returns:
            Tensors and primitives only: "step"; "elements", entry name to parameter name to a tensor of the parameter's
            shape; "segments", names of a segment's parameters to entry name to tensor; "owners", the part that keeps an
            entry, and "resize", what becomes of it when the number of ranks changes (see `resized`); and what it
            belongs to.

        Raises:
            NonFiniteGradient, RankFailure: see `catch_up`.
        """
        self.catch_up()
        if self._saved is not None:
            return dict(self._saved)  # loaded, but the parameters are not known yet
        state: dict[str, Any] = {
            "version": VERSION,
            "method": repr(self.method),
            "rank": self.comm.rank,
            "size": self.comm.size,
            "step": self.step,
            "skipped": self.skipped,
            "owners": dict(self._owners),
            "resize": {name: self._entries[name].resize for name in self._owners},
            "elements": {name: {} for name, entry in self._entries.items() if entry.per == "element"},
            "segments": {},
        }
        for segment, kept in zip(self.layout.segments if self.layout else (), self.states, strict=True):
            for name, per_param in state["elements"].items():
                for param, shape, view in zip(segment.names, segment.shapes, segment.views(kept[name]), strict=True):
                    per_param[param] = view.reshape(shape).to("cpu", copy=True)
            state["segments"]["\n".join(segment.names)] = {
                name: value.to("cpu", copy=True)
                for name, value in kept.items()
                if name in self._entries and self._entries[name].per == "segment"
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on the same rank; another granularity is fine, another density, too.

        What a part of another kind has kept is left out, with a warning.

        Raises:
            ValueError: it belongs to another rank, number of ranks (see `resized`) or set of parameters.
        """
        for key, mine in (("version", VERSION), ("rank", self.comm.rank), ("size", self.comm.size)):
            if state.get(key) != mine:
                raise ValueError(f"Reducer state is of {key} {state.get(key)!r}, here it is {mine!r}: cannot load it.")
        if self.layout is None:
            self._saved = state  # there is no place for it before the parameters are known
        else:
            self._restore(self.layout, state)
        self.step, self.skipped = int(state["step"]), int(state["skipped"])

    def _restore(self, layout: Layout, state: Mapping[str, Any]) -> None:
        fitting = {name for name, owner in state["owners"].items() if self._owners.get(name) == owner}
        if lost := sorted(state["owners"].keys() - fitting):
            log.warning(
                f"The saved state of {state['method']} holds {', '.join(lost)}, for which {self.method!r} has no use: "
                f"what was kept there is not sent any more."
            )
        for name in fitting & state["elements"].keys():
            per_param = state["elements"][name]
            if set(per_param) != set(layout.names):
                odd = sorted(set(per_param) ^ set(layout.names))
                raise ValueError(f"Reducer state and model differ in their parameters: {', '.join(odd)}.")
            for segment in layout.segments:
                for param, shape in zip(segment.names, segment.shapes, strict=True):
                    if tuple(per_param[param].shape) != shape:
                        raise ValueError(
                            f"Reducer state of {param!r} has shape {tuple(per_param[param].shape)}, not {shape}."
                        )
        # All is known to fit: from here on nothing fails half-way.
        self._clear()
        for segment, kept in zip(layout.segments, self.states, strict=True):
            for name in fitting & state["elements"].keys():
                for param, view in zip(segment.names, segment.views(kept[name]), strict=True):
                    view.copy_(state["elements"][name][param].reshape(-1))
            for name, value in state["segments"].get("\n".join(segment.names), {}).items():
                if name in fitting:
                    kept[name] = value.to(self._device, copy=True)


def resized(states: Iterable[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the state for one of `size` new ranks, from those of the old ranks.

    Of what error feedback keeps the sum over all ranks, divided by their number, stays what it was: new rank r takes
    (new / old) times the sum of the old ranks that are r modulo the new number. What is equal on all ranks stays so;
    the rest starts anew.

    Args:
        states: `Reducer.state_dict` of old rank 0, and of those that are `rank` modulo `size`, in order. One after the
            other is taken, so that few have to be in memory.
        rank: of the new rank.
        size: the new number of ranks.
    """
    result: dict[str, Any] = {}
    for state in states:
        mine = state["rank"] % size == rank
        factor = size / state["size"] if mine else 0.0
        if not result:
            result = {**state, "rank": rank, "size": size}
            result["segments"] = {
                names: {name: value for name, value in kept.items() if state["resize"][name] == "replicate"}
                for names, kept in state["segments"].items()
            }
            result["elements"] = {
                name: {
                    param: value.clone() if state["resize"][name] == "replicate" else torch.zeros_like(value)
                    for param, value in per_param.items()
                }
                for name, per_param in state["elements"].items()
            }
        for name, per_param in state["elements"].items():
            shapes = {param: value.shape for param, value in per_param.items()}
            if shapes != {param: value.shape for param, value in result["elements"].get(name, {}).items()}:
                raise ValueError(f"Reducer states of two ranks differ in the parameters of their {name}.")
            if state["resize"][name] == "sum" and mine:
                for param, value in per_param.items():
                    result["elements"][name][param].add_(value, alpha=factor)
    return result


def write_(
    grads: Sequence[Tensor],
    segment: Segment,
    agreed: Agreed,
    scale: float,
    keeps: bool,
    sound: Tensor | None = None,
) -> Agreed | None:
    """Overwrite a segment's gradients with scale × the agreed result, or with zeros where it is not `sound`.

    Returns:
        What rounding to 16-bit gradients took away, in units of `agreed`; None where nothing was rounded.
    """
    if isinstance(agreed, Tensor):
        lost = write_dense_(grads, segment.bounds, agreed if scale == 1 else agreed * scale, keeps, sound)
        return lost if lost is None or scale == 1 else lost.div_(scale)
    terms = agreed if scale == 1 else tuple((indices, values * scale) for indices, values in agreed)
    entries = write_entries_(grads, segment.bounds, terms, sound)
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


def check_foresight(on_nonfinite: str, clip_norm: float | None) -> None:
    """Raise ValueError unless the options about gradients that are too large make sense."""
    if on_nonfinite not in get_args(OnNonFinite):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: choose from {', '.join(get_args(OnNonFinite))}.")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm!r}: the largest norm of a gradient, above 0, or None.")


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
