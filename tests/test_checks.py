"""Checksums, received messages, and sent entries that are not finite: Triton's interpreter against plain torch."""

import importlib.util

import pytest
import torch

from lightning_sparse import framing
from lightning_sparse.comm import Comm, simulate
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.base import Entries
from lightning_sparse.compressors.encoding import Encoding
from lightning_sparse.context import Context
from lightning_sparse.exchange import CORRUPT, OK, OUT_OF_STEP, Exchange, status_of
from lightning_sparse.kernels import checks
from tests.support.kernels import DEVICE, Echo
from tests.support.tiers import full

BROKEN = status_of(1) + 9
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of sums modulo 2⁶⁴
]


@pytest.mark.parametrize("lead", [(), (1,), (3,)])
@pytest.mark.parametrize("count", [0, 1, 5, 1023, 1024, 1025, 4096, 9001])
def test_messages_have_the_same_bytes(count, lead, use):
    parts = (torch.randint(-(2**62), 2**62, (*lead, 2)), torch.randint(0, 256, (*lead, count), dtype=torch.uint8))
    status = torch.tensor(BROKEN)
    use("torch")
    expected = framing.seal(parts, 7, status)
    sums = framing.weighted_sum(expected.view(torch.int32))
    assert [row[:2].tolist() for row in framing.words_on_host(expected)] == [[7, BROKEN]] * (lead[0] if lead else 1)
    assert framing.intact(framing.words_on_host(expected)).all()
    use("triton")
    assert torch.equal(framing.seal([part.to(DEVICE) for part in parts], 7, status.to(DEVICE)).cpu(), expected)
    assert torch.equal(framing.weighted_sum(expected.to(DEVICE).view(torch.int32)).cpu(), sums)
    expected.view(-1)[-9] ^= 1
    assert not framing.intact(framing.words_on_host(expected))[-1]


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("index_format", ["compact", "int32"])  # made in place, and copied
def test_messages_of_an_exchange_have_the_same_bytes(index_format, pinned, lead, use):
    numel, capacity = 70_000, 1200
    indices = torch.full((*lead, capacity), numel)
    for row, count in zip(indices.view(-1, capacity), (capacity, 0, 1100), strict=False):
        row[:count] = torch.randperm(numel)[:count].sort().values
    values = torch.where(indices < numel, torch.randn(*lead, capacity), 0)
    messages = []
    for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
        use(kernels)
        made = Exchange(Echo(4), Context.of(numel), fingerprint=7, device=torch.device(device))
        made.worst = torch.tensor(BROKEN, device=device)
        if pinned:
            made.pin(torch.arange(9, device=device))
        entries = Entries(indices.to(device), values.to(device))
        payload, _ = Encoding(index_format).encode(entries, numel, capacity)
        messages += [made._frame(payload).cpu() for _ in range(2)]
    first, second, *theirs = messages
    assert torch.equal(theirs[0], first)
    assert torch.equal(theirs[1], second), "what is sent twice is another message"
    assert framing.intact(framing.words_on_host(first)).all()


def received(damage, size: int = 5):
    """The status after messages of `size` ranks of which one or more are damaged."""
    comm = Echo(size)
    made = Exchange(comm, Context.of(100), fingerprint=7, device=torch.device(DEVICE))
    payload = (torch.arange(20.0, device=DEVICE),)
    messages = made._frame(payload).repeat(size, 1)
    damage(messages)
    made._raise = lambda *args, **kwargs: None  # as on CUDA, which does not check yet
    (rows,) = made._receive(messages, payload, made._senders)
    assert rows.shape == (size, 20)
    return int(made.worst)


def nothing(messages):
    pass


def flipped(messages):
    messages[[4, 2], 20] ^= 4


def zeroed(messages):
    messages[3] = 0


def status(messages, row=1, said=BROKEN):
    words = messages.view(torch.int64)
    weights = framing._weights(1024, 0, messages.device) * framing._weights(1, 1 << 40, messages.device)
    words[row, 1] = said
    others = messages.view(torch.int32)[row, :-2]
    words[row, -1] = framing.INTACT - (others * weights[: len(others)]).sum()


def late(messages):
    words = messages.view(torch.int64)
    words[2, 0] += 1 << 40
    status(messages, 2, OK)


@pytest.mark.parametrize(
    ("damage", "worst"),
    [
        (nothing, OK),
        (flipped, status_of(2) + CORRUPT),
        (zeroed, status_of(3) + CORRUPT),
        (status, BROKEN),
        (late, status_of(2) + OUT_OF_STEP),
    ],
)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_lowest_rank_with_an_error_wins(damage, worst, kernels, use):
    use(kernels)
    assert received(damage) == worst


@full
def test_many_messages(use):
    """More than are judged at a time, and one alone."""
    use("triton")
    assert received(flipped, checks.ROWS + 3) == status_of(2) + CORRUPT
    assert received(nothing, 1) == OK


@pytest.mark.parametrize("count", [0, 1, 3, 1024, 2500])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_the_first_broken_entry_is_noted(count, value, use):
    use("triton")
    u = torch.randn(4000, device=DEVICE)
    indices = torch.randperm(4000, device=DEVICE)[:count].sort().values
    ok, own = torch.tensor(OK, device=DEVICE), status_of(4) + 1
    assert int(checks.note_broken(u, indices, own, ok, OK)) == OK
    u[indices[count // 3 :: 2]] = value
    padded = torch.cat([indices, indices.new_full((3,), 4000)])
    for given in (indices, padded):
        first = int(indices[count // 3]) if count else 0
        assert int(checks.note_broken(u, given, own, ok, OK)) == (own + first if count else OK)
    known = torch.tensor(status_of(7), device=DEVICE)
    assert int(checks.note_broken(u, indices, own, known, OK)) == status_of(7), "the cause is known already"
    u[:] = torch.finfo(torch.float32).max
    assert int(checks.note_broken(u, indices, own, ok, OK)) == OK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_broken_element_of_all_is_noted(value, dtype, use):
    use("triton")
    u = torch.randn(2500, device=DEVICE).to(dtype)
    ok, own = torch.tensor(OK, device=DEVICE), status_of(4)
    assert int(checks.note_broken(u, None, own, ok, OK)) == OK
    assert int(checks.note_broken(u[:0], None, own, ok, OK)) == OK
    u[[2499, 1100]] = value
    assert int(checks.note_broken(u, None, own, ok, OK)) == own + 1100
    assert int(checks.note_broken(u, None, own - 1, ok, OK, place=False)) == own - 1
    assert int(checks.note_broken(u, None, status_of(0) - 1, ok, OK, place=False)) == status_of(0) - 1
    known = torch.tensor(status_of(7), device=DEVICE)
    assert int(checks.note_broken(u, None, own, known, OK)) == status_of(7), "the cause is known already"


def told(comm: Comm) -> int:
    u = torch.zeros(50)
    u[[comm.rank + 3, 40]] = torch.inf
    made = Exchange(comm, Context.of(50), device=torch.device("cpu"))
    payload, _ = made.compress(u, TopK(0.1))
    made._frame(payload)
    return int(made.worst)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_rank_notes_its_own_broken_entry(kernels, use):
    use(kernels)
    assert simulate(1, told) == [status_of(0) + 1 + 3]
