"""The cost model against steps computed by hand, and the command `advise`."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness import results
from benchmarks.harness.shaped_links import PAYLOAD_SHARE, bits_per_second
from benchmarks.sharded import SHAPES
from examples.models.gpt import GPT
from lightning_sparse import METHODS, Reducer, advise, method, simulate, trained
from lightning_sparse.aggregators import Mean, TwoLevel
from lightning_sparse.compressors import Compressor, TopK
from lightning_sparse.cost import DENSE, Costs, Link, Workload, break_even_bandwidth, matrices, step
from lightning_sparse.layout import Segment, cut
from lightning_sparse.memory import Residual
from lightning_sparse.methods import Method, resolve_updates, update_density
from lightning_sparse.update_rule import UpdateRule
from lightning_sparse.updates.exchange import DeltaExchange
from tests.support.tiers import full, in_diagonals, later, one_in, tiers
from tests.support.training import make


def test_dense_by_hand():
    # Two segments of 1000 elements, done after 1 s and 2 s of backward, behind 1 s of forward; 4 workers.
    work = Workload((1000, 1000), (0.5, 1.0), forward=1.0, backward=2.0)
    # A ring takes 2 · 3 messages and sends 2 · 3/4 · 4000 bytes: at 1000 bytes/s 6 s, and 6 · 0.1 s of latency.
    found = step(DENSE, work, 4, Link(1000, latency=0.1), Costs())
    # The first is sent from 2 s to 8.6 s, and the second follows it.
    assert (found.seconds, found.exposed, found.sent_bytes) == pytest.approx((15.2, 12.2, 12_000))
    # On a link that is much faster only the second's exchange is left: 6 messages of 0.1 s each.
    assert step(DENSE, work, 4, Link(1e12, latency=0.1), Costs()).exposed == pytest.approx(0.6)
    # 16 bit halves the bytes.
    assert step(DENSE, work, 4, Link(1000), Costs(), dense_bytes=2).sent_bytes == 6000


def test_sparse_by_hand():
    work = Workload((1000,), (1.0,), forward=1.0, backward=2.0)
    topk = Method(TopK(density=0.01, index_format="int32"))
    # A rank sends 10 entries of 8 bytes to each of 3 others at 100 bytes/s, in 3 messages. Selecting takes 0.5 s, and
    # summing the entries of 3 others takes 0.3 s.
    costs = Costs(element=0.5e-3, entry=0.01, shared=True)
    found = step(topk, work, 4, Link(100, latency=0.1), costs)
    assert (found.seconds, found.sent_bytes) == pytest.approx((3 + 0.5 + 2.4 + 0.3 + 0.3, 240))
    # With a second segment, selecting in the first delays backward if they share a device, and not otherwise.
    work = Workload((1000, 1000), (0.5, 1.0), forward=1.0, backward=2.0)
    shared = step(topk, work, 4, Link(1e9, latency=0), costs).seconds
    beside = step(topk, work, 4, Link(1e9, latency=0), Costs(element=0.5e-3, entry=0.01, shared=False)).seconds
    assert shared - beside == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "size"), in_diagonals(METHODS, [2, 3, 8], 3))
def test_bytes_are_those_of_a_reducer(name, size):
    numel = 20_000
    chosen = make(name, 0.01)

    def rank(comm):
        reducer = Reducer(chosen, comm, granularity="model")
        generator = torch.Generator().manual_seed(comm.rank)
        grads = {str(shape): torch.randn(shape, generator=generator) for shape in reversed(matrices(numel))}
        reducer.reduce_(grads)
        return comm.sent_bytes

    work = Workload((numel,), (1.0,), 0.0, 1.0)
    said = step(DENSE if name == "dense" else chosen, work, size, Link(1e9), Costs()).sent_bytes
    said *= chosen.update_rule.local_steps if chosen.update_rule else 1
    sent = simulate(size, rank)
    # In gTopK some ranks send fewer messages than others. In ScaleCom each rank leads in turn, and then sends more.
    assert said <= max(sent) * 1.001
    # The difference is headers, counts, and rounding up to words of 8 bytes.
    assert sum(sent) / size <= said + 150 * size


def test_dense_is_sent_where_that_is_less():
    work = Workload((1000,), (1.0,), 0.0, 1.0)
    assert step(method("topk", density=0.5), work, 64, Link(1e6), Costs()) == step(DENSE, work, 64, Link(1e6), Costs())


def test_updates_of_several_steps_come_after_backward():
    """Two segments of 0.1 s on the wire: one hides behind backward, but of four steps none, and these share them."""
    work = Workload((1000, 1000), (0.5, 1.0), 1.0, 1.0)
    link = Link(4000 / 0.1, latency=0.0)
    local = replace(DENSE, update_rule=UpdateRule(local_steps=4))
    assert step(DENSE, work, 2, link, Costs()).exposed == pytest.approx(0.1)
    assert step(DENSE, work, 2, link, Costs(), exchanged="update").exposed == pytest.approx(0.1)
    found = step(local, work, 2, link, Costs())
    assert found.exposed == pytest.approx(0.05)
    assert found.seconds == pytest.approx(2.05)
    assert found.sent_bytes == 2000


def test_updates_go_segment_by_segment():
    """Two segments take 0.5 s on the wire, after 0.05 s of work. The second one's work waits for the first segment."""
    work, link = Workload((1000, 1000), (0.5, 1.0), 1.0, 1.0), Link(4000 / 0.5, latency=0.0)
    costs = Costs(dense_byte=0.05 / 4000, shared=False)
    assert step(DENSE, work, 2, link, costs).exposed == pytest.approx(0.55)  # 1.5 + 0.05 + 2 · 0.5 - 2
    assert step(DENSE, work, 2, link, costs, exchanged="update").exposed == pytest.approx(0.6)  # 0.05 more


def test_delayed_updates_go_beside_the_next_steps():
    """Two segments of 10 entries: 0.1 s of selecting, 0.05 s of adding up, and a message of 80 bytes, each."""
    work, costs = Workload((1000, 1000), (0.5, 1.0), 1.0, 1.0), Costs(element=0.1e-3, entry=0.005)
    topk = Method(TopK(density=0.01, index_format="int32"), update_rule=UpdateRule(overlap="next_step"))
    beside = replace(costs, shared=False)
    assert step(topk, work, 2, Link(80 / 0.2, latency=0.3), costs).exposed == pytest.approx(0.2 + 0.1)
    assert step(topk, work, 2, Link(80 / 0.2, latency=0.3), beside).exposed == pytest.approx(0.2)
    # The link's second and the third that it takes to add up are longer than a step of two seconds, or than two steps.
    assert step(topk, work, 2, Link(80 / 0.2, latency=1.3), costs).exposed == pytest.approx(3.0 + 0.1 - 2)
    rarer = replace(topk, update_rule=UpdateRule(overlap="next_step", local_steps=2))
    assert step(rarer, work, 2, Link(80 / 0.2, latency=1.3), costs).exposed == pytest.approx((0.2 + 0.1) / 2)
    assert step(rarer, work, 2, Link(80 / 0.2, latency=3.3), costs).exposed == pytest.approx((7.0 + 0.1 - 4) / 2)


def test_shards_share_the_link_of_their_worker():
    """Two replicas of four shards, of 1000 elements each."""
    work = Workload.even(4000, 1.0, 1.0, shards=4)
    assert (work.segments, work.shards) == ((1000,), 4)
    work = replace(work, segments=(500, 500), arrivals=(0.5, 1.0))
    # Each rank sends 2 · 1/2 · 2000 bytes of a segment in two messages, and the link carries the bytes of four ranks.
    link = Link(4 * 2000 / 0.4, latency=0.1)
    dense = step(DENSE, work, 2, link, Costs())
    # The first segment is sent during backward, from 1.5 s to 2.1 s, and the second follows it.
    assert (dense.exposed, dense.sent_bytes) == pytest.approx((0.7, 16_000))
    # Each rank selects 5 of 500 elements, and sends 40 bytes. Selecting takes 0.05 s, and adding 0.1 s. The second
    # segment's selection runs while the first one is sent. All of it is after backward.
    topk, costs = Method(TopK(density=0.01, index_format="int32")), Costs(element=1e-4, entry=0.02)
    sparse = step(topk, work, 2, Link(4 * 40 / 0.3, latency=0.0), costs, exchanged="update")
    assert (sparse.exposed, sparse.sent_bytes) == pytest.approx((0.05 + 0.3 + 0.1 + 0.05 + 0.3 + 0.1, 320))
    with pytest.raises(ValueError, match=r"shards=0: .* at least one parameter and one shard"):
        Workload.even(10, 1, 1, shards=0)


def test_ranks_of_a_node_share_its_link_in_a_hierarchical_exchange():
    """Two nodes of four ranks, each of which sends 10 of its 1000 entries, of 8 bytes each."""
    topk, work = Method(TopK(density=0.01, index_format="int32")), Workload((4000,), (1.0,), 1.0, 1.0)
    by_node = step(replace(topk, aggregator=TwoLevel(ranks_per_node=4)), work, 8, Link(4 * 80, latency=0.0), Costs())
    assert (by_node.exposed, by_node.sent_bytes) == pytest.approx((1.0, 320))
    # Without a hierarchy, payloads of 40 entries pass the link in a ring, one from each of seven ranks.
    assert step(topk, work, 8, Link(4 * 80, latency=0.0), Costs()).exposed == pytest.approx(7.0)
    # Dense if that sends less: a ring among 8 ranks sends 2 · 7/8 · 16,000 bytes, and 4 · 1000 entries 32,000.
    everything = replace(topk, aggregator=TwoLevel(ranks_per_node=4), compressor=TopK(1.0, index_format="int32"))
    assert step(everything, work, 8, Link(1e9), Costs()) == step(DENSE, work, 8, Link(1e9), Costs())


def of_two_nodes(training: str, link: Link, seconds: float):
    """Return the modelled step of a training in `sharded_seconds.csv`: two nodes of two ranks.

    Args:
        training: its name.
        link: the link of a node.
        seconds: of a step without communication.
    """
    replicas, shards = SHAPES[training]
    params = sum(x.numel() for x in GPT().parameters())
    work = Workload.even(params, seconds / 3, 2 / 3 * seconds, shards=max(1, shards))
    if training == "dense HSDP":
        return step(DENSE, work, replicas, link, Costs())
    chosen = resolve_updates("topk", None, ranks=2 if "hierarchical" in training else replicas)[0]
    if "hierarchical" in training:
        chosen = replace(chosen, aggregator=TwoLevel(chosen.aggregator, 2))
    return step(chosen, work, replicas, link, Costs(), exchanged="update")


def test_bytes_between_two_nodes_are_those_of_the_measurement():
    """The CSV counts the bytes of a rank. A node sends the bytes of two ranks, or of one rank in a ring of all."""
    measured = results.load(results.RESULTS / "sharded_seconds.csv")
    for run in measured.itertuples():
        together = 1 if "whole models" in run.contestant else 2
        said = of_two_nodes(run.contestant, Link(1e9), 0.1).sent_bytes / together
        # A rank sends up to three messages. Each has less than 40 bytes of headers, counts and padding.
        assert 0 <= run.sent_bytes_per_step - said <= (0 if run.contestant == "dense HSDP" else 3 * 40)


def test_steps_between_two_nodes_are_those_of_the_measurement():
    """Dense steps at 100 Mbit/s, from the steps with updates, whose exchange takes less than a millisecond.

    Over gloo, FSDP2 waits for each all-reduce, so nothing overlaps. The model of so few parameters has one segment,
    which is sent after backward. At 1 Gbit/s, the exchange takes less time than the tolerance.
    """
    measured = results.load(results.RESULTS / "sharded_seconds.csv").query("rate == '100mbit'").set_index("contestant")
    link = Link(bits_per_second("100mbit") / 8 * PAYLOAD_SHARE)
    dense, sparse = (measured.loc[name] for name in ("dense HSDP", "TopUp between replicas"))
    exposed = of_two_nodes("TopUp between replicas", link, 0.1).exposed
    assert exposed < 0.001
    said = of_two_nodes("dense HSDP", link, sparse.median_ms / 1e3 - exposed)
    # The standard error of a median of n normal samples is 1.25 σ/√n, and σ is (p80 − p20)/1.68. Both steps have one.
    errors = [1.25 * (row.p80_ms - row.p20_ms) / 1.68 / math.sqrt(row.steps) for row in (dense, sparse)]
    tolerance = 3 * math.hypot(*errors) + dense.largest_calibration_error * 1e3 * said.exposed
    assert abs(1e3 * said.seconds - dense.median_ms) < tolerance
    # With a link for each rank, instead of one for each node, the model would be far off.
    assert abs(1e3 * (said.seconds - said.exposed / 2) - dense.median_ms) > 2 * tolerance


def test_messages_of_each_way():
    messages = {name: [method(name).aggregator.messages(size) for size in (1, 2, 5, 8)] for name in METHODS}
    assert messages == {
        "dense": [0, 3, 12, 21],  # with the headers that our own dense path sends before
        "randk": [0, 3, 12, 21],
        "topk": [0, 1, 4, 7],
        "gaussiank": [0, 1, 4, 7],
        **{key: [0, 1, 4, 7] for key in ["sidco", "mstopk", "chunktopk"]},
        "gtopk": [0, 1, 4, 3],
        "oktopk": [0, 3, 12, 21],
        "scalecom": [0, 4, 15, 24],
        "int8": [0, 2, 8, 14],
        "int4": [0, 2, 8, 14],
        "doublesqueeze": [0, 2, 8, 14],
        "qsgd": [0, 1, 4, 7],
        "powersgd": [0, 5, 20, 35],  # headers, and two rings of all-reduce
        "signsgd": [0, 2, 8, 14],
        "signum": [0, 2, 8, 14],
        "median": [0, 2, 8, 14],
        "trimmed_mean": [0, 2, 8, 14],
        "onebit": [0, 2, 8, 14],
        "terngrad": [0, 3, 12, 21],
        "efsignsgd": [0, 1, 4, 7],
        **{key: [0, 1, 4, 7] for key in ["memsgd", "dgc", "sparseloco"]},
        **{key: [0, 3, 12, 21] for key in ["local_sgd", "diloco"]},
    }
    assert TwoLevel(ranks_per_node=4).messages(8) == 1


@pytest.mark.parametrize(("direct", "trips"), [(0, 6), (1 << 10, 6), (1 << 11, 1)])
def test_short_messages_to_all_ranks_at_once_take_the_latency_once(direct, trips):
    """250 entries of 8 bytes are 2,000 bytes for each other rank."""
    link, work = Link(1e9, 0.1, direct), Workload((2500,), (1.0,), 0.0, 0.0)
    topk = TopK(density=0.1, index_format="int32")
    assert step(Method(topk), work, 7, link, Costs()).seconds == pytest.approx(0.1 * trips, rel=1e-3)
    assert step(DENSE, work, 7, link, Costs()).seconds == pytest.approx(0.1 * 12, rel=1e-3)
    # Of two ranks in each of seven nodes, each sends half of the entries.
    nodes = Method(topk, aggregator=TwoLevel(ranks_per_node=2))
    assert step(nodes, work, 14, link, Costs()).seconds == pytest.approx(0.1 if direct else 0.6, rel=1e-3)


def test_break_even_bandwidth():
    work = Workload.even(25_000_000, 0.05, 0.1)
    costs = Costs(element=1e-9)
    point = break_even_bandwidth(method("gtopk"), work, 16, Link(1e9), costs, [4, 2])

    def ratio(bandwidth):
        dense = step(DENSE, work, 16, Link(bandwidth), costs, dense_bytes=2).seconds
        return dense / step(method("gtopk"), work, 16, Link(bandwidth), costs).seconds

    assert ratio(point * 1.01) < 1 < ratio(point * 0.99)
    assert break_even_bandwidth(method("gtopk"), work, 16, Link(1e9), Costs(element=1.0), [4]) < 1e3 * 125
    # Without compute costs, sending less is never slower. With infinite bandwidth it is not faster either.
    assert break_even_bandwidth(method("gtopk"), work, 16, Link(1e9, latency=0), Costs(), [4]) > 1e10


def test_equal_segments_are_computed_once():
    computed = []

    @dataclass(frozen=True)
    class Counts(TopK):
        def nbytes(self, segment, density):
            computed.append(segment.numel)
            return super().nbytes(segment, density)

    work = Workload.even(1_000_000_001, 0.1, 0.2)
    found = step(Method(Counts(), Residual()), work, 4, Link(1e9), Costs(element=1e-9))
    assert len({*computed}) == 2 < len(work.segments)
    assert len(computed) < 10
    assert found == step(method("topk"), work, 4, Link(1e9), Costs(element=1e-9))


def test_segments_are_even():
    work = Workload.even(10_000_001, 0.1, 0.2)
    assert sum(work.segments) == 10_000_001
    assert max(work.segments) - min(work.segments) <= 1
    assert work.arrivals[-1] == 1


def test_a_thousand_workers():
    for name in METHODS:
        found = step(method(name), Workload.even(125_000_000, 0.1, 0.2), 1024, Link(125e6), Costs(element=1e-9))
        assert math.isfinite(found.seconds)


def test_bad_input():
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        Link(0)
    for params in (0, 10**30):
        with pytest.raises(ValueError, match=r"at least one parameter .* at most 1e\+13 parameters"):
            Workload.even(params, 1, 1)
    for size in (0, -1, math.nan):
        with pytest.raises(ValueError, match="the size of a segment in MiB is above 0"):
            Workload.even(1000, 1, 1, bucket_cap_mb=size)
    for segments, arrivals in (((10, 20), (1.0,)), ((), ())):
        with pytest.raises(ValueError, match="give each segment the time at which it arrives"):
            Workload(segments, arrivals, 0, 0)
    assert update_density(500_000) == 1
    with pytest.raises(ValueError, match="workers=0"):
        step(DENSE, Workload.even(10, 1, 1), 0, Link(1), Costs())


def table(capsys, *arguments):
    advise.main(["--params", "2e5", "--workers", "8", *arguments])
    return capsys.readouterr().out


@full
def test_advise_prints_all_methods_and_says_when_dense_wins(capsys, monkeypatch):
    slow = table(capsys, "--bandwidth", "1Mbit", "--backward", "0.01")
    names = re.findall(r"^(\w[\w, -]*?)  +\d", slow, re.MULTILINE)
    assert set(names) == {*METHODS, "ddp", "ddp, 16-bit hook"} - {"dense"}
    assert "x ddp" in slow
    assert re.search(r"^topk takes \d+% of the time of ddp, 16-bit hook", slow, re.MULTILINE)
    monkeypatch.setattr(advise, "METHODS", {"topk": METHODS["topk"]})
    fast = table(capsys, "--bandwidth", "400Gbit", "--backward", "0.5")
    assert re.search(
        r"No method that trained as well as dense with 8 workers is faster than ddp(, 16-bit hook)?\.", fast
    )
    assert "Stay with it." in fast


def test_advise_about_sharded_models(capsys, monkeypatch):
    """Two nodes of four devices: replicas of four shards, beside whole models on eight devices."""
    names = ("topk", "int4", "signsgd", "dense", "dgc")
    monkeypatch.setattr(advise, "METHODS", {name: METHODS[name] for name in names})
    monkeypatch.setattr(advise, "measure", lambda *_, **__: (Costs(element=1e-9), 1.0))
    monkeypatch.setattr(advise, "slowdown", lambda: 1.0)
    arguments = "--workers", "2", "--shards", "4", "--bandwidth", "10Mbit", "--backward", "0.1", "--latency", "0.03"
    out = table(capsys, *arguments)
    rows = {line[:24].strip(): line[24:].split() for line in out.splitlines()[3:10]}
    whole = "topk_ddp", "topk_ddp, hierarchical"
    assert rows.keys() == {"dense_hsdp", "dense_hsdp, 16-bit", "topk_hsdp", "int4_hsdp", "dgc_hsdp", *whole}
    assert "2 workers of 4 shards each" in out
    # A node of a ring sends the whole model once, in fp32 or 16 bits. Payloads of 8 ranks pass it 7 times.
    assert [rows[name][3] for name in ("dense_hsdp", "dense_hsdp, 16-bit")] == ["0.800", "0.400"]
    of_two, of_eight = (
        resolve_updates("topk", None, ranks=ranks)[0].compressor.nbytes(Segment(0, ("",), ((numel,),), 0), None)
        for ranks, numel in ((2, 50_000), (8, 200_000))
    )
    sent = [float(rows[name][3]) for name in ("topk_hsdp", "topk_ddp, hierarchical", "topk_ddp")]
    assert sent == pytest.approx([4e-6 * of_two, 4e-6 * of_two, 7e-6 * of_eight], abs=0.0006)
    assert re.search(r"^topk_hsdp takes \d+% of the time of dense_hsdp, 16-bit, .* with up to 2 workers", out, re.M)
    assert "topk_ddp trains whole models on 8 devices, without the collectives of FSDP2" in out
    assert "(for SGD)" in out
    assert "next_step" not in out
    # Only two replicas have been tried, and only with AdamW.
    of_three = table(capsys, *arguments, "--workers", "3")
    assert "with 3 workers is faster than dense_hsdp, 16-bit." in of_three
    assert re.search("^topk_hsdp would take .* only with up to 2 workers", of_three, re.M)
    with_sgd = table(capsys, *arguments, "--optimizer", "sgd")
    assert re.search(r"^topk_hsdp .*\(not seen to train as dense\)", with_sgd, re.M)


def test_shards_of_what_is_recommended_have_trained_as_dense():
    sharded = results.load(results.RESULTS / "sharded.csv").replace({"contestant": {"dense HSDP": "dense"}})
    assert level(sharded, "TopUp between replicas", replicas=advise.SHARDED, shards=2)


@later
def test_advise_says_what_a_delay_would_gain(capsys, monkeypatch):
    monkeypatch.setattr(advise, "METHODS", {name: METHODS[name] for name in ("topk", "gtopk", "sparseloco")})
    far = "--bandwidth", "1Mbit", "--backward", "1", "--latency", "0.05"
    of_four = table(capsys, *far, "--workers", "4")
    assert re.search(r"^With overlap='next_step' topk would take 1[0-5]\d\d(\.\d)? ms a step", of_four, re.MULTILINE)
    assert "next_step" not in table(capsys, *far)  # eight workers trained less well with it
    assert "next_step" not in table(capsys, "--bandwidth", "1Gbit", "--backward", "1", "--workers", "4")


@full
def test_advise_does_not_say_that_a_density_by_hand_trained_as_well(capsys, monkeypatch):
    monkeypatch.setattr(advise, "METHODS", {name: METHODS[name] for name in ("topk", "int4")})
    slow = "--bandwidth", "1Mbit", "--backward", "0.1", "--workers", "4"
    assert re.search(r"^topk takes \d+% of the time of .* trained as well", table(capsys, *slow), re.M)
    by_hand = table(capsys, *slow, "--density", "0.0001")
    assert re.search(r"^topk .*\(not seen to train as dense\)", by_hand, re.M)
    assert re.search(r"^int4 takes \d+% of the time of .* trained as well", by_hand, re.M)
    assert "next_step" not in by_hand
    monkeypatch.setattr(advise, "METHODS", {"topk": METHODS["topk"]})
    of_eight = table(capsys, "--bandwidth", "1Mbit", "--backward", "0.1", "--density", "0.01")
    assert "No method that trained as well as dense with 8 workers, with the options of its runs, is faster" in of_eight
    assert "Leave --density out to compare the density that trained." in of_eight


def test_advise_says_that_it_takes_its_time_before_it_does(capsys, monkeypatch):
    """It also prints a line for each method as soon as the method is timed. The table comes at the end."""
    measured = iter([(Costs(element=1e-9), 1.0)])

    def interrupted(*_, **__):
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(advise, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table(capsys, "--bandwidth", "1Mbit", "--backward", "0.01")
    captured = capsys.readouterr()
    first, *rows = captured.err.splitlines()
    assert re.fullmatch(r"Timing every method on .*, which takes about half a minute, longer if .*:", first)
    assert re.fullmatch(r"topk: [\d.]+ ms a step", rows[0])
    assert captured.out == ""  # which may go to a file


@full
def test_advise_recommends_nothing_that_was_not_seen_to_train_as_dense(capsys, monkeypatch):
    names = ("powersgd", "scalecom", "doublesqueeze", "int4", "randk", "diloco")
    monkeypatch.setattr(advise, "METHODS", {name: METHODS[name] for name in names})
    slow = "--bandwidth", "1Mbit", "--backward", "0.01"
    of_eight = table(capsys, *slow, "--workers", "8")
    assert of_eight.count("(not seen to train as dense)") == 3
    assert re.search(r"^int4 takes \d+% .* with up to 8 workers; check that", of_eight, re.MULTILINE)
    of_many = table(capsys, *slow, "--workers", "16")
    assert "(trained as dense with up to 8 workers)" in of_many
    assert "with 16 workers is faster than ddp, 16-bit hook." in of_many
    assert "Stay with it." not in of_many
    assert re.search(
        r"^int4 would take \d+% of its time, but it trained as well as dense only with up to 8 workers",
        of_many,
        re.MULTILINE,
    )


def test_advise_says_that_the_machine_is_busy(capsys, monkeypatch):
    """Its times include the effect of all programs on this machine."""
    for slow, spread in ((1.0, 1.0), (1.0, 2.5), (2.5, 1.0)):
        monkeypatch.setattr(advise, "slowdown", lambda slow=slow: slow)
        monkeypatch.setattr(advise, "measure", lambda *_, spread=spread, **__: (Costs(element=1e-9), spread))
        said = table(capsys, "--bandwidth", "1Mbit", "--backward", "0.01")
        assert ("This machine is busy: steps took 2.5 times as long as they would alone" in said) is (slow + spread > 2)


def test_equal_buckets_are_cut_once():
    """A table for 70 billion parameters and 1,024 workers must not keep 11 million regions."""
    work = Workload.even(100_000_000, 0.1, 0.1)
    assert len(work.segments) > 10
    for name in METHODS:
        before = cut.cache_info().currsize
        step(method(name), work, 61, Link(1e9), Costs())
        assert cut.cache_info().currsize - before <= 2


def test_a_container_with_fewer_processors_is_not_busy(monkeypatch):
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: "100000 100000" if path.name == "cpu.max" else read(path))
    threads: list[int] = []
    pool = advise.ThreadPoolExecutor
    monkeypatch.setattr(advise, "ThreadPoolExecutor", lambda count: threads.append(count) or pool(count))
    advise.slowdown(seconds=0.01)
    assert threads == [1]


@full
@pytest.mark.skipif(sys.platform != "linux", reason="counts processors as Linux does")
def test_other_programs_are_seen_by_the_time_that_they_take():
    cores = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * cores)]
    try:
        time.sleep(1)
        assert advise.slowdown() > 2  # five programs for each processor
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_method_that_is_slow_here_is_timed_for_two_steps(monkeypatch):
    begun = time.perf_counter()
    costs, ratio = advise.measure(method("topk"), 100_000, seconds=0.0)
    assert costs.element > 0
    assert ratio >= 0
    assert time.perf_counter() - begun < 60


def level(table, least, **where):
    """Return whether a method's best mean loss at the last step is at most 2 % above that of dense training."""
    for column, value in where.items():
        table = table[table[column] == value]
    table = table[table.step == table.step.max()]
    means = table.groupby(["contestant", "lr"]).val_loss.mean().groupby("contestant").min()
    return means[least] <= 1.02 * means["dense"]


def test_what_is_recommended_has_trained_as_dense_with_as_many_workers():
    """Compares with the files that the benchmarks wrote."""
    language = results.load(results.RESULTS / "language.csv").rename(columns={"method": "contestant"})
    language["contestant"] = language.contestant.replace("ddp", "dense")
    for name, most in advise.TRAINED["adamw"].items():
        assert most in (2, 4, 8)
        contestant = name if name.startswith("int") else f"{name} by default"
        for workers in [x for x in (2, 4, 8) if x <= most]:
            if name == "int8":
                assert level(results.load(results.RESULTS / "comparison_gpt_adamw.csv"), name)
            else:
                assert level(language, contestant, workers=workers, steps=1000, optimizer="adamw")
    sgd = results.load(results.RESULTS / "comparison_gpt_sgd.csv")
    for name, most in advise.TRAINED["sgd"].items():
        assert most == 2
        assert level(sgd, name)
    assert not level(sgd, "topk")


def test_auto_exchanges_updates_only_with_optimizers_that_trained_as_well_as_dense():
    """Compares with the file that the benchmark wrote, at the rates with updates, which are the best of dense."""
    table = results.load(results.RESULTS / "optimizers.csv")
    losses = table[table.step == table.step.max()].set_index(["optimizer", "lr"])
    dense, updates = (losses[losses.exchanged == name].val_loss for name in ("dense", "updates"))
    ratios = (updates / dense).dropna().droplevel("lr")
    assert {*ratios.index} == {*table.optimizer}
    assert {*ratios[ratios <= 1.02].index} == trained.WITH_UPDATES | {"AdamW", "Lamb", "ADOPT"}
    assert {*ratios[ratios > 1.02].index} == trained.ABOVE_DENSE | {"SGD", "Lion"}


@dataclass(frozen=True)
class Sign(Compressor):
    """One bit per element: no sparsifier, and without a density."""

    refuses: bool = False

    def compress(self, u, ctx):
        if self.refuses:
            raise RuntimeError("on purpose")
        payload = (pack_bits(u >= 0), u.abs().mean().view(1))
        return payload, self.decode(payload, ctx)

    def decode(self, payload, ctx):
        return (unpack_bits(payload[0], ctx.segment.numel).float() * 2 - 1) * payload[1]

    def nbytes(self, segment, density):
        return -(-segment.numel // 8) + 4


def pack_bits(bits):
    return torch.tensor(np.packbits(bits.numpy()))


def unpack_bits(packed, numel):
    return torch.tensor(np.unpackbits(packed.numpy(), count=numel))


@pytest.mark.parametrize("density", tiers([[], ["--density", "0.01"]], [[]]))
def test_advise_prints_what_it_can_for_any_method(density, capsys, monkeypatch):
    extra = {"sign": (Sign, Residual(), Mean(), ""), "refusing": (lambda: Sign(True), Residual(), Mean(), "")}
    rows = {"topk": METHODS["topk"], **{name: type(METHODS["topk"])(*row) for name, row in extra.items()}}
    monkeypatch.setattr(advise, "METHODS", rows)
    monkeypatch.setattr("lightning_sparse.methods.METHODS", {**METHODS, **rows})
    out = table(capsys, "--bandwidth", "1Mbit", "--backward", "0.01", *density)
    (line,) = re.findall(r"^sign  +[\d.]+ .*", out, re.MULTILINE)
    # 7 others times 2e5 / 8 bytes.
    assert float(line.split()[4]) == pytest.approx(0.175, abs=0.001)
    assert "refusing           cannot be timed here: RuntimeError: on purpose" in out
    assert "topk" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidth", "fast", "--backward", "1"], "'fast' is not a bandwidth: write 1Gbit"),
        (["--bandwidth", "1Gbit", "--backward", "-1"], "times are 0 s or more"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--density", "2"], "density must be in"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--latency", "-1"], "latency 0 s or more"),
        (["--bandwidth", "1Gbit"], "required: --backward"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--workers", "1"], "fewer than two"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--shards", "0"], "shards=0: a model has at least one"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--shards", "2.5"], "--shards: invalid int value: '2.5'"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--params", "nan"], "--params: 'nan' is not a finite number"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--params", "inf"], "--params: 'inf' is not a finite number"),
        (["--bandwidth", "1Gbit", "--backward", "many"], "--backward: 'many' is not a finite number"),
        (["--bandwidth", "1Gbit", "--backward", "1", "--latency", "nan"], "--latency: 'nan' is not a finite number"),
    ],
)
def test_advise_refuses_what_makes_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        table(capsys, *arguments)
    assert message in " ".join(capsys.readouterr().err.split())


@one_in(2)
@pytest.mark.parametrize(
    ("name", "adaptive", "updates"), [("topk", True, True), ("topk", False, False), ("memsgd", False, True)]
)
def test_what_is_timed_is_what_a_training_exchanges(name, adaptive, updates, monkeypatch):
    exchanged = []
    for owner, verb in ((DeltaExchange, "exchange"), (Reducer, "reduce_")):
        real = getattr(owner, verb)
        monkeypatch.setattr(
            owner, verb, lambda self, x, real=real, owner=owner: (exchanged.append(owner), real(self, x))
        )
    monkeypatch.setattr(advise, "METHODS", {name: METHODS[name], "dense": METHODS["dense"]})
    work = Workload.even(100_000, 0.1, 0.1)
    rows, failed, _ = advise.estimates(work, 4, Link(1e8), None, adaptive)
    assert not failed
    assert name in [row[0] for row in rows]
    assert set(exchanged) == {DeltaExchange if updates else Reducer}
