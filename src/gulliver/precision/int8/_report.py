"""`Report`: what became of each layer of a model that was quantised."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gulliver.options import size_text
from gulliver.precision.int8._products import chosen_kernels


@dataclass(frozen=True)
class Layer:
    """Report on one layer."""

    path: str
    kind: str
    shape: tuple[int, ...]
    format: str  # Mode that it is in; empty where it was kept
    before: int  # Bytes of its weight
    after: int  # Bytes of its weight, scales and sums of rows
    why: str = ""  # Why it was kept, or not in the mode that was asked for
    # Relative error of its weight in the Frobenius norm, where it was measured.
    error: float | None = None


@dataclass
class Report:
    """Report on a model's layers and its kernels."""

    mode: str  # Mode that was asked for
    # All layers with a weight of two dims or more, replaced and kept.
    layers: list[Layer] = field(default_factory=list)
    before: int = 0  # Bytes of the model's parameters and buffers
    after: int = 0

    @property
    def replaced(self) -> list[Layer]:
        """Layers that are quantised now."""
        return [layer for layer in self.layers if layer.format]

    @property
    def kept(self) -> list[Layer]:
        """Layers that were kept."""
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
            f"{self.mode}: {len(self.replaced)} layers quantised, {len(self.kept)} kept; "
            f"{size_text(self.before)} before, {size_text(self.after)} after"
        ]
        for row, count in lines.items():
            cells = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
            text.append(f"  {cells}  x{count}  {row[4]}".rstrip())
        own = {(layer.format, *sorted(layer.shape)) for layer in self.replaced}
        for shape, kernel in chosen_kernels().items():
            mode, outputs, inputs, rows, dtype, *_ = shape
            if (mode, *sorted((outputs, inputs))) not in own:
                continue
            name = str(dtype).removeprefix("torch.")
            text.append(f"  kernel of {mode} {outputs}x{inputs}, {rows} rows of {name}: {kernel}")
        return "\n".join(text)
