"""The strategy, without its base class: Lightning exists under two names, and each needs a real subclass of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning_sparse.hook import CommThread, method_of
from lightning_sparse.layout import check_partition
from lightning_sparse.methods import METHODS, Method
from lightning_sparse.reducer import Reducer, check_warmup

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
        **kwargs: for Lightning's DDPStrategy and torch's DistributedDataParallel.

    Attributes:
        reducer: the algorithm and its state; there while `fit` runs.
    """

    def __init__(
        self,
        method: str | Method = "topk",
        density: float | None = None,
        granularity: Literal["layer", "bucket", "model"] = "bucket",
        warmup: Sequence[float] = (),
        warmup_steps: int | None = None,
        seed: int = 0,
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
        super().__init__(**kwargs)
        self._method = method_of(method, density)
        check_warmup(self._method, warmup, warmup_steps)
        check_partition(granularity, kwargs["bucket_cap_mb"])
        self._options: dict[str, Any] = {
            "granularity": granularity,
            "warmup": tuple(warmup),
            "warmup_steps": warmup_steps,
            "seed": seed,
        }
        self._comm_thread: CommThread | None = None

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running fit."""
        if self._comm_thread is None:
            raise RuntimeError("The strategy has a reducer only while fit runs.")
        return self._comm_thread.reducer

    def _register_ddp_hooks(self) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales the loss and skips steps that overflow, which the residuals cannot follow "
                "yet. Use precision='bf16-mixed' or '32-true', or strategy='ddp'."
            )
        # Not super(): it registers hooks on CUDA only, and silently nothing on CPU.
        self._comm_thread = CommThread(
            self.model,  # type: ignore[arg-type]
            self._method,
            lr=self._learning_rate,
            timeout=self._timeout,
            **self._options,
        )
        reducer = self._comm_thread.reducer
        assert reducer.layout is not None
        if self.global_rank == 0:
            log.info(
                f"{self._method!r} on {self.world_size} ranks; {reducer.layout.numel:,} parameters, "
                f"segments: {len(reducer.layout.segments)}."
            )

    def _learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        self.reducer.epoch = self.lightning_module.trainer.current_epoch

    def on_train_start(self) -> None:
        super().on_train_start()
        # A learning-rate or batch-size finder has trained before, and has put the weights back.
        self.reducer.reset()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._comm_thread is not None:
            self._comm_thread.fail(exception)

    def teardown(self) -> None:
        # May come after an exception, and before any setup.
        if self._comm_thread is not None:
            self._comm_thread.close()
            self._comm_thread = None
        super().teardown()

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
