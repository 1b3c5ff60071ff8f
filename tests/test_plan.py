"""The plan: written without a library, read back equal, mistakes named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.io import to_yaml
from gulliver.plan import ChunkPlan, MemoryPlan, Plan

PLAN = Plan(
    plugin="LowLevelZeroPlugin",
    mesh={"data": 4},
    device="cpu",
    stage=2,
    mixed_precision="none",
    optimizer="AdamW",
    parameters=1234567,
    trainable=1200000,
    memory=MemoryPlan(parameters=4 * 2**20, gradients=2**20, optimizer_state=2**21),
    chunks=(
        ChunkPlan(("a.weight", "a.bias"), 4096, 96, "float32"),
        ChunkPlan(("no: 'quotes' # \u00e9\u2028",), 64, 0, "float64"),
    ),
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_any_nested_values_are_read_back_as_they_were(values: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(values)) == values


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, stage=None, chunks=())])
def test_a_saved_plan_loads_as_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


def test_an_edited_plan_loads(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.to_yaml().replace("stage: 2", "stage: 1  # by hand"))
    assert Plan.load(path) == replace(PLAN, stage=1)


def test_the_summary_tells_people_what_matters() -> None:
    text = PLAN.summary()
    for part in ("stage 2", "data 4", "1,234,567", "2 chunks", "7.00 MiB", "optimizer 2.00 MiB"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stagee: 1", "did you mean 'stage'"),
        ("- 1", "holds no plan"),
        ("a: [", "is no YAML"),
        ("plugin: x", "no complete plan"),
        ("memory: 3", "no complete plan"),
    ],
)
def test_a_wrong_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(GulliverError, match=message) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match=r"nowhere\.yaml does not exist"):
        Plan.load(tmp_path / "nowhere.yaml")
