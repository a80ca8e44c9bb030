"""The frontier benchmark: its compressors, and every idea for some steps."""

import pytest
import torch

from benchmarks import frontier
from benchmarks.frontier import IDEAS, Neighbours, OneBit, Shared, Slices
from benchmarks.harness import results
from benchmarks.harness.training import Data
from benchmarks.language import LENGTH
from benchmarks.updates import Run
from lightning_sparse import Method, Reducer, simulate
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.kernels.native import uses_native
from lightning_sparse.memory import Residual
from tests.support.tiers import later, one_in, tiers


def test_all_that_is_committed_belongs_to_a_run_of_the_benchmark():
    table = results.load(results.RESULTS / "frontier.csv")
    found = set(table[list(Run._fields)].itertuples(index=False, name=None))
    assert found
    assert found <= set(frontier.TRIED)
    assert {run.variant for run in frontier.TRIED} <= IDEAS.keys()


def test_a_new_folder_gets_the_ideas_that_this_version_has(tmp_path):
    runs = frontier.missing_runs(tmp_path / "frontier.csv")
    assert {run.variant for run in runs} == {run.variant for run in frontier.TRIED if IDEAS[run.variant]}
    assert {run.variant for run in frontier.TRIED} > {run.variant for run in runs}
    assert frontier.missing_runs(results.RESULTS / "frontier.csv") == []


def test_a_method_is_compared_with_ddp_of_the_same_seeds(tmp_path):
    losses = {("ddp", 0): 2.0, ("ddp", 1): 4.0, ("bf16", 0): 3.0}
    losses |= {("topk by default", 0): 1.0, ("topk by default", 1): 6.0}
    common = {"optimizer": "adamw", "step": 1000, "part": "final", "lr": 0.1, "sent_bytes_per_worker": 8}
    rows = [{"method": name, "seed": seed, "val_loss": loss, **common} for (name, seed), loss in losses.items()]
    results.save(tmp_path / "language.csv", rows)
    assert frontier.contestants(tmp_path, 2).loss.to_dict() == {"bf16": 50.0, "ddp": 0.0, "topk by default": 0.0}


@later
def test_formats_are_timed_with_the_loops_in_c_and_after_a_check(monkeypatch):
    if uses_native(torch.zeros(1)):
        rows = frontier.times(numel=20_000, repetitions=1)
        assert len({(row["kernels"], row["value_format"], row["density"]) for row in rows}) == len(rows) == 12
    monkeypatch.setattr(frontier, "uses_native", lambda x: True)
    with monkeypatch.context() as patch:
        patch.setattr(frontier.DeltaExchange, "exchange", lambda self, optimizer: None)
        with pytest.raises(SystemExit, match=r"float32 values change 20,000 of 20,000 weights"):
            frontier.times(numel=20_000, repetitions=1)
    monkeypatch.setattr(frontier, "uses_native", lambda x: False)
    with pytest.raises(SystemExit, match="loops in C are not used here"):
        frontier.times(numel=20_000, repetitions=1)


@pytest.mark.parametrize("numel", [1, 3, 64, 1001])
@pytest.mark.parametrize("compressor", [OneBit(0.1), Neighbours(0.1), Slices(0.1, slices=2)])
def test_an_update_is_what_its_payload_says(compressor, numel):
    u, ctx = torch.randn(numel), Context.of(numel)
    payload, update = compressor.compress(u, ctx)
    again = compressor.decode(payload, ctx)
    there = update.indices < numel
    assert torch.equal(again.indices[: len(there)][there], update.indices[there])
    assert torch.equal(again.values[: len(there)][there], update.values[there])
    rest = u.index_add(0, update.indices[there], -update.values[there])
    assert rest.norm() <= u.norm() * (1 + 2**-8)  # means in bf16


def test_one_bit_by_hand():
    """The mean magnitude of 1, -2 and 6 is 3."""
    payload, update = OneBit(0.75).compress(torch.tensor([1.0, -2.0, 0.5, 6.0]), Context.of(4))
    assert update.values.tolist() == [3, -3, 3]
    assert payload[2].tolist() == [0b010, *[0] * 7]


@pytest.mark.parametrize("numel", [1, 7, 1001])
def test_values_of_all_ranks_at_shared_entries_lose_nothing(numel):
    us = torch.randn(3, numel)

    def take(comm):
        reducer = Reducer(Method(TopK(0.1, value_format="int2"), Residual(), Shared()), comm, granularity="model")
        grads = {"w": us[comm.rank].clone()}
        reducer.reduce_(grads)
        return grads["w"], reducer.states[0]["residual"]

    results, residuals = zip(*simulate(3, take), strict=True)
    assert results[0].any()
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert torch.allclose(us.sum(0), 3 * results[0] + sum(residuals), atol=1e-5)


@one_in(2)
@pytest.mark.parametrize(
    "name",
    tiers(
        [name for name, idea in IDEAS.items() if idea], ["1-bit values, √P", "all sent every 100 steps, 1-bit values"]
    ),
)
def test_every_idea_trains_and_keeps_weights_equal(name, monkeypatch):
    monkeypatch.setattr(frontier, "BATCH_SIZE", 1)
    monkeypatch.setattr(frontier, "EVERY", 4)
    sequence = torch.arange(LENGTH + 1) % 7
    batch, held_out = ((sequence[None, :-1].expand(n, -1), sequence[None, 1:].expand(n, -1)) for n in (1, 2))
    ranks = next((2 * count for count in (8, 4, 2) if name == frontier.BY_NODE.format(count)), 2)
    points = frontier.train(Run(name, ranks, 0.05, 0.005, 0, 4), Data(lambda numbers: batch, 100, held_out))
    assert points[1]["val_loss"] < points[0]["val_loss"]
    assert points[1]["sent_bytes"] > 0
