"""Plans: read back equal, edited by hand, checked line by line, run as they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gulliver.booster import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.io.files import to_yaml
from gulliver.memory import region_of
from gulliver.plan import Model, Plan, Predicted
from gulliver.plan.checks import check_plan
from gulliver.plan.results import MemoryPlan
from gulliver.plan.tree import ChunkPlan, Mesh, ZeroPlan
from tests.hybrid.hybrid_cells import (
    Cell,
    Grid,
    criterion,
    make_model,
    make_optimizer,
    reference,
    samples,
    saved_weights,
)
from tests.parity import largest_error
from tests.pool import Pool

PLAN = Plan(
    plugin="LowLevelZeroPlugin",
    mesh=Mesh("cpu", {"data": 4}),
    zero=ZeroPlan(
        stage=2,
        chunks=(
            ChunkPlan(("a.weight", "a.bias"), 4096, 96, "float32"),
            ChunkPlan(("no: 'quotes' # \u00e9\u2028",), 64, 0, "float64"),
        ),
    ),
    model=Model("Net", 1234567, 1200000, "AdamW"),
    predicted=Predicted(bytes=MemoryPlan(4 * 2**20, 2**20, 2**21)),
    reasons={"mesh.torus": "torus: 4.1 ms against 11 ms flat"},
)
LLAMA = "llama"

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


# Files


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_any_nested_values_are_read_back_as_they_were(values: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(values)) == values


def _load(text: str, tmp_path: Path) -> Plan:
    path = tmp_path / "plan.yaml"
    whole = f"{text}\nend: true\n" if text.startswith("version:") else text
    path.write_text(whole, encoding="utf-8")
    return Plan.load(path)


@given(
    st.dictionaries(TEXT, TEXT, max_size=3),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.floats(0, 1e6),
    st.lists(TEXT, max_size=3).map(tuple),
)
def test_any_plan_is_read_back_as_it_was(
    styles: dict[str, str], cut: tuple[int, ...], norm: float, paths: tuple[str, ...]
) -> None:
    plan = replace(
        PLAN,
        tensor=replace(PLAN.tensor, modules=styles),
        pipeline=replace(PLAN.pipeline, cut=cut, after=paths),
        max_norm=norm,
        recompute=paths,
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_an_edited_plan_loads_with_its_lines(tmp_path: Path) -> None:
    plan = _load(PLAN.to_yaml().replace("stage: 2", "stage: 1  # by hand"), tmp_path)
    assert PLAN.zero is not None
    assert plan == replace(PLAN, zero=replace(PLAN.zero, stage=1))
    lines = PLAN.to_yaml().splitlines()
    assert lines[plan.lines["zero.stage"] - 1] == "  stage: 2"
    assert plan.describe_field("zero.stage") == f"zero.stage: 1 (line {plan.lines['zero.stage']})"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stage: 2", "stagee: 2", r"unknown key 'stagee' \(line \d+\): did you mean 'stage'"),
        ("stage: 2", "stage: 4", r"zero.stage: 4 \(line \d+\): it must be one of 0, 1, 2, 3"),
        ("chunk_bytes: 4194304", "chunk_bytes: 0", "chunk_bytes: 0 .*: it must be at least 1"),
        ("stage: 2", "stage: 2\n  stage: 1", "has zero.stage twice, on lines"),
        ("version: 1\n", "", "has no version; add the line `version: 1`"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = PLAN.to_yaml()
    assert old in text
    with pytest.raises(GulliverError, match=message) as caught:
        _load(text.replace(old, new, 1), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_at_any_line_is_refused(tmp_path: Path) -> None:
    path, part = tmp_path / "plan.yaml", tmp_path / "part.yaml"
    replace(PLAN, max_norm=1.0).save(path)
    assert Plan.load(path) == replace(PLAN, max_norm=1.0)
    text = path.read_text(encoding="utf-8")
    *lines, last = text.splitlines(keepends=True)
    assert last == "end: true\n"
    for count in [n for n, line in enumerate(lines) if n and not line.startswith(" ")]:
        part.write_text("".join(lines[:count]), encoding="utf-8")
        with pytest.raises(GulliverError, match=r"does not end with .end: true"):
            Plan.load(part)
    # A section that was taken out by hand is another thing than a cut.
    part.write_text(text.replace("check_batches: true\n", ""), encoding="utf-8")
    assert Plan.load(part) == Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match=r"nowhere\.yaml does not exist"):
        Plan.load(tmp_path / "nowhere.yaml")


# Contradictions

HYBRID = HybridParallelPlugin(tp_size=2, verbose=False)


def _loaded(plan: Plan, **edits: str) -> Plan:
    """A plan from its text, with lines replaced: old=new, by name of the last key."""
    text = plan.to_yaml()
    for key, value in edits.items():
        rows = [n for n, row in enumerate(text.splitlines()) if row.strip().startswith(f"{key}:")]
        assert rows, key
        lines = text.splitlines()
        head = lines[rows[0]].partition(":")[0]
        lines[rows[0]] = f"{head}: {value}"
        text = "\n".join(lines) + "\n"
    return Plan.from_yaml(text)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"tensor": "4"}, r"mesh.axes: .*tensor 4 \(line \d+\) make 8 ranks, but there are 4"),
        (
            {"sequence": "2", "data": "1"},
            r"sequence: 2 \(line \d+\) and sequence.ulysses",
        ),
        ({"pipeline": "2", "data": "1", "cut": "[1, 2, 3]", "chunks_per_rank": "1"}, "3 stages"),
        ({"cut": "[1, 2]"}, r"pipeline: 1 \(line \d+\) and pipeline.cut: \[1, 2\] \(line \d+\)"),
        ({"mode": "ring_attn"}, r"sequence: 1 \(line \d+\) and sequence.mode: ring_attn"),
        ({"mode": "ring", "tensor": "1", "data": "4"}, r"tensor: 1 \(line \d+\) and sequence.mode"),
        (
            {"tuning": "auto"},
            r"tensor: 2 \(line \d+\) and zero.tuning: auto \(line \d+\)",
        ),
        ({"broadcast_buffers": "true"}, r"tensor: 2 .* and zero.broadcast_buffers: True"),
        ({"torus": "{a: 2, b: 2}"}, r"tensor: 2 \(line \d+\) and mesh.torus"),
        ({"ddp": "{}"}, r"zero: given \(line \d+\) and ddp: given \(line \d+\)"),
        ({"rank_order": "[0, 1]"}, "must name each of the 4 ranks"),
    ],
    ids=str,
)
def test_contradictory_values_name_both_lines(edits: dict[str, str], message: str) -> None:
    plan = _loaded(HYBRID.choices(4), **edits)
    with pytest.raises(GulliverError, match=message) as caught:
        check_plan(plan, 4)
    assert "\n" not in str(caught.value)


def _llama(shared: bool = True) -> Any:
    """Four blocks, with a loss in float64 of its own, unless a plan that shares puts one in."""
    return make_model(Cell(LLAMA, Grid("plan", 1, {"pp_size": 2})), torch.float64, wired=shared)


def _made(plugin: Any, ranks: int, model: Any = None) -> tuple[Plan, Any]:
    model = model or _llama()
    cluster = described("cpu-loopback").resized(ranks)
    return plugin.make_plan(model, make_optimizer(model), cluster), model


@pytest.mark.parametrize(
    ("plugin", "edits", "message"),
    [
        (
            {"tp_size": 2},
            {"model.layers.0.mlp.down_proj": '"colum"'},
            r"mesh.axes.tensor: 2 \(line \d+\) .*down_proj.*\(line \d+\).*'column'",
        ),
        (
            {"pp_size": 2},
            {"cut": "[3, 4]"},
            r"cut: \[3, 4\] \(line \d+\) .*7.* 4 ",
        ),
        ({"pp_size": 2}, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({}, {"parameters": "1"}, r"model.parameters: 1 \(line \d+\)"),
    ],
    ids=["style", "cut", "schedule", "model"],
)
def test_unknown_module_in_plan_is_named_with_line(
    plugin: dict[str, Any], edits: dict[str, str], message: str
) -> None:
    plan, model = _made(HybridParallelPlugin(**plugin, verbose=False), 2)
    text = plan.to_yaml()
    if "parameters" in edits:
        text = text.replace(f"  parameters: {plan.model.parameters}", "  parameters: 1")
        edited = Plan.from_yaml(text)
    else:
        named = {k if k.isidentifier() else f'"{k}"': v for k, v in edits.items()}
        edited = _loaded(plan, **named)
    from gulliver.planner.resolve import resolve

    with pytest.raises(GulliverError, match=message):
        resolve(edited, model, make_optimizer(model))


# Running


def _small(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train_small(world: World, booster: Booster, steps: int = 3) -> list[torch.Tensor]:
    model, optimizer = _small()
    model, boosted, *_ = booster.boost(model, optimizer)
    for step in range(steps):
        x = torch.full((2, 5), 0.1 * (step + 1) + world.rank).double()
        booster.backward(model(x).square().sum(), boosted)
        boosted.step()
        boosted.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


WAYS = {
    "ddp": lambda: TorchDDPPlugin(verbose=False),
    "zero 0": lambda: LowLevelZeroPlugin(0, chunk_mb=1e-4, verbose=False),
    "zero 1, clipped": lambda: LowLevelZeroPlugin(1, chunk_mb=1e-4, max_norm=0.1, verbose=False),
    "zero 2, torus": lambda: LowLevelZeroPlugin(2, 4.0, axes={"a": 2, "b": 1}, verbose=False),
    "zero 3": lambda: LowLevelZeroPlugin(3, chunk_mb=1e-4, verbose=False),
    "zero 1, bf16": lambda: LowLevelZeroPlugin(1, 4.0, precision="bf16", verbose=False),
    "hybrid": lambda: HybridParallelPlugin(zero_stage=2, verbose=False),
}


def _timeless(plan: Plan) -> Plan:
    """A plan without the seconds of a cluster, which nobody asks when a model is boosted."""
    kept = plan.predicted
    return replace(plan, predicted=Predicted(bytes=kept.bytes, fullest=kept.fullest))


def _runs_again(world: World) -> list[str]:
    """Names of the plugins whose loaded plan does not do what the plugin did."""
    wrong = []
    for name, make in WAYS.items():
        booster = Booster(make())
        wanted = _train_small(world, booster)
        plan = booster.plan
        again = Booster(plan=Plan.from_yaml(plan.to_yaml()), verbose=False)
        found = _train_small(world, again)
        model, optimizer = _small()
        made = make().make_plan(model, optimizer)
        same = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        if not (same and again.plan == plan and _timeless(made) == plan):
            wrong.append(name)
    return wrong


def test_a_loaded_plan_of_each_plugin_does_what_the_plugin_did(pool: Pool) -> None:
    assert pool.run(_runs_again, 2) == [[], []]


@pytest.mark.parametrize(
    "plugin",
    [
        {"tp_size": 2, "zero_stage": 1},
        {"pp_size": 2, "zero_stage": 2},
        {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "zero_stage": 3},
    ],
    ids=str,
)
def test_one_process_plans_for_many_ranks_as_they_do(pool: Pool, plugin: dict[str, Any]) -> None:
    wanted, _ = _made(HybridParallelPlugin(**plugin, chunk_mb=0.01, verbose=False), 4)
    for plan, memory, chunks in pool.run(_planned, 4, plugin):
        assert plan == _timeless(wanted)
        assert memory == plan.memory.total
        assert chunks == [chunk.tensors for chunk in plan.chunks]


def _planned(world: World, plugin: dict[str, Any]) -> tuple[Plan, int, list[Any]]:
    model = _llama()
    booster = Booster(HybridParallelPlugin(**plugin, chunk_mb=0.01, verbose=False))
    _, optimizer, *_ = booster.boost(model, make_optimizer(model))
    from gulliver.comm.collectives import broadcast_object

    fullest = booster.plan.predicted.fullest
    memory = broadcast_object(sum(optimizer.memory().values()), fullest)
    chunks = [tuple(c.chunk.parameters) for c in optimizer.all_chunks]
    return booster.plan, memory, broadcast_object(chunks)


EDITS: dict[str, dict[str, str]] = {
    "tensor": {"data": "1", "tensor": "2"},
    "style": {
        "data": "1",
        "tensor": "2",
        "modules": '{"model.layers.1.mlp.up_proj": "replicate", '
        '"model.layers.1.mlp.gate_proj": "replicate", '
        '"model.layers.1.mlp.down_proj": "replicate"}',
    },
    "cut": {"data": "1", "pipeline": "2", "cut": "[1, 3]"},
    "schedule": {"data": "1", "pipeline": "2", "schedule": "gpipe", "micro_batches": "4"},
    "recompute": {"recompute": '["model.layers.1", "model.layers.2"]'},
    "recompute in stages": {"data": "1", "pipeline": "2", "recompute": '["model.layers.1"]'},
    "chunk bytes": {"chunk_bytes": "100000000"},
    "stage": {"stage": "3"},
    "ring": {"data": "1", "sequence": "2", "mode": "ring_attn", "inner": "2", "layout": "zigzag"},
    "exchange": {"data": "1", "sequence": "2", "mode": "all_to_all", "ulysses": "2"},
    "split gather": {"data": "1", "tensor": "2", "mode": "split_gather"},
    "norm": {"max_norm": "0.05"},
}
"""What a person changes, by name of a case: value of each key."""


def _edited(world: World, text: str, names: list[str]) -> dict[str, tuple[float, Any]]:
    """Largest error of the weights after some steps, and what is seen of the edit."""
    found = {}
    for name in names:
        plan = _loaded(Plan.from_yaml(text), **EDITS[name])
        shared = plan.mesh.of("tensor") * plan.mesh.of("sequence") > 1
        booster, model = Booster(plan=plan, verbose=False), _llama(shared)
        counted = _count_forwards(model)
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))
        grid = Grid("edited", 2 * booster.plan.mesh.of("data"), {"pp_size": 2})
        cell = Cell(LLAMA, grid, clip=plan.max_norm)
        for step in range(2):
            data = samples(cell, optimizer.mesh.data.rank, step, torch.float64)
            if optimizer.pipeline is not None:
                weight = "shifted_labels"
                booster.execute_pipeline(iter([data]), model, None, optimizer, weight=weight)
            else:
                booster.backward(criterion(model(**data), data), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        weights = saved_weights(booster, model)
        error = largest_error(weights, reference(cell, torch.float64, 2).weights)
        found[name] = error, _seen(booster, model, optimizer, counted)
    return found


def _count_forwards(model: Any) -> list[int]:
    counted = [0] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):

        def count(x: Any, number: int = number, inner: Any = layer.mlp.act_fn.forward) -> Any:
            counted[number] += 1
            return inner(x)

        layer.mlp.act_fn.forward = count
    return counted


def _seen(booster: Booster, model: Any, optimizer: Any, counted: list[int]) -> dict[str, Any]:
    regions = {n: region_of(p) for n, p in model.named_parameters()}
    schedule = optimizer.pipeline
    return {
        "cut": sorted(n.split(".", 1)[1] for n, r in regions.items() if r is not None),
        "blocks": [any(True for _ in layer.parameters()) for layer in model.model.layers],
        "forwards": counted,
        "chunks": len(optimizer.all_chunks),
        "planned": len(booster.plan.chunks),
        "stage": optimizer.stage,
        "schedule": None if schedule is None else (schedule.style, schedule.micro_batches),
        "sequence": optimizer.mesh.sequence.plan,
        "norm": float(optimizer.options.max_norm),
    }


def test_an_edit_takes_effect_and_trains_as_one_process(pool: Pool) -> None:
    plugin = HybridParallelPlugin(zero_stage=1, chunk_mb=0.01, verbose=False)
    start, _ = _made(plugin, 2)
    first, second = pool.run(_edited, 2, start.to_yaml(), list(EDITS))
    for name in EDITS:
        assert max(first[name][0], second[name][0]) < 1e-10, name
    seen, other = ({n: s for n, (_, s) in found.items()} for found in (first, second))
    assert any("up_proj" in n for n in seen["tensor"]["cut"])
    assert "layers.1.mlp.up_proj.weight" in seen["tensor"]["cut"]
    assert "layers.1.mlp.up_proj.weight" not in seen["style"]["cut"]
    assert "layers.2.mlp.up_proj.weight" in seen["style"]["cut"]
    assert seen["cut"]["blocks"] == [True, False, False, False]
    assert other["cut"]["blocks"] == [False, True, True, True]
    assert seen["schedule"]["schedule"] == ("gpipe", 4)
    assert seen["recompute"]["forwards"] == [2, 4, 4, 2]
    assert seen["chunk bytes"]["chunks"] == 1 < seen["stage"]["chunks"]
    assert seen["stage"]["stage"] == 3
    assert (seen["ring"]["sequence"].inner, seen["ring"]["sequence"].layout) == (2, "zigzag")
    assert seen["exchange"]["sequence"].ulysses == 2
    assert seen["norm"]["norm"] == 0.05
    assert all(case["planned"] == case["chunks"] for case in seen.values())
    forwards = seen["recompute in stages"]["forwards"]
    assert forwards[1] == 2 * forwards[0] > 0


# Predicted and measured


def _compared(world: World, stage: int) -> tuple[Any, Plan, Plan]:
    model, optimizer = _small()
    plugin = LowLevelZeroPlugin(stage, chunk_mb=4.0, gather_ahead=9, verbose=False)
    sample = torch.ones(2, 5).double()
    plan = plugin.make_plan(model, optimizer, sample=sample)
    booster = Booster(plan=Plan.from_yaml(plan.to_yaml()), verbose=False)
    before = [p.grad for p in model.parameters()]
    assert before == [None] * len(before)
    model, boosted, *_ = booster.boost(model, optimizer)
    for _ in range(3):
        booster.backward(model(sample).square().sum(), boosted)
        boosted.step()
        boosted.zero_grad()
    next(iter(model.parameters())).sum().item()
    return booster.compare(), plan, booster.plan


@pytest.mark.parametrize("stage", [0, 1])
def test_compare_shows_measured_and_predicted(pool: Pool, stage: int) -> None:
    for found, planned, plan in pool.run(_compared, 2, stage):
        assert plan.work == planned.work
        assert found["step"].measured > 0 < found["step"].predicted
        assert plan.predicted.seconds == planned.predicted.seconds
        for kind in ("parameters", "gradients"):
            assert found[kind].error == 0, kind
        assert abs(found["total"].error) < 0.2
        assert "optimizer_state" in str(found)


def _sending(world: World) -> dict[str, float]:
    """Errors of the bytes that a rank is predicted to send in a step, by how the model lies."""
    sample = samples(Cell(LLAMA, Grid("plan", 1, {})), 0, 0, torch.float64)
    sample = {name: torch.cat([value] * 8) for name, value in sample.items()}
    found = {}
    for name, arguments in {
        "stage 0": {},
        "stage 3": {"zero_stage": 3, "chunk_mb": 0.01},
        "tensor": {"tp_size": 2},
        "tensor, recomputed": {"tp_size": 2, "checkpoint_activations": True},
        "split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
        "Ulysses": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
        "ring": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
        "pipeline": {"pp_size": 2},
    }.items():
        model = _llama()
        optimizer = make_optimizer(model)
        plugin = HybridParallelPlugin(**arguments, check_batches=False, verbose=False)
        plan = plugin.make_plan(model, optimizer, described("cpu-loopback").resized(2), sample)
        booster = Booster(plan=plan, verbose=False)
        model, boosted, *_ = booster.boost(model, optimizer)
        for _ in range(3):
            if "pp_size" in arguments:
                booster.execute_pipeline(iter([sample]), model, None, boosted)
            else:
                booster.backward(model(**sample).loss, boosted)
            boosted.step()
            boosted.zero_grad()
        row = booster.compare()["sent"]
        assert row.measured > 0
        assert row.predicted == plan.predicted.sent
        found[name] = row.error or 0.0
    return found


def test_the_bytes_that_a_step_sends_are_those_predicted(pool: Pool) -> None:
    found, _ = pool.run(_sending, 2)  # a plan is of the first rank
    assert max(map(abs, found.values())) < 0.05, found


def test_a_sample_gives_seconds_to_every_kind_of_plan_for_a_described_cluster() -> None:
    model = _llama()
    cluster = described("8xh100-infiniband").resized(4)
    cell = Cell(LLAMA, Grid("plan", 1, {"pp_size": 2}))
    sample = samples(cell, 0, 0, torch.float64)
    kinds = {
        "all_reduce": {"tp_size": 2},
        "reduce_scatter": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
        "all_to_all": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
        "sends": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
        "bubble": {"pp_size": 2},
        "recompute": {"checkpoint_activations": True},
        "all_gather": {"zero_stage": 3},
    }
    for kind, arguments in kinds.items():
        plugin = HybridParallelPlugin(**arguments, verbose=False)
        plan = plugin.make_plan(model, make_optimizer(model), cluster, sample)
        assert getattr(plan.predicted.seconds, kind) > 0, kind
        assert plan.predicted.cluster == cluster.name
        assert plan.memory.activations > 0
    assert all(p.grad is None for p in model.parameters())


def _tuned(world: World) -> tuple[str, list[Any], list[Any], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    booster = Booster(LowLevelZeroPlugin(chunk_mb="again", verbose=False))
    model, boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # A tuning takes more steps where timings are noisy.
    steps = 0
    while boosted.tuner.tuning and steps < 40:
        booster.backward(model(torch.ones(2, 300)).sum(), boosted)
        boosted.step()
        boosted.zero_grad()
        steps += 1
    assert 0 < steps < 40
    plan = booster.plan
    held = [tuple(s.name for s in c.chunk.layout.slots) for c in boosted.all_chunks]
    again = Booster(plan=plan, verbose=False)
    twin = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    _, other, *_ = again.boost(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert again.plan.chunks == plan.chunks
    assert other.tuner is None
    assert plan.zero is not None
    return plan.zero.tuning, [c.tensors for c in plan.chunks], held, plan.zero.chunk_bytes


def test_tuning_writes_back_what_it_found(pool: Pool) -> None:
    for tuning, planned, held, count in pool.run(_tuned, 2):
        assert tuning == "off"
        assert planned == held
        assert count != 4 * 2**20 or len(planned) == 1
