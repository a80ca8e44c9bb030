"""Blocks: results by hand, error bounds, payload, and limits."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.aggregators import TwoPass
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment, cut, joined
from lightning_sparse.memory import Residual
from tests.support import inputs
from tests.support.kernels import EITHER
from tests.support.tiers import in_diagonals, one_in
from tests.support.updates import decoded

LARGEST = torch.finfo(torch.float32).max
LAST_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as integers, all others are less


def context(*shapes: tuple[int, ...]) -> Context:
    return Context(Segment(0, tuple(f"p{index}" for index in range(len(shapes))), shapes, 0))


def test_four_bits_by_hand():
    """The second block is padded with zeros. The vector after it is sent uncompressed."""
    u = torch.tensor([7.0, -3.0, 0.25, -6.5, -1.75, 0.5, 0.1, -0.2])
    payload, update = Blocks(bits=4, block=4).compress(u, context((2, 3), (2,)))
    scales, codes, exact = payload
    assert scales.dtype == torch.bfloat16
    assert scales.tolist() == [1.0, 0.25]
    # Steps 7, -3, 0, -6 (half to even), and -7, 2, 0, 0: each 8 higher, the third above the first, as 16 times it.
    assert codes.tolist() == [15 + 16 * 8, 5 + 16 * 2, 1 + 16 * 8, 10 + 16 * 8]
    assert exact.tolist() == u[6:].tolist()
    assert update.tolist() == [7.0, -3.0, 0.0, -6.0, -1.75, 0.5, *u[6:].tolist()]


def test_eight_bits_by_hand():
    u = torch.tensor([[-127.0, 3.0, 0.4], [-0.6, 0.0, 254.0]]).view(-1)
    (scales, codes, exact), update = Blocks(bits=8, block=2).compress(u, context((2, 3)))
    # 0.6 / 127 lies between two numbers of bf16, so the scale is the upper one.
    assert scales.tolist() == [1.0, pytest.approx(0.6 / 127, rel=2**-7), 2.0]
    assert scales[1] * 127 >= 0.6
    assert codes.view(torch.int8).tolist() == [-127, 3, 85, -127, 0, 127]
    assert exact.numel() == 0
    assert update[[0, 1, 4, 5]].tolist() == [-127.0, 3.0, 0.0, 254.0]


HOSTILE = {
    **inputs.HOSTILE,
    "largest": lambda g: LARGEST * (1 - 2 * torch.rand(1000, generator=g)).sign(),
    "next to largest": lambda g: torch.full((1000,), LARGEST).mul_(1 - torch.rand(1000, generator=g) / 100),
    "denormal": lambda g: torch.randn(1000, generator=g) * 1e-42,
    "scales of one or two bits": lambda g: 2.0**-133 * torch.linspace(1, 999, 1000),
    "smallest": lambda g: torch.full((1000,), 2.0**-149),
}


@one_in(3)
@pytest.mark.parametrize("shape", [(1, 1000), (1000, 1), (10, 100), (3, 7, 11), (1, 1), (1, 0)])
@pytest.mark.parametrize(
    ("compressor", "kind"), in_diagonals([Blocks(4), Blocks(4, 6), Blocks(8), Blocks(8, 2)], HOSTILE, 2), ids=repr
)
def test_error_is_at_most_half_a_step(compressor, kind, shape):
    numel, levels = math.prod(shape), 2 ** (compressor.bits - 1) - 1
    u = HOSTILE[kind](torch.Generator().manual_seed(1))[:numel].clone()
    ctx = context(shape)
    payload, update = compressor.compress(u, ctx)
    assert torch.equal(update, decoded(compressor, u, ctx))
    assert sum(part.numel() * part.element_size() for part in payload) == compressor.nbytes(ctx.segment, None)
    if not numel:
        return
    for x, q in zip(u.double().split(compressor.block), update.double().split(compressor.block), strict=True):
        # A step is rounded up to 8 bits, of which bf16 has fewer below 2⁻¹²⁶. Next to the largest number it is rounded
        # down, and the error of that is below the step's, too. Values are rounded to fp32 once more.
        step = x.abs().max() / levels * (1 + 2**-7) + 2**-133
        assert (x - q).abs().max() <= step / 2 * (1 + 2**-20)


@pytest.mark.parametrize("bits", [4, 8])
def test_multiples_of_the_scale_come_back_exactly(bits):
    levels = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-levels, levels + 1, (50, 64), generator=generator).float()
    steps[:, 0] = levels
    u = (steps * 2.0 ** torch.randint(-140, 100, (50, 1), generator=generator)).view(-1)
    u = torch.where(u.abs() < 2.0**-126, 0, u)
    assert torch.equal(decoded(Blocks(bits), u, context((50, 64))), u)


def test_blocks_stay_inside_a_parameter_and_vectors_are_exact():
    """A large value of one parameter does not coarsen another one."""
    generator = torch.Generator().manual_seed(0)
    small, large = torch.randn(90, generator=generator), 1e6 * torch.randn(30, generator=generator)
    bias, scalar = torch.randn(7, generator=generator), torch.tensor([math.pi])
    ctx = context((9, 10), (5, 6), (7,), (), (2, 0))
    update = decoded(Blocks(4), torch.cat([small, large, bias, scalar]), ctx)
    first, second, *rest = ctx.segment.views(update)
    assert torch.equal(first, decoded(Blocks(4), small, context((9, 10))))
    assert torch.equal(second, decoded(Blocks(4), large, context((5, 6))))
    assert torch.equal(torch.cat(rest), torch.cat([bias, scalar]))


def test_a_piece_of_a_matrix_is_a_matrix():
    """Two ranks own a half each: 13 and 12 elements of a matrix of 5 · 5."""
    u = torch.linspace(-1, 1, 25)

    def rank(comm) -> Tensor:
        grads = {"w": u.view(5, 5).clone()}
        Reducer(Method(Blocks(4, 4), Residual(), TwoPass()), comm).reduce_(grads)
        return grads["w"].view(-1)

    for result in simulate(2, rank):
        assert not torch.equal(result, u)
        assert (result - u).abs().max() <= 1 / 7


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LAST_NAN], ids=str)
@pytest.mark.parametrize("place", [3, 99, 105])
def test_what_is_not_finite_is_named(bits, bad, place):
    """The value is in a full block, in a partial block, or in a vector."""

    def rank(comm) -> None:
        flat = torch.ones(110)
        flat[place] = bad if comm.rank == 1 else 1
        grads = {"w": flat[:100].view(10, 10), "b": flat[100:]}
        with pytest.raises(NonFiniteGradient, match=f"'{'w' if place < 100 else 'b'}' is not finite on rank 1"):
            Reducer(Method(Blocks(bits, 6), Residual(), TwoPass()), comm, granularity="model").reduce_(grads)

    simulate(2, rank)


def test_finite_sums_that_overflow_are_no_error():
    def rank(comm) -> Tensor:
        grads = {"w": torch.full((10, 10), LARGEST)}
        Reducer(Method(Blocks(4), Residual(), TwoPass()), comm).reduce_(grads)
        return grads["w"]

    for result in simulate(2, rank):
        assert result.isfinite().all()
        assert result.min() >= LARGEST * (1 - 2**-7)


@pytest.mark.parametrize(("name", "most"), [("int4", 0.54), ("int8", 1.04)])
def test_bytes_for_an_element_do_not_grow_with_the_number_of_ranks(name, most):
    numel = 3 * 2**15
    for size in (2, 4, 16):

        def rank(comm):
            reducer = Reducer(method(name), comm, granularity="model")
            grads = {"w": torch.randn(256, numel // 256, generator=torch.Generator().manual_seed(comm.rank))}
            reducer.reduce_(grads)
            return comm.sent_bytes, reducer.routing.nbytes(None)

        for sent, announced in simulate(size, rank):
            # Two messages to each of the others, with 24 bytes of header and checksum, and two parts filled up to 8.
            assert 0 <= sent - announced - 2 * (size - 1) * 24 < 2 * (size - 1) * 16
            assert announced / numel <= 2 * most * (size - 1) / size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, r"Blocks\(bits=2\): choose 4 or 8"),
        ({"bits": True}, r"Blocks\(bits=True\)"),
        ({"bits": 4.0}, r"Blocks\(bits=4.0\)"),
        ({"bits": 4, "block": 7}, r"Blocks\(block=7\): block must be an even number, 2 or more"),
        ({"bits": 8, "block": 0}, r"Blocks\(block=0\)"),
        ({"bits": 8, "block": 64.0}, r"Blocks\(block=64.0\)"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Blocks(**options)


def test_the_rows_have_one_option():
    assert method("int4", block=32) == Method(Blocks(4, 32), Residual(), TwoPass())
    assert method("int8").compressor == Blocks(8)
    with pytest.raises(TypeError, match="'int4' has no option 'bits'; it has block"):
        method("int4", bits=8)
    with pytest.raises(TypeError, match="'int8' has no option 'density'"):
        method("int8", density=0.1)


@one_in(2)
@pytest.mark.parametrize("kernels", ["torch", *EITHER])
@pytest.mark.parametrize("bits", [4, 8])
def test_two_segments_together_are_both_joined(bits, kernels, use):
    """One launch is enough for the regions of many ranks, because `TwoPass` compresses and decodes them at once."""
    use(kernels)
    whole = Segment(0, ("a", "b", "c", "d"), ((5, 13), (7,), (2, 3, 70), (0, 4)), 0)
    for count in (1, 2, 3, 8):
        parts, u = cut(whole, count), torch.randn(whole.numel, generator=torch.Generator().manual_seed(count))
        made = Blocks(bits)
        payload, update = made.compress(u, Context(joined(parts)))
        each = [
            made.compress(x, Context(part)) for x, part in zip(u.split([x.numel for x in parts]), parts, strict=True)
        ]
        for found, expected in zip(payload, zip(*(x for x, _ in each), strict=True), strict=True):
            assert torch.equal(found, torch.cat(expected))
        assert torch.equal(update, torch.cat([x for _, x in each]))
        assert torch.equal(made.decode(payload, Context(joined(parts))), update)


@pytest.mark.parametrize("kernels", ["torch", *EITHER])
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_zeros_and_of_denormals_stay_finite(bits, flushes, kernels, use):
    use(kernels)
    u = torch.cat(
        [
            torch.zeros(64),
            torch.full((64,), 1e-40),
            torch.full((64,), 2.0**-149),
            torch.full((64,), 2.0 ** (bits - 1) - 1),
        ]
    )
    try:
        torch.set_flush_denormal(flushes)
        (scales, codes, _), update = Blocks(bits).compress(u, context((4, 64)))
    finally:
        torch.set_flush_denormal(False)
    assert scales.isfinite().all()
    assert (update - u).abs().max() <= 1e-40  # also of those values that an operation has flushed
    assert codes.view(4, -1)[0].unique().numel() == 1
