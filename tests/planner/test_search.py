"""The search over grids: its best is the best of all, bounds hold, and what it chooses runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gulliver.booster.auto import auto_engine, plan_of
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.hardware.cluster import Link
from gulliver.hardware.probe import named_cluster
from gulliver.hardware.step import Message, exposed_seconds, pipeline_seconds, predict_step
from gulliver.parallel.pipeline import STYLES
from gulliver.parallel.pipeline.schedules import predict
from gulliver.planner.search.facts import CHUNKS_MB, Axes, Grid, axes_of, facts_of, grids_of
from gulliver.planner.search.grids import search_grids
from gulliver.planner.search.score import Scorer
from tests.pool import Pool

transformers = pytest.importorskip("transformers")


def llama(layers: int = 6, width: int = 256) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def on_meta(layers: int = 6, width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return llama(layers, width)


def batch(samples: int = 1, length: int = 64, device: str = "meta") -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def small():
    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, facts_of(model, optimizer, batch(), named_cluster("h100").device)


def test_the_best_is_the_best_of_all_grids(small) -> None:
    model, optimizer, facts = small
    cluster = named_cluster("h100x16")
    for limit in (None, 24 << 20):
        found = search_grids(model, optimizer, None, cluster, 8, limit, facts=facts)
        scorer = Scorer(facts, cluster, 8, "cuda", 1.0)
        every = []
        for axes in axes_of(16, 8, 6, ["split_gather", "all_to_all", "ring_attn"]):
            if scorer.why_unsupported(axes):
                continue
            bound = scorer.bound(axes)
            for grid in grids_of(axes, 8, 6):
                whole = scorer.score(grid)
                assert bound <= whole.seconds.step * (1 + 1e-9)
                fitting = scorer.least(grid, found.limit)
                if fitting is not None:
                    assert fitting.bytes <= found.limit
                    every.append(fitting.seconds.step)
        assert len(every) > 100
        assert found.best[0].seconds.step == pytest.approx(min(every), rel=1e-3)
        steps = [scored.seconds.step for scored in found.best]
        assert steps == pytest.approx(sorted(steps), rel=1e-3)


def test_more_memory_is_never_slower_and_too_little_names_minimum(small) -> None:
    model, optimizer, facts = small
    cluster = named_cluster("h100x8")
    found = search_grids(model, optimizer, None, cluster, 16, 1 << 20, facts=facts)
    assert not found.best
    assert "nothing fits 1.00MiB" in str(found)
    least = found.least.bytes
    steps = [
        search_grids(model, optimizer, None, cluster, 16, limit, facts=facts).best[0].seconds.step
        for limit in (least, 2 * least, 4 * least, 64 * least)
    ]
    assert steps == sorted(steps, reverse=True)


def test_fewest_blocks_are_recomputed(small) -> None:
    _, _, facts = small
    scorer = Scorer(facts, named_cluster("h100x2"), 64, "cuda", 1.0)
    grid = next(
        g for axes in axes_of(2, 64, 6, []) if axes.data == 2 for g in grids_of(axes, 64, 6)
    )
    sizes = [scorer.bytes_of(replace(grid, recomputed=n)) for n in range(7)]
    # Of so many samples activations are more than gradients; one recomputed block works with all
    # that it keeps, which none does otherwise.
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sizes[6] < sizes[0]
    for number in range(1, 7):
        found = scorer.least(grid, sizes[number])
        assert found is not None
        assert found.grid.recomputed <= number
        assert scorer.bytes_of(found.grid) <= sizes[number]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_closed_forms_of_pipelines_are_those_of_the_schedules(name: str) -> None:
    chunks = STYLES[name].chunks
    for ranks in (2, 4):
        few = (1, ranks - 1) if name in ("gpipe", "interleaved", "zero_bubble", "zbv") else ()
        for micro in (*few, ranks, 2 * ranks, 4 * ranks):
            stages = [1.0 / chunks] * (ranks * chunks)
            for link in (0.0, 0.05):
                exact = predict(name, ranks, micro, stages, [2 * s for s in stages], link).seconds
                closed = pipeline_seconds(name, [3.0] * ranks, 2 / 3, micro, chunks, link)
                assert closed == pytest.approx(exact, rel=1e-6 if not link else 0.01)


def test_exposed_communication_is_costed() -> None:
    link = Link(0.0, 1e9)
    one = Message("reduce_scatter", 2 * 10**6, [(2, link)], 4, hidden=True)  # 1 ms each
    assert exposed_seconds([one], 1.0) == pytest.approx(1e-3)  # the last one
    assert exposed_seconds([one], 2e-3) == pytest.approx(4e-3 - 2e-3 * 3 / 4)
    assert exposed_seconds([replace(one, count=1)], 1.0) == pytest.approx(1e-3)
    assert exposed_seconds([replace(one, part=0.5)], 2e-3) == pytest.approx(4e-3 - 1e-3 * 3 / 4)
    hop = Message("sends", 10**6, [(2, link)], 8, hidden=True, behind_s=0.25e-3)
    assert exposed_seconds([hop], 1.0) == pytest.approx(8 * 0.75e-3)
    costs = predict_step((1.0, 2.0), 0.0, 0.0, [one], launch_s=1e-5)
    assert costs.step == pytest.approx(3.0 + 1e-3 + 4e-5)
    assert predict_step((1.0, 2.0), 0.0, 0.0, [one], free=0.0).exposed == pytest.approx(4e-3)


def test_ranks_and_micro_batches_share_products_and_not_launches(small) -> None:
    _, _, facts = small
    slow = facts.on(replace(facts.device, launch_s=1e-3))
    scorer = Scorer(slow, named_cluster("h100x4"), 8, "cuda", 1.0)
    whole, micro, tensor = (
        scorer.score(grid).seconds.compute
        for grid in (Grid(Axes(data=4)), Grid(Axes(data=4), 0, 2), Grid(Axes(2, tensor=2)))
    )
    launches = sum(slow.launches)
    assert whole > launches
    assert micro - whole == pytest.approx(launches)
    assert tensor > launches
    assert (
        Scorer(facts, named_cluster("h100x4"), 8, "cuda", 1.0)
        .score(Grid(Axes(data=4), 1))
        .grid.chunk_mb
        in CHUNKS_MB
    )


def test_plans_of_the_best_have_their_axes_and_state(small) -> None:
    model, optimizer, facts = small
    cluster = named_cluster("h100x8")
    found = search_grids(model, optimizer, None, cluster, 16, facts=facts)
    made = 0
    for scored in found.best:
        try:
            plan = plan_of(scored, found, model, optimizer, "bf16")
        except GulliverError:
            continue
        made += 1
        axes = scored.grid.axes
        assert plan.mesh.of("tensor") == axes.tensor
        assert plan.mesh.of("pipeline") == axes.pipeline
        assert plan.stage == scored.grid.stage
        if scored.grid.chunk_mb:
            assert plan.zero.chunk_bytes == scored.grid.chunk_mb << 20
        # The plan's stages are those of its first rank, the search's those of the busiest.
        assert plan.predicted.seconds.step == pytest.approx(scored.seconds.step, rel=0.1)
    assert made >= 5


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(GulliverError, match="no mesh of 8 ranks"):
        search_grids(nn.Linear(4, 4), None, torch.zeros(1, 4), named_cluster("h100x8"), 3)


def _trained(world: World, memory: int | None) -> tuple[list[float], str, int]:
    torch.manual_seed(0)
    model = llama(4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 512, (12, 16), generator=torch.Generator().manual_seed(1))
    cluster = described("cpu-loopback").resized(world.size)
    engine = auto_engine(
        *(model, optimizer, cluster), batch=batch(1, 16), samples=4, memory=memory, verbose=False
    )
    losses = []
    place, count = engine.booster.plugin.data_place()
    for step in range(3):
        rows = data[4 * step : 4 * step + 4].chunk(count)[place]
        losses.append(engine.run({"input_ids": rows, "labels": rows}))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    scored = next(s for s in engine.found.best if s.grid == engine.grid)
    compared = engine.booster.compare()
    assert compared["step"].predicted == engine.plan.predicted.seconds.step
    shown = engine.grid, scored.seconds, engine.plan.predicted.seconds
    # Stages are of unlike sizes: the plan's are simulated, the search's a formula.
    near = 0.05 if engine.grid.axes.pipeline == 1 else 0.2
    assert compared["step"].predicted == pytest.approx(scored.seconds.step, rel=near), shown
    phases = compared["passes"], compared["update"]
    for value in ("predicted", "measured"):
        assert sum(getattr(row, value) for row in phases) == pytest.approx(
            getattr(compared["step"], value)
        )
    worst = max(phases, key=lambda row: abs(row.measured - row.predicted))
    told = compared.advice
    assert abs(worst.error) <= 0.15 or told[0].startswith(worst.kind), str(compared)
    return losses, str(engine.grid), engine.samples


def test_chosen_plan_trains_as_one_process(pool: Pool) -> None:
    torch.manual_seed(0)
    model = llama(4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 512, (12, 16), generator=torch.Generator().manual_seed(1))
    expected = []
    for rows in data.split(4):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for memory in (None, 3 << 20):
        found = pool.run(_trained, 2, memory)
        grids = {grid for _, grid, _ in found}
        assert len(grids) == 1
        mean = [sum(pair) / 2 for pair in zip(*(losses for losses, _, _ in found), strict=True)]
        assert mean == pytest.approx(expected, abs=2e-5), grids
