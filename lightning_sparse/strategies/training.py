"""The strategy's part in a fit. Subclasses exchange gradients or updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_sparse.hooks import Exchanger, report_or_diagnose


class Training:
    """The strategy's part in the training of one model: a Trainer's fit, or a model that Fabric has set up.

    An instance of this class itself adds nothing: no fit is running, or DDP or FSDP2 averages gradients.

    Attributes:
        exchanger: exchanges gradients or updates; None outside of a fit.
        optimizers: the optimizers of the model.
        note: a sentence of the summary, after the exchanger's note.
        ended: returns the module of the last fit before this one, if it ended with residuals; None if there was none.
    """

    exchanger: Exchanger | None
    note = ""
    ended: Callable[[], Any] | None = None

    def __init__(self, exchanger: Exchanger | None = None, optimizers: Sequence[Optimizer] = ()) -> None:
        self.exchanger, self.optimizers = exchanger, optimizers

    def __reduce__(self) -> tuple[Any, ...]:
        """Exclude the exchange from copies of a Trainer: it belongs to this process, and a copy starts a new one."""
        return Training, ()

    def begin(self) -> None:
        """Called when training begins, after the callbacks."""

    def before_backward(self) -> None:
        """Called right before a backward pass."""

    def after_backward(self, post_backward: Callable[[], None]) -> None:
        """Call `post_backward`, Lightning's work after a backward pass."""
        post_backward()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take an optimizer's step.

        Args:
            optimizer: of torch.
            closure: forward and backward pass.
            step: Lightning's step; its argument is the closure.
        """
        return step(closure)

    def threshold(self, optimizer: Any, given: float) -> float:
        """Return the threshold for clipping an optimizer's gradient, from one for the mean gradient of all ranks."""
        return given

    def clip(self, clip: Callable[..., None], optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip by `clip`, Lightning's function, at a threshold for the mean gradient of all ranks."""
        clip(optimizer, self.threshold(optimizer, clip_val), *args, **kwargs)

    def exchange_pending(self, *_: Any) -> None:
        """Exchange the updates of steps that have not been exchanged. Then weights are equal on all ranks."""

    def wait(self) -> bool:
        """Wait until observers have seen the pending exchange; return whether it succeeded. The next raises errors."""
        return True

    def refresh_parameters(self) -> None:
        """Called before the states of optimizers are loaded."""

    def state_dict(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the weights for a checkpoint; `state_dict` is Lightning's function for them."""
        return state_dict()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that training has failed on this rank."""
        if self.exchanger is not None:
            self.exchanger.session.fail(error)
        elif dist.is_initialized():
            report_or_diagnose(error)

    def failed(self, text: str) -> RuntimeError:
        """Report a failure of this rank to the other ranks, and return it as an error to raise."""
        error = RuntimeError(text)
        self.fail(error)
        return error

    def close(self) -> None:
        """End the exchange. It may be called after an exception."""
        if self.exchanger is not None:
            self.exchanger.close()
