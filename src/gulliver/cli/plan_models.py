"""Builds the model to plan from a folder, a file, a public name, or a function.

All models are built on meta: no weights are allocated or downloaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.weights import open_weights
from gulliver.cli.models import inputs_of, tokens_of
from gulliver.cli.options import Search
from gulliver.errors import UsageError, missing_extra, nearest
from gulliver.io.hub import fetch
from gulliver.memory.symbolic import StorageCounter
from gulliver.models.configurations import CONFIGURATIONS, build

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PUBLIC: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("plan_models.json").read_text(encoding="utf-8")
)
"""Configurations (config.json) of public models by name."""
TEXT_LENGTH = 77
"""Tokens of a Stable Diffusion caption."""
TOKENS = 2048
"""Default number of tokens per sample of a language model."""
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")


@dataclass(frozen=True)
class Subject:
    """Model to plan for, with a sample."""

    model: nn.Module
    # One or a few samples, as the model's arguments.
    batch: Any
    name: str
    # Short description of a sample.
    sample: str
    # Tokens of a sample; 0 if it has none.
    tokens: int = 0
    # Notes for the user.
    notes: tuple[str, ...] = ()
    # Elements of keys and values that the model caches per sample when it generates.
    cached: int = 0


def subject_of(options: Search) -> Subject:
    name = options.model
    if name in CONFIGURATIONS:
        _refuse(options, "is a video model", "seq_length")
        return _video(options)
    if name.lower() in PUBLIC:
        return _configured(PUBLIC[name.lower()], name.lower(), options)
    hint, path = nearest(name, [*PUBLIC, *CONFIGURATIONS]), Path(name)
    if not hint.startswith("did you mean"):
        path = fetch(path, files=("*.json",))
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"{file} does not exist: pass a folder with a config.json")
        values = read_json(file)
        if not isinstance(values, Mapping):
            raise UsageError(
                f"{file} is not a model configuration: it needs fields such as model_type"
            )
        return _configured(values, Path(name).name, options)
    if re.fullmatch(r"[\w.]+:\w*", name):
        return _made(name, options)
    raise UsageError(
        f"unknown model {name!r}: {hint}; or pass a Hugging Face folder, a config.json, or "
        "module:function"
    )


def _refuse(options: Search, why: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} has no effect: {options.model} {why}; omit it")


def _video(options: Search) -> Subject:
    name = options.model
    frames, height, width = CONFIGURATIONS[name].clip
    clip = (options.frames or frames, *(_size(options.size) or (height, width)))
    fixed = CONFIGURATIONS[name].fields.get("input_size")
    if fixed is not None and CONFIGURATIONS[name].latent(*clip) != fixed:
        raise UsageError(f"{name} only accepts clips of {frames} x {height} x {width}")
    with torch.device("meta"):
        model = build(name)
    batch = inputs_of(name, clip, 1, DTYPES[options.dtype])
    return Subject(
        model, batch, name, f"a clip of {' x '.join(map(str, clip))}", tokens_of(name, clip)
    )


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or not all(8 <= int(side) < 65536 for side in found.groups()):
        raise UsageError(f"--size {text} is not a size: use rows x columns, such as 720x1280")
    rows, columns = found.groups()
    return int(rows), int(columns)


def _configured(values: Mapping[str, Any], name: str, options: Search) -> Subject:
    if "_class_name" in values:
        return _unet(values, name, options)
    model = built(values)
    if model is None and find_spec("transformers") is None:
        raise missing_extra(f"{name} needs transformers", "transformers")
    if model is None:
        kind = values.get("model_type", "no model_type")
        raise UsageError(
            f"transformers cannot build a model from {name} ({kind}); check the model_type, the "
            "architecture and the fields"
        )
    config: Any = model.config
    for module in model.modules():  # encoder and decoder have their own copies
        own: Any = getattr(module, "config", None)
        if hasattr(own, "use_cache"):
            own.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # any token works, because none is read
    made = _sample_of(model, name, options)
    if made is None:
        kind, takes = type(model).__name__, getattr(model, "main_input_name", "unknown inputs")
        raise UsageError(
            f"no example batch is known for {name}, a {kind} with input {takes}; pass a "
            "module:function that returns the model and an example batch"
        )
    batch, sample, tokens, notes = made
    cached = cached_elements(model, batch) if options.inference else 0
    return Subject(model, batch, name, sample, tokens, notes, cached)


def _sample_of(
    model: Any, name: str, options: Search
) -> tuple[dict[str, Any], str, int, tuple[str, ...]] | None:
    """Returns a transformers model's sample, its description, its number of tokens, and notes."""
    config = model.config
    _refuse(options, "takes no clips", "frames")
    seq = options.seq_length or TOKENS
    ids = torch.zeros(1, seq, dtype=torch.long, device="meta")
    takes, main = signature(model.forward).parameters, getattr(model, "main_input_name", "")
    text, vision = (getattr(config, f"{part}_config", None) for part in ("text", "vision"))
    if "return_loss" in takes and text is not None and vision is not None:
        most = getattr(text, "max_position_embeddings", seq)
        _refuse(options, "accepts only images of its own size", "size")
        pixels, sample = _pixels(vision, options)
        ids = ids[:, :most]
        batch: dict[str, Any] = {"input_ids": ids, "pixel_values": pixels}
        if not options.inference:
            batch["return_loss"] = True
        return batch, f"{sample} and {ids.shape[1]} tokens", 0, ()
    if main == "input_features" and hasattr(config, "max_source_positions"):
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        sound = torch.empty(shape, dtype=DTYPES[options.dtype], device="meta")
        ids = ids[:, : config.max_target_positions]
        last = "decoder_input_ids" if options.inference else "labels"
        batch = {main: sound, last: ids}
        return batch, f"{shape[2]} frames of sound and {ids.shape[1]} tokens", 0, ()
    if getattr(config, "image_size", None) and not getattr(config, "vocab_size", None):
        _refuse(options, "accepts only images, of its own size", "seq_length", "size")
        pixels, sample = _pixels(config, options)
        return {"pixel_values": pixels}, sample, 0, ()
    if main != "input_ids" or "input_ids" not in takes:
        return None
    _refuse(options, "is planned for text only", "size")
    batch = {"input_ids": ids}
    if type(model).__name__.endswith(LANGUAGE) and not options.inference:
        batch["labels"] = ids
    elif config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    most = getattr(config, "max_position_embeddings", None) or seq
    notes = [f"the model accepts at most {most} tokens, not {seq}"] * (seq > most)
    notes += [f"{name} is planned for text only: use module:function for images"] * bool(vision)
    return batch, f"{seq} tokens", seq, tuple(notes)


def _pixels(config: Any, options: Search) -> tuple[torch.Tensor, str]:
    side = config.image_size
    rows, columns = (side, side) if isinstance(side, int) else side
    shape = (1, config.num_channels, rows, columns)
    pixels = torch.empty(shape, dtype=DTYPES[options.dtype], device="meta")
    return pixels, f"a picture of {rows} x {columns}"


def cached_elements(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Number of key and value elements that a transformers model on meta caches for a batch."""
    if not getattr(model, "can_generate", lambda: False)():
        return 0
    try:
        with torch.no_grad(), StorageCounter():  # knows output shapes that meta tensors do not
            found = model(**batch, use_cache=True)
    except Exception:  # a model that reads data: its cache is reported as not counted
        return 0
    return sum(t.numel() for t in _cached(getattr(found, "past_key_values", None)))


def _cached(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a cache, whatever its layers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _cached(inner)
    elif hasattr(value, "__dict__"):
        for name in ("self_attention_cache", "cross_attention_cache", "layers", "keys", "values"):
            held = vars(value).get(name)
            if held is not None:
                yield from _cached(held)


def _unet(values: Mapping[str, Any], name: str, options: Search) -> Subject:
    if values["_class_name"] != "UNet2DConditionModel":
        raise UsageError(
            f"{name} is a {values['_class_name']}: of diffusers models, only UNets are supported"
        )
    try:
        from diffusers import UNet2DConditionModel
    except ImportError:
        raise missing_extra(f"{name} needs diffusers", "dreambooth") from None
    with torch.device("meta"):
        model: Any = UNet2DConditionModel.from_config(dict(values))
    config: Any = model.config
    _refuse(options, "is an image model", "seq_length", "frames")
    side = config.sample_size
    rows, columns = (n // 8 for n in _size(options.size) or (8 * side, 8 * side))
    dtype = DTYPES[options.dtype]

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    batch: dict[str, Any] = {
        "sample": empty(config.in_channels, rows, columns),
        "timestep": torch.empty(1, dtype=torch.long, device="meta"),
        "encoder_hidden_states": empty(TEXT_LENGTH, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        numbers = 6 * config.addition_time_embed_dim
        pooled = config.projection_class_embeddings_input_dim - numbers
        batch["added_cond_kwargs"] = {"text_embeds": empty(pooled), "time_ids": empty(6)}
    return Subject(model, batch, name, f"a picture of {8 * rows} x {8 * columns}")


def _made(place: str, options: Search) -> Subject:
    """Returns the model and example batch of a user's function."""
    module, function = place.split(":")
    if not function:
        raise UsageError(
            f"{place} names no function; use {place}FUNCTION, which returns a model and an example "
            "batch"
        )
    _refuse(options, "has its own example batch", "seq_length", "frames", "size")
    sys.path.insert(0, "")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{place} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    try:
        with torch.device("meta"):
            found = make()
    except Exception as error:
        raise UsageError(f"{place} fails: {type(error).__name__}: {error}") from error
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
        raise UsageError(f"{place} must return a model and an example batch")
    model, batch = found
    dtype, notes = DTYPES[options.dtype], ()
    floats = {t.dtype for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)}
    floats = {str(d).removeprefix("torch.") for d in floats if d.is_floating_point and d != dtype}
    if floats and options.dtype != "fp32":
        notes = (
            f"{' and '.join(sorted(floats))} of the batch are taken as {options.dtype}, as a "
            "run turns them: --dtype fp32 plans without",
        )
    return Subject(model, batch, place, "a sample of its batch", notes=notes)


def trained_part(subject: Subject, options: Search) -> torch.optim.Optimizer | None:
    """Prepares the model for training or inference, and creates the optimizer."""
    model = subject.model
    if options.inference:
        if options.lora:
            raise UsageError("--lora needs training, but --inference is set; omit one of them")
        model.eval().requires_grad_(False)
        return None
    if options.lora:
        adapt(model, options.lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"{subject.name} has no trainable parameters: use --inference")
    return OPTIMIZERS[options.optimizer](trained)


def adapt(model: nn.Module, rank: int) -> None:
    """Adds LoRA adapters to all linear layers except the head, and freezes the rest."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise missing_extra("--lora needs PEFT", "finetune") from None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not names:
        raise UsageError("--lora: the model has no linear layers")
    model.requires_grad_(False)
    with next(model.parameters()).device:
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=names), model)


def model_of(folder: Path) -> nn.Module:
    """Builds a folder's model on meta, by transformers or from the tensor names in its files."""
    if not folder.is_dir():
        raise UsageError(f"--model {folder} is not a folder: pass one with a config.json")
    file = folder / "config.json"
    model = built(read_json(file)) if file.is_file() else None
    if model is None:
        model = _named(folder)
    return model.float()


def built(values: Mapping[str, Any]) -> nn.Module | None:
    try:
        import transformers

        config: Any = transformers.AutoConfig.for_model(**values)
        (name,) = values.get("architectures") or ["AutoModelForCausalLM"]
        kind = getattr(transformers, name)
        with torch.device("meta"):
            return kind.from_config(config) if name.startswith("Auto") else kind(config)
    except Exception:  # any error about fields that it does not accept
        return None


def _named(folder: Path) -> nn.Module:
    """Creates modules with a meta parameter for each tensor in the folder's files."""
    model = nn.Module()
    with open_weights(folder) as weights:
        for name, info in weights.infos.items():
            module, *_ = path = [model]
            *parents, own = name.split(".")
            for part in parents:
                module = path[-1]
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                path.append(module.get_submodule(part))
            value = torch.empty(info.shape, dtype=info.dtype, device="meta")
            path[-1].register_parameter(own, nn.Parameter(value, info.dtype.is_floating_point))
    return model
