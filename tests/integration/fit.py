"""A user's script: fit, validate, test, predict and a second fit with one strategy. It writes results to a folder.

Usage: fit.py NAMESPACE STRATEGY FOLDER OPTIMIZER
"""

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch

import lightning_sparse

warnings.simplefilter("ignore")  # Lightning's advice on a toy run


NAMESPACE, STRATEGY, FOLDER, OPTIMIZER = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
pl = importlib.import_module(NAMESPACE)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, index):
        return self.layers(batch[0]).pow(2).mean()

    def validation_step(self, batch, index):
        self.log("loss", self.layers(batch[0]).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.layers(batch[0])

    def configure_optimizers(self):
        return getattr(torch.optim, OPTIMIZER)(self.parameters(), 0.1)

    def on_train_end(self):
        strategy = self.trainer.strategy
        seen = {
            "module": type(strategy).__module__,
            "steps": strategy.reducer.step,
            "sent": strategy.reducer.comm.sent_bytes,
            "weights": [float(p.double().sum()) for p in self.parameters()],
            "density": strategy.reducer.density,
            "exchanged": strategy.reducer.exchanged,
        }
        (FOLDER / f"rank{strategy.global_rank}.json").write_text(json.dumps(seen))


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32))

    def loader() -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(data, batch_size=8)

    trainer = pl.Trainer(
        strategy=STRATEGY,
        max_epochs=2,
        devices=2,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    net = Net()
    trainer.fit(net, loader(), loader())
    if "spawn" not in STRATEGY:  # which takes a quarter of a minute to start, each time
        trainer.validate(net, loader(), verbose=False)
        trainer.test(net, loader(), verbose=False)
        trainer.predict(net, loader())
    try:
        trainer.fit(Net(), loader(), loader())
        second = "ok"
    except NotImplementedError as error:
        second = str(error)
    (FOLDER / f"done{trainer.global_rank}.json").write_text(json.dumps(second))


if __name__ == "__main__":
    assert lightning_sparse.METHODS
    main()
