"""Edits of a plan that would do nothing, or fail later, are refused or told when it is boosted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from gulliver.booster import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.plan import ComparisonRow, Plan
from gulliver.plan.checks import check_plan
from gulliver.plan.results import Comparison
from gulliver.planner.resolve import resolve
from tests.hybrid.hybrid_cells import Cell, Grid, make_model
from tests.pool import Pool

GATE = "model.layers.1.mlp.gate_proj"


@cache
def _llama() -> nn.Module:
    return make_model(Cell("llama", Grid("plan", 1, {"pp_size": 2})), torch.float64, False)


def _made(plugin: Any) -> Plan:
    cluster = described("cpu-loopback").resized(2)
    return plugin.make_plan(_llama(), _optimizer(_llama()), cluster)


def _resolved(plan: Plan) -> Plan:
    return resolve(plan, _llama(), _optimizer(_llama())).plan


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _edited(plan: Plan, old: str, new: str) -> Plan:
    text = plan.to_yaml()
    assert old in text
    return Plan.from_yaml(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "rules: {}",
            'rules: {"nothing": "colum"}',
            r"tensor: 1 .*and tensor.rules: .*'colum'} \(line \d+\): .* tensor.rules: {}$",
        ),
        (
            "micro_batches: 0",
            "micro_batches: 64",
            r"pipeline.micro_batches: 64 \(line \d+\): .*: 0$",
        ),
        ('schedule: "1f1b"', 'schedule: "dualpipev"', "pipeline.schedule: dualpipev .* 1f1b$"),
        ("extra: -1", "extra: null", r"pipeline.extra: null \(line \d+\): .*extra: -1$"),
        ("kept: []", 'kept: ["model.norm"]', r"parameters: none .* and precision.kept: \['model"),
    ],
    ids=["rules", "micro-batches", "schedule", "extra", "kept"],
)
def test_a_line_of_an_axis_that_is_not_there_is_refused(old: str, new: str, message: str) -> None:
    for plugin in (LowLevelZeroPlugin(1), HybridParallelPlugin(), TorchDDPPlugin()):
        with pytest.raises(GulliverError, match=message) as caught:
            check_plan(_edited(plugin.choices(2), old, new), 2)
        assert "\n" not in str(caught.value)


def test_a_whole_layout_of_an_axis_that_was_taken_out_is_refused_in_a_short_line() -> None:
    plan = _edited(_made(HybridParallelPlugin(tp_size=2)), "    tensor: 2", "    tensor: 1")
    with pytest.raises(GulliverError, match=r"tensor.modules: \.\.\. \(line \d+\)") as caught:
        check_plan(plan, 1)
    assert len(str(caught.value)) < 300


def test_arguments_of_an_axis_of_one_rank_still_make_a_plan_that_loads() -> None:
    plugin = HybridParallelPlugin(pp_style="gpipe", replicate_rest=True, extra=None)
    check_plan(Plan.from_yaml(plugin.choices(2).to_yaml()), 2)


TENSOR = HybridParallelPlugin(tp_size=2)
STAGES = HybridParallelPlugin(pp_size=2)
HALF = LowLevelZeroPlugin(1, chunk_mb=1, precision="bf16")


@pytest.mark.parametrize(
    ("plugin", "old", "new", "message"),
    [
        (
            TENSOR,
            "rules: {}",
            'rules: {gate_proj: "replicate", up_proj: "replicate", down_proj: "replicate"}',
            r"rules.gate_proj \(line \d+\) .*'replicate'.*gate_proj.*column' \(line \d+\)",
        ),
        (TENSOR, "rules: {}", 'rules: {gate_prj: "column"}', r"gate_prj \(line .* 'gate_proj'"),
        (
            HALF,
            "kept: []",
            'kept: ["model.nrm"]',
            r"kept\[0\] \(line \d+\) .*not have: .*'model.norm'",
        ),
        (HALF, "kept: []", 'kept: ["model.layers.0"]', r"kept\[0\] .*'model.layers.0'"),
        (STAGES, "extra: -1", "extra: 3", r"extra: 3 \(line \d+\).*Llama.* null"),
        (STAGES, "extra: -1", "extra: 0", r"extra: 0 \(line \d+\).*Llama"),
        (
            STAGES,
            "after: []",
            'after: ["model.embed_tokens"]',
            r"after\[0\] .*'model.embed_tokens'",
        ),
        (
            STAGES,
            "after: []",
            'after: ["model.layers.0.mlp"]',
            r"after\[0\] .*'model.layers.0.mlp'",
        ),
    ],
    ids=["rule and module", "rule", "kept", "kept list", "3", "0", "embedding", "block"],
)
def test_an_edit_that_the_model_contradicts_is_refused_with_its_line(
    plugin: Any, old: str, new: str, message: str
) -> None:
    plan = _edited(_made(plugin), old, new)
    with pytest.raises(GulliverError, match=message) as caught:
        _resolved(plan)
    assert "\n" not in str(caught.value)


def test_plan_contains_only_rules_that_match_the_model() -> None:
    rules = {GATE: "replicate", "layers.1.mlp.up_proj": "replicate", "no_such": "column"}
    rules["layers.1.mlp.down_proj"] = "replicate"
    plan = _made(HybridParallelPlugin(tp_size=2, tensor_rules=rules))
    assert "no_such" not in plan.tensor.rules
    assert plan.tensor.modules[GATE] == plan.tensor.rules[GATE] == "replicate"
    assert _resolved(Plan.from_yaml(plan.to_yaml())).tensor == plan.tensor
    half = _made(HALF)
    kept = replace(half, precision=replace(half.precision, kept=("model.norm",)))
    assert _resolved(kept).precision.kept == ("model.norm",)


# Predicted and measured

PLUGINS: list[Callable[[], Any]] = [
    *(
        lambda stage=stage: LowLevelZeroPlugin(stage, chunk_mb=1, verbose=False)
        for stage in (1, 2, 3)
    ),
    lambda: HybridParallelPlugin(tp_size=2, verbose=False),
]


def _predicted(world: World) -> list[tuple[str, Plan, Plan, Comparison, Comparison]]:
    """Plans with and without a sample, and what is compared after some steps of each."""
    ids = torch.arange(12).reshape(2, 6) % 16
    data, cluster = {"input_ids": ids, "labels": ids}, described("cpu-loopback").resized(2)
    found = []
    for make in PLUGINS:
        for machines in (None, cluster):
            model = make_model(Cell("llama", Grid("plan", 1, {"tp_size": 2})), torch.float64, True)
            plans = [
                make().make_plan(model, _optimizer(model), machines, sample)
                for sample in (data, None)
            ]
        compared = []
        for booster in (Booster(plan=plans[0], verbose=False), Booster(make())):
            model = make_model(Cell("llama", Grid("plan", 1, {"tp_size": 2})), torch.float64, True)
            model, optimizer, *_ = booster.boost(model, _optimizer(model))
            for _ in range(3):
                booster.backward(model(**data).loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            compared.append(booster.compare())
        found.append((booster.plan.summary(), plans[0], plans[1], compared[0], compared[1]))
    return found


def test_seconds_are_predicted_with_a_sample_and_said_to_be_missing_without(pool: Pool) -> None:
    for quiet, sampled, plain, first, second in pool.run(_predicted, 2)[0]:
        seconds = sampled.predicted.seconds
        assert min(seconds.compute, seconds.update, seconds.exposed) > 0
        assert seconds.step > plain.predicted.seconds.step
        assert sampled.predicted.cluster == plain.predicted.cluster != ""
        assert "predicted step on" in sampled.summary()
        assert "excluding those that depend on the batch" in plain.summary()
        assert "no seconds are predicted: make_plan(..., sample=batch)" in quiet
        assert "gulliver probe" in quiet
        assert first["step"].error is not None
        assert second["step"].error is None
        assert second["step"].measured > 0
        assert "not predicted" in str(second)
        assert "not predicted" not in str(first)
        assert second["parameters"].error == 0


def test_zero_bytes_are_predicted_and_zero_seconds_are_not() -> None:
    assert ComparisonRow("gradients", "bytes", 0, 4).error == -1
    assert ComparisonRow("step", "s", 0.0, 4.0).error is None
