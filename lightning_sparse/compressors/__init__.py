"""Compressors, one file per method."""

from lightning_sparse.compressors.base import Agreed, Compressor, Entries, Identity, Payload, Sparsifier
from lightning_sparse.compressors.gaussiank import GaussianK
from lightning_sparse.compressors.randk import RandK
from lightning_sparse.compressors.topk import TopK

__all__ = ["Agreed", "Compressor", "Entries", "GaussianK", "Identity", "Payload", "RandK", "Sparsifier", "TopK"]
