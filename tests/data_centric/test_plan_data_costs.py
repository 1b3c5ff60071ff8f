"""``gulliver plan data`` with costs that a run has kept, host memory, and files that are broken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks._data_centric_costs import TABLE

from gulliver.cli.dispatch import run
from gulliver.cli.options import PlanData
from gulliver.cli.plan_data import load_costs
from gulliver.errors import GulliverError
from gulliver.hardware import (
    SampleShape,
    save_samples,
)
from gulliver.hardware.batch_costs import BlockKind
from gulliver.hardware.probe import planned_memory
from gulliver.hardware.samples import SampleFit, SampleModel, holds_samples, read_samples
from gulliver.options import size_text

KINDS = tuple(BlockKind(name, 28, 40.0 * 1152, 0.5) for name in ("spatial", "temporal"))
MODEL = SampleModel("video", 16 * 1152**2, 1152, KINDS, "bfloat16")
FIT = SampleFit(0.03, 2e-4, 1 / 3e14, 4e-9, 0.0, 16e9, 6e4, 2304.0, 0.02, 0.05)
SHAPES = tuple(
    SampleShape.clip(*sizes, text=300) for sizes in ((1, 16, 16), (5, 23, 40), (15, 30, 54))
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    save_samples(tmp_path / "costs.json", MODEL, FIT, SHAPES)
    return tmp_path / "costs.json"


def told(capsys: pytest.CaptureFixture[str], costs: Path, *options: str) -> str:
    assert run(["plan", "data", "--costs", str(costs), "--samples", "12", *options]) == 0
    return capsys.readouterr().out


def test_saved_costs_give_the_planners_plan(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "h100x4", "--ranks", "4", "--count", "60", "--memory", "40"]
    out = told(capsys, kept, *options, "--steps", "0")
    assert "costs of video, bfloat16" in out
    assert re.search(r"2\.0%.* 5\.0%.* h100x4", " ".join(out.split()))
    assert "40.00 GiB" in out
    assert "60 of 60 samples once each" in out


def test_saved_costs_accept_all_shape_kinds(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("15x30x54\n4096\n2x8x8\n" * 4)
    out = told(capsys, kept, "--ranks", "1", "--shapes", str(shapes), "--memory", "40")
    assert "A 15x30x54, B 2x8x8, C 4096 tokens" in out
    shapes.write_text("15x30\n")
    with pytest.raises(GulliverError, match=r"--shapes.*'15x30'"):
        told(capsys, kept, "--ranks", "1", "--shapes", str(shapes))


def test_stage_steps_respect_lower_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = told(capsys, TABLE, "--samples", "20", "--ranks", "4", "--stages", "2", "--count", "90")
    (over,) = re.findall(r"(-?[\d.]+) % over every sample in its best micro-batch", text)
    assert float(over) > 0


def test_predicted_rank_memory_matches_run(kept: Path) -> None:
    memory, why = planned_memory("cuda" if torch.cuda.is_available() else "cpu")
    found = load_costs(PlanData(kept, ranks=4, samples=12))
    assert found.costs.memory == memory
    assert f"memory of a rank: {size_text(memory)}, {why}" in found.lines


def test_files_that_hold_something_else_are_told_from_costs(kept: Path, tmp_path: Path) -> None:
    assert holds_samples(kept)
    assert not holds_samples(TABLE)
    assert not holds_samples(tmp_path / "none.json")
    values = json.loads(kept.read_text())
    for change, message in (
        ({"format": 9}, "has format 9"),
        ({"fit": 3}, "has no sample costs"),
        ({"kinds": [{"name": "spatial"}]}, "has no sample costs"),
    ):
        kept.write_text(json.dumps(values | change))
        with pytest.raises(GulliverError, match=message):
            read_samples(kept)
    save_samples(kept, MODEL, FIT, SHAPES)
    saved = read_samples(kept)
    assert (saved.model, saved.fit, saved.shapes) == (MODEL, FIT, SHAPES)
