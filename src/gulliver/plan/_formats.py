"""Number formats of a plan, and how a field says which values it may have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gulliver.precision.fp8 import SCALINGS


def choice(
    default: Any,
    *known: Any,
    least: float | None = None,
    most: float | None = None,
    size: bool = False,
) -> Any:
    """A field with the allowed values, or their range."""
    # With `size` the field counts bytes, and a file may say ``6GiB``.
    limits = {"known": known, "least": least, "most": most, "size": size}
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Fp8Plan:
    """Linear layers that compute in FP8.

    Attributes:
        scaling: scales: one for each tensor, for each row, or for each tensor from earlier steps.
        emulated: whether the same numerics are computed without FP8 units, slower.
        gate: whether only layers are taken that are predicted to pay; nothing pays emulated.
        exclude: patterns of paths of layers that are kept.
        layers: paths of the layers; empty chooses them.
        kept: reasons of the other linear layers, by path; a result.
    """

    scaling: str = choice("tensorwise", *SCALINGS)
    emulated: bool = False
    gate: bool = True
    exclude: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        how = f"{self.scaling} scales{', emulated' if self.emulated else ''}"
        counts = Counter(self.kept.values())
        kept = "; ".join(f"{count} kept: {reason}" for reason, count in counts.items())
        return f"{how}, {len(self.layers)} linear layers" + (f"; {kept}" if kept else "")
