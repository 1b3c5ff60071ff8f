"""Layers on unequal devices: no order and cut of brute force has a shorter makespan."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.solve import Fleet, lower_bound, makespan, place_layers
from tests.solver_cases import compare_placements, every_placement, partition_case

SECONDS = st.integers(0, 9)


@st.composite
def _fleets(draw: st.DrawFn) -> Fleet:
    devices, layers = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    row = st.lists(SECONDS, min_size=layers, max_size=layers)
    given: dict[str, Any] = {}
    if draw(st.booleans()):
        numbers = draw(st.integers(0, 1 << 20))
        shape = (devices, devices, layers)
        given["links"] = np.random.default_rng(numbers).integers(0, 7, shape)
    if draw(st.booleans()):
        given["memory"] = draw(st.lists(st.integers(0, 4), min_size=layers, max_size=layers))
        given["limits"] = draw(st.lists(st.integers(0, 10), min_size=devices, max_size=devices))
    every = layers >= devices and draw(st.booleans())
    return Fleet(draw(st.lists(row, min_size=devices, max_size=devices)), every=every, **given)


@settings(max_examples=250, deadline=None)
@given(_fleets())
def test_no_placement_is_better(fleet: Fleet) -> None:
    compare_placements(fleet)


@pytest.mark.full
@pytest.mark.deadline(600)
def test_no_placement_is_better_in_many_cases() -> None:
    assert sum(partition_case(seed) for seed in range(1000)) > 700


@settings(max_examples=15, deadline=None)
@given(_fleets())
def test_the_lower_bound_is_below_all_and_local_search_above(fleet: Fleet) -> None:
    from gulliver.solve._devices_local import local_search

    for count in (1, 4, math.inf):
        lower = lower_bound(fleet, count)
        best = min((makespan(servers, count) for servers in every_placement(fleet)), default=None)
        if best is None:
            continue
        assert lower <= best * (1 + 1e-9) + 1e-9
        found = local_search(fleet, count, lower, 20)
        if found is not None:
            assert makespan(fleet.servers(*found), count) >= best - 1e-9


def test_one_micro_batch_fills_the_fastest_and_many_are_balanced() -> None:
    seconds = np.outer([4.0, 1.0, 2.0], np.ones(12))
    fleet = Fleet(seconds, memory=[1.0] * 12, limits=[8.0] * 3)
    assert place_layers(fleet, 1).sizes in ((8, 4), (4, 8))
    many = place_layers(fleet, math.inf)
    # In 7 seconds they could do 1, 7 and 3 layers: one too few.
    assert many.seconds == 8.0


def test_a_link_is_a_server_and_the_order_avoids_it() -> None:
    links = np.full((3, 3, 6), 9.0)
    links[0, 2] = links[2, 1] = 0.5
    found = place_layers(Fleet(np.ones((3, 6)), links), 16)
    assert found.devices == (0, 2, 1)
    assert found.servers == (2.0, 0.5, 2.0, 0.5, 2.0)


def test_many_devices_come_with_a_bound() -> None:
    draws = np.random.default_rng(32)
    slow = 1 + draws.random(16)
    fleet = Fleet(np.outer(slow, np.ones(32)))
    found = place_layers(fleet, math.inf, tries=5)
    assert 0 <= found.gap < 0.005
    # 32 equal layers on 16 devices: the best is a small count of whole layers on each.
    assert sum(found.sizes) == 32
    assert found.lower <= found.seconds
    assert place_layers(fleet, 1).exact


def test_light_layers_do_not_loosen_the_bound_of_endless_micro_batches() -> None:
    # In less than 7 seconds 13 devices do 6 whole layers and one 3: four too few, while each of
    # the 13 could take a light layer besides.
    work = np.array([0.05, *[1.0] * 85, 0.05])
    fleet = Fleet(np.outer([*[1.0] * 13, 2.0], work))
    assert lower_bound(fleet, math.inf) >= 7.0 * (1 - 1e-9)
    assert place_layers(fleet, math.inf, tries=4).gap < 1e-6


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(GulliverError, match="links are"):
        Fleet(np.ones((2, 3)), links=np.ones((2, 2, 2)))
    with pytest.raises(GulliverError, match="too few for 4 devices"):
        Fleet(np.ones((4, 3)), every=True)
    with pytest.raises(GulliverError, match="holds them"):
        place_layers(Fleet(np.ones((2, 3)), memory=[5.0] * 3, limits=[5.0] * 2))
    with pytest.raises(GulliverError, match="at least 1 micro-batch"):
        place_layers(Fleet(np.ones((2, 3))), 0)
