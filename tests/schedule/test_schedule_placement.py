"""Jobs on nodes: exchange over two axes, packing beside brute force, one node as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gulliver.hardware import Scaling, all_reduce_seconds, described
from gulliver.schedule import Job, JobCluster, Rollout, generate, simulate, why
from gulliver.schedule.jobs import place
from gulliver.schedule.policies import make_policy


def job(name: str, arrival: float, samples: float, slots: int, **more: object) -> Job:
    costs = Scaling(0.01, 0.0, 0.05)
    values = {"batch": 64, "resize_seconds": 0.0, **more}
    return Job(name, arrival, samples, slots=slots, scaling=costs, **values)  # type: ignore[arg-type]


def test_an_exchange_over_nodes_is_the_all_reduce_over_two_axes() -> None:
    hardware = described("8xh100-infiniband")
    cluster = JobCluster.of(hardware)
    assert (cluster.slots, cluster.node_slots, cluster.nodes) == (16, 8, 2)
    links = [(size, replace(link, alpha_s=0.0)) for size, link in hardware.links()]
    count = 1 << 30
    costs = Scaling(0.0, 1.0, count / links[1][1].bandwidth)
    for nodes, own in ((2, 8), (2, 4), (2, 1), (1, 8)):
        axes = [(nodes, links[0][1]), (own, links[1][1])]
        here = costs.across((own,) * nodes, cluster.across)
        seconds = here.seconds(nodes * own, nodes * own) - 1.0
        assert seconds == pytest.approx(all_reduce_seconds(axes, count))


@pytest.mark.parametrize("name", ["fifo", "pollux", "rollout"])
def test_one_node_is_as_no_nodes(name: str) -> None:
    jobs, cluster = generate("steady", 1)
    jobs = jobs[:5]
    plain = simulate(jobs, cluster, make_policy(name))
    one = simulate(jobs, JobCluster(16, node_slots=16, across=9.0), make_policy(name))
    assert one.ends == plain.ends
    assert one.segments == plain.segments


def test_many_nodes_are_filled_largest_job_first_where_it_fits_best() -> None:
    found = place([2, 6, 9], [8, 2, 8, 0, 3, 8])
    assert [sum(parts) for parts in found] == [2, 6, 9]
    assert found[1] == (0, 0, 6, 0, 0, 0)  # 9 slots fill a node and take one of this
    assert found[0] == (0, 2, 0, 0, 0, 0)
    assert sum(part > 0 for part in found[2]) == 2


def test_a_job_that_spans_is_slower_by_its_exchange_and_why_says_so() -> None:
    cluster = JobCluster(8, node_slots=4, across=10.0)
    # a and b leave two slots on each node: c lies on both until one of them ends.
    jobs = [job("a", 0, 6400, 2), job("b", 0, 6400, 3), job("c", 1, 64_000, 3)]
    result = simulate(jobs, cluster, make_policy("fifo"))
    here = [segment for segment in result.segments if segment.job == "c"]
    parts = cluster.parts(here[0].slots)
    assert sorted(parts) == [1, 2]
    costs = jobs[2].scaling.across(parts, 10.0)
    assert here[0].rate == pytest.approx(costs.throughput(3, 64))
    assert costs.seconds(3, 64) == pytest.approx(0.22 + 0.05 * (2 * 1 / 2 + 10 * 2 / 2 / 1))
    told = why(jobs, cluster, make_policy("fifo"), "c", 2.0)[0]
    assert "1 on node 0 + 2 on node 1" in told
    assert "% slower" in told


def test_work_is_conserved_and_slots_are_never_exceeded_on_nodes() -> None:
    jobs, _ = generate("bursts", 2)
    cluster = JobCluster(16, node_slots=4, across=9.0)
    for policy in (Rollout(futures=2, coming=4), make_policy("pollux")):
        result = simulate(jobs[:7], cluster, policy)
        for each in result.jobs:
            own = [s for s in result.segments if s.job == each.name]
            done = sum(s.rate * (s.end - s.begin) for s in own)
            assert done == pytest.approx(each.samples, rel=1e-6)
        for moment in {s.begin for s in result.segments}:
            held = [n for s in result.segments if s.begin <= moment < s.end for n in s.slots]
            assert len(held) == len(set(held))
        assert result.summary().to_bound >= 1
