"""One rank of the network benchmark. `benchmarks.network` starts one per worker.

Each method is checked before it is timed. Losses must be finite, and weights must be bit-identical on all ranks. No
gradient may be lost: over the first steps, the sum of all ranks' gradients must equal the sum of averages and
residuals. The sums are compared along one random direction, so that the check sends two numbers instead of whole
gradients. For exchanged updates, the number of changed weights is checked instead.
"""

import contextlib
import gc
import math
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.baselines import CONTESTANTS, Options, along, data_parallel, steps_for_equal_bytes
from benchmarks.harness.launch import WrongResult, check_weights, gather, timed, write
from benchmarks.harness.timing import elapsed_ms, peak_bytes, reset_peak
from benchmarks.harness.workloads import BATCH, COMPUTE_SECONDS, TARGET_LOSS, build
from examples.data.digits import digits

LEARNING_RATE = 0.01
LEAST, MOST = 3, 30  # limits for the number of timed steps of a method in each round


class Rank:
    """One rank's side of all measurements in a job of `benchmarks.network`. All ranks make the same calls in order."""

    def __init__(self, job: SimpleNamespace) -> None:
        self.job, self.rank, self.size = job, dist.get_rank(), dist.get_world_size()
        self.paced, self.adamw = job.workload in COMPUTE_SECONDS, job.workload == "mlp_adamw"
        self.options = Options(job.density, job.ranks_per_host)

    def model(self) -> nn.Module:
        """Return a new model of the workload. Each method has its own, because a large model fills the memory."""
        return build(self.job.workload, self.job.compute, self.rank)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the eight batches that this rank repeats in the timing workloads."""
        if self.paced:
            return [(torch.tensor(step), torch.zeros(0)) for step in range(8)]
        random = torch.Generator().manual_seed(self.rank)
        x, y = torch.randn(8, BATCH, 2048, generator=random), torch.randint(200, (8, BATCH), generator=random)
        return list(zip(x, y, strict=True))

    def loss(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a timing workload."""
        out: Tensor = module(x)
        return out if self.paced else cross_entropy(out, y)

    def measure(self, contestant: str) -> dict[str, Any]:
        """Check a method in its first steps, and then time it."""
        kind, model = CONTESTANTS[contestant], self.model()
        params = list(model.parameters())
        optimizer = (torch.optim.AdamW if self.adamw else torch.optim.SGD)(params, lr=LEARNING_RATE)
        wrapped = kind.wrap(model, self.options, optimizer)
        batches = self.batches()
        losses: list[Tensor] = []

        def step() -> None:
            optimizer.zero_grad()
            loss = self.loss(wrapped.module, *batches[len(losses) % len(batches)])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        # Allocate tensors only if they are checked, because four ranks with a large model fill the memory.
        balanced = not kind.alone and not kind.updates
        random = torch.Generator().manual_seed(1)
        direction = [torch.randn(param.shape, generator=random) for param in params] if balanced else []
        gradients = handed_out = norm = 0.0
        for number in range(kind.check_steps):
            if balanced:
                local = torch.autograd.grad(self.loss(model, *batches[number]), params)  # leaves DDP's hooks alone
                gradients += along(direction, local)
                norm += sum(grad.square().sum().item() for grad in local)
                del local
            before = [param.detach().clone() for param in params] if kind.updates and kind.sparse else []
            ms = elapsed_ms(step)
            averages: Any = [param.grad for param in params]
            if kind.updates:
                averages = torch._foreach_sub(before, [param.detach() for param in params]) if before else []
            if balanced:
                handed_out += along(direction, averages)
            if kind.sparse:
                # The balance below holds for every approximation. This check requires that the result is sparse.
                entries = sum(int(grad.count_nonzero()) for grad in averages)
                k = self.job.density * sum(grad.numel() for grad in averages)
                if not 2 * k / 3 <= entries <= 4 * k / 3 * self.size + 100:
                    raise WrongResult(f"the result has {entries} entries, for k = {k:.0f} on {self.size} ranks")
        if balanced:
            residuals = wrapped.residuals()
            kept = along(direction, [residuals[key] for key, _ in model.named_parameters()]) if residuals else 0.0
            # The sum of all ranks' gradients must equal the averages plus the residuals.
            missing, norms = zip(*gather((gradients - handed_out - kept, norm)), strict=True)
            error, length = abs(sum(missing)), math.sqrt(sum(norms))
            if not error <= kind.tolerance * length:
                raise WrongResult(f"gradients and residuals do not add up: {error / length:.2g} is missing")
        del direction, before, averages
        # The second step allocates buffers, and DDP rebuilds its buckets in it. In slow steps this is negligible.
        for _ in range(2 if gather(ms)[0] < 3000 else 0):
            ms = elapsed_ms(step)
        count = max(LEAST, min(MOST, int(1e3 * self.job.seconds / gather(ms)[0])))
        sent_before = wrapped.counted_bytes
        reset_peak()
        found = timed(step, count) | {"peak_bytes": peak_bytes()}
        sent = max(gather(wrapped.counted_bytes - sent_before)) / count
        if not torch.stack(losses).isfinite().all():
            raise WrongResult("a loss is not finite")
        wrapped.settle()
        if not kind.alone:
            check_weights(model)
        return found | {"params": sum(param.numel() for param in params), "sent_bytes": sent}

    def warm_up(self) -> None:
        """Take two steps of DDP with a model that is thrown away, so that the first training is not slower."""
        train, _ = digits()
        module = data_parallel(self.model())
        for _ in range(2):
            cross_entropy(module(train.images[:BATCH]), train.labels[:BATCH]).backward()

    def train(self, contestant: str, learning_rate: float) -> list[dict[str, float]]:
        """Train on the digits until the test loss or the time limit is reached. The clock stops during tests."""
        train, test = digits()
        kind, model = CONTESTANTS[contestant], self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        every = steps_for_equal_bytes(model, self.options.density) if kind.updates else 1
        wrapped = kind.wrap(model, self.options._replace(every=every), optimizer)
        random = torch.Generator().manual_seed(self.rank)
        curve: list[dict[str, float]] = []
        clock, every = 0.0, wrapped.every
        # Test after an exchange, when all ranks have the same weights.
        count = every * math.ceil(10 / every)
        while True:
            with torch.no_grad():
                scores = model.eval()(test.images)
            model.train()
            loss = cross_entropy(scores, test.labels).item()
            accuracy = (scores.argmax(1) == test.labels).float().mean().item()
            curve.append({"step": count * len(curve), "seconds": clock, "test_loss": loss, "test_accuracy": accuracy})
            if gather(not loss >= TARGET_LOSS or clock > self.job.seconds)[0]:
                break
            dist.barrier()
            started = time.perf_counter()
            for number in range(1, count + 1):
                # Pick from this rank's share of the data.
                picked = torch.randint(1500 // self.size, (BATCH,), generator=random) * self.size + self.rank
                adds_up = number % every > 0 and isinstance(wrapped.module, DistributedDataParallel)
                with wrapped.module.no_sync() if adds_up else contextlib.nullcontext():  # type: ignore[operator]
                    step_loss = cross_entropy(wrapped.module(train.images[picked]), train.labels[picked])
                    (step_loss if kind.updates else step_loss / every).backward()
                if not adds_up:
                    optimizer.step()
                    optimizer.zero_grad()
            clock += time.perf_counter() - started
        if not kind.alone:
            check_weights(model)
        return curve


def work(job: dict[str, Any]) -> None:
    """Time methods in rounds, or train the methods that have learning rates."""
    rank = Rank(SimpleNamespace(**job))
    if any("learning_rate" in case for case in job["todo"]):
        rank.warm_up()
    for case in job["todo"]:
        found = {"curve": rank.train(**case)} if "learning_rate" in case else rank.measure(**case)
        write(job["out"], **case, **found)
        gc.collect()
