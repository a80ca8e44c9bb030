"""The strategy's checkpoints: sidecar files beside Lightning's own, and errors that reach all ranks."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse.hooks import GradientExchanger, UpdateExchanger
from lightning_sparse.options import listed
from lightning_sparse.reducer import Reducer
from lightning_sparse.strategies.rendezvous import Rendezvous
from lightning_sparse.strategies.saves import Saves, warn_of_files_left, writes_at_once
from lightning_sparse.strategies.sigterm import EndTogether

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

NAMED = 8
"""Number of missing sidecar files, or of an optimizer's options, that a message names."""


class Checkpointing(DDPStrategy):
    """The half of the strategy that saves and restores the reducer's state.

    All ranks call `save_checkpoint` and `load_optimizer_state_dict` together; `remove_checkpoint` acts on rank 0 alone,
    as ranks may hold different paths for one checkpoint. With the next save, and at the end of training, rank 0 tells
    the others which sidecar files it has removed, for each node may have a disk of its own.
    """

    _namespace: str
    """Lightning's name in this strategy."""

    _reducer: Reducer | None
    _exchange: GradientExchanger | UpdateExchanger | None
    _sigterm: EndTogether | None = None
    _consistent: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._loaded_from: Any = None
        self._saves = Saves()  # on rank 0
        self._has_saved = False  # on all ranks
        self._rendezvous = Rendezvous()

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running or the last fit."""
        if self._reducer is None:
            raise RuntimeError("The strategy has a reducer only from the start of fit.")
        return self._reducer

    def _inform(self, text: str) -> None:
        """Log at INFO: through Lightning's logger, which shows it, unless the program has set up logging itself."""
        lightnings = logging.getLogger(self._namespace)
        (log if lightnings.propagate else lightnings).info(text)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # A checkpoint of weights alone is not made to resume from.
        saved = self._write_sidecar(checkpoint, filepath) if "optimizer_states" in checkpoint else None
        path, tag = saved or (sidecars.absolute(filepath), None)
        save = self._saves.begin(path, tag) if self.is_global_zero else None
        error: Exception | None = None
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as caught:
            error = caught
        if save is not None and error is None:
            self._saves.returned(save, self.checkpoint_io)
            self._saves.sweep(super().remove_checkpoint)
        if tag is not None:
            self._raise_together(path, tag, error)
        elif error is not None:
            raise error

    def _write_sidecar(self, checkpoint: dict[str, Any], filepath: Any) -> tuple[str, str] | None:
        """Write this rank's sidecar file and its tag into the checkpoint.

        Returns:
            Rank 0's path of the checkpoint and the tag; None if the checkpoint gets no residuals.
        """
        if self._reducer is None:
            log.warning(
                f"{str(filepath)!r} gets no residuals: they belong to the processes that trained, which are not this "
                f"one. Save from within fit, with ModelCheckpoint for example."
            )
            return None
        agreed = self._agree(filepath)
        if agreed is None:
            return None
        path, tag = agreed
        error: Exception | None = None
        own = self._own_optimizer_states()
        try:
            sidecars.write(path, tag, {**self._reducer.state_dict(), **own})
        except Exception as caught:  # raised on all ranks, so that none waits for another
            error = caught
        if errors := self._gather_errors(self._error_message(error)):
            sidecars.remove_own(path, tag, self.global_rank, self.world_size)
            raise OSError(
                f"The residuals of {path!r} could not be written ({errors[0]}). No checkpoint was written; an earlier "
                f"one of this name is as it was."
            ) from error
        self._has_saved = True
        checkpoint[sidecars.KEY] = {
            "version": sidecars.VERSION,
            "tag": tag,
            "size": self._reducer.comm.size,
            "step": self._reducer.step,
            "skipped": self._reducer.skipped,
            # By which a change of the checkpoint shows, even one that a hook makes while it is saved.
            **(sidecars.fingerprints(own) if self.is_global_zero else {}),
        }
        return path, tag

    def _own_optimizer_states(self) -> dict[str, Any]:
        """Return the optimizers' states, on the host, where they differ from rank to rank."""
        if self._reducer is None or self._reducer.exchanged == "gradient":
            return {}
        return {"optimizers": {str(i): _plain(each.state_dict()) for i, each in enumerate(self.optimizers)}}

    def _agree(self, filepath: Any) -> tuple[str, str] | None:
        """Agree on rank 0's path and on a tag; None if the ranks' residuals are not of the same step.

        Ranks may build different paths, from a metric that was logged without sync_dist for example. Rank 0 writes the
        checkpoint, so all sidecar files lie beside its path.
        """
        assert self._reducer is not None
        exchange, interrupted = self._exchange, self._interrupted
        if self._may_be_alone and exchange is not None:
            # A callback may save on an exception of this rank alone: the other ranks would wait for it in backward.
            exchange.fail(sys.exc_info()[1] or RuntimeError("Training was interrupted."))
        if exchange is not None:
            self._consistent = exchange.drain()
        own = (sidecars.absolute(filepath), secrets.token_hex(8)), (self._reducer.step, self._consistent)
        try:
            ranks: list[Any] = self._gather(own) if self._all_ranks_present else [own, None]
        except Exception:
            if not interrupted:
                raise
            ranks = [own, None]  # a rank has ended
        (path, tag), moment = ranks[0]
        if self._consistent and all(rank is not None and rank[1] == moment for rank in ranks):
            return str(path), str(tag)
        if self.global_rank == 0:
            log.warning(
                f"{path!r} gets no residuals: training failed in the middle of a step, and a part of that step is in "
                f"them. A run that goes on from it starts with empty ones."
            )
        return None

    @property
    def _interrupted(self) -> bool:
        """Whether an error has ended training."""
        return self.lightning_module is not None and self.lightning_module.trainer.interrupted

    @property
    def _may_be_alone(self) -> bool:
        """Whether an error has ended training, perhaps on this rank alone."""
        return self._interrupted and not (self._sigterm is not None and self._sigterm.ends_by(sys.exc_info()[1]))

    @property
    def _all_ranks_present(self) -> bool:
        """Whether all ranks come to the collective that this one is about to call."""
        # A process that has forked the ranks has no process group, nor its module a trainer.
        return not dist.is_initialized() or not self._may_be_alone or self._rendezvous.all_ranks_present()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._all_ranks_present:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src) if self._all_ranks_present else obj

    def _raise_together(self, path: str, tag: str, error: Exception | None) -> None:
        """Raise an error on all ranks if rank 0 could not write the checkpoint."""
        # Any other CheckpointIO may have written the checkpoint in spite of the error, or may do so later.
        failed = error is not None and writes_at_once(self.checkpoint_io)
        own = self._error_message(error), failed, self._saves.take_pruned()
        messages, failures, pruned = zip(*self._gather(own), strict=True)
        self._prune(pruned[0])
        if not any(messages):
            return
        if failures[0]:
            sidecars.remove_own(path, tag, self.global_rank, self.world_size)
        raise OSError(
            f"{path!r} could not be written ({next(filter(None, messages))}). An earlier one of this name is as it was."
        ) from error

    def _prune(self, pruned: Mapping[str, set[str]]) -> None:
        """Remove sidecar files as rank 0 has done it, on a disk of this node."""
        for path, keep in pruned.items() if self.global_rank else ():
            try:
                sidecars.prune(path, keep)
            except Exception as error:  # not worth ending a training for
                warn_of_files_left(path, error)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._has_saved:
            self._prune(self._gather(self._saves.take_pruned())[0])

    def _gather(self, own: Any) -> list[Any]:
        if not dist.is_initialized():
            return [own]
        ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(ranks, own)
        return ranks

    def _error_message(self, error: Exception | None) -> str | None:
        return None if error is None else f"rank {self.global_rank}: {type(error).__name__}: {error}"

    def _gather_errors(self, own: str | None) -> list[str]:
        """Return the error messages of all ranks that have one."""
        return [text for text in self._gather(own) if text]

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._saves.remove(sidecars.absolute(filepath), filepath, super().remove_checkpoint)

    def teardown(self) -> None:
        try:
            super().teardown()
            self._saves.confirm_earlier()  # CheckpointIO.teardown has waited for all of them
        finally:
            self._rendezvous.end_fit()
            self._saves.sweep(super().remove_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._load_rank_0s_optimizers(checkpoint)
        info = checkpoint.get(sidecars.KEY)
        if self._reducer is None:  # as in a process that has forked or spawned the ranks
            if info is not None:
                log.warning(
                    f"The residuals of {str(self._loaded_from)!r} are not loaded: they belong to processes that train, "
                    f"and this one does not. Pass ckpt_path to fit."
                )
            return
        self.reducer.reset()
        if info is None:
            if self.global_rank == 0:
                self._inform(f"{str(self._loaded_from)!r} holds no residuals: they start at 0.")
            return
        error: str | None = None
        missing: list[int] = []
        changed: list[str] = []
        try:
            sidecars.check(info)
            state, missing = sidecars.read(self._loaded_from, info, self.global_rank, self.world_size)
            if state is not None:
                self.reducer.load_state_dict(state)
                if self.reducer.exchanged == "update":
                    own = state.get("optimizers", {})
                    if (saved := info.get("optimizers")) is not None:
                        present = {str(i): _plain(each) for i, each in enumerate(checkpoint["optimizer_states"])}
                        own = sidecars.merge(present, own, saved, changed)
                    for i, optimizer in enumerate(self.optimizers):
                        if str(i) in own:
                            needed = _options(optimizer)
                            optimizer.load_state_dict(own[str(i)])
                            if foreign := _of_another_kind(optimizer, needed, own[str(i)]):
                                raise ValueError(foreign)
            self.reducer.step, self.reducer.skipped = info["step"], info["skipped"]
        except Exception as caught:
            error = f"rank {self.global_rank}: {caught}"
        folder = sidecars.folder(self._loaded_from)
        if errors := self._gather_errors(error):
            raise ValueError(
                f"The residuals of {str(self._loaded_from)!r} cannot be loaded ({errors[0]}). If a sidecar file is "
                f"damaged or foreign: remove {folder!r} to go on without, at the price of the gradients that had not "
                f"been sent yet."
            )
        if changed and self.global_rank == 0:
            self._inform(
                f"The optimizers' states of {str(self._loaded_from)!r} are not as they were saved, by a hook for "
                f"example. All ranks take the changed values from the checkpoint, and the others from their sidecar "
                f"files: {listed(changed, NAMED)}."
            )
        # A stranger's checkpoint may ask for a million files: each rank sends, and the warning names, a few.
        lost = sorted({rank for ranks in self._gather(missing[: NAMED + 1]) for rank in ranks})
        if lost and self.global_rank == 0:
            names = [sidecars.name(info["tag"], rank, info["size"]) for rank in lost]
            log.warning(
                f"{listed(names, NAMED)} not found in {folder!r}: the residuals in "
                f"them are lost, and these workers start with empty ones. Move the folder along with the checkpoint."
            )

    def _load_rank_0s_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states that Lightning has saved, on all ranks or on none."""
        error: Exception | None = None
        needed = [*map(_options, self.optimizers)]
        try:
            super().load_optimizer_state_dict(checkpoint)
        except Exception as caught:  # for states of another kind a KeyError, in some of torch's
            error = caught
        found = map(_of_another_kind, self.optimizers, needed, checkpoint["optimizer_states"])
        foreign = next(filter(None, found), None)
        if errors := self._gather_errors(foreign or self._error_message(error)):
            path = str(self._loaded_from)
            raise ValueError(
                f"The optimizers' states of {path!r} cannot be loaded ({errors[0]}). Resume with the optimizers that "
                f"wrote them; or, to change the optimizer, start from the weights alone: "
                f"{type(self.lightning_module).__name__}.load_from_checkpoint({path!r}), and fit without ckpt_path."
            ) from error


def _options(optimizer: Optimizer) -> list[str]:
    """Return which options all parameter groups of an optimizer have; not those that schedulers keep there."""
    return [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]


def _of_another_kind(optimizer: Optimizer, needed: Sequence[str], loaded: Mapping[str, Any]) -> str | None:
    """Return which options an optimizer lacks after a state was loaded, whose parameter groups it has taken over.

    Adam's suffice for AdamW; of those of older versions torch adds what is new when it loads them.
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
    """Return what a sidecar file may hold: tensors on the host, and Python's numbers, where schedules left numpy's."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
