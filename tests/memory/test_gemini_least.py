"""The least limit that is stated is true: under it every step is served, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from tests.random_limits import RandomCase, problem


class Penalised(nn.Module):
    """A model whose loss reads all parameters again, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh().square().mean() + self.penalty()

    def penalty(self) -> Tensor:
        return (
            sum((p.square().sum() + p.view(-1)[:2].abs().sum() for p in self.parameters()), 0) / 7
        )  # type: ignore[return-value]

    def outside(self, x: Tensor) -> Tensor:
        return self(x) - torch.stack([(p * p).sum() for p in self.parameters()]).sum() / 9


@pytest.mark.parametrize("early", [False, True])
def test_a_penalty_on_all_parameters_needs_no_more_than_the_least_limit(
    tmp_path: Path, early: bool
) -> None:
    for outside in (False, True):
        runs = []
        for limited in (False, True):
            model = Penalised()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            booster = None
            if limited:
                options = {"disk": f"{tmp_path}:64MiB", "chunk_mb": 0.04, "verbose": False}
                plugin = GeminiPlugin("1GiB", step_in_backward=early, **options)
                moved = plugin.make_plan(model, optimizer).predicted.moved
                assert moved is not None
                plugin = GeminiPlugin(moved.minimum, step_in_backward=early, **options)
                booster = Booster(plugin=plugin)
                with patch.object(_limited, "Footprint", side_effect=OSError):
                    model, optimizer, *_ = booster.boost(model, optimizer)
            for step in range(3):
                x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step))
                loss = model.outside(x) if outside else model(x)
                booster.backward(loss, optimizer) if booster else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            runs.append([value.clone() for value in model.state_dict().values()])
        assert all(map(torch.equal, *runs)), outside


def test_random_models_under_random_limits_keep_to_them(tmp_path: Path) -> None:
    for seed in (*range(3), 21):  # one whose state grows when a layer is first used
        assert not problem(RandomCase(seed), str(tmp_path)), seed
