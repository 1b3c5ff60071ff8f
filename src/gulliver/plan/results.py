"""Predicted bytes, seconds and traffic of a plan; recomputed whenever a plan is applied."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryPlan:
    """Peak bytes of a rank, by kind; if ranks differ, of the rank with the most."""

    # Size of the parameters; with stage 3, shards and gathered chunks.
    parameters: int = 0
    # Size of gradients: shards, and buffers in flight.
    gradients: int = 0
    # Size of the optimizer's state, including float32 master weights.
    optimizer_state: int = 0
    # Size of the tensors saved for backward; 0 if not measured.
    activations: int = 0

    @property
    def total(self) -> int:
        """Bytes of the model's state."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step on the rank with the most compute.

    Attributes:
        compute: seconds of forward and backward.
        recompute: seconds of recomputation in backward.
        all_gather: seconds of all-gathers, hidden or exposed, like the next four.
        reduce_scatter: seconds of reduce-scatters.
        all_reduce: seconds of all-reduces.
        all_to_all: seconds of all-to-alls (attention heads).
        sends: seconds of messages between stages and in rings.
        exposed: seconds of communication and transfers not hidden by compute.
        bubble: seconds spent waiting for other stages.
        update: seconds of the optimizer.
        transfers: seconds of transfers between memory tiers, hidden or not.
        step: total seconds of the step.
    """

    compute: float = 0.0
    recompute: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    all_to_all: float = 0.0
    sends: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    update: float = 0.0
    transfers: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class TierTraffic:
    """State in slower tiers, and the traffic of a step between tiers."""

    # Smallest sufficient limit.
    minimum: int = 0
    # Bytes of state that are in use at once.
    needed: int = 0
    # The chunk that determines this.
    decides: str = ""
    # Bytes of state that always stay on the device.
    stays: MemoryPlan = field(default_factory=MemoryPlan)
    # Bytes of state that are offloaded at least at times.
    leaves: MemoryPlan = field(default_factory=MemoryPlan)
    # Bytes that a step reads from slower tiers.
    read: int = 0
    # Bytes that a step writes to slower tiers.
    written: int = 0
    # Bytes of state that are on a disk behind host memory at least at times.
    on_disk: MemoryPlan = field(default_factory=MemoryPlan)
    # Bytes that a step reads from that disk.
    disk_read: int = 0
    # Bytes that a step writes to that disk.
    disk_written: int = 0
    # The step's bottleneck.
    bottleneck: str = ""
    # Seconds that more memory would save.
    price: str = ""


@dataclass(frozen=True)
class Predicted:
    """Predicted costs of a step."""

    # Name of the cluster for which seconds are predicted.
    cluster: str = ""
    # Seconds of a step, by kind.
    seconds: Seconds = field(default_factory=Seconds)
    # Bytes sent by the first rank in a step; without a sample, those that do not depend on the
    # batch.
    sent: int = 0
    # Bytes of the rank with the most memory, by kind.
    bytes: MemoryPlan = field(default_factory=MemoryPlan)
    # Traffic between tiers; None without a limit.
    moved: TierTraffic | None = None
    # The rank with the most memory; the first of equals.
    fullest: int = 0


# Predicted and measured costs of a run.


TOLERATED = 0.15
"""Relative prediction error above which its inputs should be measured again."""


@dataclass(frozen=True)
class ComparisonRow:
    """Predicted and measured value of one kind of cost."""

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
        """Relative error of the prediction; None if either value is missing."""
        return self.predicted / self.measured - 1 if self.measured and self.is_predicted else None

    @property
    def is_predicted(self) -> bool:
        """Whether the plan has a prediction; predicting a step's costs needs a sample."""
        return self.unit == "bytes" or self.predicted > 0


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured costs of a run, by kind."""

    # Seconds of the step and its phases, then bytes sent by this rank in a step, then bytes held.
    rows: tuple[ComparisonRow, ...]

    def __getitem__(self, kind: str) -> ComparisonRow:
        found = {row.kind: row for row in self.rows}
        if kind not in found:
            raise KeyError(f"{kind!r} was not measured; choose from {', '.join(found)}")
        return found[kind]

    @property
    def advice(self) -> tuple[str, ...]:
        """Names the inputs to measure again, worst prediction first; empty if all are close."""
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
