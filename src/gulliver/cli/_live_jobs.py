"""``gulliver jobs submit, list, logs, why, stop, scheduler``: real jobs on slots that they share.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, part_of
from gulliver.schedule.live._options import JobsFolder, SchedulerOptions, Submission

if TYPE_CHECKING:
    from gulliver.schedule.live import ScheduleHistory, Spool

NO_SCHEDULER = "no scheduler runs: the next submission, or gulliver jobs scheduler, starts one"


@dataclass(frozen=True)
class Submit(SchedulerOptions, Submission):
    """Submits a training script; starts a scheduler where the folder has none."""

    script: tyro.conf.Positional[str] = tyro.MISSING
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    batch: Annotated[int, AT_LEAST_1] = tyro.MISSING
    idle: Annotated[float, AT_LEAST_1] = 60.0
    submitted: tyro.conf.Suppress[float] = 0.0


@dataclass(frozen=True)
class Listing(JobsFolder):
    """Lists jobs: what they hold, how far they are, and when they should end."""

    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """File to draw the schedule as it happened into."""


@dataclass(frozen=True)
class Logs(JobsFolder):
    """Prints what a job has printed."""

    job: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the job."""
    rank: Annotated[int, AT_LEAST_0] = 0
    """Rank."""
    attempt: Annotated[int | None, AT_LEAST_1] = None
    """Number of the attempt; the last by default."""
    curve: bool = False
    """Print the steps that count, a JSON line each: samples, loss, batch, attempt."""


@dataclass(frozen=True)
class Why(JobsFolder):
    """Says why a job waits, runs or shrank, and when it should end."""

    job: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the job."""


@dataclass(frozen=True)
class Stop(JobsFolder):
    """Asks a job to save and end; without a job, the scheduler: its jobs wait for the next one."""

    job: tyro.conf.Positional[str | None] = None
    """Name of the job."""


@dataclass(frozen=True)
class Scheduler(SchedulerOptions):
    """Schedules in the foreground, until Ctrl+C or SIGTERM: for a service or a batch system."""

    idle: Annotated[float, AT_LEAST_1] = 60.0


def live_jobs(action: JobsFolder) -> int:
    """Runs an action."""
    doers = {Submit: submit, Listing: show, Logs: logs, Why: explain, Stop: stop, Scheduler: run}
    return doers[type(action)](action)


def _spool(config: JobsFolder) -> Spool:
    from gulliver.schedule.live import Spool

    return Spool(config.path)


def submit(config: Submit) -> int:
    """Submits a job."""
    from gulliver.schedule.live import ensure_scheduler

    spool = _spool(config)
    options = part_of(config, SchedulerOptions)
    submission = part_of(config, Submission)
    submission = replace(submission, directory=str(Path(config.directory).absolute()))
    spool.check(submission)
    begun = ensure_scheduler(
        options, lambda what: print(f"the scheduler {what}", file=sys.stderr, flush=True)
    )
    about = spool.scheduler() or {}
    if not begun:
        _check_same(config, about)
    if submission.slots > about.get("slots", submission.slots):
        raise GulliverError(
            f"job {submission.name!r} asks for {submission.slots} slots and the cluster has "
            f"{about['slots']}: lower its slots, or take a larger cluster"
        )
    spool.submit(submission)
    # The one that was there may have ended just before, with nothing to do.
    ensure_scheduler(options)
    if begun:
        print(
            f"scheduler started: {about.get('slots')} slots, policy {about.get('policy')}, Ray "
            f"cluster {about.get('address')}"
            + (f", dashboard http://{about['dashboard']}" if about.get("dashboard") else "")
        )
    print(f"submitted {submission.name}: gulliver jobs why {submission.name} says what it does")
    return 0


def _check_same(config: SchedulerOptions, about: Mapping[str, Any]) -> None:
    """Refuses options that only a scheduler that starts could take."""
    # Of a cluster elsewhere slots are said by node.
    slots = config.cluster_slots if config.address in ("local", "here") else None
    for name, wanted, default in (
        ("policy", config.policy, SchedulerOptions.policy),
        ("slots", slots, None),
    ):
        if wanted != default and wanted != about.get(name, wanted):
            raise GulliverError(
                f"the scheduler that runs has {name} {about[name]}, not {wanted}: leave that out, "
                "or stop it first with gulliver jobs stop"
            )


def _history(spool: Spool) -> ScheduleHistory:
    from gulliver.schedule.live import read_history

    found = read_history(spool)
    if found is None:
        raise GulliverError(f"nothing was scheduled in {spool.path}: submit a job first")
    return found


def show(config: Listing) -> int:
    """Lists jobs."""
    from gulliver.schedule.live import expected_ends, has_scheduler, live_page

    spool = _spool(config)
    history = _history(spool)
    ends = expected_ends(history)
    if config.json:
        print(json.dumps([_plain(history, name, ends) for name in history.jobs]))
    else:
        _table(history, ends)
        for name, why in history.refused.items():
            print(f"{name} was refused: {why}")
        if not has_scheduler(spool):
            print(NO_SCHEDULER)
    if config.html is not None:
        from gulliver.io import named_errors, write_text

        with named_errors(config.html):
            write_text(config.html, live_page(history))
        print(f"report: {config.html}", file=sys.stderr)
    return 0


def _plain(history: ScheduleHistory, name: str, ends: dict[str, float]) -> dict[str, object]:
    job = history.jobs[name]
    return {
        "name": name,
        "phase": job.phase.value,
        "slots": len(job.held),
        "batch": job.batch,
        "done": job.progress.get("done", 0.0),
        "samples": job.submission.samples,
        "attempts": job.attempt,
        "resizes": job.resizes,
        "noise": job.progress.get("noise"),
        "ended": job.ended,
        "expected": ends.get(name),
        "note": job.note,
    }


def _table(history: ScheduleHistory, ends: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 130
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    table = Table("job", "phase", "slots", "done", "attempts", "resizes s", "ends in", "what")
    for job in history.jobs.values():
        samples, done = job.submission.samples, job.progress.get("done", 0.0)
        table.add_row(
            job.name,
            job.phase.value,
            str(len(job.held)),
            f"{min(done / samples, 1):.0%}" if samples else f"{done:.0f}",
            str(job.attempt),
            " ".join(f"{seconds:.1f}" for seconds in job.resizes[-3:]),
            f"{ends[job.name] - history.now:.0f} s" if job.name in ends else "",
            job.note,
        )
    console.print(table)


def logs(config: Logs) -> int:
    """Prints a log."""
    folder = _spool(config).known(config.job)
    if config.curve:
        from gulliver.schedule.live import read_curve

        for line in read_curve(folder):
            print(json.dumps(line))
        return 0
    attempt = "*" if config.attempt is None else f"{config.attempt:03d}"
    found = sorted((folder / "logs").glob(f"attempt-{attempt}-rank-{config.rank}.log"))
    if not found:
        raise GulliverError(
            f"job {config.job!r} has no log of rank {config.rank}"
            + (f" in attempt {config.attempt}" if config.attempt else ": it was not started yet")
        )
    print(found[-1].read_text(encoding="utf-8", errors="replace"), end="")
    return 0


def explain(config: Why) -> int:
    """Explains a job."""
    from gulliver.schedule.live import has_scheduler, live_why

    spool = _spool(config)
    spool.known(config.job)
    print("\n".join(live_why(_history(spool), config.job)))
    if not has_scheduler(spool):
        print(NO_SCHEDULER)
    return 0


def stop(config: Stop) -> int:
    """Stops a job, or the scheduler."""
    from gulliver.schedule.live import has_scheduler, read_history, stop_scheduler

    spool = _spool(config)
    if config.job is None:
        stop_scheduler(spool.path)
        print("the scheduler ends once its jobs have saved; they wait for the next one")
        return 0
    folder = spool.known(config.job)
    history = read_history(spool)
    job = history.jobs.get(config.job) if history else None
    if job is not None and job.phase.over:
        raise GulliverError(f"job {config.job!r} is over: {job.phase.value}, {job.note}")
    (folder / "stop").write_text(f"{time.time()}\n")
    waits = "" if has_scheduler(spool) else "; no scheduler runs, the next one will see it"
    print(f"{config.job} saves and ends{waits}")
    return 0


def run(config: Scheduler) -> int:
    """Schedules in the foreground."""
    from gulliver.schedule.live import serve

    serve(part_of(config, SchedulerOptions))
    return 0
