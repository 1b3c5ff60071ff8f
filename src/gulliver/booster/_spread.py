"""Files of models that no rank has all of: gathered and cut again one tensor at a time.

What `_states.py` does for models that every rank has whole, in the same files: each loads what the
other wrote. Every rank calls every function here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster._checkpoint import agreed, names_of_all
from gulliver.booster._model import dtypes_of, narrow_dtypes
from gulliver.checkpoint import (
    GatheredWeights,
    Mismatch,
    PartsSaver,
    Weights,
    adapter_names,
    begin_huggingface,
    begin_single,
    gather_huggingface,
    load_huggingface,
    match_huggingface,
    on_gathered,
    refuse_existing,
    write_adapters,
    write_single,
)
from gulliver.comm import gather_objects
from gulliver.parallel import BoostedOptimizer


def write_model(holder: BoostedOptimizer, model: nn.Module, path: Path) -> None:
    """Writes a model as one file, under its own names and in its own dtypes."""

    def write(weights: GatheredWeights) -> None:
        write_single(weights, {name: name for name in weights.infos}, path)

    on_gathered(holder.checkpoint.model_leaves(model), write, dtypes_of(model))


def begin_model(holder: BoostedOptimizer, model: nn.Module, path: Path) -> PartsSaver:
    """Begins to write what `write_model` writes, while training goes on."""
    leaves, dtypes = holder.checkpoint.model_leaves(model), _of_all(dtypes_of(model))
    return begin_single(leaves, path, dtypes, holder.checkpoint.copy_limit)


def write_folder(holder: BoostedOptimizer, model: nn.Module, folder: Path, **options: Any) -> None:
    """Writes a model as a Hugging Face folder; tied weights are there once."""
    aliases = _of_all(holder.checkpoint.canonical_names(model))
    leaves = holder.checkpoint.model_leaves(model)
    gather_huggingface(leaves, folder, dtypes=dtypes_of(model), aliases=aliases, **options)


def write_adapter_folder(
    holder: BoostedOptimizer,
    model: nn.Module,
    folder: Path,
    use_async: bool,
    dtype: torch.dtype | None = None,
) -> PartsSaver | None:
    """Writes PEFT's adapters of a model, or begins to while training goes on."""
    agreed(lambda: refuse_existing(folder))
    names = _of_all({0: adapter_names(model)})[0]
    wanted = {source for sources in names.values() for source in sources.values()}
    leaves = {n: leaf for n, leaf in holder.checkpoint.model_leaves(model).items() if n in wanted}
    dtypes = _of_all(dtypes_of(model))

    def write(weights: Weights) -> None:
        write_adapters(weights, model, folder, dtypes if dtype is None else dtype, names=names)

    if not use_async:
        on_gathered(leaves, write, dtypes_of(model))
        return None
    saver = PartsSaver(folder, write, holder.checkpoint.copy_limit)
    saver.begin(leaves)
    return saver


def begin_folder(
    holder: BoostedOptimizer, model: nn.Module, folder: Path, **options: Any
) -> PartsSaver:
    """Begins to write what `write_folder` writes, while training goes on."""
    agreed(lambda: refuse_existing(folder))
    aliases, dtypes = _of_all(holder.checkpoint.canonical_names(model)), _of_all(dtypes_of(model))
    leaves, limit = holder.checkpoint.model_leaves(model), holder.checkpoint.copy_limit
    return begin_huggingface(leaves, folder, dtypes, aliases, memory_limit=limit, **options)


def _of_all(mine: dict[Any, Any]) -> dict[Any, Any]:
    """What any rank has, by name; every rank calls it."""
    return {name: value for found in gather_objects(mine) for name, value in found.items()}


def read_model(
    holder: BoostedOptimizer, model: nn.Module, path: Path, strict: bool, checked: bool = False
) -> list[str]:
    """Fills a model from a file or a Hugging Face folder, each rank with what it holds.

    Args:
        holder: optimizer that the model was boosted with.
        model: boosted model.
        path: path of the file or folder.
        strict: whether to refuse names that are missing or left over.
        checked: whether the values are known to fit the dtypes that are computed with.

    Returns:
        Names that were missing or left over.
    """
    leaves, elsewhere = holder.checkpoint.load_leaves(model), names_of_all(model, holder)
    aliases = holder.checkpoint.canonical_names(model)
    found, narrow = Mismatch(), {} if checked else narrow_dtypes(model)

    def check() -> None:
        odd = match_huggingface(leaves, path, strict, "", elsewhere, aliases, narrow, model)
        found.missing, found.unexpected = odd.missing, odd.unexpected

    agreed(check)
    holder.checkpoint.before_model_load()
    given = leaves, path, False, "", elsewhere, aliases, True, model
    agreed(lambda: _ignored(load_huggingface(*given)))
    holder.checkpoint.after_model_load()
    every = gather_objects(found.missing + found.unexpected)
    return list(dict.fromkeys(name for names in every for name in names))


def _ignored(_: object) -> None:
    """What was said before is not said again."""
