"""The summary that a run logs first: method, ranks, bytes per step, and the TensorBoard command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_sparse.reducer import Reducer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def run_summary(reducer: Reducer, loggers: Sequence[Any], note: str = "") -> str:
    """Return one sentence about the run, the note, and the command that shows the run in TensorBoard."""
    assert reducer.layout is not None
    method, ranks, segments = reducer.method, reducer.comm.size, len(reducer.layout.segments)
    text = f"{method} on {ranks} rank{'s' if ranks > 1 else ''}"
    if warmup := reducer.options.density_warmup:
        steps = reducer.options.density_warmup_steps
        each = "an epoch" if steps is None else f"{steps} steps"
        densities = ", ".join(f"{density:g}" for density in warmup)
        text += f", after a warm-up at density {densities}, {each} each"
    text += f"; {reducer.layout.numel:,} parameters in {segments} segment{'s' if segments > 1 else ''}"
    dense_segments = reducer.routing.dense_segments(method.density)
    if dense_segments and method.compresses:
        numel = sum(segment.numel for segment in dense_segments)
        compressor = type(method.compressor).__name__
        text += f"; {numel:,} of them fall back to dense, because {compressor} would send at least as many bytes"
    if sent := reducer.routing.nbytes(method.density) / method.local_steps:
        dense = reducer.routing.dense_nbytes
        text += f"; bytes per step and rank: {sent:,.0f}, dense fp32 {dense:,.0f} ({dense / sent:.3g} times as many)"
    return text + (f". {note}" if note else ".") + tensorboard(loggers)


def tensorboard(loggers: Sequence[Any]) -> str:
    """Return the commands that show the run in TensorBoard; "" if it is not a logger."""
    return "".join(
        f" TensorBoard: tensorboard --logdir {shlex.quote(each.log_dir)}" for each in summary_writers(loggers)
    )


def summary_writers(loggers: Sequence[Any]) -> list[SummaryWriter]:
    """Return the writers of all TensorBoard loggers, of either of Lightning's namespaces; rank 0 only."""
    if not loggers:
        return []
    from torch.utils.tensorboard import SummaryWriter  # the import takes a third of a second

    experiments = [getattr(logger, "experiment", None) for logger in loggers]
    return [experiment for experiment in experiments if isinstance(experiment, SummaryWriter)]
