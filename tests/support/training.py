"""Gradients for tests of every method, and some steps that reduce them."""

import torch
from torch import Tensor

from lightning_sparse import METHODS, Method, Reducer, method
from lightning_sparse.comm import Comm

SHAPES = {"conv": (7, 3, 3, 3), "bias": (7,), "one": (1,), "scalar": (), "none": (0, 4), "wide": (37, 53)}


def make(name: str, density: float | None = None) -> Method:
    """Return a method with its test options, and with the given density if it has this option."""
    options = dict(METHODS[name].traits.test_options)
    if density is not None and "density" in options:
        options["density"] = density
    return method(name, **options)


def gradients(kind: str, rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    grads = {}
    for name, shape in SHAPES.items():
        x = torch.randn(shape, generator=generator)
        grads[name] = {
            "normal": x,
            "zeros": torch.zeros(shape),
            "equal": torch.full(shape, -2.5),
            "heavy": x / torch.rand(shape, generator=generator).clamp(min=1e-3),
            "one rank": x if rank == 0 else torch.zeros(shape),
            "bf16": x.to(torch.bfloat16),
            "mixed": x.to(torch.bfloat16) if name in ("bias", "wide") else x,
            "huge": x * 1e30,
            "tiny": x * 1e-42,
        }[kind]
    return grads


KINDS = ["normal", "zeros", "equal", "heavy", "one rank", "bf16", "mixed", "huge", "tiny"]


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().reshape(-1) for name in SHAPES])


def kept(reducer: Reducer) -> Tensor:
    """Return the sum of a rank's state per element."""
    return sum(flat(per_param) for per_param in reducer.state_dict()["elements"].values()) + torch.zeros(())


def train(
    comm: Comm, name: str | Method, kind: str, granularity: str, steps: int = 4
) -> tuple[Tensor, Tensor, Tensor, int]:
    chosen = make(name) if isinstance(name, str) else name
    reducer = Reducer(chosen, comm, granularity=granularity, bucket_cap_mb=0.001, seed=3)
    given, received = torch.zeros(()), torch.zeros(())
    for step in range(steps):
        grads = gradients(kind, comm.rank, step)
        given = given + flat(grads)
        reducer.reduce_(grads)
        received = received + flat(grads)
    return given, received, kept(reducer), comm.sent_bytes
