"""Whether several optimizers that exchange gradients take turns, as in a GAN: a backward pass is for one of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

log = logging.getLogger(__name__)


class Turns:
    """Warns, once, where a backward pass has exchanged gradients of an optimizer that another one's step has passed by.

    What such a gradient has left in the residuals is sent later, though `zero_grad` has taken the rest of it back.

    Args:
        optimizers: of all that is trained.
        ddp: the wrapped model; a backward pass under its `no_sync` exchanges nothing.
    """

    def __init__(self, optimizers: Sequence[Optimizer], ddp: DistributedDataParallel) -> None:
        self._optimizers, self._ddp = list(optimizers), ddp
        self._waiting: set[int] = set()  # numbers of optimizers that have gradients and have not stepped since
        self._passed: set[int] = set()  # those of them that another optimizer's step has passed by
        self._hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, number))
            for number, optimizer in enumerate(self._optimizers)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        ]

    def on_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self._waiting -= {self._optimizers.index(optimizer)}
        self._passed = set(self._waiting)

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, number: int, param: Tensor) -> None:
        if not self._ddp.require_backward_grad_sync:
            return
        self._waiting.add(number)
        if number in self._passed:
            self._passed.clear()
            self.close()
            log.warning(
                f"Optimizer {number} ({type(self._optimizers[number]).__name__}) did not step, but another one did, "
                f"between two backward passes that both exchanged gradients of its parameters. Part of the first is in "
                f"the residuals and will be sent later, though zero_grad took back the rest: training converges to "
                f"something else. Call toggle_optimizer before each optimizer's forward pass and untoggle_optimizer "
                f"after its step, with find_unused_parameters=True; see docs/options.md."
            )
