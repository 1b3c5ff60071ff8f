"""What was predicted beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of cost.

    Attributes:
        kind: name of the value in the plan.
        unit: ``s``, ``bytes`` that are held, or ``sent bytes``.
        predicted: value in the plan.
        measured: value of the run.
    """

    kind: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where nothing was predicted or measured."""
        return self.predicted / self.measured - 1 if self.measured and self.is_predicted else None

    @property
    def is_predicted(self) -> bool:
        """Whether the plan says something of it; what is of a step needs a sample."""
        return self.unit == "bytes" or self.predicted > 0


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured costs of a run, by kind.

    Attributes:
        rows: seconds first, then bytes that this rank sends in a step, then those that it holds.
    """

    rows: tuple[Row, ...]

    def __getitem__(self, kind: str) -> Row:
        return next(row for row in self.rows if row.kind == kind)

    def __str__(self) -> str:
        lines = [f"{'':<24}{'predicted':>14}{'measured':>14}{'error':>9}"]
        for row in self.rows:
            error = "" if row.error is None else f"{100 * row.error:+.1f} %"
            shown = [_shown(value, row.unit) for value in (row.predicted, row.measured)]
            predicted = shown[0] if row.is_predicted else "not predicted"
            lines.append(f"{row.kind:<24}{predicted:>14}{shown[1]:>14}{error:>9}")
        return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    return f"{1e3 * value:.2f} ms" if unit == "s" else f"{value / 2**20:.3f} MiB"
