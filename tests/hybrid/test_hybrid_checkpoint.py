"""Checkpoints of hybrid runs: read in slices, trained on one grid, gone on with on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.booster import Booster, HybridParallelPlugin, LowLevelZeroPlugin, lazy_parameters
from gulliver.checkpoint import load
from gulliver.comm import World, barrier
from gulliver.errors import GulliverError
from tests.covering import some
from tests.hybrid.hybrid_cells import make_optimizer, relative
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool

FAMILIES = ("llama", "bloom")
STEPS = 3
HYBRID = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}


def _batch(step: int, place: int = 0, size: int = 4) -> dict[str, Tensor]:
    return batch("llama", size, seed=10 * step + place)


def _begin(world: World, family: str, folder: str) -> None:
    """The weights to begin with, written by transformers."""
    if world.is_main:
        build(family, torch.float64, layers=4).save_pretrained(folder)
    barrier()


def _lazily(family: str) -> Any:
    with lazy_parameters():
        return build(family, torch.float64, layers=4)


def _train(world: World, family: str, folder: Path, plugin: dict[str, Any]) -> Tensor | None:
    """Trains from the folder, saves in every form, and gives the logits at the end."""
    _begin(world, family, str(folder / "begin"))
    model = _lazily(family)
    assert all(p.is_meta for p in model.parameters())
    booster = Booster(
        plugin=HybridParallelPlugin(
            **plugin, weights=folder / "begin", chunk_mb=0.01, verbose=False
        )
    )
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    assert not any(p.is_meta for p in model.parameters())
    for step in range(STEPS):
        data = _batch(step, optimizer.mesh.data.rank)
        booster.execute_pipeline(iter([data]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    booster.save(folder / "run", STEPS, model, optimizer)
    booster.save_huggingface(model, folder / "end")
    booster.save_optimizer(optimizer, folder / "optimizer")
    booster.wait()
    model.eval()
    told = {"input_ids": _batch(99)["input_ids"]}
    done = booster.execute_pipeline(iter([told]), model, return_outputs=True)
    return None if done["outputs"] is None else done["outputs"]["logits"]


def _go_on(world: World, family: str, folder: Path, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Loads the step where every rank has the whole model: its logits, and weights after more."""
    model = build(family, torch.float64, layers=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, chunk_mb=0.01, verbose=False))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    booster.load(folder / "run", model, optimizer, random=False)
    with torch.no_grad():
        logits = model(input_ids=_batch(99)["input_ids"]).logits
    for step in range(STEPS, STEPS + steps):
        # Every rank a sample of the batch that the grid had read as one.
        data = {name: v[world.rank :: world.size] for name, v in _batch(step).items()}
        booster.backward(model(**data).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return logits, [p.detach().clone() for p in model.parameters()]


def _reference(family: str, steps: int) -> tuple[Tensor, list[Tensor]]:
    """One process, all the way: logits after the first steps, and weights after all."""
    model = build(family, torch.float64, layers=4)
    optimizer = make_optimizer(model)
    logits = torch.empty(0)
    for step in range(STEPS + steps):
        if step == STEPS:
            with torch.no_grad():
                logits = model(input_ids=_batch(99)["input_ids"]).logits
        model(**_batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("family", some(FAMILIES, ["bloom"]))
def test_a_run_goes_on_at_other_degrees_and_with_plain_transformers(
    pool: Pool, tmp_path: Path, family: str
) -> None:
    import transformers

    wanted, weights = _reference(family, 2)
    found = [x for x in pool.run(_train, 4, family, tmp_path, HYBRID) if x is not None]
    # transformers computes losses in float32, some of it on another path.
    assert relative(found[0], wanted) < 1e-5
    for logits, gone_on in pool.run(_go_on, 4, family, tmp_path, 2):
        assert relative(logits, found[0]) < 1e-13
        for own, whole in zip(gone_on, weights, strict=True):
            assert relative(own, whole) < 1e-4
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "end", dtype=torch.float64
    )
    with torch.no_grad():
        logits = plain.eval()(input_ids=_batch(99)["input_ids"]).logits
    assert relative(logits, found[0]) < 1e-13


def _moments(folder: Path) -> dict[str, Tensor]:
    state = load(folder).values["optimizer"]["state"]
    return {
        f"{name}.{key}": value
        for name, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def _reload(world: World, family: str, folder: Path, plugin: dict[str, Any]) -> list[float]:
    """Loads the step on another grid: relative errors of the whole weights and state."""
    booster = Booster(plugin=HybridParallelPlugin(**plugin, chunk_mb=0.01, verbose=False))
    model = build(family, torch.float64, layers=4)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    booster.load(folder / "run", model, optimizer, random=False)
    booster.save_model(model, folder / "again.safetensors")
    booster.save_optimizer(optimizer, folder / "optimizer-again")
    from safetensors.torch import load_file

    errors = []
    for again, before in (
        (load_file(folder / "again.safetensors"), load_file(folder / "end/model.safetensors")),
        (_moments(folder / "optimizer-again"), _moments(folder / "optimizer")),
    ):
        assert again.keys() >= before.keys()
        errors.append(max(relative(again[name], before[name]) for name in before))
    barrier()
    return errors


@pytest.mark.parametrize(
    "plugin",
    [
        pytest.param({"pp_size": 4, "num_microbatches": 4}, marks=pytest.mark.full),
        pytest.param({"tp_size": 4, "zero_stage": 1}, marks=pytest.mark.full),
        pytest.param({"tp_size": 2, "zero_stage": 3}, marks=pytest.mark.full),
        {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "zero_stage": 2},
    ],
    ids=str,
)
def test_every_grid_reads_what_another_wrote(
    pool: Pool, tmp_path: Path, plugin: dict[str, Any]
) -> None:
    pool.run(_train, 4, "llama", tmp_path, {**HYBRID, "sequence_parallelism_mode": "split_gather"})
    for errors in pool.run(_reload, 4, "llama", tmp_path, plugin):
        assert errors == [0.0, 0.0]


def _refusal(world: World, family: str, weights: str | None) -> str:
    model = _lazily(family)
    plugin = HybridParallelPlugin(tp_size=2, weights=weights, verbose=False)
    try:
        Booster(plugin=plugin).boost(model, make_optimizer(model))
    except GulliverError as error:
        return str(error)
    return ""


def test_a_model_on_meta_needs_a_folder(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(_refusal, 2, "llama", None):
        assert "is on meta; use HybridParallelPlugin(weights=folder)" in message
    for message in pool.run(_refusal, 2, "llama", str(tmp_path / "nowhere")):
        assert "nowhere" in message
