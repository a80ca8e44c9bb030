"""The command line: registered names, error messages, and that it starts processes."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import pytorch_lightning as pl
import yaml
from pytorch_lightning.strategies import StrategyRegistry

import examples.data
import examples.models
from lightning_sparse import METHODS, Method, SparseDDPStrategy, callbacks, cli, compressors
from lightning_sparse.cli import Parser, main
from lightning_sparse.strategies.ddp_options import UNSUPPORTED
from tests.support.tiers import full, in_full, later, tiers

ROOT = Path(__file__).parents[1]
FILES = ("base", "digits", "digits/topk")
DIGITS = [f"--config={ROOT}/configs/{name}.yaml" for name in FILES]
CLASSES = [
    SparseDDPStrategy,
    Method,
    *(getattr(callbacks, name) for name in callbacks.__all__),
    *(getattr(compressors, name) for name in ("TopK", "GaussianK")),
    *(model for name in examples.models.__all__ if isinstance(model := getattr(examples.models, name), type)),
    *(getattr(examples.data, name) for name in examples.data.__all__),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning_sparse"])
    # Lightning 2.6 calls `instantiate_classes`, which jsonargparse 4.53 has renamed.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def config_of(capsys, *args: str) -> dict:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *DIGITS, *args, "--print_config"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return yaml.safe_load(out)


def error_of(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *DIGITS, *args])
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "extra.yaml"
    file.write_text(textwrap.dedent(text))
    return str(file)


STRATEGIES = {
    "name": "gaussiank_ddp_spawn",
    "class": {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": {"method": "topk", "density": 0.02}},
    "short class": {"class_path": "SparseDDPStrategy", "init_args": {"bucket_cap_mb": 3, "static_graph": True}},
    "a method's own option": {
        "class_path": "lightning_sparse.SparseDDPStrategy",
        "init_args": {"method": "qsgd"},
        "dict_kwargs": {"levels": 7},
    },
    "own parts": {
        "class_path": "lightning_sparse.SparseDDPStrategy",
        "init_args": {
            "method": {
                "compressor": {"class_path": "lightning_sparse.compressors.TopK", "init_args": {"density": 0.02}},
                "memory": {"class_path": "lightning_sparse.memory.NoMemory"},
                "aggregator": {"class_path": "lightning_sparse.aggregators.Mean"},
            },
        },
    },
    "short parts": {
        "class_path": "SparseDDPStrategy",
        "init_args": {"method": {"compressor": {"class_path": "RandK"}}},
    },
    "low rank": {
        "class_path": "SparseDDPStrategy",
        "init_args": {
            "method": {
                "compressor": {"class_path": "LowRank", "init_args": {"rank": 2}},
                "aggregator": {"class_path": "PowerSGD"},
            },
        },
    },
}


@pytest.mark.parametrize("form", tiers(STRATEGIES, ["own parts"]))
def test_strategy_in_every_form_survives_printing(form, tmp_path, capsys):
    strategy = STRATEGIES[form]
    # A file given later adds to a class of an earlier one, so the form before it has to be a name.
    extra = written(tmp_path, yaml.safe_dump({"trainer": {"strategy": strategy}}))
    printed = config_of(capsys, "--trainer.strategy=ddp", "--config", extra)
    if isinstance(strategy, str):
        assert printed["trainer"]["strategy"] == strategy
    else:
        init_args = printed["trainer"]["strategy"]["init_args"]
        assert printed["trainer"]["strategy"]["class_path"] == "lightning_sparse.SparseDDPStrategy"
        assert printed["trainer"]["strategy"].get("dict_kwargs") == strategy.get("dict_kwargs")
        for name, value in strategy["init_args"].items():
            if name == "method" and not isinstance(value, str):
                for part in ("compressor", "aggregator"):
                    given, found = value.get(part, {"class_path": "Mean"}), init_args["method"][part]
                    assert found["class_path"].rpartition(".")[2] == given["class_path"].rpartition(".")[2]
                    assert found.get("init_args", {}).items() >= given.get("init_args", {}).items()
            else:
                assert init_args[name] == value
    again = written(tmp_path, yaml.safe_dump(printed))
    with pytest.raises(SystemExit):
        main(["fit", "--config", again, "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_options_on_the_command_line_go_into_the_class(capsys):
    printed = config_of(capsys, "--trainer.strategy.density=0.5", "--data.batch_size=4", "--optimizer.lr=3")
    assert printed["trainer"]["strategy"]["init_args"]["density"] == 0.5
    assert printed["data"]["init_args"]["batch_size"] == 4
    assert printed["optimizer"]["init_args"]["lr"] == 3


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_option_has_its_text(kind):
    parser = Parser()
    parser.add_class_arguments(kind, fail_untyped=False)
    help_of = {action.dest: action.help for action in parser._actions}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert len(help_of[name] or "") > 10, f"{kind.__name__} says nothing of {name}"


@pytest.mark.parametrize("name", ["SparseDDPStrategy", "AutoDDPStrategy", "SparseHSDPStrategy", "AutoHSDPStrategy"])
def test_a_class_without_options_makes_each_strategy(name):
    parser = Parser()
    parser.add_argument("--strategy", type=pl.strategies.Strategy)
    chosen = parser.parse_object({"strategy": {"class_path": f"lightning_sparse.{name}"}})
    assert type(parser.instantiate_classes(chosen).strategy).__name__ == name


@pytest.mark.parametrize("earlier", [["--trainer.strategy=ddp"], *in_full([])], ids=["a name", "a class"])
def test_an_option_beside_the_class_path_is_told_its_place(earlier, tmp_path, capsys):
    text = "trainer: {strategy: {class_path: SparseDDPStrategy, method: topk}}"
    message = error_of(capsys, *earlier, "--config", written(tmp_path, text))
    assert "'method' is an option of a class: put it under `init_args:`, beside `class_path:`." in message
    assert "Did you mean" not in message


def test_an_option_of_a_method_in_a_stock_class_is_told_no_wrong_place(tmp_path, capsys):
    text = "trainer: {strategy: {class_path: DDPStrategy, init_args: {density: 0.1}}}"
    message = error_of(capsys, "--trainer.strategy=ddp", "--config", written(tmp_path, text))
    assert "'density' is not accepted" in message
    assert "put it under" not in message
    assert "Did you mean" not in message


@later
def test_a_wrong_option_of_a_class_on_one_line_is_no_unknown_strategy(capsys):
    message = error_of(capsys, "--trainer.strategy={class_path: SparseDDPStrategy, init_args: {overlap: nextstep}}")
    assert "the class is not known, or one of its options is wrong" in message
    assert "choose from ddp" not in message


def test_options_of_ddp_are_known_to_the_strategy():
    parser = Parser()
    parser.add_class_arguments(SparseDDPStrategy, fail_untyped=False)
    assert {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"} <= set(parser.get_defaults().keys())


def test_help_tells_the_names_and_comments_tell_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "topk_ddp" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.strategy.help=SparseDDPStrategy"])
    assert "fraction of entries to send" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fit", *DIGITS, "--print_config=comments"])
    assert "# fraction of entries to send" in capsys.readouterr().out


STRATEGY = "trainer: {strategy: {class_path: SparseDDPStrategy, init_args: {%s}}}"


TYPOS = [
    ("trainer: {max_epoch: 3}", "trainer.max_epochs"),
    ("optimzer: {class_path: torch.optim.SGD}", "optimizer"),
    ("data: {class_path: examples.data.Digits, init_args: {bath_size: 3}}", "batch_size"),
    ("model: {class_path: examples.models.Classifier, int_args: {num_classes: 3}}", "init_args"),
    ("model: {init_args: {network: {class_path: examples.models.ResNet20, init_args: {widht: 3}}}}", "width"),
    (STRATEGY % "densty: 0.1", "density"),
    (STRATEGY % "bucket_cap_md: 25", "bucket_cap_mb"),
    (STRATEGY % "method: {compresor: TopK}", "compressor"),
    (STRATEGY % "method: {compressor: {class_path: TopK, init_args: {densty: 0.1}}}", "density"),
    (STRATEGY % "method: topq, density: 0.1", "topk"),
    ("trainer: {strategy: topq_ddp}", "topk_ddp"),
]


@pytest.mark.parametrize(("text", "nearest"), tiers(TYPOS, TYPOS[::4]))
def test_a_typo_names_the_nearest_known_option(text, nearest, tmp_path, capsys):
    message = error_of(capsys, "--trainer.strategy=ddp", "--config", written(tmp_path, text))
    assert message.count("Did you mean") == 1
    assert f"Did you mean {nearest!r}?" in message


@pytest.mark.parametrize("arguments", [[], ["advice"], ["reproduce", "memsgd"]])
def test_subcommands_that_are_not_lightnings_are_named(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "A further command is `advise`" in said
    assert "`python -m reproductions`" in said


def test_a_typo_before_an_option_of_a_method_is_a_typo(capsys):
    message = error_of(capsys, "--trainer.strategy=topk_ddp", "--trainer.stratgy.density=2")
    assert "Did you mean 'trainer.strategy'?" in message
    assert "dict_kwargs" not in message


def test_a_typo_on_the_command_line_names_the_nearest_known_option(capsys):
    assert "Did you mean 'trainer.max_epochs'?" in error_of(capsys, "--trainer.max_epoks=3")


def test_an_option_of_a_method_in_the_wrong_place_is_told_the_right_one(tmp_path, capsys):
    message = error_of(capsys, "--trainer.strategy=ddp", "--config", written(tmp_path, STRATEGY % "levels: 7"))
    assert "'levels' is an option of a method: put it under `dict_kwargs:`, beside `init_args:`." in message
    assert "Did you mean" not in message


@later
def test_a_density_of_an_earlier_file_for_a_method_without_density(capsys):
    to_int4 = "--trainer.strategy.method=int4"
    message = error_of(capsys, to_int4)
    assert "Method 'int4' has no option 'density'" in message
    assert "write `density: null` next to `method:`." in message
    assert "dict_kwargs" not in message
    printed = config_of(capsys, to_int4, "--trainer.strategy.density=null")
    assert printed["trainer"]["strategy"]["init_args"]["density"] is None


@full
@pytest.mark.parametrize("name", ["topk_ddp", "AUTO_HSDP", "int4_ddp_spawn_find_unused_parameters_true", "ddp"])
def test_options_beside_a_strategys_name_are_told_its_class(name, capsys):
    message = error_of(capsys, f"--trainer.strategy={name}", "--trainer.strategy.timeout=9")
    said, _, arguments = message.partition(", write its class: ")
    assert f"{name!r} is a name, which has no options. To set options" in said
    printed = config_of(capsys, "--trainer.strategy=ddp", *arguments.split())["trainer"]["strategy"]
    known = StrategyRegistry[name.lower()]
    assert printed["class_path"].endswith(known["strategy"].__name__)
    assert printed["init_args"].items() >= known["init_params"].items()


@later
def test_an_option_that_no_chosen_method_has_is_already_in_its_place(capsys):
    message = error_of(capsys, "--trainer.strategy.dict_kwargs.levels=7")
    assert "'levels' is an option of qsgd" in message
    assert "put it under" not in message


def test_nothing_is_said_to_be_near_what_is_far(capsys):
    message = error_of(capsys, "--xyzzy=3")
    assert "--xyzzy" in message
    assert "Did you mean" not in message


def test_an_unknown_strategy_lists_the_known_ones(capsys):
    message = error_of(capsys, "--trainer.strategy=quick_ddp")
    assert "Strategy 'quick_ddp' is not known; choose from ddp, auto_ddp, dense_ddp, topk_ddp, gaussiank_ddp" in message
    assert "_hsdp in place of _ddp" in message


@full
@pytest.mark.parametrize("name", ["SparseDDPStrategy", "AutoDDPStrategy", "SparseHSDPStrategy", "AutoHSDPStrategy"])
def test_the_name_of_a_class_in_place_of_a_strategys_name(name, capsys):
    message = error_of(capsys, f"--trainer.strategy={name}")
    assert f"write `--trainer.strategy.class_path {name}`" in message
    assert "Did you mean" not in message
    printed = config_of(capsys, "--trainer.strategy=ddp", f"--trainer.strategy.class_path={name}")
    assert printed["trainer"]["strategy"]["class_path"] == f"lightning_sparse.{name}"


@full
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            STRATEGY % "method: {compressor: {class_path: TopK, init_args: {density: 2}}}, density: null",
            "TopK(density=2)",
        ),
        (STRATEGY % "method: {compressor: TopK, aggregator: AllReduceMean}, density: null", "Use Mean()"),
        ("data: {class_path: examples.data.CIFAR10, init_args: {path: nowhere}}", "cs.toronto.edu/~kriz/cifar.html"),
        ("data: {class_path: examples.data.TextFolder, init_args: {path: nowhere}}", "has no files '*.txt'"),
        (
            "model: {init_args: {network: {class_path: examples.models.GPT, init_args: {heads: 3}}}}",
            "heads must divide",
        ),
    ],
)
def test_a_part_that_refuses_its_options_is_quoted_alone(text, says, tmp_path, capsys):
    message = error_of(capsys, "--config", written(tmp_path, text))
    assert says in message
    assert "Union" not in message
    assert "Namespace" not in message


OWN_PARTS = "method: {compressor: {class_path: TopK, init_args: {density: 0.02}}, memory: Residual, aggregator: Mean}"


@full
def test_own_parts_after_a_file_that_gives_a_density(tmp_path, capsys):
    message = error_of(capsys, "--config", written(tmp_path, STRATEGY % OWN_PARTS))
    assert message.startswith("density: 0.01 is set together with custom parts of a method")
    assert "Add `density: null` next to `method:`." in message
    printed = config_of(capsys, "--config", written(tmp_path, STRATEGY % f"density: null, {OWN_PARTS}"))
    assert printed["trainer"]["strategy"]["init_args"]["method"]["compressor"]["init_args"]["density"] == 0.02


@later
def test_a_mistake_in_the_code_keeps_its_traceback(monkeypatch, capsys):
    def fail(self: object, batch_size: int = 1, fold: int = 0) -> None:
        raise KeyError("on purpose")

    monkeypatch.setattr(examples.data.Digits, "__init__", fail)
    with pytest.raises(ValueError, match="on purpose") as caught:
        main(["fit", *DIGITS])
    assert isinstance(caught.value.__cause__, KeyError)


def test_without_jsonargparse_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cli, "RequirementCache", lambda requirement: False)
    with pytest.raises(SystemExit, match=r"needs jsonargparse: pip install 'jsonargparse\[.*\]>=4.52'"):
        main(["fit"])


def test_a_second_run_into_the_same_folder(tmp_path):
    model = f"--model={cli.CLI.__mro__[1].__module__.removesuffix('.cli')}.demos.boring_classes.BoringModel"
    args = [f"--trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    args += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=1"]
    args += ["--trainer.limit_val_batches=0", f"--trainer.default_root_dir={tmp_path}"]
    for seed in ("1", "2"):
        main(["fit", model, *args, f"--seed_everything={seed}"])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["seed_everything"] == 2


@full
def test_two_processes_for_real(tmp_path):
    args = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", f"--trainer.logger.save_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_sparse", "fit", *DIGITS, *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in done.stderr
    run = tmp_path / "digits_topk/version_0"
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 2
    assert list(run.glob("checkpoints/*.ckpt"))


@full
def test_where_only_the_other_namespace_is_installed():
    script = """
        import importlib.util, sys

        hidden, find_spec = "pytorch_lightning", importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == hidden else find_spec(name, *rest)
        sys.modules[hidden] = None
        sys.argv = ["lightning_sparse", "fit", "--trainer.strategy=SparseDDPStrategy",
                    "--trainer.strategy.density=0.1", "--model=BoringModel", "--print_config"]
        import lightning.pytorch.demos.boring_classes
        from lightning_sparse import cli

        print("#", cli.CLI.__mro__[1].__module__)
        cli.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# lightning.pytorch.cli")
    assert "density: 0.1" in done.stdout


def test_the_help_of_the_strategy_offers_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.strategy.help", "SparseDDPStrategy"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m lightning_sparse [")
    offered = set(re.findall(r"--trainer\.strategy\.(\w+)", text))
    assert not offered & {*UNSUPPORTED}
    assert {"method", "density", "bucket_cap_mb", "find_unused_parameters", "dict_kwargs"} <= offered
    for name, spec in METHODS.items():
        assert all(option in text for option in spec.options), name
