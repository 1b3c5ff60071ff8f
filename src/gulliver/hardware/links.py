"""Measures the links between ranks, and groups the ranks into nodes by speed.

Every pair of ranks exchanges messages of several sizes in both directions at once, in n - 1 rounds
of disjoint pairs. All rounds are repeated, so that a load spike affects each pair at most once;
latency and bandwidth are fitted to the medians. Then the collectives are timed along each axis,
because the CPU may be the bottleneck if many ranks communicate.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import LINK, Along, Axis, Curve, Link
from gulliver.hardware.costs import point_to_point_seconds
from gulliver.hardware.probe import curve_of, once

Pair = tuple[int, int]
Progress = Callable[[str], None]
MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 21)
COLLECTIVE_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
SWEEPS = 3
LONG_S, BUDGET_S = 0.3, 1.0
"""Once a size takes `LONG_S`, no larger one is measured; a collective is timed for `BUDGET_S`."""
EXCHANGES, EXCHANGES_S = 7, 0.05
"""Limits of a sweep per message size: number of exchanges, and seconds."""
FASTEST = LINK[0][1]
NEAR = 2.0  # links between nodes must be slower than the links inside nodes by this factor
BUSY_SIDE, BUSY_PRODUCTS = 512, 4
"""Side and number of the matrices multiplied before a collective that is timed under load."""
SEEN_BY = 1 << 20  # message size in bytes at which links are compared
OVERLAP_S, OVERLAP_COUNT, OVERLAP_TURNS = 0.1, 32, 5
"""Seconds of communication together with compute, the most collectives, and the number of turns."""


# [Note: from a meeting] All ranks synchronize before each timed message, as before each collective.
# Otherwise, a 1 KiB message among four ranks on two cores takes 4 ms instead of 0.4 ms: if the
# posting thread is preempted while it holds the lock of its connection, gloo's own thread, woken by
# the peer's next message, spins on that lock on the core that the posting thread needs, until its
# time slice ends.
#
# Start with `probe_links`, `pair_rounds`, `fit_line`, `group_into_nodes`, `proposed_axes`. Only
# nodes and their ranks are detected, not racks.
def probe_links(progress: Progress = lambda _: None) -> dict[Pair, Link]:
    """Measures the link of every pair of ranks (collective; the same result on all ranks)."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise GulliverError(
            "measuring links needs several ranks; run torchrun --nproc-per-node 2 -m gulliver probe"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    mine: dict[Pair, dict[int, list[float]]] = {}
    rounds = pair_rounds(size)
    for number, pairs in enumerate(rounds * SWEEPS):
        progress(f"links, round {number + 1} of {len(rounds) * SWEEPS}")
        pair = next((pair for pair in pairs if rank in pair), None)
        for count in MESSAGE_BYTES:
            times = _exchanges(None if pair is None else sum(pair) - rank, count)
            if pair is not None:
                mine.setdefault(pair, {}).setdefault(count, []).extend(times)
    found: list[dict[Pair, dict[int, list[float]]]] = [{} for _ in range(size)]
    dist.all_gather_object(found, mine)
    links = {}
    for low, high in itertools.combinations(range(size), 2):
        # Both ends of the link have measured it.
        ends = found[low][low, high], found[high][low, high]
        curve = curve_of({count: ends[0][count] + ends[1][count] for count in MESSAGE_BYTES})
        links[low, high] = replace(fit_line(curve.sizes, curve.seconds), messages=curve)
    return links


def probe_collectives(
    operations: Mapping[str, Callable[[int], Callable[[], object]]],
    ranks: int,
    progress: Progress = lambda _: None,
    turns: int = 9,
    busy: bool = False,
    sizes: Sequence[int] | None = None,
) -> dict[str, Curve]:
    """Times collectives along an axis (collective; the same result on all ranks)."""
    compute = _computing(link_device()) if busy else None
    device, item = link_device(), 4 * ranks
    wanted = sizes or COLLECTIVE_BYTES
    made = {(name, -(-count // item) * item): None for name in operations for count in wanted}
    runs = {(name, count): operations[name](count) for name, count in made}
    turns_of = _warmed_up(runs, turns, progress)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in turns_of}
    for turn in range(turns):
        progress(f"collectives along {ranks} ranks, round {turn + 1} of {turns}")
        for key in turns_of:
            if turn < turns_of[key]:
                dist.barrier()
                if compute is not None:
                    compute()
                times[key].append(once(runs[key], device))
    # The median rank of every round: the first rank to leave a barrier waits for the last one.
    all_times: list[dict[tuple[str, int], list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_times, times)
    middle = {
        key: [statistics.median(turn) for turn in zip(*(t[key] for t in all_times), strict=True)]
        for key in times
    }
    return {
        name: curve_of({count: middle[key, count] for key, count in times if key == name})
        for name in operations
    }


def probe_overlap(
    begin: Callable[[], Callable[[], object]], progress: Progress = lambda _: None
) -> float:
    """Measures how much of communication does not slow down compute (collective; a fraction).

    Args:
        begin: starts a collective along all ranks, and returns what waits for it.
        progress: called with what is measured.
    """
    # Sockets take time of the processors, which ranks that use all cores have to share.
    device = link_device()
    compute = _computing(device)

    def send(count: int) -> Callable[[], object]:
        waits = [begin() for _ in range(count)]
        return lambda: [wait() for wait in waits]

    def slowest(run: Callable[[], object]) -> float:
        took = [0.0] * dist.get_world_size()
        dist.all_gather_object(took, once(run, device))
        return max(took)

    slowest(lambda: send(1)())
    one, product = slowest(lambda: send(1)()), slowest(compute)
    count = max(1, min(OVERLAP_COUNT, round(OVERLAP_S / one)))
    products = max(1, round(count * one / product))

    def both() -> None:
        wait = send(count)
        for _ in range(products):
            compute()
        wait()

    found = []
    for turn in range(OVERLAP_TURNS):
        progress(f"communication together with compute, round {turn + 1} of {OVERLAP_TURNS}")
        sent_s = slowest(lambda: send(count)())
        computed_s = slowest(lambda: [compute() for _ in range(products)])
        hidden = sent_s + computed_s - slowest(both)
        found.append(hidden / min(sent_s, computed_s))
    return max(0.0, min(1.0, statistics.median(found)))


def pair_rounds(size: int) -> list[list[Pair]]:
    """Round-robin tournament: every pair of ranks once, in rounds of disjoint pairs."""
    ranks: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def fit_line(counts: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fits latency and bandwidth by least squares of relative errors."""
    # On a busy machine large messages may take no longer than small ones: the bandwidth is then the
    # largest allowed in a file, and the error shows the quality of the fit. Weights 1 / seconds:
    # microseconds of a small message count as much as those of a large one.
    weights = [1 / s for s in seconds]
    a = sum(w * w for w in weights)
    b = sum(w * w * c for w, c in zip(weights, counts, strict=True))
    d = sum(w * w * c * c for w, c in zip(weights, counts, strict=True))
    e, f = sum(weights), sum(w * c for w, c in zip(weights, counts, strict=True))
    determinant = a * d - b * b
    alpha = max(0.0, (e * d - b * f) / determinant)
    slope = (a * f - b * e) / determinant if alpha else f / d
    if slope < 1 / FASTEST:
        slope = 1 / FASTEST
        alpha = (e - b * slope) / a
    errors = [abs((alpha + slope * c) / s - 1) for c, s in zip(counts, seconds, strict=True)]
    return Link(alpha, min(1 / slope, FASTEST), max(errors))


def group_into_nodes(size: int, links: Mapping[Pair, Link]) -> list[list[int]]:
    """Groups ranks into nodes of equal size by link speed; a single node if links are similar."""
    # Pairs are joined in order of speed (single linkage). Groups of equal size are nodes if the
    # next join, over the fastest link between groups, takes at least `NEAR` times as long as the
    # previous one, over the slowest link needed within a group. If this happens several times, the
    # last time, with the fewest groups, counts. So noise creates no nodes, and a fast pair within a
    # node does not hide the node. A near pair that was measured as slow does no harm, because other
    # pairs connect its ranks.
    seconds = {pair: _seen_seconds(link) for pair, link in links.items()}
    group_of = [[rank] for rank in range(size)]
    best, before = [list(range(size))], float("inf")
    for low, high in sorted(seconds, key=lambda pair: seconds[pair]):
        if group_of[low] is group_of[high]:
            continue
        groups = list({id(group): group for group in group_of}.values())
        if seconds[low, high] >= NEAR * before and len({len(group) for group in groups}) == 1:
            best = groups
        before = seconds[low, high]
        joined = sorted(group_of[low] + group_of[high])
        for rank in joined:
            group_of[rank] = joined
    return [list(group) for group in best]


def proposed_axes(
    size: int, links: Mapping[Pair, Link]
) -> tuple[tuple[Axis, ...], tuple[int, ...] | None]:
    """Axes for ranks with these links, and the order in which ranks fill them."""
    # An axis is as fast as its slowest link.
    nodes = group_into_nodes(size, links)
    inside = {pair for node in nodes for pair in itertools.combinations(node, 2)}
    axes = []
    if len(nodes) > 1:
        axes.append(Axis("node", len(nodes), _slowest(links, set(links) - inside)))
    if len(nodes[0]) > 1:
        axes.append(Axis("local", len(nodes[0]), _slowest(links, inside)))
    order = tuple(rank for node in nodes for rank in node)
    return tuple(axes), None if order == tuple(range(size)) else order


def with_collectives(link: Link, along: Sequence[Along]) -> Link:
    """Adds measured collectives to a link, and a rank's seconds per additional message."""
    found = [
        (one.collectives[name].seconds[0] - link.alpha_s) / (one.ranks - 2)
        for one in along
        for name in ("reduce_scatter", "all_gather")
        if one.ranks > 2 and name in one.collectives
    ]
    message_s = max(0.0, statistics.median(found)) if found else 0.0
    return replace(link, message_s=message_s, along=tuple(along))


def link_device() -> torch.device:
    nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _computing(device: torch.device) -> Callable[[], object]:
    """Returns a function that keeps the device busy for a few milliseconds."""
    a, b, out = (torch.ones(BUSY_SIDE, BUSY_SIDE, device=device) for _ in range(3))

    def run() -> None:
        for _ in range(BUSY_PRODUCTS):
            torch.mm(a, b, out=out)

    return run


def _exchanges(peer: int | None, count: int) -> list[float]:
    """Seconds of two-way messages between all pairs of a round (collective)."""
    device = link_device()
    out = torch.ones(count, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def exchange() -> None:
        if peer is None:
            return
        # The receive is posted first, or the two directions would alternate.
        operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def met() -> float:
        dist.barrier()
        return once(exchange, device)

    took = [0.0] * dist.get_world_size()
    dist.all_gather_object(took, met())
    return [met() for _ in range(max(1, min(EXCHANGES, int(EXCHANGES_S / max(took)))))]


def _warmed_up(
    runs: Mapping[tuple[str, int], Callable[[], object]], turns: int, progress: Progress
) -> dict[tuple[str, int], int]:
    """Number of repetitions of each operation, measured after a warm-up; equal on all ranks."""
    found: dict[tuple[str, int], int] = {}
    too_long: set[str] = set()
    for name, count in sorted(runs, key=lambda key: key[1]):
        if name in too_long:
            continue
        progress(f"{name.replace('_', '-')} of {count} bytes")
        dist.barrier()
        took = [0.0] * dist.get_world_size()
        dist.all_gather_object(took, once(runs[name, count], link_device()))
        found[name, count] = max(3, min(turns, int(BUDGET_S / max(took))))
        if max(took) > LONG_S:
            too_long.add(name)
    return found


def _slowest(links: Mapping[Pair, Link], pairs: set[Pair]) -> Link:
    return max((links[pair] for pair in pairs), key=_seen_seconds)


def _seen_seconds(link: Link) -> float:
    return point_to_point_seconds(link, SEEN_BY)
