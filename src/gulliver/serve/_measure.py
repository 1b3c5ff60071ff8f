"""Shapes of a model's keys and values, and its vocabulary, by a forward of one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._attention import attached
from gulliver.serve._forward import forward
from gulliver.serve._pages import LayerShape


@dataclass(frozen=True)
class Measured:
    """What a forward of one token told.

    Attributes:
        layers: shapes of keys and values by layer.
        dtype: dtype of keys and values.
        vocabulary: columns of the logits.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    vocabulary: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return sum(2 * s.heads * s.dim for s in self.layers) * self.dtype.itemsize


class Recorder:
    """Pages that keep no keys, only their shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32

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
        return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


@torch.inference_mode()
def measure(model: Any, device: torch.device) -> Measured:
    """Runs one token through a model.

    Args:
        model: causal language model of transformers.
        device: where its weights lie.

    Raises:
        GulliverError: not all of its layers attend over pages.
    """
    recorder = Recorder()
    one = torch.zeros(1, dtype=torch.int64, device=device)
    with attached(model, recorder):
        logits = forward(model, one, one, one)
    count = model.config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(count)):
        raise GulliverError(
            f"{type(model).__name__} attends over pages in {len(recorder.shapes)} of its {count} "
            "layers: it is not served"
        )
    layers = tuple(recorder.shapes[number] for number in range(count))
    return Measured(layers, recorder.dtype, logits.shape[-1])
