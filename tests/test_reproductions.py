"""`python -m reproductions`: its common code, and every finding at a tiny size."""

import re
import runpy
import sys

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import numpy as np
import pandas as pd

from benchmarks.harness import plots, table
from examples.data.digits import digits
from lightning_sparse.compressors import TopK
from lightning_sparse.context import Context
from lightning_sparse.contrib.memsgd import MemSGD
from lightning_sparse.contrib.qsgd import QSGD
from lightning_sparse.contrib.randk import RandK
from lightning_sparse.exchange import NonFiniteGradient
from reproductions import (
    FINDINGS,
    command,
    error_feedback,
    frame,
    gaussiank_selection,
    memsgd,
    scaling_efficiency,
    signsgd,
    volume,
)
from reproductions.digits import network, train
from reproductions.error_feedback import gradient, value
from reproductions.gaussiank_contraction import contraction, of_normal
from reproductions.logistic import Logistic, data_from, dense_data, sparse_data
from reproductions.memsgd import bits_to
from tests.support.tiers import full, tiers

TINY = {
    "memsgd": "--steps 12 --dense 40 --sparse 120",
    "gaussiank-contraction": "--numel 1000 --vectors 2",
    "gaussiank-selection": "--largest 10000 --turns 1",
    "gaussiank-distributions": "--steps 2 --draws 2",
    "sparse-accuracy": "--steps 1 --hidden 32",
    "error-feedback": "--steps 2 --examples 20 --repeats 1",
    "volume": "--elements 20000 --most 4",
    "scaling-efficiency": "--largest 300000",
    "layer-wise": "--steps 1 --repeats 1",
    "terngrad-qsgd": "--steps 1 --repeats 1",
    "signsgd": "--epochs 1",
}


def tiny(name, out):
    return [name, *TINY[name].split(), "--out", str(out)]


@full
@pytest.mark.parametrize("name", tiers(FINDINGS, ["layer-wise"]))
def test_every_finding_runs_draws_and_says_whether_it_held(name, tmp_path, capsys):
    command.main(tiny(name, tmp_path))
    said = capsys.readouterr().out
    assert "Held here: " in said or "Did not hold here: " in said
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000
    runs = len(table.load_texts(tmp_path / f"{name}.csv"))
    assert runs > 1
    # All runs exist: a second call adds none, and the figure is drawn from the file only.
    (tmp_path / f"{name}.png").unlink()
    command.main(tiny(name, tmp_path))
    assert ": 0 of " in capsys.readouterr().out
    command.main([name, "--figure", "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.png").exists()
    assert len(table.load_texts(tmp_path / f"{name}.csv")) == runs
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.csv", f"{name}.png"]


def test_efficiency_is_computing_over_computing_and_work_and_exchange(tmp_path):
    dense = scaling_efficiency.run({"link": "1 Gbit/s", "model": "VGG-16", "method": "dense"}, {})
    exchange = 62 * 0.436e-3 + 2 * 4 * 14_728_266 * 31 / 32 * 9e-9  # 62 messages, β of the paper
    assert dense["exchange_s"] == pytest.approx(exchange, rel=1e-6)
    assert dense["efficiency_percent"] == pytest.approx(100 * 0.14 / (0.14 + exchange), rel=1e-6)
    work, sent = scaling_efficiency.reduced("gtopk", 5000, 3, 0.01)
    assert work > 0
    assert sent == volume.measure("gtopk", 3, 5000, 0.01, "compact")["busiest_bytes"]
    with pytest.raises(SystemExit, match="--largest 1000: the smallest model has 272474"):
        frame.reproduce(scaling_efficiency.FINDING, {"density": 0.1, "largest": 1000}, tmp_path)


def test_a_gradient_that_is_not_finite_ends_the_training(monkeypatch):
    given = []

    def reduce(reducer, grads):
        given.append(reducer.comm.rank)
        raise NonFiniteGradient("as in a test")

    monkeypatch.setattr(signsgd.Reducer, "reduce_", reduce)
    _, steps = signsgd.train(signsgd.CONTESTANTS["mean"], "", 0.0, epochs=3, seed=0)
    assert steps == 0
    assert sorted(given) == list(range(signsgd.RANKS))


def test_selection_is_timed_where_what_is_chosen_is_right(tmp_path, monkeypatch):
    row = gaussiank_selection.run({"numel": 5000, "method": "topk"}, {"density": 0.01, "seed": 0, "turns": 1})
    assert (row["k"], row["chosen"]) == (50, 50)
    monkeypatch.setitem(gaussiank_selection.METHODS, "topk", lambda u, density: torch.arange(50))
    with pytest.raises(AssertionError, match="does not select the largest entries"):
        gaussiank_selection.run({"numel": 5000, "method": "topk"}, {"density": 0.01, "seed": 0, "turns": 1})
    config = {"largest": 100, "density": 0.01, "turns": 1, "seed": 0}
    with pytest.raises(SystemExit, match="--largest 100: give at least 10,000"):
        frame.reproduce(gaussiank_selection.FINDING, config, tmp_path)
    with pytest.raises(SystemExit, match=r"--density 2\.0: must be a share"):
        frame.reproduce(gaussiank_selection.FINDING, {**config, "largest": 10_000, "density": 2.0}, tmp_path)


def finding(run):
    def draw(found):
        figure, ((panel,),) = plots.panels(1, 1, 2)
        panel.plot(found["x"], found["y"])
        return figure

    config = {"size": 3, "seed": 0}
    return frame.Finding(
        "toy",
        config,
        ("x",),
        lambda config: [{"x": x} for x in range(config["size"])],
        run,
        draw,
        lambda found: f"sum {found['y'].sum()}",
    )


def test_ctrl_c_keeps_what_has_ended_and_the_next_run_goes_on(tmp_path, capsys):
    calls = []

    def interrupted(case, config):
        calls.append(case["x"])
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return {"y": 10 * case["x"]}

    toy = finding(interrupted)
    with pytest.raises(SystemExit, match=r"Interrupted. .*toy.csv contains all completed runs"):
        frame.reproduce(toy, toy.config, tmp_path)
    assert table.load_texts(tmp_path / "toy.csv")["x"].tolist() == ["0"]
    assert [path.name for path in tmp_path.iterdir()] == ["toy.csv"]
    with pytest.raises(SystemExit, match=r"lacks 2 runs of 3; run again: python -m reproductions toy"):
        frame.redraw(toy, tmp_path)
    frame.reproduce(toy, toy.config, tmp_path)
    assert calls == [0, 1, 1, 2]
    assert capsys.readouterr().out.endswith("sum 30\n")


def test_a_run_that_fails_writes_nothing(tmp_path):
    def fails(case, config):
        raise RuntimeError("ranks differ")

    toy = finding(fails)
    with pytest.raises(RuntimeError, match="ranks differ"):
        frame.reproduce(toy, toy.config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("before")

    def interrupted():
        with table.replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["rows.csv"]


def test_other_settings_than_those_of_the_file_are_refused(tmp_path):
    toy = finding(lambda case, config: {"y": 0})
    frame.reproduce(toy, toy.config, tmp_path)
    with pytest.raises(SystemExit, match=r"toy.csv was created with size=3, not 2: give another folder, --out"):
        frame.reproduce(toy, {**toy.config, "size": 2}, tmp_path)


def test_config_and_key_are_different_columns():
    with pytest.raises(ValueError, match="Finding 'toy': x cannot be config and key"):
        frame.Finding("toy", {"x": 1}, ("x",), *[None] * 4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["memsgd", "--figure"], "memsgd.csv: there is nothing to draw yet; run: python -m reproductions"),
        (["memsgd", "--steps", "0"], "--steps 0: must be a number above 0"),
        (["memsgd", "--steps", "1"], "--steps 1: give at least one step for each of . processes"),
        (["layer-wise", "--density", "2"], "--density 2.0: must be a share of the entries, at most 1"),
        (["memsgd", "--seed", "-1"], "--seed -1: must be a number 0 or more"),
        (["memsgd", "--data", "nowhere.svm"], "memsgd: --data nowhere.svm: there is no such file"),
    ],
)
def test_bad_input_is_one_sentence(given, says, tmp_path):
    with pytest.raises(SystemExit, match=says):
        command.main([*given, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_kind_is_named(tmp_path):
    toy = finding(lambda case, config: {"y": 0})
    for content, says in (
        ("", r"toy.csv is not a table \(No columns to parse from file\): give another folder"),
        ("a,b\n1,2\n", "toy.csv does not belong to 'toy', because it has no column seed, size, x: give another folder"),
    ):
        (tmp_path / "toy.csv").write_text(content)
        for work in (lambda: frame.reproduce(toy, toy.config, tmp_path), lambda: frame.redraw(toy, tmp_path)):
            with pytest.raises(SystemExit, match=says):
                work()
        assert (tmp_path / "toy.csv").read_text() == content
    with pytest.raises(SystemExit, match=r"toy\.csv: this is a file; give a folder"):
        frame.reproduce(toy, toy.config, tmp_path / "toy.csv")


def test_data_that_are_not_finite_are_refused(tmp_path):
    (tmp_path / "data.svm").write_text("1 1:nan 2:1\n-1 1:2\n")
    with pytest.raises(ValueError, match=r"data\.svm: has numbers that are not finite"):
        data_from(tmp_path / "data.svm")


def test_ctrl_c_before_the_first_run_has_ended_says_so(tmp_path):
    def interrupted(case, config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="No run is complete; run the same command to continue"):
        frame.reproduce(finding(interrupted), {"size": 3, "seed": 0}, tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "give the NAME of a finding, one of memsgd"),
        (["memsdg"], "'memsdg' is not known; choose from memsgd.*Did you mean 'memsgd'"),
        (["volume", "--step", "3"], "unrecognized arguments: --step 3"),
        (["volume", "--most", "many"], "invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_line_ends_with_usage(given, says, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(given)
    assert ended.value.code == 2
    assert re.search(says, capsys.readouterr().err, re.DOTALL)


def test_list_and_help(capsys):
    command.main(["--list"])
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(FINDINGS)
    command.main(["volume", "--help"])
    assert "--elements ELEMENTS" in capsys.readouterr().out


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "pandas" else name)
    with pytest.raises(SystemExit, match=r"reproductions need pandas: pip install '.\[examples\]'"):
        command.main(["volume"])


def test_the_module_runs_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reproductions", "--list"])
    runpy.run_module("reproductions", run_name="__main__")
    assert "memsgd" in capsys.readouterr().out


# The parts of the findings.


@pytest.mark.parametrize("make", [dense_data, sparse_data])
def test_logistic_gradients_are_those_of_autograd(make):
    data = make(30, 40, 0)
    x = torch.randn(40)
    rows = torch.tensor(data.rows.toarray() if data.sparse else data.rows)
    assert torch.allclose(rows.norm(dim=1), torch.ones(30), atol=1e-5)
    param = x.double().requires_grad_()
    loss = torch.nn.functional.softplus(-torch.tensor(data.labels) * (rows.double() @ param)).mean()
    (loss + data.l2 / 2 * param.square().sum()).backward()
    total = (loss + data.l2 / 2 * param.square().sum()).item()
    assert data.loss(x.double().numpy()) == pytest.approx(total)
    # The mean over all examples, each drawn by a generator that stands still.
    mean = torch.zeros(40)
    for example in range(30):
        found = data.gradient(x, example)
        if data.sparse:
            mean.index_add_(0, found.indices, found.values / 30)
        else:
            mean += found / 30
    torch.testing.assert_close(mean + data.l2 * x, param.grad.float(), rtol=1e-4, atol=1e-6)


def test_slopes_do_not_overflow():
    data = Logistic(np.array([[1.0], [1.0]], dtype=np.float32), np.array([1.0, -1.0]))
    big = torch.tensor([2000.0])
    assert [data.gradient(big, example).item() for example in (0, 1)] == [0.0, 1.0]


def test_the_minimum_is_where_the_gradient_is_zero():
    data = dense_data(50, 8, 0)
    x = torch.zeros(8)
    worker = MemSGD(x, 8, l2=data.l2)
    for _ in range(200):
        worker.step_(sum(data.gradient(x, example) for example in range(50)) / 50, lr=4.0)
    assert data.loss(x.double().numpy()) == pytest.approx(data.minimum, abs=1e-5)


def test_svmlight_files(tmp_path):
    path = tmp_path / "data.svm"
    path.write_text("+1 1:3 3:4\n-1 2:2\n+1 4:1\n")
    data = data_from(path)
    assert data.labels.tolist() == [1.0, -1.0, 1.0]
    assert not data.sparse  # a third is not zero
    assert data.rows.tolist() == [[pytest.approx(0.6), 0, pytest.approx(0.8), 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    for text, says in (("1 1:2\n2 1:3\n3 1:1\n", "3 different labels"), ("no numbers\n", "not in svmlight format")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            data_from(path)


@full
def test_memsgd_runs_on_a_file(tmp_path, capsys):
    path = tmp_path / "data.svm"
    path.write_text("".join(f"{1 - 2 * (row % 2)} {row % 7 + 1}:1 {row % 5 + 8}:-0.5\n" for row in range(40)))
    command.main(["memsgd", "--data", str(path), "--steps", "8", "--out", str(tmp_path)])
    assert "On file data" in capsys.readouterr().out


def test_bits_to_an_error_by_hand():
    curve = pd.DataFrame({"step": [1, 2, 3, 4], "bits": [10, 20, 30, 40], "error": [1.0, 0.1, 0.5, 0.1]})
    assert bits_to(curve, 0.2) == 40
    assert bits_to(curve, 2.0) == 10
    assert bits_to(curve, 0.05) == float("inf")


def test_every_curve_has_a_name_of_its_own():
    row = {"method": "top", "k": 1, "memory": "yes", "shift": "yes"}
    rows = [row, {**row, "memory": "no"}, {**row, "shift": "no"}, {**row, "method": "qsgd", "k": 4}]
    names = [memsgd.label(found) for _, found in pd.DataFrame(rows).iterrows()]
    assert names == ["top-1", "top-1, no memory", "top-1, no shift", "QSGD, s = 4"]


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_contraction_of_normal_numbers(share):
    u = torch.randn(200_000)
    assert contraction(u, TopK(share))[1] == pytest.approx(of_normal(share), rel=0.01)
    assert contraction(u, RandK(share))[1] == pytest.approx(1 - share, rel=0.02)


def test_gradients_of_the_counter_examples():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([gradient("1", torch.zeros(1), generator) for _ in range(2000)])
    assert set(drawn.view(-1).tolist()) == {4.0, -1.0}
    assert drawn.mean().item() == pytest.approx(0.25, abs=0.15)
    x = torch.tensor([3.0, -1.0])
    assert value("2", x) == pytest.approx(0.5 * 2 + 4)
    assert gradient("2", x, generator).tolist() == [1.5, -0.5]


def test_signs_alone_never_leave_the_line_of_the_second_counter_example():
    rows = error_feedback.counter_example("2", error_feedback.METHODS["sign"], 0.01, 100, 0)
    assert all(row["loss"] >= 1.0 - 1e-6 for row in rows)
    rows = error_feedback.counter_example("2", error_feedback.METHODS["scaled sign, feedback"], 0.01, 400, 0)
    assert rows[-1]["loss"] < 0.1


@pytest.mark.parametrize("whole", [False, True])
def test_a_training_of_ranks_is_one_of_their_mean(whole):
    chosen = error_feedback.METHODS["SGD"]
    found = train(chosen, ranks=2, lr=0.5, steps=3, seed=7, whole=whole)
    net, (data, _) = network(32, 7), digits()
    generators = [torch.Generator().manual_seed(7000 + rank) for rank in range(2)]
    for _ in range(3):
        picked = torch.cat([torch.randint(1500, (16,), generator=generator) for generator in generators])
        loss = torch.nn.functional.cross_entropy(net(data.images[picked]), data.labels[picked])
        for param, grad in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            param.data.sub_(grad, alpha=0.5)
    loss = torch.nn.functional.cross_entropy(net(data.images), data.labels).item()
    assert found.loss == pytest.approx(loss, rel=1e-4)
    assert found.bytes > 4 * 1000


def test_a_training_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    train(error_feedback.METHODS["top, feedback"], ranks=2, lr=0.1, steps=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_training_that_diverges_ends_with_an_infinite_loss():
    found = train(error_feedback.METHODS["top, feedback"], ranks=2, lr=1e38, steps=5)
    assert found.loss == float("inf")


def test_processes_are_powers_of_two_up_to_the_cores(monkeypatch):
    monkeypatch.setattr(memsgd, "cores", lambda: 11)
    assert memsgd.processes() == [1, 2, 4, 8]
    monkeypatch.setattr(memsgd, "cores", lambda: 1)
    assert memsgd.processes() == [1, 2]


def test_elias_code_by_hand():
    """The digits of a number, preceded by the code of their count minus one, and a 0 at the end."""
    lengths = {1: 1, 2: 3, 3: 3, 4: 6, 7: 6, 8: 7, 15: 7, 16: 11, 31: 11, 32: 12, 100: 13, 255: 14, 256: 16, 10**6: 31}
    assert memsgd.omega_bits(torch.tensor(list(lengths))).tolist() == list(lengths.values())
    # Levels 3 and -4 of 5 in the first bucket: distances 1 and 1, so 32 + (1 + 1 + 3) + (1 + 1 + 6) bits. In the second
    # one level, 5 of 5, at the second place: 32 + 3 + 1 + 6. In the third nothing.
    u = torch.tensor([3.0, -4.0, 0.0, 7.0, 0.0, 0.0])
    compressor, ctx = QSGD(levels=5, bucket=2), Context.of(6)
    assert memsgd.elias_bits(compressor, compressor.compress(u, ctx)[0], 6) == (32 + 5 + 8) + (32 + 10) + 32
    # Most levels of normally distributed values are 0, so the code has less than half the length of a fixed one.
    u, ctx = torch.randn(25_600, generator=torch.Generator().manual_seed(0)), Context.of(25_600)
    compressor = QSGD(levels=7)
    bits = memsgd.elias_bits(compressor, compressor.compress(u, ctx)[0], 25_600)
    assert bits < 8 * compressor.nbytes(ctx.segment, None) / 2
