"""The examples: models, data, and a short training in one process."""

import pickle
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch

from benchmarks.convergence import COMPARED, DENSE, STEPS_PER_EPOCH, summarize
from examples import demo, elastic
from examples.data import CIFAR10, Digits, StandardLibrary, TextFolder
from examples.data.cifar10 import crop_and_flip
from examples.elastic import newest
from examples.models import GPT, LSTM, VGG16, OneCycleClassifier, ResNet20
from examples.train import StepCost, main, make_strategy, sent_bytes, train
from lightning_sparse import AutoDDPStrategy
from tests.support.cifar10 import write_cifar10


@pytest.mark.parametrize(
    ("steps", "torn", "best"),
    [
        ({"last": 20, "step=40": 40}, (), "step=40"),  # killed between the two
        ({"last": 40, "step=20": 20, "step=40": 40}, (), "last"),
        ({"last": 40, "step=20": 20, "step=40": 40}, ("last", "step=40"), "step=20"),
        ({"last": 20, "step=40": 40}, ("step=40",), "last"),
        ({"last": 40}, ("last",), None),
        ({}, (), None),
    ],
)
def test_an_elastic_run_goes_on_from_the_highest_step_that_can_be_read(steps, torn, best, tmp_path):
    for name, step in steps.items():
        path = tmp_path / f"{name}.ckpt"
        torch.save({"global_step": step, "weights": torch.ones(1000)}, path)
        if name in torn:
            path.write_bytes(path.read_bytes()[:1000])
    assert newest(tmp_path) == (best and tmp_path / f"{best}.ckpt")


@pytest.mark.parametrize(("channels", "size", "width"), [(3, 32, 16), (1, 8, 16), (1, 4, 4), (3, 28, 8)])
def test_resnet_takes_images_of_any_size(channels, size, width):
    network = ResNet20(channels, num_classes=7, width=width)
    assert network(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_resnet_has_the_size_that_its_authors_give():
    network = ResNet20(in_channels=3)
    assert sum(p.numel() for p in network.parameters()) == 269_722  # "0.27M", He et al., table 6
    layers = [m for m in network.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 20


def test_resnet_halves_the_image_twice():
    network = ResNet20(in_channels=1)
    assert network.blocks(network.stem(torch.zeros(2, 1, 8, 8))).shape == (2, 64, 2, 2)


def test_every_parameter_gets_a_gradient():
    network = ResNet20(in_channels=1, width=4)
    network(torch.randn(4, 1, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_split_is_disjoint_complete_and_the_same_again():
    data, again = Digits(), Digits()
    data.setup("fit")
    torch.manual_seed(123)
    again.setup("fit")
    torch.testing.assert_close(data.train_indices, again.train_indices)
    torch.testing.assert_close(data.val_indices, again.val_indices)
    train_indices, val_indices = set(data.train_indices.tolist()), set(data.val_indices.tolist())
    assert not train_indices & val_indices
    assert train_indices | val_indices == set(range(1797))
    assert (len(train_indices), len(val_indices)) == (1437, 360)


def test_folds_hold_out_each_digit_once():
    held_out = []
    for fold in range(5):
        data = Digits(fold=fold)
        data.setup("fit")
        held_out += data.val_indices.tolist()
    assert sorted(held_out) == list(range(1797))
    with pytest.raises(ValueError, match=r"Digits\(fold=5\)"):
        Digits(fold=5)


def test_images_are_standardised_by_the_training_part():
    data = Digits()
    data.setup("fit")
    images, labels = data.train_set.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert abs(images.mean()) < 1e-5
    assert abs(images.std() - 1) < 1e-5
    assert data.val_set.tensors[0].mean().abs() > 1e-4  # normalised by its own mean, it would be zero
    assert labels.unique().tolist() == list(range(10))


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_two_batches_train_in_one_process():
    result = train("auto", devices=1, epochs=1, limit_train_batches=2, limit_val_batches=1)
    assert 0 <= result["val/accuracy"] <= 1
    assert result["step/bytes"] == 0
    assert result["step/seconds"] > 0


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_training_lowers_the_loss():
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(OneCycleClassifier(ResNet20(in_channels=1, width=8)), Digits(batch_size=64))
    assert trainer.callback_metrics["train/loss"] < 1.5  # log 10 = 2.3 by guessing


def test_density_goes_with_sparse_strategies_only():
    assert make_strategy("ddp") == "ddp"
    assert make_strategy("topk_ddp", 0.25)._options.method.density == 0.25
    with pytest.raises(ValueError, match="is dense"):
        make_strategy("ddp", 0.25)
    with pytest.raises(ValueError, match=r"AutoDDPStrategy\(density=0.25\)"):
        make_strategy("auto_ddp", 0.25)
    with pytest.raises(TypeError, match="'density'"):
        make_strategy("qsgd_ddp", 0.25)
    for density in (None, 0.25):
        with pytest.raises(ValueError, match="gaussiank_ddp"):
            make_strategy("no_such_ddp", density)


@pytest.mark.parametrize("start", [main, elastic.main])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--strategy no_such_ddp", "'no_such_ddp' is not known; choose from"),
        ("--strategy qsgd_ddp --density 0.01", "has no option 'density'"),
        ("--strategy auto_ddp --density 0.01", "AutoDDPStrategy(density=0.01)"),
        ("--strategy ddp --density 0.01", "is dense"),
    ],
)
def test_a_wrong_option_of_an_example_is_named(start, arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        start()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "arguments"), [(main, "--epochs 0"), (elastic.main, "--every 0"), (elastic.main, "--steps 0")]
)
def test_an_example_trains_at_least_once(start, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        start()
    assert "at least one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "density"), [("topk_ddp", 0.01), ("auto_ddp", None), ("qsgd_ddp", None), ("ddp", None)]
)
def test_an_elastic_run_has_a_folder_for_each_strategy_and_a_density_if_possible(name, density, monkeypatch):
    found = []
    monkeypatch.setattr(elastic, "quiet", lambda: None)
    monkeypatch.setattr(elastic, "train", lambda folder, strategy, **_: found.append((folder, strategy)) or 0.5)
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--strategy", name])
    elastic.main()
    ((folder, strategy),) = found
    assert folder == Path("runs/elastic") / name
    assert strategy == name if density is None else strategy._options.method.density == density


def test_an_elastic_run_that_is_complete_is_not_reported_as_another(tmp_path, capsys):
    torch.save({"global_step": 40}, tmp_path / "last.ckpt")
    with pytest.raises(SystemExit) as ended:
        elastic.train(tmp_path, "ddp", steps=40)
    assert ended.value.code is None  # so that torchrun does not start again
    assert "has taken 40 of 40 steps: for a new run, choose another folder" in capsys.readouterr().out


def test_the_bytes_of_auto_ddp_are_counted():
    class Auto(AutoDDPStrategy):
        reducer = SimpleNamespace(comm=SimpleNamespace(sent_bytes=8))

    trainer, cost, logged = SimpleNamespace(strategy=Auto(), world_size=2), StepCost(), {}
    assert sent_bytes(trainer) == 8
    module = torch.nn.Linear(100, 100)
    module.log = lambda name, value, **_: logged.update({name: value})
    cost.on_train_epoch_start(trainer, module)
    for _ in range(2):
        cost.on_train_batch_start()
        trainer.strategy.reducer.comm.sent_bytes += 50
        cost.on_train_batch_end()
    cost.on_train_epoch_end(trainer, module)
    assert logged["step/bytes"] == 50


def test_the_demo_gives_the_size_of_its_model():
    numel = sum(param.numel() for param in GPT(demo.LENGTH, demo.WIDTH).parameters())
    assert f"{numel / 1e6:.1f} million parameters" in demo.__doc__


def test_convergence_bound_is_the_paired_one():
    def rows(method, density, accuracies):
        fixed = {"method": method, "density": density, "warmup": "", "epochs": 3}
        return [{**fixed, "seed": i, "val_accuracy_percent": a, "val_loss": 0.0} for i, a in enumerate(accuracies)]

    runs = rows("ddp", 1.0, [98.0, 99.0, 97.0]) + rows("topk", 0.01, [97.0, 97.0, 97.0])
    dense, sparse = summarize(pd.DataFrame(runs)).to_dict("records")
    assert dense["gap_points"] == dense["gap_upper_95_points"] == 0
    assert sparse["gap_points"] == 1  # gaps 1, 2, 0: mean 1, standard deviation 1
    assert sparse["gap_upper_95_points"] == pytest.approx(1 + 2.920 / 3**0.5, abs=1e-3)  # t, 2 degrees of freedom
    assert not sparse["below_one_point"]
    assert sparse["sends_per_entry"] == pytest.approx(3 * STEPS_PER_EPOCH * 0.01, abs=0.01)


def test_convergence_pairs_every_case_with_dense():
    assert COMPARED[0] == DENSE
    data = Digits(batch_size=8)
    data.setup("fit")
    assert len(data.train_dataloader()) // 2 == STEPS_PER_EPOCH


def test_vgg_fits_images_of_cifar10():
    network = VGG16()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in network.parameters()) == 14_724_042
    assert sum(isinstance(m, torch.nn.Conv2d) for m in network.modules()) == 13


@pytest.mark.parametrize(("network", "parameters"), [(GPT(), 842_496), (LSTM(), 1_020_160)])
def test_language_networks_see_no_byte_before_they_predict_it(network, parameters):
    assert sum(p.numel() for p in network.parameters()) == parameters
    tokens = torch.randint(256, (2, 20))
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 256
    logits, others = network(tokens), network(changed)
    assert logits.shape == (2, 20, 256)
    torch.testing.assert_close(logits[:, :10], others[:, :10])
    assert not torch.isclose(logits[:, 10:], others[:, 10:]).all(2).any()


def test_gpt_refuses_what_it_has_no_positions_for():
    assert GPT(context=8, width=8, layers=1, heads=2)(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 256)
    with pytest.raises(ValueError, match=r"GPT\(context=8\) got sequences of 9 tokens"):
        GPT(context=8, width=8, layers=1, heads=2)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"GPT\(width=8, heads=3\)"):
        GPT(width=8, heads=3)


def test_text_is_cut_into_sequences_and_what_follows(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(bytes(range(50, 100)))
    (tmp_path / "a.txt").write_bytes(bytes(range(50)))
    (tmp_path / "c.other").write_bytes(b"not this one")
    data = TextFolder(str(tmp_path), length=4, batch_size=3, val_fraction=0.2)
    data.setup("fit")
    assert data.train_set.text.tolist() == list(range(80))
    assert len(data.train_set) == 19  # the 80th byte only follows
    assert len(data.val_set) == 4
    tokens, following = data.train_set[18]
    assert tokens.tolist() == [72, 73, 74, 75]
    assert following.tolist() == [73, 74, 75, 76]
    tokens, following = next(iter(data.val_dataloader()))
    assert tokens.shape == following.shape == (3, 4)
    assert tokens.dtype == torch.int64
    assert tokens[0].tolist() == [80, 81, 82, 83]
    seen = torch.cat([tokens for tokens, _ in data.train_dataloader()])
    assert len(seen) == 18
    assert len(seen.unique(dim=0)) == 18
    assert not torch.equal(seen, seen.sort(0).values)  # shuffled

    short = TextFolder(str(tmp_path), length=4, max_bytes=30)
    with pytest.raises(ValueError, match="found 30 bytes, of which 1 are held out"):
        short.setup("fit")
    with pytest.raises(FileNotFoundError, match=r"no files '\*\.rst'"):
        TextFolder(str(tmp_path), pattern="*.rst")
    with pytest.raises(ValueError, match=r"StandardLibrary\(val_fraction=1\)"):
        StandardLibrary(val_fraction=1)


def test_standard_library_is_the_same_again_and_without_tests():
    data, again = StandardLibrary(), StandardLibrary(max_bytes=100_000)
    files = data.files()
    assert files == again.files()
    assert Path(sysconfig.get_paths()["stdlib"], "argparse.py") in files
    assert not {"site-packages", "test", "tests"} & {part for file in files for part in file.parts}
    data.setup("fit")
    again.setup("fit")
    assert data.train_set.text.numel() > 5_000_000
    assert again.train_set.text.numel() == 95_000
    torch.testing.assert_close(again.train_set.text, data.train_set.text[:95_000])


@pytest.mark.parametrize("layout", ["python", "binary"])
@pytest.mark.parametrize("inside", [False, True])
def test_cifar10_is_read_in_both_layouts(layout, inside, tmp_path):
    images, labels = write_cifar10(tmp_path, layout)
    data = CIFAR10(str(next((tmp_path / layout).iterdir()) if inside else tmp_path / layout), batch_size=4)
    data.setup()
    read = torch.cat([data.train_set.tensors[0], data.val_set.tensors[0]])
    np.testing.assert_array_equal(read.numpy(), images)
    np.testing.assert_array_equal(torch.cat([data.train_set.tensors[1], data.val_set.tensors[1]]), labels)
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (36, 4, 8)

    batch = data.on_after_batch_transfer(next(iter(data.val_dataloader())), 0)
    assert batch[0].dtype == torch.float32
    first = (images[36, 0, 0, 0] / 255 - 0.4914) / 0.2470  # red; not augmented
    assert batch[0][0, 0, 0, 0] == pytest.approx(first, abs=1e-5)


def test_crops_are_windows_of_the_padded_image():
    image = torch.arange(1.0, 1 + 2 * 32 * 32).view(2, 32, 32)
    moved = crop_and_flip(image.repeat(500, 1, 1, 1))
    padded = torch.nn.functional.pad(image, (4,) * 4)
    windows = {
        tuple(padded[:, y : y + 32, x : x + 32][:, ::31, ::31].flatten().tolist()) for y in range(9) for x in range(9)
    }
    mirrored = {tuple(torch.tensor(w).view(2, 2, 2).flip(2).flatten().tolist()) for w in windows}
    seen = {tuple(one[:, ::31, ::31].flatten().tolist()) for one in moved}
    assert seen <= windows | mirrored
    assert len(seen & windows) > 50
    assert len(seen & mirrored) > 50


def test_cifar10_that_is_not_there_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        CIFAR10(str(tmp_path))
    for part in (
        str(tmp_path / "cifar-10-batches-py"),
        "data_batch_1 to data_batch_5 and test_batch",
        str(tmp_path / "cifar-10-batches-bin"),
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ):
        assert part in str(caught.value)


def test_broken_files_of_cifar10_are_named(tmp_path):
    write_cifar10(tmp_path, "binary")
    file = tmp_path / "binary/cifar-10-batches-bin/data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin has .* incomplete"):
        CIFAR10(str(tmp_path / "binary")).setup()
    file.write_bytes(b"\x0b" * 3073)  # a label of 11
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is not a file of CIFAR-10"):
        CIFAR10(str(tmp_path / "binary")).setup()


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran_code_of_a_stranger"),))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({b"data": Evil(), b"labels": []}),
        b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"cnumpy\nload\n(X\x01\x00\x00\x00xtR.",
        pickle.dumps({b"data": np.array([Evil()]), b"labels": []}, protocol=2),
    ],
    ids=["object", "eval", "numpy", "array of objects"],
)
def test_a_pickle_of_a_stranger_runs_no_code(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path, "python")
    (tmp_path / "python/cifar-10-batches-py/data_batch_2").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match="which files of CIFAR-10 do not: it was not read"):
        CIFAR10("python").setup()
    assert not Path("ran_code_of_a_stranger").exists()
