"""Fixtures of the whole suite: the pool of workers, and a deadline for every test."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from tests.pool import Pool, start_server

TEST_DEADLINE_S = 150.0
NATIVE_GRACE_S = 30.0
# What is kept from job to job must not pass from test session to test session.
os.environ["GULLIVER_CACHE"] = tempfile.mkdtemp(prefix="gulliver-tests-")
# Before anything runs torch here: what is forked from a process with its threads may hang.
start_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full grids, as make test-all")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deadline(seconds): how long a test may take")


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
    seconds = float(marker.args[0]) if marker else TEST_DEADLINE_S

    def expired(number: int, frame: object) -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            pytest.fail(f"not done after {seconds:g} s\n{stacks.read()}", pytrace=False)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # A thread that never comes back from native code cannot be interrupted: the session ends then.
    faulthandler.dump_traceback_later(seconds + NATIVE_GRACE_S, exit=True, file=sys.__stderr__)
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA device")
    grid = pytest.mark.skip(reason="of the full grid: --full or make test-all")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
        if "full" in item.keywords and not config.getoption("--full"):
            item.add_marker(grid)
