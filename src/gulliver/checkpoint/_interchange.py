"""Steps, Hugging Face folders and single safetensors files as one thing: tensors by name.

Read `Weights`, what all of them are to a reader, then `_write_files`, which streams any of them
into new files; `load_huggingface`, `save_huggingface`, `export_huggingface` and
`import_huggingface` are calls of these. Memory is bounded by `BATCH` and the engine's pages, whatever the tensors' sizes.

A Hugging Face folder holds ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
``model.safetensors.index.json``, whose ``weight_map`` tells which file has which tensor. Tensors
that a model shares between names are there once.
"""

from __future__ import annotations

import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gulliver.checkpoint._files import read_json, write_json
from gulliver.checkpoint._folder import LATEST, STEP, CheckpointFolder, FolderLock
from gulliver.checkpoint._image import CODES, Image, Slot, read_slots
from gulliver.checkpoint._loading import step_folder
from gulliver.checkpoint._manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    FileEntry,
    file_to_json,
)
from gulliver.checkpoint._reader import Mismatch, StepReader
from gulliver.checkpoint._saving import PAGE, _checksummed, _versions
from gulliver.checkpoint._snapshot import file_name
from gulliver.checkpoint._tree import Leaf
from gulliver.errors import GulliverError, nearest
from gulliver.io import (
    PARTIAL,
    Engine,
    File,
    Page,
    Ticket,
    atomic_file,
    default_engine,
    finish_folder,
    named_errors,
    require_space,
    write_text,
)
from gulliver.memory import Part, before_write

BATCH = 32 * 2**20
"""Bytes that are read at once."""
PAGES = 12
"""Of the engine that writes: what is on its way to the disk while the next batch is read."""
ALIGNMENT = 64
"""Of tensors in a batch's memory: no dtype has larger elements."""
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
STEMS = ("model", "diffusion_pytorch_model")
"""What files of weights are called where a folder holds several kinds."""
CONFIG = "config.json"

Progress = Callable[[int, int], None]
"""Is told the bytes done so far, and all there are."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype | None) -> TensorInfo:
        """What it becomes where numbers are converted: only floating point is."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return TensorInfo(dtype, self.shape)


class Weights(ABC):
    """Tensors by name, read piece by piece.

    Attributes:
        path: where they are.
        files: that they are in; none for those in memory.
        infos: what each of them is, in the order in which they are stored or were made.
    """

    path: Path
    files: list[Path]
    infos: dict[str, TensorInfo]

    @abstractmethod
    def read(self, wanted: Mapping[str, Part]) -> None:
        """Fills parts of tensors, in host memory and of the stored dtype.

        Raises:
            GulliverError: a file is broken.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes files and ends threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class StepWeights(Weights):
    """An entry of a saved step, or all of its entries; every page that is read is checked.

    Args:
        path: of a step, or of a run.
        entry: whose tensors; None for those of all, named ``entry: name``.
        step: of the run; None for the newest complete one.

    Raises:
        GulliverError: there is no such step or entry, or it holds no tensors.
    """

    def __init__(self, path: Path, entry: str | None = "model", step: int | None = None) -> None:
        self.path = step_folder(path, step)
        self.reader = StepReader(self.path)
        saved = self.reader.manifest.tensors
        self.files = [self.path / name for name in self.reader.manifest.files]
        if entry is not None and not saved.get(entry):
            having = [name for name, tensors in saved.items() if tensors]
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

    def read(self, wanted: Mapping[str, Part]) -> None:
        by_entry: dict[str, dict[str, Leaf]] = {}
        for public, part in wanted.items():
            entry, name = self._places[public]
            by_entry.setdefault(entry, {})[name] = part
        for entry, leaves in by_entry.items():
            self.reader.read_into(entry, leaves)

    def close(self) -> None:
        self.reader.close()


class FileWeights(Weights):
    """Safetensors files: a single one, or those of a Hugging Face folder.

    Where a file's text says of a name that it is another one's tensor (as `save_huggingface` and
    `safetensors.torch.save_model` write), it is there under both.

    Args:
        path: of the file or the folder.

    Raises:
        GulliverError: there are none, a file that the index names is missing or broken, or a
            tensor that it names is not in its file.
    """

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
            raise GulliverError(f"{index} has no weight_map: it is no index of Hugging Face's")
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
                f"says so{f', as of {len(lost) - 1} more' if lost[1:] else ''}: get the files again"
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

    def read(self, wanted: Mapping[str, Part]) -> None:
        if self._engine is None:
            # Reads go straight into memory: its pages are never used.
            self._engine = default_engine(page_bytes=4096, pages=1)
        tickets = []
        for name, part in wanted.items():
            file, slot = self._slots[name]
            if file not in self._files:
                self._files[file] = self._engine.open(file)
            value = part.value
            offset = slot.offset + part.start * slot.dtype.itemsize
            tickets.append(
                self._engine.read(self._files[file], offset, value.data_ptr(), value.nbytes)
            )
        _await(tickets)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._files.clear()


class MemoryWeights(Weights):
    """Tensors of this process, on any device; what shares its memory with another is there once.

    Args:
        tensors: by name.
        last: names that give way to others of the same memory.

    Raises:
        GulliverError: a tensor that the format cannot hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor], last: Iterable[str] = ()) -> None:
        self.path, self.files = Path(), []
        self._tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        """Names left out, and which name has their values."""
        yielding, kept = set(last), dict[Any, str]()
        for name in sorted(tensors, key=lambda name: name in yielding):
            tensor = _whole(name, tensors[name])
            identity = _identity(tensor)
            if identity in kept:
                self.aliases[name] = kept[identity]
            else:
                self._tensors[name] = tensor
                if identity is not None:
                    kept[identity] = name
        self.infos = {
            name: TensorInfo(self._tensors[name].dtype, tuple(self._tensors[name].shape))
            for name in tensors
            if name in self._tensors
        }
        self._flat: tuple[str, Tensor] | None = None

    def read(self, wanted: Mapping[str, Part]) -> None:
        for name, part in wanted.items():
            # Kept for the next part: flattening what is not contiguous copies it.
            if self._flat is None or self._flat[0] != name:
                self._flat = name, self._tensors[name].reshape(-1)
            part.value.copy_(self._flat[1][part.start : part.stop])

    def close(self) -> None:
        self._flat = None


def _whole(name: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, Part) or hasattr(tensor, "device_mesh"):
        raise GulliverError(
            f"tensor {name!r} is spread over ranks: save a step with AsyncCheckpointer, and make a "
            "Hugging Face folder of it with export_huggingface or `gulliver checkpoint convert`"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in CODES:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise GulliverError(f"tensor {name!r} is {kind}: the safetensors format cannot hold it")
    return tensor.detach().resolve_conj().resolve_neg()


def _identity(tensor: Tensor) -> Any:
    """The same for tensors that are the same memory in the same shape; None where it has none."""
    if tensor.nbytes == 0 or tensor.is_meta:
        return None
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return *place, tuple(tensor.shape), tuple(tensor.stride())


def open_weights(path: Path | str, entry: str | None = "model", step: int | None = None) -> Weights:
    """Finds out what a path is: a run, a step, a safetensors file or a Hugging Face folder.

    Args:
        path: of any of these.
        entry: of a step; None for all of its entries.
        step: of a run; None for the newest complete one.

    Raises:
        GulliverError: it is none of these, or broken.
    """
    path = Path(path)
    if is_step_or_run(path):
        return StepWeights(path, entry, step)
    if step is not None:
        raise GulliverError(f"{path} is no run: only a run has a step {step}")
    return FileWeights(path)


def is_step_or_run(path: Path) -> bool:
    """Whether a path is a step's folder, or a run's folder with a step in it.

    Raises:
        GulliverError: it does not exist.
    """
    if not path.exists():
        raise GulliverError(f"{path} does not exist")
    if path.is_file():
        return False
    found = {entry.name for entry in path.iterdir()}
    return MANIFEST in found or LATEST in found or any(STEP.fullmatch(name) for name in found)


def _locate(path: Path) -> tuple[Path | None, Path | None]:
    """The single file, or the index, that holds the weights of a file or folder."""
    if path.is_file():
        return (None, path) if path.name.endswith(INDEX) else (path, None)
    if not path.is_dir():
        raise GulliverError(f"{path} does not exist")
    for stem in STEMS:
        if (path / f"{stem}{INDEX}").is_file():
            return None, path / f"{stem}{INDEX}"
        if (path / f"{stem}{SUFFIX}").is_file():
            return path / f"{stem}{SUFFIX}", None
    indices = sorted(path.glob(f"*{INDEX}"))
    singles = sorted(path.glob(f"*{SUFFIX}"))
    if len(indices) == 1 or (not indices and len(singles) == 1):
        return (None, indices[0]) if indices else (singles[0], None)
    if indices or singles:
        found = ", ".join(file.name for file in (*indices, *singles)[:4])
        raise GulliverError(f"{path} holds several safetensors files and no index of them: {found}")
    if any(path.glob("*.bin")):
        raise GulliverError(
            f"{path} holds its weights as pickles (*.bin), which are not read: they may run code. "
            "Get its safetensors files"
        )
    raise GulliverError(f"{path} holds no checkpoint and no safetensors file")


def batches(
    infos: Mapping[str, TensorInfo], limit: int | None = None
) -> Iterator[list[tuple[str, int, int]]]:
    """Cuts tensors into runs of elements to be read together.

    Args:
        infos: in the order in which they are wanted.
        limit: bytes of a batch; None for `BATCH`.

    Yields:
        Name, first element and one past the last of each run; a name once in each batch.
    """
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


class Batch:
    """Memory that batch after batch is read into."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, weights: Weights, runs: list[tuple[str, int, int]]) -> dict[str, Part]:
        """Reads runs of elements; they are good until the next call."""
        infos = [weights.infos[name] for name, _, _ in runs]
        sizes = [(b - a) * i.dtype.itemsize for (_, a, b), i in zip(runs, infos, strict=True)]
        needed = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        parts, at = dict[str, Part](), 0
        for (name, start, _), size, info in zip(runs, sizes, infos, strict=True):
            parts[name] = Part(self._memory[at : at + size].view(info.dtype), info.shape, start)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        weights.read(parts)
        return parts


def _await(tickets: Iterable[Ticket]) -> None:
    """Waits for all, even if one has failed: until then their memory is in use."""
    failure = None
    for ticket in tickets:
        try:
            ticket.wait()
        except GulliverError as error:
            failure = failure or error
    if failure is not None:
        raise failure


# --- writing -------------------------------------------------------------------------------------


class _FileWriter:
    """A new file, filled from its beginning through the engine's pages."""

    def __init__(self, engine: Engine, path: Path, nbytes: int) -> None:
        self._engine, self.nbytes = engine, nbytes
        self._file = engine.create(path, nbytes)
        self._page: Page | None = None
        self._filled = self._written = 0
        self._open: deque[Ticket] = deque()
        self._checksums: list[int] = []

    def put(self, content: Tensor) -> None:
        """Appends bytes, a row in host memory; its memory is free again when this returns."""
        done, size = 0, content.numel()
        while done < size:
            if self._page is None:
                self._page = self._engine.acquire()
            count = min(size - done, self._engine.page_bytes - self._filled)
            target = torch.from_numpy(self._page.array)[self._filled : self._filled + count]
            target.copy_(content[done : done + count])
            done, self._filled = done + count, self._filled + count
            if self._filled == self._engine.page_bytes:
                self._flush()

    def _flush(self) -> None:
        if self._page is None:
            return
        page, self._page = self._page, None
        self._open.append(self._engine.write_page(self._file, self._written, page, self._filled))
        self._written, self._filled = self._written + self._filled, 0
        # As many as there are pages: what failed is known before more is read.
        while len(self._open) > PAGES:
            self._settle(self._open.popleft())

    def _settle(self, ticket: Ticket) -> None:
        ticket.wait()
        self._checksums.append(int(ticket.checksum or 0))

    def finish(self) -> FileEntry:
        """Sees everything to the disk."""
        self._flush()
        while self._open:
            self._settle(self._open.popleft())
        assert self._written == self.nbytes, "the file is as long as its header says"
        self._engine.sync(self._file).wait()
        return FileEntry(self.nbytes, self._engine.page_bytes, tuple(self._checksums))

    def close(self) -> None:
        """Closes the file; what was not finished is of no use."""
        if self._page is not None:
            self._engine.release(self._page)
            self._page = None
        self._engine.close_file(self._file)


@dataclass
class _FilePlan:
    """A file to be written.

    Attributes:
        path: where.
        sources: by name in the file, the name in the source.
        image: its header and the order of its tensors.
    """

    path: Path
    sources: dict[str, str]
    image: Image


def _plan(
    path: Path,
    weights: Weights,
    sources: Mapping[str, str],
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None = None,
) -> _FilePlan:
    # Tensors without memory: the header and the places follow from dtypes and shapes.
    empty = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta")
        for name, source in sources.items()
        for info in [weights.infos[source].as_dtype(dtype)]
    }
    return _FilePlan(path, dict(sources), Image(empty, {"format": "pt", **(metadata or {})}))


def _write_files(
    weights: Weights,
    plans: list[_FilePlan],
    dtype: torch.dtype | None,
    progress: Progress | None = None,
) -> dict[str, FileEntry]:
    """Writes files one after the other, each from its beginning to its end; their entries by name.

    The disk writes what has been read while more is read.
    """
    total, done = sum(plan.image.nbytes for plan in plans), 0
    batch, entries = Batch(), dict[str, FileEntry]()
    with default_engine(page_bytes=PAGE, pages=PAGES) as engine:
        for plan in plans:
            order = {plan.sources[name]: name for name in plan.image.names if name is not None}
            wanted = {source: weights.infos[source] for source in order}
            with ExitStack() as stack:
                writer = _FileWriter(engine, plan.path, plan.image.nbytes)
                stack.callback(writer.close)
                writer.put(plan.image.header)
                done += plan.image.header.numel()
                for runs in batches(wanted):
                    for part in batch.read(weights, runs).values():
                        value = _converted(part.value, dtype).view(torch.uint8)
                        writer.put(value)
                        done += value.numel()
                    if progress is not None:
                        progress(done, total)
                entries[plan.path.name] = writer.finish()
    return entries


def _converted(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None or not value.dtype.is_floating_point else value.to(dtype)


# --- Hugging Face --------------------------------------------------------------------------------


@torch.no_grad()
def load_huggingface(
    model: nn.Module | Mapping[str, Leaf],
    path: Path | str,
    strict: bool = True,
    prefix: str = "",
) -> Mismatch:
    """Fills a model in place from a Hugging Face folder or a safetensors file.

    Each process reads what it needs: for a `Part` only its elements. Values are converted to the
    model's dtypes. Names that share their memory with one that is loaded (tied weights) need not be
    in the files.

    Args:
        model: or tensors and parts of tensors by name.
        path: a folder with ``model.safetensors`` or an index, or a safetensors file.
        strict: refuse what does not match, before anything is changed; else it is reported.
        prefix: of names in the files, before those of the model: ``"model."`` loads the weights of
            a causal language model into its backbone.

    Returns:
        What did not match; empty if all did.

    Raises:
        GulliverError: the files are missing or broken; something does not match. Other shapes never
            do, and something must match.
    """
    targets = _targets(model)
    with FileWeights(Path(path)) as weights:
        names = {name: prefix + name for name in targets if prefix + name in weights.infos}
        odd = _mismatch(weights, targets, prefix)
        if odd.unlike or (strict and odd) or (targets and not names):
            raise GulliverError(f"{path} does not fit the model: {odd}")
        before_write(_value(targets[name]) for name in names)
        _fill(weights, {source: targets[name] for name, source in names.items()})
    return odd


def _targets(model: nn.Module | Mapping[str, Leaf]) -> dict[str, Leaf]:
    state: Mapping[str, Any] = model.state_dict() if isinstance(model, nn.Module) else model
    targets: dict[str, Leaf] = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    for name, leaf in targets.items():
        if _value(leaf).is_meta:
            raise GulliverError(f"{name} is on the meta device: call to_empty() on the model first")
    return targets


def _value(leaf: Leaf) -> Tensor:
    return leaf.value if isinstance(leaf, Part) else leaf


def _mismatch(weights: Weights, targets: Mapping[str, Leaf], prefix: str) -> Mismatch:
    saved = {n.removeprefix(prefix): i for n, i in weights.infos.items() if n.startswith(prefix)}
    loaded = {_identity(_value(targets[name])) for name in targets.keys() & saved.keys()} - {None}
    tied = {name for name, leaf in targets.items() if _identity(_value(leaf)) in loaded}
    odd = Mismatch(
        missing=sorted(targets.keys() - saved.keys() - tied),
        # With a prefix, a part of the files is what was asked for.
        unexpected=[] if prefix else sorted(saved.keys() - targets.keys()),
    )
    for name in targets.keys() & saved.keys():
        shape = tuple(targets[name].shape)
        if saved[name].shape != shape:
            odd.unlike[name] = (saved[name].shape, shape)
    return odd


def _fill(weights: Weights, targets: Mapping[str, Leaf]) -> None:
    """Reads into tensors and parts: straight into their memory, or through a batch's."""
    straight: dict[str, Part] = {}
    staged: dict[str, Leaf] = {}
    for source, leaf in targets.items():
        value = _value(leaf).detach()
        plain = value.is_cpu and value.is_contiguous() and not _flagged(value)
        if plain and value.dtype == weights.infos[source].dtype:
            start = leaf.start if isinstance(leaf, Part) else 0
            straight[source] = Part(value.reshape(-1), weights.infos[source].shape, start)
        else:
            staged[source] = leaf
    weights.read({source: part for source, part in straight.items() if part.value.numel()})
    batch = Batch()
    for source, leaf in staged.items():
        value, info = _value(leaf).detach(), weights.infos[source]
        first = leaf.start if isinstance(leaf, Part) else 0
        if not value.is_contiguous():
            whole = torch.empty(info.shape, dtype=info.dtype)
            weights.read({source: Part(whole.reshape(-1), info.shape)} if whole.numel() else {})
            value.copy_(whole)
            continue
        step = BATCH // info.dtype.itemsize
        for start in range(0, value.numel(), step):
            stop = min(value.numel(), start + step)
            parts = batch.read(weights, [(source, first + start, first + stop)])
            value.view(-1)[start:stop].copy_(parts[source].value)


def _flagged(value: Tensor) -> bool:
    return value.is_conj() or value.is_neg()


def save_huggingface(
    model: nn.Module | Mapping[str, Tensor],
    folder: Path | str,
    max_shard_bytes: float = 5e9,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a model as a Hugging Face folder, whole or not at all; call it on one rank.

    Tensors that share their memory are written once. Which other names they have is noted in the
    file's text, as `safetensors.torch.save_model` does.

    Args:
        model: or tensors by name, on any device.
        folder: to make; it must not exist.
        max_shard_bytes: of tensors in a file; a larger tensor has a file of its own.
        config: written as ``config.json``.
        dtype: that floating-point tensors are converted to.
        progress: is told the bytes done and all there are.

    Returns:
        The folder.

    Raises:
        GulliverError: the folder exists or cannot be written, or a tensor cannot be saved.
    """
    last: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    weights = MemoryWeights(tensors, last)  # type: ignore[arg-type]
    names = {name: name for name in weights.infos}
    return _write_huggingface(
        weights, names, Path(folder), max_shard_bytes, config, dtype, progress, weights.aliases
    )


def export_huggingface(
    path: Path | str,
    target: Path | str,
    entry: str = "model",
    max_shard_bytes: float = 5e9,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Makes a Hugging Face folder, or a single safetensors file, of a saved step.

    Tensors of which ranks saved parts are whole there. What is read is checked.

    Args:
        path: of a step, or of a run; also a Hugging Face folder, to be cut or converted anew.
        target: the folder, or a file ``*.safetensors``; it must not exist.
        entry: of the step, whose tensors are written.
        max_shard_bytes: of tensors in a file of a folder; a larger tensor has one of its own.
        dtype: that floating-point tensors are converted to.
        prefix: only names that begin with it are written, without it.
        config: written as ``config.json``; None for that which `import_huggingface` found, if any.
        step: of a run; None for the newest complete one.
        progress: is told the bytes done and all there are.

    Returns:
        The target.

    Raises:
        GulliverError: there is no such step, it is broken, or the target exists or cannot be
            written; nothing is left of it then.
    """
    target = Path(target)
    with open_weights(path, entry, step) as weights:
        names = _unprefixed(weights, prefix)
        if target.suffix == SUFFIX:
            _refuse_existing(target)
            plan = _plan(target, weights, names, dtype)
            with atomic_file(target, plan.image.nbytes) as partial:
                plan.path = partial
                _write_files(weights, [plan], dtype, progress)
            return target
        if config is None:
            config = _config_of(weights)
        return _write_huggingface(weights, names, target, max_shard_bytes, config, dtype, progress)


def _config_of(weights: Weights) -> Mapping[str, Any] | None:
    if isinstance(weights, StepWeights):
        found = weights.reader.manifest.about.get("config")
    else:
        file = weights.path / CONFIG
        found = read_json(file) if file.is_file() else None
    return found if isinstance(found, Mapping) else None


def _unprefixed(weights: Weights, prefix: str) -> dict[str, str]:
    """Names as they are written, and as they are in the source."""
    names = {n.removeprefix(prefix): n for n in weights.infos if n.startswith(prefix)}
    if not names or "" in names:
        raise GulliverError(
            f"no tensor's name in {weights.path} begins with {prefix!r}: "
            f"{nearest(prefix, [name.split('.')[0] + '.' for name in weights.infos])}"
        )
    return names


def _write_huggingface(
    weights: Weights,
    names: Mapping[str, str],
    folder: Path,
    max_shard_bytes: float,
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    progress: Progress | None,
    aliases: Mapping[str, str] | None = None,
) -> Path:
    _refuse_existing(folder)
    if not max_shard_bytes > 0:
        raise GulliverError(f"files of {max_shard_bytes} bytes cannot be: give 1 or more")
    infos = {name: weights.infos[source].as_dtype(dtype) for name, source in names.items()}
    shards = _shards(infos, max_shard_bytes)
    plans = []
    for number, shard in enumerate(shards):
        count = f"-{number + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        text = {name: kept for name, kept in (aliases or {}).items() if kept in shard}
        sources = {name: names[name] for name in shard}
        plans.append(_plan(folder / f"model{count}{SUFFIX}", weights, sources, dtype, text))
    with _new_folder(folder, sum(plan.image.nbytes for plan in plans)) as partial:
        for plan in plans:
            plan.path = partial / plan.path.name
        _write_files(weights, plans, dtype, progress)
        if len(plans) > 1:
            write_json(partial / f"model{INDEX}", _index(plans, infos))
        if config is not None:
            write_json(partial / CONFIG, dict(config))
    return folder


def _index(plans: list[_FilePlan], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(info.nbytes for info in infos.values())},
        "weight_map": {name: plan.path.name for plan in plans for name in plan.sources},
    }


def _shards(infos: Mapping[str, TensorInfo], limit: float) -> list[list[str]]:
    """Names, in order, of as many tensors as fit each file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.nbytes
    return shards


def _refuse_existing(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise GulliverError(f"{target} exists already: choose another name, or remove it first")


@contextmanager
def _new_folder(folder: Path, needed: int) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it when the block ends well."""
    require_space(folder.parent, needed)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL}")
    with named_errors(folder, needed=needed):
        made = _make_parents(folder)
        try:
            partial.mkdir()
            yield partial
            finish_folder(partial, folder)
        except BaseException:
            # Also of Ctrl-C nothing is left.
            shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(made)
            raise


def _make_parents(path: Path) -> list[Path]:
    """Makes missing folders above a path; those it made, the lowest first."""
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return made


def _remove_empty(folders: Iterable[Path]) -> None:
    # Somebody else may have put something there meanwhile.
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def import_huggingface(
    path: Path | str,
    run: Path | str,
    step: int = 0,
    entry: str = "model",
    dtype: torch.dtype | None = None,
    prefix: str = "",
    progress: Progress | None = None,
) -> Path:
    """Makes a step of a run of a Hugging Face folder or a safetensors file.

    Args:
        path: of the folder or file.
        run: folder of a run, made if there is none; its other steps stay as they are.
        step: number of the step; the run must not have it.
        entry: of the step that the tensors are.
        dtype: that floating-point tensors are converted to.
        prefix: only names that begin with it are taken, without it.
        progress: is told the bytes done and all there are.

    Returns:
        The step's folder.

    Raises:
        GulliverError: the files are missing or broken, the run has the step, another job writes
            it, or it cannot be written; it is as before then.
    """
    run = Path(run)
    folder = CheckpointFolder(run, keep=0)
    final = folder.path(step)
    if step < 0:
        raise GulliverError(f"there is no step {step}: steps count from 0")
    _refuse_existing(final)
    # Says so if the run is of a newer version, before anything is written.
    folder.latest()
    with FileWeights(Path(path)) as weights:
        names = _unprefixed(weights, prefix)
        name = file_name(entry, 0, 1)
        plan = _plan(folder.partial(step) / name, weights, names, dtype)
        require_space(run, plan.image.nbytes)
        with _unfinished(folder, step) as partial:
            files = _write_files(weights, [plan], dtype, progress)
            _describe(partial, step, entry, plan, files[name], _config_of(weights))
    return final


def _describe(
    partial: Path,
    step: int,
    entry: str,
    plan: _FilePlan,
    file: FileEntry,
    config: Mapping[str, Any] | None,
) -> None:
    """Writes what makes a file of tensors a step."""
    tensors = dict(zip(plan.image.names, plan.image.sources, strict=True))
    skeleton = {"dict": [[name, {"tensor": name}] for name in plan.sources]}
    write_json(partial / STATE, {"entries": {entry: skeleton}, "ranks": [{}]})
    parts = {
        name: {
            "dtype": CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "parts": [[plan.path.name, 0, tensors[name].numel()]],
        }
        for name in plan.sources
    }
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": 1,
        "about": {**_versions(), **({} if config is None else {"config": dict(config)})},
        "files": {plan.path.name: file_to_json(file), STATE: _checksummed(partial / STATE)},
        "tensors": {entry: parts},
    }
    write_json(partial / MANIFEST, manifest)


@contextmanager
def _unfinished(folder: CheckpointFolder, step: int) -> Iterator[Path]:
    """The temporary folder of a step, which becomes the step when the block ends well."""
    lock = FolderLock(folder.root)
    made = _make_parents(lock.path)
    try:
        with lock:
            partial = folder.begin(step)
            try:
                yield partial
                finish_folder(partial, folder.path(step))
                if folder.latest() == folder.path(step):
                    write_text(folder.root / LATEST, folder.path(step).name + "\n")
            except BaseException:
                folder.discard(step)
                raise
    except BaseException:
        if made:
            lock.path.unlink(missing_ok=True)
            _remove_empty(made)
        raise


def _of(names: Iterable[str]) -> str:
    return "choose from " + ", ".join(repr(name) for name in names)
