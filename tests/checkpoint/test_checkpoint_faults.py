"""Bad days of a checkpoint: disks that fail, folders that vanish, processes that are killed.

Whatever happens, a step that says that it is complete is what was saved, and the step before still
loads. `tests.killtest` is the longer run of the kills at the top.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing as mp
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gulliver.checkpoint import (
    AsyncCheckpointer,
    CheckpointFolder,
    PerRank,
    load,
    publishing,
    verify,
)
from gulliver.checkpoint import folder as folder_module
from gulliver.checkpoint.files import CODES, Image, write_json
from gulliver.checkpoint.folder import FolderLock, lock_file, unlock
from gulliver.checkpoint.manifest import FORMAT, MANIFEST, STATE, write_manifest
from gulliver.checkpoint.publishing import Heartbeat, HeartbeatWatch, create_heartbeats
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.snapshot import CopyStream
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.io import Engine
from gulliver.io.engine import Call
from gulliver.io.files import named_errors
from gulliver.io.native import native_problem
from gulliver.io.python_engine import PythonEngine
from gulliver.memory.parts import Part
from gulliver.memory.pending import before_write
from tests.covering import some
from tests.guarded import guarded
from tests.killtest import Options, run_kills
from tests.patience import patient
from tests.pool import Pool

PAGE, PAGES = 64 * 2**10, 4
"""Small ones: the state has more pages than the pool."""
LARGE = 300_001
"""Elements: more bytes than the whole pool."""
ENGINES = ("python", "threads", "io_uring")


def make_engine(kind: str) -> Engine:
    """An engine, or a skipped test where it was not built."""
    if kind == "python":
        return PythonEngine(page_bytes=PAGE, pages=PAGES)
    if (problem := native_problem()) is not None:
        pytest.skip(problem)
    from gulliver.io.native import NativeEngine

    uring: Literal["auto"] | bool = "auto" if kind == "io_uring" else False
    engine = NativeEngine(page_bytes=PAGE, pages=PAGES, io_uring=uring)
    if kind == "io_uring" and engine.kind != "native io_uring":
        engine.close()
        pytest.skip("io_uring is not allowed here")
    return engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine(request.param)
    yield made
    made.hold(False)
    made.close()


def state_of(number: int) -> dict[str, Any]:
    """A state whose values follow from a number: three files, a dozen pages."""
    draw = torch.Generator().manual_seed(number)
    return {
        "model": {
            "large": torch.rand(LARGE, generator=draw),
            "small": torch.rand(7, generator=draw).to(torch.bfloat16),
        },
        "ema": {"large": torch.randint(256, (PAGE + 5,), dtype=torch.uint8, generator=draw)},
        "rest": {"flags": torch.rand(3, generator=draw) > 0.5, "number": number},
    }


def assert_same(one: Any, other: Any) -> None:
    """Values, dtypes and shapes are alike, to the bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits = [t.resolve_conj().reshape(-1).contiguous().view(torch.uint8) for t in (one, other)]
        assert torch.equal(*bits)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


def assert_good(root: Path, step: int, number: int) -> None:
    """A step is complete, verifies, and is what was saved."""
    folder = CheckpointFolder(root)
    assert step in folder.steps()
    assert verify(folder.path(step)) == []
    assert_same(load(root, step=step).values, state_of(number))


def assert_clean(root: Path) -> None:
    """Nothing half written is left."""
    names = sorted(entry.name for entry in root.iterdir())
    assert all(n in (".lock", "latest") or n.startswith("step-") for n in names)
    assert not [name for name in names if name.endswith(".partial")]


def assert_nothing_wrong(root: Path, step: int, failed: bool) -> None:
    """Step 1 loads; of step `step` there is nothing, or all, and not less than was said."""
    steps = CheckpointFolder(root).steps()
    assert_good(root, 1, 1)
    assert failed or step in steps
    if step in steps:
        assert_good(root, step, step)
    assert_clean(root)


# Killed at any moment


@pytest.mark.parametrize(
    ("kills", "ranks", "mode"), [(6, 1, "shadow"), (3, 1, "ring"), (3, 2, "shadow")]
)
def test_whenever_a_saving_job_is_killed_the_newest_step_loads_bit_for_bit(
    tmp_path: Path, kills: int, ranks: Literal[1, 2], mode: Literal["shadow", "ring"]
) -> None:
    tally = run_kills(Options(kills=kills, ranks=ranks, mode=mode), tmp_path)
    assert not tally.failures, str(tally)
    assert tally.kills == kills
    assert tally.checked > 0


# Disks that fail

FAULTS: list[tuple[Call, int, int]] = [
    (call, number, nth)
    for call, nths in {
        "open": (1, 2, 3),
        "fallocate": (1, 2, 3),
        "write": (1, 2, 5, 12),
        "fsync": (1, 2, 3),
    }.items()
    for number in (errno.ENOSPC, errno.EIO)
    for nth in nths
]


def _is_usual(call: Call, number: int, nth: int) -> bool:
    """Whether it is of the default run: every call fails at every place, and at first both ways."""
    return number == errno.ENOSPC or nth == 1


@pytest.mark.parametrize(
    ("call", "number", "nth"), some(FAULTS, [fault for fault in FAULTS if _is_usual(*fault)])
)
def test_failed_call_is_reported_by_next_call(
    tmp_path: Path, engine: Engine, call: Call, number: int, nth: int
) -> None:
    checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    engine.inject(call, nth, number)
    assert checkpointer.save(2, state_of(2))
    with pytest.raises(GulliverError, match=rf"step 2 was not saved: .*{tmp_path}.*") as caught:
        checkpointer.wait()
    assert os.strerror(number) in str(caught.value)
    assert CheckpointFolder(tmp_path).steps() == [1]
    assert_nothing_wrong(tmp_path, 2, failed=True)
    assert engine.counters.free_pages == engine.pages
    # It is told once, and the next save is as good as any.
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    assert_good(tmp_path, 3, 3)


@pytest.mark.parametrize("call", ["open", "write"])
def test_on_error_warn_logs_failure_and_continues(
    tmp_path: Path, engine: Engine, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncCheckpointer(tmp_path, on_error="warn", engine=engine) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        engine.inject(call, 1, errno.ENOSPC)
        checkpointer.save(2, state_of(2))
        checkpointer.save(3, state_of(3))
    (said,) = [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]
    assert "step 2 was not saved" in said
    assert os.strerror(errno.ENOSPC) in said
    assert CheckpointFolder(tmp_path).steps() == [1, 3]
    assert_good(tmp_path, 3, 3)
    assert_clean(tmp_path)


SYSTEM = ("fsync", "replace", "mkdir", "unlink")


@pytest.mark.parametrize("call", SYSTEM)
def test_failure_while_finishing_leaves_no_broken_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Manifest, state, rename, `latest`, retention: each such call in turn, until none is left."""
    inner, left, nth = getattr(os, call), [0], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            number = errno.EIO if nth % 2 else errno.ENOSPC
            raise OSError(number, os.strerror(number), str(args[0]))
        return inner(*args, **kwargs)

    with make_engine("python") as engine:
        for nth in range(1, 100):
            root = tmp_path / str(nth)
            checkpointer = AsyncCheckpointer(root, keep=2, engine=engine)
            for step in (5, 1):  # by retention, 5 goes when 7 is saved: never before that
                checkpointer.save(step, state_of(step))
                checkpointer.wait()
            monkeypatch.setattr(os, call, counted)
            left[0] = nth
            failed = False
            try:
                checkpointer.save(7, state_of(7))
                checkpointer.wait()
            except GulliverError:
                failed = True
            happened = left[0] <= 0
            monkeypatch.setattr(os, call, inner)
            # From the moment that a step has its name, it is saved.
            assert failed == (7 not in CheckpointFolder(root).steps())
            checkpointer.save(8, state_of(8))
            checkpointer.close()
            steps = CheckpointFolder(root).steps()
            assert 8 in steps
            assert failed or 7 in steps
            for step in steps:
                assert_good(root, step, step)
            assert_clean(root)
            if not happened:
                assert not failed
                return
    raise AssertionError("there was no end of calls")


READS: list[tuple[Call, int, int]] = [
    (call, number, nth)
    for call, nths in {"open": (1,), "read": (1, 5)}.items()
    for number in (errno.EIO,)
    for nth in nths
]


@pytest.mark.parametrize(("call", "number", "nth"), READS)
def test_failed_read_is_named_and_leaks_no_page(
    tmp_path: Path, engine: Engine, call: Call, number: int, nth: int
) -> None:
    with AsyncCheckpointer(tmp_path, engine=engine) as checkpointer:
        checkpointer.save(1, state_of(1))
    # More pages than are read at once.
    reading = type(engine)(page_bytes=PAGE, pages=12)
    with reading, StepReader(CheckpointFolder(tmp_path).path(1), reading) as reader:
        reading.inject(call, nth, number)
        with pytest.raises(GulliverError, match=rf"{tmp_path}.*{os.strerror(number)}"):
            [reader.value(entry) for entry in reader.entries]
        assert reading.counters.free_pages == 12
        reading.inject("read", 1, short=1000, times=5)
        assert_same(reader.value("model"), state_of(1)["model"])


def test_step_is_saved_if_latest_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, text: str) -> None:
        with named_errors(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module, "write_text", full)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()
    assert_good(tmp_path, 1, 1)
    (said,) = [r.getMessage() for r in caplog.records if "is saved" in r.getMessage()]
    assert re.search(r"step 1 of .* is saved, but the file latest .* no space left", said)


# Folders that are not what they should be


def test_symlink_as_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    link = pytest.raises(GulliverError, match=r"run/\.lock is a link")
    with AsyncCheckpointer(tmp_path / "run") as checkpointer, link:
        checkpointer.save(1, state_of(1))
    assert (tmp_path / "precious").read_text() == "mine"


def test_unrelated_folders_are_kept(tmp_path: Path) -> None:
    notes = tmp_path / "step-00000001" / "notes.txt"
    notes.parent.mkdir()
    for path in (notes, tmp_path / "step-00000002"):
        path.write_text("mine")
    for path in (notes.parent, tmp_path / "step-00000002"):
        os.utime(path, (0, 0))
    with AsyncCheckpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2):
            with pytest.raises(GulliverError, match=f"step-0000000{step} "):
                checkpointer.save(step, state_of(step))
        for step in (3, 4):
            checkpointer.save(step, state_of(step))
            checkpointer.wait()
    assert CheckpointFolder(tmp_path).steps() == [4]
    assert notes.read_text() == (tmp_path / "step-00000002").read_text() == "mine"


def test_file_as_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(GulliverError, match=r"run.* cannot be written: (File ex|Not a dir)"):
            checkpointer.save(1, state_of(1))
        (tmp_path / "run").unlink()
        checkpointer.save(1, state_of(1))
    assert_good(tmp_path / "run", 1, 1)


def _all_there(partial: Path) -> bool:
    return len(list(partial.glob("*.safetensors"))) == len(state_of(2))


@pytest.mark.parametrize("vanishing", ["run", "step"])
def test_a_folder_that_vanishes_while_it_is_written_is_an_error(
    tmp_path: Path, engine: Engine, vanishing: str
) -> None:
    root = tmp_path / "run"
    checkpointer = AsyncCheckpointer(root, engine=engine)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    _held(engine, checkpointer, 2)
    while not _all_there(checkpointer.folder.partial(2)):
        time.sleep(0.01)
    shutil.rmtree(root if vanishing == "run" else checkpointer.folder.partial(2))
    engine.hold(False)
    with pytest.raises(GulliverError, match="step 2 was not saved"):
        checkpointer.wait()
    if vanishing == "step":
        assert_nothing_wrong(root, 2, failed=True)
    assert 2 not in CheckpointFolder(root).steps()
    checkpointer.save(3, state_of(3))
    checkpointer.close()
    assert_good(root, 3, 3)


def test_on_error_warn_survives_failed_start_of_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncCheckpointer(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait()

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", full)
            assert not checkpointer.save(2, state_of(2))
        assert checkpointer.save(3, state_of(3))
    assert_good(tmp_path, 3, 3)


# Two jobs


def _take_lock(root: str, ready: Connection) -> None:
    FolderLock(Path(root)).take()
    ready.send(os.getpid())
    signal.pause()


def test_folder_of_another_writer_is_rejected_naming_it(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    other = context.Process(target=_take_lock, args=(str(tmp_path), there), daemon=True)
    other.start()
    number = here.recv()
    checkpointer = AsyncCheckpointer(tmp_path)
    with pytest.raises(GulliverError, match=rf"process {number} on "):
        checkpointer.save(1, state_of(1))
    assert CheckpointFolder(tmp_path).steps() == []
    other.kill()
    other.join()
    checkpointer.save(1, state_of(1))
    checkpointer.close()
    assert_good(tmp_path, 1, 1)


def test_rejected_writer_leaves_other_writers_files(tmp_path: Path, engine: Engine) -> None:
    first, second = AsyncCheckpointer(tmp_path, engine=engine), AsyncCheckpointer(tmp_path)
    _held(engine, first, 1)
    with pytest.raises(GulliverError, match=rf"process {os.getpid()} "):
        second.save(1, state_of(2))
    assert first.folder.partial(1).is_dir()
    engine.hold(False)
    first.close()
    second.save(2, state_of(2))
    second.close()
    for step in (1, 2):
        assert_good(tmp_path, step, step)


def _hold_what_is_inherited(root: str, say: Connection) -> None:
    """Takes the lock, forks a worker as a data loader does, and ends by SIGKILL."""
    FolderLock(Path(root)).take()
    lock = FolderLock(Path(root) / "kept")
    lock.take()
    worker = os.fork()
    if worker == 0:
        signal.pause()
    lock.release()
    say.send(worker)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["released", "killed"])
def test_workers_forked_by_a_job_do_not_keep_its_folder(tmp_path: Path, end: str) -> None:
    context = mp.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    job = context.Process(target=_hold_what_is_inherited, args=(str(tmp_path), there))
    job.start()
    worker = here.recv()
    job.join()
    try:
        lock = FolderLock(tmp_path / "kept" if end == "released" else tmp_path)
        lock.take()
        lock.release()
    finally:
        os.kill(worker, signal.SIGKILL)


# Files that are broken


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete step."""
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
    return CheckpointFolder(tmp_path).path(1)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_named_with_file_and_tensor(saved: Path) -> None:
    _flip(saved / "model.safetensors", 700_000)
    for read in (lambda: load(saved), lambda: _verify(saved)):
        with pytest.raises(
            GulliverError, match=r"model.safetensors, bytes .* are corrupted \(.*model: large"
        ):
            read()
    # What else is in the step can still be read.
    with StepReader(saved) as reader:
        assert_same(reader.value("ema"), state_of(1)["ema"])


def _verify(path: Path) -> None:
    for problem in verify(path):
        raise GulliverError(str(problem))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 3}', '{"format": 3, "files": 3}'])
def test_a_broken_manifest_is_refused_and_its_step_passed_over(saved: Path, content: str) -> None:
    with AsyncCheckpointer(saved.parent) as checkpointer:
        checkpointer.save(2, state_of(2))
    (saved.parent / "step-00000002" / MANIFEST).write_text(content)
    with pytest.raises(GulliverError, match=r"manifest\.json"):
        load(saved.parent / "step-00000002")
    assert_same(load(saved.parent).values, state_of(1))


# While a save is under way


def _held(engine: Engine, checkpointer: AsyncCheckpointer, step: int = 1) -> dict[str, Any]:
    """Begins to save, on a disk that hangs: only the first pages are copied."""
    state = state_of(step)
    engine.hold(True)
    with guarded(state):
        assert checkpointer.save(step, state)
    return state


def test_concurrent_save_waits_and_logs(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    with AsyncCheckpointer(tmp_path, engine=engine, when_busy="wait") as checkpointer:
        _held(engine, checkpointer)
        join = checkpointer._join

        def join_at_last() -> None:
            engine.hold(False)
            join()

        monkeypatch.setattr(checkpointer, "_join", join_at_last)
        assert checkpointer.save(2, state_of(2))
    assert "the step before was still being written" in caplog.text
    for step in (1, 2):
        assert_good(tmp_path, step, step)


def test_concurrent_save_is_skipped_and_logged(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncCheckpointer(tmp_path, engine=engine, when_busy="skip") as checkpointer:
        _held(engine, checkpointer)
        assert not checkpointer.save(2, state_of(2))
        assert "step 2 is not saved: the step before is still being written" in caplog.text
        engine.hold(False)
        checkpointer.wait()
        assert checkpointer.save(3, state_of(3))
    assert CheckpointFolder(tmp_path).steps() == [1, 3]
    for step in (1, 3):
        assert_good(tmp_path, step, step)


def test_tensor_changed_during_copy_fails_save(tmp_path: Path, engine: Engine) -> None:
    checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    state = _held(engine, checkpointer, 2)
    state["model"]["large"].add_(1)
    engine.hold(False)
    with pytest.raises(GulliverError, match=r"model: large .*wait_copied\(\)"):
        checkpointer.close()
    assert CheckpointFolder(tmp_path).steps() == [1]
    assert_nothing_wrong(tmp_path, 2, failed=True)


def _never_yet(event: threading.Event) -> bool:
    """Whether something that must not happen has not: a slow machine does not make this fail."""
    return not event.wait(0.1)


def _in_thread(call: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()

    def run() -> None:
        call()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, done


def test_optimizer_step_waits_for_copy_of_old_values(tmp_path: Path, engine: Engine) -> None:
    model = nn.Linear(601, 499)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    train()
    with AsyncCheckpointer(tmp_path, engine=engine) as checkpointer:
        for step in (1, 2):
            before = {n: v.clone() for n, v in model.state_dict().items()}
            engine.hold(True)
            checkpointer.save(step, {"model": model, "optimizer": optimizer})
            thread, stepped = _in_thread(train)
            assert _never_yet(stepped)
            engine.hold(False)
            thread.join()
            assert stepped.is_set()
            checkpointer.wait()
            found = load(tmp_path).values
            assert_same(found["model"], before)
            assert not torch.equal(model.weight, before["weight"])


def test_wait_before_write_waits_only_for_those_tensors(tmp_path: Path, engine: Engine) -> None:
    early = torch.rand(PAGE // 4 + 1)
    late = torch.rand(LARGE)
    wanted = {"early": early.clone(), "late": late.clone()}
    with AsyncCheckpointer(tmp_path, engine=engine) as checkpointer:
        engine.hold(True)
        with guarded([early, late]):
            checkpointer.save(1, {"tensors": {"early": early, "late": late}})
        before_write([early])
        thread, done = _in_thread(lambda: before_write([late]))
        assert _never_yet(done)
        early.zero_()
        engine.hold(False)
        thread.join()
        late.zero_()
    assert_same(load(tmp_path).values["tensors"], wanted)


EXITS = {
    "the end": "",
    "an exit": "raise SystemExit(0)",
    "an error": "raise ValueError('on purpose')",
}
PROGRAM = """
import sys, torch
from gulliver.checkpoint import AsyncCheckpointer
state = {{"a": torch.arange(5_000_000), "b": 3}}
checkpointer = AsyncCheckpointer(sys.argv[1])
checkpointer.save(1, state)
{end}
"""


@pytest.mark.parametrize(
    ("end", "kind"),
    some(
        [("the end", "python"), ("the end", ""), ("an error", ""), ("an exit", "")],
        [("the end", "python"), ("an error", "")],
    ),
)
def test_pending_save_finishes_at_interpreter_exit(tmp_path: Path, end: str, kind: str) -> None:
    environment = {**os.environ, "GULLIVER_IO": kind}
    program = [sys.executable, "-c", PROGRAM.format(end=EXITS[end]), str(tmp_path)]
    ran = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=patient(100)
    )
    assert ran.returncode == (1 if end == "an error" else 0), ran.stderr
    assert "on purpose" in ran.stderr or end != "an error"
    found = load(tmp_path)
    assert (found.step, found.values["b"]) == (1, 3)
    assert torch.equal(found.values["a"], torch.arange(5_000_000))
    assert_clean(tmp_path)


# What is saved


def _bits(dtype: torch.dtype, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape) + dtype.itemsize)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(2 if dtype == torch.bool else 256, (count,), generator=draw)
    return raw.to(torch.uint8).view(dtype).view(shape)


def odd_state() -> dict[str, Any]:
    """Everything that is not a plain contiguous float."""
    base, tied = torch.rand(211, 173), nn.Linear(257, 257)
    pair = nn.ModuleDict({"one": tied, "other": nn.Linear(257, 257)})
    pair["other"].weight = tied.weight
    return {
        "dtypes": {str(dtype): _bits(dtype, 331, 97) for dtype in CODES},
        "small": {str(dtype): _bits(dtype, 3) for dtype in CODES},
        "scalars": {str(dtype): _bits(dtype) for dtype in CODES},
        "empty": {str(dtype): _bits(dtype, 0, 3) for dtype in CODES},
        "views": {
            "turned": base.T,
            "strided": base[::2, 1::3],
            "expanded": base[:1].expand(300, 173),
            "shifted": base.view(-1)[1:],
            "conjugated": torch.complex(base, base).conj(),
            "negated": torch.complex(base, base).conj().imag,
        },
        "tied": {**pair.state_dict()},
        "nothing": {},
        "plain": {"a": [1, (2.5, None)], 3: "x"},
    }


def _plainly(state: dict[str, Any]) -> dict[str, Any]:
    views = {n: t.resolve_conj().resolve_neg().contiguous() for n, t in state["views"].items()}
    return {**state, "views": views}


def test_every_tensor_kind_round_trips_bitwise(tmp_path: Path, engine: Engine) -> None:
    with AsyncCheckpointer(tmp_path, engine=engine) as checkpointer:
        checkpointer.save(1, odd_state())
    torch.manual_seed(0)
    state = odd_state()
    with AsyncCheckpointer(tmp_path, engine=engine) as checkpointer:
        checkpointer.save(2, state)
    assert_same(load(tmp_path).values, _plainly(state))
    _verify(CheckpointFolder(tmp_path).path(2))


@pytest.mark.parametrize("mode", ["shadow", "ring"])
def test_device_copies_equal_host_copies(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """With host memory in the place of the device: same pages, same order, no stream."""

    def ready(checkpointer: AsyncCheckpointer, snapshot: object) -> CopyStream:
        checkpointer._copy_stream = CopyStream()
        return checkpointer._copy_stream

    monkeypatch.setattr(AsyncCheckpointer, "_ready_copy_stream", ready)
    state = odd_state()
    checkpointer = AsyncCheckpointer(tmp_path, mode=mode, engine=engine)
    checkpointer.save(1, state)
    checkpointer.wait()
    assert_same(load(tmp_path).values, _plainly(state))
    for nth, call in ((1, "write"), (9, "write"), (2, "open"), (2, "fsync")):
        engine.inject(call, nth, errno.EIO)  # type: ignore[arg-type]
        checkpointer.save(2, state)
        with pytest.raises(GulliverError, match="step 2 was not saved"):
            checkpointer.wait()
        assert engine.counters.free_pages == engine.pages
    checkpointer.save(2, state)
    checkpointer.close()
    assert CheckpointFolder(tmp_path).steps() == [1, 2]
    assert_same(load(tmp_path).values, _plainly(state))


class _BrokenCopyStream(CopyStream):
    """A device whose copies fail from the third on."""

    copies = 0

    def mark(self) -> None:
        self.copies += 1
        if self.copies >= 3:
            raise RuntimeError("the device is lost")


def test_a_device_that_fails_leaks_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(checkpointer: AsyncCheckpointer, snapshot: object) -> CopyStream:
        checkpointer._copy_stream = _BrokenCopyStream()
        return checkpointer._copy_stream

    monkeypatch.setattr(AsyncCheckpointer, "_ready_copy_stream", ready)
    with make_engine("python") as engine:
        checkpointer = AsyncCheckpointer(tmp_path, engine=engine)
        checkpointer.save(1, state_of(1))
        with pytest.raises(GulliverError, match="step 1 was not saved: the device is lost"):
            checkpointer.close()
        assert engine.counters.free_pages == engine.pages


def test_state_larger_than_ring_is_saved(tmp_path: Path) -> None:
    state = {"a": torch.arange(6_000_001, dtype=torch.int32), "b": _bits(torch.bool, 9_999_999)}
    with AsyncCheckpointer(tmp_path, mode="ring", ring_mb=8) as checkpointer:
        for step in (1, 2):
            state["a"] += 1
            checkpointer.save(step, state)
            checkpointer.wait_copied()
        checkpointer.wait()
        assert checkpointer._engine is not None
        assert checkpointer._engine.pages * checkpointer._engine.page_bytes == 8 * 2**20
    assert_same(load(tmp_path).values, state)


def test_parts_beyond_4_gib_of_a_file_are_found(tmp_path: Path) -> None:
    """A file of zeros but for its end: written with a hole, read where it is wanted."""
    page, count = 4 * 2**20, 2**32 + 5000
    large = torch.empty(count, dtype=torch.int8)  # never touched: it takes no memory
    image = Image({"large": large})
    step = tmp_path / "step-00000001"
    step.mkdir()
    values = torch.arange(200, dtype=torch.int8)
    ending = values.view(torch.uint8).numpy().tobytes()
    with (step / "big.safetensors").open("wb") as file:
        file.write(bytes(image.header.tolist()))
        file.truncate(image.nbytes)
        file.seek(image.nbytes - len(ending))
        file.write(ending)
    sizes = [min(page, image.nbytes - at) for at in range(0, image.nbytes, page)]
    sums = [zlib.crc32(bytes(page))] * len(sizes)
    sums[0] = zlib.crc32(bytes(image.header.tolist()) + bytes(page - image.header.nbytes))
    sums[-1] = zlib.crc32(bytes(sizes[-1] - len(ending)) + ending)
    skeleton = {"dict": [["large", {"tensor": "large"}]]}
    write_json(step / STATE, {"entries": {"big": skeleton}, "ranks": [{}], "kinds": {}})
    content = (step / STATE).read_bytes()
    state = {"bytes": len(content), "page_bytes": len(content)}
    manifest = {
        "format": FORMAT,
        "step": 1,
        "order": 1,
        "world_size": 1,
        "about": {},
        "files": {
            "big.safetensors": {
                "bytes": image.nbytes,
                "page_bytes": page,
                "crc32": [f"{crc:08x}" for crc in sums],
            },
            STATE: {**state, "crc32": [f"{zlib.crc32(content):08x}"]},
        },
        "tensors": {
            "big": {
                "large": {
                    "dtype": "I8",
                    "shape": [count],
                    "parts": [["big.safetensors", 0, count]],
                }
            }
        },
    }
    write_manifest(step, manifest)
    end = torch.zeros(300, dtype=torch.int8)
    with StepReader(step) as reader:
        reader.read_into("big", {"large": Part(end, (count,), count - 300)})
        assert reader.bytes_read <= 3 * page
    assert torch.equal(end, torch.cat([torch.zeros(100, dtype=torch.int8), values]))
    # And the plan of writing it: no offset is cut to 32 bits.
    *_, (offset, runs) = image.pages(page)
    assert offset == (len(sizes) - 1) * page >= 2**32
    assert runs[-1][1] + runs[-1][2] == count


# What stays


def test_failed_save_keeps_other_steps(tmp_path: Path, engine: Engine) -> None:
    checkpointer = AsyncCheckpointer(tmp_path, keep=1, engine=engine)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    for step in (2, 1):  # another step, and the same again
        engine.inject("write", 7, errno.EIO)
        checkpointer.save(step, state_of(5))
        with pytest.raises(GulliverError, match=f"step {step} was not saved"):
            checkpointer.wait()
        assert CheckpointFolder(tmp_path).steps() == [1]
        assert_good(tmp_path, 1, 1)
    checkpointer.close()


def test_tensors_made_for_inference_are_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        tensor = torch.rand(LARGE)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": tensor})
    assert torch.equal(load(tmp_path).values["a"], tensor)


# Several ranks


def _caught(call: Callable[[], object]) -> str:
    try:
        call()
    except (GulliverError, KeyError) as error:
        return str(error)
    return "fine"


@contextlib.contextmanager
def _engine_of_a_rank() -> Iterator[Engine]:
    with PythonEngine(page_bytes=PAGE, pages=PAGES) as engine:
        yield engine


def _per_rank(world: World, root: str) -> list[Any]:
    with AsyncCheckpointer(root) as checkpointer:
        own = {"rng": torch.full((5,), world.rank), "seed": world.rank * 10}
        checkpointer.save(1, {**state_of(1), "own": PerRank(own)})
    found = load(root).values["own"]
    return [found["seed"], found["rng"].tolist()]


def test_per_rank_values_are_restored_per_rank(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(_per_rank, 2, str(tmp_path))
    assert found == [[0, [0] * 5], [10, [1] * 5]]


def _save_unlike(world: World, root: str) -> list[str]:
    state = {"a": torch.zeros(10 + world.rank)}
    said = []
    with AsyncCheckpointer(root) as checkpointer:
        said.append(_caught(lambda: checkpointer.save(1, state)))
        checkpointer.save(1, {"a": torch.zeros(10)})
        said.append(_caught(checkpointer.wait))
    return said


def test_ranks_that_save_different_states_are_refused(pool: Pool, tmp_path: Path) -> None:
    for one, two in pool.run(_save_unlike, 2, str(tmp_path)):
        assert "ranks save different states; mark values that differ with PerRank" in one
        assert two == "fine"
    assert_clean(tmp_path)


def _save_with_a_failing_rank(world: World, root: str, call: Call, failing: int) -> list[str]:
    said = []
    with _engine_of_a_rank() as engine:
        checkpointer = AsyncCheckpointer(root, engine=engine)
        for step in (1, 2, 3):
            if step == 2 and world.rank == failing:
                engine.inject(call, 1, errno.ENOSPC)
            checkpointer.save(step, {**state_of(step), "own": PerRank(torch.rand(LARGE))})
            said.append(_caught(checkpointer.wait))
        checkpointer.close()
    return said


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", ["open", "write"])
def test_failure_of_one_rank_is_raised_on_all(
    pool: Pool, tmp_path: Path, call: Call, failing: int
) -> None:
    for rank, said in enumerate(
        pool.run(_save_with_a_failing_rank, 2, str(tmp_path), call, failing)
    ):
        assert said[0] == said[2] == "fine", said
        assert "step 2 was not saved" in said[1]
        assert os.strerror(errno.ENOSPC) in said[1]
        assert rank == failing or f"rank {failing}" in said[1]
    assert CheckpointFolder(tmp_path).steps() == [1, 3]
    for step in (1, 3):
        _verify(CheckpointFolder(tmp_path).path(step))
    assert_clean(tmp_path)


class _Unsaveable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error


def _save_what_one_cannot(world: World, root: str, error: Exception) -> list[str]:
    said = []
    checkpointer = AsyncCheckpointer(root)
    for step in (1, 2):
        broken = {"x": _Unsaveable(error)} if world.rank == 1 and step == 1 else {"x": 3}
        said.append(_caught(lambda step=step, broken=broken: checkpointer.save(step, broken)))
    checkpointer.close()
    return said


@pytest.mark.parametrize("kind", [GulliverError, KeyError])
def test_unsavable_state_of_one_rank_is_raised_on_all(
    pool: Pool, tmp_path: Path, kind: type[Exception]
) -> None:
    error = kind("this rank cannot")
    for said in pool.run(_save_what_one_cannot, 2, str(tmp_path), error):
        assert "this rank cannot" in said[0]
        assert said[1] == "fine"
    assert CheckpointFolder(tmp_path).steps() == [2]
    assert_clean(tmp_path)


def _save_where_one_has_no_memory(world: World, root: str) -> str:
    publishing.PATIENCE_S = 1.0

    def none(*args: object) -> Engine:
        raise GulliverError("no memory for pages")

    checkpointer = AsyncCheckpointer(root)
    if world.rank == 1:
        checkpointer._ready_engine = none  # type: ignore[method-assign]
    said = _caught(lambda: checkpointer.save(1, {"a": torch.zeros(3)}))
    return said if said != "fine" else _caught(checkpointer._join) + str(checkpointer._failure)


def test_out_of_memory_of_one_rank_is_raised_on_all(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(_save_where_one_has_no_memory, 2, str(tmp_path)):
        assert "no memory for pages" in said


def _save_beside_a_leftover(world: World, root: str, word: dict[str, Any]) -> str:
    """A rank of an older job, whose rank 0 was killed, leaves its word in the new job's folder."""
    with _engine_of_a_rank() as engine:
        checkpointer = AsyncCheckpointer(root, engine=engine)
        if world.rank == 1:
            engine.hold(True)
        # A file of its own, so that a held engine keeps it from having its say.
        state = {**state_of(1), "own": torch.ones(50_000)}
        with guarded(state):
            checkpointer.save(1, {**state, "own": PerRank(state["own"])})
        if world.rank == 1:
            write_json(checkpointer.folder.partial(1) / "rank-00001.json", word)
            engine.hold(False)
        said = _caught(checkpointer.wait)
        _caught(checkpointer.close)
    return said


def test_rank_reports_of_older_jobs_are_ignored(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(_save_beside_a_leftover, 2, str(tmp_path), {"error": "of another job"})
    assert said == ["fine", "fine"]


def test_heartbeat_is_seen_for_rank_that_starts_late(tmp_path: Path) -> None:
    create_heartbeats(tmp_path, 2)
    looking = lock_file(tmp_path / "rank-00001.alive")
    assert looking is not None
    threading.Timer(0.05, unlock, [looking]).start()
    alive, watch = Heartbeat(tmp_path, 1), HeartbeatWatch(tmp_path, 1, silence_s=0)
    watch.check()  # it writes, however long
    alive.end(done=False)
    with pytest.raises(GulliverError, match="rank 1 ended or failed"):
        watch.check()


def test_a_step_may_be_completed_as_soon_as_the_last_report_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, complete, replace = tmp_path / "step.partial", tmp_path / "step", os.replace
    partial.mkdir()

    def complete_at_once(source: Path, target: Path) -> None:
        replace(source, target)
        replace(partial, complete)

    monkeypatch.setattr(os, "replace", complete_at_once)
    publishing.write_rank_report(partial, 1, "id", {"files": {}})
    assert [path.name for path in complete.iterdir()] == ["rank-00001.json"]
