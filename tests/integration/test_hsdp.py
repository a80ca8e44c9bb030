"""Trainer(strategy="topk_hsdp"): replicas of a model that FSDP2 shards. Four ranks: two replicas of two shards."""

import math
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import ModelParallelStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_sparse import NonFiniteGradient, RankFailure, SparseDDPStrategy, SparseHSDPStrategy, attach_updates
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution
from tests.integration.failing import EVENTS, SOON
from tests.integration.sharded import STEPS, Module, fitted, hsdp, loader
from tests.integration.trainers import Messages, Told, lightning_ranks, trainer
from tests.support.shards import attempt, loss_of, mesh_of, net, shard, steps, whole
from tests.support.tiers import full, in_full, later


def plain(method: Any, *, clip: float | None = None, micro: int = 1, **options: Any) -> dict[str, Tensor]:
    """Return the weights after a loop without Lightning."""
    mesh = mesh_of()
    model = shard(net(), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    attach_updates(model, optimizer, method, group=mesh["replicate"].get_group(), **options)
    for _ in steps(model, optimizer, dist.get_rank(), 4, STEPS, micro):
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    return whole(model)


def beside_plain_torch(rank: int, strategy: dict[str, Any], lightning: dict[str, Any], loop: dict[str, Any]) -> Any:
    micro = loop.get("micro", 1)
    module, run = fitted(hsdp("topk", **strategy), Module(micro=micro), **lightning)
    expected, found = plain("topk", **loop), whole(module.net)
    return [torch.equal(found[name], expected[name]) for name in expected], run.strategy.reducer.comm.size


@pytest.mark.parametrize(
    ("strategy", "lightning", "loop"),
    [
        pytest.param({"density": 0.2}, {}, {"density": 0.2}, marks=full),
        ({}, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, {"clip": 0.05 * math.sqrt(2), "micro": 2}),
        pytest.param({"local_steps": 3}, {}, {"local_steps": 3}, marks=full),
        pytest.param({"granularity": "layer", "seed": 3}, {}, {"granularity": "layer", "seed": 3}, marks=full),
    ],
)
def test_weights_are_those_of_plain_torch(strategy, lightning, loop):
    for equal, replicas in lightning_ranks(4, beside_plain_torch, strategy, lightning, loop):
        assert all(equal)
        assert replicas == 2


def clipped(rank: int) -> Any:
    cases: Any = ({"clip_norm": 0.05}, {}), ({}, {"gradient_clip_val": 0.05 / math.sqrt(2)}), ({}, {})
    # With this eps a step depends on the scale of gradients, and hardly on their rounding errors.
    make = partial(Module, partial(torch.optim.AdamW, eps=1e-3))
    found, expected, free = (whole(fitted(hsdp(**ours), make(), **options)[0].net) for ours, options in cases)
    return [max((found[n] - other[n]).abs().max().item() for n in found) for other in (expected, free)]


@full
def test_clip_norm_is_of_the_whole_replica():
    for error, difference in lightning_ranks(4, clipped):
        # Torch divides by norm + 1e-6, and the norm is about 1. AdamW moves a weight by at most 0.01 in each step.
        assert error < STEPS * 0.01 * 1e-4 < difference


def beside_ddp(rank: int) -> Any:
    """Four shards of one replica, and stock training, which have the same gradients."""
    one, _ = fitted(hsdp(replicas=1))
    stock, _ = fitted(ModelParallelStrategy(4, 1, process_group_backend="gloo"))
    ours, expected = whole(one.net), whole(stock.net)
    return max((ours[name] - expected[name]).abs().max().item() for name in expected)


@full
def test_one_replica_trains_as_stock():
    # Exact: the exchange on one rank leaves the weights as they are.
    assert max(lightning_ranks(4, beside_ddp)) == 0


class Save(pl.Callback):
    """Saves a checkpoint after some steps, and keeps the sum of this rank's residuals."""

    def __init__(self, path: str, after: int = STEPS // 2) -> None:
        self.path, self.after, self.residual = path, after, 0.0

    def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
        if run.global_step == self.after:
            run.save_checkpoint(self.path)
            self.residual = float(torch.cat([x["residual"] for x in run.strategy.reducer.states]).abs().sum())


def dense(rank: int) -> Any:
    module, _ = fitted(hsdp("dense"), Module(micro=2), accumulate_grad_batches=2)
    mesh = mesh_of()
    model = shard(net(), mesh)  # FSDP2's own replicas
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in steps(model, optimizer, dist.get_rank(), 4, STEPS, 2):
        pass
    ours, expected = whole(module.net), whole(model)
    return max((ours[name] - expected[name]).abs().max().item() for name in expected)


@full
def test_dense_replicas_train_as_fsdp2s_own():
    assert max(lightning_ranks(4, dense)) == 0  # both average the same sums of two ranks


def saved_and_resumed(rank: int, folder: str, replicas: list[int]) -> Any:
    path = f"{folder}/half.ckpt"
    save = Save(path)
    whole_run, _ = fitted(hsdp("topk", density=0.2), callbacks=[save])
    files = sorted(p.name for p in Path(folder).iterdir())
    expected, found = whole(whole_run.net), []
    for number in replicas:
        resumed, again = fitted(hsdp("topk", density=0.2, replicas=number), path=path)
        ours = whole(resumed.net)
        found.append((all(torch.equal(ours[n], expected[n]) for n in ours), again.global_step))
    return found, files, save.residual


@full
@pytest.mark.parametrize("another", [1, *in_full(4)])
def test_a_resumed_run_is_the_whole_run_bit_for_bit_and_goes_on_with_another_number_of_replicas(another, tmp_path):
    for found, files, residual in lightning_ranks(4, saved_and_resumed, str(tmp_path), [2, another]):
        assert found == [(True, STEPS), (False, STEPS)]
        assert files == ["half.ckpt", "half.ckpt.residuals"]
        assert residual != 0


def on_a_full_disk(rank: int, folder: str, owner: Any, name: str) -> Any:
    """Rank 0 cannot write a file."""
    path, errors, files = Path(folder) / "a.ckpt", [], []

    def save(run: pl.Trainer) -> None:
        try:
            run.save_checkpoint(path)
        except CheckpointException as error:
            raise OSError(f"Rank 0: {error.failures[0][0]}") from error

    class Full(pl.Callback):
        def on_train_batch_end(self, run: pl.Trainer, *_: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0 and run.global_step == 2:
                    patch.setattr(owner, name, full_disk)
                errors.append(attempt(lambda: save(run)))
            run.strategy.barrier()
            files.append(sorted(p.name for p in Path(f"{path}.residuals").iterdir()))
            run.strategy.barrier()

    fitted(hsdp("topk", density=0.2), max_steps=3, callbacks=[Full()])
    return errors, files


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@full
@pytest.mark.parametrize(("owner", "name"), [(torch, "save"), (FileSystemWriter, "write_data")])
@pytest.mark.reliability(
    "topk_hsdp: disk full on one rank in a save",
    checked="the error on all ranks; the next save works",
    methods=["topk"],
)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_the_next_one_works(owner, name, tmp_path):
    """Lightning writes a file by `torch.save` last, after torch's distributed checkpoint."""
    for errors, (first, failed, last) in lightning_ranks(4, on_a_full_disk, str(tmp_path), owner, name):
        assert [bool(error) for error in errors] == [False, True, False]
        assert "Rank 0: [Errno 28] No space left on device" in errors[1]
        assert failed == first, "none of the save that failed"
        assert len(last) == 4, "of the last save only"


class NotFinite(Module):
    """A gradient is NaN at step 2."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2:
            self.net[2].weight.grad.to_local().fill_(math.nan)


def saves_after_a_failure(rank: int, folder: str) -> tuple[str, list[str], list[bool]]:
    module, messages = NotFinite(), Messages()
    run = trainer(hsdp("topk", density=0.2), 4, max_steps=4, limit_val_batches=0)
    with pytest.raises(NonFiniteGradient) as error:
        run.fit(module, loader(), loader())
    run.limit_val_batches = 1
    run.validate(module, loader(), verbose=False)  # another run of the same strategy
    run.save_checkpoint(f"{folder}/a.ckpt")
    return str(error.value), messages.texts, [Path(f"{folder}/a.ckpt").exists()]


@later
def test_residuals_of_an_interrupted_step_are_not_saved_after_a_validation(tmp_path):
    for error, texts, exists in lightning_ranks(4, saves_after_a_failure, str(tmp_path)):
        assert "is not finite" in error
        assert exists == [False]
        assert any("a.ckpt' is not saved: training failed" in text for text in texts)


class SaveOnError(pl.Callback):
    """Saves a checkpoint when training fails, as ModelCheckpoint does with save_on_exception=True."""

    def __init__(self, path: str, weights_only: bool) -> None:
        self.path, self.weights_only = path, weights_only

    def on_exception(self, run: pl.Trainer, *_: Any) -> None:
        run.save_checkpoint(self.path, self.weights_only)


def saves_on_an_error(
    rank: int, folder: str, failing: list[int], weights_only: bool, options: dict[str, Any]
) -> tuple[str, float, list[str]]:
    """Save when some ranks fail. If the save raises an error, return the earlier error.

    If rank 1 alone fails, its process stays, so that no connection ends.
    """
    module, started, messages = Module(), time.monotonic(), Messages()
    if rank in failing:
        module.hooks = {2: EVENTS["fails"]}
    callbacks, text = [SaveOnError(f"{folder}/a.ckpt", weights_only)], ""
    try:
        fitted(hsdp(**options, timeout=timedelta(seconds=9)), module, callbacks=callbacks)
    except Exception as error:
        text = str(error.__context__ if "The weights are not saved" in str(error) else error)
    seconds = time.monotonic() - started
    if rank == 1 and len(failing) == 1:
        time.sleep(20)
    return text, seconds, messages.texts


@full
@pytest.mark.parametrize(
    ("options", "weights_only"),
    [
        ({"method": "dense"}, False),
        ({"method": "topk"}, True),
        ({"method": "topk"}, False),
        ({"method": "topk", "save_distributed_checkpoint": False}, False),
    ],
    ids=str,
)
def test_a_save_on_an_error_of_one_rank_does_not_wait_for_the_others(options, weights_only, tmp_path):
    results = lightning_ranks(4, saves_on_an_error, str(tmp_path), [1], weights_only, options)
    for error, seconds, texts in results:
        assert "an error of the loop" in error
        assert seconds < SOON
        warned = any("a.ckpt' is not saved: training failed, and a save needs all ranks" in text for text in texts)
        assert warned == ("save_distributed_checkpoint" not in options), texts
    assert [*tmp_path.iterdir()] == []


@full
@pytest.mark.parametrize("method", ["dense", "topk"])
def test_weights_are_saved_on_an_error_of_all_ranks(method, tmp_path):
    ranks = [*range(4)]
    for error, *_, texts in lightning_ranks(4, saves_on_an_error, str(tmp_path), ranks, True, {"method": method}):
        assert error == "an error of the loop"
        assert texts == []
    assert (tmp_path / "a.ckpt" / "meta.pt").exists()


class SaveWithin(pl.Callback):
    """Saves a checkpoint before a backward pass, and keeps the whole agreed weights."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_before_backward(self, run: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if run.global_step == 2:
            run.save_checkpoint(self.path)
            agreed = run.strategy.exchanger.agreed_weights()
            named = module.named_parameters()
            self.agreed = {name: agreed[id(param)].full_tensor() for name, param in named if id(param) in agreed}


def saved_within_a_batch(rank: int, folder: str, options: dict[str, Any], distributed: bool) -> Any:
    path, messages = f"{folder}/a.ckpt", Messages()
    options = {"density": 0.2, "save_distributed_checkpoint": distributed, **options}
    save = SaveWithin(path)
    fitted(hsdp("topk", **options), callbacks=[save], max_steps=4)
    fitted(hsdp("topk", **options), path=path, max_steps=4)
    return save.agreed, messages.texts


@full
@pytest.mark.parametrize("options", [{"local_steps": 3}, {"overlap": "next_step"}], ids=str)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_save_within_a_batch_has_the_agreed_weights(distributed, options, tmp_path):
    results = lightning_ranks(4, saved_within_a_batch, str(tmp_path), options, distributed)
    for agreed, texts in results:
        assert len(agreed) == 6
        assert not any("has other weights than at the save" in text for text in texts), texts
    if distributed:
        dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / ("whole.ckpt" if distributed else "a.ckpt"), weights_only=False)["state_dict"]
    assert all(type(saved[name]) is Tensor and torch.equal(saved[name], x) for name, x in results[0][0].items())


def after_a_test_of_earlier_weights(rank: int, folder: str) -> Any:
    module, run = fitted(hsdp("topk", density=0.2), max_steps=2, limit_test_batches=1)
    run.save_checkpoint(f"{folder}/best.ckpt")
    run.test(module, loader(), ckpt_path=f"{folder}/best.ckpt", verbose=False)
    run.save_checkpoint(f"{folder}/later.ckpt")


@full
def test_weights_that_a_test_has_loaded_are_saved_without_the_residuals_of_the_fit(tmp_path):
    lightning_ranks(4, after_a_test_of_earlier_weights, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "best.ckpt.residuals", "later.ckpt"]


class Later(TorchCheckpointIO):
    """Keeps checkpoints, as if it wrote them after training."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, *_: Any, **__: Any) -> None:
        self.kept.append(checkpoint["state_dict"])


class SavesEachStep(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.weights.append({name: x.clone() for name, x in whole(module).items()})
        trainer.save_checkpoint("unused.ckpt", weights_only=True)


def written_later(rank: int) -> list[bool]:
    later, saves = Later(), SavesEachStep()
    strategy = hsdp("topk", density=0.2, replicas=4, save_distributed_checkpoint=False)
    fitted(strategy, max_steps=3, callbacks=[saves], plugins=[later])
    pairs = zip(later.kept, saves.weights, strict=rank == 0)
    return [all(torch.equal(kept[name], then[name]) for name in then) for kept, then in pairs]


@full
def test_a_writer_that_comes_later_gets_weights_that_no_exchange_changes():
    """With one shard in each replica, gathered weights are the shards themselves."""
    assert lightning_ranks(4, written_later)[0] == [True] * 3


def dense_after_sparse(rank: int, folder: str) -> list[str]:
    _, run = fitted(hsdp("topk", density=0.2), max_steps=2)
    run.save_checkpoint(f"{folder}/a.ckpt")
    messages = Messages()
    module, run = fitted(hsdp("dense"), max_steps=2, path=f"{folder}/a.ckpt")
    run.validate(module, loader(), ckpt_path=f"{folder}/a.ckpt", verbose=False)
    return messages.texts


@full
def test_dense_replicas_warn_of_residuals_that_they_do_not_load(tmp_path):
    for rank, texts in enumerate(lightning_ranks(4, dense_after_sparse, str(tmp_path))):
        assert len(texts) == (rank == 0), texts
        assert all("are lost, because replicas average gradients here" in text for text in texts)


def to_and_from_stock(rank: int, folder: str) -> Any:
    ours, stock = f"{folder}/ours.ckpt", f"{folder}/stock.ckpt"
    mine, run = fitted(hsdp(), max_steps=2)
    run.save_checkpoint(ours)
    other, run = fitted(ModelParallelStrategy(4, 1, process_group_backend="gloo"), max_steps=2, path=ours)
    unchanged = whole(other.net), whole(mine.net)
    run.save_checkpoint(stock)
    _, run = fitted(hsdp(), max_steps=2, path=stock)
    moments = [state["exp_avg"].full_tensor() for state in run.optimizers[0].state.values()]
    same = all(torch.equal(unchanged[0][n], unchanged[1][n]) for n in unchanged[0])
    return same, float(moments[0].abs().sum()), unchanged[1]


@full
def test_stock_loads_our_checkpoints_and_we_load_stocks_and_torch_exports_ours(tmp_path):
    results = lightning_ranks(4, to_and_from_stock, str(tmp_path))
    for equal, moments, _ in results:
        assert equal
        assert moments > 0
    weights = results[0][2]
    dcp_to_torch_save(tmp_path / "ours.ckpt", tmp_path / "weights.pt")
    exported = torch.load(tmp_path / "weights.pt")["state_dict"]
    assert {*exported} == {f"net.{name}" for name in weights}
    assert all(torch.equal(exported[f"net.{name}"], x) for name, x in weights.items())


def to_and_from_ddp(rank: int, folder: str) -> Any:
    first, second = f"{folder}/ddp.ckpt", f"{folder}/hsdp.ckpt"
    ddp = SparseDDPStrategy("topk", density=0.2, process_group_backend="gloo")
    before, run = fitted(ddp, max_steps=2)
    run.save_checkpoint(first)
    after, run = fitted(hsdp("topk", density=0.2, save_distributed_checkpoint=False), max_steps=2, path=first)
    same = [torch.equal(a, b) for a, b in zip(whole(before.net).values(), whole(after.net).values(), strict=True)]
    run.save_checkpoint(second)
    back, _ = fitted(SparseDDPStrategy("topk", density=0.2, process_group_backend="gloo"), max_steps=2, path=second)
    return same + [torch.equal(a, b) for a, b in zip(whole(back.net).values(), whole(after.net).values(), strict=True)]


@full
def test_weights_of_ddp_go_on_sharded_and_back(tmp_path):
    for same in lightning_ranks(4, to_and_from_ddp, str(tmp_path)):
        assert all(same)


def states_of_replicas(rank: int, folder: str) -> Any:
    """Save and load; return the moments before and after, which differ between replicas."""
    path = f"{folder}/a.ckpt"
    _, run = fitted(hsdp("topk", density=0.2), max_steps=3)
    before = [x.to_local().clone() for state in run.optimizers[0].state.values() for x in (state["exp_avg"],)]
    run.save_checkpoint(path)
    _, run = fitted(hsdp("topk", density=0.2), max_steps=3, path=path)
    after = [x.to_local() for state in run.optimizers[0].state.values() for x in (state["exp_avg"],)]
    return all(map(torch.equal, before, after)), torch.cat([x.flatten() for x in before])


@full
def test_the_optimizer_states_of_replicas_do_not_mix(tmp_path):
    results = lightning_ranks(4, states_of_replicas, str(tmp_path))
    assert all(equal for equal, _ in results)
    assert not torch.equal(results[0][1], results[2][1])  # the same shard in both replicas


def with_validation_and_test(rank: int) -> Any:
    module = Module()
    run = trainer("topk_hsdp", 4, max_epochs=1, limit_train_batches=4)
    run.fit(module, loader(), loader())
    after_fit = float(run.callback_metrics["loss"])
    loss = run.validate(module, loader(), verbose=False)[0]["loss"]
    tested = run.test(module, loader(), verbose=False)[0]["loss"]
    return module.seen, after_fit, loss, tested, run.strategy.device_mesh.shape


@full
def test_by_the_string_fit_validate_and_test():
    results = lightning_ranks(4, with_validation_and_test)
    seen = [index for each, *_ in results for index in each]
    assert len(seen) == len({*seen}) == 16, "each rank has another part of the data"
    for _, fit, validated, tested, shape in results:
        assert fit == pytest.approx(validated) == pytest.approx(tested)
        assert tuple(shape) == (1, 4, 1)  # one node, one replica


class Anew(Module):
    """Makes its model anew in each run."""

    def configure_model(self) -> None:
        self.net = None
        super().configure_model()


def run_again(rank: int) -> Any:
    found = []
    for kind in (Module, Anew):
        module, messages = kind(), Messages()
        run = trainer(hsdp("dense"), 4, max_steps=2)
        run.fit(module, loader())
        after_fit = whole(module.net)
        run.test(kind(), loader(), verbose=False)
        texts = [*messages.texts]
        run.test(module, loader(), verbose=False)
        same = all(torch.equal(x, after_fit[name]) for name, x in whole(module.net).items())
        found.append((same, texts, messages.texts))
    return found


@full
def test_a_model_that_configure_model_makes_anew_in_a_later_run_is_a_warning():
    for rank, (kept, lost) in enumerate(lightning_ranks(4, run_again)):
        assert kept == (True, [], [])
        same, early, texts = lost
        assert (same, early, len(texts)) == (False, [], int(rank == 0))
        assert all("configure_model has replaced 'net.0.weight' of the run before" in text for text in texts)


class Predicting(Module):
    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self.net, 100, 0, 1)


def evaluated_first(rank: int, replicas: int, call: str) -> tuple[str, bool]:
    """Evaluate before a fit as over NCCL, for which Lightning takes inference mode."""
    module, run = Predicting(), trainer(hsdp("topk", replicas=replicas), 4, max_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytorch_lightning.loops.utilities._distributed_is_initialized", lambda: False)
        error = attempt(lambda: (getattr(run, call)(module, loader()), run.fit(module, loader())))
    return error, run.global_step


@full
@pytest.mark.parametrize(
    ("replicas", "call"), [(2, "validate"), *in_full((4, "validate"), (2, "test"), (2, "predict"))]
)
def test_an_evaluation_before_a_fit_takes_no_inference_mode_over_nccl(replicas, call):
    assert lightning_ranks(4, evaluated_first, replicas, call) == [("", 2)] * 4


class Slow(TorchCheckpointIO):
    """Writes late, or fails."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(1)
        if self.fails:
            raise OSError(28, "No space left on device")
        super().save_checkpoint(*args, **kwargs)


def saved_asynchronously(rank: int, folder: str, fails: bool) -> tuple[str, bool]:
    path = f"{folder}/a.ckpt"
    options = {"plugins": [AsyncCheckpointIO(Slow(fails))], "callbacks": [Save(path)]}
    error = attempt(lambda: fitted(hsdp("topk", save_distributed_checkpoint=False), **options))
    return error, Path(path).exists()


@full
@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_waits_for_asynchronous_saves_of_one_file_and_raises_their_errors(fails, tmp_path):
    """Rank 0 writes the file."""
    (error, exists), *_ = lightning_ranks(4, saved_asynchronously, str(tmp_path), fails)
    assert ("No space left on device" in error) == fails, error
    assert exists != fails


def without_state(rank: int, folder: str, distributed: bool) -> str:
    path, strategy = f"{folder}/a.ckpt", {"method": "topk", "save_distributed_checkpoint": distributed}
    _, run = fitted(hsdp(**strategy), Module(torch.optim.SGD), max_steps=1)
    run.save_checkpoint(path)
    return attempt(lambda: fitted(hsdp(**strategy), Module(torch.optim.SGD), path=path))


@full
@pytest.mark.parametrize("distributed", [False, True])
def test_a_resume_from_one_file_without_the_state_of_an_optimizer_is_an_error_that_names_the_remedy(
    distributed, tmp_path
):
    for error in lightning_ranks(4, without_state, str(tmp_path), distributed):
        assert ("a.ckpt' has no state of an optimizer" in error) != distributed, error
        assert ("save with save_distributed_checkpoint=True" in error) != distributed, error


def observed(rank: int, folder: str) -> Any:
    callbacks = [CommunicationMonitor(), ContractionRatio(), GradientDistribution()]
    logger = pl.loggers.TensorBoardLogger(folder)
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": callbacks}
    _, run = fitted(hsdp("topk", density=0.2, density_warmup=()), **options)
    events = EventAccumulator(logger.log_dir).Reload()
    return (
        [*events.Tags()["scalars"], *events.Tags()["histograms"]],
        run.strategy.reducer.layout.numel,
        run.strategy.reducer.comm.sent_bytes,
    )


@full
def test_callbacks_show_the_first_ranks_shards(tmp_path):
    names, numel, sent = lightning_ranks(4, observed, str(tmp_path))[0]
    assert numel == 3 * 8 + 3 + 3 * 6 + 3 + 5 + 1  # its rows of the three layers
    assert any("contraction" in name for name in names), names
    assert sent > 0


def observes_nothing(rank: int) -> Any:
    return attempt(lambda: fitted(hsdp("dense"), callbacks=[ContractionRatio()], log_every_n_steps=1))


@later
def test_all_ranks_say_that_dense_averages_have_no_reducer():
    for error in lightning_ranks(4, observes_nothing):
        assert "compresses nothing and has no reducer" in error, error


def fails(rank: int, broken: int) -> Any:
    module = Module()
    if rank == broken:
        module.hooks = {2: lambda loss: loss * float("nan")}
    return attempt(lambda: fitted(hsdp("topk", density=0.2), module))


@full
@pytest.mark.reliability(
    "topk_hsdp: NaN in one replica", checked="an error that names the rank, on all ranks", methods=["topk"]
)
def test_a_nan_in_one_replica_ends_all_ranks():
    for error in lightning_ranks(4, fails, 3):
        assert error.startswith((NonFiniteGradient.__name__, RankFailure.__name__, "RuntimeError")), error
        assert "not finite on rank" in error, error


def skips(rank: int) -> Any:
    module = Module()
    if rank == 3:
        module.hooks = {2: lambda loss: loss * float("nan")}
    fitted(hsdp("topk", density=0.2, on_nonfinite="skip"), module)
    return whole(module.net)


@full
@pytest.mark.reliability(
    "topk_hsdp: NaN in one replica, on_nonfinite='skip'", checked="finite weights, equal on all ranks", methods=["topk"]
)
def test_a_replica_with_a_nan_skips_its_step():
    results = lightning_ranks(4, skips)
    for weights in results:
        assert all(x.isfinite().all() for x in weights.values())
        assert all(torch.equal(x, results[0][name]) for name, x in weights.items())


def beside_another(rank: int, event: str) -> tuple[str, float]:
    """Train while rank 3 has another seed, or an event in its third step; return the error, and the seconds until it.

    The process of rank 3 stays for 20 s if it hangs or fails. Then no connection ends.
    """
    module, started = Module(), time.monotonic()
    if rank == 3 and event in EVENTS:
        module.hooks = {2: EVENTS[event]}
    seed = int((rank, event) == (3, "another seed"))
    options = {"timeout": timedelta(seconds=9)} if event in ("hangs", "fails") else {}
    error = attempt(lambda: fitted(hsdp("topk", density=0.2, seed=seed, **options), module))
    seconds = time.monotonic() - started
    if (rank, event) == (3, "fails"):
        time.sleep(20)
    return error, seconds


@full
@pytest.mark.reliability(
    "topk_hsdp: one rank has other settings", checked="one error on all ranks, before training", methods=["topk"]
)
def test_other_settings_on_one_rank_are_an_error_on_all():
    for error, _ in lightning_ranks(4, beside_another, "another seed"):
        assert error.startswith("RankFailure: Ranks differ in seed: rank 0 has 0, rank 3 has 1"), error


@full
@pytest.mark.reliability(
    "topk_hsdp: one rank is killed in a step", checked="cause on the ranks of both replicas", methods=["topk"]
)
def test_all_ranks_end_with_the_cause_if_one_is_killed():
    """Rank 2 waits in a collective of FSDP2, rank 1 in the exchange, and rank 0 for rank 2."""
    *others, killed = lightning_ranks(4, beside_another, "killed")
    assert killed is None
    for error, seconds in others:
        assert "No answer from rank 3" in error, error
        assert seconds < SOON


@full
@pytest.mark.reliability(
    "topk_hsdp: one rank hangs, or fails and its process stays",
    checked="cause on the ranks of both replicas after the timeout, although FSDP2 waits for the rank",
    methods=["topk"],
)
@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ("hangs", "Still running, but not taking part: rank 3"),
        ("fails", "Rank 3 failed at step 2: ValueError: an error of the loop"),
    ],
)
def test_the_timeout_holds_in_a_collective_of_fsdp2(event, cause):
    for error, seconds in lightning_ranks(4, beside_another, event)[:3]:
        assert cause in error, error
        assert seconds < SOON


def told(rank: int) -> Any:
    callbacks = [Told("on_train_batch_end", 2)] if rank == 1 else []
    run = trainer(hsdp("topk", density=0.2), 4, max_steps=40, limit_val_batches=0, callbacks=callbacks)
    try:
        run.fit(Module(), loader())
    except SystemExit as error:
        return run.global_step, str(error)
    return run.global_step, ""


@full
@pytest.mark.reliability(
    "topk_hsdp: SIGTERM for one rank", checked="all ranks end after the same batch, and name it", methods=["topk"]
)
def test_all_ranks_end_after_the_same_batch_if_one_is_told_to():
    results = lightning_ranks(4, told)
    assert len({step for step, _ in results}) == 1
    assert results[0][0] < 12
    assert "Rank 1 was told to end" in results[0][1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": 0}, r"replicas=0\): give 'auto' or a positive integer"),
        ({"tensor_parallel_size": "auto"}, r"tensor_parallel_size='auto'\): give a positive integer"),
        ({"overlap": "backward"}, "exchanged after backward. Leave overlap out"),
        ({"hierarchical": True}, "averages gradients within a replica already"),
        ({"exchange": "gradient"}, "replicas exchange updates"),
        ({"find_unused_parameters": True}, "an option of DistributedDataParallel"),
        ({"method": "signsgd"}, "makes no mean"),
        ({"method": "dense", "clip_norm": 1.0}, r"clip_norm=1.0\): replicas average .* set gradient_clip_val of the"),
        ({"method": "dense", "on_nonfinite": "skip"}, r"on_nonfinite='skip'\): replicas average gradients in backward"),
        ({"method": "dense", "broadcast_buffers": True}, "Leave broadcast_buffers out"),
        ({"levels": 7}, "has no option 'levels'"),
    ],
)
def test_options_that_it_does_not_have(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        SparseHSDPStrategy(**options)


def refused(rank: int, strategy: dict[str, Any], lightning: dict[str, Any]) -> Any:
    return attempt(lambda: fitted(hsdp("topk", **strategy), **lightning))


@pytest.mark.parametrize(
    ("strategy", "lightning", "text"),
    [
        ({"replicas": 3}, {}, "replicas=3, tensor_parallel_size=1): their product does not divide the 4 ranks"),
        ({}, {"precision": "16-true"}, "with precision='16-true': choose 32-true or bf16-mixed or bf16-true"),
    ],
)
def test_runs_that_it_refuses(strategy, lightning, text):
    for error in lightning_ranks(4, refused, strategy, lightning):
        assert text in error


class Whole(Module):
    """Forgets to shard."""

    def configure_model(self) -> None:
        self.net = self.net or net()


@full
@pytest.mark.parametrize("method", ["topk", "dense"])
def test_a_model_that_is_not_sharded_is_an_error(method):
    for error in lightning_ranks(4, lambda rank: attempt(lambda: fitted(hsdp(method), Whole()))):
        assert "whose 'net.0.weight' is not sharded over the mesh dimension 'data_parallel', the ranks [" in error
        assert "In configure_model, call fully_shard(" in error


def in_bf16(rank: int, precision: str) -> Any:
    module, _ = fitted(hsdp("topk", density=0.2), precision=precision)
    return [x.dtype for x in whole(module.net).values()], [float(x.float().sum()) for x in whole(module.net).values()]


@full
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precisions(precision):
    results = lightning_ranks(4, in_bf16, precision)
    for dtypes, sums in results:
        assert {*dtypes} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
        assert sums == results[0][1]


def of_the_other_namespace(rank: int) -> Any:
    import lightning.pytorch as other

    class Twin(other.LightningModule):
        def configure_model(self) -> None:
            self.net = shard(net(), self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, self.trainer.global_step, self.trainer.global_rank, self.trainer.world_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = False
    run = other.Trainer(strategy=hsdp(), devices=4, max_steps=STEPS, **quiet)
    run.fit(twin := Twin(), loader())
    module, _ = fitted(hsdp())
    ours, expected = whole(twin.net), whole(module.net)
    return all(torch.equal(ours[name], expected[name]) for name in expected), type(run.strategy).__module__


@full
def test_the_other_namespace():
    pytest.importorskip("lightning.pytorch")
    for equal, module in lightning_ranks(4, of_the_other_namespace):
        assert equal
        assert module.endswith("lightning_pytorch")
