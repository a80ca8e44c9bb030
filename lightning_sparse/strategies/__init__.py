"""The strategy under both of Lightning's names, `pytorch_lightning` and `lightning.pytorch`.

Importing this package registers the strategy names with whichever is installed. `SparseDDPStrategy` here is the one
for the namespace that was imported before, and for `pytorch_lightning` where that does not tell; the two modules offer
each explicitly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_sparse._lightning import CHOSEN, INSTALLED

if TYPE_CHECKING:
    from lightning_sparse.strategies.pytorch_lightning import SparseDDPStrategy

__all__ = ["SparseDDPStrategy"]

_modules = {name: import_module(f"{__name__}.{name.replace('.', '_')}") for name in INSTALLED}
if not TYPE_CHECKING:
    SparseDDPStrategy = _modules[CHOSEN].SparseDDPStrategy
