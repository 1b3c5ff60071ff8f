"""Clusters as files: written, edited, described, resized, kept for a machine."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import gulliver
from gulliver.errors import GulliverError
from gulliver.hardware import (
    Cluster,
    all_reduce_seconds,
    current_cluster,
    described,
    described_names,
)
from gulliver.hardware.cluster import Along, Axis, Curve, Device, Disk, Link
from gulliver.hardware.probe import digest, kept_path, named_cluster

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
        ("bandwidth: 12500000.0", "bandwidth: -3", "-3"),
        ("bandwidth: 12500000.0", "bandwidth: fast", "'fast'"),
        ("device:", "devise:", "'device'"),
        ("size: 2", "size: 2.5", "2.5"),
        ("measured: false", "measured: perhaps", "'perhaps'"),
        ("measured: false", "measured: false\nrank_order: [0, 0]", "rank_order"),
        ("ring: false", "messages: {sizes: [2, 1], seconds: [1, 2]}", "ascend"),
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


def test_clusters_have_short_names_with_a_count(tmp_path: Path) -> None:
    for text, size, word in (
        ("h100x64", 64, "H100"),
        ("H200x12", 12, "H200"),
        ("b200", 1, "B200"),
        ("a100x1024", 1024, "A100"),
        ("4090x4", 4, "4090"),
        ("laptop", 1, "laptop"),
        ("8xh100-infiniband", 16, "H100"),
    ):
        cluster = named_cluster(text)
        assert cluster.size == size
        assert word in cluster.name
    assert [axis.size for axis in named_cluster("h100x64").axes] == [8, 8]
    file = tmp_path / "own.yaml"
    Cluster("c", DEVICE, (Axis("node", 2, SLOW),)).save(file)
    assert named_cluster(str(file), 4).size == 4
    for text, message in (("h10x4", "h100"), ("h100x0", "use 1 to"), ("x8", "unknown cluster")):
        with pytest.raises(GulliverError, match=message):
            named_cluster(text)
    with pytest.raises(GulliverError, match=r"4 ranks.* 8 "):
        named_cluster("h100x4", 8)


def test_a_measured_cluster_is_read_back_with_its_curves(tmp_path: Path) -> None:
    curve = Curve((8, 64), (1e-5, 2.5e-3), 0.0)
    device = replace(DEVICE, matmul_curves={"float32": curve}, memory_curve=curve)
    link = replace(SLOW, error=0.5, ring=True, messages=curve)
    link = replace(link, along=(Along(2, {"all_reduce": curve}), Along(8, {"all_reduce": curve})))
    cluster = Cluster("c", device, (Axis("a", 2, link),), rank_order=(1, 0))
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster


def test_a_file_shows_what_is_known_and_rows_of_numbers_in_a_line() -> None:
    text = Cluster("c", replace(DEVICE, memory_curve=Curve((8, 64), (1e-5, 2.5e-3)))).to_yaml()
    assert "sizes: [8, 64]" in text
    assert "seconds: [1.0e-05, 0.0025]" in text
    for unknown in ("to_device_rate", "rank_order", "disk", "spread", "axes"):
        assert unknown not in text


def test_hand_written_cluster_files_are_accepted() -> None:
    text = """
name: ours
device: {name: d, matmul: {float32: 1e12}, memory_rate: 1e11, memory_bytes: 1e10}
axes: [{name: all, size: 2, link: {alpha_s: 0, bandwidth: 12.5e6}}]
rank_order: [1, 0]
date: 2026-01-02
versions: {torch: 2.11}
"""
    cluster = Cluster.from_yaml(text, "ours.yaml")
    assert cluster.device.memory_bytes == 10**10
    assert cluster.date == "2026-01-02"
    assert cluster.versions == {"torch": "2.11"}
    assert cluster.rank_order == (1, 0)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, []),
        (4, [("local", 4)]),
        (8, [("local", 8)]),
        (16, [("node", 2), ("local", 8)]),
        (64, [("node", 8), ("local", 8)]),
        (12, [("node", 12)]),
    ],
)
def test_a_described_cluster_is_resized_node_by_node(
    size: int, expected: list[tuple[str, int]]
) -> None:
    cluster = described("8xh100-infiniband").resized(size)
    assert [(axis.name, axis.size) for axis in cluster.axes] == expected
    assert cluster.size == size


def test_the_present_cluster_is_described_until_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GULLIVER_CACHE", str(tmp_path))
    guessed = current_cluster(4)
    assert not guessed.measured
    assert guessed.size == 4
    measured = replace(guessed, name="measured here", measured=True)
    measured.save(kept_path(4))
    assert current_cluster(4) == measured
    assert not current_cluster(2).measured


def test_a_measurement_is_forgotten_when_the_machine_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = kept_path(2)
    assert kept_path(2) == before
    assert kept_path(3) != before
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert kept_path(2) != before
    facts = {"hosts": ["a", "b"], "processor": "p", "cores": 4, "gpus": [], "torch": "2.11"}
    digests = {digest(facts)}
    for name in facts:
        digests.add(digest({**facts, name: "changed"}))
    assert len(digests) == len(facts) + 1


COSTS = re.compile(r".*(_seconds|flops|_volume|wire_bytes)$", re.IGNORECASE)
CONSTANTS = re.compile(r".*(FLOP|BANDWIDTH|ALPHA|LATENCY|BACKWARD_OF|ITEM_BYTES|RING_BYTES|_RATE$)")


def test_formulas_and_constants_of_costs_stand_in_hardware_alone() -> None:
    root, found = Path(gulliver.__file__).parent, []
    for file in sorted(root.rglob("*.py")):
        room = file.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            # Properties hand out figures that were computed.
            function = isinstance(node, ast.FunctionDef) and not node.decorator_list
            defined = function and COSTS.match(node.name)
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            # Timelines of `solve` add up seconds that they are handed.
            if (defined and room not in ("hardware", "solve")) or (
                stored and CONSTANTS.match(node.id) and room != "hardware"
            ):
                found.append(f"{file.name}:{node.lineno}")
    assert not found, "costs are computed by gulliver.hardware"
