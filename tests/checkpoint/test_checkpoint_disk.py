"""State that lies on disk, in files that are mapped, is saved and loaded piece by piece."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from gulliver.checkpoint import AsyncCheckpointer, load, save_huggingface
from gulliver.checkpoint.interchange import write_untied
from gulliver.checkpoint.weights import Weights
from gulliver.checkpoint.writing import PartsSaver, write_single
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.io.python_engine import PythonEngine
from gulliver.memory.buffers import PARAMETERS
from gulliver.memory.manager import Manager
from gulliver.memory.parts import Part
from gulliver.memory.pending import add_read_lock, before_write, drop_read_lock, storage_of
from gulliver.memory.stores import DiskStore
from tests.covering import some
from tests.guarded import guarded
from tests.patience import patient
from tests.pool import Pool

MIB = 2**20
SIZE = 200 * MIB
"""Bytes of the state."""
PIECES = 10


class Shelf:
    """An owner of state on disk: a file without a name, of which each tensor is a mapping."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        path = folder / f"shelf-{os.getpid()}"
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        self.offsets: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        end = 0
        for name, numel in sizes.items():
            size = -(-numel * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fallocate(self.handle, end, size)
            memory = mmap.mmap(self.handle, size, offset=end)
            self.offsets[name] = end
            self.tensors[name] = torch.frombuffer(memory, dtype=torch.float32, count=numel)
            end += size

    def write(self, name: str, values: Tensor) -> None:
        """Changes a tensor by its file, as whoever moves what is in memory to the disk does."""
        before_write([self.tensors[name]])
        content = memoryview(values.numpy()).cast("B")
        assert os.pwrite(self.handle, content, self.offsets[name]) == len(content)

    def read(self, name: str) -> Tensor:
        """Reads what is in the file."""
        tensor = self.tensors[name]
        content = os.pread(self.handle, tensor.nbytes, self.offsets[name])
        return torch.frombuffer(bytearray(content), dtype=tensor.dtype)


def values_of(name: str, numel: int, number: int = 0) -> Tensor:
    return torch.arange(numel).remainder_(100_003).float().mul_(ord(name[-1])).add_(number)


def filled(folder: Path, sizes: dict[str, int], number: int = 0) -> Shelf:
    shelf = Shelf(folder, sizes)
    for name, numel in sizes.items():
        shelf.write(name, values_of(name, numel, number))
    return shelf


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    shelf = filled(tmp_path_factory.mktemp("big"), BIG)
    # What is dirty stays in memory until it is written.
    os.fsync(shelf.handle)
    return shelf


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """The memory of this process grows by so much at most, pages of mapped files included."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < nbytes, f"{(_status('VmHWM') - before) / MIB:.0f} MiB"


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


BIG = {f"t{n}": SIZE // 4 // PIECES for n in range(PIECES)}


def parts(shelf: Shelf) -> dict[str, Part]:
    """Each tensor as a row of the elements of a matrix, as ZeRO gives it."""
    return {n: Part(t, (1, t.numel())) for n, t in shelf.tensors.items()}


def _async(folder: Path, shelf: Shelf) -> None:
    with AsyncCheckpointer(folder, memory_limit=16 * MIB) as checkpointer:
        checkpointer.save(1, {"model": dict(parts(shelf))})
    assert "a ring of 16 MiB" in checkpointer.held
    assert "is more than memory_limit" in checkpointer.held


def _raw(folder: Path, shelf: Shelf) -> None:
    with AsyncCheckpointer(folder, ring_mb=16) as checkpointer:
        checkpointer.save(1, {"model": shelf.tensors})
    assert "200 MiB of the state are on disk" in checkpointer.held


def _single(folder: Path, shelf: Shelf) -> None:
    path = folder / "model.safetensors"

    def write(weights: Weights) -> None:
        write_single(weights, {name: name for name in weights.infos}, path)

    PartsSaver(path, write, parts(shelf), 16 * MIB).close()


def _folder(folder: Path, shelf: Shelf) -> None:
    path = folder / "hf"
    PartsSaver(path, lambda w: write_untied(w, path), parts(shelf), 16 * MIB).close()


def _plain(folder: Path, shelf: Shelf) -> None:
    save_huggingface(shelf.tensors, folder / "hf")


WAYS = [_async, _single, _raw, _folder, _plain]


@pytest.mark.parametrize("save", some(WAYS, WAYS[:2]))
def test_state_on_disk_is_saved_and_loaded_in_bounded_memory(
    big: Shelf, tmp_path: Path, save: Callable[[Path, Shelf], None]
) -> None:
    with at_most(125 * MIB):
        save(tmp_path, big)
    (file,) = tmp_path.rglob("*.safetensors")
    with safe_open(file, "pt") as found:
        assert torch.equal(found.get_tensor("t3").view(-1), values_of("t3", BIG["t3"]))
    if save is _async:
        again = Shelf(tmp_path, BIG)
        with at_most(70 * MIB):
            load(tmp_path, {"model": dict(parts(again))})
        assert all(torch.equal(again.read(name), values_of(name, BIG[name])) for name in BIG)


# --- while the owner writes ----------------------------------------------------------------------


SMALL = {"a": 300_001, "b": 100_003, "c": 7, "d": 99_991}


class Asked:
    """A read lock that notes that somebody is about to write."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def release(self, storages: set[int] | None) -> None:
        self.event.set()


@pytest.mark.parametrize("mode", ["ring", "shadow"])
def test_writes_to_offload_file_wait_for_copy(
    tmp_path: Path, mode: Literal["ring", "shadow"]
) -> None:
    shelf, asked = filled(tmp_path, SMALL), Asked()

    def rewrite() -> None:
        for name, numel in reversed(SMALL.items()):
            shelf.write(name, values_of(name, numel, 1))

    with (
        PythonEngine(page_bytes=2**16, pages=4) as engine,
        AsyncCheckpointer(tmp_path / "run", mode=mode, engine=engine) as checkpointer,
    ):
        engine.hold(True)
        add_read_lock(asked)
        checkpointer.save(1, {"model": dict(parts(shelf))})
        writer = threading.Thread(target=rewrite)
        writer.start()
        assert asked.event.wait(patient(20))
        drop_read_lock(asked)
        engine.hold(False)
        writer.join()
        checkpointer.wait()
        checkpointer.save(2, {"model": dict(parts(shelf))})
    for number in (0, 1):
        found = load(tmp_path / "run", step=number + 1).values["model"]
        for name, numel in SMALL.items():
            assert torch.equal(found[name].view(-1), values_of(name, numel, number)), name


# --- at other numbers of ranks -------------------------------------------------------------------


def _share(world: World, shelf: Shelf, sizes: dict[str, int]) -> dict[str, Part]:
    """What a rank has of tensors whose elements are dealt out, as ZeRO does."""
    return {
        name: Part(shelf.tensors[name], (sizes[name],), _first(world, sizes[name]))
        for name in sizes
        if name in shelf.tensors
    }


def _first(world: World, numel: int) -> int:
    return world.rank * numel // world.size


def _own(world: World, sizes: dict[str, int]) -> dict[str, int]:
    after = World(world.rank + 1, world.size, 0, world.device)
    return {name: _first(after, numel) - _first(world, numel) for name, numel in sizes.items()}


def _save(world: World, folder: str) -> None:
    shelf = Shelf(Path(folder), {n: count for n, count in _own(world, SMALL).items() if count})
    for name, tensor in shelf.tensors.items():
        first = _first(world, SMALL[name])
        shelf.write(name, values_of(name, SMALL[name])[first : first + tensor.numel()])
    with AsyncCheckpointer(Path(folder) / "run") as checkpointer:
        checkpointer.save(1, {"model": _share(world, shelf, SMALL)})
        assert "on disk" in checkpointer.held


def _load(world: World, folder: str) -> None:
    shelf = Shelf(Path(folder), {n: count for n, count in _own(world, SMALL).items() if count})
    load(Path(folder) / "run", {"model": _share(world, shelf, SMALL)}, strict=False)
    for name, tensor in shelf.tensors.items():
        first = _first(world, SMALL[name])
        wanted = values_of(name, SMALL[name])[first : first + tensor.numel()]
        assert torch.equal(shelf.read(name), wanted), name


def test_state_on_disk_is_loaded_at_other_numbers_of_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save, 2, str(tmp_path))
    for ranks in (1, 3):
        pool.run(_load, ranks, str(tmp_path))


# --- the limit -----------------------------------------------------------------------------------


def test_copy_uses_shadow_within_limit_else_ring(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(3 * MIB)}}
    for limit, held in ((12 * MIB, "a shadow of 12 MiB"), (12 * MIB - 1, "a ring of 8 MiB")):
        with AsyncCheckpointer(tmp_path, memory_limit=limit) as checkpointer:
            checkpointer.save(limit, state)
        assert held in checkpointer.held
    with (
        AsyncCheckpointer(tmp_path, mode="shadow", memory_limit=8 * MIB) as checkpointer,
        pytest.raises(GulliverError, match=f"needs {12 * MIB} bytes .*mode='ring'"),
    ):
        checkpointer.save(1, state)
    for limit in (8 * MIB - 1, "lots", 1.5):
        with pytest.raises(GulliverError, match="memory_limit"):
            AsyncCheckpointer(tmp_path, memory_limit=limit)  # type: ignore[arg-type]


# --- memory that goes ----------------------------------------------------------------------------


class Memory(bytearray):
    """Memory that can be asked whether it is still there."""


def _tensor(numel: int) -> tuple[Tensor, weakref.ref[Memory]]:
    memory = Memory(4 * numel)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(numel), weakref.ref(memory)


def test_copied_memory_is_freed_while_writing_continues(tmp_path: Path) -> None:
    sizes = {"first": 20_000, "second": 2**20, "small": 2**19}
    made = {name: _tensor(numel) for name, numel in sizes.items()}
    first, state = made["first"][0], {name: tensor for name, (tensor, _) in made.items()}
    # A small view of something large is copied at once.
    state |= {"first": Part(first, (20_000,)), "small": state["small"][:8]}
    gone = {name: memory for name, (_, memory) in made.items()}
    with (
        PythonEngine(page_bytes=2**16, pages=4) as engine,
        AsyncCheckpointer(tmp_path, mode="ring", engine=engine) as checkpointer,
    ):
        engine.hold(True)
        with guarded([made["first"][0], made["second"][0]]):
            checkpointer.save(1, {"model": state})
        # Whoever evicts it asks, and then the snapshot has let go of it.
        before_write([first])
        del first, state, made
        gc.collect()
        left = [name for name, memory in gone.items() if memory() is not None]
        engine.hold(False)
        checkpointer.wait()
        assert left == ["second"]
        assert gone["second"]() is None
    found = load(tmp_path).values["model"]
    assert {name: float(value.min()) for name, value in found.items()} == sizes


# --- the memory manager --------------------------------------------------------------------------


def test_state_moved_during_save_is_saved_unchanged(tmp_path: Path) -> None:
    sizes = {f"o{n}": (60_000, 20_000, 100_000)[n % 3] for n in range(9)}
    store = DiskStore(tmp_path, 8 * MIB)
    manager = Manager(800_000, "cpu", store)
    objects = {
        name: manager.add(name, PARAMETERS, numel, torch.float32, torch.full((numel,), float(n)))
        for n, (name, numel) in enumerate(sizes.items())
    }

    def step(number: float) -> None:
        for n, placed in enumerate(objects.values()):
            with manager.using(placed, write=True) as tensor:
                tensor.fill_(n + number)
            assert manager.stats()["held"] <= manager.budget
        manager.end_step()

    step(0.0)
    asked = Asked()
    with (
        PythonEngine(page_bytes=2**16, pages=4) as engine,
        ThreadPoolExecutor(1) as trainer,
        AsyncCheckpointer(tmp_path / "run", engine=engine) as checkpointer,
    ):
        for number in (0, 1):
            engine.hold(True)
            add_read_lock(asked)
            views = {name: manager.view(placed) for name, placed in objects.items()}
            checkpointer.save(number, {"model": {n: Part(v, v.shape) for n, v in views.items()}})
            del views
            training = trainer.submit(step, number + 1.0)
            assert asked.event.wait(patient(20))
            drop_read_lock(asked)
            engine.hold(False)
            training.result()
            checkpointer.wait()
        assert "on disk" in checkpointer.held
    for number in (0, 1):
        found = load(tmp_path / "run", step=number).values["model"]
        for n, (name, numel) in enumerate(sizes.items()):
            assert torch.equal(found[name], torch.full((numel,), float(n + number))), name
    # Loaded through the mappings, and read by the manager.
    views = {name: manager.view(placed, write=True) for name, placed in objects.items()}
    load(tmp_path / "run", {"model": {n: Part(v, v.shape) for n, v in views.items()}}, step=0)
    del views
    for n, placed in enumerate(objects.values()):
        with manager.using(placed) as tensor:
            assert torch.equal(tensor, torch.full_like(tensor, float(n)))
    manager.close()


class Holder:
    """A read lock that keeps tensors until somebody asks for their memory."""

    def __init__(self, *tensors: Tensor) -> None:
        self.held = {storage_of(tensor): tensor for tensor in tensors}

    def release(self, storages: set[int] | None) -> None:
        for storage in storages or set(self.held):
            self.held.pop(storage, None)


def test_snapshot_memory_is_reclaimed_before_limit_error(
    tmp_path: Path,
) -> None:
    manager = Manager(800_000, "cpu", DiskStore(tmp_path, 8 * MIB))
    one, two = (manager.add(n, PARAMETERS, 150_000, torch.float32) for n in ("one", "two"))
    other = manager.add("other", PARAMETERS, 120_000, torch.float32)
    with manager.using(one, write=True) as tensor:
        tensor.fill_(1.0)
    add_read_lock(holder := Holder(manager.view(one)))
    del tensor
    try:
        with manager.using(other, write=True):  # the memory of the first is of another size
            assert not holder.held
    finally:
        drop_read_lock(holder)
    for placed, value in ((one, 1.0), (two, 0.0)):
        with manager.using(placed) as tensor:
            assert torch.equal(tensor, torch.full_like(tensor, value))
        del tensor
    manager.close()
