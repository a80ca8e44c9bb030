"""The callbacks' values against scipy, theory, and results by hand."""

import itertools
import logging.handlers
import math
import re
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch
import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_sparse import METHODS, Method, Reducer, SparseDDPStrategy, logged, method, simulate
from lightning_sparse.callbacks import CommunicationMonitor, ContractionRatio, GradientDistribution
from lightning_sparse.callbacks.base import _TimedObserver
from lightning_sparse.callbacks.communication_monitor import _Norms
from lightning_sparse.callbacks.histogram import BINS, REACH, SMALL, Distribution
from lightning_sparse.compressors import Compressor, Sparsifier, TopK
from lightning_sparse.memory import Residual
from lightning_sparse.strategies.summary import run_summary
from lightning_sparse.update_rule import UpdateRule
from tests.integration.trainers import Loader, Net, lightning_ranks, trainer
from tests.support.tiers import full, later, one_in, tiers

ALL = (GradientDistribution, ContractionRatio, CommunicationMonitor)


def summary(*parts, scale=1.0):
    distribution = Distribution()
    distribution.add([torch.as_tensor(part) for part in parts], scale)
    return distribution.summary()


# Statistics


@pytest.mark.parametrize(
    "sample",
    [
        torch.randn(300_000) * 1e-4,
        torch.randn(200_000) * 1e-30,
        torch.from_numpy(stats.t(5).rvs(200_000, random_state=0)).float(),
        torch.from_numpy(stats.expon(3).rvs(100_000, random_state=0)).float(),
        torch.cat([torch.zeros(50_000), torch.randn(50_000)]),
        torch.randn(1000).bfloat16(),
        torch.tensor([1.0, 2.0]),
    ],
    ids=["normal", "tiny", "heavy tails", "skewed and shifted", "half zeros", "bf16", "two"],
)
def test_statistics_are_scipys(sample):
    found = summary(*sample.split([len(sample) // 3, len(sample) - len(sample) // 3]))
    values = sample.double().numpy()
    mean, std = values.mean(), values.std()
    assert found.numel == len(values)
    assert found.mean == pytest.approx(mean, rel=1e-9, abs=1e-12 * std)
    assert found.std == pytest.approx(std, rel=1e-9)
    assert found.skewness == pytest.approx(stats.skew(values), rel=1e-7, abs=1e-9)
    assert found.excess_kurtosis == pytest.approx(stats.kurtosis(values), rel=1e-7, abs=1e-9)
    assert found.ks_distance == pytest.approx(stats.kstest(values, stats.norm(mean, std).cdf).statistic, abs=0.003)


def test_statistics_by_hand():
    found = summary([-3.0, 0.0], [0.0, 1.0, 2.0])
    assert found.mean == 0
    assert found.std == pytest.approx(math.sqrt(14 / 5))
    assert found.skewness == pytest.approx(-18 / 5 / (14 / 5) ** 1.5)
    assert found.excess_kurtosis == pytest.approx(98 / 5 / (14 / 5) ** 2 - 3)
    assert found.normal_threshold(5) == 0  # all of them
    # Half of a normal distribution lies beyond 0.6745 standard deviations.
    assert summary(torch.tensor([-1.0, 1.0])).normal_threshold(1) == pytest.approx(0.6745, abs=1e-4)
    assert summary([-3.0, 0.0], [0.0, 1.0, 2.0], scale=2.0).std == pytest.approx(2 * found.std)


def test_histogram_keeps_every_element_and_the_shape():
    sample = torch.cat([torch.randn(1_000_000), torch.tensor([50.0, -70.0])])
    found = summary(sample)
    assert len(found.edges) == BINS + 1
    assert found.counts.sum() == pytest.approx(len(sample))
    assert found.edges[[0, -1]] == pytest.approx([found.mean - REACH * found.std, found.mean + REACH * found.std])
    within = np.histogram(sample.numpy(), found.edges)[0]
    # If an edge divides a finer bin, its values count as evenly spread.
    assert found.counts[1:-1] == pytest.approx(within[1:-1], rel=0.02, abs=30)
    assert found.counts[0] == pytest.approx(int((sample < found.edges[1]).sum()), rel=0.1)  # includes all values beyond
    standard = found.standardised()
    assert standard.edges[[0, -1]] == pytest.approx([-REACH, REACH])
    assert standard.counts is found.counts


@pytest.mark.parametrize("sample", [torch.zeros(100), torch.full((1000,), -0.1), torch.tensor([3e38]), -torch.zeros(1)])
def test_no_spread_is_said_to_be_none(sample):
    found = summary(sample)
    assert found.std == 0
    assert found.mean == pytest.approx(float(sample[0]))
    assert math.isnan(found.skewness)
    assert math.isnan(found.ks_distance)
    assert found.edges[0] <= float(sample[0]) <= found.edges[-1]
    assert found.counts.sum() == pytest.approx(len(sample))


@pytest.mark.parametrize("numel", [200, 300_000])
@pytest.mark.parametrize("spread", [10.0**-k for k in range(7)])
def test_higher_moments_of_a_small_spread_are_right_or_not_said(spread, numel):
    sample = 1 + spread * torch.from_numpy(stats.expon.rvs(size=numel, random_state=0)).float()
    found, values = summary(sample), sample.double().numpy()
    if spread >= 1e-2:
        assert not math.isnan(found.skewness + found.excess_kurtosis)
    if spread <= 1e-5:
        assert math.isnan(found.skewness)
        assert math.isnan(found.excess_kurtosis)
    assert math.isnan(found.skewness) or found.skewness == pytest.approx(stats.skew(values), abs=SMALL)
    assert math.isnan(found.excess_kurtosis) or found.excess_kurtosis == pytest.approx(
        stats.kurtosis(values), abs=SMALL
    )


def test_nothing_is_said_about_what_is_not_finite():
    assert summary(torch.empty(0)) is None
    assert summary(torch.tensor([1.0, math.inf])) is None
    assert summary(torch.tensor([math.nan])) is None
    largest = summary(torch.tensor([-3.4e38, 3.4e38]))
    assert largest.mean == 0
    assert largest.std == pytest.approx(3.4e38)


# In the hook, without Lightning


@dataclass(frozen=True)
class Halves(Compressor):
    """Sends everything, rounded to whole numbers."""

    def compress(self, u, ctx):
        return (u.round(),), u.round()

    def decode(self, payload, ctx):
        return payload[0]

    def nbytes(self, segment, density):
        return segment.numel


def observe(callback, of, grads, *, steps=1, **options):
    """Return the observers of some steps with equal gradients on one rank, and the reducer."""

    def rank(comm):
        reducer = Reducer(of, comm, **options)
        reducer.setup(grads)
        for _ in range(steps):
            reducer.observers = [callback.observer(reducer)]
            reducer.reduce_({name: grad.clone() for name, grad in grads.items()})
            yield reducer.observers[0], reducer

    return simulate(1, lambda comm: list(rank(comm)))[0]


def contraction(of, grads, per_layer=False, **options):
    callback = ContractionRatio(per_layer)
    ((seen, _),) = observe(callback, of, grads, **options)
    found = callback.report(seen, None, 0)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def test_contraction_by_hand():
    grads = {"a": torch.tensor([3.0, 0.0, 0.0, 0.0]), "b": torch.tensor([1.0, 0.0, 1.0, 1.0])}
    found = contraction(method("topk", density=0.25), grads, per_layer=True, granularity="model")
    assert found == {
        "contraction/measured": pytest.approx(2 / 12),
        "contraction/bound_any_u": 0.75,
        "contraction/bound_bell_shaped_u": 0.5625,
        "layers/a/contraction/measured": 0,
        "layers/a/contraction/bound_any_u": 0.75,
        "layers/a/contraction/bound_bell_shaped_u": 0.5625,
        "layers/b/contraction/measured": pytest.approx(2 / 3),
        "layers/b/contraction/bound_any_u": 0.75,
        "layers/b/contraction/bound_bell_shaped_u": 0.5625,
    }


def test_contraction_in_theory():
    grads = {"u": torch.randn(400_000)}
    z = stats.norm.isf(0.005)
    lost = 1 - 2 * (z * stats.norm.pdf(z) + stats.norm.sf(z))  # the part of ‖u‖² within ±z
    for name, tolerance in (("topk", 0.003), ("gaussiank", 0.02)):
        found = contraction(method(name, density=0.01), grads)
        assert found["contraction/measured"] == pytest.approx(lost, abs=tolerance)
        assert found["contraction/measured"] < found["contraction/bound_bell_shaped_u"] < 1
    assert contraction(method("randk", density=0.1), grads)["contraction/measured"] == pytest.approx(0.9, abs=0.005)
    equal = contraction(method("topk", density=0.1), {"u": -torch.ones(1000)})
    assert equal["contraction/measured"] == pytest.approx(equal["contraction/bound_any_u"]) == pytest.approx(0.9)


def test_contraction_of_what_is_sent_whole():
    grads = {"a": torch.randn(30), "b": torch.randn(2)}
    found = contraction(method("dense"), grads, per_layer=True)
    assert len(found) == 9
    assert set(found.values()) == {0}
    rounded = contraction(Method(Halves()), {"a": torch.tensor([1.25, 3.0])})
    assert rounded == {"contraction/measured": pytest.approx(0.25**2 / (1.25**2 + 9))}  # there is no k


def test_contraction_of_nothing():
    found = contraction(method("topk", density=0.5), {"a": torch.zeros(4)})
    assert found == {"contraction/bound_any_u": 0.5, "contraction/bound_bell_shaped_u": 0.25}


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_distributions_of_gradient_residual_and_sum(granularity, per_layer):
    grads = {"a": torch.tensor([4.0, -1.0]), "b": torch.tensor([2.0, 0.0])}
    callback = GradientDistribution(per_layer)
    _, (seen, _) = observe(callback, method("topk", density=0.5), grads, steps=2, granularity=granularity)
    # The first step sends 4 and 2 and keeps the rest, so u is 4, -2, 2, 0 in the second.
    found = callback.report(seen, SimpleNamespace(loggers=[]), 0)
    assert found["distribution/g_mean"] == 5 / 4
    assert found["distribution/e_mean"] == -1 / 4
    assert found["distribution/u_mean"] == 1
    assert found["distribution/u_std"] == pytest.approx(math.sqrt(5))
    assert found["distribution/threshold_sent"] == 2
    z = stats.norm.isf(0.25)
    assert found["distribution/threshold_if_normal"] == pytest.approx(1 + z * math.sqrt(5))
    assert ("layers/a/u_mean" in found) is per_layer
    if per_layer:
        assert found["layers/a/u_mean"] == 1
        assert found["layers/a/u_std"] == 3
        assert found["layers/b/u_mean"] == 1
        assert found["layers/a/threshold_sent"] == 4
        assert found["layers/b/threshold_sent"] == 2


@pytest.mark.parametrize("name", ["topk", "local_sgd"])
def test_segments_that_wait_for_their_exchange_count_as_those_that_do_not(name):
    """With overlap="next_step", all segments begin before one ends."""
    chosen = method(name, density=0.5) if name == "topk" else method(name)
    grads = {"a": torch.tensor([4.0, -1.0, 3.0]), "b": torch.tensor([2.0, 0.0]), "c": torch.randn(5, 2)}

    def rank(comm, waits):
        reducer = Reducer(chosen, comm, granularity="layer", exchanged="update")
        reducer.setup(grads)
        norms, losses = reducer.observers = [_Norms(drifts=True), ContractionRatio(per_layer=True).observer(reducer)]
        grad_of = {key: (x * (1 + comm.rank)).view(-1) for key, x in grads.items()}
        begun = []
        for segment in reducer.layout.segments:
            begun.append(reducer.begin(segment, [grad_of[key] for key in segment.names]))
            while begun and not waits:
                reducer.finish(begun.pop())
        for each in begun:
            reducer.finish(each)
        sums = {key: list(values) for key, values in losses.sums.items()}
        return norms.difference, norms.mean, norms.density, sums

    assert repr(simulate(2, lambda comm: rank(comm, True))) == repr(simulate(2, lambda comm: rank(comm, False)))


def test_only_the_last_reduction_of_a_batch_counts():
    def rank(comm):
        reducer = Reducer(method("dense"), comm)
        watch = _TimedObserver(lambda: GradientDistribution().observer(reducer), 0)
        reducer.observers = [watch]
        for value in (1.0, 5.0):
            reducer.reduce_({"a": torch.full((3,), value)})
        return watch.observer.wholes["u"].summary().mean, watch.observer.wholes["u"].numel, watch.seconds

    (mean, numel, seconds) = simulate(1, rank)[0]
    assert (mean, numel) == (5, 3)
    assert seconds > 0


@dataclass(frozen=True)
class FirstK(Sparsifier):
    """Never looks at the rest."""

    density: float = 0.25

    def choose(self, u, k, ctx):
        return torch.arange(k)


@one_in(2)
@pytest.mark.parametrize(("compressor", "told"), [(FirstK(), 1), (TopK(0.25), 0), (TopK(0.02), 0)])
def test_a_residual_that_grows_without_bound_is_told_once(compressor, told):
    monitor = CommunicationMonitor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seen, reducer in observe(monitor, Method(compressor), {"a": torch.randn(100)}, steps=300):
            norm = math.sqrt(seen.residual)
            monitor._check(norm, math.sqrt(seen.gradient), seen.sent / seen.numel, reducer.step)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == told
    if told:
        assert "still growing, and beyond" in messages[0]
        assert "density 0.25" in messages[0]
        assert "strategy='topk_ddp'" in messages[0]


def test_a_large_residual_that_shrinks_is_not_told():
    monitor = CommunicationMonitor()
    for step, norm in enumerate([100, 200, 300, 400, 500, 400, 600]):
        monitor._check(norm, 1.0, 0.5, step)


# In Lightning


def fit(folder, callbacks, *, size=1, net=None, strategy=None, loggers=("tensorboard", "csv"), batches=8, **options):
    """Fit in forked ranks; return rank 0's weights, the messages of callbacks and strategy, and observers by step."""

    def rank(rank):
        made = {
            "tensorboard": lambda: TensorBoardLogger(folder, name="", version="tensorboard"),
            "csv": lambda: CSVLogger(folder, name="", version="csv"),
        }
        model = net() if net else Counted()
        lines = logging.handlers.BufferingHandler(1000)
        for name in ("pytorch_lightning", "lightning_sparse"):  # the second logger works if pytest has set up logging
            logging.getLogger(name).addHandler(lines)
            logging.getLogger(name).setLevel(logging.INFO)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", "(GradientDistribution|ContractionRatio|CommunicationMonitor): ")
            trained = trainer(
                strategy() if strategy else SparseDDPStrategy("topk", density=0.05),
                size,
                callbacks=callbacks,
                logger=[made[name]() for name in loggers],
                **{"log_every_n_steps": 3, "default_root_dir": folder, "enable_checkpointing": False, **options},
            )
            path = options.get("ckpt_path")
            trained.fit(model, Loader(rank, size, batches), ckpt_path=path)
        said = [str(warning.message) for warning in caught]
        return {
            "weights": model.weights.numpy() if hasattr(model, "weights") else None,
            "said": said + [line.getMessage() for line in lines.buffer],
            "observers": getattr(model, "observers", None),
            "sent": trained.strategy.reducer.comm.sent_bytes if hasattr(trained.strategy, "reducer") else None,
            "bar": {name: float(value) for name, value in trained.progress_bar_metrics.items()},
        }

    return lightning_ranks(size, rank)


class Counted(Net):
    """Notes in each step who observes."""

    def __init__(self):
        super().__init__(momentum=0.9)
        self.observers = []

    def on_before_optimizer_step(self, _):
        self.observers.append(len(self.trainer.strategy.reducer.observers))


def events(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()
    return found, found.Tags()


def steps(found, tag):
    return [event.step for event in found.Scalars(tag)]


def test_what_is_logged_and_when(tmp_path):
    (with_all,) = fit(tmp_path, [GradientDistribution(True), ContractionRatio(True), CommunicationMonitor()])
    (without,) = fit(tmp_path / "without", [], loggers=())
    assert with_all["weights"].tolist() == without["weights"].tolist()
    # The third and the sixth of eight steps log, and only these have observers.
    assert with_all["observers"] == [0, 0, 3, 0, 0, 3, 0, 0]
    found, tags = events(tmp_path / "tensorboard")
    ours = [tag for tag in tags["scalars"] if tag not in ("epoch", "hp_metric")]
    # A layer without sent entries has no threshold.
    assert all(steps(found, tag) == [2, 5] for tag in ours if not re.match("layers/.*/threshold", tag))
    for tag in (
        "distribution/u_skewness",
        "distribution/e_ks_distance",
        "distribution/threshold_if_normal",
        "layers/layers.0.weight/u_excess_kurtosis",
        "contraction/measured",
        "layers/embedding.weight/contraction/bound_any_u",
        "communication/bytes_total",
        "communication/density",
        "residual/times_gradient",
        "seconds/select",
        *(f"monitoring_cost/{callback.__name__}_ms" for callback in ALL),
    ):
        assert tag in ours, tag
    assert all(math.isfinite(event.value) for tag in ours for event in found.Scalars(tag))
    elements = sum(param.numel() for param in Net().parameters())
    for quantity in ("gradient g", "residual e", "u = g + e"):
        for group in ("distribution", "distribution_in_stds"):
            assert [event.step for event in found.Histograms(f"{group}/{quantity}")] == [2, 5]
            histogram = found.Histograms(f"{group}/{quantity}")[-1].histogram_value
            assert histogram.num == elements
            assert sum(histogram.bucket) == pytest.approx(elements)
        assert f"layers/layers.0.weight/{quantity}" in tags["histograms"]
    rows = (tmp_path / "csv" / "metrics.csv").read_text()
    assert "distribution/u_std" in rows
    assert "contraction/measured" in rows
    assert any("TensorBoard: tensorboard --logdir " in line for line in with_all["said"])
    assert with_all["bar"]["density"] == pytest.approx(0.05, abs=0.02)


def test_charts_name_tags_that_exist(tmp_path):
    fit(tmp_path, [ContractionRatio(True), GradientDistribution(), CommunicationMonitor()], size=2)
    found, tags = events(tmp_path / "tensorboard")
    layout = layout_pb2.Layout()
    layout.ParseFromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    (whole,) = [patterns for title, patterns in charts.items() if "(1 − k/d)²" in title]
    assert len(whole) == 3
    assert len([title for title in charts if title == "layers.0.weight"]) == 1
    for pattern in itertools.chain.from_iterable(charts.values()):
        assert any(re.match(pattern, tag) for tag in tags["scalars"]), pattern


def test_bytes_are_exact_on_two_ranks(tmp_path):
    (first, second) = fit(tmp_path, [callback() for callback in ALL], size=2, batches=7)
    (other, _) = fit(tmp_path / "without", [], size=2, batches=7, loggers=())
    assert first["weights"].tolist() == second["weights"].tolist() == other["weights"].tolist()
    # Only rank 0 looks.
    assert first["observers"] == [0, 0, 3, 0, 0, 3, 0]
    assert second["observers"] == [0] * 7
    found, _ = events(tmp_path / "tensorboard")
    per_step = first["sent"] / 7
    assert [event.value for event in found.Scalars("communication/bytes_per_step")] == [per_step] * 2
    assert [event.value for event in found.Scalars("communication/bytes_total")] == [3 * per_step, 6 * per_step]
    elements = sum(param.numel() for param in Net().parameters())
    # Two ranks send 2(P − 1)/P of 4 bytes, or of 2, for each element.
    for kind, size in (("fp32", 4), ("bf16", 2)):
        times = found.Scalars(f"communication/times_fewer_than_{kind}")[-1].value
        assert times == pytest.approx(size * elements / per_step)
    assert first["bar"]["x_fewer_bytes"] == pytest.approx(4 * elements / per_step, rel=1e-4)
    assert 0 <= found.Scalars("seconds/hidden_share")[-1].value <= 1
    (line,) = [line for line in first["said"] if "TensorBoard" in line]
    assert line.startswith("TopK(density=0.05) + Residual() + Mean() on 2 ranks; ")
    assert f"{elements:,} parameters in 1 segment" in line
    assert f"dense fp32 {4 * elements:,}" in line
    assert not second["said"]


class TwoOptimizers(Net):
    """Steps an optimizer for each half of the parameters."""

    automatic_optimization = False

    def configure_optimizers(self):
        params = [*self.parameters()]
        return [torch.optim.AdamW(half, 0.01) for half in (params[:2], params[2:])]

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers():
            optimizer.step()


@later
def test_savings_with_several_optimizers_are_those_of_all_their_steps(tmp_path):
    # Without rescaling ranks do not compare gradients in some steps.
    equal = replace(method("topk", density=0.05), update_rule=UpdateRule(rescale=False))
    strategy = lambda: SparseDDPStrategy(equal, exchange="update", broadcast_buffers=False)  # noqa: E731
    first, _ = fit(tmp_path, [CommunicationMonitor()], net=TwoOptimizers, strategy=strategy, size=2, batches=6)
    found, _ = events(tmp_path / "tensorboard")
    # Two ranks would send 4 bytes of each gradient, once in a batch.
    dense = 4 * sum(param.numel() for param in Net().parameters())
    times = found.Scalars("communication/times_fewer_than_fp32")[-1].value
    assert times == pytest.approx(dense / (first["sent"] / 6))
    assert found.Scalars("communication/bytes_per_step")[-1].value == pytest.approx(first["sent"] / 12)


@later
def test_savings_stay_true_if_a_layer_is_unfrozen(tmp_path):
    class Unfreezes(Net):
        def __init__(self):
            super().__init__(torch.optim.AdamW)
            self.embedding.requires_grad_(False)

        def on_train_batch_start(self, batch, index):
            self.embedding.requires_grad_(index >= 4)

    strategy = lambda: SparseDDPStrategy("topk", density=0.05, broadcast_buffers=False)  # noqa: E731
    options = {"log_every_n_steps": 6, "batches": 6}
    first, _ = fit(tmp_path, [CommunicationMonitor()], net=Unfreezes, strategy=strategy, size=2, **options)
    found, _ = events(tmp_path / "tensorboard")
    net = Net()
    numel, late = sum(param.numel() for param in net.parameters()), net.embedding.weight.numel()
    dense = 4 * (4 * (numel - late) + 2 * numel)
    assert found.Scalars("communication/times_fewer_than_fp32")[-1].value == pytest.approx(dense / first["sent"])


@full
@pytest.mark.parametrize("name", ["topk", "gtopk", "scalecom"])
def test_bounds_are_logged_if_all_sent_entries_are_in_the_result_and_ranks_choose_them(name, tmp_path):
    callbacks = [ContractionRatio(), GradientDistribution()]
    fit(tmp_path, callbacks, strategy=lambda: SparseDDPStrategy(name, density=0.05), size=2)
    found, tags = events(tmp_path / "tensorboard")
    assert {"contraction/measured", "distribution/u_std"} <= {*tags["scalars"]}
    layout = found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0].decode(errors="ignore")
    for tag in ("contraction/bound_any_u", "contraction/bound_bell_shaped_u", "distribution/threshold_sent"):
        assert (tag in tags["scalars"]) == (tag.split("/")[1] in layout) == (name == "topk"), tag


@later
def test_charts_and_advise_find_the_names_of_a_logger_with_a_prefix(tmp_path):
    def rank(rank):
        logger = TensorBoardLogger(tmp_path, name="", version="", prefix="mine")
        trained = trainer(
            SparseDDPStrategy("topk", density=0.05),
            2,
            callbacks=[CommunicationMonitor()],
            logger=logger,
            log_every_n_steps=3,
            default_root_dir=tmp_path,
        )
        trained.fit(Net(), Loader(rank, 2, 6))
        values = {"topk_ms": 2.0, "chosen_ms": 2.0, "link_mbit": 100.0, "message_ms": 1.0}
        logger.log_metrics({f"auto_ddp/{name}": value for name, value in values.items()}, 60)
        logger.finalize("success")  # a thread writes the file; `fit` has waited for the first file only

    lightning_ranks(2, rank)
    found, tags = events(tmp_path)
    layout = layout_pb2.Layout()
    layout.ParseFromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    patterns = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    assert patterns
    for pattern in patterns:
        assert any(re.match(pattern, tag) for tag in tags["scalars"]), pattern
    text = logged.table(tmp_path)
    assert re.search(r"topk +2\.0  trains", text)
    assert logged.table(Path(text.partition(", step")[0])) == text  # of the file that it names


@dataclass(frozen=True)
class SlowTopK(TopK):
    """Takes at least 30 ms to select entries, and 30 ms to add the entries of all ranks."""

    def choose(self, u, k, ctx):
        time.sleep(0.03)
        return super().choose(u, k, ctx)

    def mean(self, payloads, ctx):
        time.sleep(0.03)
        return super().mean(payloads, ctx)


@later
def test_seconds_of_an_exchange_that_overlaps_the_next_step_are_those_of_all_steps(tmp_path):
    """Every second step logs, while its exchange has just begun."""

    def strategy():
        return SparseDDPStrategy(Method(SlowTopK(0.05), Residual()), exchange="update", overlap="next_step")

    options = {"log_every_n_steps": 2, "batches": 8}
    fit(tmp_path, [CommunicationMonitor()], net=lambda: Net(torch.optim.AdamW), strategy=strategy, size=2, **options)
    found, _ = events(tmp_path / "tensorboard")
    assert [event.value for event in found.Scalars("seconds/select") if event.value < 0.06] == []
    # The half that adds the entries of all ranks may overlap with the next step, which computes for much less time.
    assert all(event.value < 0.5 for event in found.Scalars("seconds/hidden_share"))


def test_seconds_of_the_selection_have_no_collectives():
    """In the agreement on a step, ranks wait for the slowest one."""

    def rank(comm):
        reducer = Reducer(Method(SlowTopK(0.5), Residual()), comm, clip_norm=1.0)
        time.sleep(0.2 * comm.rank)
        reducer.reduce_({"a": torch.ones(8)})
        return reducer.seconds["select"], comm.seconds

    (select, communicated), _ = simulate(2, rank)
    assert communicated > 0.15
    assert 0.06 <= select < communicated


def test_accumulated_batches_log_like_lightning(tmp_path):
    fit(tmp_path, [ContractionRatio()], accumulate_grad_batches=2, log_every_n_steps=2, max_epochs=2, batches=5)
    found, _ = events(tmp_path / "tensorboard")
    assert steps(found, "contraction/measured") == [1, 3, 5]  # three steps an epoch


def test_resume_goes_on_counting(tmp_path):
    class Stops(Net):
        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 4:
                self.trainer.save_checkpoint(tmp_path / "four.ckpt")

    def rank(rank):
        results = []
        for path in (None, tmp_path / "four.ckpt"):
            monitor = CommunicationMonitor()
            logger = TensorBoardLogger(tmp_path, name="", version=f"resumed{path is not None}")
            options = {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 1, "max_epochs": 1}
            trained = trainer("topk_ddp", 2, **options, default_root_dir=tmp_path)
            trained.fit(Stops(), Loader(rank, 2, 6), ckpt_path=path)
            results.append(monitor.state_dict()["sent_total"])
        return results

    (straight, resumed), _ = lightning_ranks(2, rank)
    assert straight == resumed
    found, _ = events(tmp_path / "resumedTrue")
    assert steps(found, "communication/bytes_total") == [4, 5]
    assert found.Scalars("communication/bytes_total")[-1].value == straight


class Adversaries(pl.LightningModule):
    """Two networks, two optimizers, two backward passes in a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        for optimizer, network in zip(self.optimizers(), (self.a, self.b), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(network(torch.randn(2, 4)).pow(2).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(network.parameters(), 0.1) for network in (self.a, self.b)], []


def test_several_backward_passes_in_a_batch(tmp_path):
    strategy = lambda: SparseDDPStrategy("topk", density=0.1, find_unused_parameters=True)  # noqa: E731
    fit(tmp_path, [callback() for callback in ALL], net=Adversaries, strategy=strategy)
    found, _ = events(tmp_path / "tensorboard")
    assert steps(found, "contraction/measured") == [2, 5]
    assert found.Histograms("distribution/u = g + e")[0].histogram_value.num == 40


class Skips(Counted):
    def training_step(self, batch, index):
        return None if index == 2 else super().training_step(batch, index)


def test_a_batch_without_backward_logs_nothing(tmp_path):
    fit(tmp_path, [callback() for callback in ALL], net=Skips)
    found, _ = events(tmp_path / "tensorboard")
    assert steps(found, "contraction/measured") == [5]


class StepsEveryFourth(Counted):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(super().training_step(batch, index))
        if (index + 1) % 4 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("overlap", ["none", "next_step"])
def test_gradients_that_the_user_accumulates_log_at_the_next_step(tmp_path, overlap):
    strategy = lambda: SparseDDPStrategy("topk", density=0.05, exchange="update", overlap=overlap)  # noqa: E731
    options = {"net": StepsEveryFourth, "strategy": strategy, "batches": 20, "log_every_n_steps": 5}
    fit(tmp_path, [callback() for callback in ALL], **options)
    found, _ = events(tmp_path / "tensorboard")
    for tag in ("contraction/measured", "distribution/u_skewness", "communication/bytes_per_step"):
        assert steps(found, tag) == [7, 11, 15, 19], tag
    assert len({event.value for event in found.Scalars("communication/bytes_per_step")}) == 1


class EndsEpochs(Counted):
    def on_train_batch_start(self, batch, index):
        return -1 if index == 2 else None


def test_a_batch_that_is_left_out_leaves_nobody_watching(tmp_path):
    (result,) = fit(tmp_path, [callback() for callback in ALL], net=EndsEpochs, max_epochs=2)
    # Lightning has counted two steps in each epoch, the third of which logs.
    assert result["observers"] == [0, 0, 3, 0]
    found, _ = events(tmp_path / "tensorboard")
    assert steps(found, "contraction/measured") == [2]


def test_the_first_line_and_what_it_counts():
    def rank(comm):
        reducer = Reducer(method("topk", density=0.125), comm, density_warmup=[0.5], density_warmup_steps=100)
        reducer.setup({"a": torch.zeros(8), "b": torch.zeros(8)})
        # Two ranks send 2(P − 1)/P times 4 bytes, or 4 for each of k entries and k + 16 bits; all of them is no less.
        assert reducer.routing.dense_nbytes == 64
        assert [reducer.routing.nbytes(density) for density in (0.125, 0.25, 1.0)] == [11, 19, 64]
        return run_summary(reducer, [])

    assert simulate(2, rank)[0] == (
        "TopK(density=0.125) + Residual() + Mean() on 2 ranks, after a warm-up at "
        "density 0.5, 100 steps each; 16 parameters in 1 segment; bytes per step and rank: 11, dense fp32 64 "
        "(5.82 times as many)."
    )


@pytest.mark.parametrize(("density", "dense"), [(0.001, 2), (0.125, 2), (1.0, 1002)])
def test_the_first_line_says_how_many_elements_go_dense(density, dense):
    def rank(comm):
        reducer = Reducer(method("topk", density=density), comm, granularity="layer")
        reducer.setup({"weight": torch.zeros(1000), "scale": torch.zeros(1), "bias": torch.zeros(1)})
        return run_summary(reducer, [])

    expected = f"; 1,002 parameters in 3 segments; {dense:,} of them fall back to dense, because TopK would"
    assert expected in simulate(2, rank)[0]


def test_the_first_line_of_a_dense_method_and_of_one_rank_says_nothing_of_dense_elements():
    def rank(comm):
        reducer = Reducer(method("topk" if comm.size == 1 else "dense"), comm)
        reducer.setup({"bias": torch.zeros(2)})
        return run_summary(reducer, [])

    assert all("fall back to dense" not in simulate(size, rank)[0] for size in (1, 2))


@pytest.mark.parametrize("name", tiers(METHODS, ["dense", "topk", "signsgd"]))
def test_every_method_can_be_watched(name, tmp_path):
    fit(
        tmp_path,
        [GradientDistribution(True), ContractionRatio(True), CommunicationMonitor()],
        strategy=lambda: SparseDDPStrategy(name, local_steps=2 if method(name).local_steps > 1 else None),
    )
    found, tags = events(tmp_path / "tensorboard")
    assert "distribution/u_std" in tags["scalars"]
    if name == "dense":
        assert [event.value for event in found.Scalars("contraction/measured")] == [0, 0]
        assert "residual/norm" not in tags["scalars"]
        assert "distribution/residual e" not in tags["histograms"]


def test_no_logger(tmp_path):
    (result,) = fit(tmp_path, [callback() for callback in ALL], loggers=())
    warned = [line for line in result["said"] if "has no logger" in line]
    assert [line.split(":")[0] for line in warned] == ["GradientDistribution", "ContractionRatio"]
    assert "Trainer(logger=TensorBoardLogger(...))" in warned[0]
    assert result["observers"] == [0, 0, 1, 0, 0, 1, 0, 0]  # the progress bar's
    assert "density" in result["bar"]


def test_a_logger_without_histograms(tmp_path):
    (result,) = fit(tmp_path, [callback() for callback in ALL], loggers=("csv",))
    (warned,) = [line for line in result["said"] if line.startswith("GradientDistribution")]
    assert "CSVLogger does not support histograms" in warned
    assert "TensorBoardLogger" in warned
    assert "distribution/u_std" in (tmp_path / "csv" / "metrics.csv").read_text()
    assert not any("TensorBoard:" in line for line in result["said"])


@pytest.mark.parametrize("every", [9, 0])
def test_a_run_that_never_logs(every, tmp_path):
    (result,) = fit(tmp_path, [callback() for callback in ALL], log_every_n_steps=every)
    warned = [
        line for line in result["said"] if f"none of the steps 1 to 8 logs, since log_every_n_steps={every}" in line
    ]
    assert [line.split(":")[0] for line in warned] == [callback.__name__ for callback in ALL]
    assert result["observers"] == [0] * 8


def test_fast_dev_run(tmp_path):
    (result,) = fit(tmp_path, [callback() for callback in ALL], fast_dev_run=True)
    assert result["observers"] == [3]
    assert not [line for line in result["said"] if line.startswith(tuple(callback.__name__ for callback in ALL))]


@pytest.mark.parametrize("callback", ALL)
def test_another_strategy_is_refused(callback, tmp_path):
    with pytest.raises(TypeError, match=rf"{callback.__name__} observes .* strategy is DDPStrategy\. Use .*'topk_ddp'"):
        fit(tmp_path, [callback()], strategy=lambda: "ddp", net=Net)


@pytest.mark.parametrize("namespace", [pl, lightning.pytorch], ids=lambda namespace: namespace.__name__)
def test_both_namespaces_take_them(namespace):
    made = [callback() for callback in ALL]
    assert all(isinstance(callback, namespace.Callback) for callback in made)
    trained = namespace.Trainer(accelerator="cpu", callbacks=made, logger=False, enable_progress_bar=False)
    assert set(made) <= set(trained.callbacks)
    cli = __import__(f"{namespace.__name__}.cli", fromlist=["LightningArgumentParser"])
    parser = cli.LightningArgumentParser()
    parser.add_lightning_class_args(namespace.Trainer, "trainer")
    configured = parser.parse_object(
        {
            "trainer": {
                "callbacks": [
                    {"class_path": "lightning_sparse.callbacks.GradientDistribution", "init_args": {"per_layer": True}},
                    {"class_path": "lightning_sparse.callbacks.CommunicationMonitor"},
                ]
            }
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jsonargparse is about to rename this
        first, second = parser.instantiate_classes(configured).trainer.callbacks[:2]
    assert isinstance(first, GradientDistribution)
    assert first.per_layer
    assert isinstance(second, CommunicationMonitor)


def test_drift_by_hand():
    """Rank 0 changes one entry by 3, and the mean is 2: it is off by 1, relative to 2."""

    def rank(comm):
        seen = _Norms(drifts=True)
        reducer = Reducer("local_sgd", comm, exchanged="update")
        reducer.observers.append(seen)
        reducer.reduce_({"w": torch.tensor([[3.0, 0.0], [1.0, 0.0]][comm.rank])})
        return math.sqrt(seen.difference / seen.mean)

    assert simulate(2, rank) == [0.5, 0.5]


@later
def test_bytes_where_validation_and_the_end_ask_for_the_exchange(tmp_path):
    """Every second step instead of every fourth, and in the end after one."""
    monitor = CommunicationMonitor()

    class Validates(Net):
        def validation_step(self, batch, index):
            self.training_step(batch, index)

    def rank(rank):
        logger = CSVLogger(tmp_path, name="", version="0")
        options = {"callbacks": [monitor], "logger": logger, "log_every_n_steps": 1, "max_epochs": 1}
        strategy = SparseDDPStrategy("topk", density=0.05, exchange="update", local_steps=4)
        trained = trainer(strategy, 2, **options, default_root_dir=tmp_path, val_check_interval=2)
        trained.fit(Validates(), Loader(rank, 2, 5), Loader(rank, 2, 1))
        reducer = trained.strategy.reducer
        return reducer.step, reducer.layout.numel

    (exchanges, elements), _ = lightning_ranks(2, rank)
    assert exchanges == 3
    found = pd.read_csv(tmp_path / "0" / "metrics.csv").dropna(subset="communication/bytes_total")
    each = found["communication/bytes_total"].iloc[0]
    assert 4 * 0.05 * elements < each < 1000  # entries, their indices and the buffers
    assert found["communication/bytes_total"].tolist() == [each, 2 * each, 3 * each]
    assert found["communication/bytes_per_step"].tolist() == [each / 2, each / 2, each]


@later
def test_local_steps_that_only_torch_counts(tmp_path):
    """Raw optimizers in manual optimization; every second step logs, and every fourth has an exchange."""

    class Raw(Net):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

    def rank(rank):
        logger = CSVLogger(tmp_path, name="", version="0")
        options = {"callbacks": [CommunicationMonitor()], "logger": logger, "log_every_n_steps": 2, "max_epochs": 1}
        strategy = SparseDDPStrategy("topk", density=0.05, exchange="update", local_steps=4)
        trainer(strategy, 2, **options, default_root_dir=tmp_path).fit(Raw(), Loader(rank, 2, 8))

    lightning_ranks(2, rank)
    found = pd.read_csv(tmp_path / "0" / "metrics.csv").dropna(subset="communication/bytes_total")
    total = found["communication/bytes_total"].tolist()
    assert found["communication/bytes_per_step"].tolist() == [total[0] / 4, (total[1] - total[0]) / 4]
    assert (found["seconds/exchange"] > 0).all()


def test_a_step_that_takes_its_batches_itself(tmp_path):
    class Takes(Net):
        def training_step(self, dataloader_iter):
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    fit(tmp_path, [CommunicationMonitor()], net=Takes)
