"""The strategy under both of Lightning's names, `pytorch_lightning` and `lightning.pytorch`.

Importing this package registers the strategy names with each installed one. The two modules have a class for each name.
`SparseDDPStrategy` here is one of these classes, and it works with the Trainers of both names. Each Trainer accepts it
as one of its strategies. If a Trainer has the other name, the strategy changes its class.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING

from lightning_sparse._lightning import CHOSEN, INSTALLED

if TYPE_CHECKING:
    from lightning_sparse.strategies.pytorch_lightning import SparseDDPStrategy

__all__ = ["SparseDDPStrategy"]

_modules = {name: import_module(f"{__name__}.{name.replace('.', '_')}") for name in INSTALLED}
_bases = [import_module(f"{name}.strategies").DDPStrategy for name in INSTALLED]
for _module, _base in product(_modules.values(), _bases):
    _base.register(_module.SparseDDPStrategy)  # for isinstance
if not TYPE_CHECKING:
    SparseDDPStrategy = _modules[CHOSEN].SparseDDPStrategy
