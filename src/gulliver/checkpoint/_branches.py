"""Order in which the steps of a run were saved, and the steps on branches that the run has left."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from gulliver.checkpoint._files import read_json
from gulliver.checkpoint._manifest import MANIFEST, order_of
from gulliver.errors import GulliverError

Age = tuple[int, int]
"""Sort key of a step: its order, and its number."""
SHOWN = 6
"""Most steps that a message names."""


# [Note: branches] Who loads step 100 of 300 and trains on goes back: the steps saved from then on
# are the run, though 300 is the higher number. So every step's manifest counts: its ``order`` is
# one more than the highest in the folder was. The step of the highest order is the newest. A step
# lies on a branch that was left if a lower one, or one of the same number, was saved after it: the
# run that is now did not pass through it. Nothing else has to be written down, and no order changes
# when steps are deleted, copied or linked.
def age_of(folder: Path, step: int) -> Age | None:
    """Returns when a step was saved; None where its manifest cannot be read."""
    path = Path(folder) / MANIFEST
    try:
        found = os.stat(path)
        order = _read_order(str(path), found.st_ino, found.st_mtime_ns, found.st_size)
    except (OSError, GulliverError):
        return None
    return order, step


@functools.lru_cache(maxsize=4096)
def _read_order(path: str, inode: int, mtime_ns: int, nbytes: int) -> int:
    """Reads the order in a manifest, once while the file is the same: it may be large."""
    return order_of(read_json(Path(path)))


def by_age(folders: Iterable[tuple[int, Path]]) -> list[int]:
    """Steps that have a readable manifest, those saved first first."""
    ages = (age_of(folder, step) for step, folder in folders)
    return [step for _, step in sorted(age for age in ages if age is not None)]


def left_behind(steps: Sequence[int]) -> list[int]:
    """Returns the steps that lie on a branch that was left, ascending."""
    # From the newest back: whatever is not below all that came later was left.
    found, lowest = list[int](), float("inf")
    for step in reversed(steps):
        if step >= lowest:
            found.append(step)
        lowest = min(lowest, step)
    return sorted(found)


def higher(folder: Path, siblings: Iterable[tuple[int, Path]]) -> tuple[list[int], list[int]]:
    """Returns the higher steps of a run: those saved before one of its steps, and those after it.

    Args:
        folder: folder of the step.
        siblings: numbers and folders of the steps of its run.
    """
    ages = {path.name: age_of(path, number) for number, path in siblings}
    mine = ages.get(folder.name)
    if mine is None:
        return [], []
    beyond = sorted((age[1], age) for age in ages.values() if age is not None and age[1] > mine[1])
    return [n for n, age in beyond if age < mine], [n for n, age in beyond if age > mine]


def shown(steps: Sequence[int]) -> str:
    """Names steps for a message, the last and at most `SHOWN` in all."""
    some = [str(step) for step in steps[: SHOWN - 1]]
    if len(steps) > SHOWN:
        some.append("...")
    some += [str(step) for step in steps[SHOWN - 1 :][-1:]]
    return f"step{'s' * (len(steps) > 1)} {', '.join(some)}"
