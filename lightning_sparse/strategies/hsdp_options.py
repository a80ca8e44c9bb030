"""The strategies for models that FSDP2 shards: options, the mesh of ranks, and the exchange between replicas.

Ranks form a mesh of replicas, of shards and of tensor-parallel ranks. FSDP2 averages gradients within a replica. Ranks
that hold the same shard in different replicas exchange the updates of their optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import set_group_timeout, use_device_mesh
from lightning_sparse._lightning import Mixin
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.comm.broadcast import broadcast_differing
from lightning_sparse.hooks import UpdateExchanger, agree, report_errors_to_peers
from lightning_sparse.methods import METHODS, Method, method_options
from lightning_sparse.options import Granularity, OnNonFinite, Overlap, ReducerOptions, check, check_optional
from lightning_sparse.replica_checkpoint import load_state, read_replica, together, write_replica
from lightning_sparse.shards import average_gradients, is_any_sharded, keep_gradients, local, reshard, unsharded
from lightning_sparse.strategies.strategy_options import StrategyOptions

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""Supported values of the Trainer's and Fabric's `precision`."""

UNSUPPORTED = {
    "hierarchical": "FSDP2 averages gradients within a replica already. Leave it out.",
    "exchange": "replicas exchange updates. Leave it out; or train with strategy='topk_ddp' to exchange gradients.",
    "find_unused_parameters": "it is an option of DistributedDataParallel. Leave it out.",
    "start_method": "FSDP2 does not support ranks that are forked or spawned. Leave it out, and start the program with "
    "torchrun, SLURM, or by itself.",
    "data_parallel_size": "it is the number of ranks by replicas and tensor_parallel_size. Set replicas.",
}
"""Options of other strategies, and the reasons why these strategies do not have them."""

OF_UPDATES = {"clip_norm": None, "on_nonfinite": "raise", "broadcast_buffers": False}
"""Options that have no effect if replicas average gradients, and their defaults."""


class HSDPOptions(Mixin):  # type: ignore[misc]
    """Trains replicas of a model that FSDP2 shards. Replicas exchange a small part of each optimizer update.

    It is Lightning's ModelParallelStrategy with one more dimension of the mesh. The model is sharded over the mesh of
    one replica:

        fully_shard(layer, mesh=mesh["data_parallel"])

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
            each. None is 8, 4 and 2 times the density, 15 exchanges each, if no density is given and the method has no
            `UpdateRule`; otherwise none.
        density_warmup_steps: number of exchanges for each density of `density_warmup`.
        seed: the seed of the method's random choices.
        on_nonfinite: reaction to a NaN or an infinity in a gradient, except with "dense". "raise": an error on all
            ranks. "skip": this replica alone skips its optimizer step, and it sends a part of its residual.
        clip_norm: largest 2-norm of the replica's gradient. Trainer's gradient_clip_val and `fabric.clip_gradients`
            take that of the mean gradient, and multiply it by the root of the number of replicas.
        local_steps: number of optimizer steps before each exchange of updates; None takes the method's, mostly 1.
        overlap: "next_step" exchanges during the next step, for links of high latency; not over NCCL.
        broadcast_buffers: whether buffers are broadcast from the first replica after each exchange, as BatchNorm
            needs it. At the start they always are.
        save_distributed_checkpoint: see Lightning's ModelParallelStrategy. False writes one file with all weights,
            without residuals.
        process_group_backend: see Lightning's ModelParallelStrategy.
        timeout: time to wait for other ranks; see Lightning's ModelParallelStrategy.
        **options: further options of a method that is given by name, such as `value_format="int8"` of "topk".
    """

    _sharding: ClassVar[str]
    """Advice to shard a model, for an error message."""

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
        # A subclass has further options of Lightning's strategy.
        makers = [cls for cls in type(self).__mro__ if "__init__" in vars(cls) and issubclass(cls, HSDPOptions)]
        known = {name for cls in makers for name in inspect.signature(cls.__init__).parameters}
        own = {name: options.pop(name) for name in method_options(type(self).__name__, known, method, options)}
        if check("overlap", overlap) == "backward":
            raise ValueError(
                f"{type(self).__name__}(overlap='backward'): updates of shards are exchanged after backward. Leave "
                f"overlap out, or set overlap='next_step'."
            )
        self._check_sizes()
        check_optional("timeout", timeout)
        reducer = ReducerOptions.of(given)
        self._options = StrategyOptions(
            method, density, own, reducer, exchange="update", local_steps=local_steps, overlap=overlap
        )
        for option, default in OF_UPDATES.items() if self._is_dense else ():
            if given[option] != default:
                raise ValueError(
                    f"{type(self).__name__}('dense', {option}={given[option]!r}): replicas average gradients in "
                    f"backward, as FSDP2 does, and this option is of an exchange of updates. Leave {option} out. To "
                    f"clip gradients, set gradient_clip_val of the Trainer, or call fabric.clip_gradients."
                )
        super().__init__(  # type: ignore[call-arg]  # sizes are "auto", because this strategy makes the mesh
            data_parallel_size="auto",
            tensor_parallel_size="auto",
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **({} if timeout is None else {"timeout": timeout}),
            **options,
        )
        self._begin()

    def _check_sizes(self) -> None:
        for name, or_auto in (("replicas", "'auto' or "), ("tensor_parallel_size", "")):
            value = self._arguments[name]
            if value == "auto" and or_auto:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{type(self).__name__}({name}={value!r}): give {or_auto}a positive integer.")

    # Ranks:

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        with report_errors_to_peers():
            shape = self._mesh_shape()
        # Ranks with other meshes would wait for each other in the making of their groups.
        agree({"mesh": f"{shape[0]} replicas of {shape[1]} × {shape[2]} ranks"}, self.root_device, self._timeout)
        names = "replicate", "data_parallel", "tensor_parallel"
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        for group in mesh.get_all_groups():
            set_group_timeout(group, self._timeout)  # the default of a mesh is 30 minutes over gloo
        use_device_mesh(self, mesh)

    def _mesh_shape(self) -> tuple[int, int, int]:
        """Return the numbers of replicas, of shards and of tensor-parallel ranks.

        Raises:
            ValueError: the precision is not supported, or the numbers do not fit the number of ranks.
        """
        # Lightning checks the precision only of some instances of ModelParallelStrategy, and never of plugins.
        if (precision := str(getattr(self, self._plugin_name).precision)) not in PRECISIONS:
            raise ValueError(
                f"{type(self).__name__} with precision={precision!r}: choose {' or '.join(PRECISIONS)}; or leave it "
                f"out, and give fully_shard a MixedPrecisionPolicy."
            )
        replicas, tensor_parallel = self._arguments["replicas"], self._arguments["tensor_parallel_size"]
        if replicas == "auto":
            replicas = self.num_nodes
        if self.world_size % (replicas * tensor_parallel):
            raise ValueError(
                f"{type(self).__name__}(replicas={replicas}, tensor_parallel_size={tensor_parallel}): their product "
                f"does not divide the {self.world_size} ranks. Each replica has the same number of ranks; give a "
                f"divisor of {self.world_size // tensor_parallel or 1} as replicas, or leave it out for one per node."
            )
        return replicas, self.world_size // (replicas * tensor_parallel), tensor_parallel

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of parts of the data, and this rank's: tensor-parallel ranks share one."""
        replica, shard = (self.device_mesh.get_local_rank(name) for name in ("replicate", "data_parallel"))
        replicas, shards, _ = self.device_mesh.shape
        return {"num_replicas": replicas * shards, "rank": replica * shards + shard}

    @property
    def _group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model in different replicas."""
        return self.device_mesh["replicate"].get_group()  # type: ignore[no-any-return]

    @property
    def _replica(self) -> int:
        return int(self.device_mesh.get_local_rank("replicate"))

    # The exchange:

    @property
    def _is_dense(self) -> bool:
        """Whether replicas average their gradients, as FSDP2 does with a mesh of two dimensions."""
        options, method = self._options, self._options.method
        exchanges_updates = method.update_rule is not None or (options.local_steps or 1) > 1
        return not method.compresses and not exchanges_updates and options.overlap == "none"

    def _begin_between_replicas(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer]
    ) -> UpdateExchanger | None:
        """Begin the exchange of updates, or let replicas average gradients. All ranks call it.

        Args:
            model: the sharded model.
            optimizers: its optimizers.

        Returns:
            The exchanger; None if replicas average gradients.

        Raises:
            ValueError: the model is not sharded over the mesh of one replica.
        """
        options, group = self._options, self._group
        with report_errors_to_peers():
            reshard(model)
            self._check_sharded(model)
            if self._is_dense:
                average_gradients(model, group)
            else:
                keep_gradients(model)  # an earlier exchange of this model may have averaged them
        self._agree_on("gradient" if self._is_dense else "update", options.method, model, optimizers)
        if self._is_dense:
            tensors = [local(x).detach() for x in (*model.parameters(), *model.buffers())]
            broadcast_differing(ProcessGroupComm(group), tensors, self.root_device)
            return None
        return self._make_exchanger(  # type: ignore[no-any-return]
            model,
            optimizers,
            *options.for_updates(options.method, self.device_mesh.shape[0]),
            local_steps=options.local_steps,
            overlap=options.overlap,
            buffers="always" if self._arguments["broadcast_buffers"] else "start",
            group=group,
            timeout=self._timeout,
        )

    def _check_sharded(self, model: torch.nn.Module) -> None:
        """Raise ValueError if ranks of a replica would train copies of a parameter apart, or if nothing is sharded.

        Lightning neither saves nor loads a model without shards, also if a replica has one rank.
        """
        ranks = dist.get_process_group_ranks(self.device_mesh["data_parallel"].get_group())
        if len(ranks) > 1 and (name := unsharded(model, ranks)):
            raise ValueError(
                f"{type(self).__name__} got a {type(model).__name__} whose {name!r} is not sharded over the mesh "
                f"dimension 'data_parallel', the ranks {ranks} here, so its copies there would differ. {self._sharding}"
            )
        if not is_any_sharded(model):
            raise ValueError(
                f"{type(self).__name__} got a {type(model).__name__} that is not sharded, so Lightning could not save "
                f"it. Call fully_shard also if a replica has one rank. {self._sharding}"
            )

    @property
    def _note(self) -> str:
        """A sentence about the mesh, for the summary."""
        replicas = self.device_mesh.shape[0]
        ranks = self.world_size // replicas
        parts = f"{replicas} replicas of {ranks} ranks each" if replicas > 1 else f"One replica of {ranks} ranks"
        return f" {parts}; numbers are of the first rank's shards."

    # Checkpoints:

    def load_checkpoint(self, path: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does.

        Raises:
            ValueError: the checkpoint is one file, which lacks the state of an optimizer.
        """
        try:
            return super().load_checkpoint(path, *args, **kwargs)  # type: ignore[misc, no-any-return]
        except IndexError as error:  # of Lightning's, without a text
            if Path(path).is_dir():
                raise
            raise ValueError(
                f"{str(path)!r} has no state of an optimizer: it kept none, as SGD without momentum, or the checkpoint "
                f"has fewer optimizers. Lightning cannot resume from such a file. Start from its weights alone; and to "
                f"resume later, save with save_distributed_checkpoint=True."
            ) from error

    @property
    def _is_distributed(self) -> bool:
        """Whether each rank writes its shards into a checkpoint."""
        return bool(self._arguments["save_distributed_checkpoint"])

    def _inform_of_no_residuals(self, path: Any, remedy: str) -> None:
        """Log that a checkpoint with optimizers gets no residuals."""
        if self.global_rank == 0 and not self._is_dense:
            self.inform(
                f"{str(path)!r} holds the weights and the first replica's optimizer, and no residuals. {remedy}"
            )

    def _save(
        self,
        path: Any,
        trained: tuple[torch.nn.Module, UpdateExchanger] | None,
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Save a checkpoint. All ranks call it.

        Args:
            path: path of the checkpoint.
            trained: the model and its exchange, to save the state in which replicas differ; None saves none.
            write: Lightning's save. It gets the checkpoint's additional entries.

        Raises:
            OSError: a rank could not write its part.
        """
        path, folder = self.broadcast((sidecars.absolute(path), Path(path)))  # Lightning takes it as it was given
        steps: list[Callable[[Mapping[str, Any]], Any]]
        steps = [lambda entry: write({sidecars.KEY: entry} if entry else {})]
        if self._is_distributed:
            # Lightning makes the folder, too, but an error of one rank would leave the others in a collective.
            def remove(_: Any) -> None:
                if folder.is_file():
                    folder.unlink(missing_ok=True)  # another rank may have removed it

            steps = [remove, lambda _: folder.mkdir(parents=True, exist_ok=True), *steps]
        if trained is not None:
            write_replica(path, *trained, *steps)
            return
        for step in steps:
            together(partial(step, {}), OSError)
        sidecars.prune(path)  # of a checkpoint that this one replaces

    def _load_replica(
        self, path: Any, info: Mapping[str, Any] | None, model: torch.nn.Module, exchange: UpdateExchanger
    ) -> None:
        """Load the state in which replicas differ, after Lightning has loaded a checkpoint. All ranks call it.

        Args:
            path: path of the checkpoint.
            info: its entry under `sidecars.KEY`, if it has one.
            model: the model.
            exchange: the exchange of its updates.

        Raises:
            ValueError: see `read_replica`.
        """
        exchange.reducer.reset()
        path = sidecars.absolute(self.broadcast(path))
        if info is None or "replicas" not in info:  # of another strategy
            if self.global_rank == 0:
                self.inform(f"{path!r} holds no residuals of shards: they start at 0.")
            return
        load_state(together(partial(read_replica, path, info, model, exchange), ValueError), model, exchange)

    # Names:

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add `<method>_hsdp` of each method that makes a mean."""
        for name, spec in METHODS.items():
            if spec.aggregator.averages and (registered := f"{name}_hsdp") not in strategy_registry:
                what = "average gradients" if name == "dense" else f"exchange compressed updates: {name}"
                description = f"FSDP2 within replicas, which {what}."
                strategy_registry.register(registered, cls, description=description, method=name)
