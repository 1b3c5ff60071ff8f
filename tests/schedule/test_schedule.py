"""Jobs on a shared cluster: exact events, policies computed by hand, nothing below any bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.hardware import Scaling, fit_scaling
from gulliver.hardware.scaling import batch_efficiency, best_batch
from gulliver.schedule import (
    Decision,
    Job,
    JobCluster,
    Policy,
    Result,
    Rollout,
    View,
    generate,
    simulate,
    why,
)
from gulliver.schedule.classic import Tiresias
from gulliver.schedule.estimates import Estimator
from gulliver.schedule.policies import POLICIES, make_policy
from gulliver.schedule.simulator import bound_of
from gulliver.schedule.state import Allotment
from gulliver.solve.allocation import allocate, fluid_bound


def job(name: str, arrival: float, seconds: float, slots: int = 1, **more: object) -> Job:
    """A job that takes so many seconds on the slots that it asks for, half of that on twice."""
    values = {"batch": 64, "resize_seconds": 0.0, **more}
    batch = int(values.pop("batch"))  # type: ignore[call-overload]
    scaling = values.pop("scaling", Scaling(0.01))
    assert isinstance(scaling, Scaling)
    samples = seconds * scaling.throughput(slots, batch)
    return Job(name, arrival, samples, batch, slots, scaling, **values)  # type: ignore[arg-type]


# --- Costs, allocation, bounds -------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.floats(1e-4, 0.1),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.floats(0, 500),
    st.integers(1, 24),
    st.tuples(st.integers(1, 60), st.integers(0, 90)),
)
def test_the_best_batch_is_that_of_all(
    sample: float, step: float, exchange: float, noise: float, slots: int, limits: tuple[int, int]
) -> None:
    costs, (least, more) = Scaling(sample, step, exchange), limits

    def goodput(batch: int) -> float:
        return costs.throughput(slots, batch) * batch_efficiency(noise, least, batch)

    found = best_batch(costs, slots, noise, least, least, least + more)
    best = max(goodput(batch) for batch in range(least, least + more + 1))
    assert goodput(found) == pytest.approx(best, rel=1e-12)


def test_costs_are_found_again_from_what_was_measured() -> None:
    costs = Scaling(0.004, 0.02, 0.01)
    points = [(n, b, costs.throughput(n, b)) for n in (1, 2, 4, 8) for b in (64, 256)]
    found = fit_scaling(points)
    assert found.sample_seconds == pytest.approx(0.004)
    assert found.step_seconds == pytest.approx(0.02)
    assert found.exchange_seconds == pytest.approx(0.01)
    assert found.error < 1e-9


def test_an_allocation_is_the_best_of_all() -> None:
    draw = np.random.default_rng(0)
    for _ in range(30):
        jobs, slots = int(draw.integers(1, 4)), int(draw.integers(1, 6))
        values = draw.normal(size=(2, jobs, slots + 1))
        values[draw.random(values.shape) < 0.2] = -np.inf
        values[:, :, 0] = 0.0
        limit = int(draw.integers(0, slots + 1))
        groups = [[0], list(range(1, jobs))] if jobs > 1 else []
        limits = [limit, slots] if groups else []
        counts, found = allocate(values, groups, limits)
        for world in range(2):
            best = max(
                sum(float(values[world, j, n]) for j, n in enumerate(picked))
                for picked in itertools.product(range(slots + 1), repeat=jobs)
                if sum(picked) <= slots and (not groups or picked[0] <= limit)
            )
            assert found[world] == pytest.approx(best)
            assert sum(values[world, j, n] for j, n in enumerate(counts[world])) == pytest.approx(
                best
            )


def test_bounds_of_one_job_and_of_jobs_that_scale_perfectly_are_tight() -> None:
    rates = np.arange(5.0)[None]
    assert fluid_bound([8.0], rates, [1.0], 4) == pytest.approx(3.0)
    # Shortest remaining time first on all slots: 1 + 3 + 6 seconds.
    three = np.tile(np.arange(5.0), (3, 1))
    assert fluid_bound([4.0, 8.0, 12.0], three, [0.0] * 3, 4) == pytest.approx(10.0)


# --- The simulator beside brute force ------------------------------------------------------------


class Scripted(Policy):
    """Gives the slots that a list says, one entry for each event."""

    name, what = "scripted", "by a list"

    def __init__(self, script: list[tuple[int, ...]]) -> None:
        self.script, self.at = script, 0

    def decide(self, view: View) -> Decision:
        counts, self.at = self.script[self.at], self.at + 1
        names = sorted(state.job.name for state in view.jobs)
        jobs = {state.job.name: state.job for state in view.jobs}
        given = {
            n: Allotment(c, jobs[n].modes(view.cluster.slots).batches[c])
            for n, c in zip(names, counts, strict=True)
            if c
        }
        return Decision(given)


def every_script(jobs: int, slots: int) -> Iterator[list[tuple[int, ...]]]:
    """All allocations at each of `jobs` events, of jobs that are all there from the first on."""
    levels = [
        [c for c in itertools.product(range(slots + 1), repeat=left) if 0 < sum(c) <= slots]
        for left in range(jobs, 0, -1)
    ]
    for script in itertools.product(*levels):
        yield list(script)


def naive_total(jobs: list[Job], script: list[tuple[int, ...]]) -> float:
    """Sum of ends, followed by hand in another form: work as a share, one loop."""
    share, held, begun = {j.name: 1.0 for j in jobs}, dict.fromkeys((j.name for j in jobs), 0), {}
    wait = dict.fromkeys(share, 0.0)
    known, now, total = {j.name: j for j in jobs}, 0.0, 0.0
    for counts in script:
        for name, count in zip(sorted(share), counts, strict=True):
            if count != held[name]:
                wait[name] = known[name].resize_seconds if name in begun and count else 0.0
                held[name] = count
            if count:
                begun.setdefault(name, now)
        speed = {
            n: max(known[n].goodput(held[n], known[n].batch), 0) / known[n].samples
            for n in share
            if held[n]
        }
        ends = {n: wait[n] + share[n] / speed[n] for n in speed}
        if not ends:
            return math.inf
        spent = min(ends.values())
        for n in speed:
            share[n] -= max(0.0, spent - wait[n]) * speed[n]
            wait[n] = max(0.0, wait[n] - spent)
        now += spent
        for n in [n for n in ends if ends[n] <= spent * (1 + 1e-12)]:
            total += now
            del share[n]
            if len([m for m in ends if ends[m] <= spent * (1 + 1e-12)]) > 1:
                return math.nan  # two end at once: the script has an entry too many
    return total


def test_simulator_equals_naive_loop_and_respects_optimum() -> None:
    draw = np.random.default_rng(1)
    ratios: list[float] = []
    for case in range(4):
        costs = [Scaling(0.01, 0.02, float(draw.uniform(0, 0.3))) for _ in range(3)]
        jobs = [
            job(name, 0.0, float(draw.uniform(5, 100)), scaling=c, resize_seconds=4.0 * (case % 2))
            for name, c in zip("abc", costs, strict=True)
        ]
        cluster, best = JobCluster(3), math.inf
        for number, script in enumerate(every_script(3, 3)):
            total = naive_total(jobs, script)
            if not math.isfinite(total):
                continue
            best = min(best, total)
            if number % 23 == 0:
                found = simulate(jobs, cluster, Scripted(script))
                assert math.fsum(found.ends.values()) == pytest.approx(total, rel=1e-9)
        assert 3 * bound_of(tuple(jobs), cluster) <= best * (1 + 1e-9)
        for name in POLICIES:
            total = math.fsum(simulate(jobs, cluster, make_policy(name)).ends.values())
            # A policy that is woken by a clock may change slots between events.
            clocked = name in ("tiresias", "pollux")
            assert total >= (3 * bound_of(tuple(jobs), cluster) if clocked else best) * (1 - 1e-9)
        ours = math.fsum(simulate(jobs, cluster, Rollout()).ends.values())
        ratios.append(ours / best)
    assert max(ratios) < 1.05, ratios


# --- Invariants ----------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Job], JobCluster]:
    slots = draw(st.integers(1, 6))
    cluster = JobCluster(slots)
    jobs = []
    for number in range(draw(st.integers(1, 5))):
        batch = draw(st.integers(4, 64))
        jobs.append(
            Job(
                f"j{number}",
                draw(st.floats(0, 50)),
                draw(st.floats(50, 5000)),
                batch,
                draw(st.integers(1, slots)),
                Scaling(
                    draw(st.floats(0.001, 0.02)), draw(st.floats(0, 0.05)), draw(st.floats(0, 0.05))
                ),
                noise=draw(st.floats(0, 200)),
                least_batch=draw(st.integers(1, batch)),
                most_batch=draw(st.integers(batch, 256)),
                resize_seconds=draw(st.floats(0, 5)),
                announced=draw(st.booleans()),
            )
        )
    return jobs, cluster


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=8)
@given(traces())
def test_work_is_conserved_and_slots_are_never_exceeded(
    name: str, drawn: tuple[list[Job], JobCluster]
) -> None:
    jobs, cluster = drawn
    result = simulate(jobs, cluster, make_policy(name))
    assert sorted(result.ends) == sorted(job.name for job in jobs)
    check(result)
    total = math.fsum(result.completion(job.name) for job in jobs)
    assert total >= len(jobs) * result.bound * (1 - 1e-6)


def check(result: Result) -> None:
    """Each sample is counted once, each slot has one job, nobody runs before it came."""
    # A job may also wait for slots of others that are being resized.
    resizes = math.fsum(j.resize_seconds * result.states[j.name].resizes for j in result.jobs)
    for each in result.jobs:
        own = [s for s in result.segments if s.job == each.name]
        done = math.fsum(s.rate * (s.end - s.begin) for s in own)
        assert done == pytest.approx(each.samples, rel=1e-6)
        drawn = math.fsum(
            each.scaling.throughput(len(s.slots), s.batch) * (s.end - s.begin)
            for s in own
            if s.rate
        )
        assert result.states[each.name].drawn == pytest.approx(drawn, rel=1e-6)
        assert min(s.begin for s in own) >= each.arrival
        assert all(each.smallest <= s.batch <= each.largest for s in own)
        lost = math.fsum(s.end - s.begin for s in own if not s.rate)
        assert lost <= resizes + 1e-6
    moments = sorted({s.begin for s in result.segments})
    for moment in moments:
        held = [n for s in result.segments if s.begin <= moment < s.end for n in s.slots]
        assert len(held) == len(set(held)) <= result.cluster.slots


def test_a_fixed_batch_draws_every_sample_once_whatever_its_slots() -> None:
    jobs, cluster = generate("fixed-batch", 1)
    result = simulate(jobs[:8], cluster, Rollout())
    assert sum(state.resizes for state in result.states.values()) > 0
    for state in result.states.values():
        assert state.drawn == pytest.approx(state.job.samples, rel=1e-9)


# --- Policies computed by hand -------------------------------------------------------------------


def test_first_come_first_served_waits_behind_the_head() -> None:
    jobs = [job("a", 0, 10, 2), job("b", 1, 10, 3), job("c", 2, 4, 1)]
    ends = simulate(jobs, JobCluster(3), make_policy("fifo")).ends
    # b waits for a, and c for b, although a slot is free.
    assert ends == pytest.approx({"a": 10, "b": 20, "c": 24})


def test_the_shortest_goes_first_and_a_pause_costs_its_resize() -> None:
    jobs = [job("a", 0, 10, 2, resize_seconds=3.0), job("b", 4, 2, 2)]
    ends = simulate(jobs, JobCluster(2), make_policy("srpt")).ends
    assert ends == pytest.approx({"b": 6, "a": 4 + 2 + 3 + 6})


def test_a_job_waits_for_slots_that_others_leave() -> None:
    costs = {"resize_seconds": 3.0, "leave_seconds": 2.0}
    jobs = [job("a", 0, 10, 2, **costs), job("b", 4, 2, 2, start_seconds=1.0)]
    ends = simulate(jobs, JobCluster(2), make_policy("srpt")).ends
    # The second of a's resize that is left passes when it has its slots again.
    assert ends == pytest.approx({"b": 4 + 2 + 1 + 2, "a": 4 + 2 + 1 + 2 + 1 + 6})
    with pytest.raises(GulliverError, match="leave_seconds"):
        job("a", 0, 10, 2, resize_seconds=1.0, leave_seconds=2.0)


class Told(Policy):
    """Gives a job slots by the time."""

    name, what = "told", "as told"

    def __init__(self, plan: dict[float, dict[str, tuple[int, ...]]]) -> None:
        self.plan = plan

    def decide(self, view: View) -> Decision:
        last = max(moment for moment in self.plan if moment <= view.now + 1e-9)
        names = {state.job.name for state in view.jobs}
        chosen = {n: Allotment(s, 64) for n, s in self.plan[last].items() if n in names}
        later = [moment for moment in self.plan if moment > view.now + 1e-9]
        return Decision(chosen, wake=min(later, default=None))


def test_a_resize_waits_for_a_start_and_for_slots_that_others_leave() -> None:
    starts = [job("a", 0, 20, 2, start_seconds=10.0, resize_seconds=5.0)]
    plan = {0.0: {"a": (0, 1)}, 4.0: {"a": (0, 1, 2, 3)}}
    assert simulate(starts, JobCluster(4), Told(plan)).ends == pytest.approx({"a": 10 + 5 + 10})
    costs = {"resize_seconds": 40.0, "leave_seconds": 40.0}
    jobs = [job("a", 0, 100, 2, **costs), job("b", 0, 10, 2)]
    swapped = {0.0: {"a": (0, 1)}, 10.0: {"b": (0, 1)}, 20.0: {"b": (0, 1, 2, 3)}}
    swapped[90.0] = {"a": (0, 1)}
    ends = simulate(jobs, JobCluster(4), Told(swapped)).ends
    # b begins when a has left, although it was given more slots meanwhile.
    assert ends == pytest.approx({"b": 10 + 40 + 5, "a": 90 + 90})


def test_tiresias_lets_a_job_sink_when_its_service_is_due() -> None:
    jobs = [job("a", 0, 100, 2), job("b", 5, 100, 2)]
    result = simulate(jobs, JobCluster(2), Tiresias((40.0,)))
    # a sinks after 20 s of two slots; then b runs until it sinks too; a started first.
    changes = [(r.time, c.job, c.after) for r in result.rounds for c in r.changes]
    assert changes[:5] == [(0, "a", 2), (20, "a", 0), (20, "b", 2), (40, "a", 2), (40, "b", 0)]
    assert result.ends == pytest.approx({"a": 120, "b": 200})


def test_rollout_keeps_slots_if_resize_costs_more() -> None:
    jobs = [job("a", 0, 40, 4, resize_seconds=500.0), job("b", 10, 20, 4, resize_seconds=500.0)]
    dear = simulate(jobs, JobCluster(4), Rollout())
    assert dear.ends == pytest.approx({"a": 40, "b": 60})
    free = simulate([job("a", 0, 40, 4), job("b", 10, 20, 4)], JobCluster(4), Rollout())
    assert free.ends == pytest.approx({"b": 30, "a": 60})


def test_rollout_uses_idle_slots() -> None:
    jobs = [job("a", 0, 40, 2), job("b", 0, 10, 2)]
    result = simulate(jobs, JobCluster(4), Rollout())
    assert result.summary().used == pytest.approx(1.0)
    assert sum(result.ends.values()) == pytest.approx(3 * bound_of(tuple(jobs), JobCluster(4)), 0.5)


def test_a_deadline_comes_before_the_mean() -> None:
    late = [job("a", 0, 40, 2, deadline=41.0), job("b", 0, 10, 2), job("c", 1, 10, 2)]
    assert simulate(late, JobCluster(2), Rollout()).summary().missed == 0
    free = [job("a", 0, 40, 2), *late[1:]]
    assert simulate(free, JobCluster(2), Rollout()).ends["a"] > 41


def test_a_quota_lends_what_is_idle_and_takes_it_back() -> None:
    cluster = JobCluster(4, {"x": 2, "y": 2})
    jobs = [job("a", 0, 40, 2, tenant="x"), job("b", 10, 10, 2, tenant="y")]
    for name in ("rollout", "pollux"):
        result = simulate(jobs, cluster, make_policy(name))
        at = {(s.job, s.begin): len(s.slots) for s in result.segments}
        assert at["a", 0.0] == 4, name
        assert at["b", 10.0] == 2, name
        check(result)
    assert cluster.limits({"x": 4, "y": 1}) == {"x": 3, "y": 2}
    assert cluster.limits({"x": 4, "y": 1}, borrow=False) == {"x": 2, "y": 2}
    large = [job("a", 0, 40, 3, tenant="x"), jobs[1]]
    with pytest.raises(GulliverError, match=r"'a' requests 3 slots, tenant 'x' has a quota of 2\b"):
        simulate(large, cluster, make_policy("fifo"))
    assert simulate(large, cluster, make_policy("rollout")).ends.keys() == {"a", "b"}


def test_unknown_lengths_are_estimated_and_the_truth_is_not_looked_at() -> None:
    jobs = [job(f"j{n}", 0.0, 10.0 * (n + 1), announced=False) for n in range(4)]
    result = simulate(jobs, JobCluster(1), Rollout(Estimator("lengths")))
    check(result)
    view = result.states["j3"]
    view.done = view.job.samples / 4
    assert Estimator("perfect").remaining(view) == pytest.approx(3 * view.done)
    with pytest.raises(GulliverError, match="'perfect'"):
        Estimator("perfct")  # type: ignore[arg-type]


def test_why_says_who_holds_the_slots_and_when_a_job_should_end() -> None:
    jobs = [job("a", 0, 40, 4), job("b", 10, 20, 4), job("c", 20, 1, 4)]
    told = why(jobs, JobCluster(4), make_policy("fifo"), "b", 12.0)
    assert "waits: 4 of 4 slots are held (a 4)" in told[0]
    assert told[-1].startswith("expected to end at 60 s, in 48 s, if no job arrives")
    told = why(jobs, JobCluster(4), Rollout(), "a", 15.0)
    assert any("at 10 s from 4 to 0 slots, when b arrived" in line for line in told)
    with pytest.raises(GulliverError, match="no job 'd'"):
        why(jobs, JobCluster(4), Rollout(), "d")


def test_a_simulation_is_the_same_each_time() -> None:
    jobs, cluster = generate("artifact", 2)
    policy = Rollout(Estimator("lengths"))
    first = simulate(jobs[:5], cluster, policy)
    assert simulate(jobs[:5], cluster, policy).ends == first.ends
