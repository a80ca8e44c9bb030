"""The recipes of docs/sharded.md for accelerate and transformers: two replicas of two shards, beside stock.

    .venv-clients/bin/python -m pytest tests/integration/test_accelerate.py

They are skipped if the packages are not installed; `make clients` installs them. Accelerate chooses FSDP only for GPUs
and the like, so the tests tell it that its CPUs are GPUs.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse import attach_updates, load_replica, save_replica
from tests.processes import run_ranks
from tests.support.shards import own
from tests.support.tiers import full

accelerate: Any = pytest.importorskip("accelerate", minversion="1.12")
transformers: Any = pytest.importorskip("transformers", minversion="5.0")

Result = tuple[list[float], Tensor, Any, bool]
"""Losses, this rank's weights, the reducer's bytes, elements and group size, and whether its state was restored."""


class Replicas(accelerate.ParallelismConfig):  # type: ignore[misc]
    fsdp_dim_names = ["dp_shard_cp"]  # noqa: RUF012


def sharded(ours: bool) -> Any:
    return (Replicas if ours else accelerate.ParallelismConfig)(dp_replicate_size=2, dp_shard_size=2)


def as_on_gpus() -> None:
    accelerate.PartialState(cpu=True)
    accelerate.PartialState._shared_state["distributed_type"] = accelerate.utils.DistributedType.MULTI_GPU


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    )


def sequences() -> Tensor:
    """Return 512 sequences of 32 tokens, which count by 1, 2 or 3."""
    return (torch.arange(32)[None] * (1 + torch.arange(512) % 3)[:, None]) % 64


def by_accelerate(ours: bool, folder: Path) -> Result:
    as_on_gpus()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=sharded(ours))
    model = gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = torch.utils.data.DataLoader(sequences(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reducer = None
    if ours:
        group = accelerator.torch_device_mesh["dp_replicate"].get_group()
        reducer = attach_updates(model, optimizer.optimizer, "topk", group=group)
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    if reducer is None:
        return losses, own(model.parameters()), None, True
    before = [each["residual"].clone() for each in reducer.states]
    save_replica(folder / "end", model, optimizer.optimizer)
    for each in reducer.states:
        each["residual"].zero_()
    load_replica(folder / "end", model, optimizer.optimizer)
    restored = [torch.equal(old, each["residual"]) for old, each in zip(before, reducer.states, strict=True)]
    return losses, own(model.parameters()), counts(reducer), all(restored) and any(x.any() for x in before)


def by_transformers(ours: bool, folder: Path) -> Result:
    class Attach(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            group = args.parallelism_config.get_device_mesh()["dp_replicate"].get_group()
            self.reducer = attach_updates(model, optimizer.optimizer, "topk", group=group)

    losses = []

    class Losses(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    model, attach = gpt2(), Attach()
    training = {"per_device_train_batch_size": 4, "max_steps": 80, "gradient_accumulation_steps": 2}
    training |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "logging_steps": 5}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(
        str(folder),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        parallelism_config=sharded(ours),
        use_cpu=True,
        ddp_backend="gloo",
        **training,
        **quiet,
    )
    assert args.device.type == "cpu"  # it makes the state that the next line changes
    as_on_gpus()
    rows = [{"input_ids": row, "labels": row} for row in sequences()]
    callbacks = [Losses(), *([attach] if ours else [])]
    transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks).train()
    return losses, own(model.parameters()), counts(attach.reducer) if ours else None, True


def counts(reducer: Any) -> tuple[int, int, int, int]:
    return reducer.comm.sent_bytes, reducer.step, reducer.layout.numel, reducer.comm.size


def trained(rank: int, train: Any, ours: bool, folder: Path) -> Result:
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4", ACCELERATE_USE_CPU="true")
    return train(ours, folder)  # type: ignore[no-any-return]


@full
@pytest.mark.parametrize("train", [by_accelerate, by_transformers])
def test_two_replicas_of_two_shards(train, tmp_path):
    stock, ours = (run_ranks(4, trained, train, each, tmp_path) for each in (False, True))
    for results in (stock, ours):
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for losses, *_ in results:
            assert losses[-1] < losses[0] / 4, losses
        weights = [own for _, own, _, _ in results]
        assert torch.equal(weights[0], weights[2])  # one shard in both replicas
        assert torch.equal(weights[1], weights[3])
    for (first, *_), (same, _, (sent, steps, numel, replicas), restored) in zip(stock, ours, strict=True):
        if train is by_accelerate:
            assert first[0] == pytest.approx(same[0], rel=1e-5)  # the same weights and batches
        assert replicas == 2
        assert restored
        # A rank sends 0.3 % of its entries, in about 12 of 32 bits each. Density warm-up multiplies
        # that by up to 8 in 45 steps. Headers and counts take less than 100 bytes in a step.
        assert 0 < sent < steps * (100 + 4 * numel * 0.003 * 8 * 12 / 32)
