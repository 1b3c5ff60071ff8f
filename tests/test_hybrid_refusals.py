"""What is wrong is said in a line, on all ranks at once, and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.hybrid_cells import RING, make_optimizer
from tests.hybrid_models import VOCABULARY, batch, build
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
        assert "input_ids has token 67, and the model's vocabulary has 67 (0 to 66)" in tokens
        assert "labels has label 67, and the model's vocabulary has 67 (0 to 66)" in labels


def _generated(world: World) -> list[bool]:
    """Generation in a boosted run as it is by default, where batches are compared."""
    twin = build("llama").eval()
    ids = batch("llama", 2, seed=3)["input_ids"]
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    wanted = twin.generate(ids, **how)
    found = []
    for plugin in (SHARED, TENSOR):
        _, model, _ = _boosted(plugin)
        found.append(torch.equal(model.eval().generate(ids, **how), wanted))
    return found


def test_a_boosted_model_generates_where_batches_are_compared(pool: Pool) -> None:
    for found in pool.run(_generated, 2):
        assert all(found)
