"""The strategy, without its base class: Lightning exists under two names, and each needs a real subclass of its own."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import lightning_sparse.checkpoint as side_files
from lightning_sparse.hook import CommThread, method_of
from lightning_sparse.layout import check_partition
from lightning_sparse.methods import METHODS, Method
from lightning_sparse.reducer import OnNonFinite, Reducer, check_foresight, check_warmup
from lightning_sparse.strategies.first_line import first_line

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

REFUSED = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class SparseDDP(DDPStrategy):
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
        **kwargs: for Lightning's DDPStrategy and torch's DistributedDataParallel.

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
        super().__init__(**kwargs)
        self._method = method_of(method, density)
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

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running or the last fit."""
        if self._reducer is None:
            raise RuntimeError("The strategy has a reducer only from the start of fit.")
        return self._reducer

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
        # Not super(): it registers hooks on CUDA only, and silently nothing on CPU.
        self._comm_thread = CommThread(
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
        # By now Lightning has set its own handler. It talks to the other ranks, out of turn where not all of them got
        # the signal in the same place: gloo then aborts the process. So the others are told before.
        lightnings = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and callable(lightnings):

            def tell(number: int, frame: Any) -> None:
                if self._comm_thread is not None:
                    self._comm_thread.comm.warn(f"Rank {self.global_rank} was told to end (SIGTERM).")
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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # A checkpoint of weights alone is not made to go on from.
        if "optimizer_states" not in checkpoint or not self._write_side_file(checkpoint, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        error: Exception | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as caught:
            error = caught
        if errors := self._told(self._described(error)):
            raise OSError(
                f"{str(filepath)!r} could not be written ({errors[0]}). An earlier one of this name is as it was."
            ) from error
        self._clean(filepath)

    def _write_side_file(self, checkpoint: dict[str, Any], filepath: Any) -> bool:
        if self._reducer is None:
            log.warning(
                f"{str(filepath)!r} gets no residuals: they belong to the processes that trained, which are not this "
                f"one. Save from within fit, with ModelCheckpoint for example."
            )
            return False
        tag = self._tag(filepath)
        if tag is None:
            return False
        error: Exception | None = None
        try:
            side_files.write(filepath, tag, self._reducer.state_dict())
        except Exception as caught:  # told to all ranks, so that none waits
            error = caught
        if errors := self._told(self._described(error)):
            side_files.discard(filepath, tag, self.global_rank, self.world_size)
            raise OSError(
                f"The residuals of {str(filepath)!r} could not be written ({errors[0]}). No checkpoint was written; an "
                f"earlier one of this name is as it was."
            ) from error
        checkpoint[side_files.KEY] = {
            "version": side_files.VERSION,
            "tag": tag,
            "size": self._reducer.comm.size,
            "step": self._reducer.step,
            "skipped": self._reducer.skipped,
        }
        if self.is_global_zero:
            self._tags.setdefault(str(filepath), []).append(tag)
        return True

    def _tag(self, filepath: Any) -> str | None:
        """Agree on a name for the side files of a checkpoint; None where the ranks' states do not belong together."""
        assert self._reducer is not None
        trainer, thread = self.lightning_module and self.lightning_module.trainer, self._comm_thread
        interrupted = trainer is not None and trainer.interrupted
        if interrupted and thread is not None:
            # Saved by a callback on an exception, which may be this rank's alone: the others would wait in backward.
            thread.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
        if thread is not None:
            self._whole = thread.settle()
        ranks: list[Any] = [(secrets.token_hex(8), self._reducer.step, self._whole)]
        try:
            ranks = self._gathered(ranks[0])
        except Exception:
            if not interrupted:
                raise
            ranks.append(None)  # somebody is gone
        tag, *moment = ranks[0]
        if self._whole and all(rank is not None and rank[1:] == tuple(moment) for rank in ranks):
            return str(tag)
        if self.global_rank == 0:
            log.warning(
                f"{str(filepath)!r} gets no residuals: training failed in the middle of a step, and a part of that "
                f"step is in them. A run that goes on from it starts with empty ones."
            )
        return None

    def _gathered(self, mine: Any) -> list[Any]:
        if not dist.is_initialized():
            return [mine]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _described(self, error: Exception | None) -> str | None:
        return None if error is None else f"rank {self.global_rank}: {type(error).__name__}: {error}"

    def _clean(self, filepath: Any) -> None:
        if self.is_global_zero:
            try:
                if side_files.clean(filepath, self._tags[str(filepath)]):
                    del self._tags[str(filepath)]
            except OSError as error:  # not worth ending a training for
                log.warning(f"Side files of earlier checkpoints {str(filepath)!r} could not be removed: {error}")

    def _told(self, mine: str | None) -> list[str]:
        """Return what all ranks have to say, those that do."""
        return [text for text in self._gathered(mine) if text]

    def remove_checkpoint(self, filepath: Any) -> None:
        tags = self._tags.get(str(filepath), [])
        # AsyncCheckpointIO may be about to write it still: then it will be there in spite of this, and needs them.
        landed = not tags or side_files.named_on_disk(filepath, tags[-1:])
        super().remove_checkpoint(filepath)
        if self.is_global_zero and landed:
            side_files.remove(filepath)
            self._tags.pop(str(filepath), None)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        info = checkpoint.get(side_files.KEY)
        if info is None:
            self.reducer.reset()
            if self.global_rank == 0:
                log.info(f"{str(self._loaded_from)!r} holds no residuals: they start at 0.")
            return
        error: str | None = None
        missing: list[str] = []
        self.reducer.reset()
        try:
            side_files.check(info)
            self.reducer.step, self.reducer.skipped = info["step"], info["skipped"]  # if there is nothing else
            state, missing = side_files.read(self._loaded_from, info, self.global_rank, self.world_size)
            if state is not None:
                self.reducer.load_state_dict(state)
        except Exception as caught:
            error = f"rank {self.global_rank}: {caught}"
        folder = side_files.folder(self._loaded_from)
        if errors := self._told(error):
            raise ValueError(
                f"The residuals of {str(self._loaded_from)!r} cannot be loaded ({errors[0]}). To go on without them, "
                f"at the price of what had not been sent yet, remove {folder!r}."
            )
        lost = self._told(", ".join(missing))
        if lost and self.global_rank == 0:
            log.warning(
                f"{', '.join(sorted(set(lost)))} not found in {folder!r}: what had been kept there is lost, and these "
                f"workers start with empty residuals. Move the folder along with the checkpoint."
            )

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._comm_thread is not None:
            self._comm_thread.fail(exception)

    def teardown(self) -> None:
        # May come after an exception, and before any setup.
        if self._comm_thread is not None:
            self._comm_thread.close()
            self._whole = self._comm_thread.whole
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
