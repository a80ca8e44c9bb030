"""Training on a GPU: Lightning over NCCL and gloo, streams, no waiting of the host, the same bits in every run.

Tests that are meaningful without a GPU also run on the CPU, so that the tests themselves are tested.
"""

import importlib.util
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.timing import captured
from lightning_sparse import METHODS, RankFailure, SparseDDPStrategy, attach, method
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context
from lightning_sparse.hooks import exchange_gradients
from lightning_sparse.kernels import launch
from lightning_sparse.kernels.block_stats import add_with_stats_
from lightning_sparse.layout import Segment
from tests.integration.trainers import Batches, Watch, keeps_all, lost, trainer
from tests.processes import run_ranks
from tests.support.kernels import no_waiting
from tests.support.representatives import GRADIENTS
from tests.support.tiers import full

pytestmark = full  # `make gpu` runs it if there is a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
STEPS = 5
PATIENCE = float(os.environ.get("PATIENCE", 400))
"""Seconds that ranks may take. If Triton's cache is empty, 27 methods compile some 150 kernels."""
LOCAL_STEPS = 2
"""Local steps before each exchange, for methods with several. The last exchange, at the end of the fit, has one."""
WIDTH = {"cpu": 64, "cuda": 1100}
"""Width of the hidden layer. On CUDA the first weights are long enough for the kernel that adds and scans."""


def ranks(device: str, size: int, fn: Callable[..., Any], *args: Any, backend: str | None = None) -> list[Any]:
    """Run `fn(rank, device, *args)` in processes that can use the device. Raise a process's error."""
    start = "spawn" if device == "cuda" else "fork"  # CUDA does not survive a fork
    results = run_ranks(size, quietly, fn, device, *args, start=start, backend=backend, patience=PATIENCE, timeout=60)
    for result in results:
        assert result is not None, "a rank died"
        if isinstance(result, BaseException):
            raise result
    return results


def quietly(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")  # Lightning's advice on a toy run, and torch's on toy groups
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    # Each rank is a node with one device, the first: so two ranks can share it.
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank), LOCAL_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="tests")
    return fn(rank, *args)


def spawned(rank: int) -> list[float]:
    return ProcessGroupComm().all_reduce(torch.tensor([float(rank), 1.0])).tolist()


def test_a_spawned_rank():
    """How ranks start on CUDA."""
    assert run_ranks(1, spawned, start="spawn") == [[0.0, 1.0]]


def layers(device: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1024, WIDTH[device]), nn.ReLU(), nn.Linear(WIDTH[device], 32))


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(8, 1024, generator=generator) for _ in range(STEPS)]


def bits(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).cpu()


# Lightning.


class Net(pl.LightningModule):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = layers(device)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(rank: int, device: str, strategy: Any, nodes: int, precision: str) -> dict[str, Any]:
    net, watch = Net(device), Watch()
    accelerator = {"cpu": "cpu", "cuda": "gpu"}[device]
    options = {"accelerator": accelerator, "num_nodes": nodes, "precision": precision, "callbacks": [watch]}
    run = trainer(strategy, 1, **options)
    run.fit(net, Batches(batches(rank)))
    reducer = run.strategy.reducer
    elements = reducer.state_dict()["elements"]
    return {
        "weights": bits(net.parameters()),
        "sums": watch.on_host(),
        "state": {"elements": {key: {n: x.cpu() for n, x in kept.items()} for key, kept in elements.items()}},
        "steps": reducer.step,
        "backend": dist.get_backend(),
        "device": str(run.strategy.root_device),
    }


def alone(rank: int, device: str, name: str) -> list[dict[str, Any]]:
    precisions = ["32-true", "32-true", "bf16-mixed", "bf16-true"]
    return [fit(rank, device, f"{name}_ddp", 1, precision) for precision in precisions]


@on_both
@pytest.mark.parametrize("name", ["topk", "gaussiank"])
def test_lightning_with_one_rank(device, name):
    """Uses NCCL if there is a GPU. Nothing is lost, and a second run ends with the same bits."""
    (runs,) = ranks(device, 1, alone, name, backend=None if device == "cuda" else "gloo")
    for run in runs:
        assert (run["steps"], run["backend"]) == (STEPS, "nccl" if device == "cuda" else "gloo")
        assert run["device"].startswith(device)
        assert lost([run["sums"]], [run["state"]]) < 1e-6
        assert not torch.equal(run["weights"], bits(layers(device).parameters()))
    assert torch.equal(runs[0]["weights"], runs[1]["weights"])


class AdamNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fits_with_adamw(rank: int, device: str, size: int, fits: list[dict[str, Any]]) -> list[Tensor]:
    found = []
    for options in fits:
        net = AdamNet(device)
        backend = {} if size == 1 else {"process_group_backend": "gloo"}
        strategy = SparseDDPStrategy("topk", density=0.01, granularity="layer", **backend, **options)
        run = trainer(strategy, 1, accelerator={"cpu": "cpu", "cuda": "gpu"}[device], num_nodes=size)
        run.fit(net, Batches(batches(rank)))
        found.append(bits(net.parameters()))
    return found


@on_both
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("fits", [[{"overlap": "backward"}, {"overlap": "none"}], [{"overlap": "next_step"}] * 2])
def test_updates_are_exchanged_alike_in_each_fit(device, size, fits):
    """Within backward and after it, or during the next step. If there is a GPU, one rank uses NCCL. Two use gloo."""
    found = ranks(device, size, fits_with_adamw, size, fits, backend=None if device == "cuda" else "gloo")
    assert all(torch.equal(weights, found[0][0]) for each in found for weights in each)
    assert not torch.equal(found[0][0], bits(layers(device).parameters()))


class Overflowing(Net):
    """The first gradients overflow in fp16, until the scaler has lowered the loss scale."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return 1e5 * super().training_step(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6, momentum=0.9)


def with_a_loss_scale(rank: int, device: str, size: int) -> list[tuple[Tensor, float]]:
    backend = "nccl" if size == 1 else "gloo"
    found = []
    for strategy in (
        DDPStrategy(process_group_backend=backend),
        SparseDDPStrategy("dense", process_group_backend=backend),
    ):
        net = Overflowing(device)
        run = trainer(strategy, 1, accelerator="gpu", num_nodes=size, precision="16-mixed", max_epochs=4)
        run.fit(net, Batches(batches(rank)))
        scaler: Any = run.precision_plugin
        found.append((bits(net.parameters()), scaler.scaler.get_scale()))
    return found


@needs_gpu
@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_scale_skips_the_same_steps(size):
    """Gradients that overflow on any rank are skipped, as with stock DDP. One rank uses NCCL, two use gloo."""
    for (stock, scale), (weights, own_scale) in ranks("cuda", size, with_a_loss_scale, size):
        assert 1 <= scale == own_scale < 2**16
        assert torch.equal(stock, weights)
        assert not torch.equal(stock, bits(layers("cuda").parameters()))


class Classifier(pl.LightningModule):
    """A program of a user: a small network, with one of several features.

    Args:
        build: returns the network.
        step: calls the network.
        optimizer: the class of the optimizer, and its options.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = lambda: small(nn.LayerNorm(64)),
        step: Callable[[nn.Module, Tensor], Tensor] = lambda net, x: net(x),
        optimizer: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {}),
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.step, self.optimizer, self.losses = build(), step, optimizer, list[Tensor]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.step(self.net, batch).float(), batch[:, :8].argmax(1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind, options = self.optimizer
        made: torch.optim.Optimizer = kind(self.parameters(), 3e-3, **options)
        return made


def small(norm: nn.Module) -> nn.Module:
    """Return a network with a norm and dropout."""
    return nn.Sequential(nn.Linear(64, 64), norm, nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))


def convolutional() -> nn.Module:
    """Return a network whose weights are channels_last."""
    head = (nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 8))
    net: nn.Module = nn.Sequential(nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 16, 3, padding=1), *head)
    return net.to(memory_format=torch.channels_last)


def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    """Call a network and compute its activations again in backward."""
    result: Tensor = checkpoint(net, x, use_reentrant=False)
    return result


ADAMW = torch.optim.AdamW
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fused": ({"optimizer": (ADAMW, {"fused": True})}, {}, {}),
    "capturable": ({"optimizer": (ADAMW, {"capturable": True})}, {}, {}),
    "amsgrad": ({"optimizer": (ADAMW, {"amsgrad": True})}, {}, {}),
    "nadam": ({"optimizer": (torch.optim.NAdam, {})}, {}, {}),
    "rmsprop": ({"optimizer": (torch.optim.RMSprop, {})}, {}, {}),
    "compiled": ({"build": lambda: torch.compile(small(nn.LayerNorm(64)))}, {}, {}),
    "activations computed again": ({"step": checkpointed}, {}, {}),
    "channels_last": ({"build": convolutional}, {}, {}),
    "SyncBatchNorm": ({"build": convolutional}, {}, {"sync_batchnorm": True}),
    "clipped": ({}, {}, {"gradient_clip_val": 0.5}),
    "accumulated": ({}, {}, {"accumulate_grad_batches": 2}),
    "local steps": ({}, {"local_steps": 2}, {}),
    "with the next step": ({}, {"overlap": "next_step"}, {}),
    "after backward": ({}, {"overlap": "none"}, {}),
}
"""Options of the module, of the strategy and of the Trainer."""
ON_CUDA_ONLY = {"capturable", "SyncBatchNorm"}


def programs(rank: int, device: str, size: int, precision: str) -> dict[str, tuple[Tensor, float, float]]:
    found = {}
    inputs = torch.randn(120, 16, 64, generator=torch.Generator().manual_seed(rank))
    backend = "nccl" if size == 1 and device == "cuda" else "gloo"
    for name, (of_module, of_strategy, of_trainer) in PROGRAMS.items():
        if device == "cpu" and name in ON_CUDA_ONLY:
            continue
        net = Classifier(**of_module)
        strategy = SparseDDPStrategy("topk", density=0.05, process_group_backend=backend, **of_strategy)
        accelerator = {"cpu": "cpu", "cuda": "gpu"}[device]
        run = trainer(strategy, 1, accelerator=accelerator, num_nodes=size, precision=precision, **of_trainer)
        run.fit(net, Batches([*inputs]))
        losses = torch.stack(net.losses).cpu()
        found[name] = bits(net.parameters()), float(losses[:10].mean()), float(losses[-10:].mean())
    return found


@on_both
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("half", [False, True])
def test_programs_of_users_train(device, size, half):
    """The loss falls, and all ranks end with the same weights."""
    precision = {"cpu": "bf16-mixed", "cuda": "16-mixed"}[device] if half else "32-true"
    first, *others = ranks(device, size, programs, size, precision, backend=None if device == "cuda" else "gloo")
    for name, (weights, before, after) in first.items():
        assert after < before - 0.1, (name, before, after)
        assert all(torch.equal(weights, other[name][0]) for other in others), name


def over_gloo(rank: int, device: str, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: fit(rank, device, over_gloo_strategy(name), 2, "32-true") for name in names}


def over_gloo_strategy(name: str) -> SparseDDPStrategy:
    local_steps = LOCAL_STEPS if method(name).local_steps > 1 else None
    return SparseDDPStrategy(name, local_steps=local_steps, process_group_backend="gloo")


SOME = ["topk", "gaussiank", "int4", "powersgd", "sparseloco"]
"""One of each way to communicate: all methods take longer than a GPU may be at hand."""


@on_both
@pytest.mark.parametrize("names", [SOME, [name for name in METHODS if name not in SOME]], ids=["some", "others"])
def test_lightning_with_two_ranks_over_gloo(device, names):
    """Both on the same device, if it is a GPU."""
    results = ranks(device, 2, over_gloo, names, backend=None if device == "cuda" else "gloo")
    for name in names:
        runs = [result[name] for result in results]
        exchanges = math.ceil(STEPS / LOCAL_STEPS) if method(name).local_steps > 1 else STEPS
        assert all((run["steps"], run["backend"]) == (exchanges, "gloo") for run in runs), name
        assert all(run["device"].startswith(device) for run in runs)
        assert torch.equal(runs[0]["weights"], runs[1]["weights"]), name
        if keeps_all(name) and method(name).update_rule is None:  # `Watch` adds up gradients
            assert lost([run["sums"] for run in runs], [run["state"] for run in runs]) < 1e-6, name


# Plain DDP.


def wait_a_little(device: str) -> None:
    """Keep the current stream or the thread busy for so long that code that does not wait for it overtakes it."""
    if device == "cpu":
        time.sleep(0.01)
    else:
        torch.cuda._sleep(50_000_000)  # cycles: some ten milliseconds


def train(
    device: str,
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    autocast: bool = False,
    may_wait: bool = False,
    late: str = "",
    granularity: str = "bucket",
    bucket_cap_mb: float = 25,
) -> Tensor:
    """Train, after two steps to warm up without any wait of the host unless it `may_wait`, and return all weights.

    Args:
        device: "cpu" or "cuda".
        name: the method.
        dtype: of the parameters.
        autocast: whether to calculate in bf16.
        may_wait: whether the host may wait for the device.
        granularity: see `attach`.
        bucket_cap_mb: of DDP.
        late: the part that is delayed in every step: "training", between forward and backward, or the "thread", before
            each segment.
    """
    warnings.simplefilter("ignore")
    net = layers(device).to(device, dtype)
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    density = 0.01 if "density" in METHODS[name].options else None
    reducer = attach(ddp, name, density=density, granularity=granularity)
    if late == "thread":
        reduce_segment_ = reducer.reduce_segment_

        def reduce_late_(*args: Any) -> None:
            wait_a_little(device)
            reduce_segment_(*args)

        reducer.reduce_segment_ = reduce_late_  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    inputs = [batch.to(device, dtype) for batch in batches(0)]

    def step(batch: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = ddp(batch).pow(2).mean()
        if late == "training":
            wait_a_little(device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in inputs[:2]:
        step(batch)
    with no_waiting("cpu" if may_wait else device):
        for batch in inputs[2:]:
            step(batch)
    assert reducer.step == STEPS
    return bits(net.parameters())


def in_several_ways(rank: int, device: str, name: str) -> dict[str, Tensor]:
    kinds = {"fp32": {}, "bf16-mixed": {"autocast": True}, "bf16-true": {"dtype": torch.bfloat16}}
    return {f"{kind} {run}": train(device, name, **options) for kind, options in kinds.items() for run in range(2)}


@on_both
@pytest.mark.parametrize("name", GRADIENTS)
def test_no_step_waits_and_runs_are_bit_identical(device, name):
    (runs,) = ranks(device, 1, in_several_ways, name, backend="nccl" if device == "cuda" else "gloo")
    for kind in ("fp32", "bf16-mixed", "bf16-true"):
        assert torch.equal(runs[f"{kind} 0"], runs[f"{kind} 1"]), kind
        assert bool(runs[f"{kind} 0"].isfinite().all())


def held_up(rank: int, device: str) -> list[Tensor]:
    small = {"granularity": "layer", "bucket_cap_mb": 0.01}  # many segments and buckets
    return [train(device, "topk", late=late, **small) for late in ("", "thread", "training")]


@on_both
def test_streams_wait_for_each_other(device):
    """Whoever is late: the result is the same to the last bit."""
    (runs,) = ranks(device, 1, held_up, backend="nccl" if device == "cuda" else "gloo")
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def waiting_on_the_device(rank: int, device: str) -> tuple[str, float]:
    ddp = DistributedDataParallel(layers(device))
    thread = exchange_gradients(ddp, method("topk", density=0.01))
    ddp(batches(rank)[0]).sum().backward()
    loss = ddp(batches(rank)[1]).sum()  # while there are two: DDP itself talks there
    if rank == 1:
        thread.session.fail(KeyError("mine"))
        return "", 0.0
    thread.session._done = lambda: False  # a collective on the device waits for another rank
    started = time.monotonic()
    while thread.is_consistent and time.monotonic() < started + 10:
        time.sleep(0.01)
    seconds = time.monotonic() - started
    try:
        loss.backward()
    except RankFailure as failure:
        return str(failure), seconds
    return "no error", seconds


def test_a_failure_is_noticed_while_the_device_waits():
    """The training thread may wait with it, so the communication thread has to look."""
    text, seconds = ranks("cpu", 2, waiting_on_the_device, backend="gloo")[0]
    assert text == "Rank 1 failed at step 1: KeyError: 'mine'"
    assert seconds < 3


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def with_each_choice(rank: int, device: str) -> dict[str, tuple[Tensor, list[str]]]:
    log = logging.getLogger(launch.__name__)
    log.setLevel(logging.INFO)
    find_spec = importlib.util.find_spec
    os.environ.pop(launch.KERNELS, None)
    results = {}
    for choice in ("default", "forced", "missing"):
        launch._has_triton.cache_clear()
        lines = Lines()
        log.handlers = [lines]
        if choice == "forced":
            os.environ[launch.KERNELS] = "torch"
        if choice == "missing":
            importlib.util.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
        results[choice] = train(device, "topk", may_wait=choice != "default"), lines.lines  # plain torch waits
        os.environ.pop(launch.KERNELS, None)
        importlib.util.find_spec = find_spec
    return results


@needs_triton
@on_both
def test_plain_torch_trains_to_the_same_weights(device):
    """Plain torch runs if it is forced, and if Triton is missing. A line of the log reports the latter."""
    (runs,) = ranks(device, 1, with_each_choice, backend="nccl" if device == "cuda" else "gloo")
    weights, lines = zip(*runs.values(), strict=True)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert [len(some) for some in lines] == ([1, 0, 1] if device == "cuda" else [0, 0, 0])
    if device == "cuda":
        assert "by Triton kernels" in lines[0][0]
        assert "Triton is missing" in lines[2][0]


def each_collective(rank: int, device: str) -> list[Any]:
    # A single rank skips collectives, so this calls the functions below that decision.
    comm = ProcessGroupComm()
    x = torch.arange(6.0, device=device)

    def talk() -> list[Any]:
        total, top, told = x.clone(), x.clone(), x.clone()
        comm._timed(0, comm._all_reduce, total, "sum")
        comm._timed(0, comm._all_reduce, top, "max")
        comm._timed(0, comm._broadcast, told, 0)
        gathered = comm._timed(0, comm._all_gather, x.view(2, 3))
        return [total, top, told, *gathered, comm._timed(0, comm._all_to_all_v, x, [6], [6])]

    talk()  # connects
    busy = True
    with no_waiting(device if dist.get_backend() == "nccl" else "cpu"):
        if device == "cuda":
            wait_a_little(device)
        results = talk()
        if device == "cuda":
            busy = not torch.cuda.current_stream().query()
    return [busy, *(result.tolist() for result in results)]


@on_both
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_collectives_do_not_stop_the_host(device, backend):
    if device == "cpu" and backend == "nccl":
        pytest.skip("NCCL is for GPUs")
    (seen,) = ranks(device, 1, each_collective, backend=backend)
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen[1:] == [values, values, values, [values[:3], values[3:]], values]
    assert seen[0] or backend == "gloo"


# Without a process group.


@needs_gpu
@needs_triton
@pytest.mark.parametrize("compressor", [TopK(0.001), TopK(0.01), GaussianK(0.001), GaussianK(0.01)], ids=str)
def test_a_step_can_be_captured_in_a_graph(compressor):
    """Adding, selecting, packing and taking out, over and over, as without the graph."""
    numel = (1 << 21) + 1
    segment = Segment(0, ("w",), ((numel,),), 0)
    grad, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")

    def step() -> tuple[Tensor, ...]:
        ctx = Context(segment, stats=compressor.block_stats(numel))
        u = add_with_stats_(residual, segment.bounds, [grad], 1.0, ctx.stats)
        payload, applied = compressor.compress(u, ctx)
        add_(u, applied, -1)
        return payload

    eager = [([part.clone() for part in step()], residual.clone()) for _ in range(4)]
    graph, payload = captured(step)
    residual.zero_()
    for parts, rest in eager:
        graph.replay()
        assert all(itertools.starmap(torch.equal, zip(parts, payload, strict=True)))
        assert torch.equal(rest, residual)
