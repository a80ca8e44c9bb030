"""The check of collectives in a group of one rank, over gloo. It is made for NCCL."""

from collections import Counter

import pytest
import torch

from lightning_sparse.aggregators import GlobalTopK
from lightning_sparse.methods import METHODS
from tests import wired
from tests.processes import run_ranks
from tests.support.tiers import full

SOME = ("topk", "scalecom", "powersgd", "two levels", "int4", "topk updates", "topk updates, delayed")


def compared(rank, cases):
    wired.open_group("cpu")
    called, found = Counter(), {}
    for case in cases:
        found[case] = wired.compare(case, "cpu")
        called += wired.CALLED
    return found, set(called)


def test_weights_are_the_same_with_every_kind_of_collective():
    ((found, called),) = run_ranks(1, compared, SOME, backend=None)
    assert found == dict.fromkeys(SOME, "")
    assert called == {"_all_reduce", "_all_gather", "_broadcast", "_all_to_all_v"}


@full
def test_weights_are_the_same_in_every_case():
    ((found, _),) = run_ranks(1, compared, wired.CASES, backend=None)
    assert found == dict.fromkeys(wired.CASES, "")


def test_every_aggregator_is_among_the_cases():
    cases = [*(METHODS[name] for name in wired.GRADIENTS if name in METHODS), wired.GRADIENTS["two levels"]]
    known = {type(spec.aggregator) for spec in METHODS.values()} - {GlobalTopK}  # which needs a second rank
    assert {type(case.aggregator) for case in cases} >= known


class Wrong(wired.Wired):
    """Carries something else."""

    def all_reduce(self, x, op="sum"):
        return super().all_reduce(x, op).add_(1 if x.is_floating_point() else 0)


def not_the_same(rank):
    wired.open_group("cpu")
    return wired.compare("dense", "cpu", Wrong), wired.compare("dense", "cpu", wired.ProcessGroupComm)


def test_it_says_what_does_not_hold():
    ((wrong, none),) = run_ranks(1, not_the_same, backend=None)
    assert wrong == "317132 of 317132 weights differ"
    assert none == "no collective was called"


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        wired.main(["topk", "topq"])
    assert "unknown case 'topq': choose from dense, topk" in capsys.readouterr().err


def printed(rank, cases):
    torch.set_num_threads(1)
    try:
        wired.main(cases)
    except SystemExit as ended:
        return ended.code


def test_its_exit_status_says_whether_all_holds(monkeypatch):
    monkeypatch.setitem(wired.GRADIENTS, "gtopk", "gtopk")
    monkeypatch.setattr(wired, "CASES", (*wired.CASES, "gtopk"))
    assert run_ranks(1, printed, ["dense"], backend=None) == [None]
    assert run_ranks(1, printed, ["gtopk", "dense"], backend=None) == ["these do not: gtopk"]
