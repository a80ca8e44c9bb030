"""Shards of replicas: their places in parameters, their states, and the agreement of ranks that form several groups."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse.comm import RankFailure
from lightning_sparse.comm.handshake import Handshake
from lightning_sparse.comm.peers import Peers
from lightning_sparse.replica_checkpoint import copy_common_, joined
from lightning_sparse.shards import copies, is_any_sharded, is_sharded, like, local, locals_of, reshard
from tests.support.profiles import PROFILE
from tests.support.tiers import full

Place = tuple[list[int], list[int]]


def test_a_plain_tensor_is_its_own_part():
    x = nn.Parameter(torch.ones(3))
    assert local(x) is x
    assert locals_of({"x": x}) == {"x": x}
    assert like(x, part := torch.zeros(3)) is part
    assert (is_sharded(x), is_any_sharded(nn.Linear(2, 2)), copies(x)) == (False, False, "")
    reshard(nn.Linear(2, 2))


@st.composite
def shardings(draw: Any) -> tuple[Tensor, list[Place], list[Place]]:
    """Draw a tensor, and two ways to cut it into a grid of blocks, some of them empty."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    x = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    ways = []
    for _ in range(2):
        blocks: list[Place] = [([], [])]
        for size in shape:
            edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
            pairs = list(pairwise(edges))
            blocks = [([*start, a], [*sizes, b - a]) for start, sizes in blocks for a, b in pairs]
        ways.append(blocks)
    return x, ways[0], ways[1]


def block(x: Tensor, place: Place) -> Tensor:
    return x[tuple(slice(start, start + size) for start, size in zip(*place, strict=True))]


@PROFILE
@given(shardings())
def test_every_shard_comes_back_from_the_shards_of_any_other_sharding(case):
    x, old, new = case
    for place in new:
        into: dict[str, Tensor] = {}
        for other in old:
            copy_common_(into, "x", block(x, other), other, place)
        assert torch.equal(into["x"], block(x, place))


def test_the_state_of_a_replica_is_joined_from_the_files_of_its_ranks():
    """Moments of a parameter's shape are cut like the parameter. Other state is the same on all ranks of a replica."""
    whole = torch.arange(10.0).view(5, 2)

    def part(first: int, last: int) -> dict[str, Any]:
        shard = whole[first:last].clone()
        return {
            "replica": 1,
            "replicas": 3,
            "step": 7,
            "places": {"w": ([first, 0], [last - first, 2])},
            "elements": {"residual": {"w": shard}},
            "segments": {"w": {"Q": torch.ones(2)}},
            "optimizers": {
                "0": {"state": {"w": {"exp_avg": -shard, "step": torch.tensor(4.0), "count": 3}}, "names": "w"}
            },
        }

    state = joined([part(0, 3), part(3, 5)], {"w": ([1, 0], [3, 2])})
    assert (state["rank"], state["size"], state["step"], state["segments"]) == (1, 3, 7, {})
    assert torch.equal(state["elements"]["residual"]["w"], whole[1:4])
    of_param = state["optimizers"]["0"]["state"]["w"]
    assert torch.equal(of_param["exp_avg"], -whole[1:4])
    assert (of_param["step"].item(), of_param["count"]) == (4, 3)
    with pytest.raises(ValueError, match="The checkpoint is of another model: they differ in 'v', 'w'"):
        joined([part(0, 5)], {"v": ([0, 0], [5, 2])})


def test_no_more_files_are_read_than_a_shard_needs():
    """The elements of `bias` are not sharded: each file has them all, and they do not count twice.

    States of segments that are equal in all replicas are kept if the shards are the same.
    """
    whole, bias, places = torch.arange(12.0), torch.ones(40), [([first], [3]) for first in range(0, 12, 3)]
    read = []

    def parts(order: list[int]) -> Any:
        for number in order:
            read.append(number)
            of_params = {"w": block(whole, places[number]), "bias": bias}
            yield {
                "replica": 0,
                "replicas": 2,
                "places": {"w": places[number], "bias": ([0], [40])},
                "elements": {"residual": of_params},
                "segments": {"w\nbias": {"signal": torch.tensor(float(number)), "Q": torch.zeros(1)}},
                "resize": {"residual": "sum", "signal": "replicate", "Q": "drop"},
                "optimizers": {},
            }

    for order, place, needed in (
        ([2, 3, 1, 0], ([6], [3]), 1),
        ([1, 0, 2, 3], ([2], [4]), 2),
        ([0, 3], ([12], [0]), 1),
    ):
        read.clear()
        state = joined(parts(order), {"w": place, "bias": ([0], [40])})
        assert torch.equal(state["elements"]["residual"]["w"], block(whole, place))
        assert torch.equal(state["elements"]["residual"]["bias"], bias)
        assert read == order[:needed]
        same = [number for number in order[:needed] if places[number] == place]
        assert state["segments"] == ({"w\nbias": {"signal": same[0]}} if same else {})


PARTS = [[0, 2], [1, 3], [0, 2], [1, 3]]


def agree(settings: list[Any], of_part: list[Any], parts: list[Any], late: dict[int, float] | None = None) -> list[Any]:
    """Shake hands on 4 ranks in threads; return a name or an error of each. An exception in `settings` is refused."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        time.sleep((late or {}).get(number, 0.0))
        shaking = Handshake(store, "0", number, range(4), timedelta(seconds=20), part=parts[number])
        if isinstance(settings[number], Exception):
            return shaking.refuse(settings[number])
        try:
            return shaking.agree({"method": "topk", **settings[number]}, of_part[number])
        except RankFailure as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(rank, range(4)))


def test_parts_may_differ_and_ranks_of_a_part_may_not():
    models = [{"model": ["a", f"b{number % 2}"]} for number in range(4)]
    names = agree([{}] * 4, models, PARTS)
    assert len({*names}) == 1
    assert "Ranks" not in names[0]
    for odd, first in ((2, 0), (3, 1)):
        other = [{"model": ["a", "c"]} if number == odd else each for number, each in enumerate(models)]
        expected = (
            f"Ranks differ in model: rank {first} has b{first}, rank {odd} has c. Give all ranks the same settings."
        )
        assert agree([{}] * 4, other, PARTS) == [expected] * 4


def test_only_the_rank_that_does_not_come_is_named():
    store = dist.HashStore()

    def rank(number: int) -> str:
        shaking = Handshake(store, "0", number, range(4), timedelta(seconds=1), part=PARTS[number])
        with pytest.raises(RankFailure) as caught:
            shaking.agree({"method": "topk"})
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        assert all("waits for rank 1 to attach topk" in text for text in pool.map(rank, (0, 2, 3)))


@full
def test_the_first_rank_of_a_part_may_come_last_or_be_of_another_part():
    assert len({*agree([{}] * 4, [{}] * 4, PARTS, late={1: 1.5})}) == 1
    errors = agree([{}] * 4, [{}] * 4, [[0, 2], [1, 2], [0, 2], [1, 3]])
    assert (
        errors
        == ["Ranks differ in group: rank 1 has ranks 1, 2, rank 3 has ranks 1, 3. Give all ranks the same settings."]
        * 4
    )


def test_a_refusal_and_another_setting_reach_all_parts():
    refused = [{}, {}, {}, ValueError("not so")]
    assert agree(refused, [{}] * 4, PARTS)[:3] == ["Rank 3 cannot attach: ValueError: not so"] * 3
    seeds = [{"seed": int(number == 3)} for number in range(4)]
    assert (
        agree(seeds, [{}] * 4, PARTS)
        == ["Ranks differ in seed: rank 0 has 0, rank 3 has 1. Give all ranks the same settings."] * 4
    )


def peers_of(store: Any) -> list[Peers]:
    return [Peers(store, "session", number, range(4), part) for number, part in enumerate(PARTS)]


def test_a_failure_reaches_all_parts_and_an_end_its_own_part():
    peers = peers_of(dist.HashStore())
    assert all(each.has_parts and each.reported() == "" for each in peers)
    peers[1].mark_done(7, "rank 1 is done")
    peers[3].mark_done(5, "rank 3 is done")  # with fewer calls, though its record comes later
    peers[1].mark_done(6, "rank 1 is done")
    for number in (0, 2):
        peers[number].raise_if_failed(9)
    for number in (1, 3):
        peers[number].raise_if_failed(5)
        with pytest.raises(RankFailure, match="rank 3 is done"):
            peers[number].raise_if_failed(6)
    peers[3].mark_failed("rank 3 failed")
    for each in peers:
        assert each.reported() == "rank 3 failed"
        with pytest.raises(RankFailure, match="rank 3 failed"):
            each.raise_if_failed(0)
        assert each.diagnose(None) == "rank 3 failed"


def test_groups_of_one_name_have_different_keys():
    store = dist.HashStore()
    first, second = Peers(store, "mesh_replicate", 0, [0, 2]), Peers(store, "mesh_replicate", 0, [1, 3])
    first.mark_failed("a failure")
    assert (first.reported(), second.reported()) == ("a failure", "")
    other = Handshake(store, "mesh_replicate", 1, [1, 3], timedelta(seconds=1))
    Handshake(store, "mesh_replicate", 0, [0, 2], timedelta(seconds=1)).refuse(ValueError("not so"))
    assert other.refusal() == ""


@full
def test_a_silent_rank_of_another_part_is_named():
    """Ranks 0 and 1 answer, and rank 3 does not."""
    peers = peers_of(dist.HashStore())
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(lambda: [(time.sleep(0.1), peers[0].respond(), peers[1].respond()) for _ in range(10)])
        assert "No answer from rank 3" in peers[2].diagnose(None)
        answers.result()


@full
def test_a_rank_that_hangs_is_named_in_all_parts():
    """Rank 3 hangs, rank 1 waits for it in their exchange, rank 2 in a collective of the model, and rank 0 for rank 2.

    While no other rank has timed out, a rank in a collective of the model does not know which rank it waits for.
    """
    peers = peers_of(dist.HashStore())

    def diagnosed(calls: dict[int, int | None], answering: list[Peers]) -> list[str]:
        def answer() -> None:
            while not ended.wait(0.02):
                for each in answering:
                    each.respond()

        ended = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            pool.submit(answer)
            found = [pool.submit(peers[number].diagnose, value) for number, value in calls.items()]
            texts = [each.result() for each in found]
            ended.set()
        return texts

    for text in diagnosed({0: 1, 1: 1, 2: None}, peers[3:]):
        assert text.startswith("Still running, but not taking part: rank 3")
    peers = peers_of(dist.HashStore())
    assert diagnosed({2: None}, [peers[0], peers[1], peers[3]]) == [""]
