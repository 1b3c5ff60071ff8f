"""``gulliver jobs submit, list, logs, why, stop, scheduler``: jobs that share slots.

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

from gulliver.errors import GulliverError, UsageError, nearest
from gulliver.options import AT_LEAST_0, AT_LEAST_1, SEED, Options, Range, part_of
from gulliver.schedule.live.options import JobsFolder, SchedulerOptions, Submission, quotas_of

if TYPE_CHECKING:
    from gulliver.schedule.jobs import Job, JobCluster
    from gulliver.schedule.live.history import ScheduleHistory
    from gulliver.schedule.live.tracking import Spool
    from gulliver.schedule.simulator import Result


NO_SCHEDULER = (
    "no scheduler is running; the next submission or `gulliver jobs scheduler` starts one"
)


@dataclass(frozen=True)
class Submit(SchedulerOptions, Submission):
    """Submits a training script; starts a scheduler if the folder has none."""

    script: tyro.conf.Positional[str] = tyro.MISSING
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    batch_size: Annotated[int, AT_LEAST_1] = tyro.MISSING
    idle: Annotated[float, AT_LEAST_1] = 60.0
    submitted: tyro.conf.Suppress[float] = 0.0


@dataclass(frozen=True)
class Listing(JobsFolder):
    """Lists jobs: their slots, progress, and expected end."""

    json: bool = False
    """Print JSON."""
    html: Path | None = None
    """HTML file for a chart of the actual schedule."""


@dataclass(frozen=True)
class Logs(JobsFolder):
    """Prints the output of a job."""

    job: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the job."""
    rank: Annotated[int, AT_LEAST_0] = 0
    """Rank."""
    attempt: Annotated[int | None, AT_LEAST_1] = None
    """Number of the attempt; by default the last."""
    curve: bool = False
    """Print the completed steps, one JSON line each: samples, loss, batch, attempt."""


@dataclass(frozen=True)
class JobDecision(JobsFolder):
    """Explains why a job waits, runs or shrank, and when it should end."""

    job: tyro.conf.Positional[str] = tyro.MISSING
    """Name of the job."""


@dataclass(frozen=True)
class Stop(JobsFolder):
    """Stops a job after saving it; without a job, stops the scheduler and all its jobs."""

    job: tyro.conf.Positional[str | None] = None
    """Name of the job."""


@dataclass(frozen=True)
class Scheduler(SchedulerOptions):
    """Runs the scheduler in the foreground until Ctrl+C or SIGTERM, for use as a service."""

    idle: Annotated[float, AT_LEAST_1] = 60.0


def _spool(config: JobsFolder) -> Spool:
    from gulliver.schedule.live.tracking import Spool

    return Spool(config.path)


def submit(config: Submit) -> int:
    from gulliver.schedule.live.daemon import ensure_scheduler

    spool = _spool(config)
    options = part_of(config, SchedulerOptions)
    submission = part_of(config, Submission)
    submission = replace(submission, directory=str(Path(config.directory).absolute()))
    spool.check(submission)
    begun = ensure_scheduler(options)
    about = spool.scheduler() or {}
    if not begun:
        _check_same(config, about)
    if submission.slots > about.get("slots", submission.slots):
        raise UsageError(
            f"job {submission.name!r} requests {submission.slots} slots, but the cluster has "
            f"{about['slots']}: reduce its slots, or use a larger cluster"
        )
    spool.submit(submission)
    # The previous scheduler may just have ended, because it had no jobs.
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
    """Rejects options that only a newly started scheduler could use."""
    # Slots of a remote cluster are specified per node.
    slots = config.cluster_slots if config.address in ("local", "here") else None
    for name, wanted, default in (
        ("policy", config.policy, SchedulerOptions.policy),
        ("slots", slots, None),
    ):
        if wanted != default and wanted != about.get(name, wanted):
            raise UsageError(
                f"the running scheduler has {name} {about[name]}, not {wanted}; omit that option, "
                "or first stop it with `gulliver jobs stop`"
            )


def _history(spool: Spool) -> ScheduleHistory:
    from gulliver.schedule.live.history import read_history

    found = read_history(spool)
    if found is None:
        raise GulliverError(f"nothing was scheduled in {spool.path}: submit a job first")
    return found


def show(config: Listing) -> int:
    from gulliver.schedule.live.daemon import has_scheduler
    from gulliver.schedule.live.history import expected_ends, live_page

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
        from gulliver.io.files import named_errors, write_text

        with named_errors(config.html):
            write_text(config.html, live_page(history))
        print(config.html, file=sys.stderr if config.json else sys.stdout)
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
    from rich.table import Table

    from gulliver.jobs.display import report_console

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
    report_console().print(table)


def logs(config: Logs) -> int:
    folder = _spool(config).known(config.job)
    if config.curve:
        from gulliver.schedule.live.training import read_curve

        for line in read_curve(folder):
            print(json.dumps(line))
        return 0
    attempt = "*" if config.attempt is None else f"{config.attempt:03d}"
    found = sorted((folder / "logs").glob(f"attempt-{attempt}-rank-{config.rank}.log"))
    if not found:
        raise UsageError(
            f"job {config.job!r} has no log of rank {config.rank}"
            + (f" in attempt {config.attempt}" if config.attempt else "; it may not have started")
        )
    print(found[-1].read_text(encoding="utf-8", errors="replace"), end="")
    return 0


def explain(config: JobDecision) -> int:
    from gulliver.schedule.live.daemon import has_scheduler
    from gulliver.schedule.live.history import live_why

    spool = _spool(config)
    spool.known(config.job)
    print("\n".join(live_why(_history(spool), config.job)))
    if not has_scheduler(spool):
        print(NO_SCHEDULER)
    return 0


def stop(config: Stop) -> int:
    from gulliver.schedule.live.daemon import has_scheduler, stop_scheduler
    from gulliver.schedule.live.history import read_history

    spool = _spool(config)
    if config.job is None:
        stop_scheduler(spool.path)
        print("the scheduler ends once its jobs have saved; they wait for the next one")
        return 0
    folder = spool.known(config.job)
    history = read_history(spool)
    job = history.jobs.get(config.job) if history else None
    if job is not None and job.phase.over:
        raise UsageError(f"job {config.job!r} is over: {job.phase.value}, {job.note}")
    (folder / "stop").write_text(f"{time.time()}\n")
    waits = "" if has_scheduler(spool) else "; no scheduler runs, the next one will see it"
    print(f"{config.job} saves and ends{waits}")
    return 0


def run(config: Scheduler) -> int:
    from gulliver.schedule.live.daemon import serve

    serve(part_of(config, SchedulerOptions))
    return 0


# ``gulliver jobs``: simulated jobs that share a cluster; `jobs.py` runs real ones.
#
# Nothing here imports torch at its top: ``--help`` reads this module.


@dataclass(frozen=True)
class Simulate(Options):
    """Simulates jobs on a shared cluster: when each ends, why it waits, and summary metrics."""

    trace: tyro.conf.Positional[str] = "steady"
    """CSV or JSON file of jobs, or a generated trace: steady, heavy-tail, bursts, fixed-batch,
    artifact."""
    policy: str = "rollout"
    """Policy: fifo, srpt, tiresias, pollux or rollout."""
    compare: bool = False
    """Simulate all other policies too."""
    slots: Annotated[int | None, Range(1, 4096)] = None
    """Slots of the cluster; by default those for which a generated trace is designed."""
    node_slots: Annotated[int | None, Range(1, 4096)] = None
    """Slots per node; by default all are on one node."""
    across: Annotated[float, Range(1, 1e6)] = 1.0
    """Ratio of transfer times between nodes and within a node."""
    hardware: str | None = None
    """Described cluster, or its file, that determines slots, nodes and transfer times."""
    quota: tuple[str, ...] = ()
    """Guaranteed slots of tenants, as TENANT=SLOTS."""
    why: str | None = None
    """Job to explain: why it waits or shrank, and when it should end."""
    at: Annotated[float | None, AT_LEAST_0] = None
    """Time in seconds at which to explain it; by default the job's arrival."""
    seed: Annotated[int, SEED] = 0
    """Seed of a generated trace, and of randomized policies."""
    html: Path | None = None
    """HTML file for a chart of the schedules."""
    save: Path | None = None
    """CSV file to write the trace to."""
    json: bool = False
    """Print JSON."""


def simulate_jobs(config: Simulate) -> int:
    from gulliver.jobs.display import working
    from gulliver.schedule.policies import POLICIES, make_policy
    from gulliver.schedule.report import why
    from gulliver.schedule.simulator import simulate
    from gulliver.schedule.traces import write_trace

    if config.at is not None and config.why is None:
        raise UsageError("--at only applies with --why; name a job with --why JOB")
    if config.why is not None and (config.compare or config.json or config.html):
        raise UsageError("--why explains one job: omit --compare, --json and --html")
    if config.policy not in POLICIES:
        raise UsageError(f"unknown --policy {config.policy!r}: {nearest(config.policy, POLICIES)}")
    jobs, cluster = _trace(config)
    policy = make_policy(config.policy, config.seed)
    if config.save is not None:
        write_trace(config.save, jobs)
    if config.why is not None:
        with working(f"simulating {len(jobs)} jobs"):
            lines = why(jobs, cluster, policy, config.why, config.at)
        print("\n".join(lines))
        return 0
    names = [config.policy]
    if config.compare:
        names += [name for name in POLICIES if name != config.policy]
    results = []
    with working(f"simulating {len(jobs)} jobs") as progress:
        for name in names:
            progress(f"policy {name}, {len(results) + 1} of {len(names)}")
            results.append(simulate(jobs, cluster, make_policy(name, config.seed)))
    if config.json:
        print(json.dumps({result.policy: _result_values(result) for result in results}))
    else:
        _show(results)
    if config.html is not None:
        _draw(config.html, config.trace, results, [_about(results[0])], config.json)
    return 0


def _trace(config: Simulate) -> tuple[tuple[Job, ...], JobCluster]:
    from gulliver.schedule.traces import SHAPES, generate, read_trace

    quotas = quotas_of(config.quota)
    # A name without a suffix is a generated trace, or a misspelled one.
    if config.trace in SHAPES or not Path(config.trace).suffix:
        jobs, cluster = generate(config.trace, config.seed)
        slots = config.slots or cluster.slots
    else:
        jobs = read_trace(config.trace)
        if config.slots is None and config.hardware is None:
            raise UsageError(
                "--slots is missing: a file of jobs does not contain the number of slots"
            )
        slots = config.slots or 1
    return jobs, _cluster(config, slots, quotas)


def _cluster(config: Simulate, slots: int, quotas: dict[str, int]) -> JobCluster:
    from gulliver.schedule.jobs import JobCluster

    if config.hardware is None:
        if config.across != 1.0 and config.node_slots is None:
            raise UsageError("--across needs nodes: set --node-slots")
        return JobCluster(slots, quotas, config.node_slots, config.across)
    if config.node_slots is not None or config.across != 1.0 or config.slots is not None:
        raise UsageError(
            "--hardware determines slots and nodes: omit --slots, --node-slots and --across"
        )
    from gulliver.hardware.cluster import Cluster, described

    path = Path(config.hardware)
    return JobCluster.of(Cluster.load(path) if path.suffix else described(config.hardware), quotas)


def _about(result: Result) -> str:
    return (
        f"{len(result.jobs)} jobs on {result.cluster.slots} slots; no schedule has a mean "
        f"completion time below {result.bound:.1f} s (resizing free, arrivals known)"
    )


def _show(results: list[Result]) -> None:
    from rich.table import Table

    from gulliver.jobs.display import report_console
    from gulliver.schedule.report import HEADS, summary_row

    console = report_console()
    console.print(_about(results[0]))
    # A column per policy: there are more metrics than policies, and 80 columns fit five policies.
    rows = zip(HEADS, *map(summary_row, results), strict=True)
    table = Table(*next(rows), title="seconds from arrival to end; gap: mean of plans over bound")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _result_values(result: Result) -> dict[str, object]:
    found = result.summary()._asdict()
    return {**found, "bound": result.bound, "ends": result.ends}


def _draw(path: Path, trace: str, results: list[Result], lines: list[str], to_stderr: bool) -> None:
    from gulliver.io.files import named_errors, write_text
    from gulliver.schedule.report import schedule_page

    with named_errors(path):
        write_text(path, schedule_page(f"Jobs of {trace}", lines, results))
    print(path, file=sys.stderr if to_stderr else sys.stdout)
