"""`read_dense`: a dense decoder from its files, without transformers.

Importing transformers and building a module with it takes longer than everything else before the
first token. Common families need neither: sizes come from ``config.json``, and weights are mapped
into memory, read by native code where the operating system keeps the file. Whatever is not plainly
one of these families raises `Unfit`, and is loaded by `gulliver.serve.weights`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint.files import read_json
from gulliver.precision.int8.formats import GROUP, check_int4, largest_of, to_int4, to_int8
from gulliver.serve.attention import LayerShape, ModelShape
from gulliver.serve.decoder import KINDS, DenseModel, Unfit, native_problem
from gulliver.serve.options import ModelOptions

MAPPED = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose attention is the same in all layers, without a window."""
LINEAR = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = ("input_layernorm", "post_attention_layernorm")


def read_dense(
    folder: Path, options: ModelOptions, dtype: torch.dtype
) -> tuple[DenseModel, int, list[int]]:
    """Reads a folder's model, its context and the tokens that end a text."""
    if problem := native_problem():
        raise Unfit(problem)
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    windowed = config.get("use_sliding_window") or (
        kind == "mistral" and config.get("sliding_window", 0) is not None
    )
    if kind not in MAPPED or windowed or "quantization_config" in config:
        raise Unfit(f"{folder.name} is loaded by transformers")
    try:
        heads, count = config["num_attention_heads"], config["num_hidden_layers"]
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        vocabulary, context = config["vocab_size"], config["max_position_embeddings"]
        epsilon, activation = config["rms_norm_eps"], config["hidden_act"]
        kv_heads, dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
        dim = dim or hidden // heads
        frequencies = rotary_frequencies(config, dim)
        tensors = _mapped(folder)
    except KeyError as error:
        raise Unfit(f"its files lack {error}") from None
    queries, keys = heads * dim, kv_heads * dim
    sides = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    sides += [(inner, hidden), (inner, hidden), (hidden, inner)]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes["model.embed_tokens.weight"] = vocabulary, hidden
    for number in range(count):
        front = f"model.layers.{number}."
        shapes |= {f"{front}{n}.weight": side for n, side in zip(LINEAR, sides, strict=True)}
        shapes |= {f"{front}{name}.weight": (hidden,) for name in NORMS}
        if kind == "qwen3":
            shapes |= {f"{front}self_attn.{n}_norm.weight": (dim,) for n in ("q", "k")}
        elif kind == "qwen2" or config.get("attention_bias"):
            biased = LINEAR[: 3 if kind == "qwen2" else 4]
            shapes |= {f"{front}{n}.bias": side[:1] for n, side in zip(biased, sides, strict=False)}
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in tensors)
    head = "model.embed_tokens" if tied else "lm_head"
    shapes[f"{head}.weight"] = vocabulary, hidden
    for name in [n for n in tensors if n.endswith("rotary_emb.inv_freq")] + [
        "lm_head.weight"
    ] * tied:
        tensors.pop(name, None)
    if {name: tuple(t.shape) for name, t in tensors.items()} != shapes:
        raise Unfit("its tensors are not those of its configuration")
    if any(tensor.dtype not in KINDS for tensor in tensors.values()):
        raise Unfit("its files have other dtypes")
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if options.quantize is not None:
        head = _quantize(tensors, head, options.quantize)
    layer = LayerShape(kv_heads, dim, dim**-0.5)
    shape = ModelShape((layer,) * count, dtype, vocabulary)
    model = DenseModel(
        *(tensors, shape, heads, activation, epsilon, [frequencies], [0] * count, head)
    )
    return model, context, _end_tokens(folder, config)


def _mapped(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors, in memory that is mapped to its files."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(read_json(index)["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise Unfit(f"{folder.name} has no {name}")
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def _quantize(tensors: dict[str, Tensor], head: str, mode: str) -> str:
    """Quantizes the linear layers as `gulliver.replace_module` does; returns the head's name."""
    if head != "lm_head":  # the embedding stays as it is
        tensors["lm_head.weight"] = tensors[f"{head}.weight"]
    for name in [
        n.removesuffix(".weight") for n in tensors if n.endswith(("_proj.weight", "lm_head.weight"))
    ]:
        weight = tensors[f"{name}.weight"]
        largest = largest_of(weight, name)
        if mode == "int4" and weight.shape[1] % GROUP == 0:
            check_int4(largest, weight.shape[1], name)
            values = to_int4(weight)
        else:
            values = to_int8(weight, largest)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = values
    return "lm_head"


def rotary_frequencies(config: Mapping[str, Any], dim: int) -> tuple[list[float], float]:
    """Inverse frequencies of rotary positions, and the factor of their cosines and sines."""
    rope = config.get("rope_parameters") or {
        "rope_theta": config["rope_theta"],
        **(config.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1:
        raise Unfit(f"its rotary positions are of type {kind}")
    found = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    if kind == "linear":
        found = found / rope["factor"]
    if kind == "llama3":
        # Long wavelengths are stretched, short ones stay, and those between are interpolated.
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        found = found / rope["factor"] * (1 - kept) + found * kept
    return found.tolist(), 1.0


def _end_tokens(folder: Path, config: Mapping[str, Any]) -> list[int]:
    file = folder / "generation_config.json"
    found = (read_json(file) if file.is_file() else config).get("eos_token_id")
    return [] if found is None else list(found) if isinstance(found, list) else [int(found)]
