"""References that are computed once: by the first process that needs one, for all the others.

The ranks of a test, later tests and the other processes of pytest-xdist read what it computed from
a file. A reference must not depend on anything but its arguments: it seeds what it draws.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

FOLDER = "GULLIVER_TESTS_SHARED"
"""Environment variable with the folder of a test session; without it nothing is shared."""

P = ParamSpec("P")
R = TypeVar("R")


def folder_of_this_process(variable: str) -> None:
    """Makes a folder, tells of it by the environment, and removes it when this process ends."""
    folder = tempfile.mkdtemp(prefix="gulliver-tests-")
    os.environ[variable] = folder
    owner = os.getpid()

    def remove() -> None:
        # Children forked from here must leave it to this process.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


@contextmanager
def whole_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and removes it when its filling fails, so that the next attempt may begin."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def computed_once(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose results are kept for the session, by the values of its arguments.

    Everyone gets a copy of their own, which they may change.
    """

    @wraps(function)
    def shared(*args: P.args, **kwargs: P.kwargs) -> R:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return function(*args, **kwargs)
        named = (function.__module__, function.__qualname__, args, kwargs)
        path = Path(folder) / hashlib.sha256(_text(named).encode()).hexdigest()
        if not path.exists():
            # Ranks come at once: the first computes, the others sleep until it is done.
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    partial = path.with_suffix(".partial")
                    partial.write_bytes(pickle.dumps(function(*args, **kwargs)))
                    partial.rename(path)
        return pickle.loads(path.read_bytes())

    return shared


def _text(value: Any) -> str:
    """The same for equal arguments in every process; pickles are not."""
    import torch

    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(raw).hexdigest()}"
    if is_dataclass(value):
        return f"{type(value)}{_text({f.name: getattr(value, f.name) for f in fields(value)})}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_text(v)}' for k, v in sorted(value.items()))}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    assert type(value).__repr__ is not object.__repr__, f"{value} has no value to go by"
    return repr(value)
