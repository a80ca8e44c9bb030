"""Codes of few bits: by hand, encoded and decoded. The payload contains nothing else."""

import pytest
import torch

from lightning_sparse.contrib.kernels.codes import code_bytes, in_regions, pack_codes, region_codes, unpack_codes


@pytest.mark.parametrize(
    ("codes", "bits", "packed"),
    [
        ([1, 0, 1], 1, [0b101]),
        ([1, 0, 0, 0, 0, 0, 0, 1, 1], 1, [0b10000001, 1]),
        (
            [2, 1, 0, 3, 1],
            2,
            [
                0b11000110,
                0b01,
            ],
        ),
        ([15, 1, 7], 4, [0x1F, 0x07, 0, 0]),
        # The lower two bits of all codes, then the third bit of all.
        ([5, 2, 7], 3, [0b111001, 0, 0b101]),
        ([200, 3], 8, [200, 3, 0, 0, 0, 0, 0, 0]),
        ([258, 1], 9, [2, 1, 0, 0, 0, 0, 0, 0, 0b01]),
    ],
)
def test_by_hand(codes, bits, packed):
    given = torch.tensor(codes, dtype=torch.int16 if bits > 8 else torch.uint8)
    found = pack_codes(given, bits)
    assert found.dtype == torch.uint8
    assert found.tolist() == packed + [0] * (code_bytes(len(codes), bits) - len(packed))
    assert unpack_codes(found, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", range(1, 16))
def test_codes_come_back_and_take_their_bits(bits):
    for numel in (0, 1, 8, 77, 200, 1001, 300_000):
        codes = torch.randint(0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(bits))
        codes = codes.to(torch.int16 if bits > 8 else torch.uint8)
        packed = pack_codes(codes, bits)
        assert packed.numel() == code_bytes(numel, bits) == (numel + 7) // 8 * bits
        assert torch.equal(unpack_codes(packed, bits, numel), codes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_codes_may_be_wider_or_narrower_than_their_bits(dtype):
    codes = torch.arange(100, dtype=dtype)
    for bits in (7, 8, 9, 15):
        packed = pack_codes(codes, bits)
        assert packed.numel() == code_bytes(100, bits)
        assert torch.equal(unpack_codes(packed, bits, 100).long(), codes.long())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 129])
def test_a_region_is_packed_by_itself(bits, size):
    for numel in (0, 1, 100, 1000):
        codes = torch.randint(0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        regions = in_regions(pack_codes(codes, bits), bits, size)
        width = region_codes(numel, size)
        assert regions.shape == (size, code_bytes(width, bits))
        assert torch.equal(torch.cat([unpack_codes(row, bits, width) for row in regions])[:numel], codes)
