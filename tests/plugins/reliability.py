"""The reliability table: results of the tests marked `reliability`, one row per case.

    @pytest.mark.reliability("killed while it writes a checkpoint", checked="the checkpoint before it is complete")
    @pytest.mark.parametrize("name", REPRESENTATIVES)

`--reliability FILE` writes the table between the lines `<!-- reliability -->` and `<!-- end -->` of FILE. Tests with
the same case and `checked` share a row. Methods are counted by the values of a test's parameters. A test that iterates
over methods itself declares them: `methods=REPRESENTATIVES`.

Under pytest-xdist, the tests run in other processes than the writer. So each test's contribution is part of its report,
and rows are in the order of collection.
"""

from pathlib import Path

import pytest

from lightning_sparse import METHODS

START, END = "<!-- reliability -->\n", "<!-- end -->"
NUMBER = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption(
        "--reliability", metavar="FILE", help="write what the tests marked `reliability` showed into a table in FILE"
    )


def pytest_configure(config):
    if config.getoption("--reliability") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(Path(config.getoption("--reliability"))))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for number, item in enumerate(items):
        item.stash[NUMBER] = number


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [value for value in params if isinstance(value, str) and value in METHODS]
    report.reliability = [
        (*marker.args, marker.kwargs["checked"], [*marker.kwargs.get("methods", ()), *names], item.stash[NUMBER])
        for marker in item.iter_markers("reliability")
    ]
    return report


class Table:
    """Collects the reports and writes the table when all tests have run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {}  # (case, checked) to the number of its first test, the methods seen and, by test, the outcome

    def pytest_runtest_logreport(self, report):
        for case, checked, names, number in getattr(report, "reliability", ()):
            first, methods, outcomes = self.rows.get((case, checked), (number, set(), {}))
            self.rows[case, checked] = min(first, number), methods | {*names}, outcomes
            outcomes.setdefault(report.nodeid, "not finished")
            if report.when == "call" or not report.passed:
                outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self):
        lines = ["| case | methods | checked | result |", "|---|---|---|---|"]
        for (case, checked), (_, methods, outcomes) in sorted(self.rows.items(), key=lambda row: row[1][0]):
            bad = [outcome for outcome in outcomes.values() if outcome != "passed"]
            result = f"{', '.join(sorted(set(bad)))}: {len(bad)} of {len(outcomes)} tests" if bad else "passed"
            lines.append(f"| {case} | {len(methods) or ''} | {checked} | {result} |")
        before, _, rest = self.path.read_text().partition(START)
        self.path.write_text(before + START + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
