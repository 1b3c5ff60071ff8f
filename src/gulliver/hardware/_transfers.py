"""Collectives that follow each other without a pause, as those of a step's chunks do.

Alone, a collective takes its latency and its bytes. In a row only a part of the latency keeps the
link from the next one: the messages of one are under way while those of another are prepared. So
they are timed in a row here, at two sizes, which gives each a line of Hockney's; and once alone,
which gives the latency that nothing hides. It is measured on the very group that is in use, with
what else its ranks do left out.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gulliver.hardware._cluster import Link
from gulliver.hardware._costs import point_to_point_seconds

PROBED_BYTES = (2**17, 2**21)
IN_A_ROW = 6
"""Transfers that are timed together: a link is not idle between them, as in a step."""
Start = Callable[[int], Any]
"""Starts transfer number n of a row; what it returns has `wait`."""


@dataclass(frozen=True)
class Transfers:
    """What collectives in a row cost.

    Attributes:
        lines: link as it seems to each collective: seconds that one occupies it beside its bytes
            (`alpha_s`) and bytes/s of the whole tensor (`bandwidth`).
        latency_s: seconds until the result of a transfer is there that has the link to itself,
            beyond those that it occupies it.
        processor_s: processor seconds per byte that are taken from computing; 0 where a core is
            left to carry messages.
    """

    lines: Mapping[str, Link]
    latency_s: float = 0.0
    processor_s: float = 0.0

    def seconds(self, name: str, count: int) -> float:
        """Seconds for which a collective of `count` bytes occupies the link."""
        return point_to_point_seconds(self.lines[name], count)


def probe_transfers(
    operations: Mapping[str, Callable[[int], Start]], device: torch.device
) -> Transfers:
    """Times collectives in a row; every rank of the world calls it, and finds what it finds.

    Args:
        operations: given bytes of the whole tensor, makes what starts `IN_A_ROW` transfers; by
            name of the collective.
        device: device of the tensors.
    """
    lines, hidden, processor_s = {}, [], 0.0
    for name, operation in operations.items():
        took = {}
        for count in PROBED_BYTES:
            start = operation(count)
            rows = [_timed(start, IN_A_ROW, device) for _ in range(3)]
            took[count] = min(seconds for seconds, _ in rows) / IN_A_ROW
            processor_s = min(busy for _, busy in rows) / IN_A_ROW / count
            if count == min(PROBED_BYTES):
                alone = min(_timed(start, 1, device)[0] for _ in range(3))
                hidden.append(max(0.0, alone - took[count]))
        lines[name] = line_through(took)
    return Transfers(lines, min(hidden), processor_s if _crowded(device) else 0.0)


def line_through(took: Mapping[int, float]) -> Link:
    """Latency and bandwidth through two points, seconds by bytes; neither is negative."""
    # Between the points, and not by least squares: a shaped link lets small messages pass at once,
    # which says nothing of its rate.
    (small, low), (large, high) = sorted(took.items())
    slope = max(high - low, 1e-9 * high) / (large - small)
    return Link(max(0.0, low - slope * small), 1 / slope)


def _timed(start: Start, count: int, device: torch.device) -> tuple[float, float]:
    """Seconds, and processor seconds of this process, of transfers that are started together."""
    dist.barrier()
    begun, busy = time.perf_counter(), time.process_time()
    for handle in [start(number) for number in range(count)]:
        handle.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - begun, time.process_time() - busy


def _crowded(device: torch.device) -> bool:
    """Whether the ranks of this machine compute on all of its cores."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    busy = names.count(socket.gethostname()) * torch.get_num_threads()
    return device.type == "cpu" and busy >= (os.cpu_count() or 1)
