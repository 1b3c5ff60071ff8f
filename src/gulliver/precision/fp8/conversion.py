"""Chooses the layers that compute in FP8, with reasons for the others.

A layer is converted if its sizes suit the hardware (multiples of 16), it is not an output head or
excluded, it uses a linear layer's own forward, and, if rates are known, it is predicted to be
faster. The model may be on meta: only shapes are used.
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
from gulliver.hardware.probe import FP8_CAPABILITY
from gulliver.precision.fp8.layers import (
    MULTIPLE,
    NOT_SHARED,
    LayerState,
    Recipe,
    SharedDims,
    linear,
)

HEADS = ("lm_head", "embed_out", "final_layer.linear")
"""Output heads: errors directly affect the loss, and sizes are rarely multiples of 16."""
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
    """Linear layers of a model: those that can compute in FP8, and the others with reasons."""

    layers: tuple[Layer, ...]  # All of them, in the model's order

    @property
    def taken(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.why_not)

    @property
    def kept(self) -> dict[str, str]:
        return {layer.path: layer.why_not for layer in self.layers if layer.why_not}

    @property
    def weights(self) -> int:
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
        """Returns why a layer stays in high precision; `sizes` are its dims on each rank."""
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
            return "its weights are tied to other layers"
        if weight.dtype not in FLOATS:
            return f"its weights are {str(weight.dtype).removeprefix('torch.')}"
        if type(module) not in (nn.Linear, *_own()) and not is_transposed(module):
            return f"a {type(module).__name__} has its own forward"
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
    """Returns a model's linear layers, marking those that FP8 supports."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    tied = [p for p in model.parameters() if uses[id(p)] > 1]
    heads = () if head is None else (head,)
    rules = _Rules(exclude, parts or {}, others or {}, heads, tied)
    found = [_layer(rules, path, module) for path, module in linear_layers(model)]
    for pattern in exclude:
        if pattern not in rules.matched:
            raise GulliverError(
                f"FP8 exclude {pattern!r} matches no linear layer: "
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
    """Yields the modules that have a linear layer's weight, once each, under their first path."""
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or is_transposed(module) or type(module) in _own()
        if linear and isinstance(getattr(module, "weight", None), Tensor):
            yield path, module


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is GPT-2's Conv1D, whose weight is ``[inputs, outputs]``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def fits(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path or its last components."""
    return fnmatch(path, pattern) or fnmatch(path, f"*.{pattern}")


_taking: set[type[nn.Module]] = set()


def takes_fp8(kind: type[nn.Module]) -> type[nn.Module]:
    """Registers a class of linear layers whose own forward uses the attribute ``fp8``."""
    _taking.add(kind)
    return kind


def _own() -> tuple[type[nn.Module], ...]:
    return tuple(_taking)


# Converts a model's linear layers to FP8 layers and back, in place.
#
# Modules keep their class, their parameters and so the names and values of the state dict: weights
# keep their dtype, as master weights of the optimizer, and are quantized before each product. Only
# `forward` changes: the module gets an attribute of this name; hooks around it run as before.


@dataclass(frozen=True)
class Conversion:
    """Report of a conversion: converted layers, and layers that stay in high precision."""

    recipe: Recipe  # How the layers compute
    layers: tuple[str, ...]  # Paths of the FP8 layers
    kept: dict[str, str]  # Reasons of the linear layers that stay in high precision, by path

    def __str__(self) -> str:
        lines = [
            (f"FP8 ({self.recipe}): {len(self.layers)} linear layers, {len(self.kept)} unchanged")
        ]
        return "\n".join([*lines, *(f"  {path}: {why}" for path, why in self.kept.items())])


def convert_to_fp8(
    model: nn.Module,
    recipe: Recipe | str = "tensorwise",
    *,
    emulate: bool = False,
    exclude: Sequence[str] = (),
    layers: Collection[str] | None = None,
    keep_weights: bool = True,
    shared: dict[str, SharedDims] | None = None,
) -> Conversion:
    """Makes a model's linear layers compute in FP8, in place.

    Args:
        model: model, which may be on meta.
        recipe: scaling, ``tensorwise`` or ``rowwise``, or a `Recipe`.
        emulate: emulate the numerics on devices without FP8 units, which is slow.
        exclude: patterns of layer paths that stay in high precision; see `select_layers`.
        layers: paths of the layers to convert; None for all supported ones.
        keep_weights: keep the FP8 copies of the weights from forward to backward (tensorwise):
            one byte per weight and graph; otherwise backward casts them again.
        shared: reductions over ranks that shard dims of a layer, by path.

    Returns:
        The converted layers, and the reasons for the others.

    Raises:
        GulliverError: there are no FP8 units and `emulate` is off, layers are already FP8, no layer
            is supported, or a path of `layers` is not.
    """
    if isinstance(recipe, str):
        recipe = Recipe(recipe, emulate)
    check_hardware(model, recipe)
    already = [path for path, module in linear_layers(model) if state_of(module) is not None]
    if already:
        raise GulliverError(
            f"{already[0]!r} and {len(already) - 1} more are already FP8 layers; call "
            "revert_fp8(model) first"
        )
    found = select_layers(model, exclude)
    paths = check_layers(found, layers)
    modules = dict(linear_layers(model))
    for path in paths:
        state = LayerState(recipe, keep_weights, (shared or {}).get(path, NOT_SHARED))
        _install(modules[path], state)
    others = {layer.path: "not requested" for layer in found.layers if layer.path not in paths}
    return Conversion(recipe, paths, {**others, **found.kept})


def check_layers(found: Selection, layers: Collection[str] | None) -> tuple[str, ...]:
    able = [layer.path for layer in found.taken]
    if layers is None and not able:
        raise GulliverError(f"no linear layer can compute in FP8: {found}")
    for path in layers or ():
        if path not in able:
            why = found.kept.get(path) or f"no such layer: {nearest(path, able)}"
            raise GulliverError(f"layer {path!r} cannot compute in FP8: {why}")
    return tuple(path for path in able if layers is None or path in layers)


def revert_fp8(model: nn.Module) -> None:
    """Makes all layers of a model compute in high precision again, in place."""
    for module in model.modules():
        if state_of(module) is not None:
            vars(module).pop("forward", None)
            vars(module).pop("fp8")


def state_of(module: nn.Module) -> LayerState | None:
    """Returns the state of an FP8 layer; None for other modules."""
    return vars(module).get("fp8")


def fp8_events(model: nn.Module) -> dict[str, dict[str, int]]:
    """Returns the number of casts with non-finite elements, by layer and kind.

    Casts in compiled graphs are not counted.
    """
    found = {path: state_of(module) for path, module in model.named_modules()}
    events = {path: state.events() for path, state in found.items() if state is not None}
    return {path: counts for path, counts in events.items() if counts}


def check_hardware(model: nn.Module, recipe: Recipe) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not recipe.emulate and not has_units(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise GulliverError(
            f"{name} has no FP8 units: use bf16, or fp8_emulation=True (emulate=True of "
            "convert_to_fp8), which is slower"
        )


def has_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


class _Forward:
    """Forward of an FP8 layer, with its state; a copy of the module gets a new one."""

    def __init__(self, module: nn.Module, transposed: bool) -> None:
        self.module, self.transposed = module, transposed

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        return linear(input, module.weight, module.bias, module.fp8, self.transposed)


def _install(module: nn.Module, state: LayerState) -> None:
    vars(module)["fp8"] = state
    if isinstance(module, nn.Linear) or is_transposed(module):
        vars(module)["forward"] = _Forward(module, is_transposed(module))
