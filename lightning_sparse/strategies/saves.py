"""Which saves are in place: rank 0's record, which decides when sidecar files may be removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import pending_error

log = logging.getLogger(__name__)


@dataclass
class Save:
    """One call of `CheckpointIO.save_checkpoint`.

    Attributes:
        tag: of its sidecar files; None for a checkpoint without any.
        returned: whether the call has returned without an error; until then its outcome is unknown.
        written: whether the checkpoint is known to have been written.
        executor_error: the executor of AsyncCheckpointIO sets it after this save: to the error of this or an earlier
            save, or None.
    """

    tag: str | None
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

    The format of a checkpoint is its CheckpointIO's own, so checkpoints are never read here. A save is in place

    - once `save_checkpoint` has returned, if the CheckpointIO is one of Lightning's own that write at once;
    - once its executor has finished the save without an error, if the CheckpointIO is an AsyncCheckpointIO;
    - for any other CheckpointIO, once the next save has returned: it may write asynchronously. This keeps the sidecar
      files of one save more than needed.

    The sidecar files of the newest save that is in place, and of all later ones, stay.
    """

    def __init__(self) -> None:
        self._saves: dict[str, list[Save]] = {}
        self._unwanted: dict[str, Any] = {}  # checkpoints to remove once they are in place
        self._pruned: dict[str, set[str]] = {}  # tags kept, by path, of what other ranks have not heard of yet

    def begin(self, path: str, tag: str | None) -> Save:
        """Record a save before `CheckpointIO.save_checkpoint` is called, as even Ctrl-C may leave a checkpoint."""
        save = Save(tag)
        self._saves.setdefault(path, []).append(save)
        self._unwanted.pop(path, None)
        self._pruned.pop(path, None)
        return save

    def take_pruned(self) -> dict[str, set[str]]:
        """Return which tags were kept of the checkpoints whose sidecar files were pruned since the last call, by path.

        Other ranks prune alike: they may have a disk of their own.
        """
        pruned, self._pruned = self._pruned, {}
        return pruned

    def returned(self, save: Save, io: Any) -> None:
        """Record that `io.save_checkpoint` has returned without an error."""
        self.confirm_earlier()
        save.returned, save.written, save.executor_error = True, writes_at_once(io), _executor_error(io)

    def confirm_earlier(self) -> None:
        """Take all saves that have returned for written: a later save has returned, or the CheckpointIO has ended."""
        for save in (save for saves in self._saves.values() for save in saves):
            save.written = save.returned

    def remove(self, path: str, filepath: Any, remove: Callable[[Any], None]) -> None:
        """Remove a checkpoint and its sidecar files, once no save of it is pending.

        Args:
            path: absolute path of the checkpoint.
            filepath: its path as Lightning gives it.
            remove: `CheckpointIO.remove_checkpoint`.
        """
        # Removed while AsyncCheckpointIO has yet to write it, the checkpoint would appear afterwards and stay.
        if any(save.returned and not save.in_place for save in self._saves.get(path, [])):
            self._unwanted[path] = filepath
        else:
            remove(filepath)
            self._saves.pop(path, None)
            self._prune(path, set())

    def _prune(self, path: str, keep: set[str]) -> None:
        self._pruned[path] = keep
        sidecars.prune(path, keep)

    def sweep(self, remove: Callable[[Any], None]) -> None:
        """Remove the sidecar files of overwritten checkpoints, and the checkpoints whose removal had to wait."""
        for path, saves in list(self._saves.items()):
            last = max((index for index, save in enumerate(saves) if save.in_place), default=None)
            if last is None:
                continue
            del saves[:last]
            try:
                if len(saves) == 1:
                    del self._saves[path]
                    if path in self._unwanted:
                        self.remove(path, self._unwanted.pop(path), remove)
                        continue
                self._prune(path, {save.tag for save in saves if save.tag is not None})
            except Exception as error:  # not worth ending a training for
                warn_of_files_left(path, error)


def warn_of_files_left(path: str, error: Exception) -> None:
    """Warn that sidecar files of a checkpoint could not be removed."""
    log.warning(f"Sidecar files of earlier checkpoints {path!r} could not be removed: {error}")


def writes_at_once(io: Any) -> bool:
    """Whether a CheckpointIO is known to have written a checkpoint when `save_checkpoint` returns, and only then."""
    return type(io).__module__.startswith(("lightning_fabric.plugins.io.", "lightning.fabric.plugins.io."))


def _executor_error(io: Any) -> Future[BaseException | None] | None:
    """Return a future of the error of AsyncCheckpointIO, set once all its saves so far have ended; None for others."""
    asynchronous = [layer for layer in _layers(io) if any(map(_is_async, type(layer).__mro__))]
    return pending_error(asynchronous[0]) if len(asynchronous) == 1 else None


def _layers(io: Any) -> Iterator[Any]:
    while io is not None:
        yield io
        io = getattr(io, "checkpoint_io", None)


def _is_async(cls: type) -> bool:
    """Whether this is AsyncCheckpointIO, of either of Lightning's namespaces."""
    return f"{cls.__module__}.{cls.__name__}".endswith(".plugins.io.async_plugin.AsyncCheckpointIO")
