"""The choice of the layers that compute in FP8, and why the others do not.

A layer is taken if its sizes suit the units (multiples of 16), it is no output head and not
excluded, its forward is a linear layer's own, and, where rates are known, it is predicted to pay.
The model may be on meta: only shapes are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest
from gulliver.precision.fp8._linear import MULTIPLE

HEADS = ("lm_head", "embed_out", "final_layer.linear")
"""Paths of output heads: their errors go straight into the loss, and their sizes rarely suit."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Layer:
    """A linear layer that could compute in FP8."""

    path: str
    inputs: int  # Number of inputs that a rank has
    outputs: int  # Number of outputs that a rank has
    why_not: str = ""  # Reason to keep it in high precision; empty where it is taken


@dataclass(frozen=True)
class Selection:
    """The linear layers of a model."""

    layers: tuple[Layer, ...]  # All of them, in the model's order

    @property
    def taken(self) -> tuple[Layer, ...]:
        """Layers that compute in FP8."""
        return tuple(layer for layer in self.layers if not layer.why_not)

    @property
    def kept(self) -> dict[str, str]:
        """Reasons of the others, by path."""
        return {layer.path: layer.why_not for layer in self.layers if layer.why_not}

    @property
    def weights(self) -> int:
        """Elements of the weights that are taken."""
        return sum(layer.inputs * layer.outputs for layer in self.taken)

    def __str__(self) -> str:
        grouped: dict[str, int] = {}
        for reason in self.kept.values():
            grouped[reason] = grouped.get(reason, 0) + 1
        kept = "; ".join(f"{count} x {reason}" for reason, count in grouped.items())
        text = f"{len(self.taken)} of {len(self.layers)} linear layers"
        return text + (f" (kept: {kept})" if kept else "")


@dataclass
class _Rules:
    exclude: Sequence[str]
    parts: Mapping[str, Sequence[tuple[int, int]]]
    others: Mapping[str, str]
    heads: Collection[nn.Module]
    tied: Sequence[nn.Parameter]
    matched: set[str] = field(default_factory=set)

    def reason(self, path: str, module: Any, sizes: Sequence[tuple[int, int]]) -> str:
        """Why a layer stays in high precision; `sizes` are its inputs and outputs on each rank."""
        weight: Tensor = module.weight
        for pattern in self.exclude:
            if fits(path, pattern):
                self.matched.add(pattern)
                return f"excluded by {pattern!r}"
        if module in self.heads or any(fits(path, name) for name in HEADS):
            return "an output head"
        if ".lora_" in path:
            return "a factor of an adapter"
        if any(weight is parameter for parameter in self.tied):
            return "its weights are tied to others"
        if weight.dtype not in FLOATS:
            return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
        if type(module) not in (nn.Linear, *_own()) and not is_transposed(module):
            return f"a {type(module).__name__} computes in its own way"
        if "forward" in vars(module) and not hasattr(module, "fp8"):
            return "its forward was replaced"
        for pair in sizes:
            for name, size in zip(("inputs", "outputs"), pair, strict=True):
                if size % MULTIPLE:
                    return f"{size} {name} are no multiple of {MULTIPLE}"
        return self.others.get(path, "")


def select_layers(
    model: nn.Module,
    exclude: Sequence[str] = (),
    parts: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    others: Mapping[str, str] | None = None,
) -> Selection:
    """Returns a model's linear layers, with those that FP8 can take."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    tied = [p for p in model.parameters() if uses[id(p)] > 1]
    heads = () if head is None else (head,)
    rules = _Rules(exclude, parts or {}, others or {}, heads, tied)
    found = [_layer(rules, path, module) for path, module in linear_layers(model)]
    for pattern in exclude:
        if pattern not in rules.matched:
            raise GulliverError(
                f"FP8 exclude {pattern!r} fits no linear layer: "
                f"{nearest(pattern, [layer.path for layer in found])}"
            )
    return Selection(tuple(found))


def _layer(rules: _Rules, path: str, module: Any) -> Layer:
    outputs, inputs = module.weight.shape
    if is_transposed(module) or getattr(module, "transposed", False):
        outputs, inputs = inputs, outputs
    sizes = rules.parts.get(path, [(inputs, outputs)])
    return Layer(path, *max(sizes), rules.reason(path, module, sizes))


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules with the weight of a linear layer, each once, by its first path."""
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or is_transposed(module) or type(module) in _own()
        if linear and isinstance(getattr(module, "weight", None), Tensor):
            yield path, module


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is GPT-2's Conv1D, whose weight is ``[inputs, outputs]``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path or its last parts."""
    return fnmatch(path, pattern) or fnmatch(path, f"*.{pattern}")


_taking: set[type[nn.Module]] = set()


def takes_fp8(kind: type[nn.Module]) -> type[nn.Module]:
    """Registers a class of linear layers that reads its attribute ``fp8`` itself."""
    _taking.add(kind)
    return kind


def _own() -> tuple[type[nn.Module], ...]:
    return tuple(_taking)
