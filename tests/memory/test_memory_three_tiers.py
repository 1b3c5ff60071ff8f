"""Three tiers, a device, page-locked host memory and a disk: plain tensors on a CPU for each."""

from __future__ import annotations

import errno
import random
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.io import default_engine
from gulliver.memory.buffers import GRADIENTS, KINDS, PARAMETERS
from gulliver.memory.host import HostDiskStore
from gulliver.memory.manager import Manager
from gulliver.memory.stores import RESIDENT, DiskStore, Residency
from gulliver.solve import Event
from gulliver.solve.replacement import Action, MiddleReplacement, Replacement
from tests.memory.test_memory_manager import OPERATIONS, PAGE, SIZES, Twin, errors_of_use, filled
from tests.memory.test_memory_stores import LateCopier
from tests.solve.moves import Moved, count_moves


def three_tiers(
    folder: str | Path, device: int, host: int, disk: int = 256
) -> tuple[Manager, HostDiskStore, DiskStore]:
    """A manager, and what lies behind it, with sizes in pages; copies end as late as they may."""
    behind = DiskStore(folder, disk * PAGE)
    store = HostDiskStore(host * PAGE, behind, copier=LateCopier())
    return Manager(device * PAGE, "cpu", store), store, behind


def check_host(store: HostDiskStore, disk: DiskStore) -> None:
    """The host's memory is counted to the byte, and so is the disk."""
    objects = [*store.host._placed.values()]
    held = sum(managed.size for managed in objects if managed.residency in RESIDENT)
    assert sum(store.host.counter.live.values()) == held
    assert held <= store.host.held <= store.host.budget
    assert disk.used == sum(managed.size for managed in objects if managed.offset is not None)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(OPERATIONS, max_size=60), st.integers(4, 14), st.integers(6, 14), st.booleans())
def test_manager_contents_equal_dict_after_any_program(program, pages, host, small):
    disk = 24 - host if small else 256  # what does not fit there stays in the host's memory
    with tempfile.TemporaryDirectory() as folder:
        manager, store, behind = three_tiers(folder, pages, host, disk)
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
                check_host(store, behind)
            twin.release()
            manager.set_budget(2**19)
            twin.finish()
        finally:
            manager.close()
        assert not store._copier.locked, "all pages are unlocked"  # type: ignore[attr-defined]


def programs(seed: int) -> tuple[dict[int, int], list[list[Event]]]:
    """Sizes of some objects, and steps that use them much, but not quite, in the same order."""
    chosen = random.Random(seed)
    sizes = {n: chosen.randint(1, 4) * PAGE for n in range(14)}
    order, steps = [chosen.randrange(14) for _ in range(24)], list[list[Event]]()
    for _ in range(5):
        events = list[Event]()
        for n in order if chosen.random() < 0.7 else order[6:]:
            events += [Event("use", n, n % 2 == 0), Event("lend", PAGE), Event("done", n)]
            events += [Event("give", PAGE)]
            events += [Event("discard", n)] if n == 5 else []
        steps.append(events)
    return sizes, steps


def simulated(
    sizes: dict[int, int], steps: list[list[Event]], device: int, host: int, disk: int
) -> list[tuple[Moved, Moved]]:
    """Moves of each step before and behind the host's memory, by decisions alone."""
    behind, found = list[Action](), list[tuple[Moved, Moved]]()
    core = Replacement(device * PAGE)
    middle = MiddleReplacement(host * PAGE, disk * PAGE, behind.extend)
    moved = list[Action]()

    def run(actions: Iterable[Action]) -> None:
        for action in actions:
            moved.append(action)
            middle.follow(action, sizes[action.key])  # type: ignore[index]

    for n, size in sizes.items():
        run(core.add(n, str(n), size, True))
    for events in steps:
        for what, key, write, fresh in events:
            match what:
                case "use":
                    run(core.use(key, write, fresh))
                    middle.used(key, write or fresh)
                case "done":
                    run(core.done(key))
                case "discard":
                    run(core.discard(key))
                case "lend":
                    run(core.allocate_buffer(PAGE, "a buffer"))
                case _:
                    run(core.free_buffer(PAGE))
        core.end_step()
        middle.core.end_step()
        found.append((count_moves(moved, sizes), count_moves(behind, sizes)))
        moved.clear()
        behind.clear()
    return found


@pytest.mark.parametrize(("host", "disk"), [(9, 64), (26, 20), (48, 64)])
def test_three_tier_traffic_matches_simulation(
    tmp_path: Path, host: int, disk: int, full: bool
) -> None:
    for seed in range(2 if full else 1):
        sizes, steps = programs(seed)
        manager, store, behind = three_tiers(tmp_path, 9, host, disk)
        objects = [
            manager.add(str(n), PARAMETERS, size // 4, torch.float32, torch.full((size // 4,), n))
            for n, size in sizes.items()
        ]
        contents = {n: float(n) for n in sizes}
        expected = [[0] * 4, [0] * 4]
        for events, both in zip(steps, simulated(sizes, steps, 9, host, disk), strict=True):
            lent = []
            for what, key, write, _ in events:
                if what == "use":
                    tensor = manager.use(objects[key], write)
                    assert torch.equal(tensor, torch.full_like(tensor, contents[key]))
                    contents[key] += write
                    tensor += write
                elif what == "done":
                    manager.done(objects[key])
                elif what == "discard":
                    manager.discard(objects[key])
                    contents[key] = 0.0
                elif what == "lend":
                    lent.append(manager.allocate_buffer(1024, torch.float32, GRADIENTS))
                else:
                    manager.free_buffer(lent.pop(), GRADIENTS)
                check_host(store, behind)
            manager.end_step()
            for counts, moved in zip(expected, both, strict=True):
                for n, more in enumerate(
                    (moved.loads, moved.writes, moved.bytes_in, moved.bytes_out)
                ):
                    counts[n] += more
        waiting = [*objects, *store.host._placed.values()]
        while any(managed.residency is Residency.QUEUED for managed in waiting):
            store.raise_write_error()
            time.sleep(0.001)
        stats = manager.stats()
        for counts, tier in zip(expected, (stats, stats["behind"]), strict=True):
            # What is decided while an object still leaves may be over before it can begin.
            found = tier["loads"] + tier["cancelled"], tier["writes"]
            found += tier["bytes_in"] + tier["bytes_cancelled"], tier["bytes_out"]
            assert [*found] == counts
        if host == 48:
            assert 8 * expected[1][2] < expected[0][2], "all of it fits the host's memory"
        elif host == 9:
            assert expected[1][2] > 0
        if disk == 20:
            assert behind.used <= 20 * PAGE
        manager.close()


def test_the_disk_is_read_into_the_host_ahead_of_use(tmp_path: Path, request) -> None:
    """With a disk that hangs while something is used, nothing waits for it in the end."""
    engine = default_engine(page_bytes=PAGE, pages=1)
    request.addfinalizer(lambda: engine.hold(False))
    store = HostDiskStore(10 * PAGE, DiskStore(tmp_path, 2**20, engine), copier=LateCopier())
    manager = Manager(4 * PAGE, "cpu", store)
    objects, before = filled(manager, 20), 0
    for step in range(5):
        for managed in objects:
            while step > 3 and any(
                o.residency is Residency.QUEUED or not o.done for o in store.host._placed.values()
            ):
                store.raise_write_error()
                for late in [*store._copier.waiting]:  # type: ignore[attr-defined]
                    late.wait()
                time.sleep(0.001)
            engine.hold(step > 3)
            with manager.using(managed, write=True) as tensor:
                tensor.add_(1)
            engine.hold(False)
        before = before or (step == 3) * store.host.stats()["bytes_in"]
        manager.end_step()
    assert store.host.stats()["bytes_in"] > before > 0
    for n, managed in enumerate(objects):
        assert torch.equal(manager.view(managed), torch.full((1024,), n + 5.0))
    manager.close()
    engine.close()


@pytest.mark.parametrize("call", ["write", "read"])
def test_disk_error_is_raised_without_loss(tmp_path: Path, call) -> None:
    for times in (1, 3):
        engine = default_engine(page_bytes=PAGE, pages=1)
        store = HostDiskStore(3 * PAGE, DiskStore(tmp_path, 2**20, engine), copier=LateCopier())
        manager = Manager(3 * PAGE, "cpu", store)
        objects = filled(manager, 12)
        engine.inject(call, errno=errno.EIO, times=times)
        assert 1 <= errors_of_use(manager, objects, steps=3) <= times
        manager.close()
        engine.close()


def test_exposed_object_can_be_filled_on_host_and_disk(tmp_path: Path) -> None:
    for disk in (64, 6):
        manager, store, behind = three_tiers(tmp_path, 2, 6, disk)
        objects = [*filled(manager, 8), manager.add("empty", KINDS[0], 1024, torch.float32)]
        for n, managed in enumerate(objects):
            manager.view(managed, write=True).fill_(10.0 + n)
            check_host(store, behind)
        for n, managed in enumerate(objects):
            with manager.using(managed) as tensor:
                assert torch.equal(tensor, torch.full((1024,), 10.0 + n))
        for managed in objects:
            manager.remove(managed)
        assert (store.used, behind.used, store.host._placed) == (0, 0, {})
        manager.close()


@pytest.mark.gpu
def test_copies_of_a_gpu_wait_for_the_disk_and_for_compute(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    store = HostDiskStore(2**24, DiskStore(tmp_path, 2**27), "cuda")
    manager = Manager(2**24, "cuda", store)
    numel = 2**20
    objects = [
        manager.add(f"o{n}", PARAMETERS, numel, torch.float32, torch.full((numel,), float(n)))
        for n in range(20)
    ]
    slow = torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        for managed in objects:
            with manager.using(managed, write=True) as tensor:
                slow = torch.tanh(slow @ slow)  # copies are far ahead of compute, if they may be
                tensor.add_(1 + 0 * slow.flatten()[0])
        manager.end_step()
    for n, managed in enumerate(objects):
        with manager.using(managed) as tensor:
            assert torch.equal(tensor, torch.full_like(tensor, n + 5.0))
    assert store.host.stats()["bytes_in"] > 0
    manager.close()
