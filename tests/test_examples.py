"""The examples: what the model and the data look like, and a short training in one process."""

import pytest
import pytorch_lightning as pl
import torch

from benchmarks.convergence import DENSE, RATES, STEPS_PER_EPOCH, VERSIONS, summarize
from examples.data import Digits
from examples.models import Classifier, ResNet20
from examples.train import make_strategy, train


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
    assert data.val_set.tensors[0].mean().abs() > 1e-4  # by its own mean it would be zero
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
    trainer.fit(Classifier(ResNet20(in_channels=1, width=8)), Digits(batch_size=64))
    assert trainer.callback_metrics["train/loss"] < 1.5  # log 10 = 2.3 by guessing


def test_density_goes_with_sparse_strategies_only():
    assert make_strategy("ddp") == "ddp"
    assert make_strategy("topk_ddp", 0.25)._method.density == 0.25
    with pytest.raises(ValueError, match="sends everything"):
        make_strategy("ddp", 0.25)
    with pytest.raises(ValueError, match="gaussiank_ddp"):
        make_strategy("no_such_ddp", 0.25)


def test_convergence_bound_is_the_paired_one():
    def rows(method, density, accuracies):
        fixed = {"method": method, "density": density, "warmup": "", "epochs": 3, **VERSIONS}
        return [{**fixed, "seed": i, "val_accuracy_percent": a, "val_loss": 0.0} for i, a in enumerate(accuracies)]

    dense, sparse = summarize(rows("ddp", 1.0, [98.0, 99.0, 97.0]) + rows("topk", 0.01, [97.0, 97.0, 97.0]))
    assert dense["gap_points"] == dense["gap_upper_95_points"] == 0
    assert sparse["gap_points"] == 1  # gaps 1, 2, 0: mean 1, standard deviation 1
    assert sparse["gap_upper_95_points"] == pytest.approx(1 + 2.920 / 3**0.5, abs=1e-3)  # t, 2 degrees of freedom
    assert not sparse["below_one_point"]
    assert sparse["sends_per_entry"] == pytest.approx(3 * STEPS_PER_EPOCH * 0.01, abs=0.01)


def test_convergence_pairs_every_case_with_dense():
    assert next(iter(RATES)) == DENSE
    data = Digits(batch_size=8)
    data.setup("fit")
    assert len(data.train_dataloader()) // 2 == STEPS_PER_EPOCH
