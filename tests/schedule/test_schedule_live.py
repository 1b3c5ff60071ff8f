"""Live jobs under a policy: what the scheduler does when jobs come, leave, fail and say nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gulliver.errors import GulliverError
from gulliver.hardware import Scaling
from gulliver.schedule import Decision, JobCluster, Policy, View, simulate
from gulliver.schedule.live.controller import last_line
from gulliver.schedule.live.history import (
    ScheduleHistory,
    expected_ends,
    live_page,
    live_why,
    read_history,
    result_of,
    take_up,
    write_history,
)
from gulliver.schedule.live.tracking import Phase
from gulliver.schedule.live.training import share_of
from gulliver.schedule.policies import POLICIES
from gulliver.schedule.policies import make_policy as made
from gulliver.schedule.state import Allotment
from tests.schedule.fake_jobs import Behaviour, FakeCluster


class Wanted(Policy):
    """Gives jobs the slots that a test says."""

    name, what = "wanted", "as a test says"

    def __init__(self, **counts: int) -> None:
        self.counts = counts

    def decide(self, view: View) -> Decision:
        given = {
            s.job.name: Allotment(self.counts[s.job.name], s.job.batch)
            for s in view.jobs
            if self.counts.get(s.job.name)
        }
        return Decision(given, wake=view.now + 0.5)


def history_of(cluster: FakeCluster) -> ScheduleHistory:
    now, control = cluster.backend.now, cluster.controller
    quotas = dict(control.quotas)
    return ScheduleHistory(
        0.0, now, "rollout", 0, control.slots, quotas, control.jobs, list(control.rounds),
        control.refused,
    )  # fmt: skip


# --- Jobs run, are resized and end ---------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_all_jobs_to_their_end(policy: str, tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, policy=policy)
    for number in range(3):
        cluster.submit(f"j{number}", samples=320.0 * (number + 1), slots=1 + number)
        cluster.run(2)
    cluster.finish()
    for number in range(3):
        assert cluster.phase(f"j{number}") is Phase.ENDED
        # Each step is there once, whatever was resized.
        assert cluster.backend.drawn[f"j{number}"] == list(range(20 * (number + 1)))


def test_a_resize_saves_leaves_and_goes_on_from_there(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=4)
    cluster.submit("a", Behaviour(start=1.0, save=0.5))
    cluster.run(5)
    policy.counts["a"] = 2
    cluster.run(5)
    job = cluster.jobs["a"]
    assert (job.phase, len(job.held), job.attempt) == (Phase.RUNNING, 2, 2)
    # Half a second to save and one to start, and what the ticks of a tenth add.
    (seconds,) = job.resizes
    assert 1.5 <= seconds <= 1.9
    assert job.job().resize_seconds == seconds
    # Until its slots were free: what it had begun of a step, and the save.
    assert 0.5 <= job.job().leave_seconds <= 0.9
    cluster.finish()
    assert cluster.backend.drawn["a"] == list(range(100))


def test_measured_speeds_are_what_policies_see(tmp_path: Path) -> None:
    truth = Scaling(0.05, 0.2, 0.1)
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=1)
    cluster.submit("a", Behaviour(truth), samples=1e5)
    for count in (1, 2, 4):
        policy.counts["a"] = count
        cluster.run(30)
    found = cluster.jobs["a"].scaling
    assert found is not None
    for count in (1, 2, 4):
        assert found.seconds(count, 16) == pytest.approx(truth.seconds(count, 16), rel=1e-6)


def test_given_costs_are_scaled_until_measured(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=1)
    truth = Scaling(0.02, 0.2)
    cluster.submit("a", Behaviour(truth), sample_seconds=0.01, step_seconds=0.1)
    cluster.run(8)
    found = cluster.jobs["a"].scaling
    assert found is not None
    assert found.seconds(4, 16) == pytest.approx(truth.seconds(4, 16), rel=1e-6)
    policy.counts["a"] = 4
    cluster.run(8)
    assert len(cluster.jobs["a"].points) == 2
    found = cluster.jobs["a"].scaling
    assert found is not None
    assert found.seconds(2, 16) == pytest.approx(truth.seconds(2, 16), rel=0.05)


def test_a_schedule_of_fixed_costs_is_that_of_the_simulator(tmp_path: Path) -> None:
    costs = {"sample_seconds": 0.05, "step_seconds": 0.1}
    cluster = FakeCluster(tmp_path, policy="fifo")
    for number in range(6):
        behaviour = Behaviour(Scaling(**costs), start=1.0, save=0.0, every=10**6)
        samples = 16.0 * (40 + 10 * number)
        cluster.submit(f"j{number}", behaviour, samples=samples, slots=1 + number % 3, **costs)
    cluster.finish()
    trace = [
        replace(job.job(), scaling=Scaling(**costs), start_seconds=1.0)
        for job in cluster.jobs.values()
    ]
    found = simulate(trace, JobCluster(4), made("fifo"))
    for name, end in found.ends.items():
        ended = cluster.jobs[name].ended
        assert ended is not None
        # Looks are a tenth of a second apart, and each that one waits for adds up to two.
        assert end <= ended <= end + 1.0


def test_slots_of_a_leaving_job_are_given_once_it_has_saved(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=4)
    cluster.submit("a", Behaviour(save=5.0, every=1000))
    cluster.run(4)
    cluster.submit("b")
    policy.counts = {"a": 2, "b": 2}
    cluster.run(3)
    # FakeBackend.start asserts that no slot has two ranks.
    assert cluster.phase("a") is Phase.LEAVING
    assert cluster.phase("b") is Phase.WAITING
    cluster.run(6)
    assert cluster.phase("b") is Phase.RUNNING


def test_a_resize_during_a_save_and_one_during_a_resize_wait_for_it(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=4)
    cluster.submit("a", Behaviour(save=5.0, every=10))
    cluster.run(4)  # it saves since step 9
    for count in (2, 3, 1):
        policy.counts["a"] = count
        cluster.run(1)
    cluster.run(12)
    job = cluster.jobs["a"]
    assert (len(job.held), job.attempt, job.failures) == (1, 2, 0)
    cluster.finish()
    assert cluster.backend.drawn["a"] == list(range(100))


# --- What goes wrong -----------------------------------------------------------------------------


def test_whatever_is_killed_each_step_counts_once(tmp_path: Path) -> None:
    draws = random.Random(0)
    cluster = FakeCluster(tmp_path)
    for name in "abc":
        cluster.submit(name, samples=1600.0, tries=100)
    for _ in range(30):
        cluster.run(draws.uniform(0.5, 3))
        if cluster.backend.attempts:
            victim = draws.choice(sorted(cluster.backend.attempts))
            cluster.backend._end(victim, -9)
    cluster.finish()
    for name in "abc":
        assert cluster.phase(name) is Phase.ENDED
        assert cluster.backend.drawn[name] == list(range(100))


def test_a_job_that_fails_again_and_again_is_given_up_with_its_last_line(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.submit("a", Behaviour(fails=True))
    cluster.finish()
    assert cluster.phase("a") is Phase.FAILED
    assert cluster.jobs["a"].note == (
        "failed 3 times from the same checkpoint: rank 0 exited with code 1: ValueError: no data"
    )


def test_a_last_line_does_not_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes("grün\x1b[31m \x07über\n\n".encode())
    assert last_line(tmp_path / "log") == "grün\\x1b[31m \\x07über"


@pytest.mark.parametrize("asked", [False, True], ids=["seen gone", "does not answer"])
def test_a_node_that_leaves_is_survived_on_the_slots_left(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tmp_path, slots=4)
    cluster.backend.places |= {2: "b", 3: "b"}
    cluster.submit("a", slots=4, tries=1)
    cluster.run(6)
    assert len(cluster.jobs["a"].held) == 4
    if asked:
        # As Ray's nodes: it is the question for the ends of ranks that nobody answers.
        ended = cluster.backend.ended
        asks = iter([lambda: cluster.backend.remove_lost("b")])
        monkeypatch.setattr(
            cluster.backend, "ended", lambda: (next(asks, lambda: None)(), ended())[1]
        )
    else:
        cluster.backend.remove_lost("b")
    cluster.run(4)
    job = cluster.jobs["a"]
    assert set(job.held) <= {0, 1}
    # It is not the job's fault, so that not even one that has one try is given up.
    assert job.failures == 0
    cluster.finish()
    assert job.phase is Phase.ENDED
    assert cluster.backend.drawn["a"] == list(range(100))
    assert any("node b left with 2 slots" in entry.cause for entry in cluster.controller.rounds)


def test_a_script_that_never_reports_is_named_and_keeps_its_slots(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, policy="fifo")
    cluster.submit("a", Behaviour(silent=True), report_within=10.0, samples=16000.0)
    cluster.submit("b")
    cluster.run(15)
    job = cluster.jobs["a"]
    held = job.held
    assert "has not reported for 10 s" in job.note
    assert "it keeps its slots" in job.note
    cluster.submit("c")
    cluster.run(10)
    assert (job.held, job.attempt) == (held, 1)
    assert "a" not in expected_ends(history_of(cluster))
    cluster.finish()
    assert job.phase is Phase.ENDED
    assert "ended without a report" in job.note


def test_a_job_that_does_not_leave_is_ended_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    cluster = FakeCluster(tmp_path)
    policy = cluster.controller.policy = Wanted(a=4)
    cluster.submit("a", Behaviour(deaf=True), grace=5.0, samples=16000.0)
    cluster.run(5)
    policy.counts["a"] = 2
    cluster.run(8)
    job = cluster.jobs["a"]
    assert (len(job.held), job.attempt) == (2, 2)
    told = cluster.backend.attempts["a"]
    assert told.first % 10 == 0
    assert told.first > 0


def test_a_job_that_is_stopped_saves_first(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.submit("a")
    cluster.run(4)
    (cluster.spool.job("a") / "stop").touch()
    cluster.finish()
    assert cluster.phase("a") is Phase.STOPPED
    assert cluster.backend.saved["a"] == cluster.backend.drawn["a"][-1]


def test_jobs_that_the_cluster_can_never_run_are_refused_by_name(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, quotas={"x": 2})
    cluster.submit("large", slots=8, tenant="x")
    cluster.submit("stranger", tenant="y")
    cluster.run(1)
    refused = cluster.controller.refused
    assert "requests 8 slots but the cluster has 4" in refused["large"]
    assert "tenant 'y'" in refused["stranger"]
    with pytest.raises(GulliverError, match=r"'large'.* 8 slots"):
        live_why(history_of(cluster), "large")


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.submit("a")
    with pytest.raises(GulliverError, match="job 'a' already exists"):
        cluster.submit("a")


# --- What is told --------------------------------------------------------------------------------


def test_why_prints_reason_costs_and_correct_end(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    acts, costs = Behaviour(save=0.0), {"sample_seconds": 0.05}
    cluster.submit("a", acts, samples=4000.0, **costs)
    cluster.run(10)
    cluster.submit("b", acts, samples=800.0, slots=4, **costs)
    cluster.run(15)
    history = history_of(cluster)
    ends = expected_ends(history)
    text = "\n".join(live_why(history, "a"))
    assert "policy rollout" in text
    assert "its start took 1" in text
    assert f"expected to end at {ends['a']:.4g} s" in text
    cluster.finish()
    for name, end in ends.items():
        assert cluster.jobs[name].ended == pytest.approx(end, rel=0.05)


def test_a_history_comes_back_from_its_file_and_is_taken_up(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.submit("a")
    cluster.submit("b", samples=160.0)
    cluster.run(9)
    before = history_of(cluster)
    write_history(cluster.spool, before)
    found = read_history(cluster.spool)
    assert found is not None
    assert found.rounds == before.rounds
    assert result_of(found).segments == result_of(before).segments
    assert {n: j.phase for n, j in found.jobs.items()} == {
        n: j.phase for n, j in before.jobs.items()
    }
    assert expected_ends(found) == expected_ends(before)
    # The next scheduler goes on with them.
    again = FakeCluster(tmp_path)
    again.backend.now, again.backend.saved = cluster.backend.now, cluster.backend.saved
    again.backend.drawn = cluster.backend.drawn
    for job in found.jobs.values():
        take_up(job)
        again.jobs[job.name] = job
    again.finish()
    assert again.backend.drawn["a"] == list(range(100))


def test_the_page_draws_who_held_what(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path)
    assert "Nothing has run yet" in live_page(history_of(cluster))
    cluster.submit("a")
    cluster.submit("b")
    cluster.finish()
    page = live_page(history_of(cluster))
    assert page.count("<svg") == 1
    assert "rollout, as it happened" in page
    result = result_of(history_of(cluster))
    assert result.summary().mean > 0
    slots = [(s.begin, s.end, slot) for s in result.segments for slot in s.slots]
    for begin, end, slot in slots:
        others = [x for x in slots if x[2] == slot and x[0] < end and x[1] > begin]
        assert len(others) == 1


@pytest.mark.parametrize("batch", [1, 5, 16, 17])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_shares_of_all_ranks_are_the_batch(batch: int, parts: int) -> None:
    shares = [share_of(batch, part, parts) for part in range(parts)]
    assert [sample for share in shares for sample in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
