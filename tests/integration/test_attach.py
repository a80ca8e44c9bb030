"""`attach` under adverse conditions: every rank reports the cause within seconds, and nothing stays open."""

import gc
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Method, RankFailure, Reducer, attach, attach_updates, exchange_pending, method
from lightning_sparse.comm import POLL, process_group
from lightning_sparse.compressors import TopK
from lightning_sparse.hooks import UpdateExchanger, report_or_diagnose
from lightning_sparse.hooks.session import Session
from tests.integration.failing import SOON, caught, of_both, step, training
from tests.processes import run_ranks
from tests.support.tiers import full, one_in, tiers


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def threads() -> list[str]:
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return [thread.name for thread in others if thread.name != "lightning_sparse store"]  # those last for one call


def on_part_of_the_world(rank: int) -> tuple[str, str, float]:
    first, _ = dist.new_group([0, 1]), dist.new_group([0, 2])  # rank 0 is a member of one group more than rank 1
    if rank == 2:
        return "no error", "", 0.0

    def train() -> None:
        ddp = DistributedDataParallel(nn.Linear(50, 50), process_group=first)
        attach(ddp, "topk")
        step(ddp)
        step(ddp)

    return caught(train)


def test_a_group_whose_ranks_differ_in_their_other_groups():
    for kind, text, seconds in run_ranks(3, on_part_of_the_world, timeout=8):
        assert (kind, text) == ("no error", "")
        assert seconds < SOON


def one_after_the_other_on_a_part(rank: int) -> list[int]:
    part = dist.new_group([0, 1])
    counts = [groups()]
    for _ in range(2 if rank < 2 else 0):
        ddp = DistributedDataParallel(nn.Linear(50, 50), process_group=part)
        attach(ddp, "topk")
        step(ddp)
        counts.append(groups())
        del ddp
        gc.collect()
        counts.append(groups())
    return counts


def test_the_process_group_of_a_part_of_the_world_is_destroyed_with_the_model():
    *members, _ = run_ranks(3, one_after_the_other_on_a_part)
    assert members == [[2, 3, 2, 3, 2]] * 2


def updates_one_after_the_other(rank: int) -> list[Any]:
    found = []
    for _ in range(2):
        begin, step = training("update")
        begin()
        step()
        found.append((groups(), threads()))
        del begin, step
        gc.collect()
        found.append((groups(), threads()))
    return found


def test_an_exchange_of_updates_leaves_no_group_and_no_thread():
    assert run_ranks(2, updates_one_after_the_other) == [[(2, ["lightning_sparse"]), (1, [])] * 2] * 2


def forked(rank: int, how: str) -> tuple[str, str, float]:
    """Rank 0's child collects its copy of the model, or ends like a script, between two steps."""
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    attach(ddp, "topk")
    step(ddp)
    step(ddp)  # before its second step DDP talks to the others itself
    if rank == 0:
        child = os.fork()
        if child == 0:
            if how == "collected":
                del ddp
                gc.collect()
            else:
                import atexit

                atexit._run_exitfuncs()
            os._exit(0)
        deadline = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                return "the child hangs", "", 0.0
            time.sleep(0.01)

    def train() -> None:
        for i in range(3):
            if rank == 0:
                time.sleep(1.2 * (i == 0))  # so that rank 1 looks for failures while it waits
            step(ddp)

    return caught(train)


@full
@pytest.mark.parametrize("how", ["collected", "at exit"])
def test_a_forked_child_does_not_end_its_parents_training(how):
    assert [outcome[:2] for outcome in run_ranks(2, forked, how)] == [("no error", "")] * 2


class Collects(torch.utils.data.Dataset):
    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.models.clear()
        gc.collect()
        return torch.ones(50)


def fed_by_workers(rank: int) -> tuple[str, str, float]:
    ddp = [DistributedDataParallel(nn.Linear(50, 50))]
    attach(ddp[0], "topk")
    step(ddp[0])

    def train() -> None:
        loader = torch.utils.data.DataLoader(Collects(ddp), num_workers=1, multiprocessing_context="fork")
        for x in loader:
            time.sleep(0.6 * (1 - rank))
            ddp[0](x).sum().backward()

    return caught(train)


@full
def test_a_worker_that_collects_the_model_does_not_end_training():
    assert [outcome[:2] for outcome in run_ranks(2, fed_by_workers)] == [("no error", "")] * 2


def lost_before_attach(rank: int, victim: int, exchange: str) -> tuple[str, str, float]:
    begin, _ = training(exchange)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: begin("topk"))


@one_in(2)
@of_both
@pytest.mark.parametrize(("size", "victim"), [(2, 1), pytest.param(3, 1, marks=full), pytest.param(3, 2, marks=full)])
def test_a_rank_that_is_killed_before_it_attaches_is_named_within_seconds(size, victim, exchange):
    results = run_ranks(size, lost_before_attach, victim, exchange)
    assert results.pop(victim) is None
    for kind, text, seconds in results:
        assert kind == "RankFailure"
        assert f"Rank {victim} has ended before it attached" in text
        assert "strategy" not in text
        assert seconds < SOON


@full
@of_both
def test_a_killed_rank_that_hosted_the_store_is_named_within_seconds(exchange):
    _, *others = run_ranks(3, lost_before_attach, 0, exchange)
    for kind, text, seconds in others:
        assert kind == "RankFailure"
        assert (
            "the process that hosts it, usually rank 0 or torchrun, has ended" in text
            or "Rank 0 has ended before" in text
        )
        assert seconds < SOON


def broken_by(rank: int, killed: int, error: BaseException | None = None) -> str:
    """Return the error of the rank whose connection breaks, as the other is killed. That one may report an error."""
    dist.barrier()
    if rank == killed:
        if error is not None:
            report_or_diagnose(error)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as broken:
        dist.all_reduce(torch.ones(1))
    report_or_diagnose(broken.value)
    return str(broken.value)


def test_a_broken_connection_is_explained_by_the_end_of_the_store_as_well():
    _, text = run_ranks(2, broken_by, 0)
    assert text.startswith("Rank 1 lost the store of the process group: the process that hosts it, usually rank 0 or")
    assert "gloo" in text  # and the first error


def test_a_broken_connection_is_explained_by_an_error_of_a_training_without_a_session():
    text, _ = run_ranks(2, broken_by, 1, ValueError("not so"))
    assert text.startswith("Rank 1 failed: ValueError: not so (")


def frozen_store(rank: int) -> tuple[str, str, float]:
    """A sibling process continues rank 0, which hosts the store, after a while."""
    process_group.CONNECT_SECONDS = 2.0
    dist.barrier()
    if rank == 0:
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(8)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        return "", "", 0.0
    time.sleep(0.5)
    return caught(process_group.default_store)


@full
def test_the_first_call_of_a_store_whose_host_is_frozen_ends():
    _, (kind, text, seconds) = run_ranks(2, frozen_store)
    assert kind == "RankFailure"
    assert text.startswith("Rank 1 gets no answer from the store of the process group: the process that hosts it")
    assert seconds < 7


def frozen_before_attach(rank: int, wakes: bool) -> tuple[tuple[str, str, float], str]:
    """A sibling process continues rank 1 after a while, or once rank 0 has given up."""
    from lightning_sparse.comm import handshake

    ddp = DistributedDataParallel(nn.Linear(50, 50))
    dist.barrier()
    warnings: list[str] = []
    handshake.log.warning = lambda text: warnings.append(f"{time.monotonic() - started:.1f} s: {text}")
    started = time.monotonic()
    if rank == 1:
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(8 if wakes else 14)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)

    def train() -> None:
        attach(ddp, "topk")
        step(ddp)

    return caught(train), "\n".join(warnings)


@full
def test_a_frozen_rank_is_named_within_seconds_and_may_go_on():
    (first, warning), (second, _) = run_ranks(2, frozen_before_attach, True)
    assert first[:2] == second[:2] == ("no error", "")
    assert float(warning.split(" s")[0]) < SOON
    assert "waits for rank 1 to attach" in warning
    assert "There is no sign that its process ended: it may be loading, frozen, or using another strategy" in warning


@full
def test_a_rank_that_stays_frozen_is_an_error_after_the_timeout():
    (first, _), _ = run_ranks(2, frozen_before_attach, False, timeout=8)
    assert first[0] == "RankFailure"
    assert "waits for rank 1 to attach" in first[1]
    assert "it may be loading, frozen, or using another strategy" in first[1]
    assert first[2] < 11


def runs_out_of_memory(rank: int, victim: int, exchange: str) -> tuple[str, str, float]:
    begin, step = training(exchange)
    if rank == victim:

        def setup(self: Reducer, *_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        Reducer.setup = setup
    return caught(lambda: (begin("topk"), step()))


@one_in(2)
@of_both
@pytest.mark.parametrize("victim", tiers([0, 1, 2], [1]))
def test_running_out_of_memory_for_residuals_is_told_to_all_ranks(victim, exchange):
    for rank, (kind, text, seconds) in enumerate(run_ranks(3, runs_out_of_memory, victim, exchange)):
        assert kind == ("OutOfMemoryError" if rank == victim else "RankFailure")
        assert "CUDA out of memory. Tried to allocate 2.00 GiB." in text
        assert rank == victim or text.startswith(f"Rank {victim} cannot attach: OutOfMemoryError")
        assert seconds < SOON


def lost_while_connecting(rank: int, how: str, exchange: str) -> tuple[str, str, float]:
    from lightning_sparse.hooks import session

    begin, _ = training(exchange)
    if rank == 1:

        def new_named_group(*_: Any) -> None:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no network interface")

        session.new_named_group = new_named_group
    return caught(lambda: begin("topk"))


@one_in(2)
@of_both
@pytest.mark.parametrize("how", tiers(["killed", "error"], ["error"]))
def test_a_rank_lost_while_the_ranks_connect_is_named_within_seconds(how, exchange):
    first, second, third = run_ranks(3, lost_while_connecting, how, exchange)
    assert second is None if how == "killed" else "no network interface" in second[1]
    for kind, text, seconds in (first, third):
        assert kind == "RankFailure"
        assert ("Rank 1 has ended" if how == "killed" else "no network interface") in text
        assert seconds < SOON


def default_group_made_anew(rank: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    attach(ddp, "topk")
    step(ddp)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    errors: list[str] = []
    sys.unraisablehook = lambda args: errors.append(repr(args))
    del ddp
    gc.collect()
    again = DistributedDataParallel(nn.Linear(50, 50))
    attach(again, "topk")
    step(again)
    return errors


def test_a_model_of_a_destroyed_process_group_goes_silently():
    assert run_ranks(2, default_group_made_anew) == [[], []]


def attached_twice(rank: int, hook: str) -> tuple[tuple[str, str, float], list[Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel.distributed import _MixedPrecision

    mixed = _MixedPrecision(param_dtype=torch.bfloat16) if hook == "mixed" else None
    ddp = DistributedDataParallel(nn.Linear(50, 50), mixed_precision=mixed)
    if hook == "mixed":
        pass
    elif hook == "attach":
        attach(ddp, "topk")
    elif hook == "builtin":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    before = [groups(), threads()]
    outcome = caught(lambda: attach(ddp, "topk"))
    after = [groups(), threads()]
    if hook != "mixed":  # which torch does not compute on the CPU
        step(ddp)
    return outcome, [before == after]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("attach", "attach was called on this DistributedDataParallel before"),
        ("builtin", "has the communication hook BuiltinCommHookType.FP16_COMPRESS already"),
        ("torch's", "has the communication hook fp16_compress_hook already"),
        pytest.param(
            "mixed",
            "Leave mixed_precision out, and call the model under torch.autocast",
            marks=pytest.mark.skipif(
                torch.version.cuda is not None and not torch.cuda.is_available(),
                reason="torch built for CUDA then wants a GPU",
            ),
        ),
    ],
)
def test_a_model_takes_one_hook_and_attach_says_so(hook, message):
    for (kind, text, _), rest in run_ranks(2, attached_twice, hook):
        assert kind == "ValueError"
        assert message in text
        assert rest == [True]


class Rooted(nn.Module):
    """A parameter belongs to no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)


def changed_before_attach(rank: int, change: str) -> tuple[str, str]:
    net = Rooted()
    if change == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["weight"])
    net.layer.requires_grad_(change != "unfrozen")
    ddp = DistributedDataParallel(net)
    net.layer.requires_grad_(change != "frozen")
    return caught(lambda: attach(ddp, "topk"))[:2]


@pytest.mark.parametrize(("change", "now", "before"), [("unfrozen", 3, 1), ("frozen", 1, 3), ("ignored", 2, 3)])
def test_other_parameters_than_ddp_reduces_are_an_error_before_the_first_step(change, now, before):
    """Unfrozen ones would let backward wait for ever."""
    for kind, text in run_ranks(2, changed_before_attach, change):
        assert kind == "ValueError"
        assert f"{now} parameters of the model require gradients now, but" in text
        assert f"DistributedDataParallel reduces {before}" in text


def with_options(rank: int) -> list[Any]:
    ddp, net = DistributedDataParallel(nn.Linear(50, 50)), nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(net.parameters())
    errors = [
        caught(lambda: attach(ddp, "powersgd", levels=7))[:2],
        caught(lambda: attach(ddp, "topk", granularty="layer"))[:2],
        caught(lambda: attach_updates(net, optimizer, "topk", localsteps=3))[:2],
        caught(lambda: attach_updates(net, optimizer, Method(TopK()), value_format="int8"))[:2],
    ]
    made = [
        attach(ddp, "powersgd", rank=2, density_warmup=None),
        attach_updates(net, optimizer, "topk", value_format="int8"),
    ]
    return [*errors, *(str(reducer.method) for reducer in made)]


def test_options_of_a_method_go_with_its_name():
    for result in run_ranks(2, with_options):
        assert result == [
            (
                "TypeError",
                "attach has no option 'levels', nor has method 'powersgd', which has rank. 'levels' is an "
                "option of qsgd.",
            ),
            (
                "TypeError",
                "attach has no option 'granularty', nor has method 'topk', which has density, index_format, "
                "value_format. Did you mean 'granularity'?",
            ),
            (
                "TypeError",
                "attach_updates has no option 'localsteps', nor has method 'topk', which has density, "
                "index_format, value_format. Did you mean 'local_steps'?",
            ),
            (
                "TypeError",
                "attach_updates has no option 'value_format', and options of a Method are set in its parts. "
                "'value_format' is an option of topk, gaussiank, chunktopk and others.",
            ),
            "LowRank(rank=2) + Residual() + PowerSGD()",
            "TopK(density=0.003, value_format='int8') + Residual() + Mean() + UpdateRule()",
        ]


def fails_at_last(rank: int) -> list[Any]:
    ddp = DistributedDataParallel(nn.Linear(50, 50), find_unused_parameters=True)
    before = [groups(), threads()]

    def register_comm_hook(*_: Any) -> None:
        raise RuntimeError("no hooks today")

    ddp.register_comm_hook = register_comm_hook
    outcome = caught(lambda: attach(ddp, "topk"))
    return [
        outcome[:2],
        before == [groups(), threads()],
        [p._post_accumulate_grad_hooks or {} for p in ddp.parameters()],
    ]


def test_an_attach_that_fails_leaves_nothing_open():
    for (kind, text), left_as_before, hooks in run_ranks(2, fails_at_last):
        # RankFailure occurs on a rank that learns of the other's error before its own error occurs.
        assert kind in ("RuntimeError", "RankFailure")
        assert "no hooks today" in text
        assert left_as_before
        assert hooks == [{}, {}]


def collected_in_its_own_thread(rank: int) -> tuple[list[str], int]:
    models = [DistributedDataParallel(nn.Linear(50, 50))]
    reducer = attach(models[0], "topk")
    step(models[0])
    errors: list[str] = []
    threading.excepthook = lambda args: errors.append(repr(args))
    answer = reducer.comm.peers.respond

    def collect() -> None:  # the thread calls this while it waits for work
        models.clear()
        gc.collect()
        answer()

    reducer.comm.peers.respond = collect
    sys.unraisablehook = threading.excepthook
    deadline = time.monotonic() + SOON
    while "lightning_sparse" in threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return errors + threads(), groups()


def test_a_model_that_its_own_communication_thread_collects():
    assert run_ranks(2, collected_in_its_own_thread) == [([], 1)] * 2


def with_dtype(rank: int) -> tuple[str, str, float]:
    net = nn.Linear(50, 50)
    if rank == 1:
        net.bias.data = net.bias.data.bfloat16()
    return caught(lambda: attach(DistributedDataParallel(net, init_sync=False), "topk"))


def test_ranks_with_different_dtypes():
    for kind, text, seconds in run_ranks(2, with_dtype):
        assert kind == "RankFailure"
        assert "Ranks differ in model: rank 0 has" in text
        assert "bias[50] bfloat16" in text
        assert seconds < SOON


def with_bad_options(rank: int, options: dict[str, Any]) -> tuple[str, str, float]:
    ddp = DistributedDataParallel(nn.Linear(50, 50))
    return caught(lambda: attach(ddp, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 5}, "ValueError: timeout=5 must be a datetime.timedelta above 0"),
        ({"timeout": timedelta(0)}, "ValueError: timeout=datetime.timedelta(0) must be a datetime.timedelta above 0"),
        ({"clip_norm": "1"}, "ValueError: clip_norm='1' must be the largest 2-norm"),
        ({"loss_scale": 1024.0}, "ValueError: loss_scale=1024.0 must be a function"),
        ({"density_warmup": [0.5]}, "ValueError: density_warmup=(0.5,) without epochs"),
        (
            {"density_warmup": 0.5, "density_warmup_steps": 3},
            "ValueError: density_warmup=0.5 must be a list of densities",
        ),
        ({"density_warmup": 0.5}, "ValueError: density_warmup=0.5 must be a list of densities"),
        ({"method": "qsgd", "density": 0.1}, "TypeError: Method 'qsgd' has no option 'density'"),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_an_error_on_each_rank_before_any_rank_waits(options, message):
    for kind, text, seconds in run_ranks(2, with_bad_options, options):
        assert f"{kind}: {text}".startswith(message)
        assert seconds < SOON


def wrong_on_one_rank(rank: int, odd: int, exchange: str, how: str) -> tuple[str, str, float]:
    from lightning_sparse.hooks import update_exchange

    begin, step = training(exchange)
    options: dict[str, Any] = {}
    if rank == odd and how == "a copy of the weights":

        def out_of_memory(*_: Any) -> None:
            raise torch.OutOfMemoryError("tried to allocate a copy")

        update_exchange.DeltaExchange = out_of_memory
    elif rank == odd and how in ("without the optimizer's parameter", "without parameters"):
        model = nn.Tanh() if how == "without parameters" else nn.Linear(50, 50)
        begin = partial(attach_updates, model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    elif rank == odd:
        options = {"density": {"density": 2}, "local_steps": {"local_steps": 0}, "timeout": {"timeout": 5}}[how]
    return caught(lambda: (begin(**options), step()))


@pytest.mark.parametrize("odd", tiers([0, 1], [1]))
@pytest.mark.parametrize(
    ("exchange", "how", "text"),
    [
        ("gradient", "density", "ValueError: TopK(density=2)"),
        ("gradient", "timeout", "ValueError: timeout=5 must be"),
        ("update", "density", "ValueError: TopK(density=2)"),
        ("update", "local_steps", "ValueError: UpdateRule(local_steps=0)"),
        ("update", "without the optimizer's parameter", "ValueError: 'weight', 'bias' require gradients but are in no"),
        ("update", "without parameters", "ValueError: The Tanh has no parameters, so it has no updates to exchange"),
        ("update", "a copy of the weights", "OutOfMemoryError: tried to allocate a copy"),
    ],
)
def test_what_is_wrong_on_one_rank_alone_reaches_those_that_would_wait(odd, exchange, how, text):
    for rank, (kind, said, seconds) in enumerate(run_ranks(2, wrong_on_one_rank, odd, exchange, how)):
        if rank == odd:
            assert f"{kind}: {said}".startswith(text)
        else:
            assert kind == "RankFailure"
            assert text in said
        assert seconds < SOON


def settings_of_one_rank(rank: int, how: str) -> tuple[str, str, float]:
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 5))
    params, kind = list(net.parameters()), torch.optim.AdamW
    if how == "kind" and rank == 1:
        kind = torch.optim.Adam
    if how == "buffer" and rank == 1:
        net[1].register_buffer("mean", torch.zeros(3))
    if how == "frozen":
        net[0].requires_grad_(False).to(torch.bfloat16 if rank == 1 else torch.float32)
        params = params[2:]
    parts = (params[:1], params[1:]) if how == "split" and rank == 1 else (params,)
    rates = {"lr": 0.002} if how == "rate" and rank == 1 else {}
    return caught(lambda: attach_updates(net, [kind(part, **rates) for part in parts]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kind", "optimizers: rank 0 has optimizer 0, AdamW, of 0.weight, rank 1 has optimizer 0, Adam, of 0.weight"),
        (
            "rate",
            "settings of optimizers: rank 0 has lr 0.001 of group 0 of AdamW, rank 1 has lr 0.002 of group 0 of AdamW",
        ),
        ("split", "optimizers: rank 0 has optimizer 0, AdamW, of 0.bias, rank 1 has optimizer 1, AdamW, of 0.bias"),
        ("buffer", "frozen parameters and buffers: rank 0 has no more, rank 1 has 1.mean[3] float32"),
        (
            "frozen",
            "frozen parameters and buffers: rank 0 has 0.weight[20, 20] float32, rank 1 has 0.weight[20, 20] bfloat16",
        ),
    ],
)
def test_ranks_whose_optimizers_or_other_tensors_differ(how, message):
    for kind, text, seconds in run_ranks(2, settings_of_one_rank, how):
        assert (kind, text) == ("RankFailure", f"Ranks differ in {message}. Give all ranks the same settings.")
        assert seconds < SOON


def waits_on_the_device(rank: int, how: str) -> tuple[list[str], str, dict[str, bool], bool]:
    """Run an exchange of updates, with NCCL imitated, when rank 1 fails and the device waits for this rank."""
    freed: list[str] = []
    closed: dict[str, bool] = {}
    net = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "over_nccl", property(lambda self: True))
        patched.setattr(Session, "free_device", lambda self: freed.append("freed"))
        patched.setattr(Session, "close", lambda self, **options: closed.update(options))
        exchange = UpdateExchanger(net, [optimizer], method("topk", density=0.1))
        exchange.comm.mark_failed("Rank 1 failed at step 3: the abacus is missing a bead")
        device = threading.Event()

        def exchanged(optimizer: Any, **_: Any) -> None:
            assert device.wait(10) == (how == "host waits")
            raise RuntimeError("NCCL communicator was aborted")

        if how == "host waits":
            patched.setattr(Session, "free_device", lambda self: (freed.append("freed"), device.set()))
            patched.setattr(exchange.updates, "exchange", exchanged)
        else:  # the host has launched all work, and continues
            patched.setattr(exchange.updates, "exchange", lambda optimizer, **_: None)
            event = SimpleNamespace(query=lambda: False)
            patched.setattr(
                torch.cuda, "current_stream", lambda device=None: SimpleNamespace(record_event=lambda: event)
            )
        net(torch.ones(1, 50)).sum().backward()
        text = ""
        for _ in range(1 if how == "host waits" else 2):
            try:
                optimizer.step()
                time.sleep(3 * POLL.total_seconds())
            except RankFailure as failure:
                text = str(failure)
        consistent = exchange.drain()
        exchange.close()
    return freed, text, closed, consistent


@one_in(2)
@pytest.mark.parametrize("how", ["host waits", "host goes on"])
def test_a_device_that_waits_for_a_failed_rank_is_freed(how):
    ((freed, text, closed, consistent),) = run_ranks(1, waits_on_the_device, how)
    assert freed
    assert "the abacus is missing a bead" in text
    assert closed == {"pending": True}
    assert not consistent


def compared(rank: int, how: str, level: str) -> list[torch.Tensor]:
    """Train with torch's debug level, and barriers of the user's in between; return the weights."""
    # DDP itself ends the process by a signal if its group compares collectives, as of torch 2.13.
    dist.set_debug_level(dist.DebugLevel.OFF if how == "gradient" else dist.DebugLevel.__members__[level])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    model = DistributedDataParallel(net) if how == "gradient" else net
    dist.set_debug_level(dist.DebugLevel.__members__[level])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if how == "gradient":
        attach(model, "topk", density=0.1)
    else:
        attach_updates(net, optimizer, "topk", density=0.1, overlap="next_step" if how == "delayed" else "none")
    if rank > 0 and level == "DETAIL":
        process_group.has_ended(dist.group.WORLD, 0)  # the number of these calls depends on how late ranks connect
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + rank)).square().sum().backward()
        optimizer.step()
        dist.barrier()
    if how != "gradient":
        exchange_pending(optimizer)
    dist.barrier()
    return [param.detach() for param in net.parameters()]


@one_in(2)
@pytest.mark.parametrize("how", ["gradient", "update", "delayed"])
def test_torchs_debug_mode_finds_that_ranks_call_the_same_collectives(how):
    plain, debugged = (run_ranks(2, compared, how, level, backend=None) for level in ("OFF", "DETAIL"))
    for weights in (plain[1], *debugged):
        assert all(map(torch.equal, plain[0], weights))
