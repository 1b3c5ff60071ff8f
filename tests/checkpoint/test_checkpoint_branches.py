"""A run that goes back to an earlier step: the newest step is the one saved last."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint import AsyncCheckpointer, CheckpointFolder, import_huggingface, load
from gulliver.checkpoint.comparison import any_step
from gulliver.checkpoint.files import write_tensors
from gulliver.checkpoint.loading import step_folder
from gulliver.cli.dispatch import main


def save(root: Path, *steps: int, value: float = 0.0, **options: Any) -> CheckpointFolder:
    """Steps that hold their own number and a value, each complete before the next."""
    with AsyncCheckpointer(root, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"model": {"x": torch.tensor([float(step), value])}})
            checkpointer.wait()
    return checkpointer.folder


def list_steps(root: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "ls", str(root)])
    assert caught.value.code == 0


def held(root: Path, step: int | None = None) -> list[float]:
    values: Tensor = load(root, step=step).values["model"]["x"]
    return values.tolist()


def test_a_run_that_goes_back_is_resumed_where_it_went_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 100, 200, 300, keep=0)
    assert "branch" not in caplog.text
    for step in (110, 120, 200, 210):
        folder = save(tmp_path, step, value=1.0, keep=0)
        assert held(tmp_path) == [step, 1.0]
        assert folder.latest() == folder.path(step)
    assert folder.steps() == [100, 110, 120, 200, 210, 300]
    assert folder.left_behind() == [300]
    # Told once, by the save that leaves them.
    warned = [r.getMessage() for r in caplog.records if "was saved after" in r.getMessage()]
    assert len(warned) == 1
    assert "step 110 was saved after steps 200, 300 of" in warned[0]
    # What is left is there, as it was; what the branch has of the same number is the branch's.
    assert held(tmp_path, 300) == [300, 0.0]
    assert held(tmp_path, 200) == [200, 1.0]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_what_is_kept_is_the_branch_that_the_run_is_on(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 100, 200, 300, keep=3)
    kept = [100]
    for step in (110, 120, 130, 140):
        folder = save(tmp_path, step, keep=keep)
        kept = [*kept, step][-keep:]
        rest = [200, 300][len([200, 300]) - (keep - len(kept)) :] if keep > len(kept) else []
        assert folder.steps() == sorted(kept + rest)
        assert folder.latest() == folder.path(step)


def test_branches_are_told_when_a_step_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 10, 20, 30, keep=0)
    assert load(tmp_path).branches == []
    back = load(tmp_path, {"model": {"x": torch.zeros(2)}}, step=10)
    (line,) = back.branches
    assert "steps 20, 30 had been saved after it: a run that goes on here leaves them" in line
    assert str(back) == f"everything matched\n{line}"
    save(tmp_path, 15, keep=0)
    caplog.clear()
    (line,) = load(tmp_path).branches
    assert "step 15 was loaded; steps 20, 30 had been saved before it, on a branch that" in line
    assert line in caplog.text
    assert len(load(tmp_path, step=10).branches) == 1


def test_ls_shows_the_branch_that_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    save(tmp_path, 10, 20, 30, keep=0)
    list_steps(tmp_path)
    assert "branch left" not in capsys.readouterr().out
    save(tmp_path, 15, keep=0)
    list_steps(tmp_path)
    out = capsys.readouterr().out
    lines = {line.replace("│", " ").split()[0]: line for line in out.splitlines() if "│" in line}
    assert "complete, latest" in lines["15"]
    assert all("complete, branch left" in lines[step] for step in ("20", "30"))
    assert "branch" not in lines["10"] + lines["15"]
    assert any_step(tmp_path) == tmp_path / "step-00000015"


def test_the_order_survives_copies_and_crashes(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 10, 20, 30, keep=0)
    save(tmp_path / "a", 15, keep=0)
    # An archive that is copied back is as old as it was, whatever its files say.
    shutil.move(folder.path(30), tmp_path / "archive")
    shutil.copytree(tmp_path / "archive", folder.path(30), copy_function=shutil.copyfile)
    assert folder.latest() == folder.path(15)
    # A process that was killed before it could move the pointer, or left a step unfinished.
    (folder.root / "latest").write_text("step-00000030\n")
    (folder.root / "step-00000017.partial").mkdir()
    assert step_folder(folder.root) == folder.path(15)
    # A broken newest step is passed over for the one saved before it, on whichever branch.
    (folder.path(15) / "model.safetensors").unlink()
    assert folder.latest() == folder.path(30)


def test_a_step_made_of_other_files_is_the_newest_only_if_the_run_had_come_less_far(
    tmp_path: Path,
) -> None:
    write_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(2)})
    folder = save(tmp_path / "run", 10, 20, keep=0)
    import_huggingface(tmp_path / "x.safetensors", folder.root, step=5)
    assert folder.latest() == folder.path(20)
    import_huggingface(tmp_path / "x.safetensors", folder.root, step=25)
    assert folder.latest() == folder.path(25)
    assert folder.left_behind() == []
