"""Predicted and measured costs of a run."""

from __future__ import annotations

from dataclasses import dataclass

TOLERATED = 0.15
"""Error of a prediction from which on what it stands on should be measured again."""


@dataclass(frozen=True)
class ComparisonRow:
    """One kind of cost."""

    # Name of the value in the plan.
    kind: str
    # ``s``, ``bytes`` that are held, or ``sent bytes``.
    unit: str
    # Value in the plan.
    predicted: float
    # Value of the run.
    measured: float
    # What the prediction is based on, and how to measure that; may be empty.
    source: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where nothing was predicted or measured."""
        return self.predicted / self.measured - 1 if self.measured and self.is_predicted else None

    @property
    def is_predicted(self) -> bool:
        """Whether the plan predicts it; costs of a step need a sample."""
        return self.unit == "bytes" or self.predicted > 0


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured costs of a run, by kind."""

    # Seconds of the step and its phases, then bytes sent by this rank in a step, then bytes held.
    rows: tuple[ComparisonRow, ...]

    def __getitem__(self, kind: str) -> ComparisonRow:
        found = {row.kind: row for row in self.rows}
        if kind not in found:
            raise KeyError(f"{kind!r} was not measured: {', '.join(found)} were")
        return found[kind]

    @property
    def advice(self) -> tuple[str, ...]:
        """Names what to measure again, the worst prediction first; empty where all are near."""
        off = [row for row in self.rows if row.source and abs(row.error or 0.0) > TOLERATED]
        off.sort(key=lambda row: -abs(row.measured - row.predicted))
        return tuple(f"{row.kind} is {100 * (row.error or 0):+.0f} %: {row.source}" for row in off)

    def __str__(self) -> str:
        lines = [f"{'':<24}{'predicted':>14}{'measured':>14}{'error':>9}"]
        for row in self.rows:
            error = "" if row.error is None else f"{100 * row.error:+.1f} %"
            shown = [_shown(value, row.unit) for value in (row.predicted, row.measured)]
            predicted = shown[0] if row.is_predicted else "not predicted"
            lines.append(f"{row.kind:<24}{predicted:>14}{shown[1]:>14}{error:>9}")
        return "\n".join([*lines, *self.advice])


def _shown(value: float, unit: str) -> str:
    return f"{1e3 * value:.2f} ms" if unit == "s" else f"{value / 2**20:.3f} MiB"
