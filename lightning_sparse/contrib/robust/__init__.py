"""Training with faulty or malicious ranks: simulated attacks to test a method with, and election coding."""

from lightning_sparse.contrib.robust.attacked import Attacked
from lightning_sparse.contrib.robust.election import (
    PartSampler,
    bernoulli_allocation,
    deterministic_allocation,
    local_vote,
)

__all__ = ["Attacked", "PartSampler", "bernoulli_allocation", "deterministic_allocation", "local_vote"]
