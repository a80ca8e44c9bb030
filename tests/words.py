"""Counts sentences that are hard to read, in docstrings, comments and pages.

    python -m tests.words              # counts by pattern, and the files with the most
    python -m tests.words --list       # every hit with its file and line
    python -m tests.words --list docs  # the hits in files whose path contains "docs"
    python -m tests.words --write      # lower tests/words_limits.json to today's counts

`tests/test_words.py` fails if a count exceeds its limit. CONTRIBUTING.md says how to write instead.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tests" / "words_limits.json"
FOLDERS = ("lightning_sparse", "reproductions", "benchmarks", "examples", "docs", "tests")
MOST_WORDS = 25
LONG = f"more than {MOST_WORDS} words"

QUESTION = (
    r"(?:says?|said|shows?|sees?|knows?|tells?|explains?|describes?|asks?|decides?|about|names?|records?|prints?)"
)
PLACE = (
    r"(?:places?|points?|lines?|files?|folders?|director(?:y|ies)|positions?|machines?|nodes?|layers?|processes|hosts?)"
)
SYMBOL = r"(?:X|[A-Za-zα-ωΑ-Ω][₀-₉ᵢⱼ̂]*)\b"
EVERYDAY = [
    r"kin",
    r"go(?:es)? dense",
    r"(?:paid|pay|pays|paying) (?:\w+ )?out",
    r"(?:made )?as large again",
    r"sends of its",
    r"hand(?:s|ed|ing)? out",
    r"wants? a (?:lower|higher)",
    r"contestants?",
    r"places of \d+ bits",
    r"mend(?:s|ed|ing)?",
    r"withst(?:and|ands|ood|anding)",
    r"nobody",
    r"go(?:es|ing)? on",
    r"went on",
    r"lands?",
    r"landed",
    r"told",
    r"rests",
    r"becomes? rank 0's",
]
PATTERNS = {
    # "Where" for "if". Places, questions ("shows where") and definitions ("where d is") are left alone.
    "where": rf"(?<![.\w])where\b(?! {SYMBOL} (?:is|are|=))(?!\()",
    "what": r"\bwhat\b(?! to\b)(?!['’])",
    "those that": r"\bthose (?:that|which|who|whose|it|they|we|the|a|sent|not)\b|\bthose\b(?=[.,;:)])",
    "that which": r"\bthat which\b|\bthe ones? (?:that|which)\b|\ball (?:that|they|it)\b(?! follow)",
    "as many as": r"\bas (?:many|few|much|little|large|small|long|often)\b",
    "of its own": r"\bof (?:its|their|one's|your|our|my|his|\w+'s) own\b",
    "times as": r"\btimes (?:as|fewer|smaller|less)\b",
    "everyday words": rf"\b(?:{'|'.join(EVERYDAY)})\b",
}
BEFORE = {"where": rf"\b(?:{QUESTION}|{PLACE}|from|to|is|are)$", "what": rf"\b{QUESTION}$"}
"""Pattern to words before a hit that make it good English."""


class Hit(NamedTuple):
    """A hard sentence: the pattern that it matches, "docs" or "code", its file and line, and its text."""

    pattern: str
    kind: str
    file: str
    line: int
    text: str


def blocks(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join lines into paragraphs; list items and the entries of a docstring's sections begin new ones."""
    begin, section = 0, False
    words: list[str] = []
    for line, text in [*lines, (0, "")]:
        stripped = text.strip()
        entry = section and re.match(r"\s*[\w`*., ]+(?: \([^)]*\))?: ", text)
        item = re.match(r"\s*(?:[-*] |\d+\. |#+ |\|)", text)
        heading = re.fullmatch(r"\s*(?:Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):", text)
        if words and (not stripped or entry or item or heading):
            yield begin, " ".join(words)
            words = []
        if heading:
            section = True
        elif stripped:
            begin = begin if words else line
            words.append(re.sub(r"^(?:[-*]|\d+\.|#+) ", "", stripped))


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences."""
    text = re.sub(r"\b(e\.g|i\.e|vs|al|cf|etc)\.", r"\1", text)
    return [part for part in re.split(r"(?<=[.!?])[)\"*_]* +(?=[\"'`*_([]*[A-Z0-9])", text) if part]


def plain(text: str) -> str:
    """Reduce Markdown to words: code and short quotations become X, a link its text."""
    text = re.sub(r'"[^"\s]+(?: [^"\s]+){0,3}"', "X", text)
    text = re.sub(r"``[^`]*``|`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+|<!--.*?-->|\*\*|:\w+:`", "", text)


def page_lines(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yield a page's prose, and each cell of its tables that holds words."""
    prose: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence or mark:
            fence = "" if mark and fence else fence or (mark[1] if mark else "")
            prose.append((number, ""))
        elif line.startswith("|"):
            prose.append((number, ""))
            for cell in line.strip("|").split(" | "):
                if len(re.findall(r"[A-Za-z]{2,}", cell)) > 1:
                    yield [(number, cell)]
        else:
            prose.append((number, "" if re.fullmatch(r"<!--.*-->", line.strip()) else line))
    yield prose


def docstring_lines(first: int, text: str) -> list[tuple[int, str]]:
    """Return the prose of a docstring; examples and indented code become empty lines."""
    lines: list[tuple[int, str]] = []
    example = False
    for number, line in enumerate(text.splitlines(), first):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        lines.append((number, "" if example else line))
    return lines


def code_lines(source: str) -> Iterator[list[tuple[int, str]]]:
    """Yield each docstring and each block of comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield docstring_lines(node.lineno, node.value.value)
    block: list[tuple[int, str]] = []
    continues = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number, text = token.start[0], token.string.lstrip("#").strip()
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and continues and block[-1][0] == number - 1):
            yield block
            block = []
        continues = alone
        if not re.match(r"(?:noqa|type:|fmt:|pragma|ruff:|!)", text):
            block.append((number, re.sub(r"\s*#\s*noqa.*", "", text)))
    yield block


def found(text: str) -> Iterator[str]:
    """Yield the names of the patterns that a sentence matches, once for each match."""
    if sum(bool(re.search(r"\w", word)) for word in text.split()) > MOST_WORDS:
        yield LONG
    for name, pattern in PATTERNS.items():
        if name == "what" and text.rstrip().endswith("?"):
            continue
        for match in re.finditer(pattern, text, re.IGNORECASE):
            before = text[: match.start()].rstrip()
            if not (name in BEFORE and re.search(BEFORE[name], before, re.IGNORECASE)):
                yield name


def files() -> Iterator[tuple[str, Path]]:
    """Yield the kind and the path of every page and module."""
    yield from (("docs", path) for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))])
    yield from (("code", path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def hits() -> list[Hit]:
    """Find the hard sentences of all pages and modules."""
    result = []
    for kind, path in files():
        if path.name == "words.py":
            continue
        text = path.read_text()
        name = str(path.relative_to(ROOT))
        for lines in page_lines(text) if kind == "docs" else code_lines(text):
            for number, block in blocks(lines):
                for sentence in sentences(plain(block)):
                    result += [Hit(pattern, kind, name, number, sentence) for pattern in found(sentence)]
    return result


def counts() -> dict[str, dict[str, int]]:
    """Count the hits: pattern to kind to number."""
    counted = Counter((hit.pattern, hit.kind) for hit in hits())
    return {name: {kind: counted[name, kind] for kind in ("docs", "code")} for name in [LONG, *PATTERNS]}


def worst(pattern: str, kind: str, most: int = 3) -> list[tuple[str, int]]:
    """Return the files with the most hits of a pattern."""
    return Counter(hit.file for hit in hits() if (hit.pattern, hit.kind) == (pattern, kind)).most_common(most)


def main() -> None:
    """Print counts or hits, or write the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="?", const="", metavar="PATH", help="print each hit in files of such a path")
    parser.add_argument("--write", action="store_true", help="lower the limits to today's counts")
    args = parser.parse_args()
    if args.list is not None:
        for hit in hits():
            if args.list in hit.file:
                print(f"{hit.file}:{hit.line}: {hit.pattern}: {hit.text}")
        return
    for pattern, by_kind in counts().items():
        for kind, count in by_kind.items():
            files_with_most = ", ".join(f"{file} {n}" for file, n in worst(pattern, kind))
            print(f"{pattern:20} {kind} {count:5}  {files_with_most}")
    if args.write:
        limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
        for pattern, by_kind in counts().items():
            old = limits.get(pattern, by_kind)
            limits[pattern] = {kind: min(count, old[kind]) for kind, count in by_kind.items()}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
