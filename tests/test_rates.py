"""The check that learning rates are equal on all ranks. tests/integration/test_gradients.py tests it in a training."""

import logging

import pytest
import torch

from lightning_sparse import simulate
from lightning_sparse.hooks.rates import PERIOD, Rates


@pytest.mark.parametrize("rates", [[0.1, 0.1], [0.1, 0.2], [None, None], [None, 0.1], [torch.tensor(0.1)] * 2], ids=str)
def test_rates_that_differ_are_warned_of_once(rates, caplog):
    """A learning rate may be a tensor. It is None for an Adafactor that computes its own rate."""

    def rank(comm):
        optimizer = torch.optim.SGD([torch.ones(1)], 0.1)
        optimizer.param_groups[0]["lr"] = rates[comm.rank]
        compared = Rates(comm, [optimizer], torch.device("cpu"))
        for _ in range(2):
            compared.compare()
            assert not compared.are_due(1)
        assert compared.are_due(PERIOD)

    caplog.set_level(logging.WARNING)
    simulate(2, rank)
    assert len(caplog.records) == (rates[0] != rates[1])
    assert all("Learning rates differ among ranks" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("rates", "warns"),
    [([[1, 0], [1, 0]], False), ([[1, 1], [0, 0]], False), ([[1, 1], [1, 0], [1, 0]], True), ([[0, 1], [1, 1]], False)],
)
@pytest.mark.parametrize("have_residuals", [True, False])
def test_a_rate_that_becomes_0_is_warned_of_once_if_residuals_change_weights(rates, warns, have_residuals, caplog):
    def rank(comm):
        optimizer = torch.optim.SGD([{"params": [torch.ones(1)]} for _ in range(2)], 0.1)
        compared = Rates(comm, [optimizer], torch.device("cpu"), have_residuals=have_residuals)
        for now in rates:
            for group, rate in zip(optimizer.param_groups, now, strict=True):
                group["lr"] = 0.1 * rate
            compared.compare()
            compared.are_due(1)

    caplog.set_level(logging.WARNING)
    simulate(2, rank)
    assert len(caplog.records) == (warns and have_residuals)
    assert all("a parameter group has become 0" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["11", "11"], ""),
        (["10", "10"], ""),
        (["11", "10", "11"], "Rank 1 has no gradient of 'b' in a step"),
        (["01", "11"], "Rank 0 has no gradient of 'a' in a step"),
        (["00", "11"], ""),
    ],
    ids=str,
)
def test_a_gradient_that_only_some_ranks_have_is_warned_of_once(flags, named, caplog):
    """A rank without any gradient has left its batch out."""

    def rank(comm):
        compared = Rates(comm, [torch.optim.SGD([torch.ones(1)], 0.1)], torch.device("cpu"))
        for has_gradient in (None, flags[comm.rank], flags[comm.rank], "11"):
            compared.compare(has_gradient and {name: x == "1" for name, x in zip("ab", has_gradient, strict=True)})
            compared.are_due(1)

    caplog.set_level(logging.WARNING)
    simulate(len(flags), rank)
    assert [named in record.message for record in caplog.records] == [True] * bool(named)
