"""Encoding of entries: exact indices in few bits, and values whose rounding errors are kept."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, Reducer, method, simulate
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, TwoPass
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import GaussianK, TopK, encoding
from lightning_sparse.compressors.base import Entries
from lightning_sparse.compressors.encoding import Encoding
from lightning_sparse.context import Context
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.kernels import launch
from lightning_sparse.layout import Layout
from tests.support.kernels import device_of, needs_triton
from tests.support.tiers import in_diagonals, one_in, tiers
from tests.support.updates import dense

FORMATS = [(i, v) for i in ("compact", "int32") for v in ("float32", "bfloat16", "int8", "int4", "int2")]


def segment(numel: int):
    return Layout.of({"w": (numel,)}, "model", 25).segments[0]


def index_bytes(numel: int, capacity: int, form: str) -> int:
    return Encoding(form, "float32").nbytes(numel, capacity) - 4 * capacity


def test_compact_indices_by_hand():
    """Three of 600 elements. The lower bytes are stored as they are. The upper parts 0, 1 and 2 set the bits 0 + 0,
    1 + 1 and 2 + 2.
    """
    indices = torch.tensor([5, 300, 599])
    upper, lower = encoding.encode_indices(indices, 600, 4, "compact")
    assert lower.tolist() == [5, 300 - 256, 599 - 512, 0]
    assert upper.tolist() == [0b10101]
    count = torch.tensor([3], dtype=torch.int32)
    assert encoding.decode_indices((upper, lower), count, 600, 4, "compact").tolist() == [5, 300, 599, 600]


def test_four_bit_values_by_hand():
    """64 of 66 entries have the scale 7 / 7. The other two have 1 / 7, rounded up to bf16's 8 bits: 147 / 1024."""
    values = torch.zeros(66)
    values[:4], values[64:] = torch.tensor([-7.0, 2.4, -2.6, 0.5]), torch.tensor([1.0, -0.5])
    scales, codes = encoding.encode_values(values, 67, "int4")
    assert scales.tolist() == [1.0, 147 / 1024]
    # A code is a step plus 8. The steps are -7, 2, -3, 0 (half to even), zeros, 7, -3, and two zeros of padding. The
    # second half of the codes is in the upper four bits.
    lower, upper = [1, 10, 5, 8, *[8] * 30], [*[8] * 30, 15, 5, 8, 8]
    assert codes.tolist() == [low + 16 * high for low, high in zip(lower, upper, strict=True)]
    decoded = encoding.decode_values((scales, codes), 67, "int4")
    assert decoded[:4].tolist() == [-7.0, 2.0, -3.0, 0.0]
    assert decoded[64:].tolist() == [7 * 147 / 1024, -3 * 147 / 1024, 0.0]


@pytest.mark.parametrize(("value_format", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("capacity", [0, 1, 2, 63, 64, 65, 200])
def test_multiples_of_a_blocks_scale_come_back_exactly(capacity, value_format, levels):
    generator = torch.Generator().manual_seed(capacity)
    steps = torch.randint(-levels, levels + 1, (3, capacity), generator=generator).float()
    steps[:, ::64] = levels
    powers = 2.0 ** torch.randint(-100, 100, (3, -(-capacity // 64)), generator=generator)
    values = steps * powers.repeat_interleave(64, 1)[:, :capacity]
    parts = encoding.encode_values(values, capacity, value_format)
    assert torch.equal(encoding.decode_values(parts, capacity, value_format), values)
    assert (
        sum(part[0].numel() * part.element_size() for part in parts)
        == Encoding("int32", value_format).nbytes(10_000, capacity) - 4 * capacity
    )


def test_a_large_entry_coarsens_its_own_block_alone():
    """With one scale for all entries, 1000 would round all others to 0 in 4 bits."""
    values = torch.linspace(1, 2, 128)
    values[0] = 1000
    decoded = encoding.decode_values(encoding.encode_values(values, 128, "int4"), 128, "int4")
    assert decoded[1:64].abs().max() == 0
    assert (decoded[64:] - values[64:]).abs().max() <= 2 / 7 / 2 * (1 + 2**-7)


NUMELS = [1, 2, 255, 256, 257, 1000, 65536, 100_003, 5_000_000]


@one_in(2)
@pytest.mark.parametrize("form", ["compact", "int32"])
@pytest.mark.parametrize("numel", tiers(NUMELS, NUMELS[:-1]))
@pytest.mark.parametrize("density", [1e-6, 1e-4, 0.001, 0.01, 0.1, 0.6, 1.0])
def test_indices_come_back(numel, density, form):
    capacity = max(1, round(numel * density))
    if capacity > 2_000_000:
        return
    generator = torch.Generator().manual_seed(capacity)
    for count in {0, 1, capacity // 2, capacity}:
        for indices in (
            torch.randperm(numel, generator=generator)[:count].sort().values,
            torch.arange(count),
            torch.arange(numel - count, numel),
        ):
            parts = encoding.encode_indices(indices, numel, capacity, form)
            assert sum(part.numel() * part.element_size() for part in parts) == index_bytes(numel, capacity, form)
            counted = torch.tensor([count], dtype=torch.int32)
            back = encoding.decode_indices(parts, counted, numel, capacity, form)
            assert torch.equal(back[:count], indices)
            assert bool((back[count:] == numel).all())


def test_at_most_four_bytes_an_entry():
    """Density 0.001, bf16 values. Indices need little more than the information-theoretic log₂(e/ρ) = 11.4 bits."""
    numel, capacity = 25_000_000, 25_000
    assert 8 * index_bytes(numel, capacity, "compact") / capacity < 13
    assert TopK(0.001, "compact", "bfloat16").nbytes(segment(numel), None) <= 4 * capacity
    for density in (1e-5, 1e-4, 0.01, 0.1, 0.5):
        k = round(numel * density)
        bound = (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / k
        assert bound <= 8 * index_bytes(numel, k, "compact") / k < bound + 4.5


@pytest.mark.parametrize(("index_format", "value_format"), FORMATS)
def test_values_within_the_rounding_of_their_format(index_format, value_format):
    u = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 10_000)
    compressor, ctx = TopK(0.01, index_format, value_format), Context.of(10_000)
    payload, update = compressor.compress(u, ctx)
    indices, values = compressor.decode(payload, ctx)
    # The update equals the entries that other ranks decode.
    assert all(map(torch.equal, update, (indices, values)))
    exact = u[indices]
    assert torch.equal(indices, compressor.select(u))
    # Of each block of 64, in the order of the indices.
    largest = torch.cat([part.abs().max().expand(len(part)) for part in exact.split(64)])
    bound = {
        "float32": torch.zeros(()),
        "bfloat16": exact.abs() * 2**-8,  # 8 bits of mantissa, rounded to the nearest
        # Half a step, which is rounded up to the 8 bits of bf16's mantissa.
        "int8": largest / 127 / 2 * (1 + 2**-7 + 2**-20),
        "int4": largest / 7 / 2 * (1 + 2**-7 + 2**-20),
        "int2": exact.abs().max(),  # a mean of numbers up to that, with the sign of each
    }[value_format]
    assert ((values - exact).abs() <= bound).all()
    sent = sum(part.numel() * part.element_size() for part in payload) - 4  # without the count
    assert sent == compressor.nbytes(ctx.segment, None)


@pytest.mark.parametrize("value_format", ["float32", "bfloat16", "int8", "int4", "int2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_broken_shows_and_what_is_large_is_not_broken(bad, value_format):
    compressor, ctx = TopK(0.5, "compact", value_format), Context.of(6)
    payload, _ = compressor.compress(torch.tensor([1.0, bad, 2, 0, 0, 0]), ctx)
    assert not all(part.isfinite().all() for part in payload if part.is_floating_point())
    largest = torch.finfo(torch.float32).max
    payload, _ = compressor.compress(torch.tensor([largest, -largest, 1.0, 0, 0, 1e-45]), ctx)
    assert compressor.decode(payload, ctx).values.isfinite().all()
    payload, _ = compressor.compress(torch.full((6,), 1e-45), ctx)
    assert compressor.decode(payload, ctx).values.isfinite().all()


def test_two_bits_by_hand():
    """Magnitudes 1, 2, 3, 10: their mean is 4, so the larger ones are 10, the smaller ones on average 2."""
    values = torch.tensor([1.0, -2.0, 3.0, -10.0]).repeat(32)
    table, codes = encoding.encode_values(values, 128, "int2")
    assert table.tolist() == [2, 10]
    # Values 0, 32, 64 and 96 share a byte, two bits each: larger, and negative.
    assert codes.tolist() == [0b00000000, 0b10101010, 0b00000000, 0b11111111] * 8
    assert encoding.decode_values((table, codes), 128, "int2").tolist() == [2, -2, 2, -10] * 32


def test_two_bits_keep_zeros_and_fill_up_with_them():
    values = torch.tensor([[0.0, -1.0, 3.0], [5.0, 5.0, -5.0]])
    parts = encoding.encode_values(values, 130, "int2")
    assert [part.shape for part in parts] == [(2, 4), (2, 64)]
    found = encoding.decode_values(parts, 130, "int2")
    assert found[:, :3].tolist() == [[0, -2, 2], [5, 5, -5]]
    assert not found[:, 3:].any()
    (table, codes) = encoding.encode_values(torch.empty(0), 0, "int2")
    assert (table.numel(), codes.numel(), encoding.decode_values((table, codes), 0, "int2").numel()) == (0, 0, 0)


def test_two_bits_of_two_magnitudes_are_exact_and_others_shrink():
    signs = torch.randn(1280).sign()
    both = torch.where(torch.rand(1280) < 0.3, 7.25, 0.375) * signs
    assert torch.equal(encoding.decode_values(encoding.encode_values(both, 1280, "int2"), 1280, "int2"), both)
    largest = torch.finfo(torch.float32).max
    full = torch.full((128,), largest)
    assert torch.equal(encoding.decode_values(encoding.encode_values(full, 128, "int2"), 128, "int2"), full)
    for draw in (torch.randn(1280), torch.randn(1280) ** 5, torch.randn(1280) * 1e-42):
        rest = draw - encoding.decode_values(encoding.encode_values(draw, 1280, "int2"), 1280, "int2")
        # A mean leaves the variance, so no group grows; denormals are rounded to a multiple of the smallest.
        assert (rest.view(-1, 128).double().norm(dim=1) <= draw.view(-1, 128).double().norm(dim=1) + 1e-43).all()


@pytest.mark.parametrize("compressor", tiers([TopK, GaussianK], [GaussianK]))
@pytest.mark.parametrize(
    ("formats", "aggregator"), in_diagonals(FORMATS, [Mean(), GlobalTopK(), OkTopK(), TwoPass(), ScaleCom()], 10)
)
def test_nothing_is_lost_in_any_format(formats, compressor, aggregator):
    index_format, value_format = formats
    made = compressor(0.05, index_format=index_format, value_format=value_format)
    if not aggregator.supports(made):
        assert isinstance(aggregator, ScaleCom)
        assert value_format != "float32"
        return

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        reducer = Reducer(Method(made, aggregator=aggregator), comm)
        given, received = torch.zeros(2000), torch.zeros(2000)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {"w": torch.randn(2000, generator=generator)}
            given = given + grads["w"]
            reducer.reduce_(grads)
            received = received + grads["w"]
        return given, received, reducer.state_dict()["elements"]["residual"]["w"]

    for size in (2, 3, 5):
        ranks = simulate(size, rank)
        assert all(torch.equal(received, ranks[0][1]) for _, received, _ in ranks)
        given, kept = sum(rank[0] for rank in ranks), sum(rank[2] for rank in ranks)
        # fp32 roundings of values up to about 20, a few for each of 5 steps and ranks.
        assert (given - size * ranks[0][1] - kept).abs().max() <= 20 * 5 * size * 2**-23


@pytest.mark.parametrize("index_format", ["compact", "int32"])
def test_damaged_payloads_are_refused(index_format):
    compressor, ctx = TopK(0.01, index_format), Context.of(1000)
    (count, values, *indices), _ = compressor.compress(torch.randn(1000), ctx)
    with pytest.raises(ValueError, match="says it holds 11: it is corrupt"):
        compressor.decode((count + 1, values, *indices), ctx)
    with pytest.raises(ValueError, match="says it holds -1: it is corrupt"):
        compressor.decode((count - 11, values, *indices), ctx)
    with pytest.raises(ValueError, match=r"it is corrupt"):
        compressor.decode((count, values, ~indices[0], *indices[1:]), ctx)


def test_sums_on_the_way_refuse_rounded_values_by_name():
    with pytest.raises(ValueError, match=r"ScaleCom\(\) cannot aggregate what TopK\(.*value_format='int4'\) sends"):
        Method(TopK(value_format="int4"), aggregator=ScaleCom())
    with pytest.raises(TypeError, match="'randk' has no option 'value_format'"):
        method("randk", value_format="int4")


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match=r"TopK\(index_format='int64'\): choose from compact, int32"):
        TopK(index_format="int64")
    known = "float32, bfloat16, int8, int4, int2"
    with pytest.raises(ValueError, match=rf"GaussianK\(value_format='fp8'\): choose from {known}"):
        GaussianK(value_format="fp8")


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("index_format", ["compact", "int32"])
def test_more_entries_than_the_capacity_are_refused(index_format, backend, monkeypatch):
    """Triton kernels would write outside the payload."""

    class Generous(TopK):
        def choose(self, u, k, ctx):
            return super().choose(u, k + 1, ctx)

    monkeypatch.setenv(launch.KERNELS, backend)
    with pytest.raises(ValueError, match="11 entries of 1000 elements are to be sent, but the capacity is 10"):
        Generous(0.01, index_format).compress(torch.randn(1000, device=device_of(backend)), Context.of(1000))


def test_padding_and_rows_of_entries():
    entries = Entries(torch.tensor([[1, 3], [3, 4]]), torch.tensor([[2.0, 5.0], [1.0, 0.0]]))
    assert dense(entries, 4).tolist() == [0, 2, 0, 6]
