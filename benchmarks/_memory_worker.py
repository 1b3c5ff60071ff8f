"""The process of a job of `benchmarks.memory`: builds a contestant, trains it, says what happens.

It is started inside its control group, so even what its imports need is charged. Every event is a
line, with the seconds since the process began: what was done is known even of one that is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import _memory_jobs as jobs
from benchmarks._memory_jobs import Job, Step
from benchmarks._models import Task, gpt
from benchmarks._peers import Contestant, boosted, deepspeed, fsdp2, plain
from benchmarks.limits import disk_bytes
from gulliver.booster import GeminiPlugin
from gulliver.errors import GulliverError
from gulliver.hardware.probe import probe_disk
from gulliver.memory import activation_peak
from gulliver.plan.tree import Work

BEGAN = time.monotonic()
DISK_FILE = 512 << 20  # Bytes of the file that the disk is measured with
OWN_OPTIONS = ("constant", "attention", "told")  # Options that are not the plugin's


class Absent(Exception):
    """A contestant is not installed; the message says what is missing."""


def say(kind: str, **values: Any) -> None:
    """Prints an event."""
    event = {"kind": kind, "at": time.monotonic() - BEGAN, **values}
    print(jobs.MARK + json.dumps(event), flush=True)


def task_of(job: Job) -> Task:
    """Model and batches that a job trains."""
    task = gpt(job.width, job.depth, job.batch, job.length)
    return recomputed(task) if job.recompute else task


def recomputed(task: Task) -> Task:
    """The task with every block computed again in backward."""

    def model() -> nn.Module:
        net = task.model()
        for block in task.blocks(net):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return net

    return Task(task.name, model, task.loss, task.blocks)


def contestant_of(job: Job) -> Contestant:
    task = task_of(job)
    if job.contestant == jobs.GEMINI:
        return gemini(job, task)
    if job.contestant in (jobs.PLAIN, jobs.SWAP):
        return plain(task)
    if job.contestant == jobs.FSDP2:
        _world_of_one()
        return fsdp2(job.contestant, task, reshard=True, offload=True)
    if job.contestant in (jobs.DEEPSPEED_CPU, jobs.DEEPSPEED_DISK):
        _world_of_one()
        disk = job.contestant == jobs.DEEPSPEED_DISK
        target = {"device": "nvme", "nvme_path": job.folder} if disk else {"device": "cpu"}
        found = deepspeed(job.contestant, task, 3, target)
        if found is None:
            raise Absent("the package deepspeed is not installed")
        return found
    raise Absent(f"nobody is called {job.contestant}")


def gemini(job: Job, task: Task) -> Contestant:
    """Ours, under a limit that leaves room for the interpreter and torch."""
    limit = job.options.get("told", job.limit - job.options.get("constant", 0))
    known = {n: v for n, v in job.options.items() if n not in OWN_OPTIONS}
    return boosted(job.contestant, task, _plugin(job, limit, **known), peak_of(job, task))


def peak_of(job: Job, task: Task) -> Work:
    """Bytes that a batch takes besides state, followed with shapes alone: here it would not fit."""
    with torch.device("meta"):
        model = task.model()
        sample = torch.zeros(job.batch, job.length, dtype=torch.long)
    peak = activation_peak(model, (sample,)).bytes or 0
    return Work(samples=job.batch, tokens=job.tokens, peak=peak)


def _plugin(job: Job, limit: int, **options: Any) -> GeminiPlugin:
    disk = f"{job.folder}:{job.disk // jobs.MIB}MiB" if job.disk else None
    return GeminiPlugin(f"{limit // jobs.MIB}MiB", disk=disk, verbose=False, **options)


def train(job: Job) -> None:
    contestant = contestant_of(job)
    say("ready")
    count = disk_counter()
    for number in range(job.warm_up + job.steps):
        before, started = count(), time.perf_counter()
        contestant.advance(0, 1)
        seconds, after = time.perf_counter() - started, count()
        moved = after[0] - before[0], after[1] - before[1]
        say(
            "step",
            timed=number >= job.warm_up,
            step=asdict(Step(seconds, contestant.loss, *moved, number)),
        )
    contestant.finish()
    say("facts", facts=_facts(contestant))


def _facts(contestant: Contestant) -> dict[str, Any]:
    manager = getattr(getattr(contestant.optimizer, "shards", None), "manager", None)
    return {} if manager is None else dict(manager.stats())


def disk_counter() -> Callable[[], tuple[int, int]]:
    """Counts the bytes that this process's group has read and written; of swap, the machine's."""
    folder, device, version = json.loads(os.environ["GULLIVER_BENCH_GROUP"])

    def count() -> tuple[int, int]:
        read, written = disk_bytes(Path(folder), device, version)
        lines = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        pages = {name: int(number) for name, number in lines}
        swapped = (mmap.PAGESIZE * pages.get(name, 0) for name in ("pswpin", "pswpout"))
        return read + next(swapped), written + next(swapped)

    return count


def _world_of_one() -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def measure_disk(job: Job) -> None:
    """Bytes per second of reading, of writing, and of as much of both at once, past the cache."""
    disk = probe_disk(Path(job.folder), DISK_FILE)
    rates = {"read": disk.read_rate, "write": disk.write_rate, "both": disk.both_rate}
    say("facts", facts={f"{name}_bps": rate for name, rate in rates.items()})


def main(text: str) -> int:
    job = Job(**json.loads(text))
    try:
        (measure_disk if job.contestant == jobs.DISK else train)(job)
    except Absent as error:
        say("error", end="absent", told=str(error))
        return 1
    except GulliverError as error:
        say("error", end="refused", told=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
