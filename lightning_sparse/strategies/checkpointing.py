"""The strategy's checkpoints: side files beside Lightning's own, and errors that all ranks hear of."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import lightning_sparse.checkpoint as side_files
from lightning_sparse.hooks import CommThread
from lightning_sparse.reducer import Reducer

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object


class Checkpointing(DDPStrategy):
    """The half of the strategy that saves and restores what ranks have kept. All ranks call its methods together."""

    _reducer: Reducer | None
    _comm_thread: CommThread | None
    _whole: bool
    _loaded_from: Any
    _tags: dict[str, list[str]]

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running or the last fit."""
        if self._reducer is None:
            raise RuntimeError("The strategy has a reducer only from the start of fit.")
        return self._reducer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # A checkpoint of weights alone is not made to go on from.
        if "optimizer_states" not in checkpoint or not self._write_side_file(checkpoint, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        error: Exception | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as caught:
            error = caught
        if errors := self._told(self._described(error)):
            self._discard(filepath, checkpoint[side_files.KEY]["tag"])
            raise OSError(
                f"{str(filepath)!r} could not be written ({errors[0]}). An earlier one of this name is as it was."
            ) from error
        self._clean(filepath)

    def _discard(self, filepath: Any, tag: str) -> None:
        """Remove the side files of a checkpoint that could not be written, unless it is there in spite of that."""
        landed = True
        if self.is_global_zero:
            with contextlib.suppress(Exception):
                self.checkpoint_io.teardown()  # AsyncCheckpointIO may be about to write it still
            with contextlib.suppress(Exception):
                landed = side_files.named_on_disk(filepath, [tag]) is not None
        if not self._gathered(landed)[0]:
            with contextlib.suppress(OSError):
                side_files.discard(filepath, tag, self.global_rank, self.world_size)
            if self.is_global_zero:
                self._tags[str(filepath)].remove(tag)

    def _write_side_file(self, checkpoint: dict[str, Any], filepath: Any) -> bool:
        if self._reducer is None:
            log.warning(
                f"{str(filepath)!r} gets no residuals: they belong to the processes that trained, which are not this "
                f"one. Save from within fit, with ModelCheckpoint for example."
            )
            return False
        tag = self._tag(filepath)
        if tag is None:
            return False
        error: Exception | None = None
        try:
            side_files.write(filepath, tag, self._reducer.state_dict())
        except Exception as caught:  # told to all ranks, so that none waits
            error = caught
        if errors := self._told(self._described(error)):
            side_files.discard(filepath, tag, self.global_rank, self.world_size)
            raise OSError(
                f"The residuals of {str(filepath)!r} could not be written ({errors[0]}). No checkpoint was written; an "
                f"earlier one of this name is as it was."
            ) from error
        checkpoint[side_files.KEY] = {
            "version": side_files.VERSION,
            "tag": tag,
            "size": self._reducer.comm.size,
            "step": self._reducer.step,
            "skipped": self._reducer.skipped,
        }
        if self.is_global_zero:
            self._tags.setdefault(str(filepath), []).append(tag)
        return True

    def _tag(self, filepath: Any) -> str | None:
        """Agree on a name for the side files of a checkpoint; None where the ranks' states do not belong together."""
        assert self._reducer is not None
        trainer, thread = self.lightning_module and self.lightning_module.trainer, self._comm_thread
        interrupted = trainer is not None and trainer.interrupted
        if interrupted and thread is not None:
            # Saved by a callback on an exception, which may be this rank's alone: the others would wait in backward.
            thread.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
        if thread is not None:
            self._whole = thread.drain()
        ranks: list[Any] = [(secrets.token_hex(8), self._reducer.step, self._whole)]
        try:
            ranks = self._gathered(ranks[0])
        except Exception:
            if not interrupted:
                raise
            ranks.append(None)  # somebody is gone
        tag, *moment = ranks[0]
        if self._whole and all(rank is not None and rank[1:] == tuple(moment) for rank in ranks):
            return str(tag)
        if self.global_rank == 0:
            log.warning(
                f"{str(filepath)!r} gets no residuals: training failed in the middle of a step, and a part of that "
                f"step is in them. A run that goes on from it starts with empty ones."
            )
        return None

    def _gathered(self, mine: Any) -> list[Any]:
        if not dist.is_initialized():
            return [mine]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _described(self, error: Exception | None) -> str | None:
        return None if error is None else f"rank {self.global_rank}: {type(error).__name__}: {error}"

    def _clean(self, filepath: Any) -> None:
        if self.is_global_zero:
            try:
                if side_files.clean(filepath, self._tags[str(filepath)]):
                    del self._tags[str(filepath)]
            except OSError as error:  # not worth ending a training for
                log.warning(f"Side files of earlier checkpoints {str(filepath)!r} could not be removed: {error}")

    def _told(self, mine: str | None) -> list[str]:
        """Return what all ranks have to say, those that do."""
        return [text for text in self._gathered(mine) if text]

    def remove_checkpoint(self, filepath: Any) -> None:
        tags = self._tags.get(str(filepath), [])
        # AsyncCheckpointIO may be about to write it still: then it will be there in spite of this, and needs them.
        landed = not tags or side_files.named_on_disk(filepath, tags[-1:])
        super().remove_checkpoint(filepath)
        if self.is_global_zero and landed:
            side_files.remove(filepath)
            self._tags.pop(str(filepath), None)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        info = checkpoint.get(side_files.KEY)
        if info is None:
            self.reducer.reset()
            if self.global_rank == 0:
                log.info(f"{str(self._loaded_from)!r} holds no residuals: they start at 0.")
            return
        error: str | None = None
        missing: list[str] = []
        self.reducer.reset()
        try:
            side_files.check(info)
            self.reducer.step, self.reducer.skipped = info["step"], info["skipped"]  # if there is nothing else
            state, missing = side_files.read(self._loaded_from, info, self.global_rank, self.world_size)
            if state is not None:
                self.reducer.load_state_dict(state)
        except Exception as caught:
            error = f"rank {self.global_rank}: {caught}"
        folder = side_files.folder(self._loaded_from)
        if errors := self._told(error):
            raise ValueError(
                f"The residuals of {str(self._loaded_from)!r} cannot be loaded ({errors[0]}). If a side file is torn "
                f"or foreign: remove {folder!r} to go on without, at the price of what had not been sent yet."
            )
        lost = self._told(", ".join(missing))
        if lost and self.global_rank == 0:
            log.warning(
                f"{', '.join(sorted(set(lost)))} not found in {folder!r}: what had been kept there is lost, and these "
                f"workers start with empty residuals. Move the folder along with the checkpoint."
            )
