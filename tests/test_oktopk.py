"""OkTopK: owners of regions sum the entries of all ranks."""

from itertools import pairwise

import pytest
import torch

from lightning_sparse import Method, Reducer, method, simulate
from lightning_sparse.aggregators import OkTopK
from lightning_sparse.aggregators.oktopk import _by_region
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.base import Entries
from lightning_sparse.kernels.select import topk_indices


def test_two_ranks_by_hand():
    """Two of eight entries. The median indices are 4 and 6, so rank 0 owns 0 to 4 and rank 1 owns 5 to 7."""
    given = [[0, 3.0, 1, 0, -4.0, 0, 0, 0], [0, 2.0, 0, 0, 0, 0.5, 6.0, 0]]

    def rank(comm: Comm) -> tuple[list[float], list[float], list[float]]:
        reducer = Reducer(method("oktopk", density=0.25), comm)
        grads = {"w": torch.tensor(given[comm.rank])}
        reducer.reduce_(grads)
        state = reducer.state_dict()
        return (
            grads["w"].tolist(),
            state["elements"]["residual"]["w"].tolist(),
            state["segments"]["w"]["boundaries"].tolist(),
        )

    # Rank 0 adds up 3 + 2 at index 1, which beats -4 at index 4; rank 1 has 6 at index 6.
    (out, kept0, boundaries), (same, kept1, _) = simulate(2, rank)
    assert boundaries == [5.0]
    assert out == same == [0, 2.5, 0, 0, 0, 0, 3.0, 0]
    assert kept0 == [0, 0, 1, 0, -4.0, 0, 0, 0]
    assert kept1 == [0, 0, 0, 0, 0, 0.5, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
def test_at_most_six_words_an_entry_whatever_the_number_of_ranks(size):
    k, d = 240, 24_000
    compressor = TopK(k / d, index_format="int32")

    def rank(comm: Comm) -> tuple[int, float, int]:
        reducer = Reducer(Method(compressor, aggregator=OkTopK()), comm)
        generator = torch.Generator().manual_seed(comm.rank)
        grads = {"w": torch.randn(d, generator=generator)}
        reducer.reduce_(grads)
        claimed = reducer.method.aggregator.nbytes(compressor, reducer.layout.segments[0], None, comm.size)
        return comm.sent_bytes, claimed, int(grads["w"].count_nonzero())

    for sent, claimed, count in simulate(size, rank):
        room, share = -(-2 * k // size), -(-k // size)
        assert claimed == (size - 1) * 8 * (room + share)
        assert claimed <= 4 * 6 * k * (size - 1) / size + 16 * size  # and whole entries
        # Metadata: three messages with fingerprint, status and checksum, a word each. One has the digest of the
        # boundaries, and two have counts. Parts fill words of 8 bytes. The boundaries are P - 1 words.
        boundaries = 2 * (size - 1) * 8 * (size - 1) // size
        padding = 8 * (room % 2) + 8 * (share % 2)
        assert sent == (size - 1) * (8 * (room + share) + padding + 3 * 24 + 3 * 8) + boundaries
        assert size == 1 or count <= size * share


def test_regions_stay_for_a_while_and_follow_the_entries_then():
    def rank(comm: Comm) -> list[list[float]]:
        reducer = Reducer(Method(TopK(0.05), aggregator=OkTopK(refresh=3)), comm)
        seen = []
        for step in range(6):
            grads = {"w": torch.zeros(1000)}
            grads["w"][100 * step : 100 * step + 50] = 1.0 + torch.arange(50) / 50
            reducer.reduce_(grads)
            seen.append(reducer.states[0]["boundaries"].tolist())
        return seen

    (seen, same) = simulate(2, rank)
    assert seen == same
    assert seen == [[25.0]] * 5 + [[525.0]]


def test_another_number_of_ranks_cuts_anew():
    def rank(comm: Comm, state=None) -> dict:
        reducer = Reducer(method("oktopk", density=0.05), comm)
        if state is not None:
            reducer.load_state_dict({**state, "rank": comm.rank, "size": comm.size})
        for _ in range(2):
            reducer.reduce_({"w": torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))})
        return reducer.state_dict()

    state = simulate(2, rank)[0]
    after = simulate(3, lambda comm: rank(comm, state))
    assert all(len(s["segments"]["w"]["boundaries"]) == 2 for s in after)


@pytest.mark.parametrize("count", [0, 1, 57])
@pytest.mark.parametrize("room", [1, 4, 60])
@pytest.mark.parametrize("boundaries", [[], [50], [0, 0, 30, 100, 100], [10, 20, 30, 40, 50, 60, 70]])
def test_the_largest_of_each_region(boundaries, room, count):
    numel = 100
    indices = torch.randperm(numel)[:count].sort().values
    values = torch.randn(count).mul(3).round()  # some are equal, some zero
    values[count // 2 :][:1] = torch.nan
    padded = Entries(torch.cat([indices, torch.tensor([numel] * 5)]), torch.cat([values, torch.zeros(5)]))
    rows, row_of = _by_region(padded, torch.tensor(boundaries, dtype=torch.int64), room, numel)
    assert rows.indices.shape == rows.values.shape == (len(boundaries) + 1, room)
    edges = [0, *boundaries, numel]
    for row, (low, high) in enumerate(pairwise(edges)):
        inside = (indices >= low) & (indices < high)
        mine, theirs = indices[inside], values[inside]
        largest = topk_indices(theirs, room)
        there = rows.indices[row] < numel
        assert torch.equal(rows.indices[row][there], mine[largest])
        assert rows.indices[row].tolist() == sorted(rows.indices[row].tolist())
        torch.testing.assert_close(rows.values[row][there], theirs[largest], rtol=0, atol=0, equal_nan=True)
        assert not rows.values[row][~there].any()
    for place, where in enumerate(row_of.tolist()):
        if where < rows.indices.numel():
            assert rows.indices.view(-1)[where] == padded.indices[place]
    assert int((row_of < rows.indices.numel()).sum()) == int((rows.indices < numel).sum())


def test_refresh_is_checked():
    with pytest.raises(ValueError, match=r"OkTopK\(refresh=0\): at least one step"):
        OkTopK(refresh=0)
