"""Detects which Lightning namespaces are installed and which one the user imported.

Import this module before the strategies, which import both.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet

log = logging.getLogger(__name__)

SUPPORTED = SpecifierSet(">=2.5,!=2.6.2,!=2.6.3", prereleases=True)
"""Supported versions, under either name; 2.6.2 and 2.6.3 were compromised. Keep it equal to the one in setup.cfg."""


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if it is a user's folder of the same name."""
    if not find_spec(package):
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # a source checkout has a version if it was imported before
        return getattr(sys.modules.get(package), "__version__", None)


_found = {
    module: found
    for package, module in (("pytorch_lightning", "pytorch_lightning"), ("lightning", "lightning.pytorch"))
    if (found := _version(package))
}
INSTALLED = [module for module, found in _found.items() if found in SUPPORTED]
Mixin: Any = object
"""The base of classes that a strategy of Lightning is combined with. Its type is that of all attributes: unknown."""
FABRIC = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}
"""The module with Fabric, by namespace."""
_unsupported = " and ".join(f"{module} {found}" for module, found in _found.items() if module not in INSTALLED)
if not INSTALLED:
    raise ImportError(
        f"lightning_sparse needs Lightning {SUPPORTED}, and found {_unsupported or 'none'}: pip install -U "
        f"pytorch-lightning (or lightning)."
    )
if _unsupported:
    log.warning(
        f"lightning_sparse needs Lightning {SUPPORTED}, so its strategies do not work with {_unsupported}, which is "
        f"installed as well; they do with {INSTALLED[0]}. To use both names, install one version of both: pip install "
        f"-U pytorch-lightning lightning."
    )
_imported = [module for module in INSTALLED if module.partition(".")[0] in sys.modules]

CHOSEN = _imported[0] if len(_imported) == 1 else INSTALLED[0]
"""The namespace that was imported before lightning_sparse; `pytorch_lightning` if neither or both were."""
