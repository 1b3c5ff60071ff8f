"""Loads steps: plans how nested values are filled, with a `Ref` for each tensor not yet read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gulliver.checkpoint.collect import PerRank, kind_of, refuse_boosted
from gulliver.checkpoint.files import has_memory
from gulliver.checkpoint.folder import CheckpointFolder, steps_of
from gulliver.checkpoint.manifest import (
    MANIFEST,
    Mismatch,
    TensorEntry,
    is_complete,
    match,
    read_manifest,
)
from gulliver.checkpoint.reader import StepReader, Verifier, first_unrepresentable
from gulliver.checkpoint.tree import (
    Leaf,
    as_leaf,
    below,
    is_dtensor,
    join_state,
    like_local,
    local_leaf,
    names_in,
    values_of,
)
from gulliver.comm.collectives import group_rank
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, state_shape
from gulliver.memory.pending import before_write, storage_of


@dataclass(frozen=True)
class Ref:
    """Placeholder for a tensor that has not been read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def with_refs(skeleton: Any, saved: Mapping[str, TensorEntry]) -> Any:
    names = [name for name in names_in(skeleton) if name in saved]
    return join_state({n: Ref(n, saved[n].shape, saved[n].dtype) for n in names}, skeleton)


def refs_in(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, Mapping):
        return [ref for item in value.values() for ref in refs_in(item)]
    return [ref for item in value for ref in refs_in(item)] if _is_row(value) else []


def replace_refs(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Ref):
        return tensors[value.name]
    if isinstance(value, Mapping):
        return {key: replace_refs(item, tensors) for key, item in value.items()}
    return type(value)(replace_refs(v, tensors) for v in value) if _is_row(value) else value


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)


# Reads the state of an optimizer, and checks that it belongs to the optimizer to be filled.
#
# A torch optimizer numbers its parameters and accepts any state; a mismatch shows up much later, or
# never. So class, groups and shapes are compared before anything is loaded.


def optimizer_state(
    reader: StepReader,
    entry: str,
    skeleton: Any,
    optimizer: torch.optim.Optimizer,
    shapes: Sequence[Any] | None,
) -> Callable[[], None]:
    """Reads an optimizer's state (of DTensors, this rank's part); returns a function to load it."""
    where = f"{reader.folder}, entry {entry!r}"
    content = with_refs(skeleton, reader.tensors(entry))
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        if isinstance(content, dict) and {"optimizer", "groups", "state"} <= content.keys():
            raise GulliverError(
                f"{where}, was saved by a Booster: boost model and optimizer (TorchDDPPlugin "
                "shards nothing) and use booster.load, or omit this entry"
            )
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            raise GulliverError(
                f"{where}, is not the state of an optimizer; pass the name of the entry in which "
                "it was saved"
            )
        whole = replace_refs(content, reader.whole(entry, names_in(skeleton)))
        return lambda: optimizer.load_state_dict(whole)
    groups = content["param_groups"]
    _check_groups(where, groups, optimizer, shapes)
    numbers = [number for group in groups for number in group["params"]]
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = dict(zip(numbers, stepped, strict=True))
    made, leaves = dict[str, Tensor](), dict[str, Leaf]()
    for number, state in content["state"].items():
        for ref in refs_in(state):
            made[ref.name], leaves[ref.name] = _new(where, ref, parameters.get(number))
    for ref in refs_in(groups):
        made[ref.name], leaves[ref.name] = _new(where, ref, None)
    reader.read_into(entry, leaves)
    for number, state in content["state"].items():
        _check_values(where, number, state, made, parameters.get(number))
    ready = replace_refs(content, made)
    return lambda: optimizer.load_state_dict(ready)


def _new(where: str, ref: Ref, parameter: Any) -> tuple[Tensor, Leaf]:
    """Allocates a tensor for the optimizer; returns it and the part to read."""
    if parameter is None or not is_dtensor(parameter) or not ref.shape:
        tensor = torch.empty(ref.shape, dtype=ref.dtype)
        return tensor, tensor
    if ref.shape != tuple(parameter.shape):
        raise GulliverError(
            f"{where}: tensor {ref.name!r} has shape {ref.shape}, but its parameter is a DTensor "
            f"of shape {tuple(parameter.shape)}; only state of the same shape can be sharded"
        )
    local = torch.empty_like(parameter.to_local(), dtype=ref.dtype, requires_grad=False)
    tensor = like_local(parameter, local)
    return tensor, local_leaf(f"{where}: tensor {ref.name!r}", tensor, saving=False)


def _check_groups(
    where: str,
    saved: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    shapes: Sequence[Any] | None,
) -> None:
    ours = optimizer.param_groups
    if len(saved) != len(ours):
        raise GulliverError(
            f"{where}, has {len(saved)} parameter groups, but the optimizer has {len(ours)}"
        )
    for number, (theirs, group) in enumerate(zip(saved, ours, strict=True)):
        count = len(group["params"])
        if len(theirs["params"]) != count:
            raise GulliverError(
                f"{where}: group {number} has {len(theirs['params'])} parameters, but the "
                f"optimizer has {count}"
            )
        # A newer torch may add options; only another optimizer lacks some and has others.
        odd = sorted(theirs.keys() - group.keys())
        lacking = sorted(optimizer.defaults.keys() - theirs.keys())
        if odd and lacking and shapes is None:
            raise GulliverError(
                f"{where}, is the state of another optimizer: group {number} has {', '.join(odd)}, "
                f"but {type(optimizer).__name__} has {', '.join(lacking)}"
            )
        names = theirs.get("param_names"), group.get("param_names")
        if None not in names and list(names[0]) != list(names[1]):  # type: ignore[arg-type]
            first = next(pair for pair in zip(*names, strict=True) if pair[0] != pair[1])  # type: ignore[arg-type]
            raise GulliverError(
                f"{where}: group {number} has {first[0]!r}, but the optimizer has {first[1]!r}"
            )
        for place, parameter in enumerate(group["params"] if shapes is not None else ()):
            there, here = tuple(shapes[number][place]), state_shape(parameter)  # type: ignore[index]
            if there != here:
                raise GulliverError(
                    f"{where}: parameter {place} of group {number} has shape {there} in the "
                    f"checkpoint, but {here} in the model"
                )


def _check_values(
    where: str, number: Any, state: Any, made: Mapping[str, Tensor], parameter: Any
) -> None:
    """Rejects values that do not fit the parameter's dtype, to which torch converts state."""
    if parameter is None or not parameter.is_floating_point() or not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key == "step" or not isinstance(value, Ref) or not value.dtype.is_floating_point:
            continue
        tensor: Any = made[value.name]
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        problem = first_unrepresentable(local.cpu(), parameter.dtype)
        if problem is not None:
            raise GulliverError(f"{where}: {key} of parameter {number}: {problem}")


# Fills each kind of value from a step: checked first, filled afterwards.
#
# `plan` creates the `Filling` of a value, and finds all errors before any value of the program is
# changed. Modules and tensors, including those in dicts and lists, are filled in place from the
# files; optimizers and other objects get their full state by `load_state_dict`, because a new
# optimizer has no state to fill yet.


EXTRA = "_extra_state"
"""Key in a state dict of the value that a module's `get_extra_state` returned."""


@dataclass
class Filling:
    """Plan for filling one value from an entry."""

    # Reader of the step.
    reader: StepReader
    # Entry whose tensors are read; differs from the requested one for per-rank values.
    entry: str
    # Prefix of the names in the checkpoint that names here lack.
    prefix: str = ""
    # Tensors and parts to be filled in place, by name.
    leaves: dict[str, Leaf] = field(default_factory=dict)
    # Names and shapes that did not match.
    odd: Mismatch = field(default_factory=Mismatch)
    # Function that is called once the leaves are filled: loads the rest, and returns the value.
    finish: Callable[[], Any] = lambda: None
    # Whether the value loads its own state, and is not returned.
    is_object: bool = False

    def check(self, strict: bool) -> None:
        where = f"{self.reader.folder}, entry {self.entry!r},"
        self.odd.refuse(where, len(self.leaves) + len(self.odd.missing), strict)
        for name, leaf in self.leaves.items():
            _check_fillable(f"{self.entry}: tensor {name!r}", leaf)
        self.reader.check_fits(self.entry, self.leaves, self.prefix)

    @torch.no_grad()
    def fill(self) -> Any:
        before_write(v if isinstance(v, Tensor) else v.value for v in self.leaves.values())
        self.reader.read_into(self.entry, self.leaves, self.prefix)
        return self.finish()


def plan(
    reader: StepReader, entry: str, value: Any, rank: int | None, strict: bool, prefix: str
) -> Filling:
    """Plans how a value is filled from an entry; changes nothing."""
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
        filling.finish = lambda: value.load_state_dict(content)
    elif prefix and _is_flat(value):
        _match_names(filling, _leaves_of(entry, value), prefix)
        filling.finish = lambda: value
    else:
        _plan_tree(filling, entry, value, skeleton)
    filling.check(strict)
    return filling


def _check_kind(reader: StepReader, entry: str, value: Any) -> None:
    saved, ours = reader.kind(entry).get("kind"), (kind_of(value) or {}).get("kind")
    if saved is not None and ours is not None and saved != ours:
        raise GulliverError(
            f"{reader.folder}, entry {entry!r}, is the state of {saved}, not of {ours}"
        )


def _check_scheduler(reader: StepReader, entry: str, value: Any, content: Any) -> None:
    """Rejects an entry that is not a scheduler's state; schedulers would accept any dict."""
    if not isinstance(value, LRScheduler):
        return
    if not isinstance(content, dict) or not content.keys() & value.state_dict().keys():
        raise GulliverError(
            f"{reader.folder}, entry {entry!r}, is not the state of a scheduler; pass the name of "
            "the entry in which it was saved"
        )


def _check_fillable(where: str, leaf: Leaf) -> None:
    target = values_of(leaf)
    if target.is_meta:
        raise GulliverError(
            f"{where} is on meta: call model.to_empty(device=...) first, and recompute values "
            "that are not saved"
        )
    if target.layout == torch.strided and not has_memory(target):
        raise GulliverError(
            f"{where} is a {type(target).__name__} without storage, which cannot be filled; load "
            "into the tensors that it wraps"
        )
    folded = [n for n, s in zip(target.shape, target.stride(), strict=True) if n > 1 and not s]
    if folded:
        raise GulliverError(f"{where} is expanded, so its elements share memory; clone it first")


# --- modules -------------------------------------------------------------------------------------


def module_leaves(module: nn.Module) -> tuple[dict[str, Leaf], list[str]]:
    """Returns a module's tensors to fill in place, and the names left to `load_state_dict`."""
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
        # Non-tensor values that look like a module's extra state.
        plain = (n for n in saved if not names_in(saved[n]) and n not in extras)
        odd.unexpected += sorted(n for n in plain if isinstance(n, str) and n.endswith(EXTRA))
    content = filling.reader.whole(filling.entry, sorted(held))
    state = {name: join_state(content, item) for name, item in extras.items()}

    def finish() -> None:
        if state:
            module.load_state_dict(state, strict=False)

    filling.finish = finish


def _match_names(filling: Filling, leaves: Mapping[str, Leaf], prefix: str) -> None:
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
    """Plans a nested value: its tensors are filled, other values are returned as saved."""
    matched = _Tree(filling, entry)
    result = matched.match(value, skeleton, "")
    fresh = filling.reader.whole(filling.entry, matched.fresh)
    filling.finish = lambda: result(fresh)


class _Tree:
    """Matches a nested value with an entry's tensors."""

    # A value without tensors may stand for anything: the saved value is returned.

    def __init__(self, filling: Filling, entry: str) -> None:
        self.filling, self.entry = filling, entry
        self.saved = filling.reader.tensors(filling.entry)
        self.fresh: list[str] = []
        """Names of tensors that are read into new memory."""

    def match(self, value: Any, skeleton: Any, path: str) -> Callable[[Mapping[str, Tensor]], Any]:
        """Records the tensors to fill; returns a function that builds the value after reading."""
        if _is_leaf(value):
            self._match_leaf(value, skeleton, path or "value")
            return lambda _: value
        # A placeholder such as None or 0: there is nothing to fill, so new tensors are created.
        if not _has_leaves(value):
            self.fresh += names_in(skeleton)
            return lambda fresh: join_state(fresh, skeleton)
        ours = value if isinstance(value, Mapping) else dict(enumerate(value))
        theirs = _items(skeleton, isinstance(value, Mapping))
        if theirs is None:
            self.filling.odd.missing += [below(path, key) for key in ours]
            return lambda _: value
        found = {}
        for key, item in ours.items():
            if key in theirs:
                found[key] = self.match(item, theirs[key], below(path, key))
            else:
                self.filling.odd.missing.append(below(path, key))
                found[key] = lambda _, item=item: item
        self.filling.odd.unexpected += [below(path, key) for key in theirs if key not in ours]
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
    """Returns the items of a saved dict (list); None if the saved value is not a dict (list)."""
    kind = _kind(skeleton)
    if is_mapping:
        if kind != "dict":
            return None
        return {join_state({}, key): item for key, item in skeleton["dict"]}
    return dict(enumerate(skeleton[kind])) if kind in ("list", "tuple") else None


# Loads a step into a program's objects.


_log = logging.getLogger("gulliver")

ATTEMPTS = 100
Result = TypeVar("Result")


@dataclass
class Loaded:
    """Result of loading a step.

    Attributes:
        step: number of the step.
        values: values by entry, except for objects that load their own state.
        mismatches: mismatched names and shapes by entry; empty if all matched.
        absent: requested entries that are not in the checkpoint.
    """

    step: int
    values: dict[str, Any] = field(default_factory=dict)
    mismatches: dict[str, Mismatch] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{entry}: {found}" for entry, found in self.mismatches.items()]
        lines += [f"{entry}: not in the checkpoint" for entry in self.absent]
        return "\n".join(lines or ["everything matched"])


def step_folder(path: Path | str, step: int | None = None) -> Path:
    """Finds a complete step's folder from a run's folder or the step's own."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        check_number(path, step)
        return path
    if not path.is_dir():
        raise GulliverError(f"{path} does not exist: pass the folder of a run or of a step")
    folder = CheckpointFolder(path)
    if step is not None:
        if not is_complete(folder.path(step)):
            why = _why_broken(folder.path(step))
            raise GulliverError(
                f"{path} has no complete step {step}: it has {folder.steps()}{why and f'; {why}'}"
            )
        return folder.path(step)
    newest = folder.latest()
    if newest is None:
        last = max(steps_of(path), default=None)
        why = "" if last is None else _why_broken(last[1])
        raise GulliverError(f"{path} contains no complete checkpoint{why and f': {why}'}")
    return newest


def _why_broken(step: Path) -> str:
    try:
        if step.is_dir():
            Verifier(step, read_manifest(step)).check_sizes()
    except GulliverError as error:
        return str(error).removesuffix(": use another checkpoint")
    return ""


def check_number(folder: Path, step: int | None) -> None:
    if step is not None and (number := read_manifest(folder).step) != step:
        raise GulliverError(
            f"{folder} is step {number}, not step {step}: pass the run's folder, or omit step"
        )


def load(
    path: Path | str,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    strict: bool = True,
    prefix: str = "",
) -> Loaded:
    """Loads a step on any number of ranks.

    Modules, tensors and parts, including those in dicts and lists, are filled in place, reading
    only their bytes; values are converted to their dtype if they fit. Other objects get their full
    state through `load_state_dict`. Dicts and lists are returned in `Loaded.values`, with the
    filled tensors; a leaf such as None returns the saved value. Everything is checked before
    anything is filled, except for checksums of data read in place.

    Args:
        path: folder of a run, or of one of its steps.
        state: objects and values by entry, as for `AsyncCheckpointer.save`; other entries are not
            loaded. None loads everything into new tensors.
        step: number of the step of a run; None for the complete step that was saved last.
        strict: raise on mismatches before anything is changed; otherwise report them.
        prefix: prefix of the state's names in the checkpoint: ``"encoder."`` loads only a model's
            encoder.

    Raises:
        GulliverError: the step does not exist; names, shapes, or an optimizer's class or groups do
            not match; a value does not fit; a tensor is on meta; a file is corrupt.
    """
    return read_during_writes(path, step, lambda folder: _load(folder, state, strict, prefix))


def read_during_writes(
    path: Path | str, step: int | None, read: Callable[[Path], Result]
) -> Result:
    """Reads a step; if a writer removes its folder meanwhile, finds and reads another."""
    # Another process may be saving there and keep only few steps. Readers take no lock; a folder
    # that is replaced or removed meanwhile is detected by its identity.
    for left in reversed(range(ATTEMPTS)):
        folder, before = None, _identity(Path(path))
        try:
            folder = step_folder(path, step)
            before = _identity(folder)
            return read(folder)
        except GulliverError:
            now = _identity(folder or Path(path))
            went = folder is not None and now is None
            if not left or (before == now and not went):
                raise
    raise AssertionError("the last attempt returns or raises")


def _identity(folder: Path) -> object:
    """Returns a value that changes with a folder or its entries; None if the folder is gone."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _load(folder: Path, state: Mapping[str, Any] | None, strict: bool, prefix: str) -> Loaded:
    with StepReader(folder) as reader:
        loaded = Loaded(reader.manifest.step)
        if state is None:
            for entry in reader.entries:
                rank = group_rank() if reader.is_per_rank(entry) else None
                loaded.values[entry] = reader.value(entry, rank)
        else:
            fill_all(plan_all(reader, state, strict, prefix, loaded), loaded)
        return loaded


def plan_all(
    reader: StepReader, state: Mapping[str, Any], strict: bool, prefix: str, loaded: Loaded
) -> dict[str, Filling]:
    """Plans how each entry of a state is filled; changes nothing."""
    found: dict[str, Filling] = {}
    for entry, value in _present(reader, state, loaded, strict).items():
        rank = group_rank() if isinstance(value, PerRank) or reader.is_per_rank(entry) else None
        if rank is not None and rank >= reader.manifest.world_size:
            # There are more ranks than at saving: a new rank has no value of its own.
            loaded.absent.append(entry)
            continue
        held = value.value if isinstance(value, PerRank) else value
        found[entry] = plan(reader, entry, held, rank, strict, prefix)
        if found[entry].odd:
            loaded.mismatches[entry] = found[entry].odd
    return found


def fill_all(fillings: Mapping[str, Filling], loaded: Loaded) -> None:
    for entry, filling in fillings.items():
        value = filling.fill()
        if not filling.is_object:
            loaded.values[entry] = value


def _present(
    reader: StepReader, state: Mapping[str, Any], loaded: Loaded, strict: bool
) -> dict[str, Any]:
    found = {}
    for entry, value in state.items():
        if entry in reader.entries:
            found[entry] = value
        elif strict:
            raise GulliverError(
                f"{reader.folder} has no entry {entry!r}: it has {', '.join(reader.entries)}"
            )
        else:
            loaded.absent.append(entry)
    return found
