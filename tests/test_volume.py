"""The counts of the finding "volume", and that it does not count wrong results."""

import pandas as pd
import pytest

from lightning_sparse.memory import Memory, Residual
from reproductions import volume

K, NUMEL = 20, 20_000


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12])
def test_words_stay_below_what_the_papers_promise(ranks):
    peers = ranks - 1
    oktopk = int(volume.measure("oktopk", ranks, NUMEL, 0.001, "int32")["busiest_bytes"])
    # Each peer gets three messages, with fingerprint, status and checksum (24 bytes each). The first has a digest (8).
    # The other two have payloads of whole entries (8 bytes more at most), with counts and parts filled up to 8 bytes
    # (16 each). The boundaries are P - 1 words by all-reduce.
    metadata = peers * (3 * 24 + 8 + 2 * 8 + 2 * 16) + 2 * 8 * peers * peers / ranks
    assert oktopk <= 4 * 6 * K * peers / ranks + metadata
    scalecom = int(volume.measure("scalecom", ranks, NUMEL, 0.001, "int32")["busiest_bytes"])
    # An empty message to each peer; header and checksum of the indices; one value more in the sum.
    assert scalecom <= 4 * 3 * K + 24 * peers + 24 + 8


def rows(methods):
    config = {"elements": NUMEL, "density": 0.001, "most": 16}
    cases = [case for case in volume.cases(config) if case["method"] in methods and case["ranks"] == 16]
    return {(case["method"], case["index_format"]): volume.run(case, config) for case in cases}


def test_runs_by_hand():
    found = rows(["gtopk", "topk, 8 a node"])
    gtopk = found["gtopk", "int32"]
    assert float(gtopk["published_words"]) == 4 * K * 4
    # Four rounds, each of 2k words and 32 bytes: header of two words, count filled up, checksum.
    assert int(gtopk["busiest_bytes"]) == 4 * (4 * 2 * K + 32)
    # k/8 of 2.5 is rounded to 2. So 16 bytes go to the other node, with header, count and checksum. An empty message
    # goes to each of 15 ranks.
    assert int(found["topk, 8 a node", "int32"]["busiest_bytes"]) == 16 + 32 + 15 * 24


def test_cases_are_all_methods_and_encodings_and_nodes_of_eight_only():
    cases = volume.cases({"elements": NUMEL, "density": 0.001, "most": 16})
    count = {ranks: sum(case["ranks"] == ranks for case in cases) for ranks in (2, 6, 8, 16, 24)}
    assert count == {2: 3 + 2 * 4, 6: 3 + 2 * 4, 8: 3 + 2 * 5, 16: 3 + 2 * 5, 24: 0}


@pytest.mark.parametrize(("most", "elements"), [(1, NUMEL), (4, 499)])
def test_too_few_ranks_or_entries_are_refused(most, elements):
    said = f"--most {most} --elements {elements} --density 0.001: at least two ranks must send at least one entry"
    with pytest.raises(ValueError, match=said):
        volume.cases({"elements": elements, "density": 0.001, "most": most})


def test_the_verdict_of_two_ranks_has_no_empty_list():
    rows = [
        (name, "int32", ranks, sent) for name, sent in (("topk", 8), ("gtopk", 9), ("dense", 99)) for ranks in (2, 3)
    ]
    said = volume.verdict(pd.DataFrame(rows, columns=["method", "index_format", "ranks", "busiest_bytes"]))
    assert "With none of these numbers of ranks, gTopK sends less than TopK." in said


def test_refuses_what_is_wrong(monkeypatch):
    monkeypatch.setattr(Residual, "update", Memory.update)  # which keeps nothing
    with pytest.raises(RuntimeError, match=r"topk: .* of an entry is lost with 2 ranks"):
        volume.measure("topk", 2, NUMEL, 0.001, "compact")
