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
from gulliver.hardware import TierRates, Visit, memory_bytes, tiered_seconds
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


def brute_seconds(visits: list[Visit], rates: TierRates, ahead: int) -> float:
    """The step of a run that goes on, tick by tick: a link and a computing unit take turns."""
    many, repeats = len(visits), 12
    jobs = [
        (
            rates.write_seconds(v.written, v.writes or 1)
            + rates.read_seconds(v.read, v.reads or 1),
            v.read,
        )
        for v in visits
    ]
    tick, clock = 1, 0
    ended: list[int] = []
    arrived, left, started = 0, 0, False
    running = 0
    while len(ended) < many * repeats:
        # The link: the next job, where what lies ahead of the visits leaves room for it.
        if arrived < many * repeats and not started:
            first = len(ended)
            under_way = sum(jobs[n % many][1] for n in range(first, arrived + 1))
            if under_way <= max(ahead, jobs[arrived % many][1]) or first > arrived - 1:
                started, left = True, round(jobs[arrived % many][0])
        while started and left == 0:
            arrived, started = arrived + 1, False
            if arrived < many * repeats:
                first = len(ended)
                under_way = sum(jobs[n % many][1] for n in range(first, arrived + 1))
                if under_way <= max(ahead, jobs[arrived % many][1]) or first > arrived - 1:
                    started, left = True, round(jobs[arrived % many][0])
        if len(ended) < arrived and running == 0:
            running = round(visits[len(ended) % many].seconds)
            if running == 0:
                ended.append(clock)
                continue
        clock += tick
        left -= tick if started else 0
        if running:
            running -= tick
            if running == 0:
                ended.append(clock)
    return ended[-1] - ended[-1 - many]


VISITS = st.lists(
    st.builds(
        Visit,
        seconds=st.integers(1, 6).map(float),
        read=st.integers(0, 5),
        written=st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@given(VISITS, st.integers(0, 12))
def test_seconds_are_those_of_a_link_and_a_unit_that_take_turns(
    visits: list[Visit], ahead: int
) -> None:
    rates = TierRates("disk", 1.0, 1.0)
    found = tiered_seconds(visits, rates, ahead)
    assert found.step == pytest.approx(brute_seconds(visits, rates, ahead), rel=0.02, abs=1.0)
    least = max(found.compute, found.busy)
    assert least <= found.step <= found.compute + found.busy + 1e-9
    assert found.step <= tiered_seconds(visits, rates, max(0, ahead - 1)).step + 1e-9


def test_the_bottleneck_is_named() -> None:
    rates = TierRates("disk", 1e9, 1e9)
    visits = [Visit(0.1, 10**9, 10**9)] * 9
    assert tiered_seconds(visits, rates, 10**10).bottleneck == "disk: 18.0 s of 18.0 s"
    assert tiered_seconds([Visit(2.0, 10**6)] * 2, rates, 0).bottleneck.startswith("compute: 4.0 s")
    both = replace(rates, duplex=True)
    assert tiered_seconds(visits, both, 10**10).busy == pytest.approx(9.0)
