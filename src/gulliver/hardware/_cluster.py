"""Devices, links, disks and the cluster they make. Units are seconds and bytes, always.

A cluster is a file that people can read and edit: measured by ``gulliver probe``, shipped with the
library for common machines (from published figures, and marked so), or written by hand for one that
is not there yet.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Self

from gulliver.errors import GulliverError, nearest
from gulliver.io import named_errors, to_yaml, write_text


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: of the model.
        matmul: FLOP/s of large matrix products by dtype.
        memory_rate: bytes/s read and written by an element-wise operation.
        memory_bytes: of the device.
        launch_s: before an operation begins.
        to_device_rate: bytes/s of copies from pinned host memory.
        to_host_rate: and to it.
    """

    name: str
    matmul: dict[str, float]
    memory_rate: float
    memory_bytes: int
    launch_s: float = 0.0
    to_device_rate: float | None = None
    to_host_rate: float | None = None


@dataclass(frozen=True)
class Link:
    """What messages between two ranks of an axis travel on, in each direction at once.

    Attributes:
        alpha_s: seconds until the first byte is there.
        bandwidth: bytes/s afterwards.
        error: largest relative error of the fit, where it was measured.
    """

    alpha_s: float
    bandwidth: float
    error: float | None = None


@dataclass(frozen=True)
class Disk:
    """A folder's file system: bytes/s, with writes synchronised."""

    write_rate: float
    read_rate: float


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
        name: of the whole.
        device: of every rank.
        axes: outer to inner; their sizes' product is the number of ranks.
        disk: where checkpoints go.
        measured: False for descriptions from published figures.
        source: where the figures come from.
        date: of the measurement.
        versions: of what it was measured with.
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

    @property
    def size(self) -> int:
        """Ranks."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    def links(self) -> list[tuple[int, Link]]:
        """Size and link of each axis, outer to inner, as the cost formulas take them."""
        return [(axis.size, axis.link) for axis in self.axes]

    def to_yaml(self) -> str:
        """As a file."""
        return to_yaml(asdict(self))

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
        try:
            import yaml
        except ImportError:
            raise GulliverError("reading a cluster needs PyYAML: install gulliver[train]") from None
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise GulliverError(f"{where} is no YAML: {' '.join(str(error).split())}") from error
        return _read(cls, values, where)


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


_NESTED = {"device": Device, "disk": Disk, "link": Link}
_POSITIVE = {"bandwidth", "memory_rate", "memory_bytes", "size", "write_rate", "read_rate"}


def _read(kind: Any, values: Any, where: str) -> Any:
    """Builds a dataclass from plain values, refusing what it does not know."""
    if not isinstance(values, dict):
        raise GulliverError(f"{where} holds no {kind.__name__.lower()}")
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise GulliverError(f"{where} has an unknown entry {key!r}: {nearest(key, known)}")
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise GulliverError(f"{where} has no entry {name!r}")
    found = {key: _entry(key, value, f"{where}: {key}") for key, value in values.items()}
    return kind(**found)


def _entry(key: str, value: Any, where: str) -> Any:
    if key in _NESTED and value is not None:
        return _read(_NESTED[key], value, where)
    if key == "axes":
        return tuple(_read(Axis, axis, f"{where} {n}") for n, axis in enumerate(value or ()))
    if key == "rank_order" and value is not None:
        return tuple(value)
    if key == "matmul":
        if not isinstance(value, dict):
            raise GulliverError(f"{where} is {value!r}: it must name a rate for each dtype")
        return {dtype: _number(rate, f"{where} {dtype}", True) for dtype, rate in value.items()}
    if key in _POSITIVE or key in ("alpha_s", "launch_s"):
        return _number(value, where, key in _POSITIVE)
    return value


def _number(value: Any, where: str, positive: bool) -> Any:
    if isinstance(value, str):
        # YAML reads 1e9 as a word: it asks for a point.
        try:
            value = float(value)
        except ValueError:
            raise GulliverError(f"{where} is {value!r}: it must be a number") from None
    if not isinstance(value, int | float) or value < 0 or (positive and value == 0):
        kind = "a positive number" if positive else "a number that is not negative"
        raise GulliverError(f"{where} is {value!r}: it must be {kind}")
    return value
