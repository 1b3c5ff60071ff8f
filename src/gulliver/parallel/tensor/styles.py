"""Sharding styles of modules by name, and their names in other libraries.

`gulliver.families.Tensors` assigns `STYLES` to the modules of each known model family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.layout.even import Interval
from gulliver.parallel.tensor.collectives import copy, reduce, share
from gulliver.precision.fp8.conversion import is_transposed

Kind = Literal[
    "column",
    "row",
    "vocabulary",
    "embedding",
    "experts",
    "parameters",
    "latent",
    "summed",
    "replicate",
]


@dataclass(frozen=True)
class ModuleSharding:
    """A sharding style."""

    # Outputs (column), inputs (row), rows of an embedding (vocabulary) or its columns (embedding);
    # features inside of all experts of a module (experts); parameters of an attention by their
    # heads (parameters); whole on all ranks (replicate), with gradients that are partial because
    # each rank has other heads (summed), or of whose output the rotary part goes to heads as it is
    # (latent).
    kind: Kind
    heads: bool = False  # Heads are not split, and query heads stay with their key-value head
    # Number of blocks that are distributed separately: 3 for ``[q; k; v]``.
    blocks: int = 1
    gather: bool = False  # All ranks get the full output
    split: bool = False  # All ranks have the full input


STYLES: dict[str, ModuleSharding] = {
    "column": ModuleSharding("column"),
    "column, gathered": ModuleSharding("column", gather=True),
    "column, packed": ModuleSharding("column", blocks=2),
    "column by heads": ModuleSharding("column", heads=True),
    "q; k; v by heads": ModuleSharding("column", heads=True, blocks=3),
    "k; v by heads": ModuleSharding("column", heads=True, blocks=2),
    "row": ModuleSharding("row"),
    "row by heads": ModuleSharding("row", heads=True),
    "row, split": ModuleSharding("row", split=True),
    "vocabulary": ModuleSharding("vocabulary"),
    "head": ModuleSharding("column", gather=True),
    "embedding, gathered": ModuleSharding("embedding", gather=True),
    "embedding by heads": ModuleSharding("embedding", heads=True),
    "experts": ModuleSharding("experts"),
    "parameters by heads": ModuleSharding("parameters"),
    "latent": ModuleSharding("latent"),
    "summed": ModuleSharding("summed"),
    "replicate": ModuleSharding("replicate"),
}

HUGGING_FACE: dict[str, str] = {
    "colwise": "column",
    "colwise_gather_output": "column, gathered",
    "colwise_rep": "column, gathered",
    "packed_colwise": "column, packed",
    "rowwise": "row",
    "rowwise_split_input": "row, split",
    "rowwise_rep": "row, split",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "embedding, gathered",
    "replicated_with_grad_allreduce": "summed",
    "sequence_parallel": "replicate",
    "replicate": "replicate",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "latent",
    "local_params": "parameters by heads",
}
"""Styles by their names in Hugging Face plans; attention is split by heads."""


GATHERED = {"column": "column, gathered", "row": "row, split"}
"""Styles that replace `column` and `row` where the neighboring modules are unknown."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
"""Attributes of attention modules with the number of heads."""

SCALED = (*KV_HEADS, *HEADS, "split_size", "inner_dim", "all_head_size", "embed_dim")
"""Attributes of attention modules that are divided by the number of ranks."""

REPEATED = "num_key_value_groups"
"""Attribute of attention modules with the number of query heads per key-value head."""

HIDDEN = ("hidden_states",)
"""Argument names of a module's input if it is not the first argument."""

DRAWN_ALIKE = ("y_embedder",)
"""Unsharded modules that draw one random number per sample."""


# Properties of a module: heads, adapters, and whether a style applies to its class.


DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def dropouts_of(model: nn.Module) -> list[str]:
    """Lists a model's active dropouts, except those with equal masks on all ranks."""
    names: list[str] = []
    for path, module in model.named_modules():
        if any(part in DRAWN_ALIKE for part in path.split(".")):
            continue
        if isinstance(module, DROPOUTS) and module.p > 0:
            names.append(f"{path}.p = {module.p}")
        names += [
            f"{path}.{name} = {value}"
            for name, value in vars(module).items()
            if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
        ]
    return names


def layer_of(path: str) -> tuple[str, str]:
    """Returns the path of a module's layer, and the module's LoRA factor or ""."""
    # PEFT wraps a layer ``x`` as ``x.base_layer``, ``x.lora_A.NAME`` and ``x.lora_B.NAME``.
    parts = path.split(".")
    if parts[-1] == "base_layer":
        return ".".join(parts[:-1]), ""
    if len(parts) > 2 and parts[-2].startswith("lora_"):
        return ".".join(parts[:-2]), parts[-2] if parts[-2] in ("lora_A", "lora_B") else "other"
    return path, ""


def best_match(path: str, patterns: Mapping[str, Any]) -> str | None:
    parts = path.split(".")
    fitting = [pattern for pattern in patterns if _fits(parts, pattern.split("."))]
    return max(fitting, key=lambda p: (p.count("."), -p.count("*")), default=None)


def _fits(parts: list[str], pattern: list[str]) -> bool:
    tail = parts[-len(pattern) :]
    return len(tail) == len(pattern) and all(
        p in ("*", t) for t, p in zip(tail, pattern, strict=True)
    )


def head_groups(module: nn.Module) -> int:
    """Number of an attention module's head groups; 0 for other modules."""
    keys, width = getattr(module, "k_proj", None), vars(module).get("head_dim")
    if isinstance(keys, nn.Linear) and isinstance(width, int):
        return keys.out_features // width
    for name in (*KV_HEADS, *HEADS):
        count = vars(module).get(name)
        if isinstance(count, int) and not isinstance(module, nn.ModuleList):
            return count
    config = vars(module).get("config")
    if config is not None and "Attention" in type(module).__name__:
        counts = (getattr(config, name, None) for name in (KV_HEADS[0], "num_attention_heads"))
        return next((count for count in counts if isinstance(count, int)), 0)
    return 0


def query_heads(attention: nn.Module, groups: int) -> tuple[int, int]:
    each, width = (vars(attention).get(name) for name in (REPEATED, "head_dim"))
    return (groups * each, width) if isinstance(each, int) and isinstance(width, int) else (0, 0)


def rotary_width(path: str, module: nn.Module, attention: nn.Module) -> int:
    """Returns the number of rotary features of latent attention's first projection."""
    name, config = "qk_rope_head_dim", getattr(attention, "config", None)
    width = getattr(attention, name, getattr(config, name, None))
    latent = getattr(attention, "kv_lora_rank", getattr(config, "kv_lora_rank", None))
    outputs = getattr(module, "out_features", None)
    if not isinstance(width, int) or (isinstance(latent, int) and outputs != latent + width):
        raise GulliverError(
            f"{path} is 'latent', but is not the first projection of latent keys and values, which "
            "has kv_lora_rank + qk_rope_head_dim outputs: use another style, such as 'replicate'"
        )
    return width


def fits_kind(module: nn.Module, style: str | None) -> bool:
    kind = STYLES[style].kind if style in STYLES else "replicate"
    if kind in ("vocabulary", "embedding"):
        return isinstance(module, nn.Embedding)
    linear = is_transposed(module) or type(module).forward is nn.Linear.forward
    return kind not in ("column", "row") or linear


def is_scaled(module: nn.Module) -> bool:
    """Whether an embedding overrides `nn.Embedding.forward`, for example to scale its output."""
    return isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward


def cut_dims(path: str, module: nn.Module, how: ModuleSharding) -> dict[str, int]:
    transposed = is_transposed(module)
    linear = transposed or type(module).forward is nn.Linear.forward
    embedding = type(module).forward is nn.Embedding.forward
    cuts = how.kind in ("column", "row")
    if not (linear if cuts else embedding):
        wanted = "a linear layer" if cuts else "an embedding"
        raise GulliverError(
            f"{path} is a {type(module).__name__}, but its rule is for {wanted}: use another "
            "rule, such as 'replicate'"
        )
    if embedding:
        _check_embedding(path, module)
    names = {name for name, p in module._parameters.items() if p is not None}
    if not names <= {"weight", "bias"} or "weight" not in names:
        raise GulliverError(f"{path} has parameters {sorted(names)}: expected weight and bias")
    dim = int((how.kind in ("row", "embedding")) != transposed)
    return (
        {"weight": dim, "bias": 0} if how.kind == "column" and "bias" in names else {"weight": dim}
    )


def _check_embedding(path: str, module: Any) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise GulliverError(
            f"{path} is an embedding with max_norm, scale_grad_by_freq or sparse gradients: only "
            "plain ones can be sharded; use 'replicate'"
        )


# Mixture-of-experts layers over tensor ranks: each rank has some inner features of every expert.
#
# transformers stores the weights of all experts of a layer together, ``[experts, out, in]`` (or the
# last two dims swapped), and an experts module loops over them, or computes one grouped product.
# Sharded by inner features, the module is unchanged and computes partial sums of the experts'
# outputs. Inputs are copied (the gradients of hidden states and router weights are summed over the
# ranks), and outputs are summed.


INTO = ("gate_up_proj", "gate_proj", "up_proj")
OUT = "down_proj"
ADDED = "down_proj_bias"
"""Names of expert parameters: projections to features, projections from features, output bias."""


# [Note: features, not experts] Assigning full experts to ranks (expert parallelism) would need an
# all-to-all of tokens, and ranks would wait for the one with the most popular experts. Sharded by
# features, every rank has the same work for any routing, at the price of narrower products.
#
# Latent attention is also handled here: the rotary part of its first key-value projection is used
# by all heads unchanged, so its gradient is summed.
@dataclass(frozen=True)
class ParameterCut:
    """The sharding of one parameter."""

    dim: int  # Dimension that is sharded
    total: int  # Features along it
    units: int  # Indivisible units in each block of features
    blocks: int = 1  # Number of consecutive blocks, each distributed separately


def parts_of_experts(path: str, module: Any, size: int) -> dict[str, ParameterCut]:
    held = {n: p for n, p in module._parameters.items() if p is not None}
    into = [n for n in INTO if n in held]
    known = {*into, *(f"{n}_bias" for n in into), OUT, ADDED}
    plain = (
        hasattr(module, "is_transposed")
        and not getattr(module, "has_post_expert_norm", False)
        # An expert that returns its input would be summed once per rank.
        and not hasattr(module, "identity_expert")
        and len(list(module.parameters())) == len(held)
    )
    if not plain or not into or OUT not in held or set(held) - known:
        raise GulliverError(
            f"{path} is a {type(module).__name__} with parameters "
            f"{', '.join(held) or 'in submodules'}: such experts cannot be sharded; use the rule "
            "'replicate'"
        )
    # Dim of a weight's inputs; 3 - inputs is that of its outputs.
    inputs = 1 if module.is_transposed else 2
    features = held[OUT].shape[inputs]
    if features < size:
        raise GulliverError(
            f"{path} has experts with {features} features, fewer than the {size} tensor ranks; use "
            f"tp_size from 1 to {features}"
        )
    found = {OUT: ParameterCut(inputs, features, features)}
    for name in into:
        # Gate and up in one parameter: as [gate; up], or interleaved by feature.
        fused = held[name].shape[3 - inputs] // features
        blocks = fused if fused > 1 and module.is_concatenated else 1
        found[name] = ParameterCut(3 - inputs, fused * features, features, blocks)
        if f"{name}_bias" in held:
            found[f"{name}_bias"] = ParameterCut(1, fused * features, features, blocks)
    return found


def share_experts(module: nn.Module, rank_group: RankGroup) -> None:
    """Hooks a sharded experts module so that its inputs and outputs are full tensors."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        added = module._parameters.get(ADDED)
        if added is not None:
            # Every rank adds the output bias before the sum, so each adds a fraction of it. An
            # attribute takes precedence over the parameter of this name while the module runs.
            vars(module)[ADDED] = copy(added, rank_group) / rank_group.size
        given = {name: _copied(value, rank_group) for name, value in kwargs.items()}
        return tuple(_copied(value, rank_group) for value in args), given

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        vars(module).pop(ADDED, None)
        return None if output is None else reduce(output, rank_group)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)


def share_rotary(module: nn.Module, width: int, rank_group: RankGroup) -> None:
    """Sums the gradient of a module's last `width` output features over the ranks."""
    # All heads read these features unchanged, and each rank has some of the heads, so the gradient
    # on a rank is partial. The other features are inputs of a column layer, which sums their
    # gradients.

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - width, width], -1)
        return torch.cat([latent, copy(rotary, rank_group)], -1)

    module.register_forward_hook(after)


def _copied(value: Any, rank_group: RankGroup) -> Any:
    return (
        copy(value, rank_group)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


# The plan of tensor parallelism: the sharding of each module, as data that can be printed.


@dataclass(frozen=True)
class ShardedModule:
    """The sharding of a module."""

    style: str
    how: ModuleSharding
    # Sharded dim of each parameter; replicated parameters are not listed.
    dims: Mapping[str, int]
    total: int = 0  # Features along it
    units: int = 0  # Indivisible units in each block of features
    copies: int = 1  # Number of ranks with equal copies of each unit
    # Distribution by parameter, if the parameters of a module differ.
    parts: Mapping[str, ParameterCut] = field(default_factory=dict)

    def runs(self, size: int, place: int, name: str = "") -> tuple[Interval, ...]:
        part = self.parts.get(name)
        if part is not None:
            return share(part.total, part.units, size, place, part.blocks)
        of, number = size // self.copies, place // self.copies
        return share(self.total, self.units, of, number, self.how.blocks)


@dataclass(frozen=True)
class TensorPlan:
    """The sharding of a model over tensor ranks."""

    size: int
    # Sharding by path, of modules that are sharded or have partial gradients.
    modules: Mapping[str, ShardedModule]
    attention: Mapping[str, int]  # Number of head groups by path of an attention module
    sites: tuple[str, ...]  # Modules whose input is entered once for several columns
    stacks: tuple[str, ...]  # Paths of the lists of blocks
    sliced: Mapping[str, tuple[str, ...]]  # Arguments by path of which a rank takes its heads' part
    replicated: tuple[str, ...]  # Paths of modules with replicated parameters
    known: bool  # Whether the model's type is known, or the model has its own plan
    # Paths of modules in blocks that need the full sequence: experts, and opaque modules.
    whole: tuple[str, ...] = ()

    def share_of(self, model: nn.Module) -> float:
        whole = cut = 0
        lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        for path, module in model.named_modules():
            if not any(path.startswith(f"{inside}.") for inside in lists):
                continue
            dims = self.modules[path].dims if path in self.modules else {}
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    whole += parameter.numel()
                    cut += parameter.numel() if name in dims else 0
        return cut / whole if whole else 1.0

    def __str__(self) -> str:
        lines: dict[str, str] = {}
        for path, placed in self.modules.items():
            what = f"{placed.total} in {placed.units}" if placed.units else ""
            lines[re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)] = f"{placed.style:20} {what}"
        for path in self.replicated:
            lines.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) or "(model)", "replicate")
        width = max(map(len, lines), default=0)
        return "\n".join(
            [f"tensor parallel over {self.size} ranks"]
            + [f"  {path:{width}}  {what}".rstrip() for path, what in lines.items()]
        )
