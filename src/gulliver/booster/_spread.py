"""Files of models that no rank has whole: gathered and cut one tensor at a time.

The files are those of models that every rank has whole. Every rank calls every function here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster._checkpoint import names_of_all
from gulliver.booster._model import dtypes_of, narrow_dtypes
from gulliver.checkpoint import (
    GatheredWeights,
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
from gulliver.comm import gather_objects, raise_on_any_rank
from gulliver.parallel import BoostedOptimizer


def write_gathered(holder: BoostedOptimizer, model: nn.Module, path: Path) -> None:
    """Writes a model as one file, under its own names and in its own dtypes."""

    def write(weights: GatheredWeights) -> None:
        write_single(weights, {name: name for name in weights.infos}, path)

    on_gathered(holder.checkpoint.model_leaves(model), write, dtypes_of(model))


def begin_gathered(holder: BoostedOptimizer, model: nn.Module, path: Path) -> PartsSaver:
    """Begins to write what `write_gathered` writes, while training goes on."""
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
    raise_on_any_rank(lambda: refuse_existing(folder))
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
    raise_on_any_rank(lambda: refuse_existing(folder))
    aliases, dtypes = _of_all(holder.checkpoint.canonical_names(model)), _of_all(dtypes_of(model))
    leaves, limit = holder.checkpoint.model_leaves(model), holder.checkpoint.copy_limit
    return begin_huggingface(leaves, folder, dtypes, aliases, memory_limit=limit, **options)


def _of_all(mine: dict[Any, Any]) -> dict[Any, Any]:
    """Joins the entries of all ranks by name; every rank calls it."""
    return {name: value for found in gather_objects(mine) for name, value in found.items()}


def read_sharded(
    holder: BoostedOptimizer, model: nn.Module, path: Path, strict: bool, checked: bool = False
) -> list[str]:
    """Fills a model from a file or a Hugging Face folder, each rank with what it holds."""
    leaves, elsewhere = holder.checkpoint.load_leaves(model), names_of_all(model, holder)
    aliases = holder.checkpoint.canonical_names(model)
    narrow = {} if checked else narrow_dtypes(model)
    odd = raise_on_any_rank(
        lambda: match_huggingface(
            leaves, path, strict, "", elsewhere, aliases, dtypes=narrow, like=model
        )
    )
    holder.checkpoint.before_model_load()
    # Mismatches were found and reported above.
    given = leaves, path, False, "", elsewhere, aliases, True, model
    raise_on_any_rank(lambda: load_huggingface(*given))
    holder.checkpoint.after_model_load()
    every = gather_objects(odd.missing + odd.unexpected)
    return list(dict.fromkeys(name for names in every for name in names))
