"""Lightning in forked ranks: any number of consecutive fits in one process group."""

import logging
import os
import re
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed.algorithms.ddp_comm_hooks  # which every rank would import
from torch import Tensor, nn

import lightning_sparse  # makes the strategy names known  # noqa: F401
from lightning_sparse import METHODS, SparseDDPStrategy, method
from lightning_sparse.compressors import Identity
from lightning_sparse.memory import Residual
from tests.processes import run_ranks
from tests.support.representatives import small
from tests.support.vectors import flat


class Net(pl.LightningModule):
    """Has two layers, a normalisation and an embedding. Options adapt it to a test."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
        self.optimizer, self.options = optimizer, {"lr": 0.05, **options}
        self.gradients: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(self.embedding(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)

    @property
    def weights(self) -> Tensor:
        return flat(self, torch.float32)


class Unhooked(torch.optim.Optimizer):
    """Calls no hooks around its steps, so it is unknown whether gradients wait for them."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": [*params], **options}], {}, options

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        with torch.no_grad():
            for param in (each for each in self.param_groups[0]["params"] if each.grad is not None):
                param.sub_(param.grad, alpha=0.01)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [{"params": [0]}]}


class Gan(pl.LightningModule):
    """Two networks, two optimizers, manual optimization: backward passes take turns, discriminator first.

    Args:
        leave_out: numbers of backward passes that do not take place, nor their step.
        on: called with (module, "backward" or "step", number of the backward pass) after each.
    """

    def __init__(
        self, leave_out: Collection[int] = (), on: Callable[..., None] = lambda *_: None, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.generator = nn.Linear(16, 16)
        self.discriminator = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
        self.leave_out, self.on, self.options, self.count = leave_out, on, {"lr": 0.05, "momentum": 0.9, **options}, -1

    def training_step(self, batch: list[Tensor], index: int) -> None:
        noise, real = (nn.functional.one_hot(part, 16).float() for part in batch)
        with torch.autocast("cpu", enabled=False):
            for optimizer in reversed(self.optimizers()):
                self.count += 1
                if self.count in self.leave_out:
                    continue
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()  # of this one alone: the other's gradients stay, and are stale
                fake = self.discriminator(self.generator(noise))
                generating = self.count % 2 == 1
                truth = self.discriminator(real)
                self.manual_backward(-fake.mean() if generating else (fake - truth + fake**2 + truth**2).mean())
                self.on(self, "backward", self.count)
                optimizer.step()
                self.on(self, "step", self.count)
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), **self.options) for part in (self.generator, self.discriminator)]

    @property
    def weights(self) -> Tensor:
        return flat(self)


class Unfreezing(pl.callbacks.BaseFinetuning):
    """Freezes the embedding in the first epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.embedding)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.embedding, optimizer)


class Told(pl.Callback):
    """Sends this process a signal in some hook, when that is called for the nth time."""

    def __init__(self, hook: str, count: int, signum: int = signal.SIGTERM) -> None:
        self.count, self.signum = count, signum
        setattr(self, hook, self.strike)

    def strike(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            os.kill(os.getpid(), self.signum)


class Lookahead(torch.optim.Optimizer):
    """Like timm's, does not call torch's constructor. So torch does not call hooks before the first zero_grad."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
                param.copy_(slow.lerp_(param, 0.5))
        return loss


class Loader:
    """Yields the same batches in the same order in every fit, and different ones on each rank. Saves its position."""

    def __init__(self, rank: int, size: int, batches: int = 8) -> None:
        generator = torch.Generator().manual_seed(2)
        count = 8 * batches * size
        inputs = torch.randint(16, (count,), generator=generator)
        targets = torch.randint(4, (count,), generator=generator)
        mine = slice(rank, None, size)
        self.batches = list(zip(inputs[mine].split(8), targets[mine].split(8), strict=True))
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def trainer(strategy: Any, size: int, **options: Any) -> pl.Trainer:
    """Return a quiet trainer for the ranks of `lightning_ranks`."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = any(isinstance(c, pl.callbacks.Checkpoint) for c in options.get("callbacks", ()))
    return pl.Trainer(strategy=strategy, devices=size, **{"max_epochs": 1, **quiet, **options})


def lightning_ranks(size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` in an environment that Lightning takes for torchrun's. Exceptions are raised here."""

    def rank_fn(rank: int) -> Any:
        warnings.simplefilter("ignore")  # Lightning's advice on a toy run
        logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
        os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID="tests")
        return fn(rank, *args)

    results = run_ranks(size, rank_fn, **options)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Batches:
    """A list of batches; Lightning would take a plain list for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Watch(pl.Callback):
    """Adds up this rank's gradients, unscaled, and the gradients that the optimizer gets: flat, on their device."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {"given": {}, "mass": {}, "applied": {}}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        def watch(name: str, param: nn.Parameter) -> None:
            def add(grad: Tensor) -> None:
                scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
                grad = grad.double().flatten() / (1.0 if scaler is None else scaler.get_scale())
                self.fresh = True
                self.sums["given"][name] += grad
                self.sums["mass"][name] += grad.abs()

            for sums in self.sums.values():
                sums[name] = torch.zeros(param.numel(), dtype=torch.float64, device=param.device)
            param.register_hook(add)

        self.names = {id(param): name.replace("_orig_mod.", "") for name, param in module.named_parameters()}
        for param in module.parameters():
            watch(self.names[id(param)], param)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        fresh, self.fresh = self.fresh, False  # SWA makes one step without a backward pass, when all is over
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if fresh and param.grad is not None:
                self.sums["applied"][self.names[id(param)]] += param.grad.double().flatten()

    def on_host(self) -> dict[str, dict[str, Tensor]]:
        """Return the sums as tensors of the CPU, for another process and for `lost`."""
        return {kind: {name: x.cpu() for name, x in sums.items()} for kind, sums in self.sums.items()}


def lost(sums: list[dict[str, Any]], states: list[dict[str, Any]]) -> float:
    """Return the norm of the lost part (neither applied nor kept), relative to the gradients, over all ranks."""
    gone = mass = 0.0
    for name, applied in sums[0]["applied"].items():
        difference = sum(rank["given"][name] for rank in sums) - len(sums) * applied
        difference -= sum(state["elements"]["residual"][name].double().flatten() for state in states)
        gone += float(difference.norm()) ** 2
        mass += float(sum(rank["mass"][name] for rank in sums).norm()) ** 2
    return float((gone / mass) ** 0.5)


class Messages(logging.Handler):
    """Collects this package's warnings; `caplog` does not reach into forked ranks.

    It leaves out that a rank waits for another one, which happens on a loaded machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("lightning_sparse")
        logger.handlers = [self]  # in place of an earlier one of the kind

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING and not re.match(r"Rank \d+ waits for .* to attach", text):
            self.texts.append(text)


def keeps_all(name: str) -> bool:
    """Return whether a method keeps all unsent entries exactly. Then nothing is lost, and density 1.0 is stock ddp."""
    return name in METHODS and isinstance(method(name).memory, Residual)


def sends_all(name: str) -> bool:
    """Return whether a method compresses nothing. (The median of two ranks is their mean.)"""
    return name in METHODS and isinstance(method(name).compressor, Identity)


def strategy(name: str, density: float | None = None, **options: Any) -> pl.strategies.DDPStrategy:
    """Return stock DDP's strategy for "ddp", and otherwise this package's, with a density if the method has one.

    Gradients are exchanged with any optimizer; test_update_exchange.py tests updates.
    """
    if name == "ddp":
        ours = ("method", "granularity", "density_warmup", "density_warmup_steps", "seed", "on_nonfinite", "clip_norm")
        return pl.strategies.DDPStrategy(**{key: value for key, value in options.items() if key not in ours})
    chosen = method(name, density=None if method(name).density is None else density, **small(name))
    return SparseDDPStrategy(chosen, **{"exchange": "gradient", **options})


def same(a: Any, b: Any) -> bool:
    """Whether two nested results are equal to the last bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
