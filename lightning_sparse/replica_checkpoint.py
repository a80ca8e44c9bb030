"""Saves and loads the state in which replicas of a model differ: residuals, and the states of their optimizers.

    save_replica("last.ckpt", model, optimizer)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="last.ckpt")   # weights, equal in all replicas

    dcp.load(state := {"model": get_model_state_dict(model)}, checkpoint_id="last.ckpt")
    set_model_state_dict(model, state["model"])
    load_replica("last.ckpt", model, optimizer)

Each rank writes a sidecar file with its own shards, as in `lightning_sparse.checkpoint`, under a tag that is new for
each save. `entry.json` names the tag of the last complete save. Torch's distributed checkpoints are not used. They
store one copy of tensors with equal names, which mixes the optimizer states of replicas. Their metadata is a pickle.
They have no checksums.

A file also has the place of each shard in its parameter. So a replica's state can be loaded with another number of
shards. For another number of replicas see `state.resized`.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import fsspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse import checkpoint as sidecars
from lightning_sparse._compat import ignored_by_ddp, parameters_by_name, shard_offset
from lightning_sparse.hooks.misuse import tensors_in
from lightning_sparse.hooks.optimizer_kinds import unwrapped
from lightning_sparse.hooks.update_exchange import UpdateExchanger, exchange_of
from lightning_sparse.options import listed
from lightning_sparse.shards import is_any_sharded, is_sharded, load_optimizer, local, parameters_of, reshard
from lightning_sparse.state import resized, sources

log = logging.getLogger(__name__)
T = TypeVar("T")
State = dict[str, Any]
ENTRY = "entry.json"
"""Name of the file with a save's entry."""
_last_saved = weakref.WeakValueDictionary[str, UpdateExchanger]()
"""By path, the exchange of the last `save_replica`."""


def save_replica(path: str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> None:
    """Save this rank's part of its replica's residuals and optimizer states. All ranks call it, between steps.

    It first exchanges pending updates. Save the weights after that: they are equal in all replicas.

    Args:
        path: path of the checkpoint of the weights, the same on all ranks. The folder "<path>.residuals" gets one file
            per rank, with its shards of the residual and of the optimizers' states. Each model needs another path.
        model: the model of `attach_updates`.
        optimizers: its optimizer, or all its optimizers in the order of `attach_updates`.

    Raises:
        ValueError: the updates of an optimizer are not exchanged, or its state cannot be sharded anew; on all ranks.
        OSError: a rank could not write its file. The earlier save is unchanged.
    """
    exchange = _begin(model, optimizers)
    path = sidecars.absolute(path)
    write_replica(path, model, exchange, lambda entry: _write_entry(path, entry) if dist.get_rank() == 0 else None)
    last, _last_saved[path] = _last_saved.get(path), exchange
    if last is not None and last is not exchange and not last.session.is_closed and dist.get_rank() == 0:
        log.warning(
            f"save_replica({path!r}) has replaced the residuals and optimizer states of another model, which was saved "
            f"under this path before. Give each model another path."
        )


def write_replica(path: str, model: nn.Module, exchange: UpdateExchanger, *finish: Callable[[State], None]) -> None:
    """Write this rank's file of a checkpoint, and complete the checkpoint. All ranks call it.

    Args:
        path: absolute path of the checkpoint, the same on all ranks.
        exchange: the exchange of its updates; none is pending.
        *finish: functions that get the entry of the checkpoint about its files, and complete the checkpoint in turn. If
            one fails on a rank, no rank calls the next one.

    Raises:
        ValueError, OSError: as in `save_replica`.
        CheckpointException: of torch, from `finish`; it is no Exception.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # the import takes time

    state = together(lambda: replica_state(model, exchange), ValueError)
    tag = gather(secrets.token_hex(8))[0]
    entry = entry_of(tag, state["weights"], exchange)
    try:
        together(lambda: sidecars.write(path, tag, state), OSError)
        for step in finish:
            together(partial(step, entry), OSError)
    except (OSError, CheckpointException):  # on all ranks
        sidecars.remove(path, tag)
        raise
    sidecars.prune(path, [tag])


def load_replica(path: str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> None:
    """Continue from `save_replica`, perhaps with other numbers of replicas and shards. All ranks call it.

    Load the weights before, and call `attach_updates` before. Without changes, training continues bit for bit. With
    another number of replicas, the mean of the residuals stays. Learning rates come from the saved optimizers.

    Args:
        path: path of the checkpoint, as for `save_replica`.
        model: the model of `attach_updates`.
        optimizers: as for `save_replica`.

    Raises:
        ValueError: files are missing, damaged, or of another save, model or kind of optimizer. All ranks raise it, and
            nothing has changed, except parameter groups for another kind of optimizer. Or updates are pending.
    """
    together(lambda: _check_idle(optimizers), ValueError)
    exchange = _begin(model, optimizers)
    path = sidecars.absolute(path)
    parts = parts_of(0 if is_any_sharded(model) else _checksum_of_weights(model, exchange), exchange)
    state = together(lambda: read_replica(path, _read_entry(path), model, exchange, parts), ValueError)
    load_state(state, model, exchange)


def entry_of(tag: str, weights: int, exchange: UpdateExchanger) -> State:
    """Return the entry of a checkpoint about its files, equal on all ranks. All ranks call it.

    Args:
        tag: tag of the save.
        weights: the checksum of this rank's weights.
        exchange: the exchange of the model's updates.
    """
    reducer, parts = exchange.reducer, parts_of(weights, exchange)
    return {
        "version": sidecars.VERSION,
        "tag": tag,
        "size": dist.get_world_size(),
        "step": reducer.step,
        "skipped": reducer.skipped,
        "replicas": gather(exchange.comm.rank),
        **({"parts": parts} if parts else {}),
    }


def parts_of(weights: int, exchange: UpdateExchanger) -> list[int]:
    """Return, for each rank, the first rank with the same part of a model without shards; [] for a model with shards.

    Args:
        weights: the checksum of this rank's weights.
    """
    is_sharded_here = any(map(is_sharded, exchange.updates.parameters.values()))
    found = gather(None if is_sharded_here else weights)
    return [] if None in found else [*map(found.index, found)]


def replica_state(model: nn.Module, exchange: UpdateExchanger) -> State:
    """Return the content of this rank's file: tensors and primitives, see `Reducer.state_dict`.

    "rank" and "size" count in the default process group. Further keys:

    - "replica", "replicas": number of this rank's replica, and of all replicas;
    - "places": for each parameter, the offset of this rank's shard in it, and its shape;
    - "shapes": the shapes of the whole parameters;
    - "weights": checksum of this rank's shards of the weights;
    - "optimizers": for each optimizer by number, its state by name of the parameter, its parameter groups, and the
      names and dtypes of its parameters.

    Raises:
        ValueError: the state of a sharded parameter cannot be sharded anew.
    """
    reshard(model)
    reducer = exchange.reducer
    return {
        **reducer.state_dict(),
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "replica": reducer.comm.rank,
        "replicas": reducer.comm.size,
        "places": _places(model),
        "shapes": _shapes(model),
        "weights": _checksum_of_weights(model, exchange),
        "optimizers": {str(i): _own_state(model, each, str(i)) for i, each in enumerate(exchange.optimizers)},
    }


def read_replica(
    path: str, entry: Mapping[str, Any], model: nn.Module, exchange: UpdateExchanger, parts: Sequence[int] = ()
) -> State:
    """Return this rank's state, from the files of a checkpoint; see `load_state`. It calls no collective.

    Args:
        path, entry, model, exchange: see `write_replica` and `entry_of`.
        parts: see `parts_of`. They tell apart the stages of a pipeline.

    Raises:
        ValueError: files are missing, damaged, or of another save, model or kind of optimizer.
    """
    reshard(model)
    sidecars.check(entry)
    tag, old, replica_of = entry["tag"], entry["size"], entry.get("replicas")
    if not isinstance(replica_of, list) or len(replica_of) != old or not all(isinstance(x, int) for x in replica_of):
        raise ValueError(f"The entry of {path!r} about its files is invalid: {dict(entry)!r:.200}")
    files = sidecars.find(path, tag, old)
    if missing := [sidecars.name(tag, rank, old) for rank in range(old) if rank not in files]:
        raise ValueError(
            f"{len(missing)} of {old} files of this save are missing in {sidecars.folder(path)!r}: "
            f"{listed([*map(repr, missing[: sidecars.NAMED])])}. Copy the whole folder, of all nodes; or continue with "
            f"empty residuals and new optimizer states: leave out load_replica, or take {sidecars.KEY!r} out of the "
            f"checkpoint's meta.pt."
        )
    comm, places, shapes = exchange.comm, _places(model), _shapes(model)
    rank, alike = dist.get_rank(), [*range(old)]
    if parts and "parts" in entry and not is_any_sharded(model):
        alike = _ranks_of_part(entry["parts"], parts, parts[rank])

    def load(rank: int) -> State:
        state = sidecars.load(*files[rank], tag, rank, old)
        if odd := [name for name, shape in state["shapes"].items() if shapes.get(name, shape) != shape]:
            raise ValueError(
                f"The checkpoint is of another model: {odd[0]!r} has the shape {state['shapes'][odd[0]]} there, "
                f"{shapes[odd[0]]} here."
            )
        return state

    if old == dist.get_world_size() and replica_of[rank] == comm.rank and rank in alike:
        own = load(rank)
        if own["places"] == places and own["replicas"] == comm.size:
            _check_names(own, exchange, model)
            if own["weights"] != _checksum_of_weights(model, exchange):
                log.warning(
                    f"Rank {rank} has other weights than at the save of {path!r}. Load the weights of the "
                    f"same save, before load_replica."
                )
            return {**own, "rank": comm.rank, "size": comm.size}

    shards = dist.get_world_size() // comm.size
    position = rank % shards / shards  # of this rank's shard within its replica, in most meshes

    def states() -> Iterator[State]:
        for replica in sources(comm.rank, comm.size, max(replica_of) + 1):
            ranks = [each for each in alike if replica_of[each] == replica]
            nearest = sorted(range(len(ranks)), key=lambda i: abs(i - position * len(ranks)))
            state = joined((load(ranks[i]) for i in nearest), places)
            _check_names(state, exchange, model)
            yield state

    return resized(states(), comm.rank, comm.size)


def _ranks_of_part(before: Sequence[int], now: Sequence[int], first: int) -> list[int]:
    """Return the ranks of a save that had this rank's part of a model without shards.

    Args:
        before, now: `parts_of` at the save, and now.
        first: this rank's part now.
    """
    saved, present = sorted({*before}), sorted({*now})
    if len(saved) != len(present):
        raise ValueError(
            f"The checkpoint is of a model in {len(saved)} parts, such as the stages of a pipeline, and here it has "
            f"{len(present)}. Take the same number of parts; or continue without load_replica."
        )
    part = saved[present.index(first)]
    return [rank for rank, each in enumerate(before) if each == part]


def load_state(state: Mapping[str, Any], model: nn.Module, exchange: UpdateExchanger) -> None:
    """Continue from a state that `read_replica` has returned.

    Raises:
        ValueError: it is of another kind of optimizer. The parameter groups may have changed.
    """
    for i, optimizer in enumerate(exchange.optimizers):
        saved, present = state["optimizers"][str(i)], optimizer.state_dict()
        names = enumerate(_names(model, optimizer))
        groups = zip(saved["param_groups"], present["param_groups"], strict=True)
        loaded = {
            **{key: x for key, x in saved.items() if key not in ("names", "dtypes")},
            "state": {index: saved["state"][name] for index, name in names if name in saved["state"]},
            "param_groups": [{**group, "params": own["params"]} for group, own in groups],
        }
        sidecars.put_back(loaded, present)
        needed = sidecars.options_of(optimizer)
        try:
            dtypes = enumerate(zip(saved.get("dtypes", ()), _dtypes(optimizer), strict=False))  # not of older files
            load_optimizer(optimizer, loaded, {i: before for i, (before, now) in dtypes if before != now})
            foreign = sidecars.missing_options_message(optimizer, needed, saved)
        except KeyError as error:  # of torch's optimizers, for the state of another kind
            foreign = f"{type(optimizer).__name__} needs {error}, which the saved state lacks"
        if foreign:
            raise ValueError(f"The checkpoint is of another kind of optimizer: {foreign}.")
    exchange.reducer.load_state_dict(state)


def _begin(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> UpdateExchanger:
    """Return the exchange of a model's optimizers, without pending updates and with the present parameters."""
    exchange = together(lambda: _exchange_of(optimizers), ValueError)
    exchange.exchange_pending()

    def refresh() -> None:
        exchange.updates.refresh_parameters(names=True)
        if odd := sorted(exchange.updates.parameters.keys() - parameters_by_name(model).keys()):
            raise ValueError(
                f"The {type(model).__name__} has no parameter {odd[0]!r}, whose updates are exchanged. Give the model "
                f"that attach_updates got, not a wrapper or a part of it."
            )

    together(refresh, ValueError)
    return exchange


def _check_idle(optimizers: Optimizer | Sequence[Optimizer]) -> None:
    """Raise ValueError if updates are pending: their exchange would write over weights that were loaded."""
    if _exchange_of(optimizers).is_pending:
        raise ValueError(
            "load_replica while updates wait for their exchange, which would change the weights that you have loaded. "
            "Call exchange_pending(optimizer) on all ranks before you load the weights."
        )


def _exchange_of(optimizers: Optimizer | Sequence[Optimizer]) -> UpdateExchanger:
    given = [optimizers] if isinstance(optimizers, Optimizer) else [*optimizers]
    exchange = exchange_of(given[0]) if given else None
    if exchange is None or [id(unwrapped(each)) for each in given] != [*map(id, exchange.optimizers)]:
        raise ValueError(
            "Give the optimizers of attach_updates, all of them and in the same order, after attach_updates was called."
        )
    return exchange


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its `state_dict`."""
    name_of = {id(param): name for name, param in parameters_by_name(model).items()}
    return [name_of[id(param)] for param in parameters_of([optimizer])]


def _dtypes(optimizer: Optimizer) -> list[str]:
    """Return the dtypes of an optimizer's parameters, in the order of its `state_dict`."""
    return [str(param.dtype) for param in parameters_of([optimizer])]


def _places(model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """Return the offset of this rank's shard in each parameter, and its shape."""
    return {name: ([*shard_offset(x)], [*local(x).shape]) for name, x in parameters_by_name(model).items()}


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the whole parameters by name."""
    return {name: [*param.shape] for name, param in parameters_by_name(model).items()}


def _checksum_of_weights(model: nn.Module, exchange: UpdateExchanger) -> int:
    """Return a checksum of this rank's shards of the agreed weights, which a checkpoint has."""
    agreed = exchange.agreed_weights()  # a save within a batch leaves the present ones in the model
    ignored = ignored_by_ddp(model)  # they may differ among ranks
    params = {name: param for name, param in parameters_by_name(model).items() if name not in ignored}
    return sidecars.checksum({name: local(agreed.get(id(param), param)) for name, param in params.items()})


def _own_state(model: nn.Module, optimizer: Optimizer, number: str) -> State:
    """Return an optimizer's state by name of the parameter, with this rank's shards on the host; see `plain`."""
    state, names, params = optimizer.state_dict(), _names(model, optimizer), parameters_by_name(model)
    own: State = {}
    if "state" not in state:
        raise ValueError(
            f"{type(optimizer).__name__}.state_dict() has no entry 'state', so it cannot be saved for each replica."
        )
    for index, kept in state["state"].items():
        name = names[index]
        for key, x in kept.items():
            if is_sharded(params[name]) and isinstance(x, Tensor) and x.numel() > 1 and x.shape != params[name].shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {list(x.shape)} for {name!r} of shape "
                    f"{list(params[name].shape)}, whose shards cannot be saved. Use an optimizer whose state has the "
                    f"parameter's shape, such as AdamW."
                )
        own[name] = {key: local(x).to("cpu", copy=True) if isinstance(x, Tensor) else x for key, x in kept.items()}
    rest = {key: x for key, x in state.items() if key != "state"}
    for key in rest.keys() - {"param_groups"} if is_any_sharded(model) else ():
        if any(x.numel() > 1 for x in tensors_in(rest[key])):
            raise ValueError(
                f"{type(optimizer).__name__}.state_dict() has tensors in {key!r}, and it is unknown whether they are "
                f"shards, so they cannot be saved. Use an optimizer that keeps them in 'state', such as AdamW."
            )
    kept = sidecars.plain({**rest, "state": own}, number if dist.get_rank() == 0 else "")
    return {**kept, "names": names, "dtypes": _dtypes(optimizer)}


def _check_names(state: Mapping[str, Any], exchange: UpdateExchanger, model: nn.Module) -> None:
    """Raise ValueError unless a state has the parameters of the exchange, and groups of them."""
    elements = next(iter(state["elements"].values()), None)
    exchanged = exchange.updates.parameters
    saved = [kept["names"] for _, kept in sorted(state["optimizers"].items(), key=lambda each: int(each[0]))]
    here = [_names(model, optimizer) for optimizer in exchange.optimizers]
    odd = {name for names in saved for name in names} ^ {name for names in here for name in names}
    if elements is not None:  # others may be frozen now, or have been frozen then
        odd |= (elements.keys() ^ exchanged.keys()) - parameters_by_name(model).keys()
    if odd:
        raise ValueError(
            f"The checkpoint is of another model, or of optimizers of other parameters: they differ in "
            f"{listed(sorted(map(repr, odd)))}."
        )
    before = [[len(group["params"]) for group in kept["param_groups"]] for kept in state["optimizers"].values()]
    now = [[len(group["params"]) for group in each.param_groups] for each in exchange.optimizers]
    if before != now or saved != here:
        raise ValueError(
            f"The checkpoint is of optimizers with parameter groups of {before} parameters, here they have {now}. "
            f"Create them as in the run that saved it, with the parameters in the same order."
        )


def joined(parts: Iterable[State], places: Mapping[str, tuple[list[int], list[int]]]) -> State:
    """Return the state of one replica for this rank's shards, from the files of its ranks.

    It reads no further file as soon as it has all elements. Files are large, so the order of `parts` matters.
    """
    result: State = {}
    missing = sum(math.prod(shape) for _, shape in places.values())
    copied: dict[str, list[Any]] = {name: [] for name in places}
    for part in parts:
        if part["places"].keys() != places.keys():
            odd = sorted(part["places"].keys() ^ places.keys())
            raise ValueError(f"The checkpoint is of another model: they differ in {listed([*map(repr, odd)])}.")
        if not result:
            kept = {key: x for key, x in part.items() if key not in ("elements", "segments", "optimizers")}
            result = {**kept, "rank": part["replica"], "size": part["replicas"], "segments": {}}
            result["elements"] = {name: {} for name in part["elements"]}
            result["optimizers"] = {i: {**each, "state": {}} for i, each in part["optimizers"].items()}
        if not result["segments"] and part["places"] == places:
            # Of the same shards on any replica.
            result["segments"] = {
                names: {kind: x for kind, x in kept.items() if part["resize"][kind] == "replicate"}
                for names, kept in part["segments"].items()
            }
        for state, per_param in part["elements"].items():
            for name, x in per_param.items():
                copy_common_(result["elements"][state], name, x, part["places"][name], places[name])
        for i, each in part["optimizers"].items():
            for name, kept in each["state"].items():
                of_param = result["optimizers"][i]["state"].setdefault(name, {})
                for key, x in kept.items():
                    if isinstance(x, Tensor) and [*x.shape] == part["places"][name][1] and x.dim():
                        copy_common_(of_param, key, x, part["places"][name], places[name])
                    else:
                        of_param.setdefault(key, x)
        for name, place in places.items():
            if part["places"][name] not in copied[name]:  # several ranks have a tensor that is not sharded
                copied[name].append(part["places"][name])
                missing -= math.prod(_common(part["places"][name], place)[1])
        if not missing:
            break
    return result


def copy_common_(
    into: dict[str, Tensor], key: str, x: Tensor, old: tuple[list[int], list[int]], new: tuple[list[int], list[int]]
) -> None:
    """Copy the elements that a shard of the old sharding has in common with this rank's shard, which may be new."""
    target = into.setdefault(key, torch.zeros(new[1], dtype=x.dtype, device="cpu"))
    first, shape = _common(old, new)
    if math.prod(shape):
        here, there = (
            tuple(slice(a - b, a - b + n) for a, b, n in zip(first, begin, shape, strict=True))
            for begin in (new[0], old[0])
        )
        target[here] = x[there]


def _common(a: tuple[list[int], list[int]], b: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Return the offset and the shape of the elements that two shards of a parameter have in common."""
    first = [max(begins) for begins in zip(a[0], b[0], strict=True)]
    ends = (min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True))
    return first, [max(0, end - begin) for begin, end in zip(first, ends, strict=True)]


def _write_entry(path: str, entry: Mapping[str, Any]) -> None:
    sidecars.write_file(path, ENTRY, lambda file: file.write(json.dumps(entry).encode()))


def _read_entry(path: str) -> State:
    fs, root = fsspec.core.url_to_fs(sidecars.folder(path))
    place = f"{root}/{ENTRY}"
    try:
        with fs.open(place, "r") as file:
            entry = json.load(file)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path!r} has no complete save of save_replica: there is no {place!r}. Move the folder together with the "
            f"checkpoint; or continue without load_replica, with empty residuals and new optimizer states."
        ) from error
    except ValueError as error:
        raise ValueError(f"{place!r} is damaged: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{place!r} is damaged: it holds no dictionary.")
    return entry


def gather(value: T) -> list[T]:
    """Return the values of all ranks, or of this one if there is no process group."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(call: Callable[[], T], kind: type[Exception]) -> T:
    """Return the result of a call. If it fails on a rank, all ranks raise an error that names the first of them."""
    error, own = None, ""
    try:
        result = call()
    except Exception as caught:
        error = caught
        own = str(error) or repr(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
    for rank, text in enumerate(gather(own)):
        if text:
            raise kind(f"Rank {rank}: {text}") from error
    return result
