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
from unittest.mock import patch

import pytest

from gulliver.comm import World
from tests.patience import patient
from tests.pool import Pool

ROOT = Path(__file__).resolve().parent.parent
UNTRAINED = {"own_clips", "criteo", "dynamic_ids"}
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - UNTRAINED)
RUN = r"python|torchrun --nproc-per-node \d+"
COMMAND = re.compile(rf"^ {{4}}((?:{RUN}) examples/.*?)(?: {{2,}}#.*)?$", re.MULTILINE)
BLOCK = re.compile(
    r"<!-- (?:run: )?(\d+ ranks?|shell|output) -->\n```(?:python|console|text)\n(.*?)```", re.DOTALL
)
"""Blocks of a page that run (on ranks, or in a shell), and what the block before prints."""


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


def test_resume_on_other_ranks_equals_uninterrupted_run(pool: Pool, tmp_path: Path) -> None:
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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(page: Path) -> list[tuple[str, str, str | None]]:
    """Marker, code and shown output (None: not shown) of the blocks of a page that run."""
    found: list[tuple[str, str, str | None]] = []
    for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "output":
            marker, before, _ = found.pop()
            found.append((marker, before, code))
        else:
            found.append((kind, code, None))
    return found


BLOCKS = [
    pytest.param(*block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(_blocks(page))
]


def _execute(world: World, code: str, folder: Path) -> str:
    if "accelerate.state" in sys.modules:  # what an earlier block has left in this process
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    with patch.dict(os.environ), chdir(folder), redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def _in_shell(commands: str, folder: Path) -> str:
    """Runs the lines that begin with `$`, and returns what they print, with the lines."""
    shown = ""
    for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", commands, re.MULTILINE):
        ended = subprocess.run(
            ["bash", "-c", line.replace("gulliver ", f"{sys.executable} -m gulliver.cli ", 1)],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT / "src"),
                "COLUMNS": "120",
            },
            capture_output=True,
            text=True,
            timeout=patient(100),
        )
        assert ended.returncode == 0, ended.stderr
        shown += f"$ {line}\n{ended.stdout}"
    return shown


NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
"""Numbers with a point are compared to one per cent; integers and words exactly."""


def _agrees(printed: str, shown: str) -> bool:
    """Whether an output is as shown: `...` stands for anything; spaces and frames do not count."""
    printed, shown = (re.sub(r"[\s\u2500-\u257f]+", " ", text).strip() for text in (printed, shown))
    pattern = re.escape(NUMBER.sub("#", shown)).replace(r"\.\.\.", ".*?")
    pattern = pattern.replace(r"\#", r"(\d+\.\d+(?:e[+-]?\d+)?)")
    found = re.fullmatch(pattern, printed)
    if found is None:
        return False
    expected = [float(number) for number in NUMBER.findall(shown)]
    return [*map(float, found.groups())] == pytest.approx(expected, rel=0.01, abs=1e-3)


@pytest.mark.parametrize(("kind", "code", "shown"), BLOCKS)
def test_a_block_of_the_pages_runs_and_prints_what_is_shown(
    pool: Pool, tmp_path: Path, kind: str, code: str, shown: str | None
) -> None:
    if kind == "shell":
        printed, shown = _in_shell(code, tmp_path), code
    else:
        printed = pool.run(_execute, int(kind.split()[0]), code, tmp_path)[0]
    assert shown is None or _agrees(printed, shown), printed


def test_outputs_are_compared_word_by_word_and_numbers_to_a_per_cent() -> None:
    assert _agrees("step 1  loss 0.5001\nrank 3\n", "step 1 loss 0.500\n...")
    assert not _agrees("step 2 loss 0.5001\n", "step 1 loss 0.5001\n")
    assert not _agrees("step 1 loss 0.6\n", "step 1 loss 0.5\n")
