"""Loads a public video model: a Hugging Face folder, a safetensors file, or several with an index.

    model = load_model("OpenSora-STDiT-v3")
    model = load_model("Open_Sora_v2.safetensors", torch.device("cuda"), torch.bfloat16)

Which model it is and how large follows from names and shapes of the tensors; a ``config.json``
beside them says the rest. Names are matched strictly, before any memory is filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver import models
from gulliver.checkpoint import load_huggingface, open_weights, read_json
from gulliver.errors import GulliverError
from gulliver.models import CONFIGS, CONFIGURATIONS, fields_of, look_of, make_of_fields

NO_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "type")
"""Entries of public configurations that say nothing of the model's sizes."""
KINDS = frozenset(one.kind for one in CONFIGURATIONS.values())
"""Classes of public models."""


def load_model(
    path: Path | str,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    kind: str | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds the model that files hold, and fills it.

    Args:
        path: Hugging Face folder, safetensors file or index of several.
        device: device to fill it on; None for the CPU.
        dtype: dtype to convert it to; None for that of the files.
        kind: class of `gulliver.models` that it must be; None for whichever it is.
        overrides: arguments of its class, such as ``input_size`` of an STDiT.

    Returns:
        The model, in evaluation mode.

    Raises:
        GulliverError: the files are missing or broken, are those of another model, which is named,
            or do not match their configuration; they hold integers where weights belong, or
            float8 and no dtype is named.
    """
    model = outline_model(path, dtype, kind=kind, **overrides)
    model = model.to_empty(device=device or torch.device("cpu"))
    load_huggingface(model, Path(path))
    return model.eval()


def outline_model(
    path: Path | str,
    dtype: torch.dtype | None = None,
    *,
    kind: str | None = None,
    **overrides: Any,
) -> nn.Module:
    """Builds the model that files hold on meta, in their dtype: `load_model` without the memory."""
    # Only headers are read, so that parts which do not belong together are refused at once.
    made, fields, infos = _read(Path(path), kind, overrides)
    with torch.device("meta"):
        model = make_of_fields(made, fields, path)
    _check_positions(Path(path), model, {name: info.shape for name, info in infos.items()})
    return model.to(dtype_of_files(path, model, infos, dtype)).eval()


def dtype_of_files(
    path: Path | str,
    model: nn.Module,
    infos: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> torch.dtype:
    """Returns the dtype to fill a model in: the one that is asked for, or that of its files."""
    weights = (name for name, held in model.state_dict().items() if held.is_floating_point())
    for name in weights:
        found = infos[name].dtype if name in infos else torch.float32
        stored = f"{path}: tensor {name!r} is {str(found).removeprefix('torch.')}"
        if not found.is_floating_point:
            raise GulliverError(f"{stored}: expected floating-point weights, not quantised ones")
        if found.itemsize == 1 and dtype is None:
            raise GulliverError(f"{stored}, which nothing computes in: pass dtype=torch.bfloat16")
    floating = (info.dtype for info in infos.values() if info.dtype.is_floating_point)
    return dtype or next(floating, torch.float32)


def fields_of_files(path: Path | str) -> tuple[str, dict[str, Any]]:
    """Returns the class of `gulliver.models` that files hold, and its arguments."""
    made, fields, *_ = _read(Path(path), None, {})
    return made.__name__, fields


def _read(
    path: Path, kind: str | None, overrides: Mapping[str, Any]
) -> tuple[type[nn.Module], dict[str, Any], dict[str, Any]]:
    """Reads headers and configuration: class, arguments, tensors by name."""
    with open_weights(path) as weights:
        infos = dict(weights.infos)
    shapes = {name: info.shape for name, info in infos.items()}
    if kind is not None:
        check_kind(path, kind, shapes)
    try:
        found, fields = fields_of(shapes)
    except GulliverError as error:
        raise GulliverError(f"{path}: {error}") from None
    made: type[nn.Module] = getattr(models, found)
    fields |= _configured(path, made) | dict(overrides)
    return made, fields, infos


def check_kind(path: Path | str, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses the state dict of another model, saying which it looks like."""
    look = look_of(shapes)
    if look is None or look.kind != kind:
        found = look.told if look else "nothing known"
        advice = f": load it as {look.kind}" if look and look.kind else ""
        raise GulliverError(f"{path} is no {kind}, it looks like {found}{advice}")


def _configured(path: Path, kind: type[nn.Module]) -> dict[str, Any]:
    """Fields of the ``config.json`` beside the weights."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    # Beside a single file may lie that of something else.
    if not file.is_file() or (path.is_file() and path.suffix == ".safetensors"):
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise GulliverError(f"{file} is no configuration: expected an object")
    said = str(content.get("model_type", ""))
    if said.lower() in {name.lower() for name in KINDS - {kind.__name__}}:
        raise GulliverError(
            f"{file} says model_type {said!r}, the tensors beside it are of an {kind.__name__}: "
            "put the files of one model together"
        )
    known = {field.name for field in dataclasses.fields(CONFIGS[kind.__name__])}
    return {
        name: value
        for name, value in content.items()
        # What transformers writes for every model is not the model's.
        if name in known
        or not (name in NO_FIELDS or name.startswith("_") or _of_transformers(name))
    }


def _of_transformers(name: str) -> bool:
    try:
        from transformers import PretrainedConfig
    except ImportError:
        return name == "transformers_version"
    return name == "transformers_version" or name in PretrainedConfig().to_dict()


def _check_positions(path: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses fixed positions of another size of clip, which names alone would not tell."""
    for name in ("pos_embed", "pos_embed_temporal"):
        wanted = model.state_dict().get(name)
        if wanted is not None and tuple(wanted.shape) != shapes.get(name):
            counts = [shapes.get(n, (1, 0))[1] for n in ("pos_embed_temporal", "pos_embed")]
            raise GulliverError(
                f"{path} has positions of {counts[0]} frames of {counts[1]} tokens: pass "
                "input_size=(frames, rows, columns) of such latents, as 16, 32, 32"
            )
