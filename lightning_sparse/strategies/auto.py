"""Strategies that choose the exchange by measuring while they train: dense averages, or a method that pays.

They try only methods that trained as well as dense training in this project's benchmarks. `Tuner` decides by the times
of steps. Ranks decide alike, because each decides by the numbers of the slowest rank. A switch happens between two
steps:

- Ranks take the mean of the residuals of gradients, and add it to the gradient of the next step.
- Residuals of updates stay if updates are exchanged afterwards. Otherwise they are dropped: applied at once, these old
  updates raise the loss (benchmarks.switches). Ranks take the mean of the optimizers' states, which differ among ranks
  while updates are exchanged.

`AutoStrategy` is the common part. `AutoDDP` is here, and `auto_hsdp` has the strategy for sharded models.
"""

# Lightning's strategy and ours are the next bases:
# mypy: disable-error-code="misc"

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse import logged
from lightning_sparse._compat import (
    accumulates,
    ddp_options,
    has_step_hooks,
    have_hooks_called,
    parameters_by_name,
    steps_taken,
)
from lightning_sparse._lightning import Mixin
from lightning_sparse.comm import ProcessGroupComm, RankFailure
from lightning_sparse.comm.link import measure_link, speed_up
from lightning_sparse.cost import DENSE, Costs, Link, Workload, step
from lightning_sparse.gradients import REDUCIBLE
from lightning_sparse.hooks import agree, report_errors_to_peers
from lightning_sparse.hooks.closure import is_inner_step, with_gradients
from lightning_sparse.hooks.ddp import sparse_embedding
from lightning_sparse.hooks.stock import StockExchanger, count_ddp
from lightning_sparse.layout import Granularity, Layout
from lightning_sparse.methods import WARMUP_FACTORS, WARMUP_STEPS
from lightning_sparse.options import ReducerOptions
from lightning_sparse.replica_checkpoint import gather
from lightning_sparse.shards import local, parameters_of, reshard
from lightning_sparse.state import renamed
from lightning_sparse.strategies.fit_checks import check_placement, trains_with_updates
from lightning_sparse.strategies.gradient_training import GradientTraining, initial_states
from lightning_sparse.strategies.overlap_rules import gradient_hooks
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.summary import tensorboard
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.tuner import DRIFT, Tuner
from lightning_sparse.strategies.update_training import UpdateTraining
from lightning_sparse.trained import BFLOAT16, DELAYED, TRAINED
from lightning_sparse.updates.parameters import exchanged_parameters

log = logging.getLogger(__name__)
KEY, BASIS = "lightning_sparse_auto", "lightning_sparse_auto_links"
"""Keys of the choice in a checkpoint, and of its basis. The basis is the number of ranks, the seconds of each
candidate's step on the link, and whether all had been tried. A training without a choice has neither."""
STOCK, BF16 = "ddp", "ddp, bf16"
UPDATES = TOPK, NEXT_STEP, BY_NODE = "topk", "topk, next step", "topk, hierarchical"
"""Candidates that exchange updates. With the last one, the ranks of a node average gradients, and are one worker."""
SHORT = 0.05
"""Seconds on the link of a dense step. Below, training begins with stock all-reduce, which a few steps cannot hurt."""
WARMUP = len(WARMUP_FACTORS) * WARMUP_STEPS
"""Steps before the first measurement. In the density warm-up of updates ranks send more than later."""
OTHER_LINK = 2.0
"""Ratio of the times of a dense step on two links from which a choice for one does not hold for the other."""
FAR = 0.01
"""Seconds of latency in each step that are worth an exchange of updates in one segment."""


class _Clock:
    """Times the batches of a step, from the batch to the end of the optimizer's step, without loading of data.

    Raw optimizers in manual optimization do not note the end. Then loading of data counts, too.

    Attributes:
        batches: the number of batches that ended an accumulation, in automatic optimization. A module may step its
            optimizer after several of them; then each kind of exchange is timed by such a batch.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._began = time.perf_counter()
        self._ended: float | None = self._began
        self._spent = 0.0

    @property
    def _elapsed(self) -> float:
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    def begin_batch(self) -> None:
        self._spent += self._elapsed
        self._began, self._ended = time.perf_counter(), None

    def note_end(self) -> None:
        self._ended = time.perf_counter()

    def take(self) -> float:
        """Return the seconds since the last call, for each of `batches`."""
        spent, self._spent = (self._spent + self._elapsed) / max(1, self.batches), 0.0
        self._began, self.batches = time.perf_counter(), 0
        self._ended = self._began
        return spent


class AutoStrategy(Mixin):
    """The choice of the exchange while a Trainer trains, for a strategy that exchanges by fixed options.

    Args:
        seed: the seed of the methods' random choices.
        overlap: "next_step" also tries the exchange of updates during the next step. Between two steps, weights then
            differ among ranks, so no callback or hook may read or change them. "none" exchanges updates after each
            step. By default, `auto_ddp` exchanges them during backward, if possible.
        **kwargs: the options of the strategy that are no choice of an exchange.

    Raises:
        ValueError: an option of a method, which this strategy chooses itself.
    """

    _kind: ClassVar[str]
    """The end of the strategy's name: "ddp" or "hsdp"."""
    _stock: ClassVar[str]
    """The name of the dense average of gradients among the candidates."""
    _chosen: ClassVar[Sequence[str]] = (
        *("method", "density", "density_warmup", "density_warmup_steps", "exchange", "local_steps"),
        *("granularity", "hierarchical", "clip_norm", "on_nonfinite"),
    )
    """Options of other strategies that are a part of the choice."""
    _steps = 0
    """Number of batches of a fit that ended an accumulation; in manual optimization, of steps of this rank."""
    _has_counted = False
    """Whether the present batch was counted."""
    _evaluates_again = False
    """Whether an optimizer has evaluated its closure several times in a step."""
    _step_hooks: Sequence[Any] = ()

    if TYPE_CHECKING:
        _options: Any
        _training: Any
        _reducer: Any
        model: Any

    def __init__(self, *, seed: int = 0, overlap: Literal["next_step", "none"] | None = None, **kwargs: Any) -> None:
        if overlap not in ("next_step", "none", None):
            raise ValueError(
                f"{type(self).__name__}(overlap={overlap!r}): give 'next_step', which also tries the exchange of "
                f"updates during the next step; or 'none', which exchanges them after the step; or None."
            )
        options = inspect.signature(super().__init__).parameters
        for option in self._chosen:  # a configuration file passes all defaults explicitly
            if option in kwargs and option in options and (value := kwargs.pop(option)) != options[option].default:
                raise self._refused(option, value)
        fixed = {"overlap": "none"} if overlap == "none" else {}
        super().__init__(TOPK, seed=seed, **fixed, **kwargs)  # type: ignore[call-arg]
        for option, value in self._options.own.items():
            raise self._refused(option, value)
        self._arguments = {"seed": seed, "overlap": overlap, **kwargs}

    def _refused(self, option: str, value: Any) -> ValueError:
        return ValueError(
            f"{type(self).__name__}({option}={value!r}): this strategy chooses the exchange itself, and the dense "
            f"average of gradients is one choice. Leave {option} out; or take Sparse{self._kind.upper()}Strategy, or "
            f"strategy='topk_{self._kind}', to decide yourself."
        )

    def _begin(self) -> None:
        super()._begin()
        self._auto = _Choice(self._options, f"auto_{self._kind}", self._stock)

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {**state, "_step_hooks": ()}

    @property
    def choice(self) -> str:
        """The name of the exchange that trains: that of the dense average of gradients, or that of a method."""
        return self._auto.tuner.current

    # Each kind of strategy adds these, and `_group`: the process group of the ranks that exchange; None is all ranks.

    def _candidates(self, base: StrategyOptions, trainer: Any, ranks: int) -> Mapping[str, StrategyOptions | None]:
        """Return the options of each candidate besides `_stock` by name; None for another dense average.

        Args:
            base: the options of TopK.
            ranks: number of ranks that exchange with each other.
        """
        raise NotImplementedError

    def _use_stock(self, name: str, trainer: Any) -> None:
        """Begin a dense average of gradients: a candidate whose options are None."""
        raise NotImplementedError

    def _check_frozen(self) -> None:
        """Raise RuntimeError if a parameter whose gradients are not averaged has one. Called after a backward pass."""

    def _exchanges_updates(self, base: StrategyOptions, ranks: int) -> bool:
        """Return whether updates of the optimizers can be exchanged, and trained as well as dense averages."""
        if replace(base, exchange="auto").choose(self.optimizers)[0] != "update":
            return False
        stepping = [optimizer for optimizer in self.optimizers if optimizer.param_groups]
        others = {type(optimizer).__name__: None for optimizer in stepping if not trains_with_updates(optimizer)}
        if others and ranks <= TRAINED["adamw"][TOPK] and self.global_rank == 0:
            names = " and ".join(others)
            self.inform(
                f"auto_{self._kind} does not exchange updates of {names}: in this project's benchmarks their loss was "
                f"higher than with dense averages, or they were not tried. strategy='topk_{self._kind}' exchanges them."
            )
        return not others

    def _updates(
        self, base: StrategyOptions, trainer: Any, ranks: int, most: int = TRAINED["adamw"][TOPK], nodes: int = 1
    ) -> dict[str, StrategyOptions]:
        """Return the candidates that exchange updates, by name.

        Args:
            base, trainer, ranks: see `_candidates`.
            most: largest number of workers with which TopK trains as well as dense training.
            nodes: number of nodes. A node whose ranks average gradients is one worker.
        """
        if any(getattr(each, "master_weights", None) for each in self.optimizers):  # as of Apex's FusedAdam
            return {}
        found = {TOPK: base} if ranks <= most else {}
        # Weights differ among ranks while an exchange is pending, and a callback may average them then.
        averages = any(hasattr(each, "should_update") for each in trainer.callbacks)
        if found and self._arguments["overlap"] == "next_step" and ranks <= DELAYED and not averages:
            found[NEXT_STEP] = replace(base, overlap="next_step")
        if 1 < nodes <= most and nodes < ranks:
            found[BY_NODE] = replace(base, hierarchical=True)
        return found

    # Start and switches:

    def _start_exchange(self, trainer: Any) -> None:
        self._steps, self._evaluates_again = 0, False
        self._auto.begin(self, trainer)
        self._step_hooks = hooks = []
        for optimizer in filter(has_step_hooks, self.optimizers):
            have_hooks_called(optimizer)
            hooks.append(optimizer.register_step_post_hook(self._note_step))
        self._use(self.choice, trainer)

    def _use(self, name: str, trainer: Any) -> None:
        """Begin an exchange."""
        self._auto.parameters = Parameters.of(self.lightning_module, self._auto.parameters.trained)
        options = self._auto.options[name]
        self._in_use = name, options
        if options is None:
            self._use_stock(name, trainer)
        else:
            self._options = options
            super()._start_exchange(trainer)

    def _make_exchanger(self, *args: Any, **kwargs: Any) -> Any:
        # During a fit, ReduceLROnPlateau and Prodigy may set another rate on each rank.
        return super()._make_exchanger(*args, compare_numbers=self._steps == 0, **kwargs)

    def _began(self, training: Training, why: str, loggers: Sequence[Any] = ()) -> None:
        if self._auto.tuner.times and not self._auto.tuner.is_settled:
            return  # a try of some steps
        if not isinstance(training.exchanger, StockExchanger):
            super()._began(training, self._auto.reason, loggers)
        elif self.global_rank == 0:
            note = f"{training.exchanger.note}{training.note}"
            self.inform(f"{self.world_size} ranks. {note} Chosen by {self._auto.reason}.{tensorboard(loggers)}")

    def on_train_start(self) -> None:
        super().on_train_start()
        self._auto.start(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer, before, text = self.lightning_module.trainer, self.choice, ""
        if self._is_manual:
            self._synchronize()
        if self._auto.is_due(self, trainer):
            text = self._auto.decide(self)
        if (self.choice, self._auto.options[self.choice]) != self._in_use:
            self._switch(trainer)
        if self.global_rank == 0 and text:
            if self.choice == before or not self._auto.tuner.is_settled:
                self.inform(text)  # otherwise the summary of the new exchange has said so
            for logger in trainer.loggers if self._auto.tuner.is_settled else ():
                logger.log_metrics(self._auto.scalars(), steps_taken(trainer))
        super().on_train_batch_start(batch, batch_idx)
        self._has_counted = False
        self._auto.clock.begin_batch()

    def _switch(self, trainer: Any) -> None:
        """Change to the chosen exchange between two steps."""
        resume = self._leave(self._training, self._auto.options[self.choice])
        self._replace(trainer)
        if not isinstance(self._training, UpdateTraining):  # which has begun with rank 0's weights
            self._training.begin()
        resume()

    def _replace(self, trainer: Any) -> None:
        """End the exchange, and begin the chosen one in its place."""
        old = self._training
        assert old.exchanger is not None
        comm = old.exchanger.comm
        reducer = old.exchanger.reducer
        kept = comm.sent_bytes, comm.dense_bytes, comm.seconds, reducer.seconds, reducer.step, comm.peers.terminating
        old.close()
        self._training, self.model = Training(), self.lightning_module
        del old, reducer
        gc.collect()  # of DistributedDataParallel's buckets
        self._use(self.choice, trainer)
        reducer, comm = self.reducer, self.reducer.comm
        comm.sent_bytes, comm.dense_bytes, comm.seconds, reducer.seconds, reducer.step, comm.peers.terminating = kept
        self._auto.step = self.done  # steps of another kind count from now on

    def _leave(self, training: Any, options: StrategyOptions | None) -> Callable[[], None]:
        """End an exchange; return a function that hands over to the next one, of these options."""
        if isinstance(training, UpdateTraining):
            training.exchange_pending()
            if options is not None and options.choose(self.optimizers)[0] == "update":
                if options.hierarchical:  # ranks that average gradients need one loss scale
                    training.exchanger.share_scales()
                state, before = training.exchanger.reducer.state_dict(), self._auto.parameters
                return lambda: self.reducer.load_state_dict(renamed(state, before.renames(self._auto.parameters)))
            # In automatic optimization no gradient waits for a step now.
            training.exchanger.settle(gradients=self._is_manual)
        return lambda: None

    # Measurement:

    @property
    def done(self) -> int:
        """The number of steps so far, for one kind of exchange.

        One rank alone may skip a step of its optimizer. So exchanges of updates count, or batches with an average of
        gradients. Ranks may differ in their totals, but not in their numbers since a switch.
        """
        return self.reducer.step if isinstance(self._training, UpdateTraining) else self._steps

    @property
    def _is_manual(self) -> bool:
        return not self.lightning_module.automatic_optimization

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_manual and not is_inner_step(optimizer):
            self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if isinstance(self.exchanger, StockExchanger) and optimizer is self.optimizers[0]:
            self.exchanger.count_step()

    def _synchronize(self) -> None:
        if self.root_device.type == "cuda" and self._auto.tuner.is_measuring:
            torch.cuda.current_stream(self.root_device).synchronize()

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        self._check_frozen()
        if not self._is_manual:
            self._auto.clock.note_end()
            if not self._has_counted and not accumulates(self.lightning_module.trainer):
                self._has_counted = True
                self._auto.clock.batches += 1
                self._count_step(self.optimizers[0])

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        before, evaluations = self._steps, 0

        def evaluate() -> Any:
            nonlocal evaluations
            evaluations += 1
            return closure()

        result = super().optimizer_step(optimizer, evaluate, model, **kwargs)
        self._evaluates_again |= evaluations > 1
        if self._steps == before:  # in manual optimization: the optimizer calls no hooks, or a scaler skipped the step
            self._note_step(optimizer)
        self._synchronize()
        self._auto.clock.note_end()
        return result

    def teardown(self) -> None:
        super().teardown()
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = ()
        self._auto.forget()

    # Checkpoints:

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if len(self._auto.options) > 1:
            checkpoint[KEY], checkpoint[BASIS] = self.choice, self._auto.basis
        super().save_checkpoint(checkpoint, filepath, storage_options)


class AutoDDP(AutoStrategy):
    """Data-parallel training that measures link and steps, and exchanges by the fastest method that trains well.

    It begins with stock all-reduce on a fast link and with sparse updates or gradients on a slow one. It decides within
    about a hundred steps, or two hundred if their times vary. It looks again every hundred steps, and decides anew if
    steps take another time.

    Args:
        seed: the seed of the methods' random choices.
        overlap: see `AutoStrategy`.
        **kwargs: the options of Lightning's DDPStrategy and torch's DistributedDataParallel.

    Raises:
        ValueError: an option of a method, which this strategy chooses itself.
    """

    _kind, _stock = "ddp", STOCK
    _group = None
    _residuals: dict[torch.Tensor, torch.Tensor]
    """By parameter, the mean of residuals that its next step adds to the gradient."""

    def _begin(self) -> None:
        super()._begin()
        self._residuals = {}

    def _start_exchange(self, trainer: Any) -> None:
        super()._start_exchange(trainer)
        stepped = filter(has_step_hooks, self.optimizers)
        self._step_hooks = [*self._step_hooks, *(each.register_step_pre_hook(self._before_step) for each in stepped)]

    def teardown(self) -> None:
        super().teardown()
        self._residuals = {}

    def _candidates(self, base: StrategyOptions, trainer: Any, ranks: int) -> Mapping[str, StrategyOptions | None]:
        found: dict[str, StrategyOptions | None] = {}
        is_sparse = sparse_embedding(self.lightning_module) is not None
        exchanges_updates = self._exchanges_updates(base, ranks)
        trained = TRAINED["adamw" if exchanges_updates else "sgd"]
        halves = any(param.dtype is torch.float32 for param in self.lightning_module.parameters())
        # Entries that were clipped or scaled after the exchange would not belong to the residuals.
        hooks = gradient_hooks(self, ("configure_gradient_clipping", "clip_gradients"))
        compresses_gradients = not (is_sparse or trainer.gradient_clip_val or hooks or self.scaler is not None)
        compresses_gradients &= all(map(has_step_hooks, self.optimizers))  # which take the residuals after a switch
        if exchanges_updates:
            if ranks <= BFLOAT16 and halves and not is_sparse:
                found[BF16] = None
            found |= self._updates(base, trainer, ranks, nodes=1 if is_sparse else self.num_nodes)
        for name in ("int8", "int4") if compresses_gradients else ():
            if trained[name] >= ranks:
                found[name] = StrategyOptions(name, None, {}, base.reducer)
        return found

    def _use_stock(self, name: str, trainer: Any) -> None:
        self._reducer = None
        # DistributedDataParallel chooses the size of its buckets, unless it is given: its first one is smaller.
        with self._with_ddp_options(bucket_cap_mb=self._arguments.get("bucket_cap_mb")):
            ddp = self._wrap()
        states, reducer = initial_states(ddp, ddp_options(self)), self._auto.reducer_options
        stock = count_ddp(ddp, reducer, self._timeout, from_rank_0=states, in_bfloat16=name == BF16)
        self._begin_fit(trainer, Training(stock, self.optimizers), "")

    def _check_frozen(self) -> None:
        params = self._auto.parameters
        for name in params.frozen if isinstance(self.exchanger, StockExchanger) else ():
            param = params.by_name[name]
            if param.requires_grad and param.grad is not None and name not in self.model.parameters_to_ignore:
                raise self._training.failed(
                    f"{name!r} was frozen when auto_ddp wrapped the model and takes gradients now: DDP does not "
                    f"average them, so the ranks would drift apart. Unfreeze it before fit or in "
                    f"on_train_batch_start. If a training step freezes and unfreezes it, also take "
                    f"strategy='auto_ddp_find_unused_parameters_true'."
                )

    def _use(self, name: str, trainer: Any) -> None:
        # A training step may freeze parameters that the next step unfreezes, as GANs do. DDP leaves out parameters that
        # are frozen when it wraps the model. It allows for others without gradients only if it finds unused parameters.
        options = ddp_options(self)  # type: ignore[arg-type]
        trained = self._auto.parameters.trained if options.get("find_unused_parameters") else ()
        frozen = [param for param in trained if not param.requires_grad]
        try:
            for param in frozen:
                param.requires_grad_(True)
            super()._use(name, trainer)
        finally:
            for param in frozen:
                param.requires_grad_(False)

    def _leave(self, training: Any, options: StrategyOptions | None) -> Callable[[], None]:
        if isinstance(training, GradientTraining):
            params, stepped = self._auto.parameters.by_name, {*parameters_of(self.optimizers)}
            for name, mean in training.exchanger.mean_residuals().items():
                if (param := params[name]) in stepped:
                    self._residuals[param] = mean + self._residuals.get(param, 0.0)
        return super()._leave(training, options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._residuals or is_inner_step(optimizer):
            return None
        return with_gradients(args, kwargs, partial(self._add_residuals, optimizer))

    @torch.no_grad()
    def _add_residuals(self, optimizer: Optimizer) -> None:
        """Add the residuals that wait to the gradients of a step."""
        # Of a gradient scaler, for a fused optimizer that unscales gradients and skips steps itself:
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and bool(found_inf):
            return
        for param in parameters_of([optimizer]):
            if param.grad is not None and param in self._residuals:
                residual = self._residuals.pop(param)
                param.grad += (residual if scale is None else residual * scale).to(param.grad)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        params = self._auto.parameters
        unfrozen = [name for name in params.frozen if params.by_name[name].requires_grad]
        if unfrozen and not isinstance(self._training, UpdateTraining):
            # DDP averages only the gradients of parameters that were trained when it wrapped the model.
            try:
                self._switch(self.lightning_module.trainer)  # to the same exchange
            except RankFailure as error:
                raise RankFailure(
                    f"{unfrozen[0]!r} was unfrozen on rank {self.global_rank}, and then: {error} Unfreeze the same "
                    f"parameters before the same step on all ranks."
                ) from error
            self._auto.note_unfrozen(self, params.numel)
        super().on_train_batch_start(batch, batch_idx)

    # Checkpoints:

    def _parts(self, filepath: Any) -> list[Any]:
        trains_stock = self._reducer is not None and self._auto.options[self.choice] is None
        return [] if trains_stock else super()._parts(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._auto.loaded = Loaded(checkpoint.get(KEY, ""), sidecars.KEY in checkpoint, checkpoint.get(BASIS))
        return checkpoint

    def _load_residuals(self, info: Any, states: Mapping[str, Any], path: Any) -> None:
        if self._auto.options[self.choice] is not None:
            super()._load_residuals(info, states, path)
        elif info is not None:
            self.warn_of_lost_residuals(path, f"{self.choice} trains")

    @classmethod
    def _registered(cls) -> dict[str, dict[str, Any]]:
        return {"auto": {}}


class Loaded(NamedTuple):
    """The choice in the checkpoint of a fit, whether it has residuals, and its entry under `BASIS`."""

    choice: str = ""
    has_residuals: bool = False
    basis: Any = None


class Parameters(NamedTuple):
    """A model's parameters by name, the names of frozen ones, and the parameters that a fit has trained so far."""

    by_name: Mapping[str, torch.nn.Parameter] = {}
    frozen: Sequence[str] = ()
    trained: Collection[torch.nn.Parameter] = ()

    @classmethod
    def of(cls, model: torch.nn.Module, trained: Collection[torch.nn.Parameter]) -> Parameters:
        """Return the present parameters of a model; `trained` are earlier ones of the fit."""
        by_name = parameters_by_name(model)
        frozen = [name for name, param in by_name.items() if not param.requires_grad]
        return cls(by_name, frozen, {*trained, *(param for param in by_name.values() if param.requires_grad)})

    def renames(self, now: Parameters) -> dict[str, str]:
        """Return the present names by these names, which callbacks may have changed."""
        names = {id(param): name for name, param in now.by_name.items()}
        return {name: names.get(id(param), name) for name, param in self.by_name.items()}

    @property
    def numel(self) -> int:
        """Number of elements that were trained at that time."""
        frozen = {*self.frozen}
        return sum(param.numel() for name, param in self.by_name.items() if name not in frozen)


class _Choice:
    """The candidates of a fit, their measurements, and the present choice.

    Args:
        base: the options of TopK.
        name: the strategy's name, for messages and loggers.
        stock: the name of the dense average of gradients.

    Attributes:
        options: the options of each candidate, by name; None of dense averages.
        tuner: decides.
        clock: times the steps.
        reason: the reason for the present choice, for the summary of a run.
        loaded: the checkpoint of this fit, until `choose_first`.
        parameters: those at the start of the present exchange.
        step: the number of steps at the last measurement, see `AutoStrategy.done`.
    """

    def __init__(self, base: StrategyOptions, name: str, stock: str) -> None:
        self._base, self._name, self.reason, self.loaded = base, name, "", Loaded()
        self.parameters = Parameters()
        self._callbacks: Sequence[Any] = ()  # a learning rate finder trains without them
        self.options: dict[str, StrategyOptions | None] = {stock: None}
        self.tuner = Tuner({stock: 0.0}, stock)
        self.clock = _Clock()
        self._link = Link(1e9)
        self.step = self._ranks = 0

    @property
    def reducer_options(self) -> ReducerOptions:
        return self._base.reducer

    def begin(self, strategy: AutoStrategy, trainer: Any) -> None:
        """Find the candidates for a fit, and the first one."""
        self._ranks, optimizers = dist.get_world_size(strategy._group), strategy.optimizers
        self.options, self._callbacks = {strategy._stock: None}, [*trainer.callbacks]
        stepped = {*map(id, parameters_of(optimizers))}
        params = [*strategy.lightning_module.parameters()]
        trains = any(id(param) in stepped and param.requires_grad for param in params)
        trains &= not any(map(is_lazy, params))  # of DDP's errors, that for these is clear
        trains &= all(param.dtype in REDUCIBLE for param in params if param.requires_grad)
        if self._ranks > 1 and trains and not any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            self.options |= strategy._candidates(self._base, trainer, self._ranks)
        with report_errors_to_peers():
            works = self._workloads(strategy) if len(self.options) > 1 else None
        names = [*self.options]
        agree({f"candidates of {self._name}": names}, strategy.root_device, strategy._timeout)
        if BY_NODE in self.options:
            try:
                nodes, counts = zip(*gather((strategy.node_rank, strategy.num_processes)), strict=True)
                if len({*counts}) > 1:  # with SLURM
                    raise ValueError(f"Nodes have different numbers of ranks: {', '.join(map(str, {*counts}))}.")
                check_placement(nodes, counts[0])
            except ValueError as error:
                log.info(f"{self._name}: no candidate averages within nodes. {error}".split("; or leave")[0])
                del self.options[BY_NODE]
        self.tuner = Tuner(self._measure(strategy, works) if works is not None else {names[0]: 0.0}, names[0])
        if works is not None:
            self.tuner.left_out = self._crowded(strategy)
        self.choose_first(optimizers)

    def choose_first(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Choose the candidate that trains first, by the checkpoint or by the link.

        Args:
            optimizers: if one is not torch's, a step may evaluate its closure several times. Then no candidate that
                compresses gradients is first.
        """
        links, names, left_out = self.tuner.links, [*self.options], self.tuner.left_out
        are_torchs = all(type(each).__module__.startswith("torch.optim") for each in optimizers)
        fitting = [name for name in names if name not in left_out]
        suited = [name for name in fitting if are_torchs or not self._sends_gradients(name, optimizers)]
        first = names[0] if links[names[0]] < SHORT else min(suited, key=links.__getitem__)
        loaded, self.loaded = self.loaded, Loaded()  # a later fit may have no checkpoint
        # A strategy that always takes TopK saves no choice.
        alike: tuple[str, ...] = (BY_NODE, TOPK) if loaded.choice == BY_NODE else (TOPK, BY_NODE)
        alike = alike if loaded.choice in ("", *UPDATES) else (loaded.choice,)
        kept = next((name for name in alike if loaded.has_residuals and name in names), "")
        first = kept or first
        resumed = loaded.choice if loaded.choice in names else ""
        ranks, before, settled = loaded.basis or (0, {}, False)
        pairs = [sorted((before[name], links[name])) for name in before if name in links]
        is_another_link = any(high > SHORT and high > OTHER_LINK * low for low, high in pairs)
        if ranks != self._ranks or is_another_link or not (settled or kept):  # a method in its try may be slow
            resumed = ""
        settled &= links.keys() <= before.keys()  # else try the new candidates
        self.tuner = Tuner(links, resumed or first, settled=bool(resumed) and settled)
        self.tuner.left_out = left_out
        only = "the model, its hooks, the optimizer or the number of ranks"
        why = "the checkpoint" if resumed or kept else "the link" if len(names) > 1 else only
        self.reason = f"{self._name}, by {why}" + (f": {self._link_text()}" if len(names) > 1 else "")

    @property
    def basis(self) -> tuple[int, dict[str, float], bool]:
        """The entry of a checkpoint under `BASIS`."""
        return self._ranks, dict(self.tuner.links), self.tuner.is_settled

    def forget(self) -> None:
        """Forget a fit, and a checkpoint that an evaluation has loaded."""
        self.loaded, self.parameters, self._callbacks = Loaded(), Parameters(), ()

    def measure_again(self, strategy: AutoStrategy) -> None:
        """Measure the link anew, and try the candidates anew. All ranks call it."""
        self.tuner.restart(self._measure(strategy, self._workloads(strategy)))

    def note_unfrozen(self, strategy: AutoStrategy, numel: int) -> None:
        """Measure again if the trained part of the model had another size before, of `numel` elements."""
        if len(self.options) == 1:
            return
        before, works = [*self.options], self._workloads(strategy)
        if [*self.options] != before or abs(numel / self.parameters.numel - 1) > DRIFT:
            self.tuner.restart(self._measure(strategy, works))

    def start(self, strategy: AutoStrategy) -> None:
        """Begin to measure, after the density warm-up."""
        self.step, self.clock = strategy.done, _Clock()
        self.tuner.wait(WARMUP - strategy.reducer.step)

    def _workloads(self, strategy: AutoStrategy) -> tuple[Workload, Workload, Workload]:
        """Return a rank's part of gradients in buckets, of updates in buckets, and of updates in the fewest segments.

        All ranks return the same, also if shards of one parameter have different lengths. If updates cannot be
        exchanged, they are no candidates from now on.
        """
        module, bucket_cap_mb = strategy.lightning_module, self._base.reducer.bucket_cap_mb
        reshard(module)  # an evaluation leaves whole parameters in the root of a sharded model
        shards = int(strategy.world_size) // self._ranks
        numel = sum(param.numel() for param in module.parameters() if param.requires_grad)
        gradients = Workload.even(-(-numel // shards), 0.0, 0.0, bucket_cap_mb)
        if not self.options.keys() & {*UPDATES}:
            return gradients, gradients, gradients
        try:
            params, _, group_of = exchanged_parameters(module, strategy.optimizers)
        except ValueError as error:  # two parameters share memory, for example
            if isinstance(strategy._training, UpdateTraining):
                raise
            log.info(f"{self._name}: no candidate exchanges updates. {error}")
            self.options = {name: each for name, each in self.options.items() if name not in UPDATES}
            return gradients, gradients, gradients
        shapes = {name: (-(-param.numel() // shards),) for name, param in params.items()}
        dtypes = {name: param.dtype for name, param in params.items()}
        layouts = [Layout.of(shapes, "bucket", bucket_cap_mb, dtypes=dtypes, group_of=group_of)]
        with contextlib.suppress(ValueError):  # too long for one segment
            layouts.append(Layout.of(shapes, "model", dtypes=dtypes, group_of=group_of))
        lengths = [tuple(segment.numel for segment in layout.segments) for layout in layouts]
        works = [Workload(each, (1.0,) * len(each), 0.0, 0.0) for each in lengths]
        return gradients, works[0], works[-1]

    def _measure(self, strategy: AutoStrategy, works: tuple[Workload, Workload, Workload]) -> dict[str, float]:
        """Measure the link; return the seconds on it of a step of each candidate.

        It also chooses the granularity of updates. One segment takes the latency of the link once in each step. Several
        segments can be sent within backward, while the next gradients are computed.

        Args:
            works: see `_workloads`.
        """
        comm = ProcessGroupComm(strategy._group)
        self._link = Link(*measure_link(comm, strategy.root_device, comm.of_all()))
        gradients, buckets, whole = works
        links = {name: self._seconds(name, gradients, strategy) for name in self.options}
        for name in UPDATES:
            if (options := self.options.get(name)) is not None:
                in_buckets, in_one = (self._seconds(name, work, strategy) for work in (buckets, whole))
                is_far = in_buckets - in_one > FAR
                links[name] = in_one if is_far else in_buckets
                granularity: Granularity = "model" if is_far else "bucket"
                if options.reducer.granularity != granularity:
                    self.options[name] = replace(options, reducer=replace(options.reducer, granularity=granularity))
        return links

    def _seconds(self, name: str, work: Workload, strategy: AutoStrategy) -> float:
        """Return the seconds on the link of a step of a candidate."""
        method = DENSE
        if (options := self.options[name]) is not None:
            what, method = options.choose(strategy.optimizers)[0], options.with_nodes(strategy.num_processes)
            if what == "update":
                method = replace(options.for_updates(method, self._ranks)[0], update_rule=None)
        return step(method, work, self._ranks, self._link, Costs(), dense_bytes=2 if name == BF16 else 4).seconds

    def _link_text(self) -> str:
        return f"the link carries {8e-6 * self._link.bandwidth:.3g} Mbit/s, {1e3 * self._link.latency:.2g} ms a message"

    def is_due(self, strategy: AutoStrategy, trainer: Any) -> bool:
        """Note the step that has ended, if one has; return whether ranks compare their measurements now."""
        done = strategy.done
        in_finder = self._callbacks and not any(callback in trainer.callbacks for callback in self._callbacks)
        if done == self.step or len(self.options) == 1 or in_finder:
            return False
        self.step = done
        return self.tuner.note(self.clock.take())

    def decide(self, strategy: AutoStrategy) -> str:
        """Compare measurements with the other ranks, and decide; return a message if the choice was made or changed."""
        strategy._training.exchange_pending()  # its collectives come before the following ones on all ranks
        needed = self._bytes(strategy)
        free = needed[self.tuner.current] + _free_bytes(strategy.root_device)
        lacking = [math.inf if self._is_barred(strategy, name) else needed[name] - free for name in needed]
        own = torch.tensor([self.tuner.median(), self.tuner.spread(), *lacking], device=strategy.root_device)
        comm = strategy.reducer.comm
        everyone = comm.of_all()
        was_settled, factor = self.tuner.is_settled, 1.0
        with comm.uncounted():
            slowest, spread, *lacking = everyone.all_gather(own).amax(0).tolist()
            if self.tuner.needs_more(spread):
                return ""
            left_out = {name: nbytes for name, nbytes in zip(self.options, lacking, strict=True) if nbytes > 0}
            if not self.tuner.times and not was_settled and self.options[self.tuner.current] is None:
                # Another program may have begun to use the link. Only a dense average would hide that.
                self.tuner.links = self._measure(strategy, self._workloads(strategy))
            link = self._link
            if seconds := self.tuner.probe_seconds:
                factor = speed_up(comm, strategy.root_device, link.bandwidth, link.latency, seconds, everyone)
        self.tuner.left_out = left_out
        for name in left_out:  # it was tried before the optimizer evaluated its closure several times
            if left_out[name] == math.inf:
                self.tuner.times.pop(name, None)
        if self.tuner.decide(slowest, factor):
            self.measure_again(strategy)
            now = f"a step takes {1e3 * slowest:.3g} ms now, and {self._link_text()}"
            self.reason = f"{self._name}, which tries again: {now}"
            return f"{self._name}: {now}: it tries again."
        if self.tuner.is_settled and not was_settled:
            found = f"{self.tuner.summary()}; {self._link_text()}"
            untried = [name for name in self.tuner.untried if name in left_out]
            if names := [name for name in untried if left_out[name] < math.inf]:
                found += f"; too little memory for {', '.join(names)}"
            if names := [name for name in untried if left_out[name] == math.inf]:
                found += f"; no {' or '.join(names)}, because a step evaluates its closure several times"
            self.reason = f"{self._name}, by measured steps: {found}"
            return f"{self._name} keeps {self.tuner.current}: {found}."
        return ""

    def _crowded(self, strategy: AutoStrategy) -> Collection[str]:
        """Return the candidates for which some rank lacks memory, besides gradients and two moments, at the start."""
        params = [local(param) for param in strategy.lightning_module.parameters() if param.requires_grad]
        free = _free_bytes(strategy.root_device, trains=False) - 3 * sum(param.nbytes for param in params)
        lacks = [nbytes > max(free, 0.0) for nbytes in self._bytes(strategy).values()]
        comm = ProcessGroupComm(strategy._group).of_all()
        found = comm.all_reduce(torch.tensor(lacks, dtype=torch.float32, device=strategy.root_device), "max")
        return [*itertools.compress(self.options, found.tolist())]

    def _is_barred(self, strategy: AutoStrategy, name: str) -> bool:
        """Return whether a candidate would raise an error, because a step evaluates its closure several times."""
        is_barred = strategy._evaluates_again and name != self.tuner.current
        return is_barred and self._sends_gradients(name, strategy.optimizers)

    def _sends_gradients(self, name: str, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether a candidate compresses gradients."""
        options = self.options[name]
        return options is not None and options.choose(optimizers)[0] == "gradient"

    def _bytes(self, strategy: AutoStrategy) -> dict[str, float]:
        """Return the bytes that each candidate needs on this rank, in addition to dense averages."""
        params = [local(param) for param in strategy.lightning_module.parameters() if param.requires_grad]
        fp32, weights = 4 * sum(param.numel() for param in params), sum(param.nbytes for param in params)
        found = dict.fromkeys(self.options, 0.0)
        for name, options in self.options.items():
            if options is not None:
                found[name] += fp32 * options.method.memory.error_feedback
                if options.choose(strategy.optimizers)[0] == "update":
                    found[name] += weights + 2 * fp32 * (options.overlap == "next_step")  # ranks agree on the weights
        return found

    def scalars(self) -> dict[str, float]:
        """Return the times by which the choice was made, and the link, for loggers."""
        tuner, link = self.tuner, self._link
        found = {name + logged.MEASURED: 1e3 * seconds for name, seconds in tuner.times.items()}
        found |= {name + logged.BOUND: 1e3 * tuner.bound(name) for name in tuner.untried}
        found |= {logged.CHOSEN: found[tuner.current + logged.MEASURED]}
        found |= {logged.LINK: 8e-6 * link.bandwidth, logged.MESSAGE: 1e3 * link.latency}
        return {f"{self._name}/{name}": value for name, value in found.items()}


def _free_bytes(device: torch.device, *, trains: bool = True) -> float:
    """Return the free bytes of a GPU's memory; inf for the CPU. If it trains, activations need their memory again."""
    if device.type != "cuda":
        return math.inf
    used = torch.cuda.max_memory_allocated(device) if trains else torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used)
