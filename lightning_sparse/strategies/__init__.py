"""The strategy under both of Lightning's names, `pytorch_lightning` and `lightning.pytorch`.

Importing this package registers the strategy names with whichever is installed. `SparseDDPStrategy` here is the one
for the namespace that was imported before, and for `pytorch_lightning` where that does not tell; the two modules offer
each explicitly.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_sparse.strategies.pytorch_lightning import SparseDDPStrategy

__all__ = ["SparseDDPStrategy"]

# Which one the user works with has to be seen before both are imported for their registries.
_BY_NAMESPACE = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning_pytorch"}
_installed = [name for name in _BY_NAMESPACE if find_spec(name)]
if not _installed:
    raise ImportError("lightning_sparse needs Lightning: pip install pytorch-lightning (or lightning).")
_imported = [name for name in _installed if name in sys.modules]
_chosen = _imported[0] if len(_imported) == 1 else _installed[0]
_modules = {name: import_module(f"{__name__}.{_BY_NAMESPACE[name]}") for name in _installed}
if not TYPE_CHECKING:
    SparseDDPStrategy = _modules[_chosen].SparseDDPStrategy
