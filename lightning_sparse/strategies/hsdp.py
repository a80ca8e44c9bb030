"""The strategy for models that FSDP2 shards, without its base class. Replicas of the model exchange updates.

    Trainer(strategy="topk_hsdp", num_nodes=2, devices=8)  # two replicas, each sharded over the devices of a node

Ranks form a mesh of replicas, of shards and of tensor-parallel ranks. FSDP2 averages gradients within a replica. Ranks
that hold the same shard in different replicas exchange the updates of their optimizers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.device_mesh import init_device_mesh

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import use_device_mesh
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.comm.broadcast import broadcast_differing
from lightning_sparse.hooks import UpdateExchanger
from lightning_sparse.methods import METHODS, Method, method_options
from lightning_sparse.options import Granularity, OnNonFinite, Overlap, ReducerOptions, check, check_optional
from lightning_sparse.reducer import Reducer
from lightning_sparse.replica_checkpoint import load_state, read_replica, together, write_replica
from lightning_sparse.shards import average_gradients, local
from lightning_sparse.strategies.base import SparseStrategy
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.trainer import TrainerCalls
from lightning_sparse.strategies.trainer_updates import TrainerUpdates

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ModelParallelStrategy
else:
    ModelParallelStrategy = object

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""Values of the Trainer's `precision` that this strategy supports."""


class SparseHSDP(TrainerCalls, SparseStrategy, ModelParallelStrategy):
    """Trains replicas of a model that FSDP2 shards. Replicas exchange a small part of each optimizer update.

    It is Lightning's ModelParallelStrategy with one more dimension of the mesh. The LightningModule shards its model in
    `configure_model`, over the mesh of one replica:

        fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    Args:
        method: a name in `lightning_sparse.METHODS`, or a custom `Method`, which makes a mean. With "dense" replicas
            average gradients, as FSDP2 does with a mesh of two dimensions.
        replicas: number of replicas; "auto" is the number of nodes. The other ranks shard each replica.
        tensor_parallel_size: number of ranks in the mesh dimension "tensor_parallel" of each replica.
        density: fraction of entries to send, in (0, 1]. None is 0.003 with two-bit values, after a density warm-up,
            and more with more than four replicas. A method with an `UpdateRule` keeps its default.
        granularity: the unit of compression: each "layer", each "bucket" of `bucket_cap_mb`, or the whole "model".
            Each is a unit of this rank's shards.
        bucket_cap_mb: size of a "bucket" in MiB.
        density_warmup: densities to use in turn before `density`, an epoch each, or `density_warmup_steps` exchanges
            each. None is 8, 4 and 2 times the density, 15 exchanges each, if no density is given; otherwise none.
        density_warmup_steps: number of exchanges for each density of `density_warmup`.
        seed: the seed of the method's random choices.
        on_nonfinite: reaction to a NaN or an infinity in a gradient. "raise": an error on all ranks. "skip": this
            replica alone skips its optimizer step, and it sends a part of its residual.
        clip_norm: largest 2-norm of the replica's gradient; the same as Trainer's gradient_clip_val.
        local_steps: number of optimizer steps before each exchange of updates; None takes the method's, mostly 1.
        overlap: "next_step" exchanges during the next step, for links of high latency; not over NCCL.
        broadcast_buffers: whether buffers are broadcast from the first replica after each exchange, as BatchNorm
            needs it. At the start they always are.
        save_distributed_checkpoint: see Lightning's ModelParallelStrategy. False writes one file with all weights,
            without residuals.
        process_group_backend: see Lightning's ModelParallelStrategy.
        timeout: time to wait for other ranks; see Lightning's ModelParallelStrategy.
        **options: further options of a method that is given by name, such as `value_format="int8"` of "topk".

    Attributes:
        reducer: the algorithm and its state for this rank's shards; it exists from the start of `fit`.
    """

    _class_name = "SparseHSDPStrategy"

    def __init__(
        self,
        method: str | Method = "topk",
        *,
        replicas: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        density: float | None = None,
        granularity: Granularity = "bucket",
        bucket_cap_mb: float = 25,
        density_warmup: Sequence[float] | None = None,
        density_warmup_steps: int | None = None,
        seed: int = 0,
        on_nonfinite: OnNonFinite = "raise",
        clip_norm: float | None = None,
        local_steps: int | None = None,
        overlap: Overlap = "none",
        broadcast_buffers: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        given = {**locals(), **options}
        self._arguments = {name: given[name] for name in given if name not in ("self", "options", "__class__")}
        for option, why in UNSUPPORTED.items():
            if option in options:
                raise ValueError(f"{type(self).__name__}({option}={options[option]!r}): {why}")
        known = inspect.signature(SparseHSDP.__init__).parameters
        own = {name: options[name] for name in method_options(type(self).__name__, known, method, options)}
        if check("overlap", overlap) == "backward":
            raise ValueError(
                f"{type(self).__name__}(overlap='backward'): updates of shards are exchanged after backward. Leave "
                f"overlap out, or set overlap='next_step'."
            )
        self._sizes = _positive(replicas, "replicas", or_auto=True), _positive(tensor_parallel_size)
        check_optional("timeout", timeout)
        reducer_options = ReducerOptions(
            granularity=granularity,
            bucket_cap_mb=bucket_cap_mb,
            density_warmup=density_warmup,
            density_warmup_steps=density_warmup_steps,
            seed=seed,
            on_nonfinite=on_nonfinite,
            clip_norm=clip_norm,
        )
        self._options = StrategyOptions(
            method, density, own, reducer_options, exchange="update", local_steps=local_steps, overlap=overlap
        )
        super().__init__(  # sizes are "auto", because this strategy makes the mesh
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **({} if timeout is None else {"timeout": timeout}),  # type: ignore[arg-type]
        )
        self._exchanger: UpdateExchanger | None = None  # of the running fit, or of the last one, for a checkpoint
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_exchanger": None}

    # Ranks:

    def setup_environment(self) -> None:
        super().setup_environment()
        self._destroys_groups_at_exit()
        replicas, tensor_parallel = self._sizes
        if replicas == "auto":
            replicas = self.num_nodes
        if self.world_size % (replicas * tensor_parallel):
            raise ValueError(
                f"{type(self).__name__}(replicas={replicas}, tensor_parallel_size={tensor_parallel}): their product "
                f"does not divide the {self.world_size} ranks. Each replica has the same number of ranks; give a "
                f"divisor of {self.world_size // tensor_parallel or 1} as replicas, or leave it out for one per node."
            )
        shape = replicas, self.world_size // (replicas * tensor_parallel), tensor_parallel
        names = "replicate", "data_parallel", "tensor_parallel"
        use_device_mesh(self, init_device_mesh(self.root_device.type, shape, mesh_dim_names=names))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of parts of the data, and this rank's: tensor-parallel ranks share one."""
        replica, shard = (self.device_mesh.get_local_rank(name) for name in ("replicate", "data_parallel"))
        replicas, shards, _ = self.device_mesh.shape
        return {"num_replicas": replicas * shards, "rank": replica * shards + shard}

    @property
    def _replica(self) -> int:
        return int(self.device_mesh.get_local_rank("replicate"))

    def setup(self, trainer: Any) -> None:
        # Lightning checks the precision only of an instance of ModelParallelStrategy, and lets 16-mixed pass.
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            raise ValueError(
                f"{type(self).__name__} with precision={precision!r}: choose {' or '.join(PRECISIONS)}; or leave it "
                f"out, and give fully_shard a MixedPrecisionPolicy."
            )
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._reducer = self._exchanger = None  # free the residuals of an earlier fit before allocating new ones
        model, options, mesh = self.model, self._options, self.device_mesh
        assert model is not None
        group = mesh["replicate"].get_group()
        self._agree_on("gradient" if self._is_dense else "update", options.method, model, self.optimizers)
        if self._is_dense:
            average_gradients(model, group)
            tensors = [local(x).detach() for x in (*model.parameters(), *model.buffers())]
            broadcast_differing(ProcessGroupComm(group), tensors, tensors[0].device)
            return
        self._exchanger = exchanger = UpdateExchanger(
            model,
            self.optimizers,
            *options.for_updates(options.method, mesh.shape[0]),
            local_steps=options.local_steps,
            overlap=options.overlap,
            forward_sync_buffers=self._arguments["broadcast_buffers"],
            group=group,
            timeout=self._timeout,
        )
        training = TrainerUpdates(self, exchanger)
        ranks = self.world_size // mesh.shape[0]
        training.note = f" {mesh.shape[0]} replicas of {ranks} ranks each; numbers are of the first rank's shards."
        self._begin_fit(trainer, training, "the strategy")

    @property
    def _is_dense(self) -> bool:
        """Whether replicas average their gradients, as FSDP2 does with a mesh of two dimensions."""
        options, method = self._options, self._options.method
        exchanges_updates = method.update_rule is not None or (options.local_steps or 1) > 1
        return not method.compresses and not exchanges_updates and options.overlap == "none"

    @property
    def reducer(self) -> Reducer:
        if self._is_dense:
            raise RuntimeError(
                f"{type(self).__name__}('dense') compresses nothing and has no reducer. Remove the callbacks of "
                f"lightning_sparse, or take another method."
            )
        return super().reducer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if isinstance(self.exchanger, UpdateExchanger):  # before FSDP2's collectives wait for a rank that has failed
            self.exchanger.raise_known_failure()

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self.exchanger, UpdateExchanger):  # FSDP2's collectives say that a rank has ended, but not why
            self.exchanger.fail_in_model(exception)
        super().on_exception(exception)

    # Checkpoints:

    @property
    def _is_distributed(self) -> bool:
        """Whether each rank writes its shards into a checkpoint."""
        return bool(self._arguments["save_distributed_checkpoint"])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.may_be_alone and not self._is_distributed:
            raise RuntimeError("The weights are not saved: training failed, and whole weights need all ranks.")
        return self._training.state_dict(super().lightning_module_state_dict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        exchange = self._exchanger
        if "optimizer_states" not in checkpoint or exchange is None or not self._is_distributed:
            if "optimizer_states" in checkpoint and self.global_rank == 0 and not self._is_dense:
                self.inform(
                    f"{str(filepath)!r} holds the weights and the first replica's optimizer, and no residuals. To "
                    f"resume bit for bit, save within fit, with save_distributed_checkpoint=True."
                )
            self._keep_first_replicas_optimizers(checkpoint)
            write()
            return
        if self.may_be_alone or (self.exchanger is not None and not exchange.drain()):
            log.warning(f"{str(filepath)!r} is not saved: training failed, and a save needs all ranks.")
            return

        def finish(entry: dict[str, Any]) -> None:
            checkpoint[sidecars.KEY] = entry
            self._keep_first_replicas_optimizers(checkpoint)
            write()

        assert self.model is not None
        write_replica(self.broadcast(sidecars.absolute(filepath)), self.model, exchange, finish)

    def _keep_first_replicas_optimizers(self, checkpoint: dict[str, Any]) -> None:
        """Remove the optimizers' states on other replicas' ranks.

        Torch's distributed checkpoint stores one copy of tensors with equal names, and would mix replicas.
        """
        if "optimizer_states" in checkpoint and self._is_distributed and self._replica:
            checkpoint["optimizer_states"] = []

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            sidecars.prune(sidecars.absolute(filepath), [])

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        exchange, info = self._exchanger, checkpoint.get(sidecars.KEY)
        if exchange is None or self.exchanger is None:  # weights for validation, for example
            return checkpoint
        exchange.reducer.reset()
        path = sidecars.absolute(self.broadcast(checkpoint_path))
        if info is None or "replicas" not in info:  # of another strategy
            if self.global_rank == 0:
                self.inform(f"{path!r} holds no residuals of shards: they start at 0.")
            return checkpoint
        assert self.model is not None
        state = together(partial(read_replica, path, info, self.model, exchange), ValueError)
        load_state(state, self.model, exchange)
        return checkpoint

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_hsdp` of each method that makes a mean."""
        for name, spec in METHODS.items():
            if spec.aggregator.averages and (registered := f"{name}_hsdp") not in strategy_registry:
                what = "average gradients" if name == "dense" else f"exchange compressed updates: {name}"
                description = f"FSDP2 within replicas, which {what}."
                strategy_registry.register(registered, cls, description=description, method=name)


UNSUPPORTED = {
    "hierarchical": "FSDP2 averages gradients within a replica already. Leave it out.",
    "exchange": "replicas exchange updates. Leave it out; or train with SparseDDPStrategy to exchange gradients.",
    "find_unused_parameters": "it is an option of DistributedDataParallel. Leave it out.",
    "data_parallel_size": "it is the number of ranks by replicas and tensor_parallel_size. Set replicas.",
}
"""Options of other strategies, and the reasons why this one does not have them."""


def _positive(value: Any, name: str = "tensor_parallel_size", or_auto: bool = False) -> Any:
    if (or_auto and value == "auto") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    choices = "'auto' or a positive integer" if or_auto else "a positive integer"
    raise ValueError(f"SparseHSDPStrategy({name}={value!r}): give {choices}.")
