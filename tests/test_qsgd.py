"""QSGD: by hand, in expectation, bit by bit, and at its limits."""

import math

import pytest
import torch

from lightning_sparse import Method, NonFiniteGradient, Reducer, method, simulate
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels.codes import unpack_codes
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.kernels import launch
from lightning_sparse.memory import NoMemory
from tests.support.rounding import check_rounding
from tests.support.tiers import in_diagonals
from tests.support.updates import decoded


def test_by_hand():
    """The norm is 5; with 5 levels 3 and -4 are levels themselves, so nothing is left to chance."""
    compressor = QSGD(levels=5, bucket=2)
    (norms, packed), update = compressor.compress(torch.tensor([3.0, -4.0, 0.0]), Context.of(3))
    assert norms.tolist() == pytest.approx([5.0, 0.0])
    assert compressor.bits == 4
    # Each code 5 higher: 8 and 1 in a byte, 5 in the next.
    assert packed.tolist() == [0x18, 0x05, 0, 0]
    assert update.tolist() == [3.0, -4.0, 0.0]


@pytest.mark.parametrize(("levels", "bucket"), [(7, 1), (7, 12), (15, 512), (127, 1)])
def test_a_value_that_rounding_puts_above_its_norm_has_the_highest_level(levels, bucket):
    """Norm / levels of denormals is rounded, and in 2¹⁶ elements a random number is nearly 1: codes must not spill."""
    u = torch.ones(1 << 17)
    u[:bucket] = 10 * 2.0**-149
    compressor, ctx = QSGD(levels, bucket), Context.of(len(u))
    payload, update = compressor.compress(u, ctx)
    assert torch.equal(compressor.decode(payload, ctx), update)
    assert unpack_codes(payload[1], compressor.bits, len(u)).max() <= 2 * levels
    assert update.max() <= payload[0].max()


@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (15, 5), (63, 7), (127, 8)]
)
def test_values_take_as_many_bits_as_there_are_levels(levels, bits):
    assert bits == math.ceil(math.log2(2 * levels + 1))
    u = torch.randn(5120, generator=torch.Generator().manual_seed(0))
    compressor, ctx = QSGD(levels), Context.of(5120)
    payload, update = compressor.compress(u, ctx)
    assert sum(part.numel() * part.element_size() for part in payload) == 5120 * bits / 8 + 10 * 4
    assert compressor.nbytes(ctx.segment, None) == 5120 * bits / 8 + 10 * 4
    assert torch.equal(compressor.decode(payload, ctx), update)
    assert (u - update).abs().max() <= payload[0].max() / levels * (1 + 1e-5)


@pytest.mark.parametrize("levels", [1, 2, 4, 15, 64])
def test_one_entry_per_bucket_comes_back_exactly(levels):
    u = torch.zeros(6 * 64)
    u[::64] = torch.tensor([1.0, -2.0, 0.5, 4.0, -8.0, 2.0**-140])
    assert torch.equal(decoded(QSGD(levels, 64), u)[: 5 * 64], u[: 5 * 64])
    if levels == 1:  # of other numbers of levels the smallest numbers have no parts
        assert torch.equal(decoded(QSGD(levels, 64), u), u)


INPUTS = {
    "normal": lambda g: torch.randn(64, generator=g),
    "heavy": lambda g: torch.randn(64, generator=g) / torch.rand(64, generator=g).clamp(min=1e-3),
    "equal": lambda g: torch.full((64,), -2.5),
    "few": lambda g: torch.randn(64, generator=g) * (torch.arange(64) % 16 == 0),
    "huge": lambda g: torch.randn(64, generator=g) * 1e30,
    "tiny": lambda g: torch.randn(64, generator=g) * 1e-30,
}


@pytest.mark.parametrize(("kind", "levels"), in_diagonals(INPUTS, [1, 3, 15], 6))
def test_unbiased_and_within_the_published_variance(kind, levels):
    """E Q(v) = v, and E‖Q(v) - v‖² <= min(d/s², √d/s)‖v‖²."""
    u = INPUTS[kind](torch.Generator().manual_seed(1))
    compressor, norm = QSGD(levels, 64), u.double().norm()
    unit = float(u.abs().max())  # squares of the huge would be too large for the statistics, too
    error = check_rounding(
        lambda step: compressor.compress(u, Context.of(64, step=step))[1].double() / unit,
        u.double() / unit,
        norm / levels / unit,
        draws=1000,
    )
    assert error <= min(64 / levels**2, 8 / levels) * float(norm / unit) ** 2


@pytest.mark.parametrize("compressor", [QSGD(15), TernGrad(math.inf)], ids=repr)
def test_a_value_may_come_back_from_two_parts_in_65536_of_a_level_on(compressor):
    """The random numbers are odd multiples of 2⁻¹⁶: of a level 2⁻¹⁶ never comes back, 3 · 2⁻¹⁶ does once in 2¹⁵."""
    draws, numel = 400, 16 * 512
    for part, expected in ((2**-16, 0.0), (3 * 2**-16, draws * (numel - 16) / 2**15)):
        u = torch.full((numel,), part / getattr(compressor, "levels", 1))
        u[::512] = 1.0  # the largest of each bucket
        updates = (compressor.compress(u, Context.of(numel, step=step))[1] for step in range(draws))
        came = sum(int(update.count_nonzero()) - 16 for update in updates)
        assert abs(came - expected) <= 5 * math.sqrt(expected), "five deviations of a sum of rare events, about 50"


def test_ranks_and_elements_round_independently():
    """The error of the mean over ranks, and that of a sum of elements, is as of independent ones."""
    u, steps, ranks = torch.full((512,), 1.0), 300, 4
    # With 15 levels, a value is 15 / √512 = 0.66 of a level.
    p, level = 15 / math.sqrt(512), math.sqrt(512) / 15
    sums = []
    for step in range(steps):
        updates = [QSGD().compress(u, Context.of(512, step=step, rank=rank))[1].double() for rank in range(ranks)]
        sums.append(float(torch.stack(updates).mean(0).sum() - 512))
    variance = 512 * p * (1 - p) * level**2 / ranks
    # The variance of an estimated variance of a normal distribution is 2 / n of its square.
    assert abs(sum(x * x for x in sums) / steps / variance - 1) < 5 * math.sqrt(2 / steps)


@pytest.mark.parametrize("levels", [1, 3, 7])
def test_as_few_levels_above_zero_as_published(levels):
    """E nnz <= s(s + √d). The number is a sum of independent numbers of variance at most 1/4 each."""
    numel, draws = 512, 50
    u = torch.randn(numel * draws, generator=torch.Generator().manual_seed(0))
    compressor, ctx = QSGD(levels), Context.of(numel * draws)
    payload, _ = compressor.compress(u, ctx)
    codes = unpack_codes(payload[1], compressor.bits, numel * draws)
    found = int((codes != levels).sum()) / draws
    assert found <= levels * (levels + math.sqrt(numel)) + 5 * math.sqrt(numel / 4 / draws)


@pytest.mark.parametrize("chunk", [64, 1 << 10])
def test_pieces_that_stay_in_cache_change_nothing(chunk, monkeypatch):
    u = torch.randn(5001, generator=torch.Generator().manual_seed(0))
    for bucket in (1, 3, 512, 6000):
        monkeypatch.undo()
        ctx = Context.of(5001)
        expected, update = QSGD(bucket=bucket).compress(u, ctx)
        monkeypatch.setattr(launch, "CHUNK", chunk)
        payload, found = QSGD(bucket=bucket).compress(u, ctx)
        assert torch.equal(found, update)
        assert all(map(torch.equal, payload, expected))
        assert torch.equal(QSGD(bucket=bucket).decode(payload, ctx), update)


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "'w' is not finite"), (math.inf, "'w' is not finite"), (3e38, "too large for the compr")],
)
def test_what_has_no_norm_is_an_error_on_all_ranks(value, message):
    def rank(comm):
        grads = {"w": torch.ones(1000)}
        if comm.rank == 1:
            grads["w"][700:703] = value
        with pytest.raises(NonFiniteGradient, match=message):
            Reducer(method("qsgd"), comm).reduce_(grads)
        return True

    assert all(simulate(3, rank))


@pytest.mark.parametrize("options", [{"levels": 0}, {"levels": 128}, {"levels": 1.5}, {"bucket": 0}, {"bucket": True}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=rf"QSGD\({next(iter(options))}="):
        QSGD(**options)


def test_errors_that_would_grow_are_not_kept():
    """With s² ≤ n the bound on the error, √n/s · ‖v‖², is at least ‖v‖²."""
    with pytest.raises(ValueError, match=r"Residual\(\) keeps the errors of QSGD\(levels=7.*\), .* Use NoMemory\(\)"):
        Method(QSGD(levels=7))
    assert Method(QSGD(levels=7), NoMemory())
    assert Method(QSGD(levels=23)), "23² > 512: its errors shrink"
