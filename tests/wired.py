"""One rank whose collectives use its process group, as with several ranks.

    python -m tests.wired                # every aggregator: over NCCL if there is a GPU, otherwise over gloo
    python -m tests.wired topk int8      # only some methods

NCCL does not allow two ranks on one GPU, and `Comm` skips the collectives of a single rank. Here `Comm` calls them.
Each case trains twice, without and with collectives, and must end with the same weights, bit by bit. On a GPU, an error
is raised if the host waits for the device after the second step. In the second step DDP itself waits, because it
rebuilds its buckets. `gtopk` is not among the cases, because a single rank has no peer in any of its rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Method, attach, attach_updates, exchange_pending
from lightning_sparse.aggregators import TwoLevel
from lightning_sparse.comm import ProcessGroupComm
from lightning_sparse.comm.base import Comm, Op, _SubComm
from lightning_sparse.compressors import TopK
from tests.support.kernels import no_waiting
from tests.support.vectors import flat

STEPS, WARM = 5, 2
CALLED: Counter[str] = Counter()
"""Collectives since the last look, by name."""


class Always(Comm):
    """Calls each collective even if there is one rank."""

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        if op == "max" and x.is_floating_point():
            x.masked_fill_(x.isnan(), torch.inf)
        self._timed(0, self._all_reduce, x, op)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._timed(0, self._all_gather, x.contiguous())

    def all_to_all(self, rows: Tensor) -> Tensor:
        return self._to_itself(rows)

    def reduce_scatter_mean(self, x: Tensor) -> Tensor:
        return self._to_itself(x)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        self._timed(0, self._broadcast, x, src)
        return x

    def sendrecv(self, x: Tensor, peer: int) -> Tensor:
        return self._to_itself(x)

    def _to_itself(self, x: Tensor) -> Tensor:
        return self._timed_all_to_all_v(x.reshape(-1), [x.numel()], [x.numel()]).view(x.shape)

    def _timed(self, nbytes: int, collective: Callable[..., Any], *args: Any) -> Any:
        CALLED[collective.__name__] += 1
        return super()._timed(nbytes, collective, *args)


class Part(Always, _SubComm):
    """A node of one rank."""


class Wired(Always, ProcessGroupComm):
    """The rank's own connection."""

    def sub(self, ranks: Any, *, counted: bool = True) -> Comm:
        return Part(self, sorted(ranks), counted)


GRADIENTS: dict[str, str | Method] = {
    **{name: name for name in ("dense", "topk", "gaussiank", "randk", "chunktopk", "oktopk", "scalecom")},
    **{name: name for name in ("doublesqueeze", "int4", "int8", "onebit", "qsgd", "powersgd")},
    **{name: name for name in ("signsgd", "signum", "terngrad", "median", "trimmed_mean")},
    "two levels": Method(TopK(0.01), aggregator=TwoLevel()),
}
UPDATES: dict[str, dict[str, Any]] = {
    "topk updates": {},
    "topk updates, delayed": {"overlap": "next_step"},
    "topk updates, local steps": {"local_steps": 2},
    "efsignsgd updates": {"method": "efsignsgd"},
    "sparseloco updates": {"method": "sparseloco", "local_steps": 2},
}
CASES = (*GRADIENTS, *UPDATES)


def train(case: str, device: str) -> Tensor:
    """Train a small net for some steps and return its weights on the host."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(1024, 300), nn.ReLU(), nn.Linear(300, 32)).to(device)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 1024, generator=generator).to(device) for _ in range(STEPS)]
    optimizer: torch.optim.Optimizer
    if case in UPDATES:
        # With `capturable` Adam's step counts are tensors on the device, so Adam itself does not wait.
        optimizer = torch.optim.AdamW(net.parameters(), 0.01, capturable=device == "cuda")
        attach_updates(net, optimizer, **{"method": "topk", **UPDATES[case]})
        model = net
    else:
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        attach(model, GRADIENTS[case])
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor) -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for x in inputs[:WARM]:
        step(x)
    with no_waiting(device):
        for x in inputs[WARM:]:
            step(x)
    if case in UPDATES:
        exchange_pending(optimizer)
    return flat(net).cpu()


def compare(case: str, device: str, comm: type[ProcessGroupComm] = Wired) -> str:
    """Train without and with collectives; return a description of the differences, or an empty text."""
    alone = train(case, device)
    CALLED.clear()
    with mock.patch("lightning_sparse.hooks.session.ProcessGroupComm", comm):
        wired = train(case, device)
    if not CALLED:
        return "no collective was called"
    if not bool(alone.isfinite().all()):
        return "weights are not finite"
    return "" if torch.equal(alone, wired) else f"{int((alone != wired).sum())} of {len(alone)} weights differ"


def open_group(device: str) -> None:
    """Make a default process group of one rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    where: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        where = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
    dist.init_process_group(**where, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))


def main(arguments: Any = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    chosen = parser.parse_args(arguments).cases or CASES
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown case {min(unknown)!r}: choose from {', '.join(CASES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    open_group(device)
    called: Counter[str] = Counter()
    failed = []
    for case in chosen:
        try:
            found = compare(case, device)
        except Exception as error:  # the others are worth knowing, too
            found = f"{type(error).__name__}: {error}"
        calls = ", ".join(f"{count} {name.strip('_')}" for name, count in sorted(CALLED.items()))
        print(f"{case}: {found or 'the same weights'}; {calls}", flush=True)
        called += CALLED
        failed += [case] if found else []
    print(f"over {dist.get_backend()}: {len(chosen) - len(failed)} of {len(chosen)} cases hold", flush=True)
    dist.destroy_process_group()
    if failed:
        sys.exit(f"these do not: {', '.join(failed)}")


if __name__ == "__main__":
    main()
