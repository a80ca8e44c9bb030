"""Whether several optimizers that exchange gradients take turns, as in a GAN: a backward pass is for one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

log = logging.getLogger(__name__)


class Turns:
    """Warns, once, where a backward pass has exchanged gradients of an optimizer that another one's step has passed by.

    What such a gradient has left in the residuals is sent later, though `zero_grad` has taken the rest of it back.

    Args:
        params: the parameters of a model, by name; their optimizers are known from their first steps.

    Attributes:
        hook: of the steps of all optimizers in the process; to be removed in the end.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._name_of = {id(param): name for name, param in params.items()}
        self._optimizer_of: dict[str, str] = {}  # its class
        self._waiting: set[str] = set()  # parameters with gradients whose optimizer has not stepped since
        self._passed: set[str] = set()  # those of them that another optimizer's step has passed by
        self.hook = register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        ids = (id(param) for group in optimizer.param_groups for param in group["params"])
        own = {self._name_of[each] for each in ids if each in self._name_of}
        self._optimizer_of.update(dict.fromkeys(own, type(optimizer).__name__))
        self._waiting -= own
        self._passed = self._waiting & self._optimizer_of.keys()

    def on_exchange(self, names: Iterable[str]) -> None:
        """Note that the gradients of these parameters have been exchanged."""
        again = [name for name in names if name in self._passed]
        self._waiting.update(names)
        if again:
            self.hook.remove()
            self._passed.clear()
            log.warning(
                f"{self._optimizer_of[again[0]]} of {again[0]!r} did not step, but another optimizer did, between two "
                f"backward passes that both exchanged gradients of its parameters. Part of the first is in the "
                f"residuals and will be sent later, though zero_grad took back the rest: training converges to "
                f"something else. In Lightning call toggle_optimizer before each optimizer's forward pass and "
                f"untoggle_optimizer after its step, with find_unused_parameters=True; elsewhere let a model that a "
                f"backward pass is not for go through it within its no_sync(); see docs/options.md."
            )
