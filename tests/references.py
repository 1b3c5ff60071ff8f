"""References that are computed once: by the first process that needs one, for all the others.

The ranks of a test, later tests and the other processes of pytest-xdist read what it computed from
a file. A reference must not depend on anything but its arguments: it seeds what it draws.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

FOLDER = "GULLIVER_TESTS_SHARED"
"""Environment variable with the folder of a test session; without it nothing is shared."""

P = ParamSpec("P")
R = TypeVar("R")


def computed_once(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose results, by its pickled arguments, are kept for the session.

    Everyone gets a copy of their own, which they may change.
    """

    @wraps(function)
    def shared(*args: P.args, **kwargs: P.kwargs) -> R:
        folder = os.environ.get(FOLDER)
        if folder is None:
            return function(*args, **kwargs)
        named = (function.__module__, function.__qualname__, args, sorted(kwargs.items()))
        key = hashlib.sha256(pickle.dumps(named)).hexdigest()
        path = Path(folder) / key
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
