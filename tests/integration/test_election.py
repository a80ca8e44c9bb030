"""Election coding with a LightningDataModule and real processes: one of three ranks attacks without any effect."""

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse import Method, SparseDDPStrategy
from lightning_sparse.contrib.majority_vote import MajorityVote
from lightning_sparse.contrib.robust import Attacked, PartSampler, deterministic_allocation, local_vote
from lightning_sparse.contrib.sign import Sign
from lightning_sparse.memory import NoMemory
from tests.integration.trainers import Net, lightning_ranks, trainer
from tests.support.tiers import full

WORKERS, PART_SIZE = 3, 4


class Parts(pl.LightningDataModule):
    def __init__(self, allocation: Tensor) -> None:
        super().__init__()
        self.allocation = allocation

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(2)
        data = TensorDataset(
            torch.randint(16, (50,), generator=generator), torch.randint(4, (50,), generator=generator)
        )
        sampler = PartSampler(data, self.allocation, PART_SIZE)
        return DataLoader(data, batch_size=sampler.batch_size, sampler=sampler)


class Voting(Net):
    def __init__(self) -> None:
        super().__init__(lr=0.001)
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        step = super().training_step
        parts = zip(*(x.split(PART_SIZE) for x in batch), strict=True)
        return local_vote((step(part, index) for part in parts), self.parameters())


def fit(allocation: Tensor, share: float) -> tuple[Tensor, list[list[int]], float]:
    method = Method(Sign(), NoMemory(), Attacked(MajorityVote(), "negate", share))
    net = Voting()
    run = trainer(SparseDDPStrategy(method), WORKERS, max_epochs=3)
    run.fit(net, datamodule=Parts(allocation))
    return net.weights, net.seen, run.strategy.reducer.step


@full
def test_one_of_three_ranks_attacks():
    def both(rank: int) -> list[tuple[Tensor, list[list[int]], float]]:
        one_each = torch.eye(WORKERS, dtype=torch.bool)
        # A part of the data has no sign for embeddings that it does not use, so a vote with one part per rank differs.
        return [fit(deterministic_allocation(WORKERS, 1), share) for share in (0, 0.4)] + [fit(one_each, 0.4)]

    ranks = lightning_ranks(WORKERS, both)
    for honest, attacked, uncoded in ranks:
        assert torch.equal(honest[0], ranks[0][0][0])
        assert torch.equal(attacked[0], honest[0])
        assert not torch.equal(uncoded[0], honest[0])
        # 50 examples are 4 steps of 12; the order is another one in each epoch.
        assert honest[2] == attacked[2] == uncoded[2] == 12
        assert [len(batch) for batch in honest[1]] == [12] * 12
        assert len({tuple(batch) for batch in honest[1]}) == 12
        assert honest[1] == ranks[0][0][1]
    for step, batch in enumerate(ranks[0][0][1]):
        assert batch == [index for rank in ranks for index in rank[2][1][step]]


def test_an_allocation_for_another_number_of_ranks_is_refused():
    def wrong(rank: int) -> str:
        try:
            fit(deterministic_allocation(5, 1), 0)
        except ValueError as error:
            return str(error)
        return "no error"

    assert set(lightning_ranks(WORKERS, wrong)) == {"PartSampler(allocation for 5 workers): there are 3 ranks."}
