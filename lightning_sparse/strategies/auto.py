"""Strategies that choose the exchange by measuring while they train: dense averages, or a method that pays.

They try only methods that trained as well as dense training in this project's benchmarks. `Choice` finds them, and
`Tuner` decides by the times of steps. Ranks decide alike, because each decides by the numbers of the slowest rank. A
switch happens between two steps:

- Ranks take the mean of the residuals of gradients, and add it to the gradient of the next step.
- Residuals of updates stay if updates are exchanged afterwards. Otherwise they are dropped: applied at once, these old
  updates raise the loss (benchmarks.switches). Ranks take the mean of the optimizers' states, which differ among ranks
  while updates are exchanged.

`AutoStrategy` is the common part. `AutoDDP` is here, and `auto_hsdp` has the strategy for sharded models.
"""

# Lightning's strategy and ours are the next bases:
# mypy: disable-error-code="misc"

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import (
    accumulates,
    ddp_options,
    has_step_hooks,
    have_hooks_called,
    ignored_by_ddp,
    parameters_by_name,
    steps_taken,
)
from lightning_sparse._lightning import Mixin
from lightning_sparse.comm import RankFailure
from lightning_sparse.hooks.closure import is_inner_step, with_gradients
from lightning_sparse.hooks.ddp import sparse_embedding
from lightning_sparse.hooks.misuse import keeps_copy
from lightning_sparse.hooks.stock import StockExchanger, count_ddp
from lightning_sparse.hooks.update_exchange import UpdateExchanger
from lightning_sparse.shards import parameters_of
from lightning_sparse.state import renamed
from lightning_sparse.strategies.choice import (
    BASIS,
    BF16,
    BY_NODE,
    KEY,
    NEXT_STEP,
    STOCK,
    TOPK,
    UPDATES,
    Choice,
    Loaded,
    Parameters,
)
from lightning_sparse.strategies.fit_checks import trains_with_updates
from lightning_sparse.strategies.gradient_training import GradientTraining, initial_states
from lightning_sparse.strategies.overlap_rules import gradient_hooks
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.summary import tensorboard
from lightning_sparse.strategies.training import Training
from lightning_sparse.strategies.update_training import UpdateTraining
from lightning_sparse.trained import BFLOAT16, DELAYED, TRAINED


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
        self._auto = Choice(self._options, f"auto_{self._kind}", self._stock)

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

    def _look_at_gradients(self) -> None:
        """Raise RuntimeError if a parameter whose gradients are not averaged has one. Called after a backward pass."""

    def _obstacles(self) -> dict[str, tuple[bool, Sequence[str]]]:
        """Return, by obstacle, whether this rank has met it, and the candidates that would raise an error then.

        All ranks return the same obstacles and candidates.
        """
        others = [name for name in self._auto.options if name != self.choice]
        compressing = [name for name in others if self._auto.sends_gradients(name, self.optimizers)]
        updates = [] if isinstance(self._training, UpdateTraining) else [name for name in others if name in UPDATES]
        return {
            "a step evaluates its closure several times": (self._evaluates_again, compressing),
            "an optimizer keeps its own copy of the weights": (
                bool(updates) and any(map(keeps_copy, self.optimizers)),
                updates,
            ),
        }

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
        self._auto.parameters = Parameters(parameters_by_name(self.lightning_module), self._auto.parameters)
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

    @property
    def _accumulates(self) -> bool:
        """Whether Lightning only accumulates gradients in the present batch."""
        return not self._is_manual and accumulates(self.lightning_module.trainer)

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
        self._look_at_gradients()
        if not self._is_manual:
            self._auto.clock.note_end()
            if not self._has_counted and not self._accumulates:
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
        overlap: "next_step" also tries the exchange of updates during the next step. Between two steps, weights then
            differ among ranks, so no callback or hook may read or change them. "none" exchanges updates after each
            step. None exchanges them during backward, if possible.
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

    def _look_at_gradients(self) -> None:
        params, options = self._auto.parameters, ddp_options(self)  # type: ignore[arg-type]
        may_lack = options.get("find_unused_parameters") or options.get("static_graph") or params.lack_gradients
        if isinstance(self._training, UpdateTraining) and not may_lack and not self._accumulates:
            params.look_at_gradients(ignored_by_ddp(self.lightning_module))
        for name in params.frozen if isinstance(self.exchanger, StockExchanger) else ():
            param = params.by_name[name]
            if param.requires_grad and param.grad is not None and name not in self.model.parameters_to_ignore:
                raise self._training.failed(
                    f"{name!r} was frozen when auto_ddp wrapped the model and takes gradients now: DDP does not "
                    f"average them, so the ranks would drift apart. Unfreeze it before fit or in "
                    f"on_train_batch_start. If a training step freezes and unfreezes it, also take "
                    f"strategy='auto_ddp_find_unused_parameters_true'."
                )

    def _obstacles(self) -> dict[str, tuple[bool, Sequence[str]]]:
        by_ddp = [name for name in self._auto.options if name not in UPDATES and name != self.choice]
        exchanger, options = self.exchanger, ddp_options(self)  # type: ignore[arg-type]
        in_parts = isinstance(exchanger, UpdateExchanger) and exchanger.gradients_in_parts
        return super()._obstacles() | {
            "a step computes no gradient of some parameter": (
                self._auto.parameters.lack_gradients,
                by_ddp,
            ),
            "gradients come in several parts, as with reentrant checkpointing": (
                in_parts and not options.get("static_graph"),
                by_ddp,
            ),
        }

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
        unfrozen, new = list[str](), list[str]()
        if isinstance(self._training, UpdateTraining):
            params.begin_batch()
        else:
            unfrozen = [name for name in params.frozen if params.by_name[name].requires_grad]
            new = params.added(self.lightning_module, self.optimizers)
        if unfrozen or new:
            # DDP averages only the gradients of parameters that were trained when it wrapped the model.
            try:
                self._switch(self.lightning_module.trainer)  # to the same exchange
            except RankFailure as error:
                change = "unfrozen" if unfrozen else "added"
                raise RankFailure(
                    f"{[*unfrozen, *new][0]!r} was {change} on rank {self.global_rank}, and then: {error} "
                    f"Add and unfreeze the same parameters before the same step on all ranks."
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
