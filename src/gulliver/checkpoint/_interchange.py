"""Hugging Face's folders, to and from models and steps.

Read `_write_files`, which streams tensors from anywhere into new files; `load_huggingface`,
`save_huggingface`, `export_huggingface` and `import_huggingface` are calls of it and of
`_weights.py`. Memory is bounded by `BATCH` and the engine's pages, whatever the tensors' sizes.

A Hugging Face folder holds ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
``model.safetensors.index.json``, whose ``weight_map`` tells which file has which tensor. Tensors
that a model shares between names are there once.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gulliver.checkpoint._collect import file_name
from gulliver.checkpoint._files import read_json, write_json
from gulliver.checkpoint._folder import LATEST, CheckpointFolder, FolderLock
from gulliver.checkpoint._gathering import GatheredWeights, on_gathered
from gulliver.checkpoint._image import CODES, Image
from gulliver.checkpoint._manifest import (
    STATE,
    FileEntry,
    file_to_json,
    format_of,
    read_manifest,
    write_manifest,
)
from gulliver.checkpoint._publishing import checksummed, versions
from gulliver.checkpoint._reader import Mismatch
from gulliver.checkpoint._saving import PAGE
from gulliver.checkpoint._tree import Leaf
from gulliver.checkpoint._weights import (
    BATCH,
    INDEX,
    SUFFIX,
    Batch,
    FileWeights,
    MemoryWeights,
    StepWeights,
    TensorInfo,
    Weights,
    batches,
    identity,
    open_weights,
)
from gulliver.errors import GulliverError, nearest
from gulliver.io import (
    PARTIAL,
    Engine,
    Page,
    Ticket,
    atomic_file,
    default_engine,
    finish_folder,
    hold,
    named_errors,
    remove_leftovers,
    require_space,
    write_text,
)
from gulliver.memory import Part, Region, before_write, region_of

PAGES = 12
"""Of the engine that writes: what is on its way to the disk while the next batch is read."""
CONFIG = "config.json"
IMPORTED = -1
"""Order of a step that was made of other files after the run had come further."""

_log = logging.getLogger("gulliver")

Progress = Callable[[int, int], None]
"""Is told the bytes done so far, and all there are."""


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
    if isinstance(weights, GatheredWeights):
        weights.announce(p.sources[n] for p in plans for n in p.image.names if n is not None)
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
    elsewhere: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> Mismatch:
    """Fills a model in place from a Hugging Face folder or a safetensors file.

    Every rank calls it, and reads what it needs: for a `Part`, and for a parameter that holds a
    region of a whole (`gulliver.memory.set_region`), only its elements. Values are
    converted to the model's dtypes. Names that share their memory with one that is loaded (tied
    weights) need not be in the files. Boosted models can be loaded, too.

    Args:
        model: or tensors and parts of tensors by name.
        path: a folder with ``model.safetensors`` or an index, or a safetensors file; also a step's
            or a run's, of which the entry ``model`` is taken.
        strict: refuse what does not match, before anything is changed; else it is reported.
        prefix: of names in the files, before those of the model: ``"model."`` loads the weights of
            a causal language model into its backbone.
        elsewhere: names that may be in the files and not in this model, as those of the other
            stages of a pipeline are.
        aliases: names of this model, and the names whose values they have where the files lack
            them: tied weights of which one lies in another stage.

    Returns:
        What did not match; empty if all did.

    Raises:
        GulliverError: the files are missing or broken; something does not match. Other shapes never
            do, and something must match.
    """
    targets = _targets(model)
    with open_weights(path) as weights:
        odd = _matched(weights, targets, strict, prefix, elsewhere, aliases)
        names = {name: prefix + name for name in targets if prefix + name in weights.infos}
        before_write(_value(targets[name]) for name in names if _is_plain(targets[name]))
        _fill(weights, {source: targets[name] for name, source in names.items()})
    return odd


def match_huggingface(
    model: nn.Module | Mapping[str, Leaf],
    path: Path | str,
    strict: bool = True,
    prefix: str = "",
    elsewhere: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> Mismatch:
    """What `load_huggingface` would say of these arguments; it reads headers only.

    Raises:
        GulliverError: as it does, but for broken values.
    """
    with open_weights(path) as weights:
        return _matched(weights, _targets(model), strict, prefix, elsewhere, aliases)


def _matched(
    weights: Weights,
    targets: Mapping[str, Leaf],
    strict: bool,
    prefix: str,
    elsewhere: Collection[str],
    aliases: Mapping[str, str] | None,
) -> Mismatch:
    _add_aliases(weights, targets, prefix, aliases or {})
    found = any(prefix + name in weights.infos for name in targets)
    odd = _mismatch(weights, targets, prefix)
    odd.unexpected = [name for name in odd.unexpected if name not in elsewhere]
    if odd.unlike or (strict and odd) or (targets and not found):
        raise GulliverError(f"{weights.path} does not fit the model: {odd}")
    return odd


def _add_aliases(
    weights: Weights,
    targets: Mapping[str, Leaf],
    prefix: str,
    aliases: Mapping[str, str],
) -> None:
    """Lets tensors be found under the names that this model has for them, too."""
    for name, kept in aliases.items():
        there = prefix + kept in weights.infos and prefix + name not in weights.infos
        if name in targets and there:
            weights.add_alias(prefix + name, prefix + kept)


def _targets(model: nn.Module | Mapping[str, Leaf]) -> dict[str, Leaf]:
    # The parameters themselves: what ZeRO shards is only written through these.
    state: Mapping[str, Any] = (
        model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    )
    targets: dict[str, Leaf] = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    for name, leaf in targets.items():
        if _value(leaf).is_meta:
            raise GulliverError(f"{name} is on the meta device: call to_empty() on the model first")
        if hasattr(leaf, "device_mesh"):
            raise GulliverError(f"{name} is a DTensor: load the model before it is distributed")
    return targets


def _value(leaf: Leaf) -> Tensor:
    return leaf.value if isinstance(leaf, Part) else leaf


def _is_plain(leaf: Leaf) -> bool:
    """Whether a leaf's memory is its own: other kinds only take what is copied to them."""
    return type(_value(leaf)) in (Tensor, nn.Parameter)


def _same_memory(leaf: Leaf) -> Any:
    return identity(_value(leaf)) if _is_plain(leaf) else id(leaf)


def _mismatch(weights: Weights, targets: Mapping[str, Leaf], prefix: str) -> Mismatch:
    saved = {n.removeprefix(prefix): i for n, i in weights.infos.items() if n.startswith(prefix)}
    common = [name for name in targets if name in saved]
    loaded = {_same_memory(targets[name]) for name in common} - {None}
    tied = {name for name, leaf in targets.items() if _same_memory(leaf) in loaded}
    odd = Mismatch(
        missing=sorted(targets.keys() - saved.keys() - tied),
        # With a prefix, a part of the files is what was asked for.
        unexpected=[] if prefix else sorted(saved.keys() - targets.keys()),
    )
    for name in common:
        shape = _shape(targets[name])
        if saved[name].shape != shape:
            odd.unlike[name] = (saved[name].shape, shape)
    return odd


def _fill(weights: Weights, targets: Mapping[str, Leaf]) -> None:
    """Reads into tensors and parts: straight into their memory, or through a batch's."""
    straight: dict[str, Part] = {}
    staged: dict[str, Leaf] = {}
    for source, leaf in targets.items():
        if _fits(leaf, weights.infos[source]):
            start, region = _origin(leaf)
            flat = _value(leaf).detach().reshape(-1)
            straight[source] = Part(flat, weights.infos[source].shape, start, region=region)
        else:
            staged[source] = leaf
    weights.read({source: part for source, part in straight.items() if part.value.numel()})
    # Whoever watches tensors by their versions (autograd, ZeRO's copies) saw nothing of that.
    increment_version([_value(targets[source]) for source in straight])
    batch = Batch()
    for source, leaf in staged.items():
        info = weights.infos[source]
        if _is_plain(leaf) and _value(leaf).is_contiguous():
            _fill_staged(weights, source, leaf, batch)
            continue
        start, region = _origin(leaf)
        held = torch.empty(_value(leaf).shape, dtype=info.dtype)
        part = Part(held.reshape(-1), info.shape, start, region=region)
        weights.read({source: part} if held.numel() else {})
        _value(leaf).copy_(held)


def _origin(leaf: Leaf) -> tuple[int, Region | None]:
    """The first element of a leaf, and the region that it is counted in."""
    return (leaf.start, leaf.region) if isinstance(leaf, Part) else (0, region_of(leaf))


def _shape(leaf: Leaf) -> tuple[int, ...]:
    """Of the whole that a leaf is of."""
    region = _origin(leaf)[1]
    return tuple(leaf.shape) if region is None else region.shape


def _fits(leaf: Leaf, info: TensorInfo) -> bool:
    """Whether the bytes of a file are those of a leaf."""
    if not _is_plain(leaf):
        return False
    value = _value(leaf)
    usual = value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
    return usual and value.dtype == info.dtype


def _fill_staged(weights: Weights, source: str, leaf: Leaf, batch: Batch) -> None:
    value, size = _value(leaf).view(-1), weights.infos[source].dtype.itemsize
    (first, region), step = _origin(leaf), BATCH // size
    for start in range(0, value.numel(), step):
        stop = min(value.numel(), start + step)
        runs = [(source, first + start, first + stop)]
        parts = batch.read(weights, runs, {source: region})
        value[start:stop].copy_(parts[source].value)


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
        GulliverError: the folder exists or cannot be written, or a tensor cannot be saved: also one
            that is spread over ranks (save a step, and make a folder of that).
    """
    last: Iterable[str] = getattr(model, "_tied_weights_keys", None) or ()
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor | Part)}
    weights = MemoryWeights(tensors, last)  # type: ignore[arg-type]
    names = {name: name for name in weights.infos}
    return _write_huggingface(
        weights, names, Path(folder), max_shard_bytes, config, dtype, progress, weights.aliases
    )


def gather_huggingface(
    leaves: Mapping[str, Leaf],
    folder: Path | str,
    max_shard_bytes: float = 5e9,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    aliases: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a model that is spread over ranks as a Hugging Face folder; every rank calls it.

    Rank 0 writes, and has one tensor at a time: the others send it theirs.

    Args:
        leaves: that this rank has, by name: parts, and tensors that are alike wherever they are.
        folder: to make; it must not exist.
        max_shard_bytes: of tensors in a file; a larger tensor has a file of its own.
        config: written as ``config.json``.
        dtype: that floating-point tensors are converted to.
        dtypes: that floating-point tensors of this rank are, by name, instead of their own.
        aliases: names that are left out, and those that have their values (tied weights).
        progress: on rank 0, is told the bytes done and all there are.

    Returns:
        The folder.

    Raises:
        GulliverError: on every rank: the folder exists or cannot be written; parts are missing.
    """

    def write(weights: GatheredWeights) -> None:
        kept = aliases or {}
        left = {
            name: of for name, of in kept.items() if name in weights.infos and of in weights.infos
        }
        names = {name: name for name in weights.infos if name not in left}
        place = Path(folder)
        _write_huggingface(weights, names, place, max_shard_bytes, config, dtype, progress, left)

    on_gathered(leaves, write, dtypes)
    return Path(folder)


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
            write_single(weights, names, target, dtype, progress)
            return target
        if config is None:
            config = _config_of(weights)
        return _write_huggingface(weights, names, target, max_shard_bytes, config, dtype, progress)


def write_single(
    weights: Weights,
    names: Mapping[str, str],
    target: Path,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as one safetensors file, whole or not at all; one that is there is replaced.

    Args:
        weights: to read from.
        names: of the tensors in the file, and in `weights`.
        target: the file.
        dtype: that floating-point tensors are converted to.
        progress: is told the bytes done and all there are.
        metadata: text beside the tensors.

    Raises:
        GulliverError: it cannot be written; nothing is left of it then.
    """
    plan = _plan(target, weights, names, dtype, metadata)
    _clear(target.parent)
    with _parents(target), atomic_file(target, plan.image.nbytes) as partial:
        plan.path = partial
        _write_files(weights, [plan], dtype, progress)


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
def _parents(path: Path) -> Iterator[None]:
    """Makes the missing folders above a path; removes them if what is done there fails."""
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        # Somebody else may have put something there meanwhile.
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def _clear(folder: Path) -> None:
    """Removes what conversions that were killed have left hidden."""
    for path in remove_leftovers(folder):
        _log.warning("removed %s, which a process that was killed had left half written", path)


@contextmanager
def _new_folder(folder: Path, needed: int) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it when the block ends well."""
    _clear(folder.parent)
    require_space(folder.parent, needed)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL}")
    with _parents(folder), named_errors(folder, needed=needed):
        try:
            partial.mkdir()
            with hold(partial):
                yield partial
                finish_folder(partial, folder)
        finally:
            # Also after Ctrl-C nothing is left.
            shutil.rmtree(partial, ignore_errors=True)


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
            newest = folder.latest()
            # What comes from elsewhere is the newest only if the run had come less far.
            ahead = newest is None or step > read_manifest(newest).step
            order = folder.next_order() if ahead else IMPORTED
            _describe(partial, step, order, entry, plan, files[name], _config_of(weights))
    return final


def _describe(
    partial: Path,
    step: int,
    order: int,
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
        "format": format_of({entry: parts}),
        "step": step,
        "order": order,
        "world_size": 1,
        "about": {**versions(), **({} if config is None else {"config": dict(config)})},
        "files": {plan.path.name: file_to_json(file), STATE: checksummed(partial / STATE)},
        "tensors": {entry: parts},
    }
    write_manifest(partial, manifest)


@contextmanager
def _unfinished(folder: CheckpointFolder, step: int) -> Iterator[Path]:
    """The temporary folder of a step, which becomes the step when the block ends well."""
    is_new = not folder.root.exists()
    lock = FolderLock(folder.root)
    with _parents(lock.path):
        try:
            with lock:
                partial = folder.begin(step)
                try:
                    yield partial
                    finish_folder(partial, folder.path(step))
                finally:
                    folder.discard(step)
                if folder.latest() == folder.path(step):
                    write_text(folder.root / LATEST, folder.path(step).name + "\n")
        except BaseException:
            if is_new:
                lock.path.unlink(missing_ok=True)
            raise
