"""Loading a step into a program's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gulliver.checkpoint._collect import PerRank, refuse_boosted
from gulliver.checkpoint._folder import CheckpointFolder
from gulliver.checkpoint._manifest import MANIFEST, is_complete
from gulliver.checkpoint._reader import Mismatch, StepReader
from gulliver.checkpoint._tree import Leaf, as_leaf
from gulliver.comm import group_rank
from gulliver.errors import GulliverError
from gulliver.memory import Part, before_write

ATTEMPTS = 100
"""To read a step while a writer removes what is being read."""
Result = TypeVar("Result")


@dataclass
class Loaded:
    """What was loaded.

    Attributes:
        step: that it was.
        values: by entry, of what is no object with a state of its own.
        mismatches: by entry, where something did not match; empty if all did.
        absent: entries that are wanted and not in the checkpoint.
    """

    step: int
    values: dict[str, Any] = field(default_factory=dict)
    mismatches: dict[str, Mismatch] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{entry}: {found}" for entry, found in self.mismatches.items()]
        lines += [f"{entry}: not in the checkpoint" for entry in self.absent]
        return "\n".join(lines) or "everything matched"


def step_folder(path: Path | str, step: int | None = None) -> Path:
    """A step's folder, of a run's folder or of itself.

    Args:
        path: of a step, or of a run.
        step: of the run; None for the newest complete one.

    Raises:
        GulliverError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise GulliverError(f"{path} does not exist: give the folder of a run or of a step")
    folder = CheckpointFolder(path)
    if step is not None:
        if not is_complete(folder.path(step)):
            raise GulliverError(f"{path} has no complete step {step}: it has {folder.steps()}")
        return folder.path(step)
    newest = folder.latest()
    if newest is None:
        raise GulliverError(f"{path} holds no complete checkpoint")
    return newest


def load(
    path: Path | str,
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    strict: bool = True,
    prefix: str = "",
) -> Loaded:
    """Loads a step, at any number of ranks.

    Modules, tensors and parts are filled in place, with only their bytes read; values are converted
    to their dtype. Other objects are given their whole state by `load_state_dict`.

    Args:
        path: of a run, or of one of its steps.
        state: by entry, as for `AsyncCheckpointer.save`; what is not in it is not loaded. None
            loads everything into new tensors.
        step: of the run; None for the newest complete one.
        strict: refuse what does not match, before anything is changed; else it is reported.
        prefix: of names in the checkpoint, before those of the state: ``"encoder."`` loads a
            model's encoder alone.

    Raises:
        GulliverError: there is no such step; something does not match; a file is broken.
    """
    return beside_a_writer(path, step, lambda folder: _load(folder, state, strict, prefix))


def beside_a_writer(path: Path | str, step: int | None, read: Callable[[Path], Result]) -> Result:
    """Reads a step; again, and perhaps another, where its folder went while it was read.

    Another process may be saving there and keep only few steps.

    Args:
        path: of a run, or of one of its steps.
        step: of the run; None for the newest complete one.
        read: what to do with the step's folder.

    Raises:
        GulliverError: as `step_folder` and `read` do.
    """
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
    """Another one when a folder has been replaced or its entries have; None where it is gone."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _load(folder: Path, state: Mapping[str, Any] | None, strict: bool, prefix: str) -> Loaded:
    with StepReader(folder) as reader:
        loaded = Loaded(reader.manifest.step)
        if state is None:
            for entry in reader.entries:
                rank = group_rank() if reader.is_per_rank(entry) else None
                loaded.values[entry] = reader.value(entry, rank)
            return loaded
        wanted = _present(reader, state, loaded, strict)
        targets = {entry: _targets(value) for entry, value in wanted.items()}
        for entry, leaves in targets.items():
            if leaves is not None:
                _check(reader, entry, leaves, prefix, strict, loaded)
        for entry, value in wanted.items():
            _take(reader, entry, value, targets[entry], prefix, loaded)
        return loaded


def _present(
    reader: StepReader, state: Mapping[str, Any], loaded: Loaded, strict: bool
) -> dict[str, Any]:
    """What of a state is in the checkpoint."""
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


def _targets(value: Any) -> dict[str, Leaf] | None:
    """What is filled in place; None where a value is given as a whole."""
    if isinstance(value, nn.Module):
        refuse_boosted(value, "load")
        state = value.state_dict(keep_vars=True)
        return {n: as_leaf(v) for n, v in state.items() if isinstance(v, Tensor)}
    if isinstance(value, Mapping) and value and all(_is_leaf(v) for v in value.values()):
        return dict(value)
    return None


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor | Part)


def _check(
    reader: StepReader,
    entry: str,
    leaves: dict[str, Leaf],
    prefix: str,
    strict: bool,
    loaded: Loaded,
) -> None:
    odd = reader.match(entry, leaves, prefix)
    if prefix:
        odd.unexpected = []
    if odd.unlike or (strict and odd) or (leaves and len(odd.missing) == len(leaves)):
        raise GulliverError(f"{reader.folder}, entry {entry!r}, does not fit: {odd}")
    for name in odd.missing:
        del leaves[name]
    if odd:
        loaded.mismatches[entry] = odd


@torch.no_grad()
def _take(
    reader: StepReader,
    entry: str,
    value: Any,
    leaves: dict[str, Leaf] | None,
    prefix: str,
    loaded: Loaded,
) -> None:
    if leaves is not None:
        before_write(v if isinstance(v, Tensor) else v.value for v in leaves.values())
        reader.read_into(entry, leaves, prefix)
        if not isinstance(value, nn.Module):
            loaded.values[entry] = value
        return
    rank = group_rank() if isinstance(value, PerRank) or reader.is_per_rank(entry) else None
    if rank is not None and rank >= reader.manifest.world_size:
        # More ranks than saved it: a new one has no value of its own.
        loaded.absent.append(entry)
        return
    held = value.value if isinstance(value, PerRank) else value
    content = reader.value(entry, rank)
    if hasattr(held, "load_state_dict"):
        held.load_state_dict(content)
    else:
        loaded.values[entry] = content
