"""The documentation matches the package: numbers from CSV files, existing error messages, working links."""

import ast
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import pytest
import yaml

from lightning_sparse import METHODS, SparseDDPStrategy
from tests.support.tiers import full

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIGS = [f"--config={ROOT}/configs/{name}.yaml" for name in ("base", "digits", "digits/topk")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def test_readme_is_a_front_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@full
def test_tables_are_what_the_benchmarks_wrote(monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    runpy.run_path(str(DOCS / "render.py"), run_name="__main__")  # it exits with the pages that are out of date


def test_every_method_has_its_row_with_its_citation():
    rows = (DOCS / "methods.md").read_text().splitlines()
    for name, spec in METHODS.items():
        source = spec.citation.split(":")[0]
        assert any(row.startswith(f"| `{name}` |") and source in row for row in rows), name


def test_every_option_of_the_strategy_has_its_row():
    rows = (DOCS / "options.md").read_text()
    for name, parameter in inspect.signature(SparseDDPStrategy).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert f"| `{name}` |" in rows


def words(text):
    return re.findall(r"[A-Za-z_]{2,}", text)


@cache
def messages():
    """Return all texts of the package as words, without the formatted values."""
    texts = []
    for path in (ROOT / "lightning_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(" ".join(part.value for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return [(found := words(text), frozenset(found)) for text in texts]


def quoted():
    """The messages that the page about troubleshooting explains; symptoms are no messages."""
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        cell = line.split(" | ")[0]
        if line.startswith("| ") and "(Lightning's)" not in cell:
            yield from re.findall(r"`([^`]*)`", cell)


def likeness(example, text, known):
    enough = 0.7 * len(example)
    if len(text) < enough or sum(map(known.__contains__, example)) < enough:
        return 0
    blocks = SequenceMatcher(None, example, text, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(example)


@pytest.mark.parametrize("message", list(quoted()))
def test_a_message_that_is_explained_is_one_of_the_package(message):
    # The example has filled in a name or a number here and there.
    example = words(message)
    assert any(likeness(example, *text) >= 0.7 for text in messages())


CASES = """
import sys, pytest

class Print:
    def pytest_collection_finish(self, session):
        for item in session.items:
            for marker in item.iter_markers("reliability"):
                print("case:", *marker.args, file=sys.stderr)

pytest.main(["--collect-only", "-q", "-m", "reliability", "-p", "no:cacheprovider"], plugins=[Print()])
"""


@full
def test_the_reliability_table_has_the_cases_that_are_marked():
    run = subprocess.run([sys.executable, "-c", CASES], cwd=ROOT, capture_output=True, text=True, check=True)
    marked = {line.removeprefix("case: ") for line in run.stderr.splitlines() if line.startswith("case: ")}
    _, _, table = (DOCS / "reliability.md").read_text().partition("<!-- reliability -->\n")
    written = [line.split(" | ")[0].removeprefix("| ") for line in table.partition("<!-- end -->")[0].splitlines()[2:]]
    assert marked
    assert marked == set(written)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_benchmarks_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    for module in re.findall(r"-m ((?:benchmarks|lightning_sparse|reproductions)[.\w]*)", text):
        assert importlib.util.find_spec(module), module
    folders = "benchmarks|configs|docs|examples|lightning_sparse|reproductions|tests"
    for path in re.findall(rf"`((?:{folders})/[\w/.-]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_of_a_page_lead_to_files(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def slugs(page):
    """The anchors of a page's headings that GitHub and the site share."""
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE):
        kept = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        if re.sub(r"\s", "-", kept) == re.sub(r"[-\s]+", "-", kept):
            yield re.sub(r"\s", "-", kept)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_there_on_github_and_on_the_site(page):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        assert anchor in slugs((page.parent / link) if link else page), f"{link}#{anchor}"


def examples():
    return re.findall(r"```yaml\n(.*?)```", (DOCS / "command-line.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", examples())
def test_yaml_examples_are_understood_by_the_command_line(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("jsonargparse")
    from lightning_sparse.cli import main

    monkeypatch.setattr(sys, "argv", ["lightning_sparse"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls a renamed function
    file = tmp_path / "example.yaml"
    file.write_text(example)
    with pytest.raises(SystemExit) as ended:
        main(["fit", *CONFIGS, "--config", str(file), "--print_config"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert yaml.safe_load(out)["trainer"]["strategy"]


@full
def test_the_site_builds_and_no_link_in_it_is_dead(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings", reason="the documentation is built with Python 3.11 or later")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/search/search_index.js").exists()  # without it, search needs a server
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link)[^>]* (?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not fetched, f"{page.name} needs the network: {fetched}"
