"""Shardings and recomputation are picked jointly: no picks of brute force are better."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.solve import Block, Operator, Strategy, least_memory, solve_joint
from gulliver.solve.activations import boxed
from gulliver.solve.joint import ENTRY, EdgeSeconds
from tests.solve.solver_cases import joint_case, small_network


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_joint_search_is_optimal(seed: int) -> None:
    joint_case(seed, 2, 600)


FULL = pytest.param(range(6, 60), marks=[pytest.mark.full, pytest.mark.deadline(600)])


@pytest.mark.parametrize("seeds", [range(6), FULL])
def test_lower_bound_is_valid(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        blocks = small_network(draw, draw.randint(2, 4), 4, 3)
        budget = least_memory(blocks).peak + draw.randint(0, 20)
        exact = solve_joint(blocks, budget, tolerance=0, states=2000)
        assert exact.exact
        for states in (1, 8):
            rough = solve_joint(blocks, budget, states=states, tolerance=0.3)
            assert rough.lower <= exact.cost.seconds * (1 + 1e-9)
            assert exact.cost.seconds <= rough.cost.seconds * (1 + 1e-9)
            assert rough.cost.peak <= budget


def test_pruning_keeps_plans_with_low_peak() -> None:
    # No weighted sum of seconds and peak is least for the middle one.
    seconds, peak = np.array([0.0, 6.0, 10.0]), np.array([10.0, 6.0, 0.0])
    priced = seconds + np.array([0.5, 1.0, 2.0])[:, None] * peak
    kinds = np.zeros(3, np.intp)
    assert sorted(boxed(kinds, peak, priced, 1)) == [0, 2]
    assert sorted(boxed(kinds, peak, priced, 3)) == [0, 1, 2]


def _layer(name: str, wide: float) -> Operator:
    """Two ways: whole on each device, or sharded, which communicates."""
    whole = Strategy("whole", 2.0, 4.0, state=8, saved=8, backward_bytes=2)
    parts = Strategy("parts", 1.0, 2.0, wide, wide, state=4, saved=4, backward_bytes=2)
    dear = EdgeSeconds(((0.0, 0.1), (0.5, 0.0)), ((0.0, 0.5), (0.1, 0.0)))
    return Operator(name, (whole, parts), conversions=(dear,))


def _chain(count: int) -> list[Block]:
    stays = (Strategy("", 0.1, 0.1, output=2), Strategy("", 0.1, 0.1, output=1))
    layers = [_layer("up", 0.4), _layer("down", 0.7)]
    up, down = layers[0], Operator("down", layers[1].strategies, (0,), layers[1].conversions)
    add = Operator("add", stays, (ENTRY, 1), (None, layers[0].conversions[0]))
    return [Block((up, down, add))] * count


def test_recomputation_repeats_communication_so_that_the_shardings_depend_on_the_budget() -> None:
    blocks = _chain(6)
    free = solve_joint(blocks, 10**6)
    tight = solve_joint(blocks, least_memory(blocks).peak + 12)
    assert {p.choice for b in free.picks for p in b} == {"keep"}
    assert "recompute" in {p.choice for b in tight.picks for p in b}
    assert free.price == 0 < tight.price
    # In two stages: the shardings that are best without a limit, then what to recompute.
    chosen = [
        Block(
            tuple(
                Operator(o.name, (o.strategies[p.strategy],), o.inputs, last_use=o.last_use)
                for o, p in zip(block.operators, picks, strict=True)
            )
        )
        for block, picks in zip(blocks, free.picks, strict=True)
    ]
    assert least_memory(chosen).peak >= least_memory(blocks).peak


def test_many_blocks_end_within_a_small_gap() -> None:
    blocks = _chain(96)
    least, free = least_memory(blocks), solve_joint(blocks, 10**9)
    middle = (least.peak + free.cost.peak) // 2
    found = solve_joint(blocks, middle)
    assert found.cost.peak <= middle
    assert found.lower <= found.cost.seconds
    assert found.gap < 0.01


def test_infeasible_budget_names_the_binding_operator() -> None:
    blocks = _chain(2)
    least = least_memory(blocks)
    with pytest.raises(GulliverError, match=rf"{least.peak}\b.* '(up|down|add)'"):
        solve_joint(blocks, least.peak - 1)
    assert solve_joint(blocks, least.peak).cost.peak == least.peak
