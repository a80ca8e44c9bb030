"""Random models and histories with exchanged updates, with hypothesis: equal ranks and no loss."""

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse import METHODS, simulate
from lightning_sparse.comm import Comm
from lightning_sparse.memory import Residual
from tests.support.profiles import PROFILE
from tests.support.tiers import full
from tests.support.training import make
from tests.support.update_training import OPTIMIZERS, Net, train

# Methods that keep all unsent entries in one residual. A TwoPass is excluded: it has one for its owner's errors, too.
NAMES = [
    name
    for name in METHODS
    if make(name).update_rule is None and isinstance(make(name).memory, Residual) and not make(name).aggregator.state
]
KINDS = ["normal", "zeros", "equal", "heavy", "one rank"]


@dataclass(frozen=True)
class Step:
    kind: str
    unused: frozenset[tuple[int, int]]  # (rank, parameter), modulo their numbers


@dataclass(frozen=True)
class Case:
    method: str
    density: float
    optimizer: str
    shapes: list[tuple[int, ...]]
    size: int
    granularity: str
    bf16: bool
    delayed: bool
    steps: list[Step]


shapes = st.one_of(
    st.sampled_from([(), (1,), (0,), (0, 4)]),
    st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple),
    st.integers(1, 3000).map(lambda n: (n,)),
)
steps = st.builds(
    Step,
    st.sampled_from(KINDS),
    st.one_of(st.just(frozenset()), st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=8)),
)
cases = st.builds(
    Case,
    method=st.sampled_from(NAMES),
    density=st.one_of(st.sampled_from([0.001, 0.01, 0.3, 1.0]), st.floats(1e-3, 1.0)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    shapes=st.lists(shapes, min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 3, 5]),
    granularity=st.sampled_from(["layer", "bucket", "model"]),
    bf16=st.booleans(),
    delayed=st.booleans(),
    steps=st.lists(steps, min_size=1, max_size=5),
)


class RandomNet(Net):
    """A model of a case, whose gradients are those of its steps."""

    def __init__(self, case: Case) -> None:
        named = {f"p{number}": shape for number, shape in enumerate(case.shapes)}
        super().__init__(torch.bfloat16 if case.bf16 else torch.float32, named)
        self.case = case

    def backward(self, rank: int, step: int) -> None:
        super().backward(rank, step)
        kind, unused = self.case.steps[step].kind, self.case.steps[step].unused
        absent = {(of % self.case.size, param % len(self.case.shapes)) for of, param in unused}
        for number, param in enumerate(self.parameters()):
            g = param.grad
            assert g is not None
            made = {
                "normal": g,
                "zeros": torch.zeros_like(g),
                "equal": torch.full_like(g, -2.5),
                "heavy": g**5,
                "one rank": g if rank == 0 else torch.zeros_like(g),
            }[kind]
            param.grad = None if (rank, number) in absent else made


@full
@PROFILE
@given(cases)
def test_equal_on_all_ranks_and_nothing_lost(case):
    """In every step, `train` compares the deltas of the ranks with the applied updates and the residuals."""
    dtype = torch.bfloat16 if case.bf16 else torch.float32

    def rank(comm: Comm) -> Tensor:
        return train(
            comm,
            case.optimizer,
            make(case.method, case.density),
            steps=len(case.steps),
            granularity=case.granularity,
            dtype=dtype,
            net=RandomNet(case),
            delayed=case.delayed and make(case.method).aggregator.applies_all_sent,
        )[0]

    first, *others = simulate(case.size, rank)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
