"""Dependencies point in one direction, and importing loads nothing unnecessary."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.tiers import full

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_sparse"
FILES = sorted(PACKAGE.rglob("*.py"))
# Parts of the package that each part may import, besides its own folder.
ALLOWED = {
    "_compat": set(),
    "_lightning": set(),
    "options": set(),
    "layout": {"options"},
    "comm": {"_compat"},
    "kernels": {"_compat"},
    "context": {"kernels", "layout"},
    "compressors": {"layout", "context", "kernels", "options"},
    "memory": {"context", "compressors", "kernels", "options"},
    "momentum": {"compressors", "kernels", "layout"},
    "update_rule": {"context", "layout", "momentum", "options"},
    "framing": {"kernels"},
    "exchange": {"comm", "compressors", "context", "framing", "kernels"},
    "aggregators": {"layout", "context", "compressors", "exchange", "framing", "kernels", "options"},
    "method_spec": {"compressors", "memory", "aggregators", "update_rule"},
    "methods": {"compressors", "memory", "aggregators", "contrib", "method_spec", "options", "update_rule"},
    "observer": {"context", "compressors"},
    "state": {"context", "exchange", "kernels", "layout", "methods"},
    "overflow": {"comm", "exchange", "layout", "options"},
    "routing": {"aggregators", "comm", "compressors", "context", "layout", "methods"},
    "gradients": {"compressors", "kernels", "layout"},
    "reducer": {
        *("aggregators", "observer", "options", "layout", "context", "comm", "compressors", "exchange"),
        *("gradients", "kernels", "methods", "overflow", "routing", "state"),
    },
    "shards": set(),
    "updates": {
        *(
            "_compat",
            "comm",
            "compressors",
            "context",
            "gradients",
            "kernels",
            "layout",
            "momentum",
            "options",
            "reducer",
            "shards",
            "state",
        ),
        "update_rule",
    },
    "hooks": {
        "_compat",
        "layout",
        "comm",
        "gradients",
        "kernels",
        "memory",
        "methods",
        "options",
        "reducer",
        "shards",
        "trained",
        "update_rule",
        "updates",
    },
    "checkpoint": {"options", "state"},
    "replica_checkpoint": {"_compat", "checkpoint", "hooks", "options", "shards", "state"},
    "strategies": {
        "_compat",
        "_lightning",
        "aggregators",
        "checkpoint",
        "comm",
        "compressors",
        "cost",
        "gradients",
        "layout",
        "hooks",
        "logged",
        "memory",
        "methods",
        "momentum",
        "options",
        "reducer",
        "replica_checkpoint",
        "shards",
        "state",
        "trained",
        "update_rule",
        "updates",
    },
    "callbacks": {
        *("_compat", "_lightning", "observer", "layout", "context", "compressors", "reducer", "strategies"),
    },
    "cli": {"_lightning", "methods", "strategies", "callbacks"},
    "logged": set(),
    "trained": set(),
    "cost": {"layout", "compressors", "aggregators", "exchange", "methods"},
    "advise": {
        *("aggregators", "comm", "compressors", "cost", "exchange", "logged", "methods", "reducer", "trained"),
        *("update_rule", "updates"),
    },
    # Only `methods` may import from `contrib`, and only `contrib.methods`.
    "contrib": {
        *("_lightning", "aggregators", "callbacks", "compressors", "context", "exchange", "kernels", "layout"),
        *("memory", "method_spec", "options", "update_rule"),
    },
    "__main__": {"advise", "cli"},
}
# Folders of the repository that are not installed, and those of them that each may import.
OUTSIDE = {"examples": {"benchmarks"}, "benchmarks": {"examples"}, "reproductions": {"benchmarks", "examples"}}
LIGHTNING = {"strategies", "callbacks", "cli", "contrib"}
NAMESPACES = ("lightning_pytorch", "pytorch_lightning")
DISTRIBUTED = {"_compat", "comm", "hooks", "replica_checkpoint", "shards", "strategies"}


@cache
def tree_of(file):
    return ast.parse(file.read_text())


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path, *, top_level: bool = False) -> set[str]:
    tree = tree_of(file)
    found = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_dependencies_point_one_way(file):
    mine = part(file)
    if mine == "__init__":
        return  # it gathers the public names
    assert mine in ALLOWED, f"say in this test what {mine} may import"
    for name in imports(file):
        top, *rest = name.split(".")
        assert top not in OUTSIDE, name
        if top == "lightning_sparse" and rest:
            assert rest[0] == mine or rest[0] in ALLOWED[mine], name
        if top in ("lightning", "pytorch_lightning"):
            assert mine in LIGHTNING, name
        if name.startswith("torch.distributed"):
            assert mine in DISTRIBUTED, name
        assert top != "triton" or (file.parent.name == "kernels" and name not in imports(file, top_level=True)), name


def test_rows_of_contrib_do_not_import_the_table_that_they_join():
    """`methods` imports `contrib.methods`, whose imports must not include `methods`."""
    of = {".".join(("lightning_sparse", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in FILES}
    assert {name for name in imports(of["lightning_sparse.methods"]) if ".contrib" in name} == {
        *("lightning_sparse.contrib.methods", "lightning_sparse.contrib.methods.CONTRIB"),
    }
    reached, left = set(), {"lightning_sparse.contrib.methods"}
    while left:
        reached.add(name := left.pop())
        left |= {other for other in imports(of[name]) & of.keys() if other not in reached}
    assert reached.isdisjoint(
        {"lightning_sparse.methods", *(name for name in of if part(of[name]) in LIGHTNING - {"contrib"})}
    )


def test_importing_the_package_imports_no_third_party_but_torch_lightning_and_their_requirements():
    """Histograms, the cost model and the command line need more, and import it when they are used."""
    of = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    seen, left = set(), {"lightning_sparse", *(f"lightning_sparse.strategies.{name}" for name in NAMESPACES)}
    while left:
        seen.add(name := left.pop())
        found = {name.rpartition(".")[0], *(imports(of[name], top_level=True) if name in of else ())}
        left |= {other for other in found if other} - seen
    theirs = {name.split(".")[0] for name in seen} - sys.stdlib_module_names - {"lightning_sparse"}
    lightning = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
    assert theirs == {"torch", "numpy", "fsspec", "packaging", *lightning}


@pytest.mark.parametrize("folder", OUTSIDE)
def test_nothing_imports_a_reproduction_but_another(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for name in imports(file):
            top = name.split(".")[0]
            assert top == folder or top not in OUTSIDE or top in OUTSIDE[folder], f"{file.relative_to(ROOT)}: {name}"


@full
def test_what_tests_share_is_in_no_test_file():
    for folder in ("tests", "benchmarks", "reproductions"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in imports(file):
                assert not re.search(r"^tests\.(.*\.)?test_", name), f"{file.relative_to(ROOT)} imports {name}"


MAKES_TENSORS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor"}
MAKES_TENSORS |= {"as_tensor", "zeros"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_tensors_are_made_on_a_device_that_is_named(file):
    """The default device may be set to CUDA."""
    calls = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in MAKES_TENSORS}]
    assert [ast.unparse(call) for call in made if "device" not in {word.arg for word in call.keywords}] == []
