"""Indices as bits, with plain torch and with Triton; padding has no effect."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.kernels import launch, pack
from tests.support.kernels import DEVICE, needs_triton
from tests.support.tiers import one_in

# numpy's, in which the interpreter calculates: of NaN and infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def padded(indices, numel, size):
    return torch.tensor([*indices, *[numel] * (size - len(indices))], dtype=torch.int64)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_by_hand(kernels, use):
    use(kernels)
    # With eight lower bits the upper ones are 0: bits 0, 1, 2. With none: bits 3 + 0, 5 + 1, 14 + 2.
    indices = torch.tensor([3, 5, 14]).to(DEVICE if kernels == "triton" else "cpu")
    upper, lower = pack.pack_bits(indices, 300, 4, 8)
    assert upper.tolist() == [0b00000111]
    assert lower.tolist() == [3, 5, 14, 0]
    (upper,) = pack.pack_bits(indices, 15, 4, 0)
    assert upper.tolist() == [1 << 3 | 1 << 6, 0, 1]
    count = torch.tensor([3], dtype=torch.int32, device=upper.device)
    assert pack.unpack_bits(upper, (), count, 15, 4, 0).tolist() == [3, 5, 14, 15]


@one_in(2)
@needs_triton
@pytest.mark.parametrize("width", [0, 8, 16])
@pytest.mark.parametrize(
    ("numel", "count", "capacity"),
    [(1, 1, 1), (70_000, 0, 5), (70_000, 90, 90), (70_000, 33, 1500), (3_000, 2_999, 3_000)],
)
def test_both_ways_agree(numel, count, capacity, width, use):
    indices = torch.randperm(numel)[:count].sort().values
    use("torch")
    expected = pack.pack_bits(indices, numel, capacity, width)
    use("triton")
    # The indices without padding, and with padding, as from a host that does not know their number.
    for given_indices in (indices, padded(indices.tolist(), numel, min(capacity, count + 7))):
        parts = pack.pack_bits(given_indices.to(DEVICE), numel, capacity, width)
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(parts, expected, strict=True))
    counted = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    back = pack.unpack_bits(parts[0], parts[1:], counted, numel, capacity, width)
    assert torch.equal(back.cpu(), padded(indices.tolist(), numel, capacity))
    use("torch")
    assert torch.equal(pack.unpack_bits(expected[0], expected[1:], counted.cpu(), numel, capacity, width), back.cpu())


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("width", [0, 8, 16])
def test_rows_are_packed_each_for_itself(width, kernels, use):
    use(kernels)
    device = DEVICE if kernels == "triton" else "cpu"
    numel, capacity, counts = 9_001, 40, [40, 0, 7, 39]
    rows = [torch.randperm(numel)[:count].sort().values for count in counts]
    indices = torch.stack([padded(row.tolist(), numel, capacity) for row in rows]).to(device)
    count = torch.tensor(counts, dtype=torch.int32, device=device).unsqueeze(1)
    together = pack.pack_bits(indices, numel, capacity, width)
    for row, alone in enumerate(rows):
        parts = pack.pack_bits(alone.to(device), numel, capacity, width)
        assert all(torch.equal(part[row], mine) for part, mine in zip(together, parts, strict=True))
    # As in messages: rows are not contiguous.
    upper, *lower = (torch.nn.functional.pad(part, (8, 8))[:, 8:-8] for part in together)
    assert torch.equal(pack.unpack_bits(upper, lower, count, numel, capacity, width), indices)


@needs_triton
def test_many_tiles_know_what_is_before_them(use, monkeypatch):
    monkeypatch.setattr(pack, "TILE", 64)
    monkeypatch.setattr(pack, "BYTES", 64)
    use("triton")
    indices = torch.randperm(30_000)[:4_000].sort().values
    upper, lower = pack.pack_bits(indices.to(DEVICE), 30_000, 4_000, 8)
    assert upper.numel() > 8 * 64
    counted = torch.tensor([4_000], dtype=torch.int32, device=DEVICE)
    assert torch.equal(pack.unpack_bits(upper, (lower,), counted, 30_000, 4_000, 8).cpu(), indices)


@needs_triton
@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=40, max_size=40), st.integers(-5, 100))
def test_damaged_bytes_do_no_harm(damaged, count):
    """The indices may be wrong, but with none of them a reader accesses memory out of bounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(launch.KERNELS, "triton")
        data = torch.frombuffer(bytearray(damaged), dtype=torch.uint8).to(DEVICE)
        upper, lower = data[: pack.upper_bytes(2_000, 20, 8)], torch.cat([data] * 2)[:20]
        counted = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        indices = pack.unpack_bits(upper, (lower,), counted, 2_000, 20, 8)
        assert len(indices) == 20
        assert bool((indices >= 0).all())


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_gather(kernels, use):
    use(kernels)
    device = DEVICE if kernels == "triton" else "cpu"
    u = torch.randn(5000, device=device)
    indices = torch.arange(0, 5000, 3, device=device)
    assert torch.equal(pack.gather(u, indices), u[indices])
    assert pack.gather(u, indices[:0]).tolist() == []
    if kernels == "triton":
        assert pack.gather(u, torch.tensor([1, 5000], device=device)).tolist() == [u[1].item(), 0.0]
