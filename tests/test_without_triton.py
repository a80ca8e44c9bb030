"""On CUDA without Triton, methods give the same results as on the CPU; tested without a GPU."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse import METHODS, Reducer, simulate
from lightning_sparse.comm import Comm
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.cuda_like import CPU, CUDA, WrongDevice, simulate_on_cuda
from tests.support.representatives import DISTINCT
from tests.support.tiers import one_in, tiers
from tests.support.training import make
from tests.support.update_training import OPTIMIZERS

SHAPES = {"matrix": (140, 500), "bias": (101,), "nothing": (0,), "other": (77, 3)}
STEPS = 3


def drawn(rank: int, step: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in SHAPES.items()}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return them as one, on the host."""
    return torch.cat([tensors[name].detach().cpu().double().view(-1) for name in SHAPES])


def reduced(comm: Comm, device: torch.device, name: str, density: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the result of each step, and the sum of the tensors that a rank keeps at the end."""
    reducer, results = Reducer(make(name, density), comm, granularity="model", seed=3), []
    for step in range(STEPS):
        grads = drawn(comm.rank, step, dtype, device)
        reducer.reduce_(grads)
        assert {grad.device for grad in grads.values()} == {device}
        results.append(flat(grads))
    assert {x.device for state in reducer.states for x in state.values()} <= {device}
    kept = [flat(per_param) for per_param in reducer.state_dict()["elements"].values()]
    return [*results, sum(kept, torch.zeros(()))]


# Selection of few entries takes another path.
CASES = [
    (name, density, dtype)
    for name in DISTINCT
    for density in ([0.05, 0.001] if "density" in METHODS[name].traits.test_options else [0.05])
    for dtype in (torch.float32, torch.bfloat16)
]
QUICK = [case for case in CASES if case[1:] == (0.05, torch.bfloat16)]
QUICK += [(name, 0.001, torch.float32) for name in ("gaussiank", "chunktopk", "sidco")]


@one_in(6)
@pytest.mark.parametrize(("name", "density", "dtype"), tiers(CASES, QUICK))
def test_results_are_those_of_the_cpu(name, density, dtype, use):
    use("torch")  # which the kernels of the CPU are compared with elsewhere
    on_cpu = simulate(2, lambda comm: reduced(comm, CPU, name, density, dtype))
    on_cuda = simulate_on_cuda(2, lambda comm: reduced(comm, CUDA, name, density, dtype))
    for expected, found in zip(on_cpu, on_cuda, strict=True):
        for x, y in zip(expected, found, strict=True):
            if name == "powersgd":
                # Bases come from torch on CUDA, and from our own code on the CPU. Both have rounding errors of sums of
                # up to 500 terms. Each step increases them, and so does P, which is up to ten times longer in one
                # direction than in another. A mean may also be rounded to the next number of bf16.
                eps = 10 * STEPS * math.sqrt(500) * 2**-24 + (2**-8 if dtype == torch.bfloat16 else 0)
                assert (x - y).abs().max() <= eps * x.abs().max()
                continue
            if name not in ("qsgd", "terngrad"):
                assert torch.equal(x, y)
                continue
            # On CUDA the host does not look whether squares are out of range: norms are of values divided by the
            # largest. Rounding changes a sum of n squares by about √n · 2⁻²⁴ of it, a norm by half of that; two norms.
            tolerance = math.sqrt(math.prod(SHAPES["matrix"])) * 2**-24
            # Then a mean may be rounded to the next number of bf16. A share `tolerance` of each rank's values lies so
            # close to the boundary between two levels that these values get the other level.
            eps = 2**-8 if dtype == torch.bfloat16 else 0
            others = (x - y).abs() > (tolerance + eps) * x.abs().max()
            assert others.sum() <= 2 * tolerance * x.numel()
    if METHODS[name].traits.conserves and make(name).memory.error_feedback:
        given = sum(flat(drawn(rank, step, dtype, CPU)) for rank in range(2) for step in range(STEPS))
        left = sum(rank[-1] for rank in on_cuda)
        # A few fp32 roundings for every rank and step, of numbers that are at most the sum of all.
        largest = sum(flat(drawn(rank, step, dtype, CPU)).abs().max() for rank in range(2) for step in range(STEPS))
        assert (given - 2 * sum(on_cuda[0][:-1]) - left).abs().max() <= largest * 2**-22


def updated(comm: Comm, device: torch.device, name: str, optimizer: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the weights after each step whose updates are exchanged.

    Before them are steps that are the same on all ranks. Adam's first updates are nearly equal in size, so rounding
    would decide which entries are sent.
    """
    model = nn.Module()
    for key, start in drawn(0, 0, dtype, device).items():
        model.register_parameter(key, nn.Parameter(start))
    params = dict(model.named_parameters())
    optim = OPTIMIZERS[optimizer](params.values())
    updates = DeltaExchange(Reducer(make(name, 0.01), comm, granularity="model", exchanged="update"), model, [optim])
    weights = []
    for step in range(2 * STEPS):
        for key, grad in drawn(0 if step < STEPS else comm.rank, 1 + step, dtype, device).items():
            params[key].grad = grad
        if step < STEPS:
            optim.step()
            continue
        updates.begin(optim)
        optim.step()
        updates.exchange(optim)
        weights.append(flat(params))
    assert {x.device for x in params.values()} == {device}
    return weights


UPDATES = [
    (name, optimizer, dtype)
    for name in ("topk", "gaussiank", "chunktopk", "dgc", "randk", "int4")
    for optimizer in ("adamw", "momentum", "nadam")
    for dtype in (torch.float32, torch.bfloat16)
]
QUICK_UPDATES = [
    ("topk", "adamw", torch.float32),
    ("topk", "momentum", torch.bfloat16),
    ("gaussiank", "nadam", torch.float32),
    ("chunktopk", "momentum", torch.float32),
    ("dgc", "momentum", torch.bfloat16),
]


@one_in(4)
@pytest.mark.parametrize(("name", "optimizer", "dtype"), tiers(UPDATES, QUICK_UPDATES))
def test_updated_weights_are_those_of_the_cpu(name, optimizer, dtype):
    on_cpu = simulate(2, lambda comm: updated(comm, CPU, name, optimizer, dtype))
    on_cuda = simulate_on_cuda(2, lambda comm: updated(comm, CUDA, name, optimizer, dtype))
    for expected, first, second in zip(on_cpu[0], *on_cuda, strict=True):
        assert torch.equal(first, second)
        if optimizer == "momentum":
            assert torch.equal(expected, first)
        else:
            # On the CPU a·m / (b·√v + c) is (a/b)·m / (√v + c/b), so the payout is rounded differently. A weight may be
            # rounded to the next number in each step.
            eps = 2**-8 if dtype == torch.bfloat16 else 2**-23
            assert (expected - first).abs().max() <= STEPS * eps * expected.abs().max()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.ones(4).add_(x),
        lambda x: torch.add(x, x, out=torch.ones(4)),
        lambda x: x.index_select(0, torch.arange(2)),
        lambda x: torch._foreach_add_([x], [torch.ones(4)]),
        lambda x: torch.cat([x, torch.ones(4)]),
        lambda x: torch.rand(4, generator=torch.Generator(), device=CUDA),
        lambda x: x.cpu() + x.to(CPU).to(CUDA),
        lambda x: torch.tensor([1.0], device=CUDA) + torch.zeros_like(x, device=CPU),
        lambda x: next(iter(x)) + torch.topk(x.cpu(), 1).values,
        lambda x: x.numpy(),
    ],
)
def test_wrong_devices_are_seen(wrong):
    """Shows that the tests above can fail."""
    with pytest.raises(WrongDevice):
        simulate_on_cuda(1, lambda comm: wrong(torch.ones(4, device=CUDA)))


def test_a_copy_is_one():
    """Neither side sees what is written to the other."""

    def rank(comm: Comm) -> list[list[float]]:
        host = torch.zeros(2)
        there = host.to(CUDA)
        back = there.cpu()
        there += 1
        back += 2
        return [host.tolist(), there.tolist(), back.tolist()]

    assert simulate_on_cuda(1, rank) == [[[0, 0], [1, 1], [2, 2]]]
