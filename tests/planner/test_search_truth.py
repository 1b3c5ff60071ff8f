"""The search over grids beside all grids, and its bytes beside those of the plans that run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.memory_truth import Case, peaks, predicted

from gulliver.booster import HybridParallelPlugin, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.hardware import Cluster
from gulliver.hardware.probe import named_cluster
from gulliver.planner.search.facts import Axes, Grid
from gulliver.planner.search.grids import search_grids
from gulliver.planner.search.score import Scorer
from tests.pool import Pool

SAMPLES, LENGTH, RANKS = 8, 64, 8
STAGES = (0, 1, 2, 3)


@cache
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@cache
def cluster() -> Cluster:
    return named_cluster(f"h100x{RANKS}")


@cache
def scorer() -> Scorer:
    found = search_grids(llama(), adam(llama()), batch(), cluster(), SAMPLES)
    return Scorer(found.facts, cluster(), SAMPLES, "cuda", 1.0)


PLANNED = {
    **{f"ZeRO {stage}": Grid(Axes(data=RANKS), stage) for stage in STAGES},
    **{f"tensor 2, ZeRO {stage}": Grid(Axes(RANKS // 2, tensor=2), stage) for stage in range(3)},
    "tensor 8": Grid(Axes(tensor=8)),
    **{
        f"pipeline 2, ZeRO {stage}": Grid(Axes(RANKS // 2, pipeline=2), stage, 4, "1f1b")
        for stage in (2, 3)
    },
    "pipeline 2": Grid(Axes(RANKS // 2, pipeline=2), 1, 4, "1f1b"),
    "pipeline 4, tensor 2": Grid(Axes(tensor=2, pipeline=4), 0, 4, "1f1b"),
}


def plan_of(grid: Grid) -> Any:
    """The plan of a grid, with the search's size of a chunk."""
    chunk = float(scorer().with_best_chunk_size(grid).chunk_mb or 4)
    axes, shared = grid.axes, {"chunk_mb": chunk, "precision": "bf16", "verbose": False}
    if axes.size == axes.data:
        plugin: Any = LowLevelZeroPlugin(grid.stage, **shared)
    else:
        plugin = HybridParallelPlugin(
            tp_size=axes.tensor,
            pp_size=axes.pipeline,
            zero_stage=grid.stage,
            num_microbatches=grid.micro_batches if axes.pipeline > 1 else None,
            **shared,
        )
    return plugin.make_plan(llama(), adam(llama()), cluster())


def state_of(memory: Any) -> int:
    return memory.parameters + memory.gradients + memory.optimizer_state


@pytest.mark.parametrize("name", PLANNED)
def test_a_grid_has_the_bytes_of_its_plan(name: str) -> None:
    grid = PLANNED[name]
    scored, planned = scorer().state_of(grid), plan_of(grid).memory
    assert state_of(scored) == pytest.approx(state_of(planned), rel=0.05), (scored, planned)


# Bytes of runs

USUAL = (
    Case(Grid(Axes(data=2), 3), blocks=4),
    Case(Grid(Axes(data=2), 2, 2), "bf16", blocks=4),
    Case(Grid(Axes(data=2), 0, recomputed=4), blocks=4),
    Case(Grid(Axes(tensor=2), recomputed=4), blocks=4),
    Case(Grid(Axes(pipeline=2), 0, 4, "1f1b"), blocks=4),
)
"""Runs of two ranks that hold one kind of bytes each that the others do not."""


def _peaks(world: World, cases: tuple[Case, ...]) -> list[int]:
    return peaks(cases)


def held_to(pool: Pool, ranks: int, cases: tuple[Case, ...]) -> None:
    found = pool.run(_peaks, ranks, cases, deadline_s=20.0 * len(cases))
    for case, *real in zip(cases, *found, strict=True):
        told = predicted(case)
        assert sum(told.values()) == pytest.approx(max(real), rel=0.05), (str(case), told, real)


@pytest.mark.deadline(150)
def test_search_predicts_bytes_of_a_run(pool: Pool) -> None:
    held_to(pool, 2, USUAL)
