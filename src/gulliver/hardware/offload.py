"""Seconds of a step whose state does not fit the memory where compute happens.

State lies behind the first memory, on a disk or in the host's, and is brought for each visit: for a
chunk's forward, its backward, its update. One unit computes, visit after visit; one link carries
what visits need, and takes away what must make room. Nothing else is assumed; which bytes move,
and when they are sent on their way, is decided by whoever plans (`gulliver.solve` knows the rules
of replacement), not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gulliver.hardware.cluster import Cluster, Device

VISIT_LAUNCHES, TRANSFER_LAUNCHES = 120, 80
"""Processor time of a use of state, and of a transfer between tiers, in that of starting an
operation: hooks, decisions and views of our own code, which take longer where any such code does.
From processor seconds of a model of tiny layers, with a limit and without (docs/lab-notes.md)."""
REPEATS = 4
"""Steps that are gone through: the first ones have nothing under way as they begin."""
DISK, HOST = "disk", "host"


# [Note: reads and writes at once] Each direction is a queue of its own. While both have something
# to do, both go on, slower by what was measured of moving as much of both at once: a disk that both
# share does each at half its rate, a bus with two directions each at its own. Memory that is
# written is not free until its write has ended, so what comes may have to wait for what leaves.
@dataclass(frozen=True)
class TierRates:
    """The link to the memory behind the first one."""

    # ``disk`` or ``host``.
    name: str
    # Bytes/s from there.
    read_rate: float
    # Bytes/s to there.
    write_rate: float
    # Seconds of a transfer beside its bytes.
    latency_s: float = 0.0
    # Bytes/s of reading and writing as much at once, both counted; None where they share the link.
    both_rate: float | None = None
    # Seconds of the processor that computes for a use of state, beside its compute.
    visit_s: float = 0.0
    # Seconds of it for a transfer.
    transfer_s: float = 0.0
    # Bytes/s that it goes through in memory; None where that is not counted.
    memory_rate: float | None = None
    # Link from there to a third memory; None where there is none.
    behind: TierRates | None = None

    def seconds(self, transfer: Transfer) -> float:
        """Seconds of a transfer that has the link to itself."""
        rate = self.write_rate if transfer.write else self.read_rate
        return self.latency_s + transfer.bytes / rate if transfer.bytes else 0.0

    def handling(self, visit: Visit) -> float:
        """Seconds of the processor for a visit and its transfers, beside what is computed."""
        moved = sum(transfer.bytes > 0 for transfer in visit.transfers)
        passed = visit.passed / self.memory_rate if self.memory_rate else 0.0
        return visit.uses * self.visit_s + moved * self.transfer_s + passed

    @property
    def at_once(self) -> float:
        """Share of its rate that each direction has while the other is busy, too."""
        if self.both_rate is None:
            return 0.5
        return min(max(self.both_rate / (2 * min(self.read_rate, self.write_rate)), 0.5), 1.0)

    def busy(self, reads: float, writes: float) -> float:
        """Seconds of so many seconds of reads and of writes, where neither ever waits."""
        both = min(reads, writes)
        return both / self.at_once + max(reads, writes) - both


@dataclass(frozen=True)
class Transfer:
    """Bytes that a visit sends on their way."""

    # Number of bytes.
    bytes: int
    # Whether they leave the first memory, rather than come.
    write: bool = False
    # Number of visits until they are needed; 0 for the visit itself.
    until: int = 0
    # Bytes of writes under way beside which there is memory for what comes; None for any.
    room: int | None = None


@dataclass(frozen=True)
class Visit:
    """A use of state by a step."""

    # Seconds of compute from its begin to its end.
    seconds: float
    # What is sent on its way as it begins, in order.
    transfers: tuple[Transfer, ...] = ()
    # Number of uses of state that it is, each with hooks and decisions of its own.
    uses: int = 1
    # Bytes of state that are gone through to copy or compare them.
    passed: int = 0


@dataclass(frozen=True)
class TieredSeconds:
    """Seconds of a step."""

    # Seconds from one step to the next.
    step: float
    # Seconds of compute.
    compute: float
    # Seconds of reads.
    reads: float
    # Seconds of writes.
    writes: float
    # Name of the link that is busier than others.
    link: str
    # Seconds for which it is busy.
    busy: float

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed, those of the processor for visits included."""
        return max(0.0, self.step - self.compute)

    @property
    def bottleneck(self) -> str:
        """What the step waits for, in words: ``disk: 18.2 s of 20.1 s``."""
        name, seconds = (self.link, self.busy) if self.busy > self.compute else ("", self.compute)
        return f"{name or 'compute'}: {seconds_text(seconds)} of {seconds_text(self.step)}"


def tiered_seconds(visits: Sequence[Visit], rates: TierRates) -> TieredSeconds:
    """Seconds of a step that repeats."""
    # A visit begins when the one before it has ended; then its transfers are queued, and it
    # computes as soon as all that it needs is there. The link takes the transfers of each direction
    # in their order.
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
    """Transfers under way, each direction in its order."""

    def __init__(self, at_once: float) -> None:
        self._at_once = at_once
        self.clock, self.sent, self._read, self._writing = 0.0, 0, 0, 0
        self._reads, self._writes = deque[_Moving](), deque[_Moving]()

    def send(self, transfer: Transfer, seconds: float) -> None:
        """Queues a transfer."""
        queue = self._writes if transfer.write else self._reads
        queue.append(_Moving(transfer, seconds))
        self._writing += transfer.bytes * transfer.write
        self.sent += not transfer.write

    def run(self, until: float, reads: int = 0) -> None:
        """Goes on until a time, and then until so many reads have ended."""
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
        """Whether the first of a queue is under way: there is memory for it."""
        if not queue:
            return False
        first = queue[0].transfer
        free = first.write or first.room is None or self._writing <= first.room
        return free or not self._writes

    def _end(self, transfer: Transfer) -> None:
        self._writing -= transfer.bytes * transfer.write
        self._read += not transfer.write


def disk_rates(cluster: Cluster) -> TierRates | None:
    """The disk as the tier behind a machine's memory; None where none is known."""
    disk = cluster.disk
    if disk is None:
        return None
    # Its latency is that of a new file: what moves here lies in one that is open. What computes is
    # the processor itself, so it cannot look after transfers meanwhile.
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
    """Page-locked host memory as the tier behind a device; None where the device is the host."""
    if device.to_device_rate is None or device.to_host_rate is None:
        return None
    rates = device.to_device_rate, device.to_host_rate
    return TierRates(HOST, *rates, device.launch_s, 2 * min(rates))


def seconds_text(seconds: float) -> str:
    """Writes seconds for people."""
    if seconds >= 0.9995:
        return f"{seconds:,.1f} s"
    if 0 < seconds < 0.9995e-4:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms"


def rate_text(count: float) -> str:
    """Writes a number per second for people, four digits of a small one."""
    return f"{count:,.0f}" if count >= 1000 else f"{count:.4g}"


def flops_text(count: float) -> str:
    """Writes a number of floating-point operations for people."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if count >= size or size == 1e3:
            return f"{count / size:,.2f} {unit}"
    raise AssertionError("the smallest unit is for all")
