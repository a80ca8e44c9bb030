"""Kernels in C and in Triton against plain torch. Triton's kernels run on a GPU, or with the interpreter on the CPU.

Compilation for GPUs is tested without a GPU. Tests that need a GPU are skipped with a reason.
"""

import contextlib
import importlib.util
import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaging.version import Version

from benchmarks import selection
from benchmarks.harness.rehearsal import rehearsal
from benchmarks.harness.timing import captured
from lightning_sparse import METHODS, Method, NonFiniteGradient, Reducer, method
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm import ProcessGroupComm, RankFailure
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.compressors.blocks import Blocks
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.context import Context
from lightning_sparse.contrib.kernels import codes, levels, row_numbers, ternary
from lightning_sparse.contrib.kernels.row_table import row_table
from lightning_sparse.contrib.kernels.signs import count_votes
from lightning_sparse.contrib.kernels.ternary import sum_of_ternary
from lightning_sparse.contrib.onebit import OneBit
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.rows import row_count, rows_of
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.contrib.scaled_sign import ScaledSign
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.contrib.terngrad import TernGrad
from lightning_sparse.kernels import block_stats, launch, native, select, select_triton, two_bits
from lightning_sparse.kernels.basis import bases
from lightning_sparse.kernels.block_stats import BlockStats, add_with_stats_
from lightning_sparse.kernels.dispatch import backend_of
from lightning_sparse.kernels.select import topk_indices
from lightning_sparse.kernels.threshold import gaussian_indices
from lightning_sparse.kernels.uniform import FACTORS, add_uniform_, key_and_step
from lightning_sparse.kernels.write_back import add_entries_, write_dense_, write_entries_
from lightning_sparse.layout import Segment
from lightning_sparse.memory import Residual
from tests.processes import run_ranks
from tests.support.kernels import (
    DEVICE,
    EITHER,
    HOSTILE,
    KERNELS,
    SOME,
    Echo,
    device_of,
    interpreted,
    is_kernel,
    needs_gpu,
    needs_native,
    needs_triton,
    no_waiting,
)
from tests.support.representatives import DISTINCT
from tests.support.tiers import exhaustive, full, in_diagonals, one_in, tiers
from tests.support.training import make
from tests.support.vectors import INPUTS, SMOOTH, oracle

# numpy's, in which the interpreter calculates: of NaN and infinities, and of sums that overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def same_bits(x, y):
    """Whether two fp32 tensors are equal to the last bit, whatever the bits of a NaN are."""
    x, y = x.cpu(), y.cpu()
    broken = x.isnan()
    return torch.equal(broken, y.isnan()) and torch.equal(x[~broken].view(torch.int32), y[~broken].view(torch.int32))


# Shorter than a block, whole tiles, cut at both ends, short ones between long ones, and none at all.
LENGTHS = [[0], [1], [63], [64, 1], [5, 0, 130, 1, 700, 64], [8192], [4097, 1, 13, 12289], [9000, 3, 20001, 4096]]


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "dtype"), in_diagonals(LENGTHS, (torch.float32, torch.bfloat16, torch.float16), 6), ids=str
)
def test_adding_and_scanning(lengths, dtype, use):
    bounds = [0, *itertools.accumulate(lengths)]
    for block, scale in ((1, 1.0), (16, 2.0**-16), (64, 2.0**-16), (64, 1 / 3)):
        # Gradients are contiguous, as in DDP's buckets. In some cases memory is not aligned.
        bucket = torch.randn(bounds[-1] + 1).to(dtype)
        start = block == 1 or scale == 1 / 3
        grads = bucket[start : start + bounds[-1]].split(lengths)
        u = torch.randn(bounds[-1])
        x, mine = u.to(DEVICE, copy=True), BlockStats(len(u), block, moments=True)
        use("triton")
        # On the device, as a loss scale is, the factor is the same number.
        factor = torch.tensor(scale, device=DEVICE) if block == 16 else scale
        theirs = bucket.to(DEVICE)[start : start + bounds[-1]].split(lengths)
        assert add_with_stats_(x, bounds, theirs, factor, mine) is x
        alone = add_with_stats_(u.to(DEVICE, copy=True), bounds, theirs, factor, None)
        assert torch.equal(alone, x), "adding is not another thing without scanning"
        use("torch")
        terms = scale * torch.cat(grads).float()
        add_with_stats_(u, bounds, grads, scale, BlockStats(len(u), block))
        if scale == 1 / 3:
            # Depending on the machine, the product is rounded before it is added, by 2⁻²⁴ of it. Then each of the two
            # sums is rounded by 2⁻²⁴ of it. The factor 2 covers the rounding of x, and of the product above.
            assert bool(((x.cpu() - u).abs() <= 2**-23 * (u.abs() + terms.abs()) + 1e-44).all())
        else:
            assert torch.equal(x.cpu(), u)
        check_scan(mine, x.cpu())


@needs_triton
@pytest.mark.parametrize("name", tiers(HOSTILE, ["nan and inf"]))
def test_scanning_hostile_inputs(name, use):
    use("triton")
    for numel, block in itertools.product((1, 63, 4096, 4096 + 63, 9001), (1, 16, 64)):
        u = HOSTILE[name](numel)
        x, mine = u.to(DEVICE, copy=True), BlockStats(numel, block, moments=True)
        zeros = torch.zeros(numel, device=DEVICE)
        assert same_bits(add_with_stats_(x, [0, numel], [zeros], 1.0, mine), u + 0.0)  # which makes -0.0 + 0.0 = 0.0
        check_scan(mine, x.cpu())
        check_scan(BlockStats(numel, block, moments=True).read(u.to(DEVICE)), u)


def check_scan(mine, u):
    """Maxima are exact; so are moments but for rounding."""
    full = len(u) // mine.block * mine.block
    if mine.block == 1:
        assert mine.maxima is None
    else:
        bits = (u[:full].view(torch.int32) & block_stats.MAGNITUDE).view(-1, mine.block)
        assert torch.equal(mine.maxima.cpu(), bits.amax(1) if full else torch.empty(0, dtype=torch.int32))
    sums, x = mine.partial.sum(0, dtype=torch.float64).cpu(), u.double()
    if bool((x.abs() < 1e15).all()):
        # Higham 2002, 4.2, bounds the error of a sum of n terms in fp32, in any order. It is at most
        # (n - 1)·2⁻²⁴/(1 - n·2⁻²⁴) of the sum of their magnitudes; a square adds one rounding. A tile has n = 4096
        # terms, so 2⁻¹¹ is twice the bound. Tiles are summed in fp64. Squares below 2⁻¹⁴⁹ vanish, which is an absolute
        # error for each.
        assert abs(sums[0] - x.sum()) <= 2**-11 * x.abs().sum()
        assert abs(sums[1] - x.square().sum()) <= 2**-11 * x.square().sum() + len(x) * 2**-149
    elif bool(x.isnan().any()):
        assert bool(sums.isnan().all())
    else:
        assert not bool(sums.isfinite().all())  # overflow must not look like a number


@needs_triton
@pytest.mark.parametrize("name", tiers(HOSTILE, ["few values"]))
def test_topk_equals_the_oracle(name, use):
    use("triton")
    for numel in (0, 1, 65, 4096 + 63, 12_345):
        u = HOSTILE[name](numel)
        counts = {0, 1, *(round(numel * density) for density in (0.001, 0.01, 0.02, 0.5)), numel - 1, numel, numel + 1}
        for k in counts - {-1}:
            chosen = topk_indices(u.to(DEVICE), k)
            assert chosen.dtype == torch.int64
            assert torch.equal(chosen.cpu(), oracle(u, k)), (numel, k)


@full
@needs_triton
@pytest.mark.parametrize(
    "name", tiers(["normal", "few values", "mostly zero", "denormal", "nan and inf"], ["nan and inf"])
)
def test_selection_among_the_entries_that_reach_a_bound(name):
    u = INPUTS[name](9_001)
    bits = u.to(DEVICE).view(torch.int32)
    magnitudes = u.view(torch.int32) & block_stats.MAGNITUDE
    blocks = select_triton.Blocks(bits, torch.tensor([*range(0, 9_001 // 32, 2), 9_001 // 32], device=DEVICE), 32)
    # Every other block of 32, and the rest at the end.
    mine = torch.cat([magnitudes[: 9_001 // 32 * 32].view(-1, 32)[::2].reshape(-1), magnitudes[9_001 // 32 * 32 :]])
    for k in (1, 2, 90, 4_000, len(mine)):
        threshold = mine.sort(descending=True).values[k - 1].to(DEVICE)
        # All entries that reach a bound are kept. Selection from them finds the same largest entries.
        counts = select_triton.zeros(torch.device(DEVICE))
        kept = select_triton.Kept(blocks, threshold // 2, counts[0])
        assert int(kept.numbers.sum()) == int((mine >= threshold.cpu() // 2).sum())
        chosen = select_triton.select(kept, counts[0], k, k)
        assert torch.equal(chosen, select_triton.select(blocks, counts[1], k, k))
        assert magnitudes[chosen.cpu()].sort(descending=True).values.equal(mine.sort(descending=True).values[:k])


@needs_triton
def test_topk_takes_what_the_pass_that_makes_u_has_found(use, monkeypatch):
    use("triton")
    topk, numel = TopK(0.001), 3 * 4096 + 17
    ctx, u, grad = Context.of(numel, stats=topk.block_stats(numel)), torch.randn(numel), torch.randn(numel)
    x = add_with_stats_(u.to(DEVICE, copy=True), [0, numel], [grad.to(DEVICE)], 0.5, ctx.stats)
    monkeypatch.setattr(BlockStats, "read", None)
    k = topk.count(numel)
    assert torch.equal(topk.choose(x, k, ctx).cpu(), oracle(u + 0.5 * grad, k))


@needs_triton
@pytest.mark.parametrize("name", tiers([*HOSTILE, *SMOOTH], ["Laplace"]))
def test_gaussiank_equals_the_reference(name, use):
    for numel in (3, 4096 + 63, 20_007):
        u = {**HOSTILE, **SMOOTH}[name](numel)
        for k in {max(1, round(density * numel)) for density in (0.001, 0.01, 0.1)}:
            z = NormalDist().inv_cdf(1 - k / numel / 2) if k > 1 else 0.0
            block = select.block_size(numel, k)
            use("triton")
            mine = BlockStats(numel, block, moments=True).read(u.to(DEVICE))
            padded = gaussian_indices(u.to(DEVICE), k, z, mine).cpu()
            chosen = padded[padded < numel]
            assert len(padded) == max(4 * k // 3, k)
            assert bool((padded[len(chosen) :] == numel).all())
            assert 2 * k / 3 <= len(chosen) <= 4 * k / 3
            # From moments that are equal to the last bit, the search takes the same steps.
            use("torch")
            reference = BlockStats(numel, block, moments=True).read(u)
            reference._total, reference._squares = mine.partial.sum(0, dtype=torch.float64).tolist()
            assert torch.equal(chosen, gaussian_indices(u, k, z, reference)), (numel, k)


def term(numel, count):
    return torch.randperm(numel)[:count].sort().values, torch.randn(count) * 10 ** torch.randn(count)


@one_in(2)
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[1], [3, 4], [0, 5, 0, 0, 130, 1, 700, 64, 0], [3000, 1, 2000]], ids=str)
def test_writing_terms_in_order(lengths, dtype, use):
    bounds = [0, *itertools.accumulate(lengths)]
    numel = bounds[-1]
    # Most elements are in several terms: their sum depends on the order.
    terms = [term(numel, count) for count in (numel // 2, 0, numel, 1, -(-numel // 3))]
    terms[2][1][0] = 1e30  # more than 16 bits hold
    results = []
    for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
        use(kernels)
        grads = [torch.full((length,), 7.0, dtype=dtype, device=device) for length in lengths]
        lost = write_entries_(grads, bounds, [(indices.to(device), values.to(device)) for indices, values in terms])
        if lost is not None and kernels == "triton":
            there = lost[0] < numel
            assert not lost[1][~there].any()  # padding has no values
            lost = [part[there] for part in lost]
        results.append([torch.cat(grads).cpu(), *(part.cpu() for part in lost or ())])
    assert len(results[0]) == len(results[1]) == (1 if dtype == torch.float32 else 3)
    assert all(map(torch.equal, *results))


@needs_triton
def test_gradients_of_several_dtypes(use):
    terms = [term(100, 50), term(100, 60)]
    results = []
    for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
        use(kernels)
        grads = [torch.zeros(60, device=device), torch.zeros(40, dtype=torch.bfloat16, device=device)]
        write_entries_(grads, [0, 60, 100], [(indices.to(device), values.to(device)) for indices, values in terms])
        results.append([grad.cpu() for grad in grads])
    assert all(map(torch.equal, *results))


@needs_triton
def test_adding_and_taking_out_entries(use):
    use("triton")
    for numel, count in ((1, 0), (1, 1), (5000, 1), (5000, 1024), (5000, 2500)):
        x, (indices, values) = torch.randn(numel), term(numel, count)
        mine = x.to(DEVICE, copy=True)
        assert add_entries_(mine, indices.to(DEVICE), values.to(DEVICE), -1.0) is mine
        assert torch.equal(mine.cpu(), x.index_add(0, indices, values, alpha=-1))
        # Sent entries become exactly zero. A rest would be sent again.
        chosen = x[indices].to(DEVICE)
        assert not add_entries_(x.to(DEVICE, copy=True), indices.to(DEVICE), chosen, -1.0)[indices.to(DEVICE)].any()


@one_in(3)
@needs_triton
@pytest.mark.parametrize(
    "size", tiers([1, 2, 8], [2])
)  # by others CUDA divides to another last bit, on all ranks alike
@pytest.mark.parametrize(
    ("name", "options"),
    tiers(
        [
            *itertools.product(("topk", "gaussiank"), ({}, {"index_format": "int32"}, {"value_format": "bfloat16"})),
            ("topk", {"value_format": "int2"}),
            ("randk", {}),
        ],
        [("topk", {}), ("gaussiank", {"value_format": "bfloat16"}), ("topk", {"value_format": "int2"}), ("randk", {})],
    ),
)
@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_steps_through_the_reducer(name, dtype, options, size, use):
    """Nothing is lost, and all is as by plain torch."""
    shapes = {"w": (90, 91), "b": (91,), "v": (70, 70)}
    generator = torch.Generator().manual_seed(0)
    steps = [
        {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()} for _ in range(3)
    ]
    outcomes = []
    for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
        use(kernels)
        reducer = Reducer(method(name, density=0.01, **options), Echo(size))
        outs = []
        for step in steps:
            grads = {key: grad.to(device, copy=True) for key, grad in step.items()}
            reducer.reduce_(grads)
            outs.append({key: grad.cpu() for key, grad in grads.items()})
        kept = {key: kept.cpu() for key, kept in reducer.state_dict()["elements"]["residual"].items()}
        outcomes.append((outs, kept))
    for outs, residual in outcomes:
        for key, kept in residual.items():
            given, sent = sum(step[key].float() for step in steps), sum(out[key].float() for out in outs)
            torch.testing.assert_close(kept + sent, given, rtol=0, atol=4e-6)
            assert sent.any()
    if name != "gaussiank":  # which asks for moments, and these are rounded differently
        (outs, residual), (expected, kept) = outcomes
        assert all(torch.equal(out[key], other[key]) for out, other in zip(outs, expected, strict=True) for key in out)
        assert all(torch.equal(residual[key], kept[key]) for key in kept)


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "dtype"), in_diagonals(LENGTHS, (torch.float32, torch.bfloat16, torch.float16), 6), ids=str
)
def test_a_dense_result_is_written_as_by_plain_torch(lengths, dtype, use):
    bounds = [0, *itertools.accumulate(lengths)]
    out = 1e5 * torch.randn(bounds[-1])  # beyond fp16's largest
    out[::7] = torch.finfo(torch.float32).max
    out[3::50] = torch.nan
    for step_ok in (None, True, False):
        written = []
        for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
            use(kernels)
            grads = torch.ones(bounds[-1] + 1, dtype=dtype, device=device)[1:].split(lengths)
            ok = None if step_ok is None else torch.tensor(step_ok, device=device)
            rest = write_dense_(grads, bounds, out.to(device), True, ok)
            assert (rest is None) == (dtype == torch.float32)
            written.append((torch.cat(grads).float(), torch.zeros(1) if rest is None else rest))
        for mine, theirs in zip(*written, strict=True):
            assert same_bits(mine, theirs)


# Full blocks, cut ones, matrices of no elements, vectors before and between, and nothing but vectors.
MATRICES = [[(64, 64)], [(3,), (5, 13), (0, 4), (7,), (1, 1), (90, 91), (2,)], [(1, 1000)], [(9,)]]


@one_in(4)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize(
    ("compressor", "name"),
    in_diagonals([Blocks(4), Blocks(4, 6), Blocks(8), Blocks(8, 2), Blocks(8, 130)], HOSTILE, 7),
    ids=repr,
)
def test_blocks_are_those_of_plain_torch(compressor, name, kernels, use):
    """If a value is not finite, only the scale shows it, and the codes of its block do not matter."""
    for shapes in MATRICES:
        ctx, u, x = of_rows(shapes, name, kernels)
        use("torch")
        payload, update = compressor.compress(u, ctx)
        use(kernels)
        found, applied = compressor.compress(x, ctx)
        for mine, theirs in zip(found, payload, strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        scales, codes, exact = (part.cpu() for part in found)
        finite = payload[0].isfinite()
        assert torch.equal(finite, scales.isfinite())
        assert torch.equal(scales[finite], payload[0][finite])
        width = compressor.block * compressor.bits // 8
        assert torch.equal(codes.view(-1, width)[finite], payload[1].view(-1, width)[finite])
        assert same_bits(exact, payload[2])
        here = applied.cpu().isfinite()
        assert torch.equal(here, update.isfinite())
        assert torch.equal(applied.cpu()[here], update[here])
        again = compressor.decode(tuple(map(shifted, found)), ctx).cpu()
        assert same_bits(again[here] + 0.0, applied.cpu()[here] + 0.0)
        assert kernels == "triton" or same_bits(again[here], applied[here]), "not even a zero has another sign"


# Whole tiles, rows of one element and of several pieces, of no elements, vectors and scalars, and parameters of a few
# elements within one byte.
ROWS = [
    [(4, 1024)],
    [(3,), (5, 13), (0, 4), (7,), (1, 1), (50, 91), (2,), ()],
    [(2, 1025), (1,), (6, 1, 3)],
    [(130, 1)],
    [(3, 0)],
]


def of_rows(shapes, name, kernels):
    """Return a context, its u, and a copy of u on the kernels' device, in memory that is not aligned."""
    ctx = Context(Segment(0, tuple(map(str, range(len(shapes)))), tuple(shapes), 0))
    u = HOSTILE[name](ctx.segment.numel)
    return ctx, u, shifted(u.to(device_of(kernels)))


def shifted(x):
    """Return a 1-D copy whose memory starts one element after an aligned address."""
    return torch.empty(len(x) + 1, dtype=x.dtype, device=x.device)[1:].copy_(x)


def apart(x):
    """Return a copy with other values between its rows, as in gathered messages."""
    return torch.nn.functional.pad(x, (0, 8), value=77)[..., : x.shape[-1]]


def of_a_column(x):
    """Return a copy with other values between its elements, as in gathered messages of one element each."""
    return x.unsqueeze(1).repeat(1, 2)[:, 0]


@one_in(6)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize(("shapes", "name"), in_diagonals(ROWS, HOSTILE, 8), ids=str)
@pytest.mark.parametrize("compressor", [Sign(), ScaledSign(), OneBit()], ids=repr)
def test_signs_and_what_they_stand_for_are_those_of_plain_torch(compressor, shapes, name, kernels, use):
    ctx, u, x = of_rows(shapes, name, kernels)
    use("torch")
    payload, expected = compressor.compress(u, ctx)
    use(kernels)
    found, update = compressor.compress(x, ctx)
    assert [(part.dtype, part.shape) for part in found] == [(part.dtype, part.shape) for part in payload]
    numbers, packed = (part.cpu() for part in found)
    assert torch.equal(packed, payload[1])
    assert torch.equal(x.cpu().view(torch.int32), u.view(torch.int32)), "u is left as it is"
    assert same_bits(compressor.decode(tuple(map(shifted, found)), ctx), update)
    assert same_bits(compressor.decode((found[0], of_a_column(found[1])), ctx), update)
    if isinstance(compressor, Sign):
        assert torch.equal(numbers, payload[0])
        assert torch.equal(update.cpu(), expected)
        return
    check_means(numbers, u, rows_of(ctx.segment, whole=compressor.whole), compressor.numbers)
    # Each element has the value that its sign stands for.
    upper, lower = (part.view(-1) for part in compressor.levels(numbers.view(compressor.numbers, -1)))
    below_zero = ~(u >= 0)
    for rows in rows_of(ctx.segment, whole=compressor.whole):
        negative, own = (part[rows.start : rows.stop].view(-1, rows.length) for part in (below_zero, update.cpu()))
        above, below = (part[rows.first : rows.last, None] for part in (upper, lower))
        assert same_bits(own, torch.where(negative, below, above))
    assert torch.equal(update.cpu().isfinite(), expected.isfinite())


def check_means(numbers, u, rows, count):
    """Compare means with those in fp64.

    A piece is a sum of up to 1024 terms in fp32, in any order. Its error is below 1024·2⁻²⁴ of the sum of their
    magnitudes (Higham 2002, 4.2). So the error of a mean is below 1024·2⁻²⁴ of the mean magnitude. All other steps are
    in fp64, except that the result is rounded; twice the bound covers this. If there are elements above 2¹¹¹, each
    element is rounded to 2⁻¹³⁸.
    """
    numbers = numbers.view(count, -1).double()
    for row in rows:
        own = u[row.start : row.stop].view(-1, row.length).double()
        sides = [own >= 0, own < 0] if count == 2 else [own == own]
        for found, side in zip(numbers[:, row.first : row.last], sides, strict=True):
            magnitudes = torch.where(side | own.isnan(), own, 0).abs().sum(1) / side.sum(1).clamp(min=1)
            exact = magnitudes if count == 1 or side is sides[0] else -magnitudes
            fine = magnitudes.isfinite()
            assert torch.equal(fine, found.isfinite())
            assert bool(((found - exact).abs() <= 2**-13 * magnitudes + 2**-138)[fine].all())


@one_in(8)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("name", ["student", "largest", "denormal", "nan and inf"])
def test_a_row_of_many_pieces_is_added_up_in_several_turns(name, kernels, use, monkeypatch):
    monkeypatch.setattr(row_numbers, "AT_A_TIME", 4)
    ctx, u, x = of_rows([(2, 2100), (5,), (1, 9000), (3, 1)], name, kernels)
    use(kernels)
    rows, wholes = rows_of(ctx.segment), rows_of(ctx.segment, whole=True)
    check_means(row_numbers.mean_magnitudes(x, rows).cpu(), u, rows, 1)
    check_means(row_numbers.signed_means(x, rows).cpu(), u, rows, 2)
    check_scales(row_numbers.clipped_maxima(x, wholes, 2.5).cpu(), u, wholes, 2.5)
    x.zero_()[13_000] = -1e-45
    assert row_numbers.used_rows(x, rows).tolist() == [0, 0, 0, 1, 0, 0, 0]


@one_in(6)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize(("shapes", "name"), in_diagonals(ROWS, HOSTILE, 8), ids=str)
@pytest.mark.parametrize("clip", [2.5, math.inf])
def test_ternary_values_are_those_of_plain_torch(clip, shapes, name, kernels, use):
    ctx, u, x = of_rows(shapes, name, kernels)
    compressor = TernGrad(clip)
    use(kernels)
    own = compressor.scales(x, ctx).cpu()
    check_scales(own, u, rows_of(ctx.segment, whole=True), clip)
    # With equal scales all finite results are equal. The scales are this rank's own, and larger ones that ranks share.
    for scales in (own, own * 1.7):
        use("torch")
        packed, expected = compressor.quantize(u, own, scales, ctx)
        use(kernels)
        theirs = [part.to(device_of(kernels)) for part in (own, scales)]
        found, update = compressor.quantize(x, *theirs, ctx)
        finite = expected.isfinite()
        assert torch.equal(update.cpu().isfinite(), finite)
        unlike = (update.cpu() != expected) & finite
        if unlike.any():
            assert kernels == "triton"
            # On a GPU the product is not rounded before the noise is added: three roundings of 2⁻²⁴ differ at most.
            limits, shared = (torch.cat([part.expand(n) for part, n in sizes(each, ctx)]) for each in (own, scales))
            at = (u.double() / limits).clamp(-1, 1) * (limits / shared)
            at += add_uniform_(torch.zeros(len(u)), ctx.key(shared=False))
            assert bool(((at[unlike].abs() - 0.5).abs() <= 3 * 2**-24).all())
        elif finite.all():
            assert torch.equal(found.cpu(), packed)
        assert same_bits(compressor.decode((theirs[1], shifted(found)), ctx)[finite], update[finite])


@pytest.mark.parametrize("kernels", EITHER)
def test_random_numbers_are_those_of_plain_torch(kernels, use):
    """To the last bit: 1/2 minus an element's random number is rounded down, and a value 2⁻¹⁶ above is rounded up."""
    ctx, one = Context.of(3001, step=3), torch.ones(1, device=device_of(kernels))
    noise = add_uniform_(torch.zeros(3001), ctx.key(shared=False))
    use(kernels)
    for above, expected in ((0, 0), (2**-16, 1)):
        _, update = TernGrad().quantize((0.5 - noise + above).to(one.device), one, one, ctx)
        assert bool((update == expected).all())


def sizes(scales, ctx):
    rows = rows_of(ctx.segment, whole=True)
    return [(scale, row.stop - row.start) for scale, row in zip(scales.double(), rows, strict=True)]


def check_scales(found, u, rows, clip):
    """A sum of 1024 squares is off by 1024·2⁻²⁴ of itself, and its root by half of that. Three roundings follow."""
    for scale, row in zip(found.double(), rows, strict=True):
        own = u[row.start : row.stop].double()
        exact = own.abs().max().minimum(own.square().mean().sqrt() * min(clip, 1e30))
        assert bool(exact.isfinite()) == bool(scale.isfinite())
        assert not exact.isfinite() or abs(scale - exact) <= 2**-14 * exact + 2**-149
        assert clip < math.inf or not exact.isfinite() or scale == exact


@one_in(4)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize(
    ("compressor", "name"),
    in_diagonals([QSGD(), QSGD(1, 3), QSGD(7, 1), QSGD(127, 6000), QSGD(63, 1000)], HOSTILE, 7),
    ids=repr,
)
def test_levels_are_those_of_plain_torch(compressor, name, kernels, use, monkeypatch):
    """With equal norms, all finite levels are equal."""
    for numel in (0, 1, 9, 1024, 5003) if kernels == "native" else (0, 9, 1100):
        ctx, u, x = of_rows([(numel,)], name, kernels)
        use(kernels)
        (norms, packed), update = compressor.compress(x, ctx)
        check_norms(norms.cpu(), u, compressor.bucket)
        use("torch")
        left = iter(norms.tolist())
        with monkeypatch.context() as patched:
            patched.setattr(levels, "_norms", lambda rows, left=left: torch.tensor([next(left) for _ in rows]))
            (_, theirs), expected = compressor.compress(u, ctx)
        use(kernels)
        again, update = compressor.decode((shifted(norms), shifted(packed)), ctx).cpu(), update.cpu()
        finite = expected.isfinite()
        assert torch.equal(update.isfinite(), finite)
        assert torch.equal(update[finite], expected[finite])
        assert same_bits(again[finite], update[finite])
        if finite.all():
            assert torch.equal(packed.cpu(), theirs)


def check_norms(norms, u, bucket):
    """A sum of 1024 squares is off by 1024·2⁻²⁴ of itself, and its root by half of that. One rounding follows."""
    exact = torch.stack([part.double().norm() for part in u.split(bucket)]) if len(u) else torch.empty(0)
    fine = exact.float().isfinite()
    assert torch.equal(norms.isfinite(), fine)
    assert bool(((norms - exact).abs() <= 2**-14 * exact + 2**-149)[fine].all())


@one_in(4)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("size", [1, 2, 7, 129])
def test_sums_of_ternary_codes_are_exact(size, kernels, use):
    ctx, _, _ = of_rows(ROWS[1], "zeros", kernels)
    scales = torch.rand(7)
    width = codes.region_codes(ctx.segment.numel, 1)
    drawn = torch.randint(0, 3, (size, width), dtype=torch.uint8)
    packed = torch.stack([torch.nn.functional.pad(codes.pack_codes(row, 2), (0, 8)) for row in drawn])[:, :-8]
    outcomes = []
    for choice, device in (("torch", "cpu"), (kernels, device_of(kernels))):
        use(choice)
        total = sum_of_ternary(packed.to(device), width)
        assert torch.equal(total.cpu(), drawn.sum(0, dtype=torch.int16))
        given = total[: ctx.segment.numel]
        given = given.to(torch.uint8) if size < 100 else given
        outcomes.append(TernGrad().values(given, scales.to(device), ctx, size).cpu())
    assert torch.equal(*outcomes)


@one_in(8)
@needs_triton
@pytest.mark.parametrize(("shapes", "size"), in_diagonals(ROWS, [1, 2, 3, 8, 129], 3), ids=str)
def test_votes_are_counted_as_by_plain_torch(shapes, size, use):
    segment = Segment(0, tuple(map(str, range(len(shapes)))), tuple(shapes), 0)
    width = codes.region_codes(segment.numel, size)
    used = torch.randint(0, 2, (size, row_count(segment) + 5), dtype=torch.uint8)
    # As in messages, with other bytes before and after.
    votes = torch.randint(0, 256, (size, width // 8 + 24), dtype=torch.uint8)
    for rank in {0, size // 2, size - 1}:
        won = []
        for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
            use(kernels)
            theirs = votes.to(device)[:, 16 : 16 + width // 8]
            won.append(count_votes(theirs, used.to(device), rows_of(segment), rank * width, (rank + 1) % size).cpu())
        assert torch.equal(*won)


@one_in(6)
@needs_triton
@pytest.mark.parametrize("size", [3, 2, 1])
@pytest.mark.parametrize("name", ["signsgd", "signum"])
def test_votes_through_the_reducer(name, size, use):
    outcomes = []
    for kernels, device in (("torch", "cpu"), ("triton", DEVICE)):
        use(kernels)
        reducer, outs = Reducer(method(name), Echo(size), granularity="model"), []
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            grads = {
                str(number): torch.randn(shape, generator=generator).round().to(device)
                for number, shape in enumerate(ROWS[1])
            }
            reducer.reduce_(grads)
            outs += [grad.view(-1).cpu() for grad in grads.values()]
        outcomes.append(torch.cat(outs))
    assert torch.equal(*outcomes)


def methods_at(density):
    return {name: make(name, density) for name in METHODS}


def every_method(rank, size):
    """Return the results of three steps of every method with equal gradients, by plain torch and by Triton."""
    outcomes = {}
    comm = ProcessGroupComm()
    ways = methods_at(0.02)
    if size % 2 == 0:
        ways = {"gtopk": ways["gtopk"]}  # whose rounds depend on whether the number of ranks is a power of two
        ways["two levels"] = Method(TopK(0.02), Residual(), TwoLevel(GlobalTopK(), 2))
        ways["two levels, gaussiank"] = Method(GaussianK(0.02), Residual(), TwoLevel(Mean(), 2))
        ways["two levels, oktopk"] = Method(TopK(0.02), Residual(), TwoLevel(OkTopK(refresh=2), 2))
        ways["two levels, scalecom"] = Method(TopK(0.02), Residual(), TwoLevel(ScaleCom(), 2))
        ways["two levels, doublesqueeze"] = Method(TopK(0.02), Residual(), TwoLevel(TwoPass(), 2))
        ways["two levels, int4"] = Method(Blocks(4, 64), Residual(), TwoLevel(TwoPass(), 2))
    else:
        ways["gtopk, rounded"] = Method(TopK(0.02, value_format="int4"), Residual(), GlobalTopK())
        ways["gtopk, gaussiank"] = Method(GaussianK(0.02, index_format="int32"), Residual(), GlobalTopK())
        ways["oktopk, rounded"] = Method(TopK(0.02, value_format="bfloat16"), Residual(), OkTopK(refresh=2))
        ways["oktopk, gaussiank"] = Method(GaussianK(0.02), Residual(), OkTopK())
        ways["scalecom, gaussiank"] = Method(GaussianK(0.02), Residual(), ScaleCom())
    for name, kernels in itertools.product(ways, ("torch", "triton")):
        os.environ[launch.KERNELS] = kernels
        generator = torch.Generator().manual_seed(rank)
        reducer, total, given = Reducer(ways[name], comm), 0, 0
        for _ in range(3):
            grads = {"w": torch.randn(60, 61, generator=generator), "b": torch.randn(61, generator=generator)}
            given = given + torch.cat([grad.view(-1) for grad in grads.values()])
            reducer.reduce_(grads)
            total = total + torch.cat([grad.view(-1) for grad in grads.values()])
        kept = reducer.state_dict()["elements"].get("residual")
        kept = torch.zeros_like(given) if kept is None else torch.cat([kept[key].view(-1) for key in grads])
        outcomes[name, kernels] = (given, total, kept)
    return outcomes


@exhaustive
@needs_triton
@interpreted
@pytest.mark.parametrize("size", [3, 4])
def test_every_method_over_processes(size):
    """Processes, because the interpreter is no place for threads."""
    ranks = run_ranks(size, every_method, size, timeout=900)
    for name, kernels in ranks[0]:
        outcomes = [rank[name, kernels] for rank in ranks]
        for _, total, _ in outcomes:
            assert torch.equal(total, outcomes[0][1])
        given, total, kept = (sum(part) for part in zip(*outcomes, strict=True))
        if name not in METHODS or METHODS[name].traits.conserves:
            # Sums of some 30 numbers of about 3, each rounded to 2⁻²⁴ of it.
            torch.testing.assert_close(total + kept, given, rtol=0, atol=2e-5)
        # These methods need moments, or sums of rows, which are rounded differently.
        if "gaussiank" not in name and name not in ("onebit", "efsignsgd", "terngrad"):
            # QSGD: three steps of values up to their bucket's norm, which is below 16. Its last bit, 2⁻²⁰, may differ.
            atol = 3 * 2**-20 if name == "qsgd" else 0.0
            for rank in ranks:
                for mine, reference in zip(rank[name, "triton"], rank[name, "torch"], strict=True):
                    torch.testing.assert_close(mine, reference, rtol=0, atol=atol, msg=name)


@full
@needs_triton
@pytest.mark.parametrize("density", tiers([0.7, 0.76, 0.9, 1.0], [0.9]))
def test_gaussiank_of_nearly_everything(density, use):
    use("triton")
    for numel in (1, 5, 120):
        grads = {"w": torch.randn(numel, device=DEVICE)}
        given = grads["w"].clone()
        reducer = Reducer(method("gaussiank", density=density), Echo(1))
        reducer.reduce_(grads)
        torch.testing.assert_close(grads["w"] + reducer.states[0]["residual"], given)


def wrong_on_rank_1(rank, size):
    """Return, for each method, the result of a step with NaN on rank 1, and the error that is raised later."""
    os.environ[launch.KERNELS] = "triton"
    comm, outcomes = ProcessGroupComm(), {}
    ways = methods_at(0.02)
    if size % 2 == 0:
        inter_nodes = Mean(), GlobalTopK(), OkTopK(), ScaleCom()
        ways = {repr(part): Method(TopK(0.02), Residual(), TwoLevel(part, 2)) for part in inter_nodes}
    for name, way in ways.items():
        reducer = Reducer(way, comm, granularity="model")
        reducer.reduce_({"v": torch.ones(30), "w": torch.ones(40, 50)})
        grads = {"v": torch.ones(30), "w": torch.ones(40, 50)}
        if rank == 1:
            grads["w"][7, 7] = math.nan
        reducer.reduce_(grads)
        try:
            reducer.state_dict()
            error = ""
        except NonFiniteGradient as raised:
            error = str(raised)
        outcomes[name] = (sum(float(grad.abs().sum()) for grad in grads.values()), error)
    return outcomes


@exhaustive
@needs_triton
@interpreted
@pytest.mark.parametrize("size", [3])
def test_what_is_wrong_on_one_rank_harms_nobodys_weights(size):
    ranks = run_ranks(size, wrong_on_rank_1, size, timeout=900)
    for name in ranks[0]:
        outs, errors = zip(*(rank[name] for rank in ranks), strict=True)
        assert outs == (0.0,) * size, name
        for error in errors:
            assert "'w' is not finite on rank 1 at step 1." in error, name


class Noisy(ProcessGroupComm):
    """Rank 1 receives one message with a byte changed: `at` counts down to it."""

    at = math.inf

    def _timed(self, nbytes, collective, x, *args):
        result = super()._timed(nbytes, collective, x, *args)
        received = x if result is None else result
        if x.dtype == torch.uint8:
            self.at -= 1
            if self.at == -1 and self.rank == 1:
                message = received[0] if isinstance(received, list) or received.dim() == 2 else received
                message[self.place(message.numel())] ^= 0xC5
        return result


def damaged_on_its_way(rank, size):
    """Return, for each aggregator and damaged message, the result on this rank, and whether an error is raised."""
    os.environ[launch.KERNELS] = "triton"
    comm, outcomes = Noisy(), {}
    ways = [Mean(), GlobalTopK(), OkTopK(), ScaleCom()]
    if size % 2 == 0:
        ways = [TwoLevel(inter_node, 2) for inter_node in ways]
    grads = {"w": torch.randn(30, 31, generator=torch.Generator().manual_seed(rank))}
    for aggregator in ways:
        reducer, right = Reducer(Method(TopK(0.05), Residual(), aggregator), comm), None
        reducer.reduce_({key: grad.clone() for key, grad in grads.items()})
        before = [{name: value.clone() for name, value in state.items()} for state in reducer.states]
        for at in itertools.chain([math.inf], itertools.count()):
            for state, saved in zip(reducer.states, before, strict=True):
                state.update({name: value.clone() for name, value in saved.items()})
            reducer.step = 1
            # In the middle, or in the last byte before the checksum.
            comm.at, comm.place = at, (lambda n: n // 2) if at % 2 else (lambda n: n - 9)
            out = {key: grad.clone() for key, grad in grads.items()}
            reducer.reduce_(out)
            hit, comm.at = comm.at < 0, math.inf
            if at < math.inf and not hit:
                break  # there are no more
            right = out["w"] if right is None else right
            try:
                reducer.raise_deferred()
                raised = ""
            except (ValueError, RankFailure) as error:
                raised = str(error)
            reducer._deferred.clear()
            outcomes[repr(aggregator), at] = (hit, not out["w"].any(), torch.equal(out["w"], right), raised)
    return outcomes


@exhaustive
@needs_triton
@interpreted
@pytest.mark.parametrize("size", [4])
def test_a_damaged_message_harms_nobodys_weights(size):
    ranks = run_ranks(size, damaged_on_its_way, size, timeout=900)
    hits = set()
    for case in ranks[0]:
        hit, nothing, _, raised = ranks[1][case]
        if hit:
            hits.add(case[0])
            assert "corrupt" in raised, case
            assert nothing, case
        for _, nothing, right, _ in (rank[case] for rank in ranks):
            assert right or (nothing and hit), case
    assert len(hits) == 4


@one_in(2)
@needs_triton
@pytest.mark.parametrize("order", [("w", "v"), ("v", "w")])
def test_what_is_wrong_harms_no_weights_of_several_dtypes(order, use):
    """Each dtype is a separate segment. The other segment stays correct."""
    use("triton")
    dtypes = {"w": torch.float32, "v": torch.bfloat16}
    grads = {key: torch.ones(300, dtype=dtypes[key], device=DEVICE) for key in order}
    grads["w"][5] = torch.nan
    reducer = Reducer(method("gaussiank", density=0.05), Echo(2), granularity="model")
    reducer.reduce_(grads)
    assert not grads["w"].any()
    assert set(grads["v"].tolist()) == {0.0, 1.0}
    for _ in range(2):  # and it is not forgotten
        with pytest.raises(NonFiniteGradient, match="'w' is not finite on rank 0"):
            reducer.state_dict()


@needs_triton
@pytest.mark.parametrize(
    ("name", "dtype"),
    tiers(
        itertools.product(DISTINCT, (torch.float32, torch.bfloat16)),
        [("topk", torch.bfloat16)],
    ),
)
def test_what_is_wrong_is_raised_a_step_later_and_harms_no_weights(name, dtype, use):
    use("triton")
    for value in (torch.nan, torch.inf):
        grads = {
            key: torch.ones(shape, dtype=dtype, device=DEVICE)
            for key, shape in {"w": (40, 50), "nothing": (0,), "v": (30,)}.items()
        }
        reducer = Reducer(make(name, 0.01), Echo(2), granularity="model")
        reducer.reduce_({key: grad.clone() for key, grad in grads.items()})
        broken = {key: grad.clone() for key, grad in grads.items()}
        broken["w"][7, 7] = value
        reducer.reduce_(broken)
        assert not any(out.any() for out in broken.values())  # neither NaN nor anything else
        with pytest.raises(NonFiniteGradient, match=r"'w' is not finite on rank 0 at step 1\."):
            reducer.reduce_(grads)
        reducer = Reducer(make(name, 0.01), Echo(2), granularity="model")
        found = pytest.raises(NonFiniteGradient, match=r"'w' is not finite on rank 0 at step 0\.")
        at_once = name in ("oktopk", "scalecom")  # which have to know that all ranks are in the same first step
        with found if at_once else contextlib.nullcontext():
            reducer.reduce_({**grads, "w": torch.full_like(grads["w"], value)})
        if not at_once:
            with found:
                reducer.state_dict()  # a broken state is not saved


@one_in(2)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e30])
@pytest.mark.parametrize(
    ("shape", "capacity"), [((0,), 0), ((1,), 1), ((130,), 140), ((3, 200), 1000), ((128,), 128), ((2, 2000), 2000)]
)
def test_two_bits_are_those_of_plain_torch(shape, capacity, scale, kernels, use):
    """A mean of 128 magnitudes within 2²² of each other is exact in fp64, so that the order of a sum does not count."""
    values = torch.randn(shape).clamp(-3, 3) * scale
    values[..., ::150] = 0
    rows = torch.zeros(*shape[:-1], 2 * -(-capacity // 128)), torch.zeros(*shape[:-1], -(-capacity // 128) * 32)
    found = {}
    for how in ("torch", kernels):
        use(how)
        device = device_of(how) if how == kernels else "cpu"
        table, packed = rows[0].to(device, copy=True), rows[1].to(device, torch.uint8, copy=True)
        update = two_bits.round_to_two_bits(apart(values.to(device)), table, packed)
        again = two_bits.two_bit_values(apart(table), apart(packed), capacity)
        found[how] = [x.cpu() for x in (table, packed, update, again)]
    for theirs, ours in zip(*found.values(), strict=True):
        assert torch.equal(theirs, ours)
    assert torch.equal(update.cpu(), again[..., : shape[-1]].cpu())


@needs_triton
def test_numbers_of_bytes_and_codes_may_exceed_31_bits():
    """The first program alone runs, which needs no memory for the others."""
    one = torch.ones(1, device=DEVICE)
    given = torch.arange(1, codes.TILE + 1, device=DEVICE).to(torch.uint8)
    packed = torch.zeros_like(given)
    launch.launch(codes._pack_codes, 1, given, packed, (1 << 31) - 8, 1 << 28, BITS=8, TILE=codes.TILE)
    assert torch.equal(packed, given)
    u, update, numel = torch.ones(ternary.TILE, device=DEVICE), torch.zeros(ternary.TILE, device=DEVICE), (1 << 31) - 4
    table, packed = row_table([(0, numel, 0, 1, numel)], u), torch.zeros(ternary.TILE // 4, device=DEVICE).byte()
    constants = {"STEPS": 1, "FIRST": FACTORS[0], "SECOND": FACTORS[1], "TILE": ternary.TILE}
    args = u, table, one, one, packed, update, *key_and_step(0), numel, 1
    launch.launch(ternary._round, 1, *args, **constants)
    assert packed.all()


@needs_triton
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_are_too_long_for_triton_take_torch(bits, use):
    """A tensor of Triton has at most 2²⁰ elements."""
    compressor, u, ctx, found = Blocks(bits, 1 << 22), torch.randn(60), Context(Segment(0, ("w",), ((6, 10),), 0)), []
    for kernels in ("triton", "torch"):
        use(kernels)
        payload, update = compressor.compress(u.to(DEVICE), ctx)
        found.append([x.cpu() for x in (*payload, update, compressor.decode(payload, ctx))])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kernels", ["torch", *EITHER])
@pytest.mark.parametrize("groups", [0, 2])
def test_two_bit_codes_that_are_too_short_are_refused(groups, kernels, use):
    use(kernels)
    table, packed = torch.ones(3, 6, device=device_of(kernels)), torch.zeros(3, 96, dtype=torch.uint8)
    packed = packed.to(table.device)
    assert two_bits.two_bit_values(table, packed, 300).shape == (3, 300)
    with pytest.raises(ValueError, match=f"codes have {96 * groups} elements, but the segment takes 288"):
        two_bits.two_bit_values(table, packed[:, : 32 * groups], 300)


@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_two_bits_of_what_is_not_finite_are_not_finite(value, kernels, use):
    use(kernels)
    values = torch.randn(300, device=device_of(kernels))
    values[130] = value
    table, packed = values.new_empty(6), torch.empty(96, dtype=torch.uint8, device=values.device)
    update = two_bits.round_to_two_bits(values, table, packed)
    assert update[:128].isfinite().all()
    assert not update[128:256].isfinite().any()
    assert update[256:].isfinite().all()
    assert not table[2:4].isfinite().all()


@one_in(4)
@pytest.mark.parametrize("kernels", EITHER)
@pytest.mark.parametrize("bits", range(1, 16))
def test_codes_have_the_same_bytes(bits, kernels, use):
    device = device_of(kernels)
    for numel in (0, 1, 7, 8, 1001, 1024, 3001):
        drawn = torch.randint(0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(bits))
        for dtype in [torch.int16] if bits > 8 else [torch.uint8, torch.int16]:
            given = drawn.to(dtype)
            use("torch")
            packed = codes.pack_codes(given, bits)
            use(kernels)
            assert torch.equal(codes.pack_codes(shifted(given.to(device)), bits).cpu(), packed)
            for theirs in (shifted(packed.to(device)), of_a_column(packed.to(device))):
                again = codes.unpack_codes(theirs, bits, numel).cpu()
                assert again.dtype == (torch.int16 if bits > 8 else torch.uint8)
                assert torch.equal(again, drawn.to(again.dtype))


def test_the_choice_can_be_forced(monkeypatch):
    x = torch.zeros(1)
    monkeypatch.delenv(launch.KERNELS, raising=False)
    assert not launch.uses_triton(x)
    monkeypatch.setenv(launch.KERNELS, "triton")
    assert launch.uses_triton(x)
    monkeypatch.setenv(launch.KERNELS, "torch")
    assert not launch.uses_triton(x)
    monkeypatch.setenv(launch.KERNELS, "cuda")
    with pytest.raises(ValueError, match="LIGHTNING_SPARSE_KERNELS='cuda': choose torch or triton"):
        launch.uses_triton(x)


SHAPES_OF_LOW_RANK = [
    [(40, 21), (3,), (7, 9, 5), (0, 4), (11, 50)],  # one that travels exactly, between others
    [(300, 33), (129, 130)],  # several parts, one below the other
    [(21, 2500)],  # beside the other, and lanes that are not full
]


@needs_native
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("name", tiers(["normal", "zeros", "student", "largest"], ["normal"]))
def test_products_of_matrices_in_c(rank, name, use):
    """Sums of n products are off by n·2⁻²⁴ of the sum of their magnitudes at most, in whatever order they are added."""
    for shapes in SHAPES_OF_LOW_RANK:
        ctx, u, x = of_rows(shapes, name, "native")
        compressor, generator = LowRank(rank), torch.Generator().manual_seed(rank)
        matrices = [u[start : start + n * m].view(n, m).double() for start, n, m in matrices_of(ctx.segment, rank)]
        start = torch.randn(rank * sum(m.shape[1] for m in matrices), generator=generator)
        results = {}
        for kernels in ("native", "torch"):
            use(kernels)
            given = x if kernels == "native" else u
            ctx.state["right"] = start.clone()
            products, exact = compressor.left_products(given, ctx)
            drawn = torch.randn(len(products), generator=torch.Generator().manual_seed(1))
            rights = compressor.right_products(given, shifted(drawn), ctx)
            decoded = compressor.decode((shifted(drawn), shifted(start), exact), ctx)
            results[kernels] = exact, decoded
            assert bool(products.isfinite().all()) or name == "largest"
            for m, p, q, left, right in zip(
                matrices,
                products.split([rank * len(m) for m in matrices]),
                rights.split([rank * m.shape[1] for m in matrices]),
                drawn.double().split([rank * len(m) for m in matrices]),
                start.double().split([rank * m.shape[1] for m in matrices]),
                strict=True,
            ):
                unit = right.view(rank, -1) / right.view(rank, -1).norm(dim=1, keepdim=True)
                check_products(p.view(-1, rank), m, unit.float().double().mT)
                check_products(q.view(rank, -1), left.view(-1, rank).mT, m)
        assert all(map(same_bits, results["native"], results["torch"]))


@one_in(3)
@needs_native
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(("rows", "rank"), [([1, 40, 7, 5001], 3), ([300], 1), ([1024, 17], 9), ([], 2)])
def test_bases_have_the_same_bits_whoever_makes_them(rows, rank, name, use):
    products = HOSTILE[name](rank * sum(rows))
    found = {}
    for kernels, threads in (("native", 1), ("torch", 1), ("torch", 2)):
        use(kernels)
        torch.set_num_threads(threads)
        found[kernels, threads] = bases(products, rows, rank, 1e-6)
        torch.set_num_threads(1)
    first, *others = found.values()
    assert all(same_bits(first, other) for other in others)
    for given, basis in zip(*(x.split([rank * count for count in rows]) for x in (products, first)), strict=True):
        basis, given = basis.view(-1, rank).double(), given.view(-1, rank).double()
        if not given.isfinite().all():
            assert not basis.isfinite().all()
            continue
        products_of_columns = basis.T @ basis
        lengths = products_of_columns.diagonal()
        # Columns are rounded to fp32: 2⁻²⁴ of each element, and so at most of each product of columns of length 1.
        assert float((products_of_columns - torch.diag(lengths)).abs().max()) < 2**-22
        assert bool(((lengths - 1).abs() < 2**-22).logical_or(lengths == 0).all())
        # Almost nothing of the columns is outside the span of the basis.
        rest = given - basis @ (basis.T @ given)
        assert bool((rest.norm(dim=0) <= 1e-5 * given.norm(dim=0)).all())


def matrices_of(segment, rank):
    """Return start, rows and columns of each matrix that is sent as low-rank factors."""
    found, start = [], 0
    for shape in segment.shapes:
        n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        found += [(start, n, m)] if 2 * (n + m) * rank < n * m else []
        start += math.prod(shape)
    return found


def check_products(found, left, right):
    """Compare a product in fp32 with the product in fp64. Elements that are out of range in fp32 are ignored."""
    bound = left.shape[1] * 2**-24 * (left.abs() @ right.abs())
    in_range = (left.abs() @ right.abs()) < torch.finfo(torch.float32).max
    assert bool(((found.double() - left @ right).abs() <= bound)[in_range].all())


@needs_native
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_matrix_that_is_not_finite_shows_in_its_product(broken, use):
    use("native")
    for place in (0, 1023, 1024, 2040, 2499, 21 * 2500 - 1):
        ctx, u = Context(Segment(0, ("w",), ((21, 2500),), 0)), torch.zeros(21 * 2500)
        u[place] = broken
        products, _ = LowRank(5).left_products(u, ctx)
        assert not bool(products.view(21, 5)[place // 2500].isfinite().any())


def within_fences(run):
    """Return a `native.run` whose tensors lie between bytes that must not change."""

    def call(name, *args):
        fenced = {}
        for place, x in enumerate(args):
            if isinstance(x, torch.Tensor):
                memory = torch.full((x.nbytes + 128,), 0xA5, dtype=torch.uint8)
                memory[64:-64].view(x.dtype).copy_(x.view(-1))
                fenced[place] = memory
        run(name, *(fenced[place][64:-64].view(x.dtype) if place in fenced else x for place, x in enumerate(args)))
        for place, memory in fenced.items():
            assert bool((memory[:64] == 0xA5).all()), (name, place)
            assert bool((memory[-64:] == 0xA5).all()), (name, place)
            args[place].view(-1).copy_(memory[64:-64].view(args[place].dtype))

    return call


@one_in(2)
@needs_native
@pytest.mark.parametrize(
    "compressor",
    [Blocks(4), Blocks(8, 130), LowRank(1), LowRank(6), OneBit(), QSGD(63), Sign(), TernGrad()],
    ids=repr,
)
def test_loops_write_to_their_results_only(compressor, use, monkeypatch):
    use("native")
    for shapes in (*ROWS, *MATRICES, *SHAPES_OF_LOW_RANK, [(1, 3)], [(2, 21)]):
        ctx, u, _ = of_rows(shapes, "normal", "native")
        with monkeypatch.context() as patched:
            patched.setattr(native, "run", within_fences(native.run))
            payload, update = compressor.compress(u, ctx)
            again = compressor.decode(payload, ctx)
            for bits in (3, 12):
                drawn = torch.randint(0, 1 << bits, (ctx.segment.numel,), dtype=torch.int16)
                assert torch.equal(codes.unpack_codes(codes.pack_codes(drawn, bits), bits, len(drawn)), drawn)
        assert torch.equal(again, update)
        ctx.state.clear()
        assert torch.equal(update, compressor.compress(u, ctx)[1])


@needs_native
@pytest.mark.parametrize("name", tiers(HOSTILE, SOME))
def test_selection_in_c_writes_to_its_results_only(name, use, monkeypatch):
    use("native")
    monkeypatch.setattr(native, "run", within_fences(native.run))
    for numel, k in ((1, 1), (15, 3), (63, 62), (64, 1), (4096 + 63, 100), (4096 + 63, 20), (9001, 3000)):
        u = HOSTILE[name](numel)
        assert torch.equal(topk_indices(u, k), oracle(u, k))
        assert len(gaussian_indices(u, k, 2.5)) <= numel


@needs_native
@pytest.mark.parametrize(
    "compressor", [Blocks(4), Blocks(8), LowRank(2), OneBit(), QSGD(), ScaledSign(), Sign(), TernGrad()], ids=repr
)
def test_what_the_loops_in_c_do_not_take_is_refused(compressor, use):
    """Other dtypes and lengths would be read as fp32 of the segment's length, beyond the end of the memory."""
    use("native")
    ctx, u, _ = of_rows([(3, 40), (5,), (16, 64)], "normal", "native")
    payload, update = compressor.compress(u, ctx)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        with pytest.raises(TypeError, match=rf"in C takes floats as torch.float32, but got a tensor of {dtype}"):
            compressor.compress(u.to(dtype), ctx)
    for given in (u[:-1], u[:9], u[:0], torch.cat([u, u]), u.view(1, -1)):
        with pytest.raises(ValueError, match=re.escape(f"u has the shape {tuple(given.shape)}, but its segment has ")):
            compressor.compress(given, ctx)
    with pytest.raises(ValueError, match=r"takes contiguous tensors on the CPU, but got one of shape \(1149,\) with s"):
        compressor.compress(torch.stack([u, u], 1)[:, 0], ctx)
    for place, part in enumerate(payload[:2]):
        before, after = payload[:place], payload[place + 1 :]
        for wrong in {torch.bfloat16, torch.int64, torch.int16} - {part.dtype}:
            with pytest.raises(TypeError, match=f"^The payload's [a-z ]+ are {part.dtype}, but got {wrong}: decode"):
                compressor.decode((*before, part.to(wrong), *after), ctx)
        # A view of rows is torch's own to refuse.
        with pytest.raises((ValueError, RuntimeError), match=f" {len(part) - 1} elements, but|size {len(part) - 1}$"):
            compressor.decode((*before, part[:-1], *after), ctx)
    assert torch.equal(compressor.decode(payload, ctx), update)


@needs_native
def test_the_loops_in_c_read_integers_of_numpy_as_integers(use):
    use("native")
    u = torch.randn(10_000)
    for k in (np.int64(10), np.int32(10), np.uint8(10)):
        assert torch.equal(topk_indices(u, k), topk_indices(u, 10))


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_codes_of_another_width_are_not_misread(kernels, use):
    use(kernels)
    wide = torch.ones(64, dtype=torch.int64)
    for decode in (
        lambda: codes.unpack_codes(wide, 3, 99),
        lambda: levels.level_values(torch.ones(1), wide, 3, 3, 99, 99),
        lambda: two_bits.two_bit_values(torch.ones(2), wide[:32], 99),
    ):
        with pytest.raises(TypeError, match=r"codes are torch.uint8, but got torch.int64: decode"):
            decode()
    sums = torch.tensor([0, 1, 2, 3, 4])
    decoded = ternary.ternary_values(sums, ((0, 5, 0, 1, 5),), torch.ones(1), 2)
    assert decoded.tolist() == [-1, -0.5, 0, 0.5, 1]


@needs_native
def test_the_cpu_takes_the_compiled_loops_where_nothing_is_forced(use):
    x = torch.zeros(1)
    for kernels, chosen in (("native", "native"), ("torch", None), ("triton", "triton")):
        use(kernels)
        assert backend_of(x) == chosen
    use("native")
    with torch._subclasses.FakeTensorMode():
        assert backend_of(torch.zeros(1)) is None, "it has no memory"
    assert not native.uses_native(torch.zeros(1, device="meta"))


@needs_native
def test_tensors_that_loops_in_c_would_read_behind_their_end(use):
    use("native")
    with pytest.raises(ValueError, match="Of a parameter with 2 elements there is a tensor with 1"):
        native.table([torch.zeros(3), torch.zeros(1)], (0, 3, 5))
    with torch._subclasses.FakeTensorMode(), pytest.raises(TypeError, match="takes plain tensors, but got a FakeTens"):
        native.run("kth_largest", torch.zeros(3), torch.zeros(1), 3, 1)
    x = torch.ones(5)
    # Other integers are converted. Indices that are negative or not ascending are ignored.
    write_entries_([x], (0, 5), [(torch.tensor([1, 3], dtype=torch.int32), torch.ones(2))])
    assert x.tolist() == [0, 1, 0, 1, 0]
    memory = torch.zeros(6)
    write_entries_([memory[2:4], memory[4:]], (0, 2, 4), [(torch.tensor([-1, 0, 3, 0]), torch.ones(4))])
    assert memory.tolist() == [0, 0, 1, 0, 0, 1]


def test_loops_take_tensors_on_the_cpu_alone():
    """One tensor decides the backend; others of the call may be on another device."""
    x = torch.ones(4)
    assert native.takes([x, None])
    assert not native.takes([x, x.to("meta")])
    assert not native.takes([x.half()])
    assert not native.takes([x[::2]])


@needs_native
def test_loops_of_other_sources_are_not_taken(monkeypatch, tmp_path, caplog):
    """Else C would misread arguments of a function that has changed since."""
    folders = [tmp_path / "kernels", tmp_path / "contrib"]
    for kept, folder in zip(native.FOLDERS, folders, strict=True):
        shutil.copytree(kept, folder)
    header = folders[1] / "codes.h"
    monkeypatch.setattr(native, "FOLDERS", folders)
    for change, taken in ((lambda: None, True), (lambda: header.write_text(header.read_text() + "\n"), False)):
        change()
        native.library.cache_clear()
        assert (native.library() is not None) == taken
    assert "Install the package again" in caplog.text
    for folder in folders:  # an installed package has no sources
        shutil.rmtree(folder)
    native.library.cache_clear()
    assert native.library() is not None
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.mark.parametrize("damaged", [False, True])
def test_without_the_compiled_loops_the_cpu_takes_torch(damaged, use, monkeypatch, tmp_path, caplog):
    file = tmp_path / "library.so"
    if damaged:
        file.write_text("of another machine")
    monkeypatch.setattr(native, "LIBRARY", file)
    native.library.cache_clear()
    u, ctx, outcomes = torch.randn(3001), Context.of(3001), []
    with caplog.at_level(logging.INFO):
        for kernels in ("native", "torch"):
            use(kernels)
            assert backend_of(u) is None
            for compressor in (Blocks(8), OneBit(), QSGD(), ScaledSign(), Sign(), TernGrad()):
                payload, update = compressor.compress(u, ctx)
                outcomes.append(torch.cat([update, compressor.decode(payload, ctx)]))
    native.library.cache_clear()
    assert all(map(torch.equal, outcomes[:6], outcomes[6:]))
    (said,) = [record.message for record in caplog.records]  # once
    assert said.startswith(
        f"The loops in C {'cannot be loaded' if damaged else 'were not compiled'}, so work on the CPU"
    )


@pytest.mark.parametrize(
    ("spec", "chosen", "line"), [(None, False, "Triton is missing"), (object(), True, "by Triton kernels")]
)
def test_on_cuda_one_line_says_what_was_chosen(spec, chosen, line, monkeypatch, caplog):
    class OnCuda:
        is_cuda, device = True, torch.device("cuda", 0)

    monkeypatch.delenv(launch.KERNELS, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    launch._has_triton.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [launch.uses_triton(OnCuda()) for _ in range(3)] == [chosen] * 3
    launch._has_triton.cache_clear()
    assert len(caplog.records) == 1
    assert line in caplog.text


@pytest.mark.parametrize(("capability", "able"), [((6, 1), False), ((7, 0), True), ((10, 0), True)])
def test_devices_that_are_too_old_for_triton_take_torch(capability, able, monkeypatch, caplog):
    class OnCuda:
        is_cuda, device = True, torch.device("cuda", 0)

    monkeypatch.delenv(launch.KERNELS, raising=False)
    monkeypatch.setattr(launch, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch._is_able.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [launch.uses_triton(OnCuda()) for _ in range(3)] == [able] * 3
    launch._is_able.cache_clear()
    assert [record.message for record in caplog.records] == [
        "Selection on CUDA by plain torch, which is slower: the device is too old for Triton's kernels."
    ] * (not able)


@pytest.mark.parametrize(
    ("version", "reorders"), [("3.4.0", True), ("3.8.0+git1", True), ("3.9.0", False), ("3.10.0", False)]
)
def test_kernels_of_a_module_replace_their_stand_ins_at_once(version, reorders, monkeypatch):
    """Another thread would compile a kernel that calls a stand-in, and Triton would remember that."""
    seen = []

    def jit(function, do_not_specialize):
        seen.append([type(scope[name]) for name in ("first", "second")])
        return function.__name__

    language = SimpleNamespace(constexpr=lambda value: value)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=jit, language=language, __version__=version))
    scope = {}
    exec("def first(): pass\ndef second(): pass", scope)
    scope |= {name: launch.kernel()(scope[name]) for name in ("first", "second")}
    assert scope["first"].load() == "first"
    assert seen == [[launch.Kernel] * 2] * 2
    assert (scope["second"], scope["tl"], scope["REORDERS"]) == ("second", language, reorders)


@full
def test_the_package_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"  # importing it fails
        "import torch\n"
        "from lightning_sparse.compressors import TopK\n"
        "assert TopK(0.5).select(torch.tensor([1.0, -2.0])).tolist() == [1]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[1])


def by_compiler(module, capability):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, str(capability)]
    root = Path(__file__).parents[1]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler on Linux only")


@full
@needs_triton
@interpreted
@on_linux
def test_whole_steps_compile_for_gpus():
    launched = by_compiler("tests.compile_steps", 90)
    known = {name for module in KERNELS for name, value in vars(module).items() if is_kernel(value)}
    # Other kernels call these.
    called = {"_address", "_bisect", "_halves", "_magnitudes", "_digit", "_store_stats"}
    called |= {"_parameter_of", "_row_of", "_noise", "_number", "_slots"}
    assert launched.keys() == known - called
    for name, kernel in by_compiler("tests.compile_kernels", 90).items():
        # The number of registers matters only if the kernel is launched with this number of warps.
        assert kernel["warps"] in launched.get(kernel["function"], [4]), (name, kernel, launched)


@exhaustive  # that the kernels compile at all, the test above has seen
@interpreted
@needs_triton
@on_linux
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_gpus(capability):
    kernels = by_compiler("tests.compile_kernels", capability)
    assert len(kernels) == 79
    for name, kernel in kernels.items():
        if Version(metadata.version("triton")) < Version("3.7"):
            continue  # compiled, and slower: Triton 3.4 spills up to 16 bytes and uses up to 148 registers
        # ptxas uses few registers, such as 40 to add an fp16 gradient, and spills some: since a version, so many bytes.
        spilling = {(80, "payout of bf16"): ("3.7", 16), (100, "add fp16"): ("3.7", 16), (90, "votes"): ("3.8", 32)}
        spilling |= {(90, "add bf16"): ("3.9", 16), (100, "votes"): ("3.9", 32)}
        since, allowed = spilling.get((capability, name), ("0", 0))
        if Version(metadata.version("triton")) < Version(since):
            allowed = 0
        assert kernel["spilled"] <= allowed, (name, kernel)
        # Two programs of 256 threads share the 65,536 registers, so that one loads while the other calculates.
        assert kernel["registers"] <= 128, (name, kernel)
    # 256 threads and 4096 elements: 16 elements each, four to a load of fp32, eight to one of 16 bits. Other loads are
    # for tiles of several gradients, or of one that is not aligned.
    for name, wide in {"add fp32": 4 + 4, "add bf16": 4 + 2, "add fp16": 4 + 2}.items():
        assert kernels[name]["wide loads"] == wide, (name, kernels[name])
        assert kernels[name]["registers"] <= 48, "more would leave room for too few programs to hide their waiting"
        assert kernels[name]["wide stores"] == 4, (name, kernels[name])
    # Zeros: wide stores to an aligned gradient; one by one to one that is not, and to tiles of several gradients.
    for name, wide in {"zero fp32": 8, "zero bf16": 4}.items():
        assert (kernels[name]["wide stores"], kernels[name]["stores"]) == (wide, wide + 32 + 2), (name, kernels[name])
    # These have the same loads twice: wide for full tiles, and one by one for the last.
    for name in (
        "read",
        "first digit",
        "last digit",
        "digit of maxima",
        "keep",
        "keep at 1 %",
        "count",
        "write",
        "chunks",
    ):
        assert kernels[name]["wide loads"] >= 4, (name, kernels[name])


@full
def test_the_benchmark_checks_and_times_every_contestant():
    with rehearsal() if DEVICE == "cpu" else contextlib.nullcontext():
        rows = list(selection.on_device(20_000, 0.01, 2, DEVICE))
    contestants = {"torch.topk", "torch.sort", "GaussianK as published", "TopK", "GaussianK", "RandK"}
    for part in ("selection", "step"):
        assert {row["contestant"] for row in rows if row["part"] == part} >= contestants
    assert all(row["ms"] > 0 and row["times_floor"] > 0 for row in rows)


def test_the_benchmark_refuses_wrong_results():
    u = torch.randn(1000)
    with pytest.raises(SystemExit, match="selects wrong entries"):
        selection.check("TopK", u, u.abs().topk(10, largest=False).indices, 0.01)
    step = selection.Step(u, 0.01, lambda u, density: topk_indices(u, 10))
    step.residual = torch.ones(500).repeat_interleave(2)
    step.check("TopK")
    step.select = lambda u, density: torch.arange(10)
    with pytest.raises(SystemExit, match="selects wrong entries"):
        step.check("TopK")


@needs_triton
@needs_gpu
def test_a_step_needs_no_synchronisation_and_can_be_captured():
    numel = 1 << 20
    topk = TopK(0.001)
    grad, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")

    def step():
        ctx = Context.of(numel, stats=topk.block_stats(numel))
        u = add_with_stats_(residual, [0, numel], [grad], 1.0, ctx.stats)
        chosen = topk.choose(u, topk.count(numel), ctx)
        values = u.index_select(0, chosen)
        add_entries_(u, chosen, values, -1.0)
        return chosen, values

    expected = [[part.clone() for part in step()] for _ in range(4)]
    residual.zero_()
    with no_waiting("cuda"):
        again = [[part.clone() for part in step()] for _ in range(4)]
    assert all(map(torch.equal, itertools.chain(*expected), itertools.chain(*again)))
    graph, replayed = captured(step)
    residual.zero_()
    for before in expected:
        graph.replay()
        assert all(map(torch.equal, before, replayed))


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", SMOOTH)
def test_large_inputs_on_the_device(name):
    for numel in (1 << 22, 5_000_011):
        u = SMOOTH[name](numel)
        for density in (0.001, 0.01, 0.1):
            x, k = u.cuda(), round(density * numel)
            assert torch.equal(topk_indices(x, k).cpu(), oracle(u, k))
            chosen = GaussianK(density).select(x)
            assert 2 * k / 3 <= len(chosen) <= 4 * k / 3
            assert torch.equal(chosen.cpu(), oracle(u, len(chosen)))
            assert torch.equal(chosen, GaussianK(density).select(x))
