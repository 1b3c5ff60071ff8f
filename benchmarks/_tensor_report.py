"""What `benchmarks.tensor` makes of its measurements: formulas, bars and the table.

All of it is arithmetic on what ranks found; it starts nothing.

[Note: bytes] With N ranks an all-gather or a reduce-scatter of an activation ``[B, L, H]`` sends a
*unit* of ``(N - 1) / N`` of its bytes from each rank, an all-reduce two. A step takes, in units:

| | plain | sequence cut |
|---|---|---|
| a block, forward | 2 all-reduces: 4 | 2 gathers, 2 reduce-scatters: 4 |
| a block, backward | 2 all-reduces: 4 | the same, and 2 gathers of what was kept as pieces: 6 |
| embedding | an all-reduce forward: 2 | and a gather backward: 3 |
| head | an all-reduce backward: 2 | and a gather forward: 3 |

Two further all-reduces carry four numbers of each token for the loss, and with the sequence cut one
for each norm in a block sums its weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._harness import Bar, Report, Spread, at_least, at_most
from benchmarks._tensor_models import (
    COMPUTE,
    DTENSOR,
    DTENSOR_SEQUENCE,
    OURS,
    PEERS,
    RING,
    SPLIT_GATHER,
    TENSOR,
    Sizes,
)
from benchmarks._tensor_ranks import Entry, Found

LOOPBACK = "loopback"
REACHED = 0.95  # Share of a shaped rate that gloo reaches
SLOW = 0.75  # Communication over compute from which a link counts as one that has to be hidden
FASTER, NOT_SLOWER = 1.2, 0.97
NUMBER = 4  # Bytes of a float32
MIB = 2**20


@dataclass(frozen=True)
class Network:
    """What was measured with so many ranks on one network."""

    name: str  # `loopback`, or its rate
    ranks: int  # how many
    results: dict[str, Entry]  # by contestant, with compute; over all ranks
    reduction: Spread  # seconds of an all-reduce of one activation, alone
    sizes: Sizes  # of the model and the batch
    foreign: float = 0.0  # cores that other processes used meanwhile

    @property
    def shaped(self) -> bool:
        """Whether the links have a rate."""
        return self.name != LOOPBACK

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.step_s(COMPUTE)

    @property
    def communication_s(self) -> float:
        """Seconds of plain tensor parallelism's all-reduces, alone."""
        return reductions(self.sizes) * self.reduction.median

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        return self.communication_s / self.compute_s

    def step_s(self, name: str) -> float:
        """Seconds of a contestant's step."""
        return self.results[name].step.median

    def fastest(self, names: Sequence[str]) -> str | None:
        """The one with the shortest step, of those that took part."""
        return min((n for n in names if n in self.results), key=self.step_s, default=None)


def reductions(sizes: Sizes) -> int:
    """All-reduces of an activation in a step of plain tensor parallelism."""
    return 4 * sizes.blocks + 2


def formula_bytes(name: str, ranks: int, sizes: Sizes) -> float:
    """Bytes that a rank sends in a step of ours, as in [Note: bytes]."""
    tokens = sizes.batch * sizes.length
    part = NUMBER * (ranks - 1) / ranks
    units, small = 2.0 * reductions(sizes), 2 * 4 * tokens
    if name != TENSOR:
        units += 2 * sizes.blocks + 2
        small += 2 * 2 * sizes.blocks * sizes.hidden
    return part * (units * tokens * sizes.hidden + small)


def rate_for(ratio: float, compute_s: float, ranks: int, sizes: Sizes) -> str:
    """The rate of links on which plain tensor parallelism sends for `ratio` times the compute."""
    seconds = ratio * compute_s * REACHED
    return f"{8 * formula_bytes(TENSOR, ranks, sizes) / seconds / 1e6:.0f}mbit"


def joined(name: str, found: Sequence[Found], sizes: Sizes, foreign: float) -> Network:
    """Puts together what the ranks found."""
    results = {}
    for contestant, entry in found[0].entries.items():
        entries = [f.entries[contestant] for f in found]
        sent = [e.wire for e in entries if e.wire is not None]
        results[contestant] = Entry(
            entry.step,
            max(sent, default=None),
            max(e.saved for e in entries),
            tuple(sum(x) / len(x) for x in zip(*(e.losses for e in entries), strict=True)),
        )
    return Network(name, len(found), results, found[0].reduction, sizes, foreign)


def loss_differences(network: Network) -> dict[str, float]:
    """How far losses ever are from those of the first contestant, a peer where there is one."""
    trained = {n: r for n, r in network.results.items() if n != COMPUTE}
    if not trained:
        return {}
    base = next(iter(trained.values())).losses
    return {
        name: max(abs(own / other - 1) for own, other in zip(r.losses, base, strict=True))
        for name, r in trained.items()
    }


def bars(networks: Sequence[Network]) -> list[Bar]:
    """What must hold."""
    found = []
    for ranks in sorted({n.ranks for n in networks}):
        alike = [n for n in networks if n.ranks == ranks]
        found += [*_loss_bars(alike), *_bytes_bars(alike), *_saved_bars(alike)]
        found += [bar for network in alike for bar in _time_bars(network)]
    return found


def _loss_bars(networks: Sequence[Network]) -> list[Bar]:
    """For the peers too: one that trains something else would be no peer."""
    worst: dict[str, float] = {}
    for network in networks:
        for name, off in list(loss_differences(network).items())[1:]:
            worst[name] = max(off, worst.get(name, 0.0))
    ranks = networks[0].ranks
    return [at_most(f"{ranks} ranks, {n}: losses, off", off, 1e-5) for n, off in worst.items()]


def _bytes_bars(networks: Sequence[Network]) -> list[Bar]:
    found = []
    for name in OURS:
        sent = [(n, n.results[name].wire) for n in networks if name in n.results]
        offs = [abs(b / formula_bytes(name, n.ranks, n.sizes) - 1) for n, b in sent if b]
        if offs:
            title = f"{networks[0].ranks} ranks, {name}: bytes sent, off the formula"
            found.append(at_most(title, max(offs), 0.03))
    return found


def _saved_bars(networks: Sequence[Network]) -> list[Bar]:
    results = networks[0].results
    names = [name for name in (SPLIT_GATHER, RING) if name in results]
    if TENSOR not in results:
        return []
    return [
        at_most(
            f"{networks[0].ranks} ranks, {name}: activations kept, over tensor's",
            results[name].saved / results[TENSOR].saved,
            0.99,
        )
        for name in names
    ]


def _time_bars(network: Network) -> list[Bar]:
    found = []
    slow = network.shaped and network.ratio >= SLOW
    cases = (((SPLIT_GATHER, RING), DTENSOR_SEQUENCE, FASTER if slow else NOT_SLOWER),)
    for ours, peer, limit in (*cases, ((TENSOR,), DTENSOR, NOT_SLOWER)):
        best = network.fastest(ours)
        if best is not None and peer in network.results:
            gain = network.step_s(peer) / network.step_s(best)
            title = f"{place(network)}, {best}: times faster than {peer}"
            found.append(at_least(title, gain, limit))
    return found


def place(network: Network) -> str:
    """Where it was measured, in a few words."""
    return f"{network.ranks} ranks, {network.name} ({network.ratio:.2g} x compute)"


COLUMNS = (
    *("", "step ms (quartiles)", "exposed", "/ compute", "/ DTensor's", "MB sent", "formula"),
    *("kept MiB", "loss off"),
)


def report(networks: Sequence[Network], sizes: Sizes) -> Report:
    """The table, the figures and the bars."""
    made = Report("tensor", f"A training step of {described(sizes)}", COLUMNS, bars=bars(networks))
    for network in networks:
        where = f"{network.ranks} ranks, {network.name}", f"({network.ratio:.2f} x compute)"
        made.rows.append([*where, *[""] * (len(COLUMNS) - 2)])
        differences = loss_differences(network)
        for name, result in network.results.items():
            made.rows.append(_row(network, name, result, differences.get(name)))
        made.figures[f"{network.ranks} ranks, {network.name}"] = {
            "communication_s": network.communication_s,
            "ratio": network.ratio,
            **{name: _figures(result) for name, result in network.results.items()},
        }
    made.notes = _notes(networks)
    return made


def described(sizes: Sizes) -> str:
    """The task in a few words."""
    shape = f"{sizes.hidden}x{sizes.blocks}, {sizes.batch}x{sizes.length} tokens"
    return f"a Llama {shape}, ranks of one thread"


def _row(network: Network, name: str, result: Entry, difference: float | None) -> list[str]:
    step = result.step
    alone = name == COMPUTE
    same = {TENSOR: DTENSOR, SPLIT_GATHER: DTENSOR_SEQUENCE, RING: DTENSOR_SEQUENCE}.get(name)
    base = network.results.get(same or "")
    formula = formula_bytes(name, network.ranks, network.sizes) / 1e6 if name in OURS else None
    return [
        name,
        step.shown(".0f", 1e-3),
        "" if alone else f"{1e3 * (step.median - network.compute_s):.0f}",
        "" if alone else f"{step.median / network.compute_s:.2f}",
        f"{step.median / base.step.median:.2f}" if base else "",
        "" if result.wire is None or alone else f"{result.wire / 1e6:.1f}",
        "" if formula is None else f"{formula:.1f}",
        f"{result.saved / MIB:.1f}",
        "" if difference is None else f"{difference:.0e}",
    ]


def _figures(result: Entry) -> dict[str, Any]:
    return {
        "step_s": result.step.median,
        "quartiles_s": [result.step.low, result.step.high],
        "sent_bytes": result.wire,
        "kept_bytes": result.saved,
    }


def _notes(networks: Sequence[Network]) -> list[str]:
    return [
        "Compute: a step of a model with one rank's share of heads, widths and vocabulary, without "
        "communication, all ranks side by side. Communication, as a multiple of it: the "
        f"{reductions(networks[0].sizes)} all-reduces of plain tensor parallelism, alone.",
        "Exposed: ms of a step beyond compute. Kept: activations saved for backward. Bytes are "
        "payload, read from the interfaces' counters. All see the same global batch; AdamW, "
        f"fused, float32. {', '.join(PEERS[2:])} deal the batch out.",
        "Other processes used "
        + ", ".join(f"{n.foreign:.1f}" for n in networks)
        + " cores meanwhile, run by run.",
    ]
