"""Loads a step into a program's objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from gulliver.checkpoint._branches import higher, shown
from gulliver.checkpoint._collect import PerRank
from gulliver.checkpoint._filling import Filling, plan
from gulliver.checkpoint._folder import CheckpointFolder, steps_of
from gulliver.checkpoint._manifest import MANIFEST, is_complete, read_manifest
from gulliver.checkpoint._matching import Mismatch
from gulliver.checkpoint._reader import StepReader
from gulliver.checkpoint._verifying import Verifier
from gulliver.comm import group_rank
from gulliver.errors import GulliverError

_log = logging.getLogger("gulliver")

ATTEMPTS = 100
"""Number of attempts to read a step while a writer removes what is being read."""
Result = TypeVar("Result")


@dataclass
class Loaded:
    """Report on what was loaded.

    Attributes:
        step: number of the step.
        values: values by entry, of what is no object with a state of its own.
        mismatches: names and shapes by entry that did not match; empty if all did.
        absent: entries that are wanted and not in the checkpoint.
        branches: sentences about higher steps of the run, where there are some.
    """

    step: int
    values: dict[str, Any] = field(default_factory=dict)
    mismatches: dict[str, Mismatch] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    branches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{entry}: {found}" for entry, found in self.mismatches.items()]
        lines += [f"{entry}: not in the checkpoint" for entry in self.absent]
        return "\n".join([*(lines or ["everything matched"]), *self.branches])

    @classmethod
    def of(cls, reader: StepReader) -> Self:
        """Makes an empty report of a step; rank 0 logs it where the run has left a branch."""
        step, run = reader.manifest.step, reader.folder.parent
        before, after = higher(reader.folder, steps_of(run))
        lines = []
        if before:
            lines.append(
                f"step {step} was loaded; {shown(before)} had been saved before it, on a branch "
                "that the run has left"
            )
            if group_rank() == 0:
                _log.warning("%s: %s", run, lines[0])
        if after:
            lines.append(
                f"step {step} was loaded; {shown(after)} had been saved after it: a run that goes "
                "on here leaves them"
            )
        return cls(step, branches=lines)


def step_folder(path: Path | str, step: int | None = None) -> Path:
    """Finds a complete step's folder, given a run's folder or the step's own."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        check_number(path, step)
        return path
    if not path.is_dir():
        raise GulliverError(f"{path} does not exist: give the folder of a run or of a step")
    folder = CheckpointFolder(path)
    if step is not None:
        if not is_complete(folder.path(step)):
            why = _why_broken(folder.path(step))
            raise GulliverError(
                f"{path} has no complete step {step}: it has {folder.steps()}{why and f'; {why}'}"
            )
        return folder.path(step)
    newest = folder.latest()
    if newest is None:
        last = max(steps_of(path), default=None)
        why = "" if last is None else _why_broken(last[1])
        raise GulliverError(f"{path} holds no complete checkpoint{why and f': {why}'}")
    return newest


def _why_broken(step: Path) -> str:
    """Tells what is missing or too short of a step, if it is there at all."""
    try:
        if step.is_dir():
            Verifier(step, read_manifest(step)).check_sizes()
    except GulliverError as error:
        return str(error).removesuffix(": take another checkpoint")
    return ""


def check_number(folder: Path, step: int | None) -> None:
    """Refuses a step's folder where another step is asked for."""
    if step is not None and (number := read_manifest(folder).step) != step:
        raise GulliverError(
            f"{folder} is step {number}, not step {step}: give the folder of its run, or no step"
        )


def load(
    path: Path | str,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    strict: bool = True,
    prefix: str = "",
) -> Loaded:
    """Loads a step, at any number of ranks.

    Modules, and tensors and parts, also those in dicts and lists, are filled in place, with only
    their bytes read; values are converted to their dtype, where they fit it. Other objects are
    given their whole state by `load_state_dict`. What else there is in dicts and lists is in
    `Loaded.values`, together with the tensors that were filled; what has no tensor in it, such as
    None, stands for whatever was saved. Everything is checked before anything is filled, but for
    the checksums of what is read in place.

    Args:
        path: folder of a run, or of one of its steps.
        state: objects and values by entry, as for `AsyncCheckpointer.save`; what is not in it is
            not loaded. None loads everything into new tensors.
        step: number of the step, of a run; None for the newest complete one.
        strict: whether to refuse what does not match, before anything is changed; else it is
            reported.
        prefix: text before the state's names in the checkpoint: ``"encoder."`` loads a model's
            encoder alone.

    Raises:
        GulliverError: there is no such step; names, shapes, an optimizer's kind or groups do not
            match; a value does not fit; a tensor is on meta; a file is broken.
    """
    return beside_a_writer(path, step, lambda folder: _load(folder, state, strict, prefix))


def beside_a_writer(path: Path | str, step: int | None, read: Callable[[Path], Result]) -> Result:
    """Reads a step; again, and perhaps another, where its folder went while it was read."""
    # Another process may be saving there and keep only few steps. There is no lock for readers: a
    # folder that was replaced or removed meanwhile is noticed by its identity.
    for left in reversed(range(ATTEMPTS)):
        folder, before = None, _identity(Path(path))
        try:
            folder = step_folder(path, step)
            before = _identity(folder)
            return read(folder)
        except GulliverError:
            now = _identity(folder or Path(path))
            went = folder is not None and now is None
            if not left or (before == now and not went):
                raise
    raise AssertionError("the last attempt returns or raises")


def _identity(folder: Path) -> object:
    """Returns a value that changes with a folder or its entries; None where the folder is gone."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _load(folder: Path, state: Mapping[str, Any] | None, strict: bool, prefix: str) -> Loaded:
    with StepReader(folder) as reader:
        loaded = Loaded.of(reader)
        if state is None:
            for entry in reader.entries:
                rank = group_rank() if reader.is_per_rank(entry) else None
                loaded.values[entry] = reader.value(entry, rank)
        else:
            fill_all(plan_all(reader, state, strict, prefix, loaded), loaded)
        return loaded


def plan_all(
    reader: StepReader, state: Mapping[str, Any], strict: bool, prefix: str, loaded: Loaded
) -> dict[str, Filling]:
    """Finds out how a state takes up a step, while nothing is changed; see `fill_all`."""
    found: dict[str, Filling] = {}
    for entry, value in _present(reader, state, loaded, strict).items():
        rank = group_rank() if isinstance(value, PerRank) or reader.is_per_rank(entry) else None
        if rank is not None and rank >= reader.manifest.world_size:
            # More ranks than saved it: a new one has no value of its own.
            loaded.absent.append(entry)
            continue
        held = value.value if isinstance(value, PerRank) else value
        found[entry] = plan(reader, entry, held, rank, strict, prefix)
        if found[entry].odd:
            loaded.mismatches[entry] = found[entry].odd
    return found


def fill_all(fillings: Mapping[str, Filling], loaded: Loaded) -> None:
    """Fills what `plan_all` found."""
    for entry, filling in fillings.items():
        value = filling.fill()
        if not filling.is_object:
            loaded.values[entry] = value


def _present(
    reader: StepReader, state: Mapping[str, Any], loaded: Loaded, strict: bool
) -> dict[str, Any]:
    """Picks the entries of a state that are in the checkpoint; `strict` refuses others."""
    found = {}
    for entry, value in state.items():
        if entry in reader.entries:
            found[entry] = value
        elif strict:
            raise GulliverError(
                f"{reader.folder} has no entry {entry!r}: it has {', '.join(reader.entries)}"
            )
        else:
            loaded.absent.append(entry)
    return found
