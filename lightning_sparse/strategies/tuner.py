"""Chooses among candidates by measured times of steps. It only computes, and it is equal on all ranks.

A step takes at least the compute time that steps of stock all-reduce show, and at least the time of its bytes on the
link. A candidate is tried if this bound is below the fastest measured step. So a try takes at most 2.4 times the
time of that step, and the candidate's own work, which is unknown. After the tries the fastest candidate trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

SETTLING, WINDOW = 4, 8
"""Steps that are left out after a switch, and measured steps before a decision. On a GPU up to six exchanges capture
CUDA graphs first, so most measured steps are without a capture. Both are even, because the steps of a GAN alternate."""
LONGEST = 4 * WINDOW
"""The most measured steps before a decision. They are doubled while their times differ much, as with sequences of
different lengths."""
EVERY, RAREST = 100, 800
"""Steps between two looks at the chosen candidate, at first and at most. Each repetition of the tries doubles them. So
a link that changes all the time does not cause tries all the time."""
DRIFT = 0.2
"""Relative change of the step's time, in two looks in a row, after which candidates are tried anew. If quartiles of the
measured steps differ by more, more steps are measured."""
FASTER = 1.5
"""Factor by which the link has become faster in two looks in a row, for the same. Methods that send few bytes gain
nothing from a faster link, so their time does not show it."""
PROBE = 0.005
"""Share of the time between two looks for one message that shows the speed of the link."""
GAIN = 0.03
"""Relative gain that is worth a try."""
MARGIN = 0.01
"""Least relative gain over stock all-reduce. Smaller differences are within the spread of measurements."""
ERROR = 0.7
"""Share of the estimated time on the link that a bound contains: the link was measured in a short time."""


class Tuner:
    """The candidates, their measured times, and the present choice.

    Args:
        links: seconds on the link of a step of each candidate, by name. The first one is stock all-reduce.
        current: the candidate that trains first.
        settled: whether this is a choice of an earlier run, which needs no tries.

    Attributes:
        current: the candidate that trains.
        is_settled: whether all promising candidates have been tried.
        times: measured seconds of a step by candidate.
        left_out: candidates that are not tried.
    """

    def __init__(self, links: Mapping[str, float], current: str, *, settled: bool = False) -> None:
        self.links, self.current, self.is_settled = dict(links), current, settled or len(links) == 1
        self.times: dict[str, float] = {}
        self.left_out: Collection[str] = ()
        self._stock = next(iter(links))
        self._window: list[float] = []
        self._length = WINDOW
        self._left = SETTLING
        self._has_drifted = False
        self._every = EVERY

    def wait(self, steps: int) -> None:
        """Measure no step before so many steps of the first candidate, `SETTLING` at least."""
        self._left = max(SETTLING, steps)

    @property
    def is_measuring(self) -> bool:
        """Whether the time of the present step, or of the next one, counts."""
        return len(self.links) > 1 and self._left <= 1

    @property
    def untried(self) -> list[str]:
        """Candidates without a measured time."""
        return [name for name in self.links if name not in self.times]

    def note(self, seconds: float) -> bool:
        """Add the seconds of a step on this rank; return whether all ranks compare their medians now."""
        if self._left:
            self._left -= 1
        else:
            self._window.append(seconds)
        return len(self._window) == self._length and len(self.links) > 1

    def median(self) -> float:
        """Return this rank's median of the measured steps."""
        return statistics.median(self._window)

    def spread(self) -> float:
        """Return the difference of the quartiles of this rank's measured steps, relative to their median."""
        first, _, third = statistics.quantiles(self._window)
        return (third - first) / self.median()

    def needs_more(self, spread: float) -> bool:
        """Return whether more steps are measured before a decision.

        Args:
            spread: the largest of the ranks.
        """
        more = spread > DRIFT and self._length < LONGEST
        self._length = 2 * self._length if more else WINDOW
        return more

    @property
    def probe_seconds(self) -> float:
        """The time for a message that shows the speed of the link before the next decision; 0 if none is needed."""
        if not self.is_settled or self.current == self._stock or self.current not in self.times:
            return 0.0
        return PROBE * self._every * self.times[self.current]

    def decide(self, slowest: float, speed_up: float = 1.0) -> bool:
        """Choose the candidate that trains next.

        Args:
            slowest: the slowest rank's median.
            speed_up: factor by which the link is faster than before.

        Returns:
            Whether the time of a step has drifted, or the link is faster. Then the link is measured again, and
            `restart` called.
        """
        self._window.clear()
        if self.is_settled:
            return self._has_changed(slowest, speed_up)
        self.times[self.current] = slowest
        self.current, self.is_settled = self._next()
        self._left = self._every if self.is_settled else SETTLING
        return False

    def restart(self, links: Mapping[str, float]) -> None:
        """Try candidates anew, with new times on the link."""
        self._left = SETTLING if self.times else max(SETTLING, self._left)  # the first one may be in its warm-up
        self.links, self.times, self.is_settled = dict(links), {}, False
        self._has_drifted, self._length = False, WINDOW
        self._window.clear()

    def _has_changed(self, slowest: float, speed_up: float) -> bool:
        before = self.times.setdefault(self.current, slowest)  # not measured before a resume
        drifts = abs(slowest / before - 1) > DRIFT or speed_up > FASTER
        changed, self._has_drifted = drifts and self._has_drifted, drifts
        self._left = 0 if drifts else self._every
        self._every = min(2 * self._every, RAREST) if changed else self._every
        return changed

    def _next(self) -> tuple[str, bool]:
        """Return the candidate that trains next, and whether it is the final choice."""
        fastest = min(self.times, key=self.times.__getitem__)
        best = self.times[fastest]
        untried = {name: self.bound(name) for name in self.untried if name not in self.left_out}
        promising = min(untried, key=untried.__getitem__, default=None)
        if promising is not None and untried[promising] < (1 - GAIN) * best:
            return promising, False
        if self._stock in self.times and self.times[self._stock] < best * (1 + MARGIN):
            return self._stock, True
        return fastest, True

    def bound(self, name: str) -> float:
        """Return the least time of a step of a candidate that has not been tried."""
        if name == self._stock:
            return ERROR * self.links[name]
        # Only steps of stock all-reduce show the compute time: other methods also select or quantize.
        compute = self.times.get(self._stock, 0.0) - self.links[self._stock]
        return max(compute, ERROR * self.links[name])

    def summary(self) -> str:
        """Return the measured times, and the bounds of the candidates that were not tried, as a text."""
        tried = [f"{name} {1e3 * seconds:.3g} ms a step" for name, seconds in self.times.items()]
        bounds = [f"{name} at least {1e3 * self.bound(name):.3g}" for name in self.untried]
        text = ", ".join(tried) or "nothing measured yet"
        return f"{text}; not tried: {', '.join(bounds)}" if bounds else text
