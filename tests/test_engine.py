"""The I/O engine: the native one and the one in Python keep the same promises."""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.cli.dispatch import run as run_command
from gulliver.errors import GulliverError
from gulliver.io import Engine, IoError, default_engine
from gulliver.io import native as default_module
from gulliver.io.native import NativeEngine, native_problem
from gulliver.io.python_engine import PythonEngine
from tests.native_stress import SANITIZERS, CannotBuild
from tests.native_stress import build as build_stress
from tests.native_stress import run as run_stress

PAGE = 16384
KINDS = ("python", "threads", "io_uring")


def build(kind: str, **options: Any) -> Engine:
    options = {"page_bytes": PAGE, "pages": 4, **options}
    if kind == "python":
        return PythonEngine(**options)
    if native_problem():
        pytest.skip("the extension is not built")
    if kind == "threads":
        return NativeEngine(io_uring=False, **options)
    try:
        return NativeEngine(io_uring=True, **options)
    except GulliverError as error:
        if "io_uring is not available" not in str(error):
            raise
        pytest.skip(str(error))


Make = Callable[..., Engine]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes engines of one kind; what a test leaves open is closed."""
    made: list[Engine] = []

    def one(**options: Any) -> Engine:
        made.append(build(request.param, **options))
        return made[-1]

    yield one
    for engine in made:
        engine.hold(False)
        engine.close()


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def whole(array: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
    """One segment: a range of an array."""
    stop = array.nbytes if stop is None else stop
    return np.array([[array.ctypes.data + start, stop - start]], dtype=np.int64)


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


def stage_all(engine: Engine, file: Any, source: np.ndarray) -> list:
    starts = range(0, source.nbytes, PAGE)
    return [
        engine.stage(file, at, whole(source, at, min(at + PAGE, source.nbytes))) for at in starts
    ]


# What arrives


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """A file cut into pieces, and for each how it is written."""
    nbytes = draw(st.integers(0, 6 * PAGE + 77))
    inner = st.integers(0, nbytes)
    blocks = st.integers(0, nbytes // 4096).map(lambda k: 4096 * k)
    cuts = sorted({0, nbytes, *draw(st.lists(inner | blocks, max_size=12))})
    pieces = []
    for start, stop in itertools.pairwise(cuts):
        way = draw(st.sampled_from(["stage", "write", "page"]))
        holes = draw(st.lists(st.integers(0, stop - start), max_size=4))
        pieces.append((start, stop, way, sorted(holes), draw(st.integers(-2, 2))))
    return {
        "nbytes": nbytes,
        "pieces": draw(st.permutations(pieces)),
        "shift": draw(st.integers(0, 8)),
        "pages": draw(st.integers(1, 5)),
        "direct": draw(st.booleans()),
        "reads": draw(st.lists(st.tuples(inner, inner), max_size=4)),
        "reserve": draw(st.booleans()),
    }


@pytest.mark.parametrize("kind", KINDS)
@given(program=programs())
@settings(max_examples=40, deadline=None)
def test_files_hold_what_was_submitted_and_reads_return_it(kind: str, program: dict) -> None:
    nbytes, shift = program["nbytes"], program["shift"]
    source = noise(nbytes + shift, seed=nbytes)[shift:]
    options = {"pages": program["pages"], "direct": "auto" if program["direct"] else False}
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        build(kind, **options) as engine,
    ):
        path = Path(folder, "bytes")
        file = engine.create(path, nbytes if program["reserve"] else 0)
        tickets = []
        for start, stop, way, holes, priority in program["pieces"]:
            for at in range(start, stop, PAGE):
                end = min(at + PAGE, stop)
                args, tail = (file, at), {"priority": priority}
                if way == "write":
                    ticket = engine.write(*args, source.ctypes.data + at, end - at, **tail)
                elif way == "page":
                    page = engine.acquire()
                    page.array[: end - at] = source[at:end]
                    ticket = engine.write_page(*args, page, end - at, **tail)
                else:
                    edges = [at, *(start + h for h in holes if at < start + h < end), end]
                    table = np.array(
                        [[source.ctypes.data + a, b - a] for a, b in itertools.pairwise(edges)]
                    )
                    ticket = engine.stage(*args, table, **tail)
                tickets.append((at, end, way, ticket))
        engine.sync(file).wait()
        for at, end, way, ticket in tickets:
            assert ticket.done
            if way != "write":
                assert ticket.checksum == zlib.crc32(source[at:end])
        assert path.read_bytes() == source.tobytes()
        again = engine.open(path)
        assert again.nbytes == nbytes
        for one, other in program["reads"]:
            start, stop = sorted((one, other))
            target = np.zeros(stop - start, np.uint8)
            ticket = engine.read(
                again, start, target.ctypes.data, stop - start, checksum=True, priority=1
            )
            ticket.wait()
            assert np.array_equal(target, source[start:stop])
            assert ticket.checksum == zlib.crc32(target)


def test_aligned_extents_go_past_the_page_cache_both_ways(make: Make, tmp_path: Path) -> None:
    engine = make()
    source, target = aligned(40 * PAGE), aligned(40 * PAGE)
    source[:] = noise(source.nbytes)
    file = engine.create(tmp_path / "extent", source.nbytes)
    engine.write(file, 0, source.ctypes.data, source.nbytes).wait()
    engine.read(file, 0, target.ctypes.data, target.nbytes).wait()
    assert np.array_equal(source, target)
    counters = engine.counters
    assert (counters.written, counters.read) == (source.nbytes, source.nbytes)
    assert counters.direct in (0, 2 * source.nbytes)  # nothing where the file system has none


@pytest.mark.parametrize("make", KINDS[1:], indirect=True)
def test_file_system_that_refuses_direct_calls_is_written_through_the_cache(
    make: Make, tmp_path: Path
) -> None:
    engine = make(writers=1)
    source = noise(8 * PAGE + 5)
    file = engine.create(tmp_path / "file", source.nbytes)
    engine.inject("write", errno=errno.EINVAL)
    for ticket in stage_all(engine, file, source):
        ticket.wait()
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    engine.close_file(file)


def test_offsets_beyond_4_gib(make: Make, tmp_path: Path) -> None:
    engine, far = make(), 5 * 2**30
    source, target = noise(4096 + 17), np.zeros(4096 + 17, np.uint8)
    file = engine.create(tmp_path / "sparse", 0)
    engine.stage(file, far, whole(source)).wait()
    engine.sync(file).wait()
    assert (tmp_path / "sparse").stat().st_size == far + source.nbytes
    reading = engine.open(tmp_path / "sparse")
    engine.read(reading, far, target.ctypes.data, target.nbytes).wait()
    assert np.array_equal(source, target)


def test_empty_writes_succeed(make: Make, tmp_path: Path) -> None:
    engine = make()
    file = engine.create(tmp_path / "empty", 0)
    for ticket in (
        engine.stage(file, 0, np.empty((0, 2), np.int64)),
        engine.stage(file, 0, np.zeros((3, 2), np.int64)),
        engine.write_page(file, 0, engine.acquire(), 0),
    ):
        ticket.wait()
        assert ticket.checksum == 0
    engine.write(file, 0, 0, 0).wait()
    engine.read(file, 0, 0, 0).wait()
    engine.sync(file).wait()
    engine.close_file(file)
    assert (tmp_path / "empty").read_bytes() == b""


def test_prefetched_file_reads_the_same(make: Make, tmp_path: Path) -> None:
    source, target = noise(5 * PAGE), aligned(5 * PAGE)
    (tmp_path / "file").write_bytes(source.tobytes())
    engine = make()
    file = engine.open(tmp_path / "file")
    engine.prefetch(file, 0, source.nbytes)
    engine.read(file, 0, target.ctypes.data, target.nbytes).wait()
    assert np.array_equal(source, target)
    assert engine.counters.direct == 0


def test_checksums_equal_zlibs_at_every_length() -> None:
    if native_problem():
        pytest.skip("the extension is not built")
    crc32 = importlib.import_module("gulliver.io._core").crc32
    data = noise(5000)
    for start, nbytes in itertools.product((0, 1, 7), (*range(300), 1024, 4096, 4999)):
        part = data[start : start + min(nbytes, data.nbytes - start)]
        for tables in (False, True):
            found = crc32(part.ctypes.data, part.nbytes, tables=tables)
            assert found == zlib.crc32(part)
            assert crc32(part.ctypes.data, part.nbytes, 77, tables) == zlib.crc32(part, 77)


# Tickets, pages, lines


@pytest.mark.parametrize("now", [False, True])
def test_source_may_change_once_copied_however_slow_the_disk(
    make: Make, tmp_path: Path, now: bool
) -> None:
    engine = make(copiers=1, nice=19)
    source = noise(4 * PAGE)
    kept = source.tobytes()
    file = engine.create(tmp_path / "file", source.nbytes)
    engine.hold(True)
    tickets = stage_all(engine, file, source)
    if now:
        engine.copy_now(reversed(tickets))
    for at, ticket in enumerate(tickets):
        ticket.wait_copied()
        assert ticket.copied
        assert not ticket.done
        assert ticket.checksum == zlib.crc32(kept[at * PAGE : (at + 1) * PAGE])
    source[:] = 0
    engine.hold(False)
    engine.sync(file).wait()
    assert (tmp_path / "file").read_bytes() == kept


def test_staging_waits_for_pages_without_blocking_the_caller(make: Make, tmp_path: Path) -> None:
    engine = make(pages=2)
    source = noise(6 * PAGE)
    file = engine.create(tmp_path / "file", source.nbytes)
    engine.hold(True)
    tickets = stage_all(engine, file, source)
    tickets[1].wait_copied()
    assert not any(ticket.copied for ticket in tickets[2:])
    with pytest.raises(TimeoutError):
        tickets[2].wait_copied(timeout=0.01)
    with pytest.raises(TimeoutError):
        tickets[0].wait(timeout=0)
    engine.hold(False)
    for ticket in tickets:
        ticket.wait()
    assert (tmp_path / "file").read_bytes() == source.tobytes()


def test_full_queue_blocks_the_caller_until_something_ends(make: Make, tmp_path: Path) -> None:
    engine = make(queue=2)
    source = noise(9 * PAGE)
    file = engine.create(tmp_path / "file", source.nbytes)
    engine.hold(True)
    first = [
        engine.stage(file, at * PAGE, whole(source, at * PAGE, at * PAGE + PAGE)) for at in (0, 1)
    ]
    page = engine.acquire()
    page.array[:] = source[2 * PAGE : 3 * PAGE]
    # An acquired page is never held up by those who may wait for it.
    first.append(engine.write_page(file, 2 * PAGE, page, PAGE))
    passed = []

    def more() -> None:
        for at in range(3, 9):
            engine.stage(file, at * PAGE, whole(source, at * PAGE, at * PAGE + PAGE))
            passed.append(at)

    thread = threading.Thread(target=more)
    thread.start()
    first[1].wait_copied()
    assert engine.counters.pending == 3
    assert not passed
    engine.hold(False)
    thread.join()
    engine.sync(file).wait()
    assert (tmp_path / "file").read_bytes() == source.tobytes()


def test_disk_serves_the_higher_priority_then_the_older(make: Make, tmp_path: Path) -> None:
    engine = make(writers=1)
    source = noise(100)
    file = engine.create(tmp_path / "file", 0)
    engine.hold(True)
    tickets = [
        engine.write(file, 100 * at, source.ctypes.data, 100, priority=priority)
        for at, priority in enumerate((0, 3, 3, -1))
    ]
    engine.inject("write", errno=errno.EIO)
    engine.hold(False)
    with pytest.raises(IoError):
        tickets[1].wait()
    for at in (0, 2, 3):
        tickets[at].wait()


def test_acquired_pages_are_lent_one_by_one(make: Make) -> None:
    engine = make(pages=2)
    pages = [engine.acquire(), engine.acquire(timeout=1)]
    assert {page.index for page in pages} == {0, 1}
    assert all(page.address % 4096 == 0 and page.nbytes == PAGE for page in pages)
    with pytest.raises(TimeoutError):
        engine.acquire(timeout=0.01)
    engine.release(pages[0])
    assert engine.acquire(timeout=10).index == pages[0].index
    engine.release(pages[1])
    with pytest.raises(GulliverError, match=r"page \d+ is not|not acquired"):
        engine.release(pages[1])


def test_growing_pool_wakes_waiters(make: Make, tmp_path: Path) -> None:
    engine = make(pages=1)
    page = engine.acquire()
    file = engine.create(tmp_path / "file", PAGE)
    source = noise(PAGE)
    ticket = engine.stage(file, 0, whole(source))
    assert not ticket.copied
    engine.grow(3)
    ticket.wait()
    assert engine.pages == 4
    assert sum(nbytes for _, nbytes in engine.regions) == 4 * PAGE
    engine.release(page)


def test_many_threads_submit_at_once(make: Make, tmp_path: Path) -> None:
    engine = make(queue=8)
    source = noise(64 * PAGE)
    file = engine.create(tmp_path / "file", source.nbytes)

    def part(number: int) -> None:
        for at in range(number * PAGE, source.nbytes, 4 * PAGE):
            engine.stage(file, at, whole(source, at, at + PAGE))

    threads = [threading.Thread(target=part, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.sync(file).wait()
    assert (tmp_path / "file").read_bytes() == source.tobytes()


# The end


def test_close_finishes_pending_and_rejects_new_requests(make: Make, tmp_path: Path) -> None:
    engine = make(pages=2)
    source = noise(20 * PAGE + 3)
    file = engine.create(tmp_path / "file", source.nbytes)
    tickets = stage_all(engine, file, source)
    engine.close()
    engine.close()
    assert all(ticket.done for ticket in tickets)
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    engine.close_file(file)
    for call in (
        lambda: engine.stage(file, 0, whole(source, 0, 1)),
        lambda: engine.open(tmp_path / "file"),
        lambda: engine.acquire(),
        lambda: engine.grow(1),
    ):
        with pytest.raises(GulliverError, match="closed"):
            call()


def test_close_wakes_waiters_for_pages(make: Make) -> None:
    engine = make(pages=1)
    engine.acquire()
    refused = []

    def wait() -> None:
        try:
            engine.acquire()
        except GulliverError as error:
            refused.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join()
    assert len(refused) == 1


def test_closing_a_file_waits_for_it_and_for_no_other(make: Make, tmp_path: Path) -> None:
    engine = make()
    source = noise(3 * PAGE)
    file = engine.create(tmp_path / "file", source.nbytes)
    stage_all(engine, file, source)
    engine.close_file(file)
    assert (tmp_path / "file").read_bytes() == source.tobytes()
    engine.close_file(file)
    with pytest.raises(GulliverError, match="closed"):
        engine.write(file, 0, source.ctypes.data, 1)


def script(kind: str, body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that has `engine`, a held `file` and 40 pages of `source` staged."""
    if kind != "python" and native_problem():
        pytest.skip("the extension is not built")
    head = f"""
        import os, sys
        import numpy as np
        from gulliver.errors import GulliverError
        from gulliver.io import default_engine
        os.environ["GULLIVER_IO"] = {kind!r}
        engine = default_engine(page_bytes={PAGE}, pages=4)
        source = np.arange(40 * {PAGE}, dtype=np.int64).astype(np.uint8)
        file = engine.create({str(folder / "file")!r}, source.nbytes)
        engine.hold(True)
        tickets = [
            engine.stage(file, at, np.array([[source.ctypes.data + at, {PAGE}]]))
            for at in range(0, source.nbytes, {PAGE})
        ]
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["python", "native"])
def test_interpreter_exit_finishes_pending_requests(kind: str, tmp_path: Path) -> None:
    done = script(kind, "engine.hold(False)", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = np.arange(40 * PAGE, dtype=np.int64).astype(np.uint8)
    assert (tmp_path / "file").read_bytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["python", "native"])
def test_forked_child_cannot_use_engine(kind: str, tmp_path: Path) -> None:
    body = """
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: tickets[0].wait(),
                lambda: tickets[0].wait_copied(),
                lambda: engine.sync(file),
                lambda: engine.acquire(),
                lambda: engine.close_file(file),
                lambda: engine.create("other", 0),
                lambda: engine.close(),
            ):
                try:
                    call()
                except GulliverError as error:
                    refused += "parent process" in str(error)
            own = default_engine(page_bytes=4096, pages=1)
            own.close()
            del engine, file, tickets
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        engine.hold(False)
        engine.sync(file).wait()
        print(os.waitstatus_to_exitcode(status))
    """
    done = script(kind, body, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("7", "")


def test_native_engine_works_while_python_never_lets_go_of_the_gil(tmp_path: Path) -> None:
    # The interval is longer than any test: no other Python thread ever runs.
    body = """
        sys.setswitchinterval(1e6)
        engine.hold(False)
        while engine.counters.pending:
            sum(range(1000))
        print(engine.counters.written)
    """
    done = script("native", body, tmp_path)
    assert (done.stdout.strip(), done.stderr) == (str(40 * PAGE), "")


# Bad days

FAULTS = [
    ("open", errno.EIO),
    ("fallocate", errno.ENOSPC),
    ("truncate", errno.EIO),
    ("write", errno.ENOSPC),
    ("read", errno.EIO),
    ("fsync", errno.EIO),
]


def save_and_load(engine: Engine, path: Path, source: np.ndarray) -> np.ndarray:
    """What a checkpoint does: every call site of the engine, and all errors looked at."""
    file = engine.create(path, source.nbytes)
    cut = 3 * PAGE
    tickets = stage_all(engine, file, source[:cut])
    page = engine.acquire()
    page.array[:] = source[cut : cut + PAGE]
    tickets.append(engine.write_page(file, cut, page, PAGE))
    rest = cut + PAGE
    tickets.append(
        engine.write(file, rest, source.ctypes.data + rest, source.nbytes - rest, priority=-1)
    )
    failures = []
    for ticket in [*tickets, engine.sync(file)]:
        try:
            ticket.wait()
        except IoError as error:
            failures.append(error)
    engine.close_file(file)
    if failures:
        # The last one is the sync: whoever waits for it alone is told as well.
        assert failures[-1].errno == failures[0].errno
        raise failures[-1]
    target = np.zeros(source.nbytes, np.uint8)
    reading = engine.open(path)
    ticket = engine.read(reading, 0, target.ctypes.data, target.nbytes, checksum=True)
    ticket.wait()
    assert ticket.checksum == zlib.crc32(target)
    engine.close_file(reading)
    return target


@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize(("call", "number"), FAULTS)
def test_failing_call_is_a_named_error_or_a_right_file(
    make: Make, tmp_path: Path, call: Any, number: int, nth: int
) -> None:
    engine = make()
    path, source = tmp_path / "file.bin", noise(6 * PAGE + 123)
    if call == "truncate":
        engine.inject("fallocate", errno=errno.EOPNOTSUPP)
    engine.inject(call, nth, number)
    target, error = None, None
    try:
        target = save_and_load(engine, path, source)
    except IoError as caught:
        error = caught
    if error is None:
        assert nth > 1  # the first is always used
        assert np.array_equal(target, source)
        assert path.read_bytes() == source.tobytes()
    else:
        assert (error.errno, error.path) == (number, path)
        assert str(path) in str(error)
        assert (error.offset is not None) == (call in ("write", "read"))
        if call in ("fallocate", "truncate"):
            assert not path.exists()
        # It goes on working.
        assert np.array_equal(save_and_load(engine, tmp_path / "next", source), source)


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("call", ["open", "fallocate", "truncate", "write", "read", "fsync"])
def test_interrupted_call_is_made_again(make: Make, tmp_path: Path, call: Any, nth: int) -> None:
    engine = make()
    source = noise(6 * PAGE + 123)
    if call == "truncate":
        engine.inject("fallocate", errno=errno.EOPNOTSUPP)
    engine.inject(call, nth, errno.EINTR, times=3)
    assert np.array_equal(save_and_load(engine, tmp_path / "file", source), source)
    assert (tmp_path / "file").read_bytes() == source.tobytes()


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("short", [511, 5000])
@pytest.mark.parametrize("call", ["write", "read"])
def test_short_calls_are_continued(
    make: Make, tmp_path: Path, call: Any, short: int, nth: int
) -> None:
    engine = make()
    source = noise(6 * PAGE + 123)
    engine.inject(call, nth, short=short, times=4)
    assert np.array_equal(save_and_load(engine, tmp_path / "file", source), source)
    assert (tmp_path / "file").read_bytes() == source.tobytes()


@pytest.mark.parametrize("call", ["write", "read"])
def test_zero_byte_transfer_is_an_error(make: Make, tmp_path: Path, call: Any) -> None:
    engine = make()
    engine.inject(call, short=0)
    with pytest.raises(IoError) as caught:
        save_and_load(engine, tmp_path / "file", noise(6 * PAGE))
    assert caught.value.errno == (errno.EIO if call == "write" else errno.ENODATA)


def test_failed_write_fails_every_later_sync_of_its_file_only(make: Make, tmp_path: Path) -> None:
    engine = make()
    source = noise(PAGE)
    file, other = engine.create(tmp_path / "bad", PAGE), engine.create(tmp_path / "good", PAGE)
    engine.inject("write", errno=errno.ENOSPC)
    ticket = engine.stage(file, 0, whole(source))
    ticket.wait_copied()
    with pytest.raises(IoError, match="No space left"):
        ticket.wait()
    engine.stage(other, 0, whole(source)).wait()
    engine.sync(other).wait()
    for _ in range(2):
        with pytest.raises(IoError, match=r"bad at byte 0: No space left"):
            engine.sync(file).wait()


def test_sync_waits_for_the_writes_before_it(make: Make, tmp_path: Path) -> None:
    engine = make(writers=1)
    source = noise(PAGE)
    file = engine.create(tmp_path / "file", PAGE)
    engine.hold(True)
    # The sync would be first in line: it has the higher priority.
    engine.write(file, 0, source.ctypes.data, PAGE, priority=-5)
    ticket = engine.sync(file)
    engine.inject("write", errno=errno.EIO)
    engine.hold(False)
    with pytest.raises(IoError):
        ticket.wait()


def test_file_that_ends_early_is_named(make: Make, tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "short").write_bytes(bytes(5000))
    target = aligned(3 * 4096)
    file = engine.open(tmp_path / "short")
    with pytest.raises(IoError, match=r"short at byte 5000: the file is too short") as caught:
        engine.read(file, 0, target.ctypes.data, target.nbytes).wait()
    assert (caught.value.offset, caught.value.errno) == (5000, errno.ENODATA)


def test_paths_that_cannot_be_opened_are_named(make: Make, tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "there").write_bytes(b"kept")
    for call, number in (
        (lambda: engine.open(tmp_path / "none"), errno.ENOENT),
        (lambda: engine.open(tmp_path), errno.EISDIR),
        (lambda: engine.create(tmp_path / "there", 5), errno.EEXIST),
        (lambda: engine.create(tmp_path / "none" / "file", 5), errno.ENOENT),
        (lambda: engine.create(tmp_path / "huge", 2**62), errno.EFBIG),
    ):
        with pytest.raises(IoError, match=str(tmp_path)) as caught:
            call()
        assert caught.value.errno == number
    assert (tmp_path / "there").read_bytes() == b"kept"
    assert not (tmp_path / "huge").exists()


def test_invalid_submissions_are_rejected(make: Make, tmp_path: Path) -> None:
    engine, other = make(), make()
    file = engine.create(tmp_path / "file", 0)
    source = noise(2 * PAGE)
    for call, words in (
        (lambda: engine.stage(file, 0, whole(source)), "do not fit"),
        (lambda: engine.stage(file, 0, np.array([[2**40, 2**62], [0, 2**62]])), "do not fit"),
        (lambda: engine.stage(file, 0, np.array([[0, -1]])), "do not fit"),
        (lambda: other.write(file, 0, 0, 0), "not opened by this"),
        (lambda: engine.inject("wite", 1), "did you mean 'write'"),  # pyright: ignore
        (lambda: engine.grow(0), "at least 1"),
        (lambda: make(page_bytes=5000), "multiple of 4096"),
        (lambda: make(writers=0), "at least 1"),
        (lambda: make(pages=2**30, page_bytes=2**30), "no memory"),
    ):
        with pytest.raises(GulliverError, match=words):
            call()
    page = engine.acquire()
    with pytest.raises(GulliverError, match="exceed the page"):
        engine.write_page(file, 0, page, PAGE + 1)
    engine.release(page)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(IoError("write", "some/file", 7, errno.ENOSPC)))
    assert (error.path, error.offset, error.errno) == (Path("some/file"), 7, errno.ENOSPC)
    assert "some/file at byte 7: No space left" in str(error)


# Choosing


def test_python_fallback_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GULLIVER_IO", raising=False)
    monkeypatch.setattr(default_module, "native_problem", lambda: "it is not built")
    monkeypatch.setattr(default_module, "_said", set())
    with caplog.at_level(logging.WARNING, "gulliver"):
        kinds = []
        for _ in range(2):
            with default_engine(page_bytes=4096, pages=1) as engine:
                kinds.append(engine.kind)
    assert kinds == ["python threads"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "I/O runs in Python threads, which compete for the GIL: it is not built"
    ]
    monkeypatch.setenv("GULLIVER_IO", "native")
    with pytest.raises(GulliverError, match=r"GULLIVER_IO=native .* not built"):
        default_engine()


def test_environment_chooses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_IO", "python")
    with default_engine(page_bytes=4096, pages=1) as engine:
        assert engine.kind == "python threads"
    monkeypatch.setenv("GULLIVER_IO", "thread")
    with pytest.raises(GulliverError, match="did you mean 'threads'"):
        default_engine()
    if native_problem() is None:
        monkeypatch.setenv("GULLIVER_IO", "threads")
        with default_engine(page_bytes=4096, pages=1) as engine:
            assert engine.kind == "native threads"


# The native threads under sanitizers


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_native_stress_test_is_sanitizer_clean(sanitizer: str, tmp_path: Path) -> None:
    try:
        program = build_stress(tmp_path, sanitizer)
    except CannotBuild as error:
        pytest.skip(f"cannot build with -fsanitize={sanitizer}: {error}")
    done = run_stress(program, tmp_path, rounds=3)
    assert (done.stdout, done.stderr, done.returncode) == ("ok\n", "", 0)


# gulliver doctor


@pytest.mark.parametrize("kind", ["", "python"])
def test_doctor_names_io_engine_and_leaves_no_files(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GULLIVER_IO", kind)
    assert run_command(["doctor", "--folder", str(tmp_path), "--mib", "2"]) == 0
    printed = capsys.readouterr().out
    with default_engine(page_bytes=4096, pages=1) as engine:
        assert engine.kind in printed
    assert "disk, writing" in printed
    assert "GB/s" in printed
    assert not list(tmp_path.iterdir())
