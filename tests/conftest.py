"""Fixtures of the whole suite: the pool of workers, deadlines, and which cases run by default."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.cpu_times import CpuTimes
from tests.patience import Deadline, session_factor
from tests.pool import MANY_FILES, Pool, start_server
from tests.references import FOLDER, folder_of_this_process

TEST_DEADLINE_S = 150.0
NATIVE_GRACE_S = 30.0
DEAREST = 10
LONG_CASES = Path(__file__).with_name("long_cases.txt")
FEWER, LEAST_EXAMPLES = 4, 10
"""Without --full hypothesis tries a fourth of a test's examples, and no fewer than these."""
STDERR = pytest.StashKey[int]()
os.environ.pop("COLUMNS", None)  # a width that tables are abridged to


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full grids, as make test-all")
    parser.addoption("--cpu-times", metavar="FILE", help="append CPU seconds and name of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deadline(seconds): how long a test may take")
    if STDERR not in config.stash:
        # While tests run, the file of sys.__stderr__ is one that pytest captures into.
        config.stash[STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    if times := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(Path(times)), "cpu-times")
    is_worker = hasattr(config, "workerinput")
    if not _begun:
        _begun.append(config)
        _begin(is_worker)


_begun: list[pytest.Config] = []
"""The session of this process: a test of these fixtures configures another inside it."""


def _begin(is_worker: bool) -> None:
    """Prepares this process."""
    session_factor()
    # Deadlines are those of this file: a single example may wait for a core.
    slow = [HealthCheck.too_slow]
    settings.register_profile("gulliver", deadline=None, suppress_health_check=slow)
    settings.load_profile("gulliver")
    if not is_worker:
        folder_of_this_process(FOLDER)
    # What is kept from job to job must not pass from test session to test session.
    folder_of_this_process("GULLIVER_CACHE")
    # Before torch is imported, here and in what this process starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_report_header() -> str:
    return f"deadlines: {session_factor():.2f} x those of an idle core of 2.1 GHz"


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the full grids run: loops may be longer then."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that live as long as the session."""
    workers = Pool()
    yield workers
    workers.close()


@contextmanager
def _deadline(item: pytest.Item) -> Iterator[None]:
    """Fails what hangs, with the stacks of all threads."""
    marker = item.get_closest_marker("deadline")
    due = Deadline(float(marker.args[0]) if marker else TEST_DEADLINE_S)
    stderr = item.config.stash[STDERR]

    def arm(left: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, left)
        # What never comes back from native code cannot be interrupted: the process ends then, and
        # pytest-xdist names the test and starts another.
        native = 2 * left + NATIVE_GRACE_S
        faulthandler.dump_traceback_later(native, exit=True, file=stderr)

    def expired(number: int, frame: object) -> None:
        left = due.left()
        if left > 0:
            arm(left)
            return
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            pytest.fail(f"not done after {due.seconds:g} s\n{stacks.read()}", pytrace=False)

    before = signal.signal(signal.SIGALRM, expired)
    arm(due.left())
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with _deadline(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _deadline(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with _deadline(item):
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What was imported stays: a collection of garbage need not look at a million objects each time.
    gc.freeze()
    # In the processes that run tests: the server is a program of its own, and forks the workers.
    if session.items and not session.config.option.collectonly:
        start_server(many=len({item.path for item in session.items}) > MANY_FILES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
    _mark_long_cases(config, items)
    if not config.getoption("--full"):
        _try_fewer_examples(items)
        left_out = [item for item in items if "full" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "full" not in item.keywords]


def _mark_long_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives the cases of the table the marker `full`."""
    lines = LONG_CASES.read_text().splitlines()
    long = {line.partition(" ")[2] for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.full)
    if config.getoption("--full") and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        gone = sorted(long - {item.nodeid for item in items})
        if gone:
            raise pytest.UsageError(f"{LONG_CASES.name} names no test: {gone[0]}")


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    # There is no public way to change what a test's own decorator says.
    name = "_hypothesis_internal_use_settings"
    for function in {getattr(item, "obj", None) for item in items}:
        if (own := getattr(function, name, None)) is not None:
            fewer = max(own.max_examples // FEWER, min(own.max_examples, LEAST_EXAMPLES))
            setattr(function, name, settings(own, max_examples=fewer))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says which files the time went to: a suite grows slow by a file at a time."""
    spent: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[report.location[0]] += report.duration
    if len(spent) <= DEAREST:
        return
    dearest = sorted(spent, key=spent.__getitem__, reverse=True)[:DEAREST]
    terminalreporter.section(
        f"the {DEAREST} dearest of {len(spent)} files, in seconds of a process"
    )
    for name in dearest:
        terminalreporter.write_line(f"{spent[name]:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(spent.values()):8.1f}  all")
