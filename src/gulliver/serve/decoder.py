"""`NativeDecoder`: runs a step of a dense decoder in native code, without Python per layer.

`decoder_of` passes the tensors of a model's modules to the extension `gulliver.serve._decoder`
without copying weights. Models with unsupported parts run their own forward instead. `FAMILIES`
lists the supported types of models.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.precision.int8.layers import QuantizedLinear
from gulliver.serve.attention import ModelShape, Pages, tree_of
from gulliver.serve.batch import Batch
from gulliver.serve.kernels import KINDS, MOST_ROWS, native, native_problem

_log = logging.getLogger("gulliver")

FAMILIES = ("gemma", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Supported `config.model_type`s: RMS norms, rotary positions, a gated MLP, no experts."""
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
QUANTIZED = {"int8": 3, "int8_dynamic": 3, "int4": 4}
"""Formats of quantized weights; activations are not rounded."""


class Unfit(Exception):
    """Reason why native code cannot run a model."""


class NativeDecoder:
    """Runs batches of one model; keeps the tensors that native code reads alive."""

    def __init__(self, decoder: Any, vocabulary: int, kept: list[Tensor]) -> None:
        self._decoder, self._vocabulary, self._kept = decoder, vocabulary, kept

    def takes(self, batch: Batch) -> bool:
        """Whether native code is faster for a batch; torch is for float32 matmuls of many rows."""
        return batch.tokens <= MOST_ROWS or any(t.dtype != torch.float32 for t in self._kept)

    def run(self, batch: Batch) -> Tensor:
        """Returns the logits [batch.outputs, V] of a batch."""
        tokens: list[int] = []
        wanted: list[int] = []
        for span in batch.spans:
            tokens += span.tokens
            wanted += range(len(tokens) - span.outputs, len(tokens))
        logits = torch.empty(len(wanted), self._vocabulary)
        where, threads = logits.data_ptr(), torch.get_num_threads()
        self._decoder.run(_sequences(batch), tokens, wanted, where, threads)
        return logits


def _sequences(batch: Batch) -> Any:
    firsts, counts, starts, tables = [], [], [], []
    places: list[int] = []
    trees: list[list[int]] = []
    for span in batch.spans:
        count, start = len(span.tokens), span.start
        firsts.append(len(places))
        counts.append(count)
        starts.append(start)
        tables.append(list(span.blocks))
        depth, mask = tree_of(span)
        places += range(start, start + count) if mask is None else [start + d for d in depth]
        trees.append([] if mask is None else mask.flatten().tolist())
    found = native()
    assert found is not None
    return found.built.Sequences(firsts, counts, starts, tables, places, trees)


def decoder_of(model: Any, shape: ModelShape, pages: Pages) -> NativeDecoder | None:
    """Creates a model's native decoder; None if the model runs its own forward."""
    try:
        made = _Reader(model, shape, pages).made()
    except Unfit as reason:
        _log.info("decoder: torch, because %s", reason)
        return None
    found = native()
    _log.info("decoder: native, %s", found.name if found is not None else "")
    return made


class _Reader:
    """Converts a model's modules to the native decoder."""

    def __init__(self, model: Any, shape: ModelShape, pages: Pages) -> None:
        self._model, self._shape, self._pages = model, shape, pages
        self._tensors: list[Tensor] = []

    def made(self) -> NativeDecoder:
        """Creates the decoder; raises `Unfit` if native code does not support the model."""
        problem, model, config = native_problem(), self._model, self._model.config
        if problem is not None:
            raise Unfit(problem)
        found = native()
        assert found is not None
        if config.model_type not in FAMILIES:
            raise Unfit(f"models of type {config.model_type} run their own forward")
        changed = next((name for name, m in model.named_modules() if _changed(m)), None)
        if changed is not None:
            raise Unfit(f"{changed} has hooks or a custom forward")
        body, shapes = model.model, self._shape.layers
        first = shapes[0]
        if any((s.heads, s.dim, s.scale) != (first.heads, first.dim, first.scale) for s in shapes):
            raise Unfit("its layers have attention of several sizes")
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in ACTIVATIONS:
            raise Unfit(f"its activation is {activation}")
        kind = self._pages.keys[0].dtype
        if kind not in KINDS or first.dim % 16:
            raise Unfit(f"its keys are of {kind}, {first.dim} a head")
        frequencies = self._frequencies(body.rotary_emb)
        rotated = 2 * len(next(iter(frequencies.values()))[0])
        embedding, heads = body.embed_tokens, config.num_attention_heads
        sizes = [
            *(config.hidden_size, heads, first.heads, first.dim, config.intermediate_size),
            *(self._shape.vocabulary, rotated, self._pages.size, KINDS[kind]),
            ACTIVATIONS[activation],
        ]
        if any(size % 16 for size in (config.hidden_size, config.intermediate_size)):
            raise Unfit(f"16 does not divide its sizes, {sizes}")
        scale = getattr(embedding, "embed_scale", None)
        if scale is not None:
            # As the module has it: rounded to the dtype of the weights.
            scale = float(scale.to(embedding.weight.dtype))
        numbers = [self._epsilon(body.norm), first.scale, 1.0 if scale is None else scale]
        decoder = found.built.Decoder(
            *(found.name, sizes, numbers, self._whole(embedding, embedding.weight)),
            *(self._matrix(model.get_output_embeddings()), self._norm(body.norm)),
            list(frequencies.values()),
        )
        names = list(frequencies)
        for number, layer in enumerate(body.layers):
            attention = layer.self_attn
            rotary = names.index(getattr(attention, "layer_type", "")) if len(names) > 1 else 0
            if not getattr(attention, "use_rope", True):
                rotary = -1
            decoder.add_layer(
                *(self._matrices(layer, heads * first.dim, first.heads * first.dim),),
                *(self._norms(layer), shapes[number].window or 0, rotary),
                *(t[number].data_ptr() for t in (self._pages.keys, self._pages.values)),
            )
        return NativeDecoder(decoder, self._shape.vocabulary, self._tensors)

    def _frequencies(self, rotary: Any) -> dict[str, tuple[list[float], float]]:
        """Inverse frequencies and factor by layer type; under an empty name if all are equal."""
        if hasattr(rotary, "inv_freq"):
            return {"": (rotary.inv_freq.float().tolist(), float(rotary.attention_scaling))}
        return {
            kind: (
                getattr(rotary, f"{kind}_inv_freq").float().tolist(),
                float(getattr(rotary, f"{kind}_attention_scaling")),
            )
            for kind in rotary.layer_types
        }

    def _matrices(self, layer: Any, queries: int, keys: int) -> list[list[int]]:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            whole, joined = attention.qkv_proj, mlp.gate_up_proj
            inner = joined.out_features // 2
            first = [
                self._matrix(whole, 0, queries),
                self._matrix(whole, queries, keys),
                self._matrix(whole, queries + keys, keys),
            ]
            second = [self._matrix(joined, 0, inner), self._matrix(joined, inner, inner)]
        else:
            first = [self._matrix(getattr(attention, f"{n}_proj")) for n in ("q", "k", "v")]
            second = [self._matrix(mlp.gate_proj), self._matrix(mlp.up_proj)]
        return [*first, self._matrix(attention.o_proj), *second, self._matrix(mlp.down_proj)]

    def _norms(self, layer: Any) -> list[int]:
        """Pointers to the norms around attention and MLP, and of queries and keys; 0 for none."""
        attention = layer.self_attn
        before = getattr(layer, "pre_feedforward_layernorm", None)
        after = layer.post_attention_layernorm if before is not None else None
        return [
            self._norm(one)
            for one in (
                layer.input_layernorm,
                before if before is not None else layer.post_attention_layernorm,
                after,
                getattr(layer, "post_feedforward_layernorm", None),
                getattr(attention, "q_norm", None),
                getattr(attention, "k_norm", None),
            )
        ]

    def _norm(self, norm: Any) -> int:
        if norm is None:
            return 0
        if not type(norm).__name__.endswith("RMSNorm"):
            raise Unfit(f"its norms are {type(norm).__name__}")
        self._epsilon(norm)
        weight = norm.weight.detach().float()
        return self._address(weight + 1 if type(norm).__name__.startswith("Gemma") else weight)

    def _epsilon(self, norm: Any) -> float:
        found = getattr(norm, "variance_epsilon", None)
        found = float(norm.eps if found is None else found)
        if found != self._model.config.rms_norm_eps:
            raise Unfit("its norms differ")
        return found

    def _matrix(self, layer: Any, first: int = 0, count: int | None = None) -> list[int]:
        """Describes a linear layer, or some of its outputs, for native code."""
        if type(layer) is nn.Linear:
            return self._whole(layer, layer.weight, first, count)
        if type(layer) is not QuantizedLinear or layer.in_features % 16:
            raise Unfit(f"{type(layer).__name__} is not a supported linear layer")
        values, scales = layer.weight, layer.weight_scale
        outputs = layer.out_features - first if count is None else count
        return [
            self._address(values) + first * values.stride(0),
            self._address(scales) + first * scales.stride(0) * 4,
            self._bias(layer.bias, first),
            *(outputs, layer.in_features, QUANTIZED[layer.mode]),
        ]

    def _whole(
        self, layer: Any, weight: Tensor, first: int = 0, count: int | None = None
    ) -> list[int]:
        if weight.dtype not in KINDS or weight.shape[1] % 16:
            raise Unfit(f"it has weights {list(weight.shape)} of {weight.dtype}")
        return [
            self._address(weight) + first * weight.stride(0) * weight.element_size(),
            *(0, self._bias(getattr(layer, "bias", None), first)),
            *(len(weight) - first if count is None else count, weight.shape[1]),
            KINDS[weight.dtype],
        ]

    def _bias(self, bias: Tensor | None, first: int) -> int:
        return 0 if bias is None else self._address(bias.detach().float()) + first * 4

    def _address(self, tensor: Tensor) -> int:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise Unfit("its weights are not contiguous on the CPU")
        self._tensors.append(tensor)
        return tensor.data_ptr()


def _changed(module: nn.Module) -> bool:
    """Whether a module has hooks or a custom forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
