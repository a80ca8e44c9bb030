"""What the strategy does when Lightning calls it during a fit. It differs with what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_sparse.hooks import Exchanger, report_or_diagnose


class Training:
    """The strategy's part in one fit. This class is for the time outside of a fit: it adds nothing to Lightning.

    Attributes:
        exchanger: exchanges gradients or updates; None outside of a fit.
        note: a sentence for the summary, which follows the exchanger's.
    """

    exchanger: Exchanger | None = None
    note = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the exchange out of copies of a Trainer: it belongs to this process, and a copy begins its own."""
        return Training, ()

    def begin(self) -> None:
        """Called when training begins, after all callbacks."""

    def before_backward(self) -> None:
        """Called right before a backward pass."""

    def after_backward(self, post_backward: Callable[[], None]) -> None:
        """Called after a backward pass, with what Lightning does then."""
        post_backward()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take an optimizer's step.

        Args:
            optimizer: of torch.
            closure: forward and backward pass.
            step: Lightning's step, which takes the closure.
        """
        return step(closure)

    def exchange_pending(self, *_: Any) -> None:
        """Exchange updates of steps whose exchange is still to come, so that weights are equal on all ranks."""

    def wait(self) -> None:
        """Wait until observers have seen the pending exchange. Its errors are raised by the next one."""

    def refresh_parameters(self) -> None:
        """Called before optimizers' states are loaded."""

    def state_dict(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the weights to save, with those of the function given as a start."""
        return state_dict()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that training has failed on this one."""
        if self.exchanger is not None:
            self.exchanger.fail(error)
        elif dist.is_initialized():
            report_or_diagnose(error)

    def failed(self, text: str) -> RuntimeError:
        """Report to the other ranks what has failed on this one, and return it as an error to raise."""
        error = RuntimeError(text)
        self.fail(error)
        return error

    def close(self) -> None:
        """End the exchange. May be called after an exception."""
        if self.exchanger is not None:
            self.exchanger.close()


def enabled_scaler(precision_plugin: Any) -> Any:
    """Return Lightning's gradient scaler; None if there is none, or if it is switched off and so skips no step."""
    scaler = getattr(precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
