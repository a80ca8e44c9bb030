"""The runner of the GPU tests, with mock commands."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import gpu
from tests.support.tiers import exhaustive, full, in_full, one_in, tiers

ORIGIN = {"device": "NVIDIA H100", "date": "2026-01-01"}


def part(code: str, judge: gpu.Judge | None = None, file: str = "", seconds: float = 30, **options: object) -> gpu.Part:
    return gpu.Part(f'{{python}} -c "{code}"', seconds, {"it works": judge}, file, **options)


def run(parts, out, budget=60.0):
    return gpu.run(parts, out, budget, False, ORIGIN)


def verdicts(out):
    return {row["part"]: row["verdict"] for row in gpu.read(out / "gpu.csv")}


def written(text):
    return f"import os, pathlib; pathlib.Path(os.environ['OUT'], 'rows.csv').write_text('{text}')"


@pytest.mark.parametrize(
    ("made", "verdict", "said"),
    [
        (part("pass"), gpu.HOLDS, "ended"),
        (part("raise SystemExit(3)"), gpu.BROKEN, "ended with status 3"),
        (part("import time; time.sleep(60)", seconds=1), gpu.OPEN, "cut off after 1 s"),
        (part("pass", needs=["triton"]), gpu.OPEN, "not run: Triton is not installed"),
        (part("pass", needs=["compute-sanitizer"]), gpu.OPEN, "not run: compute-sanitizer is not installed"),
        (part("pass", gpu.within, "rows.csv"), gpu.OPEN, "ended"),  # nothing was written
        (part(written("within\\nTrue\\n"), gpu.within, "rows.csv"), gpu.HOLDS, "ended"),
        (part(written("within\\nTrue\\nFalse\\n"), gpu.within, "rows.csv"), gpu.BROKEN, "ended"),
        (part(written("within\\nTrue\\n") + "; 1 / 0", gpu.within, "rows.csv"), gpu.BROKEN, "ended with status 1"),
        pytest.param(
            part(written("within\\nTrue\\n") + "; import time; time.sleep(60)", gpu.within, "rows.csv", seconds=2),
            gpu.HOLDS,  # the row was there before the limit
            "cut off after 2 s",
            marks=full,
        ),
    ],
)
def test_a_promise_holds_if_its_command_and_its_rows_say_so(made, verdict, said, tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert run({"it": made}, tmp_path) == int(verdict != gpu.HOLDS)
    (row,) = gpu.read(tmp_path / "gpu.csv")
    assert (row["verdict"], row["ended"], row["device"]) == (verdict, said, "NVIDIA H100")
    assert "it works (it)" in capsys.readouterr().out
    assert f"===== it: {said}" in (tmp_path / "log.txt").read_text()


def test_tests_that_were_all_skipped_show_nothing():
    for output, verdict in (("[gw0] [ 9%] SKIPPED a.py::b", gpu.OPEN), ("[gw0] [ 9%] PASSED a.py::b", gpu.HOLDS)):
        found = gpu.verdicts(gpu.FIRST["lightning"], gpu.Ended("ended", True, 1.0, output), Path(), 0.0)
        assert set(found.values()) == {verdict}


def test_rows_of_an_earlier_run_do_not_count(tmp_path):
    (tmp_path / "rows.csv").write_text("within\nTrue\n")
    os.utime(tmp_path / "rows.csv", (1, 1))
    run({"it": part("pass", gpu.within, "rows.csv")}, tmp_path)
    assert verdicts(tmp_path) == {"it": gpu.OPEN}


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


CHILD = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("then", [*in_full("time.sleep(99)", "raise SystemExit(1)"), "pass"])
def test_a_part_leaves_no_process_behind(then, tmp_path):
    """Workers of a test that was cut off, or has failed, would hold the GPU and disturb all later times."""
    run({"it": part(f"{CHILD} print('child', p.pid, flush=True); {then}", seconds=3)}, tmp_path)
    pid = int((tmp_path / "log.txt").read_text().split("child ")[1].split()[0])
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


@full
def test_a_part_that_hangs_fails_or_is_killed_does_not_disturb_the_others(tmp_path):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    parts = {
        "hangs": part(stubborn, seconds=2),
        "fails": part("1 / 0"),
        "killed": part("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        "fine": part("import time; time.sleep(3); print('done')"),
        "later": part("print('after')", group=1),
    }
    assert run(parts, tmp_path) == 1
    assert verdicts(tmp_path) == {
        "hangs": gpu.OPEN,
        "fails": gpu.BROKEN,
        "killed": gpu.BROKEN,
        "fine": gpu.HOLDS,
        "later": gpu.HOLDS,
    }
    log = (tmp_path / "log.txt").read_text()
    assert "ZeroDivisionError" in log
    assert "done" in log


def test_parts_of_a_group_run_side_by_side_and_groups_one_after_the_other(tmp_path):
    meet = (
        "import pathlib, time; pathlib.Path('{0}').touch(); "
        "[time.sleep(0.05) for _ in range(400) if not pathlib.Path('{1}').exists()]; "
        "assert pathlib.Path('{1}').exists()"
    )
    one, two = tmp_path / "one", tmp_path / "two"
    alone = f"import pathlib; assert pathlib.Path('{one}').exists(); pathlib.Path('{tmp_path}/three').touch()"
    early = f"import pathlib; assert not pathlib.Path('{tmp_path}/three').exists()"
    parts = {
        "alone": part(alone, group=1),
        "one": part(meet.format(one, two) + "; " + early),
        "two": part(meet.format(two, one)),
    }
    assert run(parts, tmp_path) == 0, (tmp_path / "log.txt").read_text()


@full
def test_without_time_left_a_part_is_not_begun(tmp_path, capsys):
    parts = {"first": part("import time; time.sleep(2)", seconds=20), "second": part("pass", group=1)}
    run(parts, tmp_path, budget=16)
    assert verdicts(tmp_path) == {"first": gpu.HOLDS, "second": gpu.OPEN}
    assert "not run: 9 s are left of BUDGET=16, and a part needs 10" in capsys.readouterr().out
    run(parts, tmp_path, budget=3)
    assert "not run: 0 s are left of BUDGET=3" in capsys.readouterr().out


def test_other_parts_rows_stay_and_a_parts_own_are_replaced(tmp_path):
    run({"one": part("pass"), "two": part("1 / 0")}, tmp_path)
    run({"two": part("pass")}, tmp_path)
    assert verdicts(tmp_path) == {"one": gpu.HOLDS, "two": gpu.HOLDS}


@full
def test_what_is_printed_fits_however_much_the_parts_say(tmp_path, capsys):
    loud = part("print('x' * 3_000_000); 1 / 0")
    run(dict.fromkeys(gpu.PARTS, loud), tmp_path)
    assert len(capsys.readouterr().out) < 12_000
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert all(file.stat().st_size < 16 << 20 for file in files)


SCRIPT = """
import sys
from pathlib import Path
from tests import gpu
parts = {{
    "done": gpu.Part("echo measured", 30, {{"it works": None}}),
    "slow": gpu.Part("echo begun; sleep 99", 90, {{"it works": None}}, group=1),
}}
gpu.signal.signal(gpu.signal.SIGTERM, gpu.signal.default_int_handler)
sys.exit(gpu.run(parts, Path({out!r}), 100, False, {{}}))
"""


@one_in(2)
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(which, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(out=str(tmp_path))], cwd=gpu.ROOT, stdout=subprocess.PIPE, text=True
    )
    while process.stdout.readline() != "== done: ended, 0 s\n":
        pass
    time.sleep(0.5)
    process.send_signal(which)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert verdicts(tmp_path) == {"done": gpu.HOLDS, "slow": gpu.OPEN}
    assert "== slow: interrupted" in said
    assert "Interrupted. What the parts above have shown is kept." in said
    assert "begun" in (tmp_path / "log.txt").read_text()


# Verdicts on a benchmark's rows.


def steps(**shares: float) -> gpu.Rows:
    of = {"part": "step", "contestant": "TopK, CUDA graph", "density": "0.001", "within": "True"}
    return [{**of, "numel": numel.strip("n"), "times_torch.topk": str(share)} for numel, share in shares.items()]


def test_how_many_times_faster_a_step_must_be():
    judge = gpu.for_all_lengths(gpu.faster)
    fast = {"n1000000": 1.0, "n25000000": 0.3, "n100000000": 0.25, "n400000000": 0.2}
    assert judge(steps(**fast)) == gpu.HOLDS
    assert judge(steps(**{**fast, "n25000000": 0.34})) == gpu.BROKEN
    assert judge(steps(n1000000=1.0)) == gpu.OPEN
    for other in ("GaussianK", "TopK"):  # without a graph it is the host that is timed
        assert judge([{**row, "contestant": other} for row in steps(**fast)]) == gpu.OPEN
    # If the run ends after 100 M elements, it cannot show that the promise holds, but it may show the opposite.
    assert judge(steps(n25000000=0.3, n100000000=0.25)) == gpu.OPEN
    assert judge(steps(n25000000=0.34)) == gpu.BROKEN
    assert gpu.for_all_lengths(gpu.within)(steps(n25000000=0.3)) == gpu.OPEN
    assert gpu.for_all_lengths(gpu.within)(steps(**fast)) == gpu.HOLDS


def segment(device, device_us, host_us=500.0, beside_us=700.0):
    row = {"method": "topk", "ranks": "2", "device": device, "limit_device_us": "150", "limit_host_us": "600"}
    row |= {"device_us": str(device_us), "host_us": str(host_us), "beside_us": str(beside_us)}
    return [{"method": "topk", "ranks": "1", "device": device, "device_us": "1", "limit_device_us": ""}, row]


def test_what_a_segment_may_take():
    assert gpu.at_most("device_us")(segment("NVIDIA H100 80GB HBM3", 150)) == gpu.HOLDS
    assert gpu.at_most("device_us")(segment("NVIDIA H200", 151)) == gpu.BROKEN
    assert gpu.at_most("host_us")(segment("NVIDIA H200", 151, host_us=601)) == gpu.BROKEN
    assert gpu.at_most("device_us")(segment("NVIDIA A100", 100)) == gpu.OPEN
    assert gpu.at_most("device_us")([]) == gpu.OPEN
    assert gpu.beside_products(segment("any", 100, 500, 700)) == gpu.HOLDS
    assert gpu.beside_products(segment("any", 100, 500, 701)) == gpu.BROKEN
    assert gpu.beside_products([]) == gpu.OPEN


def test_the_row_of_a_contestant_in_bf16_mixed_decides_about_gpt():
    row = {"precision": "bf16-mixed", "contestant": "topk", "within": "True"}
    others = [{**row, "contestant": "topk updates", "within": "False"}, {**row, "precision": "bf16-true", "within": ""}]
    judge = gpu.adds_little("topk")
    assert judge([row, *others]) == gpu.HOLDS
    assert judge([{**row, "within": "False"}]) == gpu.BROKEN
    assert judge(others) == gpu.OPEN
    assert gpu.adds_little("topk updates")([row, *others]) == gpu.BROKEN


def test_tests_are_counted_as_far_as_they_came():
    output = (
        "[gw0] [ 1%] PASSED tests/a.py::b[PASSED] \na.py::c PASSED\n[gw1] FAILED a.py::d\nERROR a.py::e\n2 passed\n"
    )
    assert gpu.counted(output) == ", 2 passed, 2 failed"
    assert gpu.counted("nothing\n========= ERROR SUMMARY: 0 errors") == ""


# The command line.


def refused(arguments, capsys, **variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            gpu.main(arguments)
    return str(ended.value.code), capsys.readouterr().err.strip().splitlines()[-1:]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["quick", "kernel"], {}, "unknown part 'kernel': choose from first, second, third, probe, kernels"),
        (["full", "probe"], {}, "unknown part 'probe': choose from kernels, nccl"),
        (["slow"], {}, "invalid choice: 'slow'"),
        (["quick"], {"BUDGET": "soon"}, "BUDGET='soon': give the seconds that the whole run may take"),
        (["quick"], {"BUDGET": "-1"}, "BUDGET='-1': give the seconds"),
        (["quick", "--rehearse"], {"OUT": ""}, "--rehearse needs --out"),
        (["full", "--rehearse"], {}, "--rehearse goes with quick"),
    ],
)
def test_wrong_words_get_one_line(arguments, variables, said, capsys, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    code, (line,) = refused(arguments, capsys, **variables)
    assert code == "2"
    assert said in line


def test_parts_are_chosen_by_run_and_by_name():
    first, budget = gpu.chosen_parts("quick", [], False)
    assert (list(first), budget) == (list(gpu.FIRST), 330)
    second, budget = gpu.chosen_parts("quick", ["kernels", "second"], False)
    assert (list(second), budget) == (["kernels", *gpu.SECOND], 400)
    assert list(gpu.chosen_parts("full", [], False)[0]) == list(gpu.FULL)
    assert list(gpu.chosen_parts("quick", [], True)[0]) == [*gpu.PARTS]
    assert gpu.budget_of("12.5", 330) == 12.5
    assert gpu.budget_of(None, 330) == 330


def test_each_run_ends_within_its_budget():
    """This holds even if every part is killed at its limit."""
    for parts, budget in gpu.RUNS.values():
        groups = {each.group for each in parts.values()}
        longest = [max(each.seconds for each in parts.values() if each.group == group) for group in groups]
        assert sum(longest) + len(longest) * gpu.GRACE + gpu.RESERVE <= budget
        assert all(each.rehearsal for each in parts.values())


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch finds no GPU here\. Rehearse on the CPU"):
        list(gpu.described(False))


@pytest.mark.parametrize(
    ("name", "capability", "triton", "said"),
    [
        ("NVIDIA H200", (9, 0), "3.6.0", ""),
        ("NVIDIA A100", (8, 0), "3.6.0", "NVIDIA A100 is no H100 or H200: times in μs are not judged"),
        ("Tesla P100", (6, 0), "3.6.0", "Tesla P100 is older than compute capability 7.0"),
        ("NVIDIA H100", (9, 0), "3.7.1", "Triton 3.7.1 is installed: a cache made for 3.6.0 is not hit"),
        ("NVIDIA H100", (9, 0), "", "Triton is not installed: the parts that need it are not run."),
    ],
)
def test_another_machine_than_expected_is_described(name, capability, triton, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton or None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: triton)
    first, *others = gpu.described(False)
    assert first == f"{name}, torch {torch.__version__}"
    assert len(others) == bool(said)
    assert all(line.startswith(said) for line in others)


def test_a_training_counts_at_the_last_step_that_both_have_reached():
    def rows(*losses):
        return [
            {"part": "a", "seed": "0", "method": method, "step": str(step), "val_loss": str(loss)}
            for method, step, loss in losses
        ]

    ours, start = "topk by default", [("dense", 0, 5.0), ("topk by default", 0, 5.0)]
    assert gpu.trains_as_dense(rows(*start)) == gpu.OPEN
    early = [*start, ("dense", 10, 2.0), (ours, 10, 3.0)]
    assert gpu.trains_as_dense(rows(*early)) == gpu.BROKEN
    assert gpu.trains_as_dense(rows(*early, ("dense", 20, 1.0), (ours, 20, 1.01))) == gpu.HOLDS
    assert gpu.trains_as_dense(rows(*early, ("dense", 20, 1.0))) == gpu.BROKEN


def test_steps_over_a_link_are_judged_at_its_rate():
    rows = [
        {"rate": rate, "method": method, "median_ms": str(ms)}
        for rate, method, ms in [("1gbit", "ddp", 300.0), ("loopback", "topk by default", 1.0)]
    ]
    assert gpu.is_fast_over_links(rows) == gpu.OPEN
    for ms, said in ((100.0, gpu.HOLDS), (101.0, gpu.BROKEN)):
        found = [*rows, {"rate": "1gbit", "method": "topk by default", "median_ms": str(ms)}]
        assert gpu.is_fast_over_links(found) == said


# The commands of the parts.


@pytest.mark.parametrize("name", tiers(["lightning", "nowait", "kernels"], []))
def test_the_tests_of_a_part_exist(name):
    """A selection by `-k` that fits nothing would say that all is well, or that all is wrong."""
    command = gpu.PARTS[name].command.replace("-p xdist.plugin --dist loadgroup", "")
    command = command.split(" -n ")[0] + " --collect-only " + command.split(" -n ")[1].partition(" ")[2]
    ran = subprocess.run(
        command.format(python=f"'{sys.executable}'"),
        shell=True,
        cwd=gpu.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    collected = int(ran.stdout.split("/")[-2].split()[-1])
    assert collected >= {"lightning": 8, "nowait": 20, "kernels": 100}[name]  # without a GPU


@exhaustive  # minutes
def test_the_rehearsal_runs_all_parts(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "quick", "--rehearse", "--out", str(tmp_path)],
        cwd=gpu.ROOT,
        env={key: value for key, value in os.environ.items() if key != "BUDGET"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = verdicts(tmp_path)
    assert found.keys() == {*gpu.PARTS}
    ended = {row["part"]: row["ended"] for row in gpu.read(tmp_path / "gpu.csv")}
    assert all(said.startswith("ended") and "status" not in said for said in ended.values()), ran.stdout
    assert len(ran.stdout) < 12_000
