"""`save_replica` and `load_replica`: bit for bit, with other numbers of replicas and shards, and with damaged files."""

import json
import re
import shutil
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from lightning_sparse import Reducer, attach_updates, load_replica, save_replica
from lightning_sparse.checkpoint import folder
from lightning_sparse.shards import like
from tests.integration.failing import caught
from tests.integration.trainers import Messages
from tests.processes import run_ranks
from tests.support.shards import attempt, mesh_of, net, own, shard, steps
from tests.support.tiers import full, in_full, later

OPTIONS: dict[str, Any] = {"density": 0.25, "value_format": "int8", "granularity": "bucket", "bucket_cap_mb": 5e-5}


@dataclass
class Training:
    """A model of R replicas and S shards, and its optimizers."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    reducer: Reducer
    group: Any

    @staticmethod
    def of(replicas: int, shards: int, seed: int = 0, **options: Any) -> "Training":
        mesh = mesh_of(replicas, shards)
        model = shard(net(), mesh["shard"])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + seed)
        parts = [list(layer.parameters()) for layer in (model[:2], model[2:])]
        optimizers: list[Any] = [torch.optim.AdamW(parts[0], 0.01), torch.optim.SGD(parts[1], 0.1, momentum=0.9)]
        group = mesh["replicate"].get_group()
        return Training(model, optimizers, attach_updates(model, optimizers, group=group, **OPTIONS, **options), group)

    def run(self, count: int, first: int) -> Tensor:
        """Take steps, with other gradients on each rank; return this rank's weights."""

        class All:
            zero_grad = staticmethod(lambda: [each.zero_grad() for each in self.optimizers])
            step = staticmethod(lambda: [each.step() for each in self.optimizers])

        for _ in steps(self.model, All, dist.get_rank(), dist.get_world_size(), count, first=first):
            pass
        return own(self.model.parameters())

    def save(self, path: Path) -> None:
        save_replica(str(path), self.model, self.optimizers)
        dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = {"model": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        load_replica(str(path), self.model, self.optimizers)

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """Return this replica's residual and moments of whole parameters, by kind and name."""
        found: dict[str, dict[str, Tensor]] = {"residual": {}, "exp_avg": {}, "exp_avg_sq": {}, "momentum_buffer": {}}
        for name, param in self.model.named_parameters():
            rest = self.reducer.state_dict()["elements"]["residual"][name]
            found["residual"][name] = like(param, rest).full_tensor()  # type: ignore[attr-defined]
            for optimizer in self.optimizers:
                for key, x in optimizer.state.get(param, {}).items():
                    if key in found:
                        found[key][name] = x.full_tensor().clone()  # with one shard it is the state itself
        return found


def resumed(rank: int, path: Path, options: dict[str, Any]) -> list[Any]:
    first = Training.of(2, 2, **options)
    first.run(4, 0)
    first.save(path)
    before = first.whole()
    second = Training.of(2, 2, seed=1, **options)
    second.load(path)
    after = second.whole()
    same = [torch.equal(x, after[kind][name]) for kind, per_param in before.items() for name, x in per_param.items()]
    return [all(same), len(same), torch.equal(first.run(4, 4), second.run(4, 4)), first.reducer.step]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"local_steps": 3}, marks=full), pytest.param({"overlap": "next_step"}, marks=full)]
)
def test_training_continues_bit_for_bit(options, tmp_path):
    results = run_ranks(4, resumed, tmp_path / "last.ckpt", options)
    for same, count, equal, _ in results:
        # Six parameters have a residual. Two have two moments each, and four have a momentum.
        assert (same, count, equal) == (True, 6 + 2 * 2 + 4, True)
    assert len({step for *_, step in results}) == 1


def of_whole_models(rank: int, path: Path, save: bool) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    reducer = attach_updates(model, optimizer, **OPTIONS)
    if save:
        for _ in steps(model, optimizer, rank, dist.get_world_size(), count=3):
            pass
        save_replica(str(path), model, optimizer)
    else:
        load_replica(str(path), model, optimizer)
    moments = own(state["exp_avg"] for state in optimizer.state.values())
    return [own(reducer.state_dict()["elements"]["residual"].values()), moments]


def two_models(rank: int, path: Path) -> list[str]:
    messages, pairs = Messages(), []
    for _ in range(2):
        model = net()
        pairs.append((model, torch.optim.AdamW(model.parameters(), 0.01)))
        attach_updates(*pairs[-1], **OPTIONS)
    for number, name in [(0, "a"), (0, "a"), (1, "b"), (1, "a")]:
        save_replica(str(path / name), *pairs[number])
    return messages.texts


def test_a_save_of_another_model_under_the_same_path_is_warned_of(tmp_path):
    first, second = run_ranks(2, two_models, tmp_path)
    assert len(first) == 1
    assert "has replaced the residuals and optimizer states of another model" in first[0]
    assert second == []


@later
def test_models_that_are_not_sharded(tmp_path):
    path = tmp_path / "last.ckpt"
    old = run_ranks(2, of_whole_models, path, True)
    same = run_ranks(2, of_whole_models, path, False)
    assert all(
        torch.equal(a, b) for before, after in zip(old, same, strict=True) for a, b in zip(before, after, strict=True)
    )
    (merged,) = run_ranks(1, of_whole_models, path, False)
    for (first, second), mean in zip(zip(*old, strict=True), merged, strict=True):
        torch.testing.assert_close(mean, (first + second) / 2, rtol=2e-7, atol=0)  # fp32 sums of two terms


def saved(rank: int, path: Path) -> Any:
    training = Training.of(2, 2)
    training.run(4, 0)
    training.save(path)
    return rank // 2, training.whole(), training.reducer.step


def loaded(rank: int, path: Path, replicas: int, shards: int) -> Any:
    training = Training.of(replicas, shards, seed=1)
    training.load(path)
    state = training.whole()
    step = training.reducer.step
    weights = training.run(2, 4)
    return rank // shards, state, step, bool(weights.isfinite().all())


@full
def test_another_number_of_replicas_and_shards(tmp_path):
    """The mean of the residuals stays. A new replica has the mean of its old ones' moments, or one old replica's."""
    path = tmp_path / "last.ckpt"
    old = {replica: state for replica, state, _ in run_ranks(4, saved, path)}
    assert any(not torch.equal(x, old[1]["exp_avg"][name]) for name, x in old[0]["exp_avg"].items())
    for replicas, shards in [(2, 2), (4, 1), (1, 4), (2, 1), (1, 1)]:
        copy = tmp_path / f"{replicas}x{shards}"
        for suffix in ("", ".residuals"):
            shutil.copytree(f"{path}{suffix}", f"{copy}{suffix}")
        results = run_ranks(replicas * shards, loaded, copy, replicas, shards)
        new = {replica: state for replica, state, *_ in results}
        assert all(step == 4 * 2 and finite for _, _, step, finite in results)
        for replica, state in new.items():
            sources = [each for each in old if each % replicas == replica]
            for kind, per_param in state.items():
                for name, x in per_param.items():
                    if kind == "residual":
                        # A sum of two terms has one rounding, as has its half.
                        expected = sum((old[each][kind][name] for each in sources), torch.zeros_like(x))
                        torch.testing.assert_close(x, expected * replicas / 2, rtol=2e-7, atol=0)
                    else:
                        expected = torch.stack([old[each][kind][name] for each in sources or [replica % 2]]).mean(0)
                        torch.testing.assert_close(x, expected, rtol=2e-7, atol=0)
        for name, x in old[0]["residual"].items():
            mean = torch.stack([state["residual"][name] for state in new.values()]).double().mean(0)
            before = torch.stack([x, old[1]["residual"][name]]).double().mean(0)
            torch.testing.assert_close(mean, before, rtol=4e-7, atol=0)


def mixed(rank: int, path: Path) -> tuple[int, int]:
    """Fill the moments with the number of the replica, and count the moments that another replica's replace."""
    mesh = mesh_of()
    model = shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    attach_updates(model, optimizer, "topk", group=mesh["replicate"].get_group())
    for _ in steps(model, optimizer, rank, 4, count=1):
        pass
    counts = []
    for stock in (True, False):
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].to_local().fill_(rank // 2)
        if stock:
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
            loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(loaded, checkpoint_id=path)
            moments = [x[key] for x in loaded["optimizer"]["state"].values() for key in ("exp_avg", "exp_avg_sq")]
        else:
            save_replica(str(path), model, optimizer)
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].to_local().fill_(7)
            load_replica(str(path), model, optimizer)
            moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        counts.append(sum(bool((x.full_tensor() != rank // 2).any()) for x in moments))
    return counts[0], counts[1]


@full
def test_replicas_keep_their_own_moments_which_stock_checkpoints_mix(tmp_path):
    results = run_ranks(4, mixed, tmp_path / "last.ckpt")
    assert [ours for _, ours in results] == [0] * 4
    # Stock checkpoints store one copy of each shard. So each is another replica's on some ranks.
    assert sum(stock for stock, _ in results) > 0


class Kind(Enum):
    FAST = 1


class Slow(torch.optim.SGD):
    """Keeps something beside its state, as Lookahead does, and options and a state of unusual types."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, np.float64(0.1), momentum=0.9)
        self.beside: dict[str, Any] = {}
        self.param_groups[0]["kind"] = Kind.FAST

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "beside": self.beside}

    def load_state_dict(self, state_dict: Any) -> None:
        self.beside = state_dict["beside"]
        super().load_state_dict(state_dict)


def unusual(rank: int, path: Path) -> list[Any]:
    def made() -> tuple[Any, Slow]:
        mesh = mesh_of()
        model = shard(net(), mesh["shard"])
        optimizer = Slow(model.parameters())
        attach_updates(model, optimizer, "topk", group=mesh["replicate"].get_group(), **OPTIONS)
        return model, optimizer

    model, optimizer = made()
    for _ in steps(model, optimizer, rank, 4, count=2):
        pass
    optimizer.beside["count"] = rank
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double() / 3
    momentum = own(state["momentum_buffer"] for state in optimizer.state.values())
    save_replica(str(path), model, optimizer)
    model, optimizer = made()
    load_replica(str(path), model, optimizer)
    group = optimizer.param_groups[0]
    found = [type(group["lr"]), group["lr"], group["kind"], optimizer.beside]
    found.append(torch.equal(own(state["momentum_buffer"] for state in optimizer.state.values()), momentum))
    optimizer.beside = {"weights": [torch.ones(2)]}
    return [*found, attempt(lambda: save_replica(str(path), model, optimizer))]


@full
def test_options_and_states_of_unusual_types_and_what_an_optimizer_keeps_beside_them(tmp_path):
    for rank, (*found, error) in enumerate(run_ranks(4, unusual, tmp_path / "last.ckpt")):
        assert found == [float, 0.1, Kind.FAST, {"count": rank}, True]
        assert error.startswith("ValueError: Rank 0: Slow.state_dict() has tensors in 'beside'"), error


def damage(path: Path, kind: str) -> None:
    """Damage the files of a save."""
    files = sorted(Path(folder(path)).glob("*.pt"))
    if kind == "missing folder":
        shutil.rmtree(folder(path))
    elif kind == "torn":  # killed before the entry was written
        (Path(folder(path)) / "entry.json").unlink()
    elif kind == "missing file":
        files[3].unlink()
    elif kind == "flipped bit":
        content = bytearray(files[1].read_bytes())
        middle = len(content) // 2
        while content[middle] == ord("Z"):  # torch fills gaps with it
            middle += 1
        content[middle] ^= 1
        files[1].write_bytes(content)
    elif kind == "another rank's file":
        shutil.copy(files[0], files[2])
    elif kind == "foreign tag":
        entry = json.loads((Path(folder(path)) / "entry.json").read_text())
        (Path(folder(path)) / "entry.json").write_text(json.dumps({**entry, "tag": "0" * 16}))
    elif kind == "damaged entry":
        (Path(folder(path)) / "entry.json").write_text("{")


DAMAGES = {
    "missing folder": "has no complete save of save_replica",
    "torn": "has no complete save of save_replica",
    "missing file": r"1 of 4 files of this save are missing in .*rank3-of-4",
    "flipped bit": r"rank1-of-4.pt' is damaged",
    "another rank's file": r"rank2-of-4.pt' belongs to another checkpoint",
    "foreign tag": "4 of 4 files of this save are missing",
    "damaged entry": "entry.json' is damaged",
}


def from_damaged(rank: int, path: Path, shards: int) -> list[str]:
    found = []
    training = Training.of(4 // shards, shards)
    for number, kind in enumerate(DAMAGES):
        copy = path.with_name(str(number))
        before = own(training.model.parameters()), training.reducer.step, len(training.optimizers[0].state)
        found.append(attempt(lambda copy=copy: load_replica(str(copy), training.model, training.optimizers)))
        after = own(training.model.parameters()), training.reducer.step, len(training.optimizers[0].state)
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:], kind
    return found


@full
@pytest.mark.parametrize("shards", [2, pytest.param(1, marks=full)])
def test_damaged_files_are_one_error_on_all_ranks(shards, tmp_path):
    path = tmp_path / "last.ckpt"
    run_ranks(4, saved, path)
    for number, kind in enumerate(DAMAGES):
        shutil.copytree(folder(path), folder(tmp_path / str(number)))
        damage(tmp_path / str(number), kind)
    results = run_ranks(4, from_damaged, path, shards)
    for texts in results:
        assert not isinstance(texts, BaseException)
        for (kind, pattern), text in zip(DAMAGES.items(), texts, strict=True):
            assert text.startswith("ValueError: Rank "), (kind, text)
            assert re.search(pattern, text), (kind, text)
    assert all(texts == results[0] for texts in results)


def of_others(rank: int, path: Path) -> list[str]:
    """Load a save of SGD by AdamW, a save of a longer layer, and a save while updates wait for their exchange."""

    def made(width: int, kind: Any, shards: int, **options: Any) -> tuple[Any, Any]:
        mesh = mesh_of(4 // shards, shards)
        model = shard(nn.Sequential(nn.Linear(8, width)), mesh["shard"])
        optimizer = kind(model.parameters(), 0.1)
        attach_updates(model, optimizer, "topk", group=mesh["replicate"].get_group(), **OPTIONS, **options)
        return model, optimizer

    sgd = partial(torch.optim.SGD, momentum=0.9)
    model, optimizer = made(6, sgd, 2, local_steps=2)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = [attempt(lambda: load_replica(str(path), model, optimizer))]
    save_replica(str(path), model, optimizer)
    for width, kind, shards in ((6, torch.optim.AdamW, 2), (12, sgd, 2), (12, sgd, 4), (4, sgd, 4)):
        model, optimizer = made(width, kind, shards)
        found.append(attempt(lambda model=model, optimizer=optimizer: load_replica(str(path), model, optimizer)))
    return found


@full
def test_a_save_of_another_model_or_kind_of_optimizer_and_a_load_in_the_middle(tmp_path):
    for early, kind, *shapes in run_ranks(4, of_others, tmp_path / "last.ckpt"):
        assert "ValueError: Rank 0: load_replica while updates wait for their exchange" in early
        assert kind.startswith("ValueError: The checkpoint is of another kind of optimizer: AdamW needs")
        for text, width in zip(shapes, (12, 12, 4), strict=True):
            assert f"'0.weight' has the shape [6, 8] there, [{width}, 8] here" in text, text


def bad_calls(rank: int, path: Path) -> list[Any]:
    training = Training.of(2, 2)
    training.run(2, 0)
    training.save(path)
    model, mesh = shard(net(), mesh_of()["shard"]), mesh_of()
    group = mesh["replicate"].get_group()
    adamw = torch.optim.AdamW(model.parameters())
    found = [attempt(lambda: save_replica(str(path), model, adamw))]
    attach_updates(model, adamw, "topk", group=group)
    found.append(attempt(lambda: load_replica(str(path), model, adamw)))
    found.append(attempt(lambda: load_replica(str(path), training.model, training.optimizers[::-1])))
    other = shard(nn.Sequential(nn.Linear(8, 6)), mesh["shard"])
    odd = torch.optim.SGD(other.parameters(), 0.1)
    attach_updates(other, odd, "topk", group=group)
    odd.state[other[0].weight]["blocks"] = torch.zeros(2)  # as optimizers have that quantize their state
    found.append(attempt(lambda: save_replica(str(path), other, odd)))
    found.append(attempt(lambda: load_replica(str(path), other, odd)))
    # A rank that cannot write: the save before it stays.
    training.run(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:
            patch.setattr(torch, "save", lambda *_: Path(path.parent / "no folder" / "file").write_text(""))
        found.append(attempt(lambda: save_replica(str(path), training.model, training.optimizers)))
    found.append(attempt(lambda: training.load(path)))
    found.append(training.reducer.step)
    return found


@full
def test_bad_calls_and_a_rank_that_cannot_write(tmp_path):
    for found in run_ranks(4, bad_calls, tmp_path / "last.ckpt"):
        unattached, others, order, blocks, other_model, unwritten, again, step = found
        assert unattached.startswith("ValueError: Rank 0: Give the optimizers of attach_updates")
        assert order.startswith("ValueError: Rank 0: Give the optimizers of attach_updates")
        assert "parameter groups of [[2], [4]] parameters, here they have [[6]]" in others
        assert "SGD keeps 'blocks' of shape [2] for '0.weight' of shape [6, 8]" in blocks
        assert "The checkpoint is of another model" in other_model
        assert unwritten.startswith("OSError: Rank 3: ")
        assert again == ""
        assert step == 4


def of_dtypes(rank: int, path: Path) -> list[Any]:
    found = []
    for before, now in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for dtype in (before, now):
            torch.manual_seed(0)
            model = nn.Linear(8, 6).to(dtype)
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            attach_updates(model, optimizer, "topk", density=0.25)
            if dtype is now:
                load_replica(str(path), model, optimizer)
            model(torch.ones(2, 8, dtype=dtype)).sum().backward()
            optimizer.step()
            if dtype is before:
                save_replica(str(path), model, optimizer)
        found += [optimizer.state[model.weight]["exp_avg"].dtype, int(optimizer.state[model.weight]["step"])]
    return found


@later
def test_a_load_with_weights_of_another_dtype_converts_the_moments(tmp_path):
    assert run_ranks(2, of_dtypes, tmp_path / "last.ckpt") == [[torch.bfloat16, 2, torch.float32, 2]] * 2


def stage(rank: int, replicas: int, path: Path, loads: bool) -> Any:
    """Train one of two stages of a pipeline, whose parameters have equal names and shapes; save, or load."""
    number = rank // replicas
    group = [dist.new_group([*range(each * replicas, (each + 1) * replicas)]) for each in range(2)][number]
    torch.manual_seed(number)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    attach_updates(model, optimizer, density=0.1, group=group)
    if loads:
        load_replica(str(path), model, optimizer)
    else:
        (model(torch.ones(1, 8)).sum() * 10**number).backward()
        optimizer.step()
        save_replica(str(path), model, optimizer)
    return number, float(optimizer.state[model.weight]["exp_avg"].mean())


@pytest.mark.parametrize(("before", "now"), [(1, 2), *in_full((2, 1), (2, 2))])
def test_a_stage_of_a_pipeline_gets_its_own_state(tmp_path, before, now):
    for loads, replicas in ((False, before), (True, now)):
        for number, moment in run_ranks(2 * replicas, stage, replicas, tmp_path / "0", loads):
            assert moment == pytest.approx(0.1 * 10**number)


def unsharded(rank: int, path: Path, loads: bool) -> float:
    if not loads:
        training = Training.of(2, 2)
        training.run(2, 0)
        training.save(path)
        return 0.0
    model = net()
    parts = [list(layer.parameters()) for layer in (model[:2], model[2:])]
    optimizers: list[Any] = [torch.optim.AdamW(parts[0], 0.01), torch.optim.SGD(parts[1], 0.1, momentum=0.9)]
    attach_updates(model, optimizers, **OPTIONS)
    load_replica(str(path), model, optimizers)
    return float(optimizers[0].state[parts[0][0]]["exp_avg_sq"].sum())


@later
def test_a_save_of_shards_is_loaded_into_whole_models(tmp_path):
    run_ranks(4, unsharded, tmp_path / "0", False)
    assert min(run_ranks(2, unsharded, tmp_path / "0", True)) > 0


def other_number_of_stages(rank: int, path: Path) -> tuple[str, str, float]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_updates(model, optimizer, density=0.1)
    return caught(lambda: load_replica(str(path), model, optimizer))


@later
def test_a_save_of_two_stages_is_not_one_of_a_whole_model(tmp_path):
    run_ranks(2, stage, 1, tmp_path / "0", False)
    for kind, text, _ in run_ranks(2, other_number_of_stages, tmp_path / "0"):
        assert kind == "ValueError"
        assert "is of a model in 2 parts, such as the stages of a pipeline, and here it has 1" in text


def with_a_parameter_of_the_rank(rank: int, path: Path, loads: bool) -> tuple[str, str, float]:
    model = nn.Linear(8, 8)
    model.register_parameter("own", nn.Parameter(torch.full((4,), float(rank)), requires_grad=False))
    model._ddp_params_and_buffers_to_ignore = ["own"]
    optimizer = torch.optim.AdamW([model.weight, model.bias])
    attach_updates(model, optimizer, density=0.1)
    return caught(lambda: (load_replica if loads else save_replica)(str(path), model, optimizer))


@later
def test_a_parameter_that_ddp_ignores_makes_no_stage_of_a_pipeline(tmp_path):
    for size, loads in ((2, False), (3, True)):
        outcomes = run_ranks(size, with_a_parameter_of_the_rank, tmp_path / "0", loads)
        assert [(kind, text) for kind, text, _ in outcomes] == [("no error", "")] * size


def of_a_wrapper(rank: int, path: Path) -> tuple[str, str, float]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    attach_updates(model, optimizer, density=0.1)
    return caught(lambda: save_replica(str(path), nn.Sequential(model), optimizer))


def test_a_save_with_another_model_than_attached_is_an_error(tmp_path):
    """Its residuals would have other names than its parameters, so no other number of ranks could load it."""
    for kind, text, _ in run_ranks(2, of_a_wrapper, tmp_path / "0"):
        assert kind == "ValueError"
        assert "The Sequential has no parameter 'bias', whose updates are exchanged" in text
