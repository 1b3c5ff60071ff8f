"""Plans under a memory limit: sizes as text, edits, refusals, and predictions by brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gulliver.booster._tiers import split_disk
from gulliver.errors import GulliverError
from gulliver.hardware import TierRates, Transfer, Visit, memory_bytes, tiered_seconds
from gulliver.hardware._memory import group_limits
from gulliver.options import UNITS, byte_size, size_at_least

GIB, MIB = 2**30, 2**20

# Sizes


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_size_in_any_unit_is_read_exactly(count: int, unit: str, gap: str) -> None:
    assert byte_size("limit", f"{count}{gap}{unit}") == count * UNITS[unit]
    assert byte_size("limit", f" {count}{gap}{unit.lower()} ") == count * UNITS[unit]
    assert byte_size("limit", count) == byte_size("limit", str(count)) == count


@given(st.integers(1, 2**50))
def test_a_size_that_is_told_is_enough_and_hardly_more(count: int) -> None:
    read = byte_size("limit", size_at_least(count))
    assert count <= read <= count + max(1, count / 100 + 11)


@given(st.integers(1, 10**4), st.integers(10**4, 2**50))
def test_a_share_is_of_the_whole(share: int, whole: int) -> None:
    assert byte_size("limit", f"{share / 100:.2f}%", whole) == share * whole // 10**4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("lots", r"limit='lots' is no size: give a number with a unit, such as '6GiB'"),
        ("6 GiBs", r"limit='6 GiBs' has no known unit: did you mean 'GiB'\?"),
        ("", "is no size"),
        ("GiB", "is no size"),
        ("-3GiB", "is no size above 0"),
        ("0MiB", "is no size above 0"),
        (0, "limit=0 is no size above 0"),
        (-5, "limit=-5 is no size above 0"),
        (float("nan"), "is no size above 0"),
        (float("inf"), "is no size above 0"),
        (True, "must be a whole number"),
        (None, "must be a whole number"),
        ("70%", "is a share, and of what is not known"),
        ("1.2.3GiB", "is no size"),
        ("0.0001B", "is no size above 0"),
    ],
)
def test_what_is_no_size_is_refused_with_what_would_be_right(value: Any, message: str) -> None:
    with pytest.raises(GulliverError, match=message) as caught:
        byte_size("limit", value)
    assert "\n" not in str(caught.value)


def test_a_share_of_more_than_all_is_refused() -> None:
    with pytest.raises(GulliverError, match="more than all of it"):
        byte_size("limit", "101%", 100)
    assert byte_size("limit", 6e9) == 6 * 10**9


def test_a_disk_is_a_folder_that_may_have_colons_and_a_size() -> None:
    assert split_disk("/a:b/c:100GiB") == ("/a:b/c", "100GiB")
    assert split_disk("C:1 TB") == ("C", "1 TB")
    for text, message in {
        "/scratch": r"such as disk='/scratch:100GiB'",
        ":5GiB": "give a folder and a size",
        "/scratch:lots": r"disk='/scratch:lots': 'lots' is no size",
        "/scratch:0GiB": "is no size above 0",
        "/scratch:": "is no size",
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
def test_seconds_are_those_of_a_link_and_a_unit_that_take_turns(visits: list[Visit]) -> None:
    rates = TierRates("disk", 1.0, 1.0)
    found = tiered_seconds(visits, rates)
    assert found.step <= found.compute + found.busy + 1e-9
    assert found.step >= found.compute - 1e-9
    if found.busy <= found.compute:  # else the queue grows from step to step for a while
        assert found.step == pytest.approx(brute_seconds(visits, rates), abs=1e-9)


def test_the_bottleneck_is_named() -> None:
    rates = TierRates("disk", 1e9, 1e9)
    slow = Visit(0.1, (Transfer(10**9, write=True), Transfer(10**9)))
    assert tiered_seconds([slow] * 9, rates).bottleneck == "disk: 18.0 s of 18.9 s"
    fast = Visit(2.0, (Transfer(10**6, until=1),))
    assert tiered_seconds([fast] * 2, rates).bottleneck == "compute: 4.0 s of 4.0 s"
    both = tiered_seconds([slow] * 9, replace(rates, duplex=True))
    assert (both.busy, both.step) == pytest.approx((9.0, 9.9))
