"""The plan of tensor parallelism: how each module is sharded. Data, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from gulliver.layout import Interval
from gulliver.parallel.tensor._deal import share
from gulliver.parallel.tensor._experts import ParameterCut
from gulliver.parallel.tensor._table import How


@dataclass(frozen=True)
class Placed:
    """The sharding of one module."""

    style: str
    how: How
    # Parameter to the dim that is sharded; those that are whole are not named.
    dims: Mapping[str, int]
    total: int = 0  # Features along it
    units: int = 0  # Indivisible units in each block of features
    copies: int = 1  # Ranks that hold each of them alike
    # Parameter to how it is dealt, where those of a module are dealt differently.
    parts: Mapping[str, ParameterCut] = field(default_factory=dict)

    def runs(self, size: int, place: int, name: str = "") -> tuple[Interval, ...]:
        """The intervals of a parameter that a rank holds."""
        part = self.parts.get(name)
        if part is not None:
            return share(part.total, part.units, size, place, part.blocks)
        of, number = size // self.copies, place // self.copies
        return share(self.total, self.units, of, number, self.how.blocks)


@dataclass(frozen=True)
class TensorPlan:
    """The sharding of a model over tensor ranks."""

    size: int
    # Path to its sharding, of modules that are cut or whose gradients are partial.
    modules: Mapping[str, Placed]
    attention: Mapping[str, int]  # Path of an attention module to how many head groups it has
    sites: tuple[str, ...]  # Modules whose input goes into several columns, and is taken in once
    stacks: tuple[str, ...]  # Paths of the lists of blocks
    sliced: Mapping[str, tuple[str, ...]]  # Path to arguments of which a rank takes its heads' part
    replicated: tuple[str, ...]  # Paths of modules with parameters that stay whole
    known: bool  # The model is of a known type, or has a plan of its own
    # Paths of modules in blocks that need the whole sequence: experts, and what is cut without
    # being understood.
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
