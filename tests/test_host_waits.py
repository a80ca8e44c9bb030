"""On CUDA no step makes the host wait; tested without a GPU, with fake tensors.

torch's fake tensors have a device and a shape, but no values, so any code that reads a value raises an error. A
dispatch mode detects copies between host and device.
"""

import contextlib
import itertools
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import Method, Reducer, method
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm.worker import Worker
from lightning_sparse.compressors import GaussianK, Identity, TopK
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.order_statistics import TrimmedMean
from lightning_sparse.contrib.robust import Attacked
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.hooks.rates import Rates
from lightning_sparse.memory import NoMemory
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.fake_cuda import CUDA, Counting, HostWait, on_fake_cuda
from tests.support.tiers import one_in, tiers
from tests.support.update_training import ADAMW, OthersAdam

COPIES = ("aten::_to_copy", "aten::copy_", "aten::lift_fresh_copy")
STARTS_WITH_COUNT = ("aten::nonzero", "aten::masked_select", "aten::_unique", "aten::unique", "aten::bincount")


class NoWaiting(TorchDispatchMode):
    """Raises HostWait for operators that make the host wait."""

    def __init__(self):
        super().__init__()
        self.pinned = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        on_host = name == "aten::_local_scalar_dense" and args[0].device.type == "cpu"
        if (name == "aten::_local_scalar_dense" and not on_host) or name.startswith(STARTS_WITH_COUNT):
            raise HostWait(name)
        if name.startswith("aten::index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for index in (args[1] if isinstance(args[1], (list, tuple)) else ())
        ):
            raise HostWait("an index of bool")
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory") or (
            name in ("aten::copy_", "aten::detach") and any(args[0] is pinned for pinned in self.pinned)
        ):
            self.pinned.append(result)
        if name in COPIES:
            tensors = [x for x in (args[0], *args[1:2], result) if isinstance(x, torch.Tensor)]
            devices = {x.device.type for x in tensors}
            waits = not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:3] == (True,)))
            waits |= any(x.device.type == "cpu" and not any(x is pinned for pinned in self.pinned) for x in tensors)
            if len(devices) > 1 and waits:
                raise HostWait(f"{name} between {devices}")
        return result


@pytest.fixture
def fake_cuda():
    with on_fake_cuda() as launched:
        yield launched


SHAPES = {"w": (1200, 1000), "b": (1000,), "nothing": (0,), "v": (77, 3)}


def counting(made, size):
    inner = getattr(made.aggregator, "inter_node", made.aggregator)
    return Counting(size, first_may_wait=isinstance(inner, (OkTopK, ScaleCom)))


def steps(made, dtype, size, **options):
    """Take three steps with a large and a small parameter and an empty one; return the number of host reads."""
    grads = {key: torch.empty(shape, dtype=dtype, device=CUDA) for key, shape in SHAPES.items()}
    comm = counting(made, size)
    reducer = Reducer(made, comm, granularity="model", **options)
    reducer.setup(grads)
    with NoWaiting():
        for comm.steps in range(3):
            for segment in reducer.layout.segments:
                reducer.reduce_segment_(segment, [grads[key].view(-1) for key in segment.names])
            reducer.finish_step()
    return comm.fetched


OPTIONS = [
    ("topk", {"density": 0.001}),
    ("topk", {"density": 0.01, "index_format": "int32"}),
    ("topk", {"density": 0.01, "value_format": "bfloat16"}),
    ("topk", {"density": 0.01, "value_format": "int8"}),
    ("topk", {"density": 0.01, "value_format": "int4"}),
    ("gaussiank", {"density": 0.001}),
    ("gaussiank", {"density": 0.01}),
    ("gaussiank", {"density": 0.1}),
    ("topk", {"density": 0.01, "value_format": "int2"}),
    ("dgc", {"density": 0.001}),
    ("dgc", {"density": 0.05}),
    ("sidco", {"density": 0.001}),
    ("sidco", {"density": 0.1, "fit": "gamma"}),
    ("sidco", {"density": 0.01, "fit": "pareto"}),
    ("mstopk", {"density": 0.001}),
    ("mstopk", {"density": 0.1}),
    ("chunktopk", {"density": 0.001}),
    ("sparseloco", {}),
    ("randk", {"density": 0.001}),
    ("dense", {}),
]


def test_a_comparison_of_learning_rates_does_not_wait(fake_cuda):
    comm = Counting(2)
    optimizer = torch.optim.SGD([torch.empty(3, device=CUDA)], 0.1)
    with NoWaiting():
        Rates(comm, [optimizer], CUDA).compare()
    assert comm.fetched == 1


@pytest.mark.parametrize("size", tiers([1, 2, 4], [2]))
@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize(("name", "options"), tiers(OPTIONS, [OPTIONS[at] for at in (0, 4, 6, 11, 16, 18)]))
def test_no_step_waits(name, options, dtype, size, fake_cuda):
    made = method(name, **options)
    assert steps(made, dtype, size) == 3
    if name != "dense":
        scanned = made.compressor.block_stats(1_201_231) is not None
        assert {"_add_entries", "_add_to_many", *["_add_with_stats"] * scanned} <= set(fake_cuda)
    if name in ("chunktopk", "sparseloco"):
        assert "_chunktopk" in fake_cuda
    elif name not in ("randk", "dense"):
        assert {"_histogram", "_count", "_write", "_gather"} <= set(fake_cuda)


@pytest.mark.parametrize("size", tiers([1, 2, 5], [2]))
@pytest.mark.parametrize(
    "name",
    tiers(
        ["int4", "int8", "powersgd", "qsgd", "terngrad", "onebit", "signsgd", "signum", "efsignsgd", "median"],
        ["int4", "powersgd", "signsgd", "median"],
    ),
)
def test_no_step_of_quantizers_waits(name, size, fake_cuda):
    assert steps(method(name), torch.bfloat16, size) == 3


OPTIMIZERS = {
    "adamw": lambda params: ADAMW(params, 0.01),
    "adamw, fused": lambda params: ADAMW(params, 0.01, fused=True),
    "adamw, capturable": lambda params: ADAMW(params, 0.01, capturable=True),
    "adamw, rate on the device": lambda params: ADAMW(params, capturable=True),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "nadam, capturable": lambda params: torch.optim.NAdam(params, 0.01, capturable=True),
    "radam": lambda params: torch.optim.RAdam(params, 0.01),
    "radam, capturable": lambda params: torch.optim.RAdam(params, 0.01, capturable=True),
    "adamax, capturable": lambda params: torch.optim.Adamax(params, 0.01, capturable=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    "adam of others": lambda params: OthersAdam(params, 0.01),
}


def steps_of_updates(made, dtype, size, optimizer):
    """Take four steps and exchange the optimizer's updates; "b" is not trained in the first, nor "v" in the last."""
    model = torch.nn.Module()
    for key, shape in SHAPES.items():
        model.register_parameter(key, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=CUDA)))
        model.get_parameter(key).grad = torch.empty(shape, dtype=dtype, device=CUDA)
    name, optimizer = optimizer, OPTIMIZERS[optimizer](model.parameters())
    if name == "adamw, rate on the device":
        optimizer.param_groups[0]["lr"] = torch.empty((), device=CUDA)
    comm = counting(made, size)
    reducer = Reducer(made, comm, granularity="model", exchanged="update")
    updates = DeltaExchange(reducer, model, [optimizer])
    if made.delayed:
        ours = SimpleNamespace(device=CUDA, wait_stream=lambda other: None)
        updates = DeltaExchange(reducer, model, [optimizer], worker=Worker(ours, over_nccl=True))
    for comm.steps in range(4):
        model.b.grad = None if comm.steps == 0 else torch.empty_like(model.b)
        if comm.steps == 3:
            model.v.requires_grad_(False)
        with NoWaiting():
            updates.begin(optimizer)
        optimizer.step()
        if comm.steps == 3 and name == "nadam":  # as after a resume: torch moves all but the steps
            for state in optimizer.state.values():
                state["mu_product"] = torch.empty((), dtype=dtype, device=CUDA)
        with NoWaiting():
            updates.exchange(optimizer)
    return comm.fetched


UPDATES = [
    *(("topk", 0.01, optimizer, torch.float32, 2) for optimizer in OPTIMIZERS),
    ("topk", 0.01, "adamw", torch.bfloat16, 2),
    ("topk", 0.01, "adamw, fused", torch.bfloat16, 4),
    ("topk", 0.2, "adamw, fused", torch.float32, 1),
    ("topk", 0.2, "adamw, fused", torch.float32, 2),
    *((name, 0.01, "adamw, fused", torch.float32, 4) for name in ("gaussiank", "oktopk", "scalecom", "gtopk")),
    *((name, 0.01, "momentum", torch.float32, 2) for name in ("dgc", "memsgd", "randk")),
    *((name, None, "adamw, capturable", torch.float32, 2) for name in ("dense", "diloco", "sparseloco")),
]


@one_in(2)
@pytest.mark.parametrize(("name", "density", "optimizer", "dtype", "size"), tiers(UPDATES, UPDATES[:3]))
def test_no_step_of_updates_waits(name, density, optimizer, dtype, size, fake_cuda):
    made = method(name, density=density)
    assert steps_of_updates(made, dtype, size, optimizer) == 4 + isinstance(made.aggregator, (OkTopK, ScaleCom))
    if density == 0.01 and name == "topk" and optimizer != "adam of others":  # whose fake moments are not plain tensors
        assert {"_changes", "_add_with_payout", "_histogram", "_count", "_write", "_gather", "_clear"} <= set(fake_cuda)


@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("name", tiers(["topk", "gaussiank", "randk", "efsignsgd", "local_sgd"], ["topk", "local_sgd"]))
def test_no_delayed_step_waits(name, dtype, fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    made = method(name)
    made = replace(made, update_rule=(made.update_rule or UpdateRule()).changed(1, "next_step"))
    assert steps_of_updates(made, dtype, 2, "adamw, fused") == 4


def test_a_state_that_an_exchange_replaces_stays_for_its_stream(fake_cuda, monkeypatch):
    """A loaded state is from another stream, whose next kernels could take its memory while the exchange reads it."""
    recorded = set()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.add(id(x)))
    comm = Counting(2)
    reducer = Reducer(method("powersgd"), comm)
    grads = {"w": torch.empty(300, 400, device=CUDA)}
    reducer.setup(grads)
    (segment,) = reducer.layout.segments
    for comm.steps in range(2):
        before = [*reducer.states[segment.index].values()]
        reducer.reduce_segment_(segment, [grads["w"].view(-1)])
        reducer.finish_step()
        assert {id(x) for x in before} <= recorded
    assert len(before) == 2


@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
def test_a_delayed_exchange_keeps_nothing_of_what_it_has_sent(name, fake_cuda, monkeypatch):
    """The payload is not kept until the next step either, which raises the exchange's error."""
    sent = []
    exchange_later = DeltaExchange._exchange_later

    def started(updates, segments, pending):
        sent.extend(weakref.ref(part) for each in pending for part in each.exchange.precompressed[0])
        exchange_later(updates, segments, pending)

    monkeypatch.setattr(DeltaExchange, "_exchange_later", started)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    made = method(name)
    made = replace(made, update_rule=(made.update_rule or UpdateRule()).changed(1, "next_step"))
    assert steps_of_updates(made, torch.float32, 2, "adamw, fused") == 4
    assert sent
    assert not any(reference() is not None for reference in sent)


@pytest.mark.parametrize("attack", ["scale", "flip", "negate"])
@pytest.mark.parametrize(
    ("compressor", "aggregator"),
    tiers(
        [(Identity(), TrimmedMean()), (Sign(), MajorityVote()), (TopK(0.01), Mean())],
        [(TopK(0.01), Mean())],
    ),
)
def test_no_step_of_an_attacker_waits(compressor, aggregator, attack, fake_cuda, monkeypatch):
    monkeypatch.setattr("lightning_sparse.contrib.robust.attacked.share_of", lambda share, size: size)
    assert steps(Method(compressor, NoMemory(), Attacked(aggregator, attack, 0.4)), torch.float32, 2) == 3


@pytest.mark.parametrize("name", ["topk", "gaussiank", "gtopk", "randk"])
def test_no_step_of_a_warm_up_waits(name, fake_cuda):
    """The first density falls back to dense, and the next two do not."""
    steps(method(name), torch.float32, 4, density_warmup=(0.9, 0.01), density_warmup_steps=1)


COMPRESSORS = [
    TopK(0.001),
    TopK(0.01, "int32", "int4"),
    GaussianK(0.01),
    TopK(0.0001, "compact", "bfloat16"),
    Blocks(4, 64),
]
# One read of the status for each step. If the collectives depend on the step, one more in the first step.
AGGREGATORS = [
    (GlobalTopK(), {1: 3, 2: 3, 3: 3, 4: 3, 8: 3}),
    (OkTopK(), {1: 4, 2: 4, 5: 4}),
    (OkTopK(refresh=2), {4: 4}),
    (ScaleCom(), {1: 4, 2: 4, 3: 4}),
    (TwoPass(), {1: 3, 2: 3, 5: 3}),
    (TwoLevel(Mean(), ranks_per_node=2), {2: 3, 4: 3, 6: 3}),
    (TwoLevel(GlobalTopK(), ranks_per_node=2), {4: 3, 6: 3}),
    (TwoLevel(OkTopK(refresh=2), ranks_per_node=2), {4: 4}),
    (TwoLevel(ScaleCom(), ranks_per_node=3), {6: 4}),
    (TwoLevel(TwoPass(), ranks_per_node=2), {4: 3}),
]


CASES = [
    (compressor, aggregator, size, looks[size], dtype)
    for compressor, (aggregator, looks), dtype in itertools.product(
        COMPRESSORS, AGGREGATORS, (torch.float32, torch.bfloat16)
    )
    for size in looks
    # The dtype of gradients matters after the aggregator.
    if aggregator.supports(compressor)
    and (dtype == torch.float32 or compressor is COMPRESSORS[0])
    and (compressor not in COMPRESSORS[2:4] or not isinstance(aggregator, TwoLevel))
]
QUICK = [(GlobalTopK(), 3), (OkTopK(), 5)]


@one_in(2)
@pytest.mark.parametrize(
    ("compressor", "aggregator", "size", "looks", "dtype"),
    tiers(CASES, [case for case in CASES if case[0] is COMPRESSORS[1] and case[1:3] in QUICK]),
)
def test_no_step_of_other_aggregators_waits(compressor, aggregator, size, looks, dtype, fake_cuda):
    assert steps(Method(compressor, aggregator=aggregator), dtype, size) == looks


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: torch.tensor([1], device=CUDA),
        lambda x: x[x > 0],
        lambda x: math.isfinite(x.sum()),
        lambda x: x.unique(),
        lambda x: torch.empty(4).copy_(x),
        lambda x: torch.empty(4).copy_(x, non_blocking=True),  # not pinned
        lambda x: x.index_put_((x > 0,), x.new_ones(())),
    ],
)
def test_waits_are_seen(wait, fake_cuda):
    """Shows that the test above can fail."""
    x = torch.empty(4, device=CUDA)
    with NoWaiting(), pytest.raises((HostWait, RuntimeError)):
        wait(x)
    with NoWaiting():
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
