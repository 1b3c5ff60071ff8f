"""CPU seconds of each test, workers and subprocesses included: `pytest --cpu-times FILE`.

Wall times of a loaded machine say little; what a test makes all of its processes compute is nearly
the same everywhere. Counted are the process of pytest and all its descendants: the pool of workers,
the server that forks it, subprocesses; of the dead, what their parents were told when they reaped
them. `python -m tests.cpu_times FILE` adds a table up by file and by test function.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def tree_seconds(root: int) -> float:
    """User and system seconds of a process, its living descendants and their reaped children."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # After the name, which may hold blanks: state, parent, ... 11 fields on: the times.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if _descends(pid, root, parents)) / TICKS


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root


class CpuTimes:
    """A plugin that writes a line per test: seconds and its name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = tree_seconds(os.getpid())
        result = yield
        with self._path.open("a") as file:
            file.write(f"{tree_seconds(os.getpid()) - before:.2f} {item.nodeid}\n")
        return result


def main() -> None:
    """Prints the sums of a file of times by file and by test function, the dearest first."""
    sums: dict[str, float] = defaultdict(float)
    cases: dict[str, int] = defaultdict(int)
    for line in Path(sys.argv[1]).read_text().splitlines():
        seconds, _, name = line.partition(" ")
        for key in ("all", name.partition("::")[0], name.partition("[")[0]):
            sums[key] += float(seconds)
            cases[key] += 1
    for key in sorted(sums, key=sums.__getitem__, reverse=True):
        print(f"{sums[key]:8.1f} s  {cases[key]:5d}  {key}")


if __name__ == "__main__":
    main()
