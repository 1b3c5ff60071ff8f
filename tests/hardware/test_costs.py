"""The cost formulas against networks and collectives that are played through message by message."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gulliver.comm import choose_axes
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, all_reduce_seconds, described, torus_seconds
from gulliver.hardware.cluster import Along, Axis, Curve, Device, Link
from gulliver.hardware.costs import (
    all_gather_seconds,
    all_to_all_seconds,
    copy_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
    wire_bytes,
    zero_collectives,
)
from gulliver.hardware.step import Message

SLOW, FAST = Link(1e-3, 12.5e6), Link(1e-4, 125e6)
DEVICE = Device("d", {"float32": 1e11, "float8_e4m3fn": 4e11}, 1e10, 10**9, 1e-6, 2e9, 1e9)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
Place = tuple[int, ...]


def axes_of(sizes: list[int], ring: bool = False) -> list[tuple[int, Link]]:
    return [(n, replace(FAST if k else SLOW, ring=ring)) for k, n in enumerate(sizes)]


def places(sizes: list[int]) -> list[Place]:
    return list(itertools.product(*(range(n) for n in sizes)))


def direct_exchange(ranks: int, part: float, link: Link) -> float:
    """When the last message is there if all send one to each other, one after the other."""
    there = [0.0]
    for _ in range(ranks):
        port_free = 0.0
        for _ in range(ranks - 1):
            port_free += part / link.bandwidth
            there.append(port_free + link.alpha_s)
    return max(there)


def ring_exchange(ranks: int, part: float, link: Link) -> float:
    """When the last rank has what went once round a ring."""
    ready = [0.0] * ranks
    for _ in range(ranks - 1):
        ready = [
            max(ready[r - 1], ready[r]) + link.alpha_s + part / link.bandwidth for r in range(ranks)
        ]
    return max(ready)


@given(st.integers(1, 9), st.integers(1, 10**7), st.booleans())
def test_one_axis_takes_what_the_exchange_of_messages_takes(n: int, part: int, ring: bool) -> None:
    link, count = replace(FAST, ring=ring), n * part
    expected = (ring_exchange if ring else direct_exchange)(n, part, link)
    axes = [(n, link)]
    assert reduce_scatter_seconds(axes, count) == pytest.approx(expected)
    assert all_gather_seconds(axes, count) == pytest.approx(expected)
    assert all_to_all_seconds(axes, count) == pytest.approx(expected)
    assert all_reduce_seconds(axes, count) == pytest.approx(2 * expected)


@given(SIZES, st.integers(1, 50), st.booleans())
def test_torus_cost_equals_simulated_messages(sizes: list[int], part: int, ring: bool) -> None:
    axes, count = axes_of(sizes, ring), part * math.prod(sizes)
    # Along an axis each peer gets the parts of its own coordinate, and those alone go on.
    held, me, sent, seconds = places(sizes), tuple(0 for _ in sizes), [], 0.0
    exchange = ring_exchange if ring else direct_exchange
    for k in reversed(range(len(sizes))):
        sent.insert(0, part * sum(p[k] != me[k] for p in held))
        seconds += exchange(sizes[k], part * len(held) / sizes[k], axes[k][1])
        held = [p for p in held if p[k] == me[k]]
    assert held == [me]
    assert wire_bytes(axes, count, "reduce_scatter") == pytest.approx(sent)
    assert wire_bytes(axes, count, "all_gather") == pytest.approx(sent)
    assert wire_bytes(axes, count, "all_reduce") == pytest.approx([2 * s for s in sent])
    assert reduce_scatter_seconds(axes, count) == pytest.approx(seconds)
    assert all_gather_seconds(axes, count) == pytest.approx(seconds)
    assert all_reduce_seconds(axes, count) == pytest.approx(2 * seconds)


@given(SIZES, st.integers(1, 50))
def test_messages_that_are_passed_on_along_every_axis_make_an_all_to_all(
    sizes: list[int], part: int
) -> None:
    axes, everywhere = axes_of(sizes), places(sizes)
    at = {place: [(place, goal) for goal in everywhere] for place in everywhere}
    sent = []
    for k in range(len(sizes)):
        moved: dict[Place, list[tuple[Place, Place]]] = {place: [] for place in everywhere}
        leaving = 0
        for place, messages in at.items():
            for source, goal in messages:
                target = (*place[:k], goal[k], *place[k + 1 :])
                moved[target].append((source, goal))
                leaving += target != place
        at = moved
        sent.append(part * leaving / len(everywhere))
    assert all(goal == place for place, messages in at.items() for _, goal in messages)
    count = part * len(everywhere)
    assert wire_bytes(axes, count, "all_to_all") == pytest.approx(sent)
    expected = sum(
        link.alpha_s + amount / link.bandwidth
        for (n, link), amount in zip(axes, sent, strict=True)
        if n > 1
    )
    assert all_to_all_seconds(axes, count) == pytest.approx(expected)


def test_a_torus_over_nodes_beats_one_slow_axis_as_its_bytes_say() -> None:
    torus, flat = [(2, SLOW), (4, FAST)], [(8, SLOW)]
    count = 8 * 10**6
    # 7/8 of the payload over the slow links, or half of a quarter of it.
    ratio = all_reduce_seconds(flat, count) / all_reduce_seconds(torus, count)
    by_hand = (2e-3 + 2 * 0.56) / (2e-3 + 2 * 0.08 + 2e-4 + 2 * 0.048)
    assert ratio == pytest.approx(by_hand)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(1 << 10, 1 << 22))
def test_a_curve_is_exact_where_seconds_lie_on_a_line(
    alpha: float, bandwidth: float, size: int
) -> None:
    sizes = (1 << 10, 1 << 16, 1 << 22)
    curve = Curve(sizes, tuple(alpha + s / bandwidth for s in sizes))
    assert curve.at(size) == pytest.approx(alpha + size / bandwidth)


def test_a_curve_stays_flat_below_its_points_and_keeps_its_last_rate_beyond() -> None:
    curve = Curve((10, 100), (1.0, 2.0))
    assert curve.at(1) == 1.0
    assert curve.at(1000) == pytest.approx(20.0)


def test_measured_curves_override_formula_for_same_ranks() -> None:
    measured = {"all_gather": Curve((100, 1000), (1.0, 2.0)), "all_reduce": Curve((9,), (5.0,))}
    link = replace(FAST, along=(Along(4, measured), Along(9, {})))
    assert all_gather_seconds([(4, link)], 550) == pytest.approx(1.5)
    assert all_gather_seconds([(8, link)], 550) == all_gather_seconds([(8, FAST)], 550)
    assert reduce_scatter_seconds([(4, link)], 550) == reduce_scatter_seconds([(4, FAST)], 550)
    # Outermost an all-reduce is one operation, within it is two.
    assert all_reduce_seconds([(4, link)], 9) == 5.0
    inner = reduce_scatter_seconds([(4, FAST)], 400) + 1.0
    outer = all_reduce_seconds([(2, SLOW)], 100)
    assert all_reduce_seconds([(2, SLOW), (4, link)], 400) == pytest.approx(
        inner + outer + (measured["all_gather"].at(400) - 1.0)
    )


def test_measured_messages_go_before_alpha_and_bandwidth() -> None:
    link = replace(FAST, messages=Curve((100, 1000), (1.0, 2.0)))
    assert point_to_point_seconds(link, 550) == pytest.approx(1.5)
    assert point_to_point_seconds(link, 2000) == pytest.approx(4.0)


def test_axes_of_one_rank_cost_nothing() -> None:
    for cost in (all_reduce_seconds, all_gather_seconds, all_to_all_seconds):
        assert cost([(1, SLOW), (1, FAST)], 10**6) == 0
        assert cost([], 10**6) == 0
        assert cost([(1, SLOW), (4, FAST)], 10**6) == cost([(4, FAST)], 10**6)


def test_a_device_gives_what_counting_by_hand_gives() -> None:
    assert point_to_point_seconds(SLOW, 125_000) == pytest.approx(1e-3 + 0.01)
    assert memory_seconds(DEVICE, 10**7) == pytest.approx(1e-6 + 1e-3)
    assert matmul_seconds(DEVICE, 100, 200, 300) == pytest.approx(1e-6 + 12e6 / 1e11)
    # Thin products are bound by their bytes.
    assert matmul_seconds(DEVICE, 1, 1000, 1000) == pytest.approx(1e-6 + 4 * 1_002_000 / 1e10)
    assert matmul_seconds(DEVICE, 1, 1000, 1000, "float8_e4m3fn") == pytest.approx(
        1e-6 + 1_002_000 / 1e10
    )
    assert copy_seconds(DEVICE, 10**9, to_device=True) == pytest.approx(0.5, rel=1e-4)
    assert copy_seconds(DEVICE, 10**9, to_device=False) == pytest.approx(1.0, rel=1e-4)


def test_measured_curves_of_a_device_go_before_its_rates() -> None:
    products = {"float32": Curve((2 * 8**3, 2 * 64**3), (1e-5, 1e-4))}
    device = replace(DEVICE, matmul_curves=products, memory_curve=Curve((10_000,), (1e-6,)))
    assert matmul_seconds(device, 4, 8, 16) == pytest.approx(1e-5)
    assert matmul_seconds(device, 32, 64, 128) == pytest.approx(1e-4)
    # 200,000 operations on 800,000 bytes: the bytes decide.
    assert matmul_seconds(device, 1, 100_000, 1) == pytest.approx(1e-6 * 80.0004)
    assert memory_seconds(device, 20_000) == pytest.approx(2e-6)


def test_costs_that_have_no_figure_are_refused_by_name() -> None:
    with pytest.raises(GulliverError, match="float32"):
        matmul_seconds(DEVICE, 1, 1, 1, "float23")
    with pytest.raises(GulliverError, match="copy rate"):
        copy_seconds(described("cpu-loopback").device, 1, to_device=True)
    with pytest.raises(GulliverError, match="did you mean 'all_reduce'"):
        wire_bytes([(2, FAST)], 1, "all_reduced")  # type: ignore[arg-type]


def slowest_link(cluster: Cluster, line: list[int]) -> Link:
    """Of all pairs of a line, the link of the outermost axis on which the two differ."""
    at = places([axis.size for axis in cluster.axes])
    crossed = [
        next(k for k, (x, y) in enumerate(zip(at[a], at[b], strict=True)) if x != y)
        for a, b in itertools.combinations(line, 2)
    ]
    return cluster.axes[min(crossed)].link


def laid_by_hand(cluster: Cluster, sizes: list[int]) -> list[tuple[int, Link]]:
    """Size and slowest link of each axis, from the coordinates of all ranks."""
    found = []
    for k, size in enumerate(sizes):
        lines: dict[Place, list[int]] = {}
        for rank, place in enumerate(places(sizes)):
            lines.setdefault((*place[:k], *place[k + 1 :]), []).append(rank)
        links = [slowest_link(cluster, line) for line in lines.values()]
        found.append((size, max(links, key=lambda link: link.alpha_s)))
    return found


def factorisations(number: int) -> list[list[int]]:
    rest = [
        [f, *more]
        for f in range(2, number)
        if number % f == 0
        for more in factorisations(number // f)
    ]
    return [[number], *rest]


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("sizes", [[2, 4], [4, 2], [2, 3], [3, 4], [2, 2, 3], [8], [7]], ids=str)
def test_the_chosen_axes_are_the_best_of_all_factorisations(sizes: list[int], ring: bool) -> None:
    cluster = Cluster(
        "c",
        DEVICE,
        tuple(Axis(f"a{k}", n, link) for k, (n, link) in enumerate(axes_of(sizes, ring))),
    )
    for stage, chunk in itertools.product((0, 2, 3), (1 << 10, 1 << 22)):
        collectives = zero_collectives(stage, [chunk] * 3)
        costs = {"all_reduce": all_reduce_seconds, "reduce_scatter": reduce_scatter_seconds}
        costs["all_gather"] = all_gather_seconds
        took = {}
        for shape in factorisations(math.prod(sizes)):
            axes = laid_by_hand(cluster, shape)
            took[tuple(shape)] = sum(costs[name](axes, count) for name, count in collectives)
            assert torus_seconds(cluster, shape, collectives) == pytest.approx(took[tuple(shape)])
        chosen = choose_axes(cluster, collectives)
        flat = took.pop((cluster.size,))
        assert chosen.flat_s == pytest.approx(flat)
        best = min(took.values(), default=flat)
        assert chosen.seconds == pytest.approx(best)
        assert bool(chosen.axes) == (best < 0.95 * flat)
        if chosen.axes:
            assert took[tuple(chosen.axes.values())] == pytest.approx(best)


def two_speeds(fast: Link = FAST) -> Cluster:
    return Cluster("c", DEVICE, (Axis("node", 2, SLOW), Axis("local", 4, fast)))


def test_two_speeds_make_a_torus_with_its_reason_and_one_speed_does_not() -> None:
    collectives = zero_collectives(2, [4 << 20, 1 << 20])
    chosen = choose_axes(two_speeds(), collectives)
    assert chosen.axes == {"node": 2, "local": 4}
    count, by_hand = 5 << 20, 0.0
    for _ in range(2):  # there and back
        by_hand += 2 * (1e-4 + 1e-3) + count * (3 / 4 / 125e6 + 1 / 8 / 12.5e6)
    assert chosen.seconds == pytest.approx(by_hand)
    flat = 2 * (2 * 1e-3 + count * 7 / 8 / 12.5e6)
    told = (
        f"torus {{'node': 2, 'local': 4}}: {1e3 * by_hand:.3g} ms against {1e3 * flat:.3g} ms flat"
    )
    assert str(chosen) == told
    alike = choose_axes(two_speeds(SLOW), collectives)
    assert alike.axes == {}
    assert str(alike).startswith("flat: ")


def test_measured_curves_are_compared_with_measured_curves() -> None:
    names = "reduce_scatter", "all_gather"
    slower = {name: Curve((1, 10**9), (3e-3, 3e-3 + 9e9 / 12.5e6)) for name in names}
    link = replace(SLOW, along=(Along(4, slower),))
    cluster = Cluster("c", DEVICE, (Axis("local", 4, link),))
    collectives = zero_collectives(2, [1 << 20])
    chosen = choose_axes(cluster, collectives)
    # By alpha and bandwidth alone a torus would be nine times as fast as what was measured flat.
    assert torus_seconds(Cluster("c", DEVICE, (Axis("local", 4, SLOW),)), (2, 2), collectives) < (
        chosen.flat_s / 4
    )
    assert chosen.axes == {}
    assert chosen.seconds > chosen.flat_s


def test_a_cluster_of_other_ranks_is_refused() -> None:
    with pytest.raises(GulliverError, match=r"resized\(4\)"):
        choose_axes(two_speeds(), zero_collectives(1, [8]), 4)
    with pytest.raises(GulliverError, match=r"3 x 2 .*8 ranks"):
        torus_seconds(two_speeds(), (3, 2), [])


def test_a_step_that_stops_for_a_message_waits_as_long_as_was_measured_between_computing() -> None:
    alone, busy = (Curve((1 << 20,), (seconds,)) for seconds in (1e-3, 4e-3))
    along = Along(2, {"all_reduce": alone}, {"all_reduce": busy, "sends": busy})
    line = [(2, replace(FAST, along=(along,)))]
    stops = Message("all_reduce", 1 << 20, line, 3)
    assert stops.seconds == pytest.approx(12e-3)
    assert replace(stops, hidden=True).seconds == pytest.approx(3e-3)
    assert Message("sends", 1 << 20, line, 2, hidden=True).seconds == pytest.approx(8e-3)
    assert stops.sent == 3 * (1 << 20)
    assert Message("sends", 100, line, 2).sent == 200


def test_zero_on_one_host_costs_reading_memory_unless_that_is_off_or_a_torus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = replace(FAST, host_rate=1e9)
    read = Message("all_reduce", 1 << 20, [(4, link)], reads=True)
    assert read.seconds == pytest.approx(2 * 3 / 4 * (1 << 20) / 1e9)
    sent = replace(read, reads=False).seconds
    assert sent > 2 * read.seconds
    assert Message("all_gather", 1 << 20, [(2, link), (2, link)], reads=True).seconds > 1e-4
    cluster = Cluster("c", DEVICE, (Axis("local", 4, link),))
    collectives = zero_collectives(0, [1 << 20])
    assert choose_axes(cluster, collectives).flat_s == pytest.approx(read.seconds)
    monkeypatch.setenv("GULLIVER_SHARED_MEMORY", "off")
    assert replace(read).seconds == pytest.approx(sent)
