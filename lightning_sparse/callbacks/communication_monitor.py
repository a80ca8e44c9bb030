"""Logs bytes, density and seconds of communication, and checks that the residual stays within its bound."""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_sparse.callbacks.base import Charts, StepCallback, Trainer, sum_of_squares
from lightning_sparse.compressors.base import Entries, Update
from lightning_sparse.context import Context
from lightning_sparse.observer import Observer
from lightning_sparse.reducer import Reducer

if TYPE_CHECKING:
    import pytorch_lightning as pl

GROWING = 5
"""Number of consecutive logging steps on which the residual must grow before a warning."""

BAR = {"density": "communication/density", "x_fewer_bytes": "communication/times_fewer_than_fp32"}
"""Maps a name in the progress bar to the tag of the logged value."""

PHASES = ("compensate", "select", "exchange", "decode")


class CommunicationMonitor(StepCallback):
    """Logs bytes, density, residual norm and seconds per phase; shows density and savings in the progress bar.

    All values describe rank 0. On each logging step, the callback logs:

    - `communication/bytes_per_step`: exact mean over the steps since the last log; and `bytes_total`: sum since
      training began, including the runs before a resume. If several optimizers exchange updates, the steps of each
      count;
    - `communication/times_fewer_than_fp32` and `_bf16`: the bytes of a ring all-reduce of dense gradients, divided by
      the bytes sent. With P ranks the all-reduce sends 2(P − 1)/P times the gradients' size;
    - `communication/density`: the part of rank 0's entries that is in the result, for methods that choose entries.
      With most methods these are the sent entries. `gtopk`, `oktopk` and `doublesqueeze` choose again among them. It
      is 1 while `auto_ddp` lets DDP average gradients, and the following values are then missing;
    - `residual/norm`, `residual/gradient_norm` and their ratio. A warning is given once if the residual grows beyond
      the bound of error feedback (see below);
    - `communication/drift`, if ranks take several steps between exchanges: the distance of rank 0's weights from the
      mean of the ranks' weights. It is relative to the norm of the mean update;
    - `seconds/compensate`, `select`, `exchange` and `decode`: seconds of each phase per step. Selection includes
      packing and summing, exchange includes waiting for slower ranks, and decoding includes the update of the residual.
      These are means over the steps since the last log. Logging steps are excluded if there are other steps. They are
      seconds of the host: on a GPU over NCCL it only starts the work, so they do not show the link there;
    - `seconds/hidden_share`: the fraction of this time that overlaps with backward.

    If C leaves at most 1 − δ of ‖u‖² in the residual, ‖e‖ ≤ 2√(1 − δ)/δ · max ‖g‖ (Karimireddy et al. 2019, arXiv
    1901.09847, lemma 3). Here δ = k/d. The bound uses the largest ‖g‖ of all logging steps. The warning appears if ‖e‖
    exceeds the bound and has grown on each of the last five logging steps.

    A logging step costs one pass over gradient and residual, logged as `monitoring_cost/CommunicationMonitor_ms`. Other
    steps cost nothing.
    """

    needs_logger, counts = False, True
    category = "Communication"

    def __init__(self) -> None:
        self._sent_before = 0  # bytes of earlier fits, and of the runs that this one resumes
        self._first: int | None = None  # bytes sent when this fit began
        self._last: _Totals | None = None
        self._step_began: _Totals | None = None
        self._norms: deque[float] = deque(maxlen=GROWING + 1)
        self._largest = 0.0
        self._warned = False

    def charts(self, reducer: Reducer) -> Charts:
        return {
            "Bytes that rank 0 sends per step": ["communication/bytes_per_step"],
            "Times fewer bytes than dense gradients: in fp32, and half as many in bf16": [
                "communication/times_fewer_than_fp32",
                "communication/times_fewer_than_bf16",
            ],
            **(
                {"Distance of rank 0's weights from the ranks' mean, by the mean update": ["communication/drift"]}
                if reducer.method.local_steps > 1
                else {}
            ),
            "2-norms of the residual e and of the gradient g": ["residual/norm", "residual/gradient_norm"],
            "Seconds per step: compensate, select, exchange, decode": [f"seconds/{phase}" for phase in PHASES],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"sent_total": self._total()}

    def _total(self) -> int:
        """Return the bytes sent since training began, including the runs before a resume."""
        sent: int = self._sent_before
        if self._first is not None:
            sent += self._comm.sent_bytes - self._first
        return sent

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sent_before, self._first = state_dict["sent_total"], None

    def on_train_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._sent_before, self._first = self._total(), None
        self._norms.clear()
        self._largest, self._warned = 0.0, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        reducer: Reducer = trainer.strategy.reducer
        if self._first is None:
            # on_train_start is too early: the strategy's on_train_start runs later and resets the counts.
            self._last = _Totals.of(trainer)
            self._first = self._last.sent
        self._comm = reducer.comm  # a new one if the strategy has chosen another exchange
        if self._timed_observer is not None:
            trainer.strategy.wait_for_exchange()  # that of the step before counts, in seconds as in steps
            self._step_began = _Totals.of(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._comm = trainer.strategy.reducer.comm  # `auto_ddp` may have switched after callbacks began the batch
        super().on_train_batch_end(trainer, *args, **kwargs)

    def observer(self, reducer: Reducer) -> Observer:
        return _Norms(drifts=reducer.method.local_steps > 1)

    def report(self, seen: _Norms | None, trainer: Trainer, step: int) -> dict[str, float]:
        reducer: Reducer = trainer.strategy.reducer
        last, began, now = self._last, self._step_began, _Totals.of(trainer)
        assert last is not None
        assert began is not None
        if now.exchanges == began.exchanges:
            return {}  # no step, or one without an exchange
        self._last = now
        sent, steps = now.sent - last.sent, now.steps - last.steps
        scalars = {
            "communication/bytes_per_step": sent / steps,
            "communication/bytes_total": self._total(),
        }
        if seen is not None or not reducer.method.compresses:  # else `auto_ddp` has just switched
            scalars["communication/density"] = 1.0 if seen is None else seen.density
        if sent > 0:
            # Gradients would be averaged in each local step.
            dense = (now.dense - last.dense) * steps / (now.exchanges - last.exchanges)
            scalars["communication/times_fewer_than_fp32"] = dense / sent
            scalars["communication/times_fewer_than_bf16"] = dense / 2 / sent
        if seen is not None:
            scalars |= self._norms_of(seen, step)
            # Observing slows down logging steps, so the means exclude them if there are other steps.
            scalars |= (began if began.exchanges > last.exchanges else now).seconds_since(last)
        for name, tag in BAR.items():
            if self.has_bar and math.isfinite(value := scalars.get(tag, math.nan)):
                trainer.lightning_module.log(
                    name, value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1
                )
        return scalars

    def _norms_of(self, seen: _Norms, step: int) -> dict[str, float]:
        gradient = math.sqrt(seen.gradient)
        scalars = {"residual/gradient_norm": gradient}
        if seen.mean > 0:
            scalars["communication/drift"] = math.sqrt(seen.difference / seen.mean)
        if seen.residual is not None:
            norm = scalars["residual/norm"] = math.sqrt(seen.residual)
            if gradient > 0:
                scalars["residual/times_gradient"] = norm / gradient
            self._check(norm, gradient, seen.density, step)
        return scalars

    def _check(self, norm: float, gradient: float, delta: float, step: int) -> None:
        self._largest = max(self._largest, gradient)
        self._norms.append(norm)
        norms = list(self._norms)
        grows = len(norms) > GROWING and all(a < b for a, b in pairwise(norms))
        bound = 2 * math.sqrt(max(0.0, 1 - delta)) / delta * self._largest if delta > 0 else math.inf
        if grows and norm > bound and not self._warned:
            self._warned = True
            warnings.warn(
                f"CommunicationMonitor: at step {step} the residual's norm is {norm:.3g}, still growing, and beyond "
                f"{bound:.3g}, the bound of error feedback at density {delta:.3g} with gradients of norm up to "
                f"{self._largest:.3g}. Some entries are never sent, or sent entries stay in the residual. Train with "
                f"strategy='topk_ddp', or raise the density; if the method is custom, check its selection.",
                stacklevel=2,
            )


@dataclass(frozen=True)
class _Totals:
    """Snapshot of the reducer's counts."""

    steps: int
    exchanges: int
    sent: int
    dense: float
    seconds: dict[str, float]

    @staticmethod
    def of(trainer: Trainer) -> _Totals:
        reducer: Reducer = trainer.strategy.reducer
        # Validation or a checkpoint may cause an exchange before `local_steps` steps are complete.
        steps = trainer.strategy.exchanger.steps_taken if reducer.method.local_steps > 1 else reducer.step
        seconds = {**reducer.seconds, "exchange": reducer.comm.seconds}
        return _Totals(steps, reducer.step, reducer.comm.sent_bytes, reducer.comm.dense_bytes, seconds)

    def seconds_since(self, before: _Totals) -> dict[str, float]:
        steps = self.steps - before.steps
        spent = {phase: (self.seconds[phase] - before.seconds[phase]) / steps for phase in self.seconds}
        exposed, spent["decode"] = spent.pop("exposed"), spent.pop("write")
        scalars = {f"seconds/{phase}": spent[phase] for phase in PHASES}
        if total := sum(spent.values()):
            scalars["seconds/hidden_share"] = max(0.0, 1 - exposed / total)
        return scalars


class _Norms(Observer):
    """Observes one reduction.

    Attributes:
        gradient: Σg², in the units in which g is added to u.
        residual: Σe²; None without a residual.
        sent: number of entries sent; NaN for methods that do not send entries.
        numel: number of elements.
        difference, mean: Σ(g − m)² and Σm² for the result m; 0 unless ranks take several steps between exchanges.
    """

    def __init__(self, drifts: bool) -> None:
        self._drifts = drifts
        self._own: dict[int, list[Tensor]] = {}  # by segment: several may wait for their exchange
        self.difference = self.mean = 0.0
        self.gradient = 0.0
        self.residual: float | None = None
        self.sent = 0.0
        self.numel = 0

    @property
    def density(self) -> float:
        """Entries sent divided by elements."""
        return self.sent / self.numel

    def gradients(self, grads: list[Tensor], ctx: Context) -> None:
        self.gradient += ctx.scale**2 * float(sum_of_squares(grads))
        if "residual" in ctx.state:
            self.residual = (self.residual or 0.0) + float(sum_of_squares([ctx.state["residual"]]))
        if self._drifts:
            self._own[ctx.segment.index] = [grad.clone() for grad in grads]

    def written(self, grads: list[Tensor], ctx: Context) -> None:
        if self._drifts:
            self.mean += float(sum_of_squares(grads))
            own = self._own.pop(ctx.segment.index)
            self.difference += float(sum_of_squares([each - mean for each, mean in zip(own, grads, strict=True)]))

    def aggregated(self, u: Tensor, applied: Update, ctx: Context) -> None:
        self.numel += u.numel()
        if applied is u:
            self.sent += u.numel()
        elif isinstance(applied, Entries):
            self.sent += int((applied.indices < u.numel()).sum())
        else:
            self.sent = math.nan
