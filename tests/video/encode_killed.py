"""Encodes, and ends itself by SIGKILL again and again, at reads, writes and renames of any moment.

Started by `tests/video/test_kept_latents.py`: the options as JSON, the
number of kills, a seed, and the number of ranks. It has imported everything; what it forks is there
in no time. After the last kill the call runs to its end. Prints the number of kills.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from gulliver.comm import shutdown
from gulliver.data.table import ClipTable
from gulliver.options import from_plain
from gulliver.video.config import EncodeConfig
from gulliver.video.preparation.encoding import encode

EVENTS = ((os, "replace"), (os, "fsync"), (os, "unlink"), (ClipTable, "read"))
"""What is counted, before and after it happens."""
MOST = 14
"""Most events of a call that is killed, so that there are calls enough until the end."""


def _arm(after: int) -> None:
    """Lets this process end at an event."""
    left = [after]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for place, name in EVENTS:
        setattr(place, name, _counted(getattr(place, name), count))


def _counted(inner: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def counted(*told: Any, **more: Any) -> Any:
        count()
        found = inner(*told, **more)
        count()
        return found

    return counted


def _child(config: EncodeConfig, world: tuple[int, int, int], after: int) -> NoReturn:
    rank, ranks, port = world
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if ranks > 1:
        told = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ["MASTER_ADDR"] = "localhost"
    if after:
        _arm(after)
    encode(config)
    if ranks > 1:
        shutdown()
    os._exit(0)


def _call(config: EncodeConfig, ranks: int, after: int) -> bool:
    """Runs a call on ranks, of which one ends itself and the others are ended; whether it ended."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    victim = after % ranks
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _child(config, (rank, ranks, port), after if rank == victim else 0)
        children.append(child)
    codes = []
    while children:
        child, status = os.wait()
        children.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            for other in children:
                os.kill(other, signal.SIGKILL)
    unexpected = {code for code in codes if code not in (0, -signal.SIGKILL)}
    assert not unexpected, f"a rank ended with {unexpected}"
    return not any(codes)


def main(told: str, kills: int, seed: int, ranks: int) -> None:
    torch.set_num_threads(1)
    config = from_plain(json.loads(told), EncodeConfig)
    draw, killed = random.Random(seed), 0
    while killed < kills:
        if _call(config, ranks, draw.randint(1, MOST)):
            shutil.rmtree(Path(config.out))  # done before there were kills enough: once more
        else:
            killed += 1
    assert _call(config, ranks, 0)
    print(killed)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
