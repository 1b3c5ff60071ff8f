"""Clusters as files, the cost formulas against counting by hand, and the parts of the probe."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import (
    Axis,
    Cluster,
    Device,
    Disk,
    Link,
    all_reduce_seconds,
    described,
    described_names,
    fit_line,
    group_into_nodes,
    matmul_seconds,
    pair_rounds,
    point_to_point_seconds,
    probe_disk,
    probe_links,
    proposed_axes,
    reduce_scatter_seconds,
    wire_bytes,
)
from tests.pool import Pool

SLOW, FAST = Link(1e-3, 12.5e6), Link(1e-4, 125e6)
DEVICE = Device("d", {"float32": 1e11}, 1e10, 10**9, 1e-6)


def test_a_cluster_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    axes = (Axis("node", 2, SLOW), Axis("local", 4, FAST))
    cluster = Cluster("c", DEVICE, axes, Disk(1e9, 2e9), True, "by hand", "2026-01-02", {"a": "1"})
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    assert cluster.size == 8


def test_every_description_loads_and_says_that_it_was_not_measured() -> None:
    assert len(described_names()) >= 4
    for name in described_names():
        cluster = described(name)
        assert not cluster.measured
        assert cluster.source
        assert cluster.size > 1
        assert all_reduce_seconds(cluster.links(), 10**9) > 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth:", "bandwith:", "did you mean 'bandwidth'"),
        ("bandwidth: 12500000.0", "bandwidth: -3", "must be a positive number"),
        ("bandwidth: 12500000.0", "bandwidth: fast", "must be a number"),
        ("device:", "devise:", "'device'"),
        ("size: 2", "size: 0", "must be a positive number"),
    ],
)
def test_a_wrong_entry_is_one_clear_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = Cluster("c", DEVICE, (Axis("node", 2, SLOW),)).to_yaml()
    assert old in text
    (tmp_path / "c.yaml").write_text(text.replace(old, new))
    with pytest.raises(GulliverError) as caught:
        Cluster.load(tmp_path / "c.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_descriptions_are_named(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match="gulliver probe"):
        Cluster.load(tmp_path / "none.yaml")
    with pytest.raises(GulliverError, match="8xa100-infiniband"):
        described("8xa100")


def test_formulas_give_what_counting_by_hand_gives() -> None:
    assert point_to_point_seconds(SLOW, 125_000) == pytest.approx(1e-3 + 0.01)
    assert matmul_seconds(DEVICE, 100, 200, 300) == pytest.approx(1e-6 + 12e6 / 1e11)
    # Thin products are bound by their bytes.
    assert matmul_seconds(DEVICE, 1, 1000, 1000) == pytest.approx(1e-6 + 4 * 1_002_000 / 1e10)
    with pytest.raises(GulliverError, match="float32"):
        matmul_seconds(DEVICE, 1, 1, 1, "float23")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 50))
def test_wire_bytes_are_those_of_messages_counted_one_by_one(sizes: list[int], part: int) -> None:
    axes = [(size, SLOW if n == 0 else FAST) for n, size in enumerate(sizes)]
    ranks = 1
    for size in sizes:
        ranks *= size
    count = part * ranks
    # Every place holds a set of parts; along an axis each peer gets those of its own coordinate.
    held = list(itertools.product(*(range(s) for s in sizes)))
    me = tuple(0 for _ in sizes)
    sent = []
    for axis in reversed(range(len(sizes))):
        sent.append(part * sum(p[axis] != me[axis] for p in held))
        held = [p for p in held if p[axis] == me[axis]]
    assert wire_bytes(axes, count, "reduce_scatter") == pytest.approx(sent[::-1])
    assert wire_bytes(axes, count, "all_reduce") == pytest.approx([2 * s for s in sent[::-1]])
    expected = sum(
        link.alpha_s + amount / link.bandwidth
        for (size, link), amount in zip(axes, sent[::-1], strict=True)
        if size > 1
    )
    assert reduce_scatter_seconds(axes, count) == pytest.approx(expected)


@given(st.integers(2, 17))
def test_rounds_hold_every_pair_once_and_share_no_rank(size: int) -> None:
    rounds = pair_rounds(size)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert sorted(p for pairs in rounds for p in pairs) == list(
        itertools.combinations(range(size), 2)
    )
    assert len(rounds) == size - 1 + size % 2


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_a_line_without_noise_is_found_again(alpha: float, bandwidth: float) -> None:
    counts = (1 << 10, 1 << 16, 1 << 20, 4 << 20)
    link = fit_line(counts, [alpha + c / bandwidth for c in counts])
    for count in counts:
        assert point_to_point_seconds(link, count) == pytest.approx(alpha + count / bandwidth, 1e-6)
    assert link.error is not None
    assert link.error < 1e-6


@given(st.permutations(range(6)), st.sampled_from([1, 2, 3, 6]))
def test_nodes_are_found_however_ranks_are_numbered(order: list[int], nodes: int) -> None:
    node_of = {rank: place // (6 // nodes) for place, rank in enumerate(order)}
    links = {
        (a, b): FAST if node_of[a] == node_of[b] else SLOW
        for a, b in itertools.combinations(range(6), 2)
    }
    found = group_into_nodes(6, links)
    if nodes in (1, 6):
        assert found in ([list(range(6))], [[r] for r in range(6)])
        return
    assert {frozenset(n) for n in found} == {
        frozenset(r for r in range(6) if node_of[r] == k) for k in range(nodes)
    }
    axes, filled = proposed_axes(6, links)
    assert [axis.size for axis in axes] == [nodes, 6 // nodes]
    assert [axis.link for axis in axes] == [SLOW, FAST]
    assert sorted(filled or range(6)) == list(range(6))


def test_the_probe_refuses_what_it_cannot_measure(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match="several ranks"):
        probe_links()
    with pytest.raises(GulliverError, match="folder that can be written"):
        probe_disk(tmp_path / "none")


def _links(world: World) -> dict[tuple[int, int], Link]:
    return probe_links()


def test_all_ranks_learn_the_links_of_all_pairs(pool: Pool) -> None:
    first, *others = pool.run(_links, 3)
    assert sorted(first) == [(0, 1), (0, 2), (1, 2)]
    assert all(link.bandwidth > 0 and link.alpha_s >= 0 for link in first.values())
    assert all(found == first for found in others)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    disk = probe_disk(tmp_path, 1 << 22)
    assert disk.write_rate > 0
    assert disk.read_rate > 0
    assert list(tmp_path.iterdir()) == []
