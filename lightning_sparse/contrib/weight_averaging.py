"""Lightning's `WeightAveraging`, or a minimal version of it for releases before Lightning 2.6, which do not have it.

    from lightning_sparse.contrib.memsgd import QuadraticAverage
    from lightning_sparse.contrib.weight_averaging import WeightAveraging

    Trainer(callbacks=WeightAveraging(avg_fn=QuadraticAverage(shift + 1)))

This example averages the weights as in the paper of Mem-SGD.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from lightning_sparse._lightning import CHOSEN

if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    from lightning_sparse.callbacks.base import Callback


class AverageAtEnd(Callback):
    """Averages the weights after each optimizer step, and loads the average into the model at the end of training.

    Args:
        device: device of the average; None is the model's.
        use_buffers: whether buffers are averaged, too.
        **options: further options of torch's `AveragedModel`, such as `avg_fn`.
    """

    def __init__(self, device: torch.device | str | None = None, use_buffers: bool = True, **options: Any) -> None:
        self.options, self.steps = {"device": device, "use_buffers": use_buffers, **options}, 0
        self.average: AveragedModel | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.steps = trainer.global_step
            options = {**self.options, "device": self.options["device"] or pl_module.device}
            self.average = AveragedModel(pl_module, **options)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average now. As in Lightning's class, this is after every step; a subclass may change it.

        Args:
            step_idx: number of the last step, from 0; None at the end of an epoch.
            epoch_idx: number of the last epoch, from 0; None after a step.
        """
        return step_idx is not None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:  # with gradient accumulation, not every batch ends with a step
            self.steps = trainer.global_step
            self._update(pl_module, self.should_update(step_idx=self.steps - 1))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._update(pl_module, self.should_update(epoch_idx=trainer.current_epoch))

    def _update(self, pl_module: Any, is_due: bool) -> None:
        if is_due:
            assert self.average is not None
            self.average.update_parameters(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.average is not None
        if self.average.n_averaged > 0:  # else it has the weights from before a checkpoint was loaded
            pl_module.load_state_dict(self.average.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average and self.average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        if self.average is not None:
            self.average.load_state_dict(state_dict["average"])


WeightAveraging: Any = getattr(import_module(f"{CHOSEN}.callbacks"), "WeightAveraging", AverageAtEnd)
