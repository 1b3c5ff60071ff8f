"""Seconds of a step whose state does not fit the memory where compute happens.

State lies behind the first memory, on a disk or in the host's, and is brought for each visit: for a
chunk's forward, its backward, its update. One unit computes, visit after visit; one link carries
what visits need, and takes away what must make room. Nothing else is assumed; which bytes move,
and when they are sent on their way, is decided by whoever plans (`gulliver.solve` knows the rules
of replacement), not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gulliver.hardware._cluster import Cluster, Device

REPEATS = 4
"""Steps that are gone through: the first ones have nothing under way as they begin."""
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

    def seconds(self, transfer: Transfer) -> float:
        """Seconds of a transfer."""
        rate = self.write_rate if transfer.write else self.read_rate
        return self.latency_s + transfer.bytes / rate


@dataclass(frozen=True)
class Transfer:
    """Bytes that a visit sends on their way.

    Attributes:
        bytes: number of bytes.
        write: whether they leave the first memory, rather than come.
        until: number of visits until they are needed; 0 for the visit itself.
    """

    bytes: int
    write: bool = False
    until: int = 0


@dataclass(frozen=True)
class Visit:
    """A use of state by a step.

    Attributes:
        seconds: seconds of compute from its begin to its end.
        transfers: what is sent on its way as it begins, in order.
    """

    seconds: float
    transfers: tuple[Transfer, ...] = ()


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


def tiered_seconds(visits: Sequence[Visit], rates: TierRates) -> TieredSeconds:
    """Seconds of a step that repeats.

    A visit begins when the one before it has ended; then its transfers are queued, and it computes
    as soon as all that it needs is there. The link takes transfers in their order; with `duplex`
    there is one for each direction.

    Args:
        visits: uses of state in their order.
        rates: link to where the state lies.
    """
    seconds = [[(t, rates.seconds(t)) for t in visit.transfers] for visit in visits]
    reads = sum(took for moves in seconds for t, took in moves if not t.write)
    writes = sum(took for moves in seconds for t, took in moves if t.write)
    compute = sum(v.seconds for v in visits)
    step = _repeated(visits, seconds, rates.duplex)
    return TieredSeconds(step, compute, reads, writes, rates.name, rates.duplex)


def _repeated(
    visits: Sequence[Visit], transfers: Sequence[Sequence[tuple[Transfer, float]]], duplex: bool
) -> float:
    clock = begun = 0.0
    free = {False: 0.0, True: 0.0}
    there = [0.0] * len(visits)
    for _ in range(REPEATS):
        begun = clock
        for number, visit in enumerate(visits):
            for transfer, seconds in transfers[number]:
                way = transfer.write and duplex
                free[way] = max(free[way], clock) + seconds
                if not transfer.write:
                    place = (number + transfer.until) % len(visits)
                    there[place] = max(there[place], free[way])
            clock = max(clock, there[number]) + visit.seconds
    return clock - begun


def disk_rates(cluster: Cluster) -> TierRates | None:
    """The disk as the tier behind a machine's memory; None where none is known."""
    disk = cluster.disk
    if disk is None:
        return None
    return TierRates(DISK, disk.read_rate, disk.write_rate, disk.latency_s, disk.duplex)


def host_rates(device: Device) -> TierRates | None:
    """Page-locked host memory as the tier behind a device; None where the device is the host."""
    if device.to_device_rate is None or device.to_host_rate is None:
        return None
    return TierRates(HOST, device.to_device_rate, device.to_host_rate, device.launch_s, True)


def seconds_text(seconds: float) -> str:
    """Writes seconds for people."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
