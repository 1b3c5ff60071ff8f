"""A folder of checkpoints, of which the newest complete one always loads.

A step is written under a temporary name, forced to the disk, and renamed; `latest` is moved after
that. A process killed at any moment leaves complete steps and at most one temporary folder, which
the next save removes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from gulliver.checkpoint._files import read_json, write_json
from gulliver.comm import World, any_rank, barrier
from gulliver.errors import GulliverError
from gulliver.io import PARTIAL, finish_folder, named_errors, write_text

FORMAT = 1
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8})")


class CheckpointFolder:
    """Checkpoints of one run, by step.

    Args:
        root: the folder; made when the first step is saved.
        keep: how many of the newest steps stay; 0 keeps all.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        self.root, self.keep = Path(root), keep

    def path(self, step: int) -> Path:
        """Where a step lies."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        if not self.root.is_dir():
            return []
        found = (STEP.fullmatch(entry.name) for entry in self.root.iterdir())
        numbers = sorted(int(match[1]) for match in found if match)
        return [step for step in numbers if self._complete(self.path(step))]

    def latest(self) -> Path | None:
        """The newest complete step; the file `latest` names it for people and scripts."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, step: int, write: Callable[[Path], None], world: World | None = None) -> Path:
        """Saves a step.

        Args:
            step: its number; a step of that number is replaced.
            write: fills the folder that it is given. With a world every rank calls it, on the same
                folder, so that each may write its own files.
            world: the ranks that save together; None for this process alone.

        Raises:
            GulliverError: what went wrong on this rank, or that another rank failed. No step has
                been changed then.
        """
        partial = self.root / f"{self.path(step).name}{PARTIAL}"
        alone_or_main = world is None or world.is_main
        failure: BaseException | None = None
        try:
            if alone_or_main:
                self._clean()
                with named_errors(self.root):
                    partial.mkdir(parents=True)
            if world is not None:
                barrier()
            write(partial)
        except Exception as error:
            failure = error
        failed = failure is not None
        if world is not None:
            failed = any_rank(failed, world.device)
        if alone_or_main:
            if failed:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                self._publish(partial, step)
        if failure is not None:
            raise failure
        if failed:
            raise GulliverError(f"step {step} was not saved: another rank failed")
        if world is not None:
            barrier()
        return self.path(step)

    def _publish(self, partial: Path, step: int) -> None:
        files = {
            str(found.relative_to(partial)): found.stat().st_size
            for found in sorted(partial.rglob("*"))
            if found.is_file()
        }
        write_json(partial / MANIFEST, {"format": FORMAT, "step": step, "files": files})
        final = self.path(step)
        if final.exists():
            shutil.rmtree(final)
        finish_folder(partial, final)
        write_text(self.root / "latest", final.name + "\n")
        if self.keep:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old))

    def _clean(self) -> None:
        """Removes what a killed process left half written."""
        if self.root.is_dir():
            for entry in self.root.glob(f"*{PARTIAL}"):
                shutil.rmtree(entry, ignore_errors=True)

    def _complete(self, folder: Path) -> bool:
        try:
            manifest = read_json(folder / MANIFEST)
        except GulliverError:
            return False
        if manifest.get("format", 0) > FORMAT:
            raise GulliverError(
                f"{folder} was written by a newer version (format {manifest['format']}, this one "
                f"reads up to {FORMAT}): update gulliver"
            )
        return all(
            (folder / name).is_file() and (folder / name).stat().st_size == size
            for name, size in manifest["files"].items()
        )
