"""Bounds of what a machine can be, by which a file with a slip of units is told from a machine.

Files give bytes and seconds. Who writes 400 for a link of 400 Gbit/s, or 80 for 80 GiB, would get a
plan of a machine that does not exist, and no error.
"""

from __future__ import annotations

from collections.abc import Iterable

from gulliver.errors import GulliverError

LINK = (1e3, 1e14), "bytes/s", "400 Gbit/s are 5.0e+10"
LATENCY = (0.0, 10.0), "seconds", "5 microseconds are 5.0e-06"
MATMUL = (1e6, 1e19), "FLOP/s", "989 TFLOP/s are 9.89e+14"
RATE = (1e5, 1e16), "bytes/s", "3.35 TB/s are 3.35e+12"
MEMORY = (1e6, 1e15), "bytes", "80 GiB are 85899345920"
RANKS = (1, 1e6), "ranks", "64 nodes are 64"


def check_plausible(
    values: Iterable[tuple[str, float | None, tuple[tuple[float, float], str, str]]], where: str
) -> None:
    """Refuses values that no machine has."""
    for name, value, ((least, most), unit, example) in values:
        if value is not None and not least <= value <= most:
            raise GulliverError(
                f"{where}: {name} is {value:g} {unit}, which no machine has ({least:g} to "
                f"{most:g}): {example}"
            )
