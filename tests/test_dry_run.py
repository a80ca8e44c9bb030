"""Kernels are warmed up before training, and streams synchronise; tested without a GPU, with mocks."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_sparse import Reducer, method
from lightning_sparse.hooks.gradient_exchange import exchanges_after_backward
from lightning_sparse.hooks.session import Session
from lightning_sparse.options import ReducerOptions
from tests.processes import run_ranks
from tests.support.fake_cuda import CUDA, Counting, on_fake_cuda
from tests.support.kernels import Echo

PARAMS = {"w": torch.zeros(50, 40), "b": torch.zeros(7)}


class Log(list):
    """The calls on one or several streams, in order."""

    def stream(self, name: str) -> Any:
        class Stream:
            def wait_stream(_, other: Any) -> None:  # noqa: N805
                self.append(f"{name} waits for {other}")

            def __str__(_) -> str:  # noqa: N805
                return name

        return Stream()


def session_of(reducer: Reducer, stream: Any = None) -> Session:
    session = Session.__new__(Session)
    session.reducer, session.comm, session.stream = reducer, reducer.comm, stream
    session.device, session._closed, session._pid = torch.device("cpu"), False, -1
    return session


def rehearsed(**options: Any) -> tuple[Reducer, list[tuple[Any, ...]]]:
    reducer = Reducer(method("topk", density=0.01), Echo(2), **options)
    reducer.setup(PARAMS)
    reducer.epoch = 1
    reduce_segment_, check_gradients, seen = reducer.reduce_segment_, reducer.check_gradients, []

    def recorded(segment, grads, unused=()):
        seen.append((reducer.density, [grad.data_ptr() % 16 for grad in grads], list(unused), reducer.step))
        return reduce_segment_(segment, grads, unused)

    def checked(grads, unused=()):
        seen.append(("all", list(grads)))
        return check_gradients(grads, unused)

    reducer.reduce_segment_, reducer.check_gradients = recorded, checked
    session_of(reducer).dry_run(PARAMS)
    return reducer, seen


def test_every_density_is_rehearsed_with_aligned_gradients_and_with_others():
    """Triton compiles again for another alignment of memory, and for other densities. In backward that may be late."""
    reducer, seen = rehearsed(density_warmup=(1.0, 0.1), granularity="model")
    assert [row[0] for row in seen] == [1.0, 1.0, 0.1, 0.1, *[0.01] * 4]
    assert [row[1:] for row in seen[6:]] == [(*seen[4][1:3], step) for step in (2, 3)]  # like the first one
    for first, second in zip(seen[:6:2], seen[1:6:2], strict=True):
        assert first[1][0] == 0
        assert second[1][0] != 0
        assert (first[2], second[2]) == ([], ["b"])  # reversed, as backward brings them
        assert (first[3], second[3]) == (0, 1)
    assert reducer.options == ReducerOptions(density_warmup=(1.0, 0.1), granularity="model")
    assert (reducer.epoch, reducer.step) == (1, 0)
    assert reducer.comm.sent_bytes == 0
    assert not any(reducer.seconds.values())
    assert not reducer.states[0]["residual"].any()


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"on_nonfinite": "skip"}, {"loss_scale": lambda: 8.0}])
def test_looking_at_all_gradients_is_rehearsed(options):
    reducer, seen = rehearsed(granularity="model", **options)
    assert [row[0] for row in seen] == ["all", 0.01] * 4
    assert reducer.skipped == 0


def test_streams_wait_for_each_other_around_the_rehearsal(monkeypatch):
    """The residuals were set to zero in the current stream, and training begins there."""
    log = Log()
    current, side = log.stream("training"), log.stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    inside = contextlib.contextmanager(lambda stream: iter([log.append(f"in {stream}")]))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    reducer = Reducer("topk", Echo(2))
    reducer.setup(PARAMS)
    reset = reducer.reset
    reducer.reset = lambda: (log.append("residuals set to zero"), reset())
    session_of(reducer, side).dry_run(PARAMS)
    assert log == ["side waits for training", "in side", "residuals set to zero", "training waits for side"]


@pytest.mark.parametrize("rank", [0, 1])
def test_scalecoms_kernels_are_there_before_a_rank_leads(rank):
    """Segment 0 is led by rank 0 at first; the kernels of rank 1 would be compiled while rank 0 waits for it."""
    comm = Counting(2, first_may_wait=True)
    comm.rank = rank
    with on_fake_cuda() as launched:
        grads = {"w": torch.empty(200_000, device=CUDA)}
        reducer = Reducer(method("scalecom", density=0.001), comm)
        reducer.setup(grads)
        reducer.reduce_segment_(reducer.layout.segments[0], list(grads.values()))
    assert {"_histogram", "_count", "_write"} <= set(launched)


def opened(rank: int) -> tuple[int, dict[str, Any]]:
    """Open a session's group on a device that is not there; return the stream's priority and the group's options."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    class Nccl:
        pass

    Nccl.Options = Options
    seen: dict[str, Any] = {}
    helper = dist.distributed_c10d._new_process_group_helper

    def recorded(*args: Any, backend_options: Any = None, **kwargs: Any) -> Any:
        seen["options"] = vars(backend_options)
        return helper(*args, **kwargs)

    def stream(device: torch.device, priority: int = 0) -> None:
        seen["priority"] = priority

    dist.distributed_c10d._new_process_group_helper = recorded
    dist.ProcessGroupNCCL = Nccl
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    torch.cuda.Stream = stream
    limit = timedelta(seconds=20)
    session = Session(
        lambda: PARAMS,
        method("topk"),
        ReducerOptions(),
        group=dist.group.WORLD,
        device=torch.device("cuda"),
        timeout=limit,
    )
    session.close()
    return seen["priority"], seen["options"]


def test_kernels_and_collectives_come_before_those_of_backward_that_wait():
    ((priority, options),) = run_ranks(1, opened)
    assert priority == -1
    assert options == {"is_high_priority_stream": True, "_timeout": timedelta(seconds=20)}


class Wrapped:
    find_unused_parameters = static_graph = False

    def __init__(self, module: nn.Module, **options: bool) -> None:
        self.module = module
        vars(self).update(options)


@pytest.mark.parametrize(
    ("ddp", "environment", "after"),
    [
        (Wrapped(nn.Linear(2, 2)), {}, False),
        (Wrapped(nn.BatchNorm1d(2)), {}, False),
        (Wrapped(nn.Sequential(nn.SyncBatchNorm(2))), {}, True),
        (Wrapped(nn.Linear(2, 2), find_unused_parameters=True), {}, True),
        (Wrapped(nn.Linear(2, 2), find_unused_parameters=True, static_graph=True), {}, False),
        (Wrapped(nn.Linear(2, 2)), {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, True),
        (Wrapped(nn.Linear(2, 2)), {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, False),
    ],
)
def test_where_backward_has_collectives_of_its_own(ddp, environment, after, monkeypatch):
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exchanges_after_backward(ddp) is after
