"""Blocks compiled before or after boost train as they do without, cut into tensors and stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid.hybrid_cells import largest, make_optimizer
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool

TENSOR = {"tp_size": 2}
STAGES = {"pp_size": 2, "num_microbatches": 2}
PIPED = {**STAGES, "checkpoint_activations": True}
Run = tuple[list[float], dict[str, Tensor]]


def _trained(family: str, plugin: dict[str, Any], when: str, backend: str) -> Run:
    """Losses of two steps, the second of longer sequences, and its gradients."""
    torch._dynamo.reset()
    whole = build(family)

    def compile_blocks() -> None:
        blocks = whole.model.layers if family == "llama" else whole.transformer.h
        for block in blocks:
            block.compile(backend=backend)

    if when == "before":
        compile_blocks()
    booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
    model, optimizer, *_ = booster.boost(whole, make_optimizer(whole))
    if when == "after":
        compile_blocks()
    losses = []
    for length in (9, 12):
        data = batch(family, 2, seed=length, length=length)
        optimizer.zero_grad()
        done = booster.execute_pipeline(iter([data]), model, None, optimizer)
        losses.append(float(done["loss"]))
        gradients = optimizer.full_gradients()
        optimizer.step()
    return losses, gradients


def _error(family: str, plugin: dict[str, Any], when: str, backend: str) -> float:
    losses, gradients = _trained(family, plugin, when, backend)
    traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert traced > 0, "something was compiled"
    wanted, of_eager = _trained(family, plugin, "never", backend)
    error = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    return max(error, largest(gradients, of_eager))


def _errors(world: World, cases: list[Any]) -> list[float]:
    return [_error(*case) for case in cases]


FULL = [
    (family, plugin, when, backend)
    for family in ("llama", "gpt2")
    for plugin in (TENSOR, {**TENSOR, "zero_stage": 3}, STAGES, {**TENSOR, **STAGES}, PIPED)
    for when in ("before", "after")
    for backend in ("aot_eager", "inductor")
]


@pytest.mark.full
@pytest.mark.deadline(600)
def test_compiled_blocks_train_as_others_on_every_grid(pool: Pool) -> None:
    for errors in pool.run(_errors, 4, FULL):
        assert max(errors) <= 1e-7, errors


def _whole(world: World, how: str) -> str:
    torch._dynamo.reset()
    model = build("llama")
    booster = Booster(plugin=HybridParallelPlugin(**TENSOR, verbose=False))
    model, *_ = booster.boost(model, make_optimizer(model))
    call: Any = model
    if how == "wrapped":
        call = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(GulliverError) as raised:
        call(**batch("llama", 2))
    return str(raised.value)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_cut_model_compiled_as_a_whole_is_refused(pool: Pool, how: str) -> None:
    for said in pool.run(_whole, 2, how):
        assert "compiled as one graph: compile its blocks" in said
