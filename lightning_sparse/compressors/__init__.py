"""Compressors, one file for each method."""

from lightning_sparse.compressors.base import Compressor, Entries, Identity, Payload, Update
from lightning_sparse.compressors.gaussiank import GaussianK
from lightning_sparse.compressors.sparsifier import Sparsifier
from lightning_sparse.compressors.topk import TopK

__all__ = ["Compressor", "Entries", "GaussianK", "Identity", "Payload", "Sparsifier", "TopK", "Update"]
