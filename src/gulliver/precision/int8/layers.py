"""Layers with quantized weights: linear, convolution, embedding.

A layer keeps two buffers, ``weight`` (int8) and ``weight_scale``, and its original bias, so its
state dict can be saved as usual. The buffers have no gradient, and backward raises an error. Scales
keep their dtype (float32; float16 for int4) if the model is cast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gulliver.errors import GulliverError
from gulliver.precision.int8.formats import from_int8
from gulliver.precision.int8.products import MODES, Stored, product


class QuantizedLayer(nn.Module, ABC):
    """A layer with a quantized weight."""

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        path: str,
        mode: str,
        values: Tensor,
        scales: Tensor,
        inputs: int,
        bias: nn.Parameter | None = None,
        threshold: float = math.inf,
    ) -> None:
        super().__init__()
        assert mode in MODES
        self.path, self.mode, self.inputs, self.threshold = path, mode, inputs, threshold
        self.register_buffer("weight", values)
        self.register_buffer("weight_scale", scales)
        self.register_parameter("bias", bias)
        self._stored: tuple[int, Stored] | None = None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the quantized weight, as a matrix."""
        return self.outputs, self.inputs

    @property
    def stored(self) -> Stored:
        weight, scales, version = self._state()
        known = self._stored
        # Sums are recomputed when the weight was replaced or written.
        if known is None or known[0] != version or known[1].values is not weight:
            sums = None if self.mode == "int4" else weight.flatten(1).sum(1, dtype=torch.int32)
            known = version, Stored(self.mode, weight, scales, sums, self.inputs, self.threshold)
        elif known[1].scales is not scales:
            known = version, replace(known[1], scales=scales)
        self._stored = known
        return known[1]

    def moved(self) -> None:
        """Updates data pointers after buffers have moved; the row sums stay valid."""
        if self._stored is not None:
            weight, scales, version = self._state()
            self._stored = version, replace(self._stored[1], values=weight, scales=scales)

    def _state(self) -> tuple[Any, Any, int]:
        weight, scales = self._buffers["weight"], self._buffers["weight_scale"]
        assert weight is not None
        return weight, scales, -1 if weight.is_inference() else weight._version

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scales = self.weight_scale
        super()._apply(fn, recurse)
        # Viewed as integers, they are moved but not cast.
        moved = fn(scales.view(torch.int32 if scales.dtype == torch.float32 else torch.int16))
        self.weight_scale = moved.view(scales.dtype)
        self._stored = None
        return self

    def _load_from_state_dict(self, *given: Any, **keywords: Any) -> None:
        state_dict, prefix = given[:2]
        weight, scales = (state_dict.get(prefix + n) for n in ("weight", "weight_scale"))
        if isinstance(weight, Tensor):
            self._check(weight, scales)
        super()._load_from_state_dict(*given, **keywords)
        self._stored = None

    def _check(self, weight: Tensor, scales: Any) -> None:
        if weight.dtype != torch.int8 or not isinstance(scales, Tensor):
            raise GulliverError(
                f"{self.path} is quantized to {self.mode}, but the new weight is "
                f"{_name(weight.dtype)}; load it before replace_module, or load quantized weights"
            )
        if weight.shape != self.weight.shape or scales.shape != self.weight_scale.shape:
            raise GulliverError(
                f"{self.path} is {self.mode} with values {list(self.weight.shape)} and scales "
                f"{list(self.weight_scale.shape)}, but got {list(weight.shape)} and "
                f"{list(scales.shape)}, which belong to another model or mode"
            )

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.run(x)
        bias = self.bias
        # A trainable bias must not silently stay untrained either.
        if x.requires_grad or (bias is not None and bias.requires_grad):
            return _Forward.apply(x, bias, self)
        with torch.no_grad():
            return self.run(x)

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        pass

    def _activations(self, x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            raise GulliverError(
                f"{self.path} needs floats, not {_name(x.dtype)}, because the model casts its "
                f"input to the dtype of the quantized weight; use exclude=[{self.path!r}]"
            )
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}

    def extra_repr(self) -> str:
        return f"{self.mode}, {self.inputs} to {self.outputs}, bias={self.bias is not None}"


class QuantizedLinear(QuantizedLayer):
    """A linear layer ``[..., inputs]`` to ``[..., outputs]`` with an int8 or int4 weight."""

    @property
    def in_features(self) -> int:
        return self.inputs

    @property
    def out_features(self) -> int:
        return self.outputs

    def run(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None, largest: Tensor | None = None) -> Tensor:
        """Multiplies by the weight; `largest` as for `gulliver.precision.int8.product`."""
        x = self._activations(x)
        if x.shape[-1] != self.inputs:
            raise GulliverError(f"{self.path} has {self.inputs} inputs, not {x.shape[-1]}")
        rows = x.reshape(math.prod(x.shape[:-1]), self.inputs)
        y = product(self.stored, rows, bias, largest)
        return y.view(*x.shape[:-1], y.shape[-1])


class QuantizedConvolution(QuantizedLayer):
    """A convolution with an int8 weight, dequantized in every call."""

    def __init__(self, like: Any, path: str, values: Tensor, scales: Tensor) -> None:
        inputs = values[:1].numel()
        super().__init__(path, "int8", values, scales, inputs, like.bias)
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation
        self.groups, self.padding_mode = like.groups, like.padding_mode
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.kernel_size = like.kernel_size
        self._convolve = (F.conv1d, F.conv2d, F.conv3d)[values.dim() - 3]
        self._around = like._reversed_padding_repeated_twice

    def run(self, x: Tensor) -> Tensor:
        x = self._activations(x)
        values = self.weight.flatten(1)
        weight = from_int8(values, self.weight_scale, x.dtype).view(self.weight.shape)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._around, mode=self.padding_mode), 0
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self._convolve(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class QuantizedEmbedding(QuantizedLayer):
    """An embedding with int8 rows, dequantized on lookup."""

    def __init__(
        self,
        path: str,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(path, "int8", values, scales, values.shape[1])
        self.padding_idx = padding_idx
        # Casting the model casts this buffer, whose dtype the output has.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def num_embeddings(self) -> int:
        return self.outputs

    @property
    def embedding_dim(self) -> int:
        return self.inputs

    def run(self, x: Tensor) -> Tensor:
        vectors = F.embedding(x, self.weight).float()
        scales = F.embedding(x, self.weight_scale[:, None])
        return vectors.mul_(scales).to(cast(Tensor, self.like).dtype)


class _Forward(Function):
    """Forward pass whose backward raises an error that names the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer = layer.path, layer.mode
        return layer.run(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        path, mode = ctx.layer
        raise GulliverError(
            f"{path} has {mode} weights, which do not support backward: train before "
            "replace_module, run under torch.no_grad(), or freeze it with requires_grad_(False) "
            "if only later layers are trained"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
