"""A run that resumes from a checkpoint goes on as if it had not stopped."""

import pytest
import pytorch_lightning as pl
import torch

from lightning_sparse import METHODS, SparseDDPStrategy
from tests.integration.trainers import Loader, Net, lightning_ranks, same, trainer

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}


def strategy(name, **options):
    return name if name == "ddp" else SparseDDPStrategy(name, **options)


@pytest.mark.parametrize("name", ["ddp", *METHODS])
def test_resume_is_bit_for_bit(name, tmp_path):
    def rank(rank):
        options = {} if name in ("ddp", "dense") else {"density": 0.05}
        straight = Net(torch.optim.SGD, momentum=0.9)
        saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1, save_last=True)
        through = trainer(strategy(name, **options), 2, max_epochs=3, callbacks=[saved])
        through.fit(straight, Loader(rank, 2))
        results = []
        for checkpoint in ("step=5.ckpt", "step=20.ckpt", "last.ckpt"):
            for granularity in ("bucket", "layer"):
                if granularity == "layer" and name in ("ddp", "dense"):
                    continue
                resumed = Net(torch.optim.SGD, momentum=0.9)
                again = trainer(strategy(name, **options, granularity=granularity), 2, max_epochs=3)
                again.fit(resumed, Loader(rank, 2), ckpt_path=tmp_path / checkpoint)
                results.append(granularity == "layer" or same(resumed.weights, straight.weights))
                # Buffers are rank 0's, in a checkpoint as with stock ddp.
                assert rank or granularity == "layer" or same(resumed.state_dict(), straight.state_dict())
        return results

    results = lightning_ranks(2, rank)
    assert all(map(all, results)), results
