"""Random options, values and histories for every method, with hypothesis.

There are 200 examples, the same in every run. To test 2,000 new examples, which takes some minutes:

    HYPOTHESIS_PROFILE=long pytest tests/test_random.py
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse import METHODS, Reducer, simulate
from lightning_sparse.aggregators import AllReduceMean, Mean
from lightning_sparse.comm import Comm
from lightning_sparse.compressors.base import Entries, drop_padding
from lightning_sparse.memory import NoMemory
from lightning_sparse.observer import Observer
from lightning_sparse.state import resized, sources
from tests.integration.trainers import same
from tests.support.profiles import PROFILE
from tests.support.tiers import full
from tests.support.training import make

SIZES = [1, 2, 3, 5]
GRANULARITIES = ["layer", "bucket", "model"]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]  # half of them fp32
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
KINDS = ["normal", "zeros", "equal", "ties", "heavy", "one rank", "opposite", "huge", "tiny"]


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool
    tied: bool  # a second name for it


@dataclass(frozen=True)
class Step:
    kind: str
    unused: frozenset[tuple[int, int]]  # (rank, parameter), modulo their numbers
    overflow: tuple[int, int, float] | None  # rank, parameter, value


@dataclass(frozen=True)
class Case:
    name: str
    density: float
    params: list[Param]
    size: int
    granularity: str
    cap: float
    scale: float | None
    before: list[Step]
    after: list[Step]
    new_size: int
    new_granularity: str
    seed: int


shapes = st.one_of(
    st.sampled_from([(), (1,), (0,), (0, 4), (1, 1, 1)]),
    st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple),
    st.integers(1, 5000).map(lambda n: (n,)),
)
params = st.builds(Param, shapes, st.sampled_from(DTYPES), st.integers(0, 5).map(lambda n: n == 0), st.booleans())
steps = st.builds(
    Step,
    st.sampled_from(KINDS),
    st.one_of(st.just(frozenset()), st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=8)),
    st.one_of(
        st.none(),
        st.none(),
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from([math.inf, -math.inf, math.nan])),
    ),
)
cases = st.builds(
    Case,
    name=st.sampled_from(sorted(METHODS)),
    density=st.one_of(st.sampled_from([0.001, 0.01, 0.05, 0.3, 1.0]), st.floats(1e-4, 1.0)),
    params=st.lists(params, min_size=1, max_size=6).filter(lambda all_: not all(p.frozen for p in all_)),
    size=st.sampled_from(SIZES),
    granularity=st.sampled_from(GRANULARITIES),
    cap=st.sampled_from([1e-5, 1e-3, 25.0]),
    scale=st.sampled_from([None, None, 1.0, 1024.0]),
    before=st.lists(steps, min_size=1, max_size=4),
    after=st.lists(steps, min_size=1, max_size=3),
    new_size=st.sampled_from(SIZES),
    new_granularity=st.sampled_from(GRANULARITIES),
    seed=st.integers(0, 2**31),
)


def model(case: Case) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a module by name. A tied parameter occurs once, a frozen one never."""
    module = nn.Module()
    for number, param in enumerate(case.params):
        made = nn.Parameter(torch.zeros(param.shape, dtype=param.dtype), requires_grad=not param.frozen)
        setattr(module, f"p{number}", made)
        if param.tied:
            setattr(module, f"also{number}", made)
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def values(kind: str, param: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(param.shape, generator=generator)
    # The largest that may add up over all steps and ranks.
    largest = 1e36 if param.dtype != torch.float16 else 1e3
    made = {
        "normal": x,
        "zeros": torch.zeros_like(x),
        "equal": torch.full_like(x, -2.5),
        "ties": x.round(),
        "heavy": x / torch.rand(x.shape, generator=generator).clamp(min=1e-3),
        "one rank": x if rank == 0 else torch.zeros_like(x),
        "opposite": torch.full_like(x, (-1.0) ** rank),
        "huge": x.clamp(-4, 4) * largest / 4,
        "tiny": x * 1e-42,
    }[kind]
    return made.to(param.dtype)


class Counter(Observer):
    """Checks that the number of sent entries fits the density, if the aggregator applies the sent entries unchanged."""

    def __init__(self, compressor):
        self.compressor = compressor

    def aggregated(self, u, applied, ctx):
        numel = ctx.segment.numel
        if isinstance(applied, Entries):
            indices = drop_padding(applied, numel).indices
            k = self.compressor.count(numel, ctx.density)
            assert 2 * k / 3 <= indices.numel() <= self.compressor.capacity(numel, ctx.density), ctx.segment
            assert (indices.diff() > 0).all()
            assert indices.numel() == 0 or 0 <= indices[0] <= indices[-1] < numel


class Run:
    """One rank's history: its own gradients and the results that it received, in fp64."""

    def __init__(self, case: Case, comm: Comm, granularity: str, state: dict | None = None) -> None:
        self.case, self.comm, self.params = case, comm, model(case)
        made = make(case.name, case.density)
        options = {"on_nonfinite": "skip"} if case.scale is None else {"loss_scale": lambda: case.scale}
        if not any(step.overflow for step in case.before + case.after) and case.scale is None:
            options = {}  # one segment after the other, without a look ahead
        options |= {"granularity": granularity, "bucket_cap_mb": case.cap, "seed": case.seed}
        self.reducer = Reducer(made, comm, **options)
        if isinstance(made.aggregator, Mean | AllReduceMean):
            self.reducer.observers = [Counter(made.compressor)]
        if state is not None:
            self.reducer.load_state_dict(state)
        self.reducer.setup(self.params)
        self.given = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in self.params.items()}
        self.received = {name: value.clone() for name, value in self.given.items()}
        self.largest = dict.fromkeys(self.params, 0.0)
        self.outs: list[dict[str, Tensor]] = []

    def steps(self, steps: list[Step], first: int) -> "Run":
        for number, step in enumerate(steps, first):
            self.step(step, number)
        return self

    def step(self, step: Step, number: int) -> None:
        size, names = self.comm.size, list(self.params)
        scale = self.case.scale or 1.0

        def gradients(rank: int) -> tuple[dict[str, Tensor], set[str]]:
            generator = torch.Generator().manual_seed(self.case.seed + 1000 * number + rank)
            unused = {names[p % len(names)] for r, p in step.unused if r % size == rank}
            grads = {name: values(step.kind, param, rank, generator) for name, param in self.params.items()}
            for name in unused:
                grads[name].fill_(math.nan)  # the gradient of an unused parameter is ignored
            if step.overflow is not None and step.overflow[0] % size == rank:
                name = names[step.overflow[1] % len(names)]
                if grads[name].numel() and name not in unused:
                    grads[name].view(-1)[-1] = step.overflow[2]
            return grads, unused

        def broken(rank: int) -> bool:
            grads, unused = gradients(rank)
            return any(not grad.isfinite().all() for name, grad in grads.items() if name not in unused)

        grads, unused = gradients(self.comm.rank)
        before = self.reducer.state_dict()
        mine = {name: grad.double() / scale for name, grad in grads.items() if name not in unused}
        self.reduce(grads, unused)
        if any(broken(rank) for rank in range(size)):
            assert all(grad.isnan().all() for grad in grads.values())
            assert same(before["elements"], self.reducer.state_dict()["elements"])
            return
        for name, value in mine.items():
            self.given[name] += value
            self.largest[name] += float(value.abs().max()) if value.numel() else 0.0
        for name, grad in grads.items():
            assert grad.isfinite().all(), name
            self.received[name] += grad.double() / scale
        used_by_nobody = set.intersection(*(gradients(rank)[1] for rank in range(size)))
        if METHODS[self.case.name].traits.conserves:
            assert not any(grads[name].any() for name in used_by_nobody), "DDP discards it: lost"
        self.outs.append(grads)

    def reduce(self, grads: dict[str, Tensor], unused: set[str]) -> None:
        """Reduce gradients like the hook."""
        if self.reducer.gradient_check.needs_all_gradients and not self.reducer.check_gradients(grads, unused):
            return
        for segment in self.reducer.layout.segments:
            flat = [grads[name].view(-1) for name in segment.names]
            self.reducer.reduce_segment_(segment, flat, [name for name in segment.names if name in unused])
        self.reducer.finish_step()

    def kept(self, name: str) -> Tensor:
        return sum((e[name].double() for e in self.reducer.state_dict()["elements"].values()), torch.zeros(()))


@full
@pytest.mark.reliability(
    "random parameter sets, dtypes, unused parameters, values, overflows and numbers of ranks, by hypothesis",
    checked="nothing lost; equal on all ranks; density within bounds; resume with other partitions and other ranks",
    methods=METHODS,
)
@PROFILE
@given(cases)
def test_a_random_history(case):
    def begin(comm: Comm) -> Run:
        return Run(case, comm, case.granularity).steps(case.before, 0)

    def go_on(comm: Comm) -> Run:
        rank, size = comm.rank, comm.size
        needed = [states[old] for old in sources(rank, size, case.size)]
        state = states[rank] if size == case.size else resized(needed, rank, size)
        run = Run(case, comm, case.new_granularity, state)
        # The saved state of each parameter is restored, in any partition into segments.
        assert same(run.reducer.state_dict()["elements"], state["elements"])
        return run.steps(case.after, len(case.before))

    first = simulate(case.size, begin)
    states = [run.reducer.state_dict() for run in first]
    second = simulate(case.new_size, go_on)
    for runs in (first, second):
        assert all(same(run.outs, runs[0].outs) for run in runs), "ranks differ"
    if (case.size, case.granularity) == (case.new_size, case.new_granularity):
        straight = simulate(case.size, lambda comm: begin(comm).steps(case.after, len(case.before)))
        assert same(straight[0].outs, first[0].outs + second[0].outs), "resume differs from going on"
    if not METHODS[case.name].traits.conserves:
        return
    count = len(case.before) + len(case.after)
    for name, param in second[0].params.items():
        given, largest = torch.zeros(()), 0.0
        for runs in (first, second):
            given = given + sum(run.given[name] for run in runs) / len(runs)
            largest += max(run.largest[name] for run in runs)
        kept = sum(run.kept(name) for run in second) / len(second)
        found = first[0].received[name] + second[0].received[name] + kept
        # No number in an element's history is larger than `largest`, the sum of its inputs. Each number is rounded once
        # for every rank, and when it is added, scaled, divided, written and kept. If the number of ranks changes, all
        # these roundings happen again.
        roundings = (max(case.size, case.new_size) + 6) * (count + 1)
        tolerance = roundings * (largest * 2**-24 + 2**-149)
        if isinstance(METHODS[case.name].memory, NoMemory):  # 16-bit gradients round every step's result
            tolerance += count * (largest * ROUNDING[param.dtype] + 2**-25)
        assert ((given - found).abs() <= tolerance).all(), f"{name}: {(given - found).abs().max()} > {tolerance}"
