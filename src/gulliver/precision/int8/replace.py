"""Replaces layers with quantized ones, and reports on them."""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from gulliver._compat import share_forward_hooks
from gulliver.errors import GulliverError, check_known
from gulliver.options import size_text
from gulliver.precision.fp8.conversion import is_transposed
from gulliver.precision.int8.formats import (
    GROUP,
    check_int4,
    from_int4,
    from_int8,
    largest_of,
    sensitive_paths,
    to_int4,
    to_int8,
)
from gulliver.precision.int8.layers import (
    QuantizedConvolution,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)
from gulliver.precision.int8.products import MODES


@dataclass(frozen=True)
class Layer:
    """Report on a layer."""

    path: str
    kind: str
    shape: tuple[int, ...]
    format: str  # Mode that it is in; empty where it was kept
    before: int  # Bytes of its weight
    after: int  # Bytes of its weight, scales and sums of rows
    why: str = ""  # Why it was kept, or not in the mode that was asked for
    # Relative error of its weight in the Frobenius norm, if measured.
    error: float | None = None


@dataclass
class Report:
    """Report on a model's layers and on kernels."""

    mode: str  # Mode that was asked for
    # All layers with a weight of two dims or more, replaced and kept.
    layers: list[Layer] = field(default_factory=list)
    before: int = 0  # Bytes of the model's parameters and buffers
    after: int = 0

    @property
    def replaced(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.format]

    @property
    def kept(self) -> list[Layer]:
        return [layer for layer in self.layers if not layer.format]

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], int] = {}
        for layer in self.layers:
            path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.path)
            shape = "x".join(map(str, layer.shape))
            row = (path, layer.kind, shape, layer.format or "kept", layer.why)
            lines[row] = lines.get(row, 0) + 1
        widths = [max((len(row[i]) for row in lines), default=0) for i in range(4)]
        text = [
            f"{self.mode}: {len(self.replaced)} layers quantized, {len(self.kept)} unchanged; "
            f"{size_text(self.before)} before, {size_text(self.after)} after"
        ]
        for row, count in lines.items():
            cells = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
            text.append(f"  {cells}  x{count}  {row[4]}".rstrip())
        return "\n".join(text)


# Replaces the layers of a model by quantized ones, in place, and reports on each of them.
#
# model = replace_module(model)                      # int8 weights and activations
# print(report_of(model))


LOG = logging.getLogger("gulliver")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Model = TypeVar("Model", bound=nn.Module)
NOTE = "_quantisation"


@dataclass(frozen=True)
class Rounded:
    """A pre-rounded weight for `replace_module`."""

    values: Tensor  # Values, as `to_int8` or `to_int4` returns them
    scales: Tensor  # Scales that those return with them
    error: float  # Relative error of the weight in the Frobenius norm


@dataclass
class QuantizeArguments:
    """Settings of a quantization."""

    mode: str  # One of `MODES`
    threshold: float  # Magnitude of activations that are not quantised
    # Fills a layer on meta before it is quantized, given its path.
    load: Callable[[str, nn.Module], None] | None = None
    errors: bool = False  # Whether the error of each weight is measured
    # Pre-rounded weights, by the path of their layer.
    rounded: Mapping[str, Rounded] = field(default_factory=dict)
    path: str = ""  # Path of the layer at hand
    key: int = 0  # What tells its weight from others; tied ones have the same
    # Quantized values and scales by weight, so that tied weights stay tied.
    made: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # Relative error of the last quantized weight, in the Frobenius norm.
    error: float | None = None

    def quantised(
        self, weight: Tensor, mode: str, joined: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        key = self.key, mode == "int4"
        known, given = self.made.get(key), self.rounded.get(self.path)
        if known is None and given is not None:
            known = self.made[key] = given.values, given.scales
            self.error = given.error
        elif known is None:
            largest = largest_of(weight, self.path)
            if mode == "int4":
                check_int4(largest, self.path)
            largest = largest if joined is None else joined(largest)
            known = to_int4(weight) if mode == "int4" else to_int8(weight, largest)
            self.made[key] = known
            back = (from_int4 if mode == "int4" else from_int8) if self.errors else None
            self.error = None if back is None else _relative(weight, back(*known, weight.dtype))
        return known


Make = Callable[[Any, QuantizeArguments], nn.Module]
REPLACED: dict[type[nn.Module], Make] = {}
"""Factories of quantized layers by layer class, for layers of other packages."""
GROUPED: dict[type[nn.Module], Callable[[Any, str], bool]] = {}
"""Functions by layer class that check whether int4 groups divide a layer's inputs."""


def replace_module(
    model: Model,
    mode: str = "int8_dynamic",
    exclude: Iterable[str] = (),
    outlier_threshold: float | None = 6.0,
    embeddings: bool = False,
    convolutions: bool = True,
    only: Iterable[str] | None = None,
    load: Callable[[str, nn.Module], None] | None = None,
    errors: bool = False,
    rounded: Mapping[str, Rounded] | None = None,
) -> Model:
    """Quantizes a model's weights for inference, in place.

    The weights must be loaded first. Tied weights stay tied if both layers are quantized.
    `report_of` lists what was done to each layer.

    Args:
        model: any model; its linear layers (including transformers' Conv1D) and convolutions are
            replaced under the same names.
        mode: ``"int8_dynamic"``, int8 weights and activations as in LLM.int8(); ``"int8"``,
            int8 weights only; or ``"int4"``, int4 weights in groups of 32 inputs.
        exclude: patterns of paths to keep, matching a path or its end (``"lm_head"``,
            ``"*.attn.*"``).
        outlier_threshold: activations of at least this magnitude are not quantized; None: no limit.
        embeddings: whether to quantize embeddings.
        convolutions: whether to quantize convolutions.
        only: patterns of the paths to quantize; None for all.
        load: function of path and layer that fills a layer on meta before it is quantized; its
            float weight is freed afterwards.
        errors: whether to report the error of each weight.
        rounded: pre-rounded weights of linear layers, by path; see
            `gulliver.quantize.replace_calibrated`.

    Returns:
        The model.

    Raises:
        GulliverError: the mode or a pattern is unknown, the threshold is not positive, the model is
            already quantized, or a weight is not finite or too large; nothing is changed then.
    """
    _check(model, mode, outlier_threshold)
    threshold = math.inf if outlier_threshold is None else float(outlier_threshold)
    options = QuantizeArguments(mode, threshold, load, errors, rounded or {})
    replacing = _Replacing(model, options, embeddings, convolutions)
    replacing.match(list(exclude), None if only is None else list(only))
    replacing.run()
    return model


def linear_modes(
    model: nn.Module, mode: str = "int8_dynamic", exclude: Iterable[str] = ()
) -> dict[str, str]:
    # Without layers whose weights others share, and without layers of other packages.
    _check(model, mode, None)
    replacing = _Replacing(model, QuantizeArguments(mode, math.inf), False, False)
    replacing.match(list(exclude), None)
    users = Counter(id(p) for m in replacing.modules.values() for p in m._parameters.values())
    found: dict[str, str] = {}
    for path, module in replacing.modules.items():
        weight = _matrix_in(module)
        own = weight is not None and users[id(weight)] == 1 and type(module) not in REPLACED
        if own and not replacing._why_kept(path, module)[0]:
            found[path] = replacing.fitting(mode, module, path)[0]
    return found


def report_of(model: nn.Module) -> Report:
    """Returns the report on a model that `replace_module` has quantized.

    Raises:
        GulliverError: the model is not quantized.
    """
    report = vars(model).get(NOTE)
    if report is None:
        raise GulliverError("the model is not quantized; call replace_module(model) first")
    return report


def _check(model: nn.Module, mode: str, threshold: float | None) -> None:
    check_known("mode", mode, MODES)
    if threshold is not None and not threshold > 0:
        raise GulliverError(f"outlier_threshold={threshold} must be above 0, or None")
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise GulliverError(f"{path} has no shape; run the model once before replace_module")
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            raise GulliverError(
                f"the model is already quantized ({path or 'it'} is {module.mode}); load its float "
                "weights again to change the mode"
            )


class _Replacing:
    def __init__(
        self, model: nn.Module, options: QuantizeArguments, embeddings: bool, convolutions: bool
    ) -> None:
        self.model, self.options = model, options
        self.embeddings, self.convolutions = embeddings, convolutions
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._sensitive = sensitive_paths(self.modules)
        self.exclude: set[str] = set()
        self.report = Report(options.mode, before=model_bytes(model))

    def match(self, exclude: Sequence[str], only: Sequence[str] | None) -> None:
        for pattern in (*exclude, *(only or ())):
            if not any(_matches(path, pattern) for path in self.modules):
                raise GulliverError(f"no module matches {pattern!r}; use a path or the end of one")
        for path in self.modules:
            wanted = only is None or any(_matches(path, p) or _under(path, p) for p in only)
            if not wanted or any(_matches(path, p) or _under(path, p) for p in exclude):
                self.exclude.add(path)

    def run(self) -> None:
        for path, module in self.modules.items():
            if type(module) in GROUPED and not self._why_kept(path, module)[0]:
                self.fitting(self.options.mode, module, path)  # refused before anything is read
        new: dict[int, nn.Module | None] = {}
        layers: list[tuple[str, nn.Module, nn.Module]] = []
        for path, module in self.modules.items():
            weight = _matrix_in(module)
            if weight is None or id(module) in new:
                continue
            why, mode = self._why_kept(path, module)
            made = None
            if not why:
                made, why = self._loaded(path, module, mode, weight)
            new[id(module)] = made
            self._note(path, module, weight, made, why)
        # Only now: a weight that is rejected leaves the model as it was.
        for path, module in self.modules.items():
            made = new.get(id(module))
            if made is not None and path:
                parent, _, name = path.rpartition(".")
                layers.append((path, module, made))
                setattr(self.model.get_submodule(parent), name, made)
        for _, module, made in layers:
            share_forward_hooks(module, made)
            made.train(module.training)
        self._note_untied(new)
        self._warn(bool(layers))
        self.report.after = model_bytes(self.model)
        vars(self.model)[NOTE] = self.report

    def _warn(self, some: bool) -> None:
        whole = sum(layer.before for layer in self.report.layers)
        kept = {layer.path: layer.before for layer in self.report.kept}
        if not some:
            LOG.warning("replace_module replaced nothing: see report_of(model)")
        elif sum(kept.values()) > whole / 2:
            LOG.warning(
                "replace_module left %.0f %% of the weights unchanged, the largest in %s: see "
                "report_of(model)",
                100 * sum(kept.values()) / whole,
                max(kept, key=lambda path: kept[path]),
            )

    def _note_untied(self, new: Mapping[int, nn.Module | None]) -> None:
        """Records quantized layers whose float weight other layers still share."""
        kept = {
            id(_matrix_in(m)): path for path, m in self.modules.items() if new.get(id(m), m) is None
        }
        for place, layer in enumerate(self.report.layers):
            other = kept.get(id(_matrix_in(self.modules[layer.path])))
            if layer.format and other is not None:
                why = "; ".join(
                    filter(None, (layer.why, (f"untied: {other} keeps the float weight")))
                )
                self.report.layers[place] = replace(layer, why=why)

    def _why_kept(self, path: str, module: nn.Module) -> tuple[str, str]:
        """Returns why a layer is not quantized (empty if it is), and its mode."""
        parent = self.modules.get(path.rpartition(".")[0]) if path else None
        mode = self.options.mode
        if path in self.exclude:
            return "excluded", mode
        if not path:
            return "it is the model itself", mode
        if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            return f"nn.{type(parent).__name__} reads its weights past the layer", mode
        if _reads_weight(parent, path.rpartition(".")[2], isinstance(module, nn.Embedding)):
            return f"{type(parent).__name__}.forward reads its weight past the layer", mode
        hooked = "weight" in vars(module)  # by nn.utils.weight_norm or spectral_norm
        if parametrize.is_parametrized(module) or hooked:
            return "its weight is recomputed at every use (parametrised)", mode
        if isinstance(module, nn.Embedding):
            return ("" if self.embeddings else "embeddings=False"), "int8"
        if type(module) in CONVOLUTIONS:
            return ("" if self.convolutions else "convolutions=False"), "int8"
        if type(module) in REPLACED or _is_linear(module):
            return "", mode
        return f"no quantized {type(module).__name__} is known", mode

    def _loaded(
        self, path: str, module: Any, mode: str, weight: Tensor
    ) -> tuple[nn.Module | None, str]:
        """Quantizes a layer on meta; its float weight exists only during the call."""
        self.options.path, self.options.key, self.options.error = path, id(weight), None
        if self.options.load is not None:
            self.options.load(path, module)
        made, why = self._made(module, mode)
        if self.options.load is not None:
            module._parameters["weight"] = weight
        if all((id(weight), int4) in self.options.made for int4 in (True, False)):
            why = "; ".join(
                filter(None, (why, ("untied: the other layer's weight is not quantized") + mode))
            )
        return made, why

    def fitting(self, mode: str, module: nn.Module, path: str) -> tuple[str, str]:
        """Returns a layer's mode, int8 instead of int4 if that does not fit, and the reason."""
        if mode != "int4":
            return mode, ""
        asked = GROUPED.get(type(module))
        if not (asked(module, path) if asked else matrix_of(module).shape[1] % GROUP == 0):
            return "int8", f"int8: {GROUP} does not divide its inputs"
        return ("int8", "int8: sensitive") if path in self._sensitive else (mode, "")

    def _made(self, module: Any, mode: str) -> tuple[nn.Module | None, str]:
        if isinstance(module, nn.Embedding):
            return self._embedding(module)
        if type(module) in CONVOLUTIONS:
            values, scales = self.options.quantised(module.weight.detach().flatten(1), "int8")
            values = values.view(module.weight.shape)
            note = "" if self.options.mode == "int8" else "weights only"
            return QuantizedConvolution(module, self.options.path, values, scales), note
        mode, why = self.fitting(mode, module, self.options.path)
        self.options.mode, asked = mode, self.options.mode
        try:
            return REPLACED.get(type(module), quantized_linear)(module, self.options), why
        finally:
            self.options.mode = asked

    def _embedding(self, module: Any) -> tuple[nn.Module | None, str]:
        if module.max_norm is not None or type(module).forward is not nn.Embedding.forward:
            return None, "it scales or filters its output"
        values, scales = self.options.quantised(module.weight.detach(), "int8")
        made = (self.options.path, values, scales, module.weight.dtype, module.padding_idx)
        return QuantizedEmbedding(*made), ""

    def _note(
        self, path: str, module: nn.Module, weight: Tensor, made: nn.Module | None, why: str
    ) -> None:
        inside = [m for m in made.modules() if isinstance(m, QuantizedLayer)] if made else []
        after = sum(layer_bytes(m) for m in inside) if made else weight.nbytes
        mode = inside[0].mode if inside else ""
        said = path, type(module).__name__, tuple(weight.shape), mode, weight.nbytes, after
        self.report.layers.append(Layer(*said, why, self.options.error if made else None))


def quantized_linear(module: Any, options: QuantizeArguments) -> nn.Module:
    weight = matrix_of(module)
    values, scales = options.quantised(weight, options.mode)
    return QuantizedLinear(
        options.path, options.mode, values, scales, weight.shape[1], module.bias, options.threshold
    )


def matrix_of(module: Any) -> Tensor:
    weight = module.weight.detach()
    return weight.t() if is_transposed(module) or getattr(module, "transposed", False) else weight


def _reads_weight(parent: nn.Module | None, name: str, slices: bool) -> bool:
    """Whether a module's forward reads its child layer's weight, as CLIP's does for the dtype."""
    # Forwards that mention int8 are assumed to support quantized weights, as T5's does. Slices of
    # linear weights do not count: BLOOM's forward has a branch with them that is never taken.
    source = "" if parent is None else _source(type(parent))
    unread = "device" if slices else r"device|\["
    asked = re.search(rf"\w\.{re.escape(name)}\.weight\b(?!\.?({unread}))", source)
    return asked is not None and "int8" not in source


@cache
def _source(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def _relative(weight: Tensor, back: Tensor) -> float:
    return float((back - weight).norm() / weight.norm().clamp(min=1e-30))


def _matrix_in(module: nn.Module) -> Tensor | None:
    own = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() > 1:
        return weight
    return max(own, key=Tensor.numel, default=None)


def _is_linear(module: nn.Module) -> bool:
    return is_transposed(module) or type(module).forward is nn.Linear.forward


def layer_bytes(layer: QuantizedLayer) -> int:
    """Returns the bytes of a layer's values, scales and row sums."""
    sums = 0 if layer.mode == "int4" or not isinstance(layer, QuantizedLinear) else layer.outputs
    return layer.weight.nbytes + layer.weight_scale.nbytes + 4 * sums


def model_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters, buffers and row sums; storages count once."""
    seen: dict[Any, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        # Tensors on meta have no address; each counts separately.
        key = id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
        seen[key] = max(seen.get(key, 0), tensor.nbytes)
    layers = (m for m in model.modules() if isinstance(m, QuantizedLinear) and m.mode != "int4")
    return sum(seen.values()) + sum(4 * layer.outputs for layer in layers)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or path.endswith(f".{pattern}")


def _under(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(_matches(".".join(parts[:count]), pattern) for count in range(1, len(parts)))
