"""Operators shared one by one: forward, loss and every gradient are those of one process."""

from __future__ import annotations

import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gulliver.booster import Booster
from gulliver.booster.auto import auto_engine
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, described
from gulliver.operators.apply import check_operators
from gulliver.operators.plans import batch_of, find_operators, form_of, plan_from, problem_of
from gulliver.plan import Plan
from gulliver.plan.tree import Mesh
from gulliver.solve import Choice, least_memory
from gulliver.solve.joint import Pick, joint_cost
from gulliver.solve.joint_search import JointPlan
from tests.operators.operator_models import BATCH, LocalBytes, build, loss_of, one_process
from tests.pool import Pool

BAR = 1e-10
MESHES = {2: ({"data": 2},), 4: ({"data": 4}, {"data": 2, "tensor": 2})}


def cluster_of(ranks: int) -> Cluster:
    found = described("cpu-loopback").resized(ranks)
    rates = {**found.device.matmul, "float64": 5e9}
    return replace(found, device=replace(found.device, matmul=rates))


def random_plan(kind: str, axes: dict[str, int], seed: int, fates: tuple[Choice, ...]) -> Plan:
    """Any picks that the search could make."""
    draw, (model, batch) = random.Random(seed), build(kind)
    ranks = 1
    for size in axes.values():
        ranks *= size
    problem = problem_of(model, batch_of(batch), tuple(axes.values()), cluster_of(ranks))
    picks = []
    for block in problem.blocks:
        row = []
        for number, operator in enumerate(block.operators):
            strategy = draw.randrange(len(operator.strategies))
            choice = draw.choice(fates)
            open_ = block.used_until(number, strategy) >= len(block.operators)
            if choice == "recompute" and (open_ or not operator.recomputable):
                choice = "keep"
            row.append(Pick(strategy, choice))
        picks.append(tuple(row))
    cost = joint_cost(problem.blocks, picks)
    found = JointPlan(tuple(picks), cost, 0.0, False, 0.0)
    return plan_from(problem, found, Mesh("cpu", axes), form_of(batch_of(batch)), 0)


def run(kind: str, plan: Plan) -> tuple[float, float]:
    """Largest relative errors of loss and gradients, of two steps of which the first updates."""
    wanted, grads = one_process(kind)
    model, batch = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    booster = Booster(plan=plan, verbose=False)
    boosted, stepper, *_ = booster.boost(model, optimizer)
    worst = 0.0
    for _ in range(2):
        loss = loss_of(boosted, batch)
        booster.backward(loss, stepper)
        found = stepper.full_gradients()
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            scale = max(float(grad.abs().max()), 1e-3)
            worst = max(worst, float((found[name] - grad).abs().max()) / scale)
        worst = max(worst, abs(float(loss.detach()) - wanted) / abs(wanted))
        stepper.step()
        stepper.zero_grad()
    booster.close()
    return worst, wanted


def _runs(world: World, cases: list[tuple[str, Plan]]) -> list[float]:
    torch.set_num_threads(1)
    return [run(kind, plan)[0] for kind, plan in cases]


FATES: tuple[Choice, ...] = ("keep", "keep", "recompute")


def _check_picks(pool: Pool, kind: str, meshes: tuple[dict[str, int], ...], seeds: range) -> None:
    cases = [
        (kind, random_plan(kind, axes, seed, ("keep",) if seed == 0 else FATES))
        for axes in meshes
        for seed in seeds
    ]
    for found in pool.run(_runs, math.prod(meshes[0].values()), cases):
        assert max(found) < BAR, found


@pytest.mark.parametrize(
    ("kind", "ranks"), [("mlp", 4), pytest.param("llama", 2, marks=pytest.mark.full)]
)
def test_any_picks_have_the_loss_and_gradients_of_one_process(
    pool: Pool, kind: str, ranks: int
) -> None:
    _check_picks(pool, kind, MESHES[ranks][-1:], range(1, 2))


def found_plan(kind: str, axes: dict[str, int], above: float) -> tuple[Plan, int]:
    """What the joint search finds for a budget above the least, and that least."""
    model, batch = build(kind)
    cluster = cluster_of(4)
    problem = problem_of(model, batch_of(batch), tuple(axes.values()), cluster)
    least = least_memory(problem.blocks).peak
    optimizer = torch.optim.AdamW(model.parameters())
    memory = int(above * least)
    return find_operators(model, batch, cluster, axes, memory, optimizer, states=4), memory


class _Measured:
    """Most bytes of a step of Adam, all of its state included."""

    def __init__(self, kind: str, plan: Plan) -> None:
        model, batch = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        booster = Booster(plan=plan, verbose=False)
        boosted, stepper, *_ = booster.boost(model, optimizer)
        booster.backward(loss_of(boosted, batch), stepper)
        stepper.step()
        stepper.zero_grad()
        state = booster.compare()["optimizer_state"].measured
        with LocalBytes() as counter:
            booster.backward(loss_of(boosted, batch), stepper)
            stepper.step()
        self.peak = int(stepper.parameter_bytes(boosted) + state + counter.peak)
        booster.close()


def _peaks(world: World, cases: list[tuple[str, Plan]]) -> list[int]:
    torch.set_num_threads(1)
    return [_Measured(kind, plan).peak for kind, plan in cases]


@pytest.mark.parametrize("kind", ["mlp", pytest.param("llama", marks=pytest.mark.full)])
def test_no_rank_has_more_bytes_than_the_budget_of_the_search(
    pool: Pool, kind: str, full: bool
) -> None:
    cases = [
        (kind, *found_plan(kind, axes, above))
        for axes, above in (({"data": 2, "tensor": 2}, 1.0), ({"data": 4}, 1.3))[: 1 + full]
    ]
    assert any("recompute" in plan.to_yaml() for _, plan, _ in cases)
    for peaks in pool.run(_peaks, 4, [(kind, plan) for kind, plan, _ in cases]):
        for (kind, plan, memory), peak in zip(cases, peaks, strict=True):
            assert plan.operators is not None
            assert peak <= plan.operators.peak <= memory, (kind, peak, plan.operators.peak)


def test_a_plan_of_operators_is_read_as_it_was_written() -> None:
    plan = random_plan("mlp", {"data": 4}, 3, ("keep", "recompute"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    held = plan.memory
    assert 0 < held.gradients == held.parameters
    assert held.optimizer_state == 2 * held.parameters


def _edited(world: World, text: str) -> str:
    try:
        model, _ = build("mlp")
        Booster(plan=Plan.from_yaml(text), verbose=False).boost(model, None)
    except GulliverError as error:
        return str(error)
    return ""


EDITS = [
    # What is edited, and what the message says beside the two lines.
    ("ddp: null", "ddp: {bucket_mb: 25}", ["operators: given (line", "ddp: given (line"]),
    (
        'data: "rows"',
        'data: "heads"',
        ["data: heads (line", "columns"],
    ),
    (
        '- "1"',
        '- "0"',
        ["blocks[0].blocks[0]: 0 (line", "blocks[1].blocks[0]: 0 (line", "same block"],
    ),
]


@pytest.mark.parametrize("number", range(3))
def test_contradictory_edits_name_both_lines(pool: Pool, number: int) -> None:
    old, new, told = EDITS[number]
    text = edited_plan().to_yaml()
    assert old in text, text
    for found in pool.run(_edited, 2, text.replace(old, new, 1)):
        assert all(part in found for part in told), found


def edited_plan() -> Plan:
    """A plan in which each block has operators of its own."""
    for seed in range(50):
        plan = random_plan("mlp", {"data": 2}, seed, ("keep",))
        assert plan.operators is not None
        if 'data: "rows"' in plan.to_yaml() and len(plan.operators.blocks) == 4:
            return plan
    raise AssertionError("no such plan")


def test_inexact_operators_are_rejected() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    with pytest.raises(GulliverError, match=r"dropout in '1'.*set p to 0"):
        find_operators(model, torch.randn(4, 8), cluster_of(2))

    class InPlace(torch.nn.Linear):
        def forward(self, input: Any) -> Any:
            return super().forward(input).mul_(2)

    with pytest.raises(GulliverError, match="mul_ in the model"):
        find_operators(InPlace(8, 8), torch.randn(4, 8), cluster_of(2))


def _other_forward(world: World, plan: Plan) -> list[str]:
    model, batch = build("mlp")
    assert isinstance(model, torch.nn.Sequential)
    boosted, *_ = Booster(plan=plan, verbose=False).boost(model, None)
    found = []
    for given in (batch[:4], batch):
        try:
            boosted(given)
            found.append("ran")
        except GulliverError as error:
            found.append(str(error))
        model[1] = torch.nn.Tanh()
    return found


def test_another_batch_or_forward_than_planned_is_refused(pool: Pool) -> None:
    plan = random_plan("mlp", {"data": 2}, 0, ("keep",))
    for shorter, other in pool.run(_other_forward, 2, plan):
        assert re.search("float64 8 x 16.* 0 float64 4 x 16", shorter)
        assert "tanh" in other


def test_recomputing_from_dropped_input_names_both_lines() -> None:
    model, batch = build("mlp")
    problem = problem_of(model, batch_of(batch), (2,), cluster_of(2))
    picks = [[Pick(0, "keep") for _ in block.operators] for block in problem.blocks]
    block, place = next(
        (n, i)
        for n, numbers in enumerate(problem.graph.blocks)
        for i, node in enumerate(numbers)
        if problem.graph.nodes[node].name.endswith("add")
    )
    picks[block][place] = Pick(0, "recompute")  # what it adds is in no backward, and is not kept
    rows = tuple(map(tuple, picks))
    found = JointPlan(rows, joint_cost(problem.blocks, rows), 0.0, False, 0.0)
    plan = plan_from(problem, found, Mesh("cpu", {"data": 2}), form_of(batch_of(batch)), 0)
    with pytest.raises(GulliverError) as told:
        check_operators(Plan.from_yaml(plan.to_yaml()), model, None)
    lines = r"saved: recompute \(line \d+\) and .*saved: keep \(line \d+\)"
    assert re.search(lines, str(told.value)), told.value


def _chosen(world: World, kind: str) -> tuple[float, float, bool]:
    """Errors of the loss and of the gradients, and whether the optimizer moves the parameters."""
    torch.set_num_threads(1)
    wanted, grads = one_process(kind)
    model, batch = build(kind)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"operators": True, "verbose": False}
    samples = 2 * BATCH if kind == "mlp" else BATCH
    cluster = cluster_of(world.size)
    engine = auto_engine(model, optimizer, cluster, batch=batch, samples=samples, **options)
    given = (batch,) if kind == "mlp" else batch
    loss = engine.run(given, lambda out, _: out if out.ndim == 0 else out.square().mean())
    found = engine.optimizer.full_gradients()
    error = max(float((found[name] - grad).abs().max()) for name, grad in grads.items())
    engine.optimizer.step()
    after = dict(engine.booster.release(engine.model, engine.optimizer).named_parameters())
    moved = all(
        torch.allclose(after[name], whole[name] - 0.1 * grad, rtol=0, atol=BAR)
        for name, grad in grads.items()
    )
    return abs(loss - wanted), error, moved


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=() if (kind, ranks) == ("llama", 2) else pytest.mark.full)
        for kind in ("mlp", "llama", "gpt2")
        for ranks in (1, 2, 4)
    ],
)
def test_what_auto_engine_chooses_steps_as_one_process_does(
    pool: Pool, kind: str, ranks: int
) -> None:
    for loss, gradient, moved in pool.run(_chosen, ranks, kind):
        assert loss < BAR
        assert gradient < BAR
        assert moved


def _one_fails(world: World) -> list[str]:
    found = list[str]()
    for wrong in (world.rank == 1, True):
        layers = [torch.nn.Linear(8, 8), *([torch.nn.Dropout(0.1)] if wrong else [])]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"batch": torch.randn(4, 8), "samples": 4, "verbose": False}
        with pytest.raises(GulliverError) as told:
            auto_engine(model, optimizer, cluster_of(2), operators=True, **options)
        found.append(str(told.value))
    return found


def test_planning_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    first, other = pool.run(_one_fails, 2)
    assert first == [f"rank 1 failed: {other[0]}", other[1]]
    assert re.match("dropout in '1'", first[1]), first


def _saved(world: World, plan: Plan, folder: str) -> tuple[list[str], bool, list[str]]:
    model, _ = build("mlp")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    booster, found = Booster(plan=plan, verbose=False), list[str]()
    boosted, stepper, *_ = booster.boost(model, optimizer)
    for save in (
        lambda: booster.save(folder, 1, boosted, stepper, use_async=False),
        lambda: booster.save_model(boosted, f"{folder}/model.safetensors"),
        lambda: booster.save_optimizer(stepper, f"{folder}/optimizer"),
        lambda: booster.save_huggingface(boosted, f"{folder}/whole"),
        lambda: booster.load_model(boosted, f"{folder}/given.safetensors"),
    ):
        try:
            save()
            found.append("ran")
        except GulliverError as error:
            found.append(str(error))
    files = sorted(os.listdir(folder))
    whole = booster.release(boosted, stepper).state_dict()
    same = all(torch.equal(whole[name], value) for name, value in wanted.items())
    return found, same, files


def test_a_model_of_operators_is_saved_after_release_alone(pool: Pool, tmp_path: Path) -> None:
    plan = random_plan("mlp", {"data": 2}, 1, ("keep",))
    save_file(build("mlp")[0].state_dict(), tmp_path / "given.safetensors")
    for told, same, files in pool.run(_saved, 2, plan, str(tmp_path)):
        assert all("release" in line and "\n" not in line for line in told), told
        assert same, "release gives the parameters as they were"
        assert files == ["given.safetensors"], "nothing half done"
