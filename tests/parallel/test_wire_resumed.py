"""Runs with packed messages that are saved and resumed: what packing had lost goes with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from tests.pool import Pool

PACKED: dict[str, Any] = {"force_communication_dtype": True, "error_feedback": True}
PLUGINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDP": (TorchDDPPlugin, {"communication_dtype": "int4"}),
    **{
        f"stage {stage}": (
            LowLevelZeroPlugin,
            {"stage": stage, "chunk_mb": 0.05, "communication_dtype": "int4"},
        )
        for stage in (0, 2, 3)
    },
}


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(
    world: World, name: str, folder: str, first: int, last: int, load: bool, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    """Steps from `first` to `last`; returns parameters, what the log said, and DDP's losses."""
    plugin, given = PLUGINS[name]
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    booster = Booster(plugin=plugin(**given, **PACKED, **options, verbose=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    heard = _Heard()
    logging.getLogger("gulliver").addHandler(heard)
    if load:
        booster.load(Path(folder), model, optimizer)
    logging.getLogger("gulliver").removeHandler(heard)
    for step in range(first, last):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
        booster.backward((model(x) - x.sin()).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            booster.save(Path(folder), step, model, optimizer)
            booster.wait()
    lost = optimizer.feedback.lost() if name == "DDP" else {}
    return {n: p.detach().clone() for n, p in model.named_parameters()}, heard.lines, lost


@pytest.mark.parametrize("name", ["stage 0", "stage 2", "stage 3"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    folder = str(tmp_path / "run")
    whole = pool.run(_run, 2, name, folder, 0, 6, False, {})
    resumed = pool.run(_run, 2, name, folder, 3, 6, True, {})
    for (expected, _, _), (found, lines, _) in zip(whole, resumed, strict=True):
        assert not lines
        for key, value in expected.items():
            assert torch.equal(found[key], value)


def test_ddp_restores_error_feedback(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    saved = pool.run(_run, 2, "DDP", folder, 0, 3, False, {})
    loaded = pool.run(_run, 2, "DDP", folder, 3, 3, True, {})
    for (parameters, _, lost), (_, lines, found) in zip(saved, loaded, strict=True):
        assert not lines
        assert found.keys() == lost.keys() == {n.removeprefix("module.") for n in parameters}
        assert float(sum(value.norm() for value in lost.values())) > 0
        for key, value in lost.items():
            assert torch.equal(found[key], value.view_as(found[key]))
    # It is used up by the first step, whatever buckets there are then.
    stepped = pool.run(_run, 2, "DDP", folder, 3, 4, True, {})
    moved = [not torch.equal(value, loaded[0][2][key]) for key, value in stepped[0][2].items()]
    assert any(moved)


def test_on_other_ranks_it_is_left_out_with_one_line(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    pool.run(_run, 2, "stage 2", folder, 0, 3, False, {})
    answers = pool.run(_run, 3, "stage 2", folder, 3, 4, True, {})
    (line,) = answers[0][1]
    assert "2 ranks, this run of 3" in line
    assert all(not lines for _, lines, _ in answers[1:])
    for found, _, _ in answers:
        for key, value in found.items():
            assert torch.equal(value, answers[0][0][key])
    other = pool.run(_run, 2, "stage 2", folder, 3, 4, True, {"wire_gate": False})
    assert not other[0][1]
