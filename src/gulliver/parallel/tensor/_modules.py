"""Facts about one module: its heads, its adapters, whether a style is for its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gulliver.errors import GulliverError
from gulliver.parallel.tensor._convolution import CONVOLUTIONS
from gulliver.parallel.tensor._table import DRAWN_ALIKE, HEADS, KV_HEADS, REPEATED, STYLES, How
from gulliver.precision.fp8 import is_transposed

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def dropouts_of(model: nn.Module) -> list[str]:
    """Lists a model's dropouts by path and probability, without those that all ranks draw alike."""
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
    """Returns the layer that a module belongs to, and which factor of its adapter it is."""
    # PEFT wraps a layer ``x`` as ``x.base_layer``, ``x.lora_A.NAME`` and ``x.lora_B.NAME``.
    parts = path.split(".")
    if parts[-1] == "base_layer":
        return ".".join(parts[:-1]), ""
    if len(parts) > 2 and parts[-2].startswith("lora_"):
        return ".".join(parts[:-2]), parts[-2] if parts[-2] in ("lora_A", "lora_B") else "other"
    return path, ""


def best_match(path: str, patterns: Mapping[str, Any]) -> str | None:
    """Returns the longest pattern that the last parts of a path fit; None where none does."""
    parts = path.split(".")
    fitting = [pattern for pattern in patterns if _fits(parts, pattern.split("."))]
    return max(fitting, key=lambda p: (p.count("."), -p.count("*")), default=None)


def _fits(parts: list[str], pattern: list[str]) -> bool:
    tail = parts[-len(pattern) :]
    return len(tail) == len(pattern) and all(
        p in ("*", t) for t, p in zip(tail, pattern, strict=True)
    )


def head_groups(module: nn.Module) -> int:
    """Heads of an attention module that can lie on different ranks; 0 for other modules."""
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
    """Returns an attention module's number of query heads and their width; 0 where not seen."""
    each, width = (vars(attention).get(name) for name in (REPEATED, "head_dim"))
    return (groups * each, width) if isinstance(each, int) and isinstance(width, int) else (0, 0)


def rotary_width(path: str, module: nn.Module, attention: nn.Module) -> int:
    """Returns how many outputs of latent attention's first projection are rotary keys."""
    name, config = "qk_rope_head_dim", getattr(attention, "config", None)
    width = getattr(attention, name, getattr(config, name, None))
    latent = getattr(attention, "kv_lora_rank", getattr(config, "kv_lora_rank", None))
    outputs = getattr(module, "out_features", None)
    if not isinstance(width, int) or (isinstance(latent, int) and outputs != latent + width):
        raise GulliverError(
            f"{path} is 'latent', but is not the first projection of latent keys and values, which "
            "has kv_lora_rank + qk_rope_head_dim outputs: give it another style, such as "
            "'replicate'"
        )
    return width


def fits_kind(module: nn.Module, style: str | None) -> bool:
    """Whether a style is for modules of this kind."""
    kind = STYLES[style].kind if style in STYLES else "replicate"
    if kind in ("vocabulary", "embedding"):
        return isinstance(module, nn.Embedding)
    linear = is_transposed(module) or type(module).forward is nn.Linear.forward
    return kind not in ("column", "row") or linear or type(module) in CONVOLUTIONS


def is_scaled(module: nn.Module) -> bool:
    """Whether an embedding does more than look up."""
    return isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward


def cut_dims(path: str, module: nn.Module, how: How) -> dict[str, int]:
    """Returns the dim along which each parameter is sharded, by name."""
    transposed = is_transposed(module)
    linear = transposed or type(module).forward is nn.Linear.forward
    convolution = type(module) in CONVOLUTIONS
    embedding = type(module).forward is nn.Embedding.forward
    cuts = how.kind in ("column", "row")
    if not ((cuts and (linear or convolution)) or (not cuts and embedding)):
        wanted = "a linear layer or a convolution" if cuts else "an embedding"
        raise GulliverError(
            f"{path} is a {type(module).__name__}, but its rule is for {wanted}: "
            "give it another, such as 'replicate'"
        )
    if convolution:
        _check_convolution(path, module, how)
    if embedding:
        _check_embedding(path, module)
    names = {name for name, p in module._parameters.items() if p is not None}
    if not names <= {"weight", "bias"} or "weight" not in names:
        raise GulliverError(f"{path} has parameters {sorted(names)}: expected weight and bias")
    dim = int((how.kind in ("row", "embedding")) != transposed)
    return (
        {"weight": dim, "bias": 0} if how.kind == "column" and "bias" in names else {"weight": dim}
    )


def _check_convolution(path: str, module: Any, how: How) -> None:
    if module.groups != 1 or module.padding_mode != "zeros" or how.heads or how.blocks > 1:
        raise GulliverError(
            f"{path} is a convolution with groups={module.groups} and "
            f"padding_mode={module.padding_mode!r}: only plain ones are cut; give it 'replicate'"
        )


def _check_embedding(path: str, module: Any) -> None:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise GulliverError(
            f"{path} is an embedding with max_norm, scale_grad_by_freq or sparse gradients: "
            "only plain ones are cut; give it 'replicate'"
        )
