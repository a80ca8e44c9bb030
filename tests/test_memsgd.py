"""Mem-SGD in one process and in several: results by hand, conservation, learning rate, average, and bad input."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import NonFiniteGradient
from lightning_sparse.compressors.base import Entries
from lightning_sparse.contrib.memsgd import MemSGD, MemSGDLR, QuadraticAverage, train_parallel
from lightning_sparse.contrib.weight_averaging import AverageAtEnd, WeightAveraging
from tests.support.tiers import later, tiers


def test_two_steps_by_hand():
    x = torch.tensor([1.0, -1.0, 0.0])
    worker = MemSGD(x, k=1, l2=0.5)
    # m = 0.1 (g + x/2) = [0.25, -0.45, 0.1]: the second entry is sent.
    assert worker.step_(torch.tensor([2.0, -4.0, 1.0]), lr=0.1).indices.tolist() == [1]
    torch.testing.assert_close(x, torch.tensor([1.0, -0.55, 0.0]))
    torch.testing.assert_close(worker.memory, torch.tensor([0.25, 0.0, 0.1]))
    # m = [0.25 + 0.2 · 0.5, −0.2 · 0.275, 0.1 + 0.2 · (−3)] = [0.35, −0.055, −0.5]
    sent = worker.step_(Entries(torch.tensor([2]), torch.tensor([-3.0])), lr=0.2)
    torch.testing.assert_close(sent.values, torch.tensor([-0.5]))
    torch.testing.assert_close(x, torch.tensor([1.0, -0.55, 0.5]))
    torch.testing.assert_close(worker.memory, torch.tensor([0.35, -0.055, 0.0]))


@pytest.mark.parametrize("choice", ["top", "random"])
def test_sent_indices_ascend(choice):
    sent = MemSGD(torch.zeros(9), k=5, choice=choice).step_(torch.tensor([5.0, 6, 4, 7, 3, 8, 2, 9, 1]), 1.0)
    assert sent.indices.tolist() == sorted({*sent.indices.tolist()})
    assert len(sent.indices) == 5
    assert choice == "random" or sent.indices.tolist() == [0, 1, 3, 5, 7]


@pytest.mark.parametrize("choice", ["top", "random"])
@pytest.mark.parametrize("numel", [1, 7, 100])
@pytest.mark.parametrize("kind", ["normal", "heavy", "zeros", "equal", "entries"])
def test_nothing_is_lost(choice, numel, kind):
    x = torch.randn(numel, dtype=torch.float64)
    start, lost = x.clone(), torch.zeros_like(x)
    worker = MemSGD(x, k=min(3, numel), choice=choice, l2=0.3)
    for step in range(50):
        dense = torch.randn(numel, dtype=torch.float64)
        dense = {"heavy": dense**9, "zeros": dense * 0, "equal": dense * 0 + 2}.get(kind, dense)
        if kind == "entries":
            dense[torch.rand(numel) < 0.8] = 0
        where = dense.nonzero().squeeze(1)
        lr = 1 / (10 + step)
        lost += lr * (dense + 0.3 * x)
        worker.step_(Entries(where, dense[where]) if kind == "entries" else dense, lr)
        assert worker.memory.count_nonzero() <= numel - min(3, numel) or choice == "random"
    worker.apply_lazy_l2_()
    torch.testing.assert_close(start - x + worker.memory, lost)


@pytest.mark.parametrize("choice", ["top", "random"])
def test_with_all_entries_it_is_sgd(choice):
    x = torch.tensor([3.0, -2.0, 0.5])
    param = x.clone().requires_grad_()
    sgd, worker = torch.optim.SGD([param], lr=0.1, weight_decay=0.2), MemSGD(x, k=3, choice=choice, l2=0.2)
    for _ in range(5):
        param.grad = torch.randn(3)
        sgd.step()
        worker.step_(param.grad, lr=0.1)
    torch.testing.assert_close(x, param.detach())
    assert not worker.memory.any()


def test_lazy_l2_is_the_same_as_l2_in_every_gradient():
    lazy, eager = torch.ones(20, dtype=torch.float64), torch.ones(20, dtype=torch.float64)
    workers = MemSGD(lazy, 2, "random", l2=0.4, seed=3), MemSGD(eager, 2, "random", seed=3)
    for step in range(40):
        gradient = torch.randn(20, dtype=torch.float64)
        workers[0].step_(gradient, 0.1 / (1 + step))
        workers[1].step_(gradient + 0.4 * eager, 0.1 / (1 + step))
    torch.testing.assert_close(lazy, eager)


def test_without_error_feedback_the_rest_is_forgotten():
    x = torch.zeros(3)
    worker = MemSGD(x, k=1, choice="top", error_feedback=False)
    worker.step_(torch.tensor([2.0, -3.0, 1.0]), lr=1.0)
    assert not worker.memory.any()
    assert x.tolist() == [0.0, 3.0, 0.0]


def test_k_may_be_a_number_of_numpy():
    assert len(MemSGD(torch.zeros(3), np.int64(2)).step_(torch.ones(3), 1.0).indices) == 2


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63])
def test_the_random_choice_does_not_follow_a_generator_with_the_same_seed(seed):
    chosen = MemSGD(torch.zeros(1000), 400, "random", seed=seed).step_(torch.ones(1000), 1.0).indices
    examples = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:400]
    assert 100 < len(set(chosen.tolist()) & set(examples.tolist())) < 220  # 160 on average
    again = MemSGD(torch.zeros(1000), 400, "random", seed=seed).step_(torch.ones(1000), 1.0).indices
    assert torch.equal(chosen, again)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("choice", ["top", "random"])
def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(bad, choice):
    x = torch.ones(5)
    worker = MemSGD(x, k=1, choice=choice)
    with pytest.raises(NonFiniteGradient, match="MemSGD was given"):
        worker.step_(torch.tensor([0.0, bad, 0.0, 0.0, 0.0]), 0.1)
    assert x.tolist() == [1.0] * 5
    assert not worker.memory.any()


def test_learning_rate_by_hand():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 7.0}], lr=1.0)
    scheduler, rates = MemSGDLR(optimizer, mu=0.1, shift=20, gamma=2), []
    for _ in range(3):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert rates == [pytest.approx([wanted] * 2) for wanted in (1, 2 / 2.1, 2 / 2.2)]
    resumed = MemSGDLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), mu=0.1, shift=20, gamma=2)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.last_epoch == 3


@pytest.mark.parametrize("shift", [0.5, 3, 1000.0])
def test_the_average_is_the_formula(shift):
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)
    average = AveragedModel(model, avg_fn=QuadraticAverage(shift))
    seen = torch.randn(200, 1, 4, dtype=torch.float64)
    for weight in seen:
        model.weight.data.copy_(weight)
        average.update_parameters(model)
    weights = (shift + torch.arange(200, dtype=torch.float64)) ** 2
    expected = (weights[:, None, None] * seen).sum(0) / weights.sum()
    torch.testing.assert_close(average.module.weight, expected, rtol=1e-5, atol=1e-6)


def test_of_whole_numbers_the_last_counts():
    model = torch.nn.BatchNorm1d(1)
    average = AveragedModel(model, avg_fn=QuadraticAverage(1), use_buffers=True)
    for x in (5.0, 10.0):
        model(torch.full((4, 1), x))
        average.update_parameters(model)
    assert average.module.num_batches_tracked.item() == 2
    # 0.1 · 5, and then 0.9 · 0.5 + 0.1 · 10: (1 · 0.5 + 4 · 1.45) / (1 + 4)
    assert average.module.running_mean.item() == pytest.approx(1.26)


def test_a_late_average_moves_by_3_in_t():
    late = QuadraticAverage(1.0)(torch.zeros(1), torch.ones(1), torch.tensor(3_000_000_000))
    assert late.item() == pytest.approx(1e-9, rel=1e-3)
    assert pickle.loads(pickle.dumps(QuadraticAverage(2))) == QuadraticAverage(2.0)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch, index):
        return (self.model(batch[0]) - batch[1]).square().mean()

    def on_train_batch_end(self, *_):
        self.seen.append(self.model.weight.detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": MemSGDLR(optimizer, mu=8, shift=20), "interval": "step"},
        }


def train(model, callback, folder, batch_size, max_epochs=1):
    data = DataLoader(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), batch_size=batch_size)
    pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callback,
    ).fit(model, data)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("callback", [WeightAveraging, AverageAtEnd])
def test_lightning_averages_by_the_formula(callback, tmp_path):
    model = Regression()
    train(model, callback(avg_fn=QuadraticAverage(20 + 1)), tmp_path, batch_size=2)
    weights = torch.tensor([(20.0 + t) ** 2 for t in range(1, 13)])
    expected = (weights[:, None, None] * torch.stack(model.seen)).sum(0) / weights.sum()
    torch.testing.assert_close(model.model.weight.detach(), expected)
    assert not torch.allclose(model.seen[-1], expected)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_an_average_at_the_end_goes_on_from_a_checkpoint():
    model, given = Regression(), {"avg_fn": QuadraticAverage(2)}
    first, second = AverageAtEnd(**given), AverageAtEnd(**given)
    start = SimpleNamespace(global_step=0)
    first.setup(start, model, "fit")
    first.average.update_parameters(model)
    first.steps = 5
    second.setup(start, Regression(), "fit")
    second.load_state_dict(first.state_dict())
    assert (second.steps, second.average.n_averaged.item()) == (5, 1)


def test_an_average_at_the_end_begins_anew_with_each_fit():
    model, callback = torch.nn.Linear(1, 1, bias=False), AverageAtEnd(avg_fn=QuadraticAverage(1))
    model.device = torch.device("cpu")
    for _ in range(2):
        trainer = SimpleNamespace(global_step=0)
        callback.setup(trainer, model, "fit")
        for weight in (5.0, 10.0):
            trainer.global_step += 1
            model.weight.data.fill_(weight)
            callback.on_train_batch_end(trainer, model)
        callback.on_train_end(trainer, model)
        assert model.weight.item() == 9
    # A fit without a step keeps the weights, which may be from a checkpoint that has no average.
    callback.setup(trainer, model, "fit")
    model.weight.data.fill_(3.0)
    callback.on_train_end(trainer, model)
    assert model.weight.item() == 3


class Normalized(Regression):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def on_train_batch_end(self, *_):
        pass


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("options", [{}, {"use_buffers": False, "device": "cpu"}], ids=["default", "options"])
@pytest.mark.parametrize("by", ["step", "epoch"])
def test_averages_are_those_of_lightnings_class_that_asks_when(by, options, tmp_path):
    if WeightAveraging is AverageAtEnd:
        pytest.skip("Lightning has no such class")

    def fit(base):
        class Chosen(base):
            def should_update(self, step_idx=None, epoch_idx=None):
                return epoch_idx in (0, 2) if by == "epoch" else step_idx is not None and step_idx % 3 == 1

        model = Normalized()
        train(model, Chosen(**options), tmp_path, batch_size=4, max_epochs=4)
        return model.state_dict()

    expected, found = fit(WeightAveraging), fit(AverageAtEnd)
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=0, msg=name)


class Quadratic:
    """The gradient of ½‖x − target‖², with noise."""

    def __init__(self, target, fails=False):
        self.target, self.fails = target, fails

    def __call__(self, x, generator):
        if self.fails:
            raise ArithmeticError("no gradient here")
        return x - self.target + 0.1 * torch.randn(len(x), generator=generator)


def rate(t):
    return 1.0 / (20 + t)


def test_one_process_is_the_sequential_algorithm():
    target = torch.linspace(-1, 1, 10)
    x, same = torch.zeros(10), torch.zeros(10)
    run = train_parallel(x, Quadratic(target), rate, 30, 2, processes=1, l2=0.1, seed=4, start_method="fork")
    worker, generator = MemSGD(same, 2, l2=0.1, seed=4), torch.Generator().manual_seed(4)
    for t in range(30):
        worker.step_(Quadratic(target)(same, generator), rate(t))
    assert torch.equal(x, same)
    assert torch.equal(run.memories[0], worker.memory)
    assert run.seconds > 0


@pytest.mark.parametrize("start_method", tiers(["fork", "spawn"], ["fork"]))
def test_two_processes_share_one_vector(start_method):
    target = torch.linspace(-1, 1, 20)
    x = torch.zeros(20)
    run = train_parallel(x, Quadratic(target), rate, 600, 3, "random", start_method=start_method)
    assert (x - target).norm() < 0.2 * target.norm()
    assert len(run.memories) == 2
    assert not torch.equal(*run.memories)  # each its own


@later
def test_a_process_that_fails_ends_all():
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="no gradient here"):
        train_parallel(torch.zeros(4), Quadratic(torch.ones(4), fails=True), rate, 5, 1, start_method="fork")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MemSGD(torch.zeros(4), 5), r"MemSGD\(k=5\): k must be a whole number from 1 to 4"),
        (lambda: MemSGD(torch.zeros(4), 0), r"MemSGD\(k=0\)"),
        (lambda: MemSGD(torch.zeros(4), 1.0), r"MemSGD\(k=1.0\)"),
        (lambda: MemSGD(torch.zeros(4), 1, "topk"), r"MemSGD\(choice='topk'\): choose from top, random"),
        (lambda: MemSGD(torch.zeros(4), 1, l2=-1), r"MemSGD\(l2=-1\)"),
        (lambda: QuadraticAverage(0), r"QuadraticAverage\(shift=0\): shift must be a number above 0"),
        (lambda: QuadraticAverage(math.nan), r"shift=nan"),
        (lambda: MemSGDLR(None, mu=0, shift=1), r"MemSGDLR\(mu=0\): mu must be a number above 0"),
        (lambda: MemSGDLR(None, mu=1, shift=-2), r"MemSGDLR\(shift=-2\)"),
        (lambda: MemSGDLR(None, mu=1, shift=2, gamma=math.inf), r"MemSGDLR\(gamma=inf\)"),
        (lambda: train_parallel(torch.zeros(4), rate, rate, 1, 9), r"k=9"),
        (lambda: train_parallel(torch.zeros(4), rate, rate, 0, 1), r"train_parallel\(steps=0\)"),
        (lambda: train_parallel(torch.zeros(4), rate, rate, 1, 1, processes=0), r"train_parallel\(processes=0\)"),
        (
            lambda: train_parallel(torch.zeros(4), rate, rate, 1, 1, start_method="forkserver"),
            "choose from spawn, fork",
        ),
    ],
)
def test_bad_options_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), [0.0], torch.zeros(2).requires_grad_(), torch.zeros(4)[::2]],
)
def test_weights_must_be_a_vector_to_write_to(x):
    with pytest.raises(TypeError, match="MemSGD"):
        MemSGD(x, 1)
