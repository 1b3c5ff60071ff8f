"""Lightning's examples under Gulliver's strategies: the losses that its own ddp has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")


from gulliver.booster.plugins import LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.integrations.lightning import GulliverStrategy
from tests.integrations.lightning_models import Autoencoder, Gan, Gpt, Recording, trainer_of
from tests.pool import Pool

MODELS = {"autoencoder": Autoencoder, "gan": Gan, "gpt": Gpt}
STRATEGIES: dict[str, Any] = {
    "gulliver": lambda: "gulliver",
    "zero3": lambda: "gulliver_zero3",
    "gemini": lambda: GulliverStrategy(memory_limit="256MiB"),
    "zero2": lambda: GulliverStrategy(plugin=LowLevelZeroPlugin(2, chunk_mb=0.001, verbose=False)),
    "ddp_plugin": lambda: GulliverStrategy(
        plugin=TorchDDPPlugin(find_unused_parameters=True, verbose=False)
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "64-true": {"precision": "64-true"},
}
TOLERANCE = 2e-6


def losses(world: World, strategy: Any, model: str, **options: Any) -> list[float]:
    module: Recording = MODELS[model]()
    trainer_of(world, strategy, **options).fit(module)
    return [*module.losses, *(p.detach().double().norm().item() for p in module.parameters())]


def compared(world: World, cases: list[tuple[str, str, str]]) -> dict[str, float]:
    """Largest difference from ddp of each case, losses and norms of the weights after it."""
    known: dict[tuple[str, str], torch.Tensor] = {}
    found = {}
    for model, strategy, options in cases:
        if (model, options) not in known:
            known[model, options] = torch.tensor(losses(world, "ddp", model, **OPTIONS[options]))
        here = losses(world, STRATEGIES[strategy](), model, **OPTIONS[options])
        expected = known[model, options]
        assert len(here) == len(expected) > 8
        difference = (torch.tensor(here) - expected).abs().max().item()
        found[f"{model} {strategy} {options}"] = difference
    return found


CASES = [
    *(("autoencoder", "gulliver", o) for o in ("accumulated", "bf16-mixed")),
    *(("autoencoder", strategy, "norm") for strategy in ("zero3", "gemini", "zero2")),
    ("gan", "gulliver", "plain"),
    ("gpt", "zero3", "accumulated"),
]
MORE = [
    *(("autoencoder", "gulliver", options) for options in OPTIONS),
    *(("autoencoder", "ddp_plugin", options) for options in OPTIONS),
    *(("gan", strategy, "plain") for strategy in ("zero2", "ddp_plugin")),
    *(("gpt", strategy, "norm") for strategy in ("gulliver", "zero3", "gemini", "ddp_plugin")),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_losses_are_those_of_ddp(pool: Pool, ranks: int, full: bool) -> None:
    cases = CASES + MORE if full else CASES
    for found in pool.run(compared, ranks, cases, deadline_s=180):
        assert {case: d for case, d in found.items() if not d < TOLERANCE} == {}
