"""What is wrong is said in a line, on all ranks at once, and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid.hybrid_cells import RING, largest, make_optimizer
from tests.hybrid.hybrid_models import VOCABULARY, batch, build
from tests.parallel.test_pipeline_runs import Table
from tests.pool import Pool

TENSOR = {"tp_size": 2}
SPLIT = {**TENSOR, "sequence_parallelism_mode": "split_gather"}
STAGES = {"pp_size": 2, "num_microbatches": 2}
SHARED = {"sp_size": 2, **RING}


def _boosted(plugin: dict[str, Any], model: Any = None) -> tuple[Booster, Any, Any]:
    model = model or build("llama")
    booster = Booster(plugin=HybridParallelPlugin(**plugin, verbose=False))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def _step(booster: Booster, model: Any, optimizer: Any, data: dict[str, Any]) -> float:
    if optimizer.pipeline is None:
        loss = model(**data).loss
        booster.backward(loss, optimizer)
        return float(loss)
    return float(booster.execute_pipeline(iter([data]), model, None, optimizer)["loss"])


def _unknown(world: World, plugin: dict[str, Any]) -> list[str]:
    run = _boosted(plugin)
    said = []
    for name in ("input_ids", "labels"):
        data = batch("llama", 2, seed=0)
        data["input_ids"] = data["input_ids"].clone()
        data[name][1, 7] = VOCABULARY
        with pytest.raises(GulliverError) as raised:
            _step(*run, data)
        said.append(str(raised.value))
    # Nobody waits for one that stopped: the next step runs.
    assert _step(*run, batch("llama", 2, seed=0)) > 0
    return said


@pytest.mark.parametrize("plugin", [TENSOR, SPLIT, SHARED, STAGES], ids=str)
def test_tokens_and_labels_of_no_vocabulary_are_named_on_every_rank(
    pool: Pool, plugin: dict[str, Any]
) -> None:
    for tokens, labels in pool.run(_unknown, 2, plugin):
        assert (
            "input_ids has token 67, but the model's vocabulary has 67 entries (0 to 66)" in tokens
        )
        assert "labels has label 67, but the model's vocabulary has 67 entries (0 to 66)" in labels


def _generated(world: World) -> bool:
    """Generation in a boosted run as it is by default, where batches are compared."""
    twin = build("llama").eval()
    ids = batch("llama", 2, seed=3)["input_ids"]
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    wanted = twin.generate(ids, **how)
    _, model, _ = _boosted(TENSOR)
    return torch.equal(model.eval().generate(ids, **how), wanted)


def test_a_boosted_model_generates_where_batches_are_compared(pool: Pool) -> None:
    assert all(pool.run(_generated, 2))


def _shape_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a boost changes of a model and its optimizer."""
    modules = [
        (name, id(m), len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    ]
    parameters = [(name, id(p), p.dtype, p.sum().item()) for name, p in model.named_parameters()]
    return [modules, parameters, [[id(p) for p in g["params"]] for g in optimizer.param_groups]]


def _dynamic(model: Any) -> Any:
    model.config.rope_parameters = {"rope_type": "dynamic"}
    return model


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rotary": ({**SHARED, "tp_size": 1, "precision": "bf16"}, _dynamic, "'dynamic'"),
    "no folder": (
        {**TENSOR, "weights": "nowhere"},
        lambda m: m,
        "weights='nowhere' is not a folder",
    ),
    "schedule": ({**STAGES, "pp_style": "dualpipev"}, lambda m: m, "blocks"),
    "blocks": ({**STAGES, "blocks": "model.norm"}, lambda m: m, "'model.norm' is a LlamaRMSNorm"),
    "no module": ({**STAGES, "after": ["model.nrm"]}, lambda m: m, "no module 'model.nrm'"),
}


def _untouched(world: World) -> list[tuple[str, bool]]:
    found = []
    for plugin, change, _ in REFUSED.values():
        model = change(build("llama"))
        optimizer = make_optimizer(model)
        before = _shape_of(model, optimizer)
        with pytest.raises(GulliverError) as raised:
            Booster(plugin=HybridParallelPlugin(**plugin, verbose=False)).boost(model, optimizer)
        found.append((str(raised.value), _shape_of(model, optimizer) == before))
    return found


def test_a_refused_boost_leaves_the_model_as_it_was(pool: Pool) -> None:
    for found in pool.run(_untouched, 2):
        for (said, same), (_, _, wanted) in zip(found, REFUSED.values(), strict=True):
            assert wanted in said
            assert same


"""Arguments that messages name of calls: of the model, of a booster, of execute_pipeline."""


"""Arguments of the functions of sequence parallelism and int8, which no plugin calls so."""


def _dropped(world: World, plugin: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three calls, and the gradients of what all ranks of a line hold whole."""
    model = build("gpt2")
    model.transformer.drop.p = model.transformer.h[0].mlp.dropout.p = 0.3
    torch.manual_seed(world.rank)
    booster, model, optimizer = _boosted({**plugin, "dropout": "alike"}, model)
    data = batch("gpt2", 4, seed=0)
    losses = [_step(booster, model, optimizer, data) for _ in range(3)]
    gradients = optimizer.full_gradients()
    return losses, {name: g for name, g in gradients.items() if "ln_" in name}


@pytest.mark.parametrize("plugin", [TENSOR, SPLIT, SHARED, STAGES], ids=str)
def test_alike_dropout_is_equal_on_ranks_with_equal_inputs(
    pool: Pool, plugin: dict[str, Any]
) -> None:
    (losses, gradients), other = pool.run(_dropped, 2, plugin)
    assert len(set(losses)) == 3
    assert losses == other[0]
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, other[1][name], rtol=1e-10, atol=1e-14), name


def _named_blocks(world: World) -> float:
    """A model that no table knows, cut as the plugin's arguments say; the largest error."""
    torch.manual_seed(0)
    data = torch.arange(12).view(4, 3) % 11, torch.rand(4, dtype=torch.float64)
    whole = Table()
    (whole(*data).square().mean()).backward()
    model = Table()
    model.load_state_dict(whole.state_dict())
    how = {"blocks": "blocks", "everywhere": ["mix"], "extra": 1}
    booster, model, optimizer = _boosted({**STAGES, **how}, model)
    booster.execute_pipeline(iter([data]), model, lambda out, _: out.square().mean(), optimizer)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    return largest(optimizer.full_gradients(), wanted)


def test_the_plugin_takes_what_stack_of_takes(pool: Pool) -> None:
    assert max(pool.run(_named_blocks, 2)) <= 1e-10
