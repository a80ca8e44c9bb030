"""A run that resumes from a checkpoint goes on as if it had not stopped."""

import errno
import os
import re
import shutil
import signal
import sys
import time

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_sparse.checkpoint as side_files
from lightning_sparse import METHODS, SparseDDPStrategy, method
from tests.integration.checkpoints import (
    MOMENTUM,
    OPTIMIZERS,
    STEP_4,
    STEP_8,
    At,
    AtStart,
    fit,
    heard,
    named,
    network,
    odd,
    result,
    saving,
    unless,
)
from tests.integration.trainers import Loader, Net, keeps_all, lightning_ranks, same, strategy, trainer


@pytest.mark.reliability(
    "resume, at mid-epoch and at the end of an epoch; SGD, Nesterov, Adam, AdamW and a schedule",
    checked="bit-identical to a run that never stopped, as with ddp; the state too",
)
@pytest.mark.parametrize("name", ["ddp", *METHODS])
def test_resume_is_bit_for_bit(name, tmp_path):
    def rank(rank):
        results = {}
        for optimizer in OPTIMIZERS:
            folder = tmp_path / optimizer
            straight = result(*fit(name, rank, net=network(optimizer), callbacks=[saving(folder)]))
            for step in (4, 6) if optimizer == "momentum" else (4,):
                ckpt_path = folder / f"step={step}.ckpt"
                resumed = result(*fit(name, rank, net=network(optimizer), ckpt_path=ckpt_path))
                results[optimizer, step] = same(resumed, straight)
        # The control: without the folders a method that keeps something goes another way.
        dist.barrier()
        if name != "ddp" and rank == 0:
            shutil.rmtree(folder / "step=4.ckpt.residuals")
        dist.barrier()
        bare = result(*fit(name, rank, net=network(optimizer), ckpt_path=folder / "step=4.ckpt"))
        results["control"] = not keeps_all(name) or not torch.equal(bare[0], straight[0])
        return results

    results = lightning_ranks(2, rank)
    assert all(all(result.values()) for result in results), results


class Scored(Net):
    """Logs something to be the best in: the later the better."""

    def training_step(self, batch, index):
        self.log("score", float(self.global_step))
        return super().training_step(batch, index)


BEST = {"monitor": "score", "mode": "max"}
WAYS = {
    "every step, top 1": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=1)], ["step=7"]),
    "top 2": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=2, **BEST)], ["step=6", "step=7"]),
    "last": (lambda d: [saving(d, every_n_train_steps=1, save_top_k=0, save_last=True)], ["last"]),
    "last and top 2": (
        lambda d: [saving(d, every_n_train_steps=1, save_top_k=2, save_last=True, **BEST)],
        ["last", "step=6", "step=7"],
    ),
    "link": (
        lambda d: [saving(d, every_n_train_steps=1, save_top_k=1, save_last="link")],
        ["last", "step=7"],
    ),
    "by hand": (lambda d: [At(step, lambda t: t.save_checkpoint(d / "hand.ckpt")) for step in (5, 7)], ["hand"]),
}


@pytest.mark.reliability(
    "ModelCheckpoint (top 1, top 2, last.ckpt as file and as link), by hand; AsyncCheckpointIO",
    checked="side files of no checkpoint but those on disk; each goes on bit for bit",
    methods=["topk"],
)
@pytest.mark.parametrize("io", [None, AsyncCheckpointIO])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_save(way, io, tmp_path):
    callbacks, expected = WAYS[way]

    def rank(rank):
        straight = result(*fit("topk", rank, net=Scored(**MOMENTUM)))
        plugins = [io()] if io else []
        fit("topk", rank, net=Scored(**MOMENTUM), max_steps=7, callbacks=callbacks(tmp_path), plugins=plugins)
        dist.barrier()
        wrong = odd(tmp_path, others=False)
        # With ddp, AsyncCheckpointIO leaves a checkpoint that was removed before it was written. Not so here.
        assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == expected
        resumed = [
            result(*fit("topk", rank, net=Scored(**MOMENTUM), ckpt_path=tmp_path / f"{checkpoint}.ckpt"))
            for checkpoint in expected
            if (way, checkpoint) != ("top 2", "step=6")  # saves time
        ]
        return wrong, [same(weights, straight) for weights in resumed]

    results = lightning_ranks(2, rank)
    assert results == [([], [True] * len(results[0][1]))] * 2


class Slow(TorchCheckpointIO):
    """Writes a checkpoint three steps later, and looks at what lies there before and after."""

    def __init__(self, directory):
        self.directory, self.wrong, self.saves, self.steps = directory, [], 0, 0

    def step(self, trainer):
        self.steps = trainer.global_step

    def save_checkpoint(self, *args, **options):
        while self.steps < min(self.saves + 4, 12):
            time.sleep(0.002)
        self.wrong += odd(self.directory)
        super().save_checkpoint(*args, **options)
        self.wrong += odd(self.directory)
        self.saves += 1


@pytest.mark.reliability(
    "AsyncCheckpointIO over slow storage, several saves on their way",
    checked="what is on disk has its side files at every moment, and in the end none but its own remain",
    methods=["topk"],
)
@pytest.mark.parametrize("options", [{"save_top_k": 0, "save_last": True}, {"save_top_k": 1}])
def test_slow_asynchronous_saves(options, tmp_path):
    def rank(rank):
        io = Slow(tmp_path)
        callbacks = [saving(tmp_path, every_n_train_steps=1, **options), *(At(n, io.step) for n in range(1, 13))]
        straight = result(*fit("topk", rank, callbacks=callbacks, plugins=[AsyncCheckpointIO(io)]))
        dist.barrier()
        last = max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        _, run = fit("topk", rank, ckpt_path=last)
        assert rank or io.saves == 12
        return io.wrong, odd(tmp_path, others=False), same(run.strategy.reducer.state_dict(), straight[2])

    assert lightning_ranks(2, rank) == [([], [], True)] * 2


def test_a_save_after_fit_and_one_of_weights_alone(tmp_path):
    def rank(rank):
        _, run = fit("topk", rank, callbacks=[saving(tmp_path, save_top_k=1, save_weights_only=True)])
        run.save_checkpoint(tmp_path / "hand.ckpt", weights_only=True)
        run.save_checkpoint(tmp_path / "after.ckpt")
        before = run.strategy.reducer.state_dict()
        dist.barrier()
        _, run = fit("topk", rank, max_epochs=3, callbacks=[at_start := AtStart()], ckpt_path=tmp_path / "after.ckpt")
        assert run.global_step == 18
        return same(at_start.state, before)

    assert lightning_ranks(2, rank) == [True, True]
    assert {path.name: named(path) is not None for path in tmp_path.glob("*.ckpt")} == {
        "step=12.ckpt": False,
        "hand.ckpt": False,
        "after.ckpt": True,
    }
    assert [path.name for path in tmp_path.glob("*.residuals")] == ["after.ckpt.residuals"]


@pytest.mark.reliability("resume of a resume, and twice from one checkpoint", checked="bit-identical")
@pytest.mark.parametrize("name", ["ddp", "topk"])
def test_resume_of_a_resume(name, tmp_path):
    def rank(rank):
        straight = result(*fit(name, rank))
        last = None
        for step in (3, 5, 8):  # overwrites last.ckpt, which names side files of the run before
            saved = saving(tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
            fit(name, rank, max_steps=step, callbacks=[saved], ckpt_path=last)
            last = tmp_path / "last.ckpt"
        dist.barrier()
        wrong = [] if name == "ddp" else odd(tmp_path, others=False)
        return wrong, [same(result(*fit(name, rank, ckpt_path=last)), straight) for _ in range(2)]

    assert lightning_ranks(2, rank) == [([], [True, True])] * 2


WITH_DENSITY = [name for name in METHODS if method(name).density is not None]


class Densities(Callback):
    """Notes the density of each step."""

    def on_train_batch_end(self, trainer, module, *_):
        self.seen = {**getattr(self, "seen", {}), trainer.global_step: trainer.strategy.reducer.density}


@pytest.mark.reliability(
    "warm-up by steps or by epochs, with a resume within it", checked="bit-identical", methods=WITH_DENSITY
)
@pytest.mark.parametrize("warmup_steps", [3, None])
def test_a_warm_up_goes_on(warmup_steps, tmp_path):
    ours = {"warmup": (0.4, 0.2), "warmup_steps": warmup_steps}

    def rank(rank):
        results = {}
        for name in WITH_DENSITY:
            seen, later = Densities(), Densities()
            straight = result(*fit(name, rank, ours=ours, callbacks=[seen, saving(tmp_path / name)]))
            resumed = result(*fit(name, rank, ours=ours, callbacks=[later], ckpt_path=tmp_path / name / STEP_4))
            assert set(seen.seen.values()) == ({0.4, 0.2, 0.05} if warmup_steps else {0.4, 0.2})
            results[name] = same(resumed, straight), later.seen == {step: seen.seen[step] for step in range(5, 13)}
        return results

    for results in lightning_ranks(2, rank, patience=300):
        assert set(results.values()) == {(True, True)}, results


class Batched(Net):
    """With a batch size that can be searched for, and a learning rate."""

    batch_size, lr = 2, 0.05

    def train_dataloader(self):
        return Loader(self.rank, self.size, 12)


class Search(Callback):
    """Searches in the middle of training, and keeps the state before and after."""

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


@pytest.mark.reliability(
    "LearningRateFinder and BatchSizeFinder within fit", checked="state as before", methods=["topk"]
)
# Lightning's search for a batch size is for one rank: others look for the checkpoint under another name.
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of twelve steps with all its checkpoints; the results of its two ranks."""
    directory = tmp_path_factory.mktemp("saved")
    results = lightning_ranks(2, lambda rank: result(*fit("topk", rank, callbacks=[saving(directory)])))
    return directory, results


def side(directory, step, rank):
    return next((directory / f"{step}.residuals").glob(f"*.rank{rank}-of-2.pt"))


def edit(directory, change):
    checkpoint = torch.load(directory / STEP_4, weights_only=False)
    change(checkpoint[side_files.KEY])
    torch.save(checkpoint, directory / STEP_4)


def truncate(path, share):
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def mix(directory, *ranks):
    """Put files of step 8 where those of step 4 are looked for."""
    for rank in ranks:
        shutil.copy(side(directory, STEP_8, rank), side(directory, STEP_4, rank))


def strange(path):
    torch.save({"version": 1, "tag": path.name.split(".")[0], "state": sys.exit, "checksum": 0}, path)


BOTH = r"[0-9a-f]{16}\.rank0-of-2\.pt, [0-9a-f]{16}\.rank1-of-2\.pt not found in '.*': the residuals in them are lost"
DAMAGES = {
    "none": (lambda d: None, "", None),
    "moved with its folder": (lambda d: None, "", None),
    "moved alone": (lambda d: shutil.rmtree(d / f"{STEP_4}.residuals"), BOTH, None),
    "one file missing": (lambda d: side(d, STEP_4, 1).unlink(), "^[0-9a-f]{16}.rank1-of-2.pt not found in '.*'", None),
    "folder of another checkpoint": (
        lambda d: (
            shutil.rmtree(d / f"{STEP_4}.residuals"),
            (d / f"{STEP_8}.residuals").rename(d / f"{STEP_4}.residuals"),
        ),
        BOTH,
        None,
    ),
    "file empty": (
        lambda d: truncate(side(d, STEP_4, 1), 0),
        None,
        "rank 1: .* is damaged, or not one of ours: EOFError",
    ),
    "file torn": (lambda d: truncate(side(d, STEP_4, 1), 0.6), None, "rank 1: .* is damaged"),
    "last byte missing": (lambda d: truncate(side(d, STEP_4, 0), 0.9999), None, "rank 0: .* is damaged"),
    "bit flipped": (lambda d: flip(side(d, STEP_4, 1)), None, "rank 1: .* is damaged: its checksum differs"),
    "file of another rank": (
        lambda d: shutil.copy(side(d, STEP_4, 0), side(d, STEP_4, 1)),
        None,
        "rank 1: .* belongs to another checkpoint, rank or version than its name says",
    ),
    "one file of another step": (lambda d: mix(d, 1), None, "rank 1: .* belongs to another checkpoint"),
    "all files of another step": (lambda d: mix(d, 0, 1), None, "rank 0: .* belongs to another checkpoint"),
    "other version": (
        lambda d: edit(d, lambda info: info.update(version=99)),
        None,
        "its sidecar files are of version 99, this is 1",
    ),
    "sizes that make no sense": (lambda d: edit(d, lambda info: info.update(size=10**15)), None, "makes no sense"),
    "a million files asked for": (
        lambda d: edit(d, lambda info: info.update(size=2**20)),
        r"^[0-9a-f]{16}\.rank0-of-1048576\.pt, .{,400} and others not found in '.*'",
        None,
    ),
    "malicious": (
        lambda d: strange(side(d, STEP_4, 1)),
        None,
        "rank 1: .* is damaged, or not one of ours: UnpicklingError",
    ),
}


@pytest.mark.reliability(
    "side files moved, missing, torn, flipped, foreign, of another step, another version, or malicious",
    checked="bit-identical if all is there; else the documented warning, or the same error on all ranks at once",
    methods=["topk"],
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_side_files(damage, saved, tmp_path):
    directory, straight = saved
    shutil.copytree(directory, tmp_path / "moved")
    do, warning, error = DAMAGES[damage]
    do(tmp_path / "moved")

    def rank(rank):
        started = time.monotonic()
        options = {"ckpt_path": tmp_path / "moved" / STEP_4}
        told, records = heard(unless, fit, "topk", rank, callbacks=[at_start := AtStart()], **options)
        if error:
            assert time.monotonic() - started < 20  # the group's timeout is 30 s
            # As the message says: without the folder the run goes on, if the checkpoint itself makes sense.
            dist.barrier()
            shutil.rmtree(tmp_path / "moved" / f"{STEP_4}.residuals", ignore_errors=True)
            dist.barrier()
            again = unless(fit, "topk", rank, **options)
            return told, again
        assert told is None
        # Where nothing was found the count of steps is the checkpoint's.
        assert at_start.state["step"] == 4
        return records, result(*fit("topk", rank, ckpt_path=tmp_path / "moved" / STEP_4))

    results = lightning_ranks(2, rank)
    if error:
        assert results[0][0] == results[1][0]
        assert re.search(error, results[0][0])
        assert "cannot be loaded" in results[0][0]
        assert all((again is None) != (damage in ("other version", "sizes that make no sense")) for _, again in results)
        return
    assert results[1][0] == []
    assert [bool(re.search(warning, text)) for text in results[0][0]] == [True] * bool(warning)
    assert [same(a[1], b) for a, b in zip(results, straight, strict=True)] == [not warning] * 2


@pytest.mark.reliability(
    "saving and equal-size resume",
    checked="each rank opens its own side file and no other: nothing passes through rank 0",
    methods=["topk"],
)
def test_no_rank_opens_the_files_of_another(tmp_path):
    def rank(rank):
        opened = []
        sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
        fit("topk", rank, callbacks=[saving(tmp_path)])
        fit("topk", rank, ckpt_path=tmp_path / STEP_4)
        return [path.split(".rank")[1][0] for path in opened if ".residuals/" in path]

    for number, found in enumerate(lightning_ranks(2, rank)):
        assert found == [str(number)] * (6 + 1)  # saves, and one read


class Other(Net):
    """Brings its own weights along, so that only the residuals are those of another model."""

    def __init__(self, width=24, frozen=False):
        super().__init__()
        self.layers[3] = torch.nn.Linear(24, width)
        self.layers[3].requires_grad_(not frozen)

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = self.state_dict()
        checkpoint["optimizer_states"] = []


@pytest.mark.reliability(
    "residuals of another model", checked="error on all ranks, nothing is loaded", methods=["topk"]
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 5}, r"rank 0: Reducer state of 'layers.3.(weight|bias)' has shape \S+( 24\))?, not \S+( 24\))?\."),
        (
            {"frozen": True},
            "rank 0: Reducer state and model differ in their parameters: layers.3.bias, layers.3.weight",
        ),
    ],
)
def test_another_model(options, message, saved):
    def rank(rank):
        run = trainer(strategy("topk", 0.05), 2)
        told = unless(run.fit, Other(**options), Loader(rank, 2), ckpt_path=saved[0] / STEP_4)
        kept = run.strategy.reducer.state_dict()["elements"]["residual"].values()
        return told, any(value.any() for value in kept)

    results = lightning_ranks(2, rank)
    assert results[0] == results[1]
    assert re.search(message, results[0][0])
    assert results[0][1] is False


SETTINGS = {
    "granularity": lambda: {"ours": {"granularity": "layer"}},
    "one segment": lambda: {"ours": {"granularity": "model"}},
    "bucket size": lambda: {"ours": {"bucket_cap_mb": 0.0005}},
    "density": lambda: {"density": 0.5},
}


@pytest.mark.reliability(
    "resume with another granularity, bucket size or density",
    checked="each rank starts with exactly what it had kept, and trains",
    methods=METHODS,
)
@pytest.mark.parametrize("setting", SETTINGS)
def test_other_settings_on_resume(setting, tmp_path):
    def rank(rank):
        results = {}
        for name in METHODS:
            _, run = fit(name, rank, max_steps=4, callbacks=[saving(tmp_path / name)])
            before = run.strategy.reducer.state_dict()["elements"]
            options = SETTINGS[setting]()
            _, run = fit(name, rank, callbacks=[at_start := AtStart()], ckpt_path=tmp_path / name / STEP_4, **options)
            results[name] = same(at_start.state["elements"], before), run.global_step
        return results

    for results in lightning_ranks(2, rank, patience=300):
        assert set(results.values()) == {(True, 12)}, results


@pytest.mark.reliability("a compiled model resumes a plain one, and back", checked="bit-identical kept state")
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
    """Return what all ranks have kept together, per element, divided by their number."""
    kept = [
        torch.cat([value.double().flatten() for value in state["elements"].get(entry, {}).values()] or [torch.zeros(1)])
        for state in states
        for entry, resize in state["resize"].items()
        if resize == "sum"
    ]
    return sum(kept, torch.zeros(1)) / len(states)


@pytest.mark.reliability(
    "resume with another number of ranks: 4 to 2, 2 to 3, 2 to 1, 1 to 2",
    checked="mean of what was kept, to 1e-6; equal weights on all ranks; from then on bit-identical resume",
    methods=METHODS,
)
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 3), (2, 1), (1, 2)])
def test_another_number_of_ranks(old, new, tmp_path):
    def before(rank):
        runs = {name: fit(name, rank, old, max_steps=4, callbacks=[saving(tmp_path / name)])[1] for name in METHODS}
        return {name: run.strategy.reducer.state_dict() for name, run in runs.items()}

    def after(rank):
        results = {}
        for name in METHODS:
            options = {"callbacks": [start := AtStart(), saving(tmp_path / "new" / name)]}
            through = result(*fit(name, rank, new, ckpt_path=tmp_path / name / STEP_4, **options))
            again = result(*fit(name, rank, new, ckpt_path=tmp_path / "new" / name / STEP_8))
            results[name] = start.state, through[0], same(through, again)
        return results

    olds, news = lightning_ranks(old, before, patience=300), lightning_ranks(new, after, patience=300)
    for name in METHODS:
        states, weights, equal = zip(*(result[name] for result in news), strict=True)
        assert all(equal), name
        assert all(torch.equal(weights[0], others) for others in weights)
        assert all(state["step"] == 4 for state in states)
        expected = mean([result[name] for result in olds])
        assert float((mean(states) - expected).norm()) <= 1e-6 * float(expected.norm()), name
        assert not keeps_all(name) or expected.any()


@pytest.mark.reliability(
    "a checkpoint of ddp goes on with ours, and back", checked="trains on from the same weights", methods=METHODS
)
def test_from_ddp_and_back(tmp_path):
    def rank(rank):
        straight = result(*fit("ddp", rank, callbacks=[saving(tmp_path / "ddp")]))
        results = {}
        for name in METHODS:
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


def test_another_method(saved):
    def rank(rank):
        records = []
        for name in ("topk", "gaussiank", "dense"):
            _, heard_ = heard(fit, name, rank, callbacks=[start := AtStart()], ckpt_path=saved[0] / STEP_4)
            records.append((start.state["elements"], heard_))
        return records

    for topk, gaussiank, dense in lightning_ranks(2, rank):
        assert same(topk, gaussiank)
        assert topk[1] == []
        assert dense[0] == {}
        assert "holds residual, for which Method(compressor=Identity()" in dense[1][0]


def full_disk(part, rank):
    """Let a rank find the disk full: "side" files, or the "main" checkpoint."""
    write = LocalFileOpener.write

    def full(self, data):
        if (".residuals/" in self.path) == (part == "side"):
            write(self, bytes(data)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    LocalFileOpener.write = full


def killed(part, rank):
    """Kill a rank between writing a file and giving it its name."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if part == "side":
        LocalFileSystem.mv = die
    else:
        LocalFileOpener.commit = die


@pytest.mark.reliability(
    "disk full, or kill -9, while side files or a checkpoint are written, on one rank",
    checked="the error on all ranks; last.ckpt and its side files as they were: bit-identical resume",
    methods=["topk"],
)
@pytest.mark.parametrize(("part", "victim"), [("side", 1), ("side", 0), ("main", 0)])
@pytest.mark.parametrize("trouble", [full_disk, killed])
def test_trouble_while_saving(trouble, part, victim, saved, tmp_path):
    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        if rank == victim:
            last.insert(0, At(5, lambda _: trouble(part, rank)))
        return unless(fit, "topk", rank, callbacks=last)

    texts = lightning_ranks(2, rank)
    if trouble is full_disk:
        assert texts[0] == texts[1]
        assert f"could not be written (rank {victim}: OSError: [Errno 28] No space left on device)" in texts[0]
        assert odd(tmp_path, others=False) == []
    else:
        assert texts[victim] is None
        assert texts[1 - victim]
        assert odd(tmp_path) == []
    resumed = lightning_ranks(2, lambda rank: result(*fit("topk", rank, ckpt_path=tmp_path / "last.ckpt")))
    assert same(resumed, saved[1])


@pytest.mark.parametrize(("part", "victim"), [("side", 1), ("main", 0)])
def test_a_first_checkpoint_that_cannot_be_written_leaves_nothing(part, victim, tmp_path):
    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        if rank == victim:
            last.insert(0, At(2, lambda _: full_disk(part, rank)))
        return unless(fit, "topk", rank, callbacks=last)

    texts = lightning_ranks(2, rank)
    assert texts[0] == texts[1]
    assert f"could not be written (rank {victim}: OSError: [Errno 28] No space left on device)" in texts[0]
    assert list(tmp_path.iterdir()) == []


def test_side_files_stay_where_the_checkpoint_lands_in_spite_of_an_error(tmp_path):
    class Moaning(TorchCheckpointIO):
        def save_checkpoint(self, *args, **options):
            super().save_checkpoint(*args, **options)
            raise OSError("written, but of an earlier one I have to say")

    def rank(rank):
        last = [saving(tmp_path, every_n_train_steps=3, save_top_k=0, save_last=True)]
        return unless(fit, "topk", rank, callbacks=last, plugins=[Moaning()])

    assert all("of an earlier one I have to say" in text for text in lightning_ranks(2, rank))
    assert odd(tmp_path, others=False) == []
    assert (tmp_path / "last.ckpt").exists()


class Failing(Net):
    """Fails in one rank's step."""

    def __init__(self, step, rank):
        super().__init__(**MOMENTUM)
        self.fails = step, rank

    def training_step(self, batch, index):
        if self.fails == (self.global_step, self.global_rank):
            raise ArithmeticError("of the user")
        return super().training_step(batch, index)


@pytest.mark.reliability(
    "checkpoint on an exception of one rank",
    checked="written at once, without residuals, and it says so",
    methods=["topk"],
)
def test_a_checkpoint_on_an_exception_in_one_rank(tmp_path):
    def rank(rank):
        started = time.monotonic()
        callbacks = [pl.callbacks.OnExceptionCheckpoint(tmp_path)]
        told, records = heard(unless, fit, "topk", rank, net=Failing(3, 1), callbacks=callbacks)
        assert time.monotonic() - started < 20
        _, later = heard(fit, "topk", rank, ckpt_path=tmp_path / "on_exception.ckpt")
        return told, records, later

    (told, records, later), theirs = lightning_ranks(2, rank)
    assert "Rank 1 failed at step 3: ArithmeticError: of the user" in told
    assert theirs == ("of the user", [], [])
    assert "gets no residuals: training failed in the middle of a step" in records[-1]
    assert later == []
    assert named(tmp_path / "on_exception.ckpt") is None


def test_a_checkpoint_on_an_exception_between_steps(saved, tmp_path):
    def interrupt(_):
        raise ArithmeticError("of the user")

    def rank(rank):
        callbacks = [At(4, interrupt), pl.callbacks.OnExceptionCheckpoint(tmp_path)]
        told, records = heard(unless, fit, "topk", rank, callbacks=callbacks)
        fit("topk", rank, callbacks=[start := AtStart()], ckpt_path=tmp_path / "on_exception.ckpt")
        fit("topk", rank, callbacks=[expected := AtStart()], ckpt_path=saved[0] / STEP_4)
        return told, records, same(start.state, expected.state)

    assert lightning_ranks(2, rank) == [("of the user", [], True)] * 2


def test_a_process_that_did_not_train_says_that_it_has_no_residuals(tmp_path):
    # Such as the one that has started others by spawn or fork.
    parent = SparseDDPStrategy("topk")
    _, records = heard(parent.save_checkpoint, {"optimizer_states": []}, tmp_path / "a.ckpt")
    assert "gets no residuals: they belong to the processes that trained" in records[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
