"""Finds what is broken in a checkpoint, and what differs between two.

`verify` reads every page of every file of a step against its checksum, and goes on after what is
broken. `compare` reads two checkpoints of any kind side by side, batch by batch.
"""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gulliver.checkpoint._branches import by_age
from gulliver.checkpoint._folder import steps_of
from gulliver.checkpoint._image import MAX_HEADER, read_slots
from gulliver.checkpoint._loading import check_number, step_folder
from gulliver.checkpoint._manifest import MANIFEST, FileEntry, Manifest, read_manifest
from gulliver.checkpoint._weights import (
    Batch,
    StepWeights,
    TensorInfo,
    Weights,
    batches,
    open_weights,
)
from gulliver.checkpoint._writing import Progress
from gulliver.errors import GulliverError
from gulliver.io import Engine, IoError, Page, Ticket, default_engine

AHEAD = 8
"""Pages that are read at once."""
SLICE = 2**20
"""Elements that are compared at once, in double precision."""


# --- verifying -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Something broken in a step.

    Attributes:
        file: name of the file in the step's folder.
        begin: first byte that may be wrong.
        stop: one past the last.
        tensors: names of the tensors that lie there, as ``entry: name``; empty for the header and
            for text.
        what: description of what is wrong.
    """

    file: str
    begin: int
    stop: int
    tensors: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:4]) + (", ..." if len(self.tensors) > 4 else "")
        several = f"{len(self.tensors)} tensors: " if len(self.tensors) > 1 else ""
        holding = f" ({several}{shown})" if self.tensors else ""
        return f"{self.file}, bytes {self.begin} to {self.stop}: {self.what}{holding}"


def run_steps(path: Path | str) -> list[tuple[int, Path]]:
    """All steps of a run, complete or not, lowest first."""
    return steps_of(Path(path))


def verify(
    path: Path | str, step: int | None = None, progress: Progress | None = None
) -> list[Problem]:
    """Reads every byte of a step and checks it against the checksums in its manifest.

    Args:
        path: folder of a step, or of a run.
        step: number of the step, of a run; None for the newest, complete or not.
        progress: callback that is told the bytes done and all there are.

    Returns:
        What is broken; empty if nothing is.

    Raises:
        GulliverError: there is no such step, its manifest is missing or broken, or it is of another
            format.
    """
    folder = any_step(path, step)
    manifest = read_manifest(folder)
    problems: list[Problem] = []
    done = 0
    largest = max((entry.page_bytes for entry in manifest.files.values()), default=1)
    with default_engine(page_bytes=-(-largest // 4096) * 4096, pages=AHEAD) as engine:
        for name, entry in manifest.files.items():
            for found in _verify_file(engine, folder, manifest, name, entry):
                if isinstance(found, Problem):
                    problems.append(found)
                    continue
                done += found
                if progress is not None:
                    progress(done, manifest.nbytes)
    return _joined(problems)


def any_step(path: Path | str, step: int | None = None) -> Path:
    """Finds a step's folder, complete or not, given a run's folder or the step's own.

    Args:
        path: folder of a step, or of a run.
        step: number of the step, of a run; None for the newest.

    Raises:
        GulliverError: there is none, or `path` is that of another step.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        check_number(path, step)
        return path
    folders = dict(run_steps(path))
    if not folders:
        return step_folder(path, step)
    if step is not None and step not in folders:
        raise GulliverError(f"{path} has no step {step}: it has {sorted(folders)}")
    if step is None:
        # A step whose manifest is broken does not say when it was saved: it may be the newest.
        saved = by_age(folders.items())
        unknown = [n for n in folders if n not in saved]
        step = max([*saved[-1:], *unknown])
    return folders[step]


def _verify_file(
    engine: Engine, folder: Path, manifest: Manifest, name: str, entry: FileEntry
) -> Iterator[int | Problem]:
    """Yields numbers of bytes that were read, and problems."""
    size = (folder / name).stat().st_size if (folder / name).is_file() else None
    if size is None:
        yield Problem(name, 0, entry.nbytes, _held(folder, manifest, name), "the file is missing")
        return
    if size != entry.nbytes:
        what = f"the file has {size} bytes, not {entry.nbytes}"
        begin, stop = sorted((size, entry.nbytes))
        yield Problem(name, begin, stop, _held(folder, manifest, name, begin, stop), what)
    if entry.page_bytes < 1 or len(entry.crc32) != math.ceil(entry.nbytes / entry.page_bytes):
        what = "its checksums in the manifest are incomplete"
        yield Problem(name, 0, entry.nbytes, _held(folder, manifest, name), what)
        return
    checked = _mislabelled(folder, manifest, name)
    for number, failure in _broken_pages(engine, folder / name, entry, min(size, entry.nbytes)):
        begin = number * entry.page_bytes
        stop = min(begin + entry.page_bytes, entry.nbytes)
        yield stop - begin
        if failure is not None:
            checked = None
            yield Problem(name, begin, stop, _held(folder, manifest, name, begin, stop), failure)
    if checked is not None and size == entry.nbytes:
        yield checked


def _broken_pages(
    engine: Engine, path: Path, entry: FileEntry, size: int
) -> Iterator[tuple[int, str | None]]:
    """Yields every page that is there in full, and what is wrong with it; None where nothing is."""
    last = math.ceil(entry.nbytes / entry.page_bytes)
    numbers = deque(n for n in range(last) if min((n + 1) * entry.page_bytes, entry.nbytes) <= size)
    reading: deque[tuple[int, Page, Ticket]] = deque()
    try:
        file = engine.open(path)
    except IoError as error:
        yield 0, str(error)
        return
    try:
        while numbers or reading:
            while numbers and len(reading) < AHEAD:
                number, page = numbers.popleft(), engine.acquire()
                offset = number * entry.page_bytes
                count = min(entry.page_bytes, entry.nbytes - offset)
                ticket = engine.read(file, offset, page.address, count, checksum=True)
                reading.append((number, page, ticket))
            number, page, ticket = reading.popleft()
            failure = _failure(ticket)
            engine.release(page)
            if failure is None and ticket.checksum != entry.crc32[number]:
                failure = "they are not what was written"
            yield number, failure
    finally:
        for _, page, ticket in reading:
            _failure(ticket)
            engine.release(page)
        engine.close_file(file)


def _failure(ticket: Ticket) -> str | None:
    try:
        ticket.wait()
    except GulliverError as error:
        return str(error)
    return None


def _held(
    folder: Path, manifest: Manifest, file: str, begin: int = 0, stop: int | None = None
) -> tuple[str, ...]:
    """The tensors between two bytes of a file; all of the file's where its header is unreadable."""
    names = [
        (entry, name)
        for entry, tensors in manifest.tensors.items()
        for name, tensor in tensors.items()
        if any(part.file == file for part in tensor.parts)
    ]
    places = _places(folder / file)
    if stop is None or places is None:
        return tuple(f"{entry}: {name}" for entry, name in names)
    return tuple(
        f"{entry}: {name}"
        for entry, name in names
        if name in places and places[name][0] < stop and places[name][1] > begin
    )


def _places(path: Path) -> dict[str, tuple[int, int]] | None:
    """First byte and one past the last of each tensor of a file; also of a truncated one."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, MAX_HEADER)))
        entries.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        return {name: (8 + length + a, 8 + length + b) for name, (a, b) in offsets.items()}
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError):
        # A broken header tells nothing.
        return None


def _mislabelled(folder: Path, manifest: Manifest, file: str) -> Problem | None:
    """A file that is whole, but not the one that the manifest speaks of."""
    if not file.endswith(".safetensors"):
        return None
    try:
        slots, _ = read_slots(folder / file)
    except GulliverError as error:
        return Problem(file, 0, manifest.files[file].nbytes, (), str(error))
    for entry, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            for part in tensor.parts:
                if part.file != file:
                    continue
                count = (part.stop - part.start) * tensor.dtype.itemsize
                slot = slots.get(name)
                if slot is None or slot.dtype != tensor.dtype or slot.nbytes != count:
                    whole = manifest.files[file].nbytes
                    what = "the header and the manifest disagree"
                    return Problem(file, 0, whole, (f"{entry}: {name}",), what)
    return None


def _joined(problems: list[Problem]) -> list[Problem]:
    """Joins equal problems of neighbouring pages."""
    found: list[Problem] = []
    for problem in problems:
        before = found[-1] if found else None
        if before is not None and (before.file, before.what, before.stop) == (
            problem.file,
            problem.what,
            problem.begin,
        ):
            tensors = tuple(dict.fromkeys((*before.tensors, *problem.tensors)))
            found[-1] = Problem(problem.file, before.begin, problem.stop, tensors, problem.what)
        else:
            found.append(problem)
    return found


# --- comparing -----------------------------------------------------------------------------------


@dataclass
class Difference:
    """Distance between the values that two checkpoints have of a tensor.

    Attributes:
        name: name of the tensor.
        numel: number of elements that were compared.
        unequal: number of these that are further apart than was allowed.
        absolute: largest difference of two elements; infinite where one of them is not a number.
        relative: largest difference in terms of the larger of the two elements.
    """

    name: str
    numel: int = 0
    unequal: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def add(self, one: Tensor, other: Tensor, tolerance: float, relative: float) -> None:
        """Adds rows of elements, of one length, to the comparison."""
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
            # Doubles do not tell all large integers apart.
            same = one.view(_bits(one.dtype)) == other.view(_bits(one.dtype))
            apart.clamp_(min=1.0)
        apart.masked_fill_(same, 0.0)
        scale = torch.maximum(a.abs(), b.abs()).nan_to_num_(0.0, torch.inf)
        ratio = torch.where(same, 0.0, apart / scale)
        ratio = torch.where(ratio.isnan(), torch.inf, ratio)
        self.absolute = max(self.absolute, float(apart.max()))
        self.relative = max(self.relative, float(ratio.max()))
        # An infinite element allows nothing.
        allowed = tolerance + relative * scale.nan_to_num(posinf=0.0)
        self.unequal += int((apart > allowed).sum())


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size that can be compared: not all unsigned ones can."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _double(value: Tensor) -> Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    # 8-bit floats go by way of 32 bits: not every pair of dtypes is convertible.
    return (value.float() if value.dtype.itemsize == 1 else value).double()


@dataclass
class Comparison:
    """Differences between two checkpoints.

    Attributes:
        missing: tensors of the first that the second has not.
        unexpected: tensors of the second that the first has not.
        shapes: shapes in the first and in the second by name, where they differ.
        dtypes: dtypes in the first and in the second by name, where they differ; the values are
            compared all the same.
        values: entries of which something else than the tensors differs.
        differences: distances of tensors with elements further apart than allowed, the furthest
            first.
        compared: number of tensors whose values were compared.
        allow_dtypes: whether other dtypes are no difference.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    allow_dtypes: bool = False

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
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
    """Compares two checkpoints, batch by batch: memory does not grow with their size.

    Elements are apart where ``|a - b| > tolerance + relative * max(|a|, |b|)``. Zeros of either
    sign are equal, and so is what is not a number in both.

    Args:
        a: a run, a step, a safetensors file or a Hugging Face folder.
        b: the other, of any of these kinds.
        entry: entry of steps to compare; None compares all entries, what is no tensor too: both
            have to be steps.
        tolerance: absolute difference that is allowed.
        relative: difference that is allowed in terms of the larger element.
        allow_dtypes: whether tensors of other dtypes may be equal.
        step: number of the first's step, where it is a run; None for the newest complete one.
        other_step: number of the second's, likewise.
        progress: callback that is told the bytes done and all there are.

    Raises:
        GulliverError: one of them is missing or broken.
    """
    with open_weights(a, entry, step) as one, open_weights(b, entry, other_step) as other:
        if entry is None and type(one) is not type(other):
            raise GulliverError(
                f"{a} and {b} cannot be compared entry by entry: one of them is no step; choose "
                "one entry"
            )
        found = Comparison(allow_dtypes=allow_dtypes)
        found.missing = [name for name in one.infos if name not in other.infos]
        found.unexpected = [name for name in other.infos if name not in one.infos]
        common: dict[str, TensorInfo] = {}
        for name, info in one.infos.items():
            theirs = other.infos.get(name)
            if theirs is None:
                continue
            if info.shape != theirs.shape:
                found.shapes[name] = info.shape, theirs.shape
                continue
            if info.dtype != theirs.dtype:
                found.dtypes[name] = info.dtype, theirs.dtype
            # In batches of the larger elements neither side needs more memory.
            common[name] = max(info, theirs, key=lambda info: info.dtype.itemsize)
        if entry is None:
            found.values = _unlike_values(one, other)
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
    ours, theirs = Batch(), Batch()
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


def _unlike_values(one: Weights, other: Weights) -> list[str]:
    """Entries of two steps that differ in what is no tensor."""
    assert isinstance(one, StepWeights)
    assert isinstance(other, StepWeights)
    ours, theirs = _values(one), _values(other)
    return sorted(e for e in ours.keys() | theirs.keys() if ours.get(e) != theirs.get(e))


def _values(weights: StepWeights) -> dict[str, object]:
    reader = weights.reader
    return {e: reader.skeleton(e) for e in reader.entries if not reader.is_per_rank(e)}
