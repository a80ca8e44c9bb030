"""CUDA graphs: replays give the same bits as launches. On a CPU, recorded operations stand for graphs."""

import contextlib
import copy
import functools
import os
import pickle
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lightning_sparse import Reducer, method
from lightning_sparse.comm.worker import Worker
from lightning_sparse.compressors import GaussianK, TopK
from lightning_sparse.contrib.published_gaussiank import PublishedGaussianK
from lightning_sparse.exchange import NonFiniteGradient
from lightning_sparse.hooks.overlap import BackwardOverlap
from lightning_sparse.kernels import graphs as module
from lightning_sparse.kernels import launch
from lightning_sparse.kernels.block_stats import BlockStats
from lightning_sparse.kernels.graphs import MOST, Captures
from lightning_sparse.kernels.launch import kept
from lightning_sparse.memory import DecayingResidual, NoMemory, Residual
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.kernels import DEVICE, Echo, needs_triton
from tests.support.recorded_graphs import recorded_graphs
from tests.support.tiers import full, in_full, later

SHAPES = {"w": (61, 67), "b": (67,), "v": (1000,)}
STEPS = 5


@contextlib.contextmanager
def graphs(replayed):
    """Use Triton; note replays."""
    with mock.patch.dict(os.environ, {launch.KERNELS: "triton"}), recorded_graphs(replayed):
        yield


def train(name, ranks, captures, rule=None, dtype=torch.float32, memory=None, density=0.002, shapes=SHAPES, **options):
    """Return weights after some steps, of which the first four may capture, residuals, and the last step's replays.

    The second step captures the first graph. Its results are inputs of the second graph, and so on.
    """
    replayed, results = [], []
    torch.manual_seed(0)
    made = replace(method(name, density=density, **options), update_rule=rule)
    made = made if memory is None else replace(made, memory=memory)
    exchanged = "update" if rule else "gradient"
    with graphs(replayed):
        reducer = Reducer(made, Echo(ranks), granularity="model", exchanged=exchanged)
        model = torch.nn.ParameterDict(
            {key: torch.zeros(shape, dtype=dtype, device=DEVICE) for key, shape in shapes.items()}
        )
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        updates = DeltaExchange(reducer, model, [optimizer]) if rule else None
        allowed = reducer.captures.allowed
        if not captures:
            reducer.captures.allowed = contextlib.nullcontext
        for step in range(STEPS):
            replayed.clear()
            for x in model.values():
                x.grad = torch.randn(x.shape, device="cpu").to(DEVICE, dtype)
            if updates is None:
                with allowed() if captures and step < 4 else contextlib.nullcontext():
                    reducer.reduce_({key: x.grad for key, x in model.items()})
                optimizer.step()
            else:
                updates.begin(optimizer)
                optimizer.step()
                updates.exchange(optimizer)
                updates.complete()
            results.append({key: x.detach().clone() for key, x in model.items()})
        reducer.raise_deferred()
    kept = reducer.state_dict()["elements"].get("residual", dict.fromkeys(SHAPES, torch.zeros(1)))
    return results, kept, replayed


def compare(name, ranks, **options):
    """Return the replays in the last step of a training with graphs, which gives the same bits as one without."""
    run = functools.partial(train, name, ranks, **options)
    (plain, residual, nothing), (found, kept, replayed) = run(False), run(True)
    for want, got in zip(plain, found, strict=True):
        for key in SHAPES:
            assert torch.equal(want[key], got[key]), key
    for key in SHAPES:
        assert torch.equal(residual[key], kept[key])
    assert not nothing
    return len(replayed)


@later
@needs_triton
@pytest.mark.parametrize(
    ("name", "ranks", "options", "graphs"),
    [
        ("topk", 3, {"dtype": torch.bfloat16}, 3),
        pytest.param("topk", 3, {"shapes": {**SHAPES, "none": (0,)}}, 3, marks=full),  # first in the segment
        pytest.param("topk", 1, {"value_format": "int2", "density": 0.006}, 3, marks=full),
        pytest.param("gaussiank", 3, {"density": 0.001}, 3, marks=full),
        pytest.param("topk", 3, {"memory": NoMemory()}, 3, marks=full),
        pytest.param("topk", 3, {"value_format": "int4"}, 3, marks=full),
        pytest.param("chunktopk", 3, {}, 3, marks=full),
        pytest.param("gtopk", 3, {}, 1, marks=full),
        pytest.param("oktopk", 3, {}, 1, marks=full),
        pytest.param("randk", 3, {}, 0, marks=full),
    ],
)
def test_replays_give_the_same_bits_as_launches(name, ranks, options, graphs):
    assert compare(name, ranks, **options) == graphs


@needs_triton
@full
@pytest.mark.parametrize(
    ("rule", "graphs"), [(UpdateRule(), 3), (UpdateRule(momentum="keep"), 3), (UpdateRule(overlap="next_step"), 0)]
)
def test_updates_replay_as_well(rule, graphs):
    assert compare("topk", 3, rule=rule) == graphs


def train_within(captures, steps):
    """Return weights and moments, whether each step was within backward, and the number of its replays."""
    replayed, counts, begun = [], [], []
    torch.manual_seed(0)
    with graphs(replayed):
        reducer = Reducer(method("topk", density=0.002), Echo(3), bucket_cap_mb=0.01, exchanged="update")
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))).to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        worker = Worker(torch.cuda.Stream() if DEVICE == "cuda" else None)
        if DEVICE == "cpu":  # the interpreter runs in one thread
            worker.submit = lambda call, *_: at_once(call)
        updates = DeltaExchange(reducer, net, [optimizer], worker=worker)
        assert len(updates.segments) == 2
        within = BackwardOverlap(updates, optimizer)
        if not captures:
            reducer.captures.allowed = contextlib.nullcontext

        def closure():
            optimizer.zero_grad()
            if captures:
                within.watch()
            net(torch.randn(8, 64, device=DEVICE)).square().mean().backward()

        for _ in range(steps):
            replayed.clear()
            within.run_closure(closure, [].append)
            begun.append(within.has_begun)
            if within.has_begun:
                within.finish()
            else:
                updates.begin(optimizer)
                optimizer.step()
                updates.exchange(optimizer)
            counts.append(len(replayed))
        reducer.raise_deferred()
        within.close()
        updates.close()
    state = optimizer.state_dict()["state"]
    return [*net.parameters(), *(x for each in state.values() for x in each.values())], begun, counts


def at_once(call):
    future = Future()
    future.set_result(call())
    return future


@needs_triton
@full  # 25 seconds
def test_within_backward_graphs_are_replayed_once_exchanges_after_the_step_have_captured_them(monkeypatch):
    monkeypatch.setattr("lightning_sparse.routing.Routing._pays", lambda *_: True)
    found, begun, counts = train_within(captures=True, steps=7)
    plain, *_ = train_within(captures=False, steps=7)
    assert begun == [False] * 5 + [True] * 2
    assert counts[4:] == [6] * 3  # three graphs for each of two segments
    for x, y in zip(found, plain, strict=True):
        assert torch.equal(x, y)


class Broken(Echo):
    """Changes a byte of the message of rank 1 in some calls."""

    def __init__(self, calls):
        super().__init__(3)
        self.calls = calls

    def _all_gather(self, x):
        rows = super()._all_gather(x)
        if self._counts["begun"] - 1 in self.calls:
            rows[1][40] ^= 1
        return rows


@full
@needs_triton
@pytest.mark.parametrize("fault", ["not finite", *in_full("corrupt")])
def test_a_replay_notices_what_launches_notice(fault):
    comm = Broken({STEPS - 1} if fault == "corrupt" else ())
    with graphs([]):
        reducer = Reducer(method("topk", density=0.002), comm, granularity="model")
        grads = {key: torch.empty(shape, device=DEVICE) for key, shape in SHAPES.items()}
        with reducer.captures.allowed():
            for step in range(STEPS):
                for x in grads.values():
                    x.normal_()
                if step == STEPS - 1 and fault == "not finite":
                    grads["b"][7] = torch.nan
                reducer.reduce_(grads)
        assert not any(x.any() for x in grads.values())
        text = {
            "not finite": "The gradient of 'b' is not finite on rank 0 at step 4",
            "corrupt": "A message of rank 1 at step 4, .*, is corrupt",
        }
        with pytest.raises((NonFiniteGradient, ValueError), match=text[fault]):
            reducer.raise_deferred()


@full
@needs_triton
def test_a_failed_capture_changes_nothing(caplog, monkeypatch):
    (plain, residual, _), broken = train("topk", 3, captures=False), {"left": 1}
    real = recorded_graphs

    @contextlib.contextmanager
    def failing(replayed):
        with real(replayed):
            capture = module.capture

            def fails_after(function, *args):
                if broken["left"]:
                    broken["left"] -= 1
                    capture(function, *args)
                    raise RuntimeError("operation not permitted when stream is capturing")
                return capture(function, *args)

            with mock.patch.object(module, "capture", fails_after):
                yield

    monkeypatch.setitem(globals(), "recorded_graphs", failing)
    with caplog.at_level("INFO"):
        found, kept, _ = train("topk", 3, captures=True)
    assert broken["left"] == 0
    assert len(caplog.records) == 1
    for want, got in zip(plain, found, strict=True):
        assert all(torch.equal(want[key], got[key]) for key in SHAPES)
    assert all(torch.equal(residual[key], kept[key]) for key in SHAPES)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_cannot_end_is_abandoned(ends, fails, monkeypatch):
    """Else torch's random numbers and allocator would fail from then on. The function's error is reported first."""
    abandoned = []

    class Graph:
        replay = None

        def capture_begin(self, pool, capture_error_mode):
            pass

        def capture_end(self):
            if not ends:
                raise RuntimeError("of the capture")

    def function():
        if fails:
            raise ValueError("of the function")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(module, "abandon_capture", lambda *given: abandoned.append(given))
    x, expected = torch.ones(1), contextlib.nullcontext()
    if fails or not ends:
        expected = pytest.raises((ValueError, RuntimeError), match="of the function" if fails else "of the capture")
    with expected:
        module.capture(function, [x], (0, 1), None)
    assert abandoned == [((0, 1), x.device)] * (not ends)


@needs_triton
def test_a_function_that_cannot_be_captured_runs_as_before(caplog):
    captures, x = Captures(), torch.ones(3, device=DEVICE)
    found = captures.of(0)
    with graphs([]), captures.allowed(), caplog.at_level("INFO"):
        for _ in range(4):
            # The constant is new to the cache in each run, captured or not.
            result = found.run(("add",), lambda: x + kept(object(), x, lambda: x.clone()), [x])
            assert torch.equal(result, x + 1)
    (record,) = caplog.records  # nothing is captured after that
    assert record.levelname == "WARNING"
    assert record.message.startswith("CUDA could not capture ('add',), so the host launches each kernel")


def test_captures_are_in_a_stream_of_high_priority(monkeypatch):
    """Since torch 2.10, kernels of a graph have the priority of the stream of its capture."""
    priorities = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: priorities.append(priority))
    monkeypatch.setattr(module, "capture", lambda *_: "captured")
    assert Captures().attempt("topk", lambda: None, [torch.ones(1)]) == "captured"
    assert priorities == [-1]


def test_nothing_is_captured_without_leave():
    captures, x = Captures(), torch.ones(3, device=DEVICE)
    replayed = []
    with graphs(replayed):
        for _ in range(4):
            assert torch.equal(captures.of(0).run(("add",), lambda: x + 1, [x]), x + 1)
    assert not replayed


@needs_triton
@pytest.mark.parametrize(
    "other",
    [lambda x: torch.full_like(x, 5.0), lambda x: x[:2], lambda x: x.view(torch.int32)],
    ids=["address", "shape", "dtype"],
)
def test_inputs_of_another_address_shape_or_dtype_are_not_replayed(other):
    captures, x, replayed = Captures(), torch.ones(3, device=DEVICE), []
    found, y = captures.of(0), other(x)
    with graphs(replayed), captures.allowed():
        for _ in range(2):
            found.run(("add",), lambda: x + 1, [x])
        assert len(replayed) == 1
        assert torch.equal(found.run(("add",), lambda: y + 1, [y]), y + 1)
        assert len(replayed) == 1
        x.fill_(7)
        assert torch.equal(found.run(("add",), lambda: 1 / 0, [x]), x + 1)  # type: ignore[arg-type, return-value]


@needs_triton
def test_inputs_that_move_are_captured_a_few_times():
    captures, replayed = Captures(), []
    found, inputs = captures.of(0), [torch.full((3,), float(number), device=DEVICE) for number in range(MOST)]
    with graphs(replayed), captures.allowed():
        for x in inputs:
            for _ in range(3):
                assert torch.equal(found.run(("add",), lambda x=x: x + 1, [x]), x + 1)
    assert len(replayed) == MOST  # half of the inputs were captured, and each of them was replayed twice


@needs_triton
def test_inputs_at_other_addresses_within_backward_do_not_make_captures_due_for_ever():
    """The worker's stream has other memory. Exchanges would alternate between within backward and after the step."""
    captures, after, within = Captures(), torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    found, due = captures.of(0), []
    with graphs([]):
        for step in range(3 * MOST):
            due.append(captures.are_due)
            x = after if step == 0 or due[-1] else within
            with captures.allowed() if x is after else contextlib.nullcontext():
                found.run(("add",), lambda x=x: x + 1, [x])
    assert any(due)
    assert not any(due[2 * MOST :])


@needs_triton
def test_a_new_capture_drops_the_graphs_that_follow_it():
    """They may use the memory of the graph that it replaces."""
    captures, x, y = Captures(), torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    found, replayed = captures.of(0), []

    def step(x):
        made = found.run(("double",), lambda: 2 * x, [x])
        return found.run(("add",), lambda: made + 1, [made])

    with graphs(replayed):
        with captures.allowed():
            for _ in range(4):
                step(x)
            assert len(found._captured) == 2
            for _ in range(2):
                step(y)
        assert list(found._captured) == [("double",)]


@needs_triton
def test_a_late_capture_drops_the_graphs_that_follow_it():
    """Its results may be in their temporary memory, which was free."""
    captures, first, second, replayed = Captures(), torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE), []
    found = captures.of(0)
    with graphs(replayed), captures.allowed():
        for x in (first, second):
            found.run(("double", 2), lambda x=x: 2 * x, [x])
            found.run(("add",), lambda: first + 1, [first])
        assert list(found._captured) == [("add",)]
        found.run(("double", 2), lambda: 2 * second, [second])
        assert list(found._captured) == [("double", 2)]


@later
@needs_triton
def test_without_leave_an_exchange_takes_no_buffer_that_is_kept():
    """The worker's kernels may still read it when the training thread's stream gets its memory."""
    with graphs([]):
        reducer = Reducer(method("topk", density=0.002), Echo(3), granularity="model")
        grads = {key: torch.randn(shape, device=DEVICE) for key, shape in SHAPES.items()}
        with reducer.captures.allowed():
            reducer.reduce_(grads)
        found = reducer.captures.of(0)
        kept = found.stats
        assert kept is not None
        (segment,) = reducer.layout.segments
        pending = reducer.begin(segment, [grads[key].view(-1) for key in segment.names])
        assert pending.exchange.ctx.stats is not kept
        reducer.finish(pending)
        x = torch.ones(3, device=DEVICE)
        with reducer.captures.allowed():
            for _ in range(2):
                found.run(("add",), lambda: x + 1, [x])
        assert found.buffer_like(x).shape == x.shape
        assert reducer.captures.buffer is None


@needs_triton
def test_segments_share_a_buffer_that_never_moves():
    """A short segment's input would move as a longer one asked for the buffer, and be captured late."""
    with graphs([]):
        reducer = Reducer(method("topk", density=0.002), Echo(3), bucket_cap_mb=0.001)
        reducer.setup({key: torch.empty(shape, device=DEVICE) for key, shape in SHAPES.items()})
        captures, (short, *_, long) = reducer.captures, sorted(x.numel for x in reducer.layout.segments)
        assert short < long
        for made in (captures, copy.deepcopy(captures)):
            with made.allowed():
                first, second = (made.of(0).buffer_like(torch.ones(size, device=DEVICE)) for size in (short, long))
            assert (len(first), len(second)) == (short, long)
            assert first.data_ptr() == second.data_ptr()


@needs_triton
def test_steps_that_log_stay_within_backward():
    """They replay nothing, so nothing can be captured in them."""
    with graphs([]):
        reducer = Reducer(method("topk", density=0.002), Echo(3), exchanged="update")
        net = torch.nn.Linear(64, 64).to(DEVICE)
        updates = DeltaExchange(reducer, net, [torch.optim.AdamW(net.parameters())])
        reducer.captures.note_run()
        assert updates.captures_are_due
        reducer.observers.append(object())
        assert not updates.captures_are_due


@full
@needs_triton
def test_messages_that_are_large_beside_the_residual_are_not_kept():
    """Their copies and entries would stay on the device for all segments."""
    assert compare("topk", 3, density=0.05) == 1


def test_a_subclass_says_anew_whether_it_depends_on_the_step():
    """Else random numbers in a user's `choose` would repeat the captured step."""

    class Drawn(TopK):
        pass

    class Mine(Residual):
        pass

    assert not TopK().depends_on_step
    assert not Residual().depends_on_step
    assert not DecayingResidual().depends_on_step
    assert PublishedGaussianK().depends_on_step > GaussianK().depends_on_step
    assert Drawn().depends_on_step
    assert Mine().depends_on_step


def test_copies_have_no_graphs():
    captures = Captures()
    with captures.allowed():
        captures.of(0)
        for copied in (copy.deepcopy(captures), pickle.loads(pickle.dumps(captures))):
            assert not copied.are_allowed
            assert not copied._of
        assert not copy.deepcopy(captures.of(0)).is_active(torch.ones(1))


def test_on_the_cpu_statistics_are_those_of_the_step():
    """Sums of several steps would change the threshold of GaussianK."""
    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        reducer = Reducer(method("gaussiank", density=0.01), Echo(2), granularity="model")
        sent = []
        for _ in range(4):
            grads = {"w": torch.randn(100_000)}
            with reducer.captures.allowed() if keeps else contextlib.nullcontext():
                reducer.reduce_(grads)
            sent.append(grads["w"].count_nonzero())
        results.append(sent)
        assert reducer.captures.of(0).stats is None
    assert results[0] == results[1]
    stats = BlockStats(1000, 64, moments=True)
    u = torch.randn(1000)
    assert stats.read(u).mean_and_deviation() == stats.read(u).mean_and_deviation()
