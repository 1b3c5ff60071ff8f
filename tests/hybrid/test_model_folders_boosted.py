"""Boosted models get transformers' values from folders whose files have other tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.booster import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    lazy_parameters,
)
from gulliver.comm import World
from tests.hybrid.hybrid_cells import saved_weights
from tests.models.family_models import config_of
from tests.pool import Pool

transformers = pytest.importorskip("transformers")

KINDS = ("gpt_neox", "mixtral")
QUIET = {"verbose": False}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (TorchDDPPlugin, {}),
    "zero 2": (LowLevelZeroPlugin, {"stage": 2, "chunk_mb": 0.01}),
    "zero 3": (LowLevelZeroPlugin, {"stage": 3, "chunk_mb": 0.01}),
    "gemini": (GeminiPlugin, {"memory_limit": "64MiB"}),
    "tensor": (HybridParallelPlugin, {"tp_size": 2}),
    "stages": (HybridParallelPlugin, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}),
}
FILLED = ("zero 3", "gemini", "tensor", "stages")
"""Ways that take `weights=`."""


def built(kind: str, meta: bool, seed: int) -> Any:
    config = config_of("causal", kind)
    torch.manual_seed(seed)
    if meta:
        with lazy_parameters():
            return transformers.AutoModelForCausalLM.from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def loaded(world: World, kinds: tuple[str, ...], root: Path) -> dict[str, dict[str, Tensor]]:
    """The whole weights after each way to fill a model from a folder."""
    found = {}
    for kind in kinds:
        for name, (plugin, options) in WAYS.items():
            if plugin is not TorchDDPPlugin:
                options = {**options, **QUIET}
            for meta in (False, True) if name in FILLED else (False,):
                more = {"weights": root / kind} if meta else {}
                booster = Booster(plugin=plugin(**options, **more))
                model = built(kind, meta, seed=1)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                model, optimizer, *_ = booster.boost(model, optimizer)
                if not meta:
                    booster.load_model(model, root / kind)
                found[f"{kind}, {name}, {meta}"] = saved_weights(booster, model)
    return found


@pytest.mark.deadline(240)
@pytest.mark.parametrize("kind", KINDS)
def test_boosted_models_have_the_values_of_from_pretrained(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    built(kind, False, seed=2).save_pretrained(tmp_path / kind)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).state_dict()
    for found in pool.run(loaded, 2, (kind,), tmp_path, deadline_s=200):
        assert len(found) == len(WAYS) + len(FILLED)
        for way, weights in found.items():
            assert weights.keys() <= wanted.keys(), way
            assert weights.keys() >= {n for n in wanted if n != "lm_head.weight"}, way
            for name, value in weights.items():
                assert torch.equal(value, wanted[name]), (way, name)
