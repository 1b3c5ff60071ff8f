"""A folder of checkpoints, of which the newest complete one always loads.

A step is written under a temporary name, forced to the disk, and renamed; `latest` is moved after
that. A process killed at any moment leaves complete steps and at most some temporary folders, which
the next save removes. A step is complete if all files that its manifest lists are there in the size
that they had; what the files hold is not known here.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from gulliver.checkpoint._files import read_json, write_json
from gulliver.comm import World, gather_objects, group_rank
from gulliver.errors import GulliverError
from gulliver.io import PARTIAL, finish_folder, named_errors, remove_folder, write_text

FORMAT = 1
LATEST = "latest"
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")

_log = logging.getLogger("gulliver")


class CheckpointFolder:
    """Checkpoints of one run, by step.

    Args:
        root: the folder; made when the first step is saved.
        keep: how many of the newest steps stay; 0 keeps all.

    Raises:
        GulliverError: `keep` is negative.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        if keep < 0:
            raise GulliverError(f"{keep} checkpoints cannot be kept: give 1 or more, or 0 for all")
        self.root, self.keep = Path(root), keep

    def path(self, step: int) -> Path:
        """Where a step lies."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The complete steps, lowest first.

        Raises:
            GulliverError: a step was written by a newer version.
        """
        if not self.root.is_dir():
            return []
        found = (STEP.fullmatch(entry.name) for entry in self.root.iterdir())
        numbers = sorted(int(match[1]) for match in found if match)
        return [step for step in numbers if self._complete(self.path(step))]

    def latest(self) -> Path | None:
        """The newest complete step; says so where the file `latest` names one that is not.

        Raises:
            GulliverError: a step was written by a newer version.
        """
        steps = self.steps()
        newest = self.path(steps[-1]) if steps else None
        pointer = self.root / LATEST
        named = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        if named and named not in {self.path(step).name for step in steps} and group_rank() == 0:
            instead = newest.name if newest else "no other is there"
            _log.warning("checkpoint %s is not complete: taking %s", self.root / named, instead)
        return newest

    def save(self, step: int, write: Callable[[Path], None], world: World | None = None) -> Path:
        """Saves a step.

        Args:
            step: its number; a step of that number is replaced.
            write: fills the folder that it is given. With a world every rank calls it, on the same
                folder, so that each may write its own files.
            world: the ranks that save together; None for this process alone.

        Returns:
            The folder of the step.

        Raises:
            Exception: what went wrong on this rank.
            GulliverError: which other rank failed, and why. In both cases nothing half written
                stays.
        """
        partial = self.root / f"{self.path(step).name}{PARTIAL}"
        is_main = world is None or world.is_main
        try:
            _together(world, step, lambda: self._begin(partial), is_main)
            _together(world, step, lambda: write(partial), True)
            _together(world, step, lambda: self._publish(partial, step), is_main)
        except Exception:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.path(step)

    def _begin(self, partial: Path) -> None:
        """Removes what a killed process left half written, and makes the temporary folder."""
        with named_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for entry in self.root.glob(f"*{PARTIAL}"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            partial.mkdir()

    def _publish(self, partial: Path, step: int) -> None:
        files = {
            str(found.relative_to(partial)): found.stat().st_size
            for found in sorted(partial.rglob("*"))
            if found.is_file()
        }
        write_json(partial / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        finish_folder(partial, self.path(step))
        write_text(self.root / LATEST, self.path(step).name + "\n")
        if self.keep:
            for old in self.steps()[: -self.keep]:
                if old != step:
                    remove_folder(self.path(old))

    def _complete(self, folder: Path) -> bool:
        try:
            manifest = read_json(folder / MANIFEST)
            written, files = manifest["format"], manifest["files"].items()
        except (GulliverError, TypeError, KeyError, AttributeError):
            return False
        if written > FORMAT:
            raise GulliverError(
                f"{folder} was written by a newer version (format {written}, this one reads up to "
                f"{FORMAT}): update gulliver"
            )
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == size
            for name, size in files
        )


def _together(world: World | None, step: int, action: Callable[[], None], acts: bool) -> None:
    """Runs `action` on the ranks that act; all ranks go on only if it went well on all of them."""
    failure: Exception | None = None
    if acts:
        try:
            action()
        except Exception as error:
            failure = error
    reason = None if failure is None else f"{failure}" or type(failure).__name__
    reasons = [reason] if world is None else gather_objects(reason)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reasons):
        if other is not None:
            raise GulliverError(f"step {step} was not saved: rank {rank} failed ({other})")
