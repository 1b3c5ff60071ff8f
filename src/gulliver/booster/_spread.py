"""Files of models that no rank has all of: gathered and cut again one tensor at a time.

What `_states.py` does for models that every rank has whole, in the same files: each loads what the
other wrote. Every rank calls every function here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster._checkpoint import agreed, names_of_all
from gulliver.booster._states import (
    SKELETON,
    TENSORS,
    check_groups,
    read_skeleton,
    saved_groups,
    stepped,
)
from gulliver.checkpoint import (
    GatheredWeights,
    Mismatch,
    PartsSaver,
    begin_huggingface,
    begin_single,
    gather_huggingface,
    join_state,
    load_huggingface,
    match_huggingface,
    merge_skeletons,
    on_gathered,
    open_weights,
    refuse_existing,
    split_state,
    write_json,
    write_single,
)
from gulliver.comm import broadcast_object, gather_objects
from gulliver.errors import GulliverError
from gulliver.memory import Part, whole_shape
from gulliver.parallel import BoostedOptimizer, Counter, ZeroOptimizer
from gulliver.parallel.zero import export_leaves, import_leaves


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def write_model(holder: BoostedOptimizer, model: nn.Module, path: Path) -> None:
    """Writes a model as one file, under its own names and in its own dtypes."""

    def write(weights: GatheredWeights) -> None:
        write_single(weights, {name: name for name in weights.infos}, path)

    on_gathered(holder.model_leaves(model), write, _dtypes(model))


def begin_model(holder: BoostedOptimizer, model: nn.Module, path: Path) -> PartsSaver:
    """Begins to write what `write_model` writes, while training goes on."""
    return begin_single(holder.model_leaves(model), model.buffers(), path, _of_all(_dtypes(model)))


def write_folder(holder: BoostedOptimizer, model: nn.Module, folder: Path, **options: Any) -> None:
    """Writes a model as a Hugging Face folder; tied weights are there once."""
    aliases = _of_all(holder.canonical_names(model))
    leaves = holder.model_leaves(model)
    gather_huggingface(leaves, folder, dtypes=_dtypes(model), aliases=aliases, **options)


def begin_folder(
    holder: BoostedOptimizer, model: nn.Module, folder: Path, **options: Any
) -> PartsSaver:
    """Begins to write what `write_folder` writes, while training goes on."""
    agreed(lambda: refuse_existing(folder))
    aliases, dtypes = _of_all(holder.canonical_names(model)), _of_all(_dtypes(model))
    leaves = holder.model_leaves(model)
    return begin_huggingface(leaves, model.buffers(), folder, dtypes, aliases, **options)


def _of_all(mine: dict[str, Any]) -> dict[str, Any]:
    """What any rank has, by name; every rank calls it."""
    return {name: value for found in gather_objects(mine) for name, value in found.items()}


def read_model(holder: BoostedOptimizer, model: nn.Module, path: Path, strict: bool) -> list[str]:
    """Fills a model from a file or a Hugging Face folder, each rank with what it holds.

    Returns:
        Names that were missing or left over.
    """
    leaves, elsewhere = holder.load_leaves(model), names_of_all(model, holder)
    aliases = holder.canonical_names(model)
    found = Mismatch()

    def check() -> None:
        odd = match_huggingface(leaves, path, strict, "", elsewhere, aliases)
        found.missing, found.unexpected = odd.missing, odd.unexpected

    agreed(check)
    holder.before_model_load()
    agreed(lambda: _ignored(load_huggingface(leaves, path, False, "", elsewhere, aliases)))
    holder.after_model_load()
    every = gather_objects(found.missing + found.unexpected)
    return list(dict.fromkeys(name for names in every for name in names))


def _ignored(_: object) -> None:
    """What was said before is not said again."""


def write_optimizer(optimizer: BoostedOptimizer, folder: Path) -> None:
    """Writes what `booster._states.write_optimizer` does, one tensor at a time."""
    saved = {
        name: {k: v.to_value() if isinstance(v, Counter) else v for k, v in found.items()}
        for name, found in export_leaves(_zero(optimizer)).items()
    }
    content = {"state": saved, "groups": saved_groups(optimizer), "parameters": stepped(optimizer)}
    tensors, skeleton = split_state(content)
    merged = merge_skeletons(gather_objects(skeleton))
    mark = broadcast_object(uuid.uuid4().hex)

    def write(weights: GatheredWeights) -> None:
        names = {name: name for name in weights.infos}
        write_single(weights, names, folder / TENSORS, metadata={"mark": mark})
        kind = type(optimizer.inner).__name__
        write_json(folder / SKELETON, {"optimizer": kind, "mark": mark, "state": merged})

    on_gathered(tensors, write)


def _zero(optimizer: BoostedOptimizer) -> ZeroOptimizer:
    assert isinstance(optimizer, ZeroOptimizer), "models are spread over ranks by ZeRO's kind"
    return optimizer


@dataclass(frozen=True)
class _Stored:
    """Stands for a tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_optimizer(optimizer: BoostedOptimizer, folder: Path) -> None:
    """Fills the state of what this rank trains from what `write_optimizer` wrote."""
    ours = optimizer.all_group_names()
    content: dict[str, Any] = {}
    agreed(lambda: content.update(_checked(optimizer, folder, ours)))
    entries = content["state"]
    targets = import_leaves(_zero(optimizer), entries)
    wanted = {entries[name][key].name: leaf for (name, key), leaf in targets.items()}
    agreed(lambda: _ignored(wanted and load_huggingface(wanted, folder / TENSORS, strict=False)))
    _zero(optimizer).publish_masters()
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        group.update(saved["options"])


def _checked(optimizer: BoostedOptimizer, folder: Path, ours: list[list[str]]) -> Mapping[str, Any]:
    """Groups and state, with stand-ins for tensors that are to be read."""
    skeleton = read_skeleton(optimizer, folder)
    with open_weights(folder / TENSORS) as weights:
        infos = weights.infos
        stored: dict[str, Any] = {n: _Stored(n, i.shape, i.dtype) for n, i in infos.items()}
        # Single values are counters and options: all ranks need them.
        singles = {n: torch.empty(i.shape, dtype=i.dtype) for n, i in infos.items() if not i.shape}
        weights.read({n: Part(value.view(1), ()) for n, value in singles.items()})
    content = join_state(stored | singles, skeleton)
    check_groups(ours, content["groups"], folder)
    for found in content["groups"]:
        for key, value in found["options"].items():
            if isinstance(value, _Stored):
                raise GulliverError(f"{folder} has a tensor for {key!r}: use booster.load")
    shapes = {name: whole_shape(p) for p, name in optimizer.names.items()}
    state = {name: _as_saved(found) for name, found in content["state"].items()}
    for name, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, _Stored) and value.shape != shapes.get(name, value.shape):
                raise GulliverError(
                    f"{folder} does not fit: the optimizer state of {name!r} does not fit: {key} "
                    f"is {value.shape}, the parameter {shapes[name]}"
                )
    return {"groups": content["groups"], "state": state}


def _as_saved(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, _Stored) else Counter.of(v) for k, v in entries.items()}
