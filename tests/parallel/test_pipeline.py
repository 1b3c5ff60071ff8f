"""A pipeline computes what one process computes: loss and every gradient."""

from __future__ import annotations

import pytest

from gulliver.parallel.pipeline import STYLES
from tests.covering import grid
from tests.hybrid import hybrid_models
from tests.parallel.pipelines import check, one_step
from tests.pool import Pool


@pytest.mark.parametrize(
    ("style", "ranks"),
    grid(list(STYLES), [2, 3, 4], strength=1, always=lambda style, ranks: ranks == 3),
)
def test_every_schedule_gives_the_gradients_of_one_process(
    pool: Pool, style: str, ranks: int
) -> None:
    micro_batches = {"dualpipev": 2 * ranks}.get(style, ranks)
    results = pool.run(one_step, ranks, "plain", style, 8, 9, micro_batches=micro_batches)
    check(results, "plain", 8)


@pytest.mark.parametrize("family", hybrid_models.FAMILIES)
def test_every_family_gives_the_gradients_of_one_process(pool: Pool, family: str) -> None:
    check(pool.run(one_step, 2, family, "1f1b", 3, 5, micro_batches=2), family, 3)


@pytest.mark.parametrize(
    ("style", "family"),
    grid(
        ["interleaved", "zero_bubble", "zbv", "dualpipev"],
        ["llama", "gpt2", "t5", "stdit3"],
        strength=1,
        always=lambda style, family: family == "t5",
    ),
)
def test_schedules_of_several_stages_a_rank_know_tied_weights(
    pool: Pool, family: str, style: str
) -> None:
    chunks = 2 if style in ("interleaved", "zero_bubble") else None
    results = pool.run(one_step, 2, family, style, 4, 5, micro_batches=4, chunks=chunks)
    check(results, family, 4)


@pytest.mark.parametrize(
    "at", [[1, 1, 6], [3, 1, 4], [4, 3, 1], [1, 6, 1]], ids=lambda at: "+".join(map(str, at))
)
def test_an_encoder_and_decoder_may_be_cut_anywhere(pool: Pool, at: list[int]) -> None:
    check(pool.run(one_step, 3, "t5", "1f1b", 4, 4, micro_batches=3, at=at), "t5", 4)
    check(pool.run(one_step, 3, "whisper", "gpipe", 4, 4, micro_batches=3, at=at), "whisper", 4)


@pytest.mark.parametrize(
    ("family", "style"),
    grid(["llama", "t5"], ["1f1b", "zero_bubble", "interleaved"], strength=1),
)
def test_recomputed_blocks_give_the_same_gradients(pool: Pool, family: str, style: str) -> None:
    results = pool.run(one_step, 2, family, style, 4, 4, micro_batches=2, recompute=True)
    check(results, family, 4)
