"""Quantised models as Hugging Face folders, and back into a model of the same configuration.

The file has the tensors of the state dict, and in its text what they are quantised to: without that
it is not taken for a float model's, nor another mode's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gulliver.checkpoint.files import read_metadata, write_tensors
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.checkpoint.writing import refuse_existing
from gulliver.errors import GulliverError
from gulliver.parallel.tensor.apply import materialize
from gulliver.precision.int8.layers import QuantizedLayer
from gulliver.precision.int8.replace import replace_module, report_of

FILE, KEY = "quantized.safetensors", "gulliver_quantization"
"""Not model.safetensors: transformers would load the int8 values as weights, and only warn."""
_OTHERS = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".onnx"}
WEIGHTS = {".safetensors", *_OTHERS}
"""Endings of files of weights, which a quantised folder has its own of."""
FOLDERS = ("additional_chat_templates",)
"""Folders that belong to a tokenizer."""


def save_quantized(model: nn.Module, folder: Path | str) -> Path:
    """Writes a quantised model, and its configuration where it has one.

    Args:
        model: model that `replace_module` or `stream_quantized` treated, whole on this rank.
        folder: folder that is made.

    Raises:
        GulliverError: the model is not quantised, or is a shard; the folder exists.
    """
    folder = Path(folder)
    report = report_of(model)
    layers = {p: m for p, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    shard = next((p for p, m in layers.items() if hasattr(m, "rank_group")), None)
    if shard is not None:
        raise GulliverError(f"{shard} is a rank's shard: save from a model that is not sharded")
    refuse_existing(folder)
    threshold = next((m.threshold for m in layers.values() if m.mode != "int8"), None)
    about = {
        "version": 1,
        "mode": report.mode,
        "threshold": threshold if threshold != float("inf") else None,
        "layers": {path: layer.mode for path, layer in layers.items()},
    }
    folder.mkdir(parents=True)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    elif hasattr(model, "save_config"):  # diffusers' networks
        cast(Any, model).save_config(folder)
    write_tensors(folder / FILE, _untied(model), {"format": "pt", KEY: json.dumps(about)})
    return folder


def copy_companions(folder: Path, out: Path) -> None:
    """Copies all files that are not weights, so that the quantised folder is used alike."""
    # Those are the tokenizer's files, chat templates, the generation configuration, and whatever
    # else is no weights; what `out` has already stays.
    for path in folder.iterdir():
        weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_dir() and path.name in FOLDERS:
            shutil.copytree(path, out / path.name)
        elif path.is_file() and not weights and not (out / path.name).exists():
            shutil.copy2(path, out / path.name)


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state, each tensor under the first of its names."""
    found: dict[Any, str] = {}
    state = model.state_dict()
    for name, value in state.items():
        found.setdefault((value.data_ptr(), value.shape) if value.numel() else name, name)
    return {name: state[name] for name in found.values()}


@torch.no_grad()
def load_quantized(model: nn.Module, path: Path | str) -> nn.Module:
    """Gives a float model the quantised weights of a folder, in place; its own are freed.

    Args:
        model: model of the same configuration, on meta or not.
        path: folder or file that `save_quantized` wrote.

    Raises:
        GulliverError: the file is not a quantised model's, or is another model's.
    """
    path = Path(path)
    quantize_like(model, path)
    _allocate(model)
    materialize(model, "cpu")
    load_huggingface(model, path)
    return model.eval().requires_grad_(False)


def quantize_like(model: nn.Module, path: Path | str) -> nn.Module:
    """Gives a float model the quantised layers of a folder, on meta; its own weights are freed."""
    path = Path(path)
    about = _about(path)
    known = dict(model.named_modules(remove_duplicate=False))
    metas: dict[int, nn.Parameter] = {}
    for place in about["layers"]:
        if isinstance(known.get(place), QuantizedLayer):
            raise GulliverError("the model is quantised already: load into one of float weights")
        if place not in known or "weight" not in known[place]._parameters:
            raise GulliverError(f"{path} is of another model: this one has no layer {place}")
        weight: Any = known[place]._parameters["weight"]
        # Tied ones stay one, or they would be quantised twice.
        meta = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        known[place]._parameters["weight"] = metas.setdefault(id(weight), meta)
    embeddings = any(isinstance(known[place], nn.Embedding) for place in about["layers"])
    given = about["mode"], (), about["threshold"], embeddings
    return replace_module(model, *given, only=list(about["layers"]))


def _allocate(model: nn.Module) -> None:
    """Gives quantised layers memory, tied ones the same."""
    made: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            for name, value in layer._buffers.items():
                assert value is not None
                empty = made.setdefault(id(value), torch.empty_like(value, device="cpu"))
                layer._buffers[name] = empty


def refuse_quantized(path: Path | str) -> None:
    """Refuses a folder or file that `save_quantized` wrote, where float weights are wanted."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if file.suffix == ".safetensors" and file.is_file() and KEY in read_metadata(file):
        raise GulliverError(
            f"{path} is quantised already: quantising twice would round what is rounded; take the "
            "folder that it was made of"
        )


def _about(path: Path) -> dict[str, Any]:
    file = path / FILE if path.is_dir() else path
    text = None if path.is_dir() and not file.is_file() else read_metadata(file).get(KEY)
    if text is None:
        raise GulliverError(
            f"{path} is not quantised: gulliver quantize {path} --out FOLDER makes such a folder"
        )
    about = json.loads(text)
    if about.get("version") != 1:
        raise GulliverError(f"{path} is of version {about.get('version')}: this reads version 1")
    return about
