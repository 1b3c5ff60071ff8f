"""Predicts the time of a step with state offloaded to host memory or a disk.

State is loaded from the slower tier for each visit: a chunk's forward, backward or update. The
device computes visits in order, while one link loads their state and writes evicted state. The
caller decides which bytes move and when (`gulliver.solve` has the replacement policies).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gulliver.hardware.cluster import Cluster, Device

VISIT_LAUNCHES, TRANSFER_LAUNCHES = 120, 80
"""CPU time of a visit to state, and of a transfer between tiers, in units of an operation's launch
time. Measured on a model of tiny layers, with and without a memory limit (docs/lab-notes.md).
"""
REPEATS = 4  # number of simulated steps; the first ones start without transfers in flight
DISK, HOST = "disk", "host"


# [Note: reads and writes at once] Each direction has its own queue. While both are busy, both
# proceed, slowed down by the measured ratio for simultaneous transfers: a disk shared by both runs
# each at half its rate, a full-duplex bus each at its own. Memory is free only after its write has
# ended, so loads may have to wait for evictions.
@dataclass(frozen=True)
class TierRates:
    """Rates of the link to the slower tier."""

    # ``disk`` or ``host``.
    name: str
    # Bytes/s of reads.
    read_rate: float
    # Bytes/s of writes.
    write_rate: float
    # Constant seconds per transfer.
    latency_s: float = 0.0
    # Total bytes/s when reading and writing equal amounts at once; None if they share the link.
    both_rate: float | None = None
    # CPU seconds per use of state, in addition to its compute.
    visit_s: float = 0.0
    # CPU seconds per transfer.
    transfer_s: float = 0.0
    # Bytes/s of memory passes; None if not counted.
    memory_rate: float | None = None
    # Link to a third tier; None if there is none.
    behind: TierRates | None = None

    def seconds(self, transfer: Transfer) -> float:
        rate = self.write_rate if transfer.write else self.read_rate
        return self.latency_s + transfer.bytes / rate if transfer.bytes else 0.0

    def handling(self, visit: Visit) -> float:
        moved = sum(transfer.bytes > 0 for transfer in visit.transfers)
        passed = visit.passed / self.memory_rate if self.memory_rate else 0.0
        return visit.uses * self.visit_s + moved * self.transfer_s + passed

    @property
    def at_once(self) -> float:
        """Fraction of its rate that each direction reaches while the other is busy."""
        if self.both_rate is None:
            return 0.5
        return min(max(self.both_rate / (2 * min(self.read_rate, self.write_rate)), 0.5), 1.0)

    def busy(self, reads: float, writes: float) -> float:
        both = min(reads, writes)
        return both / self.at_once + max(reads, writes) - both


@dataclass(frozen=True)
class Transfer:
    """A transfer that starts with a visit."""

    # Number of bytes.
    bytes: int
    # Whether they are written to the slower tier, rather than read.
    write: bool = False
    # Number of visits until they are needed; 0 for the visit itself.
    until: int = 0
    # Maximum bytes of writes in flight for which there is memory for this transfer; None for any.
    room: int | None = None


@dataclass(frozen=True)
class Visit:
    """A use of a chunk's state in a step."""

    # Seconds of compute.
    seconds: float
    # Transfers that start with it, in order.
    transfers: tuple[Transfer, ...] = ()
    # Number of uses of state, each with its own hooks and decisions.
    uses: int = 1
    # Bytes of state that are copied or compared.
    passed: int = 0


@dataclass(frozen=True)
class TieredSeconds:
    """Predicted time of a step with tiered memory."""

    # Seconds from one step to the next.
    step: float
    # Seconds of compute.
    compute: float
    # Seconds of reads.
    reads: float
    # Seconds of writes.
    writes: float
    # Name of the busiest link.
    link: str
    # Its busy seconds.
    busy: float

    @property
    def exposed(self) -> float:
        return max(0.0, self.step - self.compute)

    @property
    def bottleneck(self) -> str:
        name, seconds = (self.link, self.busy) if self.busy > self.compute else ("", self.compute)
        return f"{name or 'compute'}: {seconds_text(seconds)} of {seconds_text(self.step)}"


def tiered_seconds(visits: Sequence[Visit], rates: TierRates) -> TieredSeconds:
    # A visit begins when the previous one has ended; then its transfers are queued, and it computes
    # as soon as all its inputs have arrived. The link handles the transfers of each direction in
    # order.
    compute = sum(v.seconds for v in visits)
    visits = [replace(visit, seconds=visit.seconds + rates.handling(visit)) for visit in visits]
    seconds = [[(t, rates.seconds(t)) for t in visit.transfers] for visit in visits]
    reads = sum(took for moves in seconds for t, took in moves if not t.write)
    writes = sum(took for moves in seconds for t, took in moves if t.write)
    step, busy = _repeated(visits, seconds, rates.at_once), rates.busy(reads, writes)
    return TieredSeconds(step, compute, reads, writes, rates.name, busy)


def _repeated(
    visits: Sequence[Visit], transfers: Sequence[Sequence[tuple[Transfer, float]]], at_once: float
) -> float:
    link, clock, begun = _Link(at_once), 0.0, 0.0
    needed = [0] * len(visits)
    for _ in range(REPEATS):
        begun = clock
        for number, visit in enumerate(visits):
            link.run(clock)
            for transfer, seconds in transfers[number]:
                link.send(transfer, seconds)
                if not transfer.write:
                    needed[(number + transfer.until) % len(visits)] = link.sent
            link.run(clock, needed[number])
            clock = max(clock, link.clock) + visit.seconds
    return clock - begun


@dataclass
class _Moving:
    transfer: Transfer
    left: float


class _Link:
    def __init__(self, at_once: float) -> None:
        self._at_once = at_once
        self.clock, self.sent, self._read, self._writing = 0.0, 0, 0, 0
        self._reads, self._writes = deque[_Moving](), deque[_Moving]()

    def send(self, transfer: Transfer, seconds: float) -> None:
        queue = self._writes if transfer.write else self._reads
        queue.append(_Moving(transfer, seconds))
        self._writing += transfer.bytes * transfer.write
        self.sent += not transfer.write

    def run(self, until: float, reads: int = 0) -> None:
        """Advances the clock to `until`, and further until `reads` reads have completed."""
        while self.clock < until or self._read < reads:
            moving = [queue for queue in (self._reads, self._writes) if self._moves(queue)]
            speed = self._at_once if len(moving) > 1 else 1.0
            took = min((queue[0].left / speed for queue in moving), default=until - self.clock)
            if self._read >= reads:
                took = min(took, until - self.clock)
            self.clock += took
            for queue in moving:
                queue[0].left -= took * speed
                if queue[0].left <= 1e-12:
                    self._end(queue.popleft().transfer)

    def _moves(self, queue: deque[_Moving]) -> bool:
        """Whether a queue's first transfer can run; a read may have to wait for evictions."""
        if not queue:
            return False
        first = queue[0].transfer
        free = first.write or first.room is None or self._writing <= first.room
        return free or not self._writes

    def _end(self, transfer: Transfer) -> None:
        self._writing -= transfer.bytes * transfer.write
        self._read += not transfer.write


def disk_rates(cluster: Cluster) -> TierRates | None:
    """The cluster's disk as the slower tier; None if unknown."""
    disk = cluster.disk
    if disk is None:
        return None
    # The measured latency is for a new file, but transfers use an open one. The CPU computes, so it
    # cannot handle transfers meanwhile.
    device = cluster.device
    return TierRates(
        DISK,
        disk.read_rate,
        disk.write_rate,
        both_rate=disk.both_rate,
        visit_s=VISIT_LAUNCHES * device.launch_s,
        transfer_s=TRANSFER_LAUNCHES * device.launch_s,
        memory_rate=device.memory_rate,
    )


def host_rates(device: Device) -> TierRates | None:
    """Pinned host memory as the slower tier of a device; None if the device is the host."""
    if device.to_device_rate is None or device.to_host_rate is None:
        return None
    rates = device.to_device_rate, device.to_host_rate
    return TierRates(HOST, *rates, device.launch_s, 2 * min(rates))


def seconds_text(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{seconds:,.1f} s"
    if 0 < seconds < 0.9995e-4:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms"


def rate_text(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else f"{count:.4g}"


def flops_text(count: float) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if count >= size or size == 1e3:
            return f"{count / size:,.2f} {unit}"
    raise AssertionError("the smallest unit fits all values")
