"""Exact searches beside brute force, and the joint search of long networks beside its bound.

`python -m benchmarks.solvers` has two parts. `truth` makes random small cases of every solver and
compares each with an independent definition, by brute force or by HiGHS
(`tests/solve/solver_cases.py`).
`speed` times `solve_joint` on equal blocks of 10 operators with 6 strategies each, drawn at
random, for budgets close to the least memory that works: CPU seconds, which a busy machine does not
move much, and the gap to the bound.

With `--progress FILE` what is done is written there as it goes, and a run that is cut goes on where
it was; figures of another commit are not taken.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import tyro
from tests.solve.solver_cases import (
    conversion_case,
    joint_case,
    milp_case,
    staged_case,
)

from benchmarks._harness import Progress, Report, at_least, at_most, finish
from gulliver.solve import Block, Operator, Strategy, least_memory, solve_joint
from gulliver.solve.joint import ENTRY, EdgeSeconds

OPERATORS, STRATEGIES = 10, 6
ALLOWED_S = {32: 5.0, 96: 30.0, 200: 60.0}
"""CPU seconds that so many blocks may take."""
CASES: dict[str, tuple[Callable[[int], bool], int]] = {
    "joint, brute force": (joint_case, 3000),
    "joint, HiGHS": (milp_case, 60),
    "two stages, brute force; joint never above": (staged_case, 400),
    "conversion": (conversion_case, 400),
}
"""Solvers with their reference, and the number of cases."""
SAVED_S = 10.0
"""Seconds after which progress is written."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    parts: tuple[str, ...] = ("truth", "speed")
    share: float = 1.0
    """Share of the cases to run."""
    blocks: tuple[int, ...] = tuple(ALLOWED_S)
    budgets: tuple[float, ...] = (0.02, 0.1)
    """Budgets, from the least memory that works to what the fastest picks take."""
    progress: str = ""
    """File of what is done already, which a run that was cut reads."""
    keep: bool = False
    """Write benchmarks/results."""


def network(blocks: int, seed: int = 0) -> list[Block]:
    """Equal blocks with two residual additions, drawn at random; seconds in ms, bytes in MiB."""
    draw, found = random.Random(seed), list[Operator]()

    def conversion() -> EdgeSeconds:
        def table(most: float) -> tuple[tuple[float, ...], ...]:
            size = range(STRATEGIES)
            return tuple(tuple(most * draw.random() * (i != j) for j in size) for i in size)

        copies = tuple(tuple(int(size) for size in row) for row in table(20))
        return EdgeSeconds(table(0.5), table(0.5), copies)

    additions = {OPERATORS // 2: ENTRY, OPERATORS - 1: OPERATORS // 2}
    for number in range(OPERATORS):
        options = list[Strategy]()
        for _ in range(STRATEGIES):
            seconds, saved = 0.5 + 2 * draw.random(), draw.randint(20, 400)
            comm, comm_back = draw.random(), draw.random()
            stays = draw.randint(0, 100) if number in additions else 0
            extra, extra_back = draw.randint(0, 100), draw.randint(0, 100)
            state = draw.randint(20, 400)
            passes = (seconds, 2 * seconds, comm, comm_back)
            options.append(Strategy("", *passes, state, saved, stays, extra, extra_back, saved))
        inputs = tuple(sorted({number - 1, additions.get(number, number - 1)}))
        conversions = tuple(conversion() for _ in inputs)
        found.append(Operator(str(number), tuple(options), inputs, conversions))
    return [Block(tuple(found))] * blocks


def add_truth(made: Report, options: Options, progress: Progress) -> None:
    """Compares; a case that is not equal ends the run."""
    total = 0
    for name, (case, count) in CASES.items():
        tried = max(1, int(count * options.share))
        compared, seconds = _compared(name, case, tried, progress)
        total += compared
        made.rows.append((name, f"{compared} of {tried} equal", f"{seconds:.0f}", "", ""))
        made.figures[name] = compared
    made.bars.append(at_least("cases that are equal", total, 2000 * min(1.0, options.share)))
    made.notes.append(
        "cases that are too large for brute force, or impossible, are left out; one that is not "
        "equal ends the run"
    )


def _compared(
    name: str, case: Callable[[int], bool], count: int, progress: Progress
) -> tuple[int, float]:
    """Number of seeds below `count` that could be compared, all equal, and CPU seconds."""
    first, compared, seconds = progress.done.get(name, (0, 0, 0.0))
    begun, saved = time.process_time(), time.monotonic()
    for seed in range(first, count):
        compared += case(seed)
        if time.monotonic() - saved > SAVED_S or seed == count - 1:
            saved, now = time.monotonic(), time.process_time()
            seconds, begun = seconds + now - begun, now
            progress.save(name, (seed + 1, compared, seconds))
    return compared, seconds


def add_speed(made: Report, options: Options, progress: Progress) -> None:
    """Times the joint search."""
    for count in options.blocks:
        for share in options.budgets:
            name = f"{count} blocks, budget at {share:.0%}"
            if name not in progress.done:
                progress.save(name, _timed(count, share))
            seconds, gap, step, lower = progress.done[name]
            cells = f"{step:.0f}", f"{lower:.0f}"
            made.rows.append((name, f"gap {gap:.2%}", f"{seconds:.1f}", *cells))
            made.figures[name] = {"cpu_s": seconds, "gap": gap}
            if count in ALLOWED_S:
                made.bars.append(at_most(f"{name}: CPU s", seconds, ALLOWED_S[count]))
            made.bars.append(at_most(f"{name}: gap", gap, 0.02))


def _timed(count: int, share: float) -> tuple[float, float, float, float]:
    """CPU seconds of a joint search, its gap, and seconds of a step and of the bound."""
    blocks = network(count)
    least, most = least_memory(blocks), solve_joint(blocks, 1 << 60)
    budget = int(least.peak + share * (most.cost.peak - least.peak))
    begun = time.process_time()
    found = solve_joint(blocks, budget)
    return time.process_time() - begun, found.gap, found.cost.seconds, found.lower


def main() -> None:
    """Runs what the options say."""
    options = tyro.cli(Options, description=__doc__)
    columns = ("case", "result", "CPU s", "step ms", "bound ms")
    progress = Progress(options.progress)
    made = Report("solvers", "Searches beside brute force, and their time", columns)
    if "truth" in options.parts:
        add_truth(made, options, progress)
    if "speed" in options.parts:
        add_speed(made, options, progress)
    finish(made, options.keep)


if __name__ == "__main__":
    main()
