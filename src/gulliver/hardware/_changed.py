"""Clusters with a figure changed: what a faster link or more memory would do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from gulliver.errors import GulliverError, nearest
from gulliver.hardware._cluster import Axis, Cluster
from gulliver.options import byte_size

CHANGES = ("link", "inner", "memory", "flops")
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_RATE = re.compile(r"([0-9.]+)\s*([KMGTP]?)(b|B|F|)(?:/s|ps|it/s)?")


def changed_cluster(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """Changes figures of a cluster; curves that were measured give way to the changed rate."""
    for text in changes:
        name, _, value = text.partition("=")
        if name not in CHANGES or not value:
            raise GulliverError(
                f"--what-if {text!r} changes nothing: {nearest(name, CHANGES)}, as in link=400Gb"
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
        raise GulliverError(f"--what-if {name}={value}: a cluster of one rank has no links")
    place = 0 if name == "link" else len(cluster.axes) - 1
    axes = list(cluster.axes)
    old = axes[place].link
    bandwidth = old.bandwidth * times if times else _rate(value, "b")
    link = replace(old, bandwidth=bandwidth, messages=None, along=(), error=None)
    axes[place] = Axis(axes[place].name, axes[place].size, link)
    return replace(cluster, axes=tuple(axes))


def _factor(value: str) -> float | None:
    found = re.fullmatch(r"x(\d+(?:\.\d+)?)", value)
    factor = float(found[1]) if found else None
    if factor == 0:
        raise GulliverError(f"--what-if {value!r}: a factor is above 0")
    return factor


def _rate(value: str, unit: str) -> float:
    """FLOP/s, or bytes/s of what may be given in bits."""
    found = _RATE.fullmatch(value)
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    known = ("b", "B") if unit == "b" else ("F", "")
    if found is None or not number > 0 or found[3] not in known:
        right = "400Gb (bits), 50GB (bytes)" if unit == "b" else "990T"
        raise GulliverError(f"--what-if {value!r} is no rate: give {right} or a factor, x1.5")
    return number * PREFIXES[found[2]] / (8 if found[3] == "b" else 1)
