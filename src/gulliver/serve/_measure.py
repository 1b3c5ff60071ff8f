"""Shapes of a model's keys and values, and its vocabulary, by a forward of one token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._attention import attached
from gulliver.serve._forward import forward
from gulliver.serve._pages import LayerShape

SIGNS = 64
"""Numbers of a sign, at most."""


@dataclass(frozen=True)
class Measured:
    """What a forward of one token told.

    Attributes:
        layers: shapes of keys and values by layer.
        dtype: dtype of keys and values.
        vocabulary: columns of the logits.
        sign: what the last layer's values are, some of them: see `sign_of`.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    vocabulary: int
    sign: tuple[float, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return sum(2 * s.heads * s.dim for s in self.layers) * self.dtype.itemsize


def sign_token(model: Any) -> int:
    """Token whose values a model is known by: the first ones may be padding, of zeros."""
    return int(model.config.vocab_size) // 2


def sign_of(values: Tensor) -> tuple[float, ...]:
    """Some of a layer's values of `sign_token` at place 0, by which a model is known again."""
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


@torch.inference_mode()
def measure(model: Any, device: torch.device) -> Measured:
    """Runs one token through a model."""
    recorder = Recorder()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with attached(model, recorder):
        logits = forward(model, zero + sign_token(model), zero, zero)
    count = model.config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(count)):
        raise GulliverError(
            f"{type(model).__name__} attends over pages in {len(recorder.shapes)} of its {count} "
            "layers: it is not served"
        )
    layers = tuple(recorder.shapes[number] for number in range(count))
    sign = sign_of(recorder.values[count - 1])
    return Measured(layers, recorder.dtype, logits.shape[-1], sign)
