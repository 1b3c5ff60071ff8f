"""Plans under a memory limit: sizes as text, edits, refusals, and predictions by brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gulliver.booster import GeminiPlugin
from gulliver.errors import GulliverError
from gulliver.hardware import described, memory_bytes
from gulliver.hardware.offload import TierRates, Transfer, Visit, disk_rates, tiered_seconds
from gulliver.hardware.probe import group_limits
from gulliver.options import UNITS, byte_size, size_at_least
from gulliver.plan import Plan
from gulliver.plan.checks import check_plan
from gulliver.planner.ranks import ResolvedPlan, rank_states
from gulliver.planner.residency import find_residency
from gulliver.planner.tiers import split_disk

MIB = 2**20

# Sizes


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_in_any_unit_is_read_exactly(count: int, unit: str, gap: str) -> None:
    assert byte_size("limit", f"{count}{gap}{unit}") == count * UNITS[unit]
    assert byte_size("limit", f" {count}{gap}{unit.lower()} ") == count * UNITS[unit]
    assert byte_size("limit", count) == byte_size("limit", str(count)) == count


@given(st.integers(1, 2**50))
def test_stated_minimum_is_sufficient_and_tight(count: int) -> None:
    read = byte_size("limit", size_at_least(count))
    assert count <= read <= count + max(1, count / 100 + 11)


@given(st.integers(1, 10**4), st.integers(10**4, 2**50))
def test_percentage_is_of_total_memory(share: int, whole: int) -> None:
    assert byte_size("limit", f"{share / 100:.2f}%", whole) == share * whole // 10**4


def test_a_disk_is_a_folder_that_may_have_colons_and_a_size() -> None:
    assert split_disk("/a:b/c:100GiB") == ("/a:b/c", "100GiB")
    assert split_disk("C:1 TB") == ("C", "1 TB")
    for text, message in {
        "/scratch": r"such as disk='/scratch:100GiB'",
        ":5GiB": r"such as disk='/scratch:5GiB'",
        "/scratch:lots": r"disk='/scratch:lots': 'lots' is not a size",
        "/scratch:0GiB": "is not a positive size",
        "/scratch:": "is not a size",
    }.items():
        with pytest.raises(GulliverError, match=message):
            split_disk(text)


def test_the_memory_of_a_process_is_that_of_its_control_groups(tmp_path: Path) -> None:
    for folder, name, text in (
        ("a/b", "memory.max", "max"),
        ("a", "memory.max", "5000"),
        ("memory/x", "memory.limit_in_bytes", "7000"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text + "\n")
    member = tmp_path / "member"
    member.write_text("4:cpu,memory:/x\n3:cpuset:/\n0::/a/b\n")
    assert sorted(group_limits(tmp_path, member)) == [5000, 7000]
    assert group_limits(tmp_path, tmp_path / "none") == []
    assert 0 < memory_bytes("cpu") <= 2**50


# Seconds


def brute_seconds(visits: list[Visit], rates: TierRates) -> float:
    """The step of a run that goes on, tick by tick: a link and a computing unit."""
    repeats = 8
    queue = list[tuple[int, bool, int]]()  # ticks that are left, is it a write, visit that waits
    run = visits * repeats
    ended, clock, left, queued = list[int](), 0, 0, -1
    while len(ended) < len(run):
        now = len(ended)
        if queued < now:
            for t in run[now].transfers:
                queue.append((round(rates.seconds(t)), t.write, now + t.until))
            queued, left = now, round(run[now].seconds)
        while queue and queue[0][0] == 0:
            queue.pop(0)
        waits = any(not write and visit <= now for _, write, visit in queue)
        if not waits and left == 0:
            ended.append(clock)
            continue
        clock += 1
        left -= 0 if waits else 1
        if queue:
            queue[0] = (queue[0][0] - 1, *queue[0][1:])
    return ended[-1] - ended[-1 - len(visits)]


TRANSFERS = st.builds(
    Transfer, bytes=st.integers(0, 5), write=st.booleans(), until=st.integers(0, 3)
)
VISITS = st.lists(
    st.builds(
        Visit,
        seconds=st.integers(0, 6).map(float),
        transfers=st.lists(TRANSFERS, max_size=3).map(tuple),
    ),
    min_size=4,
    max_size=7,
)


@given(VISITS)
def test_simulated_seconds_alternate_link_and_compute(visits: list[Visit]) -> None:
    rates = TierRates("disk", 1.0, 1.0)
    found = tiered_seconds(visits, rates)
    assert found.step <= found.compute + found.busy + 1e-9
    assert found.step >= found.compute - 1e-9
    # Nobody waits for a write, where there is memory; else it would share the link.
    reads = [Visit(v.seconds, tuple(t for t in v.transfers if not t.write)) for v in visits]
    found = tiered_seconds(reads, rates)
    if found.busy <= found.compute:  # else the queue grows from step to step for a while
        assert found.step == pytest.approx(brute_seconds(reads, rates), abs=1e-9)


def test_the_bottleneck_is_named() -> None:
    rates = TierRates("disk", 1e9, 1e9)
    slow = Visit(0.1, (Transfer(10**9, write=True), Transfer(10**9)))
    assert tiered_seconds([slow] * 9, rates).bottleneck == "disk: 18.0 s of 18.9 s"
    fast = Visit(2.0, (Transfer(10**6, until=1),))
    assert tiered_seconds([fast] * 2, rates).bottleneck == "compute: 4.0 s of 4.0 s"
    both = tiered_seconds([slow] * 9, replace(rates, both_rate=2e9))
    assert (both.busy, both.step) == pytest.approx((9.0, 9.9))


def test_concurrent_reads_and_writes_use_measured_rate() -> None:
    visit = Visit(0.0, (Transfer(10**9, write=True), Transfer(10**9)))
    for both, seconds in ((None, 2.0), (1e9, 2.0), (1.25e9, 1.6), (2e9, 1.0), (9e9, 1.0)):
        rates = TierRates("disk", 1e9, 1e9, both_rate=both)
        # The write of a visit goes on in the next: a chain of reads alone sets the pace.
        assert tiered_seconds([visit] * 8, rates).busy == pytest.approx(8 * seconds)
    unequal = TierRates("disk", 2e9, 1e9, both_rate=1.5e9)
    assert unequal.busy(1.0, 2.0) == pytest.approx(1.0 / 0.75 + 1.0)


def test_cpu_overhead_of_transfers_is_predicted() -> None:
    rates = TierRates("disk", 1e9, 1e9, visit_s=0.25, transfer_s=0.5, memory_rate=1e9)
    # Nothing is moved where memory is made; the moves beside 2 s of compute take 1 s.
    moves = (Transfer(10**8, write=True), Transfer(0), Transfer(10**8, until=1))
    found = tiered_seconds([Visit(2.0, moves, uses=2, passed=10**9)] * 3, rates)
    assert found.step == pytest.approx(3 * (2.0 + 2 * 0.25 + 2 * 0.5 + 1.0))
    assert found.compute == pytest.approx(6.0)
    assert found.exposed == pytest.approx(7.5)
    bare = tiered_seconds([Visit(2.0, moves)] * 3, TierRates("disk", 1e9, 1e9))
    assert bare.step == pytest.approx(6.0)


def test_a_faster_processor_and_memory_take_less_beside_what_is_computed() -> None:
    cluster = described("cpu-loopback")
    device = replace(cluster.device, launch_s=1e-6, memory_rate=1e9)
    first, second = (
        disk_rates(replace(cluster, device=d))
        for d in (device, replace(device, launch_s=2e-6, memory_rate=2e9))
    )
    assert first is not None
    assert second is not None
    visit = Visit(0.0, (Transfer(10**8),))
    assert 2 * first.handling(visit) == pytest.approx(second.handling(visit))
    assert replace(first, visit_s=0.0).handling(Visit(0.0, passed=10**9)) == pytest.approx(1.0)


def test_loads_wait_for_evictions() -> None:
    rates = TierRates("disk", 1e9, 1e9, both_rate=2e9)
    there = Visit(0.0, (Transfer(10**9, write=True), Transfer(10**9, room=10**9)))
    waits = Visit(0.0, (Transfer(10**9, write=True), Transfer(10**9, room=0)))
    made = Visit(0.5, (Transfer(10**9, write=True), Transfer(0, room=0)))
    assert tiered_seconds([there] * 4, rates).step == pytest.approx(4.0)
    assert tiered_seconds([waits] * 4, rates).step == pytest.approx(8.0)
    assert tiered_seconds([made] * 4, rates).step == pytest.approx(6.0)


# Plans


def _model() -> nn.Module:
    """16 MiB of parameters, 64 of state, and nothing of it is there."""
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16))
        return nn.Sequential(*blocks)


def _plan(limit: int | str, disk: str | None = "/tmp:1GiB", **options: Any) -> Plan:
    model = _model()
    plugin = GeminiPlugin(limit, disk=disk, verbose=False, **options)
    return plugin.make_plan(
        model, torch.optim.AdamW(model.parameters()), described("cpu-loopback").resized(1)
    )


def test_a_plan_with_tiers_is_read_back_as_it_was_and_a_size_may_be_text() -> None:
    plan = _plan("24MiB", step_in_backward=True)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    text = plan.to_yaml().replace("limit: 25165824", "limit: 3 MiB  # by hand")
    edited = Plan.from_yaml(text)
    assert edited.zero is not None
    assert edited.zero.tiers is not None
    assert edited.zero.tiers.limit == 3 * MIB
    for wrong, message in {
        "limit: lots": r"zero.tiers.limit: 'lots' \(line \d+\): use a number with a unit",
        "limit: 70%": "use a number with a unit",
        "limit: 0": "it must be at least 1",
        "limit: 2.5": "it must be a whole number",
    }.items():
        with pytest.raises(GulliverError, match=message):
            Plan.from_yaml(plan.to_yaml().replace("limit: 25165824", wrong))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "stage: 3",
            "stage: 2",
            r"zero.stage: 2 \(line \d+\) and zero.tiers.limit: .*use stage: 3",
        ),
        ('tuning: "off"', 'tuning: "auto"', r"zero.tuning: auto .* use tuning: off"),
        (
            'disk: "/tmp"',
            "disk: null",
            r"tiers.disk: null .* and zero.tiers.disk_bytes: 1073741824",
        ),
        ("disk_bytes: 1073741824", "disk_bytes: 0", "such as disk_bytes: 100GiB"),
        ("host: 0", "host: 5GiB", r"mesh.device: cpu .* and zero.tiers.host: .*use host: 0"),
        ("offload_param: 1.0", "offload_param: 0.5", r"policy: auto .* use policy: static"),
        ("offload_optim: 1.0", "offload_optim: 1.5", "it must be at most 1"),
        ("offload_optim: 1.0", "offload_optim: 0.5", "use policy: static"),
        ('policy: "auto"', 'policy: "best"', "it must be one of auto, static"),
        ('activations: "keep"', 'activations: "kept"', "must be one of keep, recompute"),
    ],
)
def test_an_edit_that_contradicts_another_value_is_refused_with_both_lines(
    old: str, new: str, message: str
) -> None:
    text = _plan("24MiB").to_yaml()
    assert old in text
    with pytest.raises(GulliverError, match=message) as caught:
        check_plan(Plan.from_yaml(text.replace(old, new, 1)), 1)
    assert "\n" not in str(caught.value)


def test_a_limit_that_is_too_small_names_the_least_and_that_one_works() -> None:
    with pytest.raises(GulliverError, match=r"smallest limit that works is (\d+)MiB") as caught:
        _plan("100KiB")
    least = str(caught.value).rpartition(" ")[2]
    assert "chunk" in str(caught.value)
    plan = _plan(least)
    assert plan.predicted.moved is not None
    assert plan.predicted.moved.minimum <= byte_size("least", least)
    with pytest.raises(GulliverError, match=r"all state.*with a disk") as caught:
        _plan("24MiB", disk=None)
    alone = str(caught.value).rpartition(" ")[2]
    whole = _plan(alone, disk=None).predicted.moved
    assert whole is not None
    assert (whole.read, whole.written, whole.leaves.total) == (0, 0, 0)
    with pytest.raises(GulliverError, match=r"of state do not fit the memory limit: give it \d"):
        _plan("24MiB", disk="/tmp:1MiB")


def test_more_memory_moves_less_and_all_of_it_moves_nothing() -> None:
    moved = [_plan(limit).predicted.moved for limit in ("24MiB", "32MiB", "48MiB", "128MiB")]
    counts = [m.read + m.written for m in moved if m is not None]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0
    first = moved[0]
    assert first is not None
    assert first.bottleneck.startswith("disk: ")
    assert "more saves" in first.price


def test_of_three_memories_the_slower_link_sets_the_pace() -> None:
    plan, model = _plan("24MiB"), _model()
    assert plan.zero is not None
    assert plan.zero.tiers is not None
    (state,) = rank_states(ResolvedPlan(plan, model, torch.optim.AdamW(model.parameters())))
    tiers = replace(plan.zero.tiers, host=16 * MIB)
    found = find_residency(state, tiers, plan.work)
    assert 0 < found.moved.disk_read < found.moved.read
    fast, slow = TierRates("host", 1e12, 1e12), TierRates("disk", 1e9, 1e9)
    behind = found.seconds(plan.work, replace(fast, behind=slow))
    assert behind.bottleneck.startswith("disk: ")
    # All of it, at the rate of the disk, less what hides behind compute: there is none here.
    least = max(found.moved.disk_read, found.moved.disk_written) / 1e9
    assert least <= behind.step <= 2 * (found.moved.disk_read + found.moved.disk_written) / 1e9
    before = found.seconds(plan.work, replace(slow, name="host", behind=replace(fast, name="disk")))
    assert before.bottleneck.startswith("host: ")
    assert before.step > behind.step
    with pytest.raises(GulliverError, match=r"host_limit=100.0 KiB is too small for disk="):
        find_residency(state, replace(tiers, host=100 * 2**10), plan.work)
    with pytest.raises(GulliverError, match=r"host_limit give 36.0 MiB, .* set them to \d"):
        find_residency(state, replace(tiers, disk_bytes=20 * MIB), plan.work)
    beyond = replace(tiers, host=11 * MIB, disk_bytes=70 * MIB)
    with pytest.raises(GulliverError, match=r"host_limit=11\.0 MiB .*\d+.* MiB"):
        find_residency(state, beyond, plan.work)


def test_fixed_shares_stay_resident() -> None:
    plan = _plan("48MiB", placement_policy="static", offload_param_frac=0.0)
    assert plan.predicted.moved is not None
    assert plan.predicted.moved.leaves.parameters == 0
    assert plan.predicted.moved.leaves.optimizer_state > 0
    with pytest.raises(GulliverError, match="smallest limit that works is"):
        _plan("48MiB", placement_policy="static", offload_param_frac=0.0, offload_optim_frac=0.0)
    other = _plan("56MiB", placement_policy="static", offload_optim_frac=0.5)
    assert other.predicted.moved is not None
    stays = other.predicted.moved.stays.optimizer_state
    assert stays >= 0.4 * (stays + other.predicted.moved.leaves.optimizer_state)


def test_a_step_in_backward_needs_no_memory_for_gradients() -> None:
    late, early = (_plan("24MiB", step_in_backward=b).predicted.moved for b in (False, True))
    assert late is not None
    assert early is not None
    assert early.leaves.gradients == 0 < late.leaves.gradients
    assert early.read + early.written < late.read + late.written
