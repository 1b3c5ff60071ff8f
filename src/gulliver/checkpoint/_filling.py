"""Fills each kind of value with what a step has of it: checked first, filled afterwards.

`plan` makes a `Filling` of a value: all that can be wrong is found there, while nothing of the
program has changed. Modules and tensors, also those in dicts and lists, are filled in place, from
the files; optimizers and other objects are given their whole state by `load_state_dict`, for a new
optimizer has no state yet that could be filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gulliver.checkpoint._collect import kind_of, refuse_boosted
from gulliver.checkpoint._dtensors import is_dtensor, local_leaf
from gulliver.checkpoint._image import has_memory
from gulliver.checkpoint._matching import Mismatch, match
from gulliver.checkpoint._optimizers import optimizer_state
from gulliver.checkpoint._reader import StepReader
from gulliver.checkpoint._tree import Leaf, as_leaf, join_state, names_in
from gulliver.errors import GulliverError
from gulliver.memory import Part, before_write, storage_of

EXTRA = "_extra_state"
"""Name that torch gives the state of a module that has a `get_extra_state`."""


@dataclass
class Filling:
    """Plan of what is filled from an entry."""

    # Reader of the step.
    reader: StepReader
    # Name that the tensors are kept under.
    entry: str
    # Text that their names begin with there, and not here.
    prefix: str = ""
    # Tensors and parts to be filled in place, by name.
    leaves: dict[str, Leaf] = field(default_factory=dict)
    # Names and shapes that did not match.
    odd: Mismatch = field(default_factory=Mismatch)
    # Function that takes up the rest once the leaves are filled, and returns the value.
    finish: Callable[[], Any] = lambda: None
    # Whether the value has a state of its own, and is not given back.
    is_object: bool = False

    def check(self, strict: bool) -> None:
        """Refuses what does not match, and values that do not fit; see `Mismatch.refuse`."""
        where = f"{self.reader.folder}, entry {self.entry!r},"
        self.odd.refuse(where, len(self.leaves) + len(self.odd.missing), strict)
        for name, leaf in self.leaves.items():
            _check_fillable(f"{self.entry}: tensor {name!r}", leaf)
        self.reader.check_fits(self.entry, self.leaves, self.prefix)

    @torch.no_grad()
    def fill(self) -> Any:
        """Fills everything and returns the value."""
        before_write(v if isinstance(v, Tensor) else v.value for v in self.leaves.values())
        self.reader.read_into(self.entry, self.leaves, self.prefix)
        return self.finish()


def plan(
    reader: StepReader, entry: str, value: Any, rank: int | None, strict: bool, prefix: str
) -> Filling:
    """Finds out how a value is filled from an entry, while nothing is changed."""
    stored, skeleton = reader.place(entry, rank)
    filling = Filling(reader, stored, is_object=hasattr(value, "load_state_dict"))
    if isinstance(value, nn.Module):
        _plan_module(filling, value, skeleton, prefix)
    elif isinstance(value, torch.optim.Optimizer):
        _check_kind(reader, entry, value)
        known = reader.kind(entry).get("shapes")
        filling.finish = optimizer_state(reader, stored, skeleton, value, known)
    elif hasattr(value, "load_state_dict"):
        _check_kind(reader, entry, value)
        content = join_state(reader.whole(stored, names_in(skeleton)), skeleton)
        _check_scheduler(reader, entry, value, content)
        filling.finish = lambda: _give(value, content)
    elif prefix and _is_flat(value):
        _match_names(filling, _leaves_of(entry, value), prefix)
        filling.finish = lambda: value
    else:
        _plan_tree(filling, entry, value, skeleton)
    filling.check(strict)
    return filling


def _give(value: Any, content: Any) -> None:
    value.load_state_dict(content)


def _check_kind(reader: StepReader, entry: str, value: Any) -> None:
    saved, ours = reader.kind(entry).get("kind"), (kind_of(value) or {}).get("kind")
    if saved is not None and ours is not None and saved != ours:
        raise GulliverError(f"{reader.folder}, entry {entry!r}, is of {saved}, not of {ours}")


def _check_scheduler(reader: StepReader, entry: str, value: Any, content: Any) -> None:
    """Refuses what is no scheduler's state: a scheduler would merge any dict into its own."""
    if not isinstance(value, LRScheduler):
        return
    if not isinstance(content, dict) or not content.keys() & value.state_dict().keys():
        raise GulliverError(
            f"{reader.folder}, entry {entry!r}, is not the state of a scheduler: give what was "
            "saved"
        )


def _check_fillable(where: str, leaf: Leaf) -> None:
    target = leaf.value if isinstance(leaf, Part) else leaf
    if target.is_meta:
        raise GulliverError(
            f"{where} is on meta: give the model memory first, by model.to_empty(device=...), and "
            "recompute what is not saved"
        )
    if target.layout == torch.strided and not has_memory(target):
        raise GulliverError(
            f"{where} is a {type(target).__name__} without memory of its own, which cannot be "
            "filled: load into the tensors in it"
        )
    folded = [n for n, s in zip(target.shape, target.stride(), strict=True) if n > 1 and not s]
    if folded:
        raise GulliverError(f"{where} is expanded: its elements share memory, clone it first")


# --- modules -------------------------------------------------------------------------------------


def module_leaves(module: nn.Module) -> tuple[dict[str, Leaf], list[str]]:
    """Returns what of a module's state is filled in place, and the names that it has to be given.

    The latter is what is no tensor of its own: the state of `get_extra_state`, and what hooks and
    overridden methods make of its tensors.

    Raises:
        GulliverError: it is boosted, or on meta.
    """
    refuse_boosted(module, "load")
    own = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in own:
        if tensor.is_meta:
            _check_fillable(f"tensor {name!r} of the model", tensor)
    known = {id(tensor) for _, tensor in own}
    memory = {storage_of(tensor) for _, tensor in own if not is_dtensor(tensor) and tensor.numel()}
    leaves, given = dict[str, Leaf](), list[str]()
    for name, value in module.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == EXTRA or not isinstance(value, Tensor):
            given.append(name)
        elif id(value) in known or is_dtensor(value) or storage_of(value) in memory:
            leaves[name] = _target(f"tensor {name!r} of the model", value)
        else:
            given.append(name)
    return leaves, given


def _target(where: str, value: Leaf) -> Leaf:
    return local_leaf(where, value, saving=False) if is_dtensor(value) else as_leaf(value)


def _plan_module(filling: Filling, module: nn.Module, skeleton: Any, prefix: str) -> None:
    leaves, given = module_leaves(module)
    saved = dict(skeleton["dict"]) if _kind(skeleton) == "dict" else {}
    extras = {name: saved[prefix + name] for name in given if prefix + name in saved}
    held = {name for item in extras.values() for name in names_in(item)}
    _match_names(filling, leaves, prefix)
    first: dict[nn.Parameter, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    tied = {name: first.setdefault(parameter, name) for name, parameter in names}
    filling.reader.check_tied(filling.entry, tied, prefix)
    odd = filling.odd
    odd.missing += [name for name in given if name not in extras]
    odd.unexpected = [name for name in odd.unexpected if prefix + name not in held]
    if not prefix:
        # What is no tensor, and would have been a module's own.
        plain = (n for n in saved if not names_in(saved[n]) and n not in extras)
        odd.unexpected += sorted(n for n in plain if isinstance(n, str) and n.endswith(EXTRA))
    content = filling.reader.whole(filling.entry, sorted(held))
    state = {name: join_state(content, item) for name, item in extras.items()}

    def finish() -> None:
        if state:
            module.load_state_dict(state, strict=False)

    filling.finish = finish


def _match_names(filling: Filling, leaves: Mapping[str, Leaf], prefix: str) -> None:
    """Notes what is filled by the names of tensors."""
    reader, filling.prefix = filling.reader, prefix
    odd = filling.odd = match(reader.tensors(filling.entry), leaves, prefix)
    filling.leaves = {n: leaf for n, leaf in leaves.items() if n not in odd.missing}


# --- tensors, also in dicts and lists ------------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor | Part)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and _is_leaf(v) for k, v in value.items()
    )


def _leaves_of(entry: str, value: Mapping[str, Leaf]) -> dict[str, Leaf]:
    return {name: _target(f"{entry}: tensor {name!r}", leaf) for name, leaf in value.items()}


def _has_leaves(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_leaves, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_leaves, value))
    return _is_leaf(value)


def _plan_tree(filling: Filling, entry: str, value: Any, skeleton: Any) -> None:
    """Plans nested values: tensors in them are filled, all else is returned as it was saved."""
    matched = _Tree(filling, entry)
    result = matched.match(value, skeleton, "")
    fresh = filling.reader.whole(filling.entry, matched.fresh)
    filling.finish = lambda: result(fresh)


class _Tree:
    """Matches a nested value with where the tensors of an entry belong."""

    # What has no tensor in it stands for anything: it is given back as it was saved.

    def __init__(self, filling: Filling, entry: str) -> None:
        self.filling, self.entry = filling, entry
        self.saved = filling.reader.tensors(filling.entry)
        self.fresh: list[str] = []
        """Names of tensors that are read into new memory."""

    def match(self, value: Any, skeleton: Any, path: str) -> Callable[[Mapping[str, Tensor]], Any]:
        """Notes what is to be filled; returns what makes the value once new tensors are read."""
        if _is_leaf(value):
            self._match_leaf(value, skeleton, path or "value")
            return lambda _: value
        # A placeholder such as None or 0: there is nothing to fill, so new tensors are made.
        if not _has_leaves(value):
            self.fresh += names_in(skeleton)
            return lambda fresh: join_state(fresh, skeleton)
        ours = value if isinstance(value, Mapping) else dict(enumerate(value))
        theirs = _items(skeleton, isinstance(value, Mapping))
        if theirs is None:
            self.filling.odd.missing += [_below(path, key) for key in ours]
            return lambda _: value
        found = {}
        for key, item in ours.items():
            if key in theirs:
                found[key] = self.match(item, theirs[key], _below(path, key))
            else:
                self.filling.odd.missing.append(_below(path, key))
                found[key] = lambda _, item=item: item
        self.filling.odd.unexpected += [_below(path, key) for key in theirs if key not in ours]
        if isinstance(value, Mapping):
            return lambda fresh: {key: made(fresh) for key, made in found.items()}
        kind = list if isinstance(value, list) else tuple
        return lambda fresh: kind(made(fresh) for made in found.values())

    def _match_leaf(self, leaf: Leaf, skeleton: Any, path: str) -> None:
        odd = self.filling.odd
        name = skeleton["tensor"] if _kind(skeleton) == "tensor" else ""
        there = {path: self.saved[name]} if name in self.saved else {}
        found = match(there, {path: leaf})
        odd.missing += found.missing
        odd.unlike.update(found.unlike)
        if not found:
            self.filling.leaves[name] = _target(f"{self.entry}: tensor {path!r}", leaf)


def _kind(skeleton: Any) -> str | None:
    return next(iter(skeleton)) if isinstance(skeleton, dict) and len(skeleton) == 1 else None


def _items(skeleton: Any, is_mapping: bool) -> dict[Any, Any] | None:
    """Returns the items of a saved dict or list; None where the other is wanted."""
    kind = _kind(skeleton)
    if is_mapping:
        if kind != "dict":
            return None
        return {join_state({}, key): item for key, item in skeleton["dict"]}
    return dict(enumerate(skeleton[kind])) if kind in ("list", "tuple") else None


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
