"""The command line: help without torch, and numbers that cannot be end early in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gulliver.cli.dispatch import COMMANDS, main

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
    calls = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    calls += [["checkpoint", name, "--help"] for name in ("ls", "verify", "diff", "convert")]
    actions = ("scan", "cut", "score", "dedup", "filter", "caption", "show", "encode")
    calls += [["data", name, "--help"] for name in actions]
    calls += [["plan", name, "--help"] for name in ("memory", "show", "search", "data")]
    ended = subprocess.run(
        [sys.executable, "-c", HELP.format(calls=calls)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    for name in COMMANDS:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt x --fps 0", "--fps is 0.0: it must be positive, at most 1000"),
        ("generate --prompt x --condition-frames 5", "--condition-frames is for --extend"),
        ("generate --prompt x --loops 2", "2 loops need frames"),
        ("generate --prompt x --negative-prompt y --guidance 1", "no effect with guidance 1"),
        ("generate --prompt x --mask-strategy 0", "uses reference 0"),
        ("generate --prompt x --guidance-image 2", "image guidance 2 without given frames"),
        (
            "generate --prompt x --guidance-image 2 --guidance-ranks 2",
            "--guidance-ranks 2 does not support image guidance",
        ),
        ("train --data.frame-interval 2", "--data.frame-interval is 2: it is for the clips of a"),
        ("generate --prompt x --resolution 60000", "at scale 4 has 7.5e+11 pixels"),
        ("train --flow.masks image_head:0.6 extend:0.6", "it must be at most 1"),
        ("train --flow.masks image_head:0.6 randon:0.1", "unknown strategy 'randon'"),
        ("train --flow.shift-by-size --flow.shift-rule 1.2", "a clip of 4 has none"),
        ("train --data.shapes 13x32x32 13x32x32:2", "it occurs twice"),
    ],
)
def test_numbers_that_cannot_be_end_in_one_line(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []
