"""Hooks that make torch optimizer steps wait for a checkpoint's pending copies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gulliver.checkpoint.files import RESERVED, check_holdable, is_holdable
from gulliver.checkpoint.tree import Leaf, as_leaf, is_dtensor, local_leaf, split_state
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, state_shape
from gulliver.memory.pending import (
    ASKS,
    PendingParameter,
    add_writer,
    any_read_lock,
    before_any_write,
    before_write_at,
    storage_of,
    writers,
)

_hooked: list[Callable[[], None]] = []


def install_hooks() -> None:
    """Hooks every torch optimizer so that `step` waits for pending copies of its tensors."""
    if _hooked:
        return

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        add_writer(optimizer)
        # An optimizer that updates in parts (ZeRO chunk by chunk) waits before each part itself.
        if any_read_lock() and not getattr(optimizer, ASKS, False):
            before_write_at(_storages(optimizer))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Code after a step modifies other tensors: averages of weights, statistics, counters.
        before_any_write()

    _hooked.append(register_optimizer_step_pre_hook(before).remove)
    _hooked.append(register_optimizer_step_post_hook(after).remove)


def guarded_storages() -> set[int]:
    return set().union(*(_storages(optimizer) for optimizer in writers()))


def _storages(optimizer: torch.optim.Optimizer) -> set[int]:
    found = set[int]()
    for tensor in _changed_by(optimizer):
        with suppress(NotImplementedError, RuntimeError):  # sparse and fake tensors have none
            found.add(storage_of(tensor))
    return found - {0}


def _changed_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if changed := getattr(optimizer, ASKS, None):
        yield from changed()
        return
    for group in optimizer.param_groups:
        # A pending parameter has no memory yet, and reading its address would gather its shards.
        params = (p for p in group["params"] if type(p) is not PendingParameter)
        yield from (_local(parameter) for parameter in params)
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


# Splits a state into a rank's tensors by entry, and chooses the rank that writes replicated ones.


WHOLE_FILE = ".safetensors"
SMALL = 2**16
"""Tensors up to this many bytes are copied immediately, which is cheaper than tracking them."""
TINY = 2**12
"""The same limit for tensors that only optimizers modify; their steps wait for copies anyway."""
ALIKE = 2**20
"""Rank 0 writes replicated tensors smaller than this many bytes."""


@dataclass(frozen=True)
class PerRank:
    """Marks a state entry that has a separate value on every rank.

    Loading gives each rank its own saved value, for any number of ranks.
    """

    value: Any


@dataclass
class RankContent:
    """Content that one rank writes."""

    # Tensors and parts by entry and name.
    tensors: dict[str, dict[str, Leaf]] = field(default_factory=dict)
    # Skeletons of replicated values, by entry.
    skeletons: dict[str, Any] = field(default_factory=dict)
    # Skeletons of this rank's own values, by entry.
    own: dict[str, Any] = field(default_factory=dict)
    # Class names of optimizers and schedulers by entry, and the shapes of an optimizer's
    # parameters.
    kinds: dict[str, Any] = field(default_factory=dict)
    # Hash of the names, dtypes and shapes that must be equal on all ranks.
    digest: str = ""
    # Storages that only optimizers modify whose steps wait for a snapshot; all other storages may
    # be modified as soon as `save` returns.
    guarded: set[int] = field(default_factory=set)


def own_entry(entry: str, rank: int) -> str:
    return f"{entry}@{rank}"


def file_name(entry: str, rank: int, world_size: int) -> str:
    if world_size == 1 or "@" in entry:
        return f"{entry.replace('@', '-rank-')}{WHOLE_FILE}"
    return f"{entry}-{rank + 1:05d}-of-{world_size:05d}{WHOLE_FILE}"


def collect(
    state: Mapping[str, Any],
    rank: int = 0,
    world_size: int = 1,
) -> RankContent:
    """Splits a state into tensors and skeletons by entry."""
    found = RankContent()
    common: dict[str, dict[str, Tensor]] = {}
    for entry, value in state.items():
        if not isinstance(entry, str) or not entry or set(entry) & set("/\\@\0") or entry[0] == ".":
            raise GulliverError(f"{entry!r} is not a valid entry name: use letters, digits and _")
        alone = isinstance(value, PerRank)
        held = value.value if alone else value
        if isinstance(held, Optimizer):
            add_writer(held)
        leaves, skeleton = split_state(_content(held))
        # Per-rank values may have different kinds.
        kind = None if alone else kind_of(held)
        if kind is not None:
            found.kinds[entry] = kind
        if RESERVED in leaves:
            raise GulliverError(
                f"{entry}: a tensor is called {RESERVED!r}, which the safetensors format reserves: "
                "rename it"
            )
        leaves = {name: _leaf(entry, name, leaf) for name, leaf in leaves.items()}
        if alone:
            found.tensors[own_entry(entry, rank)] = leaves
            found.own[entry] = skeleton
            continue
        found.skeletons[entry] = skeleton
        found.tensors[entry] = {n: v for n, v in leaves.items() if isinstance(v, Part)}
        common[entry] = {n: v for n, v in leaves.items() if not isinstance(v, Part)}  # type: ignore[misc]
    if world_size > 1:
        found.digest = _digest(common)
    _assign_shared(common, found, rank, world_size)
    found.guarded = guarded_storages()
    return found


def _content(value: Any) -> Any:
    if isinstance(value, nn.Module):
        refuse_boosted(value, "save")
        return {
            name: as_leaf(v) if isinstance(v, Tensor) else v
            for name, v in value.state_dict(keep_vars=True).items()
        }
    return value.state_dict() if hasattr(value, "state_dict") else value


def kind_of(value: Any) -> dict[str, Any] | None:
    """Describes an optimizer or scheduler, whose state does not name its class; otherwise None."""
    if isinstance(value, LRScheduler):
        return {"kind": type(value).__name__}
    if not isinstance(value, torch.optim.Optimizer):
        return None
    # A boosted optimizer is saved as the one that it wraps.
    kind = type(getattr(value, "inner", value)).__name__
    shapes = [[list(state_shape(p)) for p in group["params"]] for group in value.param_groups]
    return {"kind": kind, "shapes": shapes}


def refuse_boosted(model: nn.Module, action: str) -> None:
    for name, parameter in model.named_parameters():
        if "_boosted" in vars(parameter):
            raise GulliverError(
                f"parameter {name!r} is in a ZeRO chunk; use booster.{action} of the booster that "
                "boosted the model"
            )


def _leaf(entry: str, name: str, leaf: Leaf) -> Leaf:
    if type(leaf) in (Tensor, nn.Parameter) and leaf.is_cpu and is_holdable(leaf):  # type: ignore[union-attr]
        value = leaf.detach()  # type: ignore[union-attr]
        if not value.is_conj() and not value.is_neg():
            return value  # the usual case, of which there may be many
    where = f"{entry}: tensor {name!r}"
    if isinstance(leaf, Part):
        check_holdable(where, leaf.value)
        return leaf
    if is_dtensor(leaf):
        return local_leaf(where, leaf, saving=True)
    check_holdable(where, leaf)
    value = leaf.detach()
    if value.is_conj() or value.is_neg():
        # Lazily conjugated or negated views would be written without the operation.
        value = value.resolve_conj().resolve_neg()
    # Host tensors that are not contiguous are gathered when they are copied.
    return value if value.is_cpu else value.contiguous()


def _assign_shared(
    common: Mapping[str, Mapping[str, Tensor]], found: RankContent, rank: int, world_size: int
) -> None:
    """Assigns each replicated tensor to the rank with the fewest bytes to write."""
    if world_size == 1:
        for entry, tensors in common.items():
            found.tensors[entry].update(tensors)
        return
    # Ranks see equal tensors (`digest`), so they need not communicate to agree on the assignment.
    loads = [0] * world_size
    for entry, tensors in common.items():
        for name, tensor in tensors.items():
            writer = 0 if tensor.nbytes < ALIKE else loads.index(min(loads))
            loads[writer] += tensor.nbytes
            if writer == rank:
                found.tensors[entry][name] = tensor


def _digest(common: Mapping[str, Mapping[str, Tensor]]) -> str:
    lines: Sequence[str] = [
        f"{entry}/{name} {tensor.dtype} {tuple(tensor.shape)}"
        for entry, tensors in common.items()
        for name, tensor in tensors.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
