"""One model, forwards of several degrees of sequence parallelism: gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin, sequence_degree
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid.hybrid_cells import (
    Cell,
    criterion,
    grid,
    largest,
    make_model,
    make_optimizer,
    samples,
)
from tests.pool import Pool
from tests.references import computed_once

pytest.importorskip("transformers")

WAYS = {
    "llama": ("ring_attn", 1),
    "mistral": ("all_to_all", 2),
    "stdit3": ("all_to_all", 1),
}
"""Sequence mode and tensor ranks of each model."""


def _cell(family: str) -> Cell:
    return Cell(family, grid("degrees", 4))


@computed_once
def _alone(family: str, places: int, step: int) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and mean gradients of one process that reads the batches of all places."""
    model, total = make_model(_cell(family), torch.float64, wired=False), 0.0
    for place in range(places):
        data = samples(_cell(family), place, step, torch.float64)
        loss = criterion(model(**data), data) / places
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _loss(model: nn.Module, family: str, degree: int, step: int) -> Tensor:
    with sequence_degree(model, degree) as (place, _):
        data = samples(_cell(family), place, step, torch.float64)
        return criterion(model(**data), data)


def _varied(world: World, families: list[str]) -> dict[str, float]:
    """Errors of gradients of forwards of changing degree, and of two that are in flight."""
    errors = {}
    for family in families:
        mode, tensor = WAYS[family]
        whole = world.size // tensor
        plugin = HybridParallelPlugin(
            tensor, sp_size=whole, sequence_parallelism_mode=mode, zero_stage=1, verbose=False
        )
        booster, model = Booster(plugin=plugin), make_model(_cell(family), torch.float64, True)
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))

        for step, degree in enumerate((whole, 1, 2, whole)):
            booster.backward(_loss(model, family, degree, step), optimizer)
            wanted = _alone(family, whole // degree, step)[1]
            errors[f"{family} {degree}"] = largest(optimizer.full_gradients(), wanted)
            optimizer.zero_grad()
        both = _loss(model, family, 1, 0) + _loss(model, family, whole, 1)
        booster.backward(both, optimizer)
        first, second = _alone(family, whole, 0)[1], _alone(family, 1, 1)[1]
        wanted = {name: first[name] + second[name] for name in first}
        errors[f"{family} in flight"] = largest(optimizer.full_gradients(), wanted)
    return errors


@pytest.mark.deadline(120)
def test_degree_may_differ_from_forward_to_forward(pool: Pool) -> None:
    for errors in pool.run(_varied, 4, list(WAYS)):
        assert max(errors.values()) <= 1e-11, errors


def _refused(world: World) -> list[str]:
    told = []
    for family, settings, sizes in (
        ("llama", {}, {"tp_size": 2}),
        ("llama", {}, {"sp_size": 2}),
        ("gpt2", {"resid_pdrop": 0.1}, {"sp_size": 2}),
        ("llama", {}, {"sp_size": 1, "pp_size": 2}),
    ):
        model = make_model(_cell(family), torch.float64, wired=True)
        for name, value in settings.items():
            setattr(model.config, name, value)
            for block in model.transformer.h:
                block.mlp.dropout.p = value
        mode = {"sequence_parallelism_mode": "ring_attn"} if sizes.get("sp_size", 1) > 1 else {}
        plugin = HybridParallelPlugin(**sizes, **mode, verbose=False)
        model, *_ = Booster(plugin=plugin).boost(model, make_optimizer(model))
        degree = 3 if family == "llama" else 1
        with pytest.raises(GulliverError) as error, sequence_degree(model, degree):
            pass
        told.append(str(error.value))
    return told


def test_a_degree_that_cannot_be_is_refused(pool: Pool) -> None:
    for whole, divisor, drops, stages in pool.run(_refused, 2):
        assert "sequence_parallelism_mode" in whole
        assert "sequence_parallelism_mode" in stages
        assert "does not divide" in divisor
        assert "[1, 2]" in divisor
        assert "dropout is drawn by position" in drops
