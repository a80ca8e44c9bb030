"""Broadcasting tensors from rank 0 in few messages and few bytes."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_sparse import simulate
from lightning_sparse.comm import Comm
from lightning_sparse.comm import broadcast as broadcast_module
from lightning_sparse.comm.broadcast import broadcast, broadcast_differing
from tests.support.kernels import Echo
from tests.support.tiers import tiers

CPU = torch.device("cpu")


def made(rank: int) -> list[Tensor]:
    return [
        torch.full((3,), rank == 0),
        torch.full((5,), rank + 0.5, dtype=torch.bfloat16),
        torch.tensor(rank + 7),
        torch.full((4, 3), float(rank)).t(),
        torch.full((6,), float(rank))[::2],
        torch.full((2,), complex(rank, 1)),
        torch.full((0, 2), rank, dtype=torch.int16),
        torch.full((1,), rank + 0.1, dtype=torch.float64),
    ]


def test_rank_0_copies_no_buffers():
    def rank(comm: Comm) -> tuple[list[int], list[Tensor]]:
        tensors = [torch.full((2,), comm.rank), torch.tensor(comm.rank), torch.full((3,), float(comm.rank))]
        before = [tensor._version for tensor in tensors]
        broadcast(comm, tensors, torch.device("cpu"))
        return [tensor._version - since for tensor, since in zip(tensors, before, strict=True)], tensors

    (written, _), (_, received) = simulate(2, rank)
    assert written == [0, 0, 0]
    assert all(not tensor.any() for tensor in received)


def test_a_broadcast_is_one_message_whatever_the_tensors():
    def rank(comm: Comm) -> tuple[int, list[Tensor]]:
        tensors = [*made(comm.rank), torch.inference_mode()(torch.full)((2,), float(comm.rank))]
        before = comm._counts["begun"]
        broadcast(comm, tensors, torch.device("cpu"))
        return comm._counts["begun"] - before, tensors

    for messages, received in simulate(3, rank):
        assert messages == 1
        assert all(map(torch.equal, received, [*made(0), torch.zeros(2)]))
        assert [x.dtype for x in received] == [x.dtype for x in [*made(0), torch.zeros(2)]]


def test_hashes_wait_for_the_callers_stream(monkeypatch):
    """Threads of the pool copy in the default stream, which does not wait for others."""
    done = []

    class Pool:
        def __init__(self) -> None:
            done.append("hash")
            raise KeyboardInterrupt

    stream = SimpleNamespace(synchronize=lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(broadcast_module, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        broadcast_differing(Echo(2), made(0), torch.device("cuda"))
    assert done == ["synchronize", "hash"]


@pytest.mark.parametrize("at_once", [broadcast_module.AT_ONCE, 24, 1])
@pytest.mark.parametrize("size", tiers([1, 2, 3, 5, 8], [1, 2, 3]))
def test_only_what_differs_is_sent(size, at_once, monkeypatch):
    """Any rank may differ. Equal tensors keep their bits."""
    monkeypatch.setattr(broadcast_module, "AT_ONCE", at_once)

    def rank(comm: Comm) -> tuple[list[int], list[int], list[Tensor]]:
        mine, others = made(comm.rank), made(0)
        # Ranks 1 to 3 differ from rank 0 in turn, one per tensor. The last tensors are equal on all ranks.
        tensors = [x if comm.rank == 1 + i % 3 else y for i, (x, y) in enumerate(zip(mine, others, strict=True))]
        tensors += [torch.tensor([math.nan, -0.0]), torch.zeros(2)]
        if comm.rank == size - 1 > 0:
            tensors[-1][1] = -0.0  # equal to 0, and other bits
        lengths, send, versions = [], comm._broadcast, [x._version for x in tensors]
        comm._broadcast = lambda x, src: (lengths.append(x.nbytes), send(x, src))[1]  # type: ignore[method-assign]
        broadcast_differing(comm, tensors, CPU)
        assert comm.sent_bytes == 0
        return lengths, [x._version - y for x, y in zip(tensors, versions, strict=True)], tensors

    expected = [*made(0), torch.tensor([math.nan, -0.0]), torch.zeros(2)]
    for lengths, written, received in simulate(size, rank):
        assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(received, expected, strict=True))
        assert [x.dtype for x in received] == [x.dtype for x in expected]
        assert not received[-1].signbit().any()
        assert written[-2] == 0
        differ = [x for i, x in enumerate(expected[:-2]) if 1 + i % 3 < size] + [expected[-1]] * (size > 1)
        assert sum(lengths) == sum(x.nbytes for x in differ)


def test_messages_have_a_most_length(monkeypatch):
    monkeypatch.setattr(broadcast_module, "AT_ONCE", 40)

    def rank(comm: Comm) -> tuple[int, list[Tensor]]:
        tensors = [torch.full((n,), float(comm.rank)) for n in (4, 6, 1, 20, 1)]  # 16, 24, 4, 80 and 4 bytes
        before = comm._counts["begun"]
        broadcast_differing(comm, tensors, CPU)
        return comm._counts["begun"] - before, tensors

    for messages, tensors in simulate(2, rank):
        assert messages == 1 + 4  # hashes, and 16 + 24, 4, 80, 4
        assert not any(x.any() for x in tensors)


def test_nothing_is_compared_where_there_is_nothing():
    assert simulate(2, lambda comm: broadcast_differing(comm, [], CPU)) == [None, None]
