"""What mkdocs does beside its own: README is the home page, and figures and CSV files stay where they are.

Links in README and in docs/ are written as a reader of the repository needs them; the site has both in one folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME, TUTORIAL = "index.md", "examples/tutorial.ipynb"


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside of docs/."""
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, TUTORIAL, abs_src_path=str(ROOT / TUTORIAL)))
    for path in sorted(ROOT.glob("benchmarks/results/*.[pc][ns][gv]")):  # png and csv
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shorten links to what they are in the site."""
    for before, after in (("](../README.md", f"]({HOME}"), ("](../", "]("), ("](docs/", "](")):
        markdown = markdown.replace(before, after)
    # Figures are wider than the page: a click shows them in full.
    return re.sub(r"(?m)^!\[(.*)\]\((\S+\.png)\)$", r"[![\1](\2)](\2)", markdown)
