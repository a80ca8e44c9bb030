"""Sidecar files: each rank's own state, mainly its residuals, next to the checkpoint that rank 0 writes.

    last.ckpt                                    # written by Lightning's CheckpointIO; contains the tag of this save
    last.ckpt.residuals/3f2a91c0.rank0-of-2.pt   # one file per rank, as large as the model or larger
    last.ckpt.residuals/3f2a91c0.rank1-of-2.pt

Each rank writes and reads its own sidecar file, so residuals never pass through another rank's memory. A save has three
steps:

1. Every rank writes its sidecar file under a tag that is new for each save.
2. When all sidecar files are complete, rank 0 writes the checkpoint, which contains the tag.
3. When the checkpoint is in place, rank 0 removes the sidecar files of earlier tags. Then all other ranks do the same,
   because nodes may have separate disks.

So a process may be killed at any moment: the checkpoint on disk always has matching sidecar files. Lightning writes a
checkpoint to a temporary folder first; only on the same disk it then gets its name at once. If you move or copy a
checkpoint, move or copy the folder too.

A sidecar file contains only tensors and primitives, and their checksum. The checksum is needed because torch.load
ignores the checksums of its zip files, so it would not detect a flipped bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from numbers import Integral, Real
from typing import Any

import fsspec
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.options import listed
from lightning_sparse.state import resized, sources

log = logging.getLogger(__name__)
KEY = "lightning_sparse"
"""Key of a checkpoint's entry about its sidecar files, such as their tag."""
VERSION = 1
MAX_RANKS = 2**20
NAMED = 8
"""Number of missing files, or of an optimizer's options, that a message names."""
READABLE = (Tensor, Mapping, list, tuple, Real, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that torch.load reads with weights_only=True."""


def absolute(checkpoint: str | os.PathLike[str]) -> str:
    """Return a path that denotes the same file on every rank, regardless of the working directory."""
    located = _locate(str(checkpoint))
    if located is not None and isinstance(located[0], LocalFileSystem):
        return os.path.abspath(located[1])
    return str(checkpoint)


def folder(checkpoint: str | os.PathLike[str]) -> str:
    """Return the path of the folder of a checkpoint's sidecar files."""
    head, slash, base = str(checkpoint).rstrip("/").rpartition("/")
    # On SLURM, Lightning resumes from the highest number in all names with "hpc_ckpt_", also names of folders.
    return f"{head}{slash}{base.replace('hpc_ckpt_', 'hpc_ckpt-')}.residuals"


def name(tag: str, rank: int, size: int) -> str:
    """Return the name of the sidecar file of one of `size` ranks under a tag."""
    return f"{tag}.rank{rank}-of-{size}.pt"


_NAME = re.compile(r"(?P<tag>[0-9a-f]+)\.rank(?P<rank>\d{1,7})-of-(?P<size>\d{1,7})\.pt(?P<part>\.part)?")


def write(checkpoint: str | os.PathLike[str], tag: str, state: Mapping[str, Any]) -> None:
    """Write the sidecar file of one rank atomically.

    Args:
        checkpoint: path of the checkpoint, in any file system that fsspec supports.
        tag: tag of this save, equal on all ranks.
        state: result of `Reducer.state_dict`.
    """
    content = {"version": VERSION, "tag": tag, "state": dict(state)}
    content["checksum"] = checksum(content)
    write_file(checkpoint, name(tag, state["rank"], state["size"]), partial(torch.save, content))


def write_file(checkpoint: str | os.PathLike[str], name: str, write: Callable[[Any], None]) -> None:
    """Write a file beside a checkpoint atomically, in its folder of sidecar files.

    Args:
        checkpoint: path of the checkpoint, in any file system that fsspec supports.
        name: name of the file.
        write: writes the content to an open binary file.
    """
    fs, root = fsspec.core.url_to_fs(folder(checkpoint))
    fs.makedirs(root, exist_ok=True)
    path = f"{root}/{name}"
    # In a file system with a native rename, the complete file gets its final name at the end. A killed process leaves
    # a "*.part" file, which `prune` removes. Object stores have no rename and show complete files only. For them fsspec
    # would copy the file, and would treat `[`, `*` and `?` in the path as a pattern.
    part = path if type(fs).mv is AbstractFileSystem.mv else f"{path}.part"
    try:
        with fs.open(part, "wb") as file:
            write(file)
        if part != path:
            fs.mv(part, path)
    except BaseException:
        if fs.exists(part):
            fs.rm_file(part)
        raise


def read(
    checkpoint: str | os.PathLike[str], info: Mapping[str, Any], rank: int, size: int
) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the state of one of `size` ranks, even if the checkpoint was written by another number of ranks.

    Args:
        checkpoint: path of the checkpoint; a link is followed.
        info: the checkpoint's entry under `KEY`.

    Returns:
        The state, or None if there is no sidecar file; and the old ranks whose sidecar files this rank needs but did
        not find.

    Raises:
        ValueError: a sidecar file is damaged, or belongs to another checkpoint.
    """
    check(info)
    tag, old = info["tag"], info["size"]
    files = find(checkpoint, tag, old)
    needed = [rank] if old == size else sources(rank, size, old)
    missing = [source for source in needed if source not in files]
    # State that is equal on all ranks must remain equal, so a rank without a file takes it from any other rank's.
    found = [source for source in needed if source in files] or sorted(files)[:1]
    if not found:
        return None, missing
    # A generator loads one file after the other, so that only one is in memory besides the sum.
    states = (load(*files[source], tag, source, old) for source in found)
    return next(states) if old == size and not missing else resized(states, rank, size), missing


def check(info: Mapping[str, Any]) -> None:
    """Raise ValueError unless `info` is a valid entry under `KEY`. The checkpoint may come from an untrusted source."""
    if info.get("version") != VERSION:
        raise ValueError(f"its sidecar files are of version {info.get('version')!r:.50}, this is {VERSION}")
    counts = [info.get(name) for name in ("size", "step", "skipped")]
    valid = all(isinstance(count, int) and 0 <= count < 2**63 for count in counts) and 1 <= info["size"] <= MAX_RANKS
    valid = valid and isinstance(info.get("optimizers", {}), Mapping)
    if not valid or not re.fullmatch("[0-9a-f]{1,64}", str(info.get("tag"))):
        raise ValueError(f"its entry about sidecar files is invalid: {dict(info)!r:.200}")


def _locate(path: str) -> tuple[AbstractFileSystem, str] | None:
    """Return the file system of a path and the path there; None if only the user's CheckpointIO can access it."""
    try:
        fs, path = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError):
        return None
    return fs, path


def _list(checkpoint: str | os.PathLike[str]) -> Iterator[tuple[AbstractFileSystem, str, re.Match[str]]]:
    """List the sidecar files of a checkpoint for all tags."""
    located = _locate(folder(checkpoint))
    if located is None:
        return
    fs, root = located
    fs.invalidate_cache(root)  # the cache lacks files that other ranks have written since
    try:
        paths = fs.ls(root, detail=False)
    except Exception as error:
        # A web server that lists no folders may refuse to list one that does not exist.
        if isinstance(error, FileNotFoundError) or getattr(error, "status", None) == 403:
            return
        raise
    for path in paths:
        if match := _NAME.fullmatch(path.rsplit("/", 1)[-1]):
            yield fs, path, match


def find(checkpoint: str | os.PathLike[str], tag: str, size: int) -> dict[int, tuple[AbstractFileSystem, str]]:
    """Return the sidecar files of a save by rank: their file systems, and their paths there.

    Args:
        checkpoint: path of the checkpoint; a link is followed.
        tag: tag of the save.
        size: number of ranks of the save.
    """
    files = {}
    for place in (os.path.realpath(checkpoint), checkpoint):
        for fs, path, match in _list(place):
            if (match["tag"], int(match["size"]), match["part"]) == (tag, size, None):
                files[int(match["rank"])] = fs, path
    return files


def load(fs: AbstractFileSystem, path: str, tag: str, rank: int, size: int) -> dict[str, Any]:
    """Return the content of a sidecar file.

    Args:
        fs, path: as `find` returns them.
        tag, rank, size: tag, rank and number of ranks of the save, which the file must have.

    Raises:
        ValueError: the file is damaged, or belongs to another checkpoint.
    """
    try:
        with fs.open(path, "rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        stored_checksum = content.pop("checksum")
        intact = stored_checksum == checksum(content) and _is_state(content["state"])
        names = (content["version"], content["tag"], content["state"]["rank"], content["state"]["size"])
    except Exception as error:  # torch.load raises many types of errors, with texts about zip files and pickles
        raise ValueError(f"{path!r} is damaged, or not a sidecar file: {type(error).__name__}") from error
    if not intact:
        raise ValueError(f"{path!r} is damaged: its checksum differs")
    if names != (VERSION, tag, rank, size):
        raise ValueError(f"{path!r} belongs to another checkpoint, rank or version than its name says")
    return dict(content["state"])


def _is_state(state: Mapping[str, Any]) -> bool:
    """Return whether a state has all entries that `Reducer.load_state_dict` and `resized` need. They check shapes."""
    elements = [(name, value) for name, per_param in state["elements"].items() for value in per_param.values()]
    segments = [(name, value) for kept in state["segments"].values() for name, value in kept.items()]
    return (
        all(isinstance(state[count], int) and state[count] >= 0 for count in ("step", "skipped"))
        and all(isinstance(value, Tensor) for _, value in elements + segments)
        and all(value.dtype == torch.float32 for _, value in elements)
        and {*state["elements"], *(name for name, _ in segments)} <= state["resize"].keys() & state["owners"].keys()
    )


def checksum(content: Any, so_far: int = 0) -> int:
    """Return the CRC-32 of nested dictionaries and lists of tensors and primitives. It takes half a second per GB."""
    if isinstance(content, list | tuple) and _holds_tensor(content):  # a learning rate may be a tensor
        content = dict(enumerate(content))
    if isinstance(content, Mapping):
        for key, value in content.items():
            so_far = checksum(value, zlib.crc32(repr(key).encode(), so_far))
        return so_far
    if isinstance(content, Tensor):
        so_far = zlib.crc32(repr((content.dtype, tuple(content.shape))).encode(), so_far)
        if parts := _inner_tensors(content):
            return checksum(parts, so_far)
        flat = content.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:  # an expanded tensor or a single element may not be viewable as bytes
            flat = flat.clone(memory_format=torch.contiguous_format)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, so_far)
    return zlib.crc32(repr(content).encode(), so_far)


def _inner_tensors(x: Tensor) -> dict[str, Tensor]:
    """Return the tensors in which a tensor subclass keeps its data, as 8-bit optimizers' states do; mostly none."""
    if type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return {}
    return {name: part for name, part in vars(x).items() if isinstance(part, Tensor)}  # torch.save writes these


def options_of(optimizer: Optimizer) -> list[str]:
    """Return the optimizer's options that all its parameter groups have; schedulers add other keys."""
    return [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]


def missing_options_message(optimizer: Optimizer, needed: Sequence[str], loaded: Mapping[str, Any]) -> str | None:
    """Return an error message if an optimizer lacks options after it has loaded a state with its parameter groups.

    AdamW can load Adam's parameter groups. When torch loads a state of an older version, it adds the new options.
    """
    lacks = [key for key in needed if any(key not in group for group in optimizer.param_groups)]
    if not lacks:
        return None
    has = dict.fromkeys(key for group in loaded.get("param_groups", ()) for key in group if key != "params")
    return (
        f"{type(optimizer).__name__} needs {listed(lacks, NAMED)}, but another kind of optimizer wrote these: their "
        f"parameter groups have {listed(list(has), NAMED)}"
    )


_warn_once = functools.cache(log.warning)


def plain(value: Any, name: str = "") -> Any:
    """Return a value as a sidecar file may hold it: tensors on the host, and Python numbers for NumPy numbers.

    Items of dictionaries that are other objects are left out, with a warning that begins with `name`, if it is given.
    """
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        odd = {key: x for key, x in value.items() if _is_odd(x)}
        if odd and name:
            kinds = listed(sorted({f"{key!r} ({type(item).__name__})" for key, item in odd.items()}), NAMED)
            _warn_once(
                f"The state of optimizer {name} has {kinds}, which a safe load cannot read. Each rank's own one is not "
                f"saved: after a resume it is rank 0's, or a new optimizer's."
            )
        return {key: plain(item, name) for key, item in value.items() if key not in odd}
    if isinstance(value, list | tuple):
        return type(value)(plain(item, name) for item in value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _is_odd(value: Any) -> bool:
    """Return whether a value, or an item of a list, is an object that torch.load does not read safely."""
    if not isinstance(value, READABLE) or isinstance(value, Enum) or hasattr(value, "_fields"):
        return True
    items = [*value] if isinstance(value, list | tuple) else []
    if isinstance(value, tuple):  # nothing can be put back into it
        items += [item for each in value if isinstance(each, Mapping) for item in each.values()]
    return any(map(_is_odd, items))


def put_back(into: Any, whole: Any) -> None:
    """Put the objects that `plain` leaves out of `whole` into the same places of dictionaries and lists."""
    for key, value in whole.items() if isinstance(whole, Mapping) else enumerate(whole):
        if _is_odd(value):
            into[key] = value
        elif isinstance(value, Mapping | list) and (key in into if isinstance(into, Mapping) else key < len(into)):
            put_back(into[key], value)


def fingerprints(content: Any) -> Any:
    """Return checksums of the values of nested dictionaries and lists of dictionaries, as nested dictionaries."""
    branches = _branches(content)
    return checksum(content) if branches is None else {key: fingerprints(value) for key, value in branches.items()}


def merge(present: Any, own: Any, saved: Any, changed: list[str], name: str = "") -> Any:
    """Return this rank's state, except for values that were changed in the checkpoint after it was saved.

    Args:
        present: current state in the checkpoint: nested dictionaries and lists of dictionaries.
        own: state of this rank, from its sidecar file.
        saved: `fingerprints` of rank 0's state at the time of the save.
        changed: list to which the names of changed, added and removed values are appended.
        name: prefix of these names.
    """
    parts = _branches(present), _branches(own), saved
    if any(not isinstance(part, Mapping) for part in parts):
        unchanged = fingerprints(present) == saved
        changed += [] if unchanged else [name]
        return own if unchanged else present
    here, mine, before = ({} if part is None else part for part in parts)
    merged = {}
    for key in dict.fromkeys((*mine, *here)):
        inner = f"{name}.{key}" if name else str(key)
        if key in here and key in mine and key in before:
            merged[key] = merge(here[key], mine[key], before[key], changed, inner)
        elif key in here and fingerprints(here[key]) != before.get(key):
            changed.append(inner)
            merged[key] = here[key]
        elif key in mine and key not in before:  # rank 0 had no value, because the parameter had no gradient there
            merged[key] = mine[key]
        elif key in mine:
            changed.append(inner)
    return [*merged.values()] if isinstance(own, list) else merged


def _branches(content: Any) -> Mapping[Any, Any] | None:
    """Return the values of a dictionary or of a list of dictionaries by key; None for any other type."""
    if isinstance(content, list) and content and all(isinstance(item, Mapping) for item in content):
        return dict(enumerate(content))
    return content if isinstance(content, Mapping) else None


def _holds_tensor(content: Any) -> bool:
    """Return whether nested dictionaries and lists contain a tensor. Its repr would depend on torch's print options."""
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, list | tuple) else ()
    return isinstance(content, Tensor) or any(map(_holds_tensor, parts))


def remove(checkpoint: str | os.PathLike[str], tag: str) -> None:
    """Remove the sidecar files of a failed save, after all ranks have written theirs."""
    _remove(checkpoint, lambda file: file["tag"] == tag)


def prune(checkpoint: str | os.PathLike[str], keep: Collection[str] = ()) -> None:
    """Remove the sidecar files of a checkpoint whose tags are not in `keep`, or warn that some remain."""
    try:
        _remove(checkpoint, lambda file: file["tag"] not in keep)
    except Exception as error:  # a leftover file is no reason to end training
        log.warning(f"Sidecar files of earlier checkpoints {str(checkpoint)!r} could not be removed: {error}")


def _remove(checkpoint: str | os.PathLike[str], unneeded: Callable[[re.Match[str]], bool]) -> None:
    """Remove sidecar files by their parsed names, and then the folder if it is empty."""
    for fs, path, file in list(_list(checkpoint)):
        if unneeded(file):
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                fs.rm_file(path)  # not `rm`, which treats `[`, `*` and `?` as a pattern
    located = _locate(folder(checkpoint))
    if located is not None:
        fs, root = located
        fs.invalidate_cache(root)
        with contextlib.suppress(OSError):  # the folder does not exist, or another rank has removed it
            if not fs.ls(root, detail=False):  # the rmdir of some file systems removes all files, too
                fs.rmdir(root)
