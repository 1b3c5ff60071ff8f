"""Seconds of forwards by their number of tokens, measured before any request comes."""

from __future__ import annotations

from time import perf_counter

from gulliver.serve._batch import Batch, Facts, Runner, Span
from gulliver.serve._local import LocalRunner
from gulliver.serve._sampling import SamplingParameters
from gulliver.serve._speculation import Wanted
from gulliver.serve.speculative._cost import Mean, StepCost
from gulliver.serve.speculative._proposal import Proposer

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens that are measured, as long as they fit."""
WIDE = 8
"""Tokens of a sequence in a forward that is measured."""
LIMIT = 2.0
"""Seconds that measuring takes, about."""


def measure_steps(runner: Runner, cost: StepCost) -> None:
    """Runs forwards of several sizes over an empty cache."""
    # Other runners than a local one count their batches: their seconds are learnt as they run.
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


def measure_proposals(proposer: Proposer, facts: Facts, cost: StepCost, reading: Mean) -> None:
    """Lets a draft model guess for sequences that nobody asked for."""
    begun, greedy = perf_counter(), SamplingParameters(temperature=0.0)
    length = min(64, facts.longest - 4)
    if length < 32:
        return
    blocks = range(-(-(length + 2) // facts.block_size))
    for count in (1, 4, 16, 64):
        for more in range(3):  # the first round reads the texts
            tokens = [0] * (length + more)
            wanted = [
                Wanted(-1 - n, tokens, len(tokens) - 1, blocks, 2, greedy) for n in range(count)
            ]
            start = perf_counter()
            found = proposer.propose(wanted, 2)
            spent = perf_counter() - start - proposer.apart
            if more and len(found) == count:
                cost.note(count, spent / 2)
            elif proposer.apart:
                reading.add(proposer.apart / (length * count))
        for number in range(count):
            proposer.dropped(-1 - number)
        if perf_counter() - begun > LIMIT / 2:
            break


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
