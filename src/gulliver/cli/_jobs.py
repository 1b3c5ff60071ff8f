"""``gulliver jobs``: jobs that share a cluster, simulated here, real ones in `_live_jobs.py`.

Nothing here imports torch at its top: ``--help`` reads this module.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gulliver.cli._live_jobs import (
    Listing,
    Logs,
    Scheduler,
    Stop,
    Submit,
    Why,
    live_jobs,
)
from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, SEED, Options, Range
from gulliver.schedule.live._options import quotas_of

if TYPE_CHECKING:
    from gulliver.schedule import Job, JobCluster, Result

WIDTH = 130
"""Characters of a line where the output is no terminal."""


@dataclass(frozen=True)
class Simulate(Options):
    """Simulates jobs that share a cluster: when each ends, why it waits, and how good that is."""

    trace: tyro.conf.Positional[str] = "steady"
    """CSV or JSON file of jobs, or a drawn trace: steady, heavy-tail, bursts, fixed-batch,
    artifact."""
    policy: str = "rollout"
    """Policy: fifo, srpt, tiresias, optimus, pollux, ones or rollout."""
    compare: bool = False
    """Simulate all other policies too."""
    slots: Annotated[int | None, Range(1, 4096)] = None
    """Slots of the cluster; by default those that a drawn trace is meant for."""
    node_slots: Annotated[int | None, Range(1, 4096)] = None
    """Slots of a node; by default all are of one."""
    across: Annotated[float, Range(1, 1e6)] = 1.0
    """Times that a byte takes longer between two nodes than within one."""
    hardware: str | None = None
    """Described cluster, or its file, that slots, nodes and across are taken from."""
    quota: tuple[str, ...] = ()
    """Slots that tenants have a right to, as TENANT=SLOTS."""
    why: str | None = None
    """Job to explain: why it waits or shrank, and when it should end."""
    at: Annotated[float | None, AT_LEAST_0] = None
    """Second at which it is explained; by default that of its arrival."""
    seed: Annotated[int, SEED] = 0
    """Seed of a drawn trace, and of policies that draw."""
    html: Path | None = None
    """File to draw the schedules into."""
    save: Path | None = None
    """CSV file to write the trace into."""
    json: bool = False
    """Print JSON."""


JobsAction = (
    Annotated[Simulate, tyro.conf.subcommand("simulate", prefix_name=False)]
    | Annotated[Submit, tyro.conf.subcommand("submit", prefix_name=False)]
    | Annotated[Listing, tyro.conf.subcommand("list", prefix_name=False)]
    | Annotated[Logs, tyro.conf.subcommand("logs", prefix_name=False)]
    | Annotated[Why, tyro.conf.subcommand("why", prefix_name=False)]
    | Annotated[Stop, tyro.conf.subcommand("stop", prefix_name=False)]
    | Annotated[Scheduler, tyro.conf.subcommand("scheduler", prefix_name=False)]
)


@dataclass(frozen=True)
class JobsConfig(Options):
    """Runs jobs that share a cluster, or simulates them."""

    action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[JobsAction]] = tyro.MISSING


def jobs_command(config: JobsConfig, arguments: list[str]) -> int:
    """Simulates, or deals with real jobs."""
    del arguments
    action = config.action
    return simulate_jobs(action) if isinstance(action, Simulate) else live_jobs(action)


def simulate_jobs(config: Simulate) -> int:
    """Simulates, and prints a table, an explanation or JSON."""
    from gulliver.schedule import POLICIES, make_policy, simulate, why, write_trace

    if config.at is not None and config.why is None:
        raise GulliverError("--at says when a job is explained: name it with --why JOB")
    if config.why is not None and (config.compare or config.json or config.html):
        raise GulliverError("--why explains one job: leave --compare, --json and --html away")
    jobs, cluster = _trace(config)
    policy = make_policy(config.policy, config.seed)
    if config.save is not None:
        write_trace(config.save, jobs)
    if config.why is not None:
        print("\n".join(why(jobs, cluster, policy, config.why, config.at)))
        return 0
    names = [config.policy]
    left_out = []
    if config.compare:
        for name in POLICIES:
            if cluster.quotas and not make_policy(name).knows_quotas:
                left_out.append(f"{name} is left out: it knows no quotas")
            elif name != config.policy:
                names.append(name)
    results = []
    for name in names:
        result = policy if name == config.policy else make_policy(name, config.seed)
        results.append(simulate(jobs, cluster, result))
    if config.json:
        print(json.dumps({result.policy: _result_values(result) for result in results}))
    else:
        _show(results, left_out)
    if config.html is not None:
        _draw(config.html, config.trace, results, [_about(results[0]), *left_out])
    return 0


def _trace(config: Simulate) -> tuple[tuple[Job, ...], JobCluster]:
    from gulliver.schedule import SHAPES, generate, read_trace

    quotas = quotas_of(config.quota)
    # A name that has no suffix is a drawn trace, or a mistake in one.
    if config.trace in SHAPES or not Path(config.trace).suffix:
        jobs, cluster = generate(config.trace, config.seed)
        slots = config.slots or cluster.slots
    else:
        jobs = read_trace(config.trace)
        if config.slots is None and config.hardware is None:
            raise GulliverError(
                "--slots is missing: a file of jobs does not say how many there are"
            )
        slots = config.slots or 1
    return jobs, _cluster(config, slots, quotas)


def _cluster(config: Simulate, slots: int, quotas: dict[str, int]) -> JobCluster:
    from gulliver.schedule import JobCluster

    if config.hardware is None:
        if config.across != 1.0 and config.node_slots is None:
            raise GulliverError("--across is of nodes: say how many slots a node has, --node-slots")
        return JobCluster(slots, quotas, config.node_slots, config.across)
    if config.node_slots is not None or config.across != 1.0 or config.slots is not None:
        raise GulliverError("--hardware says slots and nodes: leave --slots and the like away")
    from gulliver.hardware import Cluster, described

    path = Path(config.hardware)
    return JobCluster.of(Cluster.load(path) if path.suffix else described(config.hardware), quotas)


def _about(result: Result) -> str:
    return (
        f"{len(result.jobs)} jobs on {result.cluster.slots} slots; no schedule has a mean "
        f"completion time below {result.bound:.1f} s (resizing free, arrivals known)"
    )


def _show(results: list[Result], lines: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gulliver.schedule import HEADS, summary_row

    console = Console(
        markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH
    )
    console.print(_about(results[0]))
    table = Table(*HEADS, title="seconds from arrival to end; gap: plans over their bound, mean")
    for result in results:
        table.add_row(*summary_row(result))
    console.print(table)
    for line in lines:
        console.print(line)


def _result_values(result: Result) -> dict[str, object]:
    found = result.summary()._asdict()
    return {**found, "bound": result.bound, "ends": result.ends}


def _draw(path: Path, trace: str, results: list[Result], lines: list[str]) -> None:
    from gulliver.io import named_errors, write_text
    from gulliver.schedule import schedule_page

    with named_errors(path):
        write_text(path, schedule_page(f"Jobs of {trace}", lines, results))
    print(f"report: {path}")
