"""The least limit that is stated is true: under it every step is served, and exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.least_limits import at_least_limit, least_case, plain
from tests.random_limits import RandomCase, problem

CASES, FULL_CASES = 8, 250


def check(seeds: range, folder: Path) -> None:
    for seed in seeds:
        case = least_case(seed)
        wanted, found = plain(case), at_least_limit(case, str(folder))
        assert len(wanted) == len(found), case
        assert all(map(torch.equal, wanted, found)), case


def test_the_least_limit_serves_every_step_of_whatever_model(tmp_path: Path) -> None:
    check(range(CASES), tmp_path)


@pytest.mark.full
@pytest.mark.deadline(1800)
def test_the_least_limit_serves_hundreds_of_models(tmp_path: Path) -> None:
    check(range(CASES, FULL_CASES), tmp_path)


def test_random_models_under_random_limits_keep_to_them(tmp_path: Path) -> None:
    for seed in (*range(6), 21):  # one whose state grows when a layer is first used
        assert not problem(RandomCase(seed), str(tmp_path)), seed


@pytest.mark.full
@pytest.mark.deadline(3600)
def test_thousands_of_random_models_keep_to_their_limits(tmp_path: Path) -> None:
    for seed in range(3000):
        assert not problem(RandomCase(seed), str(tmp_path)), seed
