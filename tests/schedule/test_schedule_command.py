"""`gulliver jobs`, traces in files, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gulliver.cli.dispatch import main
from gulliver.errors import GulliverError
from gulliver.hardware import Scaling
from gulliver.schedule import Job, JobCluster, generate, read_trace, simulate
from gulliver.schedule.policies import make_policy as made
from gulliver.schedule.traces import write_trace

ROW = {"name": "a", "arrival": 0, "samples": 1000, "batch": 32, "slots": 2, "sample_seconds": 0.01}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["jobs", "simulate", *arguments])
    return int(stop.value.code or 0)


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    jobs, _ = generate("heavy-tail", 3)
    write_trace(tmp_path / "t.csv", jobs)
    assert read_trace(tmp_path / "t.csv") == jobs


@pytest.mark.parametrize("cells", ["a,0,6400,64,2,0.01", "a,0,6400,64,2,0.01,0.1,0.1,1"])
def test_rows_with_missing_or_surplus_cells_are_rejected(tmp_path: Path, cells: str) -> None:
    header = "name,arrival,samples,batch,slots,sample_seconds,step_seconds,exchange_seconds"
    (tmp_path / "t.csv").write_text(f"{header}\n{cells}\n")
    with pytest.raises(GulliverError, match="line 2"):
        read_trace(tmp_path / "t.csv")


def test_measured_points_become_costs(tmp_path: Path) -> None:
    costs = Scaling(0.01, 0.02, 0.03)
    points = [[n, b, costs.throughput(n, b)] for n in (1, 2, 4) for b in (32, 64)]
    row = {k: v for k, v in ROW.items() if k != "sample_seconds"} | {"measured": points}
    (tmp_path / "t.json").write_text(json.dumps({"jobs": [row]}))
    (found,) = read_trace(tmp_path / "t.json")
    assert found.scaling.throughput(8, 64) == pytest.approx(costs.throughput(8, 64))


def test_jobs_that_the_cluster_can_never_run_are_refused() -> None:
    large = Job("a", 0.0, 100.0, 32, 8, Scaling(0.01))
    small = Job("a", 0.0, 100.0, 32, 1, Scaling(0.01))
    with pytest.raises(GulliverError, match=r"'a' requests 8 slots .*\b4;"):
        simulate([large], JobCluster(4), made("fifo"))
    with pytest.raises(GulliverError, match="named 'a'"):
        simulate([small, small], JobCluster(4), made("fifo"))
    with pytest.raises(GulliverError, match="no jobs"):
        simulate([], JobCluster(4), made("fifo"))
    with pytest.raises(GulliverError, match="tenant ''"):
        simulate([small], JobCluster(4, {"x": 1}), made("fifo"))
    with pytest.raises(GulliverError, match="quotas add up to 5"):
        JobCluster(4, {"x": 5})


def test_the_command_compares_explains_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW | {"name": n, "samples": 4000 * (k + 1)} for k, n in enumerate("abc")]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    trace, page = str(tmp_path / "t.json"), tmp_path / "page.html"
    assert run(trace, "--slots", "4", "--compare", "--html", str(page)) == 0
    out = capsys.readouterr().out
    assert "mean completion time" in out
    assert all(name in out for name in ("fifo", "srpt", "tiresias", "pollux", "rollout"))
    text = page.read_text()
    assert text.count("<svg") == 5
    assert "http" not in text
    assert run(trace, "--slots", "4", "--why", "c", "--policy", "fifo") == 0
    assert "c at 0 s, policy fifo: waits: 4 of 4 slots" in capsys.readouterr().out
    assert run(trace, "--slots", "4", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["rollout"]["ends"]) == set("abc")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("stedy",), 1, "'stedy'.*'steady'"),
        (("steady", "--policy", "first"), 2, "policy 'first'"),
        (("steady", "--at", "3"), 2, "--at.*--why"),
        (("steady", "--why", "x", "--compare"), 2, "--why.*--compare"),
        (("steady", "--slots", "2"), 1, r"requests 4 slots .*\b2;"),
        (("none.csv", "--slots", "2"), 1, r"none\.csv"),
    ],
)
def test_mistakes_end_in_one_line(
    arguments: tuple[str, ...], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    error = capsys.readouterr().err
    assert re.search(told, error)
    assert error.count("\n") == 1


def test_nodes_come_from_options_or_from_described_hardware(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("steady", "--policy", "fifo", "--json", "--hardware", "8xh100-infiniband") == 0
    one = json.loads(capsys.readouterr().out)
    assert run("steady", "--policy", "fifo", "--json", "--node-slots", "8", "--across", "9") == 0
    assert json.loads(capsys.readouterr().out) == one
    assert run("steady", "--across", "9") == 2
    assert "--node-slots" in capsys.readouterr().err
    assert run("steady", "--hardware", "8xh100-infiniband", "--slots", "4") == 2
    assert "--hardware" in capsys.readouterr().err
