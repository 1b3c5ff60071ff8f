"""Real jobs beside the simulator, on Ray: completion times, curves, and ranks that are killed.

Eight small jobs come to 4 slots under two policies. Their steps sleep as long as their costs say,
as a host does while its device computes, so that 4 slots fit two cores; what the scheduler adds is
real: processes, checkpoints, resizes. Before, one job is started, resized and ended, and what the
scheduler measures of it (seconds of a step on 1, 2 and 4 slots, of a start, of resizes, of saves
that others wait for, of an end) is all that the simulator is told of this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks.elastic_job import plain_losses
from gulliver.hardware import Scaling
from gulliver.schedule import Decision, Job, JobCluster, Policy, View, simulate
from gulliver.schedule.live.controller import Controller
from gulliver.schedule.live.nodes import LocalNodes, Nodes, RayNodes
from gulliver.schedule.live.options import HERE, Submission
from gulliver.schedule.live.tracking import LiveJob, MeasuredSeconds, Phase, Spool
from gulliver.schedule.live.training import read_curve
from gulliver.schedule.policies import make_policy
from gulliver.schedule.state import Allotment

SCRIPT = Path(__file__).with_name("elastic_job.py")
SLOTS, BATCH = 4, 16
COSTS = Scaling(0.02, 0.05)
STEPS = (150, 30, 60, 90, 40, 120, 25, 50)
ASKED = (2, 1, 4, 2, 1, 4, 2, 1)
BETWEEN = 4.0
"""Seconds between two arrivals."""
POLICIES = ("fifo", "rollout")
KILLS = 30
TICK_S = 0.05


class Given(Policy):
    """Gives the one job that is there as many slots as it is told."""

    name, what = "given", "as told"
    count = 1

    def decide(self, view: View) -> Decision:
        """Gives them."""
        given = {state.job.name: Allotment(self.count, state.job.batch) for state in view.jobs}
        return Decision(given, wake=view.now + 0.1)


@dataclass
class Stage:
    """A scheduler over the slots, in a folder of its own."""

    control: Controller

    @classmethod
    def make(cls, folder: Path, nodes: Nodes, policy: Policy) -> Stage:
        """Makes it; it begins to count now."""
        spool = Spool(folder)
        spool.make()
        return cls(Controller(spool, nodes, policy, time.time, {}, time.time()))

    def submit(self, name: str, steps: int, slots: int, every: int = 50, tries: int = 3) -> Path:
        """Submits a job now."""
        drawn = self.control.spool.job(name) / "drawn"
        arguments = {"steps": steps, "every": every, "drawn": drawn}
        arguments |= {"sample-seconds": COSTS.sample_seconds, "step-seconds": COSTS.step_seconds}
        flags = [text for key, value in arguments.items() for text in (f"--{key}", str(value))]
        folder = self.control.spool.submit(
            Submission(
                script=str(SCRIPT),
                batch=BATCH,
                name=name,
                slots=slots,
                samples=float(steps * BATCH),
                arguments=tuple(flags),
                sample_seconds=COSTS.sample_seconds,
                step_seconds=COSTS.step_seconds,
                tries=tries,
            )
        )
        drawn.mkdir()
        return folder

    def until(self, done: Callable[[], bool], seconds: float = 300.0) -> None:
        """Schedules until something has happened."""
        due = time.monotonic() + seconds
        while not done():
            if time.monotonic() > due:
                raise TimeoutError({n: j.note for n, j in self.control.jobs.items()})
            self.control.tick()
            time.sleep(TICK_S)

    def job(self, name: str) -> LiveJob | None:
        """A job, once the scheduler has seen it."""
        return self.control.jobs.get(name)

    def step(self, name: str) -> int:
        """Last step of the attempt that runs; -1 before its first."""
        job = self.job(name)
        return job.progress["step"] if job is not None and job.heard else -1


def lines_of(folder: Path) -> list[dict[str, object]]:
    """Reads the lines that ranks wrote of the samples that they drew."""
    return [
        json.loads(text)
        for path in sorted((folder / "drawn").iterdir())
        for text in path.read_text().splitlines()
    ]


def off(folder: Path, steps: int, expected: Sequence[float]) -> tuple[float, int]:
    """Largest difference from the unscaled curve, and samples that do not count exactly once."""
    curve = read_curve(folder)
    drawn: dict[tuple[object, object], list[int]] = {}
    for line in lines_of(folder):
        first, last = line["samples"]  # type: ignore[misc]
        drawn.setdefault((line["step"], line["attempt"]), []).extend(range(first, last))
    wrong = BATCH * abs(steps - len(curve))
    for place, line in enumerate(curve):
        found = sorted(drawn.get((line["step"], line["attempt"]), []))
        wrong += BATCH * (line["step"] != place) + len(set(range(BATCH)) ^ set(found))
        wrong += len(found) - len(set(found))
    return max(abs(a["loss"] - b) for a, b in zip(curve, expected, strict=False)), wrong


SIZES = (1, 2, 4, 1, 2)
"""Slots of the job that is looked at before, one after the other."""
FEW = 14
"""Steps on each of them."""


def calibrate(folder: Path, nodes: Nodes) -> LiveJob:
    """Measures what the scheduler does: a job on several numbers of slots, to its end."""
    policy = Given()
    stage = Stage.make(folder, nodes, policy)
    stage.submit("calibration", FEW * len(SIZES), 1)
    for place, count in enumerate(SIZES):
        policy.count = count
        stage.until(lambda place=place: stage.step("calibration") > FEW * (place + 0.7))
    stage.until(lambda: not stage.control.busy)
    return stage.control.jobs["calibration"]


def jobs_of(known: Job) -> list[Job]:
    """The trace: arrivals, samples and costs, with all seconds as they were measured."""
    return [
        Job(
            f"j{number}",
            number * BETWEEN,
            float(steps * BATCH),
            BATCH,
            slots,
            known.scaling,
            resize_seconds=known.resize_seconds,
            start_seconds=known.start_seconds,
            save_seconds=known.save_seconds,
            end_seconds=known.end_seconds,
            most_slots=BATCH,
        )
        for number, (steps, slots) in enumerate(zip(STEPS, ASKED, strict=True))
    ]


def run_trace(
    folder: Path, nodes: Nodes, policy: str, trace: Sequence[Job], before: LiveJob
) -> Stage:
    """Runs the trace as real jobs."""
    stage = Stage.make(folder, nodes, make_policy(policy))
    stage.control.measured = MeasuredSeconds.of([before])
    for job in trace:
        due = stage.control.begun + job.arrival
        stage.until(lambda due=due: time.time() >= due)
        stage.submit(job.name, round(job.samples / BATCH), job.slots)
    names = [job.name for job in trace]
    stage.until(lambda: all(n in stage.control.jobs for n in names) and not stage.control.busy)
    return stage


def kill_ranks(folder: Path, nodes: Nodes) -> tuple[LiveJob, Path, int]:
    """Kills a rank again and again while a job trains on two slots."""
    policy, draws, steps = Given(), random.Random(0), 8 * KILLS
    policy.count = 2
    stage = Stage.make(folder, nodes, policy)
    place = stage.submit("victim", steps, 2, every=4, tries=KILLS)
    for _ in range(KILLS):
        stage.until(lambda: stage.step("victim") >= 0)
        job = stage.control.jobs["victim"]
        attempt, wanted = job.attempt, stage.step("victim") + draws.randrange(1, 9)
        stage.until(lambda wanted=wanted: stage.step("victim") >= wanted)
        ranks = sorted({int(str(x["pid"])) for x in lines_of(place) if x["attempt"] == attempt})
        os.kill(draws.choice(ranks), signal.SIGKILL)
        stage.until(lambda job=job, attempt=attempt: job.attempt > attempt or job.phase.over)
    stage.until(lambda: not stage.control.busy)
    return stage.control.jobs["victim"], place, steps


def real(address: str, keep: bool) -> None:
    """Real jobs beside the simulator, their curves, and kills."""
    where = "" if address == HERE else " of Ray"
    report = Report(
        "schedule_real" if address == HERE else "schedule_real_ray",
        f"{len(STEPS)} real jobs on {SLOTS} slots{where}, beside the simulator",
        ("policy", "job", "asked", "attempts", "simulated s", "real s", "real / simulated"),
    )
    nodes = LocalNodes(SLOTS) if address == HERE else RayNodes(None, SLOTS, "the benchmark")
    try:
        while len(nodes.slots()) < SLOTS:
            time.sleep(TICK_S)
        with tempfile.TemporaryDirectory(prefix="gulliver-jobs-") as place:
            _real(Path(place), nodes, report)
    finally:
        nodes.close()
    finish(report, keep)


def _real(place: Path, nodes: Nodes, report: Report) -> None:
    before = calibrate(place / "calibration", nodes)
    known = before.job()
    trace = jobs_of(known)
    longest = plain_losses(max(*STEPS, 8 * KILLS), BATCH)
    report.figures |= {"measured": before.measured._asdict(), "costs": asdict(known.scaling)}
    worst, wrong, resized = 0.0, 0, 0
    for policy in POLICIES:
        expected = simulate(trace, JobCluster(SLOTS), make_policy(policy))
        stage = run_trace(place / policy, nodes, policy, trace, before)
        _compare(report, policy, trace, expected.ends, stage)
        for job, steps in zip(trace, STEPS, strict=True):
            difference, bad = off(stage.control.spool.job(job.name), steps, longest)
            worst, wrong = max(worst, difference), wrong + bad
            resized += len(stage.control.jobs[job.name].resizes)
    victim, folder, steps = kill_ranks(place / "kills", nodes)
    lost, missing = off(folder, steps, longest)
    report.figures |= {"resizes": resized, "curve": worst, "kills": victim.attempt - 1}
    report.bars += [
        at_least("resizes in the real runs", resized, 1),
        at_most("loss of resized jobs, from that of plain torch", worst, 1e-10),
        at_most("their samples that count not exactly once", wrong, 0),
        at_least("ranks killed", victim.attempt - 1, KILLS),
        at_most("jobs lost by it", int(victim.phase is not Phase.ENDED), 0),
        at_most("loss after the kills, from that of plain torch", lost, 1e-10),
        at_most("samples that count not exactly once after the kills", missing, 0),
    ]
    kind = "Ray" if isinstance(nodes, RayNodes) else "processes of this machine"
    each = ", ".join(f"{seconds:.2f}" for seconds in before.resizes)
    steps_told = ", ".join(f"{known.scaling.seconds(n, BATCH):.3f}" for n in (1, 2, 4))
    steps_asked = ", ".join(f"{COSTS.seconds(n, BATCH):.3f}" for n in (1, 2, 4))
    report.notes += [
        f"On {kind}. Before, a start took {known.start_seconds:.2f} s, resizes {each} s, of which "
        f"{known.save_seconds:.2f} until the slots were free, and an end {known.end_seconds:.2f} "
        f"s; steps on 1, 2 and 4 slots took {steps_told} s, of which {steps_asked} are slept, so "
        "that a slot is no core. The simulator is told these means and nothing else.",
        f"The killed job ran on 2 slots, saved every 4 steps, and was started {victim.attempt} "
        "times.",
    ]


def _compare(
    report: Report, policy: str, trace: Sequence[Job], ends: dict[str, float], stage: Stage
) -> None:
    """Lays completion times beside those that were simulated."""
    ratios, real, simulated = [], [], []
    for job in trace:
        live = stage.control.jobs[job.name]
        assert live.ended is not None, live.note
        took, thought = live.ended - live.arrival, ends[job.name] - job.arrival
        real.append(took)
        simulated.append(thought)
        ratios.append(took / thought)
        row = (policy, job.name, str(job.slots), str(live.attempt))
        report.rows.append((*row, f"{thought:.1f}", f"{took:.1f}", f"{ratios[-1]:.2f}"))
    mean = statistics.fmean(real) / statistics.fmean(simulated)
    span = max(j.ended or 0.0 for j in stage.control.jobs.values()) / max(ends.values())
    row = (policy, "mean", "", "", f"{statistics.fmean(simulated):.1f}")
    report.rows.append((*row, f"{statistics.fmean(real):.1f}", f"{mean:.3f}"))
    report.figures[policy] = {"mean": mean, "makespan": span, "jobs": ratios}
    report.bars += [
        at_most(f"{policy}: mean completion, real off the simulator", abs(mean - 1), 0.1),
        at_most(f"{policy}: makespan, real off the simulator", abs(span - 1), 0.1),
    ]
