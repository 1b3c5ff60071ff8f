"""Real jobs: processes are resized and killed, and each sample counts once with the same loss.

The reference is the loop in plain torch, in one process, with nothing of this library in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gulliver.errors import GulliverError
from gulliver.schedule.live import elastic
from gulliver.schedule.live.controller import Controller
from gulliver.schedule.live.daemon import only_one, serve
from gulliver.schedule.live.nodes import Agent, LocalNodes
from gulliver.schedule.live.options import HERE, SchedulerOptions, Submission
from gulliver.schedule.live.tracking import Phase, Spool
from gulliver.schedule.live.training import read_curve
from gulliver.schedule.policies import make_policy
from tests.patience import patient
from tests.schedule.elastic_job import plain_losses
from tests.schedule.test_schedule_live import Wanted

SCRIPT = Path(__file__).with_name("elastic_job.py")
BATCH = 16


def check(folder: Path, steps: int) -> None:
    """Each step and each sample counts once, and the losses are those of one process."""
    curve = read_curve(folder)
    assert [line["step"] for line in curve] == list(range(steps))
    assert all(line["samples"] == BATCH for line in curve)
    assert curve[-1]["drawn"] == steps * BATCH
    expected = plain_losses(steps, BATCH)
    for line, loss in zip(curve, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=0, abs=1e-10)
    # Of the attempt that counts, ranks together drew each sample of each step once.
    drawn: dict[tuple[int, int], list[int]] = {}
    for path in (folder / "drawn").iterdir():
        for text in path.read_text().splitlines():
            line = json.loads(text)
            place = drawn.setdefault((line["step"], line["attempt"]), [])
            place += range(*line["samples"])
    for line in curve:
        assert sorted(drawn[line["step"], line["attempt"]]) == list(range(BATCH))


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """An agent whose program has imported torch once for all tests."""
    made = Agent()
    assert made.ready()
    yield made
    made.close()


class Cluster:
    """A controller over real processes."""

    def __init__(self, folder: Path, agent: Agent, slots: int = 3) -> None:
        self.spool = Spool(folder)
        self.spool.make()
        self.policy = Wanted()
        nodes = LocalNodes(slots, agent)
        self.control = Controller(self.spool, nodes, self.policy, time.time, {}, time.time())

    def submit(self, name: str, steps: int, *arguments: str, **values: object) -> Path:
        """Submits the job."""
        given = {"batch": BATCH, "samples": float(steps * BATCH), "arguments": arguments}
        told = Submission(name=name, script=str(SCRIPT), **(given | values))  # type: ignore[arg-type]
        folder = self.spool.submit(told)
        (folder / "drawn").mkdir()
        return folder

    def until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        """Lets the scheduler work until something has happened."""
        due = time.monotonic() + patient(seconds)
        while not done():
            assert time.monotonic() < due, {n: j.note for n, j in self.control.jobs.items()}
            self.control.tick()
            time.sleep(0.02)

    def step(self, name: str) -> int:
        """Last step of the attempt that runs now; -1 before its first."""
        job = self.control.jobs.get(name)
        return job.progress["step"] if job is not None and job.heard else -1


def arguments_of(folder: Path, name: str, steps: int) -> tuple[str, ...]:
    drawn = str(folder / "jobs" / name / "drawn")
    pace = ("--sample-seconds", "0.002", "--every", "5")
    return ("--steps", str(steps), *pace, "--drawn", drawn)


@pytest.mark.deadline(600)
def test_a_job_that_is_resized_and_killed_is_the_unscaled_run(
    tmp_path: Path, agent: Agent, full: bool
) -> None:
    """Sizes 2, 3, 1; then a rank is killed: once, or 30 times."""
    steps, kills = (600, 30) if full else (60, 1)
    cluster = Cluster(tmp_path, agent)
    cluster.policy.counts["a"] = 2
    # Slow steps: a busy host must not let the last attempt end before it is killed.
    pace = ("--step-seconds", "0.08")
    folder = cluster.submit("a", steps, *arguments_of(tmp_path, "a", steps), *pace, tries=10)
    for count in (3, 1):
        before = max(cluster.step("a"), 0)
        cluster.until(lambda before=before: cluster.step("a") > before + 4)
        cluster.policy.counts["a"] = count
        cluster.until(lambda count=count: len(cluster.control.jobs["a"].held) == count)
    job = cluster.control.jobs["a"]
    assert job.attempt == 3
    draws = random.Random(0)
    for _ in range(kills):
        cluster.until(lambda: cluster.step("a") >= 0 and job.phase is Phase.RUNNING)
        attempt, step = job.attempt, cluster.step("a")
        wanted = step + draws.randrange(1, 12)
        cluster.until(lambda wanted=wanted: cluster.step("a") >= min(wanted, steps - 2))
        victim = draws.choice(ranks_of(folder, job.attempt))
        os.kill(victim, signal.SIGKILL)
        cluster.until(lambda attempt=attempt: job.phase.over or job.attempt > attempt)
    cluster.until(lambda: job.phase.over, 120)
    assert job.phase is Phase.ENDED, job.note
    assert job.attempt == 3 + kills
    assert len(job.resizes) == 2
    check(folder, steps)


def ranks_of(folder: Path, attempt: int) -> list[int]:
    """Processes of an attempt, as its ranks wrote them."""
    lines = [
        json.loads(text)
        for path in sorted((folder / "drawn").iterdir())
        for text in path.read_text().splitlines()
    ]
    return sorted({line["pid"] for line in lines if line["attempt"] == attempt})


def test_a_script_with_an_error_is_given_up_with_its_line(tmp_path: Path, agent: Agent) -> None:
    cluster = Cluster(tmp_path, agent)
    cluster.policy.counts["a"] = 1
    cluster.submit("a", 5, "--steps", "many", tries=2)
    cluster.until(lambda: bool(cluster.control.jobs) and cluster.control.jobs["a"].phase.over)
    job = cluster.control.jobs["a"]
    assert job.phase is Phase.FAILED
    assert job.note.startswith("failed 2 times from the same checkpoint: rank 0 exited with code")


def test_ranks_are_forked_with_all_that_takes_seconds_to_import(
    tmp_path: Path, agent: Agent
) -> None:
    cluster = Cluster(tmp_path, agent)
    cluster.policy.counts["a"] = 1
    folder = cluster.submit("a", 3, *arguments_of(tmp_path, "a", 3))
    cluster.until(lambda: bool(cluster.control.jobs) and cluster.control.jobs["a"].phase.over)
    line = json.loads(next((folder / "drawn").iterdir()).read_text().splitlines()[0])
    assert line["preloaded"]


def test_a_second_scheduler_in_a_folder_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.make()
    told = r"has a scheduler: process .*; submit to it, or stop it first"
    with only_one(spool), pytest.raises(GulliverError, match=told):
        serve(SchedulerOptions(tmp_path, HERE))


def test_without_a_scheduler_a_job_runs_to_its_end(tmp_path: Path) -> None:
    job = elastic(tmp_path, batch=4, samples=12)
    assert not job.resumes
    seen = []
    for step in job.steps():
        assert job.share() == range(4)
        assert not job.report(loss=1.0)
        seen.append(step)
    assert seen == [0, 1, 2]
    with pytest.raises(GulliverError, match=r"step 0 was not reported.*job\.report"):
        list(elastic(tmp_path, batch=4).steps(0, 2))
    with pytest.raises(GulliverError, match="the job has no length"):
        next(elastic(tmp_path, batch=4).steps())
    with pytest.raises(GulliverError, match="the batch size is unknown"):
        elastic(tmp_path).share()


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from gulliver.schedule.live import nodes as _ray

    monkeypatch.setattr(_ray, "find_spec", lambda name: None)
    with pytest.raises(GulliverError, match=r"pip install '\.\[ray\]'"):
        _ray.RayNodes(None, 2, "")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.deadline(400)
def test_on_ray_a_job_survives_its_node_and_a_second_scheduler_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
    from gulliver.schedule.live.nodes import RayNode, RayNodes
    from tests.programs import run_program

    nodes = RayNodes(None, 2, "the first")
    try:
        again = run_program(second_scheduler, nodes.address, timeout=120)
        assert "has a scheduler: the first" in again.stdout
        spool = Spool(tmp_path)
        spool.make()
        policy = make_policy("fifo")
        control = Controller(spool, nodes, policy, time.time, {}, time.time())
        cluster = Cluster.__new__(Cluster)
        cluster.spool, cluster.control = spool, control
        cluster.until(lambda: len(control.slots) == 2, 240)
        folder = cluster.submit("a", 40, *arguments_of(tmp_path, "a", 40), slots=2)
        cluster.until(lambda: cluster.step("a") > 7, 120)
        (node,) = nodes.nodes.values()
        assert isinstance(node, RayNode)
        import ray

        ray.kill(node.actor)  # as when the node is gone; Ray starts a new agent on what is there
        cluster.until(lambda: control.jobs["a"].attempt == 2, 240)
        cluster.until(lambda: control.jobs["a"].phase.over, 120)
        assert control.jobs["a"].phase is Phase.ENDED
        assert control.jobs["a"].failures == 0
        check(folder, 40)
    finally:
        nodes.close()


def second_scheduler(address: str) -> None:
    """Tries to schedule on a cluster that has a scheduler."""
    from gulliver.schedule.live.nodes import RayNodes

    try:
        RayNodes(address, 2, "the second")
    except GulliverError as error:
        print(error)
        sys.stdout.flush()
