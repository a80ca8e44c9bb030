"""Step times of several contestants that take turns on the same ranks, over shaped links.

A benchmark's `work` calls `take_turns` on every rank; `over_links` starts the ranks and tabulates what they write.
"""

import statistics
from collections.abc import Sequence

import pandas as pd

from benchmarks.harness.launch import run_ranks
from benchmarks.harness.ranks import check_weights, gather, timed, write
from benchmarks.harness.results import Row, origin
from benchmarks.harness.shaped_links import missing
from benchmarks.harness.timing import FOREIGN_LOAD, step_columns
from benchmarks.harness.training import Trainee

ROUNDS, STEPS = 5, 8
"""Turns of each contestant, and the steps timed in one. Updates are exchanged after 1 or after `STEPS` steps here."""


def take_turns(contestants: Sequence[tuple[Row, int, Trainee]], out: str) -> None:
    """Time steps of each contestant in turn, several rounds: its columns, steps before an exchange, and trainee."""
    for _, _, trainee in contestants:  # DDP forms its buckets anew in the second step
        for _ in range(3):
            trainee.step()
    for number, (columns, every, trainee) in list(enumerate(contestants)) * ROUNDS:
        trainee.step()  # brings the model back into the caches
        sent_before = trainee.sent_bytes
        found = timed(trainee.step, STEPS)
        sent = max(gather(trainee.sent_bytes - sent_before)) / STEPS
        write(out, number=number, columns=columns, every=every, sent_bytes=sent, **found)
    for _, _, trainee in contestants:  # the last step of 3 + ROUNDS · (1 + STEPS) has exchanged
        check_weights(trainee.model)


def over_links(module: str, job: Row, workers: int, rate: str) -> list[Row]:
    """Time steps of what a module's `work` gives to `take_turns`; return a row for each contestant.

    Raises:
        SystemExit: links cannot be shaped here, or are off their rate, or a rank fails.
    """
    if reason := missing():
        raise SystemExit(f"No links can be made here: {reason}.")
    records, calibration = run_ranks(module, job, workers, rate)
    off = round(max(abs(probe["ratio_to_expected"] - 1) for probe in calibration), 3)
    rows: list[Row] = []
    for _, turns in pd.DataFrame(records).groupby("number"):
        every = turns["every"].iloc[0]
        share = min(every, STEPS) / every  # of the exchanges timed, how many a training has
        ms = [amortized(ms, share) for ms in turns["ms"]] if share < 1 else turns["ms"].sum()
        means = turns[["sent_bytes", "tx_bytes", "foreign_load"]].mean()
        row = turns["columns"].iloc[0] | step_columns(ms)
        row |= {"sent_bytes_per_step": round(means["sent_bytes"] * share)}
        row |= {"transmitted_bytes_per_step": round(means["tx_bytes"] * share)}
        row |= {"foreign_load": round(means["foreign_load"], 3), "largest_calibration_error": off}
        rows.append(row | {"threads_per_rank": 1} | origin())
    print(pd.DataFrame(rows).loc[:, :"foreign_load"].to_string(index=False), flush=True)
    if max(row["foreign_load"] for row in rows) > FOREIGN_LOAD:
        print(f"Other programs used more than {FOREIGN_LOAD:.0%} of the processors; repeat it.")
    return rows


def amortized(ms: Sequence[float], share: float) -> float:
    """Return the mean time of a step, if only a share of the exchanges took place; one of the steps had one."""
    *steps, exchange = sorted(ms)
    return statistics.mean(steps) + (exchange - statistics.mean(steps)) * share / len(ms)
