"""Importing does not change logging, and a run's messages appear once in a Trainer's output."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.tiers import full

ROOT = Path(__file__).parents[1]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )


@full
def test_importing_leaves_logging_as_it_is():
    done = run("""
        import logging
        import lightning_sparse, lightning_sparse.callbacks, lightning_sparse.cli

        names = ["lightning_sparse", *(n for n in logging.root.manager.loggerDict if n.startswith("lightning_sparse."))]
        for logger in map(logging.getLogger, names):
            assert all(isinstance(handler, logging.NullHandler) for handler in logger.handlers), logger
            assert logger.propagate and logger.level == logging.NOTSET, logger
        assert not logging.root.handlers and logging.root.level == logging.WARNING
    """)
    assert done.stderr == ""


FIT = """
    import logging, warnings
    warnings.simplefilter("ignore")
    {before}
    import {namespace} as pl
    import lightning_sparse
    import torch

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(100, 10)
        def training_step(self, batch, index):
            return self.layer(batch[0]).sum()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 100)), batch_size=2)
    strategy = lightning_sparse.SparseDDPStrategy(exchange="gradient")  # of which Adam is warned
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, barebones=True).fit(Net(), data)
"""


@full
@pytest.mark.parametrize(
    ("namespace", "before"),
    [
        ("pytorch_lightning", ""),
        pytest.param("lightning.pytorch", "logging.basicConfig(level=logging.INFO)", marks=full),
    ],
    ids=["as it is", "set up by the program"],
)
def test_the_first_line_and_warnings_of_a_run_show_once(namespace, before):
    done = run(FIT.format(namespace=namespace, before=before))
    assert done.stderr.count("TopK(density=0.001) + Residual() + Mean() on 1 rank; 1,010 parameters") == 1, done.stderr
    assert done.stderr.count("Adam takes too large steps") == 1, done.stderr
    assert done.stdout.count("TopK") == 0


@full
def test_who_silences_lightning_silences_the_first_line_and_keeps_warnings():
    done = run(
        FIT.format(
            namespace="pytorch_lightning",
            before='import pytorch_lightning; logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)',
        )
    )
    assert "1,010 parameters" not in done.stderr
    assert "Adam takes too large steps" in done.stderr


@full
def test_warnings_without_lightning_show_as_pythons_do():
    done = run("""
        import torch
        from lightning_sparse import Reducer, simulate

        grads = {"w": torch.tensor([float("nan")])}
        simulate(1, lambda comm: Reducer("topk", comm, on_nonfinite="skip").reduce_(grads))
    """)
    assert "All ranks skip this step; 1 skipped so far." in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "lightning_sparse").rglob("*.py")), ids=lambda path: path.stem)
def test_no_text_that_a_user_gets_points_to_a_file_that_is_not_installed(path):
    tree = ast.parse(path.read_text())
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text.value for text in texts if text not in statements and re.search(r"docs/|\.md\b", text.value)]
