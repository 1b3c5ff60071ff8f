"""A memory limit is one: in a control group of the kernel's nothing that keeps to it is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from benchmarks.limits import Group, LimitsError, Place, check_limits, disk_bytes, places
from benchmarks.limits._group import FILES

from tests.memory.limited_models import LimitCase, random_case
from tests.patience import patient

ROOT = Path(__file__).parents[2]
CASES = 1


def cannot_limit() -> str:
    try:
        check_limits()
    except LimitsError as error:
        return str(error)
    return ""


needs_groups = pytest.mark.skipif(bool(cannot_limit()), reason=cannot_limit())


@dataclass(frozen=True)
class Ran:
    code: int
    kills: int
    ended: list[dict[str, object]]
    last: str


def run_limited(cases: Sequence[LimitCase], folder: Path) -> Ran:
    text = json.dumps([asdict(case) for case in cases])
    with Group() as group, (folder / "said").open("w+") as said:
        name = FILES["limit"][group.place.version]
        command = [
            sys.executable,
            "-m",
            "tests.memory.limited_models",
            str(group.folders[0] / name),
        ]
        process = group.start([*command, str(folder), text], stdout=said, stderr=said, cwd=ROOT)
        code, kills = process.wait(patient(120 + 6 * len(cases))), group.kills
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    ended = [json.loads(line)["ended"] for line in lines if line.startswith('{"ended"')]
    return Ran(code, kills, ended, lines[-1] if lines else "")


def check(cases: Sequence[LimitCase], ran: Ran, kills: int = 0) -> None:
    assert ran.kills == kills, ran.last
    assert len(ran.ended) == len(cases), ran.last
    for case, found in zip(cases, ran.ended, strict=True):
        assert found["found"] == found["wanted"], case
        assert "limit" in str(found["refused"]), f"half of the least limit was taken: {case}"


@needs_groups
@pytest.mark.deadline(300)
def test_models_within_their_limit_train_as_without_one_and_a_model_that_ignores_it_is_killed(
    tmp_path: Path,
) -> None:
    cases = [random_case(seed) for seed in range(CASES)]
    ignores = LimitCase(1, width=384, depth=8, share=0.1, limited=False)
    ran = run_limited([*cases, ignores], tmp_path)
    check(cases, ran, kills=1)
    assert ran.code == -9
    assert ran.last.startswith('{"begins"')


@needs_groups
def test_a_group_limits_counts_and_is_removed(tmp_path: Path) -> None:
    code = "x = bytearray({0} << 20); open({1!r}, 'wb', 0).write(x[:1 << 20])"
    with Group(memory=64 << 20) as group:
        folders = group.folders
        fits = group.start([sys.executable, "-c", code.format(20, str(tmp_path / "a"))])
        assert fits.wait(patient(20)) == 0
        assert 20 << 20 < group.peak <= 64 << 20
        killed = group.start([sys.executable, "-c", code.format(100, str(tmp_path / "b"))])
        assert killed.wait(patient(20)) == -9
        assert group.kills == 1
        waits = group.start([sys.executable, "-c", "import time; time.sleep(100)"])
    assert waits.wait(patient(20)) == -9
    assert not any(folder.exists() for folder in folders)


def test_groups_are_found_where_they_are_mounted(tmp_path: Path) -> None:
    with pytest.raises(LimitsError, match="mount cgroup v1 or v2"):
        places(tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    assert places(tmp_path) == Place(2, tmp_path, tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1\n")
    assert places(tmp_path) == Place(1, tmp_path / "memory", tmp_path / "blkio")


def test_bytes_of_a_disk_are_read_from_both_versions(tmp_path: Path) -> None:
    lines = "8:0 Read 5\n254:0 Read 100\n254:0 Write 20\nTotal 125\n"
    (tmp_path / "blkio.throttle.io_service_bytes_recursive").write_text(lines)
    (tmp_path / "io.stat").write_text("8:0 rbytes=5 wbytes=0\n254:0 rbytes=7 wbytes=9 rios=1\n")
    assert disk_bytes(tmp_path, "254:0", 1) == (100, 20)
    assert disk_bytes(tmp_path, "254:0", 2) == (7, 9)
