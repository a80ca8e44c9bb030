"""Every file in configs/ is loaded and trains two steps on two ranks."""

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse import SparseDDPStrategy, cli
from tests.processes import run_ranks
from tests.test_examples import write_cifar10

pytestmark = pytest.mark.xdist_group("configs")  # `results` trains with all files: once, not in each process
CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(f"{file.parent.name}/{file.stem}" for file in CONFIGS.glob("*/*.yaml"))
EXPERIMENTS = ("cifar10_resnet20", "cifar10_vgg16", "digits", "gpt", "lstm")
METHODS = ("dense", "gaussiank", "randk", "topk")
# Less data and smaller batches: what is in question is that the files fit the code.
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


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    """Run everything in one process per rank, as torchrun would have started it; return what came out."""
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
        for name in FILES
    }
    commands["validate"] = ["validate", *command("gpt/topk", folder)]
    commands["test"] = ["test", *command("cifar10_resnet20/topk", folder)]
    for name, args in commands.items():
        try:
            cli.main([*args, "--trainer.limit_val_batches=1", "--trainer.num_sanity_val_steps=0"])
            trainer = finished[-1].trainer
            results[name] = {
                "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
                "steps": trainer.global_step,
                "ranks": trainer.world_size,
                "strategy": type(trainer.strategy).__name__,
                "method": repr(getattr(trainer.strategy, "_method", None)),
            }
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the other rank may have got further: they are out of step
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("configs")
    write_cifar10(folder, "python")
    write_cifar10(folder, "binary")
    mine, others = run_ranks(2, run_all, folder, patience=600, timeout=120)
    for name, result in mine.items():
        assert isinstance(result, dict), f"{name}: {result}"
        assert result["method"] == others[name]["method"]
    return mine


def test_every_experiment_comes_with_every_method():
    expected = [f"{experiment}/{method}" for experiment in EXPERIMENTS for method in METHODS]
    assert expected == FILES
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {"base", *EXPERIMENTS}


@pytest.mark.parametrize("name", FILES)
def test_two_steps(name, results):
    result = results[name]
    assert result["steps"] == 2
    assert result["ranks"] == 2
    assert 0 < result["metrics"]["train/loss"] < 10
    assert 0 <= result["metrics"]["val/accuracy"] <= 1
    if name.startswith(("gpt", "lstm")):
        assert result["metrics"]["val/bits_per_byte"] == pytest.approx(result["metrics"]["val/loss"] * 1.442695)
    compressors = {"dense": "Identity", "topk": "TopK", "randk": "RandK", "gaussiank": "GaussianK"}
    assert result["strategy"] == SparseDDPStrategy.__name__
    assert f"compressor={compressors[name.rpartition('/')[2]]}(" in result["method"]


def test_own_parts_are_those_of_the_name(results):
    assert "class_path: RandK" in (CONFIGS / "lstm/randk.yaml").read_text()
    assert results["lstm/randk"]["method"] == results["gpt/randk"]["method"]


def test_other_subcommands(results):
    assert results["validate"]["metrics"]["val/bits_per_byte"] == pytest.approx(8, abs=0.5)  # it knows nothing yet
    assert 0 <= results["test"]["metrics"]["test/accuracy"] <= 1
