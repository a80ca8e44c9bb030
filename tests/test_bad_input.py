"""Errors during an exchange, and extreme input: correct results, or an error on every rank."""

import itertools
import os
import re
import threading
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, NonFiniteGradient, Reducer, exchange, simulate
from lightning_sparse.aggregators import Aggregator, GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm import Comm, ProcessGroupComm, RankFailure
from lightning_sparse.compressors import TopK, encoding
from lightning_sparse.compressors.base import add_
from lightning_sparse.context import Context
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.framing import unframe
from tests.processes import run_ranks
from tests.support.representatives import in_turn
from tests.support.tiers import in_diagonals, one_in, tiers
from tests.support.training import flat, gradients, kept, train
from tests.support.updates import dense

AGGREGATORS = {
    "topk": Mean(),
    "gtopk": GlobalTopK(),
    "oktopk": OkTopK(),
    "scalecom": ScaleCom(),
    "two passes": TwoPass(),
    "two levels": TwoLevel(Mean(), ranks_per_node=2),
    "two levels, oktopk": TwoLevel(OkTopK(), ranks_per_node=2),
    "two levels, two passes": TwoLevel(TwoPass(), ranks_per_node=2),
}
every_aggregator = pytest.mark.parametrize("name", AGGREGATORS)
NUMEL, K = 400, 20


def within(seconds: float, fn):
    """Return the result of `fn`, or fail after a time limit, because a test that hangs gives no information."""
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
    return simulate(size, lambda comm: (steps(comm, AGGREGATORS[name], count=2), comm._counts["done"])[1])[0]


def on_call(comm: Comm, number: int, change) -> Comm:
    """Replace the call `number` of this rank's collectives by `change(collective, x, *args)`."""
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
@pytest.mark.parametrize("size", tiers([2, 4, 6], [4]))
@pytest.mark.parametrize("trouble", tiers([disappears, truncated], [truncated]))
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


@pytest.mark.parametrize("name", tiers(AGGREGATORS, ["two levels"]))
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
    [
        (Mean(), 2),
        (OkTopK(), 2),
        (ScaleCom(), 1),
        (TwoPass(), 2),
        (TwoLevel(Mean(), 2), 3),
        (TwoLevel(ScaleCom(), 2), 3),
    ],
)
def test_who_sent_a_damaged_message_is_named(aggregator, sender, monkeypatch):
    original = exchange.seal

    def seal(parts, *header):
        message = original(parts, *header)
        if threading.current_thread().name == f"rank {sender}" and armed:
            message.view(-1)[-9] ^= 1
        return message

    armed = False
    monkeypatch.setattr(exchange, "seal", seal)

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
    tiers(
        [(n, d) for n, d in itertools.product(AGGREGATORS, DAMAGES) if not (n == "scalecom" and "count" in d)],
        in_turn(AGGREGATORS, DAMAGES).items(),
    ),
)
def test_a_corrupt_payload_in_every_round(damage, name, monkeypatch):
    made = threading.local()
    original, found = exchange.seal, 0

    def seal(parts, *header):
        made.count = getattr(made, "count", -1) + 1
        if threading.current_thread().name == "rank 1" and made.count == at:
            parts = [part.clone() for part in parts]
            if not parts or parts[-1].dtype == torch.int64:
                return original(parts, *header)  # nothing, or the digest of OkTopK's regions
            if parts[-1].dtype == torch.uint8:  # TwoPass: payloads of a quarter of the elements, as bytes
                like = torch.empty(1).int(), torch.empty(K // 4), torch.empty(K // 4).int()
                count, _, indices = unframe(parts[-1].view(-1, parts[-1].shape[-1])[-1], like)
            elif len(parts) == 1 or (len(parts) == 3 and parts[0].shape[-1] > 1):
                indices = parts[-1]  # padded, without a count: messages of ScaleCom, and within a host
                count = (indices < NUMEL).sum()
            else:
                *_, count, _, indices = parts
            if indices.dim() == 2:
                count, indices = count[-1], indices[-1]  # to another rank
            hurt(count, indices)
        return original(parts, *header)

    def hurt(count, indices):
        if int(count) > 1:
            DAMAGES[damage](count, indices)

    monkeypatch.setattr(exchange, "seal", seal)

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
        else:  # there is nothing to damage, or only unused padding
            assert all(map(torch.equal, ranks, right)), at
    assert found


@pytest.mark.parametrize(
    ("name", "index_format"),
    tiers(itertools.product(AGGREGATORS, ["compact", "int32"]), [("topk", "compact"), ("oktopk", "int32")]),
)
def test_flipped_bits_are_an_error_or_go_on(name, index_format):
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
        # A small change in a partial sum, in the header of one, or in the regions' checksum may not be detected.
        assert len(errors) in ((4,) if name in ("topk", "gtopk") else (0, 4)), ranks
        found += len(errors) == 4
    print(f"{name}, {index_format}: {found} of {2 * made} found")


def swap_words(message: Tensor, earlier: list[Tensor], draw: torch.Generator) -> Tensor:
    words = message.clone().view(torch.int64)
    pairs = [(i, j) for i, j in itertools.combinations(range(len(words)), 2) if words[i] != words[j]]
    i, j = pairs[int(torch.randint(len(pairs), (1,), generator=draw))]
    words[[i, j]] = words[[j, i]]
    return words.view(torch.uint8)


def flip_a_bit(message: Tensor, earlier: list[Tensor], draw: torch.Generator) -> Tensor:
    message = message.clone()
    message[torch.randint(message.numel(), (1,), generator=draw)] ^= 1 << int(torch.randint(8, (1,), generator=draw))
    return message


def cut_off(message: Tensor, earlier: list[Tensor], draw: torch.Generator) -> Tensor:
    message = message.clone()
    message[int(torch.randint(message.numel(), (1,), generator=draw)) // 8 * 8 :] = 0
    return message


CORRUPTIONS = {
    "two words swapped": swap_words,
    "a bit flipped": flip_a_bit,
    "the rest is missing": cut_off,
    "zeros": lambda message, earlier, draw: torch.zeros_like(message),
    "the last step's message": lambda message, earlier, draw: next(
        (old for old in reversed(earlier) if old.shape == message.shape), torch.zeros_like(message)
    ),
}


@pytest.mark.parametrize(
    ("name", "corruption"),
    tiers(itertools.product(AGGREGATORS, CORRUPTIONS), in_turn(AGGREGATORS, CORRUPTIONS).items()),
)
def test_every_corrupt_message_is_an_error_on_all_ranks(corruption, name):
    generator = torch.Generator().manual_seed(0)

    def corrupted(comm: Comm, target: int) -> Comm:
        """Change the target-th message of this rank, or its first chunk for another rank; sums are no messages."""
        earlier, sent = [], itertools.count()
        for collective in ("_all_gather", "_broadcast", "_all_to_all_v"):
            inner = getattr(comm, collective)

            def call(x, *args, inner=inner):
                if x.dtype != torch.uint8 or (inner.__name__ == "_broadcast" and args[0] != comm.rank):
                    return inner(x, *args)
                # Damage a chunk for another rank, if there is one.
                sizes = args[0] if inner.__name__ == "_all_to_all_v" else [x.numel()]
                chunks = list(x.split(list(sizes)))
                place = next((r for r, size in enumerate(sizes) if size and r != comm.rank), 0)
                if len(sizes) == 1:
                    place = 0
                before = [old for step, old in earlier if step < reducer_step()]
                if chunks[place].numel() and next(sent) == target:
                    chunks[place] = CORRUPTIONS[corruption](chunks[place], before, generator)
                    x = torch.cat(chunks)
                elif chunks[place].numel():
                    earlier.append((reducer_step(), chunks[place].clone()))
                return inner(x, *args)

            setattr(comm, collective, call)
        counted.append(sent)
        return comm

    def reducer_step() -> int:
        return progress[0]

    def rank(comm: Comm, target: int) -> object:
        if comm.rank == 1:
            corrupted(comm, target)
        reducer = Reducer(Method(TopK(K / NUMEL, "int32"), aggregator=AGGREGATORS[name]), comm, granularity="model")
        try:
            for step in range(3):
                if comm.rank == 1:
                    progress[0] = step
                grads = {"w": torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + comm.rank))}
                reducer.reduce_(grads)
        except (RankFailure, ValueError) as error:
            return error

    counted, progress = [], [0]
    simulate(4, lambda comm: rank(comm, -1))
    messages = next(counted[0])
    assert messages >= 3
    # Only ranks that receive the message detect it at once. The others detect it in the next step, so messages of the
    # last step are left out. Before a message of the first step there is none to send again, so zeros are sent.
    for target in range(2 * messages // 3):
        ranks = within(20, lambda target=target: simulate(4, lambda comm: rank(comm, target)))
        assert all(isinstance(error, Exception) for error in ranks), (target, ranks)


@one_in(2)
@pytest.mark.parametrize(("name", "place"), in_diagonals(AGGREGATORS, [(1, 1), (2, 2), (3, 3), (5, 1), (6, 3)], 10))
def test_short_segments_and_more_wanted_than_there_is(name, place):
    size, per_node = place
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.inter_node, per_node)
    # Asked directly: a reducer would send such segments dense.
    for numel, density, zeros in itertools.product((0, 1, 2, 3, 7), (0.001, 1.0), (False, True)):

        def rank(comm, numel=numel, density=density, zeros=zeros):
            ctx = Context.of(numel, rank=comm.rank)
            u = torch.arange(1.0, numel + 1) * (0 if zeros else comm.rank + 1)
            exchange_ = exchange.Exchange(comm, ctx, device=u.device, in_sync=False)
            update, applied = aggregator(u, TopK(density), exchange_, ctx)
            return dense(update, numel), add_(u.clone(), applied, -1)

        ranks = simulate(size, rank)
        assert all(torch.equal(out, ranks[0][0]) for out, _ in ranks)
        given = torch.arange(1.0, numel + 1) * (0 if zeros else size * (size + 1) / 2)
        # Sums up to 147 of a few terms.
        torch.testing.assert_close(
            size * ranks[0][0] + sum(rest for _, rest in ranks), given, rtol=0, atol=147 * 2**-22
        )
        if density == 1.0:
            torch.testing.assert_close(size * ranks[0][0], given, rtol=2**-21, atol=0)


@one_in(2)
@every_aggregator
@pytest.mark.parametrize("kind", tiers(["zeros", "one rank"], ["zeros"]))
def test_segments_without_elements_and_gradients_of_zeros(name, kind):
    method = Method(TopK(0.05), aggregator=AGGREGATORS[name])
    for size in (2, 4):
        ranks = simulate(size, lambda comm: train(comm, method, kind, "layer"))
        assert all(torch.equal(rank[1], ranks[0][1]) for rank in ranks)
        given = sum(rank[0] for rank in ranks)
        assert (given - size * ranks[0][1] - sum(rank[2] for rank in ranks)).abs().max() <= 20 * size * 2**-22


@one_in(2)
@every_aggregator
def test_a_world_of_one_sends_nothing_and_loses_nothing(name):
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.inter_node)
    (given, received, rest, sent) = simulate(
        1, lambda comm: train(comm, Method(TopK(0.05), aggregator=aggregator), "normal", "layer")
    )[0]
    assert torch.equal(given, (received + rest).to(given.dtype)) or (given - received - rest).abs().max() <= 20 * 2**-22
    assert sent == 0


@pytest.mark.parametrize("name", tiers(["gtopk", "oktopk", "scalecom"], ["scalecom"]))
def test_129_ranks(name):
    aggregator = AGGREGATORS[name]
    if isinstance(aggregator, TwoLevel):
        aggregator = TwoLevel(aggregator.inter_node, ranks_per_node=3)

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        reducer = Reducer(Method(TopK(0.01), aggregator=aggregator), comm, granularity="model")
        grads = gradients("normal", comm.rank, 0)
        given = flat(grads)
        # The reducer would fall back to dense, because the ranks are many and the elements few.
        reducer.setup(grads)
        reducer.routing._pays = lambda *_: True  # type: ignore[method-assign]
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
    parts = encoding.encode_indices(indices, 600, 4, form)
    parts[-1][1:3] = parts[-1][1:3].flip(0)
    with pytest.raises(ValueError, match="indices of 600 elements that do not ascend: it is corrupt"):
        encoding.decode_indices(parts, torch.tensor([4], dtype=torch.int32), 600, 4, form)
