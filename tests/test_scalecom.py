"""ScaleCom: ranks lead in turn."""

import pytest
import torch
from torch import nn

from lightning_sparse import Reducer, method, simulate
from lightning_sparse.comm import Comm
from lightning_sparse.context import Context
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.tiers import one_in


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

    # Rank 0 leads and chooses index 0 for both. Then rank 1 chooses index 3, because its sum there is -10.
    (outs, kept0), (same, kept1) = simulate(2, rank)
    assert outs == same == [[2.5, 0, 0, 0], [0, 0, 0, -5.0]]
    assert kept0 == [0, -3.0, 1.0, 0]
    assert kept1 == [0, 0, 0, 0]


@one_in(2)
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


@one_in(2)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_turns_are_even_in_all_steps_and_in_every_nth(count):
    turns = [Context.of(1, step=step).turn(count) for step in range(count * 1000)]
    for start in range(0, len(turns), count):
        assert sorted(turns[start : start + count]) == list(range(count))
    for each in range(1, 9):
        for first in range(each):
            alone = turns[first::each]
            assert [alone.count(who) * count / len(alone) for who in range(count)] == pytest.approx(
                [1] * count, rel=0.2
            )


@pytest.mark.parametrize("optimizers", [2, 3, 4])
def test_all_ranks_lead_for_each_of_several_optimizers(optimizers):
    def rank(comm: Comm) -> list[set[int]]:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(optimizers)))
        all_optimizers = [torch.optim.SGD(layer.parameters(), 0.01) for layer in net]
        updates = DeltaExchange(Reducer(method("scalecom", density=0.1), comm, exchanged="update"), net, all_optimizers)
        leaders: list[set[int]] = [set() for _ in all_optimizers]
        broadcast = comm.broadcast
        for _ in range(8):
            net(torch.ones(2, 8)).sum().backward()
            for optimizer, led_by in zip(all_optimizers, leaders, strict=True):
                comm.broadcast = lambda x, src, led_by=led_by: (led_by.add(src), broadcast(x, src))[1]
                updates.begin(optimizer)
                optimizer.step()
                updates.exchange(optimizer)
        return leaders

    assert simulate(2, rank) == [[{0, 1}] * optimizers] * 2
