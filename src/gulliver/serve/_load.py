"""Loading of a model and its tokenizer from a folder that transformers wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint import open_weights, read_json
from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.finetune import load_tokenizer
from gulliver.precision.int8 import MODES
from gulliver.serve._families import check_type
from gulliver.serve._filling import Filling, is_quantised
from gulliver.serve._memory import free_bytes, size_words
from gulliver.serve._offload import StreamedWeights, group_units, unit_paths
from gulliver.serve._source import Source, build_on_meta
from gulliver.serve._ways import ModelOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    folder: Path | str, dtype: str | torch.dtype | None = None, quantize: str | None = None
) -> tuple[Any, Any]:
    """Loads a model and its tokenizer.

    Args:
        folder: folder with configuration, safetensors and tokenizer, as transformers writes it.
        dtype: ``"float32"`` or ``"bfloat16"``, or torch's own; None takes that of the files.
        quantize: mode of `gulliver.replace_module`, such as ``"int8_dynamic"``; the weights are
            quantised layer by layer as they are read.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        GulliverError: the folder lacks something, the model is of a type that is not served, or
            there is too little memory; it says what would fit.
    """
    folder, dtype = Path(folder), dtype_name(dtype)
    check_options(folder, dtype, quantize)
    # Before the model: it is the quickest to be found missing.
    tokenizer = load_tokenizer(folder)
    return load_model(folder, ModelOptions(dtype=dtype, quantize=quantize))[0], tokenizer  # type: ignore[arg-type]


def load_model(folder: Path, options: ModelOptions) -> tuple[Any, StreamedWeights | None]:
    """Reads a folder's model; with `memory=` also returns what brings its weights from a disk."""
    if options.limit is None:
        check_memory(folder, options.dtype, options.quantize)
    model = build_on_meta(folder, kept_dtype(folder, options.dtype))
    paths = unit_paths(model)
    with Source(folder, model) as source:
        filling = Filling(model, source, options.quantize, is_quantised(folder))
        return model, fill_model(model, paths, filling, options)


def fill_model(
    model: Any, paths: list[str], filling: Filling, options: ModelOptions
) -> StreamedWeights | None:
    """Fills a model on meta, within `memory=` if given; `paths` are its units as it was float."""
    limit = options.limit
    if limit is None:
        filling.fill_all()
        return None
    units = group_units(model, paths)
    streamed = StreamedWeights(
        units, lambda unit: filling.fill(unit.path, unit.module), limit, options.disk
    )
    model.eval().requires_grad_(False)
    return streamed


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """Writes torch's own dtype as the name that options have."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def check_options(folder: Path, dtype: str | None, quantize: str | None) -> None:
    """Refuses folders without a served model, and formats that it cannot have."""
    check_folder(folder)
    for name, value, known in (("dtype", dtype, DTYPES), ("quantize", quantize, MODES)):
        if value is not None and value not in known:
            raise GulliverError(f"{name}={value!r} is unknown: {nearest(value, known)}")
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("serving needs transformers", "serve")
    if is_quantised(folder) and (dtype is not None or quantize is not None):
        raise GulliverError(f"{folder} is quantised already: give neither dtype nor quantize")


def check_memory(folder: Path, dtype: str | None, quantize: str | None) -> None:
    """Refuses weights that the memory does not hold, and says which would fit."""
    if not is_quantised(folder):
        size, kept = _sizes(folder)
        _check_memory(folder, size, DTYPES[dtype] if dtype is not None else kept, quantize)


def kept_dtype(folder: Path, dtype: str | None) -> torch.dtype:
    """The dtype that a folder's model computes in."""
    if is_quantised(folder):
        return torch.float32
    return DTYPES[dtype] if dtype is not None else _sizes(folder)[1]


def check_folder(folder: Path) -> None:
    """Refuses a folder that has no model that is served."""
    if not (folder / "config.json").is_file():
        raise GulliverError(
            f"{folder} has no config.json: give a folder that save_pretrained of transformers wrote"
        )
    kind = read_json(folder / "config.json").get("model_type")
    if not isinstance(kind, str):
        raise GulliverError(f"{folder}/config.json names no model_type: it is not of transformers")
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    whole = ("model.safetensors", "model.safetensors.index.json")
    if shards and not any((folder / name).is_file() for name in whole):
        raise GulliverError(
            f"{folder} has {shards[0].name} and no model.safetensors.index.json: it is still being "
            "written, or was not copied whole"
        )
    check_type(kind)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a text: of the generation configuration, else of the tokenizer."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = own if own is not None else getattr(tokenizer, "eos_token_id", None)
    if given is None:
        return []
    return [int(token) for token in (given if isinstance(given, list) else [given])]


def _sizes(folder: Path) -> tuple[int, torch.dtype]:
    """Number of elements of the weights, and the dtype that most of them have."""
    counts: dict[torch.dtype, int] = {}
    with open_weights(folder) as weights:
        for info in weights.infos.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.numel
    most = max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32
    return sum(counts.values()), most if most in DTYPES.values() else torch.float32


def _check_memory(folder: Path, size: int, dtype: torch.dtype, quantize: str | None) -> None:
    """Refuses weights that the memory does not hold, and says which would fit."""
    free = free_bytes(torch.device("cpu"))
    bits = {"int4": 5, "int8": 9, "int8_dynamic": 9, "bfloat16": 16, "float32": 32}
    mine = quantize or str(dtype).removeprefix("torch.")
    needs = size * bits[mine] // 8
    if needs <= free:
        return
    fit = [name for name in bits if size * bits[name] // 8 <= free]
    fit = [f'dtype="{name}"' if name in DTYPES else f'quantize="{name}"' for name in fit]
    raise GulliverError(
        f"{folder}: {size:,} weights in {mine} take {size_words(needs)}, and {size_words(free)} of "
        "memory are free: "
        + (f"{fit[-1]} would fit" if fit else "no format that is known would fit")
    )
