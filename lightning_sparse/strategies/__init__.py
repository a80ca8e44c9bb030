"""The strategies under both of Lightning's names, `pytorch_lightning` and `lightning.pytorch`.

Importing this package registers the strategy names with each installed one. The two modules have the classes for each
name. The classes here are from one of these modules, and they work with Trainer and Fabric of both names. Lightning
accepts them as strategies of both names. If a Trainer or a Fabric has the other name, the strategy changes its class.
"""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING

from lightning_sparse._lightning import CHOSEN, FABRIC, INSTALLED

if TYPE_CHECKING:
    from lightning_sparse.strategies.pytorch_lightning import (
        AutoDDPStrategy,
        AutoHSDPStrategy,
        FabricSparseDDPStrategy,
        FabricSparseHSDPStrategy,
        SparseDDPStrategy,
        SparseHSDPStrategy,
    )

__all__ = [
    "AutoDDPStrategy",
    "AutoHSDPStrategy",
    "FabricSparseDDPStrategy",
    "FabricSparseHSDPStrategy",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
]

_modules = {name: import_module(f"{__name__}.{name.replace('.', '_')}") for name in INSTALLED}
for _module, _name in product(_modules.values(), INSTALLED):  # for isinstance
    import_module(f"{_name}.strategies").DDPStrategy.register(_module.SparseDDPStrategy)
    import_module(f"{_name}.strategies").DDPStrategy.register(_module.AutoDDPStrategy)
    import_module(f"{_name}.strategies").ModelParallelStrategy.register(_module.SparseHSDPStrategy)
    import_module(f"{_name}.strategies").ModelParallelStrategy.register(_module.AutoHSDPStrategy)
    import_module(f"{FABRIC[_name]}.strategies").DDPStrategy.register(_module.FabricSparseDDPStrategy)
    import_module(f"{FABRIC[_name]}.strategies").ModelParallelStrategy.register(_module.FabricSparseHSDPStrategy)
if not TYPE_CHECKING:
    globals().update((name, getattr(_modules[CHOSEN], name)) for name in __all__)
