"""Every file in configs/ can be loaded and trains two steps on two ranks."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lightning_sparse
from lightning_sparse import SparseDDPStrategy, cli
from tests.processes import run_ranks
from tests.support.cifar10 import write_cifar10
from tests.support.tiers import in_full

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(f"{file.parent.name}/{file.stem}" for file in CONFIGS.glob("*/*.yaml"))
EXPERIMENTS = ("cifar10_resnet20", "cifar10_vgg16", "digits", "gpt", "lstm")
METHODS = ("dense", "gaussiank", "randk", "topk")
SUBCOMMANDS = [("digits", "validate"), ("gpt", "validate"), ("cifar10_resnet20", "test")]
# Use little data and small batches, because only the files are tested.
SMALL = {
    "digits": [],
    "gpt": ["--data.max_bytes=100000"],
    "lstm": ["--data.max_bytes=100000"],
    "cifar10": ["--data.batch_size=2"],
}
NO = ["enable_progress_bar", "enable_model_summary", "enable_checkpointing"]


def command(name: str, folder: Path) -> list[str]:
    experiment = name.partition("/")[0]
    args = [f"--config={CONFIGS / file}.yaml" for file in ("base", experiment, name)]
    args += SMALL[experiment.partition("_")[0]]
    if name.startswith("cifar10"):
        args.append(f"--data.path={folder / ('python' if 'resnet' in name else 'binary')}")
    return [*args, *(f"--trainer.{option}=false" for option in NO), f"--trainer.logger.init_args.save_dir={folder}"]


def run_all(rank: int, experiment: str, methods: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run an experiment with some methods in one process per rank, as if started by torchrun; return the results."""
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="test")
    # Lightning 2.6 calls `instantiate_classes`, which jsonargparse 4.53 has renamed.
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    sys.argv = ["lightning_sparse"]
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning's advice to validate on one device.
    warnings.filterwarnings("ignore", ".*Using `DistributedSampler` with the dataloaders.*")
    finished: list[cli.CLI] = []

    class Kept(cli.CLI):
        def after_instantiate_classes(self) -> None:
            finished.append(self)

    cli.CLI = Kept  # type: ignore[misc]
    results: dict[str, Any] = {}
    commands = {
        name: [
            "fit",
            *command(name, folder),
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=2",
            "--trainer.log_every_n_steps=1",
        ]
        for name in (f"{experiment}/{method}" for method in methods)
    }
    for subcommand in (subcommand for of, subcommand in SUBCOMMANDS if of == experiment):
        commands[subcommand] = [subcommand, *command(f"{experiment}/topk", folder)]
    for name, args in commands.items():
        try:
            cli.main([*args, "--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0"])
            trainer = finished[-1].trainer
            options = getattr(trainer.strategy, "_options", None)
            results[name] = {
                "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
                "steps": trainer.global_step,
                "ranks": trainer.world_size,
                "strategy": type(trainer.strategy).__name__,
                "method": repr(options and options.method),
            }
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the other rank may have got further: they are out of step
    return results


def test_every_experiment_comes_with_every_method():
    expected = [f"{experiment}/{method}" for experiment in EXPERIMENTS for method in METHODS]
    assert expected == FILES
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {"base", *EXPERIMENTS}


COMPRESSORS = {"dense": "Identity", "topk": "TopK", "randk": "RandK", "gaussiank": "GaussianK"}


@pytest.mark.parametrize(
    ("experiment", "methods"), [("digits", ["topk"]), *in_full(*((name, METHODS) for name in EXPERIMENTS))]
)
def test_every_file_trains_two_steps(experiment, methods, tmp_path):
    write_cifar10(tmp_path, "python")
    write_cifar10(tmp_path, "binary")
    results, others = run_ranks(2, run_all, experiment, methods, tmp_path, patience=600, timeout=120)
    for name, result in results.items():
        assert isinstance(result, dict), f"{name}: {result}"
        assert result["method"] == others[name]["method"]
    for method in methods:
        result = results[f"{experiment}/{method}"]
        metrics = result["metrics"]
        assert result["steps"] == 2
        assert result["ranks"] == 2
        assert 0 < metrics["train/loss"] < 10
        assert 0 <= metrics["val/accuracy"] <= 1
        if experiment in ("gpt", "lstm"):
            assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] * 1.442695)
            if method == "randk":  # the one gives its parts, the other its name
                assert result["method"] == repr(lightning_sparse.method("randk", density=0.01))
        assert result["strategy"] == SparseDDPStrategy.__name__
        assert f"compressor={COMPRESSORS[method]}(" in result["method"]
    if experiment == "gpt":
        assert results["validate"]["metrics"]["val/bits_per_byte"] == pytest.approx(8, abs=0.5)  # it knows nothing yet
    if experiment == "digits":
        assert 0 <= results["validate"]["metrics"]["val/accuracy"] <= 1
    if experiment == "cifar10_resnet20":
        assert 0 <= results["test"]["metrics"]["test/accuracy"] <= 1


def test_own_parts_are_those_of_a_file():
    assert "class_path: RandK" in (CONFIGS / "lstm/randk.yaml").read_text()
