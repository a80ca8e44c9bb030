"""The strategy's checkpoints: sidecar files beside Lightning's checkpoint, and errors that reach all ranks."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.options import listed
from lightning_sparse.reducer import Reducer
from lightning_sparse.replica_checkpoint import gather
from lightning_sparse.strategies.saves import Saves, writes_at_once

if TYPE_CHECKING:
    from lightning_sparse.strategies.base import SparseStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The state of one model's exchange in a checkpoint.

    Attributes:
        reducer: has the residuals.
        optimizers: the optimizers of the model, by the names that their states have in sidecar files.
        is_consistent: whether the reducer's state belongs to a complete step.
        gradients_wait: on rank 0, whether exchanged gradients wait for a step of these optimizers.
    """

    reducer: Reducer
    optimizers: Mapping[str, Optimizer]
    is_consistent: bool = True
    gradients_wait: bool = False

    @property
    def own_optimizer_states(self) -> dict[str, Any]:
        """The states of the optimizers, on the host, if they differ among ranks."""
        if self.reducer.exchanged == "gradient":
            return {}
        warns = self.reducer.comm.rank == 0
        named = self.optimizers.items()
        return {"optimizers": {name: sidecars.plain(each.state_dict(), name if warns else "") for name, each in named}}


Infos = list[dict[str, Any]]
"""The entry about sidecar files of each part, see `checkpoint.KEY`."""


class Checkpoints:
    """Saves and restores the states of reducers, and the optimizers' states if they differ among ranks.

    All ranks call `save`, `load` and `load_together` together. `remove` acts on rank 0 alone, because ranks may have
    different paths for one checkpoint. Nodes may have separate disks. So rank 0 reports the removed sidecar files to
    the other ranks, with the next save and at the end of training.

    Args:
        strategy: the strategy that Lightning calls.

    Attributes:
        strategy: the strategy. A copy of the strategy has a copy of this object.
        has_saved: whether sidecar files have been written; equal on all ranks.
    """

    def __init__(self, strategy: SparseStrategy) -> None:
        self.strategy = strategy
        self._saves = Saves()  # filled on rank 0
        self.has_saved = False

    @property
    def _rank(self) -> int:
        return int(self.strategy.global_rank)

    def save(
        self, parts: Sequence[Part], enter: Callable[[Infos], None], filepath: Any, write: Callable[[], None]
    ) -> None:
        """Save a checkpoint.

        Args:
            parts: the exchanges whose states belong to it.
            enter: puts the entries about sidecar files into the checkpoint, unless it gets no sidecar files.
            filepath: its path on this rank.
            write: Lightning's function that writes it.
        """
        saved = self._write_sidecars(parts, filepath) if parts else None
        path, infos = saved or (sidecars.absolute(filepath), [])
        if infos:
            enter(infos)
        tags = tuple(info["tag"] for info in infos)
        save = self._saves.begin(path, tags) if self.strategy.is_global_zero else None
        error: Exception | None = None
        try:
            write()
        except Exception as caught:
            error = caught
        if save is not None and error is None:
            self._saves.returned(save, self.strategy.checkpoint_io)
            self._saves.sweep(self.strategy.checkpoint_io)
        if tags:
            self._raise_together(path, tags, error)
        elif error is not None:
            raise error

    def _write_sidecars(self, parts: Sequence[Part], filepath: Any) -> tuple[str, Infos] | None:
        """Write this rank's sidecar file of each part.

        Returns:
            Rank 0's path of the checkpoint, and the entries; None if the checkpoint gets no residuals.
        """
        agreed = self._agree(parts, filepath)
        if agreed is None:
            return None
        path, tags = agreed
        if self._rank == 0 and any(part.gradients_wait for part in parts):
            log.warning(
                f"{path!r} is saved between a backward pass and the optimizer's step: it lacks the gradients of this "
                f"step, and its residuals lack the entries that ranks sent for them. Save after the step, as in "
                f"on_train_batch_end."
            )
        error: Exception | None = None
        owns: list[dict[str, Any]] = []
        try:
            for part, tag in zip(parts, tags, strict=True):
                owns.append(part.own_optimizer_states)
                sidecars.write(path, tag, {**part.reducer.state_dict(), **owns[-1]})
        except Exception as caught:  # raised on all ranks below, so that none waits for another
            error = caught
        if errors := self._gather_errors(self._error_message(error)):
            for tag in tags:
                sidecars.remove(path, tag)
            raise OSError(
                f"The residuals of {path!r} could not be written ({errors[0]}). No checkpoint was written; an earlier "
                f"one of this name is as it was."
            ) from error
        self.has_saved = True
        return path, [
            {
                "version": sidecars.VERSION,
                "tag": tag,
                "size": part.reducer.comm.size,
                "step": part.reducer.step,
                "skipped": part.reducer.skipped,
                # They reveal later changes of the checkpoint, also by a hook while it is saved.
                **(sidecars.fingerprints(own) if self.strategy.is_global_zero else {}),
            }
            for part, tag, own in zip(parts, tags, owns, strict=True)
        ]

    def _agree(self, parts: Sequence[Part], filepath: Any) -> tuple[str, Sequence[str]] | None:
        """Agree on rank 0's path and on a tag per part; None if the ranks' residuals belong to different steps.

        Ranks may build different paths, for example from a metric that was logged without sync_dist. Rank 0 writes the
        checkpoint, so all sidecar files are beside its path.
        """
        moments = [(*part.optimizers, part.reducer.step, part.is_consistent) for part in parts]
        own = (sidecars.absolute(filepath), [secrets.token_hex(8) for _ in parts]), moments
        try:
            ranks: list[Any] = gather(own) if self.strategy.all_ranks_present() else [own, None]
        except Exception:
            if not self.strategy.interrupted:
                raise
            ranks = [own, None]  # a rank has ended
        (path, tags), moments = ranks[0]
        is_consistent = all(part.is_consistent for part in parts)
        if is_consistent and all(rank is not None and rank[1] == moments for rank in ranks):
            return str(path), tags
        if self._rank == 0:
            log.warning(
                f"{path!r} gets no residuals: training failed in the middle of a step, and a part of that step is in "
                f"them. A run that goes on from it starts with empty ones."
            )
        return None

    def _raise_together(self, path: str, tags: Sequence[str], error: Exception | None) -> None:
        """Raise an error on all ranks if rank 0 could not write the checkpoint."""
        # Any other CheckpointIO may have written the checkpoint despite the error, or may write it later.
        failed = error is not None and writes_at_once(self.strategy.checkpoint_io)
        own = self._error_message(error), failed, self._saves.take_pruned()
        messages, failures, pruned = zip(*gather(own), strict=True)
        self._prune(pruned[0])
        if not any(messages):
            return
        for tag in tags if failures[0] else ():
            sidecars.remove(path, tag)
        raise OSError(
            f"{path!r} could not be written ({next(filter(None, messages))}). An earlier one of this name is as it "
            f"was, if the temporary folder is on the same disk."
        ) from error

    def _prune(self, pruned: Mapping[str, set[str]]) -> None:
        """Remove on this node's disk the sidecar files that rank 0 has removed."""
        for path, keep in pruned.items() if self._rank else ():
            sidecars.prune(path, keep)

    def end_training(self) -> None:
        """Remove sidecar files on all nodes at the end of training. All ranks call it."""
        self._prune(gather(self._saves.take_pruned())[0])

    def _error_message(self, error: Exception | None) -> str | None:
        return None if error is None else f"rank {self._rank}: {type(error).__name__}: {error}"

    def _gather_errors(self, own: str | None) -> list[str]:
        """Return the error messages of all ranks that have one."""
        return [text for text in gather(own) if text]

    def remove(self, filepath: Any) -> None:
        """Remove a checkpoint and its sidecar files."""
        if self.strategy.is_global_zero:
            self._saves.remove(sidecars.absolute(filepath), filepath, self.strategy.checkpoint_io)

    def close(self, teardown: Callable[[], None]) -> None:
        """Wait for all saves in Lightning's `teardown`; then remove the files whose removal was deferred."""
        try:
            teardown()
            self._saves.confirm_earlier()  # CheckpointIO.teardown has waited for all saves
        finally:
            self._saves.sweep(self.strategy.checkpoint_io)

    def together(self, load: Callable[[], Any], filepath: Any) -> Any:
        """Return the result of `load`, which loads from a checkpoint, or raise an error on all ranks."""
        error, result = None, None
        try:
            result = load()
        except Exception as caught:
            error = caught
        if errors := self._gather_errors(self._error_message(error)):
            raise error or ValueError(f"{str(filepath)!r} cannot be loaded on all ranks ({errors[0]}).")
        return result

    def load(
        self, part: Part, info: Mapping[str, Any] | None, optimizer_states: Mapping[str, Any], filepath: Any
    ) -> None:
        """Load the reducer's state, and the optimizers' states if they differ among ranks.

        Args:
            info: its entry in the checkpoint; None without an entry.
            optimizer_states: states of its optimizers in the checkpoint, by name. They are loaded already.
        """
        reducer = part.reducer
        reducer.reset()
        if len({*gather((info or {}).get("tag"))}) > 1:
            raise ValueError(
                f"Ranks have different checkpoints {str(filepath)!r}. Copy one of them, and its folder, to all nodes."
            )
        if info is None:
            if self._rank == 0:
                self.strategy.inform(f"{str(filepath)!r} holds no residuals: they start at 0.")
            return
        error: str | None = None
        state: dict[str, Any] | None = None
        missing: list[int] = []
        changed: list[str] = []
        try:
            sidecars.check(info)
            state, missing = sidecars.read(filepath, info, self._rank, self.strategy.world_size)
            if state is not None:
                reducer.load_state_dict(state)
                if reducer.exchanged == "update":
                    _load_own_optimizers(part, optimizer_states, info, state.get("optimizers", {}), changed)
            reducer.step, reducer.gradient_check.skipped = info["step"], info["skipped"]
        except Exception as caught:
            error = f"rank {self._rank}: {caught}"
        folder = sidecars.folder(filepath)
        # A foreign checkpoint may claim a million files. So each rank sends only a few, and the warning names a few.
        own = error, state is not None, missing[: sidecars.NAMED + 1]
        messages, have_state, lost_of = zip(*gather(own), strict=True)
        if errors := [*filter(None, messages)]:
            raise ValueError(
                f"The residuals of {str(filepath)!r} cannot be loaded ({errors[0]}). If a sidecar file is "
                f"damaged or foreign: remove {folder!r} to go on without, at the price of the gradients that had not "
                f"been sent yet."
            )
        if any(have_state) and not all(have_state):  # a rank without sidecar files cannot take these states from others
            reducer.segment_states.restart_equal_states()
        if changed and self._rank == 0:
            self.strategy.inform(
                f"The optimizers' states of {str(filepath)!r} are not as they were saved, by a hook for "
                f"example. All ranks take the changed values from the checkpoint, and the others from their sidecar "
                f"files: {listed(changed, sidecars.NAMED)}."
            )
        lost = sorted({rank for ranks in lost_of for rank in ranks})
        if lost and self._rank == 0:
            names = [sidecars.name(info["tag"], rank, info["size"]) for rank in lost]
            log.warning(
                f"{listed(names, sidecars.NAMED)} not found in {folder!r}: the residuals in "
                f"them are lost, and these workers start with empty ones. Move the folder along with the checkpoint."
            )

    def load_together(
        self,
        optimizers: Mapping[str, Optimizer],
        states: Mapping[str, Any],
        load: Callable[[], None],
        filepath: Any,
        remedy: str,
    ) -> None:
        """Load the optimizers' states that Lightning has saved, on all ranks or on none.

        Args:
            states: their states in the checkpoint, by name.
            load: loads the states.
            remedy: the way to change the optimizer, for the error message.
        """
        error: Exception | None = None
        needed = {name: sidecars.options_of(each) for name, each in optimizers.items()}
        try:
            load()
        except Exception as caught:  # a KeyError, for example, for the state of another kind of optimizer
            error = caught
        names = [name for name in optimizers if name in states]
        found = (sidecars.missing_options_message(optimizers[name], needed[name], states[name]) for name in names)
        foreign = next(filter(None, found), None)
        if errors := self._gather_errors(foreign or self._error_message(error)):
            raise ValueError(
                f"The optimizers' states of {str(filepath)!r} cannot be loaded ({errors[0]}). Resume with the "
                f"optimizers that wrote them; or, to change the optimizer, start from the weights alone: {remedy}."
            ) from error


def _load_own_optimizers(
    part: Part, present: Mapping[str, Any], info: Mapping[str, Any], own: Any, changed: list[str]
) -> None:
    """Load the optimizers' states of this rank, except for values that were changed in the checkpoint.

    Args:
        present: states of its optimizers in the checkpoint, by name.
        info: the checkpoint's entry about sidecar files.
        own: the states in this rank's sidecar file.
        changed: gets the names of the changed values.
    """
    if (saved := info.get("optimizers")) is not None:
        own = sidecars.merge(sidecars.plain(present), own, saved, changed)
        sidecars.put_back(own, present)
    for name, optimizer in part.optimizers.items():
        if name in own:
            needed = sidecars.options_of(optimizer)
            optimizer.load_state_dict(own[name])
            if foreign := sidecars.missing_options_message(optimizer, needed, own[name]):
                raise ValueError(foreign)
