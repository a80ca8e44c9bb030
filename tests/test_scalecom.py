"""ScaleCom: the ranks lead in turn."""

import pytest
import torch

from lightning_sparse import Reducer, method, simulate
from lightning_sparse.comm import Comm


def test_two_steps_by_hand():
    given = {
        0: [[4.0, -3.0, 0, 0], [0, 0, 1.0, 0]],
        1: [[1.0, 0, 0, -9.0], [0, 0, 0, -1.0]],
    }

    def rank(comm: Comm) -> tuple[list, list[float]]:
        reducer = Reducer(method("scalecom", density=0.25), comm)
        outs = []
        for step in range(2):
            grads = {"w": torch.tensor(given[comm.rank][step])}
            reducer.reduce_(grads)
            outs.append(grads["w"].tolist())
        return outs, reducer.state_dict()["elements"]["residual"]["w"].tolist()

    # Rank 0 leads and chooses index 0 for both; then rank 1 chooses index 3, where -10 has gathered.
    (outs, kept0), (same, kept1) = simulate(2, rank)
    assert outs == same == [[2.5, 0, 0, 0], [0, 0, 0, -5.0]]
    assert kept0 == [0, -3.0, 1.0, 0]
    assert kept1 == [0, 0, 0, 0]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_at_most_three_words_an_entry_whatever_the_number_of_ranks(size):
    def rank(comm: Comm) -> int:
        reducer = Reducer(method("scalecom", density=0.01), comm)
        for _ in range(size):
            reducer.reduce_({"w": torch.randn(10_000)})
        return comm.sent_bytes

    for sent in simulate(size, rank):
        headers = size * (size - 1) * 24 + 24  # fingerprint, status and checksum
        assert sent == 100 * 4 + headers + size * (
            2 * (size - 1) * (400 + 4) // size
        )  # the values, and whether a rank has failed
        assert (sent - headers) / size <= 3 * 4 * 100


def test_a_rank_on_another_step_is_noticed():
    def rank(comm: Comm) -> None:
        reducer = Reducer(method("scalecom", density=0.25), comm)
        reducer.setup({"w": torch.zeros(4)})
        reducer.step = comm.rank  # both would lead
        reducer.reduce_({"w": torch.ones(4)})

    with pytest.raises(RuntimeError, match="Ranks are out of step"):
        simulate(2, rank)
