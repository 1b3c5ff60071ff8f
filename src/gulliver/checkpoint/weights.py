"""A common interface to steps, Hugging Face folders, safetensors files and in-memory tensors.

`Weights` has tensors by name and reads ranges of their elements. `batches` splits tensors into
ranges that fit `BATCH`, and a `ReadBatch` is the memory that is reused for each batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import Slot, check_holdable, read_json, read_slots
from gulliver.checkpoint.folder import LATEST, STEP
from gulliver.checkpoint.loading import read_during_writes
from gulliver.checkpoint.manifest import MANIFEST
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.regions import Copies, PartOffset, clusters, copy_bytes, overlap, place_of
from gulliver.checkpoint.tree import Leaf
from gulliver.errors import GulliverError
from gulliver.io.engine import Engine, File, Ticket
from gulliver.io.files import FileMappings
from gulliver.io.native import default_engine
from gulliver.memory.parts import Part, Region

BATCH = 32 * 2**20
"""Bytes per batch."""
ALIGNMENT = 64
"""Alignment in bytes of tensors in a batch's memory; a multiple of any dtype's size."""
READ = 8 * 2**20
"""Maximum bytes per read of scattered slices."""
GAP = 64 * 2**10
"""Longest gap in bytes to read through, which is cheaper than another read."""
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
STEMS = {"model": (SUFFIX, INDEX), "diffusion_pytorch_model": (INDEX, SUFFIX)}


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype | None) -> TensorInfo:
        """Returns the info after conversion to `dtype`, which leaves integers unchanged."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return TensorInfo(dtype, self.shape)


class Weights(ABC):
    """Tensors by name, read in parts."""

    # Path of the file or folder; meaningless for tensors in memory.
    path: Path
    # Files with the tensors; none for tensors in memory.
    files: list[Path]
    # Dtypes and shapes by name, in the order of storage or creation.
    infos: dict[str, TensorInfo]

    @abstractmethod
    def read(self, wanted: Mapping[str, Part]) -> None:
        """Fills parts of tensors, which are in host memory and have the stored dtype."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Maps names to their source; names with the same source cannot be read in one call."""
        return {name: name for name in self.infos}

    def add_alias(self, name: str, kept: str) -> None:
        self.infos[name] = self.infos[kept]

    @abstractmethod
    def close(self) -> None:
        """Closes files and stops threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rounds(wanted: Iterable[tuple[Any, Part]]) -> list[dict[Any, Part]]:
    """Splits reads into rounds with at most one name per source."""
    found: list[dict[Any, Part]] = []
    for source, part in wanted:
        free = next((one for one in found if source not in one), None)
        if free is None:
            found.append(free := {})
        free[source] = part
    return found


class StepWeights(Weights):
    """One or all entries of a saved step; every page read is verified."""

    def __init__(self, path: Path, entry: str | None = "model", step: int | None = None) -> None:
        self.reader = read_during_writes(path, step, StepReader)
        self.path = self.reader.folder
        saved = self.reader.manifest.tensors
        self.files = [self.path / name for name in self.reader.manifest.files]
        if entry is not None and not saved.get(entry):
            having = [name for name, tensors in saved.items() if tensors]
            if self.reader.entries == ["optimizer"]:
                raise GulliverError(f"{self.path} is an optimizer's state: use load_optimizer")
            raise GulliverError(f"{self.path}, entry {entry!r}, has no tensors: {_of(having)}")
        self._places = {
            f"{which}: {name}" if entry is None else name: (which, name)
            for which, tensors in saved.items()
            if entry is None or which == entry
            for name in tensors
        }
        self.infos = {
            public: TensorInfo(saved[which][name].dtype, saved[which][name].shape)
            for public, (which, name) in self._places.items()
        }

    def add_alias(self, name: str, kept: str) -> None:
        super().add_alias(name, kept)
        self._places[name] = self._places[kept]

    def read(self, wanted: Mapping[str, Part]) -> None:
        for places in rounds((self._places[public], part) for public, part in wanted.items()):
            by_entry: dict[str, dict[str, Leaf]] = {}
            for (entry, name), part in places.items():
                by_entry.setdefault(entry, {})[name] = part
            for entry, leaves in by_entry.items():
                self.reader.read_into(entry, leaves)

    def close(self) -> None:
        self.reader.close()


class FileWeights(Weights):
    """Tensors of a safetensors file, or of all such files of a Hugging Face folder."""

    # If a file's metadata maps a name to another one's tensor (as `save_huggingface` and
    # `safetensors.torch.save_model` write), the tensor has both names.

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._engine: Engine | None = None
        self._files: dict[Path, File] = {}
        self._slots: dict[str, tuple[Path, Slot]] = {}
        single, index = _locate(self.path)
        if index is None:
            assert single is not None
            self.files = [single]
            self._add(single)
        else:
            self._add_indexed(index)
        self.infos = {
            name: TensorInfo(slot.dtype, slot.shape) for name, (_, slot) in self._slots.items()
        }

    def _add_indexed(self, index: Path) -> None:
        content = read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
            raise GulliverError(f"{index} has no weight_map, so it is not a Hugging Face index")
        for name in places.values():
            if Path(name).name != name or name == "..":
                raise GulliverError(f"{index} names {name!r}: files must be in the same folder")
        names = sorted(set(places.values()))
        self.files = [index.parent / name for name in names]
        absent = [name for name, file in zip(names, self.files, strict=True) if not file.is_file()]
        if absent:
            raise GulliverError(
                f"{index.parent} lacks {len(absent)} of the {len(names)} files that {index.name} "
                f"names: {', '.join(absent[:4])}{', ...' if len(absent) > 4 else ''}"
            )
        for file in self.files:
            self._add(file, places)
        lost = [name for name in places if name not in self._slots]
        if lost:
            raise GulliverError(
                f"{index.parent / places[lost[0]]} has no tensor {lost[0]!r}, though {index.name} "
                f"lists it{f', and {len(lost) - 1} more' if lost[1:] else ''}: download the "
                "files again"
            )

    def _add(self, file: Path, places: Mapping[str, str] | None = None) -> None:
        slots, metadata = read_slots(file)
        aliases = {
            name: slots[kept]
            for name, kept in metadata.items()
            if name != "format" and kept in slots and name not in slots
        }
        for name, slot in (*slots.items(), *aliases.items()):
            if places is None or places.get(name, file.name) == file.name:
                self._slots.setdefault(name, (file, slot))

    def add_alias(self, name: str, kept: str) -> None:
        super().add_alias(name, kept)
        self._slots[name] = self._slots[kept]

    def read(self, wanted: Mapping[str, Part]) -> None:
        if self._engine is None:
            # Reads go directly into memory: the engine's pages are never used.
            self._engine = default_engine(page_bytes=4096, pages=1)
        tickets, scattered = [], list[tuple[str, Part, Copies]]()
        for name, part in wanted.items():
            _, slot = self._slots[name]
            whole = PartOffset(slot.shape, 0, math.prod(slot.shape))
            copies = overlap(whole, place_of(part)).scaled(slot.dtype.itemsize)
            if len(copies) == 1:
                count = int(copies.count[0])
                tickets.append(self._started(name, int(copies.source[0]), part.value, count))
            elif len(copies):
                scattered.append((name, part, copies))
        _await(tickets)
        for name, part, copies in scattered:
            self._read_scattered(name, part.value, copies)

    def _started(self, name: str, begin: int, into: Tensor, count: int) -> Ticket:
        assert self._engine is not None
        file, slot = self._slots[name]
        if file not in self._files:
            self._files[file] = self._engine.open(file)
        return self._engine.read(self._files[file], slot.offset + begin, into.data_ptr(), count)

    def _read_scattered(self, name: str, into: Tensor, copies: Copies) -> None:
        """Reads nearby ranges together, gaps included, and copies the wanted parts."""
        target = into.reshape(-1).view(torch.uint8)
        reads = deque(clusters(copies, GAP, READ))
        # One is copied while the next is read.
        memory = [torch.empty(READ, dtype=torch.uint8) for _ in range(min(2, len(reads)))]
        waiting: deque[tuple[int, int, Tensor, Ticket]] = deque()
        try:
            while reads or waiting:
                while reads and memory:
                    low, high = reads.popleft()
                    page = memory.pop()
                    waiting.append((low, high, page, self._started(name, low, page, high - low)))
                low, high, page, ticket = waiting.popleft()
                memory.append(page)
                ticket.wait()
                copy_bytes(target, page[: high - low], copies.within(low, high))
        finally:
            _await(ticket for *_, ticket in waiting)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._files.clear()


class MemoryWeights(Weights):
    """Tensors of this process, on any device; tied tensors appear once."""

    def __init__(self, tensors: Mapping[str, Tensor], last: Iterable[str] = ()) -> None:
        self.path, self.files = Path(), []
        self._tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        """Omitted names of tied tensors, each with the name that has the values."""
        yielding, kept = set(last), dict[Any, str]()
        for name in sorted(tensors, key=lambda name: name in yielding):
            tensor = _whole(name, tensors[name])
            same = identity(tensor)
            if same in kept:
                self.aliases[name] = kept[same]
            else:
                self._tensors[name] = tensor
                if same is not None:
                    kept[same] = name
        self.infos = {
            name: TensorInfo(self._tensors[name].dtype, tuple(self._tensors[name].shape))
            for name in tensors
            if name in self._tensors
        }
        self._flat: tuple[str, Tensor] | None = None
        self._mapped = FileMappings()

    def read(self, wanted: Mapping[str, Part]) -> None:
        for name, part in wanted.items():
            assert part.region is None, "in-memory tensors are read completely"
            # Kept for the next part, because flattening a non-contiguous tensor copies it.
            if self._flat is None or self._flat[0] != name:
                self._flat = name, self._tensors[name].reshape(-1)
            piece = self._flat[1][part.start : part.stop]
            part.value.copy_(piece)
            self._mapped.release_pages(piece.data_ptr(), piece.nbytes if piece.is_cpu else 0)

    def close(self) -> None:
        self._flat = None


def _whole(name: str, tensor: Tensor) -> Tensor:
    # Sharded ZeRO parameters have their own class, and using them here would wait for gathers.
    if type(tensor) not in (Tensor, nn.Parameter):
        raise GulliverError(
            f"tensor {name!r} is a {type(tensor).__name__}, sharded over ranks: save a step with "
            "AsyncCheckpointer, and make a Hugging Face folder of it with export_huggingface or "
            "`gulliver checkpoint convert`"
        )
    check_holdable(f"tensor {name!r}", tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def identity(tensor: Tensor) -> Any:
    """Key shared by tensors with the same memory and shape; None for empty or meta tensors."""
    if tensor.nbytes == 0 or tensor.is_meta:
        return None
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return *place, tuple(tensor.shape), tuple(tensor.stride())


def open_weights(path: Path | str, entry: str | None = "model", step: int | None = None) -> Weights:
    path = Path(path)
    if is_step_or_run(path):
        return StepWeights(path, entry, step)
    if step is not None:
        raise GulliverError(f"{path} is not a run folder, so it has no step {step}")
    return FileWeights(path)


def is_step_or_run(path: Path) -> bool:
    if not path.exists():
        raise GulliverError(f"{path} does not exist")
    if path.is_file():
        return False
    found = {entry.name for entry in path.iterdir()}
    if any(STEP.fullmatch(name) for name in found):
        return True
    # Other programs write files with these names next to a model, whose configuration is there too.
    return bool({MANIFEST, LATEST} & found) and "config.json" not in found


def _named(folder: Path) -> Path | None:
    """Returns a folder's weights file or index under a name that libraries use, or None."""
    # If a folder has both, libraries read one of them: transformers the file, diffusers the index.
    names = [f"{stem}{ending}" for stem, endings in STEMS.items() for ending in endings]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _locate(path: Path) -> tuple[Path | None, Path | None]:
    if path.is_file():
        return (None, path) if path.name.endswith(INDEX) else (path, None)
    if not path.is_dir():
        raise GulliverError(f"{path} does not exist")
    if (found := _named(path)) is not None:
        return (None, found) if found.name.endswith(INDEX) else (found, None)
    indices = sorted(path.glob(f"*{INDEX}"))
    singles = sorted(path.glob(f"*{SUFFIX}"))
    if len(indices) == 1 or (not indices and len(singles) == 1):
        return (None, indices[0]) if indices else (singles[0], None)
    if indices or singles:
        found = ", ".join(file.name for file in (*indices, *singles)[:4])
        raise GulliverError(f"{path} holds several safetensors files but no index: {found}")
    if any(path.glob("*.bin")):
        raise GulliverError(
            f"{path} has pickled weights (*.bin), which may run code and are not read: download "
            "its safetensors files"
        )
    raise GulliverError(f"{path} holds no checkpoint and no safetensors file")


def batches(
    infos: Mapping[str, TensorInfo], limit: int | None = None
) -> Iterator[list[tuple[str, int, int]]]:
    """Splits tensors into ranges of elements that are read together."""
    limit = limit or BATCH
    found: list[tuple[str, int, int]] = []
    filled = 0
    for name, info in infos.items():
        size, start = info.dtype.itemsize, 0
        while start < info.numel:
            if limit - filled < max(size, ALIGNMENT):
                yield found
                found, filled = [], 0
            stop = min(info.numel, start + (limit - filled) // size)
            found.append((name, start, stop))
            filled += -(-(stop - start) * size // ALIGNMENT) * ALIGNMENT
            start = stop
    if found:
        yield found


class ReadBatch:
    """Memory that successive batches are read into."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(
        self,
        weights: Weights,
        runs: list[tuple[str, int, int]],
        regions: Mapping[str, Region | None] | None = None,
    ) -> dict[str, Part]:
        """Reads ranges of elements; the result is valid until the next call."""
        regions = regions or {}
        infos = [weights.infos[name] for name, _, _ in runs]
        sizes = [(b - a) * i.dtype.itemsize for (_, a, b), i in zip(runs, infos, strict=True)]
        needed = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        parts, at = dict[str, Part](), 0
        for (name, start, _), size, info in zip(runs, sizes, infos, strict=True):
            value = self._memory[at : at + size].view(info.dtype)
            parts[name] = Part(value, info.shape, start, region=regions.get(name))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        weights.read(parts)
        return parts


def _await(tickets: Iterable[Ticket]) -> None:
    """Waits for all reads even if one failed, because they still write to their memory."""
    failure = None
    for ticket in tickets:
        try:
            ticket.wait()
        except GulliverError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _of(names: Iterable[str]) -> str:
    return "choose from " + ", ".join(repr(name) for name in names)
