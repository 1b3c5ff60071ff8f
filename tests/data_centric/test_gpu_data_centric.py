"""Planned steps of one rank on a GPU against plain torch on the CPU; they skip without one."""

from __future__ import annotations

import pytest

from gulliver.comm import World
from tests.data_centric.data_centric_runs import Case, errors
from tests.hybrid.test_gpu_hybrid import nccl

__all__ = ["nccl"]  # a fixture

pytestmark = pytest.mark.gpu
CASES = (
    Case("llama", 1, clip=0.5, steps=6),
    Case("documents", 3, by_tokens=True, steps=4),
    Case("stdit3", 2, steps=4),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_planned_steps_on_a_gpu_are_those_of_plain_torch(nccl: World, case: Case) -> None:
    found = errors(nccl, case)
    assert found["gradients"] <= 1e-10
    assert found["losses"] <= 1e-10
    assert found["weights"] <= 1e-10
