"""The examples and the snippets of the pages run as they are, and learn what one process learns."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from gulliver.comm import World
from tests.patience import patient
from tests.pool import Pool

ROOT = Path(__file__).resolve().parent.parent
UNTRAINED = {"own_clips", "criteo", "dynamic_ids"}
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - UNTRAINED)
RUN = r"python|torchrun --nproc-per-node \d+"
COMMAND = re.compile(rf"^ {{4}}((?:{RUN}) examples/.*?)(?: {{2,}}#.*)?$", re.MULTILINE)
SNIPPET = re.compile(r"<!-- run: (\d+) ranks? -->\n```python\n(.*?)```", re.DOTALL)


def _run(world: World, name: str, options: dict[str, Any]) -> tuple[list[float], str]:
    """This rank's losses, and what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
        return main(**options), printed.getvalue()


def _losses(pool: Pool, name: str, ranks: int, **options: Any) -> list[float]:
    """The losses of the whole batch: the mean of what the ranks have."""
    found = [losses for losses, _ in pool.run(_run, ranks, name, options)]
    return [sum(step) / ranks for step in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("name", "ranks", "steps", "tolerance"),
    [
        ("pretrain_gpt", 2, 4, 1e-4),
        ("zero3", 2, 4, 1e-5),
        ("train_larger_than_memory", 2, 5, 1e-5),
        ("tensor_pipeline", 4, 4, 1e-4),
        ("long_context", 2, 3, 1e-4),
        ("custom_model", 2, 4, 1e-4),
    ],
)
def test_an_example_trains_as_one_process_does(
    pool: Pool, name: str, ranks: int, steps: int, tolerance: float
) -> None:
    several = _losses(pool, name, ranks, steps=steps)
    assert several == pytest.approx(_losses(pool, name, 1, steps=steps), rel=tolerance)
    assert several[-1] < several[0]


def test_a_fine_tuned_model_is_saved_for_transformers(pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = {"steps": 6, "folder": tmp_path / "run"}
    losses = _losses(pool, "finetune_huggingface", 2, **options)
    assert losses[-1] < losses[0]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name).lm_head.weight
        for name in ("pretrained", "tuned")
    )
    assert 0 < (before - after).abs().max() < 0.1


def test_packed_conversations_train_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    one, two = (
        _losses(pool, "packed_chats", ranks, steps=4, folder=tmp_path / str(ranks))
        for ranks in (1, 2)
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert two[-1] < two[0]


def test_a_run_resumed_on_other_ranks_goes_on_as_if_it_had_not_stopped(
    pool: Pool, tmp_path: Path
) -> None:
    whole = _losses(pool, "resume", 1, steps=30, folder=tmp_path / "whole")
    parts = [
        loss
        for ranks in (2, 1, 3)
        for loss in _losses(pool, "resume", ranks, steps=10, folder=tmp_path / "parts")
    ]
    assert parts == pytest.approx(whole, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.deadline(300)
def test_every_command_that_an_example_names_runs(name: str, tmp_path: Path) -> None:
    commands = COMMAND.findall((ROOT / "examples" / f"{name}.py").read_text())
    assert commands
    for command in commands:
        python, *rest = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
        launcher = ["-m", "torch.distributed.run"] if python == "torchrun" else []
        ended = subprocess.run(
            [sys.executable, *launcher, *rest],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=patient(120),
        )
        assert ended.returncode == 0, ended.stderr
        shown = [float(found) for found in re.findall(r"loss (\d+\.\d+)", ended.stdout)]
        assert shown[-1] < shown[0], ended.stdout


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(int(ranks), code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (ranks, code) in enumerate(SNIPPET.findall(page.read_text(encoding="utf-8")))
]


def _execute(world: World, code: str, folder: Path) -> None:
    with chdir(folder), redirect_stdout(io.StringIO()):
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("ranks", "code"), SNIPPETS)
def test_a_snippet_of_the_pages_runs(pool: Pool, tmp_path: Path, ranks: int, code: str) -> None:
    pool.run(_execute, ranks, code, tmp_path)
