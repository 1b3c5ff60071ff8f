"""The task and the arithmetic of the benchmark of fine-tuning."""

from __future__ import annotations

import math

import pytest
from benchmarks._finetune_texts import heads
from benchmarks._memory_jobs import MIB, Outcome
from benchmarks.finetune import OURS, SPARE, TRAINER, apart, half_of

SOURCE = """
class Box:
    def put(self, thing, place=None, *rest, quiet=False):
        pass

    def empty(self):
        pass


def long(
    a,
):
    pass


def one(value): return value
"""


def test_the_task_is_to_name_the_arguments_of_heads_of_one_line() -> None:
    head = "def put(self, thing, place=None, *rest, quiet=False):"
    assert list(heads(SOURCE)) == [(f"{head}\n# takes", " thing place quiet")]
    assert list(heads("def broken(:")) == []


def test_losses_of_other_steps_are_endlessly_far_apart() -> None:
    assert apart({0: 2.0, 1: 1.0}, {0: 1.0, 1: 1.0}) == 1.0
    assert apart({0: 1.0}, {0: 1.0, 1: 1.0}) == math.inf
    assert apart({}, {}) == math.inf


def test_a_limit_leaves_the_process_half_of_the_peak() -> None:
    found = {
        OURS: [Outcome("done", facts={"base": 300 * MIB})],
        TRAINER: [Outcome("done", anonymous=1600 * MIB)],
    }
    assert half_of(found) + 300 * MIB + SPARE == pytest.approx(800 * MIB)
