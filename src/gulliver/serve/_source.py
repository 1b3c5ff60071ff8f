"""`Source`: parameters of a model read from the folder that transformers wrote, slice by slice.

A model is built on meta (`build_on_meta`), cut over ranks and stages there, and filled with what is
left of it. A slice of a tensor is read without the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint import float_config, model_weights
from gulliver.errors import GulliverError
from gulliver.memory import Part, Region
from gulliver.precision.int8 import QuantizedLayer


def build_on_meta(folder: Path | str, dtype: torch.dtype) -> Any:
    """Builds a folder's model with parameters on meta, and its settings of generation."""
    import transformers

    from gulliver.booster import lazy_parameters

    config = float_config(folder)
    with lazy_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    return model.eval().requires_grad_(False)


class Source:
    """Tensors of a folder, by the names of a model's parameters."""

    def __init__(self, folder: Path | str, model: nn.Module) -> None:
        self.folder = Path(folder)
        self._weights = model_weights(folder, model)
        first: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), []).append(name)
        self._tied = {name: names for names in first.values() for name in names}

    def close(self) -> None:
        """Closes the files."""
        self._weights.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, model: nn.Module) -> None:
        """Compares names and shapes of all parameters with the files; no weight is read."""
        for name, parameter in model.named_parameters():
            self._compare(self._known(name), tuple(parameter.shape))

    def fill(self, name: str, into: Tensor, region: Region | None = None) -> None:
        """Reads a parameter, or a region of it."""
        self._read(self._known(name), into, region)

    def fill_expert(
        self,
        name: str,
        expert: int,
        into: Tensor,
        shape: tuple[int, ...],
        region: Region | None = None,
    ) -> None:
        """Reads one expert's matrix of a joined tensor."""
        whole = tuple(shape) if region is None else region.shape
        source = self._known(name)
        info = self._compare(source, whole)
        assert into.dtype == info.dtype
        part = Part(into.view(-1), whole, expert * into.numel(), region=region)
        self._weights.read({source: part})

    def fill_buffers(self, module: nn.Module, front: str) -> None:
        """Reads the buffers of a module that the files have; values of quantised layers are not."""
        for inner_path, inner in module.named_modules():
            if isinstance(inner, QuantizedLayer):
                continue
            at = f"{front}{inner_path}." if inner_path else front
            for name, buffer in inner._buffers.items():
                if buffer is not None and at + name in self._weights.infos and not buffer.is_meta:
                    self._read(at + name, buffer, None)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a parameter has in the files."""
        return self._weights.infos[self._known(name)].dtype

    def _known(self, name: str) -> str:
        names = self._tied.get(name, [name])
        found = next((one for one in names if one in self._weights.infos), None)
        if found is None:
            known = " or ".join(names[:2])
            raise GulliverError(
                f"{self.folder}: the files lack {known}: they are of another model, or not whole"
            )
        return found

    def _compare(self, source: str, shape: tuple[int, ...]) -> Any:
        """What the files say of a tensor, which must have this shape."""
        info = self._weights.infos[source]
        if info.shape != shape:
            raise GulliverError(
                f"{self.folder}: {source} is {list(info.shape)} in the files and {list(shape)} in "
                "the model: the config.json is of another model"
            )
        return info

    def _read(self, source: str, into: Tensor, region: Region | None) -> None:
        info = self._compare(source, tuple(into.shape) if region is None else region.shape)
        if not into.numel():
            return
        straight = into.dtype == info.dtype and into.is_contiguous() and into.is_cpu
        value = into if straight else torch.empty(into.shape, dtype=info.dtype)
        self._weights.read({source: Part(value.view(-1), info.shape, region=region)})
        if not straight:
            into.copy_(value)
