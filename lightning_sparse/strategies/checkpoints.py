"""The strategy's checkpoints: sidecar files beside Lightning's checkpoint, and errors that reach all ranks."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.options import listed
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.saves import Saves, warn_of_files_left, writes_at_once

if TYPE_CHECKING:
    from lightning_sparse.strategies.sparse_ddp import SparseDDP

log = logging.getLogger(__name__)

NAMED = 8
"""Number of missing sidecar files, or of an optimizer's options, that a message names."""


class Checkpoints:
    """Saves and restores the reducer's state, and the optimizers' states if they differ among ranks.

    All ranks call `save` and `load_optimizers` together. `remove` acts on rank 0 alone, because ranks may have
    different paths for one checkpoint. Nodes may have separate disks. So rank 0 reports the removed sidecar files to
    the other ranks, with the next save and at the end of training.

    Args:
        strategy: the strategy that Lightning calls.

    Attributes:
        strategy: the strategy. A copy of the strategy has a copy of this object.
        reducer: the reducer of the running fit, or of the last one, so that a checkpoint can be written afterwards.
            Copies have none.
        loaded_from: the path of the checkpoint that was loaded last.
        is_consistent: whether the reducer's state belongs to a complete step.
    """

    def __init__(self, strategy: SparseDDP) -> None:
        self.strategy = strategy
        self.reducer: Reducer | None = None
        self.is_consistent = True
        self.loaded_from: Any = None
        self._saves = Saves()  # filled on rank 0
        self._has_saved = False  # equal on all ranks

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "reducer": None}

    @property
    def _rank(self) -> int:
        return self.strategy.global_rank

    @property
    def _size(self) -> int:
        return self.strategy.world_size

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        write: Callable[[], None],
        remove: Callable[[Any], None],
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: its content.
            filepath: its path on this rank.
            write: Lightning's function that writes it.
            remove: Lightning's function that removes a checkpoint.
        """
        # Training does not resume from a checkpoint of weights alone.
        saved = self._write_sidecar(checkpoint, filepath) if "optimizer_states" in checkpoint else None
        path, tag = saved or (sidecars.absolute(filepath), None)
        save = self._saves.begin(path, tag) if self.strategy.is_global_zero else None
        error: Exception | None = None
        try:
            write()
        except Exception as caught:
            error = caught
        if save is not None and error is None:
            self._saves.returned(save, self.strategy.checkpoint_io)
            self._saves.sweep(remove)
        if tag is not None:
            self._raise_together(path, tag, error)
        elif error is not None:
            raise error

    def _write_sidecar(self, checkpoint: dict[str, Any], filepath: Any) -> tuple[str, str] | None:
        """Write this rank's sidecar file and its tag into the checkpoint.

        Returns:
            Rank 0's path of the checkpoint, and the tag; None if the checkpoint gets no residuals.
        """
        reducer = self.reducer
        if reducer is None:
            log.warning(
                f"{str(filepath)!r} gets no residuals: they belong to the processes that trained, which are not this "
                f"one. Save from within fit, with ModelCheckpoint for example."
            )
            return None
        agreed = self._agree(reducer, filepath)
        if agreed is None:
            return None
        path, tag = agreed
        error: Exception | None = None
        own = self._own_optimizer_states(reducer)
        try:
            sidecars.write(path, tag, {**reducer.state_dict(), **own})
        except Exception as caught:  # raised on all ranks below, so that none waits for another
            error = caught
        if errors := self._gather_errors(self._error_message(error)):
            sidecars.remove_own(path, tag, self._rank, self._size)
            raise OSError(
                f"The residuals of {path!r} could not be written ({errors[0]}). No checkpoint was written; an earlier "
                f"one of this name is as it was."
            ) from error
        self._has_saved = True
        checkpoint[sidecars.KEY] = {
            "version": sidecars.VERSION,
            "tag": tag,
            "size": reducer.comm.size,
            "step": reducer.step,
            "skipped": reducer.skipped,
            # They reveal later changes of the checkpoint, also by a hook while it is saved.
            **(sidecars.fingerprints(own) if self.strategy.is_global_zero else {}),
        }
        return path, tag

    def _own_optimizer_states(self, reducer: Reducer) -> dict[str, Any]:
        """Return the optimizers' states, on the host, if they differ among ranks."""
        if reducer.exchanged == "gradient":
            return {}
        return {"optimizers": {str(i): _plain(each.state_dict()) for i, each in enumerate(self.strategy.optimizers)}}

    def _agree(self, reducer: Reducer, filepath: Any) -> tuple[str, str] | None:
        """Agree on rank 0's path and on a tag; None if the ranks' residuals belong to different steps.

        Ranks may build different paths, for example from a metric that was logged without sync_dist. Rank 0 writes the
        checkpoint, so all sidecar files are beside its path.
        """
        exchanger, interrupted = self.strategy.exchanger, self.strategy.interrupted
        if self.strategy.may_be_alone and exchanger is not None:
            # A callback may save on an exception of this rank alone. The other ranks would wait for it in backward.
            exchanger.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
        if exchanger is not None:
            self.is_consistent = exchanger.drain()
        own = (sidecars.absolute(filepath), secrets.token_hex(8)), (reducer.step, self.is_consistent)
        try:
            ranks: list[Any] = self._gather(own) if self.strategy.all_ranks_present() else [own, None]
        except Exception:
            if not interrupted:
                raise
            ranks = [own, None]  # a rank has ended
        (path, tag), moment = ranks[0]
        if self.is_consistent and all(rank is not None and rank[1] == moment for rank in ranks):
            return str(path), str(tag)
        if self._rank == 0:
            log.warning(
                f"{path!r} gets no residuals: training failed in the middle of a step, and a part of that step is in "
                f"them. A run that goes on from it starts with empty ones."
            )
        return None

    def _raise_together(self, path: str, tag: str, error: Exception | None) -> None:
        """Raise an error on all ranks if rank 0 could not write the checkpoint."""
        # Any other CheckpointIO may have written the checkpoint despite the error, or may write it later.
        failed = error is not None and writes_at_once(self.strategy.checkpoint_io)
        own = self._error_message(error), failed, self._saves.take_pruned()
        messages, failures, pruned = zip(*self._gather(own), strict=True)
        self._prune(pruned[0])
        if not any(messages):
            return
        if failures[0]:
            sidecars.remove_own(path, tag, self._rank, self._size)
        raise OSError(
            f"{path!r} could not be written ({next(filter(None, messages))}). An earlier one of this name is as it was."
        ) from error

    def _prune(self, pruned: Mapping[str, set[str]]) -> None:
        """Remove on this node's disk the sidecar files that rank 0 has removed."""
        for path, keep in pruned.items() if self._rank else ():
            try:
                sidecars.prune(path, keep)
            except Exception as error:  # a leftover file is no reason to end training
                warn_of_files_left(path, error)

    def end_training(self) -> None:
        """Remove sidecar files on all nodes at the end of training. All ranks call it."""
        if self._has_saved:
            self._prune(self._gather(self._saves.take_pruned())[0])

    def _gather(self, own: Any) -> list[Any]:
        if not dist.is_initialized():
            return [own]
        ranks: list[Any] = [None] * self._size
        dist.all_gather_object(ranks, own)
        return ranks

    def _error_message(self, error: Exception | None) -> str | None:
        return None if error is None else f"rank {self._rank}: {type(error).__name__}: {error}"

    def _gather_errors(self, own: str | None) -> list[str]:
        """Return the error messages of all ranks that have one."""
        return [text for text in self._gather(own) if text]

    def remove(self, filepath: Any, remove: Callable[[Any], None]) -> None:
        """Remove a checkpoint, by Lightning's function `remove`, and its sidecar files."""
        if self.strategy.is_global_zero:
            self._saves.remove(sidecars.absolute(filepath), filepath, remove)

    def close(self, teardown: Callable[[], None], remove: Callable[[Any], None]) -> None:
        """Wait for all saves in Lightning's `teardown`; then remove the files whose removal was deferred."""
        try:
            teardown()
            self._saves.confirm_earlier()  # CheckpointIO.teardown has waited for all saves
        finally:
            self._saves.sweep(remove)

    def load_optimizers(self, checkpoint: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        """Load the optimizers' states and the reducer's state.

        Args:
            checkpoint: the content of the checkpoint at `loaded_from`.
            load: Lightning's function that loads the optimizers' states.
        """
        self._load_rank_0s_optimizers(checkpoint, load)
        info = checkpoint.get(sidecars.KEY)
        reducer = self.reducer
        if reducer is None:  # this process has forked or spawned the ranks, for example
            if info is not None:
                log.warning(
                    f"The residuals of {str(self.loaded_from)!r} are not loaded: they belong to processes that train, "
                    f"and this one does not. Pass ckpt_path to fit."
                )
            return
        reducer.reset()
        if info is None:
            if self._rank == 0:
                self.strategy.inform(f"{str(self.loaded_from)!r} holds no residuals: they start at 0.")
            return
        error: str | None = None
        missing: list[int] = []
        changed: list[str] = []
        try:
            sidecars.check(info)
            state, missing = sidecars.read(self.loaded_from, info, self._rank, self._size)
            if state is not None:
                reducer.load_state_dict(state)
                if reducer.exchanged == "update":
                    self._load_own_optimizers(checkpoint, info, state.get("optimizers", {}), changed)
            reducer.step, reducer.gradient_check.skipped = info["step"], info["skipped"]
        except Exception as caught:
            error = f"rank {self._rank}: {caught}"
        folder = sidecars.folder(self.loaded_from)
        if errors := self._gather_errors(error):
            raise ValueError(
                f"The residuals of {str(self.loaded_from)!r} cannot be loaded ({errors[0]}). If a sidecar file is "
                f"damaged or foreign: remove {folder!r} to go on without, at the price of the gradients that had not "
                f"been sent yet."
            )
        if changed and self._rank == 0:
            self.strategy.inform(
                f"The optimizers' states of {str(self.loaded_from)!r} are not as they were saved, by a hook for "
                f"example. All ranks take the changed values from the checkpoint, and the others from their sidecar "
                f"files: {listed(changed, NAMED)}."
            )
        # A foreign checkpoint may claim a million files. So each rank sends only a few, and the warning names a few.
        lost = sorted({rank for ranks in self._gather(missing[: NAMED + 1]) for rank in ranks})
        if lost and self._rank == 0:
            names = [sidecars.name(info["tag"], rank, info["size"]) for rank in lost]
            log.warning(
                f"{listed(names, NAMED)} not found in {folder!r}: the residuals in "
                f"them are lost, and these workers start with empty ones. Move the folder along with the checkpoint."
            )

    def _load_own_optimizers(
        self, checkpoint: Mapping[str, Any], info: Mapping[str, Any], own: Any, changed: list[str]
    ) -> None:
        """Load the optimizers' states of this rank, except for values that were changed in the checkpoint.

        Args:
            checkpoint: its content.
            info: its entry about sidecar files.
            own: the states in this rank's sidecar file.
            changed: gets the names of the changed values.
        """
        if (saved := info.get("optimizers")) is not None:
            present = {str(i): _plain(each) for i, each in enumerate(checkpoint["optimizer_states"])}
            own = sidecars.merge(present, own, saved, changed)
        for i, optimizer in enumerate(self.strategy.optimizers):
            if str(i) in own:
                needed = _options(optimizer)
                optimizer.load_state_dict(own[str(i)])
                if foreign := _missing_options_message(optimizer, needed, own[str(i)]):
                    raise ValueError(foreign)

    def _load_rank_0s_optimizers(
        self, checkpoint: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Load the optimizers' states that Lightning has saved, on all ranks or on none."""
        error: Exception | None = None
        optimizers = self.strategy.optimizers
        needed = [*map(_options, optimizers)]
        try:
            load(checkpoint)
        except Exception as caught:  # a KeyError, for example, for the state of another kind of optimizer
            error = caught
        found = map(_missing_options_message, optimizers, needed, checkpoint["optimizer_states"])
        foreign = next(filter(None, found), None)
        if errors := self._gather_errors(foreign or self._error_message(error)):
            path = str(self.loaded_from)
            raise ValueError(
                f"The optimizers' states of {path!r} cannot be loaded ({errors[0]}). Resume with the optimizers that "
                f"wrote them; or, to change the optimizer, start from the weights alone: "
                f"{type(self.strategy.lightning_module).__name__}.load_from_checkpoint({path!r}), and fit without "
                f"ckpt_path."
            ) from error


def _options(optimizer: Optimizer) -> list[str]:
    """Return the optimizer's options that all its parameter groups have; schedulers add other keys."""
    return [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]


def _missing_options_message(optimizer: Optimizer, needed: Sequence[str], loaded: Mapping[str, Any]) -> str | None:
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


def _plain(value: Any) -> Any:
    """Return a value as a sidecar file may hold it: tensors on the host, and Python numbers for NumPy numbers."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
