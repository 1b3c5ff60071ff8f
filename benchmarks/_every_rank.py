"""Simulates every rank of a grid, as `gulliver.planner.search.simulate` does one of each kind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterator, Sequence

from gulliver.planner.search.facts import Grid
from gulliver.planner.search.score import Scorer
from gulliver.planner.search.simulate import step_actions, step_seconds
from gulliver.solve.timeline import Act, Action, RankProgram


def simulate_every_rank(
    scorer: Scorer, grid: Grid, torus: Sequence[int] = (), jitter: float = 0.0, seed: int = 0
) -> float:
    """Seconds of a step; each computation varies by a share of itself, its standard deviation."""
    return step_seconds(list(_programs(scorer, grid, torus, jitter, seed)))


def _programs(
    scorer: Scorer, grid: Grid, torus: Sequence[int], jitter: float, seed: int
) -> Iterator[RankProgram]:
    axes, rows = grid.axes, step_actions(scorer, grid, torus)
    sizes = list(torus) or [axes.data * axes.sequence]
    places = itertools.product(*map(range, (axes.pipeline, axes.data, axes.sequence, axes.tensor)))
    for number, (stage, data, sequence, tensor) in enumerate(places):
        groups: dict[str, tuple[Hashable, int]] = {
            "pipeline": ((data, sequence, tensor), 1),
            "sequence": ((stage, data, tensor), axes.sequence),
            "tensor": ((stage, data, sequence), axes.tensor),
        }
        left, turn = data * axes.sequence + sequence, list[int]()
        for size in reversed(sizes):
            left, at = divmod(left, size)
            turn.insert(0, at)
        for place, size in enumerate(sizes):
            others = tuple(turn[:place] + turn[place + 1 :])
            groups[f"replicas {place}"] = ((stage, tensor, *others), size)
        row = _jittered(rows[stage], jitter, random.Random(f"{seed} {number}"))
        yield RankProgram(row, groups)


def _jittered(actions: Sequence[Action], jitter: float, draw: random.Random) -> Iterator[Action]:
    for action in actions:
        if jitter and action.act is Act.COMPUTE:
            action = action._replace(seconds=action.seconds * max(0.0, draw.gauss(1.0, jitter)))
        yield action
