"""Sidecar files without Lightning: writing, reading, damage, removal."""

import errno
import io
import os
import uuid
from collections import Counter
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from lightning_sparse import METHODS, Reducer, method, simulate
from lightning_sparse import checkpoint as sidecars
from lightning_sparse.layout import Layout
from lightning_sparse.state import SegmentStates, resized, sources
from tests.integration.trainers import same

TAG = "0123456789abcdef"


def state(rank: int = 0, size: int = 2, step: int = 3) -> dict:
    generator = torch.Generator().manual_seed(100 * step + rank)
    elements = {"residual": {"w": torch.randn(30, 4, generator=generator), "b": torch.randn(4, generator=generator)}}
    elements["common"] = {"w": torch.full((30, 4), 5.0), "b": torch.full((4,), 6.0)}
    return {
        "version": 2,
        "method": "Method()",
        "rank": rank,
        "size": size,
        "step": step,
        "skipped": 0,
        "owners": {"residual": "Residual", "common": "Common", "round": "Common"},
        "resize": {"residual": "sum", "common": "replicate", "round": "replicate"},
        "elements": elements,
        "segments": {"w\nb": {"round": torch.tensor([7])}},
    }


def info(**changes) -> dict:
    return {"version": sidecars.VERSION, "tag": TAG, "size": 2, "step": 3, "skipped": 0, **changes}


def written(checkpoint, size: int = 2, tag: str = TAG, step: int = 3) -> list[str]:
    """Write the sidecar files of all ranks, and a checkpoint that names them; return their paths."""
    for rank in range(size):
        sidecars.write(checkpoint, tag, state(rank, size, step))
    with fsspec.open(checkpoint, "wb") as file:
        torch.save({"weights": torch.ones(3), sidecars.KEY: info(size=size, tag=tag, step=step)}, file)
    fs, root = fsspec.core.url_to_fs(sidecars.folder(checkpoint))
    return sorted(path for path in fs.ls(root, detail=False) if tag in path)


@pytest.fixture(params=["local", "memory"])
def checkpoint(request, tmp_path):
    return f"{tmp_path if request.param == 'local' else f'memory://{uuid.uuid4()}'}/last, [best]*? {{epoch=1}}.ckpt"


def test_sidecar_files_are_read_as_written_and_pruned(checkpoint):
    paths = written(checkpoint)
    assert [path.rsplit("/", 1)[1] for path in paths] == [f"{TAG}.rank0-of-2.pt", f"{TAG}.rank1-of-2.pt"]
    for rank in range(2):
        found, missing = sidecars.read(checkpoint, info(), rank, 2)
        assert missing == []
        assert same(found, state(rank))
        fs, _ = fsspec.core.url_to_fs(checkpoint)
        with fs.open(paths[rank], "rb") as file:
            assert same(torch.load(file, weights_only=True)["state"], state(rank))
    sidecars.prune(checkpoint)
    assert sidecars.read(checkpoint, info(), 1, 2) == (None, [1])
    assert not fs.exists(sidecars.folder(checkpoint))
    sidecars.prune(checkpoint)  # without a folder


@pytest.mark.parametrize("x", [torch.tensor(2.0).expand(5), torch.arange(8.0).as_strided((1,), (8,))], ids=str)
def test_the_checksum_of_a_tensor_with_strides_is_that_of_its_values(x):
    assert sidecars.checksum(x) == sidecars.checksum(x.clone(memory_format=torch.contiguous_format))


class Codes(torch.Tensor):
    """A tensor without storage, like the states of 8-bit optimizers: its codes are an attribute."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


def test_a_tensor_subclass_without_storage_is_written_and_read(tmp_path):
    optimizers = {"0": {"state": {0: {"exp_avg": Codes(torch.arange(6, dtype=torch.uint8))}}}}
    path = str(tmp_path / "a.ckpt")
    sidecars.write(path, TAG, {**state(), "optimizers": optimizers})
    with torch.serialization.safe_globals([Codes]):
        found, _ = sidecars.read(path, info(), 0, 2)
    assert found is not None
    assert found["optimizers"]["0"]["state"][0]["exp_avg"].codes.tolist() == [0, 1, 2, 3, 4, 5]
    assert sidecars.checksum(Codes(torch.ones(6))) != sidecars.checksum(Codes(torch.zeros(6)))


def test_names_are_literal_and_no_patterns(checkpoint):
    """Removing the sidecar files of `[ab]*?.ckpt` leaves those of checkpoints that match it as a pattern."""
    place = checkpoint.rpartition("/")[0]
    neighbours = [f"{place}/{name}.ckpt" for name in ("a", "aa", "abc", "best")]
    pattern = f"{place}/[ab]*?.ckpt"
    for path in (*neighbours, pattern):
        written(path)
    sidecars.remove(pattern, TAG)
    assert sidecars.read(pattern, info(), 0, 2)[1] == [0]
    written(pattern)
    sidecars.prune(pattern, {"ffff"})
    for path in neighbours:
        assert sidecars.read(path, info(), 0, 2)[1] == []
    assert sidecars.read(pattern, info(), 0, 2) == (None, [0])


@pytest.mark.reliability("safe loading", checked="weights_only=True loads the state of every method, bit for bit")
@pytest.mark.parametrize("name", METHODS)
def test_every_methods_state_is_loaded_with_weights_only(name, tmp_path):
    def run(comm):
        reducer = Reducer(name, comm)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            reducer.reduce_({"a": torch.randn(300, generator=generator), "b": torch.randn(40, 5, generator=generator)})
        sidecars.write(tmp_path / "a.ckpt", TAG, reducer.state_dict())
        return reducer.state_dict()

    for rank, kept in enumerate(simulate(2, run)):
        assert same(sidecars.read(tmp_path / "a.ckpt", info(), rank, 2)[0], kept)


@pytest.mark.reliability("sidecar file torn or with flipped bits", checked="refused, or read as written: never garbage")
def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path):
    path = Path(written(tmp_path / "a.ckpt")[0])
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 100):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged"):
            sidecars.read(tmp_path / "a.ckpt", info(), 0, 2)
    outcome = Counter()
    for place in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            unnoticed = not same(torch.load(io.BytesIO(flipped), weights_only=True)["state"], state(0))
        except Exception:
            unnoticed = False
        try:
            found, _ = sidecars.read(tmp_path / "a.ckpt", info(), 0, 2)
            outcome["harmless" if same(found, state(0)) else "garbage"] += 1
        except ValueError:
            outcome["refused by checksum" if unnoticed else "refused"] += 1
    # The control: torch.load alone accepts many of these files.
    assert outcome["garbage"] == 0, outcome
    assert outcome["refused by checksum"] > 10, outcome


def rewritten(path: str, **changes) -> None:
    """Change a sidecar file as a stranger would who knows the format."""
    content = torch.load(path, weights_only=True)
    del content["checksum"]
    content["state"].update(changes.pop("state", {}))
    content.update(changes)
    torch.save({**content, "checksum": sidecars.checksum(content)}, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),  # the control
        ({"tag": "ffff"}, "belongs to another"),
        ({"version": 99}, "belongs to another"),
        ({"state": {"rank": 1}}, "belongs to another"),
        ({"state": {"size": 4}}, "belongs to another"),
        ({"state": {"step": -1}}, "is damaged"),
        ({"state": {"elements": {"residual": {"w": [1.0, 2.0]}}}}, "is damaged"),
        ({"state": {"elements": {"residual": {"w": torch.ones(30, 4).half()}}}}, "is damaged"),
        ({"state": {"elements": {"unheard of": {"w": torch.ones(30, 4)}}}}, "is damaged"),
        ({"state": {"segments": {"w": None}}}, "is damaged"),
        ({"state": []}, "is damaged"),
    ],
)
def test_a_strangers_sidecar_file_is_refused(changes, message, tmp_path):
    path = written(tmp_path / "a.ckpt")[0]
    if changes.get("state") == []:
        torch.save({"version": 1, "tag": TAG, "state": [], "checksum": 0}, path)
    else:
        rewritten(path, **changes)
    if message is None:
        assert same(sidecars.read(tmp_path / "a.ckpt", info(), 0, 2)[0], state(0))
        return
    with pytest.raises(ValueError, match=message) as error:
        sidecars.read(tmp_path / "a.ckpt", info(), 0, 2)
    assert str(path) in str(error.value)


class Touch:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.reliability("sidecar file from a stranger", checked="refused, and no code of it runs")
@pytest.mark.parametrize("where", ["content", "state", "legacy"])
def test_a_malicious_sidecar_file_is_refused_and_runs_nothing(where, tmp_path):
    path = written(tmp_path / "a.ckpt")[0]
    canary = tmp_path / "ran"
    content = {"version": 1, "tag": TAG, "state": state(0), "checksum": 0}
    content["state" if where == "state" else "extra"] = Touch(canary)
    torch.save(content, path, _use_new_zipfile_serialization=where != "legacy")
    with pytest.raises(ValueError, match="is damaged, or not a sidecar file: UnpicklingError"):
        sidecars.read(tmp_path / "a.ckpt", info(), 0, 2)
    assert not canary.exists()
    torch.load(path, weights_only=False)  # the control
    assert canary.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "of version 99, this is 1"),
        ({"size": 10**15}, "about sidecar files is invalid"),
        ({"size": 0}, "about sidecar files is invalid"),
        ({"step": "3"}, "about sidecar files is invalid"),
        ({"skipped": -1}, "about sidecar files is invalid"),
        ({"tag": "../../etc/passwd"}, "about sidecar files is invalid"),
        ({"tag": None}, "about sidecar files is invalid"),
        ({"tag": "a" * 10**6}, "about sidecar files is invalid"),
        ({"version": "9" * 10**6}, "of version '999"),
    ],
)
def test_a_checkpoints_entry_about_sidecar_files_is_checked_before_use(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        sidecars.read(tmp_path / "a.ckpt", info(**changes), 0, 2)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_that_asks_for_a_million_files_costs_one_look_at_the_folder(size, checkpoint, monkeypatch):
    written(checkpoint)
    looks = []
    monkeypatch.setattr(AbstractFileSystem, "exists", lambda *args: looks.append(args))
    listing = LocalFileSystem.ls
    monkeypatch.setattr(LocalFileSystem, "ls", lambda *args, **options: looks.append(args) or listing(*args, **options))
    found, missing = sidecars.read(checkpoint, info(size=sidecars.MAX_RANKS), 0, size)
    assert (found, len(missing)) == (None, sidecars.MAX_RANKS // size)
    assert len(looks) <= 2  # one of them for the target of a link


def test_ranks_of_different_models_are_not_added_up():
    elements = {"w": torch.ones(1)}
    other = {**state(2, 4), "elements": {"residual": elements, "common": elements}}
    with pytest.raises(ValueError, match="Reducer states of two ranks differ in the shape of 'w'"):
        resized([state(0, 4), other], 0, 2)


def of_optimizers(*kept: dict) -> list[dict]:
    return [
        {**state(rank, len(kept)), "optimizers": {"0": {"state": own, "param_groups": []}}}
        for rank, own in enumerate(kept)
    ]


def test_a_parameter_without_gradients_on_a_rank_has_moments_of_zero_there():
    """Then the mean of the ranks' moments stays, as that of their residuals does."""
    both, one = {"step": torch.tensor(7.0), "m": torch.ones(3)}, {"step": torch.tensor(5.0), "m": torch.full((3,), 4.0)}
    for ranks in ({0: both, 1: one}, {0: both}), ({0: both}, {0: both, 1: one}):
        kept = resized(of_optimizers(*ranks), 0, 1)["optimizers"]["0"]["state"]
        assert same(kept, {0: both, 1: {"step": torch.tensor(5.0), "m": torch.full((3,), 2.0)}})


def test_the_mean_of_moments_in_16_bits_is_rounded_once():
    """In bf16, 256 + 1 is 256. In fp16, 4 times 60000 is infinite."""
    bf16 = of_optimizers(*({0: {"m": torch.full((3,), x, dtype=torch.bfloat16)}} for x in (256.0, *[1.0] * 7)))
    fp16 = of_optimizers(*({0: {"m": torch.full((3,), 60000.0, dtype=torch.float16)}} for _ in range(4)))
    for states, mean in ((bf16, torch.tensor(263 / 8).bfloat16()), (fp16, torch.tensor(60000.0).half())):
        kept = resized(states, 0, 1)["optimizers"]["0"]["state"][0]["m"]
        assert torch.equal(kept, mean.expand(3))
        assert states[0]["optimizers"]["0"]["state"][0]["m"][0] in (256, 60000)


def test_with_twice_the_ranks_the_mean_of_the_moments_stays():
    old = of_optimizers(*({0: {"m": torch.full((3,), value)}} for value in (1.0, 2.0, 6.0)))
    new = [resized([old[source] for source in sources(rank, 6, 3)], rank, 6) for rank in range(6)]
    moments = [kept["optimizers"]["0"]["state"][0]["m"][0] for kept in new]
    assert moments == [1, 2, 6, 1, 2, 6]
    assert (
        torch.stack([kept["elements"]["residual"]["w"] for kept in new])
        .mean(0)
        .equal(torch.stack([each["elements"]["residual"]["w"] for each in old]).mean(0))
    )


def test_states_of_different_optimizers_have_no_mean():
    ranks = of_optimizers({0: {"exp_avg": torch.ones(3)}}, {0: {"momentum_buffer": torch.ones(3)}})
    with pytest.raises(
        ValueError, match=r"different kinds.*one keeps exp_avg, another one momentum_buffer\. Go on with"
    ):
        resized(ranks, 0, 1)


def test_a_rank_without_its_file_takes_replicated_state_from_another_ranks(tmp_path):
    paths = written(tmp_path / "a.ckpt", 3)
    os.remove(paths[1])
    for new in (3, 2):
        found, missing = sidecars.read(tmp_path / "a.ckpt", info(size=3), 1, new)
        assert missing == [1]
        assert not any(value.any() for value in found["elements"]["residual"].values())
        assert same(found["elements"]["common"], state()["elements"]["common"])
        assert same(found["segments"], state()["segments"])
        assert (found["rank"], found["size"], found["step"]) == (1, new, 3)


def test_links_and_moved_folders_are_followed(tmp_path):
    written(tmp_path / "a.ckpt")
    os.symlink("a.ckpt", tmp_path / "last.ckpt")
    assert same(sidecars.read(tmp_path / "last.ckpt", info(), 1, 2)[0], state(1))
    sidecars.prune(tmp_path / "last.ckpt")  # the link has no sidecar files
    os.mkdir(tmp_path / "elsewhere")
    for name in ("a.ckpt", "a.ckpt.residuals"):
        os.rename(tmp_path / name, tmp_path / "elsewhere" / name)
    assert same(sidecars.read(tmp_path / "elsewhere" / "a.ckpt", info(), 1, 2)[0], state(1))
    assert sidecars.read(tmp_path / "a.ckpt", info(), 1, 2)[0] is None


def test_pruning_removes_sidecar_files_of_other_tags_only(checkpoint):
    fs, root = fsspec.core.url_to_fs(sidecars.folder(checkpoint))

    def tags() -> set[str]:
        return {path.rsplit("/", 1)[1].split(".")[0] for path in fs.ls(root, detail=False)}

    for tag in ("a1", "a2", "a3"):
        written(checkpoint, tag=tag)
    fs.pipe_file(f"{root}/readme.txt", b"mine")
    fs.pipe_file(f"{root}/dead.rank0-of-2.pt.part", b"of a killed run")
    sidecars.prune(checkpoint, {"a2", "a3"})
    assert tags() == {"a2", "a3", "readme"}
    sidecars.prune(checkpoint)
    assert tags() == {"readme"}


def test_files_that_cannot_be_removed_are_a_warning(checkpoint, monkeypatch, caplog):
    def refused(fs, path):
        raise PermissionError(f"{path}: sticky folder")

    fs, _ = fsspec.core.url_to_fs(checkpoint)
    files = written(checkpoint)
    monkeypatch.setattr(type(fs), "rm_file", refused)
    sidecars.prune(checkpoint)
    assert [each.getMessage() for each in caplog.records] == [
        f"Sidecar files of earlier checkpoints {checkpoint!r} could not be removed: {files[0]}: sticky folder"
    ]


@pytest.mark.parametrize(("status", "expected"), [(403, "no file"), (500, "an error")])
def test_a_web_server_that_refuses_to_list_a_folder_has_none(status, expected, checkpoint, monkeypatch):
    class ClientResponseError(Exception):
        """As aiohttp's."""

        def __init__(self):
            self.status = status

    def ls(*_, **__):
        raise ClientResponseError

    fs, _ = fsspec.core.url_to_fs(checkpoint)
    monkeypatch.setattr(type(fs), "ls", ls)
    if expected == "no file":
        assert sidecars.read(checkpoint, info(), 0, 2) == (None, [0])
    else:
        with pytest.raises(ClientResponseError):
            sidecars.read(checkpoint, info(), 0, 2)


def test_equal_states_of_frozen_layers_restart_with_the_others():
    """Otherwise ranks with sidecar files would have another outer momentum than ranks without, once it is unfrozen."""
    states, layout = SegmentStates(method("diloco"), "update"), Layout.of({"a": (3,)}, "model")
    states.later = ["b"]
    states.allocate(layout, torch.device("cpu"))
    saved = states.state_dict()
    for per_param in saved["elements"].values():
        per_param |= {"a": torch.ones(3), "b": torch.ones(2)}
    states.load({**saved, "rank": 0})
    states.restart_equal_states()
    assert saved["resize"] == {"outer_momentum": "replicate"}
    assert same(states.state_dict()["elements"], {"outer_momentum": {"a": torch.zeros(3)}})


def test_a_path_that_only_the_checkpoint_io_knows_has_no_sidecar_files():
    path = "mydatabase://runs/1"
    assert sidecars.absolute(path) == path
    sidecars.prune(path)
    assert sidecars.read(path, info(), 0, 2) == (None, [0])
    with pytest.raises(ValueError, match="Protocol not known: mydatabase"):
        sidecars.write(path, TAG, state())


@pytest.mark.parametrize("at", [0, 1])
def test_a_full_disk_leaves_the_earlier_sidecar_files_and_no_others(at, tmp_path, monkeypatch):
    before = written(tmp_path / "a.ckpt")
    write = LocalFileOpener.write

    def full(self, data):
        assert self.path.endswith(".part")  # a file with its final name is complete
        write(self, bytes(data)[: 1000 * at])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileOpener, "write", full)
    with pytest.raises(OSError, match="No space left"):
        sidecars.write(tmp_path / "a.ckpt", "a2", state(0))
    monkeypatch.undo()
    assert sorted(map(str, (tmp_path / "a.ckpt.residuals").iterdir())) == before
    sidecars.write(tmp_path / "a.ckpt", "a2", state(0))
    sidecars.remove(tmp_path / "a.ckpt", "a2")
    assert sorted(map(str, (tmp_path / "a.ckpt.residuals").iterdir())) == before


def test_the_checksum_of_a_tensor_in_a_list_is_that_of_its_bytes():
    """An example is a learning rate that is a tensor, in an optimizer's groups."""
    groups = {"param_groups": [{"lr": torch.tensor(0.00123), "betas": (0.9, 0.999)}]}
    before = sidecars.checksum(groups)
    precision = torch._tensor_str.PRINT_OPTS.precision
    torch.set_printoptions(precision=2)
    try:
        assert sidecars.checksum(groups) == before
        assert sidecars.checksum({"param_groups": [{"lr": torch.tensor(0.00124), "betas": (0.9, 0.999)}]}) != before
    finally:
        torch.set_printoptions(precision=precision)


def test_the_checksum_sees_names_types_shapes_and_order():
    tensor = torch.tensor([1.0, 2.0])
    contents = [
        *({"a": tensor}, {"b": tensor}, {"a": tensor.double()}, {"a": tensor.view(2, 1)}, {"a": tensor.flip(0)}),
        *({"a": {"a": tensor}}, {"a": 1}, {"a": "1"}, {"a": None}, {}, {"a": torch.empty(0)}, {"a": torch.tensor(1)}),
        *({"a": tensor, "b": 1}, {"b": 1, "a": tensor}, {"a": tensor.bfloat16()}),
    ]
    assert len({sidecars.checksum(content) for content in contents}) == len(contents)
    strided = torch.arange(8.0).view(4, 2).t()
    assert sidecars.checksum({"a": strided}) == sidecars.checksum({"a": strided.contiguous()})


def test_a_folder_with_files_stays_in_a_file_system_whose_rmdir_removes_them(checkpoint, monkeypatch):
    """As Arrow's does, over HDFS."""
    fs, _ = fsspec.core.url_to_fs(checkpoint)
    rmdir = type(fs).rmdir

    def with_files(fs, path):
        for each in fs.ls(path, detail=False):
            fs.rm_file(each)
        rmdir(fs, path)

    monkeypatch.setattr(type(fs), "rmdir", with_files)
    written(checkpoint, tag="a1")
    written(checkpoint, tag="a2")
    sidecars.prune(checkpoint, {"a2"})
    assert sidecars.read(checkpoint, {**info(), "tag": "a2"}, 0, 2)[1] == []
    sidecars.prune(checkpoint)
    assert not fs.exists(sidecars.folder(checkpoint))


@pytest.mark.parametrize(("old", "new"), [(1, 2), (4, 2), (2, 3)])
def test_momentum_is_the_mean_of_old_ranks_or_that_of_one(old, new):
    def run(comm):
        reducer = Reducer(method("signum", beta=0.5), comm)
        reducer.reduce_({"a": torch.full((4,), float(1 + comm.rank))})
        return reducer.state_dict()

    states = simulate(old, run)
    for rank in range(new):
        found = resized([states[source] for source in sources(rank, new, old)], rank, new)
        same = [source for source in range(old) if source % new == rank % old % new] if old > new else [rank % old]
        expected = sum(0.5 * (1 + source) for source in same) / len(same)
        assert found["elements"]["momentum"]["a"].tolist() == [expected] * 4


def test_quantized_moments_are_those_of_one_rank():
    """Codes and scales of different ranks do not fit together."""
    codes = [torch.full((4,), rank, dtype=torch.uint8) for rank in range(4)]
    own = [{"state": {0: {"codes": x, "scales": x[:1].float()}}, "param_groups": []} for x in codes]
    states = [{**state(), "rank": rank, "size": 4, "optimizers": {"0": each}} for rank, each in enumerate(own)]
    for rank in range(2):
        found = resized([states[source] for source in sources(rank, 2, 4)], rank, 2)["optimizers"]["0"]["state"][0]
        assert (found["codes"].tolist(), found["scales"].tolist()) == ([rank] * 4, [rank])


def test_a_state_that_a_rank_lacks_counts_as_zeros():
    """As that of a frozen parameter, of a node whose files were lost."""
    states = [state(rank, 4) for rank in range(4)]
    del states[0]["elements"]["residual"]["b"]
    found = resized([states[rank] for rank in sources(0, 2, 4)], 0, 2)["elements"]["residual"]
    torch.testing.assert_close(found["b"], states[2]["elements"]["residual"]["b"] / 2)
    torch.testing.assert_close(found["w"], sum(states[rank]["elements"]["residual"]["w"] for rank in (0, 2)) / 2)
