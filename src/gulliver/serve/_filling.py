"""`Filling`: gives a model on meta the values of a folder, module by module, quantised or not.

Names, regions and layouts of the float weights are noted before their layers are replaced, so that
a layer can be filled wherever its memory lies by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import ALONE, RankGroup, all_reduce
from gulliver.errors import GulliverError
from gulliver.memory import Region, region_of
from gulliver.parallel.tensor import QuantizedRow, materialize
from gulliver.precision import replace_module
from gulliver.precision.int8 import QuantizedLayer, largest_of, to_int4, to_int8
from gulliver.quantize import quantize_like
from gulliver.serve._experts import JOINED, QuantizedExperts, quantize_experts, settle_experts
from gulliver.serve._source import Source


@dataclass(frozen=True)
class _Weight:
    """A float weight, of which a quantised layer is made."""

    name: str
    shape: tuple[int, ...]
    region: Region | None
    transposed: bool


class Filling:
    """Values of a folder for a model, which is whole or cut."""

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
        """Gives the model memory of its own, and all of its values."""
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
    """Whether `gulliver quantize` wrote a folder."""
    from gulliver.checkpoint import read_metadata

    float_weights = ("model.safetensors", "model.safetensors.index.json")
    if any((folder / name).is_file() for name in float_weights):
        return False  # those are read
    file = folder / "quantized.safetensors"
    return file.is_file() and "gulliver_quantization" in read_metadata(file)


def check_quantised(tensor: int) -> None:
    """Refuses tensor ranks for weights that are quantised in the files."""
    if tensor > 1:
        raise GulliverError(
            f"tensor={tensor}: weights that lie quantised in files are not cut over tensor ranks; "
            "give the folder that they were made of and quantize=, or pipeline= ranks"
        )
