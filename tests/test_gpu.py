"""What `make gpu` says at the end, by commands that stand in for those that need a GPU."""

import sys

import pytest

from tests import gpu


def part(code: str, promise: object = None, file: str = "", tool: str = "") -> gpu.Part:
    return gpu.Part(f'-c "{code}"', {"it works": promise}, file, tool)


def verdicts(out):
    return {row["promise"]: row["verdict"] for row in gpu.read(out / "gpu.csv")}


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (part("pass"), gpu.HOLDS),
        (part("raise SystemExit(1)"), gpu.BROKEN),
        (part("import time; time.sleep(60)"), gpu.OPEN),
        (part("pass", tool="no-such-sanitizer --tool memcheck"), gpu.OPEN),
        (part("pass", gpu.within, "rows.csv"), gpu.BROKEN),  # nothing was written
    ],
)
def test_a_promise_holds_if_its_command_succeeds(made, verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", {"it": made})
    monkeypatch.setattr(gpu, "SECONDS", 5)
    with pytest.raises(SystemExit) as ended:
        gpu.report(["it"], tmp_path, {"device": "none"})
    assert ended.value.code == (verdict != gpu.HOLDS)
    assert verdicts(tmp_path) == {"it works": verdict}
    assert f"{verdict:14} it works (it)" in capsys.readouterr().out


def test_results_are_written_where_asked_and_judged(tmp_path, monkeypatch):
    code = "import sys; import pathlib; pathlib.Path(sys.argv[2], 'rows.csv').write_text('within\\n' + '{}\\n,\\n')"
    for said, verdict in (("True", gpu.HOLDS), ("False", gpu.BROKEN)):
        monkeypatch.setattr(gpu, "PARTS", {"it": part(code.format(said), gpu.within, "rows.csv")})
        assert gpu.run("it", tmp_path, sys.executable) == {"it works": verdict}


def test_what_other_parts_have_shown_stays(tmp_path, monkeypatch):
    parts = {"one": gpu.Part("-c pass", {"first": None}), "two": gpu.Part("-c pass", {"second": None})}
    monkeypatch.setattr(gpu, "PARTS", parts)
    for name in parts:
        with pytest.raises(SystemExit, match="0"):
            gpu.report([name], tmp_path, {"device": "none"})
    assert verdicts(tmp_path) == {"first": gpu.HOLDS, "second": gpu.HOLDS}


def rows(**shares: float) -> gpu.Rows:
    of = {"part": "step", "contestant": "TopK", "density": "0.001"}
    return [{**of, "numel": numel.strip("n"), "times_torch.topk": str(share)} for numel, share in shares.items()]


def test_how_many_times_faster_a_step_must_be():
    fast = {"n1000000": 1.0, "n25000000": 0.3, "n100000000": 0.25, "n400000000": 0.2}
    assert gpu.faster(rows(**fast)) == gpu.HOLDS
    assert gpu.faster(rows(**{**fast, "n25000000": 0.34})) == gpu.BROKEN
    assert gpu.faster(rows(n1000000=1.0)) == gpu.OPEN
    other = [{**row, "contestant": "GaussianK"} for row in rows(**fast)]
    assert gpu.faster(other) == gpu.OPEN


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU here"):
        gpu.main([])
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["kernel"])
