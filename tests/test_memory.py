"""Memory of a step in addition to gradients and state: a chunk in cache, d/64 block maxima, and O(kP).

With updates it also includes the weights before the step, and a segment's unspent momentum.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_sparse import METHODS, Method, Reducer, method
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import TopK
from lightning_sparse.kernels import launch
from lightning_sparse.kernels.block_stats import CHUNK, chunk_size
from lightning_sparse.kernels.select import block_size
from lightning_sparse.updates.exchange import DeltaExchange
from tests.processes import run_ranks
from tests.support.tiers import full, one_in

NUMEL = 1_000_000


def held_bytes(fn: Callable[[], object]) -> tuple[int, int]:
    """Call `fn`; return the peak of the memory that it allocates, and the memory that remains, in bytes.

    All memory that torch allocates in this thread counts, also inside operators. The memory of gloo's threads does not.
    """
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        result = fn()
    events = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    held = torch.tensor(events).cumsum(0)
    del result
    return int(held.max()), int(held[-1])


def peak_bytes(chosen: Method, rank: int) -> int:
    """Return the peak of the memory that the second step allocates, in bytes."""
    reducer = Reducer(chosen, ProcessGroupComm(), granularity="model")
    generator = torch.Generator().manual_seed(rank)
    reducer.reduce_({"w": torch.randn(NUMEL, generator=generator)})
    grads = {"w": torch.randn(NUMEL, generator=generator)}
    return held_bytes(lambda: reducer.reduce_(grads))[0]


def methods(size: int) -> dict[str, Method]:
    return {
        # Quantizers decode into tensors of the gradient's length.
        **{
            name: method(name, density=0.001 if "density" in spec.options else None)
            for name, spec in METHODS.items()
            if spec.traits.exact is not None
        },
        "two levels": Method(TopK(), aggregator=TwoLevel(ranks_per_node=max(1, size // 2))),
    }


def beside_state(size: int) -> tuple[int, int, int]:
    """Return the most bytes that a step of `size` ranks at density 0.001 needs; block maxima and headers of it."""
    k = round(0.001 * NUMEL)
    block = block_size(NUMEL, k)
    # The pass that makes u works on a copy of a chunk, and leaves a maximum for each block.
    maxima = 4 * NUMEL // block
    scan = 4 * chunk_size(NUMEL) + maxima
    # Then the k blocks that may contain selected entries, a piece at a time. A piece needs a copy, a mask of the large
    # entries (a byte each), and indices and magnitudes of these, well below a twelfth.
    blocks = 6 * min(block * k, CHUNK // 4)
    # P payloads, and the selected and the packed entries of this rank, have at most 4k/3 entries each. An entry takes 8
    # bytes on the wire, 12 decoded, and 12 more divided by P, or sorted.
    entries = 32 * (size + 2) * 4 * k // 3
    # Beside payloads: empty messages of 24 bytes, all ranks' twice, and some words for each rank to judge them by.
    headers = 112 * (size + 2)
    return max(scan, maxima + blocks + entries) + headers, maxima, headers


@full
@pytest.mark.parametrize("size", [2, 3, 8])
def test_state_and_a_little_more(size):
    bound, maxima, headers = beside_state(size)
    assert bound < 4 * NUMEL / 4  # a quarter of the gradient here; the chunk does not grow beyond 4 MB
    bounds = dict.fromkeys(methods(size), bound) | {
        "dense": headers,  # the exchange is in place
        # The gradients that the other ranks of the host send for the dense sum, and separate block maxima of this sum.
        "two levels": 4 * NUMEL + maxima + bound,
        # The sum of the region that this rank owns.
        "doublesqueeze": 4 * -(-NUMEL // size) + bound,
        # The size of the sample does not grow with the gradient, and may be 11 % larger. The sample needs space as it
        # is, as int64 or fp64, for a mask or two, and for the values that are compared or counted.
        **{name: bound + 32 * sample for name, sample in {"dgc": 111_200, "sidco": 67_500, "mstopk": 67_500}.items()},
    }
    for peaks in run_ranks(size, lambda rank: {name: peak_bytes(m, rank) for name, m in methods(size).items()}):
        assert {name: peak for name, peak in peaks.items() if peak > bounds[name]} == {}


def bytes_with_updates(rank: int, dtype: torch.dtype) -> tuple[int, tuple[int, int]]:
    """Return the bytes that an exchange of AdamW's updates keeps, and peak and rest of three steps after the first."""
    gc.disable()
    net = nn.ParameterDict({name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()})
    for param in net.parameters():
        param.grad = torch.randn(param.shape, dtype=dtype)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, fused=True)  # it needs nothing beside its state
    made: list[DeltaExchange] = []

    def make() -> None:
        reducer = Reducer(method("topk", density=0.001), ProcessGroupComm(), granularity="model", exchanged="update")
        made.append(DeltaExchange(reducer, net, [optimizer]))

    def train(steps: int) -> None:
        for _ in range(steps):
            made[0].begin(optimizer)
            optimizer.step()
            made[0].exchange(optimizer)

    _, kept = held_bytes(make)
    train(1)
    return kept, held_bytes(lambda: train(3))


SHAPES = {"w": (1000, 900), "b": (1000,), "v": (99, 1000)}


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_need_the_weights_before_the_step_and_of_a_segment_what_momentum_owes(dtype):
    """The segment is the whole model here. Nothing of a step is left, and the garbage collector is off."""
    weights, vector = dtype.itemsize * NUMEL, 4 * NUMEL  # all but the weights is fp32
    owed = vector
    # The weights themselves store the differences, unless these would be rounded.
    differences = 0 if dtype == torch.float32 else vector
    # u with the unspent momentum is formed a piece at a time. Moments or weights of 16 bits are copied to fp32.
    bound = owed + differences + max(4 * 4 * launch.CHUNK, beside_state(2)[0])
    assert bound < owed + differences + vector  # so one vector more would show
    for kept, (peak, left) in run_ranks(2, bytes_with_updates, dtype):
        assert weights + vector <= kept < weights + vector + 1000  # the copy, and the residual
        assert owed + differences <= peak <= bound
        assert left < vector / 20
