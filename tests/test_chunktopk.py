"""ChunkTopK: the largest entries of each 4,096, 12-bit indices, and the results of its aggregators."""

import pytest
import torch
from torch import Tensor

from lightning_sparse import Method, Reducer, method, simulate
from lightning_sparse.aggregators import GlobalTopK, Mean, OkTopK, TwoLevel, TwoPass
from lightning_sparse.comm import Comm
from lightning_sparse.compressors import chunktopk as module
from lightning_sparse.compressors.chunktopk import ChunkTopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.scalecom import ScaleCom
from lightning_sparse.kernels import chunks
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.chunks import CHUNK
from tests.support.tiers import one_in, tiers
from tests.support.updates import decoded, remainder
from tests.support.vectors import INPUTS, SMOOTH, oracle


def each_by_itself(u: Tensor, density: float) -> Tensor:
    parts = u.split(CHUNK)
    counts = [min(len(part), max(1, round(density * len(part)))) for part in parts]
    return torch.cat(
        [oracle(part, count) + CHUNK * i for i, (part, count) in enumerate(zip(parts, counts, strict=True))]
    )


def test_by_hand():
    u = torch.zeros(2 * CHUNK + 10)
    u[[5, 6, 7]] = torch.tensor([9.0, -8.0, 7.0])
    u[CHUNK + 4000] = -0.1  # small, but the largest of its chunk
    u[2 * CHUNK + 3] = 1e-9
    compressor = ChunkTopK(2 / CHUNK)
    assert compressor.select(u).tolist() == [5, 6, CHUNK, CHUNK + 4000, 2 * CHUNK + 3]
    assert remainder(compressor, u).nonzero().squeeze(1).tolist() == [7]
    assert compressor.count(2 * CHUNK + 10) == 2 + 2 + 1
    assert [ChunkTopK(0.001).count(numel) for numel in (0, 1, 4095, 4096, 4097, 8192, 40960)] == [0, 1, 4, 4, 5, 8, 40]


def test_places_take_twelve_bits():
    packed = module._pack_places(torch.tensor([0x123, 0xABC, 0xFFF]))
    assert [f"{byte:02x}" for byte in packed.tolist()] == ["23", "c1", "ab", "ff", "0f", "00"]
    assert module._unpack_places(packed, 3).tolist() == [0x123, 0xABC, 0xFFF]
    numel = 26 * CHUNK
    for value_format, bits in (("float32", 12 + 32), ("bfloat16", 12 + 16), ("int2", 12 + 2.5)):
        compressor = ChunkTopK(64 / CHUNK, value_format)
        payload, _ = compressor.compress(torch.randn(numel), Context.of(numel))
        sent = sum(part.numel() * part.element_size() for part in payload)
        assert sent == compressor.nbytes(Context.of(numel).segment, None)
        assert 8 * sent / (64 * 26) == bits


LENGTHS = (1, 63, 4095, 4096, 4097, 3 * 4096 + 100, 300 * 4096 + 7)


@pytest.mark.parametrize("name", tiers(INPUTS, ["normal", "few values", "nan and inf"]))
def test_equals_the_oracle_chunk_by_chunk(name):
    """Densities for which blocks of 64, 32 and 16 share a maximum, and none do."""
    for numel in LENGTHS:
        u = INPUTS[name](numel)
        before = u.clone()
        for density in (0.0001, 0.001, 0.01, 1 / 64, 0.05, 1.0) if numel < 300 * CHUNK else (0.001,):
            compressor = ChunkTopK(density)
            chosen = compressor.select(u)
            assert torch.equal(chosen, each_by_itself(u, density)), (numel, density)
            assert len(chosen) == compressor.count(numel) == compressor.capacity(numel)
        assert torch.equal(u.view(torch.int32), before.view(torch.int32))
    assert {chunks.block_size(CHUNK, k) for k in (1, 4, 41, 64, 205)} == {64, 32, 16, 1}


def test_takes_what_the_pass_that_makes_u_has_found(monkeypatch):
    u, compressor = torch.randn(5 * CHUNK), ChunkTopK(0.001)
    stats = compressor.block_stats(len(u)).read(u)
    expected = compressor.select(u)

    def again(*_):
        raise AssertionError("reads u once more")

    monkeypatch.setattr(BlockStats, "read", again)
    assert torch.equal(compressor.choose(u, 20, Context.of(len(u), stats=stats)), expected)
    assert ChunkTopK(0.05).block_stats(len(u)) is None
    assert compressor.block_stats(CHUNK - 1) is None


@pytest.mark.parametrize("value_format", ["float32", "bfloat16", "int8", "int2"])
@pytest.mark.parametrize("numel", [0, 1, 2, 4097, 3 * CHUNK + 1001])
def test_what_others_decode_is_the_update(numel, value_format):
    u, ctx, compressor = torch.randn(numel), Context.of(numel), ChunkTopK(0.003, value_format)
    payload, update = compressor.compress(u, ctx)
    assert all(map(torch.equal, update, compressor.decode(payload, ctx)))
    assert sum(part.numel() * part.element_size() for part in payload) == compressor.nbytes(ctx.segment, None)
    rows = tuple(torch.stack([part, part]) for part in payload)
    indices, values = compressor.decode(rows, ctx)
    assert torch.equal(indices[1], update.indices)
    assert torch.equal(compressor.mean(rows, ctx).values * 2, values)


def test_the_context_may_ask_for_another_density():
    u = torch.randn(2 * CHUNK)
    assert len(ChunkTopK(0.001).select(u, density=0.01)) == 82
    ctx = Context.of(len(u), density=0.01)
    payload, update = ChunkTopK(0.001).compress(u, ctx)
    assert torch.equal(ChunkTopK(0.001).decode(payload, ctx).indices, update.indices)


@pytest.mark.parametrize("density", [0.001, 0.03])
def test_a_vector_with_k_entries_in_each_chunk_is_reproduced_exactly(density):
    u, compressor = torch.zeros(7 * CHUNK), ChunkTopK(density)
    for chunk in u.view(7, CHUNK):
        chosen = torch.randperm(CHUNK)[: compressor.count(CHUNK)]
        chunk[chosen] = torch.randn(len(chosen))
    assert torch.equal(decoded(compressor, u), u)
    assert not remainder(compressor, u).any()


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("value_format", ["float32", "int2"])
def test_contraction(name, value_format):
    """Chunk by chunk; 2 bits leave more, but never more than sending nothing."""
    u, compressor = SMOOTH[name](5 * CHUNK), ChunkTopK(0.01, value_format)
    rest = remainder(compressor, u).double().view(5, CHUNK).square().sum(1)
    whole = u.double().view(5, CHUNK).square().sum(1)
    if value_format == "float32":
        assert (rest <= (1 - 41 / CHUNK) * whole * (1 + 1e-12)).all()
    else:
        assert rest.sum() < whole.sum()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("value_format", ["float32", "bfloat16", "int8", "int2"])
def test_what_is_broken_is_sent(bad, value_format):
    for where in (0, CHUNK - 1, CHUNK, 3 * CHUNK - 1, 3 * CHUNK + 5):
        u = torch.randn(3 * CHUNK + 6)
        u[where] = bad
        _, update = ChunkTopK(0.0001, value_format).compress(u, Context.of(len(u)))
        assert where in update.indices.tolist()
        assert not update.values[update.indices == where].isfinite().any()


def test_damaged_places_are_refused():
    ctx, compressor = Context.of(CHUNK + 100), ChunkTopK(0.001)
    (values, places), _ = compressor.compress(torch.randn(CHUNK + 100), ctx)
    first = places.clone()
    first[:3] = 0  # the first two entries at place 0
    last = places.clone()
    last[-3:] = 255  # beyond the last element
    for damaged in (first, last):
        with pytest.raises(ValueError, match=r"indices of 4196 elements that do not ascend: it is corrupt"):
            compressor.decode((values, damaged), ctx)


@one_in(2)
@pytest.mark.parametrize(
    "aggregator",
    [Mean(), GlobalTopK(), OkTopK(), ScaleCom(), TwoPass(), TwoLevel(Mean(), 2), TwoLevel(GlobalTopK(), 2)],
    ids=repr,
)
@pytest.mark.parametrize("value_format", tiers(["float32", "bfloat16", "int8", "int2"], ["float32", "int2"]))
def test_nothing_is_lost_with_any_aggregator(aggregator, value_format):
    made = ChunkTopK(0.01, value_format)
    if not aggregator.supports(made):
        assert isinstance(aggregator, ScaleCom)
        assert value_format != "float32"
        return

    def rank(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        reducer = Reducer(Method(made, aggregator=aggregator), comm, granularity="model")
        given, received = torch.zeros(10_000), torch.zeros(10_000)
        for step in range(3):
            grads = {"w": torch.randn(10_000, generator=torch.Generator().manual_seed(10 * step + comm.rank))}
            given = given + grads["w"]
            reducer.reduce_(grads)
            received = received + grads["w"]
        return given, received, reducer.state_dict()["elements"]["residual"]["w"]

    for size in (2, 4):
        ranks = simulate(size, rank)
        assert all(torch.equal(received, ranks[0][1]) for _, received, _ in ranks)
        assert ranks[0][1].any()
        given, kept = sum(rank[0] for rank in ranks), sum(rank[2] for rank in ranks)
        # fp32 roundings of values up to about 20, a few for each of 3 steps and ranks.
        assert (given - size * ranks[0][1] - kept).abs().max() <= 20 * 3 * size * 2**-23


def test_sparseloco_is_built_of_it():
    made = method("sparseloco")
    assert made.compressor == ChunkTopK(64 / 4096, "int2")
    assert method("chunktopk", value_format="bfloat16").compressor == ChunkTopK(0.001, "bfloat16")
    with pytest.raises(TypeError, match="'chunktopk' has no option 'index_format'; it has density, value_format"):
        method("chunktopk", index_format="int32")
    with pytest.raises(ValueError, match=r"ChunkTopK\(value_format='fp8'\): choose from float32, .*, int2"):
        ChunkTopK(value_format="fp8")
