"""What goes wrong in the middle of an exchange, and input at its limits: right results, or an error on every rank."""

import itertools
import os
import re
import threading
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, NonFiniteGradient, Reducer, simulate
from lightning_sparse.aggregators import (
    Aggregator,
    GlobalTopK,
    Mean,
    OkTopK,
    ScaleCom,
    TwoLevel,
    gtopk,
    mean,
    messages,
    oktopk,
    scalecom,
)
from lightning_sparse.aggregators import two_level as two_levels
from lightning_sparse.comm import Comm, ProcessGroupComm, RankFailure
from lightning_sparse.compressors import TopK, formats
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment
from tests.processes import run_ranks
from tests.test_methods import flat, gradients, kept, train

AGGREGATORS = {
    "topk": Mean(),
    "gtopk": GlobalTopK(),
    "oktopk": OkTopK(),
    "scalecom": ScaleCom(),
    "two levels": TwoLevel(Mean(), ranks_per_node=2),
    "two levels, oktopk": TwoLevel(OkTopK(), ranks_per_node=2),
}
every_aggregator = pytest.mark.parametrize("name", AGGREGATORS)
NUMEL, K = 400, 20


def within(seconds: float, fn):
    """Return what `fn` returns, or fail: a test that hangs says nothing."""
    future = Future()

    def call():
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(seconds)  # TimeoutError: a rank hangs


def steps(comm: Comm, aggregator: Aggregator, index_format: str = "int32", count: int = 3) -> object:
    """Take steps; return the last result, or the error that a rank may end with. Any other one fails the test."""
    reducer = Reducer(Method(TopK(K / NUMEL, index_format), aggregator=aggregator), comm, granularity="model")
    try:
        for step in range(count):
            grads = {"w": torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + comm.rank))}
            reducer.reduce_(grads)
    except (RankFailure, ValueError, NonFiniteGradient) as error:
        return error
    return grads["w"]


def calls(name: str, size: int) -> int:
    """Return how many collectives two steps make."""
    return simulate(size, lambda comm: (steps(comm, AGGREGATORS[name], count=2), comm._calls)[1])[0]


def on_call(comm: Comm, number: int, change) -> Comm:
    """Let `change(collective, x, *args)` make one of this rank's collectives, the others as always."""
    calls = itertools.count()
    inners = {name: getattr(comm, name) for name in ("_all_reduce", "_all_gather", "_broadcast", "_all_to_all_v")}
    for name, inner in inners.items():

        def collective(x, *args, inner=inner):
            return change(inner, x, *args) if next(calls) == number else inner(x, *args)

        setattr(comm, name, collective)
    return comm


def disappears(*_):
    raise RankFailure("gone")


def truncated(inner, x, *args):
    if inner.__name__ != "_all_to_all_v":
        return inner(x[:-1], *args)
    send, receive = args
    last = max(rank for rank, size in enumerate(send) if size)
    return inner(x[:-1], [size - (rank == last) for rank, size in enumerate(send)], receive)


@every_aggregator
@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("trouble", [disappears, truncated])
def test_a_peer_that_disappears_or_breaks_off_in_every_exchange(trouble, size, name):
    aggregator = AGGREGATORS[name]
    for number in range(calls(name, size)):
        ranks = within(
            20,
            lambda number=number: simulate(
                size,
                lambda comm: steps(on_call(comm, number, trouble) if comm.rank == 1 else comm, aggregator),
            ),
        )
        assert all(isinstance(rank, RankFailure) for rank in ranks), (number, ranks)


def dies(rank: int, name: str, number: int) -> str:
    comm = ProcessGroupComm()
    comm.all_reduce(torch.ones(1))  # connected
    result = steps(on_call(comm, number, lambda *_: os._exit(1)) if rank == 2 else comm, AGGREGATORS[name])
    return str(result) if isinstance(result, RankFailure) else f"no error: {result}"


@every_aggregator
def test_a_process_that_dies_in_the_middle_of_an_exchange(name):
    *others, dead, last = run_ranks(4, dies, name, calls(name, 4) - 1, patience=30)
    assert dead is None
    for text in (*others, last):
        assert re.search("lost its peers in an exchange", text), text


DAMAGES = {
    "too large a count": lambda count, indices: count.fill_(2**30),
    "negative count": lambda count, indices: count.fill_(-1),
    "out of range": lambda count, indices: indices[int(count) - 1 :].fill_(NUMEL + 1),
    "negative index": lambda count, indices: indices[:1].fill_(-1),
    "not ascending": lambda count, indices: indices[: int(count)].copy_(indices[: int(count)].flip(0)),
    "twice": lambda count, indices: indices[1:2].copy_(indices[:1]),
}


@pytest.mark.parametrize(
    ("aggregator", "sender"),
    # In the second step rank 1 leads. Rank 3 is the second one of those with the second part of the segment.
    [(Mean(), 2), (OkTopK(), 2), (ScaleCom(), 1), (TwoLevel(Mean(), 2), 3), (TwoLevel(ScaleCom(), 2), 3)],
)
def test_who_sent_a_damaged_message_is_named(aggregator, sender, monkeypatch):
    def packed(parts):
        message = messages.packed(parts)
        if threading.current_thread().name == f"rank {sender}" and armed:
            message.view(-1)[-9] ^= 1
        return message

    armed = False
    for module in (mean, oktopk, scalecom, two_levels):
        monkeypatch.setattr(module, "packed", packed)

    def rank(comm):
        nonlocal armed
        reducer = Reducer(Method(TopK(0.1), aggregator=aggregator), comm, granularity="model")
        reducer.reduce_({"w": torch.ones(NUMEL)})
        comm.all_reduce(torch.ones(1))
        armed = True
        try:
            reducer.reduce_({"w": torch.ones(NUMEL)})
        except (ValueError, RankFailure) as error:
            return str(error)

    errors = [error for error in simulate(4, rank) if "corrupt" in error]
    assert errors
    assert all(f"A message of rank {sender} at step 1" in error for error in errors), errors


@pytest.mark.parametrize(
    ("name", "damage"),
    # ScaleCom sends no count.
    [(n, d) for n, d in itertools.product(AGGREGATORS, DAMAGES) if not (n == "scalecom" and "count" in d)],
)
def test_a_corrupt_payload_in_every_round(damage, name, monkeypatch):
    made = threading.local()
    original, found = messages.packed, 0

    def packed(parts):
        made.count = getattr(made, "count", -1) + 1
        if threading.current_thread().name == "rank 1" and made.count == at:
            parts = [part.clone() for part in parts]
            if len(parts) == 1 or (parts[0].shape == (1,) and parts[0].dtype == torch.int64):
                indices = parts[-1]  # padded, without a count: ScaleCom's, and what the ranks of a host tell each other
                count = (indices < NUMEL).sum()
            else:
                *_, count, _, indices = parts
            if indices.dim() == 2:
                count, indices = count[-1], indices[-1]  # to another rank
            hurt(count, indices)
        return original(parts)

    def hurt(count, indices):
        if int(count) > 1:
            DAMAGES[damage](count, indices)

    for module in (mean, gtopk, oktopk, scalecom, two_levels):
        monkeypatch.setattr(module, "packed", packed)

    def rank(comm):
        return steps(comm, AGGREGATORS[name])

    at = -1
    right = simulate(4, rank)
    for at in range(4):  # in a round of the first steps
        ranks = within(20, lambda: simulate(4, rank))
        if any(isinstance(result, Exception) for result in ranks):
            assert all(isinstance(result, Exception) for result in ranks), (at, ranks)
            assert any("corrupt" in str(result) for result in ranks), (at, ranks)
            found += 1
        else:  # nothing to damage there, or room that nobody looks at
            assert all(map(torch.equal, ranks, right)), at
    assert found


@every_aggregator
@pytest.mark.parametrize("index_format", ["compact", "int32"])
def test_flipped_bits_are_an_error_or_go_on(index_format, name):
    """A damaged message is an error. Sums that are made on the way have no checksum; nothing crashes or hangs there."""
    generator = torch.Generator().manual_seed(0)

    def flip(inner, x, *args):
        x = x.clone()
        if x.numel():
            data = x.view(-1).view(torch.uint8)
            data[torch.randint(data.numel(), (1,), generator=generator)] ^= 1 << int(
                torch.randint(8, (1,), generator=generator)
            )
        return inner(x, *args)

    found, made = 0, calls(name, 4)
    for number in range(2 * made):
        ranks = within(
            20,
            lambda number=number: simulate(
                4,
                lambda comm: steps(
                    on_call(comm, number % made, flip) if comm.rank == 1 else comm,
                    AGGREGATORS[name],
                    index_format,
                ),
            ),
        )
        errors = [rank for rank in ranks if isinstance(rank, Exception)]
        # In a sum on its way, in the header of one, and in the regions' checksum a bit more or less goes unnoticed.
        assert len(errors) in ((4,) if name in ("topk", "gtopk") else (0, 4)), ranks
        found += len(errors) == 4
    print(f"{name}, {index_format}: {found} of {2 * made} found")


@every_aggregator
@pytest.mark.parametrize(("size", "per_node"), [(1, 1), (2, 2), (3, 3), (5, 1), (6, 3)])
def test_short_segments_and_more_wanted_than_there_is(name, size, per_node):
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.between, per_node)
    # Asked directly: a reducer would send such segments dense.
    for numel, density, zeros in itertools.product((0, 1, 2, 3, 7), (0.001, 1.0), (False, True)):

        def rank(comm, numel=numel, density=density, zeros=zeros):
            segment, compressor, ctx = Segment(0, ("w",), ((numel,),), 0), TopK(density), Context(rank=comm.rank)
            u = torch.arange(1.0, numel + 1) * (0 if zeros else comm.rank + 1)
            agreed, used = aggregator(u, segment, compressor, comm, ctx)
            out = torch.zeros(numel)
            for indices, values in agreed:
                out.index_add_(0, indices, values)
            return out, compressor.remove_(u.clone(), used, segment, ctx)

        ranks = simulate(size, rank)
        assert all(torch.equal(out, ranks[0][0]) for out, _ in ranks)
        given = torch.arange(1.0, numel + 1) * (0 if zeros else size * (size + 1) / 2)
        # Sums up to 147 of a few terms.
        torch.testing.assert_close(
            size * ranks[0][0] + sum(rest for _, rest in ranks), given, rtol=0, atol=147 * 2**-22
        )
        if density == 1.0:
            torch.testing.assert_close(size * ranks[0][0], given, rtol=2**-21, atol=0)


@every_aggregator
@pytest.mark.parametrize("kind", ["zeros", "one rank"])
def test_segments_without_elements_and_gradients_of_zeros(name, kind):
    method = Method(TopK(0.05), aggregator=AGGREGATORS[name])
    for size in (2, 4):
        ranks = simulate(size, lambda comm: train(comm, method, kind, "layer"))
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)
        given = sum(rank[0] for rank in ranks)
        assert (given - size * ranks[0][1] - sum(rank[2] for rank in ranks)).abs().max() <= 20 * size * 2**-22


@every_aggregator
def test_a_world_of_one_sends_nothing_and_loses_nothing(name):
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.between)
    (given, received, rest, sent) = simulate(
        1, lambda comm: train(comm, Method(TopK(0.05), aggregator=aggregator), "normal", "layer")
    )[0]
    assert torch.equal(given, (received + rest).to(given.dtype)) or (given - received - rest).abs().max() <= 20 * 2**-22
    assert sent == 0


@pytest.mark.parametrize("name", list(AGGREGATORS)[:5])
def test_129_ranks(name):
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.between, ranks_per_node=3)

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        reducer = Reducer(Method(TopK(0.01), aggregator=aggregator), comm, granularity="model")
        grads = gradients("normal", comm.rank, 0)
        given = flat(grads)
        # Not by the reducer's own choice: so many ranks would send these few elements dense.
        reducer._sends_less = lambda *_: True
        reducer.reduce_(grads)
        return given, flat(grads), kept(reducer)

    ranks = within(300, lambda: simulate(129, rank))
    assert all(torch.equal(out, ranks[0][1]) for _, out, _ in ranks)
    given, rest = sum(rank[0] for rank in ranks), sum(rank[2] for rank in ranks)
    # Sums of up to 129 values up to 5, each rounded.
    assert (given - 129 * ranks[0][1] - rest).abs().max() <= 129 * 129 * 5 * 2**-24


@pytest.mark.parametrize("form", ["int32", "compact"])
def test_indices_that_do_not_ascend_are_refused(form):
    indices = torch.tensor([5, 300, 301, 599])
    parts = formats.encode_indices(indices, 600, 4, form)
    parts[-1][1:3] = parts[-1][1:3].flip(0)
    with pytest.raises(ValueError, match="indices of 600 elements that do not ascend: it is corrupt"):
        formats.decode_indices(parts, torch.tensor([4], dtype=torch.int32), 600, 4, form)
