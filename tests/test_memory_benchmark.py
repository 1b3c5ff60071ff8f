"""The arithmetic of the benchmark of training under a limit, and its least moves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from benchmarks._memory_disk import chosen_over_best
from benchmarks._memory_jobs import (
    GEMINI,
    MARK,
    SWAP,
    Job,
    Ledger,
    Outcome,
    Step,
    _judged,
    run,
)
from benchmarks._memory_moves import CHANGE, OVERWRITE, READ, Case, least_moves, random_case
from benchmarks._memory_report import Beside, Rates, limit_bars, loss_bar, row, speed_bars, swap_bar

RATES = Rates(read_bps=100.0, write_bps=50.0, both_bps=80.0)


def outcome(seconds: float, read: int = 0, written: int = 0, loss: float = 1.0) -> Outcome:
    return Outcome("done", steps=(Step(seconds, loss, read, written),), peak=90)


def beside(seconds: float, compute: float, read: int, written: int) -> Beside:
    return Beside(outcome(seconds, read, written), outcome(compute), RATES, tokens=64)


def test_seconds_of_a_disk_are_those_of_both_at_once_and_of_the_rest_alone() -> None:
    assert RATES.seconds(200, 0) == 2.0
    assert RATES.seconds(0, 200) == 4.0
    assert RATES.seconds(300, 100) == pytest.approx(200 / 80 + 200 / 100)


def test_what_is_hidden_is_what_a_step_does_not_wait_for() -> None:
    found = beside(seconds=5.0, compute=4.0, read=200, written=0)
    assert (found.disk_s, found.bound_s, found.share, found.hidden) == (2.0, 4.0, 0.8, 0.5)
    assert beside(9.0, 4.0, 200, 0).hidden == 0.0


@pytest.mark.parametrize(
    ("compute", "wanted"), [(4.0, {1.15, 0.95}), (2.0, {1.15, 0.84}), (1.0, {1.15})]
)
def test_the_bar_for_speed_depends_on_whether_compute_covers_the_disk(
    compute: float, wanted: set[float]
) -> None:
    bars = speed_bars("ours", beside(max(2.0, compute), compute, read=200, written=0))
    assert {bar.bar for bar in bars} == wanted
    assert all(bar.holds for bar in bars)
    slow = speed_bars("ours", beside(1.3 * max(2.0, compute), compute, 200, 0))
    assert not any(bar.holds for bar in slow)


def test_a_limit_is_broken_by_a_run_that_does_no_step_or_needs_more() -> None:
    assert all(bar.holds for bar in limit_bars("ours", outcome(1.0), limit=100))
    assert not limit_bars("ours", Outcome("killed", peak=100), limit=100)[0].holds
    assert not limit_bars("ours", outcome(1.0), limit=80)[1].holds


def test_another_loss_is_noticed() -> None:
    same = beside(1.0, 1.0, 0, 0)
    assert loss_bar("ours", same)[0].holds
    # Losses of the same step are compared, whatever number of steps warmed up.
    later = dataclasses.replace(outcome(1.0), steps=(Step(1.0, 1.0, 0, 0, number=3),))
    assert not loss_bar("ours", dataclasses.replace(same, outcome=later))[0].holds
    other = dataclasses.replace(same, outcome=outcome(1.0, loss=1.0 + 1e-15))
    assert not loss_bar("ours", other)[0].holds


def test_a_swapping_run_that_was_stopped_counts_with_the_seconds_it_had() -> None:
    stopped = Outcome("stopped", unfinished_s=30.0)
    found = {
        GEMINI: beside(5.0, 4.0, 0, 0),
        SWAP: Beside(stopped, outcome(4.0), RATES, tokens=64),
    }
    assert swap_bar(found)[0].value == 6.0
    assert row(SWAP, found[SWAP])[4:6] == [">= 30.00", "<= 2.1"]


def test_what_a_killed_worker_had_said_is_kept() -> None:
    events = [
        {"kind": "ready", "at": 2.0},
        {"kind": "step", "at": 3.0, "timed": True, "step": vars(Step(1.0, 0.5, 7, 8))},
    ]
    text = "".join(f"{MARK}{json.dumps(event)}\n" for event in events)
    killed = _judged(text, -9, 1, False, 5.0, 99, (90, 0))
    assert (killed.end, killed.steps[0].read, killed.ready_s) == ("killed", 7, 2.0)
    late = _judged(text, -9, 0, True, 60.0, 99, (90, 0))
    assert (late.end, late.unfinished_s) == ("stopped", 57.0)
    assert _judged("", -9, 0, True, 60.0, 99, (90, 0)).unfinished_s == 0, "it was in no step"
    failed = _judged("Traceback\nValueError: no\n", 1, 0, False, 1.0, 99, (90, 0))
    assert (failed.end, failed.told) == ("failed", "ValueError: no")


def test_a_job_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    job, kept = Job(GEMINI, width=8), tmp_path / "ledger"
    Ledger(kept).add(job, outcome(2.0))
    again = run(dataclasses.replace(job, folder="/elsewhere"), Ledger(kept))
    assert again == outcome(2.0)
    assert Ledger(kept).get(dataclasses.replace(job, width=9)) is None


def test_the_setting_that_is_chosen_is_held_against_the_fastest() -> None:
    jobs = [Job(GEMINI, options={"step_in_backward": early}) for early in (True, False)]
    found = list(zip(jobs, (outcome(2.0), outcome(1.0)), strict=True))
    wrong = {jobs[0].key: 1.0, jobs[1].key: 3.0}
    assert chosen_over_best(found, wrong) == [2.0]
    assert chosen_over_best(found, {**wrong, jobs[0].key: 4.0}) == [1.0]


def test_least_moves_of_a_case_that_can_be_done_by_hand() -> None:
    # The two do not fit together: each is read in every round.
    assert least_moves(Case((2, 3), ((0, READ), (1, READ)), 4), 5) == 5 * (2 + 3)
    # Two of three fit: after the first two, every other use finds what it needs (Belady).
    three = Case((1, 1, 1), ((0, READ), (1, READ), (2, READ)), 2)
    assert least_moves(three, 5) == 2 + 7
    # What is overwritten is not read, and what was changed is written when it leaves.
    changed = Case((2, 2), ((0, OVERWRITE), (1, CHANGE)), 2)
    assert least_moves(changed, 1) == 2 + 2
    assert least_moves(changed, 2) == (2 + 2) + (2 + 2 + 2)


def test_what_there_is_no_time_for_is_left_out_and_the_table_comes_out(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", within_s=0.0)
    left_out = run(Job(GEMINI, width=8), ledger)
    assert (left_out.end, left_out.ran) == ("left out", False)
    assert ledger.get(Job(GEMINI, width=8)) is None
    neither = Beside(left_out, left_out, RATES, tokens=64)
    assert row("ours", neither)[1] == "left out: no time was left"
    alone = dataclasses.replace(neither, outcome=outcome(2.0, read=100))
    assert row("ours", alone)[4:6] == ["2.00", "32.0"]
    assert speed_bars("ours", alone) == loss_bar("ours", alone) == []
    assert swap_bar({GEMINI: alone, SWAP: neither}) == []


@pytest.mark.parametrize("seed", range(3))
def test_least_moves_are_those_of_every_way_to_leave(seed: int) -> None:
    case, rounds = random_case(seed), 2
    case = dataclasses.replace(case, accesses=case.accesses[:6])
    trace = list(case.accesses) * rounds

    def least(at: int, here: dict[int, bool]) -> int:
        if at == len(trace):
            return 0
        number, kind = trace[at]
        best = []
        for count in range(len(here) + 1):
            for leaving in itertools.combinations(here, count):
                if number in leaving:
                    continue
                kept = {n: dirty for n, dirty in here.items() if n not in leaving}
                moved = sum(case.sizes[n] for n in leaving if here[n])
                if number not in kept and kind != OVERWRITE:
                    moved += case.sizes[number]
                kept[number] = kept.get(number, False) or kind != READ
                if sum(case.sizes[n] for n in kept) <= case.budget:
                    best.append(moved + least(at + 1, kept))
        return min(best)

    assert least_moves(case, rounds) == least(0, {})
