"""One rank of the network benchmark: `benchmarks.network` starts as many as there are workers.

Every contestant is checked before its time counts: finite losses, weights that are bit-identical on all ranks, the same
weights as one process that sees all batches (dense contestants), and nothing lost: over the first steps the gradients
of all ranks must equal what was handed out plus what is kept. That sum is compared along one random direction, so that
the check sends two numbers instead of whole gradients.
"""

# No `from __future__ import annotations` here: DDP looks at a hook's annotations and refuses strings.

import contextlib
import copy
import gc
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.shapes import shapes
from examples.models.resnet import ResNet20

if TYPE_CHECKING:
    from lightning_sparse import Reducer

LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Job:
    """What `benchmarks.network` asks of all ranks.

    Attributes:
        workload: "mlp", one of `TRAININGS`, or a model of `benchmarks.shapes`.
        todo: contestants and the round that each belongs to, in order; for a training with their learning rates, as in
            "topk@0.05".
        out: file to which rank 0 appends one JSON line per result.
        seconds: how long to time each contestant in each round.
        min_steps: timed steps at least, even when they take longer.
        max_steps: timed steps at most.
        batch: examples per rank and step.
        density: of all sparse contestants.
        bucket_cap_mb: size of DDP's buckets for our contestants.
        target_loss: a training ends when the test loss is below it.
        compute: seconds of forward and backward of a model of `benchmarks.shapes`.
        ranks_per_host: how many ranks share a link.
    """

    workload: str
    todo: list[tuple[str, int]]
    out: str
    seconds: float
    min_steps: int
    max_steps: int
    batch: int
    density: float
    bucket_cap_mb: float
    target_loss: float
    compute: float
    ranks_per_host: int


@dataclass
class Wrapped:
    """A model made ready for one contestant's kind of communication.

    Attributes:
        module: what the training loop calls.
        residuals: returns what the rank has kept so far, by parameter name.
        reducer: ours only.
        every: how many steps lie between two exchanges, in a training.
        averages: exchanges weights, not gradients.
    """

    module: nn.Module
    residuals: Callable[[], dict[str, Tensor]] = dict
    reducer: "Reducer | None" = None
    every: int = 1
    averages: bool = False


@dataclass(frozen=True)
class Contestant:
    """A way to communicate.

    Attributes:
        wrap: makes a model ready.
        tolerance: distance allowed from the single-process reference, relative to the reference's step; None where
            the contestant is not dense.
        check_steps: steps over which nothing may be lost; the first of them count as warm-up.
        sparse: whether few entries are handed out: at most P·⌈4k/3⌉.
        alone: ranks do not communicate at all.
    """

    wrap: Callable[[nn.Module, Job], Wrapped]
    tolerance: float | None = None
    check_steps: int = 1
    sparse: bool = False
    alone: bool = False


def mlp() -> nn.Module:
    """Return the timing model: 2048 inputs, six hidden layers of 2048, 200 classes; 25.6 million parameters."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 200))


def convnet() -> nn.Module:
    """Return the model for 8 × 8 digits; 2.1 million parameters, nearly all in one layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


TRAININGS = {"real": convnet, "real_resnet20": lambda: ResNet20(in_channels=1)}
"""Workloads that train for real, on the digits."""


class Paced(nn.Module):
    """Gradients of given shapes, after a given time: what a model does for the communication, with idle processors.

    Forward sleeps for a third of the time, and backward for the rest, the same share for each matrix. The values are
    gradients of a small convolutional network on the digits, put end to end; in every other step those of another
    batch. So large ones are in the same places on all ranks and in all steps, as in a real model.
    """

    def __init__(self, shapes: list[tuple[int, ...]], compute: float, values: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.forward_seconds = compute / 3
        matrices = sum(len(shape) > 1 for shape in shapes)
        self.seconds = [2 / 3 * compute / matrices if len(shape) > 1 else 0.0 for shape in shapes]
        # Long enough for the largest parameter, from wherever it starts. A function, so that copies share it.
        longest = max(param.numel() for param in self.params)
        period = values[0].numel()
        sources = [batch.repeat(2 + longest // period) for batch in values]
        starts = torch.randint(period, (len(shapes),), generator=torch.Generator().manual_seed(0)).tolist()
        self.gradient = lambda step, number, shape: sources[step % 2][starts[number] :][: math.prod(shape)].view(shape)

    def forward(self, step: Tensor) -> Tensor:
        """Return a loss, 0. `step` chooses the gradients, 0 to 7."""
        time.sleep(self.forward_seconds)
        x = torch.zeros((), requires_grad=True)
        for number, (param, seconds) in enumerate(zip(self.params, self.seconds, strict=True)):
            x = _Pace.apply(x, param, self.gradient(int(step), number, param.shape), seconds)  # type: ignore[no-untyped-call]
        return x


class _Pace(torch.autograd.Function):
    """Hands a parameter its gradient, after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


def real_gradients(rank: int) -> list[Tensor]:
    """Return two of the convolutional network's gradients on this rank's digits, after some steps that all share."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = convnet()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    kept = []
    for seed in [*range(20), 1000 + rank, 2000 + rank]:
        picked = torch.randint(len(labels), (32,), generator=torch.Generator().manual_seed(seed))
        grads = torch.autograd.grad(functional.cross_entropy(model(images[picked]), labels[picked]), params)
        if seed >= 1000:
            kept.append(torch.cat([grad.view(-1) for grad in grads]))
        else:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
    return kept


def _no_communication(model: nn.Module, job: Job) -> Wrapped:
    return Wrapped(model)


def _idle_hook(model: nn.Module, job: Job) -> Wrapped:
    """DDP with a hook that hands every gradient back: what its buckets cost without any communication."""
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=job.bucket_cap_mb, gradient_as_bucket_view=True)

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)
    return Wrapped(ddp)


def _ddp(model: nn.Module, job: Job) -> Wrapped:
    # All ranks build the same model, so sending it around would only cost time on a slow link.
    return Wrapped(DistributedDataParallel(model, init_sync=False))


def _fp16(model: nn.Module, job: Job) -> Wrapped:
    ddp = DistributedDataParallel(model, init_sync=False)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Wrapped(ddp)


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Torch's bf16_compress_hook, which refuses to run without NCCL, although gloo can add up bf16."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.to(torch.bfloat16).div_(dist.get_world_size()), async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return future


def _bf16(model: nn.Module, job: Job) -> Wrapped:
    ddp = DistributedDataParallel(model, init_sync=False)
    ddp.register_comm_hook(None, bf16_hook)
    return Wrapped(ddp)


def _powersgd(model: nn.Module, job: Job) -> Wrapped:
    # One bucket: with several, the hook's callbacks wait for each other on gloo's threads and never end. The hook asks
    # for two dense steps at first.
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=100_000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    names = {id(param): name for name, param in model.named_parameters()}
    order: list[Tensor] = []

    def hook(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        order[:] = bucket.parameters()
        return powerSGD_hook.powerSGD_hook(state, bucket)

    ddp.register_comm_hook(state, hook)

    def residuals() -> dict[str, Tensor]:
        parts = state.error_dict[0].split([param.numel() for param in order])
        return {names[id(param)]: part for param, part in zip(order, parts, strict=True)}

    return Wrapped(ddp, residuals)


def _naive_topk(model: nn.Module, job: Job) -> Wrapped:
    """Top-k as it is usually written: torch.topk over each bucket, and two all-gathers within the hook."""
    ddp = DistributedDataParallel(model, init_sync=False)
    names = {id(param): name for name, param in model.named_parameters()}
    kept = {name: torch.zeros_like(param) for name, param in model.named_parameters()}

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        u = bucket.buffer()
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            grad.add_(kept[names[id(param)]])
        _, indices = torch.topk(u.abs(), max(1, int(job.density * u.numel())))
        values = u[indices]
        u[indices] = 0
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            kept[names[id(param)]].copy_(grad)
        size = dist.get_world_size()
        all_indices = [torch.empty_like(indices) for _ in range(size)]
        all_values = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(all_indices, indices)
        dist.all_gather(all_values, values)
        u.zero_()
        for where, what in zip(all_indices, all_values, strict=True):
            u.index_add_(0, where, what / size)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(u)
        return done

    ddp.register_comm_hook(None, hook)
    return Wrapped(ddp, lambda: kept)


def _ours(name: str, two_level: bool = False) -> Callable[[nn.Module, Job], Wrapped]:
    def wrap(model: nn.Module, job: Job) -> Wrapped:
        # Here, so that the other contestants run without waiting for Lightning's import on every rank.
        from lightning_sparse import attach, method
        from lightning_sparse.aggregators import TwoLevel

        chosen = method(name, density=job.density)
        if two_level:
            chosen = replace(chosen, aggregator=TwoLevel(chosen.aggregator, job.ranks_per_host))

        # As our strategies do it.
        ddp = DistributedDataParallel(
            model, init_sync=False, bucket_cap_mb=job.bucket_cap_mb, gradient_as_bucket_view=True
        )
        reducer = attach(ddp, chosen)
        return Wrapped(ddp, lambda: reducer.state_dict()["elements"]["residual"], reducer)

    return wrap


def _seldom(averages: bool) -> Callable[[nn.Module, Job], Wrapped]:
    """Dense, but so seldom that as many bytes are sent as by top-k: gradients added up, or weights averaged."""

    def wrap(model: nn.Module, job: Job) -> Wrapped:
        from lightning_sparse import method
        from lightning_sparse.layout import Layout

        layout = Layout.of({name: tuple(param.shape) for name, param in model.named_parameters()}, "bucket", 25)
        size, topk = dist.get_world_size(), method("topk", density=job.density)
        sparse = sum(topk.aggregator.nbytes(topk.compressor, segment, None, size) for segment in layout.segments)
        every = round(8 * layout.numel * (size - 1) / size / sparse)
        if averages:
            return Wrapped(model, every=every, averages=True)
        return Wrapped(DistributedDataParallel(model, init_sync=False), every=every)

    return wrap


CONTESTANTS = {
    "none": Contestant(_no_communication, alone=True),
    "idle_hook": Contestant(_idle_hook, alone=True),
    "ddp": Contestant(_ddp, tolerance=1e-4),
    "fp16": Contestant(_fp16, tolerance=1e-2),
    "bf16": Contestant(_bf16, tolerance=5e-2),
    "powersgd": Contestant(_powersgd, check_steps=4),
    "naive_topk": Contestant(_naive_topk, check_steps=2, sparse=True),
    "topk": Contestant(_ours("topk"), check_steps=2, sparse=True),
    "gaussiank": Contestant(_ours("gaussiank"), check_steps=2, sparse=True),
    "gtopk": Contestant(_ours("gtopk"), check_steps=2, sparse=True),
    "oktopk": Contestant(_ours("oktopk"), check_steps=2, sparse=True),
    "scalecom": Contestant(_ours("scalecom"), check_steps=2, sparse=True),
    "randk": Contestant(_ours("randk"), check_steps=2, sparse=True),
    "ddp_accumulated": Contestant(_seldom(averages=False)),
    "local_sgd": Contestant(_seldom(averages=True)),
    "topk_two_level": Contestant(_ours("topk", two_level=True), check_steps=2, sparse=True),
}


class WrongResult(RuntimeError):
    """A contestant computes something else than it should, so its time means nothing."""


Batch = tuple[Tensor, Tensor]


class Rank:
    """What one rank knows and does; the order of calls is the same on all ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.paced = job.workload not in ("mlp", *TRAININGS)
        if self.paced:
            self.model: nn.Module = Paced(shapes(job.workload), job.compute, real_gradients(self.rank))
        else:
            self.model = mlp() if job.workload == "mlp" else TRAININGS[job.workload]()

    def write(self, **record: Any) -> None:
        """Append a line to the results; rank 0 only."""
        if self.rank == 0:
            with Path(self.job.out).open("a") as file:
                file.write(json.dumps(record) + "\n")

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agreed(self, value: float) -> float:
        """Return rank 0's `value`."""
        return float(self.gather(value)[0])

    def batches(self, rank: int) -> list[Batch]:
        """Return the eight batches that a rank goes through again and again in the timing workloads."""
        if self.paced:
            return [(torch.tensor(step), torch.zeros(0)) for step in range(8)]
        random = torch.Generator().manual_seed(rank)
        return [
            (
                torch.randn(self.job.batch, 2048, generator=random),
                torch.randint(200, (self.job.batch,), generator=random),
            )
            for _ in range(8)
        ]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a timing workload."""
        out: Tensor = module(batch[0])
        return out if self.paced else functional.cross_entropy(out, batch[1])

    def check_weights(self, model: nn.Module) -> None:
        """Raise unless all ranks have the same weights, bit by bit."""
        checksum = 0
        for param in model.parameters():
            checksum = zlib.crc32(param.detach().numpy().data, checksum)
        checksums = self.gather(checksum)
        if len(set(checksums)) > 1:
            raise WrongResult(f"the ranks' weights differ: checksums {checksums}")

    def check_reference(self, model: nn.Module, start: nn.Module, tolerance: float) -> None:
        """Raise unless one step from `start` with the batches of all ranks in one process leads to `model`."""
        reference = copy.deepcopy(start)
        for rank in range(self.size):
            x, y = self.batches(rank)[0]
            (functional.cross_entropy(reference(x), y) / self.size).backward()
        torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE).step()
        error = step = 0.0
        for before, expected, got in zip(start.parameters(), reference.parameters(), model.parameters(), strict=True):
            error += (got - expected).square().sum().item()
            step += (expected - before).square().sum().item()
        if not math.sqrt(error / step) <= tolerance:
            raise WrongResult(
                f"one step is off by {math.sqrt(error / step):.2g} of its length; {tolerance:g} is allowed"
            )

    def measure(self, name: str) -> dict[str, Any]:
        """Check a contestant in its first steps, then time it."""
        contestant = CONTESTANTS[name]
        model = copy.deepcopy(self.model)
        wrapped = contestant.wrap(model, self.job)
        batches = self.batches(self.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        losses: list[Tensor] = []

        def step(batch: Batch) -> float:
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = self.loss(wrapped.module, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            return time.perf_counter() - started

        random = torch.Generator().manual_seed(1)
        direction = [torch.randn(param.shape, generator=random) for param in model.parameters()]
        gradients = handed_out = norm = 0.0
        for number in range(contestant.check_steps):
            # autograd.grad leaves DDP's hooks alone.
            local = torch.autograd.grad(self.loss(model, batches[number]), list(model.parameters()))
            gradients += along(direction, local)
            norm += sum(grad.square().sum().item() for grad in local)
            seconds = step(batches[number])
            agreed = [param.grad for param in model.parameters() if param.grad is not None]
            handed_out += along(direction, agreed)
            if contestant.sparse:
                # The balance below holds for every approximation; this says that it is one that saves something.
                entries = sum(int(grad.count_nonzero()) for grad in agreed)
                k = self.job.density * sum(grad.numel() for grad in agreed)
                if not 2 * k / 3 <= entries <= 4 * k / 3 * self.size + 100:
                    raise WrongResult(f"{entries} entries were handed out, for k = {k:.0f} on {self.size} ranks")
            if number == 0 and contestant.tolerance is not None and not self.paced:
                self.check_reference(model, self.model, contestant.tolerance)
        if not contestant.alone:
            residuals = wrapped.residuals()
            kept = along(direction, [residuals[key] for key, _ in model.named_parameters()]) if residuals else 0.0
            self.check_conservation(gradients, handed_out, kept, norm, contestant.tolerance or 1e-4)
        del direction
        # Buffers are allocated and DDP forms its buckets anew in the second step; a slow step drowns both.
        for number in range(2 if self.agreed(seconds) < 3 else 0):
            seconds = step(batches[number])
        count = max(self.job.min_steps, min(self.job.max_steps, int(self.job.seconds / self.agreed(seconds))))

        dist.barrier()
        sent, transmitted = sent_bytes(wrapped), interface_bytes()
        phases = reducer_seconds(wrapped)
        started, busy, own = time.perf_counter(), machine_seconds(), time.process_time()
        times = [step(batches[number % len(batches)]) for number in range(count)]
        dist.barrier()
        busy, own = machine_seconds() - busy, time.process_time() - own
        capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
        transmitted = interface_bytes() - transmitted
        sent = sent_bytes(wrapped) - sent
        phases = {phase: value - phases[phase] for phase, value in reducer_seconds(wrapped).items()}

        if not torch.stack(losses).isfinite().all():
            raise WrongResult("a loss is not finite")
        if not contestant.alone:
            self.check_weights(model)
        everyone = self.gather((times, sent, transmitted, phases, own))
        return {
            "steps": count,
            "params": sum(param.numel() for param in model.parameters()),
            # A step is over when its slowest rank is.
            "ms": [1e3 * max(column) for column in zip(*(rank[0] for rank in everyone), strict=True)],
            "sent_bytes": max(rank[1] for rank in everyone) / count,
            "tx_bytes": max(rank[2] for rank in everyone) / count,
            "cpu_ms": 1e3 * sum(rank[4] for rank in everyone) / self.size / count,
            "foreign_load": max(0.0, busy - sum(rank[4] for rank in everyone)) / capacity,
            "phases_ms": {phase: 1e3 * max(rank[3][phase] for rank in everyone) / count for phase in everyone[0][3]},
        }

    def check_conservation(
        self, gradients: float, handed_out: float, kept: float, norm: float, tolerance: float
    ) -> None:
        """Raise unless the gradients of all ranks equal what all ranks got plus what they keep, along one direction."""
        both = torch.tensor([gradients - handed_out - kept, norm], dtype=torch.float64)
        dist.all_reduce(both)
        error, length = abs(both[0].item()), math.sqrt(both[1].item())
        if not error <= tolerance * length:
            raise WrongResult(f"gradients and residuals do not add up: {error / length:.2g} is missing")

    def parts(self) -> dict[str, Any]:
        """Time selection and decoding on their own, on all ranks at once, without any communication."""
        from lightning_sparse.compressors import GaussianK, TopK
        from lightning_sparse.layout import Layout

        of_param = {name: tuple(param.shape) for name, param in self.model.named_parameters()}
        layout = Layout.of(of_param, "bucket", self.job.bucket_cap_mb)
        model = copy.deepcopy(self.model)
        batches = self.batches(self.rank)
        residuals = [torch.zeros(segment.numel) for segment in layout.segments]
        chosen = [torch.zeros(0, dtype=torch.int64) for _ in layout.segments]
        density = self.job.density
        out = torch.empty(layout.numel)
        # As many entries as top-k sends, elsewhere for each rank.
        received = [
            [
                (torch.randperm(segment.numel)[: round(density * segment.numel)].sort().values, value)
                for value in torch.ones(self.size, round(density * segment.numel))
            ]
            for segment in layout.segments
        ]

        def select(choose: Callable[[Tensor], Tensor]) -> None:
            for number, (segment, e) in enumerate(zip(layout.segments, residuals, strict=True)):
                torch._foreach_add_(segment.views(e), [gradient[name].view(-1) for name in segment.names])
                chosen[number] = choose(e)
                e[chosen[number]] = 0

        def naive(e: Tensor) -> Tensor:
            return torch.topk(e.abs(), max(1, int(density * e.numel()))).indices

        def decode() -> None:
            for segment, payloads in zip(layout.segments, received, strict=True):
                part = out[segment.start : segment.start + segment.numel].zero_()
                for indices, values in payloads:
                    part.index_add_(0, indices, values)

        topk, gaussiank = TopK(density).select, GaussianK(density).select
        timed: dict[str, Callable[[], None]] = {
            "select topk": lambda: select(topk),
            "select gaussiank": lambda: select(gaussiank),
            "select torch.topk": lambda: select(naive),
            "decode": decode,
        }
        times: dict[str, list[float]] = {}
        for part, run in timed.items():
            for e in residuals:
                e.zero_()
            for number in range(12 if part != "select torch.topk" else 4):
                x, y = batches[number % len(batches)]
                grads = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
                gradient = dict(zip(of_param, grads, strict=True))
                dist.barrier()
                started = time.perf_counter()
                run()
                if number > 1:
                    times.setdefault(part, []).append(time.perf_counter() - started)
        everyone = self.gather(times)
        return {
            part: [1e3 * max(column) for column in zip(*(rank[part] for rank in everyone), strict=True)]
            for part in timed
        }

    def train(self, name: str, learning_rate: float) -> list[dict[str, float]]:
        """Train on the digits until the test loss is reached, or time is up; the clock stands still during tests."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
        labels = torch.tensor(digits.target)[order]
        train_x, train_y, test_x, test_y = images[:1500], labels[:1500], images[1500:], labels[1500:]
        model = copy.deepcopy(self.model)
        wrapped = CONTESTANTS[name].wrap(model, self.job)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        random = torch.Generator().manual_seed(self.rank)
        curve: list[dict[str, float]] = []
        clock, every = 0.0, wrapped.every
        # Tests come after an exchange, so that all ranks have the same weights.
        count = every * math.ceil(10 / every)
        while True:
            model.eval()
            with torch.no_grad():
                scores = model(test_x)
            model.train()
            test_loss = functional.cross_entropy(scores, test_y).item()
            accuracy = (scores.argmax(1) == test_y).float().mean().item()
            curve.append(
                {"step": count * len(curve), "seconds": clock, "test_loss": test_loss, "test_accuracy": accuracy}
            )
            if self.agreed(not test_loss >= self.job.target_loss or clock > self.job.seconds):
                break
            dist.barrier()
            started = time.perf_counter()
            for number in range(1, count + 1):
                # A rank's own quarter of the data.
                picked = torch.randint(1500 // self.size, (self.job.batch,), generator=random) * self.size + self.rank
                exchanges = number % every == 0
                adds_up = not exchanges and isinstance(wrapped.module, DistributedDataParallel)
                with wrapped.module.no_sync() if adds_up else contextlib.nullcontext():  # type: ignore[operator]
                    loss = functional.cross_entropy(wrapped.module(train_x[picked]), train_y[picked])
                    (loss if wrapped.averages else loss / every).backward()
                if not adds_up:
                    optimizer.step()
                    optimizer.zero_grad()
                if exchanges and wrapped.averages:
                    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
                    dist.all_reduce(weights.div_(self.size))
                    nn.utils.vector_to_parameters(weights, model.parameters())
            clock += time.perf_counter() - started
        if not CONTESTANTS[name].alone:
            self.check_weights(model)
        return curve


def along(direction: list[Tensor], tensors: Sequence[Tensor]) -> float:
    """Return the scalar product of two lists of tensors, in double precision."""
    return sum(
        torch.dot(a.view(-1).double(), b.reshape(-1).double()).item() for a, b in zip(direction, tensors, strict=True)
    )


def sent_bytes(wrapped: Wrapped) -> int:
    """Return what the method itself counts, 0 where it does not."""
    return wrapped.reducer.comm.sent_bytes if wrapped.reducer else 0


def reducer_seconds(wrapped: Wrapped) -> dict[str, float]:
    """Return the time that our reducer has spent in each phase; "wire" is part of "aggregate"."""
    reducer = wrapped.reducer
    return {**reducer.seconds, "wire": reducer.comm.seconds} if reducer else {}


def interface_bytes() -> int:
    """Return what the interface has transmitted so far; nothing where the ranks share one."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return 0 if name == "lo" else int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def machine_seconds() -> float:
    """Return the processor seconds that all programs of the machine, and others on the same hardware, have used."""
    user, nice, system, _, _, _, _, steal = Path("/proc/stat").read_text().split()[1:9]
    return (int(user) + int(nice) + int(system) + int(steal)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the job given as JSON in the first argument."""
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    rank = Rank(job)
    for name, number in job.todo:
        rank.write(started=name, round=number)
        if name == "parts":
            result: Any = rank.parts()
        else:
            contestant, _, learning_rate = name.partition("@")
            result = rank.train(contestant, float(learning_rate)) if learning_rate else rank.measure(name)
        rank.write(finished=name, round=number, result=result)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
