"""The probe: what it finds in made-up networks, what it writes, and what it refuses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gulliver.cli import probe as command
from gulliver.comm import World, all_gather, barrier, init_world
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, current_cluster, described
from gulliver.hardware import links as _links
from gulliver.hardware import probe as _probe
from gulliver.hardware.cluster import Axis, Curve, Disk, Link
from gulliver.hardware.costs import point_to_point_seconds
from gulliver.hardware.links import (
    fit_line,
    group_into_nodes,
    pair_rounds,
    probe_collectives,
    probe_links,
    probe_overlap,
    proposed_axes,
)
from gulliver.hardware.probe import kept_path, probe_device, probe_disk
from gulliver.precision.wire import packing as _rates
from gulliver.precision.wire import wire_format
from tests.pool import Pool

SLOW, FAST = Link(1e-3, 12.5e6), Link(1e-4, 125e6)


@contextmanager
def small_sizes() -> Iterator[None]:
    """Measures little: what comes out is of no interest here."""
    with (
        patch.multiple(_probe, SIDES=(8, 16), TENSOR_BYTES=(1 << 10, 1 << 12), BLOCK_BYTES=1 << 16),
        patch.multiple(_links, MESSAGE_BYTES=(1 << 8, 1 << 12), COLLECTIVE_BYTES=(1 << 8, 1 << 12)),
        patch.object(command, "probe_disk", lambda folder, *_, **__: probe_disk(folder, 1 << 16)),
    ):
        yield


# Pure parts


@given(st.integers(2, 33))
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


@pytest.mark.parametrize("seconds", [(4e-3, 3e-3, 2e-3, 1e-3), (2e-3, 2e-3, 2e-3, 2e-3)])
def test_link_fit_tolerates_noise(seconds: tuple[float, ...], tmp_path: Path) -> None:
    link = fit_line((1 << 10, 1 << 16, 1 << 20, 4 << 20), seconds)
    cluster = replace(described("8xh100-infiniband"), axes=(Axis("local", 8, link),))
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml").axes[0].link.bandwidth == link.bandwidth
    assert min(seconds) < 1.01 * point_to_point_seconds(link, 1 << 16) < 1.02 * max(seconds)


def network(
    node_of: list[int], noise: random.Random | None = None, spread: float = 1.0
) -> dict[tuple[int, int], Link]:
    """Links between ranks of nodes, each slower by up to `spread` times."""
    links = {}
    for a, b in itertools.combinations(range(len(node_of)), 2):
        link = FAST if node_of[a] == node_of[b] else SLOW
        slower = noise.uniform(1, spread) if noise else 1.0
        links[a, b] = Link(link.alpha_s * slower, link.bandwidth / slower)
    return links


@given(st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 3), (4, 4)]), st.randoms(use_true_random=False))
def test_nodes_are_found_however_ranks_are_numbered_and_links_vary(
    shape: tuple[int, int], chance: random.Random
) -> None:
    nodes, local = shape
    node_of = [node for node in range(nodes) for _ in range(local)]
    chance.shuffle(node_of)
    links = network(node_of, chance, spread=1.9)
    found = group_into_nodes(len(node_of), links)
    expected = {frozenset(r for r, n in enumerate(node_of) if n == k) for k in range(nodes)}
    assert {frozenset(group) for group in found} == expected
    axes, order = proposed_axes(len(node_of), links)
    assert [(axis.name, axis.size) for axis in axes] == [("node", nodes), ("local", local)]
    filled = list(order or range(len(node_of)))
    assert sorted(filled) == list(range(len(node_of)))
    for start in range(0, len(filled), local):
        assert len({node_of[rank] for rank in filled[start : start + local]}) == 1


@given(st.integers(2, 9), st.randoms(use_true_random=False))
def test_equal_links_make_one_axis(size: int, chance: random.Random) -> None:
    links = network([0] * size, chance, spread=1.9)
    assert group_into_nodes(size, links) == [list(range(size))]
    axes, order = proposed_axes(size, links)
    assert [(axis.name, axis.size) for axis in axes] == [("local", size)]
    assert order is None
    # As fast as the slowest.
    assert axes[0].link.bandwidth == min(link.bandwidth for link in links.values())


def random_cluster(draw: random.Random) -> tuple[int, dict[tuple[int, int], Link], set[Any]]:
    """Links with 3 % noise, ranks numbered at random, and the nodes that they are of.

    Nodes of one size, with or without faster pairs inside; of several sizes, which are no mesh; one
    node; and one rank a node.
    """
    kind = draw.choice(("even", "even", "pairs", "uneven", "one", "alone"))
    nodes, local = draw.randint(2, 6), draw.randint(2, 8)
    if kind == "pairs":
        local = draw.choice((4, 6, 8))
    sizes = {"one": [local], "alone": [1] * nodes}.get(kind, [local] * nodes)
    if kind == "uneven":
        while len(set(sizes)) == 1:
            sizes = [draw.randint(1, 8) for _ in range(nodes)]
    node_of = [node for node, count in enumerate(sizes) for _ in range(count)]
    pair_of = [rank // 2 for rank in range(len(node_of))]
    order = draw.sample(range(len(node_of)), len(node_of))
    inside, alpha = draw.uniform(10e9, 600e9), draw.uniform(0, 5e-6)
    outside = inside / draw.uniform(2.5, 60)
    links = {}
    for a, b in itertools.combinations(range(len(node_of)), 2):
        x, y = order[a], order[b]
        rate = inside if node_of[x] == node_of[y] else outside
        if kind == "pairs" and pair_of[x] == pair_of[y]:
            rate *= draw.uniform(4, 4.2)
        slower = 1 + draw.uniform(-0.03, 0.03)
        extra = alpha if node_of[x] == node_of[y] else 3 * alpha
        links[a, b] = Link(extra * slower, rate / slower)
    of = [{a for a, x in enumerate(order) if node_of[x] == node} for node in range(len(sizes))]
    found = of if len(set(sizes)) == 1 and sizes[0] > 1 else [set(range(len(node_of)))]
    return len(node_of), links, {frozenset(group) for group in found}


def test_nodes_of_random_clusters_are_those_they_were_made_of(full: bool) -> None:
    draw = random.Random(0)
    for number in range(2000 if full else 300):
        size, links, nodes = random_cluster(draw)
        found = {frozenset(group) for group in group_into_nodes(size, links)}
        assert found == nodes, number


def test_one_disturbed_pair_does_not_hide_a_node_and_single_ranks_are_one_axis() -> None:
    axes, order = proposed_axes(3, network([0, 1, 2]))
    assert ([axis.size for axis in axes], axes[0].link, order) == ([3], SLOW, None)
    links = network([0, 0, 0, 0, 1, 1, 1, 1])
    links[0, 3] = Link(0.1, 1e6)
    assert group_into_nodes(8, links) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# Measuring


def test_a_device_is_measured_in_every_dtype_with_rising_curves() -> None:
    with small_sizes():
        device = probe_device(torch.device("cpu"))
    assert set(device.matmul) == set(device.matmul_curves)
    assert {"float32", "bfloat16"} <= set(device.matmul)
    for curve in (*device.matmul_curves.values(), device.memory_curve):
        assert isinstance(curve, Curve)
        assert list(curve.seconds) == sorted(curve.seconds)
        assert curve.spread is not None
    assert device.matmul_curves["float32"].sizes == (2 * 8**3, 2 * 16**3)
    assert device.to_device_rate is None


@pytest.mark.gpu
def test_a_gpu_is_measured_with_its_copies() -> None:
    with small_sizes():
        device = probe_device(torch.device("cuda", 0))
    assert device.to_device_rate
    assert device.to_host_rate
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    said: list[tuple[str, float]] = []
    with patch.object(_probe, "TURN_S", 0.001):
        disk = probe_disk(tmp_path, 1 << 22, progress=lambda *what: said.append(what))
    assert disk.write_rate > 0
    assert disk.read_rate > 0
    assert disk.both_rate
    assert disk.latency_s >= 0
    assert disk.has(tmp_path)
    assert not disk.has("/proc")
    assert list(tmp_path.iterdir()) == []
    assert [share for _, share in said] == sorted(share for _, share in said)
    with pytest.raises(GulliverError, match="1,073,741,824"):
        probe_disk(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_another_disk_is_measured_anew_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    kept = replace(described("cpu-loopback"), disk=Disk(1.0, 2.0, folder="/proc"), measured=True)
    kept.save(path)
    with small_sizes(), patch.object(command, "probe_device", side_effect=AssertionError("device")):
        command.probe(path, None, again=False)
        assert Cluster.load(path) == kept
        command.probe(path, tmp_path, again=False)
    found = Cluster.load(path)
    assert found.disk is not None
    assert found.disk.has(tmp_path)
    assert found.disk.both_rate
    assert replace(found, disk=kept.disk) == kept


def _links_of(world: World) -> dict[tuple[int, int], Link]:
    return probe_links()


def test_all_ranks_learn_the_links_of_all_pairs(pool: Pool) -> None:
    first, *others = pool.run(_links_of, 3)
    assert sorted(first) == [(0, 1), (0, 2), (1, 2)]
    for link in first.values():
        assert link.bandwidth > 0
        assert link.alpha_s >= 0
        assert link.messages is not None
        assert link.messages.sizes == _links.MESSAGE_BYTES
    assert all(found == first for found in others)


def _collectives_of(world: World) -> dict[str, Curve]:
    def gather(count: int):  # type: ignore[no-untyped-def]
        whole, part = torch.ones(count // 4), torch.ones(count // 4 // world.size)
        return lambda: all_gather(whole, part)

    with small_sizes():
        return probe_collectives({"all_gather": gather}, world.size, turns=2)


def test_all_ranks_learn_the_same_curves_of_collectives(pool: Pool) -> None:
    first, *others = pool.run(_collectives_of, 3)
    assert list(first) == ["all_gather"]
    # Multiples of three numbers of four bytes.
    assert first["all_gather"].sizes == (264, 4104)
    assert all(found == first for found in others)


def _long_collectives_of(world: World) -> dict[str, Curve]:
    with patch.object(_links, "LONG_S", 0.0):
        return _collectives_of(world)


def test_collectives_larger_than_one_that_took_long_are_left_out(pool: Pool) -> None:
    first, *others = pool.run(_long_collectives_of, 3)
    assert first["all_gather"].sizes == (264,)
    assert all(found == first for found in others)


# The command


def _command(world: World, out: Path, folder: Path, again: bool = False) -> int:
    with small_sizes():
        return command.probe(out, folder, again)


def _current(world: World) -> tuple[Cluster, Path]:
    path = kept_path(world.size)
    if world.is_main:
        with small_sizes():
            Cluster("by hand", probe_device(world.device), measured=True).save(path)
    try:
        return current_cluster(world.size), path
    finally:
        barrier()
        if world.is_main:
            path.unlink()  # other tests' plans are not of these machines


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_overlap_is_the_share_of_communication_that_costs_no_compute(share: float) -> None:
    # On a clock that only compute (3 ms a product) and collectives move: each occupies the link for
    # 10 ms, in which it needs the processor for 1 - `share` of the time.
    clock, link, owed = [0.0], [0.0], [0.0]

    def work(seconds: float) -> None:
        clock[0] += seconds + owed[0]
        owed[0] = 0.0

    def wait(end: float) -> None:
        clock[0], owed[0] = max(clock[0], end), 0.0

    def begin() -> Any:
        link[0] = end = max(clock[0], link[0]) + 10e-3
        owed[0] += 10e-3 * (1 - share)
        return lambda: wait(end)

    def once(run: Any, _: Any) -> float:
        before = clock[0]
        run()
        return clock[0] - before

    def gather(into: list[float], one: float) -> None:
        into[:] = [one]

    with (
        patch.object(_links, "once", once),
        patch.object(_links, "_computing", lambda _: lambda: work(3e-3)),
        patch.object(torch.distributed, "get_world_size", lambda: 1),
        patch.object(torch.distributed, "all_gather_object", gather),
    ):
        found = probe_overlap(begin)
    assert found == pytest.approx(share, abs=0.05)


def test_ranks_measure_links_and_collectives_into_one_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.yaml"
    assert pool.run(_command, 4, path, tmp_path) == [0, 0, 0, 0]
    cluster = Cluster.load(path)
    assert cluster.measured
    assert cluster.size == 4
    for axis in cluster.axes:
        assert axis.size in [measured.ranks for measured in axis.link.along]
        for measured in axis.link.along:
            ring = {"ring_all_reduce"} if measured.ranks > 2 else set()
            names = {"all_reduce", "reduce_scatter", "all_gather"} | ring
            assert set(measured.collectives) == names
    assert len({axis.link.host_rate for axis in cluster.axes}) == 1  # all are on this host
    assert cluster.disk is not None
    assert cluster.date
    assert cluster.versions["torch"] == torch.__version__


def test_ranks_refuse_together_what_rank_0_cannot_write(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GulliverError, match="cannot write"):
        pool.run(_command, 2, tmp_path / "file" / "c.yaml", tmp_path)
    with pytest.raises(GulliverError, match=r"none\b.*(folder|write|exist)"):
        pool.run(_command, 2, tmp_path / "c.yaml", tmp_path / "none")
    assert not (tmp_path / "c.yaml").exists()


def test_all_ranks_get_the_cluster_that_rank_0_finds(pool: Pool) -> None:
    found = pool.run(_current, 2)
    assert found[0] == found[1]
    assert found[0][0].name == "by hand"


def test_a_measurement_is_kept_and_shown_until_it_is_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init_world().size == 1
    path = tmp_path / "c.yaml"
    with small_sizes():
        assert command.probe(path, tmp_path, again=False) == 0
    assert "torchrun" in " ".join(capsys.readouterr().err.split())
    kept = path.read_text()
    with patch.object(command, "probe_device", side_effect=AssertionError("measured")):
        assert command.probe(path, tmp_path, again=False) == 0
        said = capsys.readouterr().out
        assert "matrix product, float32" in said
        assert "packing float32 as fp8, unpacking" in said
        with pytest.raises(AssertionError, match="measured"):
            command.probe(path, tmp_path, again=True, mib=1)
    assert path.read_text() == kept


def test_rates_of_packing_are_kept_for_the_plans_of_later_jobs(tmp_path: Path) -> None:
    _rates.pack_rates.cache_clear()
    with small_sizes():
        assert command.probe(tmp_path / "c.yaml", tmp_path, again=True, mib=1) == 0
    wire = wire_format("int8")
    found = _rates.pack_rates(wire)
    assert min(found.pack_s, found.unpack_s, found.call_s) > 0
    random = torch.random.get_rng_state()
    _rates.pack_rates(wire_format("fp8:1024"))
    assert torch.equal(random, torch.random.get_rng_state())  # a run goes on as if it were kept
    _rates.pack_rates.cache_clear()
    with patch.object(_rates, "_measured", side_effect=AssertionError("measured")):
        assert _rates.pack_rates(wire) == found
        with pytest.raises(AssertionError, match="measured"):
            _rates.pack_rates(wire_format("int8:1024"))


def test_unwritable_cache_prevents_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        patch.object(command, "probe_device", side_effect=AssertionError("measured")),
        pytest.raises(GulliverError, match="--out") as caught,
    ):
        command.probe(tmp_path / "file" / "c.yaml", tmp_path, again=False)
    assert "\n" not in str(caught.value)
