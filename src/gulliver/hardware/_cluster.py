"""Devices, links, disks and the cluster they make. Units are seconds and bytes, always.

A cluster is a file that people can read and edit: measured by ``gulliver probe``, shipped with the
library for common machines (from published figures, and marked so), or written by hand for one that
is not there yet. How a file is checked stands in `_reading.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

from gulliver.errors import GulliverError, nearest
from gulliver.hardware._curve import Curve
from gulliver.hardware._plausible import (
    LATENCY,
    LINK,
    MATMUL,
    MEMORY,
    RANKS,
    RATE,
    check_plausible,
)
from gulliver.hardware._reading import read
from gulliver.io import named_errors, to_yaml, write_text


@dataclass(frozen=True)
class Device:
    """What one rank computes on."""

    # Name of the model.
    name: str
    # FLOP/s of large matrix products by dtype.
    matmul: dict[str, float]
    # Bytes/s read and written by a large element-wise operation.
    memory_rate: float
    # Size of its memory.
    memory_bytes: int
    # Before an operation begins.
    launch_s: float = 0.0
    # Bytes/s of copies from pinned host memory.
    to_device_rate: float | None = None
    # And to it.
    to_host_rate: float | None = None
    # Seconds of square products by their operations, by dtype, where measured.
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    # Seconds of an element-wise operation by its bytes, where measured: what fits a cache is
    # faster.
    memory_curve: Curve | None = None
    # Share of messages that travel while it computes as if it did not, where known; None for all on
    # a GPU, and on a CPU for none as soon as ranks leave no core free.
    overlap: float | None = None


@dataclass(frozen=True)
class Along:
    """Collectives as they were measured along a number of ranks."""

    # Number of ranks that took part.
    ranks: int
    # Seconds by bytes of the whole tensor, by name.
    collectives: dict[str, Curve]
    # The same of ranks that come from computing, each at its own moment: what a step waits.
    busy: dict[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """What messages between two ranks of an axis travel on, in each direction at once."""

    # Seconds until the first byte is there.
    alpha_s: float
    bandwidth: float
    # Largest relative error of the fit, where it was measured.
    error: float | None = None
    # Collectives pass from neighbour to neighbour, with a latency for each (NCCL), rather than from
    # each rank to all others at once (what Gulliver does over gloo).
    ring: bool = False
    # Seconds by bytes, where measured: what is short may travel otherwise.
    messages: Curve | None = None
    # Collectives that were measured; on the outermost link those of all ranks at once too.
    along: tuple[Along, ...] = ()


@dataclass(frozen=True)
class Disk:
    """A folder's disk, past the page cache where the system has a way."""

    # Bytes/s written, until they are on the disk.
    write_rate: float
    read_rate: float
    # Seconds for an empty file.
    latency_s: float = 0.0
    # Bytes/s of reading and writing as much at once, both counted; None where that is not known:
    # they share the disk then.
    both_rate: float | None = None
    # Folder that was measured; empty where it is not known.
    folder: str = ""

    def has(self, folder: Path | str) -> bool:
        """Whether a folder lies in the file system that was measured, as far as one can see."""
        try:
            return os.stat(self.folder).st_dev == os.stat(folder).st_dev
        except OSError:
            return False


@dataclass(frozen=True)
class Axis:
    """Ranks along one axis, and the links between them."""

    name: str
    size: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Equal devices on named axes, slowest links first.

    Attributes:
        name: name of the whole.
        device: what every rank computes on.
        axes: outer to inner; their sizes' product is the number of ranks.
        disk: where checkpoints go, and what a memory limit leaves no room for.
        measured: False for descriptions from published figures.
        source: where the figures come from.
        date: day of the measurement.
        versions: versions of what it was measured with.
        rank_order: ranks as they fill the axes, innermost first; None for 0, 1, 2 ...
    """

    name: str
    device: Device
    axes: tuple[Axis, ...] = ()
    disk: Disk | None = None
    measured: bool = False
    source: str = ""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rank_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise GulliverError(f"axes {', '.join(names)} must have different names")
        if self.rank_order is not None and sorted(self.rank_order) != list(range(self.size)):
            raise GulliverError(f"rank_order must name each of the {self.size} ranks once")

    @property
    def size(self) -> int:
        """Ranks."""
        return math.prod(axis.size for axis in self.axes)

    def links(self) -> list[tuple[int, Link]]:
        """Size and link of each axis, outer to inner, as the cost formulas take them."""
        return [(axis.size, axis.link) for axis in self.axes]

    def crossed(self, stride: int, size: int) -> list[tuple[int, Link]]:
        """Size and link of each axis that a line of places crosses, outer to inner.

        Args:
            stride: places from one of the line to the next.
            size: places of the line.
        """
        crossed, unit, span = [], 1, stride * size
        for axis in reversed(self.axes):
            whole = unit * axis.size
            count = -(-min(span, whole) // max(stride, unit))
            if count > 1 and stride < whole:
                crossed.append((count, axis.link))
            unit = whole
        return crossed[::-1]

    def level(self, low: int, high: int) -> int:
        """Number of the outermost axis on which two places differ."""
        unit = self.size
        for number, axis in enumerate(self.axes):
            unit //= axis.size
            if low // unit != high // unit:
                return number
        raise AssertionError("places that differ lie apart on an axis")

    def link_between(self, ranks: Sequence[int]) -> Link:
        """The slowest link that messages between some ranks, two or more, travel on."""
        order = self.rank_order or range(self.size)
        places = [order.index(rank) for rank in ranks]
        return self.axes[self.level(min(places), max(places))].link

    def resized(self, size: int) -> Cluster:
        """The same machines for `size` ranks: inner axes stay full, or fewer of them are needed.

        Ranks that fill no whole number of nodes are all charged to the outermost link.
        """
        axes = tuple(axis for axis in _fitted(self.axes, size) if axis.size > 1)
        return replace(self, axes=axes, rank_order=None)

    def to_yaml(self) -> str:
        """The text of a file; what is not known is left out."""
        return to_yaml(_known(asdict(self)))

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        write_text(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            GulliverError: missing, no YAML, an unknown or missing entry, or a value of no sense.
        """
        path = Path(path)
        if not path.is_file():
            raise GulliverError(f"cluster {path} does not exist: measure one with gulliver probe")
        with named_errors(path):
            text = path.read_text(encoding="utf-8")
        return cls.from_yaml(text, str(path))

    @classmethod
    def from_yaml(cls, text: str, where: str) -> Self:
        """Reads the text of a file; `where` it is from stands in errors."""
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise GulliverError(f"{where} is no YAML: {' '.join(str(error).split())}") from error
        cluster = read(cls, values, where)
        check_plausible(_bounded(cluster), where)
        return cluster


def _bounded(cluster: Cluster) -> list[tuple[str, float | None, Any]]:
    """Entries of a file that a slip of units would make a machine of, with their bounds."""
    device = cluster.device
    found: list[tuple[str, float | None, Any]] = [
        ("device.memory_rate", device.memory_rate, RATE),
        ("device.memory_bytes", device.memory_bytes, MEMORY),
        ("device.launch_s", device.launch_s, LATENCY),
        ("device.to_device_rate", device.to_device_rate, RATE),
        ("device.to_host_rate", device.to_host_rate, RATE),
    ]
    found += [(f"device.matmul.{dtype}", rate, MATMUL) for dtype, rate in device.matmul.items()]
    for number, axis in enumerate(cluster.axes):
        found += [
            (f"axes[{number}].size", axis.size, RANKS),
            (f"axes[{number}].link.alpha_s", axis.link.alpha_s, LATENCY),
            (f"axes[{number}].link.bandwidth", axis.link.bandwidth, LINK),
        ]
    return found


def described_names() -> list[str]:
    """Clusters that are described with the library."""
    folder = resources.files("gulliver.hardware") / "described"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith("yaml"))


def described(name: str) -> Cluster:
    """A cluster that is described with the library, from published figures.

    Raises:
        GulliverError: an unknown name; the nearest is named.
    """
    if name not in described_names():
        raise GulliverError(f"there is no description {name!r}: {nearest(name, described_names())}")
    file = resources.files("gulliver.hardware") / "described" / f"{name}.yaml"
    return Cluster.from_yaml(file.read_text(encoding="utf-8"), name)


def _fitted(axes: Sequence[Axis], size: int) -> tuple[Axis, ...]:
    if not axes:
        return ()
    outer, *inner = axes
    within = math.prod(axis.size for axis in inner)
    if size % within == 0:
        return (replace(outer, size=size // within), *inner)
    return _fitted(inner, size) if size < within else (replace(outer, size=size),)


def _known(values: Any) -> Any:
    if isinstance(values, dict):
        pairs = ((key, _known(value)) for key, value in values.items())
        return {key: value for key, value in pairs if value not in (None, {}, ())}
    if isinstance(values, list | tuple) and not any(isinstance(v, int | float) for v in values):
        return tuple(_known(value) for value in values)
    return values
