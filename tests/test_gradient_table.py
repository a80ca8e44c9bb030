"""The table of gradients' addresses, which is created once."""

import pytest
import torch

from lightning_sparse.kernels import block_stats, launch
from lightning_sparse.kernels.gradient_table import TILE, gradient_table
from tests.support.fake_cuda import CUDA, on_fake_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(dtype):
    lengths = [3 * TILE - 1, 0, 1, 2 * TILE, 5]  # tiles: two of the first alone, one of the first and third, two, one
    bounds = [0, 3 * TILE - 1, 3 * TILE - 1, 3 * TILE, 5 * TILE, 5 * TILE + 5]
    grads = [torch.zeros(length, dtype=dtype) for length in lengths]
    addresses = [grad.data_ptr() for grad in grads]
    tile = TILE * dtype.itemsize
    tiles = [addresses[0], addresses[0] + tile, 0, addresses[3], addresses[3] + tile, 0]
    assert gradient_table(grads, bounds).tolist() == [*bounds[:-1], *addresses, *tiles]


def test_a_tile_is_looked_up_from_where_its_gradient_starts():
    grads = torch.zeros(3 * TILE).split([7, 3 * TILE - 7])
    table = gradient_table(grads, [0, 7, 3 * TILE])
    assert table[-3:].tolist() == [0, *(grads[0].data_ptr() + 4 * TILE * tile for tile in (1, 2))]


def test_it_is_kept_for_as_long_as_gradients_stay_where_they_are():
    both = torch.zeros(2, 100)
    first = gradient_table([both[0]], [0, 100])
    assert gradient_table([both[0]], [0, 100]) is first
    assert gradient_table([both[1]], [0, 100]) is not first
    assert gradient_table([both[0]], [0, 99]) is not first


def test_not_more_bytes_are_kept_than_a_limit(monkeypatch):
    monkeypatch.setattr(launch, "_kept", launch.Cache())
    monkeypatch.setattr(launch, "KEPT", 1536)
    x = torch.zeros(1)

    def kept_of(elements):
        """Request five tensors in turn; return the numbers of the cached ones."""
        launch._kept = launch.Cache()
        made = [launch.kept(key, x, lambda key=key: torch.full((elements,), float(key))) for key in range(5)]
        assert [int(each[0]) for each in made] == [*range(5)]
        assert launch.kept(4, x, lambda: torch.tensor(7)) is made[4]
        return [key for key in range(5) if any(each is made[key] for each in launch._kept.tensors.values())]

    assert kept_of(256) == [4]
    assert kept_of(1) == [3, 4]  # as on a device, which takes 512 bytes for the smallest


def test_what_is_kept_belongs_to_a_kind_a_device_and_a_stream(monkeypatch):
    class Other(torch.Tensor):
        pass

    x = torch.zeros(1)
    assert launch.kept("key", x, lambda: x) is x
    assert int(launch.kept("key", x.as_subclass(Other), lambda: torch.tensor(5))) == 5
    with on_fake_cuda():
        y = torch.empty(1, device=CUDA)
        assert launch.kept("key", y, lambda: y) is y
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 1}))
        assert launch.kept("key", y, lambda: y + 1) is not y


@pytest.mark.parametrize("capturing", [False, True])
def test_a_constant_made_within_a_capture_is_not_kept(capturing, monkeypatch):
    """Its copy to the device is a node of that graph: without a replay its memory holds anything."""
    with on_fake_cuda():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        x = torch.empty(1, device=CUDA)
        first = launch.kept("table", x, lambda: torch.empty(3, device=CUDA))
        again = launch.kept("table", x, lambda: torch.empty(3, device=CUDA))
        assert (again is first) is not capturing


def test_a_tensor_of_the_host_is_not_handed_to_a_kernel():
    """The interpreter takes it, and a GPU does not."""
    with on_fake_cuda():
        block_stats._add_with_stats[1](torch.empty(3, device=CUDA))
        with pytest.raises(AssertionError, match="_add_with_stats got a tensor on cpu"):
            block_stats._add_with_stats[1](torch.empty(3, device=CUDA), torch.empty(3))
