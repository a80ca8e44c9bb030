"""Allocates the state of all segments, saves it parameter by parameter, and resizes it for another number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.context import State
from lightning_sparse.exchange import Exchanged
from lightning_sparse.kernels.graphs import Captures
from lightning_sparse.layout import Layout, Segment
from lightning_sparse.methods import Method

log = logging.getLogger(__name__)
VERSION = 2
"""Version of the format of `Reducer.state_dict`."""


class _Kept(NamedTuple):
    """Loaded state of parameters that the layout may get later.

    Attributes:
        elements: by name of the state, then by name of the parameter.
        segments: of segments with such a parameter, by the names of their parameters, then by name of the state.
    """

    elements: dict[str, dict[str, Tensor]]
    segments: dict[str, dict[str, Tensor]]


class SegmentStates:
    """A method's state on one rank, for all segments.

    Attributes:
        exchanged: the quantity that ranks exchange.
        layout: the partition of the parameters; None before `allocate`.
        specs: declaration by name, for all parts of the method.
        by_segment: state of each segment in the layout's order.
        captures: CUDA graphs, whose kernels read and write the state.
        later: names of parameters that may get state later; None if the saved parameters must equal the layout's.
        strides: strides by parameter name, for parameters whose elements are in memory order instead of row-major
            order, such as channels_last parameters in DDP's buckets. Saved tensors have the parameter's shape,
            regardless of its strides.
    """

    def __init__(self, method: Method, exchanged: Exchanged) -> None:
        self._method, self.exchanged = method, exchanged
        parts: list[Any] = [method.memory, method.aggregator, method.compressor]
        if exchanged == "update":
            parts.append(method.rule)
        declared = [(spec, type(part).__name__) for part in parts for spec in part.state]
        self.specs = {spec.name: spec for spec, _ in declared}
        of = "" if exchanged == "gradient" else f" of {exchanged}s"  # these have other units
        self._owners = {spec.name: f"{owner}{of}" for spec, owner in declared if spec.per != "scratch"}
        if len(self.specs) < len(declared):
            raise ValueError(f"{method!r}: two of its parts keep a state under the same name.")
        self.by_segment: list[State] = []
        self.captures = Captures()
        self.strides: Mapping[str, tuple[int, ...]] = {}
        self.layout: Layout | None = None
        self.later: Collection[str] | None = None
        self._kept = _Kept({}, {})
        self._loaded: Mapping[str, Any] | None = None  # state that was loaded before the parameters are known

    def allocate(self, layout: Layout, device: torch.device) -> None:
        """Allocate the buffers and fill them with zeros, or with the state that was loaded before."""
        self.layout, self._device = layout, device
        self.by_segment = [{} for _ in layout.segments]
        self.captures.clear(max((segment.numel for segment in layout.segments), default=0))
        for spec in self.specs.values():
            if spec.per != "segment":
                # Each segment has a separate buffer. A slice of a common buffer might not be aligned for wide loads.
                for segment, state in zip(layout.segments, self.by_segment, strict=True):
                    state[spec.name] = torch.zeros(segment.numel, dtype=torch.float32, device=device)
        if self._loaded is not None:
            self.load(self._loaded)
            self._loaded = None

    def take_memory_order(self, params: Mapping[str, Tensor]) -> None:
        """Set `strides` so that the state's elements are in the memory order of these parameters."""
        self.strides = {
            name: param.stride()
            for name, param in params.items()
            # If empty_like keeps the strides, the tensor has no gaps.
            if not param.is_contiguous() and torch.empty_like(param, device="meta").stride() == param.stride()
        }

    def clear(self) -> None:
        """Set all state to zero."""
        self._loaded, self._kept = None, _Kept({}, {})
        self._restart([*self.specs])

    def restart_equal_states(self) -> None:
        """Set all state to zero that is equal on all ranks."""
        equal = [name for name, spec in self.specs.items() if spec.resize == "replicate"]
        self._restart(equal)
        elements = {name: kept for name, kept in self._kept.elements.items() if name not in equal}
        segments = {
            names: {name: x for name, x in kept.items() if name not in equal}
            for names, kept in self._kept.segments.items()
        }
        self._kept = _Kept(elements, segments)

    def _restart(self, names: Collection[str]) -> None:
        for state in self.by_segment:
            for name in state.keys() & names:
                if self.specs[name].per == "segment":
                    del state[name]
                else:
                    state[name].zero_()

    def mask_unused(self, segment: Segment, unused: Collection[str]) -> list[tuple[Tensor, Tensor]]:
        """Set the state of unused parameters to zero; return its views and the values to restore after the step."""
        masked = []
        for spec in self.specs.values():
            # State that is equal on all ranks must remain equal, whichever rank used the parameter.
            if spec.per == "element" and spec.resize in ("sum", "mean"):
                views = segment.views(self.by_segment[segment.index][spec.name])
                for name, view in zip(segment.names, views, strict=True):
                    if name in unused:
                        masked.append((view, view.clone()))
                        view.zero_()
        return masked

    def state_dict(self) -> dict[str, Any]:
        """Return copies on the host; see `Reducer.state_dict`."""
        if self._loaded is not None:
            return dict(self._loaded)
        elements: dict[str, Any] = {
            name: {**self._kept.elements.get(name, {})} for name, spec in self.specs.items() if spec.per == "element"
        }
        segments = {names: {**kept} for names, kept in self._kept.segments.items()}
        for segment, state in zip(self.layout.segments if self.layout else (), self.by_segment, strict=True):
            for name, per_param in elements.items():
                for param, shape, view in zip(segment.names, segment.shapes, segment.views(state[name]), strict=True):
                    of_param = self._shaped(param, shape, view)
                    per_param[param] = of_param.to("cpu", copy=True, memory_format=torch.contiguous_format)
            segments["\n".join(segment.names)] = {
                name: value.to("cpu", copy=True) for name, value in state.items() if self.specs[name].per == "segment"
            }
        return {
            "version": VERSION,
            "method": repr(self._method),
            "owners": dict(self._owners),
            "resize": {name: self.specs[name].resize for name in self._owners},
            "elements": elements,
            "segments": segments,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a `state_dict`. State of a different component is dropped, with a warning on rank 0.

        Raises:
            ValueError: the saved parameters differ from the model's. In this case nothing has changed.
        """
        if (layout := self.layout) is None:
            self._loaded = saved
            return
        owners = saved["owners"]
        fitting = {name for name, owner in owners.items() if self._owners.get(name) == owner}
        present = saved["elements"].keys() | {name for each in saved["segments"].values() for name in each}
        dropped = {name: owners[name] for name in sorted(present - fitting)}
        if dropped and saved["rank"] == 0:  # the same on all ranks
            log.warning(self._why_dropped(dropped))
        for name in fitting & saved["elements"].keys():
            per_param = saved["elements"][name]
            lacking = set(per_param).difference(layout.names, self.later or ())
            added = set(layout.names) - set(per_param) if self.later is None else set()
            if odd := sorted(lacking | added):
                remedy = " If one is frozen now, let it require gradients before training begins." if lacking else ""
                raise ValueError(f"Reducer state and model differ in their parameters: {', '.join(odd)}.{remedy}")
            for segment in layout.segments:
                for param, shape in zip(segment.names, segment.shapes, strict=True):
                    if param in per_param and tuple(per_param[param].shape) != shape:
                        raise ValueError(
                            f"Reducer state of {param!r} has shape {tuple(per_param[param].shape)}, not {shape}."
                        )
        # All checks have passed, so the following code cannot fail half-way.
        self.clear()
        elements = {name: saved["elements"][name] for name in fitting & saved["elements"].keys()}
        for segment, state in zip(layout.segments, self.by_segment, strict=True):
            for name, per_param in elements.items():
                for param, shape, view in zip(segment.names, segment.shapes, segment.views(state[name]), strict=True):
                    if param in per_param:
                        self._shaped(param, shape, view).copy_(per_param[param])
            for name, value in saved["segments"].get("\n".join(segment.names), {}).items():
                if name in fitting:
                    state[name] = value.to(self._device, copy=True)
        known = set(layout.names)
        self._kept = _Kept(
            {name: {x: per[x] for x in per if x not in known} for name, per in elements.items()},
            {
                names: {name: x for name, x in kept.items() if name in fitting}
                for names, kept in saved["segments"].items()
                if not known.issuperset(names.split("\n"))
            },
        )

    def _why_dropped(self, dropped: Mapping[str, str]) -> str:
        """Return the warning about dropped state, given as owner by name."""
        before = "update" if any(owner.endswith(" of updates") for owner in dropped.values()) else "gradient"
        if before != self.exchanged:
            return (
                f"The saved state ({', '.join(dropped)}) is from a run that exchanged {before}s; this one exchanges "
                f"{self.exchanged}s, which are in other units: it is dropped, and residuals start at 0."
            )
        kept = ", ".join(f"{name} of {owner.removesuffix(' of updates')}" for name, owner in dropped.items())
        return (
            f"The saved state contains {kept}, which {self._method} does not use: it is dropped and has no further "
            f"effect."
        )

    def _shaped(self, param: str, shape: tuple[int, ...], view: Tensor) -> Tensor:
        """Return a 1-D view of a parameter's state as a view of the parameter's shape."""
        strides = self.strides.get(param)
        return view.view(shape) if strides is None else view.as_strided(shape, strides, view.storage_offset())


def check_header(state: Mapping[str, Any], rank: int, size: int) -> None:
    """Raise ValueError unless a `Reducer.state_dict` has the current version, this rank and this number of ranks."""
    for key, here in (("version", VERSION), ("rank", rank), ("size", size)):
        if state.get(key) != here:
            raise ValueError(f"Reducer state has {key} {state.get(key)!r}, but {here!r} is needed: cannot load it.")


def renamed(state: Mapping[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    """Return a `Reducer.state_dict` with new names of parameters, given by the earlier ones; others keep theirs."""
    elements = {kind: {new.get(name, name): x for name, x in each.items()} for kind, each in state["elements"].items()}
    names = {key: [new.get(name, name) for name in key.split("\n")] for key in state["segments"]}
    segments = {"\n".join(names[key]): each for key, each in state["segments"].items()}
    return {**state, "elements": elements, "segments": segments}


def sources(rank: int, size: int, old: int) -> list[int]:
    """Return the old ranks whose states `resized` needs for one of `size` new ranks, in order. Rank 0 is the first."""
    return sorted({0, *range(rank % old, old, size)})


def resized(states: Iterable[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the state of one of `size` new ranks, computed from the states of the old ranks.

    A residual keeps its mean over the ranks. New rank r takes (new / old) times the sum over all old ranks that equal
    r modulo the new number. State that is equal on all ranks is copied. Of momentum and of the optimizers' states, a
    new rank takes the mean over the same old ranks. If there are none, it takes that of old rank r modulo the old
    number. All other state starts at zero. A parameter without state on a rank counts as zeros.

    Args:
        states: `Reducer.state_dict` of the old ranks that `sources` names, in order. They are read one after the other,
            so that few are in memory at a time.
        rank: the new rank.
        size: the new number of ranks.
    """
    result: dict[str, Any] = {}
    optimizers, dtypes, added = dict[str, Any](), dict[Any, torch.dtype](), 0
    for state in states:
        mine, of_moments = state["rank"] % size == rank, state["rank"] % size == rank % state["size"]
        added += of_moments
        if of_moments:
            for name, own in state.get("optimizers", {}).items():
                _add_states_(optimizers.setdefault(name, {}), own)
                dtypes |= {(name, i, key): x.dtype for i, each in own["state"].items() for key, x in _averaged(each)}
        factor = size / state["size"] if mine else 0.0
        if not result:
            result = {**state, "rank": rank, "size": size}
            result["segments"] = {
                names: {name: value for name, value in kept.items() if state["resize"][name] == "replicate"}
                for names, kept in state["segments"].items()
            }
            result["elements"] = {
                name: {
                    param: value.clone() if state["resize"][name] == "replicate" else torch.zeros_like(value)
                    for param, value in per_param.items()
                }
                for name, per_param in state["elements"].items()
            }
        for name, per_param in state["elements"].items():
            resize, into = state["resize"][name], result["elements"].setdefault(name, {})
            for param, value in per_param.items():
                if (total := into.get(param)) is None:
                    total = into[param] = torch.zeros_like(value)
                if total.shape != value.shape:
                    raise ValueError(f"Reducer states of two ranks differ in the shape of {param!r}.")
                if (resize == "sum" and mine) or (resize == "mean" and of_moments):
                    total.add_(value, alpha=factor if resize == "sum" else 1.0)
    for name in (name for name in result["elements"] if result["resize"][name] == "mean"):
        for value in result["elements"][name].values():
            value.div_(max(1, added))
    if optimizers:
        result["optimizers"] = optimizers
    for name, total in optimizers.items():
        for param, sums in total["state"].items():
            sums.update({key: x.div_(added).to(dtypes[name, param, key]) for key, x in _averaged(sums)})
    return result


def _add_states_(total: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Add a result of `Optimizer.state_dict` to a sum, which is {} at first. Step counts come from the first.

    Sums are in fp32 or wider. A parameter without a gradient on a rank has no state there. It counts as zeros, the
    initial state.

    Raises:
        ValueError: the states belong to different kinds of optimizers.
    """
    for key, value in state.items():
        total.setdefault(key, {} if key == "state" else value)
    for param, own in state["state"].items():
        if not own:
            continue
        is_first = param not in total["state"]
        into = total["state"].setdefault(param, dict(own))
        if into.keys() != own.keys():
            raise ValueError(
                f"The optimizers of two ranks are of different kinds, so their states have no mean: one keeps "
                f"{', '.join(into)}, another one {', '.join(own)}. Go on with the same number of ranks."
            )
        for key, x in _averaged(own):
            wide = torch.promote_types(x.dtype, torch.float32)
            into[key] = x.to(wide, copy=True) if is_first else into[key].add_(x)


def _averaged(own: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return an optimizer's tensors for a parameter, by name, whose mean over ranks is meaningful, as moments.

    There are none if one of them is quantized, as codes and scales have no mean. The first rank's state is taken then.
    """
    tensors = [(key, x) for key, x in own.items() if isinstance(x, Tensor) and x.dim()]
    return tensors if all(type(x) is Tensor and x.is_floating_point() for _, x in tensors) else []
