"""What lies behind the fast tier: a file without a name, or pinned memory."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import IoError, default_engine
from gulliver.io.python_engine import PythonEngine
from gulliver.memory.host import HostStore
from gulliver.memory.stores import DiskStore, page_aligned
from gulliver.solve.extents import Extents

PAGE = 4096


class LateCopier:
    """Copies when it is waited for, or at the very end: as late as a stream could."""

    def __init__(self) -> None:
        self.waiting: list[LateCopy] = []
        self.locked: dict[int, int] = {}
        self.lock = threading.RLock()

    def lock_pages(self, memory: Tensor) -> None:
        assert memory.data_ptr() not in self.locked
        self.locked[memory.data_ptr()] = memory.numel()

    def unlock_pages(self, memory: Tensor) -> None:
        del self.locked[memory.data_ptr()]

    def mark(self) -> None:
        return None

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, incoming: bool, after: None = None) -> LateCopy:
        copy = LateCopy(self, target, source)
        self.waiting.append(copy)
        return copy

    def synchronize(self) -> None:
        while self.waiting:
            self.waiting[0].wait()


class LateCopy:
    def __init__(self, copier: LateCopier, target: Tensor, source: Tensor) -> None:
        self.copier, self.done = copier, False
        self.memory: tuple[Tensor, Tensor] | None = (target, source)

    def wait(self) -> None:
        with self.copier.lock:
            if self.memory is not None:
                self.memory[0].copy_(self.memory[1])
                self.memory, self.done = None, True
                self.copier.waiting.remove(self)

    synchronize = wait


def pages(count: int, value: int) -> Tensor:
    return page_aligned(count * PAGE).fill_(value)


def shared_memory() -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("RssShmem"))


def test_a_forked_process_shares_no_memory_and_copies_none(tmp_path: Path):
    # Large enough for huge pages, which have to begin on a page all the same.
    shared = shared_memory()
    mine = pages(1024, 3)
    assert mine.data_ptr() % PAGE == 0
    child = os.fork()
    if child == 0:
        wiped = not mine.any()
        mine.fill_(7)
        os._exit(0 if wiped and mine[-1] == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((mine == 3).all())
    assert shared_memory() == shared, "a gauge of the process counts private memory only"


def test_store_round_trips_in_anonymous_file(tmp_path: Path):
    store = DiskStore(tmp_path, 64 * PAGE)
    assert os.listdir(tmp_path) == []
    one, two = store.allocate(3 * PAGE), store.allocate(2 * PAGE - 5)
    assert store.used == 5 * PAGE
    store.write(one, pages(3, 1)).wait()
    store.write(two, pages(2, 2)).wait()
    into = pages(3, 0)
    store.read(one, into).wait()
    assert torch.equal(into, pages(3, 1))
    shown = store.mapped(two, 2 * PAGE)
    assert torch.equal(shown, pages(2, 2))
    shown.fill_(7)
    store.read(two, into[: 2 * PAGE]).wait()
    assert torch.equal(into, torch.cat((pages(2, 7), pages(1, 1))))
    store.free(one, 3 * PAGE)
    assert store.used == 2 * PAGE
    assert store.allocate(3 * PAGE) == one
    store.close()


def test_the_disk_is_gone_past_the_page_cache(tmp_path: Path):
    engine = default_engine(page_bytes=PAGE, pages=1)
    store = DiskStore(tmp_path, 64 * PAGE, engine)
    before = engine.counters
    store.write(store.allocate(8 * PAGE), pages(8, 1)).wait()
    moved = engine.counters
    assert moved.written - before.written == 8 * PAGE
    if store.direct:
        assert moved.direct - before.direct == 8 * PAGE
    store.close()
    engine.close()


def test_missing_direct_io_is_logged(tmp_path: Path, caplog):
    engine = PythonEngine(page_bytes=PAGE, pages=1)
    with caplog.at_level(logging.WARNING, "gulliver"):
        store = DiskStore(tmp_path, 16 * PAGE, engine)
    assert not store.direct
    assert "page cache" in caplog.text
    store.close()
    engine.close()


def test_bad_disks_are_refused_in_one_line(tmp_path: Path, monkeypatch):
    with pytest.raises(GulliverError, match="does not exist"):
        DiskStore(tmp_path / "gone", PAGE)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(GulliverError, match="is not a folder"):
        DiskStore(file, PAGE)
    with pytest.raises(GulliverError, match=r"needs .* free"):
        DiskStore(tmp_path, 2**60)
    with pytest.raises(GulliverError, match="less than a page of 4096 bytes"):
        DiskStore(tmp_path, 100)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs4 rw 0 0\n")
    monkeypatch.setattr("gulliver.memory.stores.MOUNTS", str(mounts))
    with pytest.raises(GulliverError, match=r"network mount \(nfs4\)"):
        DiskStore(tmp_path, PAGE)


def test_a_disk_that_is_full_or_broken_says_so_and_leaves_nothing(tmp_path: Path):
    for call, number, text in (
        ("fallocate", errno.ENOSPC, "No space left"),
        ("write", errno.EIO, "Input/output error"),
    ):
        engine = PythonEngine(page_bytes=PAGE, pages=1)
        engine.inject(call, errno=number)  # type: ignore[arg-type]
        with pytest.raises(IoError, match=text):
            DiskStore(tmp_path, 16 * PAGE, engine)
        assert os.listdir(tmp_path) == []
        engine.close()
    store = DiskStore(tmp_path, 4 * PAGE)
    store.allocate(3 * PAGE)
    with pytest.raises(GulliverError, match=f"full: {2 * PAGE} .* {PAGE} of {4 * PAGE}"):
        store.allocate(2 * PAGE)
    store.close()


def test_pieces_fill_the_store_to_capacity(tmp_path: Path):
    draw = random.Random(0)
    sizes = [PAGE * draw.randint(1, 9) for _ in range(40)]
    store, placed = DiskStore(tmp_path, sum(sizes)), dict[int, int]()
    for _ in range(2000):
        number = draw.randrange(len(sizes))
        if number in placed:
            store.free(placed.pop(number), sizes[number])
        else:
            placed[number] = store.allocate(sizes[number])
        spans = sorted((begin, begin + sizes[n]) for n, begin in placed.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for number, offset in placed.items():
        store.free(offset, sizes[number])
    assert store.allocate(store.capacity) == 0  # in one piece again
    store.close()


def test_memory_of_a_transfer_lives_until_it_has_ended(tmp_path: Path):
    engine = default_engine(page_bytes=PAGE, pages=1)
    store = DiskStore(tmp_path, 64 * PAGE, engine)
    engine.hold(True)
    store.write(0, pages(32, 3))  # nobody keeps the memory, nor the transfer
    others = [pages(32, 4) for _ in range(3)]
    engine.hold(False)
    into = pages(32, 0)
    engine.sync(store._opened.target).wait()
    store.read(0, into).wait()
    assert torch.equal(into, pages(32, 3))
    del others
    store.close()
    engine.close()


def test_pinned_memory_comes_in_slabs_of_powers_of_two_which_are_counted():
    store = HostStore(11 * PAGE, copier=LateCopier())
    one = store.allocate(3 * PAGE)  # a slab of 8 pages
    assert (store.used, store.pinned) == (3 * PAGE, 8 * PAGE)
    assert store.allocate(5 * PAGE) == one + 3 * PAGE
    assert store.pinned == 8 * PAGE
    assert store.allocate(2 * PAGE) == 8 * PAGE
    assert store.pinned == 10 * PAGE
    with pytest.raises(GulliverError, match=f"powers of two and needs {4 * PAGE} bytes"):
        store.allocate(3 * PAGE)
    store.free(one, 3 * PAGE)
    assert store.allocate(3 * PAGE) == one
    store.close()


def test_pinned_memory_is_for_gpus():
    with pytest.raises(GulliverError, match=r"needs a GPU, not cpu"):
        HostStore(PAGE, "cpu")


@pytest.mark.gpu
def test_copies_of_a_gpu_are_ordered_by_streams():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    store = HostStore(2**26, "cuda")
    offset = store.allocate(2**24)
    data = torch.ones(2**24, dtype=torch.uint8, device="cuda")
    for value in range(5):
        data.fill_(value)
        store.write(offset, data).wait()
        data.fill_(99)
        store.read(offset, data).wait()
        assert int(data.min()) == int(data.max()) == value
    assert torch.equal(store.mapped(offset, 2**24), data.cpu())
    store.close()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(0, 2**16)), max_size=120),
)
def test_extents_allocate_like_cell_model(slabs: list[int], moves: list[tuple[bool, int]]) -> None:
    extents, cells = Extents(), {n: [False] * size for n, size in enumerate(slabs)}
    for number, size in enumerate(slabs):
        extents.add(number, size)
    living: list[tuple[int, int, int]] = []

    def holes() -> list[tuple[int, int, int]]:
        found = []
        for number, row in cells.items():
            start = None
            for place, taken in enumerate([*row, True]):
                if not taken and start is None:
                    start = place
                if taken and start is not None:
                    found.append((place - start, number, start))
                    start = None
        return sorted(found)

    for gives, draw in moves:
        if gives and living:
            slab, start, size = living.pop(draw % len(living))
            extents.give(slab, start, size)
            cells[slab][start : start + size] = [False] * size
        else:
            size = draw % 12 + 1
            best = next((hole for hole in holes() if hole[0] >= size), None)
            found = extents.take(size)
            assert found == (None if best is None else best[1:])
            if found is not None:
                slab, start = found
                assert not any(cells[slab][start : start + size])
                cells[slab][start : start + size] = [True] * size
                living.append((slab, start, size))
    for block in living:
        extents.give(*block)
    assert all(extents.take(size) is not None for size in sorted(slabs, reverse=True))
