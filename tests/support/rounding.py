"""Statistics of random rounding, with error bars from its expected distribution."""

from collections.abc import Callable

import torch
from torch import Tensor

DEVIATIONS = 5
"""Largest deviation of a mean. With a thousand means of many draws, one run in 1,700 exceeds it by chance."""


def check_rounding(draw: Callable[[int], Tensor], x: Tensor, step: Tensor, draws: int) -> float:
    """Check that `draw(0)`, `draw(1)`, … round x to a multiple of `step` above or below, at random, with mean x.

    Let p be the position of x between the two multiples. An element's error is (1 - p)·step with probability p, and
    -p·step otherwise, and all errors are independent. So the mean of n draws has the variance p(1 - p)·step²/n, and the
    squared error has a known mean and variance.

    Returns:
        The expectation of the squared error of all elements.
    """
    x, step = x.double(), step.double().expand(x.shape)
    p = x / step - torch.floor(x / step)
    total, squares = torch.zeros_like(x), 0.0
    for number in range(draws):
        error = draw(number).double() - x
        # Check the distance to a multiple, in fp32.
        assert ((error / step + p) - (error / step + p).round()).abs().max() < 1e-4
        assert (error.abs() <= step * (1 + 1e-4)).all()
        total += error
        squares += float(error.square().sum())
    deviation = (p * (1 - p) / draws).sqrt() * step
    # The random numbers have 16 bits.
    assert ((total / draws).abs() <= DEVIATIONS * deviation + step * 2**-16).all()
    expected = float((p * (1 - p) * step**2).sum())
    fourth = (p * (1 - p) ** 4 + (1 - p) * p**4) * step**4
    variance = float((fourth - (p * (1 - p) * step**2) ** 2).sum()) / draws
    assert abs(squares / draws - expected) <= DEVIATIONS * variance**0.5 + expected * 2**-12 + 1e-12
    return expected
