"""One function for each operation: the backend of its first tensor, or else plain torch."""

import torch

from lightning_sparse.kernels.dispatch import operation
from tests.support.kernels import needs_native


@operation
def doubled(x, y=None):
    """Return twice the number."""
    return "torch"


@doubled.by("triton", when=lambda x, y=None: y is None)
def _by_triton(x, y=None):
    return "triton"


@doubled.by("native")
def _in_c(x, y=None):
    return "native"


@needs_native
def test_the_first_tensor_chooses(use):
    x = torch.zeros(1)
    for kernels in ("torch", "triton", "native"):
        use(kernels)
        assert doubled(x) == doubled([None, (x,)]) == kernels
        assert doubled.reference(x) == "torch"
    assert doubled(torch.zeros(1, device="meta")) == "torch"
    assert doubled([None]) == "torch", "there is no tensor"


def test_arguments_that_an_implementation_does_not_take_go_to_the_reference(use):
    use("triton")
    assert doubled(torch.zeros(1), y=1) == "torch"


def test_an_operation_without_an_implementation_runs_its_reference(use):
    use("triton")
    assert operation(lambda x: x + 1)(torch.zeros(1)).tolist() == [1]
    assert doubled.__doc__ == "Return twice the number."
