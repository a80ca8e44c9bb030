"""Lightning exists under two names, often both installed: which are, and which one the user works with.

To be imported before the strategies import both.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

INSTALLED = [
    module
    for package, module in (("pytorch_lightning", "pytorch_lightning"), ("lightning", "lightning.pytorch"))
    if find_spec(package)
]
if not INSTALLED:
    raise ImportError("lightning_sparse needs Lightning: pip install pytorch-lightning (or lightning).")
_imported = [module for module in INSTALLED if module.partition(".")[0] in sys.modules]

CHOSEN = _imported[0] if len(_imported) == 1 else INSTALLED[0]
"""The one that was imported before lightning_sparse; `pytorch_lightning` if that does not decide."""
