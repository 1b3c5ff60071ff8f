"""Seconds of a step whose state does not fit the memory where compute happens.

State lies behind the first memory, on a disk or in the host's, and is brought for each visit: for a
chunk's forward, its backward, its update. One unit computes, visit after visit; one link carries
what visits need, in their order, and takes away what must make room. The link is ahead of the
visits by as much as the room for that allows. Nothing else is assumed; which bytes move is decided
by whoever plans (`gulliver.solve` knows the rules of replacement), not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gulliver.hardware._cluster import Cluster, Device

REPEATS = 3
"""Steps that are gone through: the first ones have nothing ahead."""
DISK, HOST = "disk", "host"


@dataclass(frozen=True)
class TierRates:
    """The link to the memory behind the first one.

    Attributes:
        name: ``disk`` or ``host``.
        read_rate: bytes/s from there.
        write_rate: bytes/s to there.
        latency_s: seconds of a transfer beside its bytes.
        duplex: whether reads and writes go on at the same time.
    """

    name: str
    read_rate: float
    write_rate: float
    latency_s: float = 0.0
    duplex: bool = False

    def read_seconds(self, count: int, transfers: int = 1) -> float:
        """Seconds of reads of `count` bytes together."""
        return transfers * self.latency_s + count / self.read_rate if count else 0.0

    def write_seconds(self, count: int, transfers: int = 1) -> float:
        """Seconds of writes of `count` bytes together."""
        return transfers * self.latency_s + count / self.write_rate if count else 0.0


@dataclass(frozen=True)
class Visit:
    """A use of state by a step.

    Attributes:
        seconds: seconds of compute from its begin to its end.
        read: bytes that must be brought for it.
        written: bytes that must be taken away to make room for them.
        reads: number of reads.
        writes: number of writes.
        held: bytes that the visit itself needs in the first memory.
    """

    seconds: float
    read: int = 0
    written: int = 0
    reads: int = 0
    writes: int = 0
    held: int = 0


@dataclass(frozen=True)
class TieredSeconds:
    """Seconds of a step.

    Attributes:
        step: seconds from one step to the next.
        compute: seconds of compute.
        reads: seconds of reads.
        writes: seconds of writes.
        link: name of the link that is busier than others.
    """

    step: float
    compute: float
    reads: float
    writes: float
    link: str
    duplex: bool = False

    @property
    def busy(self) -> float:
        """Seconds for which the link is busy."""
        return max(self.reads, self.writes) if self.duplex else self.reads + self.writes

    @property
    def exposed(self) -> float:
        """Seconds in which nothing computes."""
        return max(0.0, self.step - self.compute)

    @property
    def bottleneck(self) -> str:
        """What the step waits for, in words: ``disk: 18.2 s of 20.1 s``."""
        name, seconds = (self.link, self.busy) if self.busy > self.compute else ("", self.compute)
        return f"{name or 'compute'}: {seconds_text(seconds)} of {seconds_text(self.step)}"


def tiered_seconds(visits: Sequence[Visit], rates: TierRates, ahead: int) -> TieredSeconds:
    """Seconds of a step that repeats.

    A visit's reads begin when the link is free and what is to be read until then, from the visit
    that computes on, is at most `ahead` bytes: there is no room for more. Room is made by writes,
    which go before the reads; with `duplex` they keep reads of later visits from nothing.

    Args:
        visits: uses of state in their order.
        rates: link to where the state lies.
        ahead: bytes that are brought ahead of use at most.
    """
    reads = [rates.read_seconds(v.read, v.reads or 1) for v in visits]
    writes = [rates.write_seconds(v.written, v.writes or 1) for v in visits]
    compute = sum(v.seconds for v in visits)
    step = _repeated(visits, reads, writes, rates.duplex, ahead)
    return TieredSeconds(step, compute, sum(reads), sum(writes), rates.name, rates.duplex)


def _repeated(
    visits: Sequence[Visit],
    reads: Sequence[float],
    writes: Sequence[float],
    duplex: bool,
    ahead: int,
) -> float:
    if not visits:
        return 0.0
    many, begun = len(visits) * REPEATS, 0.0
    ended = [0.0] * many
    link = back = 0.0
    first, under_way = 0, 0
    for turn in range(many):
        number = turn % len(visits)
        under_way += visits[number].read
        # The visits before `first` have ended, or must end, before this one's reads begin.
        while first < turn and under_way > max(ahead, visits[number].read):
            under_way -= visits[first % len(visits)].read
            first += 1
        free = ended[first - 1] if first else 0.0
        if duplex:
            back = max(back, free) + writes[number]
            link = max(link, free) + reads[number]
        else:
            link = max(link, free) + writes[number] + reads[number]
        before = ended[turn - 1] if turn else 0.0
        ended[turn] = max(before, link if reads[number] else 0.0) + visits[number].seconds
        if number == len(visits) - 1 and turn < many - 1:
            begun = ended[turn]
    return max(ended[-1] - begun, sum(writes) if duplex else sum(reads) + sum(writes))


def disk_rates(cluster: Cluster) -> TierRates | None:
    """The disk as the tier behind a machine's memory; None where none is known."""
    disk = cluster.disk
    if disk is None:
        return None
    return TierRates(DISK, disk.read_rate, disk.write_rate, disk.latency_s)


def host_rates(device: Device) -> TierRates | None:
    """Page-locked host memory as the tier behind a device; None where the device is the host."""
    if device.to_device_rate is None or device.to_host_rate is None:
        return None
    return TierRates(HOST, device.to_device_rate, device.to_host_rate, device.launch_s, True)


def seconds_text(seconds: float) -> str:
    """Writes seconds for people."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
