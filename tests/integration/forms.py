"""Nets and options of trainings whose updates are exchanged, for tests with different numbers of nodes."""

import math
from functools import partial
from typing import Any

import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_sparse import method
from tests.integration.trainers import Gan, Net

ADAMW = torch.optim.AdamW
AdamNet = partial(Net, ADAMW, lr=0.01)


def scaler() -> list[Any]:
    """Return a plugin for fp16. With precision="16-mixed" Lightning uses bf16 on a CPU."""
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024))]


class OwnScaler(Net):
    """Uses manual optimization and a custom scaler. Its fourth gradient is infinite or, without a scaler, missing."""

    def __init__(self, scaled: bool, overflows: bool, wrapped: bool = False) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.automatic_optimization = False
        self.overflows, self.wrapped = overflows, wrapped
        # A power of two is in the loss, and exactly out of the gradient.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000, enabled=scaled)

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(self.scaler.scale(loss))
        if self.overflows and index == 3:
            if self.scaler.is_enabled():
                self.layers[0].weight.grad[0, 0] = math.inf
            else:
                optimizer.zero_grad()
        self.scaler.step(optimizer if self.wrapped else optimizer.optimizer)
        self.scaler.update()


class Tied(Net):
    """Two layers with one weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ADAMW, lr=0.01, **options)
        self.other = nn.Linear(24, 4)
        self.other.weight = self.layers[3].weight

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = self.layers[:3](self.embedding(batch[0]))
        return nn.functional.cross_entropy(self.layers[3](hidden) + self.other(hidden), batch[1])


class Unused(Net):
    """One layer takes part on rank 0 only, in every second step. Another layer never takes part."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ADAMW, lr=0.01, **options)
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        out = self.layers(self.embedding(batch[0]))
        if self.global_rank == 0 and index % 2:
            out = self.sometimes(out)
        return nn.functional.cross_entropy(out, batch[1])


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.layers = torch.compile(self.layers, backend="aot_eager")


class ChannelsLast(Net):
    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        image = self.embedding(batch[0])[:, :3, None, None].expand(-1, -1, 4, 4)
        return super().training_step(batch, index) + self.convolution(image).square().mean()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__(ADAMW, lr=0.01)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class Twice(Net):
    """Its training step has an additional backward pass over the same layers, before Lightning's."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index % 2:
            self.layers(self.embedding(batch[0])).square().mean().backward()
        return super().training_step(batch, index)


class Checkpointed(Net):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        hidden = checkpoint(self.layers[:3], self.embedding(batch[0]), use_reentrant=bool(index > 3))
        return nn.functional.cross_entropy(self.layers[3](hidden), batch[1])


FORMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "accumulation": (AdamNet, {}, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (AdamNet, {}, {"precision": "bf16-mixed"}),
    "bf16-true": (AdamNet, {}, {"precision": "bf16-true"}),
    "16-mixed": (AdamNet, {}, {"scaled": True}),
    "clipping by the Trainer": (AdamNet, {}, {"gradient_clip_val": 0.1}),
    "clipping by the strategy": (AdamNet, {"clip_norm": 0.1}, {}),
    "fused": (partial(AdamNet, fused=True), {}, {}),
    "short window of the second moment": (partial(AdamNet, betas=(0.9, 0.9)), {}, {}),
    "gan": (Gan, {"exchange": "update"}, {}),
    "gtopk by layers": (AdamNet, {"method": "gtopk", "granularity": "layer"}, {}),
    "gaussiank": (AdamNet, {"method": "gaussiank"}, {}),
    "dense": (AdamNet, {"method": "dense", "density": None, "exchange": "update"}, {}),
    "qsgd": (AdamNet, {"method": "qsgd", "density": None, "exchange": "update"}, {}),
    "int4": (AdamNet, {"method": "int4", "density": None, "exchange": "update"}, {}),
    "powersgd": (AdamNet, {"method": method("powersgd", rank=2), "density": None, "exchange": "update"}, {}),
    "warm-up": (AdamNet, {"density_warmup": [0.5, 0.1], "density_warmup_steps": 2}, {}),
    "every third step": (AdamNet, {"local_steps": 3}, {}),
    "delayed": (AdamNet, {"overlap": "next_step"}, {}),
    "delayed by layers": (AdamNet, {"overlap": "next_step", "granularity": "layer"}, {}),
    "delayed, 16-mixed": (AdamNet, {"overlap": "next_step"}, {"scaled": True}),
    "delayed gan": (partial(Gan, lr=0.005), {"overlap": "next_step"}, {}),
    "delayed, every third step": (AdamNet, {"overlap": "next_step", "local_steps": 3}, {}),
    "delayed, dense": (AdamNet, {"method": "local_sgd", "density": None, "overlap": "next_step", "local_steps": 3}, {}),
    "delayed, tied weights": (Tied, {"overlap": "next_step"}, {}),
    "delayed, parameters without gradients": (Unused, {"overlap": "next_step"}, {}),
    "delayed, compiled": (Compiled, {"overlap": "next_step"}, {}),
    "delayed, manual optimization": (Manual, {"overlap": "next_step"}, {}),
    # Torch's defaults, as in a configuration file.
    "defaults of a file": (AdamNet, {"broadcast_buffers": None, "gradient_as_bucket_view": True}, {}),
    "diloco": (AdamNet, {"method": "diloco", "density": None, "local_steps": 3}, {}),
    "sparseloco": (AdamNet, {"method": "sparseloco", "density": None, "local_steps": 3}, {}),
    "tied weights": (Tied, {}, {}),
    "parameters without gradients": (Unused, {}, {}),
    "compiled": (Compiled, {}, {}),
    "compiled module": (lambda: torch.compile(AdamNet(), backend="aot_eager"), {}, {}),
    "channels last": (ChannelsLast, {}, {}),
    "manual optimization": (Manual, {}, {}),
    "backward in the training step": (partial(Twice, ADAMW, lr=0.01), {}, {}),
    "checkpointing": (partial(Checkpointed, ADAMW, lr=0.01), {}, {}),
    "two levels": (AdamNet, {"hierarchical": True}, {}),
    "two levels, two passes": (AdamNet, {"method": "doublesqueeze", "hierarchical": True}, {}),
    "RMSprop": (partial(Net, torch.optim.RMSprop, lr=0.001), {}, {}),
    "dgc": (partial(Net, partial(torch.optim.SGD, momentum=0.9), lr=0.01), {"method": "dgc"}, {}),
}
