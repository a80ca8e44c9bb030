"""Memory that a step needs beside gradients and state: a chunk in cache, d/64 block maxima and O(kP)."""

import pytest
import torch

from lightning_sparse import METHODS, Method, Reducer, method
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.compressors import TopK
from lightning_sparse.kernels.block_stats import CHUNK, chunk_size
from lightning_sparse.kernels.select import block_size
from tests.processes import run_ranks
from tests.support.tiers import full

NUMEL = 1_000_000


def peak_bytes(chosen: Method, rank: int) -> int:
    """Return the most that the second step holds at a time of what it allocates, in bytes.

    All that torch allocates in this thread counts, inside operators, too; what gloo's own threads need does not.
    """
    reducer = Reducer(chosen, ProcessGroupComm(), granularity="model")
    generator = torch.Generator().manual_seed(rank)
    reducer.reduce_({"w": torch.randn(NUMEL, generator=generator)})
    grads = {"w": torch.randn(NUMEL, generator=generator)}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        reducer.reduce_(grads)
    events = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    return int(torch.tensor(events).cumsum(0).max())


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


@full
@pytest.mark.parametrize("size", [2, 3, 8])
def test_state_and_a_little_more(size):
    k = round(0.001 * NUMEL)
    block = block_size(NUMEL, k)
    # The pass that makes u works on a copy of a chunk, and leaves a maximum for each block.
    maxima = 4 * NUMEL // block
    scan = 4 * chunk_size(NUMEL) + maxima
    # Then the k blocks that may hold something, a piece of them at a time: a copy, which of it is large enough (a byte
    # each), and indices and magnitudes of these, well below a twelfth.
    blocks = 6 * min(block * k, CHUNK // 4)
    # Of each of P payloads, and of what is selected and packed here, at most 4k/3 entries: 8 bytes on the wire, 12
    # decoded, and 12 more divided by P, or sorted.
    entries = 32 * (size + 2) * 4 * k // 3
    # Beside payloads: empty messages of 24 bytes, all ranks' twice, and some words for each rank to judge them by.
    headers = 112 * (size + 2)
    bound = max(scan, maxima + blocks + entries) + headers
    assert bound < 4 * NUMEL / 4  # a quarter of the gradient here; the chunk does not grow beyond 4 MB
    bounds = dict.fromkeys(methods(size), bound) | {
        "dense": headers,  # the exchange is in place
        # What the other ranks of the host send for the dense sum, which gets block maxima of its own.
        "two levels": 4 * NUMEL + maxima + bound,
        # The sum of the region that this rank owns.
        "doublesqueeze": 4 * -(-NUMEL // size) + bound,
        # A sample whose size does not grow with the gradient, and may be 11 % larger: as it is, as int64 or fp64, a
        # mask or two, and what of it is compared or counted.
        **{name: bound + 32 * sample for name, sample in {"dgc": 111_200, "sidco": 67_500, "mstopk": 67_500}.items()},
    }
    for peaks in run_ranks(size, lambda rank: {name: peak_bytes(m, rank) for name, m in methods(size).items()}):
        assert {name: peak for name, peak in peaks.items() if peak > bounds[name]} == {}
