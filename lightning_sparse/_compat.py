"""The only module that uses private or version-dependent APIs of torch and Lightning.

Each entry names the versions that it applies to. It has a test in tests/test_compat.py. `make matrix` runs these tests
with the oldest and the newest supported versions.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

OURS = "lightning_sparse"
"""The description of this package's process groups."""
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers every rank's tensor into one tensor. New in torch 2.13, which deprecates `all_gather_into_tensor`."""


def default_store() -> Any:
    """Return the store of the default process group. Private in torch 2.8 to 2.15."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def new_named_group(parent: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group of a parent's ranks under the given name. Private in torch 2.8 to 2.15.

    `torch.distributed.new_group` derives a group's name from the number of groups that a rank has created before. If
    ranks differ in this number, they wait for each other under different names until the timeout.

    With NCCL, the group's kernels have a higher priority than kernels of backward that wait for the device, as this
    package's kernels have. The group creates a new communicator. If the default group is bound to a device, it would
    split its communicator instead. A split requires a call on all of its ranks, and no pending collective.
    """
    c10d: Any = dist.distributed_c10d
    ranks = dist.get_process_group_ranks(parent)
    options: dict[str, Any] = {}
    if "nccl" in dist.get_backend_config(parent):
        options["backend_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["backend_options"]._timeout = timeout
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            dist.get_rank(parent),
            ranks,
            dist.get_backend(parent),
            default_store().clone(),  # gloo locks a client until all ranks have arrived
            name,
            timeout=timeout,
            device_id=device,
            group_desc=OURS,
            **options,
        )
    finally:
        world.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def is_open(group: dist.ProcessGroup) -> bool:
    """Return whether a process group still exists. Private in torch 2.8 to 2.15."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map  # type: ignore[attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of a group's backend for tensors of a device, such as "gloo". Private in torch 2.8 to 2.15.

    `dist.get_backend` returns one name for the whole group, which may have a backend for each type of device.
    """
    return str(group._get_backend(device).name())


def compares_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether torch compares the operations of a group's ranks, as with TORCH_DISTRIBUTED_DEBUG=DETAIL.

    In this mode torch counts all operations, including point-to-point operations. Private in torch 2.8 to 2.15.
    """
    wrapper = getattr(dist.distributed_c10d, "_ProcessGroupWrapper", None)  # type: ignore[attr-defined]
    return wrapper is not None and isinstance(group._get_backend(device), wrapper)


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives for tensors of a device. Private in torch 2.8 to 2.15."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps it. Torch 2.8's wrapper has no options.
    timeout: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
    return timeout


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a group's later collectives. Private in torch 2.8 to 2.13."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Make autograd call a function at the end of the running backward pass. Private in torch 2.8 to 2.15.

    Raises:
        RuntimeError: no backward pass is running.
    """
    Variable._execution_engine.queue_callback(callback)


def ddp_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters whose gradients DDP exchanges. Private in torch 2.8 to 2.15."""
    return list(ddp._module_parameters)


def reduced_count(ddp: DistributedDataParallel) -> int:
    """Return the number of parameters whose gradients DDP exchanges, as of wrapping. Private in torch 2.8 to 2.15."""
    return int(ddp._get_ddp_logging_data()["num_parameter_tensors"])


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return the states of a model's communication hooks that are Python functions. Private in torch 2.8 to 2.15."""
    return [state for _, state in ddp._comm_hooks]


def hook_name(ddp: DistributedDataParallel) -> str | None:
    """Return the name of a model's communication hook, in Python or built into torch. Private in torch 2.8 to 2.15."""
    name: str | None = ddp._get_ddp_logging_data().get("comm_hook")
    return name


def have_hooks_called(optimizer: Optimizer) -> None:
    """Make torch call hooks around an optimizer's steps from now on. Private in torch 2.8 to 2.15.

    A wrapper's constructor may defer this to the first `zero_grad`, and a schedule may hold the `step` from before.
    """
    optimizer._patch_step_function()  # type: ignore[no-untyped-call]
    step = optimizer.step
    if not getattr(step, "hooked", False):
        own: Any = Optimizer.profile_hook_step(lambda _, *args, **kwargs: step(*args, **kwargs))
        # A schedule marks the `step` that it holds, and warns if the mark is missing.
        own.__dict__.update(getattr(step, "__dict__", {}), hooked=True, __wrapped__=step)
        optimizer.step = MethodType(own, optimizer)  # type: ignore[method-assign]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that are called after an optimizer's steps. Private in torch 2.8 to 2.15."""
    return list(optimizer._optimizer_step_post_hooks.values())  # type: ignore[attr-defined]


def hooks_before_steps(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before an optimizer's steps, global ones first. Private in torch 2.8 to 2.15."""
    own: dict[int, Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return [*_global_optimizer_pre_hooks.values(), *own.values()]


def register_first(optimizer: Optimizer, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that runs after an optimizer's steps, before all earlier hooks. Private in torch 2.8 to 2.15."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def keep_last(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """Let a hook run after all other hooks before an optimizer's steps. Call it in a global hook before a step.

    Private in torch 2.8 to 2.15.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if next(reversed(hooks.values()), None) != hook:
        for key in [key for key, each in hooks.items() if each == hook]:
            hooks[key] = hooks.pop(key)


def step_without_hooks(optimizer: Optimizer) -> None:
    """Call an optimizer's step without its hooks and without global hooks. Private in torch 2.8 to 2.15."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def collectives_so_far() -> int:
    """Return the number of collectives that all process groups but ours have started. Private in torch 2.8 to 2.15."""
    groups: Any = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()  # type: ignore[attr-defined]
    return sum(int(each._get_sequence_number_for_group()) for each in groups if each.group_desc != OURS)


def in_backward() -> bool:
    """Return whether this thread is in a backward pass. Private in torch 2.8 to 2.15."""
    return int(torch._C._current_graph_task_id()) >= 0


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks on its backward pass. Private in torch 2.8 to 2.15."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def gradient_hooks(param: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that run after a parameter's gradient is accumulated. Private in torch 2.8 to 2.15."""
    return list((param._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer calls hooks. An object that only resembles an optimizer does not.

    Private in torch 2.8 to 2.15.
    """
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def in_ddp_forward() -> bool:
    """Return whether a DistributedDataParallel is in its forward pass. Private in torch 2.8 to 2.15; may be removed."""
    active = getattr(DistributedDataParallel, "_get_active_ddp_module", None)
    return active is not None and active() is not None


def abandon_capture(pool: tuple[int, int], device: torch.device) -> None:
    """Repair torch after a capture of a CUDA graph that failed to end. Private in torch 2.8 to 2.15.

    Torch's allocator still counts it as running, so memory would be freed late, and `empty_cache` would fail. Before
    torch 2.13, the random generator counts it, too, until another capture ends. It would raise an error when it is
    used. Call this in the stream of the capture.
    """
    with contextlib.suppress(RuntimeError):  # the allocator may know that it has ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    graph.capture_end()


def version(tensor: Tensor) -> int:
    """Return a number that increases whenever a tensor is changed in place. Private in torch 2.8 to 2.15."""
    number: int = tensor._version
    return number


def preserve_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Let autograd ignore changes of tensors in the block, as DDP does for buffers. Private in torch 2.8 to 2.15."""
    tracked = tuple(x for x in tensors if not x.is_inference())  # others have no version
    autograd: Any = torch.autograd
    return autograd._unsafe_preserve_version_counter(tracked)  # type: ignore[no-any-return]


def step_depth(optimizer: Optimizer) -> int:
    """Return the number of nested `step` calls of an optimizer: its own, and that of a base class.

    Torch calls hooks around the `step` of each class that has an instance. Private in torch 2.8 to 2.15.
    """
    depth, frame = 0, sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        hooked = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        depth += hooked and frame.f_locals.get("self") is optimizer
    return depth


def initializes_state() -> bool:
    """Return whether torch's functions for distributed checkpoints have called the running optimizer step.

    They create the state of an optimizer without one by a step at a learning rate of 0, when they save or load it. The
    name of their module is public. The step is private in torch 2.8 to 2.15.
    """
    frame: Any = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
    return False


def shard_offset(x: Tensor) -> tuple[int, ...]:
    """Return the index of a shard's first element in a DTensor; zeros for a plain tensor. Private in torch 2.8 to 2.15.

    FSDP2 and tensor parallelism together place shards in another order, which the function knows.
    """
    if not hasattr(x, "to_local"):
        return (0,) * x.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    of: Any = x
    _, offset = compute_local_shape_and_global_offset(of.shape, of.device_mesh, of.placements)
    return tuple(offset)


def delayed_parameters(ddp: DistributedDataParallel) -> Any:
    """Return the parameters that DDP reduces without its hook, if any. Private in torch 2.8 to 2.15; may be removed."""
    return getattr(ddp, "_delay_all_reduce_params", None)


def steps_in_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether torch's `_apply_optimizer_in_backward` steps a parameter of DDP. Private in torch 2.8 to 2.15."""
    return any(hasattr(param, "_in_backward_optimizers") for param in ddp.module.parameters())


def delay_static_graph_again(strategy: Any) -> None:
    """Let Lightning's DDPStrategy, which wraps a model anew, have a static graph's first gradients reduced once more.

    Private in Lightning 2.5 and 2.6.
    """
    strategy._pl_static_graph_delay_done = False


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Return the options that a DDPStrategy passes to DistributedDataParallel. Private in Lightning 2.5 and 2.6."""
    options: dict[str, Any] = strategy._ddp_kwargs
    return options


def pending_error(io: Any) -> Future[BaseException | None] | None:
    """Return a future for AsyncCheckpointIO's error that is set when all current saves have ended; None without saves.

    Its executor has one thread, so jobs end in the order of submission. Private in Lightning 2.5 and 2.6.
    """
    executor = getattr(io, "_executor", None)
    return None if executor is None else executor.submit(lambda: io._error)


def steps_taken(trainer: Any) -> int:
    """Return the number of batches after which an optimizer stepped, the step number of Lightning's loggers.

    Private in Lightning 2.5 and 2.6. In contrast, `trainer.global_step` counts the steps of every optimizer.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logs_next_step(trainer: Any) -> bool:
    """Return whether Lightning's loggers record the next step. Private in Lightning 2.5 and 2.6."""
    return bool(trainer._logger_connector.should_update_logs)


def accumulates(trainer: Any) -> bool:
    """Return whether the next batch ends without an optimizer step. Private in Lightning 2.5 and 2.6."""
    return bool(trainer.fit_loop._should_accumulate())


def replace_signal_functions(
    trainer: Any, on_sigterm: Callable[[int, Any], None], on_requeue: Callable[[int, Any], None]
) -> Callable[[], None]:
    """Replace the functions that Lightning calls on SIGTERM and on SLURM's requeue signal; return the undo function.

    In Lightning 2.6 the original function for SIGTERM is a collective. A second collective asks in each batch whether
    rank 0 received SIGTERM; it is disabled too. Call this function when fit starts, before Lightning sets its handlers.
    Private in Lightning 2.5 and 2.6.
    """
    connector, loop, broadcast = trainer._signal_connector, trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn = on_sigterm, on_requeue
    if hasattr(loop, broadcast):
        setattr(loop, broadcast, lambda: None)

    def undo() -> None:
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(connector).pop(name, None)
        vars(loop).pop(broadcast, None)

    return undo


def save_and_requeue(trainer: Any) -> None:
    """Save a checkpoint and requeue the SLURM job, as Lightning does on SIGUSR1. Private in Lightning 2.5 and 2.6."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)


def receive_sigterm(trainer: Any) -> None:
    """Make Lightning end training after the batch, as if SIGTERM had just arrived. Private in Lightning 2.5 and 2.6."""
    trainer._signal_connector.received_sigterm = True


def seed_workers(trainer: Any, loader: Any) -> None:
    """Make the workers of a loader set their seeds, if the user wants it. Lightning itself may do so later.

    It changes only loaders without a `worker_init_fn`. Private in Lightning 2.5 and 2.6.
    """
    connector: Any = sys.modules[type(trainer._data_connector).__module__]
    connector._auto_add_worker_init_fn(loader, trainer.global_rank)


def sigterm_exception(trainer: Any) -> type[SystemExit]:
    """Return the exception with which Lightning ends training on SIGTERM.

    Its module is private in Lightning 2.5 and 2.6.
    """
    loop = type(trainer.fit_loop.epoch_loop)
    module = next(sys.modules[base.__module__] for base in loop.__mro__ if base.__name__ == "_TrainingEpochLoop")
    exception: type[SystemExit] = module.SIGTERMException  # type: ignore[attr-defined]
    return exception


def use_device_mesh(strategy: Any, mesh: Any) -> None:
    """Replace the mesh of Lightning's ModelParallelStrategy and of its module. Private in Lightning 2.5 and 2.6."""
    strategy._device_mesh = mesh
    if (module := getattr(strategy, "lightning_module", None)) is not None:  # a Trainer's strategy
        module._device_mesh = mesh


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by `plain_name`."""
    return {plain_name(name): param for name, param in model.named_parameters()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and checkpoint_wrapper.

    Private in torch 2.8 to 2.15.
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def ignored_by_ddp(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that DDP is to leave to each rank. Private in torch 2.8 to 2.15."""
    return {plain_name(name) for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
