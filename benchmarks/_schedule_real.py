"""Eight jobs run by a scheduler, and the same jobs simulated with what it measured.

Steps sleep, as on devices, so that four slots need not be cores.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._harness import Report, at_most
from gulliver.hardware.scaling import Scaling
from gulliver.schedule import Decision, Job, JobCluster, Policy, simulate
from gulliver.schedule.live.controller import Controller
from gulliver.schedule.live.nodes import Agent, LocalNodes, Nodes, RayNodes
from gulliver.schedule.live.options import Submission
from gulliver.schedule.live.tracking import LiveJob, MeasuredSeconds, Spool
from gulliver.schedule.policies import make_policy
from gulliver.schedule.state import Allotment, View

SCRIPT = Path(__file__).parents[1] / "tests" / "schedule" / "elastic_job.py"
SLOTS, BATCH = 4, 16
COSTS = Scaling(0.02, 0.05)
STEPS = (150, 30, 60, 90, 40, 120, 25, 50)
ASKED = (2, 1, 4, 2, 1, 4, 2, 1)
BETWEEN_S, TICK_S, PATIENCE_S = 4.0, 0.05, 300.0
SIZES, FEW = (1, 2, 4, 1, 2), 14  # slots of the job that is measured before, steps with each
OFF = 1.1  # what the mean should be at most of the simulated one


class Given(Policy):
    """Gives all jobs the same number of slots."""

    name, what = "given", "as told"
    count = 1

    def decide(self, view: View) -> Decision:
        given = {s.job.name: Allotment(self.count, s.job.batch) for s in view.jobs}
        return Decision(given, wake=view.now + 0.1)


def begun(folder: Path, nodes: Nodes, policy: Policy) -> Controller:
    spool = Spool(folder)
    spool.make()
    return Controller(spool, nodes, policy, time.time, {}, time.time())


def submit(controller: Controller, name: str, steps: int, slots: int) -> None:
    drawn = controller.spool.job(name) / "drawn"
    sample_s, step_s = COSTS.sample_seconds, COSTS.step_seconds
    flags = {"steps": steps, "every": 50, "drawn": drawn}
    flags |= {"sample_seconds": sample_s, "step_seconds": step_s}
    arguments = [t for k, v in flags.items() for t in (f"--{k.replace('_', '-')}", str(v))]
    controller.spool.submit(
        Submission(
            script=str(SCRIPT),
            batch_size=BATCH,
            name=name,
            slots=slots,
            samples=float(steps * BATCH),
            arguments=tuple(arguments),
            sample_seconds=sample_s,
            step_seconds=step_s,
        )
    )
    drawn.mkdir()


def until(controller: Controller, done: Callable[[], bool]) -> None:
    due = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > due:
            raise TimeoutError({name: job.note for name, job in controller.jobs.items()})
        controller.tick()
        time.sleep(TICK_S)


def calibrated(folder: Path, nodes: Nodes) -> LiveJob:
    """Returns a job that was started, resized, and measured with each number of slots."""
    policy = Given()
    controller = begun(folder, nodes, policy)
    submit(controller, "calibration", FEW * len(SIZES), 1)

    def step() -> int:
        job = controller.jobs.get("calibration")
        return int(job.progress["step"]) if job is not None and job.heard else -1

    for place, count in enumerate(SIZES):
        policy.count, due = count, FEW * (place + 0.7)
        until(controller, lambda due=due: step() > due)  # type: ignore[misc]
    until(controller, lambda: not controller.busy)
    return controller.jobs["calibration"]


def real_and_simulated(
    folder: Path, nodes: Nodes, before: LiveJob, policy: str
) -> tuple[list[float], list[float], str]:
    """Completion times of the jobs, and the resizes of both."""
    known = before.job()
    costs = {k: getattr(known, k) for k in ("resize_seconds", "start_seconds", "leave_seconds")}
    trace = [
        Job(
            f"j{n}", n * BETWEEN_S, float(steps * BATCH), BATCH, slots, known.scaling,
            most_slots=BATCH, **costs,
        )
        for n, (steps, slots) in enumerate(zip(STEPS, ASKED, strict=True))
    ]  # fmt: skip
    expected = simulate(trace, JobCluster(SLOTS), make_policy(policy))
    controller = begun(folder, nodes, make_policy(policy))
    controller.measured = MeasuredSeconds.of([before])
    for job in trace:
        due = controller.begun + job.arrival
        until(controller, lambda due=due: time.time() >= due)  # type: ignore[misc]
        submit(controller, job.name, round(job.samples / BATCH), job.slots)
    jobs = controller.jobs
    until(controller, lambda: len(jobs) == len(trace) and not controller.busy)
    real = [(jobs[job.name].ended or 0.0) - jobs[job.name].arrival for job in trace]
    resizes = f"{sum(len(job.resizes) for job in jobs.values())} / {expected.summary().resizes}"
    return real, [expected.ends[job.name] - job.arrival for job in trace], resizes


def report_of(kind: str, policies: tuple[str, ...], rounds: int) -> Report:
    report = Report(
        f"schedule-real-{kind}",
        f"{len(STEPS)} jobs on {SLOTS} slots, run and simulated",
        ("policy", "round", "mean s", "simulated", "of it", "last end", "of simulated", "resizes"),
    )
    ray = kind == "ray"
    nodes: Nodes = RayNodes(None, SLOTS, "the benchmark") if ray else LocalNodes(SLOTS, Agent())
    try:
        while len(nodes.slots()) < SLOTS:
            time.sleep(TICK_S)
        folder = Path(tempfile.mkdtemp(prefix="gulliver-jobs-"))
        before = calibrated(folder / "calibration", nodes)
        report.notes.append(
            f"A start takes {before.job().start_seconds:.2g} s, a resize "
            f"{before.job().resize_seconds:.2g}, of which {before.job().leave_seconds:.2g} pass "
            "until slots are free; all were measured before, as were the steps."
        )
        for policy in policies:
            ratios = []
            for number in range(rounds):
                place = folder / f"{policy}{number}"
                real, simulated, resizes = real_and_simulated(place, nodes, before, policy)
                means = statistics.fmean(real), statistics.fmean(simulated)
                arrivals = [n * BETWEEN_S for n in range(len(STEPS))]
                lasts = [
                    max(a + b for a, b in zip(arrivals, every, strict=True))
                    for every in (real, simulated)
                ]
                ratios.append(means[0] / means[1])
                cells = (means[0], means[1], ratios[-1], lasts[0], lasts[0] / lasts[1])
                report.rows.append(
                    (policy, str(number + 1), *(f"{cell:.3g}" for cell in cells), resizes)
                )
            report.figures[policy] = {"ratios": ratios}
            median = statistics.median(ratios)
            report.bars.append(at_most(f"{policy}: mean over the simulated one", median, OFF))
    finally:
        nodes.close()
    return report
