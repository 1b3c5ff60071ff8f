"""`Source`: parameters of a model read from the folder that transformers wrote, slice by slice.

A model is built on meta (`build_on_meta`), cut over ranks and stages there, and filled with what is
left of it. A slice of a tensor is read without the rest.

[Note: experts] A mixture of experts has one tensor for all experts of a layer, and its files one
for each expert and projection, under names of their own. transformers joins them as it loads a
whole model. Here the pieces are read where they belong: rows of gates before rows of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint import open_weights
from gulliver.errors import GulliverError
from gulliver.memory import Part, Region
from gulliver.precision.int8 import QuantizedLayer

EXPERTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Joined tensors of experts, and the names of their pieces in files."""
RENAMED = ((".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))
"""Parts of names in a model, and in its files."""


def build_on_meta(folder: Path | str, dtype: torch.dtype) -> Any:
    """Builds a folder's model with parameters on meta, and its settings of generation.

    Args:
        folder: folder that transformers wrote.
        dtype: dtype of the parameters.
    """
    import transformers

    from gulliver.booster import lazy_parameters

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with lazy_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(
            folder, local_files_only=True
        )
    return model.eval().requires_grad_(False)


class Source:
    """Tensors of a folder, by the names of a model's parameters.

    Args:
        folder: folder that transformers wrote.
        model: whole model, before it is cut; its parameters may be on meta.
    """

    def __init__(self, folder: Path | str, model: nn.Module) -> None:
        self.folder = Path(folder)
        self._weights = open_weights(folder)
        self._base = str(getattr(model, "base_model_prefix", ""))
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
        """Compares names and shapes of all parameters with the files; no weight is read.

        Args:
            model: the whole model, which may be on meta.

        Raises:
            GulliverError: the files lack a parameter, or have one of another shape.
        """
        for name, parameter in model.named_parameters():
            for source, _, region in self._pieces(name, parameter, tuple(parameter.shape), None):
                self._compare(source, region)

    def fill(self, name: str, into: Tensor, region: Region | None = None) -> None:
        """Reads a parameter, or a region of it.

        Args:
            name: the model's name for it, or any other of a tied one.
            into: contiguous memory of the region's shape; values are converted to its dtype.
            region: region of the whole that is read; None for all.

        Raises:
            GulliverError: the files lack it, or have one of another shape.
        """
        whole = tuple(into.shape) if region is None else region.shape
        for source, value, part in self._pieces(name, into, whole, region):
            self._read(source, value, part)

    def fill_expert(
        self,
        name: str,
        expert: int,
        into: Tensor,
        shape: tuple[int, ...],
        region: Region | None = None,
    ) -> None:
        """Reads one expert's matrix of a joined tensor.

        Args:
            name: the model's name of the joined tensor.
            expert: number of the expert.
            into: matrix of its shape.
            shape: shape of the joined tensor, or of this rank's part of it.
            region: region of the whole that this rank has.

        Raises:
            GulliverError: as for `fill`.
        """
        whole = tuple(shape) if region is None else region.shape
        for one in self._names(name):
            if one in self._weights.infos:
                region = region or Region(whole, 0, ((0, whole[0]),))
                part = Part(into.view(-1), whole, expert * into.numel(), region=region)
                assert into.dtype == self._weights.infos[one].dtype
                self._weights.read({one: part})
                return
        for source, value, mine in self._of_experts(name, into[None], whole, region, (expert,)):
            self._read(source, value, mine)

    def fill_plain(self, name: str, into: Tensor) -> None:
        """Reads a tensor that the files have under the model's own name, or that of a tied one."""
        self._read(self._known(name), into, Region(tuple(into.shape), 0, ()))

    def fill_buffers(self, module: nn.Module, front: str) -> None:
        """Reads the buffers of a module that the files have; values of quantised layers are not."""
        for inner_path, inner in module.named_modules():
            if isinstance(inner, QuantizedLayer):
                continue
            at = f"{front}{inner_path}." if inner_path else front
            for name, buffer in inner._buffers.items():
                if buffer is not None and at + name in self._weights.infos and not buffer.is_meta:
                    self._read(at + name, buffer, Region(tuple(buffer.shape), 0, ()))

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a parameter has in the files."""
        experts = next(filter(None, map(self._experts, self._names(name))), None)
        known = self._known(name) if experts is None else f"{experts[0]}.0.{experts[1][0]}.weight"
        return self._weights.infos[known].dtype

    def _known(self, name: str) -> str:
        found = next((one for one in self._names(name) if one in self._weights.infos), None)
        if found is None:
            known = " or ".join(self._names(name)[:2])
            raise GulliverError(f"{self.folder} has no {known}: its files are of another model")
        return found

    def _pieces(
        self, name: str, into: Tensor, whole: tuple[int, ...], region: Region | None
    ) -> Iterator[tuple[str, Tensor, Region]]:
        """Names in the files, the memory for each, and the region of each that is read."""
        experts = any(self._experts(one) for one in self._names(name))
        if not experts or len(whole) != 3:
            yield self._known(name), into, region or Region(whole, 0, ((0, whole[0]),))
            return
        yield from self._of_experts(name, into, whole, region, range(whole[0]))

    def _of_experts(
        self,
        name: str,
        into: Tensor,
        whole: tuple[int, ...],
        region: Region | None,
        experts: Sequence[int],
    ) -> Iterator[tuple[str, Tensor, Region]]:
        """The same of some experts, for which `into` has a matrix each."""
        front, parts = next(filter(None, map(self._experts, self._names(name))))
        dim, runs = (region.dim, region.runs) if region else (1, ((0, whole[1]),))
        features = whole[1] // len(parts)
        for place, expert in enumerate(experts):
            for number, part in enumerate(parts):
                source = f"{front}.{expert}.{part}.weight"
                if dim == 2:
                    yield source, into[place], Region((features, whole[2]), 1, runs)
                    continue
                begin = number * features
                cut = tuple(
                    (max(a, begin) - begin, min(b, begin + features) - begin)
                    for a, b in runs
                    if a < begin + features and b > begin
                )
                before = sum(max(0, min(b, begin) - a) for a, b in runs)
                mine = Region((features, whole[2]), 0, cut)
                yield source, into[place, before : before + mine.local_shape[0]], mine

    def _names(self, name: str) -> list[str]:
        """Names that a parameter may have in files, the likeliest first."""
        found = list(self._tied.get(name, [name]))
        for inside, outside in RENAMED:
            found += [one.replace(inside, outside) for one in found if inside in one]
        front = f"{self._base}."
        return found + [one.removeprefix(front) for one in found if one.startswith(front)]

    def _experts(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Path of the experts in the files, and the names of the pieces of a joined tensor."""
        front, _, last = name.rpartition(".")
        for parts in EXPERTS.get(last, ()):
            if f"{front}.0.{parts[0]}.weight" in self._weights.infos:
                return front, parts
        return None

    def _compare(self, source: str, region: Region) -> Any:
        """What the files say of a tensor, which must be there and of a region's shape."""
        infos: Mapping[str, Any] = self._weights.infos
        if source not in infos:
            raise GulliverError(f"{self.folder} has no {source}: its files are of another model")
        info = infos[source]
        if tuple(info.shape) != tuple(region.shape):
            raise GulliverError(
                f"{self.folder}: {source} is {list(info.shape)}, the model's {list(region.shape)}"
            )
        return info

    def _read(self, source: str, into: Tensor, region: Region) -> None:
        info = self._compare(source, region)
        if not into.numel():
            return
        straight = into.dtype == info.dtype and into.is_contiguous() and into.is_cpu
        value = into if straight else torch.empty(into.shape, dtype=info.dtype)
        whole = tuple(into.shape) == tuple(region.shape)
        part = Part(value.view(-1), info.shape, region=None if whole else region)
        self._weights.read({source: part})
        if not straight:
            into.copy_(value)
