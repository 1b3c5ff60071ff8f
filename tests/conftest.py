"""Fixtures of the whole suite: the pool of workers, and a deadline for every test."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.pool import Pool, start_server

TEST_DEADLINE_S = 150
start_server()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deadline(seconds): how long a test may take")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Workers that live as long as the session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that hangs, with the stacks of all threads."""
    marker = request.node.get_closest_marker("deadline")
    seconds = marker.args[0] if marker else TEST_DEADLINE_S

    def expired(number: int, frame: object) -> None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        pytest.fail(f"not done after {seconds} s (stacks above)")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    # A thread that never comes back from native code cannot be interrupted: the session ends then.
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
