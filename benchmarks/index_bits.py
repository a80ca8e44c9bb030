"""Computes how few bits the indices of selected entries would need if their places were predicted.

Two ranks train the GPT of `benchmarks.frontier` by default options for 300 steps. In every 50th step, the bits of rank
0's indices are computed, per index:

- `sent`: the Elias-Fano code.
- `uniform`: the least number of bits if all sets of k of d elements are equally likely, log₂(d choose k) / k.
- `tensors`, `rows`, `columns`: the same if ranks also send the number of entries in each tensor, row or column. These
  numbers are coded by their frequencies within the tensor.
- `best`: the least of the three for each tensor.
- `history`: the bits if each element's probability follows from the numbers of entries in its tensor, row and column in
  earlier steps. Older steps count less, by 0.95 per step. All ranks could compute such probabilities.

    python -m benchmarks.index_bits

Output: `index_bits.csv`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaln
from torch import Tensor

from benchmarks import frontier
from benchmarks.harness import results
from benchmarks.harness.results import Row
from benchmarks.harness.training import text
from benchmarks.language import LENGTH, VAL_SEQUENCES
from benchmarks.updates import Run
from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.encoding import encode_indices
from lightning_sparse.context import Context
from lightning_sparse.layout import Segment

RUN = Run("2-bit values, warm-up", 2, 0.003, 0.002, 0, 300)
EVERY = 50
FORGET = 0.95
"""Factor on the numbers of earlier steps, per step."""
Counts = NDArray[np.float64]


def subset_bits(elements: Any, chosen: Any) -> float:
    """Return the sum of log₂(elements choose chosen) over arrays of equal shape."""
    log = gammaln(np.add(elements, 1)) - gammaln(np.add(chosen, 1)) - gammaln(np.subtract(elements, chosen) + 1)
    return float(np.sum(log)) / math.log(2)


def number_bits(numbers: Counts) -> float:
    """Return the bits of numbers that are coded by their frequencies."""
    _, counts = np.unique(numbers, return_counts=True)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


class History:
    """The numbers of entries in tensors, rows and columns in earlier steps."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.rows: dict[str, Counts] = {}
        self.columns: dict[str, Counts] = {}

    def probabilities(self, name: str, shape: Sequence[int]) -> Counts:
        """Return the probability of each element of a tensor; the mean probability is that of the earlier steps."""
        rows, columns = self.rows.get(name, np.zeros(shape[0])), self.columns.get(name, np.zeros(shape[1]))
        mean = (rows.sum() + 0.5) / (self.steps + 1) / math.prod(shape)
        weights = [(numbers + 2) / (numbers + 2).mean() for numbers in (rows, columns)]
        return np.clip(mean * np.outer(*weights), 1e-9, 0.5)

    def add(self, name: str, chosen: NDArray[np.bool_]) -> None:
        """Add the entries of a step."""
        for found, axis in ((self.rows, 1), (self.columns, 0)):
            found[name] = FORGET * found.get(name, 0.0) + chosen.sum(axis)


def index_bits(indices: Tensor, segment: Segment, history: History) -> Row:
    """Return the bits per index of one step, and add the step to the history."""
    numel, k = segment.numel, len(indices)
    chosen = np.zeros(numel, dtype=bool)
    chosen[indices.numpy()] = True
    bits = dict.fromkeys(("tensors", "rows", "columns", "best", "history"), 0.0)
    for name, shape, start, stop in zip(
        segment.names, segment.shapes, segment.bounds, segment.bounds[1:], strict=False
    ):
        matrix = chosen[start:stop].reshape(shape[0] if len(shape) > 1 else 1, -1)
        rows, columns = matrix.sum(1), matrix.sum(0)
        each = {
            "tensors": subset_bits(matrix.size, rows.sum()),
            "rows": subset_bits(np.full(len(rows), len(columns)), rows) + number_bits(rows),
            "columns": subset_bits(np.full(len(columns), len(rows)), columns) + number_bits(columns),
        }
        p = history.probabilities(name, matrix.shape)
        each["history"] = float(-np.log2(np.where(matrix, p, 1 - p)).sum())
        each["best"] = min(each[key] for key in ("tensors", "rows", "columns"))
        for key, value in each.items():
            bits[key] += value
        history.add(name, matrix)
    history.steps = FORGET * history.steps + 1
    sent = 8 * sum(part.nbytes for part in encode_indices(indices, numel, k, "compact"))
    found = {"sent": sent, "uniform": subset_bits(numel, k), **bits}
    return {"numel": numel, "entries": k, **{key: value / k for key, value in found.items()}}


def main() -> None:
    """Train, and write the rows."""
    arguments = results.command_line(__doc__, figure=False).parse_args()
    history, rows = History(), []

    class Watched(TopK):
        """Computes the bits of each step of rank 0."""

        def choose(self, u: Tensor, k: int, ctx: Context) -> Tensor:
            indices = super().choose(u, k, ctx)
            if ctx.rank == 0:
                found = index_bits(indices, ctx.segment, history)
                if (ctx.step + 1) % EVERY == 0:
                    rows.append({"step": ctx.step + 1, **found, **results.origin()})
                    print(rows[-1], flush=True)
            return indices

    torch.set_num_threads(1)
    frontier.IDEAS["watched"] = frontier.IDEAS[RUN.variant]._replace(compressor=Watched)  # type: ignore[union-attr]
    frontier.train(RUN._replace(variant="watched"), text(LENGTH, VAL_SEQUENCES))
    results.save(arguments.out / "index_bits.csv", rows, ["step"], digits=4)


if __name__ == "__main__":
    main()
