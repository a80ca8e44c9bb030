"""Fixtures of the tests with Lightning."""

import pytest

from tests.integration.checkpoints import fit, result, saving
from tests.integration.trainers import lightning_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of twelve steps with all its checkpoints; the results of its two ranks."""
    directory = tmp_path_factory.mktemp("saved")
    results = lightning_ranks(2, lambda rank: result(*fit("topk", rank, callbacks=[saving(directory)])))
    return directory, results
