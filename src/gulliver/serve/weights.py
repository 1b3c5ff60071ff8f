"""Loads served models and sizes the KV cache."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import share_forward_hooks
from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.huggingface import float_config, lazy_parameters, model_weights
from gulliver.checkpoint.weights import open_weights
from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError, UsageError, missing_extra, nearest
from gulliver.finetune.encode import load_tokenizer
from gulliver.hardware.probe import memory_bytes
from gulliver.memory.parts import Part, Region, region_of
from gulliver.options import byte_size, size_text
from gulliver.parallel.tensor.apply import materialize
from gulliver.parallel.tensor.quantized import QuantizedRow
from gulliver.precision.int8.formats import GROUP, largest_of, to_int4, to_int8
from gulliver.precision.int8.layers import QuantizedLayer, QuantizedLinear
from gulliver.precision.int8.products import MODES, largest_in_rows
from gulliver.precision.int8.replace import replace_module
from gulliver.quantize.files import quantize_like
from gulliver.serve import gguf
from gulliver.serve.gguf import is_gguf
from gulliver.serve.offload import StreamedWeights, group_units, unit_paths
from gulliver.serve.options import ModelOptions
from gulliver.serve.tokenizer import read_tokenizer

BLOCK = 16
"""Tokens per block."""
SHARE = 0.5
"""Maximum fraction of the free memory for the caches of all ranks, if no size is set."""
WHOLE = 2048
"""Context for sizing the cache if neither the model nor an option limits it."""
BUDGET_SHARE = 4
"""Divisor of the memory limit that gives the cache size, if no size is set."""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = memory_bytes("cpu")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return min(limit, sizes["MemAvailable"])
    except (OSError, KeyError, ValueError, IndexError):
        return limit


def context_of(own: Any, wanted: int | None) -> int | None:
    """Maximum tokens of a sequence: as requested, or the model's own; None if unlimited."""
    own = int(own) if isinstance(own, int) and own > 0 else None
    if wanted is not None and (wanted < 2 or (own is not None and wanted > own)):
        raise GulliverError(f"seq_length={wanted}: use 2 to {own or 'any number'}")
    return own if wanted is None else wanted


def cache_blocks(
    token_bytes: int,
    device: torch.device,
    context: int | None,
    sequences: int,
    options: ModelOptions,
    size: int = BLOCK,
    budget: int | None = None,
    ranks: int = 1,
) -> int:
    """Chooses the number of cache blocks; `budget` is that of streamed weights, if any."""
    if options.kv_cache is not None and options.cache_tokens is not None:
        raise GulliverError("set kv_cache or cache_tokens, not both")
    block_bytes = max(token_bytes * size, 1)
    free = free_bytes(device)
    if options.cache_tokens is not None:
        blocks = options.cache_tokens // size
    elif options.kv_cache is not None:
        blocks = byte_size("kv_cache", options.kv_cache) // block_bytes
    else:
        whole = -(-(context or WHOLE) // size)
        room = int(free * SHARE) // ranks
        room = room if budget is None else min(room, budget // BUDGET_SHARE)
        blocks = min(sequences * whole, max(room // block_bytes, 0))
        alone = ranks == 1 and budget is None
        if alone and blocks < whole and context is not None:
            raise GulliverError(
                f"{size_text(free)} of memory is free, of which the cache may take half, but keys "
                f"and values of one sequence of {context} tokens take "
                f"{size_text(whole * block_bytes)}: use a context of at most {blocks * size}, "
                "bfloat16, or a quantized model"
            )
    if blocks < 1:
        raise GulliverError(
            f"the cache is too small for one block of {size_text(block_bytes)}: make it larger"
        )
    if blocks * block_bytes > free:
        raise GulliverError(
            f"a cache of {size_text(blocks * block_bytes)} exceeds the {size_text(free)} of memory "
            f"that is free: use cache_tokens of at most {free // block_bytes * size}"
        )
    return blocks


# Supported models: those whose logits are tested against transformers.


SERVED = (
    *(
        "bloom",
        "cohere",
        "gemma",
        "gemma3_text",
        "glm",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "helium",
    ),
    *("llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Supported values of `config.model_type`; `tests/serve/test_serving_exact.py` runs each."""

GROWING = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a batch, so packed sequences would
affect each other."""


def check_served(model: Any) -> None:
    """Rejects a model for which correct results are not verified."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not hasattr(model, "get_output_embeddings"):
        raise GulliverError(
            f"{type(model).__name__} is not a causal language model of transformers: use one that "
            "AutoModelForCausalLM loads"
        )
    check_type(kind)
    if model.get_output_embeddings() is None:
        raise GulliverError(
            f"{type(model).__name__} returns no logits: load it with AutoModelForCausalLM"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    growing = {str(rope.get("rope_type"))} | {
        str(one.get("rope_type")) for one in rope.values() if isinstance(one, dict)
    }
    if growing & set(GROWING):
        raise GulliverError(
            f"RoPE type {min(growing & set(GROWING))} is not supported: it depends on the longest "
            "sequence of a batch, so requests would change each other's completions"
        )


def check_type(kind: str) -> None:
    if kind not in SERVED:
        raise GulliverError(f"models of type {kind!r} are not served: {nearest(kind, SERVED)}")


# `Source`: reads parameters of a model, slice by slice, from a folder that transformers wrote.
#
# A model is built on meta (`build_on_meta`), sharded over ranks and stages there, and then only its
# shard is filled. A slice of a tensor is read without the rest.


def build_on_meta(folder: Path | str, dtype: torch.dtype) -> Any:
    """Builds a folder's model on meta, and its generation settings."""
    import transformers

    config = gguf.build_config(Path(folder)) if is_gguf(folder) else float_config(folder)
    with lazy_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    if is_gguf(folder):
        gguf.check_names(Path(folder), model)
        model.generation_config.eos_token_id = gguf.end_ids(Path(folder))
    return model.eval().requires_grad_(False)


class Source:
    """Tensors of a folder, by the names of a model's parameters."""

    def __init__(self, folder: Path | str, model: nn.Module) -> None:
        self.folder = Path(folder)
        path = self.folder
        self._weights = gguf.GgufWeights(path) if is_gguf(path) else model_weights(path, model)
        first: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), []).append(name)
        self._tied = {name: names for names in first.values() for name in names}

    def close(self) -> None:
        self._weights.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, model: nn.Module) -> None:
        """Compares names and shapes of all parameters with the files, without reading weights."""
        for name, parameter in model.named_parameters():
            self._compare(self._known(name), tuple(parameter.shape))

    def fill(self, name: str, into: Tensor, region: Region | None = None) -> None:
        self._read(self._known(name), into, region)

    def fill_expert(
        self,
        name: str,
        expert: int,
        into: Tensor,
        shape: tuple[int, ...],
        region: Region | None = None,
    ) -> None:
        """Reads one expert's matrix from a stacked tensor."""
        whole = tuple(shape) if region is None else region.shape
        source = self._known(name)
        info = self._compare(source, whole)
        assert into.dtype == info.dtype
        part = Part(into.view(-1), whole, expert * into.numel(), region=region)
        self._weights.read({source: part})

    def fill_buffers(self, module: nn.Module, front: str) -> None:
        """Reads a module's buffers from the files, except values of quantized layers."""
        for inner_path, inner in module.named_modules():
            if isinstance(inner, QuantizedLayer):
                continue
            at = f"{front}{inner_path}." if inner_path else front
            for name, buffer in inner._buffers.items():
                if buffer is not None and at + name in self._weights.infos and not buffer.is_meta:
                    self._read(at + name, buffer, None)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._weights.infos[self._known(name)].dtype

    def _known(self, name: str) -> str:
        # The own name first: a quantized layer has its own weight, even if the float one is tied.
        weight = name.removesuffix("_scale")
        names = [name, *(one + name[len(weight) :] for one in self._tied.get(weight, ()))]
        found = next((one for one in names if one in self._weights.infos), None)
        if found is None:
            known = " or ".join(names[:2])
            raise GulliverError(
                f"{self.folder}: the files lack {known}: they belong to another model or are "
                "incomplete"
            )
        return found

    def _compare(self, source: str, shape: tuple[int, ...]) -> Any:
        """Returns a tensor's entry in the files, after checking its shape."""
        info = self._weights.infos[source]
        if info.shape != shape:
            raise GulliverError(
                f"{self.folder}: {source} is {list(info.shape)} in the files but {list(shape)} in "
                "the model: the config.json belongs to another model"
            )
        return info

    def _read(self, source: str, into: Tensor, region: Region | None) -> None:
        info = self._compare(source, tuple(into.shape) if region is None else region.shape)
        if not into.numel():
            return
        straight = into.dtype == info.dtype and into.is_contiguous() and into.is_cpu
        value = into if straight else torch.empty(into.shape, dtype=info.dtype)
        self._weights.read({source: Part(value.view(-1), info.shape, region=region)})
        if not straight:
            into.copy_(value)


# `QuantizedExperts`: a mixture of experts with quantized weights.
#
# transformers keeps the weights of a layer's experts in one tensor, which `replace_module` leaves
# as it is. Here each expert has its own quantized linear layers, and a forward runs those of the
# experts that its tokens are routed to. Tensor ranks shard the inner features of each expert: as in
# `gulliver.parallel.tensor.quantized.QuantizedRow`, scales are those of one rank.


THRESHOLD = 6.0
"""Magnitude above which activations are not quantized, as in `gulliver.replace_module`."""
JOINED = ("gate_up_proj", "down_proj")


class QuantizedExperts(nn.Module):
    """Quantized experts of one layer; `into` and `out` have a linear layer for each."""

    def __init__(self, like: Any, path: str, mode: str, rank_group: RankGroup = ALONE) -> None:
        super().__init__()
        self.mode, self._rank_group, self._like = mode, [rank_group], [like]
        self.num_experts = like.num_experts
        self.into, self.out = (
            nn.ModuleList(
                _on_meta(like._parameters[name], f"{path}.{name}.{expert}", mode)
                for expert in range(self.num_experts)
            )
            for name in JOINED
        )

    def fill(self, name: str, expert: int, weight: Tensor) -> None:
        layer: Any = (self.into if name == JOINED[0] else self.out)[expert]
        if layer.mode == "int4":
            values, scales = to_int4(weight)
        else:
            largest = largest_of(weight, layer.path)
            values, scales = to_int8(weight, self._joined(largest, name))
        layer.weight.copy_(values)
        layer.weight_scale.copy_(scales)

    def _joined(self, largest: Tensor, name: str) -> Tensor:
        group = self._rank_group[0]
        if name == JOINED[1] and group.size > 1:
            all_reduce(largest, "max", group=group.process_group)
        return largest

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sums the outputs of each token's experts, weighted by the router."""
        total = torch.zeros_like(hidden_states)
        like = self._like[0]
        # In ascending order, because ranks that share experts reduce the scales of each.
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            tokens, place = torch.where(top_k_index == expert)
            into: Any = self.into[expert]
            out: Any = self.out[expert]
            inner = like._apply_gate(into(hidden_states[tokens]))
            largest = None
            if out.mode != "int8" and self._rank_group[0].size > 1:
                largest = self._joined(largest_in_rows(inner, out.threshold), JOINED[1])
            found = out.multiply(inner, None, largest) * top_k_weights[tokens, place, None]
            total.index_add_(0, tokens, found.to(total.dtype))
        return total


def quantize_experts(model: nn.Module, mode: str, rank_group: RankGroup = ALONE) -> list[str]:
    """Replaces the experts of a model on meta with quantized ones, to be filled later."""
    found = {path: module for path, module in model.named_modules() if is_experts(module)}
    for path, module in found.items():
        made = QuantizedExperts(module, path, mode, rank_group)
        share_forward_hooks(module, made)
        model.set_submodule(path, made)
    return list(found)


def settle_experts(model: Any) -> None:
    """Makes experts run in a loop if grouped matmul does not support their sizes."""
    # torch's grouped matmul needs rows of a multiple of 16 bytes.
    for module in model.modules():
        if is_experts(module):
            weights = [module._parameters[name] for name in JOINED]
            if any(w.shape[dim] * w.element_size() % 16 for w in weights for dim in (1, 2)):
                module.config._experts_implementation = "eager"


def is_experts(module: Any) -> bool:
    """Whether a module has experts in stacked tensors of a supported layout."""
    held = {name for name, p in module._parameters.items() if p is not None}
    return (
        held == set(JOINED)
        and hasattr(module, "_apply_gate")
        and not getattr(module, "is_transposed", True)
        and bool(getattr(module, "has_gate", False))
        and not getattr(module, "has_bias", True)
        and not getattr(module, "has_post_expert_norm", True)
    )


def _on_meta(weight: Any, path: str, mode: str) -> QuantizedLinear:
    outputs, inputs = weight.shape[1:]
    if mode == "int4" and inputs % GROUP:
        mode = "int8"
    matrix = torch.empty(outputs, inputs, device="meta")
    if mode == "int4":
        values, scales = to_int4(matrix)
    else:
        values, scales = to_int8(matrix, torch.empty(outputs, device="meta"))
    return QuantizedLinear(path, mode, values, scales, inputs, None, THRESHOLD)


# `Filling`: fills a model on meta from a folder, module by module, quantized or not.
#
# Names, regions and layouts of the float weights are noted before their layers are replaced, so
# that a layer can be filled wherever its memory is by then.


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    region: Region | None
    transposed: bool


class Filling:
    """Fills a model, or a shard of it, from a folder."""

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        quantize: str | None = None,
        quantised: bool = False,
        rank_group: RankGroup = ALONE,
    ) -> None:
        self.model, self.source = model, source
        self._regions = {
            name: region_of(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self._read = quantised
        settle_experts(model)
        self._weights: dict[str, _Weight] = {}
        before: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        if quantised and not any(isinstance(m, QuantizedLayer) for m in before.values()):
            quantize_like(model, source.folder)
        elif quantize is not None:
            replace_module(model, quantize)
            self._shapes = {
                name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
            }
            quantize_experts(model, quantize, rank_group)
        for path, layer in model.named_modules(remove_duplicate=False):
            if isinstance(layer, QuantizedLayer) and path in before and not quantised:
                weight = before[path]._parameters["weight"]
                old = before[path]
                transposed = hasattr(old, "nf") or bool(getattr(old, "transposed", False))
                shape = tuple(weight.shape)
                self._weights[path] = _Weight(
                    f"{path}.weight", shape, region_of(weight), transposed
                )

    def fill(self, path: str, module: nn.Module) -> None:
        """Reads all values of a module whose tensors have memory."""
        front = f"{path}." if path else ""
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                self.source.fill(front + name, parameter.detach(), self._regions[front + name])
        for name, layer in module.named_modules():
            place = f"{front}{name}".removesuffix(".")
            if isinstance(layer, QuantizedExperts):
                self._fill_experts(place, layer)
            elif isinstance(layer, QuantizedLayer) and (self._read or place in self._weights):
                self._fill_quantised(place, layer)
        self.source.fill_buffers(module, front)

    def _fill_experts(self, path: str, layer: QuantizedExperts) -> None:
        for name in (f"{path}.{joined}" for joined in JOINED):
            value = torch.empty(self._shapes[name][1:], dtype=self.source.dtype_of(name))
            for expert in range(layer.num_experts):
                self.source.fill_expert(
                    name, expert, value, self._shapes[name], self._regions[name]
                )
                layer.fill(name.rpartition(".")[2], expert, value)

    def _fill_quantised(self, path: str, layer: QuantizedLayer) -> None:
        if self._read:
            self.source.fill(f"{path}.weight", layer.weight)
            self.source.fill(f"{path}.weight_scale", layer.weight_scale)
            return
        known = self._weights[path]
        value = torch.empty(known.shape, dtype=self.source.dtype_of(known.name))
        self.source.fill(known.name, value, known.region)
        matrix = value.t() if known.transposed else value.flatten(1)
        if layer.mode == "int4":
            values, scales = to_int4(matrix)
        else:
            largest = largest_of(matrix, path)
            if isinstance(layer, QuantizedRow) and layer.rank_group.size > 1:
                all_reduce(largest, "max", group=layer.rank_group.process_group)
            values, scales = to_int8(matrix, largest)
        layer.weight.copy_(values.view(layer.weight.shape))
        layer.weight_scale.copy_(scales)

    def fill_all(self) -> None:
        """Allocates the model's memory and reads all of its values."""
        materialize(self.model, "cpu")
        made: dict[int, Tensor] = {}
        for layer in self.model.modules():
            if isinstance(layer, QuantizedLayer):
                for name, value in list(layer._buffers.items()):
                    if value is not None and value.is_meta:
                        empty = made.setdefault(id(value), torch.empty_like(value, device="cpu"))
                        layer._buffers[name] = empty
        self.fill("", self.model)
        self.model.eval().requires_grad_(False)


def is_quantised(folder: Path) -> bool:
    """Whether a folder was written by `gulliver quantize`."""
    from gulliver.checkpoint.files import read_metadata

    float_weights = ("model.safetensors", "model.safetensors.index.json")
    if any((folder / name).is_file() for name in float_weights):
        return False  # those are read
    file = folder / "quantized.safetensors"
    return file.is_file() and "gulliver_quantization" in read_metadata(file)


# Loads a model and its tokenizer from a folder that transformers wrote.


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    folder: Path | str, dtype: str | torch.dtype | None = None, quantize: str | None = None
) -> tuple[Any, Any]:
    """Loads a model and its tokenizer.

    Args:
        folder: folder with configuration, safetensors and tokenizer, as written by transformers.
        dtype: ``"float32"`` or ``"bfloat16"``, or a torch dtype; None keeps that of the files.
        quantize: mode of `gulliver.replace_module`, such as ``"int8_dynamic"``; the weights are
            quantized layer by layer as they are read.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        GulliverError: the folder is incomplete, the model type is not supported, or there is too
            little memory; the message says what would fit.
    """
    from gulliver.io.hub import fetch

    folder, dtype = fetch(Path(folder)), dtype_name(dtype)
    check_options(folder, dtype, quantize)
    # Before the model, because a missing tokenizer is detected fastest.
    tokenizer = tokenizer_of(folder)
    return load_model(folder, ModelOptions(dtype=dtype, quantize=quantize))[0], tokenizer  # type: ignore[arg-type]


def load_model(folder: Path, options: ModelOptions) -> tuple[Any, StreamedWeights | None]:
    """Loads a folder's model; with `memory_limit` also returns its streamed weights."""
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
    """Fills a model on meta, within `memory_limit` if set; `paths` are its unquantized units."""
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
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def check_options(folder: Path, dtype: str | None, quantize: str | None) -> None:
    """Rejects folders without a supported model, and unsupported values of the other options."""
    check_folder(folder)
    for name, value, known in (("dtype", dtype, DTYPES), ("quantize", quantize, MODES)):
        if value is not None and value not in known:
            raise GulliverError(f"{name}={value!r} is unknown: {nearest(value, known)}")
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("serving needs transformers", "serve")
    if is_quantised(folder) and (dtype is not None or quantize is not None):
        raise GulliverError(f"{folder} is already quantized: omit dtype and quantize")


def kept_dtype(folder: Path, dtype: str | None) -> torch.dtype:
    if is_quantised(folder):
        return torch.float32
    return DTYPES[dtype] if dtype is not None else _sizes(folder)[1]


def check_folder(folder: Path) -> None:
    if is_gguf(folder):
        gguf.open_file(folder)
        return
    if (folder / "adapter_config.json").is_file():
        raise GulliverError(f"{folder} is a LoRA adapter: serve a model of finetune --merge")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} has no config.json: pass a GGUF file, or a folder written by transformers' "
            "save_pretrained"
        )
    kind = read_json(folder / "config.json").get("model_type")
    if not isinstance(kind, str):
        raise GulliverError(
            f"{folder}/config.json has no model_type: it was not written by transformers"
        )
    check_type(kind)


def tokenizer_of(folder: Path) -> Any:
    if is_gguf(folder):
        return gguf.read_tokenizer(folder)
    return read_tokenizer(folder) or load_tokenizer(folder)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Returns the end tokens, from the generation configuration or else the tokenizer."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = own if own is not None else getattr(tokenizer, "eos_token_id", None)
    if given is None:
        return []
    return [int(token) for token in (given if isinstance(given, list) else [given])]


def _sizes(folder: Path) -> tuple[int, torch.dtype]:
    """Returns the number of weights, and their most common dtype."""
    counts: dict[torch.dtype, int] = {}
    with gguf.GgufWeights(folder) if is_gguf(folder) else open_weights(folder) as weights:
        for info in weights.infos.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + info.numel
    most = max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32
    return sum(counts.values()), most if most in DTYPES.values() else torch.float32


def check_memory(folder: Path, dtype: str | None, quantize: str | None) -> None:
    """Rejects weights that do not fit in memory; the error names formats that would."""
    if is_quantised(folder):
        return
    size, kept = _sizes(folder)
    free = free_bytes(torch.device("cpu"))
    bits = {"int4": 6, "int8": 9, "int8_dynamic": 9, "bfloat16": 16, "float32": 32}
    mine = quantize or dtype or str(kept).removeprefix("torch.")
    needs = size * bits[mine] // 8
    if needs <= free:
        return
    fit = [name for name in bits if size * bits[name] // 8 <= free]
    fit = [f'dtype="{name}"' if name in DTYPES else f'quantize="{name}"' for name in fit]
    raise GulliverError(
        f"{folder}: {size:,} weights in {mine} take {size_text(needs)}, but {size_text(free)} of "
        "memory is free: " + (f"{fit[-1]} would fit" if fit else "no supported format would fit")
    )
