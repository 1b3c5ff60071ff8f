"""The benchmark of one GPU: its dry run, time limits, and what its files hold."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from benchmarks import gpu
from benchmarks._gpu_run import GpuRun, PartSkipped

from gulliver.errors import GulliverError


def result(out: Path, name: str) -> dict:
    return json.loads(gpu.result_file(out, name).read_text())


def replaced(monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.setitem(gpu.PARTS, "step", gpu.Part(run, 20))


def test_a_dry_run_leaves_a_file_of_figures(tmp_path: Path) -> None:
    options = gpu.Options(parts=("smoke-loader",), out=str(tmp_path), dry_run=True)
    assert gpu.main(options) == 0
    found = result(tmp_path, "smoke-loader")
    assert found["status"] == "ok"
    assert found["figures"] == {
        "batches": 0.0,
        "pinned": False,
        "tensors outside of the arena": 0.0,
    }
    assert all(check["holds"] for check in found["checks"].values())
    assert found["torch"] == torch.__version__
    assert {"hardware", "instructions", "commit", "python", "seconds"} <= found.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", list(gpu.PARTS))
def test_every_part_runs_dry(name: str, tmp_path: Path) -> None:
    assert gpu.main(gpu.Options(parts=(name,), out=str(tmp_path), dry_run=True)) == 0
    assert result(tmp_path, name)["status"] in ("ok", "skipped")


def test_figures_are_kept_when_a_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: GpuRun) -> None:
        run.figure("before", 1.5)
        raise ValueError("in the middle")

    replaced(monkeypatch, fails)
    assert gpu.run_here("step", tmp_path, True) == 1
    found = result(tmp_path, "step")
    assert found["status"] == "failed"
    assert found["figures"] == {"before": 1.5}
    assert "ValueError" in found["error"]


@pytest.mark.parametrize(("value", "holds"), [(1.0, True), (1.1, False), (float("nan"), False)])
def test_a_check_that_does_not_hold_is_the_status(
    value: float, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, lambda run: run.check("error", value, 1.0))
    assert gpu.run_here("step", tmp_path, True) == int(not holds)
    assert result(tmp_path, "step")["status"] == ("ok" if holds else "wrong: error")


def test_a_part_that_cannot_run_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skips(run: GpuRun) -> None:
        raise PartSkipped("no such package")

    replaced(monkeypatch, skips)
    assert gpu.run_here("step", tmp_path, True) == 0
    assert result(tmp_path, "step")["status"] == "skipped"


def test_a_part_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "decode", gpu.Part(gpu.PARTS["decode"].run, 1.3))
    begun = time.monotonic()
    found = gpu.run_apart("decode", tmp_path, True, 100.0)
    assert time.monotonic() - begun < 60
    assert found["status"].startswith("stopped")
    assert result(tmp_path, "decode")["status"] == found["status"]
    assert gpu.run_apart("decode", tmp_path, False, 2.0)["status"] == "no time left"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_or_with_an_unknown_part_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match="--dry-run"):
        gpu.main(gpu.Options(out=str(tmp_path)))
    with pytest.raises(GulliverError, match="stepp"):
        gpu.main(gpu.Options(parts=("stepp",), out=str(tmp_path), dry_run=True))
    assert not list(tmp_path.iterdir())


def test_all_limits_fit_ten_minutes() -> None:
    assert gpu.BUDGET_S <= 540
    assert list(gpu.PARTS)[-1] == "decode"
