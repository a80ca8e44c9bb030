"""On CUDA no step of ours makes the host wait: seen without a GPU, with tensors that only say they are there.

torch's fake tensors know device and shape but no values, so whatever has to look at one raises; and what copies between
host and device is seen by a dispatch mode.
"""

import contextlib
import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import Method, Reducer, method
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, ScaleCom, TrimmedMean, TwoLevel, TwoPass
from lightning_sparse.aggregators.majority_vote import MajorityVote
from lightning_sparse.compressors import GaussianK, Identity, TopK, randk
from lightning_sparse.compressors.sign import Sign
from lightning_sparse.kernels import launch
from lightning_sparse.memory import NoMemory
from lightning_sparse.robust import Attacked
from tests.support.tiers import tiers
from tests.test_kernels import KERNELS, Echo, is_kernel

CUDA = torch.device("cuda", 0)
COPIES = ("aten::_to_copy", "aten::copy_", "aten::lift_fresh_copy")
STARTS_WITH_COUNT = ("aten::nonzero", "aten::masked_select", "aten::_unique", "aten::unique", "aten::bincount")


class HostWait(AssertionError):
    """An operation for which the host has to wait until the device is done."""


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait."""

    def __init__(self):
        super().__init__()
        self.pinned = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense" or name.startswith(STARTS_WITH_COUNT):
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


class Operations(TorchFunctionMode):
    """What tensors do in Python by operations; Python's own way to them asks for the device, which is not there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return taken(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            part = taken(x, index)
            return torch.ops.aten.copy_(part, value) if isinstance(value, torch.Tensor) else part.fill_(value)
        if func is torch.Tensor.contiguous and not args[0].is_contiguous():
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def taken(x, index):
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        if item is Ellipsis:
            dim = x.dim() - sum(isinstance(other, (slice, int)) for other in index)
        elif isinstance(item, slice):
            x, dim = torch.ops.aten.slice.Tensor(x, dim, item.start, item.stop), dim + 1
        elif item is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(item, int):
            x = x.select(dim, item)
        else:
            x = torch.ops.aten.index.Tensor(x, [None] * dim + [item])
    return x


class Counting(Echo):
    """What has to be looked at is counted, and may be looked at when the step is over; in the first step, where an
    aggregator may want to know that all ranks are on the same one, sooner if that is said.
    """

    def __init__(self, size, first_may_wait=False):
        super().__init__(size)
        self.first_may_wait = first_may_wait
        self.fetched = self.steps = 0

    def to_host_async(self, x):
        assert x.device == CUDA
        self.fetched += 1
        begun = self.steps

        def wait():
            if begun == self.steps and not (self.first_may_wait and begun == 0):
                raise HostWait("looked at within the step")
            return zeros(*x.shape)

        return wait

    def _timed(self, nbytes, collective, x, *args):
        assert x.device == CUDA
        return super()._timed(nbytes, collective, x, *args)

    def _all_to_all_v(self, x, send, receive):
        return x.new_empty(sum(receive))


def zeros(first=None, *others):
    return 0 if first is None else [zeros(*others) for _ in range(first)]


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors that say they are on CUDA, and kernels that only say they were launched."""
    launched = []

    class Launched:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(self.name)

    monkeypatch.setenv(launch.KERNELS, "triton")
    for module in KERNELS:
        for name, value in list(vars(module).items()):
            if is_kernel(value):
                monkeypatch.setattr(module, name, Launched(name))
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(torch._subclasses.FakeTensor, "data_ptr", lambda self: 0, raising=False)
    monkeypatch.setattr(randk, "draw", lambda numel, k, generator: torch.empty(k, dtype=torch.int64))  # on the host
    with FakeTensorMode(), Operations():
        yield launched


def steps(made, dtype, size, **options):
    """Take three steps with a large and a small parameter and an empty one; return the number of host reads."""
    shapes = {"w": (1200, 1000), "b": (1000,), "nothing": (0,), "v": (77, 3)}
    grads = {key: torch.empty(shape, dtype=dtype, device=CUDA) for key, shape in shapes.items()}
    inner = getattr(made.aggregator, "inter_node", made.aggregator)
    comm = Counting(size, first_may_wait=isinstance(inner, (OkTopK, ScaleCom)))
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


@pytest.mark.parametrize("size", tiers([1, 2, 5], [5]))
@pytest.mark.parametrize(
    "name",
    tiers(
        ["int4", "int8", "powersgd", "qsgd", "terngrad", "onebit", "signsgd", "signum", "efsignsgd", "median"],
        ["int4", "powersgd", "signsgd", "median"],
    ),
)
def test_no_step_of_quantizers_waits(name, size, fake_cuda):
    assert steps(method(name), torch.bfloat16, size) == 3


@pytest.mark.parametrize("attack", ["scale", "flip", "negate"])
@pytest.mark.parametrize(
    ("compressor", "aggregator"),
    tiers(
        [(Identity(), TrimmedMean()), (Sign(), MajorityVote()), (TopK(0.01), Mean())],
        [(TopK(0.01), Mean())],
    ),
)
def test_no_step_of_an_attacker_waits(compressor, aggregator, attack, fake_cuda, monkeypatch):
    monkeypatch.setattr("lightning_sparse.robust.attacked.share_of", lambda share, size: size)
    assert steps(Method(compressor, NoMemory(), Attacked(aggregator, attack, 0.4)), torch.float32, 2) == 3


@pytest.mark.parametrize("name", ["topk", "gaussiank", "gtopk", "randk"])
def test_no_step_of_a_warm_up_waits(name, fake_cuda):
    """The first goes dense, the next two not."""
    steps(method(name), torch.float32, 4, warmup=(0.9, 0.01), warmup_steps=1)


COMPRESSORS = [TopK(0.001), TopK(0.01, "int32", "int4"), GaussianK(0.01), TopK(0.0001, "compact", "bfloat16")]
# One read of the status for each step; in the first step one more, where the collectives depend on the step.
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
]


CASES = [
    (compressor, aggregator, looks, dtype)
    for compressor, (aggregator, looks), dtype in itertools.product(
        COMPRESSORS, AGGREGATORS, (torch.float32, torch.bfloat16)
    )
    # The dtype of gradients matters after the aggregator.
    if aggregator.supports(compressor)
    and (dtype == torch.float32 or compressor is COMPRESSORS[0])
    and (compressor in COMPRESSORS[:2] or not isinstance(aggregator, TwoLevel))
]


@pytest.mark.parametrize(
    ("compressor", "aggregator", "looks", "dtype"),
    tiers(CASES, [case for case in CASES if case[0] is COMPRESSORS[1] and case[1] in (GlobalTopK(), OkTopK())]),
)
def test_no_step_of_other_aggregators_waits(compressor, aggregator, looks, dtype, fake_cuda):
    for size, count in looks.items():
        assert steps(Method(compressor, aggregator=aggregator), dtype, size) == count, size


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
    """So that the test above can fail."""
    x = torch.empty(4, device=CUDA)
    with NoWaiting(), pytest.raises((HostWait, RuntimeError)):
        wait(x)
    with NoWaiting():
        torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
