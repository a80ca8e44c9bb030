"""The strategy under both Lightning namespaces, with every launcher."""

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from packaging.version import Version

import lightning_sparse
from lightning_sparse import METHODS, Method, SparseDDPStrategy, method
from lightning_sparse._compat import ddp_options
from lightning_sparse.compressors import TopK
from lightning_sparse.methods import UPDATE_DENSITY, WARMUP_FACTORS
from lightning_sparse.strategies.lightning_pytorch import SparseDDPStrategy as ForLightning
from lightning_sparse.strategies.pytorch_lightning import SparseDDPStrategy as ForPytorchLightning
from tests.processes import run_program, run_ranks
from tests.support.tiers import full

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@full
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("namespace", "strategy", "second_fit"),
    [
        ("pytorch_lightning", "gaussiank_ddp", "ok"),
        (
            *("lightning.pytorch", "randk_ddp_spawn"),
            "twice on the same Trainer instance using a spawn-based strategy",
        ),
        ("pytorch_lightning", "torchrun dense_ddp", "ok"),
        (
            *("lightning.pytorch", "topk_ddp_notebook_find_unused_parameters_true"),  # which forks
            "twice on the same Trainer instance",
        ),
    ],
)
def test_launchers(namespace, strategy, second_fit, optimizer, tmp_path):
    script = [str(Path(__file__).with_name("fit.py")), namespace, strategy.split()[-1], str(tmp_path), optimizer]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"] if " " in strategy else []
    done = run_program([sys.executable, *launcher, *script], ENVIRONMENT, 180)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    sent = second.pop("sent")
    assert first.pop("sent") == sent or optimizer == "AdamW"  # rank 0 has broadcast its weights itself, without DDP
    assert first == second
    assert first["steps"] == 8
    name = strategy.split()[-1].split("_")[0]
    updates = optimizer == "AdamW" and name != "dense"
    assert first["exchanged"] == ("update" if updates else "gradient")
    assert first["density"] == (WARMUP_FACTORS[0] * UPDATE_DENSITY if updates else method(name).density)
    # 32·64 + 64 + 64·2 + 2 parameters; two ranks send 2(P − 1)/P of 4 bytes each, or less.
    dense = 8 * 4 * 2242
    share = 10 if updates else 50
    assert (dense <= sent < 1.1 * dense) if name == "dense" else sent < dense / share
    assert first["module"].endswith(namespace.replace(".", "_"))
    assert second_fit in json.loads((tmp_path / "done0.json").read_text())


@full
@pytest.mark.parametrize(
    ("imports", "chosen"),
    [
        ("import lightning.pytorch, lightning_sparse", "lightning.pytorch"),
        ("import lightning_sparse, lightning.pytorch", "pytorch_lightning"),
        ("import pytorch_lightning, lightning.pytorch, lightning_sparse", "pytorch_lightning"),
    ],
)
def test_import_orders(imports, chosen):
    check = f"""
{imports}
import importlib
for namespace in ("pytorch_lightning", "lightning.pytorch"):
    registry = importlib.import_module(namespace + ".strategies").StrategyRegistry
    assert "gaussiank_ddp" in registry and "ddp" in registry, namespace
    importlib.import_module(namespace).Trainer(strategy="topk_ddp", devices=2, accelerator="cpu", logger=False)
base = importlib.import_module("{chosen}.strategies").DDPStrategy
assert issubclass(lightning_sparse.SparseDDPStrategy, base)
"""
    subprocess.run([sys.executable, "-c", check], env=ENVIRONMENT, check=True, timeout=400, capture_output=True)


@pytest.mark.parametrize("namespace", [pytorch_lightning, lightning.pytorch])
def test_names(namespace):
    registry = namespace.strategies.StrategyRegistry
    for name in METHODS:
        for start in ("", "_spawn", "_fork", "_notebook"):
            for end in ("", "_find_unused_parameters_true", "_find_unused_parameters_false"):
                assert f"{name}_ddp{start}{end}" in registry
        for alias in (name, f"ddp_{name}"):
            strategy = namespace.Trainer(strategy=alias, accelerator="cpu", logger=False).strategy
            assert isinstance(strategy, namespace.strategies.DDPStrategy)
            assert strategy._options.method == method(name)
    strategy = registry.get("topk_ddp_fork_find_unused_parameters_true")
    assert isinstance(strategy, namespace.strategies.DDPStrategy)
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs["find_unused_parameters"]
    assert registry.get("topk_ddp_find_unused_parameters_false")._ddp_kwargs["find_unused_parameters"] is False


class Mine(SparseDDPStrategy):
    """A user's own class, for one of Lightning's names."""


@pytest.mark.parametrize("made_for", [ForPytorchLightning, ForLightning])
@pytest.mark.parametrize("namespace", [pytorch_lightning, lightning.pytorch])
def test_a_strategy_goes_with_the_trainers_of_both_of_lightnings_names(made_for, namespace):
    def fit(rank: int) -> tuple[list[tuple[int, float]], str, dict[str, Any]]:
        strategy = made_for("topk", density=0.1, density_warmup=[0.5], find_unused_parameters=True)
        seen = fit_alone(rank, strategy, max_epochs=2, namespace=namespace)
        assert isinstance(strategy, namespace.strategies.DDPStrategy)
        assert isinstance(strategy, namespace.strategies.DDPStrategy.__mro__[1])
        return seen, type(strategy).__mro__[-3].__module__, strategy._ddp_kwargs

    ((seen, base, options),) = run_ranks(1, fit)
    assert seen == [(1, 0.5), (2, 0.5), (3, 0.1), (4, 0.1)]
    assert base.startswith(f"{namespace.__name__}.")
    assert options["find_unused_parameters"] is True


def test_a_class_of_ones_own_is_for_one_of_lightnings_names():
    strategy = Mine("topk")
    (other,) = {pytorch_lightning, lightning.pytorch} - {__import__(Mine._namespace, fromlist=["Trainer"])}
    with pytest.raises(
        TypeError, match=r"Mine derives from the strategy for \S+, and a Trainer or Fabric of \S+ got it\."
    ):
        other.Trainer(strategy=strategy, accelerator="cpu", logger=False)


def test_registering_twice_is_harmless():
    for cls, namespace in ((ForPytorchLightning, pytorch_lightning), (ForLightning, lightning.pytorch)):
        before = set(namespace.strategies.StrategyRegistry)
        cls.register_strategies(namespace.strategies.StrategyRegistry)
        assert set(namespace.strategies.StrategyRegistry) == before


def test_each_copy_of_a_strategy_has_checkpoints_for_itself():
    strategy = SparseDDPStrategy("topk")
    for copied in (copy.copy(strategy), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied._checkpoints.strategy is copied
        assert copied._checkpoints is not strategy._checkpoints
    assert strategy._checkpoints.strategy is strategy


def test_strategy_survives_pickling_before_fit():
    strategy = pickle.loads(pickle.dumps(SparseDDPStrategy("topk", density=0.1, density_warmup=[0.5])))
    assert strategy._options.method == method("topk", density=0.1)


def test_teardown_before_setup():
    pytorch_lightning.Trainer(strategy="topk_ddp", devices=1, accelerator="cpu", logger=False).strategy.teardown()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "topkk"}, ValueError, "'topkk' is not known; choose from dense"),
        ({"density": 0}, ValueError, r"TopK\(density=0\)"),
        ({"method": Method(TopK()), "density": 0.1}, ValueError, "density=0.1 beside method=Method"),
        ({"method": 7}, TypeError, "method=7: give a method's name, or a Method"),
        ({"granularity": "row"}, ValueError, "granularity='row' is not known; choose from layer, bucket, model"),
        ({"bucket_cap_mb": -1}, ValueError, "bucket_cap_mb=-1 must be a positive number"),
        ({"density_warmup": [0.25, 7]}, ValueError, r"density_warmup\(density=7\)"),
        (
            {"density_warmup_steps": 10},
            ValueError,
            "density_warmup_steps=10 is the number of steps for each density of density_warmup",
        ),
        ({"timeout": 5}, ValueError, r"timeout=5 must be a datetime.timedelta above 0, such as timedelta\(minutes=5\)"),
        ({"ddp_comm_hook": print}, ValueError, r"ddp_comm_hook=...\): DDP takes one communication hook"),
        ({"process_group": print}, ValueError, r"process_group=...\): a strategy trains on all ranks"),
        ({"device_mesh": print}, ValueError, r"device_mesh=...\): a strategy trains on all ranks"),
        ({"model_averaging_period": 2}, ValueError, "model_averaging_period"),
        ({"skip_all_reduce_unused_params": True}, ValueError, "it bypasses the exchange of gradients"),
        ({"exchange": "updates"}, ValueError, r"choose from auto, gradient, update\. Did you mean 'update'\?$"),
        ({"granularity": "layers"}, ValueError, r"Did you mean 'layer'\?$"),
        (
            {"method": "int4", "overlap": "next_step", "exchange": "update"},
            ValueError,
            "overlap='next_step' with 'int4': a rank cannot",
        ),
        (
            {"method": "gtopk", "hierarchical": True, "overlap": "next_step"},
            ValueError,
            "overlap='next_step' with 'gtopk': a rank",
        ),
        ({"mixed_precision": object()}, ValueError, "out and set precision='bf16-mixed' of the Trainer"),
        (
            {"findunused_parameters": True},
            TypeError,
            r"no option 'findunused_parameters', nor has method 'topk', which has .*\. Did you mean 'find_unused",
        ),
        ({"warmup": [0.5]}, TypeError, r"no option 'warmup', nor .*\. Did you mean 'density_warmup'\?$"),
        ({"overlap": False}, ValueError, r"overlap=False is not known; choose from none, backward, next_step\.$"),
        ({"overlap": "next"}, ValueError, r"Did you mean 'next_step'\?$"),
        ({"densty": 0.01}, TypeError, r"no option 'densty', nor has method 'topk'.*\. Did you mean 'density'"),
        ({"k": 100}, TypeError, r"'k', nor has method 'topk', which has density, index_format, value_format\.$"),
        ({"method": "dense", "k": 100}, TypeError, r"has no option 'k', nor has method 'dense'\.$"),
        ({"method": "qsgd", "levls": 7}, TypeError, r"which has levels, bucket\. Did you mean 'levels'"),
        ({"method": "qsgd", "rank": 2}, TypeError, r"which has levels, bucket\. 'rank' is an option of powersgd\.$"),
        (
            {"method": "powersgd", "levels": 3},
            TypeError,
            r"which has rank\. 'levels' is an option of qsgd\.$",
        ),
        (
            {"outer_momentum": 0.9},
            TypeError,
            r"'outer_momentum' is an option of memsgd, local_sgd, diloco and others; any method that makes a mean "
            r"takes it as Method\(\.\.\., update_rule=UpdateRule\(outer_momentum=\.\.\., local_steps=\.\.\.\)\)\.$",
        ),
        ({"method": "qsgd", "momentum": "keep"}, TypeError, r"update_rule=UpdateRule\(momentum=\.\.\.\)\)\.$"),
        ({"method": "onebit", "second": 2}, ValueError, "Leave second out: it is for compressors with a density"),
        ({"method": "powersgd", "rank": 0}, ValueError, r"LowRank\(rank=0\): rank must be"),
        (
            {"method": Method(TopK()), "value_format": "int8"},
            TypeError,
            "options of a Method are set in its parts",
        ),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        SparseDDPStrategy(**options)


def test_options_may_be_none_where_the_docs_say_none_and_refused_ones_may_be_empty():
    nothing = {"ddp_comm_hook": None, "mixed_precision": None, "skip_all_reduce_unused_params": False}
    strategy = SparseDDPStrategy(
        "topk", density_warmup=None, density_warmup_steps=None, clip_norm=None, local_steps=None, **nothing
    )
    assert strategy._options.reducer.density_warmup is None
    assert not {*nothing} & {*ddp_options(strategy)}


def test_unknown_strategy_name_is_lightnings_own_error():
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='topkk_ddp'`") as caught:
        pytorch_lightning.Trainer(strategy="topkk_ddp", accelerator="cpu", logger=False)
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert str(caught.value).replace("topkk", "topk") in " ".join(page.read_text().split())  # after a forgotten import


def test_mps_is_refused(monkeypatch):
    # Lightning rejects the whole family by a part of the strategy's name.
    monkeypatch.setattr(pytorch_lightning.accelerators.MPSAccelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"strategies from the DDP family are not supported on the MPS accelerator"):
        pytorch_lightning.Trainer(strategy="topk_ddp", accelerator="mps", devices=1, logger=False)


def test_reducer_exists_only_from_the_start_of_fit():
    with pytest.raises(RuntimeError, match="only from the start of fit"):
        _ = SparseDDPStrategy().reducer


class TinyParts:
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(100, 10)
        self.lr = 1e-3
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def on_train_batch_end(self, *_):
        reducer = self.trainer.strategy.reducer
        self.seen.append((reducer.step, reducer.density))


class Tiny(TinyParts, pytorch_lightning.LightningModule):
    pass


class TinyOfLightning(TinyParts, lightning.pytorch.LightningModule):
    pass


def fit_alone(
    rank: int, strategy: SparseDDPStrategy, namespace: Any = pytorch_lightning, **options
) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 100)), batch_size=4)
    net = Tiny() if namespace is pytorch_lightning else TinyOfLightning()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on a toy run
        trainer = namespace.Trainer(
            strategy=strategy,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"devices": 1, **options},
        )
        trainer.fit(net, data)
    return net.seen


@pytest.mark.parametrize(("start_method", "devices"), [("fork", 2), ("fork", 1), ("spawn", 2), ("popen", 2)])
def test_a_fit_that_cannot_start_its_ranks_after_another_fit_says_so(start_method, devices):
    """Stock `ddp` hangs, because forked and spawned ranks mistake the earlier fit's process group for their own."""

    def twice(rank: int) -> tuple[int, str]:
        seen = fit_alone(rank, SparseDDPStrategy("topk"), max_epochs=1)
        try:
            fit_alone(rank, SparseDDPStrategy("topk", start_method=start_method), max_epochs=1, devices=devices)
        except RuntimeError as error:
            return len(seen), str(error)
        return len(seen), ""

    ((steps, error),) = run_ranks(1, twice)
    assert steps == 2
    assert "this process is in a process group of 1 already" in error
    assert "run each in a process of its own" in error


def test_warm_up_by_epochs():
    strategy = SparseDDPStrategy("topk", density=0.01, density_warmup=[0.5, 0.1])
    (seen,) = run_ranks(1, lambda rank: fit_alone(rank, strategy, max_epochs=3))
    assert seen == [(1, 0.5), (2, 0.5), (3, 0.1), (4, 0.1), (5, 0.01), (6, 0.01)]


@pytest.mark.skipif(
    Version(pytorch_lightning.__version__) < Version("2.5.3"),
    reason="after its learning rate finder Lightning 2.5.0 trains no step, with any strategy",
)
def test_a_learning_rate_finder_leaves_nothing_behind(tmp_path):
    def tune_and_fit(rank: int) -> list[tuple[int, float]]:
        finder = pytorch_lightning.callbacks.LearningRateFinder(num_training_steps=5)
        strategy = SparseDDPStrategy("topk")
        return fit_alone(rank, strategy, max_epochs=1, callbacks=[finder], default_root_dir=str(tmp_path))

    (seen,) = run_ranks(1, tune_and_fit)
    assert [step for step, _ in seen[-2:]] == [1, 2]
    assert len(seen) > 2


def test_version_is_public():
    assert lightning_sparse.__version__


@full
@pytest.mark.parametrize("fails", [False, True])
def test_gloo_is_left_before_the_interpreter_ends(fails, tmp_path):
    """Otherwise gloo sometimes aborts the process at its exit. After a failure, leaving might hang."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import atexit

            import torch.distributed as dist

            atexit.register(lambda: print("groups at the end:", dist.is_initialized()))

            import pytorch_lightning as pl

            import lightning_sparse
            from tests.integration.trainers import Loader, Net


            class Failing(Net):
                def training_step(self, batch, index):
                    if {fails} and index == 2:
                        raise ValueError("enough")
                    return super().training_step(batch, index)


            trainer = pl.Trainer(
                accelerator="cpu", devices=1, strategy="topk_ddp", max_steps=4, logger=False, barebones=True
            )
            trainer.fit(Failing(), Loader(0, 1))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == fails, done.stderr[-3000:]
    assert ("ValueError: enough" in done.stderr) == fails, done.stderr[-3000:]
    assert f"groups at the end: {fails}" in done.stdout


def test_two_level_is_an_option_and_needs_parts_that_it_can_send():
    strategy = SparseDDPStrategy("gtopk", hierarchical=True)
    assert "TwoLevel(inter_node=GlobalTopK()" in repr(strategy._options.method)
    with pytest.raises(ValueError, match=r"hierarchical=True with 'powersgd', which is not made for it\."):
        SparseDDPStrategy("powersgd", hierarchical=True)
