"""The choice among candidates, on simulated times."""

import itertools
import random
import time

import pytest
import torch

from lightning_sparse import simulate
from lightning_sparse.comm.link import measure_link, speed_up
from lightning_sparse.strategies.tuner import EVERY, LONGEST, RAREST, SETTLING, WINDOW, Tuner

NAMES = ["ddp", "ddp, bf16", "topk", "topk, next step", "int8", "int4"]


class Machine:
    """A machine on which each candidate computes, works, and sends; part of its work and sending is hidden."""

    def __init__(self, rng: random.Random) -> None:
        self.compute = 10 ** rng.uniform(-3, 0)
        self.links = {name: 10 ** rng.uniform(-4, 1) for name in NAMES}
        self.hidden = {name: rng.uniform(0, 1) for name in NAMES}
        self.own = {name: self.compute * rng.uniform(0, 1) * (name != "ddp") for name in NAMES}
        self.slower = 1.0

    def seconds(self, name: str) -> float:
        busy = self.own[name] + self.links[name]
        return self.slower * (self.compute + max(busy - self.hidden[name] * self.compute, 0.0))


def run(tuner: Tuner, machine: Machine, steps: int) -> list[str]:
    """Let a tuner choose; return the candidate of each step."""
    trained = []
    for _ in range(steps):
        trained.append(tuner.current)
        if tuner.note(machine.seconds(tuner.current)) and tuner.decide(tuner.median()):
            tuner.restart(machine.links)
    return trained


@pytest.mark.parametrize("seed", range(200))
def test_within_a_hundred_steps_the_fastest_candidate_trains_and_tries_are_cheap(seed):
    machine = Machine(random.Random(seed))
    first = min(NAMES, key=machine.links.__getitem__)
    tuner = Tuner(machine.links, first)
    trained = run(tuner, machine, 100)
    best = min(machine.seconds(name) for name in NAMES)
    assert machine.seconds(trained[-1]) <= 1.0301 * best
    assert machine.seconds(trained[-1]) <= 1.0101 * machine.seconds("ddp")
    fastest = machine.seconds(first)
    for before, name in itertools.pairwise(trained):
        if name != before:
            # At most compute, own work and the link: each is at most the fastest step so far, the link 1/0.7 of it.
            assert machine.seconds(name) <= (2 + 1 / 0.7) * fastest
        fastest = min(fastest, machine.seconds(name))


def test_by_hand():
    """On a slow link TopK trains first. Stock all-reduce takes two seconds on the link, and is never tried."""
    tuner = Tuner({"ddp": 2.0, "topk": 0.002, "int8": 0.5}, "topk")
    slow = 0.11
    for step in range(SETTLING + WINDOW):
        assert tuner.note(slow) is (step == SETTLING + WINDOW - 1)
    assert tuner.median() == slow
    assert not tuner.decide(slow)
    assert (tuner.current, tuner.is_settled) == ("topk", True)
    assert tuner.summary() == "topk 110 ms a step; not tried: ddp at least 1.4e+03, int8 at least 350"


def test_work_of_one_method_excludes_no_other():
    """TopK selects beside backward for 45 ms. All-reduce in bfloat16 has no such work."""
    seconds = {"topk": 0.145, "ddp, bf16": 0.115, "ddp": 0.13}
    tuner = Tuner({"ddp": 0.06, "ddp, bf16": 0.03, "topk": 0.001}, "topk")
    while not tuner.is_settled:
        tuner.decide(seconds[tuner.current])
    assert tuner.current == "ddp, bf16"


def test_a_restart_forgets_steps_before_it():
    tuner = Tuner({"ddp": 1.0, "topk": 0.1}, "ddp")
    for _ in range(SETTLING + WINDOW - 1):
        tuner.note(1.0)
    tuner.restart({"ddp": 1.0, "topk": 0.1})
    assert not any(tuner.note(2.0) for _ in range(SETTLING + WINDOW - 1))
    assert tuner.note(2.0)
    assert tuner.median() == 2.0


@pytest.mark.parametrize(("spread", "steps"), [(0.0, WINDOW), (0.15, WINDOW), (3.0, LONGEST)])
def test_more_steps_are_measured_if_they_take_different_times(spread, steps):
    """Such as steps with sequences of different lengths."""
    tuner, rng = Tuner({"ddp": 1.0, "topk": 0.1}, "ddp"), random.Random(0)
    for _ in range(3):  # candidates or looks
        while not tuner.note(1 + spread * rng.random()) or tuner.needs_more(tuner.spread()):
            pass
        assert len(tuner._window) == steps
        tuner.decide(tuner.median())


def test_random_lengths_seldom_hide_that_a_candidate_is_faster():
    """Steps take one to three times the least time. TopK is 30 % faster, and eight steps often show the contrary."""
    chosen = {}
    for longest in (WINDOW, LONGEST):
        rng = random.Random(0)
        chosen[longest] = 0
        for _ in range(300):
            tuner = Tuner({"ddp": 0.3, "topk": 0.01}, "ddp")
            while not tuner.is_settled:
                slower = {"ddp": 1.3, "topk": 1.0}[tuner.current]
                if tuner.note(slower * rng.uniform(1, 3)) and (
                    longest == WINDOW or not tuner.needs_more(tuner.spread())
                ):
                    tuner.decide(tuner.median())
            chosen[longest] += tuner.current == "topk"
    assert chosen[WINDOW] < 0.9 * 300 < 0.95 * 300 < chosen[LONGEST]


def test_a_restart_before_the_first_measurement_does_not_shorten_the_warm_up():
    tuner = Tuner({"ddp": 1.0, "topk": 0.1}, "topk")
    tuner.wait(45)
    for _ in range(5):
        tuner.note(1.0)
    tuner.restart(tuner.links)
    assert not any(tuner.note(1.0) for _ in range(40 + WINDOW - 1))
    assert tuner.note(1.0)


def test_stock_is_kept_if_another_candidate_gains_less_than_the_spread():
    tuner = Tuner({"ddp": 0.05, "topk": 0.001}, "ddp")
    for seconds in (0.1, 0.0995):
        assert not tuner.decide(seconds)
    assert (tuner.current, tuner.is_settled) == ("ddp", True)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 1.5])
def test_candidates_are_tried_again_when_steps_take_another_time(factor):
    machine = Machine(random.Random(1))
    tuner = Tuner(machine.links, "ddp")
    before = run(tuner, machine, 2 * (EVERY + WINDOW))[-1]
    machine.slower = factor
    restarts = []
    tuner.restart = lambda links: restarts.append(links)  # type: ignore[method-assign]
    assert {*run(tuner, machine, EVERY + 3 * WINDOW)} == {before}
    assert bool(restarts) == (abs(factor - 1) > 0.2)


def test_one_slow_window_changes_nothing():
    tuner = Tuner({"ddp": 1.0, "topk": 0.1}, "topk", settled=True)
    assert not tuner.decide(1.0)  # the first look after a resume
    assert not tuner.decide(2.0)
    assert not tuner.decide(1.0)
    assert not tuner.decide(2.0)
    assert tuner.decide(2.0)


def test_a_faster_link_is_noticed_although_the_step_takes_the_same_time():
    tuner = Tuner({"ddp": 1.0, "topk": 0.1}, "topk")
    assert tuner.probe_seconds == 0
    assert not tuner.decide(0.2)
    assert (tuner.current, tuner.is_settled) == ("topk", True)
    assert tuner.probe_seconds == pytest.approx(0.005 * EVERY * 0.2)
    assert [tuner.decide(0.2, factor) for factor in (2.0, 1.0, 1.4, 2.0, 2.0)] == [False] * 4 + [True]
    tuner.restart({"ddp": 0.01, "topk": 0.001})
    assert not tuner.decide(0.2)
    assert tuner.current == "ddp"
    assert not tuner.decide(0.19)
    assert (tuner.current, tuner.is_settled, tuner.probe_seconds) == ("ddp", True, 0)


def test_tries_get_rarer_on_a_link_that_changes_all_the_time():
    tuner, restarts = Tuner({"ddp": 0.1, "topk": 0.1}, "ddp"), []
    seconds = 1.0
    for step in range(20 * RAREST):
        seconds *= 1.3 if step % EVERY == 0 else 1
        if tuner.note(seconds) and tuner.decide(tuner.median()):
            tuner.restart(tuner.links)
            restarts.append(step)
    gaps = [b - a for a, b in itertools.pairwise(restarts)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 3 * EVERY < RAREST < gaps[-1]


def test_a_single_candidate_is_never_compared():
    tuner = Tuner({"ddp": 1.0}, "ddp")
    assert not any(tuner.note(1.0) for _ in range(1000))


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_measure_the_same_link(size):
    found = simulate(size, lambda comm: measure_link(comm, torch.device("cpu")))
    assert len({*found}) == 1
    bandwidth, latency = found[0]
    assert bandwidth > 1e5
    assert 0 < latency < 1


def test_groups_measure_the_slowest_of_their_links():
    def measured(comm):
        group = comm.sub([comm.rank % 2, comm.rank % 2 + 2])
        if comm.rank == 3:  # its group is the slower one
            group._all_reduce = lambda *_, send=group._all_reduce: (time.sleep(0.2), send(*_))
        return measure_link(group, torch.device("cpu"), comm)

    found = simulate(4, measured)
    assert len({*found}) == 1
    assert found[0][1] > 0.09  # two messages take 0.2 s


@pytest.mark.parametrize("bandwidth", [1e4, 1e15])
def test_a_faster_link_is_measured_as_faster_on_all_ranks(bandwidth):
    """A link of 10 kB/s would take 0.1 s for the message, and one of 10^15 no time."""
    found = simulate(3, lambda comm: speed_up(comm, torch.device("cpu"), bandwidth, 0.0, 0.1))
    assert len({*found}) == 1
    assert found[0] > 1.5 if bandwidth == 1e4 else 0 < found[0] < 1
