"""The choice of `auto_ddp` and `auto_hsdp` in a fit: the candidates, their measurements, and the present one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_sparse import logged
from lightning_sparse._compat import parameters_by_name
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.comm.link import measure_link, speed_up
from lightning_sparse.cost import DENSE, Costs, Link, Workload, step
from lightning_sparse.gradients import REDUCIBLE
from lightning_sparse.hooks import agree, report_errors_to_peers
from lightning_sparse.layout import Granularity, Layout
from lightning_sparse.methods import WARMUP_FACTORS, WARMUP_STEPS
from lightning_sparse.options import ReducerOptions
from lightning_sparse.replica_checkpoint import gather
from lightning_sparse.shards import local, parameters_of, reshard
from lightning_sparse.strategies.fit_checks import check_placement
from lightning_sparse.strategies.strategy_options import StrategyOptions
from lightning_sparse.strategies.tuner import DRIFT, Tuner
from lightning_sparse.strategies.update_training import UpdateTraining
from lightning_sparse.updates.parameters import exchanged_parameters

if TYPE_CHECKING:
    from lightning_sparse.strategies.auto import AutoStrategy

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
"""Least seconds of latency per step that an exchange of updates in one segment has to save."""


class Clock:
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


class Loaded(NamedTuple):
    """The choice in the checkpoint of a fit, whether it has residuals, and its entry under `BASIS`."""

    choice: str = ""
    has_residuals: bool = False
    basis: Any = None


class Parameters:
    """A model's parameters at the start of an exchange.

    Args:
        by_name: the parameters by name.
        before: those at the start of the fit's exchange before.

    Attributes:
        by_name: as given.
        frozen: names of the frozen ones.
        trained: the parameters that the fit has trained so far.
        lack_gradients: whether a backward pass of the fit has left out a parameter that DistributedDataParallel would
            have waited for.
    """

    def __init__(self, by_name: Mapping[str, torch.nn.Parameter] = {}, before: Parameters | None = None) -> None:
        self.by_name = by_name
        self.frozen = [name for name, param in by_name.items() if not param.requires_grad]
        self.trained = {param for param in by_name.values() if param.requires_grad}
        self.trained |= set() if before is None else before.trained
        self.lack_gradients: bool = before is not None and before.lack_gradients
        self._known = {*by_name.values()}
        self._were_frozen = set[torch.nn.Parameter]()  # since the exchange began

    def look_at_gradients(self, ignored: Collection[str]) -> None:
        """After a backward pass, look whether DistributedDataParallel would have waited for a gradient.

        Args:
            ignored: names of the parameters that DistributedDataParallel leaves out.
        """
        left_out = {*self.frozen, *ignored}
        trained = [param for name, param in self.by_name.items() if name not in left_out]
        self._were_frozen.update(param for param in trained if not param.requires_grad)
        self.lack_gradients |= any(
            param.requires_grad and (param.grad is None or param in self._were_frozen) for param in trained
        )

    def begin_batch(self) -> None:
        """Forget parameters that were unfrozen between two steps: a switch wraps the model with them."""
        self._were_frozen = {param for param in self._were_frozen if not param.requires_grad}

    def added(self, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
        """Return the names of parameters that the model and an optimizer have got since the last call."""
        unknown = {param for param in parameters_of(optimizers) if param not in self._known}
        self._known |= unknown  # type: ignore[arg-type]
        return [name for name, param in parameters_by_name(model).items() if param in unknown] if unknown else []

    def renames(self, now: Parameters) -> dict[str, str]:
        """Return the present names by these names, which callbacks may have changed."""
        names = {id(param): name for name, param in now.by_name.items()}
        return {name: names.get(id(param), name) for name, param in self.by_name.items()}

    @property
    def numel(self) -> int:
        """Number of elements that were trained at that time."""
        frozen = {*self.frozen}
        return sum(param.numel() for name, param in self.by_name.items() if name not in frozen)


class Choice:
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
        self.clock = Clock()
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
        trains &= not any(map(is_lazy, params))  # DDP raises a clear error for them
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
        suited = [name for name in fitting if are_torchs or not self.sends_gradients(name, optimizers)]
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
        self.step, self.clock = strategy.done, Clock()
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
        device = strategy.root_device
        self._link = Link(*measure_link(comm, device, comm.of_all()), comm.direct_bytes(device))
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
            exchange, method = options.choose(strategy.optimizers)[0], options.with_nodes(strategy.num_processes)
            if exchange == "update":
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
        lacking, obstacles = [nbytes - free for nbytes in needed.values()], strategy._obstacles()
        met = [float(is_met) for is_met, _ in obstacles.values()]
        own = torch.tensor([self.tuner.median(), self.tuner.spread(), *lacking, *met], device=strategy.root_device)
        comm = strategy.reducer.comm
        everyone = comm.of_all()
        was_settled, factor = self.tuner.is_settled, 1.0
        with comm.uncounted():
            slowest, spread, *found = everyone.all_gather(own).amax(0).tolist()
            if self.tuner.needs_more(spread):
                return ""
            if not self.tuner.times and not was_settled and self.options[self.tuner.current] is None:
                # Another program may have begun to use the link. Only a dense average would hide that.
                self.tuner.links = self._measure(strategy, self._workloads(strategy))
            link = self._link
            if seconds := self.tuner.probe_seconds:
                factor = speed_up(comm, strategy.root_device, link.bandwidth, link.latency, seconds, everyone)
        why = dict.fromkeys((name for name, nbytes in zip(needed, found) if nbytes > 0), "")  # noqa: B905
        for (obstacle, (_, names)), is_met in zip(obstacles.items(), found[len(needed) :], strict=True):
            for name in names if is_met else ():
                why[name] = obstacle
                self.tuner.times.pop(name, None)  # it was tried before
        self.tuner.left_out = why
        if self.tuner.decide(slowest, factor):
            self.measure_again(strategy)
            now = f"a step takes {1e3 * slowest:.3g} ms now, and {self._link_text()}"
            self.reason = f"{self._name}, which tries again: {now}"
            return f"{self._name}: {now}: it tries again."
        if self.tuner.is_settled and not was_settled:
            text = f"{self.tuner.summary()}; {self._link_text()}"
            for each in dict.fromkeys(why.values()):
                names = [name for name in self.tuner.untried if why.get(name) == each]
                if names and each:
                    text += f"; no {' or '.join(names)}, because {each}"
                elif names:
                    text += f"; too little memory for {', '.join(names)}"
            self.reason = f"{self._name}, by measured steps: {text}"
            return f"{self._name} keeps {self.tuner.current}: {text}."
        return ""

    def _crowded(self, strategy: AutoStrategy) -> Collection[str]:
        """Return the candidates for which some rank lacks memory, besides gradients and two moments, at the start."""
        params = [local(param) for param in strategy.lightning_module.parameters() if param.requires_grad]
        free = _free_bytes(strategy.root_device, trains=False) - 3 * sum(param.nbytes for param in params)
        lacks = [nbytes > max(free, 0.0) for nbytes in self._bytes(strategy).values()]
        comm = ProcessGroupComm(strategy._group).of_all()
        found = comm.all_reduce(torch.tensor(lacks, dtype=torch.float32, device=strategy.root_device), "max")
        return [*itertools.compress(self.options, found.tolist())]

    def sends_gradients(self, name: str, optimizers: Sequence[Optimizer]) -> bool:
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
