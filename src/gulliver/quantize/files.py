"""Reads and writes quantized models as Hugging Face folders.

The file holds the tensors of the state dict, and the quantization mode in its metadata, so that it
cannot be mistaken for a float model or another mode.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.checkpoint.files import read_metadata, write_tensors
from gulliver.checkpoint.huggingface import load_huggingface, model_weights
from gulliver.checkpoint.weights import Weights
from gulliver.checkpoint.writing import refuse_existing
from gulliver.comm.groups import ALONE, RankGroup, rank_group_of
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, region_of
from gulliver.parallel.tensor.apply import apply_tensor, materialize
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.precision.int8.layers import QuantizedLayer
from gulliver.precision.int8.replace import replace_module, report_of

FILE, KEY = "quantized.safetensors", "gulliver_quantization"
"""Not model.safetensors: transformers would load the int8 values as weights, with a warning."""
_OTHERS = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".onnx"}
WEIGHTS = {".safetensors", *_OTHERS}
"""Suffixes of weight files, which are not copied to the quantized folder."""
FOLDERS = ("additional_chat_templates",)


def save_quantized(model: nn.Module, folder: Path | str) -> Path:
    """Writes a quantized model, and its configuration if it has one.

    Args:
        model: unsharded model quantized by `replace_module` or `stream_quantized`.
        folder: folder to create.

    Raises:
        GulliverError: the model is not quantized, or is sharded, or the folder exists.
    """
    folder = Path(folder)
    report = report_of(model)
    layers = {p: m for p, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    shard = next((p for p, m in layers.items() if hasattr(m, "rank_group")), None)
    if shard is not None:
        raise GulliverError(f"{shard} is sharded; save from an unsharded model")
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
    elif hasattr(model, "save_config"):  # diffusers networks
        cast(Any, model).save_config(folder)
    write_tensors(folder / FILE, _untied(model), {"format": "pt", KEY: json.dumps(about)})
    return folder


def copy_companions(folder: Path, out: Path) -> None:
    """Copies all files except weights, so that the new folder is a drop-in replacement."""
    # Tokenizer files, chat templates, the generation configuration, and other files without
    # weights; existing files of `out` are kept.
    for path in folder.iterdir():
        weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_dir() and path.name in FOLDERS:
            shutil.copytree(path, out / path.name)
        elif path.is_file() and not weights and not (out / path.name).exists():
            shutil.copy2(path, out / path.name)


def _untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict; a tied tensor appears only under its first name."""
    found: dict[Any, str] = {}
    state = model.state_dict()
    for name, value in state.items():
        found.setdefault((value.data_ptr(), value.shape) if value.numel() else name, name)
    return {name: state[name] for name in found.values()}


@torch.no_grad()
def load_quantized(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads the quantized weights of a folder into a float model, in place.

    Args:
        model: model of the same configuration, on meta or not.
        path: folder or file written by `save_quantized`.

    Raises:
        GulliverError: the file is not quantized, or belongs to another model.
    """
    path = Path(path)
    quantize_like(model, path)
    _allocate(model)
    materialize(model, "cpu")
    load_huggingface(model, path)
    return model.eval().requires_grad_(False)


def quantize_like(model: nn.Module, path: Path | str) -> nn.Module:
    """Replaces a float model's layers with quantized ones on meta, in the modes of a folder."""
    path = Path(path)
    about = _about(path)
    known = dict(model.named_modules(remove_duplicate=False))
    metas: dict[int, nn.Parameter] = {}
    for place in about["layers"]:
        if isinstance(known.get(place), QuantizedLayer):
            raise GulliverError("the model is already quantized; load into one with float weights")
        if place not in known or "weight" not in known[place]._parameters:
            raise GulliverError(f"{path} belongs to another model: this one has no layer {place}")
        weight: Any = known[place]._parameters["weight"]
        # Tied weights stay tied, or they would be quantized twice.
        meta = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        known[place]._parameters["weight"] = metas.setdefault(id(weight), meta)
    embeddings = any(isinstance(known[place], nn.Embedding) for place in about["layers"])
    given = about["mode"], (), about["threshold"], embeddings
    return replace_module(model, *given, only=list(about["layers"]))


def _allocate(model: nn.Module) -> None:
    made: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            for name, value in layer._buffers.items():
                assert value is not None
                empty = made.setdefault(id(value), torch.empty_like(value, device="cpu"))
                layer._buffers[name] = empty


def refuse_quantized(path: Path | str) -> None:
    """Raises an error for files written by `save_quantized`, where float weights are needed."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if file.suffix == ".safetensors" and file.is_file() and KEY in read_metadata(file):
        raise GulliverError(f"{path} is already quantized; use the folder that it was made from")


def _about(path: Path) -> dict[str, Any]:
    file = path / FILE if path.is_dir() else path
    text = None if path.is_dir() and not file.is_file() else read_metadata(file).get(KEY)
    if text is None:
        raise GulliverError(f"{path} is not quantized; run gulliver quantize {path} --out FOLDER")
    about = json.loads(text)
    if about.get("version") != 1:
        raise GulliverError(
            f"{path} has version {about.get('version')}, which is not supported; quantize it again"
        )
    return about


# Streams a checkpoint into a quantized model, layer by layer.


# [Note: what is held] The model is on meta and sharded there. Each layer in turn is filled with
# this rank's slice of the file, quantized and freed; a slice is read without the rest of its
# tensor. So a rank holds at most its quantized shard, one layer's float slice, and buffers of one
# mebi-element for reading and rounding.
def stream_quantized(
    model: nn.Module,
    path: Path | str,
    mode: str = "int8_dynamic",
    rank_group: RankGroup | dist.ProcessGroup | None = ALONE,
    prefix: str = "",
    exclude: Iterable[str] = (),
    outlier_threshold: float | None = 6.0,
    embeddings: bool = False,
    rules: Mapping[str, str] | None = None,
    errors: bool = False,
) -> nn.Module:
    """Loads a checkpoint into a model on meta and quantizes it while reading.

    Every rank of the group calls it and holds its shard afterwards.

    Args:
        model: model with parameters on meta and real buffers, as built under
            `gulliver.lazy_parameters`.
        path: Hugging Face folder, safetensors file, step or run.
        mode: mode, as in `replace_module`.
        rank_group: ranks for tensor parallelism: a rank group, a torch process group, or None for
            all ranks.
        prefix: prefix of the model's names in the files.
        exclude: patterns of layers that stay in floating point.
        outlier_threshold: magnitude above which activations are not quantized.
        embeddings: whether to quantize embeddings.
        rules: rules for `plan_tensor` that replace the model's own plan.
        errors: whether to report the error of each weight.

    Returns:
        The model, in evaluation mode.

    Raises:
        GulliverError: a parameter is not on meta, tensors are missing, unexpected or already
            quantized, `rank_group` is not a group, or sharding would split an int4 group.
    """
    rank_group = _rank_group(rank_group)
    refuse_quantized(path)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise GulliverError(
                f"{name} is not on meta; build the model under gulliver.lazy_parameters(), or "
                "call gulliver.replace_module on loaded models"
            )
    if rank_group.size > 1:
        plan: TensorPlan = plan_tensor(model, rank_group.size, rules=rules)
        apply_tensor(model, plan, rank_group)
    names = [prefix + name for name in model.state_dict(keep_vars=True)]
    with model_weights(path, model, names) as weights:
        reading = _Reading(model, weights, prefix)
        kinds = mode, exclude, outlier_threshold, embeddings
        replace_module(model, *kinds, load=reading.fill, errors=errors)
    materialize(model, "cpu")
    load_huggingface(*_rest(model, path, prefix, reading.names), like=model)
    return model.eval().requires_grad_(False)


def _rank_group(given: Any) -> RankGroup:
    if isinstance(given, RankGroup):
        return given
    if given is None:
        return rank_group_of(None) if dist.is_initialized() else ALONE
    if isinstance(given, dist.ProcessGroup):
        return rank_group_of(given)
    raise GulliverError(
        f"rank_group is a {type(given).__name__}; pass a torch process group, a "
        "gulliver.comm.groups.RankGroup, or None for all ranks"
    )


class _Reading:
    """Reads and quantizes weights of layers on meta."""

    def __init__(self, model: nn.Module, weights: Weights, prefix: str) -> None:
        self.weights = weights
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(prefix + name)

    def fill(self, path: str, module: nn.Module) -> None:
        """Reads and quantizes the weight of a layer on meta; its bias stays on meta."""
        parameter: Any = module._parameters["weight"]
        names = self.names[id(parameter)]
        name = next((name for name in names if name in self.weights.infos), None)
        if name is None:
            raise GulliverError(f"{self.weights.path} has no {' or '.join(names)}")
        info, region = self.weights.infos[name], region_of(parameter)
        whole = tuple(parameter.shape) if region is None else region.shape
        if info.shape != whole:
            raise GulliverError(
                f"{self.weights.path}: {name} has shape {list(info.shape)}, but the model needs "
                f"{list(whole)}"
            )
        value = torch.empty(parameter.shape, dtype=info.dtype)
        self.weights.read({name: Part(value.view(-1), whole, region=region)})
        module._parameters["weight"] = nn.Parameter(value, requires_grad=False)


def _rest(
    model: nn.Module, path: Path | str, prefix: str, names: Mapping[int, list[str]]
) -> tuple[Any, ...]:
    """Returns the arguments for `load_huggingface` to load the tensors that are not quantized."""
    quantised = {
        f"{at}.{name}": layer
        for at, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, QuantizedLayer)
        for name in ("weight", "weight_scale")
    }
    left: dict[str, Tensor] = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name not in quantised
    }
    elsewhere = {name for known in names.values() for name in known}
    return left, path, True, prefix, elsewhere
