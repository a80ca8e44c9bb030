"""A plan in place of the measurements of `auto_ddp` and `auto_hsdp`, and a record of their choices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_sparse import AutoDDPStrategy, AutoHSDPStrategy
from lightning_sparse.strategies import choice
from lightning_sparse.strategies.tuner import Tuner


class Brief(Tuner):
    """Measures eight steps of each candidate, also if they take different times on a busy machine."""

    def needs_more(self, spread: float) -> bool:
        assert spread >= 0
        return False


class Planned(Brief):
    """Trains each candidate of a plan for six steps, whatever they take."""

    plan: Sequence[str] = ()

    def __init__(self, links: Mapping[str, float], current: str, *, settled: bool = False) -> None:
        super().__init__(links, current if settled else self.plan[0], settled=settled)
        self.steps = 0

    def note(self, seconds: float) -> bool:
        assert seconds > 0
        self.steps += 1
        self._window = [seconds]
        return self.steps % 6 == 0 and not self.is_settled

    def spread(self) -> float:
        return 0.0

    def decide(self, slowest: float, speed_up: float = 1.0) -> bool:
        self.times[self.current] = slowest
        self.current = self.plan[min(self.steps // 6, len(self.plan) - 1)]
        self.is_settled = self.steps // 6 >= len(self.plan) - 1
        return False


def follow(plan: Sequence[str]) -> None:
    """Let strategies of this process follow a plan from now on; an empty one lets them measure."""
    Planned.plan = plan
    choice.Tuner = Planned if plan else Brief  # type: ignore[misc]


class Logged(pl.loggers.logger.DummyLogger):
    """Keeps the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None, **_: Any) -> None:
        self.seen.append(dict(metrics))


class Watch(pl.Callback):
    """Records this rank's weights, the candidate and the bytes after each step.

    Args:
        weights_of: returns the weights of a module.
    """

    def __init__(self, weights_of: Callable[[Any], Tensor]) -> None:
        self.weights_of = weights_of
        self.weights: list[Tensor] = []
        self.names: list[str] = []
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights.append(self.weights_of(module))
        if isinstance(trainer.strategy, AutoDDPStrategy | AutoHSDPStrategy):
            self.names.append(trainer.strategy.choice)
            self.sent.append(trainer.strategy.reducer.comm.sent_bytes)
