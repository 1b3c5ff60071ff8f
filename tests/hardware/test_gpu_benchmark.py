"""The benchmark of one GPU: its dry run and what its files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import gpu


def result(out: Path, name: str) -> dict:
    return json.loads(gpu.result_file(out, name).read_text())


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
