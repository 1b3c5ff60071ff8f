"""The command line: help without torch, and numbers that cannot be end early in one line."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gulliver.cli.data import Caption, Cut, Dedup, Scan, Score, Show
from gulliver.cli.dispatch import COMMANDS, _found, main
from gulliver.cli.options import Convert, Diff, Ls, Memory, Search, Verify
from gulliver.errors import GulliverError
from gulliver.options import Range, ranges_of
from gulliver.video import SamplingConfig
from gulliver.video.media import write_clip

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


OPTIONS = [_found(command.options) for command in COMMANDS.values()]
OPTIONS += [
    Scan,
    Cut,
    Score,
    Dedup,
    Caption,
    Show,
    Ls,
    Verify,
    Diff,
    Convert,
    Memory,
    Search,
    SamplingConfig,
]


def _dataclasses(kind: type) -> Iterator[type]:
    yield kind
    for hint in typing.get_type_hints(kind).values():
        if dataclasses.is_dataclass(hint):
            yield from _dataclasses(typing.cast(type, hint))


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_every_number_has_a_range_and_its_default_lies_in_it(kind: type) -> None:
    for part in _dataclasses(kind):
        ranges = ranges_of(part)
        for field in dataclasses.fields(part):
            hint = typing.get_type_hints(part)[field.name]
            kinds = set(typing.get_args(hint)) | {hint}
            sizes = str in kinds  # such as 4GiB
            if sizes or not kinds & {int, float} or bool in kinds:
                continue
            if typing.get_origin(hint) is tuple:
                continue
            assert field.name in ranges, f"{part.__name__}.{field.name} has no range"
            if field.default is not None:
                assert field.default in ranges[field.name]
            for wrong in _outside(ranges[field.name], float in kinds):
                assert wrong not in ranges[field.name]


def _outside(range_: Range, is_float: bool) -> list[Any]:
    whole = [int(range_.least) - 1, int(range_.most) + 1]
    return [*whole, float("nan"), float("inf"), -float("inf")] if is_float else whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt x --fps 0", "--fps is 0.0: it must be positive, at most 1000"),
        ("generate --prompt x --fps 100", "a GIF shows at most 50 frames per second"),
        ("generate --prompt x --fps 0.001", "13 frames at fps 0.001 take 13000 s: a GIF holds at"),
        ("generate --prompt x --fps 0.0001 --out x.mp4", "an mp4 shows at least 0.001 frames per"),
        ("generate --prompt x --condition-frames 5", "--condition-frames is for --extend"),
        ("generate --prompt x --loops 2", "2 loops need a number of frames"),
        ("generate --prompt x --negative-prompt y --guidance 1", "no effect with guidance 1"),
        ("generate --prompt x --mask-strategy 0,0,0,0,1,2", "an edit ratio is between 0"),
        ("generate --prompt x --mask-strategy 0", "names reference 0: the first is 0, there are 0"),
        ("generate --prompt x --reference none.png", "none.png does not exist"),
        ("generate --prompt |1|x", "names loops [1]: they begin at 0 and ascend"),
        ('generate --prompt x{"seed":"1"}', "the unknown field 'seed'"),
        ("generate --prompt x --guidance-image 2", "image guidance 2 without given frames"),
        (
            "generate --prompt x --guidance-image 2 --guidance-ranks 2",
            "--guidance-ranks 2 with image guidance: it asks the model three times",
        ),
        ("train --data.frame-interval 2", "--data.frame-interval is 2: it is for the clips of a"),
        ("train --out=", "--out is empty: name a place"),
        ("generate --prompt x --scale 0", "--scale is 0: it must be between 1 and 64"),
        ("generate --prompt x --resolution 60000", "at scale 4 has 7.5e+11 pixels"),
        ("generate --prompt x --resolution 1024 --scale 32", "at scale 32 has"),
        ("generate --prompt x --aspect-ratio 1:100000", "is not width:height"),
        ("train --flow.masks image_head:0.6 extend:0.6", "it must be at most 1"),
        ("train --flow.masks image_head:0.6 randon:0.1", "unknown strategy 'randon'"),
        ("train --flow.shift-by-size --flow.shift-rule 1.2", "a clip of 4 has none"),
        ("train --data.shapes 13x32x32:nan", "a weight must be positive"),
        ("train --data.shapes 13x32x32 13x32x32:2", "it is named twice"),
        ("train --data.shapes 13x999999x32", "height must be between 1 and"),
        ("train --model.text-channels 63", "it must be even"),
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


def test_programs_are_refused_the_same_numbers(tmp_path: Path) -> None:
    import torch

    for options in ({"fps": 0}, {"fps": float("nan")}, {"fps": 8, "scale": 0}):
        with pytest.raises(GulliverError, match=r"fps must be .*, scale between 1 and 64"):
            write_clip(tmp_path / "x.gif", torch.zeros(3, 1, 8, 8), **options)
    assert list(tmp_path.iterdir()) == []
