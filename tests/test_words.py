"""Pages, docstrings and comments read as plain English: no count of hard sentences exceeds its limit."""

import json

import pytest

from tests import words
from tests.support.tiers import full

pytestmark = pytest.mark.xdist_group("words")  # one worker reads all files, once
LIMITS = json.loads(words.LIMITS.read_text())


@full
def test_no_more_hard_sentences_than_before():
    too_many = []
    for pattern, by_kind in words.counts().items():
        for kind, count in by_kind.items():
            limit = LIMITS[pattern][kind]
            if count > limit:
                most = ", ".join(f"{file} ({n})" for file, n in words.worst(pattern, kind))
                too_many.append(f"'{pattern}' in {kind}: {count} sentences, {limit} are allowed. Most are in {most}.")
    if too_many:
        pytest.fail(
            "\n".join(too_many) + "\nRewrite the sentence: `git diff` shows yours, `python -m tests.words --list PATH` "
            "all of a file, CONTRIBUTING.md how to write."
        )


@pytest.mark.parametrize(
    ("sentence", "patterns"),
    [
        ("Where a rank has failed, the others stop.", ["where"]),
        ("It is refused where gradients are exchanged.", ["where"]),
        ("The folder where checkpoints lie, and u = g + e, where e is the residual.", []),
        ("Returns what is sent.", ["what"]),
        ("It shows what a callback costs.", []),
        ("Those that wait take as many as there are.", ["those that", "as many as"]),
        ("The default is 1.7× faster than `ddp`.", []),
        ("A contestant lands.", ["everyday words", "everyday words"]),
        ("word " * words.MOST_WORDS, []),
        ("word " * (words.MOST_WORDS + 1), [words.LONG]),
    ],
)
def test_patterns_match_hard_sentences_only(sentence, patterns):
    assert list(words.found(words.plain(sentence))) == patterns


def test_code_examples_and_table_rules_are_no_prose():
    page = "One. Two\n\n```python\nwhere = what\n```\n| 1.7 | where it is |\n| --- | --- |\n\n- `x`, where\n  it is.\n"
    texts = [text.strip() for lines in words.page_lines(page) for _, text in words.blocks(lines)]
    assert texts == ["where it is", "One. Two", "`x`, where it is."]
    source = '"""First.\n\n    >>> where = 1\n"""\nx = 1  # of one\n# Two\n# lines.\n'
    texts = [text for lines in words.code_lines(source) for _, text in words.blocks(lines)]
    assert texts == ["First.", "of one", "Two lines."]
