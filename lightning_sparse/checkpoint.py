"""Side files: what each rank must keep to go on, beside the checkpoint that rank 0 writes.

    last.ckpt                                    # Lightning's own; names the tag of the side files that belong to it
    last.ckpt.residuals/3f2a91c0.rank0-of-2.pt   # one per rank, about the size of the gradients
    last.ckpt.residuals/3f2a91c0.rank1-of-2.pt

State never passes through another rank's memory. Side files are complete before the checkpoint that names them is
written, and older ones go only when no checkpoint on disk names them any more: whenever a process is killed, the
checkpoint on disk has its own. They travel with it if the folder is moved or copied along.

Each holds tensors and primitives only, and a checksum of them: torch.load does not look at those of its zip files, so
a flipped bit would go unnoticed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zlib
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any
from zipfile import BadZipFile, ZipFile

import fsspec
import torch
from torch import Tensor

from lightning_sparse.reducer import resized

KEY = "lightning_sparse"
"""Under which a checkpoint says what belongs to it."""
VERSION = 1
MOST_RANKS = 2**20


def folder(checkpoint: str | os.PathLike[str]) -> str:
    """Return where the side files of a checkpoint lie."""
    return f"{os.fspath(checkpoint).rstrip('/')}.residuals"


def write(checkpoint: str | os.PathLike[str], tag: str, state: Mapping[str, Any]) -> None:
    """Write one rank's side file, atomically.

    Args:
        checkpoint: path of the checkpoint, any that fsspec knows.
        tag: of this checkpoint, equal on all ranks.
        state: from `Reducer.state_dict`.
    """
    fs, root = fsspec.core.url_to_fs(folder(checkpoint))
    fs.makedirs(root, exist_ok=True)
    name = f"{root}/{_name(tag, state['rank'], state['size'])}"
    content = {"version": VERSION, "tag": tag, "state": dict(state)}
    buffer = io.BytesIO()
    torch.save({**content, "checksum": checksum(content)}, buffer)
    # Beside its final place, so that the move is a rename. A killed process leaves it behind, and `clean` takes it.
    part = f"{name}.part"
    try:
        with fs.open(part, "wb") as file:
            file.write(buffer.getbuffer())
        fs.mv(part, name)
    except BaseException:
        if fs.exists(part):
            fs.rm(part)
        raise


def read(
    checkpoint: str | os.PathLike[str], info: Mapping[str, Any], rank: int, size: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the state for one of `size` ranks, whatever their number was when the checkpoint was written.

    Args:
        checkpoint: path of the checkpoint; a link is followed.
        info: what the checkpoint holds under `KEY`.

    Returns:
        The state, None where there is nothing, and the names of the side files that this rank needs and did not find.

    Raises:
        ValueError: a side file is torn, or belongs to another checkpoint.
    """
    check(info)
    old = info["size"]
    # One after the other, so that no more than one is in memory beside the sum.
    found, missing = [], []
    for source in [rank] if old == size else sorted({0} | set(range(rank, old, size))):
        path = _find(checkpoint, info["tag"], source, old)
        if path is None:
            missing.append(_name(info["tag"], source, old))
        else:
            found.append((path, source))
    own = old == size and not missing
    if not found:
        # What is equal on all ranks must stay so: of that, any other rank's file will do.
        others = ((_find(checkpoint, info["tag"], source, old), source) for source in range(old))
        found = list(islice(((path, source) for path, source in others if path is not None), 1))
    if not found:
        return None, missing
    states = (_load(path, info["tag"], source, old) for path, source in found)
    return next(states) if own else resized(states, rank, size), missing


def check(info: Mapping[str, Any]) -> None:
    """Raise ValueError unless this is what a checkpoint holds under `KEY`: a stranger may have written it."""
    if info.get("version") != VERSION:
        raise ValueError(f"its side files are of version {info.get('version')!r}, this is {VERSION}")
    counts = [info.get(name) for name in ("size", "step", "skipped")]
    good = all(isinstance(count, int) and 0 <= count < 2**63 for count in counts) and 1 <= info["size"] <= MOST_RANKS
    if not good or not re.fullmatch("[0-9a-f]+", str(info.get("tag"))):
        raise ValueError(f"what it says about its side files makes no sense: {dict(info)!r:.200}")


def _find(checkpoint: str | os.PathLike[str], tag: str, rank: int, size: int) -> str | None:
    for place in (checkpoint, os.path.realpath(checkpoint)):
        fs, root = fsspec.core.url_to_fs(folder(place))
        path = f"{root}/{_name(tag, rank, size)}"
        if fs.exists(path):
            return str(fs.unstrip_protocol(path))
    return None


def _load(path: str, tag: str, rank: int, size: int) -> dict[str, Any]:
    try:
        with fsspec.open(path, "rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        told = content.pop("checksum")
        sound = told == checksum(content) and _is_state(content["state"])
        names = (content["version"], content["tag"], content["state"]["rank"], content["state"]["size"])
    except Exception as error:  # of many kinds, with what torch says about zip files and pickles
        raise ValueError(f"{path!r} is torn, or not one of ours: {type(error).__name__}") from error
    if not sound:
        raise ValueError(f"{path!r} is torn: its checksum differs")
    if names != (VERSION, tag, rank, size):
        raise ValueError(f"{path!r} belongs to another checkpoint, rank or version than its name says")
    return dict(content["state"])


def _is_state(state: Mapping[str, Any]) -> bool:
    """Whether all is there that `Reducer.load_state_dict` and `resized` look at; they check the sizes."""
    elements = [(name, value) for name, per_param in state["elements"].items() for value in per_param.values()]
    segments = [(name, value) for kept in state["segments"].values() for name, value in kept.items()]
    return (
        all(isinstance(state[count], int) and state[count] >= 0 for count in ("step", "skipped"))
        and all(isinstance(value, Tensor) for _, value in elements + segments)
        and all(value.dtype == torch.float32 for _, value in elements)
        and {*state["elements"], *(name for name, _ in segments)} <= state["resize"].keys() & state["owners"].keys()
    )


def checksum(content: Any, so_far: int = 0) -> int:
    """Return the CRC-32 of nested dictionaries of tensors and primitives, half a second per GB."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            so_far = checksum(value, zlib.crc32(repr(key).encode(), so_far))
        return so_far
    if isinstance(content, Tensor):
        so_far = zlib.crc32(repr((content.dtype, tuple(content.shape))).encode(), so_far)
        return zlib.crc32(content.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, so_far)
    return zlib.crc32(repr(content).encode(), so_far)


def discard(checkpoint: str | os.PathLike[str], tag: str, rank: int, size: int) -> None:
    """Remove one rank's side file of a checkpoint that will not be written, if it is there."""
    fs, root = fsspec.core.url_to_fs(folder(checkpoint))
    if fs.exists(path := f"{root}/{_name(tag, rank, size)}"):
        fs.rm(path)
    with contextlib.suppress(OSError):
        fs.rmdir(root)  # refused unless it is empty


def remove(checkpoint: str | os.PathLike[str]) -> None:
    """Remove the side files of a checkpoint, if there are any."""
    fs, root = fsspec.core.url_to_fs(folder(checkpoint))
    if fs.exists(root):
        fs.rm(root, recursive=True)


def clean(checkpoint: str | os.PathLike[str], written: list[str]) -> bool:
    """Remove side files of earlier checkpoints that were overwritten in the same place.

    Args:
        written: tags that this process has written there, in order. Shortened to those that must stay: the one that
            the checkpoint on disk names, and later ones, whose checkpoints are still on their way.

    Returns:
        Whether the last of them is on disk.
    """
    fs, root = fsspec.core.url_to_fs(folder(checkpoint))
    if not fs.exists(root):
        return False
    found = {path: _NAME.fullmatch(path.rsplit("/", 1)[-1]) for path in fs.ls(root, detail=False)}
    named = named_on_disk(checkpoint, {match["tag"] for match in found.values() if match})
    if named is None:
        return False
    if named in written:
        del written[: written.index(named)]
    for path, match in found.items():
        if match and match["tag"] not in (named, *written):
            fs.rm(path)
    return written[-1:] == [named]


def named_on_disk(checkpoint: str | os.PathLike[str], tags: Collection[str]) -> str | None:
    """Return which of the tags the checkpoint on disk names; None if it is not there, or names none."""
    fs, path = fsspec.core.url_to_fs(os.fspath(checkpoint))
    try:
        # A look at the text of the pickle is enough: nothing of it is run, and no tensor is read.
        with fs.open(path, "rb") as file, ZipFile(file) as archive:
            text = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    except (FileNotFoundError, BadZipFile, StopIteration):
        return None
    return next((tag for tag in tags if tag.encode() in text), None)


def _name(tag: str, rank: int, size: int) -> str:
    return f"{tag}.rank{rank}-of-{size}.pt"


_NAME = re.compile(r"(?P<tag>[0-9a-f]+)\.rank\d+-of-\d+\.pt(\.part)?")
