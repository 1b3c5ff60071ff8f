"""Seconds of forwards by their number of tokens, measured before any request comes."""

from __future__ import annotations

from time import perf_counter

from gulliver.serve._batch import Batch, Runner, Span
from gulliver.serve._local import LocalRunner
from gulliver.serve.speculative._cost import StepCost

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens that are measured, as long as they fit."""
WIDE = 8
"""Tokens of a sequence in a forward that is measured."""
LIMIT = 2.0
"""Seconds that measuring takes, about."""


def measure_steps(runner: Runner, cost: StepCost) -> None:
    """Runs forwards of several sizes over an empty cache.

    Other runners than a local one count their batches: their seconds are learnt as they run.

    Args:
        runner: runner without requests; what is in its cache is overwritten.
        cost: what learns.
    """
    if not isinstance(runner, LocalRunner):
        return
    begun = perf_counter()
    step(runner, 1)  # kernels are chosen, and memory is touched, before the clock runs
    for round_ in range(3):
        for size in SIZES:
            if size > runner.facts.longest or perf_counter() - begun > LIMIT:
                break
            seconds = step(runner, size)
            if round_ or seconds > LIMIT / 10:
                cost.note(size, seconds)


def step(runner: Runner, tokens: int, wide: int = WIDE, before: int = 64) -> float:
    """Seconds of one forward of so many tokens, `wide` of a sequence, after others in the cache."""
    facts = runner.facts
    wide = min(wide, tokens, facts.longest)
    start = max(0, min(before, facts.longest - wide))
    blocks = list(range(-(-(start + wide) // facts.block_size)))
    sizes = [wide] * (tokens // wide) + ([tokens % wide] if tokens % wide else [])
    spans = [Span(n, start, [0] * size, blocks, size) for n, size in enumerate(sizes)]
    begun = perf_counter()
    runner.submit(Batch(0, spans))
    # As the engine does: only then a device is done.
    runner.collect().argmax(-1).tolist()
    return perf_counter() - begun
