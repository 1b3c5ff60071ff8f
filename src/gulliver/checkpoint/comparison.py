"""Verifies a checkpoint, and compares two checkpoints.

`verify` checks every page of every file of a step against its checksum, and continues after errors.
`compare` reads two checkpoints of any kind side by side, batch by batch.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gulliver.checkpoint.folder import by_age, steps_of
from gulliver.checkpoint.loading import check_number, step_folder
from gulliver.checkpoint.manifest import MANIFEST, match, read_manifest
from gulliver.checkpoint.reader import Problem, Verifier
from gulliver.checkpoint.weights import (
    ReadBatch,
    StepWeights,
    TensorInfo,
    Weights,
    batches,
    open_weights,
)
from gulliver.checkpoint.writing import Progress
from gulliver.errors import GulliverError

SLICE = 2**20
"""Number of elements compared together, in double precision."""


# --- verifying -----------------------------------------------------------------------------------


def verify(
    path: Path | str, step: int | None = None, progress: Progress | None = None
) -> list[Problem]:
    """Reads every byte of a step and checks it against the checksums in its manifest."""
    folder = any_step(path, step)
    manifest = read_manifest(folder)
    problems: list[Problem] = []
    done = 0
    with closing(Verifier(folder, manifest)) as verifier:
        for name in manifest.files:
            for found in verifier.check(name):
                if not isinstance(found, int):
                    assert found.problem is not None
                    problems.append(found.problem)
                    continue
                done += found
                if progress is not None:
                    progress(done, manifest.nbytes)
    return _joined(problems)


def any_step(path: Path | str, step: int | None = None) -> Path:
    """Finds a step's folder, even an incomplete one, from a run's folder or the step's own."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        check_number(path, step)
        return path
    folders = dict(steps_of(path))
    if not folders:
        return step_folder(path, step)
    if step is not None and step not in folders:
        raise GulliverError(f"{path} has no step {step}: it has {sorted(folders)}")
    if step is None:
        # A step with a broken manifest has no known order, so it may be the newest.
        saved = by_age(folders.items())
        unknown = [n for n in folders if n not in saved]
        step = max([*saved[-1:], *unknown])
    return folders[step]


def _joined(problems: list[Problem]) -> list[Problem]:
    found: list[Problem] = []
    for problem in problems:
        before = found[-1] if found else None
        same = before and (before.file, before.what, before.stop)
        if before is not None and same == (problem.file, problem.what, problem.begin):
            tensors = tuple(dict.fromkeys((*before.tensors, *problem.tensors)))
            problem = replace(problem, begin=before.begin, tensors=tensors)
            found.pop()
        found.append(problem)
    return found


# --- comparing -----------------------------------------------------------------------------------


@dataclass
class Difference:
    """Distance between a tensor's values in two checkpoints."""

    # Name of the tensor.
    name: str
    # Number of compared elements.
    numel: int = 0
    # Number of elements that differ by more than allowed.
    unequal: int = 0
    # Largest absolute difference; infinite if one element is nan.
    absolute: float = 0.0
    # Largest difference relative to the larger of the two elements.
    relative: float = 0.0

    def add(self, one: Tensor, other: Tensor, tolerance: float, relative: float) -> None:
        self.numel += one.numel()
        if one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other)):
            return
        for start in range(0, one.numel(), SLICE):
            self._add(one[start : start + SLICE], other[start : start + SLICE], tolerance, relative)

    def _add(self, one: Tensor, other: Tensor, tolerance: float, relative: float) -> None:
        a, b = _double(one), _double(other)
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs()
        apart = torch.where(apart.isnan(), torch.inf, apart)
        if one.dtype == other.dtype and not (one.is_floating_point() or one.is_complex()):
            # Doubles cannot represent all large integers.
            same = one.view(_bits(one.dtype)) == other.view(_bits(one.dtype))
            apart.clamp_(min=1.0)
        apart.masked_fill_(same, 0.0)
        scale = torch.maximum(a.abs(), b.abs()).nan_to_num_(0.0, torch.inf)
        ratio = torch.where(same, 0.0, apart / scale)
        ratio = torch.where(ratio.isnan(), torch.inf, ratio)
        self.absolute = max(self.absolute, float(apart.max()))
        self.relative = max(self.relative, float(ratio.max()))
        # An infinite element adds no tolerance.
        allowed = tolerance + relative * scale.nan_to_num(posinf=0.0)
        self.unequal += int((apart > allowed).sum())


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8)


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _double(value: Tensor) -> Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    # 8-bit floats are converted through 32 bits: not every pair of dtypes is convertible.
    return (value.float() if value.dtype.itemsize == 1 else value).double()


@dataclass
class Comparison:
    """Differences between two checkpoints."""

    # Names of tensors that only the first has.
    missing: list[str] = field(default_factory=list)
    # Names of tensors that only the second has.
    unexpected: list[str] = field(default_factory=list)
    # Shapes in the first and in the second by name, if they differ.
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    # Dtypes in the first and in the second by name, if they differ; values are compared
    # nevertheless.
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    # Entries whose non-tensor values differ.
    values: list[str] = field(default_factory=list)
    # Distances of tensors that differ by more than allowed, largest first.
    differences: list[Difference] = field(default_factory=list)
    # Number of tensors whose values were compared.
    compared: int = 0
    # Whether different dtypes are accepted.
    allow_dtypes: bool = False

    @property
    def equal(self) -> bool:
        odd = self.missing or self.unexpected or self.shapes or self.values or self.differences
        return not odd and (self.allow_dtypes or not self.dtypes)


def compare(
    a: Path | str,
    b: Path | str,
    entry: str | None = "model",
    tolerance: float = 0.0,
    relative: float = 0.0,
    allow_dtypes: bool = False,
    step: int | None = None,
    other_step: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compares two checkpoints batch by batch, in constant memory."""
    # Elements differ if ``|a - b| > tolerance + relative * max(|a|, |b|)``. Zeros of either sign
    # are equal, and so are two nans.
    with open_weights(a, entry, step) as one, open_weights(b, entry, other_step) as other:
        if entry is None and type(one) is not type(other):
            raise GulliverError(
                f"{a} and {b} cannot be compared entry by entry, because one of them is not a "
                "step; choose a single entry"
            )
        odd = match(other.infos, one.infos)
        found = Comparison(odd.missing, odd.unexpected, allow_dtypes=allow_dtypes)
        found.shapes = {name: (ours, theirs) for name, (theirs, ours) in odd.unlike.items()}
        common: dict[str, TensorInfo] = {}
        for name, info in one.infos.items():
            theirs = other.infos.get(name)
            if theirs is None or name in odd.unlike:
                continue
            if info.dtype != theirs.dtype:
                found.dtypes[name] = info.dtype, theirs.dtype
            # Batches sized for the larger elements fit into memory on both sides.
            common[name] = max(info, theirs, key=lambda info: info.dtype.itemsize)
        if entry is None:
            found.values = _different_values(one, other)
        found.compared = len(common)
        found.differences = _differences(one, other, common, tolerance, relative, progress)
        return found


def _differences(
    one: Weights,
    other: Weights,
    common: dict[str, TensorInfo],
    tolerance: float,
    relative: float,
    progress: Progress | None,
) -> list[Difference]:
    total, done = sum(info.nbytes for info in common.values()), 0
    found: dict[str, Difference] = {}
    ours, theirs = ReadBatch(), ReadBatch()
    for runs in batches(common):
        mine, their = ours.read(one, runs), theirs.read(other, runs)
        for name, start, stop in runs:
            difference = found.setdefault(name, Difference(name))
            difference.add(mine[name].value, their[name].value, tolerance, relative)
            done += (stop - start) * common[name].dtype.itemsize
        if progress is not None:
            progress(done, total)
    apart = [difference for difference in found.values() if difference.unequal]
    return sorted(apart, key=lambda d: (-d.absolute, -d.relative))


def _different_values(one: Weights, other: Weights) -> list[str]:
    assert isinstance(one, StepWeights)
    assert isinstance(other, StepWeights)
    ours, theirs = _values(one), _values(other)
    return sorted(e for e in ours.keys() | theirs.keys() if ours.get(e) != theirs.get(e))


def _values(weights: StepWeights) -> dict[str, object]:
    reader = weights.reader
    return {e: reader.skeleton(e) for e in reader.entries if not reader.is_per_rank(e)}
