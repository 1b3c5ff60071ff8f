"""The command line: help without torch, and numbers that cannot be end early in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gulliver.cli.dispatch import PLACES, WHAT, _found, main, run
from gulliver.cli.parser import Printed, parse
from gulliver.errors import UsageError
from gulliver.finetune.config import FinetuneConfig
from gulliver.jobs import display

HELP = """
import sys
from gulliver.cli.dispatch import main
for arguments in {calls!r}:
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code == 0, (arguments, stop.code)
    found = [name for name in ("torch", "numpy", "safetensors", "av") if name in sys.modules]
    assert not found, (arguments, found)
"""


def test_help_and_version_import_no_torch() -> None:
    calls = [["--help"], ["--version"], *([*name.split(), "--help"] for name in WHAT)]
    ended = subprocess.run(
        [sys.executable, "-c", HELP.format(calls=calls)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    for name in WHAT:
        assert f"usage: gulliver {name}" in ended.stdout


FILTER = """
import sys
from pathlib import Path
from gulliver.cli.dispatch import main
path, out = Path({path!r}), {out!r}
path.write_text("path,text,fps\\na.mp4,a cat,24\\nb.mp4,a dog,6\\n")
main(["data", "filter", str(path), "fps >= 12", "--out", out])
assert Path(out).read_text().splitlines()[1:] == ["a.mp4,a cat,24"], Path(out).read_text()
assert "torch" not in sys.modules, "torch was imported"
"""


def test_a_table_is_filtered_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    script = FILTER.format(path=str(tmp_path / "in.csv"), out=str(tmp_path / "out.csv"))
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def _parsed(name: str, *arguments: str) -> Any:
    return parse(_found(PLACES[name].split()[0]), list(arguments), name)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "finetune",
            "--model m --tp 2 --pp=2 --length 9",
            "m --tp-size 2 --pp-size 2 --seq-length 9",
        ),
        ("finetune", "m --memory 1GiB --precision bf16", "m --memory-limit 1GiB --dtype bf16"),
        ("train", "--mixed-precision none", "--dtype fp32"),
        ("train", "--planner.memory 2.5", "--planner.memory-limit 2.5GiB"),
        ("train", "--samples.prompts a.txt", "--samples.prompt-file a.txt"),
        (
            "plan search",
            "m --batch 8 --seq 64 --host 1GiB",
            "m --batch-size 8 --seq-length 64 --host-memory 1GiB",
        ),
        (
            "plan memory",
            "--model m --memory 1GiB --batch 2",
            "m --memory-limit 1GiB --batch-size 2",
        ),
        ("serve start", "--model m --tensor 2 --cache 1GiB", "m --tp-size 2 --kv-cache 1GiB"),
        (
            "serve start",
            "m --context 64 --max-body 1MiB --dtype bfloat16",
            "m --seq-length 64 --body-bytes 1MiB --dtype bf16",
        ),
        (
            "generate",
            "--prompts f --sequence 2 --cache broadcast",
            "--prompt-file f --sp-size 2 --step-cache broadcast",
        ),
        (
            "embedding plan",
            "a=5 --cache 0.5 --host 1GiB",
            "a=5 --cached-share 0.5 --host-memory 1GiB",
        ),
        ("fp8", "--model m", "m"),
        ("speculate report", "--target m --prompt 8", "m --prompt-length 8"),
        ("checkpoint convert", "a b --dtype bfloat16", "a b --dtype bf16"),
        ("jobs submit", "s.py --batch 4 --samples 9", "s.py --batch-size 4 --samples 9"),
    ],
)
def test_old_spellings_mean_the_present_ones(name: str, old: str, new: str) -> None:
    assert _parsed(name, *old.split()) == _parsed(name, *new.split())


def test_options_take_their_old_names_in_programs_too() -> None:
    config = FinetuneConfig(tp=2, memory="1GiB")
    assert (config.tp_size, config.tp, config.memory_limit) == (2, 2, "1GiB")
    assert replace(config, tp=4).tp_size == 4
    with pytest.raises(AttributeError):
        _ = config.tq
    with pytest.raises(TypeError):
        FinetuneConfig(tq=2)


def test_a_file_gives_options_and_flags_override_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 5\nasync_save: false\noptimizer:\n  learning_rate: 1e-4\n")
    config = _parsed("train", f"--config={file}", "--steps", "7")
    assert (config.steps, config.async_save, config.optimizer.learning_rate) == (7, False, 1e-4)
    with pytest.raises(Printed):
        _parsed("train", "--config", str(file), "--tp-size", "2", "--print-config")
    file.write_text(capsys.readouterr().out)
    assert _parsed("train", "--config", str(file)) == replace(config, steps=5, tp_size=2)
    (tmp_path / "c.json").write_text(json.dumps({"model": "m", "tp": 2}))
    config = _parsed("finetune", "--config", str(tmp_path / "c.json"))
    assert (config.model, config.tp_size) == (Path("m"), 2)
    for wrong in ("stpes: 5", "steps: many", "steps: [", "- 5"):
        file.write_text(wrong)
        with pytest.raises(UsageError):
            _parsed("train", "--config", str(file))


@pytest.mark.parametrize(
    "arguments",
    [
        ["traim"],
        ["plan", "memry"],
        ["checkpoint"[:-1]],
        ["jobs", "simulat"],
        ["completion", "tcsh"],
        ["train", "--out="],
        ["train", "--steps", "0"],
        ["train", "--config"],
        ["finetune", "--data", "x"],
        ["checkpoint", "diff", "/nonexistent", "/nonexistent"],
        ["train", "--out", "/proc/x"],
        ["chat"],
        ["chat", "/nonexistent", "--prompt", "x"],
        ["quantize", "/nonexistent", "--out", "x"],
        ["plan", "llama-3-8b", "--memory-limit", "10"],
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_an_occupied_out_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    script = (
        "import sys; from gulliver.cli.dispatch import main\n"
        f"try: main(['finetune', 'm', '--data', 'x', '--out', {str(tmp_path)!r}])\n"
        "except SystemExit as stop: assert stop.code == 2 and 'torch' not in sys.modules"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "--resume" in ended.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("che", ["checkpoint"]),
        ("plan m", ["memory"]),
        ("completion f", ["fish"]),
        ("finetune --tp", ["--tp-size"]),
        ("finetune --dtype b", ["bf16"]),
        ("serve --kv", ["--kv-cache"]),
        ("chat x", []),
    ],
)
def test_words_are_completed(
    words: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(["__complete", *words.split()])
    assert capsys.readouterr().out.split() == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["completion", shell])
    script = capsys.readouterr().out
    assert "gulliver" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_only_long_work_shows_progress_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with display.working("planning m"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(display, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.01)
    said, end = "", time.monotonic() + 30
    with display.working("planning m") as progress:
        progress("searching grids")
        while "searching grids" not in said and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "planning m: searching grids" in said
