"""Shapes of a model's keys and values, and its vocabulary, by a forward of one token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._attention import attached
from gulliver.serve._pages import LayerShape

SIGNS = 64
"""Numbers of a sign, at most."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's keys, values and logits, measured by a forward of one token."""

    # Shapes of keys and values by layer; 0 heads for layers of other stages.
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    # Columns of the logits; 0 on a stage without them.
    vocabulary: int
    # Some of the last layer's values, see `sign_of`.
    sign: tuple[float, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return sum(2 * s.heads * s.dim for s in self.layers) * self.dtype.itemsize


def sign_token(model: Any) -> int:
    """Token whose values identify a model; the first ones may be padding, of zeros."""
    return int(model.config.vocab_size) // 2


def sign_of(values: Tensor) -> tuple[float, ...]:
    """Some of a layer's values of `sign_token` at place 0, which identify a model."""
    # They depend on the weights of all layers below and on no position; another dtype or quantised
    # weights change them little.
    flat = values.detach().float().flatten().cpu()
    some = torch.linspace(0, len(flat) - 1, min(SIGNS, len(flat))).long()
    return tuple(float(f"{value:.4g}") for value in flat[some].tolist())


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of two signs; 1 where one of them says nothing."""
    mine, theirs = (torch.tensor(sign, dtype=torch.float64) for sign in (one, other))
    if len(mine) != len(theirs):
        return 0.0 if len(mine) and len(theirs) else 1.0
    scale = float(mine.norm() * theirs.norm())
    return float(mine @ theirs) / scale if math.isfinite(scale) and scale > 0 else 1.0


class Recorder:
    """Pages that keep no keys, only their shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32
        self.values: dict[int, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Notes a layer; the attention of one token to itself is its value."""
        del scale, window, slopes
        if key.shape != value.shape:
            raise GulliverError(
                f"layer {layer} has keys of {key.shape[-1]} and values of {value.shape[-1]} "
                "numbers a head: models of unequal ones are not served"
            )
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[2])
        self.dtype = key.dtype
        self.values[layer] = value
        return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


def measure(
    model: Any, run: Callable[[], Tensor], layers: range, logits: bool = True
) -> ModelShape:
    """Runs one token through a model, or through a stage that has `layers` of it."""
    recorder = Recorder()
    with attached(model, recorder):
        out = run()
    if sorted(recorder.shapes) != list(layers):
        raise GulliverError(
            f"{type(model).__name__} attends over pages in layers {sorted(recorder.shapes)}, not "
            f"in all of {layers.start} to {layers.stop - 1}: it is not served"
        )
    # A layer keeps its number on every stage.
    none = LayerShape(0, 0)
    shapes = tuple(recorder.shapes.get(number, none) for number in range(layers.stop))
    sign = sign_of(recorder.values[layers.stop - 1])
    return ModelShape(shapes, recorder.dtype, out.shape[-1] if logits else 0, sign)
