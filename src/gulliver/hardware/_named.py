"""Clusters by the names that people give them: ``h100x64``, a file, or the machines here."""

from __future__ import annotations

import re
from pathlib import Path

from gulliver.errors import GulliverError, nearest
from gulliver.hardware._cluster import Cluster, described, described_names
from gulliver.hardware._kept import current_cluster

SHORT = {
    "a100": "8xa100-infiniband",
    "h100": "8xh100-infiniband",
    "h200": "8xh200-infiniband",
    "b200": "8xb200-infiniband",
    "4090": "4x4090-pcie",
    "cpu": "cpu-loopback",
    "laptop": "laptop-cpu",
}
"""Descriptions by the short names of their devices."""
MOST = 1 << 14
"""Ranks that a name may ask for."""


def named_cluster(text: str, ranks: int | None = None) -> Cluster:
    """A cluster by its name."""
    if text == "here":
        return current_cluster(ranks or 1)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        cluster = Cluster.load(Path(text))
        return cluster if ranks is None else cluster.resized(ranks)
    if text in described_names():
        cluster = described(text)
        return cluster if ranks is None else cluster.resized(ranks)
    found = re.fullmatch(r"(.+)x(\d+)", text.lower())
    name, count = found.groups() if found else (text.lower(), "")
    if name not in SHORT:
        known = ["here", *SHORT, *described_names()]
        raise GulliverError(
            f"there is no cluster {text!r}: {nearest(name, known)}; a count follows an x, as in "
            "h100x64, and a file ends in .yaml"
        )
    size = int(count) if count else ranks or 1
    if not 1 <= size <= MOST:
        raise GulliverError(f"the cluster {text!r} has {size} ranks: take 1 to {MOST}")
    if ranks is not None and ranks != size:
        raise GulliverError(f"the cluster {text!r} has {size} ranks, and {ranks} were asked for")
    return described(SHORT[name]).resized(size)
