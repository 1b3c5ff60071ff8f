"""Clusters of devices, links and disks, described by rates and measured curves.

Caches, small matrices and size-dependent protocols are not described by a latency and a bandwidth,
so a `Curve` interpolates linearly between measured points. It is unreliable far outside of them.
"""

from __future__ import annotations

import bisect
import datetime
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

from gulliver.errors import GulliverError, check_known, nearest
from gulliver.io.files import named_errors, to_yaml, write_text
from gulliver.options import byte_size


@dataclass(frozen=True)
class Curve:
    """Measured seconds by size."""

    # Ascending, in bytes (for matrix products in operations).
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    # Interquartile range relative to the median, at the middle point.
    spread: float | None = None

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise GulliverError("a curve needs at least one size, and one time per size")
        if any(a >= b for a, b in itertools.pairwise(self.sizes)):
            raise GulliverError("the sizes of a curve must be in ascending order")

    def at(self, size: float) -> float:
        """Seconds at a size: interpolated, or extrapolated beyond the last point at its rate."""
        right = bisect.bisect_left(self.sizes, size)
        if right == 0:
            return self.seconds[0]
        if right == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        x, y = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y[0] + (size - x[0]) / (x[1] - x[0]) * (y[1] - y[0])


# Builds frozen dataclasses from plain values of a file, according to their annotations.
#
# Unknown and missing entries and values of the wrong type raise a one-line error with their
# location. Numbers must be finite and, except for those in `ZERO_ALLOWED`, positive.


ZERO_ALLOWED = {
    *("alpha_s", "message_s", "launch_s", "latency_s", "error", "spread", "rank_order", "overlap")
}


def read(kind: Any, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise GulliverError(f"{where} has no {kind.__name__.lower()}")
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise GulliverError(f"{where} has an unknown entry {key!r}: {nearest(str(key), known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise GulliverError(f"{where} has no entry {name!r}")
    hints = typing.get_type_hints(kind)
    found = {k: _value(hints[k], v, f"{where}: {k}", k) for k, v in values.items()}
    try:
        return kind(**found)
    except GulliverError as error:
        raise GulliverError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _value(next(t for t in inner if t is not type(None)), value, where, name)
    if is_dataclass(hint):
        return read(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list | types.NoneType):
            raise GulliverError(f"{where} is {value!r}, but must be a list")
        return tuple(_value(inner[0], v, f"{where} {n}", name) for n, v in enumerate(value or ()))
    if origin is dict:
        if not isinstance(value, dict):
            raise GulliverError(f"{where} is {value!r}, but must map names to values")
        return {str(k): _value(inner[1], v, f"{where} {k}", name) for k, v in value.items()}
    if hint in (int, float):
        return _number(hint, value, where, name in ZERO_ALLOWED)
    if hint is str and isinstance(value, int | float | datetime.date):
        # An unquoted date or version.
        return str(value)
    if not isinstance(value, hint):
        kind = "true or false" if hint is bool else "text"
        raise GulliverError(f"{where} is {value!r}, but must be {kind}")
    return value


def _number(hint: type, value: Any, where: str, zero: bool) -> Any:
    if isinstance(value, str):
        # YAML reads 1e9 as text, because it requires a decimal point.
        try:
            value = float(value)
        except ValueError:
            raise GulliverError(f"{where} is {value!r}, but must be a number") from None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        kind = "a non-negative number" if zero else "a positive number"
        raise GulliverError(f"{where} is {value!r}, but must be {kind}")
    if hint is int and value != int(value):
        raise GulliverError(f"{where} is {value!r}, but must be an integer")
    return hint(value)


# Plausible ranges of a machine's properties, to detect wrong units in files.
#
# Files use bytes and seconds. Writing 400 for a link of 400 Gbit/s, or 80 for 80 GiB, would
# otherwise silently plan for a machine that does not exist.


LINK = (1e3, 1e14), "bytes/s", "400 Gbit/s are 5.0e+10"
LATENCY = (0.0, 10.0), "seconds", "5 microseconds are 5.0e-06"
MATMUL = (1e6, 1e19), "FLOP/s", "989 TFLOP/s are 9.89e+14"
RATE = (1e5, 1e16), "bytes/s", "3.35 TB/s are 3.35e+12"
MEMORY = (1e6, 1e15), "bytes", "80 GiB are 85899345920"
RANKS = (1, 1e6), "ranks", "64 nodes are 64"


def check_plausible(
    values: Iterable[tuple[str, float | None, tuple[tuple[float, float], str, str]]], where: str
) -> None:
    for name, value, ((least, most), unit, example) in values:
        if value is not None and not least <= value <= most:
            raise GulliverError(
                f"{where}: {name}={value:g} {unit} is implausible ({least:g} to {most:g}); "
                f"{example}"
            )


# Devices, links, disks and clusters. Units are always seconds and bytes.
#
# A cluster is a file that people can read and edit: measured by ``gulliver probe``, shipped with
# the library for common machines (from published figures, and marked as such), or written by hand.


@dataclass(frozen=True)
class Device:
    """Compute device of a rank."""

    # Model name.
    name: str
    # FLOP/s of large matrix products by dtype.
    matmul: dict[str, float]
    # Bytes/s read and written by a large element-wise operation.
    memory_rate: float
    # Memory size.
    memory_bytes: int
    # Launch latency of an operation.
    launch_s: float = 0.0
    # Bytes/s of copies from pinned host memory.
    to_device_rate: float | None = None
    # Bytes/s of copies to pinned host memory.
    to_host_rate: float | None = None
    # Seconds of square matrix products by operations, by dtype, if measured.
    matmul_curves: dict[str, Curve] = field(default_factory=dict)
    # Seconds of an element-wise operation by bytes, if measured: data in caches is faster.
    memory_curve: Curve | None = None
    # Fraction of communication that overlaps with compute without slowing it down, if known; None
    # means all on a GPU, and on a CPU none if ranks use all cores.
    overlap: float | None = None


@dataclass(frozen=True)
class Along:
    """Collectives measured over a given number of ranks."""

    # Number of participating ranks.
    ranks: int
    # Seconds by bytes of the whole tensor, by name.
    collectives: dict[str, Curve]
    # The same for ranks that arrive from computing at different times: the waiting time in a step.
    busy: dict[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A full-duplex link between two ranks of an axis."""

    # Latency in seconds.
    alpha_s: float
    bandwidth: float
    # Largest relative error of the fit, if measured.
    error: float | None = None
    # Whether collectives pass from neighbour to neighbour, with a latency for each hop (NCCL),
    # instead of from each rank to all others at once (Gulliver over gloo).
    ring: bool = False
    # Seconds of each message beyond the first that a rank sends to others at once, if measured.
    message_s: float = 0.0
    # Seconds by bytes, if measured: short messages may use another protocol.
    messages: Curve | None = None
    # Bytes/s of collectives in which ranks of one host read each other's memory; None if they
    # exchange messages.
    host_rate: float | None = None
    # Measured collectives; on the outermost link also those of all ranks at once.
    along: tuple[Along, ...] = ()


@dataclass(frozen=True)
class Disk:
    """The disk of a folder, measured with direct I/O if possible."""

    # Bytes/s written, including sync.
    write_rate: float
    read_rate: float
    # Seconds for an empty file.
    latency_s: float = 0.0
    # Total bytes/s when reading and writing equal amounts at once; None if unknown: they then share
    # the disk.
    both_rate: float | None = None
    # Measured folder; empty if unknown.
    folder: str = ""

    def has(self, folder: Path | str) -> bool:
        """Whether a folder is on the measured file system, as far as this can be determined."""
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
    """Identical devices on named axes, with the slowest links first.

    Attributes:
        name: name of the cluster.
        device: compute device of every rank.
        axes: axes from outer to inner; the product of their sizes is the number of ranks.
        disk: disk for checkpoints and for state beyond a memory limit.
        measured: False for descriptions from published figures.
        source: origin of the figures.
        date: date of the measurement.
        versions: software versions of the measurement.
        rank_order: order in which ranks fill the axes, innermost first; None for 0, 1, 2 ...
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
            raise GulliverError(f"axes {', '.join(names)} must have distinct names")
        if self.rank_order is not None and sorted(self.rank_order) != list(range(self.size)):
            raise GulliverError(f"rank_order must contain each of the {self.size} ranks once")

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def links(self) -> list[tuple[int, Link]]:
        """Size and link of each axis, outer to inner, for the cost formulas."""
        return [(axis.size, axis.link) for axis in self.axes]

    def crossed(self, stride: int, size: int) -> list[tuple[int, Link]]:
        """Size and link of each axis that a line of ranks crosses, outer to inner.

        Args:
            stride: distance between consecutive positions.
            size: number of positions.
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
        """Index of the outermost axis on which two positions differ."""
        unit = self.size
        for number, axis in enumerate(self.axes):
            unit //= axis.size
            if low // unit != high // unit:
                return number
        raise AssertionError("different positions differ on some axis")

    def resized(self, size: int) -> Cluster:
        """The same machines with `size` ranks, filling inner axes first.

        If the ranks do not fill whole nodes, all traffic is charged to the outermost link.
        """
        axes = tuple(axis for axis in _fitted(self.axes, size) if axis.size > 1)
        return replace(self, axes=axes, rank_order=None)

    def to_yaml(self) -> str:
        """Formats the cluster as YAML, omitting unknown values."""
        return to_yaml(_known(asdict(self)))

    def save(self, path: Path) -> None:
        write_text(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a YAML file.

        Raises:
            GulliverError: the file is missing or not YAML, or an entry is unknown, missing or
                invalid.
        """
        path = Path(path)
        if not path.is_file():
            raise GulliverError(f"cluster {path} does not exist; measure one with gulliver probe")
        with named_errors(path):
            text = path.read_text(encoding="utf-8")
        return cls.from_yaml(text, str(path))

    @classmethod
    def from_yaml(cls, text: str, where: str) -> Self:
        """Parses YAML; errors name its origin, `where`."""
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise GulliverError(
                f"{where} is not valid YAML: {' '.join(str(error).split())}"
            ) from error
        cluster = read(cls, values, where)
        check_plausible(_bounded(cluster), where)
        return cluster


def _bounded(cluster: Cluster) -> list[tuple[str, float | None, Any]]:
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
            (f"axes[{number}].link.host_rate", axis.link.host_rate, RATE),
        ]
    return found


def described_names() -> list[str]:
    """Names of the built-in descriptions of clusters."""
    folder = resources.files("gulliver.hardware") / "described"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith("yaml"))


def described(name: str) -> Cluster:
    """Returns a cluster description from the library, based on published figures.

    Raises:
        GulliverError: the name is unknown.
    """
    check_known("cluster", name, described_names())
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


# What-if changes of clusters, such as a faster link or more memory.


CHANGES = ("link", "inner", "memory", "flops")
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_RATE = re.compile(r"([0-9.]+)\s*([KMGTP]?)(b|B|F|)(?:/s|ps|it/s)?")


def changed_cluster(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """Changes rates of a cluster; a changed rate replaces its measured curve."""
    for text in changes:
        name, _, value = text.partition("=")
        if name not in CHANGES or not value:
            raise GulliverError(
                f"--what-if {text!r} has an unknown name: {nearest(name, CHANGES)}, as in "
                "link=400Gb"
            )
        cluster = _changed(cluster, name, value)
    told = ", ".join(changes)
    source = f"{cluster.source}; changed: {told}" if told else cluster.source
    return replace(cluster, name=f"{cluster.name}, {told}", source=source)


def _changed(cluster: Cluster, name: str, value: str) -> Cluster:
    device, times = cluster.device, _factor(value)
    if name == "memory":
        size = int(device.memory_bytes * times) if times else byte_size("--what-if memory", value)
        return replace(cluster, device=replace(device, memory_bytes=size))
    if name == "flops":
        rate = _rate(value, "F") if not times else 0.0
        rates = {dtype: rate or old * (times or 1.0) for dtype, old in device.matmul.items()}
        return replace(cluster, device=replace(device, matmul=rates, matmul_curves={}))
    if not cluster.axes:
        raise GulliverError(
            f"--what-if {name}={value} has no effect, because a cluster of one rank has no links"
        )
    place = 0 if name == "link" else len(cluster.axes) - 1
    axes = list(cluster.axes)
    old = axes[place].link
    bandwidth = old.bandwidth * times if times else _rate(value, "b")
    link = Link(old.alpha_s, bandwidth, ring=old.ring)
    axes[place] = Axis(axes[place].name, axes[place].size, link)
    return replace(cluster, axes=tuple(axes))


def _factor(value: str) -> float | None:
    found = re.fullmatch(r"x(\d+(?:\.\d+)?)", value)
    factor = float(found[1]) if found else None
    if factor == 0:
        raise GulliverError(f"--what-if {value!r} must be a factor above 0")
    return factor


def _rate(value: str, unit: str) -> float:
    found = _RATE.fullmatch(value)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    known = ("b", "B") if unit == "b" else ("F", "")
    if found is None or not number > 0 or found[3] not in known:
        right = "400Gb (bits), 50GB (bytes)" if unit == "b" else "990T"
        raise GulliverError(f"--what-if {value!r} is not a rate; use {right} or a factor (x1.5)")
    return number * PREFIXES[found[2]] / (8 if found[3] == "b" else 1)
