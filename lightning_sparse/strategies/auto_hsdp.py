"""The strategy that chooses the exchange between replicas of a sharded model by measuring while it trains.

    Trainer(strategy="auto_hsdp", num_nodes=2, devices=8)  # two replicas, each sharded over the devices of a node

Replicas average gradients, as with dense_hsdp, or exchange updates, as with topk_hsdp. `choice` measures and chooses.
"""

# Lightning's strategy and ours are the next bases:
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_sparse._compat import backend_name
from lightning_sparse.hooks.handshakes import report_errors_to_peers
from lightning_sparse.hooks.stock import average_shards
from lightning_sparse.shards import check_averages
from lightning_sparse.strategies.auto import AutoStrategy
from lightning_sparse.strategies.choice import BASIS, KEY, NEXT_STEP, TOPK, Loaded
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.training import Training
from lightning_sparse.trained import SHARDED, TRAINED


class AutoHSDP(AutoStrategy):
    """Trains replicas of a model that FSDP2 shards, and measures how replicas exchange fastest.

    Replicas average gradients, or exchange a small part of each optimizer update. Training begins with averages on a
    fast link between replicas, and with updates on a slow one. It decides within about a hundred steps, or two hundred
    if their times vary. It looks again every hundred steps.

    Args:
        replicas: number of replicas; "auto" is the number of nodes. The other ranks shard each replica.
        tensor_parallel_size: number of ranks in the mesh dimension "tensor_parallel" of each replica.
        broadcast_buffers: whether buffers are broadcast from the first replica after each exchange of updates.
        save_distributed_checkpoint: see Lightning's ModelParallelStrategy. False writes one file with all weights,
            without residuals.
        **kwargs: `seed`, `overlap`, and the further options of Lightning's ModelParallelStrategy:
            `process_group_backend` and `timeout`.

    Raises:
        ValueError: an option of a method, which this strategy chooses itself.
    """

    _kind, _stock = "hsdp", "dense"
    _chosen = (*AutoStrategy._chosen, "bucket_cap_mb")

    def __init__(
        self,
        *,
        replicas: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        broadcast_buffers: bool = False,
        save_distributed_checkpoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            broadcast_buffers=broadcast_buffers,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **kwargs,
        )

    def _candidates(self, base: StrategyOptions, trainer: Any, ranks: int) -> Mapping[str, StrategyOptions | None]:
        with report_errors_to_peers():  # now, and not in the middle of training
            check_averages(self.model, self._group)
        if not self._exchanges_updates(base, ranks):
            return {}
        most = SHARDED if self.world_size > ranks else TRAINED["adamw"][TOPK]
        found = self._updates(base, trainer, ranks, most)
        if backend_name(self._group, self.root_device) == "nccl":  # it would run beside the collectives of FSDP2
            found.pop(NEXT_STEP, None)
        return found

    def _use_stock(self, name: str, trainer: Any) -> None:
        reducer = self._auto.reducer_options
        self._options = StrategyOptions("dense", None, {}, reducer, exchange="update", overlap="none")
        self._reducer = self._exchanger = None
        self._begin_between_replicas(self.model, self.optimizers)
        stock = average_shards(self.model, self.optimizers, reducer, self._group, self._timeout)
        training = Training(stock, self.optimizers)
        training.note = self._note
        self._begin_fit(trainer, training, "")

    def _load_residuals(self, info: Any, checkpoint: Mapping[str, Any], path: Any) -> None:
        # Lightning loads a sharded model after the exchange has begun.
        before, has_residuals = self.choice, info is not None and "replicas" in info
        self._auto.loaded = Loaded(checkpoint.get(KEY, ""), has_residuals, checkpoint.get(BASIS))
        self._auto.choose_first()
        if self.choice != before:
            self._replace(self.lightning_module.trainer)
        elif self.global_rank == 0:
            self.inform(f"It begins with {self.choice}, chosen by {self._auto.reason}.")
        if has_residuals and self._auto.options[self.choice] is None:
            self.warn_of_lost_residuals(path, f"{self.choice} trains")
        else:
            super()._load_residuals(info, checkpoint, path)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add the strategy's name."""
        description = "FSDP2 within replicas, which average gradients or exchange updates, by measurement."
        if "auto_hsdp" not in strategy_registry:
            strategy_registry.register("auto_hsdp", cls, description=description)
