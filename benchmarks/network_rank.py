"""One rank of the network benchmark: `benchmarks.network` starts as many as there are workers.

Every contestant is checked before its time counts: finite losses, weights that are bit-identical on all ranks, the same
weights as one process that sees all batches (dense contestants, SGD), and no gradient lost: over the first steps the
gradients of all ranks must equal the averages handed out plus the residuals. That sum is compared along one random
direction, so that the check sends two numbers instead of whole gradients. Of exchanged updates the number of changed
weights is checked.
"""

import contextlib
import copy
import gc
import math
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.baselines import CONTESTANTS, Options, along, steps_for_equal_bytes
from benchmarks.harness.ranks import WrongResult, check_weights, gather, timed, write
from benchmarks.harness.timing import elapsed_ms, peak_bytes, reset_peak
from benchmarks.harness.workloads import BATCH, COMPUTE_SECONDS, TARGET_LOSS, build
from examples.data.digits import digits

LEARNING_RATE = 0.01
LEAST, MOST = 3, 30
"""Timed steps of a contestant in each round."""
Batch = tuple[Tensor, Tensor]


class Rank:
    """One rank's side of all measurements; the order of calls is the same on all ranks.

    Args:
        job: options of `benchmarks.network`, and the seconds to `compute` in a paced workload.
    """

    def __init__(self, job: SimpleNamespace) -> None:
        self.job = job
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.paced = job.workload in COMPUTE_SECONDS
        self.model = build(job.workload, job.compute, self.rank)
        self.options = Options(job.density, job.ranks_per_host)

    def batches(self, rank: int) -> list[Batch]:
        """Return the eight batches that a rank goes through again and again in the timing workloads."""
        if self.paced:
            return [(torch.tensor(step), torch.zeros(0)) for step in range(8)]
        random = torch.Generator().manual_seed(rank)
        return [
            (torch.randn(BATCH, 2048, generator=random), torch.randint(200, (BATCH,), generator=random))
            for _ in range(8)
        ]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a timing workload."""
        out: Tensor = module(batch[0])
        return out if self.paced else functional.cross_entropy(out, batch[1])

    def check_reference(self, model: nn.Module, start: nn.Module, tolerance: float) -> None:
        """Raise unless one step from `start` with the batches of all ranks in one process leads to `model`."""
        reference = copy.deepcopy(start)
        for rank in range(self.size):
            x, y = self.batches(rank)[0]
            (functional.cross_entropy(reference(x), y) / self.size).backward()
        torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE).step()
        before, expected, got = (
            nn.utils.parameters_to_vector(weights.parameters()).detach().double()
            for weights in (start, reference, model)
        )
        off = float((got - expected).norm() / (expected - before).norm())
        if not off <= tolerance:
            raise WrongResult(f"one step is off by {off:.2g} of its length; {tolerance:g} is allowed")

    def measure(self, name: str) -> dict[str, Any]:
        """Check a contestant in its first steps, then time it."""
        contestant, adamw = CONTESTANTS[name], self.job.workload == "mlp_adamw"
        model = copy.deepcopy(self.model)
        make = torch.optim.AdamW if adamw else torch.optim.SGD
        optimizer = make(model.parameters(), lr=LEARNING_RATE)
        wrapped = contestant.wrap(model, self.options, optimizer)
        batches = self.batches(self.rank)
        losses: list[Tensor] = []

        def step() -> None:
            optimizer.zero_grad()
            loss = self.loss(wrapped.module, batches[len(losses) % len(batches)])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        random = torch.Generator().manual_seed(1)
        direction = [torch.randn(param.shape, generator=random) for param in model.parameters()]
        gradients = handed_out = norm = 0.0
        for number in range(contestant.check_steps):
            # autograd.grad leaves DDP's hooks alone.
            local = torch.autograd.grad(self.loss(model, batches[number]), list(model.parameters()))
            gradients += along(direction, local)
            norm += sum(grad.square().sum().item() for grad in local)
            before = [param.detach().clone() for param in model.parameters()] if contestant.updates else []
            ms = elapsed_ms(step)
            averages = [param.grad for param in model.parameters() if param.grad is not None]
            if contestant.updates:
                averages = torch._foreach_sub(before, [param.detach() for param in model.parameters()])
            handed_out += along(direction, averages)
            if contestant.sparse:
                # The balance below holds for every approximation; this says that it is one that saves something.
                entries = sum(int(grad.count_nonzero()) for grad in averages)
                k = self.job.density * sum(grad.numel() for grad in averages)
                if not 2 * k / 3 <= entries <= 4 * k / 3 * self.size + 100:
                    raise WrongResult(f"{entries} entries were handed out, for k = {k:.0f} on {self.size} ranks")
            if number == 0 and contestant.tolerance is not None and not self.paced and not adamw:
                self.check_reference(model, self.model, contestant.tolerance)
        if not contestant.alone and not contestant.updates:
            residuals = wrapped.residuals()
            kept = along(direction, [residuals[key] for key, _ in model.named_parameters()]) if residuals else 0.0
            # The gradients of all ranks equal the averages plus the residuals.
            missing, norms = zip(*gather((gradients - handed_out - kept, norm)), strict=True)
            error, length = abs(sum(missing)), math.sqrt(sum(norms))
            if not error <= (contestant.tolerance or 1e-4) * length:
                raise WrongResult(f"gradients and residuals do not add up: {error / length:.2g} is missing")
        del direction, local, before, averages
        # Buffers are allocated and DDP forms its buckets anew in the second step; a slow step drowns both.
        for _ in range(2 if gather(ms)[0] < 3000 else 0):
            ms = elapsed_ms(step)
        count = max(LEAST, min(MOST, int(1e3 * self.job.seconds / gather(ms)[0])))
        sent, before = wrapped.counted_bytes, wrapped.seconds()
        reset_peak()
        found = timed(step, count)
        peak = peak_bytes()
        sent = wrapped.counted_bytes - sent
        phases = {phase: value - before[phase] for phase, value in wrapped.seconds().items()}
        if not torch.stack(losses).isfinite().all():
            raise WrongResult("a loss is not finite")
        if not contestant.alone:
            check_weights(model)
        all_sent, all_phases = zip(*gather((sent, phases)), strict=True)
        return found | {
            "params": sum(param.numel() for param in model.parameters()),
            "sent_bytes": max(all_sent) / count,
            "peak_bytes": peak,
            "phases_ms": {phase: 1e3 * max(rank[phase] for rank in all_phases) / count for phase in phases},
        }

    def train(self, name: str, learning_rate: float) -> list[dict[str, float]]:
        """Train on the digits until the test loss is reached, or time is up; the clock stands still during tests."""
        train, test = digits()
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        options = self.options
        if CONTESTANTS[name].updates:
            options = options._replace(every=steps_for_equal_bytes(model, options.density))
        wrapped = CONTESTANTS[name].wrap(model, options, optimizer)
        random = torch.Generator().manual_seed(self.rank)
        curve: list[dict[str, float]] = []
        clock, every = 0.0, wrapped.every
        # Tests come after an exchange, so that all ranks have the same weights.
        count = every * math.ceil(10 / every)
        while True:
            model.eval()
            with torch.no_grad():
                scores = model(test.images)
            model.train()
            loss = functional.cross_entropy(scores, test.labels).item()
            accuracy = (scores.argmax(1) == test.labels).float().mean().item()
            curve.append({"step": count * len(curve), "seconds": clock, "test_loss": loss, "test_accuracy": accuracy})
            if gather(not loss >= TARGET_LOSS or clock > self.job.seconds)[0]:
                break
            dist.barrier()
            started = time.perf_counter()
            for number in range(1, count + 1):
                # A rank's own quarter of the data.
                picked = torch.randint(1500 // self.size, (BATCH,), generator=random) * self.size + self.rank
                exchanges = number % every == 0
                adds_up = not exchanges and isinstance(wrapped.module, DistributedDataParallel)
                with wrapped.module.no_sync() if adds_up else contextlib.nullcontext():  # type: ignore[operator]
                    step_loss = functional.cross_entropy(wrapped.module(train.images[picked]), train.labels[picked])
                    (step_loss if CONTESTANTS[name].updates else step_loss / every).backward()
                if not adds_up:
                    optimizer.step()
                    optimizer.zero_grad()
            clock += time.perf_counter() - started
        if not CONTESTANTS[name].alone:
            check_weights(model)
        return curve


def work(job: dict[str, Any]) -> None:
    """Measure contestants, in rounds, or train with those that have learning rates."""
    rank = Rank(SimpleNamespace(**job))
    for name in job["todo"]:
        contestant, _, learning_rate = name.partition("@")
        result: Any = rank.train(contestant, float(learning_rate)) if learning_rate else rank.measure(name)
        write(job["out"], finished=name, result=result)
        gc.collect()
