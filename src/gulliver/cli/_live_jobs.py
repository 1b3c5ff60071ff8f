"""``gulliver jobs submit, list, logs, why, stop, scheduler``: real jobs on slots that they share.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SEED, Options, Range

if TYPE_CHECKING:
    from gulliver.schedule.live import ScheduleHistory, SchedulerOptions, Spool

SLOTS = Range(1, 4096)
DAY = Range(0.1, 86400)
NO_SCHEDULER = "no scheduler runs: the next submission, or gulliver jobs scheduler, starts one"


@dataclass(frozen=True)
class Folder(Options):
    """Folder that jobs are submitted to."""

    folder: Path | None = None
    """Folder that scheduler, commands and jobs meet in, seen by all nodes; GULLIVER_JOBS or
    ~/.gulliver/jobs by default."""


@dataclass(frozen=True)
class Cluster(Folder):
    """Options that a scheduler is started with."""

    address: str = "local"
    """Ray cluster: its address, or local to start one on this machine; here does without Ray."""
    cluster_slots: Annotated[int | None, SLOTS] = None
    """Slots of a cluster on this machine; of another, most on a node. The GPUs or CPUs that there
    are by default."""
    policy: str = "rollout"
    """Policy: fifo, srpt, tiresias, optimus, pollux, ones or rollout."""
    seed: Annotated[int, SEED] = 0
    """Seed of policies that draw."""
    quota: tuple[str, ...] = ()
    """Slots that tenants have a right to, as TENANT=SLOTS."""
    idle: Annotated[float, AT_LEAST_1] = 60.0
    """Seconds without a job after which the scheduler ends."""
    dashboard: bool = False
    """Give a Ray cluster that is started its dashboard."""


@dataclass(frozen=True)
class Submit(Cluster):
    """Submits a training script; starts a scheduler where the folder has none."""

    script: tyro.conf.Positional[str] = tyro.MISSING
    """Script, which says how far it is with gulliver.schedule.elastic()."""
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """Arguments of the script, after --."""
    name: str | None = None
    """Name of the job; that of the script by default."""
    batch: Annotated[int, AT_LEAST_1] = tyro.MISSING
    """Global batch size."""
    samples: Annotated[float | None, POSITIVE] = None
    """Samples to process; leave it out where nobody knows, and say --epoch."""
    epoch: Annotated[float | None, POSITIVE] = None
    """Samples of an epoch."""
    slots: Annotated[int, SLOTS] = 1
    """Slots that it asks for."""
    most_slots: Annotated[int | None, SLOTS] = None
    """Most slots that it runs on; its smallest batch size by default."""
    least_batch: Annotated[int | None, AT_LEAST_1] = None
    """Smallest batch size that is allowed; it is fixed by default."""
    most_batch: Annotated[int | None, AT_LEAST_1] = None
    """Largest batch size that is allowed; it is fixed by default."""
    noise: Annotated[float, AT_LEAST_0] = 0.0
    """Gradient noise scale in samples, until the job reports a measured one."""
    deadline: Annotated[float | None, POSITIVE] = None
    """Seconds from now at which it should be done."""
    tenant: str = ""
    """Name that quotas know its user by."""
    sample_seconds: Annotated[float | None, POSITIVE] = None
    """Seconds of a sample on one slot, where they are known; measured as it runs."""
    step_seconds: Annotated[float, AT_LEAST_0] = 0.0
    """Seconds of a step that neither slots nor samples change."""
    exchange_seconds: Annotated[float, AT_LEAST_0] = 0.0
    """Seconds that one slot takes to send all gradients once."""
    env: tuple[str, ...] = ()
    """Environment variables, as NAME=VALUE."""
    fresh: bool = False
    """Give it an interpreter of its own instead of a fork of one that has imported torch."""
    report_within: Annotated[float, DAY] = 300.0
    """Seconds after which a job that says nothing is named."""
    stop_silent: bool = False
    """Stop such a job; it keeps its slots by default, and is not resized."""
    grace: Annotated[float, DAY] = 120.0
    """Seconds that it has to save and leave."""
    tries: Annotated[int, AT_LEAST_1] = 3
    """Failures from one checkpoint after which it is given up."""


@dataclass(frozen=True)
class Listing(Folder):
    """Lists jobs: what they hold, how far they are, and when they should end."""

    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """File to draw the schedule as it happened into."""


@dataclass(frozen=True)
class Logs(Folder):
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
class Why(Folder):
    """Says why a job waits, runs or shrank, and when it should end."""

    job: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the job."""


@dataclass(frozen=True)
class Stop(Folder):
    """Lets a job save and end; without a job, the scheduler, and jobs wait for the next one."""

    job: tyro.conf.Positional[str | None] = None
    """Name of the job."""


@dataclass(frozen=True)
class Scheduler(Cluster):
    """Schedules in the foreground, until Ctrl+C or SIGTERM: for a service or a batch system."""


def live_jobs(action: Folder) -> int:
    """Does what an action asks for."""
    doers = {Submit: submit, Listing: show, Logs: logs, Why: explain, Stop: stop, Scheduler: run}
    return doers[type(action)](action)


def quotas_of(texts: tuple[str, ...]) -> dict[str, int]:
    """Reads slots by tenant.

    Raises:
        GulliverError: one does not read TENANT=SLOTS.
    """
    quotas = {}
    for text in texts:
        tenant, equals, slots = text.partition("=")
        if not equals or not slots.isdigit():
            raise GulliverError(f"--quota {text!r}: give TENANT=SLOTS")
        quotas[tenant] = int(slots)
    return quotas


def _spool(config: Folder) -> Spool:
    from gulliver.schedule.live import Spool, default_folder

    return Spool((config.folder or default_folder()).absolute())


def _options(config: Cluster) -> SchedulerOptions:
    from gulliver.schedule.live import SchedulerOptions

    return SchedulerOptions(
        str(_spool(config).path),
        config.address,
        config.cluster_slots,
        config.policy,
        config.seed,
        quotas_of(config.quota),
        config.idle,
        config.dashboard,
    )


def _variables(texts: tuple[str, ...]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise GulliverError(f"--env {text!r}: give NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def submit(config: Submit) -> int:
    """Submits a job."""
    from gulliver.schedule.live import Submission, ensure_scheduler

    spool, script = _spool(config), Path(config.script)
    same = ("batch", "samples", "epoch", "slots", "most_slots", "least_batch", "most_batch")
    same += ("noise", "deadline", "tenant", "sample_seconds", "step_seconds", "exchange_seconds")
    same += ("fresh", "report_within", "stop_silent", "grace", "tries", "arguments")
    submission = Submission(
        name=config.name or script.stem,
        script=config.script,
        folder=str(Path.cwd()),
        environment=_variables(config.env),
        **{name: getattr(config, name) for name in same},
    )
    spool.check(submission)
    begun = ensure_scheduler(
        _options(config),
        lambda what: print(f"the scheduler {what}", file=sys.stderr, flush=True),
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
    ensure_scheduler(_options(config))
    if begun:
        print(
            f"scheduler started: {about.get('slots')} slots, policy {about.get('policy')}, Ray "
            f"cluster {about.get('address')}"
            + (f", dashboard http://{about['dashboard']}" if about.get("dashboard") else "")
        )
    print(f"submitted {submission.name}: gulliver jobs why {submission.name} says what it does")
    return 0


def _check_same(config: Cluster, about: Mapping[str, Any]) -> None:
    """Refuses what only a scheduler that starts could be told.

    Raises:
        GulliverError: the one that runs has another policy, or another number of slots.
    """
    # Of a cluster elsewhere slots are said by node.
    slots = config.cluster_slots if config.address in ("local", "here") else None
    for name, wanted, default in (
        ("policy", config.policy, Cluster.policy),
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

    serve(_options(config))
    return 0
