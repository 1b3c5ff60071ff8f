"""The I/O engine beside the raw disk, its Python twin, safetensors and torch.save.

`python -m benchmarks.io` writes the same bytes, many tensors of odd sizes in memory, to a new file
until they are forced to the disk, and reads them back from a file that is not in the page cache.
The raw disk is a plain loop of aligned 4 MiB calls, past the page cache on one thread ("raw
direct"), two or four, and through it with an fsync at the end ("raw buffered"); it gathers nothing
and sums nothing, while the engines gather odd tensors into pages and compute a checksum of each.

Everything is measured once more while a Python thread holds the GIL in a busy loop.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from safetensors.torch import load_file, save_file

from benchmarks._harness import Report, Spread, alternate, at_least, finish
from gulliver.io import Engine
from gulliver.io.native import NativeEngine
from gulliver.io.python_engine import PythonEngine

PAGE = 4 * 2**20
POOL = 16 * PAGE
GIB = 2**30


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    folder: Path = Path(".")
    """Where files are written, and deleted at the end."""
    gib: float = 1.0
    """Bytes of the state, in GiB."""
    tensors: int = 128
    """That it is cut into."""
    rounds: int = 5
    busy: bool = True
    """Measure again while a Python thread holds the GIL."""
    keep: bool = False
    """Write benchmarks/results."""


class State:
    """Tensors of odd sizes, and an aligned copy for the raw loops."""

    def __init__(self, nbytes: int, count: int) -> None:
        generator = np.random.default_rng(0)
        self.nbytes = nbytes // PAGE * PAGE
        self.map = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)  # as the engines' pools
        self.aligned = np.frombuffer(self.map, np.uint8)
        noise = generator.integers(0, 256, 2**24, dtype=np.uint8)
        for at in range(0, self.nbytes, noise.nbytes):
            self.aligned[at : at + noise.nbytes] = noise[: self.nbytes - at]
        cuts = np.sort(generator.choice(self.nbytes // 4, count - 1, replace=False)) * 4
        edges = [0, *cuts.tolist(), self.nbytes]
        self.tensors = {
            f"layer.{number}": torch.from_numpy(self.aligned[a:b].copy()).view(torch.float32)
            for number, (a, b) in enumerate(itertools.pairwise(edges))
        }
        self.target = np.zeros(self.nbytes, np.uint8)
        self.pages = list(self._pages(edges))

    def _pages(self, edges: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Offset and segments of each page of the file."""
        starts = [tensor.data_ptr() for tensor in self.tensors.values()]
        for at in range(0, self.nbytes, PAGE):
            rows = []
            for number, (a, b) in enumerate(itertools.pairwise(edges)):
                start, stop = max(a, at), min(b, at + PAGE)
                if start < stop:
                    rows.append((starts[number] + start - a, stop - start))
            yield at, np.array(rows, np.int64)


def each_page(state: State, threads: int, call: Callable[[int], int]) -> None:
    """A system call for each page, the pages dealt out to threads."""

    def loop(first: int) -> None:
        for at in range(first * PAGE, state.nbytes, threads * PAGE):
            done = call(at)
            assert done == PAGE

    if threads == 1:
        loop(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, range(threads)))


def raw_write(state: State, path: Path, direct: bool, threads: int = 1) -> None:
    """A plain loop on each thread; space is reserved, as the engine does."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    handle = os.open(path, flags)
    view = memoryview(state.map)
    try:
        if direct:
            os.posix_fallocate(handle, 0, state.nbytes)
        # From a few pages again and again, as the engines do: that is easier on the caches.
        each_page(state, threads, lambda at: os.pwrite(handle, view[at % POOL :][:PAGE], at))
        os.fsync(handle)
    finally:
        os.close(handle)


def raw_read(state: State, path: Path, direct: bool, threads: int = 1) -> None:
    """A plain loop on each thread, into aligned memory."""
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view = memoryview(state.map)
    try:
        each_page(state, threads, lambda at: os.preadv(handle, [view[at : at + PAGE]], at))
    finally:
        os.close(handle)


def engine_write(engine: Engine, state: State, path: Path) -> None:
    """As a checkpoint does it: staged page by page, synchronised, closed."""
    file = engine.create(path, state.nbytes)
    tickets = [engine.stage(file, at, segments) for at, segments in state.pages]
    engine.sync(file).wait()
    assert all(ticket.done for ticket in tickets)
    engine.close_file(file)


def engine_read(engine: Engine, state: State, path: Path) -> None:
    """Straight into an aligned target."""
    file = engine.open(path)
    start = state.aligned.ctypes.data
    tickets = [engine.read(file, at, start + at, PAGE) for at, _ in state.pages]
    for ticket in tickets:
        ticket.wait()
    engine.close_file(file)


def forced(path: Path) -> None:
    """What is in the page cache goes to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def forget(path: Path) -> None:
    """Puts a file out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def writers(engines: dict[str, Engine], state: State) -> dict[str, Callable[[Path], None]]:
    """Who writes, by name."""

    def safetensors(path: Path) -> None:
        save_file(state.tensors, path)
        forced(path)

    def torch_save(path: Path) -> None:
        torch.save(state.tensors, path)
        forced(path)

    return {
        "raw direct": lambda path: raw_write(state, path, True),
        "raw direct, 2 threads": lambda path: raw_write(state, path, True, 2),
        "raw direct, 4 threads": lambda path: raw_write(state, path, True, 4),
        "raw buffered": lambda path: raw_write(state, path, False),
        **{
            name: lambda path, engine=engine: engine_write(engine, state, path)
            for name, engine in engines.items()
        },
        "safetensors": safetensors,
        "torch.save": torch_save,
    }


def readers(
    engines: dict[str, Engine], state: State, folder: Path
) -> dict[str, tuple[Path, Callable[[Path], None]]]:
    """Who reads what, by name."""
    plain, tensors, pickled = folder / "plain", folder / "tensors", folder / "pickled"
    raw_write(state, plain, True)
    save_file(state.tensors, tensors)
    torch.save(state.tensors, pickled)

    def safetensors(path: Path) -> None:
        # Loading maps the file: the bytes are read where they are first used.
        target, at = torch.from_numpy(state.target), 0
        for tensor in load_file(path).values():
            flat = tensor.view(torch.uint8)
            target[at : at + flat.numel()].copy_(flat)
            at += flat.numel()

    return {
        "raw direct": (plain, lambda path: raw_read(state, path, True)),
        "raw direct, 2 threads": (plain, lambda path: raw_read(state, path, True, 2)),
        "raw direct, 4 threads": (plain, lambda path: raw_read(state, path, True, 4)),
        "raw buffered": (plain, lambda path: raw_read(state, path, False)),
        **{
            name: (plain, lambda path, engine=engine: engine_read(engine, state, path))
            for name, engine in engines.items()
        },
        "safetensors": (tensors, safetensors),
        "torch.load": (pickled, lambda path: torch.load(path)),
    }


@contextmanager
def held_gil(wanted: bool) -> Iterator[None]:
    """A thread that never has enough of the GIL."""
    over = False

    def spin() -> None:
        while not over:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        over = True
        if wanted:
            thread.join()


def measure(
    options: Options, state: State, engines: dict[str, Engine], folder: Path
) -> dict[str, dict[str, Spread]]:
    """GB/s by what is done and by whom."""

    def timed_write(call: Callable[[Path], None], busy: bool) -> float:
        path = folder / "written"
        path.unlink(missing_ok=True)
        # The journal and the discarding of the last file are not charged to the next.
        os.sync()
        with held_gil(busy):
            started = time.perf_counter()
            call(path)
            return state.nbytes / 1e9 / (time.perf_counter() - started)

    def timed_read(path: Path, call: Callable[[Path], None], busy: bool) -> float:
        forget(path)
        with held_gil(busy):
            started = time.perf_counter()
            call(path)
            return state.nbytes / 1e9 / (time.perf_counter() - started)

    found: dict[str, dict[str, Spread]] = {}
    kinds = {"": False, ", GIL held": True} if options.busy else {"": False}
    for suffix, busy in kinds.items():
        turns = {n: partial(timed_write, c, busy) for n, c in writers(engines, state).items()}
        found[f"write{suffix}"] = alternate(turns, options.rounds)
    (folder / "written").unlink()
    reading = readers(engines, state, folder)
    for suffix, busy in kinds.items():
        turns = {n: partial(timed_read, p, c, busy) for n, (p, c) in reading.items()}
        found[f"read{suffix}"] = alternate(turns, options.rounds)
    return found


def check(state: State, engines: dict[str, Engine], folder: Path) -> None:
    """What the engines write is what was in the tensors."""
    expected = b"".join(tensor.numpy().tobytes() for tensor in state.tensors.values())
    for name, engine in engines.items():
        path = folder / "checked"
        engine_write(engine, state, path)
        assert path.read_bytes() == expected, name
        path.unlink()


def report(options: Options, state: State, found: dict[str, dict[str, Spread]]) -> Report:
    """The table and the bars."""
    columns = list(found)
    result = Report(
        claim="io",
        title=f"Moving {state.nbytes / GIB:g} GiB in {options.tensors} tensors, GB/s",
        columns=("", *columns),
        notes=[
            "median (lower to upper quartile), taking turns; higher is better",
            "writing: from odd tensors in memory to a new file that has been forced to the disk; "
            "the engines also compute a CRC-32 of each page, the raw loops neither gather nor sum",
            "reading: a file that is not in the page cache, into memory that is there",
        ],
    )
    names = dict.fromkeys(name for column in found.values() for name in column)
    for name in names:
        cells = [_spread(found[c][name]) if name in found[c] else "" for c in columns]
        result.rows.append((name, *cells))
    result.figures = {c: {n: s.median for n, s in column.items()} for c, column in found.items()}
    natives = [name for name in names if name.startswith("native")]
    for what in ("write", "read"):
        raw = max(found[what][name].median for name in names if name.startswith("raw"))
        for name in natives:
            gain = found[what][name].median / raw
            result.bars.append(at_least(f"{what}: {name} / the fastest raw loop", gain, 0.9))
            if options.busy:
                kept = found[f"{what}, GIL held"][name].median / found[what][name].median
                result.bars.append(at_least(f"{what}: {name}, GIL held / free", kept, 0.9))
    return result


def _spread(spread: Spread) -> str:
    low, middle, high = (f"{value:.2f}" for value in (spread.low, spread.median, spread.high))
    return f"{middle} ({low}-{high})"


def native_engines() -> dict[str, Engine]:
    """The native ones that this machine can run."""
    engines: dict[str, Engine] = {}
    for io_uring in ("auto", False):
        engine = NativeEngine(io_uring=io_uring)
        engines.setdefault(engine.kind, engine)
    return engines


def main() -> None:
    """Measures in a folder of its own, and removes it."""
    options = tyro.cli(Options, description=__doc__)
    state = State(int(options.gib * GIB), options.tensors)
    engines: dict[str, Engine] = {**native_engines(), "python threads": PythonEngine()}
    folder = Path(tempfile.mkdtemp(prefix="io-benchmark-", dir=options.folder))
    try:
        check(state, engines, folder)
        found = measure(options, state, engines, folder)
    finally:
        for engine in engines.values():
            engine.close()
        shutil.rmtree(folder)
    finish(report(options, state, found), options.keep)


if __name__ == "__main__":
    main()
