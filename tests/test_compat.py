"""The promises of `_compat` hold for the installed torch and Lightning; `make matrix` tests other versions."""

import ast
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning_fabric.utilities.seed import pl_worker_init_function
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lightning_sparse
from lightning_sparse import _compat
from lightning_sparse._lightning import SUPPORTED
from lightning_sparse.comm.store import in_thread
from tests.processes import run_ranks
from tests.support.tiers import full, later, tiers

PACKAGE = Path(lightning_sparse.__file__).parent
CPU = torch.device("cpu")
FOREACH = {
    *("_foreach_add_", "_foreach_copy_", "_foreach_mul", "_foreach_mul_", "_foreach_norm", "_foreach_sub"),
    *("_foreach_sub_", "_foreach_zero_"),
}
"""Names of torch that are private, but used throughout torch.optim. Each is tested below."""
INHERITED = {"_actions", "_get", "_timeout"}
"""Names that this package's classes inherit from a parser, a command line or a strategy."""


def test_step_hooks():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    hook = optimizer.register_step_post_hook(test_step_hooks)
    assert _compat.step_hooks(optimizer) == [test_step_hooks]
    hook.remove()
    assert _compat.step_hooks(optimizer) == []


def test_hooks_before_steps():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    own = optimizer.register_step_pre_hook(test_step_without_hooks)
    all_optimizers = register_optimizer_step_pre_hook(test_hooks_before_steps)
    assert _compat.hooks_before_steps(optimizer)[-2:] == [test_hooks_before_steps, test_step_without_hooks]
    own.remove()
    all_optimizers.remove()
    assert _compat.hooks_before_steps(optimizer) == []
    assert _compat.hooks_before_steps(nn.Linear(2, 2)) == []  # type: ignore[arg-type]


def test_have_hooks_called():
    """Hooks run around the step of a class unknown to torch, and of an object whose step a schedule has replaced."""
    called = []
    for replaced in (False, True):

        class New(torch.optim.Optimizer):
            def __init__(self, params):
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
                self.param_groups = [{"params": params, "lr": 1.0}]

            def step(self, closure=None):
                called.append("step")

        optimizer = New([nn.Parameter(torch.ones(1))])
        if replaced:
            torch.optim.lr_scheduler.ConstantLR(optimizer)
        for _ in range(2):  # once is enough
            _compat.have_hooks_called(optimizer)
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        optimizer.step()
    assert called == ["before", "step", "after"] * 2


def test_a_schedule_from_before_does_not_take_the_step_for_one_of_the_users():
    """A schedule warns if its mark on the optimizer's step is missing."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.__class__ = type("Wrapper", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    _compat.have_hooks_called(optimizer)
    optimizer.step()
    schedule.step()  # a warning is an error here


def test_step_without_hooks():
    param = nn.Parameter(torch.ones(2))
    optimizer, called = torch.optim.SGD([param], 0.5), []
    optimizer.register_step_post_hook(lambda *_: called.append("own"))
    hook = register_optimizer_step_post_hook(lambda *_: called.append("global"))
    param.grad = torch.ones(2)
    _compat.step_without_hooks(optimizer)
    hook.remove()
    assert param.tolist() == [0.5, 0.5]
    assert called == []


def test_in_backward():
    found, x = [_compat.in_backward()], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(_compat.in_backward()))
    x.sum().backward()
    assert found == [False, True]


def test_has_backward_hooks():
    module = nn.Linear(2, 2)
    assert not _compat.has_backward_hooks(module)
    for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
        hook = register(lambda *_: None)
        assert _compat.has_backward_hooks(module)
        hook.remove()


def test_collectives_so_far():
    assert _compat.collectives_so_far() == 0

    def count(rank):
        before = _compat.collectives_so_far()
        dist.all_reduce(torch.zeros(1))
        ours = _compat.new_named_group(dist.group.WORLD, "ours", timedelta(seconds=20))
        for group in (dist.new_group(), ours):
            dist.all_reduce(torch.zeros(1), group=group)
        return _compat.collectives_so_far() - before

    assert run_ranks(2, count) == [2, 2], "all but ours"


def test_gradient_hooks():
    param = nn.Linear(2, 2).weight
    assert _compat.gradient_hooks(param) == []
    hook = param.register_post_accumulate_grad_hook(test_gradient_hooks)
    assert _compat.gradient_hooks(param) == [test_gradient_hooks]
    hook.remove()
    assert _compat.gradient_hooks(param) == []


def test_register_first():
    optimizer, called = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), []
    optimizer.register_step_post_hook(lambda *_: called.append("early"))
    handle = _compat.register_first(optimizer, lambda *_: called.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert called == ["first", "early", "early"]


def test_keep_last():
    optimizer, called = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), []

    def mine(*_):
        called.append("mine")

    optimizer.register_step_pre_hook(mine)
    before = register_optimizer_step_pre_hook(lambda each, *_: _compat.keep_last(each, mine))
    optimizer.register_step_pre_hook(lambda *_: called.append("later"))
    optimizer.step()
    before.remove()
    assert called == ["later", "mine"]


def test_changes_within_preserve_versions_do_not_count():
    weight, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    with torch.inference_mode():
        loaded = torch.ones(2)
    result = (weight * frozen).sum()  # saves `frozen` for backward
    with _compat.preserve_versions([frozen, loaded]), torch.inference_mode():
        torch._foreach_copy_([frozen, loaded], [torch.zeros(2), torch.zeros(2)])
    result.backward()
    assert frozen.tolist() == loaded.tolist() == [0.0, 0.0]


def test_version_grows():
    x = torch.zeros(3)
    before = _compat.version(x)
    x.add_(1)
    assert _compat.version(x) > before


def test_has_step_hooks():
    assert _compat.has_step_hooks(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    assert not _compat.has_step_hooks(nn.Linear(2, 2))  # type: ignore[arg-type]


class Deeper(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_step_depth():
    torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)  # from now on its class calls hooks
    optimizer, found = Deeper(nn.Linear(2, 2).parameters(), 0.1), []
    optimizer.register_step_pre_hook(lambda *_: found.append(_compat.step_depth(optimizer)))
    optimizer.register_step_post_hook(lambda *_: found.append(_compat.step_depth(optimizer)))
    optimizer.step()
    assert found == [1, 2, 2, 1]
    assert _compat.step_depth(optimizer) == 0


class Asked(nn.Linear):
    def forward(self, x):
        self.found = _compat.in_ddp_forward()
        return super().forward(x)


def asked(_: int) -> list[bool]:
    model = Asked(2, 2)
    model(torch.zeros(1, 2))
    alone = model.found
    DistributedDataParallel(model)(torch.zeros(1, 2))
    return [alone, model.found, _compat.in_ddp_forward()]


def test_in_ddp_forward():
    assert run_ranks(1, asked) == [[False, True, False]]


def gathered(rank: int) -> list[float]:
    rows = torch.empty(4)
    _compat.all_gather_single(rows, torch.full((2,), float(rank)), group=dist.group.WORLD, async_op=True).wait()
    return rows.tolist()


def test_all_gather_single_gathers_in_rank_order():
    assert run_ranks(2, gathered) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_all_gather_single_is_not_deprecated():
    # Calling the old name in torch 2.13 and later warns at every exchange.
    assert not hasattr(_compat.all_gather_single, "__deprecated__")


def process_group(rank: int) -> tuple[str, timedelta, bytes]:
    store = _compat.default_store()
    dist.barrier()
    if rank == 0:
        store.set("key", "from rank 0")
    return _compat.backend_name(dist.group.WORLD, CPU), _compat.group_timeout(dist.group.WORLD, CPU), store.get("key")


def debugged(rank: int) -> list[bool]:
    found = [_compat.compares_collectives(dist.group.WORLD, CPU)]
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    found.append(_compat.compares_collectives(dist.new_group(), CPU))
    return found


def test_compares_collectives():
    assert run_ranks(1, debugged) == [[False, True]]


def test_the_process_group_says_its_backend_its_timeout_and_its_store():
    assert run_ranks(2, process_group, timeout=17) == [("gloo", timedelta(seconds=17), b"from rank 0")] * 2


def with_another_timeout(rank: int) -> tuple[timedelta, timedelta]:
    group = dist.new_group([0])
    before = _compat.group_timeout(group, CPU)
    _compat.set_group_timeout(group, timedelta(seconds=23))
    return before, _compat.group_timeout(group, CPU)


def test_a_new_group_has_its_own_timeout():
    ((before, after),) = run_ranks(1, with_another_timeout, timeout=17)
    assert before != timedelta(seconds=17)
    assert after == timedelta(seconds=23)


def answered_while_waiting(rank: int) -> bool:
    if rank == 1:
        dist.barrier()
        _compat.default_store().clone().set("awaited", "")
        return True
    waiting = threading.Thread(target=_compat.default_store().clone().get, args=("awaited",))
    waiting.start()
    asked = not _compat.default_store().clone().check(["never set"])
    dist.barrier()
    waiting.join()
    return asked


def test_a_store_answers_while_another_connection_waits():
    assert run_ranks(2, answered_while_waiting) == [True, True]


def test_autograd_calls_back_at_the_end_of_backward():
    called = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: _compat.at_end_of_backward(lambda: called.append(x.grad.item())))
    y.backward()
    assert called == [2.0]
    with pytest.raises(RuntimeError):
        _compat.at_end_of_backward(lambda: None)


class WithAnIgnored(nn.Module):
    _ddp_params_and_buffers_to_ignore = ("ignored",)

    def __init__(self) -> None:
        super().__init__()
        self.taken = nn.Parameter(torch.zeros(2))
        self.ignored = nn.Parameter(torch.zeros(3))


def test_the_parameters_that_ddp_is_to_ignore():
    net = WithAnIgnored()
    net._ddp_params_and_buffers_to_ignore = ["_orig_mod.ignored"]
    assert _compat.ignored_by_ddp(net) == {"ignored"}
    assert _compat.ignored_by_ddp(nn.Linear(1, 1)) == set()


def parameters_of_ddp(rank: int) -> tuple[list[int], int, int, list[int]]:
    plain = DistributedDataParallel(WithAnIgnored())
    net = WithAnIgnored()
    net.late = nn.Parameter(torch.zeros(4))
    delaying = DistributedDataParallel(
        net, delay_all_reduce_named_params=[("late", net.late)], param_to_hook_all_reduce=net.taken
    )
    exchanged = [param.numel() for param in _compat.ddp_parameters(plain)]
    delayed = [param.numel() for param in _compat.delayed_parameters(delaying)]
    return exchanged, _compat.reduced_count(plain), len(_compat.delayed_parameters(plain) or ()), delayed


def test_ddp_says_which_parameters_its_hook_gets():
    # The reducer also has the ignored parameter, because it belongs to the model itself.
    assert run_ranks(1, parameters_of_ddp) == [([2], 2, 0, [4])]


def stepped_in_backward(rank: int) -> list[bool]:
    models = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    _apply_optimizer_in_backward(torch.optim.SGD, models[1].parameters(), {"lr": 0.1})
    return [*map(_compat.steps_in_backward, models)]


def test_optimizers_that_step_in_backward_are_found():
    assert run_ranks(1, stepped_in_backward) == [[False, True]]


class Steps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Loggers(pl.loggers.Logger):
    """Remembers at which steps Lightning logs."""

    name = version = ""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_hyperparams(self, *args: object) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.steps.append(step)


class Asks(pl.Callback):
    def __init__(self) -> None:
        self.foreseen: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if _compat.logs_next_step(trainer) and not _compat.accumulates(trainer):
            self.foreseen.append(_compat.steps_taken(trainer))

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: object) -> None:
        module.log("seen", 1.0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning", "ignore:.*LeafSpec:UserWarning")
def test_the_steps_at_which_lightning_logs_are_known_before_they_begin(tmp_path):
    logger, asks = Loggers(), Asks()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=6,
        accumulate_grad_batches=2,
        log_every_n_steps=3,
        logger=logger,
        callbacks=[asks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Steps(), torch.utils.data.DataLoader([torch.zeros(1)] * 12))
    assert asks.foreseen == [2, 5]
    assert sorted(set(logger.steps)) == asks.foreseen


def test_lightnings_ddp_has_what_the_strategy_overrides_and_reads():
    assert callable(DDPStrategy._register_ddp_hooks)
    assert isinstance(DDPStrategy(timeout=timedelta(seconds=17))._timeout, timedelta)


def test_foreach_functions_take_what_they_are_given():
    xs = [torch.full((2,), 3.0), torch.full((1,), 4.0, dtype=torch.float16)]
    assert [norm.item() for norm in torch._foreach_norm(xs, float("inf"))] == [3.0, 4.0]
    norms = torch._foreach_norm(xs, 2, torch.float32)
    assert {norm.dtype for norm in norms} == {torch.float32}
    assert norms[0].item() == pytest.approx(18**0.5)
    torch._foreach_add_(xs[:1], [torch.ones(2)], alpha=2.0)
    torch._foreach_mul_(xs, 2.0)
    assert [x.tolist() for x in xs] == [[10.0, 10.0], [8.0]]
    torch._foreach_mul_(xs, list(torch.tensor([0.5, 0.25]).unbind()))  # scalars for tensors of several elements
    assert [x.tolist() for x in xs] == [[5.0, 5.0], [2.0]]
    scaled = torch._foreach_mul(xs, list(torch.tensor([3.0, 2.0]).unbind()))
    assert [x.tolist() for x in scaled] == [[15.0, 15.0], [4.0]]
    assert [x.tolist() for x in torch._foreach_sub(xs, [torch.ones(2), torch.ones(1)])] == [[4.0, 4.0], [1.0]]
    torch._foreach_sub_(xs[:1], [torch.ones(2)])
    torch._foreach_copy_(xs[1:], [torch.full((1,), 7.0)])  # from another dtype
    assert [x.tolist() for x in xs] == [[4.0, 4.0], [7.0]]
    torch._foreach_zero_(xs)
    assert not any(x.any() for x in xs)


def named_group(rank: int) -> tuple[str, list[int], bool, bool]:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # one group more than the other rank
    group = _compat.new_named_group(dist.group.WORLD, "a name of ours", timedelta(seconds=30))
    x = torch.tensor([rank + 1])
    dist.all_reduce(x, group=group)
    open_before = _compat.is_open(group)
    dist.destroy_process_group(group)
    return group.group_name, x.tolist(), open_before, _compat.is_open(group)


def test_a_group_has_the_name_it_is_given_whatever_groups_a_rank_has_made():
    assert run_ranks(2, named_group) == [("a name of ours", [3], True, False)] * 2


def group_of_absent_ranks(rank: int) -> bool:
    if rank == 0:
        make = partial(_compat.new_named_group, dist.group.WORLD, "a name of ours", timedelta(seconds=20))
        threading.Thread(target=make, daemon=True).start()
        time.sleep(1)
        call = in_thread(lambda: _compat.default_store().check(["any key"]), "check")
        return bool(wait([call], 5).done)
    return True


def test_while_a_group_waits_for_a_rank_other_threads_use_the_store():
    """Gloo holds the lock of its client until all ranks have arrived."""
    assert run_ranks(2, group_of_absent_ranks) == [True, True]


def group_of_a_bound_device(rank: int) -> tuple[list[object], bool]:
    c10d, world, asked = dist.distributed_c10d, dist.group.WORLD, []
    device = torch.device("cuda", 0)
    world.bound_device_id = device

    def passed_on(*args, device_id, **_):
        asked.extend([world.bound_device_id, device_id])
        raise ZeroDivisionError

    c10d._new_process_group_helper = passed_on
    with pytest.raises(ZeroDivisionError):
        _compat.new_named_group(world, "a name of ours", timedelta(seconds=30))
    return asked, world.bound_device_id == device


def test_a_group_does_not_split_the_communicator_of_the_default_one():
    """Lightning has bound a device to it, so a new group would split it. With a subset of ranks, that would hang."""
    assert run_ranks(1, group_of_a_bound_device) == [([None, torch.device("cuda", 0)], True)]


def hooks(rank: int) -> tuple[list[str], str | None, str | None]:
    bare, hooked = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    hooked.register_comm_hook("a state", default_hooks.allreduce_hook)
    return _compat.hook_states(hooked), _compat.hook_name(bare), _compat.hook_name(hooked)


def test_a_models_communication_hook_is_known():
    states, bare, hooked = run_ranks(1, hooks)[0]
    assert (states, bare) == (["a state"], None)
    assert "allreduce_hook" in hooked


def test_a_strategys_options_for_ddp_can_be_changed():
    strategy = DDPStrategy(bucket_cap_mb=3)
    _compat.ddp_options(strategy)["bucket_cap_mb"] = 4
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 4}


def test_a_strategy_delays_a_static_graph_again():
    strategy = DDPStrategy()
    assert strategy._pl_static_graph_delay_done is False
    strategy._pl_static_graph_delay_done = True
    _compat.delay_static_graph_again(strategy)
    assert strategy._pl_static_graph_delay_done is False


def test_the_error_of_asynchronous_saves_is_known_when_they_have_ended(tmp_path):
    class Failing(TorchCheckpointIO):
        def save_checkpoint(self, *args, **kwargs):
            raise OSError("disk full")

    io = AsyncCheckpointIO(Failing())
    assert _compat.pending_error(TorchCheckpointIO()) is None
    with contextlib.suppress(OSError):  # raised here already if the writing thread was fast
        io.save_checkpoint({}, tmp_path / "last.ckpt")
    assert str(_compat.pending_error(io).result()) == "disk full"


def test_private_names_of_others_stand_in_compat_alone():
    trees = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py") if file.name != "_compat.py"}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    ours = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    ours |= {node.id for _, node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    theirs = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file, node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ours | FOREACH | INHERITED
    ]
    assert not theirs, "torch and Lightning may change these: put each behind a function in _compat.py, with a test"


def test_initializes_state():
    """Torch creates the state of an optimizer by a step, when it saves or loads the state."""
    model, seen = nn.Linear(2, 2), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: seen.append(_compat.initializes_state()))
    state = get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    fresh.register_step_pre_hook(lambda *_: seen.append(_compat.initializes_state()))
    optimizer.zero_grad()
    set_optimizer_state_dict(model, fresh, state)
    assert seen == [True, False, True]


def test_abandon_capture(monkeypatch):
    """A GPU is needed to capture, so this test notes calls. The allocator may know that the capture has ended."""
    calls = []

    class Graph:
        capture_begin = staticmethod(lambda **options: calls.append("begin"))
        capture_end = staticmethod(lambda: calls.append("end"))

    def end_of_pool(device, pool):
        calls.append((device, pool))
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    assert torch._C._cuda_endAllocateToPool
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_of_pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    _compat.abandon_capture((0, 1), CPU)
    assert calls == [(None, (0, 1)), "begin", "end"]


def offsets(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(4, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    right = [_compat.shard_offset(torch.ones(2, 3)) == (0, 0)]
    for param in model.parameters():
        whole, part = param.full_tensor(), param.to_local()
        place = zip(_compat.shard_offset(param), part.shape, strict=True)
        right.append(torch.equal(whole[tuple(slice(start, start + size) for start, size in place)], part))
    return right


@later
def test_shard_offset():
    """Rows that are cut twice, columns, and a shard without rows."""
    assert run_ranks(4, offsets) == [[True] * 7] * 4


def test_use_device_mesh():
    """Lightning's own properties return the mesh."""
    mesh, module, strategy = object(), pl.LightningModule(), ModelParallelStrategy()
    strategy._lightning_module = module
    _compat.use_device_mesh(strategy, mesh)
    assert strategy.device_mesh is module.device_mesh is mesh
    fabrics = FabricModelParallelStrategy(lambda model, mesh: model)
    _compat.use_device_mesh(fabrics, mesh)
    assert fabrics.device_mesh is mesh


def test_each_entry_of_compat_is_tested_here():
    names = {name for name, value in vars(_compat).items() if getattr(value, "__module__", "") == _compat.__name__}
    here = inspect.getsource(inspect.getmodule(test_each_entry_of_compat_is_tested_here))
    assert names
    assert not {name for name in names | {"all_gather_single"} if f"_compat.{name}" not in here}


@later
def test_names_of_compiled_modules():
    net = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 3)), torch.nn.Linear(3, 1))
    assert "0._orig_mod.weight" in dict(net.named_parameters())
    found = _compat.parameters_by_name(net)
    assert [*found] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(map(torch.equal, found.values(), net.parameters()))


def test_names_of_modules_whose_activations_are_recomputed():
    net = torch.nn.Sequential(checkpoint_wrapper(torch.compile(torch.nn.Linear(2, 3))))
    ((name, _), _) = net.named_parameters()
    assert name != "0.weight"
    assert _compat.plain_name(name) == "0.weight"


def test_sigterm():
    run = pl.Trainer(accelerator="cpu", devices=1, barebones=True)
    loop, told, before = run.fit_loop.epoch_loop, [], signal.getsignal(signal.SIGTERM)
    note = lambda number, frame: told.append(number)  # noqa: E731
    undo = _compat.replace_signal_functions(run, note, note)
    try:
        run._signal_connector.register_signal_handlers()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
    finally:
        run._signal_connector.teardown()
        signal.signal(signal.SIGTERM, before)
    assert not run.received_sigterm
    _compat.receive_sigterm(run)
    assert run.received_sigterm
    if Version(pl.__version__) >= Version("2.6"):
        assert "_broadcast_sigterm_tensor" in vars(type(loop))
        loop._broadcast_sigterm_tensor()  # raises no SIGTERMException
    undo()
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    assert vars(run._signal_connector).keys().isdisjoint({"_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"})
    assert _compat.sigterm_exception(run) is SIGTERMException


def test_lightning_saves_and_requeues(monkeypatch, tmp_path):
    run = pl.Trainer(accelerator="cpu", devices=1, barebones=True, default_root_dir=tmp_path)
    saved = []
    monkeypatch.setattr(run, "save_checkpoint", saved.append)
    monkeypatch.setattr("pytorch_lightning.trainer.connectors.signal_connector.call", saved.append)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    _compat.save_and_requeue(run)
    assert saved == [str(tmp_path / "hpc_ckpt_1.ckpt"), ["scontrol", "requeue", "17"]]


def test_the_workers_of_a_loader_get_their_seeds(monkeypatch):
    run = pl.Trainer(accelerator="cpu", devices=1, barebones=True)
    loader = torch.utils.data.DataLoader([0])
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    _compat.seed_workers(run, loader)
    assert loader.worker_init_fn is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    _compat.seed_workers(run, loader)
    assert loader.worker_init_fn.func is pl_worker_init_function
    loader.worker_init_fn = print
    _compat.seed_workers(run, loader)
    assert loader.worker_init_fn is print


def imported_beside(folder: Path, **versions: str) -> subprocess.CompletedProcess[str]:
    """Import this package in an environment with the given versions of Lightning."""
    for package, number in versions.items():
        info = folder / f"{package}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    script = "import lightning_sparse.strategies as s; print([*s._modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)])}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@full
@pytest.mark.parametrize("number", tiers(["2.4.0", "2.6.3"], ["2.4.0"]))
def test_a_version_of_lightning_that_does_not_work_is_left_out_and_named(number, tmp_path):
    done = imported_beside(tmp_path, lightning=number)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['pytorch_lightning']\n"
    assert f"do not work with lightning.pytorch {number}, which is installed as well" in done.stderr


@full
def test_without_a_version_of_lightning_that_works_it_is_not_imported(tmp_path):
    done = imported_beside(tmp_path, lightning="2.4.0", pytorch_lightning="2.6.2")
    assert "and found pytorch_lightning 2.6.2 and lightning.pytorch 2.4.0: pip install -U" in done.stderr


def test_the_versions_of_lightning_are_those_of_the_requirements():
    text = "".join((PACKAGE.parent / file).read_text() for file in ("setup.cfg", "pyproject.toml"))
    required = re.findall(r"lightning(>=[\d.,!=]*\d)", text)
    assert [*map(SpecifierSet, required)] == [SpecifierSet(str(SUPPORTED))] * 2
