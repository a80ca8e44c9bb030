"""A run that resumes from a checkpoint continues as if it had not stopped."""

import shutil

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback

from lightning_sparse import SparseDDPStrategy, method
from lightning_sparse import checkpoint as sidecars
from tests.integration.checkpoints import (
    MOMENTUM,
    OPTIMIZERS,
    STEP_4,
    STEP_8,
    AtStart,
    fit,
    misplaced,
    network,
    result,
    saving,
    with_warnings,
)
from tests.integration.trainers import Loader, Net, keeps_all, lightning_ranks, same, trainer
from tests.support.representatives import OTHERS, REPRESENTATIVES
from tests.support.tiers import full, in_full, later, one_in, tiers


@pytest.mark.reliability(
    "resume, at mid-epoch and at the end of an epoch; SGD, Nesterov, Adam, AdamW and a schedule",
    checked="bit-identical to a run that never stopped, as with ddp; the state too",
)
@pytest.mark.parametrize(
    ("name", "optimizers"),
    [
        ("topk", ["momentum", "adamw, schedule"]),
        *in_full(("topk", ["nesterov", "adam"]), ("ddp", [*OPTIMIZERS])),
        # With SGD and one other in turn.
        *in_full(*((name, ["momentum", [*OPTIMIZERS][1 + i % 3]]) for i, name in enumerate(OTHERS))),
    ],
)
def test_resume_is_bit_for_bit(name, optimizers, tmp_path):

    def rank(rank):
        results = {}
        for optimizer in optimizers:
            folder = tmp_path / optimizer
            straight = result(*fit(name, rank, net=network(optimizer), callbacks=[saving(folder)]))
            for step in (4, 6) if optimizer == "momentum" else (4,):
                ckpt_path = folder / f"step={step}.ckpt"
                resumed = result(*fit(name, rank, net=network(optimizer), ckpt_path=ckpt_path))
                results[optimizer, step] = same(resumed, straight)
        # The control: without its residuals a method with error feedback ends with other weights.
        dist.barrier()
        if name != "ddp" and rank == 0:
            shutil.rmtree(folder / "step=4.ckpt.residuals")
        dist.barrier()
        bare = result(*fit(name, rank, net=network(optimizer), ckpt_path=folder / "step=4.ckpt"))
        results["control"] = not keeps_all(name) or not torch.equal(bare[0], straight[0])
        return results

    results = lightning_ranks(2, rank)
    assert all(all(result.values()) for result in results), results


@pytest.mark.reliability("resume of a resume, and twice from one checkpoint", checked="bit-identical")
@pytest.mark.parametrize("name", tiers(["ddp", "topk"], []))
def test_resume_of_a_resume(name, tmp_path):
    def rank(rank):
        straight = result(*fit(name, rank))
        last = None
        for step in (3, 5, 8):  # overwrites last.ckpt, whose sidecar files the run before has written
            saved = saving(tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
            fit(name, rank, max_steps=step, callbacks=[saved], ckpt_path=last)
            last = tmp_path / "last.ckpt"
        dist.barrier()
        wrong = [] if name == "ddp" else misplaced(tmp_path, others=False)
        return wrong, [same(result(*fit(name, rank, ckpt_path=last)), straight) for _ in range(2)]

    assert lightning_ranks(2, rank) == [([], [True, True])] * 2


WITH_DENSITY = [name for name in REPRESENTATIVES if method(name).density is not None]


class Densities(Callback):
    """Records the density of each step."""

    def on_train_batch_end(self, trainer, module, *_):
        self.seen = {**getattr(self, "seen", {}), trainer.global_step: trainer.strategy.reducer.density}


@pytest.mark.reliability(
    "warm-up by steps or by epochs, with a resume within it", checked="bit-identical", methods=WITH_DENSITY
)
@pytest.mark.parametrize(
    ("density_warmup_steps", "names"),
    [(3, WITH_DENSITY[:1]), *in_full((3, WITH_DENSITY[1:3]), (None, WITH_DENSITY[3:]))],
)
def test_a_warm_up_goes_on(density_warmup_steps, names, tmp_path):
    ours = {"density_warmup": (0.4, 0.2), "density_warmup_steps": density_warmup_steps}

    def rank(rank):
        results = {}
        for name in names:
            seen, later = Densities(), Densities()
            straight = result(*fit(name, rank, ours=ours, callbacks=[seen, saving(tmp_path / name)]))
            resumed = result(*fit(name, rank, ours=ours, callbacks=[later], ckpt_path=tmp_path / name / STEP_4))
            assert set(seen.seen.values()) == ({0.4, 0.2, 0.05} if density_warmup_steps else {0.4, 0.2})
            results[name] = same(resumed, straight), later.seen == {step: seen.seen[step] for step in range(5, 13)}
        return results

    for results in lightning_ranks(2, rank, patience=300):
        assert set(results.values()) == {(True, True)}, results


class Batched(Net):
    """Has the attributes that the batch size finder and the learning rate finder set."""

    batch_size, lr = 2, 0.05

    def train_dataloader(self):
        return Loader(self.rank, self.size, 12)


class Search(Callback):
    """Runs a finder in the middle of training, and records the reducer state before and after."""

    def __init__(self, finder):
        self.finder, self.states = finder, []

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            for _ in range(2):
                self.states.append(trainer.strategy.reducer.state_dict())
                if len(self.states) == 1:
                    self.finder(trainer, module)


FINDERS = {
    "learning rate": lambda t, m: pl.callbacks.LearningRateFinder(num_training_steps=4, update_attr=False).lr_find(
        t, m
    ),
    "batch size": lambda t, m: pl.callbacks.BatchSizeFinder(max_trials=1, steps_per_trial=2).scale_batch_size(t, m),
}


@one_in(2)
@pytest.mark.reliability(
    "LearningRateFinder and BatchSizeFinder within fit", checked="state as before", methods=["topk"]
)
# BatchSizeFinder works with one rank only: each rank makes up its own name for the checkpoint to go back to.
@pytest.mark.parametrize(("finder", "size"), [("learning rate", 2), ("batch size", 1)])
def test_a_search_within_fit_leaves_the_state_alone(finder, size, tmp_path):
    def rank(rank):
        net = Batched(**MOMENTUM)
        net.rank, net.size = rank, size
        options = {"callbacks": [search := Search(FINDERS[finder])], "default_root_dir": tmp_path, "max_epochs": 2}
        run = trainer("topk_ddp", size, **options)
        run.fit(net)
        before, after = search.states
        assert before["step"] > 0
        assert any(kept.any() for kept in before["elements"]["residual"].values())
        return same(before, after)

    assert lightning_ranks(size, rank) == [True] * size
    assert list(tmp_path.iterdir()) == []


SETTINGS = {
    "granularity": lambda: {"ours": {"granularity": "layer"}},
    "one segment": lambda: {"ours": {"granularity": "model"}},
    "bucket size": lambda: {"ours": {"bucket_cap_mb": 0.0005}},
    "density": lambda: {"density": 0.5},
}


@pytest.mark.reliability(
    "resume with another granularity, bucket size or density",
    checked="each rank starts with exactly its own residuals, and trains",
    methods=REPRESENTATIVES,
)
@pytest.mark.parametrize("setting", tiers(SETTINGS, []))
def test_other_settings_on_resume(setting, tmp_path):
    first = list(SETTINGS).index(setting)
    names = ["topk", *OTHERS[first :: len(SETTINGS)]]

    def rank(rank):
        results = {}
        for name in names:
            _, run = fit(name, rank, max_steps=4, callbacks=[saving(tmp_path / name)])
            before = run.strategy.reducer.state_dict()["elements"]
            options = SETTINGS[setting]()
            _, run = fit(name, rank, callbacks=[at_start := AtStart()], ckpt_path=tmp_path / name / STEP_4, **options)
            results[name] = same(at_start.state["elements"], before), run.global_step
        return results

    for results in lightning_ranks(2, rank, patience=300):
        assert set(results.values()) == {(True, 12)}, results


@full
@pytest.mark.reliability("a compiled model resumes a plain one, and back", checked="bit-identical reducer state")
@pytest.mark.parametrize("name", ["topk"])
def test_compiled(name, tmp_path):
    def compiled(net):
        return torch.compile(net, backend="eager")

    def rank(rank):
        equal = []
        for way, (first, second) in enumerate([(Net, lambda: compiled(Net())), (lambda: compiled(Net()), Net)]):
            folder = tmp_path / str(way)
            _, run = fit(name, rank, net=first(), max_steps=4, callbacks=[saving(folder)])
            fit(name, rank, net=second(), callbacks=[start := AtStart()], ckpt_path=folder / STEP_4)
            equal.append(same(start.state, run.strategy.reducer.state_dict()))
        return equal

    assert lightning_ranks(2, rank) == [[True, True]] * 2


def mean(states) -> torch.Tensor:
    """Return the mean of the residuals of all ranks, per element."""
    kept = [
        torch.cat([value.double().flatten() for value in state["elements"].get(entry, {}).values()] or [torch.zeros(1)])
        for state in states
        for entry, resize in state["resize"].items()
        if resize == "sum"
    ]
    return sum(kept, torch.zeros(1)) / len(states)


RESIZED = [(4, 2), (2, 3), (2, 1), (1, 2)]


@pytest.mark.reliability(
    "resume with another number of ranks: 4 to 2, 2 to 3, 2 to 1, 1 to 2",
    checked="mean of the residuals, to 1e-6; equal weights on all ranks; from then on bit-identical resume",
    methods=REPRESENTATIVES,
)
@pytest.mark.parametrize(
    ("old", "new", "names"),
    [(2, 3, ["topk"]), *in_full(*((*sizes, ["topk", *OTHERS[i :: len(RESIZED)]]) for i, sizes in enumerate(RESIZED)))],
)
def test_another_number_of_ranks(old, new, names, tmp_path):

    def before(rank):
        runs = {name: fit(name, rank, old, max_steps=4, callbacks=[saving(tmp_path / name)])[1] for name in names}
        return {name: run.strategy.reducer.state_dict() for name, run in runs.items()}

    def after(rank):
        results = {}
        for name in names:
            options = {"callbacks": [start := AtStart(), saving(tmp_path / "new" / name)]}
            through = result(*fit(name, rank, new, ckpt_path=tmp_path / name / STEP_4, **options))
            again = result(*fit(name, rank, new, ckpt_path=tmp_path / "new" / name / STEP_8))
            results[name] = start.state, through[0], same(through, again)
        return results

    olds, news = lightning_ranks(old, before, patience=300), lightning_ranks(new, after, patience=300)
    for name in names:
        states, weights, equal = zip(*(result[name] for result in news), strict=True)
        assert all(equal), name
        assert all(torch.equal(weights[0], others) for others in weights)
        assert all(state["step"] == 4 for state in states)
        expected = mean([result[name] for result in olds])
        assert float((mean(states) - expected).norm()) <= 1e-6 * float(expected.norm()), name
        assert not keeps_all(name) or expected.any()


FROM_DDP = ["dense", "topk", "oktopk", "signsgd"]


@full
@pytest.mark.reliability(
    "a checkpoint of ddp resumes with ours, and the reverse",
    checked="continues from the same weights",
    methods=FROM_DDP,
)
def test_from_ddp_and_back(tmp_path):
    def rank(rank):
        straight = result(*fit("ddp", rank, callbacks=[saving(tmp_path / "ddp")]))
        results = {}
        for name in FROM_DDP:
            here = saving(tmp_path / name)
            _, run = fit(
                name, rank, callbacks=[start := AtStart(), here], max_steps=8, ckpt_path=tmp_path / "ddp" / STEP_4
            )
            kept = [value for entry in start.state["elements"].values() for value in entry.values()]
            assert not any(value.any() for value in kept)
            assert start.state["step"] == 0
            back = result(*fit("ddp", rank, ckpt_path=tmp_path / name / STEP_8))
            assert back[0].isfinite().all()
            results[name] = run.global_step, same(back, straight)
        return results

    for results in lightning_ranks(2, rank, patience=300):
        assert {step for step, _ in results.values()} == {8}
        assert results["dense"][1]  # to the last bit, with two ranks
        assert not results["topk"][1]


@full
def test_another_method(saved):
    def rank(rank):
        records = []
        for name in ("topk", "gaussiank", "dense"):
            _, warnings = with_warnings(fit, name, rank, callbacks=[start := AtStart()], ckpt_path=saved[0] / STEP_4)
            records.append((start.state["elements"], warnings))
        return records

    for i, (topk, gaussiank, dense) in enumerate(lightning_ranks(2, rank)):
        assert same(topk, gaussiank)
        assert topk[1] == []
        assert dense[0] == {}
        said = any("contains residual of Residual, which Identity() + NoMemory()" in text for text in dense[1])
        assert said == (i == 0)


def resumed_without_files_on_one_rank(rank, folder):
    """Return warnings and weights of a resume with an outer optimizer, if rank 1's node has no sidecar files."""
    options = {"local_steps": 2, "process_group_backend": "gloo"}

    def train(steps, **given):
        net = Net(torch.optim.AdamW, lr=0.01)
        strategy = SparseDDPStrategy("diloco", **options)
        run = trainer(strategy, 2, default_root_dir=folder, max_steps=steps, max_epochs=-1)
        run.fit(net, Loader(rank, 2, 8), **given)
        assert run.global_step == steps
        return run, net

    run, _ = train(4)
    run.save_checkpoint(folder / "four.ckpt")
    assert run.strategy.reducer.states[0]["outer_momentum"].any()
    if rank == 1:
        sidecars.read = lambda *_: (None, [rank])
    (_, net), warnings = with_warnings(train, 8, ckpt_path=folder / "four.ckpt")
    return warnings, net.weights


@later
def test_state_that_is_equal_on_all_ranks_starts_anew_if_one_has_no_sidecar_files(tmp_path):
    (warnings, first), (_, second) = lightning_ranks(2, resumed_without_files_on_one_rank, tmp_path)
    assert any("start with empty ones" in text for text in warnings)
    assert torch.equal(first, second)
