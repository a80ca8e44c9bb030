"""The trainings of `benchmarks.confirmation`: none is missing, and with equal seeds they begin alike."""

from benchmarks.confirmation import TRIED, Run
from benchmarks.harness import results
from benchmarks.language import DEFAULT


def test_the_file_has_all_trainings_to_their_end():
    found = results.load(results.RESULTS / "confirmation.csv")
    assert results.missing(found, TRIED) == []
    last = found.groupby([*Run._fields]).step.max()
    assert (last == last.index.get_level_values("steps")).all()


def test_all_methods_begin_with_the_same_loss():
    found = results.load(results.RESULTS / "confirmation.csv").query("step == 0")
    text, seed = found.case.where(found.case == "other text", "the usual text"), found.seed
    assert (found.groupby([text, seed, found.cpu]).val_loss.nunique() == 1).all()
    losses = found.groupby([text, seed]).val_loss
    assert (losses.max() / losses.min() - 1 < 8 * 2**-24).all()  # sums in fp32 differ in a few bits among processors
    assert found.groupby([text, seed]).method.agg(lambda x: {"ddp", DEFAULT} <= {*x}).all()
