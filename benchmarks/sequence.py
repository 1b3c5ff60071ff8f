"""Sequence parallelism on a shaped network: bytes sent and overlap.

`python -m benchmarks.sequence` needs root. Four tables in one:

- *bytes*: what each rank's link carried in a forward and in a backward, over the formulas;
- *overlap*: a ring's time over the larger of computing alone and sending alone, on three links;
- *levels*: a ring of one level and of two, over two nodes of four ranks with a slow link between;
- *peers*: an all-gather, the rings of the 2021 paper and torch's own ring on the same link.

Read `_sequence_wire.py`, `_sequence_overlap.py`, `_sequence_peers.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import tyro

from benchmarks._harness import Report, finish
from benchmarks._sequence_overlap import report_overlap
from benchmarks._sequence_peers import report_peers
from benchmarks._sequence_shared import PARTS, Options
from benchmarks._sequence_wire import report_bytes, report_levels
from benchmarks.netlab import LoadMeter, NetlabError
from gulliver.errors import nearest

REPORTS: dict[str, Callable[[Options, Report], None]] = {
    "bytes": report_bytes,
    "overlap": report_overlap,
    "levels": report_levels,
    "peers": report_peers,
}


def measure(options: Options) -> Report:
    """Runs the parts."""
    for part in options.parts:
        if part not in PARTS:
            raise NetlabError(f"unknown part {part!r}: {nearest(part, PARTS)}")
    meter = LoadMeter()
    report = Report(
        claim="sequence",
        title="Attention over 4 ranks, and over 2 nodes of 4",
        columns=("part", "of", "found", "formula, computing / sending alone, or sent", "ratio"),
        notes=[
            f"batch 1, {options.heads} heads of {options.head_dim}, float32, {options.local} "
            f"tokens a rank; overlap {options.overlap_heads} x {options.overlap_local}, two levels "
            f"{options.level_heads} x {options.level_local}, uplink {options.uplink}",
            f"times: median (quartiles) of the slowest rank, {options.rounds} turns of each",
        ],
    )
    for part in options.parts:
        REPORTS[part](options, report)
    report.notes.append(f"other processes used {meter.cores():.1f} cores meanwhile")
    return report


def main() -> None:
    options = tyro.cli(Options, description=__doc__).sized()
    with contextlib.suppress(PermissionError):
        # Others' work must not take the place of the ranks'; real time would starve gloo.
        os.nice(-15)
    try:
        finish(measure(options), options.keep)
    except NetlabError as error:
        sys.exit(f"benchmarks.sequence: {error}")


if __name__ == "__main__":
    main()
