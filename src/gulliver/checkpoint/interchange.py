"""Exports `Weights` as Hugging Face folders, safetensors files and PEFT adapter folders.

A PEFT model without ``adapter_config.json`` would be loaded as a full model, with random weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.huggingface import ModelWeights, model_weights
from gulliver.checkpoint.weights import (
    INDEX,
    SUFFIX,
    MemoryWeights,
    TensorInfo,
    Weights,
    is_step_or_run,
    open_weights,
)
from gulliver.checkpoint.writing import (
    DTypes,
    FilePlan,
    Progress,
    dtype_of,
    new_folder,
    plan_file,
    refuse_existing,
    write_files,
    write_single,
)
from gulliver.errors import GulliverError, nearest
from gulliver.memory.parts import Part

FILE = "adapter_model.safetensors"
DEFAULT = "default"
"""Name of the adapter stored in the folder itself; others have subfolders."""


def has_adapters(model: Any) -> bool:
    return isinstance(model, nn.Module) and bool(getattr(model, "peft_config", None))


def adapter_names(model: Any) -> dict[str, dict[str, str]]:
    """Maps each adapter's file names to the model's names."""
    from peft import PeftModel, get_peft_model_state_dict

    # PEFT selects and renames by name only, so nothing needs to be gathered for it.
    own = {name: name for name in model.state_dict(keep_vars=True)}
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    found = dict[str, dict[str, str]]()
    for adapter, config in model.peft_config.items():
        refusal = GulliverError(
            f"adapter {adapter!r} is {config.peft_type}, which has no folder format: save a step, "
            "or the model with save_model"
        )
        try:
            names: Any = get_peft_model_state_dict(model, own, adapter)
        except (AttributeError, TypeError) as error:
            raise refusal from error
        if not names or not all(isinstance(source, str) for source in names.values()):
            raise refusal
        found[adapter] = {prefix + name: source for name, source in names.items()}
    return found


def write_adapters(
    weights: Weights,
    model: Any,
    folder: Path,
    dtype: DTypes = None,
    progress: Progress | None = None,
    names: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    refuse_existing(folder)
    found = names or adapter_names(model)
    plans = {n: plan_file(folder / FILE, weights, own, dtype) for n, own in found.items()}
    with new_folder(folder, sum(plan.image.nbytes for plan in plans.values())) as partial:
        for adapter, plan in plans.items():
            plan.path = (partial if adapter == DEFAULT else partial / adapter) / FILE
            plan.path.parent.mkdir(exist_ok=True)
        write_files(weights, list(plans.values()), dtype, progress, str(folder))
        for adapter, plan in plans.items():
            config = model.peft_config[adapter]
            was, config.inference_mode = config.inference_mode, True
            try:
                config.save_pretrained(str(plan.path.parent))
            finally:
                config.inference_mode = was
    return folder


# Conversion of models and steps to Hugging Face folders.
#
# `save_huggingface` and `export_huggingface` use `writing.py`, which streams tensors into new
# files, and `weights.py`, which reads them. `huggingface.py` fills models from such folders.
#
# A Hugging Face folder contains ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
# ``model.safetensors.index.json``, whose ``weight_map`` maps tensors to files. Tensors with several
# names in a model are stored once.


CONFIG = "config.json"


def save_huggingface(
    model: nn.Module | Mapping[str, Tensor],
    folder: Path | str,
    max_shard_bytes: float = 5e9,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a model as a Hugging Face folder atomically; call it on one rank.

    For a model with PEFT adapters only the adapters are written, as a folder that PEFT reads.
    Tensors that share memory are written once; their other names go into the file's metadata, as in
    `safetensors.torch.save_model`.

    Args:
        model: model to write, or tensors by name, on any device.
        folder: folder to create; it must not exist.
        max_shard_bytes: maximum bytes of tensors per file; a larger tensor gets its own file.
        config: content of ``config.json``; None writes none.
        dtype: dtype to which floating-point tensors are converted; None keeps their own.
        progress: callback that receives the bytes written and the total.

    Returns:
        The folder.

    Raises:
        GulliverError: the folder exists or cannot be written, or a tensor cannot be saved. For a
            tensor sharded over ranks, save a step and export it.
    """
    if has_adapters(model):
        names = adapter_names(model)
        own = model.state_dict(keep_vars=True)  # type: ignore[union-attr]
        chosen = {n: own[n] for sources in names.values() for n in sources.values()}
        return write_adapters(MemoryWeights(chosen), model, Path(folder), dtype, progress, names)
    last: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    weights = MemoryWeights(tensors, last)  # type: ignore[arg-type]
    return write_untied(
        weights, Path(folder), max_shard_bytes, config, dtype, progress, weights.aliases
    )


def export_huggingface(
    path: Path | str,
    target: Path | str,
    entry: str = "model",
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Converts a saved step to a Hugging Face folder or a single safetensors file.

    Shards are merged. Everything read is verified.

    Args:
        path: folder of a step, of a run, or a Hugging Face folder to split or convert again.
        target: folder or ``*.safetensors`` file to create; it must not exist.
        entry: entry of the step whose tensors are written.
        max_shard_bytes: maximum bytes of tensors per file; a larger tensor gets its own file.
        dtype: dtype to which floating-point tensors are converted; None keeps their own.
        prefix: export only names with this prefix, and remove it.
        config: content of ``config.json``; None copies the source folder's, if any.
        step: number of the step of a run; None for the complete step that was saved last.
        progress: callback that receives the bytes written and the total.

    Returns:
        The target.

    Raises:
        GulliverError: the step does not exist or is corrupt, or the target exists or cannot be
            written; no partial target remains.
    """
    target = Path(target)
    folder = dtype is not None and step is None and not is_step_or_run(Path(path))
    # FP8 values need their scales to be converted.
    opened = model_weights(path, None) if folder else open_weights(path, entry, step)
    with opened as weights:
        names = _unprefixed(weights, prefix)
        if target.suffix == SUFFIX:
            refuse_existing(target)
            write_single(weights, names, target, dtype, progress)
            return target
        if config is None:
            config = _config_of(weights)
        return write_untied(weights, target, max_shard_bytes, config, dtype, progress, names=names)


def _config_of(weights: Weights) -> Mapping[str, Any] | None:
    file = weights.path / CONFIG
    found = read_json(file) if file.is_file() else None
    if isinstance(found, dict) and isinstance(weights, ModelWeights):
        found.pop("quantization_config", None)
    return found if isinstance(found, Mapping) else None


def _unprefixed(weights: Weights, prefix: str) -> dict[str, str]:
    names = {n.removeprefix(prefix): n for n in weights.infos if n.startswith(prefix)}
    if not names or "" in names:
        raise GulliverError(
            f"no tensor name in {weights.path} starts with {prefix!r}: "
            f"{nearest(prefix, [name.split('.')[0] + '.' for name in weights.infos])}"
        )
    return names


def write_untied(
    weights: Weights,
    folder: Path,
    max_shard_bytes: float = 5e9,
    config: Mapping[str, Any] | None = None,
    dtype: DTypes = None,
    progress: Progress | None = None,
    aliases: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Path:
    """Writes a Hugging Face folder with one name per tied weight; `aliases` has the others."""
    refuse_existing(folder)
    if not max_shard_bytes > 0:
        raise GulliverError(f"max_shard_bytes={max_shard_bytes} is too small: use 1 or more")
    tied = {name: kept for name, kept in (aliases or {}).items() if kept in weights.infos}
    names = names or {name: name for name in weights.infos if name not in tied}
    infos = {
        name: weights.infos[source].as_dtype(dtype_of(dtype, source))
        for name, source in names.items()
    }
    shards = _shards(infos, max_shard_bytes)
    plans = []
    for number, shard in enumerate(shards):
        count = f"-{number + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        text = {name: kept for name, kept in tied.items() if kept in shard}
        sources = {name: names[name] for name in shard}
        plans.append(plan_file(folder / f"model{count}{SUFFIX}", weights, sources, dtype, text))
    with new_folder(folder, sum(plan.image.nbytes for plan in plans)) as partial:
        for plan in plans:
            plan.path = partial / plan.path.name
        write_files(weights, plans, dtype, progress, str(folder))
        if len(plans) > 1:
            write_json(partial / f"model{INDEX}", _index(plans, infos))
        if config is not None:
            write_json(partial / CONFIG, dict(config))
    return folder


def _index(plans: list[FilePlan], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(info.nbytes for info in infos.values())},
        "weight_map": {name: plan.path.name for plan in plans for name in plan.sources},
    }


def _shards(infos: Mapping[str, TensorInfo], limit: float) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.nbytes
    return shards
