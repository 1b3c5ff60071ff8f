"""`NativeDecoder`: runs a step of a dense decoder in native code, without Python per layer.

The extension `gulliver.serve._decoder` reads the tensors of a `DenseModel` in place. That is made
from a transformers model by `dense_of`, or from files by `read_dense`, without importing
transformers. Models with unsupported modules or settings run their own forward instead.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json
from gulliver.errors import GulliverError, nearest
from gulliver.memory.stores import HUGE, huge_pages
from gulliver.precision.int8.formats import (
    GROUP,
    check_int4,
    largest_of,
    sensitive_paths,
    to_int4,
    to_int8,
)
from gulliver.precision.int8.layers import QuantizedLinear
from gulliver.serve import gguf
from gulliver.serve.attention import LayerShape, ModelShape, Pages, tree_of
from gulliver.serve.batch import Batch
from gulliver.serve.options import ModelOptions

_log = logging.getLogger("gulliver")

INTERFACE = 4
"""Version of the extension's interface, increased on both sides when calls change."""
EXTENSION = "gulliver.serve._decoder"
VARIABLE = "GULLIVER_DECODER"
INSTRUCTIONS = ("avx512-bf16", "avx512-vnni", "avx512", "avx2", "none")
"""Values of `VARIABLE`; the default is the first that the processor supports."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of the floating-point dtypes in native code."""
INT8, INT4, INT8_ROUNDED = 3, 4, 5
"""Kinds of quantized weights; the last one also rounds activations, if the processor has VNNI."""
FAMILIES = ("gemma", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Supported `config.model_type`s: RMS norms, rotary positions, a gated MLP, no experts."""
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


class Unfit(Exception):
    """Reason why native code cannot run a model."""


@cache
def native_problem() -> str | None:
    """Explains why native code is not used; None if it is."""
    try:
        built: Any = importlib.import_module(EXTENSION)
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built.INTERFACE != INTERFACE:
        return "its extension is of another version: pip install -e . builds it again"
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in INSTRUCTIONS:
        raise GulliverError(f"{VARIABLE}={wanted!r} is unknown: {nearest(wanted, INSTRUCTIONS)}")
    if wanted == "none":
        return f"{VARIABLE}=none"
    names = built.instructions()
    if not names:
        return "this processor has neither AVX512 nor AVX2"
    return f"this processor has no {wanted}" if wanted and wanted not in names else None


@dataclass(frozen=True)
class DenseModel:
    """A dense decoder as native code reads it."""

    # By transformers' parameter names; a quantized weight has a `weight_scale` next to it.
    tensors: Mapping[str, Tensor]
    # Sizes of keys, values and logits.
    shape: ModelShape
    # Number of query heads.
    heads: int
    activation: str
    epsilon: float
    # Inverse frequencies and scaling factor of the rotary positions, by kind of layer.
    frequencies: list[tuple[list[float], float]]
    # Index of each layer in `frequencies`; -1 for no positions.
    rotary: list[int]
    # Name of the output layer; the embedding's name if they are tied.
    head: str = "lm_head"
    embedding_scale: float = 1.0
    # Added to the weights of norms; 1 for Gemma.
    norm_offset: float = 0.0
    # Whether activations of int8 layers are rounded to int8, with a scale per 32 values.
    rounds: bool = False


def in_huge_pages(model: DenseModel, free_bytes: int) -> DenseModel:
    """Copies the weights to one buffer of huge pages, from which they are read faster.

    If they take more than a quarter of the free memory, they stay in their mapped files.
    """
    sizes = {name: -(-tensor.nbytes // 64) * 64 for name, tensor in model.tensors.items()}
    if not HUGE <= sum(sizes.values()) <= free_bytes // 4:
        return model
    parts = huge_pages(sum(sizes.values())).split(list(sizes.values()))
    tensors = {
        name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for part, (name, tensor) in zip(parts, model.tensors.items(), strict=True)
    }
    return replace(model, tensors=tensors)


class NativeDecoder:
    """Runs batches of one model."""

    def __init__(self, model: DenseModel, pages: Pages) -> None:
        """Passes the tensors to native code; raises `Unfit` if it does not support the model."""
        problem = native_problem()
        if problem is not None:
            raise Unfit(problem)
        self._built: Any = importlib.import_module(EXTENSION)
        self._model, self._kept = model, list[Tensor]()
        self._int8 = INT8_ROUNDED if model.rounds else INT8
        self.instructions = os.environ.get(VARIABLE) or self._built.instructions()[0]
        self._decoder = self._handed(pages)

    def run(self, batch: Batch) -> Tensor:
        """Returns the logits [batch.outputs, V] of a batch."""
        tokens: list[int] = []
        wanted: list[int] = []
        firsts, counts, starts, tables = [], [], [], []
        places: list[int] = []
        trees: list[list[int]] = []
        for span in batch.spans:
            count, start = len(span.tokens), span.start
            firsts.append(len(tokens))
            counts.append(count)
            starts.append(start)
            tables.append(list(span.blocks))
            depth, mask = tree_of(span)
            places += range(start, start + count) if mask is None else [start + d for d in depth]
            trees.append([] if mask is None else mask.flatten().tolist())
            tokens += span.tokens
            wanted += range(len(tokens) - span.outputs, len(tokens))
        logits = torch.empty(len(wanted), self._model.shape.vocabulary)
        sequences = self._built.Sequences(firsts, counts, starts, tables, places, trees)
        where, threads = logits.data_ptr(), torch.get_num_threads()
        self._decoder.run(sequences, tokens, wanted, where, threads)
        return logits

    def _handed(self, pages: Pages) -> Any:
        model, shapes, kind = self._model, self._model.shape.layers, pages.keys[0].dtype
        first = shapes[0]
        if any((s.heads, s.dim, s.scale) != (first.heads, first.dim, first.scale) for s in shapes):
            raise Unfit("its attention layers differ in size")
        if model.activation not in ACTIVATIONS:
            raise Unfit(f"its activation is {model.activation}")
        if kind not in KINDS or first.dim % 16:
            raise Unfit(
                f"its keys have dtype {kind} and head dim {first.dim}; the native decoder needs "
                "float32, float16 or bfloat16, and a multiple of 16"
            )
        embedding = self._matrix("model.embed_tokens")
        layers = [self._layer(number) for number in range(len(shapes))]
        inner = layers[0][0][4][3]
        sizes = [
            *(embedding[4], model.heads, first.heads, first.dim, inner, model.shape.vocabulary),
            *(2 * len(model.frequencies[0][0]), pages.size, KINDS[kind]),
            ACTIVATIONS[model.activation],
        ]
        decoder = self._built.Decoder(
            *(self.instructions, sizes, [model.epsilon, first.scale, model.embedding_scale]),
            *(embedding, self._matrix(model.head), self._norm("model.norm")),
            model.frequencies,
        )
        for number, (matrices, norms) in enumerate(layers):
            decoder.add_layer(
                *(matrices, norms, shapes[number].window or 0, model.rotary[number]),
                *(kept[number].data_ptr() for kept in (pages.keys, pages.values)),
            )
        return decoder

    def _layer(self, number: int) -> tuple[list[list[int]], list[int]]:
        """Returns a layer's weight matrices and the norms of its sublayers, queries and keys."""
        front, first = f"model.layers.{number}.", self._model.shape.layers[0]
        attention, mlp = f"{front}self_attn.", f"{front}mlp."
        if f"{attention}qkv_proj.weight" in self._model.tensors:
            queries, keys = self._model.heads * first.dim, first.heads * first.dim
            whole, joined = f"{attention}qkv_proj", f"{mlp}gate_up_proj"
            inner = len(self._model.tensors[f"{joined}.weight"]) // 2
            into = [
                self._matrix(whole, 0, queries),
                self._matrix(whole, queries, keys),
                self._matrix(whole, queries + keys, keys),
            ]
            wide = [self._matrix(joined, 0, inner), self._matrix(joined, inner, inner)]
        else:
            into = [self._matrix(f"{attention}{n}_proj") for n in ("q", "k", "v")]
            wide = [self._matrix(f"{mlp}{n}_proj") for n in ("gate", "up")]
        out, down = self._matrix(f"{attention}o_proj"), self._matrix(f"{mlp}down_proj")
        after, before = f"{front}post_attention_layernorm", f"{front}pre_feedforward_layernorm"
        names = [f"{front}input_layernorm", after, ""]
        if f"{before}.weight" in self._model.tensors:
            names[1:] = before, after
        names += [f"{front}post_feedforward_layernorm", f"{attention}q_norm", f"{attention}k_norm"]
        return [*into, out, *wide, down], [self._norm(name) for name in names]

    def _norm(self, name: str) -> int:
        """Address of a norm's weights; 0 if there is none."""
        weight = self._model.tensors.get(f"{name}.weight")
        if weight is None:
            return 0
        return self._address(weight.detach().float() + self._model.norm_offset)

    def _matrix(self, name: str, first: int = 0, count: int | None = None) -> list[int]:
        """Describes a linear layer, or some of its outputs, in the format of native code."""
        weight = self._model.tensors.get(f"{name}.weight")
        if weight is None:
            raise Unfit(f"it has no {name}")
        scale, bias = (self._model.tensors.get(f"{name}.{k}") for k in ("weight_scale", "bias"))
        outputs, inputs = weight.shape
        kind = KINDS.get(weight.dtype)
        if scale is not None:
            kind, inputs = (INT4, 2 * inputs) if scale.dim() == 3 else (self._int8, inputs)
        if kind is None or inputs % 16:
            raise Unfit(f"{name} has unsupported shape {[outputs, inputs]} or dtype {weight.dtype}")
        return [
            self._address(weight) + first * weight.stride(0) * weight.element_size(),
            0 if scale is None else self._address(scale) + first * scale[0].nbytes,
            0 if bias is None else self._address(bias.detach().float()) + first * 4,
            *(outputs - first if count is None else count, inputs, kind),
        ]

    def _address(self, tensor: Tensor) -> int:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise Unfit("its weights are not contiguous tensors on the CPU")
        self._kept.append(tensor)
        return tensor.data_ptr()


def decoder_of(model: Any, shape: ModelShape, pages: Pages) -> NativeDecoder | None:
    """Creates the native decoder of a transformers model; None if the model is not supported."""
    try:
        made = NativeDecoder(dense_of(model, shape), pages)
    except Unfit as reason:
        _log.info("decoder: torch, because %s", reason)
        return None
    _log.info("decoder: native, %s", made.instructions)
    return made


def dense_of(model: Any, shape: ModelShape) -> DenseModel:
    """Reads a transformers model; raises `Unfit` if it is not a known dense decoder."""
    config, tensors, rounds = model.config, dict[str, Tensor](), False
    if config.model_type not in FAMILIES:
        raise Unfit(f"models of type {config.model_type} have no native decoder")
    for name, module in model.named_modules():
        own = dict(module.named_parameters(name, recurse=False))
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise Unfit(f"{name} has hooks or an overridden forward")
        if type(module) is QuantizedLinear:
            rounds |= module.mode == "int8_dynamic"
            own |= dict(module.named_buffers(name, recurse=False))
        elif type(module).__name__.endswith("RMSNorm"):
            epsilon = getattr(module, "variance_epsilon", None)
            if (module.eps if epsilon is None else epsilon) != config.rms_norm_eps:
                raise Unfit("its norms have different epsilons")
        elif own and type(module) is not nn.Linear and not isinstance(module, nn.Embedding):
            raise Unfit(f"{name} is a {type(module).__name__}, which is not supported")
        tensors |= own
    body = model.model
    rotary, scale = body.rotary_emb, getattr(body.embed_tokens, "embed_scale", None)
    kinds = [] if hasattr(rotary, "inv_freq") else list(rotary.layer_types)
    found = [
        (getattr(rotary, f"{k}inv_freq"), getattr(rotary, f"{k}attention_scaling"))
        for k in ([f"{kind}_" for kind in kinds] or [""])
    ]
    attention = [layer.self_attn for layer in body.layers]
    return DenseModel(
        *(tensors, shape, config.num_attention_heads),
        getattr(config, "hidden_activation", None) or config.hidden_act,
        config.rms_norm_eps,
        [(frequencies.float().tolist(), float(factor)) for frequencies, factor in found],
        [
            -1 if not getattr(a, "use_rope", True) else kinds.index(a.layer_type) if kinds else 0
            for a in attention
        ],
        # Like in the module, rounded to the dtype of the weights.
        embedding_scale=1.0 if scale is None else float(scale.to(body.embed_tokens.weight.dtype)),
        norm_offset=float(type(body.norm).__name__.startswith("Gemma")),
        rounds=rounds,
    )


# `read_dense`: a dense decoder from its files, without transformers.
#
# Importing transformers and building a module with it takes longer than everything else before the
# first token. Common families need neither: sizes come from ``config.json``, and weights are mapped
# into memory, read by native code where the operating system keeps the file. Any other model raises
# `Unfit`, and is loaded by `gulliver.serve.weights`.


MAPPED = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that are read; without a window, except for Gemma 3."""
LINEAR = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
NORMS = ("input_layernorm", "post_attention_layernorm")
GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
GELU = "gelu_pytorch_tanh"


def read_dense(
    folder: Path, options: ModelOptions, dtype: torch.dtype
) -> tuple[DenseModel, int, list[int]]:
    """Reads a folder's or GGUF file's model, its context and the tokens that end a text."""
    if problem := native_problem():
        raise Unfit(problem)
    gguf_file = gguf.is_gguf(folder)
    config = gguf.read_config(folder) if gguf_file else read_json(folder / "config.json")
    kind = config.get("model_type")
    windowed = config.get("use_sliding_window") or (
        kind == "mistral" and config.get("sliding_window", 0) is not None
    )
    if kind not in MAPPED or windowed or "quantization_config" in config:
        raise Unfit(f"{folder.name} needs transformers")
    try:
        heads, count = config["num_attention_heads"], config["num_hidden_layers"]
        hidden = config["hidden_size"]
        vocabulary, context = config["vocab_size"], config["max_position_embeddings"]
        gemma, epsilon = kind == "gemma3_text", config["rms_norm_eps"]
        activation = config["hidden_act"] if not gemma else config.get("hidden_activation", GELU)
        kv_heads, dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
        dim = dim or hidden // heads
        whole = LayerShape(kv_heads, dim, dim**-0.5)
        layers, rotary, frequencies = _layers(config, whole, count)
        shapes = _shapes(config, heads * dim, kv_heads * dim, dim)
        as_is = options.quantize is None and options.dtype is None
        tensors = gguf.read_tensors(folder, as_is) if gguf_file else _mapped(folder)
    except KeyError as error:
        raise Unfit(f"its files lack {error}") from None
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in tensors)
    head = "model.embed_tokens" if tied else "lm_head"
    shapes[f"{head}.weight"] = vocabulary, hidden
    if tied:
        tensors.pop("lm_head.weight", None)
    if gguf.ROTARY in tensors:
        frequencies = [(tensors[gguf.ROTARY].tolist(), frequencies[0][1])]
    tensors = {n: t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    tensors = _converted(tensors, shapes, dtype)
    if options.quantize is not None:
        head = _quantize(tensors, head, options.quantize, count)
    shape = ModelShape(tuple(layers), dtype, vocabulary)
    model = DenseModel(
        *(tensors, shape, heads, activation, epsilon, frequencies, rotary, head),
        # As in transformers, rounded to the dtype of the weights.
        embedding_scale=torch.tensor(hidden**0.5, dtype=dtype).item() if gemma else 1.0,
        norm_offset=float(gemma),
        rounds=options.quantize == "int8_dynamic",
    )
    ends = gguf.end_ids(folder) if gguf_file else _end_tokens(folder, config)
    return model, context, ends


def _shapes(
    config: Mapping[str, Any], queries: int, keys: int, dim: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a family's tensors, without the head's."""
    kind, hidden, inner = (config[k] for k in ("model_type", "hidden_size", "intermediate_size"))
    sides = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    sides += [(inner, hidden), (inner, hidden), (hidden, inner)]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes["model.embed_tokens.weight"] = config["vocab_size"], hidden
    norms = NORMS + GEMMA_NORMS if kind == "gemma3_text" else NORMS
    for number in range(config["num_hidden_layers"]):
        front = f"model.layers.{number}."
        shapes |= {f"{front}{n}.weight": side for n, side in zip(LINEAR, sides, strict=True)}
        shapes |= {f"{front}{name}.weight": (hidden,) for name in norms}
        if kind in ("gemma3_text", "qwen3"):
            shapes |= {f"{front}self_attn.{n}_norm.weight": (dim,) for n in ("q", "k")}
        elif kind == "qwen2" or config.get("attention_bias"):
            biased = LINEAR[: 3 if kind == "qwen2" else 4]
            shapes |= {f"{front}{n}.bias": side[:1] for n, side in zip(biased, sides, strict=False)}
    return shapes


def _layers(
    config: Mapping[str, Any], whole: LayerShape, count: int
) -> tuple[list[LayerShape], list[int], list[tuple[list[float], float]]]:
    """Returns the layers, Gemma 3's with and without a window, and their rotary positions."""
    if config["model_type"] != "gemma3_text":
        return [whole] * count, [0] * count, [rotary_frequencies(config, whole.dim)]
    odd = "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"
    if given := next((name for name in odd if config.get(name)), None):
        raise Unfit(f"{given} is set")
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = config.get("layer_types") or [
        "sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(count)
    ]
    scaling = config.get("rope_scaling") or {}
    ropes = config.get("rope_parameters") or {
        "sliding_attention": {"rope_theta": config["rope_local_base_freq"]},
        "full_attention": {"rope_theta": config["rope_theta"], **scaling},
    }
    names = list(ropes)
    whole = replace(whole, scale=config["query_pre_attn_scalar"] ** -0.5)
    windowed = replace(whole, window=config["sliding_window"])
    return (
        [windowed if kind == "sliding_attention" else whole for kind in kinds],
        [names.index(kind) for kind in kinds],
        [rotary_frequencies({"rope_parameters": rope}, whole.dim) for rope in ropes.values()],
    )


def _converted(
    tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Checks names and shapes, and converts floats to a dtype; 4-bit tensors are unchanged."""
    packed = {n.removesuffix("_scale") for n in tensors if n.endswith("weight_scale")}
    sizes = {
        n: (len(t), 2 * t.shape[1]) if n in packed else tuple(t.shape)
        for n, t in tensors.items()
        if not n.endswith("weight_scale")
    }
    if sizes != shapes:
        raise Unfit("its tensors do not match its configuration")
    floats = {n: tensors[n] for n in sizes if n not in packed}
    if any(tensor.dtype not in KINDS for tensor in floats.values()):
        raise Unfit("its files have unsupported dtypes")
    return tensors | {name: tensor.to(dtype) for name, tensor in floats.items()}


def _mapped(folder: Path) -> dict[str, Tensor]:
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


def _quantize(tensors: dict[str, Tensor], head: str, mode: str, count: int) -> str:
    """Quantizes the linear layers as `gulliver.replace_module` does; returns the head's name."""
    if head != "lm_head":  # the embedding stays as it is
        tensors["lm_head.weight"] = tensors[f"{head}.weight"]
    names = [f"model.layers.{number}.{name}" for number in range(count) for name in LINEAR]
    names.append("lm_head")
    sensitive = sensitive_paths(names)
    for name in names:
        weight = tensors[f"{name}.weight"]
        largest = largest_of(weight, name)
        if mode == "int4" and weight.shape[1] % GROUP == 0 and name not in sensitive:
            check_int4(largest, name)
            values = to_int4(weight)
        else:
            values = to_int8(weight, largest)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = values
    return "lm_head"


def rotary_frequencies(config: Mapping[str, Any], dim: int) -> tuple[list[float], float]:
    """Returns inverse frequencies of rotary positions, and the factor for cosines and sines."""
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
