"""The strategy, without its base class: Lightning exists under two names, and each needs a real subclass of its own."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.hooks import CommThread, resolve_method, start_comm_thread
from lightning_sparse.layout import check_partition
from lightning_sparse.methods import METHODS, Method
from lightning_sparse.reducer import OnNonFinite, Reducer, check_foresight, check_warmup
from lightning_sparse.strategies.checkpointing import Checkpointing
from lightning_sparse.strategies.first_line import first_line

log = logging.getLogger(__name__)


def _leave_gloo() -> None:
    """Leave the process groups before the interpreter ends, as Lightning does for NCCL.

    Without it gloo's threads free Python objects afterwards, and now and then that aborts the process (pytorch issue
    179291).
    """
    if dist.is_initialized():
        dist.destroy_process_group()


REFUSED = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


ADAPTIVE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers that divide by the size of past gradients; AdamW is an Adam."""


class SparseDDP(Checkpointing):
    """Data-parallel training that sends a small part of each gradient and keeps the rest for later steps.

    Args:
        method: a name in `lightning_sparse.METHODS`, or a `Method` made of own parts.
        density: fraction of gradient entries to send, in (0, 1]; None keeps the method's own, 0.001.
        granularity: what is compressed together: each "layer", each "bucket" of `bucket_cap_mb`, or the whole "model".
        warmup: densities to use in turn before `density`, an epoch each, or `warmup_steps` steps each.
        warmup_steps: number of optimizer steps for each density of `warmup`.
        seed: of the method's random choices.
        on_nonfinite: what a gradient with a NaN or an infinity means where no gradient scaler is at work: "raise" an
            error on all ranks, or "skip" the step on all ranks and count it.
        clip_norm: largest 2-norm of a worker's own gradient, before compression; use it in place of Trainer's
            gradient_clip_val, which destroys what has already left the residuals.
        two_level: add up densely inside each node, and exchange sparsely between nodes: for several devices behind one
            network card. Nodes must have equal numbers of devices.
        **kwargs: for Lightning's DDPStrategy and torch's DistributedDataParallel; `gradient_as_bucket_view` is on
            unless you say otherwise.

    Attributes:
        reducer: the algorithm and its state; there from the start of `fit`.
    """

    def __init__(
        self,
        method: str | Method = "topk",
        density: float | None = None,
        granularity: Literal["layer", "bucket", "model"] = "bucket",
        warmup: Sequence[float] = (),
        warmup_steps: int | None = None,
        seed: int = 0,
        on_nonfinite: OnNonFinite = "raise",
        clip_norm: float | None = None,
        two_level: bool = False,
        **kwargs: Any,
    ) -> None:
        for option in REFUSED:
            if kwargs.get(option) is not None:
                raise ValueError(
                    f"{type(self).__name__}({option}=...): DDP takes one communication hook, and compression is it. "
                    f"Leave {option} out, or use strategy='ddp'."
                )
        # An explicit size makes DDP's buckets hold the same parameters as our segments, so none waits for a second one.
        if kwargs.get("bucket_cap_mb") is None:
            kwargs["bucket_cap_mb"] = 25
        bucket_cap_mb = kwargs["bucket_cap_mb"]
        # Otherwise DDP copies every bucket back into the gradients when backward has ended, and nothing hides that.
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(**kwargs)
        self._method = resolve_method(method, density)
        self._two_level = two_level
        if two_level:
            self._method = replace(self._method, aggregator=TwoLevel(self._method.aggregator))
        check_warmup(self._method, warmup, warmup_steps)
        check_partition(granularity, bucket_cap_mb)
        check_foresight(on_nonfinite, clip_norm)
        self._options: dict[str, Any] = {
            "granularity": granularity,
            "warmup": tuple(warmup),
            "warmup_steps": warmup_steps,
            "seed": seed,
            "on_nonfinite": on_nonfinite,
            "clip_norm": clip_norm,
        }
        self._comm_thread: CommThread | None = None
        # It stays after fit, so that a checkpoint can be written then.
        self._reducer: Reducer | None = None
        self._whole = True  # whether the reducer has ended all steps that it has begun
        self._reductions = 0  # before the present backward
        self._loaded_from: Any = None
        self._tags: dict[str, list[str]] = {}  # of side files whose checkpoint may be on its way still; on rank 0

    def setup_distributed(self) -> None:
        super().setup_distributed()
        if dist.get_backend() == "gloo":
            atexit.register(_leave_gloo)

    def _register_ddp_hooks(self) -> None:
        scaler = self._scaler
        assert self.lightning_module is not None
        keeps = self._method.memory.keeps  # without a memory it is what stock ddp does
        if keeps and self.lightning_module.trainer.gradient_clip_val and self.global_rank == 0:
            log.warning(
                f"gradient_clip_val={self.lightning_module.trainer.gradient_clip_val} shortens what all ranks have "
                f"agreed on and taken out of their residuals: what is cut off is lost. Set clip_norm of "
                f"{type(self).__name__} instead, which clips each worker's gradient before."
            )
        if self._two_level:
            assert isinstance(self._method.aggregator, TwoLevel)
            between = self._method.aggregator.between
            self._method = replace(self._method, aggregator=TwoLevel(between, self.num_processes))
        self._reducer = None  # of an earlier fit: it would double the residuals in memory
        # Not super(): it registers hooks on CUDA only, and silently nothing on CPU.
        self._comm_thread = start_comm_thread(
            self.model,  # type: ignore[arg-type]
            self._method,
            lr=self._learning_rate,
            timeout=self._timeout,
            loss_scale=scaler and scaler.get_scale,
            **self._options,
        )
        self._reducer, self._whole = self._comm_thread.reducer, True
        if self.global_rank == 0:
            log.info(first_line(self._reducer, self.lightning_module.trainer))

    @property
    def _scaler(self) -> Any:
        """The gradient scaler at work; one that is switched off leaves no step out, so it is none."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def on_train_start(self) -> None:
        super().on_train_start()
        adaptive = next((o for o in self.optimizers if isinstance(o, ADAPTIVE)), None)
        if adaptive is not None and (self._method.density or 1) < 1 and self.global_rank == 0:
            log.warning(
                f"{type(adaptive).__name__} takes too large steps with gradients that arrive seldom: a GPT needed 4 to "
                f"6 times as many steps with them as with dense ones, and a rate of a quarter to a half. With SGD and "
                f"momentum it needed no more. Compare with stock 'ddp' before you rely on it; see the README, "
                f"'Learning rate and optimizer'."
            )
        # By now Lightning has set its own handler. It talks to the other ranks, out of turn where not all of them got
        # the signal in the same place: gloo then aborts the process. So the others are told before.
        lightnings = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and callable(lightnings):

            def tell(number: int, frame: Any) -> None:
                if self._comm_thread is not None:
                    self._comm_thread.comm.mark_terminating(f"Rank {self.global_rank} was told to end (SIGTERM).")
                lightnings(number, frame)

            signal.signal(signal.SIGTERM, tell)  # until Lightning puts back what was there before

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.reducer.epoch = self.lightning_module.trainer.current_epoch

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._comm_thread is not None:
            self._reductions = self._comm_thread.reductions

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._comm_thread is None or not self.model.require_backward_grad_sync:  # type: ignore[union-attr]
            super().post_backward(closure_loss)
            return
        # With static_graph and manual optimization, Lightning has DDP reduce the first gradients here.
        with self._comm_thread.after_backward():
            super().post_backward(closure_loss)
        # Before an optimizer applies gradients that DDP has not exchanged; itself it notices in the next forward.
        self._comm_thread.check_reduced(self._reductions)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._options["on_nonfinite"] == "raise" or self._scaler is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def without_broken_gradients() -> Any:
            result = closure()
            grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
            firsts = [grad[(0,) * grad.dim()] for grad in grads if grad is not None and grad.numel()]
            # A step that is left out has NaN everywhere. Without gradients an optimizer does nothing at all.
            if firsts and torch.stack([first.float() for first in firsts]).isnan().any():
                optimizer.zero_grad()
            return result

        return super().optimizer_step(optimizer, without_broken_gradients, model, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        atexit.unregister(_leave_gloo)  # what is pending might never end, and leaving would wait for it
        if self._comm_thread is not None:
            self._comm_thread.fail(exception)

    def teardown(self) -> None:
        # May come after an exception, and before any setup.
        if self._comm_thread is not None:
            self._comm_thread.close()
            self._whole = self._comm_thread.is_consistent
            self._comm_thread = None
        try:
            super().teardown()
        finally:
            # Now what was still being written is on disk, or never will be.
            for filepath in list(self._tags):
                self._tags[filepath].clear()
                self._clean(filepath)
            self._tags.clear()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_ddp` for every method, with Lightning's own suffixes."""
        starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for method in METHODS:
            for suffix, start_method in starts.items():
                for end, unused in (("", {}), ("_find_unused_parameters_true", {"find_unused_parameters": True})):
                    name = f"{method}_ddp{suffix}{end}"
                    if name not in strategy_registry:
                        strategy_registry.register(
                            name,
                            cls,
                            description=f"DDP with compressed gradients: {method}, started by {start_method}.",
                            method=method,
                            start_method=start_method,
                            **unused,
                        )
