"""What `benchmarks.zero` makes of its measurements: theory, bars, the table and the picture.

All of it is arithmetic on what ranks found; it starts nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._harness import Bar, Report, Spread, at_least, at_most
from benchmarks._peers import IN_BACKWARD
from benchmarks._zero_ranks import COMPUTE, Entry, Found

REACHED = 0.95  # Share of a shaped rate that gloo reaches
MIB = 2**20


@dataclass(frozen=True)
class Network:
    """Measurements on one network."""

    name: str  # `loopback`, or its rate
    ranks: int  # how many
    results: dict[str, Entry]  # by contestant, with compute; over all ranks
    communication: Spread  # seconds of a reduce-scatter and an all-gather, alone
    parameter_bytes: int  # of the model
    absent: list[str] = field(default_factory=list)  # contestants that are not installed
    foreign: float = 0.0  # cores that other processes used meanwhile

    @property
    def shaped(self) -> bool:
        """Whether the links have a rate."""
        return self.name != "loopback"

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.results[COMPUTE].step.median

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        return self.communication.median / self.compute_s

    def step_s(self, name: str) -> float:
        """Seconds of a contestant's step."""
        return self.results[name].step.median

    def peers(self) -> list[str]:
        """Contestants of others."""
        return [n for n in self.results if n != COMPUTE and not is_ours(n)]

    def ours(self, stages: Sequence[int] = (0, 1, 2, 3)) -> list[str]:
        """Our contestants of some stages."""
        return [n for n in self.results if is_ours(n) and stage_of(n) in stages]

    def fastest(self, names: Sequence[str]) -> str:
        """The one with the shortest step."""
        return min(names, key=self.step_s)


def is_ours(name: str) -> bool:
    """Whether a contestant is Gulliver's."""
    return name.startswith("ZeRO ")


def stage_of(name: str) -> int | None:
    """The stage of ZeRO that a contestant's name tells."""
    return int(name.split()[1]) if is_ours(name) or name.startswith("DeepSpeed") else None


def theory_bytes(stage: int, ranks: int, parameter_bytes: int) -> float:
    """Bytes that a rank sends in a step: of all parameters' bytes, (n-1)/n for each move.

    The gradients' reduce-scatter and the parameters' all-gather are two moves, stage 3 gathers for
    backward again.
    """
    return (3 if stage == 3 else 2) * (ranks - 1) / ranks * parameter_bytes


def rate_for(ratio: float, compute_s: float, ranks: int, parameter_bytes: int) -> str:
    """The rate of links on which two moves take `ratio` times the compute."""
    seconds = ratio * compute_s * REACHED
    return f"{8 * theory_bytes(1, ranks, parameter_bytes) / seconds / 1e6:.0f}mbit"


def joined(name: str, found: Sequence[Found], foreign: float) -> Network:
    """Puts together what the ranks found."""
    first = found[0]
    results = {}
    for contestant, entry in first.entries.items():
        entries = [f.entries[contestant] for f in found]
        fullest = max(entries, key=lambda e: e.peak)
        theory = theory_bytes(stage_of(contestant) or 0, len(found), first.parameter_bytes)
        sent = [e.wire for e in entries if e.wire is not None]
        results[contestant] = Entry(
            entry.step,
            max(sent, key=lambda b, t=theory: abs(b - t)) if sent else None,
            max(e.held for e in entries),
            fullest.peak,
            fullest.planned,
            entry.predicted_s,
            tuple(sum(x) / len(x) for x in zip(*(e.losses for e in entries), strict=True)),
            entry.chunk_mb,
            entry.passes,
        )
    communication, size = first.communication, first.parameter_bytes
    return Network(name, len(found), results, communication, size, first.absent, foreign)


def loss_differences(network: Network) -> dict[str, float]:
    """How far each loss is from the first contestant's, after as many steps as all have done."""
    trained = {n: r for n, r in network.results.items() if n != COMPUTE}
    if not trained:
        return {}
    last = min(len(r.losses) for r in trained.values()) - 1
    base = next(iter(trained.values())).losses[last]
    return {name: abs(r.losses[last] / base - 1) for name, r in trained.items()}


def bars(network: Network) -> list[Bar]:
    """Returns the bars for the results on a network."""
    found = [*_bytes_bars(network), *_loss_bars(network), *_time_bars(network)]
    results = [network.results[name] for name in network.ours((0, 1, 2))]
    errors = [abs(r.predicted_s / r.step.median - 1) for r in results if r.predicted_s]
    if errors:
        error = statistics.median(errors)
        found.append(at_most("predicted seconds of a step, median error", error, 0.15))
    return found


def _bytes_bars(network: Network) -> list[Bar]:
    found = []
    for name in network.ours():
        result = network.results[name]
        theory = theory_bytes(stage_of(name) or 0, network.ranks, network.parameter_bytes)
        if result.wire is not None:
            off = result.wire / theory - 1
            # Stage 3 may send less: the last chunks of a forward stay for the backward.
            off = off if stage_of(name) == 3 else abs(off)
            found.append(at_most(f"{name}: bytes sent, off theory", off, 0.03))
        # The plan does not know that gradients end with their update, one after another.
        if result.planned and not name.endswith(IN_BACKWARD):
            off = abs(result.peak / result.planned - 1)
            found.append(at_most(f"{name}: peak bytes of state, off the plan", off, 0.03))
    return found


def _loss_bars(network: Network) -> list[Bar]:
    """Returns bars for equal losses; peers must train the same model."""
    base, *others = list(loss_differences(network).items()) or [("", 0.0)]
    return [at_most(f"{name}: loss, off {base[0]}'s", off, 1e-5) for name, off in others]


def _time_bars(network: Network) -> list[Bar]:
    ours, peers = network.ours((0, 1, 2)), network.peers()
    if not peers:
        return []
    # Nothing can hide on a core that is busy: what communicates takes the time of compute.
    peer = network.fastest(peers)
    base = network.step_s(peer)
    return [
        at_least(f"{name}: times faster than {peer}", base / network.step_s(name), 1.0)
        for name in ours
    ]


COLUMNS = (
    *("", "step ms (quartiles)", "forward, backward, update", "predicted", "exposed"),
    *("/ best peer", "MB sent"),
    *("state MiB: held, peak, plan", "chunk MiB", "loss off"),
)


def report(network: Network, claim: str, task: str, notes: Sequence[str]) -> Report:
    """The table, the figures and the bars of a network."""
    peers = network.peers()
    base = network.step_s(network.fastest(peers)) if peers else network.compute_s
    differences = loss_differences(network)
    made = Report(
        claim,
        f"A training step of {task}, {network.ranks} ranks of one thread, {network.name}",
        COLUMNS,
        bars=bars(network),
        notes=[*_notes(network), *notes],
    )
    for name, result in network.results.items():
        made.rows.append(_row(network, name, result, base, differences.get(name)))
        made.figures[name.lower().replace(" ", "_")] = _figures(result)
    made.figures["communication_s"] = network.communication.median
    made.figures["ratio"] = network.ratio
    return made


def _row(
    network: Network, name: str, result: Entry, base: float, difference: float | None
) -> list[str]:
    step = result.step
    alone = name == COMPUTE
    planned = f"{result.planned / MIB:.0f}" if result.planned else "-"
    return [
        name,
        step.shown(".0f", 1e-3),
        ", ".join(f"{1e3 * seconds:.0f}" for seconds in result.passes),
        f"{1e3 * result.predicted_s:.0f}" if result.predicted_s else "",
        "" if alone else f"{1e3 * (step.median - network.compute_s):.0f}",
        "" if alone else f"{step.median / base:.2f}",
        "" if result.wire is None else f"{result.wire / 1e6:.1f}",
        f"{result.held / MIB:.0f}, {result.peak / MIB:.0f}, {planned}",
        f"{result.chunk_mb:.3g}" if result.chunk_mb else "",
        "" if difference is None else f"{difference:.0e}",
    ]


def _figures(result: Entry) -> dict[str, Any]:
    return {
        "step_s": result.step.median,
        "quartiles_s": [result.step.low, result.step.high],
        "passes_s": list(result.passes),
        "sent_bytes": result.wire,
        "state_bytes": result.held,
        "peak_state_bytes": result.peak,
        "planned_bytes": result.planned,
        "predicted_s": result.predicted_s,
        "chunk_mib": result.chunk_mb,
    }


def _notes(network: Network) -> list[str]:
    moves = {stage: theory_bytes(stage, network.ranks, network.parameter_bytes) for stage in (2, 3)}
    lines = [
        f"{network.parameter_bytes // 4:,} parameters. Compute {1e3 * network.compute_s:.0f} ms: "
        "the same step without communication, all ranks side by side. Communication alone, a "
        f"reduce-scatter and an all-gather: {1e3 * network.communication.median:.0f} ms, "
        f"{network.ratio:.2f} of it; stage 3 gathers twice.",
        f"Theory: {moves[2] / 1e6:.1f} MB sent by a rank in a step, {moves[3] / 1e6:.1f} with "
        "stage 3; bytes are payload, read from the interfaces' counters.",
        "Exposed: ms of a step beyond compute. State: parameters, gradients and the optimizer's, "
        "between steps and at most, looked at around every layer and the update.",
        f"Other processes used {network.foreign:.1f} cores meanwhile.",
    ]
    if network.absent:
        lines.append(f"Not installed, so without: {', '.join(network.absent)}.")
    return lines
