"""Small trainings with other packages, with two processes, compared with stock `ddp`.

    make clients                             # all clients, in a separate environment; downloads 1.5 GB
    .venv-clients/bin/python -m tests.clients timm-vit accelerate    # only some clients

Each client is a model, an optimizer or a trainer of another package. Both strategies start from the same weights and
use the same batches. The output is `benchmarks/results/clients.csv`, written after each client. It contains the
training loss at the start and at the end, as the mean of the last steps and both ranks. It says whether weights are
equal on both ranks. For both strategies, it also says whether a training that was saved and resumed halfway ends with
the same weights, bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional


def import_torchvision() -> None:
    """Import torchvision without operators. The package index has no build of it for a torch without CUDA."""
    real = torch.library.register_fake

    def register(name: Any, *args: Any, **options: Any) -> Any:
        return (lambda function: function) if str(name).startswith("torchvision::") else real(name, *args, **options)

    if importlib.util.find_spec("torchvision") is None:
        return
    with mock.patch.object(torch.library, "register_fake", register):
        importlib.import_module("torchvision")


import_torchvision()  # before others do, torchmetrics among them

from benchmarks.harness import results  # noqa: E402
from tests.integration.trainers import Batches  # noqa: E402
from tests.processes import run_ranks  # noqa: E402

STEPS = 200
"""Number of steps of most trainings, in two epochs."""
LAST = 20
"""Number of final steps whose losses are averaged."""
LONG, SEEDS = 300, (0, 1, 2)
"""Steps and seeds of clients with their own trainer. Their losses are compared more closely."""


class Client(NamedTuple):
    """A training with another package.

    Attributes:
        package: its name on the package index.
        strategy: that the user names.
        module: makes the LightningModule in a namespace of Lightning.
        batches: returns a rank's batches of an epoch.
        namespace: of Lightning.
    """

    package: str
    strategy: str
    module: Callable[[Any], Any]
    batches: Callable[[int], list[Any]]
    namespace: str = "pytorch_lightning"


# Data.


def images(rank: int) -> list[Any]:
    """Images of four classes: noise, and a pattern of the class."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randn(4, 3, 32, 32, generator=generator)
    generator.manual_seed(10 + rank)
    found = []
    for _ in range(STEPS // 2):
        labels = torch.randint(4, (8,), generator=generator)
        found.append((patterns[labels] + torch.randn(8, 3, 32, 32, generator=generator), labels))
    return found


def tokens(rank: int, seed: int = 0, count: int = STEPS // 2, length: int = 32, vocabulary: int = 61) -> list[Tensor]:
    """Sequences in which each token follows from the one before, in three of four cases."""
    generator = torch.Generator().manual_seed(100 * seed + 20 + rank)
    found = []
    for _ in range(count):
        sequence = torch.randint(vocabulary, (8, length), generator=generator)
        for place in range(1, length):
            follows = torch.rand(8, generator=generator) < 0.75
            sequence[follows, place] = (7 * sequence[follows, place - 1] + 3) % vocabulary
        found.append(sequence)
    return found


# Clients of Lightning.


def of_lightning(namespace: Any, build: Callable[[], nn.Module], loss: Any, optimizer: Any, after: Any = None) -> Any:
    """Return a LightningModule.

    Args:
        namespace: of Lightning.
        build: makes the network.
        loss: of the network and a batch.
        optimizer: of the network.
        after: called with the network before each training step, such as a teacher's update.
    """

    class Module(namespace.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = build()

        def training_step(self, batch: Any, index: int) -> Tensor:
            if after is not None:
                after(self.net)
            return loss(self.net, batch)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return optimizer(self.net)

    return Module()


def adamw(net: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return torch's AdamW of all parameters that are trained."""
    return torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=lr)


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a classifier."""
    return functional.cross_entropy(net(batch[0]), batch[1])


def vit() -> nn.Module:
    """Return a small vision transformer of timm."""
    timm = importlib.import_module("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 3, "num_classes": 4}
    return timm.models.VisionTransformer(**options)  # type: ignore[no-any-return]


def timm_vit(namespace: Any) -> Any:
    """timm's vision transformer with torch's AdamW."""
    return of_lightning(namespace, vit, cross_entropy, adamw)


def timm_lookahead(namespace: Any) -> Any:
    """The same with timm's Lookahead around AdamW."""
    lookahead = importlib.import_module("timm.optim").Lookahead
    return of_lightning(namespace, vit, cross_entropy, lambda net: lookahead(adamw(net), alpha=0.5, k=6))


def encoder() -> nn.Sequential:
    """Return a small convolutional network."""
    layers = [nn.Conv2d(3, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2)]
    return nn.Sequential(*layers, nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def student_and_teacher(heads: Mapping[str, Callable[[], nn.Module]]) -> nn.ModuleDict:
    """Return a backbone with heads and frozen copies of the backbone and of the first head."""
    found = nn.ModuleDict({"backbone": encoder()} | {name: make() for name, make in heads.items()})
    first = next(iter(heads))
    for name in ("backbone", first):
        found[f"{name}_teacher"] = copy.deepcopy(found[name]).requires_grad_(False)
    return found


def follow(*names: str) -> Callable[[nn.ModuleDict], None]:
    """Return a function like in lightly's examples: in each step, the teacher moves a little towards the student."""

    def after(net: nn.ModuleDict) -> None:
        update_momentum = importlib.import_module("lightly.models.utils").update_momentum
        for name in names:
            update_momentum(net[name], net[f"{name}_teacher"], m=0.9)

    return after


def views(batch: Any) -> tuple[Tensor, Tensor]:
    """Return two views of the images, without random numbers."""
    return batch[0], batch[0].flip(-1) + 0.1


def lightly_moco(namespace: Any) -> Any:
    """MoCo: a momentum encoder, and a memory bank of negatives."""
    heads = importlib.import_module("lightly.models.modules")
    criterion = importlib.import_module("lightly.loss").NTXentLoss(temperature=0.2, memory_bank_size=(64, 32))

    def build() -> nn.Module:
        net = student_and_teacher({"head": lambda: heads.MoCoProjectionHead(48, 48, 32)})
        net["criterion"] = criterion
        return net

    def loss(net: nn.ModuleDict, batch: Any) -> Tensor:
        query, key = views(batch)
        with torch.no_grad():
            keys = net["head_teacher"](net["backbone_teacher"](key)).detach()
        return net["criterion"](net["head"](net["backbone"](query)), keys)  # type: ignore[no-any-return]

    return of_lightning(namespace, build, loss, adamw, follow("backbone", "head"))


def lightly_byol(namespace: Any) -> Any:
    """BYOL: a teacher that follows the student."""
    heads = importlib.import_module("lightly.models.modules")
    criterion = importlib.import_module("lightly.loss").NegativeCosineSimilarity()

    def build() -> nn.Module:
        made = {
            "head": lambda: heads.BYOLProjectionHead(48, 64, 32),
            "predict": lambda: heads.BYOLPredictionHead(32, 64, 32),
        }
        return student_and_teacher(made)

    def loss(net: nn.ModuleDict, batch: Any) -> Tensor:
        parts = []
        for one, other in (views(batch), views(batch)[::-1]):
            with torch.no_grad():
                wanted = net["head_teacher"](net["backbone_teacher"](other)).detach()
            parts.append(criterion(net["predict"](net["head"](net["backbone"](one))), wanted))
        return 0.5 * (parts[0] + parts[1])  # type: ignore[no-any-return]

    return of_lightning(namespace, build, loss, adamw, follow("backbone", "head"))


def gpt2() -> Any:
    """Return a small GPT-2 of transformers, without dropout."""
    transformers = importlib.import_module("transformers")
    options = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 61}
    config = transformers.GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def peft_lora(namespace: Any) -> Any:
    """LoRA: most weights are frozen."""
    peft = importlib.import_module("peft")

    def build() -> nn.Module:
        config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.0)
        return peft.get_peft_model(gpt2(), config)  # type: ignore[no-any-return]

    def loss(net: Any, batch: Tensor) -> Tensor:
        return net(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    return of_lightning(namespace, build, loss, lambda net: adamw(net, 1e-2))


class Graph(nn.Module):
    """Two convolutions of torch-geometric over a ring."""

    def __init__(self) -> None:
        super().__init__()
        gcn = importlib.import_module("torch_geometric.nn").GCNConv
        self.first, self.second = gcn(12, 48), gcn(48, 4)
        places = torch.arange(16)
        edges = torch.stack([torch.cat([places, (places + 1) % 16]), torch.cat([(places + 1) % 16, places])])
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, self.edges).relu(), self.edges)  # type: ignore[no-any-return]


def graphs(rank: int) -> list[Any]:
    """Nodes whose class is that of their neighbours' features."""
    generator = torch.Generator().manual_seed(10 + rank)
    found = []
    for _ in range(STEPS // 2):
        x = torch.randn(16, 12, generator=generator)
        found.append((x, (x + x.roll(1, 0) + x.roll(-1, 0))[:, :4].argmax(1)))
    return found


def torch_geometric(namespace: Any) -> Any:
    """A graph network."""
    return of_lightning(namespace, Graph, cross_entropy, lambda net: adamw(net, 1e-2))


def series() -> Any:
    """Return a data set of pytorch-forecasting: eight sine waves."""
    pandas = importlib.import_module("pandas")
    forecasting = importlib.import_module("pytorch_forecasting")
    rows = [
        {"series": str(wave), "time": step, "value": float(torch.tensor(0.3 * step + wave).sin())}
        for wave in range(8)
        for step in range(40)
    ]
    lengths = {"max_encoder_length": 12, "max_prediction_length": 4}
    columns = {"time_idx": "time", "target": "value", "group_ids": ["series"], "time_varying_unknown_reals": ["value"]}
    return forecasting.TimeSeriesDataSet(pandas.DataFrame(rows), **columns, **lengths)


def forecast_batches(rank: int) -> list[Any]:
    """Return batches of the data set, which differ between ranks."""
    torch.manual_seed(10 + rank)
    loader = series().to_dataloader(train=True, batch_size=8, num_workers=0)
    found: list[Any] = []
    while len(found) < STEPS // 2:
        found += loader
    return found[: STEPS // 2]


def forecasting(namespace: Any) -> Any:
    """pytorch-forecasting's N-BEATS, a LightningModule with its own optimizer, Ranger, in lightning.pytorch."""
    package = importlib.import_module("pytorch_forecasting")
    torch.manual_seed(1)
    options = {"learning_rate": 1e-2, "widths": [32, 64], "backcast_loss_ratio": 0.1, "log_interval": 0, "dropout": 0.0}
    return package.NBeats.from_dataset(series(), **options)


def optimizer_of(name: str, lr: float, **options: Any) -> Callable[[Any], Any]:
    """Return a training with an optimizer of pytorch-optimizer."""

    def module(namespace: Any) -> Any:
        kind = getattr(importlib.import_module("pytorch_optimizer"), name)
        made = lambda net: kind(net.parameters(), lr=lr, **options)  # noqa: E731
        if name == "Lookahead":
            made = lambda net: kind(adamw(net, lr))  # noqa: E731
        return of_lightning(namespace, vit, cross_entropy, made)

    return module


OPTIMIZERS = {
    "AdaBelief": 1e-3,
    "AdEMAMix": 1e-3,
    "ADOPT": 1e-3,
    "DAdaptSGD": 1.0,
    "Lamb": 5e-3,
    "Lion": 3e-4,
    "Lookahead": 1e-3,
    "Prodigy": 1.0,
    "Ranger": 1e-3,
    "SOAP": 1e-3,
}
CLIENTS: dict[str, Client] = {
    "timm-vit": Client("timm", "topk_ddp", timm_vit, images),
    "timm-lookahead": Client("timm", "topk_ddp", timm_lookahead, images),
    "lightly-moco": Client("lightly", "topk_ddp", lightly_moco, images),
    "lightly-byol": Client("lightly", "topk_ddp", lightly_byol, images),
    "peft-lora": Client("peft", "topk_ddp", peft_lora, tokens),
    "torch-geometric": Client("torch-geometric", "topk_ddp", torch_geometric, graphs),
    "forecasting": Client("pytorch-forecasting", "topk_ddp", forecasting, forecast_batches, "lightning.pytorch"),
    **{
        f"optimizer-{name}": Client(
            "pytorch-optimizer", "int4_ddp" if name == "Lion" else "topk_ddp", optimizer_of(name, lr), images
        )
        for name, lr in OPTIMIZERS.items()
    },
}


# These small models trained worse with a sparse method. So a method that sends every element has a row, too.
for _name in ("lightly-moco", "peft-lora", "forecasting"):
    CLIENTS[f"{_name}, int4"] = CLIENTS[_name]._replace(strategy="int4_ddp")


def weights_of(module: nn.Module) -> Tensor:
    """Return all parameters, teachers included, flat. Buffers are each rank's own after a step, as with stock DDP."""
    return torch.cat([param.detach().float().flatten() for param in module.parameters()])


def fit(name: str, strategy: str, rank: int, epochs: int, path: str = "", resume: str = "") -> dict[str, Any]:
    """Train a client in Lightning; save a checkpoint to `path`, or resume from `resume`."""
    client = CLIENTS[name]
    namespace = importlib.import_module(client.namespace)
    importlib.import_module("lightning_sparse")
    torch.manual_seed(5)
    module = client.module(namespace)
    losses: list[float] = []

    class Losses(namespace.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer = namespace.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # Checkpoints of pytorch-forecasting contain its own classes, which Lightning 2.6 reads only with this option.
    trusting = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(module, Batches(client.batches(rank)), ckpt_path=resume or None, **trusting)
    if path:
        trainer.save_checkpoint(path)
    return {"losses": losses, "weights": weights_of(module)}


def of_rank(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Train with both strategies, and with ours once more in two halves."""
    quietly()
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="clients")
    path = str(Path(folder, "half.ckpt"))
    runs, resumed = {}, {}
    for strategy in ("ddp", CLIENTS[name].strategy):
        runs[strategy] = fit(name, strategy, rank, 2)
        fit(name, strategy, rank, 1, path=path)
        halves = fit(name, strategy, rank, 2, resume=path)
        resumed[strategy] = torch.equal(halves["weights"], runs[strategy]["weights"])
    ours = runs[CLIENTS[name].strategy]
    return {
        "start": ours["losses"][0],
        "ddp": statistics.mean(runs["ddp"]["losses"][-LAST:]),
        "ours": statistics.mean(ours["losses"][-LAST:]),
        "weights": ours["weights"],
        "resumed": resumed[CLIENTS[name].strategy],
        "ddp_resumed": resumed["ddp"],
    }


def quietly() -> None:
    """Leave out advice on toy runs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


def checked(found: list[Any]) -> list[dict[str, Any]]:
    """Return the ranks' results, or raise the error of a rank."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert each is not None, "a rank died"
    return found


def of_client(name: str) -> dict[str, Any]:
    """Return the row of a client of Lightning."""
    with tempfile.TemporaryDirectory() as folder:
        found = checked(run_ranks(2, of_rank, name, folder, backend="gloo", timeout=120, patience=900))
    row = {key: statistics.mean(each[key] for each in found) for key in ("start", "ddp", "ours")}
    equal = torch.equal(found[0]["weights"], found[1]["weights"])
    resumed = {key: all(each[key] for each in found) for key in ("resumed", "ddp_resumed")}
    return {"seeds": 1, "steps": STEPS, **row, "equal": equal, **resumed}


# Clients with their own trainer.


def with_accelerate(rank: int, seed: int, ours: bool) -> dict[str, Any]:
    """Train GPT-2 with accelerate, by the recipe of docs/without-lightning.md or by that of its documentation."""
    from accelerate import Accelerator

    from lightning_sparse import attach_updates

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model: Any = gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ours:
        model = accelerator.prepare_model(model, evaluation_mode=True)  # evaluation_mode: no DistributedDataParallel
        attach_updates(model, optimizer, "topk")
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in tokens(rank, seed, LONG):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return {"losses": losses, "weights": weights_of(model)}


def with_transformers(rank: int, seed: int, ours: bool) -> dict[str, Any]:
    """Train GPT-2 by transformers.Trainer, likewise."""
    import transformers

    from lightning_sparse import attach_updates

    class UpdatesTrainer(transformers.Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = lambda model, **_: prepare(model, evaluation_mode=True)

    class Attach(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            self.reducer = attach_updates(model, optimizer.optimizer, "topk")

    losses: list[float] = []

    class Losses(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """Sequences in the order in which the sampler without shuffling hands them to two ranks."""

        def __init__(self) -> None:
            batches = [tokens(each, seed, LONG) for each in range(2)]
            self.rows = torch.stack([torch.cat(each) for each in batches])

        def __len__(self) -> int:
            return self.rows.shape[0] * self.rows.shape[1]

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = self.rows[index // 8 % 2, index // 16 * 8 + index % 8]
            return {"input_ids": row, "labels": row}

    torch.manual_seed(seed)
    model = gpt2()
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none", "disable_tqdm": True, "seed": seed}
        options |= {"save_strategy": "no", "logging_steps": 1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0}
        options |= {
            "per_device_train_batch_size": 8,
            "max_steps": LONG,
            "learning_rate": 1e-3,
            "dataloader_num_workers": 0,
        }
        args = transformers.TrainingArguments(folder, **options)
        kind = UpdatesTrainer if ours else transformers.Trainer
        callbacks = [Losses(), *([Attach()] if ours else [])]
        trainer = kind(model=model, args=args, train_dataset=Data(), callbacks=callbacks)
        trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.train()
    return {"losses": losses, "weights": weights_of(model)}


OWN_TRAINERS: dict[str, tuple[str, str, Callable[[int, int, bool], dict[str, Any]]]] = {
    "accelerate": ("accelerate", "attach_updates, and prepare without DDP", with_accelerate),
    "transformers": ("transformers", "a subclass and a callback", with_transformers),
}


def of_trainer_rank(rank: int, name: str, seed: int, ours: bool) -> dict[str, Any]:
    """Train by a client's own trainer."""
    quietly()
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    return OWN_TRAINERS[name][2](rank, seed, ours)


def of_trainer(name: str) -> dict[str, Any]:
    """Return the row of a client with its own trainer."""
    start, ends, equal = [], {False: [], True: []}, []
    for seed in SEEDS:
        for ours in (False, True):
            found = checked(run_ranks(2, of_trainer_rank, name, seed, ours, backend=None, patience=900))
            # transformers logs the mean of both ranks, on rank 0 alone.
            losses = [each["losses"] for each in found if each["losses"]]
            ends[ours].append(statistics.mean(statistics.mean(each[-3 * LAST :]) for each in losses))
            start.append(losses[0][0])
            equal.append(torch.equal(found[0]["weights"], found[1]["weights"]))
            print(f"    seed {seed}, {'ours' if ours else 'ddp'}: {ends[ours][-1]:.4f}", flush=True)
    row = {"start": statistics.mean(start), "ddp": statistics.mean(ends[False]), "ours": statistics.mean(ends[True])}
    return {"seeds": len(SEEDS), "steps": LONG, **row, "equal": all(equal), "resumed": "", "ddp_resumed": ""}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*CLIENTS, *OWN_TRAINERS]
    parser.add_argument("clients", nargs="*", metavar="client", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    if unknown := set(given.clients) - set(known):
        parser.error(f"unknown client {min(unknown)!r}: choose from {', '.join(known)}")
    failed = []
    for name in given.clients or known:
        package, change = CLIENTS[name][:2] if name in CLIENTS else OWN_TRAINERS[name][:2]
        change = f'strategy="{change}"' if name in CLIENTS else change
        began = time.monotonic()
        try:
            row = of_client(name) if name in CLIENTS else of_trainer(name)
            said = ""
        except Exception as error:  # the others are worth knowing, too
            row, said = {}, f"{type(error).__name__}: {error}".splitlines()[0][:200]
        holds = bool(row) and row["equal"] and row["resumed"] == row["ddp_resumed"]
        failed += [] if holds else [name]
        row = {
            "client": name,
            "package": package,
            "version": importlib.metadata.version(package),
            "change": change,
            **row,
        }
        print({**row, "error": said}, f"{time.monotonic() - began:.0f} s", flush=True)
        origin = results.origin("pytorch_lightning")
        results.save(given.out / "clients.csv", [row | {"error": said} | origin], ["client"], digits=4)
    if failed:
        sys.exit(f"these do not train as they should: {', '.join(failed)}")


if __name__ == "__main__":
    main()
