"""Writes random images in the file formats of CIFAR-10."""

import struct
from pathlib import Path

import numpy as np


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """Encode a batch like the published files: pickle protocol 2 of Python 2, with byte strings."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def named(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode()

    none, false = b"N", b"\x89"
    empty = named("numpy.core.multiarray", "_reconstruct")
    empty += named("numpy", "ndarray") + number(0) + b"\x85" + string(b"b") + b"\x87R"
    dtype = named("numpy", "dtype") + string(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + string(b"|") + none * 3 + number(-1) * 2 + number(0) + b"tb"
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array = empty + b"(" + number(1) + shape + dtype + false + string(images.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + listed + b"u."


def write_cifar10(folder: Path, layout: str, count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Write six files of random images to folder/layout; return all training images and labels."""
    draw = np.random.default_rng(0)
    inner = folder / layout / ("cifar-10-batches-py" if layout == "python" else "cifar-10-batches-bin")
    inner.mkdir(parents=True)
    images = draw.integers(0, 256, (6, count, 3072), dtype=np.uint8)
    labels = draw.integers(0, 10, (6, count), dtype=np.uint8)
    for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        if layout == "python":
            (inner / name).write_bytes(python2_pickle(images[i], labels[i].tolist()))
        else:
            (inner / f"{name}.bin").write_bytes(np.hstack([labels[i][:, None], images[i]]).tobytes())
    return images[:5].reshape(-1, 3, 32, 32), labels[:5].reshape(-1).astype(np.int64)
