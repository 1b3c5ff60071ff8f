"""What is not known of jobs: posteriors and expected arrivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gulliver.hardware import Scaling
from gulliver.schedule import Job, JobCluster, View
from gulliver.schedule.estimates import Estimator
from gulliver.schedule.policies import futures_of
from gulliver.schedule.state import JobState


def job(name: str, arrival: float, seconds: float, **more: object) -> Job:
    values = {"batch": 64, "slots": 1, "scaling": Scaling(0.01), "resize_seconds": 0.0, **more}
    return Job(name, arrival, seconds * 100.0, **values)  # type: ignore[arg-type]


def ended(seconds: float, curvature: float = 3.0) -> JobState:
    done = job(f"e{seconds}", 0, seconds, announced=False, curvature=curvature)
    return JobState(done, done=done.samples)


def test_lengths_left_are_those_of_jobs_that_lasted_longer_and_a_tail() -> None:
    guess = Estimator("lengths")
    draw = np.random.default_rng(0)
    state = JobState(job("a", 0, 1000, announced=False, epoch=100.0), done=10_000.0)
    # Nobody has ended: half of all jobs that have done this much do no more than as much again.
    assert np.median(guess.draws(state, 1000, draw)) == pytest.approx(10_000, rel=0.01)
    guess.learn([ended(20), ended(50), ended(200), ended(200), ended(200)])
    found = np.sort(guess.draws(state, 1000, draw)) / 100
    # It has done 100 s: three lasted 200, and one in four is a job that nobody has seen.
    assert np.mean(np.abs(found - 100) < 1e-9) == pytest.approx(0.75, abs=0.01)
    assert guess.remaining(state) / 100 > 100


def test_a_loss_curve_says_how_far_a_job_is() -> None:
    guess = Estimator("curves")
    guess.learn([ended(100, 2.0), ended(100, 3.0), ended(100, 4.0)])
    state = JobState(job("a", 0, 100, announced=False, curvature=3.0, epoch=10.0), done=5000.0)
    # Its loss has fallen by exp(-1.5); the others ended at exp(-2), exp(-3) and exp(-4).
    found = guess.draws(state, 4000, np.random.default_rng(0))
    assert found.min() == pytest.approx(5000 * (2 / 1.5 - 1), rel=0.01)
    assert found.max() == pytest.approx(5000 * (4 / 1.5 - 1), rel=0.01)
    assert found.mean() == pytest.approx(5000, rel=0.01)
    # The truth is not looked at: a job of ten times the length on the same curve looks the same.
    longer = replace(state.job, samples=state.job.samples * 10, curvature=30.0)
    again = guess.draws(JobState(longer, done=5000.0), 4000, np.random.default_rng(0))
    np.testing.assert_allclose(again, found)


def test_futures_copy_jobs_that_were_seen_and_come_after_gaps_that_were_seen() -> None:
    states = [JobState(job(f"j{n}", at, 10 + n)) for n, at in enumerate((0, 5, 10, 30, 40, 60))]
    view = View(66.0, JobCluster(4), states, [], {"": 4})
    found = futures_of(view, Estimator(), 5, 3, seed=0)
    assert found.present == 6
    assert found.jobs.left.shape == (5, 6 + 15)
    assert (found.there[:, :6]).all()
    assert (found.there[:, 6:].sum(axis=1) == 3).all()
    first = np.array([found.jobs.comes[6 + 3 * n] for n in range(5)])
    # Nobody has come for 6 s: the gap is one of 10, 20 and 20 s, the 5 s are over.
    assert set(first) <= {4.0, 14.0}
    assert set(found.jobs.left[0, 6:]) <= {state.job.samples for state in states}
    again = futures_of(view, Estimator(), 5, 3, seed=0)
    np.testing.assert_array_equal(found.jobs.comes, again.jobs.comes)
    few = futures_of(view._replace(jobs=states[:2]), Estimator(), 5, 3, seed=0)
    assert few.there.shape == (1, 2), "too few to tell who comes, and nothing else is uncertain"
