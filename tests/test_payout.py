"""Optimizer changes, and u with momentum payout: torch against kernels and results by hand."""

import math
from itertools import accumulate

import pytest
import torch

from lightning_sparse.kernels.block_stats import MAGNITUDE, BlockStats, overlaps
from lightning_sparse.kernels.changes import changes_
from lightning_sparse.kernels.payout import Payout, add_with_payout_
from lightning_sparse.kernels.write_back import clear_entries_, write_entries_
from tests.support.kernels import DEVICE, EITHER, HOSTILE, interpreted, needs_native, needs_triton
from tests.support.tiers import in_diagonals, later, one_in, tiers
from tests.support.update_training import exchanged_twice

LENGTHS = [[1], [63], [64, 1], [5, 0, 130, 1, 700, 64], [3, 8196, 8192, 9001], [4096], [3] * 50, [140_000]]
ALL = ["torch", *(EITHER if DEVICE == "cpu" else EITHER[:1])]


pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture
def on_device():
    with torch.device(DEVICE):
        yield


def summed(residual, *args):
    """Return the sum plus the payout, written over a tensor of NaN."""
    return add_with_payout_(residual, *args, torch.full_like(residual, math.nan))


def drawn(lengths, dtype, seed):
    """Every other tensor does not begin at a multiple of 16 bytes."""
    generator = torch.Generator("cpu").manual_seed(seed)
    cut = [number % 2 for number in range(len(lengths))]
    whole = (torch.randn(length + 1, generator=generator, device="cpu").to(DEVICE, dtype) for length in lengths)
    return [x[start : len(x) - 1 + start] for x, start in zip(whole, cut, strict=True)]


@pytest.mark.parametrize("kernels", ALL)
def test_by_hand(kernels, use):
    """3 delta − 2 w of the first parameter; the second has no momentum."""
    use(kernels)
    payout = Payout(torch.tensor([[3.0, 0.0], [-2.0, 0.0]]), [torch.tensor([2.0, -5.0]), torch.tensor([9.0])])
    residual, stats = torch.tensor([1.0, 1.0, 7.0]), BlockStats(3, 1)
    deltas = [torch.tensor([1.0, 0.0]), torch.tensor([2.0])]
    u = summed(residual, (0, 2, 3), deltas, 0.5, payout, stats)
    assert residual.tolist() == [1.5, 1.0, 8.0]
    assert u.tolist() == [1.5 + 3 - 4, 1.0 + 10, 8.0]
    assert summed(residual, (0, 2, 3), deltas, 1.0, Payout(payout.coefficients), None).tolist() == [
        5.5,
        1,
        10,
    ]
    x = torch.tensor([2.0, 1.0])
    changes_([x], [torch.tensor([10.0, 0.0])], [x], (0, 2))
    assert x.tolist() == [8.0, -1.0]
    x = torch.tensor([2.0, 1.0])
    changes_([x], [torch.tensor([10.0, 0.0])], [x], (0, 2), (torch.tensor([2.0]), torch.tensor([0.25])))
    assert x.tolist() == [18.5, -2.0]


@one_in(6)
@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", tiers(LENGTHS, LENGTHS[:6]))
def test_changes(lengths, dtype, kernels, use):
    use(kernels)
    bounds = [0, *accumulate(lengths)]
    weights, stepped = drawn(lengths, dtype, 0), drawn(lengths, dtype, 1)
    weights[0][0] = math.nan
    out = [torch.empty(length) for length in lengths]
    changes_(out, weights, stepped, bounds)
    for result, w, x in zip(out, weights, stepped, strict=True):
        assert torch.equal(result.nan_to_num(7), (w.float() - x.float()).nan_to_num(7))
    factors, rests = (x.abs() for x in drawn([len(lengths)] * 2, torch.float32, 2))
    factors[0] = 1  # not rescaled
    rests[0] = 0
    changes_(out, weights, stepped, bounds, (factors, rests))
    for result, w, x, f, r in zip(out, weights, stepped, factors, rests, strict=True):
        w, x = w.double(), x.double()
        torch.testing.assert_close(result.double(), f * (w - x) + r * w, rtol=1e-6, atol=1e-6, equal_nan=True)


@one_in(6)
@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("with_references", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", tiers(LENGTHS, LENGTHS[2:6]))
def test_sum_and_block_statistics(lengths, dtype, with_references, kernels, use):
    use(kernels)
    bounds, many = [0, *accumulate(lengths)], len(lengths)
    deltas, references = drawn(lengths, torch.float32, 0), drawn(lengths, dtype, 1)
    residual = drawn([bounds[-1]], torch.float32, 3)[0]
    coefficients = torch.stack([torch.linspace(0.5, 2, many), torch.linspace(-1, 0.5, many)])
    coefficients[:, many // 2] = 0  # no momentum
    payout = Payout(coefficients, references if with_references else None)
    each = zip(coefficients.T.tolist(), deltas, references, strict=True)
    paid = [a * c.double() + b * w.double() * with_references for (a, b), c, w in each]
    expected = residual + 0.5 * torch.cat(deltas)
    kept, stats = residual.clone(), BlockStats(bounds[-1], 64, moments=True)
    scale = torch.tensor(0.5) if with_references else 0.5
    u = summed(residual, bounds, deltas, scale, payout, stats)
    assert torch.equal(residual, expected)
    torch.testing.assert_close(u.double(), expected.double() + torch.cat(paid), rtol=1e-5, atol=1e-5)
    full = len(u) // 64 * 64
    assert torch.equal(stats.maxima, (u[:full].view(torch.int32) & MAGNITUDE).view(-1, 64).amax(1))
    mean, deviation = stats.mean_and_deviation()
    assert mean == pytest.approx(u.double().mean().item(), abs=1e-5)
    assert deviation == pytest.approx(u.double().std(correction=0).item(), rel=1e-3, abs=1e-3)
    assert torch.equal(summed(kept, bounds, deltas, scale, payout, None), u)


@pytest.mark.parametrize("kernels", ALL)
def test_what_is_not_finite_shows_in_u(kernels, use):
    use(kernels)
    payout = Payout(torch.tensor([[1.0, 1.0], [0.5, 1.0]]), [torch.ones(2), torch.tensor([math.nan])])
    residual = torch.tensor([0.0, 2.0, 0.0])
    u = summed(residual, (0, 2, 3), [torch.tensor([0.0, -math.inf]), torch.zeros(1)], 1.0, payout, None)
    assert u[0] == 0.5
    assert u[1] == -math.inf
    assert u[2].isnan()


@needs_triton
@pytest.mark.parametrize("length", [50, 12_288])
def test_deltas_that_are_not_contiguous(length, use):
    use("triton")
    delta = torch.arange(2.0 * length)[::2]
    payout = Payout(torch.tensor([[1.0], [1.0]]), [torch.ones(length)])
    assert torch.equal(summed(torch.zeros(length), (0, length), [delta], 1.0, payout, None), 2 * delta + 1)


@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clearing(dtype, kernels, use):
    use(kernels)
    tensors = [torch.ones(3, dtype=dtype), None, torch.ones(0, dtype=dtype), torch.ones(4, dtype=dtype)]
    clear_entries_(
        tensors, (0, 3, 5, 5, 9), torch.tensor([0, 2, 3, 5, 8, 9, 9] if kernels == "triton" else [0, 2, 5, 8])
    )
    assert [None if x is None else x.tolist() for x in tensors] == [[0, 1, 0], None, [], [0, 1, 1, 0]]
    clear_entries_([None, None], (0, 1, 2), torch.tensor([0]))


WITH_MOMENTS = ["adamw", "nadam", "radam", "adamax", "nesterov", "adam of others"]


@later
@needs_triton
@pytest.mark.parametrize(("dtype", "optimizer"), in_diagonals([torch.float32, torch.bfloat16], WITH_MOMENTS, 12))
def test_an_exchange_by_kernels_is_that_by_torch(optimizer, dtype, use):
    """Same weights and residual but for rounding."""
    use("triton")
    weights, residual, empty = exchanged_twice(optimizer, dtype, DEVICE)
    use("torch")
    by_torch, other, also_empty = exchanged_twice(optimizer, dtype, DEVICE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weights, by_torch, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(residual, other, rtol=0, atol=tolerance)
    assert torch.equal(empty, also_empty)
    assert 0.01 < empty.float().mean() < 0.2


FENCE, WIDTH = 7.0, 16


def fenced(lengths, draw):
    """Return tensors in one memory, and a function that checks that the memory around them has not changed."""
    memory = torch.full((sum(lengths) + WIDTH * (len(lengths) + 1),), FENCE)
    starts = [WIDTH * (index + 1) + sum(lengths[:index]) for index in range(len(lengths))]
    tensors = [memory[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    for x in tensors:
        x.copy_(draw(len(x)))
    fences = [memory[start - WIDTH : start] for start in [*starts, len(memory)]]
    return tensors, lambda: all(bool((fence == FENCE).all()) for fence in fences)


@interpreted  # by default its tensors would be on the GPU, which C does not read
@needs_native
@pytest.mark.parametrize("name", tiers(HOSTILE, ["student", "nan and inf", "largest"]))
@pytest.mark.parametrize("lengths", [*LENGTHS[:6], [0], [0, 3, 0, 0, 1030, 0]])
def test_loops_in_c_have_the_bits_of_torch_and_write_to_their_results_only(lengths, name, use):
    bounds, many = [0, *accumulate(lengths)], len(lengths)
    by_all = []
    for kernels in ("torch", "native"):
        use(kernels)
        torch.manual_seed(0)
        draw = HOSTILE[name]
        (w, *_), (x, intact), (m, also) = (fenced(lengths, draw) for _ in range(3))
        residual, w_all, mine, results = draw(bounds[-1]), torch.cat(w), x, []
        changes_(x, w, x, bounds)
        results += x
        for references in (None, w):
            coefficients = torch.tensor([[0.3], [0.7]]).expand(2, many).contiguous()
            u = summed(residual, bounds, mine, 1.0, Payout(coefficients, references), None)
            results += [residual.clone(), u]
        some, others = (torch.arange(0, bounds[-1], step) for step in (3, 2))
        write_entries_(x, bounds, [(some, residual[some]), (others, w_all[others])])
        clear_entries_(m, bounds, others)
        assert intact()
        assert also()
        by_all.append(torch.cat([*results, *x, *m]))
    one, other = by_all
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(one.nan_to_num(1.5, 1e38, -1e38), other.nan_to_num(1.5, 1e38, -1e38))


@pytest.mark.parametrize("start", [0, 1, 5, 6])
@pytest.mark.parametrize("stop", [1, 5, 6, 11, 12])
def test_parts_of_a_range(start, stop):
    bounds = [0, 5, 5, 6, 12]
    covered = [(index, place) for index, left, right in overlaps(bounds, start, stop) for place in range(left, right)]
    owner = [0] * 5 + [2] + [3] * 6
    assert covered == [(owner[place], place) for place in range(start, stop)]
