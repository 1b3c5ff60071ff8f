"""The memory manager against a plain dict: whatever is done, contents stay bit for bit."""

from __future__ import annotations

import errno
import gc
import os
import random
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import IoError, default_engine
from gulliver.memory.budget import ProcessGauge
from gulliver.memory.buffers import GRADIENTS, KINDS, OPTIMIZER_STATE, PARAMETERS
from gulliver.memory.host import HostStore
from gulliver.memory.manager import Manager
from gulliver.memory.pending import add_read_lock, drop_read_lock, storage_of
from gulliver.memory.stores import RESIDENT, DiskStore, ManagedTensor, Pages, Residency
from gulliver.memory.traffic import end_workers
from gulliver.solve import Event
from tests.memory.test_memory_stores import LateCopier
from tests.solve.moves import simulate

PAGE = 4096
SIZES = (1, 1000, 1024, 1025, 3000, 5000)
"""Elements of the objects in random programs."""

OPERATIONS = st.tuples(
    st.sampled_from(
        (
            "read",
            "write",
            "fresh",
            "hold",
            "drop",
            "discard",
            "lend",
            "give",
            "budget",
            "view",
            "step",
        )
    ),
    st.integers(0, 5),
    st.integers(0, 2**16),
)


class Twin:
    """What a manager does, without one: a dict of tensors."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.objects = []
        self.contents: list[Tensor] = []
        self.pins: list[int] = []
        self.lent: list[tuple[Tensor, Tensor, str]] = []

    def add(self, numel: int, value: Tensor | None) -> None:
        kind = KINDS[len(self.objects) % 3]
        name = f"object {len(self.objects)}"
        self.objects.append(self.manager.add(name, kind, numel, torch.float32, value))
        self.contents.append(torch.zeros(numel) if value is None else value.clone())
        self.pins.append(0)

    def do(self, what: str, index: int, value: int) -> None:
        manager, managed = self.manager, self.objects[index]
        if what in ("read", "write", "fresh", "hold"):
            tensor = manager.use(managed, write=what in ("write", "hold"), fresh=what == "fresh")
            if what != "fresh":
                assert torch.equal(tensor, self.contents[index])
            if what != "read":
                tensor.copy_(torch.arange(tensor.numel()) + float(value))
                self.contents[index].copy_(tensor)
            if what == "hold":
                self.pins[index] += 1
            else:
                manager.done(managed)
        elif what == "drop" and self.pins[index]:
            self.pins[index] -= 1
            manager.done(managed)
        elif what == "discard" and not self.pins[index]:
            manager.discard(managed)
            self.contents[index].zero_()
        elif what == "lend":
            buffer = manager.allocate_buffer(SIZES[index], torch.float32, GRADIENTS)
            buffer.fill_(value)
            self.lent.append((buffer, buffer.clone(), GRADIENTS))
        elif what == "give" and self.lent:
            buffer, content, kind = self.lent.pop(value % len(self.lent))
            assert torch.equal(buffer, content)
            manager.free_buffer(buffer, kind)
        elif what == "budget":
            manager.set_budget(PAGE * (4 + value % 16))
        elif what == "view":
            assert torch.equal(manager.view(managed), self.contents[index])
        elif what == "step":
            manager.end_step()

    def check(self) -> None:
        """The counter is the sum of the tensors that exist; nothing is beyond the budget."""
        held = dict.fromkeys(KINDS, 0)
        for managed in self.objects:
            if managed.residency in RESIDENT:
                held[managed.kind] += managed.nbytes
        for buffer, content, kind in self.lent:
            assert torch.equal(buffer, content)
            held[kind] += buffer.nbytes
        assert self.manager.counter.live == held
        assert self.manager.held <= self.manager.budget

    def release(self) -> None:
        for buffer, _, kind in self.lent:
            self.manager.free_buffer(buffer, kind)
        self.lent.clear()

    def finish(self) -> None:
        for index, managed in enumerate(self.objects):
            with self.manager.using(managed) as tensor:
                assert torch.equal(tensor, self.contents[index])


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 14), st.booleans())
def test_manager_contents_equal_dict_after_any_program(program, pages, late):
    """On disk, and on a device whose copies end as late as they may."""
    with tempfile.TemporaryDirectory() as folder:
        store = HostStore(2**20, copier=LateCopier()) if late else DiskStore(folder, 2**20)
        manager = Manager(PAGE * pages, "cpu", store)
        twin = Twin(manager)
        try:
            for index, numel in enumerate(SIZES):
                value = torch.randn(numel) if index % 2 else None
                try:
                    twin.add(numel, value)
                except GulliverError:
                    twin.add(numel, None)
            for what, index, value in program:
                with suppress(GulliverError):  # too small a budget: nothing may have changed
                    twin.do(what, index, value)
                twin.check()
            twin.release()
            manager.set_budget(2**19)
            twin.finish()
        finally:
            manager.close()


def test_more_than_the_budget_is_trained_through_it(tmp_path: Path):
    manager = Manager(8 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = [
        manager.add(f"o{n}", OPTIMIZER_STATE, 1024, torch.float32, torch.full((1024,), float(n)))
        for n in range(20)
    ]
    for _ in range(3):
        for managed in objects:
            with manager.using(managed, write=True) as tensor:
                tensor += 1
        manager.end_step()
    for n, managed in enumerate(objects):
        assert torch.equal(manager.view(managed), torch.full((1024,), n + 3.0))
    manager.close()
    assert os.listdir(tmp_path) == []


def filled(manager: Manager, count: int) -> list[ManagedTensor]:
    """Objects of a page each, with their number as content."""
    contents = [torch.full((1024,), float(n)) for n in range(count)]
    return [
        manager.add(f"o{n}", KINDS[n % 3], 1024, torch.float32, content)
        for n, content in enumerate(contents)
    ]


def test_traffic_matches_simulation(tmp_path: Path):
    for seed in range(4):
        chosen = random.Random(seed)
        sizes = {n: chosen.randint(1, 4) * PAGE for n in range(8)}
        steps, at_random = [], [chosen.randrange(8) for _ in range(14)]
        for _ in range(4):
            events = []
            for n in at_random if chosen.random() < 0.7 else at_random[4:]:
                write = n % 2 == 0
                events += [Event("use", n, write), Event("lend", PAGE), Event("done", n)]
                events.append(Event("give", PAGE))
            steps.append(events)
        manager = Manager(9 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
        objects = [
            manager.add(str(n), PARAMETERS, size // 4, torch.float32, torch.zeros(size // 4))
            for n, size in sizes.items()
        ]
        expected = [0, 0, 0, 0]
        for events, moved in zip(steps, simulate(steps, sizes, 9 * PAGE), strict=True):
            lent = []
            for event in events:
                if event.what == "use":
                    manager.use(objects[event.key], event.write)
                elif event.what == "done":
                    manager.done(objects[event.key])
                elif event.what == "lend":
                    lent.append(manager.allocate_buffer(1024, torch.float32, GRADIENTS))
                else:
                    manager.free_buffer(lent.pop(), GRADIENTS)
            manager.end_step()
            for n, more in enumerate((moved.loads, moved.writes, moved.bytes_in, moved.bytes_out)):
                expected[n] += more
        while any(managed.residency is Residency.QUEUED for managed in objects):
            time.sleep(0.001)
        found = manager.stats()
        assert [found[k] for k in ("loads", "writes", "bytes_in", "bytes_out")] == expected
        manager.close()


def test_reads_run_ahead_and_writes_behind(tmp_path: Path, request):
    """With a disk that hangs during every use, nothing ever waits for it."""
    engine = default_engine(page_bytes=PAGE, pages=1)
    request.addfinalizer(lambda: engine.hold(False))
    manager = Manager(8 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
    objects, under_way = filled(manager, 16), 0
    for step in range(4):
        for managed in objects:
            while step > 2 and any(o.residency is Residency.QUEUED or not o.done for o in objects):
                time.sleep(0.001)
            engine.hold(step > 2)
            manager.use(managed, write=True).add_(1)
            manager.done(managed)
            under_way += bool(step > 2 and engine.counters.pending)
            assert manager.held <= manager.budget
            engine.hold(False)
        manager.end_step()
    assert under_way >= 8
    for n, managed in enumerate(objects):
        assert torch.equal(manager.view(managed), torch.full((1024,), n + 4.0))
    manager.close()
    engine.close()


def test_memory_is_reused_only_without_live_views(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    first = manager.allocate_buffer(1024, torch.float32, GRADIENTS).fill_(1)
    address = first.data_ptr()
    view = first[:10]
    manager.free_buffer(first, GRADIENTS)
    del first
    second = manager.allocate_buffer(1024, torch.float32, GRADIENTS).fill_(2)
    assert second.data_ptr() != address
    assert torch.equal(view, torch.ones(10))
    with pytest.raises(GulliverError, match=rf"views .* at least {3 * PAGE}"):
        manager.allocate_buffer(1024, torch.float32, GRADIENTS)
    del view
    assert manager.allocate_buffer(1024, torch.float32, GRADIENTS).data_ptr() == address
    manager.close()


def test_freed_pages_are_reused_for_loads(tmp_path: Path, monkeypatch):
    manager = Manager(1000 * PAGE, "cpu", DiskStore(tmp_path, 2**25))
    sizes = (300, 420, 350, 410)
    objects = [
        manager.add(
            f"o{n}", PARAMETERS, 1024 * pages, torch.float32, torch.full((1024 * pages,), n)
        )
        for n, pages in enumerate(sizes)
    ]
    made, fresh = [], Pages.fresh
    monkeypatch.setattr(Pages, "fresh", lambda self, size: made.append(size) or fresh(self, size))
    for turn in range(6):
        made *= turn > 1
        for n, managed in enumerate(objects):
            with manager.using(managed, write=True) as tensor:
                assert torch.equal(tensor, torch.full_like(tensor, n + turn))
                tensor.add_(1)
            assert manager.held <= manager.budget
        manager.end_step()
    moved = manager.stats()["bytes_in"]
    assert moved > 4 * sum(sizes) * PAGE
    assert sum(made) < moved // 4
    manager.close()


def test_a_buffer_that_shrinks_gives_its_pages_back_at_once():
    mib, gauge, pages = 1 << 20, ProcessGauge(), Pages(torch.device("cpu"))
    memory = pages.fresh(64 * mib).fill_(1)
    view, before = memory[:8], gauge.used()
    memory = pages.resized(memory, 16 * mib + PAGE)
    assert abs(before - gauge.used() - 48 * mib) < 4 * mib
    memory = pages.resized(memory, 40 * mib)
    assert memory.sum(dtype=torch.int64) == 16 * mib + PAGE
    assert pages.fits(memory, 64 * mib)
    assert not pages.fits(memory, 65 * mib)
    memory.fill_(2)
    pages.drop(memory)
    assert abs(before - gauge.used() - 64 * mib) < 4 * mib
    assert view.sum() == 0, "its memory is gone, whoever looks"
    gauge.close()


def errors_of_use(manager: Manager, objects: list[ManagedTensor], steps: int) -> int:
    """Uses objects of `filled`, again after errors; checks contents, counts errors."""
    raised = 0
    for _ in range(steps):
        for n, managed in enumerate(objects):
            for _ in range(8):
                try:
                    tensor = manager.use(managed, write=True)
                    break
                except IoError:
                    raised += 1
            assert torch.equal(tensor, torch.full((1024,), float(n)))
            manager.done(managed)
        manager.end_step()
    return raised


@pytest.mark.parametrize("call", ["write", "read"])
def test_disk_error_is_raised_at_next_use_without_loss(tmp_path: Path, call):
    for times in (1, 3):
        engine = default_engine(page_bytes=PAGE, pages=1)
        manager = Manager(3 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
        objects = filled(manager, 7)
        for managed in objects:
            manager.view(managed)
        engine.inject(call, errno=errno.EIO, times=times)
        assert 1 <= errors_of_use(manager, objects, steps=2) <= times
        assert manager.held <= manager.budget
        manager.close()
        engine.close()


def told(manager: Manager, objects: list[ManagedTensor]) -> weakref.ref[torch.Tensor]:
    """A tensor of whoever was told of an error, and caught it."""
    mine = torch.ones(8)
    for _ in range(4):
        for managed in objects:
            try:
                with manager.using(managed, write=True):
                    pass
            except IoError:
                return weakref.ref(mine)
    raise AssertionError("nothing was told")


@pytest.mark.parametrize("call", ["write", "read"])
def test_caught_error_keeps_no_caller_tensors(tmp_path: Path, call):
    engine = default_engine(page_bytes=PAGE, pages=1)
    manager = Manager(3 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
    objects = filled(manager, 7)
    engine.inject(call, errno=errno.EIO, times=1)
    gc.collect()
    gc.disable()
    try:
        assert told(manager, objects)() is None
    finally:
        gc.enable()
    manager.close()
    engine.close()


def test_a_full_disk_says_what_is_needed(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 4 * PAGE))
    objects = filled(manager, 6)
    with pytest.raises(GulliverError, match=rf"o6 does not fit: .* {7 * PAGE} .* {PAGE} bytes"):
        manager.add("o6", PARAMETERS, 1024, torch.float32)
    # All that both hold is in use: nothing can change places. It is said, and nothing is lost.
    for _ in range(2):
        with pytest.raises(GulliverError, match=rf"disk store .* is full: {PAGE} "):
            manager.use(objects[0], write=True)
    manager.set_budget(3 * PAGE)
    for n, managed in enumerate(objects):
        assert torch.equal(manager.view(managed), torch.full((1024,), float(n)))
    manager.close()


def fail(manager: Manager, managed: ManagedTensor) -> None:
    with manager.using(managed, write=True) as tensor:
        tensor.add_(1)
        tensor.add_(1 / (tensor.numel() - 1024))


def test_an_exception_inside_a_use_leaves_the_object_free_to_leave(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    one, two, three = filled(manager, 3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail(manager, one)
    for managed in (two, three, two):
        with manager.using(managed):
            pass
    assert one.tensor is None
    assert torch.equal(manager.view(one), torch.full((1024,), 3.0))
    manager.close()


def test_closing_waits_for_writes_and_two_managers_share_a_folder(tmp_path: Path):
    engine = default_engine(page_bytes=PAGE, pages=1)
    slow = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
    other = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    mine, theirs = filled(slow, 6), filled(other, 6)
    for manager, objects, more in ((slow, mine, 1), (other, theirs, 2)):
        for managed in objects:
            with manager.using(managed, write=True) as tensor:
                tensor.add_(more)
    slow.close()
    slow_again = pytest.raises(GulliverError, match="closed")
    with slow_again:
        slow.use(mine[0])
    assert engine.counters.pending == 0
    for n, managed in enumerate(theirs):
        assert torch.equal(other.view(managed), torch.full((1024,), n + 2.0))
    other.close()
    engine.close()
    assert os.listdir(tmp_path) == []


def test_unclosed_manager_does_not_write_freed_memory(tmp_path: Path):
    engine = default_engine(page_bytes=PAGE, pages=1)
    manager = Manager(4 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
    objects = filled(manager, 8)
    engine.hold(True)
    with pytest.raises(TimeoutError):
        engine.sync(manager.store._opened.target).wait(0)  # type: ignore[union-attr]
    threading.Timer(0.05, engine.hold, (False,)).start()
    del manager, objects
    gc.collect()
    assert os.listdir(tmp_path) == []
    engine.close()


def test_closing_engine_reads_nothing_at_exit(tmp_path: Path, monkeypatch):
    engine, raised = default_engine(page_bytes=PAGE, pages=1), list[object]()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    manager = Manager(4 * PAGE, "cpu", DiskStore(tmp_path, 2**20, engine))
    objects, workers = filled(manager, 12), list[threading.Thread]()
    for managed in objects * 5:
        while any(o.residency is Residency.QUEUED or not o.done for o in objects):
            time.sleep(0.001)
        engine.hold(manager.stats()["steps"] > 2)
        with manager.using(managed, write=True) as tensor:
            tensor.add_(1)
        workers = [t for t in threading.enumerate() if t.name == "gulliver-memory"]
        if engine.counters.pending and workers:
            break
        engine.hold(False)
        if managed is objects[-1]:
            manager.end_step()
    assert workers, "a read waits for the memory of a write that has not ended"
    end_workers()  # in the order of the interpreter's exit
    engine.hold(False)
    engine.close()
    for worker in workers:
        worker.join()
    assert not raised


def test_a_forked_child_is_refused(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = filled(manager, 4)
    child = os.fork()
    if not child:
        try:
            manager.use(objects[0])
        except GulliverError as error:
            os._exit(0 if "after forking" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for n, managed in enumerate(objects):
        with manager.using(managed) as tensor:
            assert torch.equal(tensor, torch.full((1024,), float(n)))
    manager.close()


def test_a_snapshot_is_asked_before_its_memory_is_used_again(tmp_path: Path):
    class Snapshot:
        def __init__(self) -> None:
            self.asked: set[int] = set()

        def release(self, storages: set[int] | None) -> None:
            self.asked |= storages or set()

    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = filled(manager, 4)
    shown = {n: manager.view(managed) for n, managed in enumerate(objects)}
    places = {n: storage_of(tensor) for n, tensor in shown.items()}
    snapshot = Snapshot()
    add_read_lock(snapshot)
    try:
        for managed in objects:
            with manager.using(managed, write=True) as tensor:
                tensor.add_(1)
    finally:
        drop_read_lock(snapshot)
    assert set(places.values()) <= snapshot.asked
    manager.close()


def test_exposed_object_is_not_evicted_by_earlier_decision(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = filled(manager, 4)
    for turn in range(50):
        for managed in objects[:2]:
            with manager.using(managed, write=True) as tensor:
                tensor.copy_(torch.full((1024,), 10.0 * turn + managed.number))
        # Both leave now, and a thread lets others take their memory as soon as they are written.
        wanted = [(managed, manager.begin_use(managed)) for managed in objects[2:]]
        shown = [manager.view(managed) for managed in objects[:2]]
        for managed, stored in wanted:
            manager.arrive(managed, stored, write=False)
        found = [tensor.clone() for tensor in shown]
        for managed in objects[2:]:
            manager.done(managed)
        for managed, tensor in zip(objects[:2], found, strict=True):
            assert torch.equal(tensor, torch.full((1024,), 10.0 * turn + managed.number)), turn
    manager.close()


def test_exposed_object_can_be_filled_in_any_tier(tmp_path: Path):
    manager = Manager(2 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    objects = [*filled(manager, 4), manager.add("empty", OPTIMIZER_STATE, 1024, torch.float32)]
    held = manager.held
    for n, managed in enumerate(objects):
        manager.view(managed, write=True).fill_(10.0 + n)
    assert manager.held == held
    for n, managed in enumerate(objects):
        with manager.using(managed) as tensor:
            assert torch.equal(tensor, torch.full((1024,), 10.0 + n))
    manager.close()


def test_without_store_everything_stays_or_raises():
    manager = Manager(2 * PAGE, "cpu", None)
    filled(manager, 2)
    with pytest.raises(GulliverError, match=rf"no disk or host memory .* at least {3 * PAGE}"):
        filled(manager, 1)
    manager.close()


def test_too_small_a_budget_names_the_least(tmp_path: Path):
    manager = Manager(3 * PAGE, "cpu", DiskStore(tmp_path, 2**20))
    a = manager.add("a", PARAMETERS, 2048, torch.float32)
    b = manager.add("weights of layer 3", PARAMETERS, 2048, torch.float32)
    manager.use(a)
    with pytest.raises(GulliverError, match=rf"weights of layer 3 .*at least {4 * PAGE}"):
        manager.use(b)
    manager.set_budget(4 * PAGE)
    manager.use(b)
    manager.close()
