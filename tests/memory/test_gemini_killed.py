"""A run under a limit that is killed goes on from its last save, under whatever limit."""

from __future__ import annotations

import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.comm import World
from tests.memory.gemini_killed import KINDS, SAVED, STEPS, adamw, batch_of, model_of, plugin_of
from tests.pool import Pool
from tests.programs import module, run_program


def _resumed(world: World, folder: str) -> list[dict[str, Tensor]]:
    """Values at the end, by limit and kind of death."""
    found = []
    for limit in ("24MiB", None):
        for kind in KINDS:
            plain = LowLevelZeroPlugin(3, verbose=False)
            plugin = plain if limit is None else plugin_of(folder, limit)
            model, booster = model_of(), Booster(plugin=plugin)
            with patch.object(_limited, "Footprint", side_effect=OSError):
                model, optimizer, *_ = booster.boost(model, adamw(model))
            loaded = booster.load(Path(folder) / kind, model, optimizer)
            assert loaded.step == SAVED
            for step in range(loaded.step, STEPS):
                booster.backward(model(batch_of(step)).square().mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.deadline(120)
def test_killed_run_resumes_under_any_limit(pool: Pool, tmp_path: Path) -> None:
    done = run_program(module, "tests.memory.gemini_killed", str(tmp_path), timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KINDS)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == set(KINDS), "the file of the state goes with its process"
    model = model_of()
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
    for ranks in (1, 2):
        for values in (v for found in pool.run(_resumed, ranks, str(tmp_path)) for v in found):
            for name, value in model.state_dict().items():
                close = 0 if ranks == 1 else 1e-5
                torch.testing.assert_close(values[name], value, rtol=0, atol=close)
