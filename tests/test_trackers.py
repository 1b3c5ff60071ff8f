"""Experiment trackers: stand-ins for their packages see what a run writes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gulliver import Booster, GulliverError
from gulliver.jobs.trackers import check_trackers, track

Calls = list[tuple[Any, ...]]


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What stand-ins for wandb and mlflow were called with."""
    made: Calls = []

    def wandb_init(**options: Any) -> Any:
        made.append(("init", options["id"], options["config"]))
        return SimpleNamespace(
            id=options["id"] or "w1",
            log=lambda values, step: made.append(("wandb", values, step)),
            finish=lambda exit_code: made.append(("finish", exit_code)),
        )

    def start_run(run_id: str | None, run_name: str | None) -> Any:
        made.append(("start_run", run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m1"))

    _module(monkeypatch, "wandb", init=wandb_init, Image=lambda pixels: ("image", pixels))
    _module(
        monkeypatch,
        "mlflow",
        start_run=start_run,
        log_params=lambda values: made.append(("params", values)),
        log_metric=lambda name, value, step: made.append(("mlflow", {name: value}, step)),
        log_image=lambda pixels, name: made.append(("picture", name)),
        end_run=lambda status: made.append(("end_run", status)),
    )
    return made


def test_each_tracker_gets_numbers_and_pictures_and_is_ended(calls: Calls, tmp_path: Path) -> None:
    config = {"steps": 3, "data": ["a"]}
    with track(("wandb", "mlflow"), tmp_path, 0, True, config) as scalars:
        scalars("train/loss", 2.0, 1)
        scalars.picture("sheet", "pixels", 1)
    assert calls == [
        ("init", None, config),
        ("start_run", None),
        ("params", {"steps": 3}),
        ("wandb", {"train/loss": 2.0}, 1),
        ("mlflow", {"train/loss": 2.0}, 1),
        ("wandb", {"sheet": ("image", "pixels")}, 1),
        ("picture", "sheet-00000001.png"),
        ("end_run", "FINISHED"),
        ("finish", 0),
    ]


def test_a_run_folder_continues_its_entries(calls: Calls, tmp_path: Path) -> None:
    for _ in range(2):
        with track(("wandb", "mlflow"), tmp_path, 0, True, {}):
            pass
    assert ("init", "w1", {}) in calls
    assert ("start_run", "m1") in calls


def test_a_failed_run_is_marked_as_failed(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), track(("wandb", "mlflow"), tmp_path, 0, True, {}):
        _ = 1 / 0
    assert calls[-2:] == [("end_run", "FAILED"), ("finish", 1)]


def test_other_ranks_open_no_tracker(calls: Calls, tmp_path: Path) -> None:
    with track(("wandb", "mlflow", "tensorboard"), tmp_path, 0, False, {}) as scalars:
        scalars("loss", 1.0, 1)
    assert calls == []


def test_missing_and_unknown_trackers_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gulliver.jobs.trackers.find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(GulliverError, match=rf"--report-to {name}.*\[trackers\]"):
            check_trackers([name])
    with pytest.raises(GulliverError, match="wandb"):
        check_trackers(["wandbb"])


def test_a_booster_logs_to_its_trackers(calls: Calls, tmp_path: Path) -> None:
    booster = Booster(verbose=False)
    with pytest.raises(GulliverError, match=r"booster\.track"):
        booster.log({"loss": 1.0}, 1)
    booster.track("wandb", "tensorboard", folder=tmp_path, config={"rate": 0.1})
    booster.log({"loss": torch.tensor(0.5)}, step=2)
    booster.close()
    assert calls == [("init", None, {"rate": 0.1}), ("wandb", {"loss": 0.5}, 2), ("finish", 0)]
    assert list((tmp_path / "tensorboard").iterdir())


def test_fine_tuning_reports_its_losses(calls: Calls, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from gulliver.finetune import FinetuneConfig, finetune, make_example

    make_example(tmp_path / "example")
    finetune(
        FinetuneConfig(
            data=(tmp_path / "example" / "capitals.jsonl",),
            model=tmp_path / "example" / "model",
            out=tmp_path / "run",
            steps=2,
            batch_tokens=512,
            samples=0,
            report_to=("mlflow",),
        )
    )
    steps = [call[2] for call in calls if call[0] == "mlflow" and "train/loss" in call[1]]
    assert steps == [1, 2]
    assert calls[-1] == ("end_run", "FINISHED")
