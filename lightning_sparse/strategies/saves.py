"""Rank 0's record of saves. It decides when sidecar files may be removed."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import pending_error

log = logging.getLogger(__name__)


@dataclass
class Save:
    """One call of `CheckpointIO.save_checkpoint`.

    Attributes:
        tags: the tags of its sidecar files; none for a checkpoint without sidecar files.
        returned: whether the call has returned without an error. Until then its outcome is unknown.
        written: whether the checkpoint is known to be written.
        executor_error: the error of this or an earlier save, or None. The executor of AsyncCheckpointIO sets it after
            this save.
    """

    tags: tuple[str, ...]
    returned: bool = False
    written: bool = False
    executor_error: Future[BaseException | None] | None = None

    @property
    def in_place(self) -> bool:
        if self.executor_error is not None:
            return self.executor_error.done() and self.executor_error.result() is None
        return self.written


class Saves:
    """The saves whose sidecar files cannot be pruned yet, oldest first, by path of the checkpoint.

    Each CheckpointIO has its format, so this class never reads checkpoints. A save is in place

    - when `save_checkpoint` has returned, for the CheckpointIOs of Lightning that write at once;
    - when the executor has finished the save without an error, for AsyncCheckpointIO;
    - when the next save has returned, for any other CheckpointIO, because it may write asynchronously. This keeps the
      sidecar files of one save more than necessary.

    The sidecar files of the newest save in place stay, and the sidecar files of all later saves.
    """

    def __init__(self) -> None:
        self._saves: dict[str, list[Save]] = {}
        self._unwanted: dict[str, Any] = {}  # checkpoints to remove when they are in place
        self._pruned: dict[str, set[str]] = {}  # kept tags by path, not yet reported to other ranks

    def begin(self, path: str, tags: tuple[str, ...]) -> Save:
        """Record a save before `CheckpointIO.save_checkpoint` is called, because even Ctrl-C may leave a checkpoint."""
        save = Save(tags)
        self._saves.setdefault(path, []).append(save)
        self._unwanted.pop(path, None)
        self._pruned.pop(path, None)
        return save

    def take_pruned(self) -> dict[str, set[str]]:
        """Return the kept tags of the checkpoints whose sidecar files were pruned since the last call, by path.

        Other ranks may have another disk. They prune the same sidecar files.
        """
        pruned, self._pruned = self._pruned, {}
        return pruned

    def returned(self, save: Save, io: Any) -> None:
        """Record that `io.save_checkpoint` has returned without an error."""
        self.confirm_earlier()
        save.returned, save.written, save.executor_error = True, writes_at_once(io), _executor_error(io)

    def confirm_earlier(self) -> None:
        """Mark all returned saves as written, because a later save has returned or the CheckpointIO has ended."""
        for save in (save for saves in self._saves.values() for save in saves):
            save.written = save.returned

    def remove(self, path: str, filepath: Any, io: Any) -> None:
        """Remove a checkpoint and its sidecar files, when no save of it is pending.

        Args:
            path: absolute path of the checkpoint.
            filepath: its path from Lightning.
            io: the CheckpointIO.
        """
        # If a checkpoint is removed before AsyncCheckpointIO writes it, it appears afterwards and stays.
        if any(save.returned and not save.in_place for save in self._saves.get(path, [])):
            self._unwanted[path] = filepath
        else:
            io.remove_checkpoint(filepath)
            self._saves.pop(path, None)
            self._prune(path, set())

    def _prune(self, path: str, keep: set[str]) -> None:
        self._pruned[path] = keep
        sidecars.prune(path, keep)

    def sweep(self, io: Any) -> None:
        """Remove the sidecar files of overwritten checkpoints, and the checkpoints whose removal was deferred."""
        for path, saves in list(self._saves.items()):
            last = max((index for index, save in enumerate(saves) if save.in_place), default=None)
            if last is None:
                continue
            del saves[:last]
            try:
                if len(saves) == 1:
                    del self._saves[path]
                    if path in self._unwanted:
                        self.remove(path, self._unwanted.pop(path), io)
                        continue
                self._prune(path, {tag for save in saves for tag in save.tags})
            except Exception as error:  # a leftover file is no reason to end training
                log.warning(f"The checkpoint {path!r} could not be removed: {error}")


def snapshot(state: dict[str, Any], io: Any) -> dict[str, Any]:
    """Return a state for a CheckpointIO: with copies of its tensors on the CPU, unless the CheckpointIO writes at once.

    Another one may write after the next step, which changes weights and moments. During an exchange of updates, the
    memory of the weights holds updates.
    """
    if writes_at_once(io):
        return state
    copies: dict[Any, Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            return x.detach().to("cpu", copy=True)
        place = x.data_ptr(), x.dtype, x.shape, x.stride()  # tied weights stay tied
        copies[place] = found = copies.get(place, x.detach().to("cpu", copy=True))
        return found

    result = copy.copy(state)  # it keeps a module's versions, which are an attribute
    for name, value in state.items():
        result[name] = apply_to_collection(value, Tensor, copied, allow_frozen=True)
    return result


def writes_at_once(io: Any) -> bool:
    """Return whether a CheckpointIO is known to write a checkpoint within `save_checkpoint`, and only there."""
    return type(io).__module__.startswith(("lightning_fabric.plugins.io.", "lightning.fabric.plugins.io."))


def _executor_error(io: Any) -> Future[BaseException | None] | None:
    """Return a future of AsyncCheckpointIO's error, set when all its saves so far have ended; None for others."""
    asynchronous = []
    while io is not None:
        names = [f"{cls.__module__}.{cls.__name__}" for cls in type(io).__mro__]
        if any(name.endswith(".plugins.io.async_plugin.AsyncCheckpointIO") for name in names):  # in either namespace
            asynchronous.append(io)
        io = getattr(io, "checkpoint_io", None)
    return pending_error(asynchronous[0]) if len(asynchronous) == 1 else None
