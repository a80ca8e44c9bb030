"""Values rounded at random to a few levels of their bucket's norm, in one call: QSGD's rounding.

    norms, packed, update = round_to_levels(u, levels, bits, bucket, key)    # what is sent, and what it stands for
    level_values(norms, packed, levels, bits, bucket, len(u))                # the same update

Only for where `uses_native`. A norm is summed up in pieces, in fp32, and of these in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sparse.kernels import native
from lightning_sparse.kernels.codes import code_bytes
from lightning_sparse.kernels.uniform import key_and_step


def round_to_levels(u: Tensor, levels: int, bits: int, bucket: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of each bucket, packed codes, and the values that they stand for, fp32.

    Args:
        u: 1-D, fp32; left as it is.
        levels: above 0, of a norm; 0 has the code `levels`.
        bits: of a code.
        bucket: elements that share a norm.
        key: of the `Uniform` numbers by which is rounded.
    """
    numel = len(u)
    norms = torch.empty(-(-numel // bucket), dtype=torch.float32, device=u.device)
    packed, update = torch.empty(code_bytes(numel, bits), dtype=torch.uint8, device=u.device), torch.empty_like(u)
    native.run("round_to_levels", u, norms, packed, update, *key_and_step(key), numel, levels, bits, bucket)
    return norms, packed, update


def level_values(norms: Tensor, packed: Tensor, levels: int, bits: int, bucket: int, numel: int) -> Tensor:
    """Return the values, fp32, that `numel` codes stand for; arguments as for `round_to_levels`."""
    update = torch.empty(numel, dtype=torch.float32, device=packed.device)
    native.run("level_values", norms, packed, update, numel, levels, bits, bucket)
    return update
