"""The plan of tensor parallelism: how each module is sharded. Data, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from gulliver.parallel.tensor._deal import Interval, share
from gulliver.parallel.tensor._experts import Part
from gulliver.parallel.tensor._table import How


@dataclass(frozen=True)
class Placed:
    """How one module is cut.

    Attributes:
        style: name of the style in `STYLES`.
        how: meaning of the style.
        dims: parameter to the dim that is sharded; those that are whole are not named.
        total: features along it.
        units: indivisible units in each block of features.
        copies: ranks that hold each of them alike.
        parts: parameter to how it is dealt, where those of a module are dealt differently.
    """

    style: str
    how: How
    dims: Mapping[str, int]
    total: int = 0
    units: int = 0
    copies: int = 1
    parts: Mapping[str, Part] = field(default_factory=dict)

    def runs(self, size: int, place: int, name: str = "") -> tuple[Interval, ...]:
        """The part of a rank, of the parameter of a name."""
        part = self.parts.get(name)
        if part is not None:
            return share(part.total, part.units, size, place, part.blocks)
        of, number = size // self.copies, place // self.copies
        return share(self.total, self.units, of, number, self.how.blocks)


@dataclass(frozen=True)
class TensorPlan:
    """How a model is cut over the ranks of a tensor line.

    Attributes:
        size: ranks.
        modules: path to its sharding, of modules that are cut or whose gradients are partial.
        attention: path of an attention module to how many head groups it has.
        sites: modules whose input goes into several columns, and is taken in once.
        stacks: paths of the lists of blocks.
        sliced: path to arguments of which a rank takes its heads' part.
        replicated: paths of modules with parameters that stay whole.
        known: the model is of a known type, or has a plan of its own.
        whole: paths of modules in blocks that need the whole sequence: experts, and what is cut
            without being understood.
    """

    size: int
    modules: Mapping[str, Placed]
    attention: Mapping[str, int]
    sites: tuple[str, ...]
    stacks: tuple[str, ...]
    sliced: Mapping[str, tuple[str, ...]]
    replicated: tuple[str, ...]
    known: bool
    whole: tuple[str, ...] = ()

    def share_of(self, model: nn.Module) -> float:
        """The share of the parameters of a model's blocks that this plan cuts, from 0 to 1."""
        whole = cut = 0
        lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        for path, module in model.named_modules():
            if not any(path.startswith(f"{inside}.") for inside in lists):
                continue
            dims = self.modules[path].dims if path in self.modules else {}
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    whole += parameter.numel()
                    cut += parameter.numel() if name in dims else 0
        return cut / whole if whole else 1.0

    def __str__(self) -> str:
        lines: dict[str, str] = {}
        for path, placed in self.modules.items():
            what = f"{placed.total} in {placed.units}" if placed.units else ""
            lines[re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)] = f"{placed.style:20} {what}"
        for path in self.replicated:
            lines.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) or "(model)", "replicate")
        width = max(map(len, lines), default=0)
        return "\n".join(
            [f"tensor parallel over {self.size} ranks"]
            + [f"  {path:{width}}  {what}".rstrip() for path, what in lines.items()]
        )
