"""Global top-k: merging pair by pair."""

import pytest
import torch

from lightning_sparse import Method, Reducer, method, simulate
from lightning_sparse.aggregators import GlobalTopK
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.chunktopk import ChunkTopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.randk import RandK


def test_four_ranks_by_hand():
    """One of four entries. Rank 0 and 1 drop 3 at index 0, which comes through by ranks 2 and 3."""
    given = [[3.0, 1, 0, 0], [0, -5.0, 0, 0], [4.0, 0, 0, 2], [0, 0, 0, -2.0]]

    def rank(comm: Comm) -> tuple[list[float], list[float]]:
        reducer = Reducer(method("gtopk", density=0.25), comm)
        grads = {"w": torch.tensor(given[comm.rank])}
        reducer.reduce_(grads)
        return grads["w"].tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    # Selected: 3 at 0, -5 at 1, 4 at 0, -2 at 3. Merged: -5 beats 3, 4 beats -2; then -5 beats 4.
    ranks = simulate(4, rank)
    assert [out for out, _ in ranks] == [[0, -1.25, 0, 0]] * 4
    assert [kept for _, kept in ranks] == [[3.0, 1, 0, 0], [0, 0, 0, 0], [4.0, 0, 0, 2], [0, 0, 0, -2]]


def test_what_one_branch_drops_and_another_brings_through_is_returned():
    """Rank 0's 4 displaces rank 1's 3 at index 0. But index 0 wins because of rank 2, so the 3 returns to rank 0."""
    given = [[0, 4.0, 0, 0], [3.0, 0, 0, 0], [9.0, 0, 0, 0], [0, 0, 1.0, 0]]

    def rank(comm: Comm) -> tuple[list[float], list[float]]:
        reducer = Reducer(method("gtopk", density=0.25), comm)
        grads = {"w": torch.tensor(given[comm.rank])}
        reducer.reduce_(grads)
        return (grads["w"] * 4).tolist(), reducer.state_dict()["elements"]["residual"]["w"].tolist()

    ranks = simulate(4, rank)
    assert [out for out, _ in ranks] == [[9.0, 0, 0, 0]] * 4
    assert [kept for _, kept in ranks] == [[3.0, 4.0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1.0, 0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_what_all_ranks_select_alike_comes_back_exactly(size):
    def rank(comm: Comm) -> torch.Tensor:
        grads = {"w": torch.zeros(1000)}
        grads["w"][[5, 77, 500, 999]] = torch.tensor([4.0, -8.0, 2.0, 16.0])
        Reducer(method("gtopk", density=0.004), comm).reduce_(grads)
        return grads["w"][[5, 77, 500, 999]]

    for out in simulate(size, rank):
        torch.testing.assert_close(out, torch.tensor([4.0, -8.0, 2.0, 16.0]), rtol=2**-22, atol=0)


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (3, 3), (4, 2), (8, 3), (9, 5)])
def test_bytes_grow_with_the_logarithm(size, rounds):
    def rank(comm: Comm) -> tuple[int, float]:
        reducer = Reducer(method("gtopk", density=0.01), comm)
        reducer.reduce_({"w": torch.randn(10_000)})
        segment = reducer.layout.segments[0]
        return comm.sent_bytes, reducer.method.aggregator.nbytes(reducer.method.compressor, segment, None, comm.size)

    ranks = simulate(size, rank)
    # 100 values and indices (see test_formats), two words of header, the count, and the checksum; each part in full
    # words of 8 bytes.
    per_round = 400 + 104 + 24 + 16 + 8 + 8
    assert max(sent for sent, _ in ranks) == rounds * per_round
    assert {claimed for _, claimed in ranks} == {rounds * (400 + 100 + 18)}


def test_its_bytes_are_those_of_the_format_that_it_sends():
    """Merged entries do not fit the format of ChunkTopK."""
    compressor, numel = ChunkTopK(0.01), 100_000
    segment, encoding = Context.of(numel).segment, compressor.encoding
    expected = 2 * encoding.nbytes(numel, compressor.capacity(numel))
    assert GlobalTopK().nbytes(compressor, segment, None, 4) == expected != 2 * compressor.nbytes(segment, None)


def test_it_needs_payloads_of_entries():
    with pytest.raises(ValueError, match="cannot aggregate"):
        Method(RandK(), aggregator=GlobalTopK())
    assert GlobalTopK().supports(TopK())
