"""The arithmetic of ZeRO's benchmark, and a small run of it from end to end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from benchmarks._harness import Bar, Spread
from benchmarks._models import gpt, stdit
from benchmarks._peers import Contestant, _within
from benchmarks._slept import SleptLayer, slept
from benchmarks._zero_ranks import COMPUTE, OURS, Entry, Found, Options
from benchmarks._zero_report import (
    COMPUTED,
    Network,
    Result,
    Scaling,
    bars,
    joined,
    loss_differences,
    rate_for,
    report,
    side_by_side,
    theory_bytes,
    weak_report,
)
from benchmarks.netlab import NetlabError
from benchmarks.zero import check_memory, checked, is_ratio, needed_bytes
from torch import nn

from tests.patience import patient
from tests.programs import run_program, text

MODEL = 1_000_000


def at(seconds: float) -> Spread:
    return Spread((seconds,))


def network(steps: dict[str, float], communication: float, name: str = "1gbit") -> Network:
    """Four ranks that send what theory says, hold what was planned and agree."""
    results = {}
    for contestant, seconds in steps.items():
        stage = int(contestant[-1]) if contestant.startswith("ZeRO") else 0
        wire = theory_bytes(stage, 4, MODEL)
        results[contestant] = Result(at(seconds), wire, 90, 100, 100, (3.0, 2.0))
    return Network(name, 4, results, at(communication), MODEL)


def failing(found: list[Bar]) -> list[str]:
    return [bar.name for bar in found if not bar.holds]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_theory_counts_the_bytes_of_every_move(ranks: int) -> None:
    shard = MODEL // ranks
    # To every other rank goes its part of the gradients, and this rank's part of the parameters.
    move = sum(shard for other in range(1, ranks))
    assert theory_bytes(0, ranks, MODEL) == theory_bytes(2, ranks, MODEL) == 2 * move
    assert theory_bytes(3, ranks, MODEL) == 3 * move


def test_a_rate_is_chosen_so_that_two_moves_take_the_time_asked_for() -> None:
    rate = rate_for(0.5, compute_s=1.0, ranks=2, parameter_bytes=100_000_000)
    bits = float(rate.removesuffix("mbit")) * 1e6
    assert theory_bytes(1, 2, 100_000_000) * 8 / (0.95 * bits) == pytest.approx(0.5, rel=0.01)


def test_bars_hold_where_communication_is_hidden() -> None:
    steps = {COMPUTE: 1.0, "DDP": 1.4, "FSDP2": 3.0, "ZeRO 1": 1.05, "ZeRO 2": 1.0, "ZeRO 3": 1.6}
    found = bars(network(steps, 1.0))
    assert failing(found) == []
    assert {bar.bar for bar in found if "faster" in bar.name} == {1.2, 1.5}


def test_each_broken_promise_is_named() -> None:
    steps = {COMPUTE: 1.0, "DDP": 1.15, "DeepSpeed 3": 2.0, "ZeRO 2": 1.2, "ZeRO 3": 1.7}
    measured = network(steps, 1.0)
    off = dataclasses.replace(measured.results["ZeRO 2"], wire=MODEL, peak=96, losses=(3.0, 2.1))
    measured.results["ZeRO 2"] = off
    assert failing(bars(measured)) == [
        "ZeRO 2: bytes sent, off theory",
        "ZeRO 2: peak bytes of state, off the plan",
        "ZeRO 2: loss, off DDP's",
        "ZeRO 2: step / max(compute, communication)",
        "ZeRO 3: step / max(compute, communication)",
        "ZeRO 2: times faster than DDP",
        "ZeRO 3: times faster than DeepSpeed 3",
    ]


def test_on_loopback_it_is_enough_not_to_be_slower() -> None:
    steps = {COMPUTE: 1.0, "DDP": 1.5, "ZeRO 1": 1.5}
    (bar,) = (b for b in bars(network(steps, 0.2, "loopback")) if "faster" in b.name)
    assert bar.bar == 1.0
    assert bar.holds


def test_where_the_core_is_busy_no_stage_may_be_slower_than_the_best_peer() -> None:
    measured = network({COMPUTE: 1.0, "DDP": 1.5, "ZeRO 1": 1.5, "ZeRO 2": 1.6}, 1.0)
    found = bars(dataclasses.replace(measured, regime=COMPUTED))
    assert failing(found) == ["ZeRO 2: times faster than DDP"]


def test_both_regimes_stand_side_by_side() -> None:
    computed = dataclasses.replace(network({COMPUTE: 1.0, "DDP": 2.0}, 1.0), regime=COMPUTED)
    slept = network({COMPUTE: 1.0, "DDP": 1.1}, 1.0)
    made = side_by_side([computed, slept], "zero", "a model")
    assert made.rows[1] == ["1gbit", "DDP", "2000", "2.00", "1.00", "1100", "1.10", "1.00"]
    assert set(made.figures) == {"1gbit, computed", "1gbit, slept"}


def test_a_task_that_sleeps_has_the_same_parameters_and_takes_its_time() -> None:
    task = gpt(32, 2, 2, 8)
    model, other = slept(task, 0.02).model(), task.model()
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (model, other)]
    assert shapes[0] == shapes[1]
    layers = [m for m in model.modules() if isinstance(m, SleptLayer)]
    assert sum(layer.seconds for layer in layers) == pytest.approx(0.02)
    blocks = slept(task, 0.02).blocks(model)
    assert [sum(p.numel() for p in b.parameters()) for b in blocks] == [
        sum(p.numel() for p in b.parameters()) for b in task.blocks(other)
    ]
    slept(task, 0.02).loss(model, 0).backward()
    for layer in layers:
        for parameter, gradient in zip(layer.parameters(), layer.gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_stage_three_is_held_against_the_longer_of_compute_and_three_moves() -> None:
    found = network({COMPUTE: 1.0, "ZeRO 2": 1.0, "ZeRO 3": 1.0}, 0.8)
    assert found.bound_s("ZeRO 2") == 1.0
    assert found.bound_s("ZeRO 3") == pytest.approx(1.2)


def test_losses_are_compared_after_as_many_steps_as_all_have_done() -> None:
    found = network({COMPUTE: 1.0, "DDP": 1.0, "ZeRO 1": 1.0}, 1.0)
    found.results["ZeRO 1"] = dataclasses.replace(
        found.results["ZeRO 1"], losses=(3.0, 2.0, 1.0, 0.5)
    )
    assert loss_differences(found) == {"DDP": 0.0, "ZeRO 1": 0.0}


def test_what_ranks_found_is_joined_by_its_worst() -> None:
    def rank(wire: float, peak: int, loss: float) -> Found:
        entry = Entry(at(1.0), wire, peak - 10, peak, peak + 1, (loss,))
        return Found({COMPUTE: Entry(at(1.0)), "ZeRO 1": entry}, at(1.0), MODEL)

    joint = joined("1gbit", [rank(1.0e6, 70, 2.0), rank(1.5e6, 80, 4.0)], 0.5)
    result = joint.results["ZeRO 1"]
    assert (result.wire, result.peak, result.planned, result.losses) == (1.5e6, 80, 81, (3.0,))


def test_a_report_has_a_row_for_each_contestant_and_the_bars() -> None:
    measured = network({COMPUTE: 1.0, "DDP": 1.4, "ZeRO 2": 1.0}, 1.0)
    made = report(dataclasses.replace(measured, absent=["DeepSpeed 1"]), "zero", "a model", ["!"])
    assert [row[0] for row in made.rows] == [COMPUTE, "DDP", "ZeRO 2"]
    assert all(len(row) == len(made.columns) for row in made.rows)
    assert made.bars == bars(measured)
    assert any("DeepSpeed 1" in note for note in made.notes)


def test_weak_scaling_is_held_to_a_bar_where_links_could_hide_it() -> None:
    def regime(name: str, step: float) -> Scaling:
        sizes = {n: network({COMPUTE: 1.0, "ZeRO 2": step}, 0.5) for n in (1, 4)}
        return Scaling(name, "1gbit", sizes)

    made = weak_report([regime("fast", 1.04), regime("slow", 2.0)], "weak", "a model", "fast")
    assert [(b.value, b.holds) for b in made.bars] == [(pytest.approx(1 / 1.04), True)]
    assert len(made.rows) == 4


def test_networks_are_rates_or_multiples_of_compute() -> None:
    assert [is_ratio(n) for n in ("0.3", "3", "loopback", "1gbit")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(contestants=("ZeRO 4",)), "unknown contestant 'ZeRO 4'.*ZeRO"),
        (Options(ranks=1), "at least 2"),
    ],
)
def test_options_that_cannot_run_are_refused(options: Options, message: str) -> None:
    with pytest.raises(NetlabError, match=message):
        checked(options)


def test_more_than_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(ranks=4, width=64, depth=1, contestants=("DDP", "ZeRO 2"), chunk_mb="4")
    size = sum(p.nbytes for p in options.task().model().parameters())
    # The model without communication takes part as well.
    assert needed_bytes(options) == 4 * 3 * 4 * size
    assert needed_bytes(dataclasses.replace(options, chunk_mb="auto")) > needed_bytes(options)
    check_memory(options)
    monkeypatch.setattr("benchmarks.zero.needed_bytes", lambda _: 1 << 60)
    with pytest.raises(NetlabError, match="name fewer --contestants"):
        check_memory(options)


def test_state_is_counted_once_for_each_storage_and_at_its_peak() -> None:
    layer = nn.Linear(4, 4, bias=False)
    buffer = torch.zeros(100)

    def step(seed: int) -> float:
        layer(torch.ones(1, 4)).sum().backward()
        layer.weight.grad = None
        return 0.0

    def tensors() -> list[torch.Tensor | None]:
        return [layer.weight, layer.weight.view(-1), layer.weight.grad, buffer[:10], buffer]

    contestant = Contestant("", step, tensors, model=nn.Sequential(layer))
    assert contestant.bytes() == 64 + 400
    layer.register_forward_hook(lambda *_: setattr(layer.weight, "grad", torch.zeros(4, 4)))
    assert contestant.peak_bytes(0, 1) == 64 + 400 + 64
    assert contestant.bytes() == 64 + 400


def test_tensors_are_found_in_containers_and_on_parameters() -> None:
    weight = nn.Parameter(torch.ones(1))
    vars(weight)["shard"] = torch.ones(2)
    found = list(_within({"a": [weight, (torch.ones(3),)], "b": weight, "c": 5}, set()))
    assert sorted(t.numel() for t in found) == [1, 2, 3]


@pytest.mark.parametrize("task", [gpt(32, 1, 2, 8), stdit(1)], ids=["gpt", "stdit"])
def test_a_task_gives_the_same_loss_for_the_same_seed(task) -> None:
    torch.manual_seed(0)
    model = task.model()
    losses = [float(task.loss(model, seed).detach()) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert task.blocks(model)


def test_a_peer_that_trains_something_else_is_named() -> None:
    measured = network({COMPUTE: 1.0, "DDP": 1.4, "DeepSpeed 1": 2.0, "ZeRO 2": 1.0}, 1.0)
    off = dataclasses.replace(measured.results["DeepSpeed 1"], losses=(3.0, 2.001))
    measured.results["DeepSpeed 1"] = off
    assert failing(bars(measured)) == ["DeepSpeed 1: loss, off DDP's"]


@pytest.mark.full
@pytest.mark.deadline(300)
def test_a_small_run_measures_every_stage_beside_its_peers() -> None:
    names = ("DDP", "FSDP2", *OURS)
    sizes = (
        "--width 64 --depth 2 --length 16 --rounds 2 --chunk-mb 0.1 --networks loopback --weak no"
    )
    command = [sys.executable, "-m", "benchmarks.zero", *sizes.split(), "--contestants", *names]
    # A process of its own: ranks are forked, and this one has used torch.
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(250), check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    for regime in ("computed", "slept"):
        figures = {name: result["figures"][f"loopback, {regime}"][name] for name in names}
        assert all(figure["step_s"] > 0 for figure in figures.values())
        held = [figures[name]["state_bytes"] for name in OURS]
        assert held[0] >= held[1] > held[2] > held[3]
    losses = [bar for bar in result["bars"] if "loss" in bar["name"].split(": ")[-1]]
    assert len(losses) == 2 * (len(names) - 1)
    assert all(bar["holds"] for bar in losses)


def test_without_root_one_line_says_so() -> None:
    script = "import os; os.geteuid = lambda: 1000; from benchmarks.zero import main; main()"
    # One contestant: how much memory is free must not matter here.
    options = "--networks", "1gbit", "--contestants", "DDP"
    done = run_program(text, script, *options, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("benchmarks.zero: shaped networks need root")
    assert "Traceback" not in done.stderr
