"""Predictions of a plan: bytes, seconds and what is sent; all of it results, computed anew."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rank holds at the peak; of the fullest rank where ranks differ.

    Attributes:
        parameters: size of the parameters, of those gathered at once where they are sharded.
        gradients: size of gradients, shards and those under way.
        optimizer_state: size of the optimizer's state, float32 copies included.
        activations: size of what forward keeps for backward; 0 where it was not measured.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Bytes of the model's state."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step of the rank that computes most.

    Attributes:
        compute: seconds of forward and backward.
        recompute: seconds of forwards that backward repeats.
        all_gather: seconds of gathers, hidden or not; likewise the next four.
        reduce_scatter: seconds of reduce-scatters.
        all_reduce: seconds of all-reduces.
        all_to_all: seconds of exchanges of heads.
        sends: seconds of messages between stages and in rings.
        exposed: seconds of all these, and of transfers, in which the rank does not compute.
        bubble: seconds that it waits for other stages.
        update: seconds of the optimizer.
        transfers: seconds of reads and writes between memories, hidden or not.
        step: seconds of the whole step.
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
class Moved:
    """What lies behind the first memory, and moves in a step; a result.

    Attributes:
        minimum: least limit that would do.
        needed: bytes of state that are in use at once.
        decides: chunk that needs that much.
        stays: bytes of state that never leave the first memory.
        leaves: bytes of state that lie behind it, at least at times.
        read: bytes that a step reads from there.
        written: bytes that a step writes there.
        on_disk: bytes of state that lie on a disk behind host memory, at least at times.
        disk_read: bytes that a step reads from that disk.
        disk_written: bytes that it writes there.
        bottleneck: what the step waits for.
        price: what more memory would save.
    """

    minimum: int = 0
    needed: int = 0
    decides: str = ""
    stays: MemoryPlan = field(default_factory=MemoryPlan)
    leaves: MemoryPlan = field(default_factory=MemoryPlan)
    read: int = 0
    written: int = 0
    on_disk: MemoryPlan = field(default_factory=MemoryPlan)
    disk_read: int = 0
    disk_written: int = 0
    bottleneck: str = ""
    price: str = ""


@dataclass(frozen=True)
class Predicted:
    """What a step should take and hold; a result.

    Attributes:
        cluster: name of the machines that seconds are of.
        seconds: seconds of a step, by kind.
        sent: bytes that the first rank sends in a step; without a sample those that do not depend
            on the batch.
        bytes: bytes of the fullest rank, by kind.
        moved: bytes between memories; None where all lies in one.
        fullest: number of that rank; the first of several that hold as much.
    """

    cluster: str = ""
    seconds: Seconds = field(default_factory=Seconds)
    sent: int = 0
    bytes: MemoryPlan = field(default_factory=MemoryPlan)
    moved: Moved | None = None
    fullest: int = 0
