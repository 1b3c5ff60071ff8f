"""Plans which state stays on the device and which moves, and predicts the cost.

`find_residency` replays a plan's steps; if the limit is too small, the error names the smallest
sufficient one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.offload import (
    TieredSeconds,
    TierRates,
    Transfer,
    Visit,
    disk_rates,
    host_rates,
    seconds_text,
    tiered_seconds,
)
from gulliver.memory.budget import BudgetRule, smallest_limit
from gulliver.memory.stores import whole_pages
from gulliver.memory.symbolic import ActivationPeak
from gulliver.options import size_at_least, size_text
from gulliver.parallel.zero.memory import ChunkBytes
from gulliver.plan.results import MemoryPlan, TierTraffic
from gulliver.plan.tree import Tiers, Work
from gulliver.planner.replay import Replay, ReplayedUse
from gulliver.planner.state_bytes import BACKWARD, FORWARD, UPDATE, Key, StateBytes
from gulliver.solve.replacement import Policy

STEPS, MORE = 4, 2  # steps after which the moves repeat, with two tiers and with three
ENDLESS = 1 << 60
GIB = 2**30
KNOWN = 32  # number of cached replays; one `boost` needs the same ones several times
FEW, MANY = 8, 96  # bounds on the number of chunks; sizes that yield fewer or more are not tried


@dataclass(frozen=True)
class StateResidency:
    """Residency of a rank's state over a step under a memory limit."""

    # State of a rank.
    state: StateBytes
    # Uses of state, in the order of the replay.
    visits: Sequence[ReplayedUse]
    # Peak bytes of device memory, by kind.
    bytes: dict[str, int]
    # Bytes of device memory for state.
    budget: int
    # State that stays on the device, state that leaves it, and the traffic.
    moved: TierTraffic

    def seconds(self, work: Work, rates: TierRates) -> TieredSeconds:
        """Time of a step; with three tiers, limited by the slower link."""
        found = tiered_seconds(_visits(self.visits, work, self.state), rates)
        if rates.behind is None:
            return found
        lower = [replace(seen, moves=seen.behind) for seen in self.visits]
        other = tiered_seconds(_visits(lower, work, self.state), rates.behind)
        return max(found, other, key=lambda seconds: (seconds.step, seconds.busy))


def other_bytes(tiers: Tiers, work: Work) -> int:
    """Peak bytes of a step in addition to state; 0 if unknown."""
    found = {
        "recompute": work.peak_recomputed,
        "offload": work.peak_offloaded,
        "mixed": work.peak_mixed,
    }
    return found.get(tiers.activations) or work.peak


def least_bytes(state: StateBytes, tiers: Tiers) -> int:
    least, _, most = state_needs(state, tiers)
    return least if tiers.host or tiers.disk is not None else most


@lru_cache(maxsize=KNOWN)
def state_needs(state: StateBytes, tiers: Tiers) -> tuple[int, int, int]:
    """Returns the bytes needed at once, the chunk that determines them, and total state bytes."""
    endless = _endless(state, tiers)
    # A backward that accumulates does not step, nor does one that waits for clipping.
    waiting = replace(tiers, step_in_backward=False)
    tightest = endless if tiers == waiting else max(endless, _endless(state, waiting), key=_needs)
    needed, deciding = max((tightest.minimum, tightest.decides), largest_made(state))
    return needed + _again(state), deciding, endless.most


@lru_cache(maxsize=KNOWN)
def find_residency(
    state: StateBytes, tiers: Tiers, work: Work, policy: Policy = "planned"
) -> StateResidency:
    other = other_bytes(tiers, work)
    least, deciding, most = state_needs(state, tiers)
    behind = tiers.disk_bytes + tiers.host
    decides = _named(state, deciding)
    if not behind:
        needed = size_at_least(smallest_limit(least, other))
        least = most
        decides = f"all state, as there is no slower tier (with a disk {needed} would suffice)"
    rule = BudgetRule(tiers.limit, least)
    budget = rule.begin(ActivationPeak(other), decides)
    roomy = most + state.reserved - state.total
    # A disk also serves steps that need more memory than planned, in which any state may leave.
    if 0 < behind < state.reserved and (budget < roomy or tiers.disk is not None):
        _refuse_behind(state, tiers, behind, smallest_limit(roomy, other), budget < roomy)
    if tiers.host and tiers.disk is not None:
        _check_host(state, tiers)
    replay = Replay(state, budget, bool(behind), tiers, policy)
    left, visits = set[Key](), list[ReplayedUse]()
    for _ in range(STEPS + MORE * (replay.behind is not None)):
        visits = replay.step()
        left |= replay.held.left
    # For a third tier, the traffic of a late step: at first everything that leaves may pass
    # through.
    lower = set[Key]() if replay.behind is None else replay.behind.left
    stays, leaves, on_disk = dict[str, int](), dict[str, int](), dict[str, int]()
    for one in state.objects():
        for where in (leaves if one.key in left else stays, *([on_disk] * (one.key in lower))):
            where[one.kind] = where.get(one.kind, 0) + one.nbytes
    moved = TierTraffic(
        minimum=smallest_limit(least, other),
        needed=least,
        decides=decides,
        stays=MemoryPlan(**stays),
        leaves=MemoryPlan(**leaves),
        read=sum(m.nbytes for seen in visits for m in seen.moves if not m.write),
        written=sum(m.nbytes for seen in visits for m in seen.moves if m.write),
        on_disk=MemoryPlan(**on_disk),
        disk_read=sum(m.nbytes for seen in visits for m in seen.behind if not m.write),
        disk_written=sum(m.nbytes for seen in visits for m in seen.behind if m.write),
    )
    return StateResidency(state, visits, replay.counter.fullest, budget, moved)


def largest_made(state: StateBytes) -> tuple[int, int]:
    """Returns the bytes of the largest chunk including its shard, and the chunk's number."""
    made = (whole_pages(chunk.whole) + whole_pages(chunk.shard) for chunk in state.chunks)
    return max(((size, number) for number, size in enumerate(made)), default=(0, 0))


def _endless(state: StateBytes, tiers: Tiers) -> Replay:
    replay = Replay(state, ENDLESS, True, tiers, "farthest")
    for _ in range(STEPS):
        replay.step()
    return replay


def _needs(replay: Replay) -> int:
    return replay.minimum


def _again(state: StateBytes) -> int:
    """Extra bytes that several ranks need if modules run in a different order than planned."""
    # In that case one chunk is gathered again and stays. Others reuse the memory of gradients in
    # flight, whose reduction is awaited early if memory runs out.
    return max((c.whole + c.shard for c in state.chunks), default=0) if state.parts > 1 else 0


def _refuse_behind(state: StateBytes, tiers: Tiers, behind: int, roomy: int, needed: bool) -> None:
    """Raises an error: any object may be evicted, but the slower tiers cannot hold all of them."""
    # Full gradients may be evicted as well during accumulation.
    named = [f"disk={tiers.disk!r}"] if tiers.disk is not None else []
    named += ["host_limit"] if tiers.host else []
    gives, each = ("gives", "it") if len(named) == 1 else ("give", "them")
    why = "do not fit the memory limit" if needed else "may have to be evicted"
    instead = f"raise the limit to {size_at_least(roomy)}" if needed else f"omit {each}"
    raise GulliverError(
        f"{' and '.join(named)} {gives} {size_text(behind)}, but {size_text(state.reserved)} of "
        f"state {why}; set {each} to {size_at_least(state.reserved)}, or {instead}"
    )


def _check_host(state: StateBytes, tiers: Tiers) -> None:
    """Rejects a host tier without room for transfers between device and disk."""
    largest = max((whole_pages(one.nbytes) for one in state.objects()), default=0)
    least, beyond = largest, state.reserved - tiers.disk_bytes
    if beyond > 0:
        least += beyond + largest  # where one does not fit, the disk's last pages stay empty
    if tiers.host < least:
        raise GulliverError(
            f"host_limit={size_text(tiers.host)} is too small for disk={tiers.disk!r} with "
            f"{size_text(tiers.disk_bytes)}: transfers and state beyond the disk need "
            f"{size_text(least)}; set it to {size_at_least(least)}, or omit it"
        )


def _named(state: StateBytes, number: int) -> str:
    if not state.chunks:
        return "no chunk"
    chunk = state.chunks[number]
    first, *rest = chunk.names
    more = f" and {len(rest)} more" if rest else ""
    return f"chunk {number} ({first}{more}, {size_text(chunk.whole)})"


def _visits(visits: Sequence[ReplayedUse], work: Work, state: StateBytes) -> list[Visit]:
    """Visits with their times; a phase's time is divided among chunks by size."""
    whole = {
        phase: sum(state.chunks[s.chunk].whole for s in visits if s.phase == phase) or 1
        for phase in (FORWARD, BACKWARD)
    }
    trained = sum(chunk.whole for chunk in state.chunks if chunk.trained) or 1
    in_backward = not any(seen.phase == UPDATE for seen in visits)
    found = []
    for seen in visits:
        chunk = state.chunks[seen.chunk]
        phases = {
            FORWARD: work.forward_s * chunk.whole / whole[FORWARD],
            BACKWARD: work.backward_s * chunk.whole / whole[BACKWARD],
            UPDATE: work.update_s / state.parts * chunk.whole * chunk.trained / trained,
        }
        seconds = phases.get(seen.phase, 0.0)
        stepped = seen.phase == BACKWARD and in_backward and chunk.trained
        if stepped:
            seconds += phases[UPDATE]
        moves = tuple(Transfer(m.nbytes, m.write, m.until, m.room) for m in seen.moves)
        found.append(Visit(seconds, moves, 1 + stepped, _passed(chunk, seen.phase)))
    return found


def _passed(chunk: ChunkBytes, phase: str) -> int:
    # Parameters are checksummed when gathered and freed, to notice writes; gradients are copied.
    # Memory written without having been read counts twice.
    gathered = (chunk.shard + 2 * chunk.whole) * chunk.copied
    if phase == FORWARD:
        return 2 * chunk.whole + gathered
    return (chunk.whole * (1 + 3 * chunk.trained) + gathered) * (phase == BACKWARD)


def tier_rates(tiers: Tiers, cluster: Cluster) -> TierRates | None:
    """Rates of the slower tiers; None if there are none or they are unknown."""
    disk = disk_rates(cluster) if tiers.disk is not None else None
    host = host_rates(cluster.device) if tiers.host else None
    return disk if host is None else replace(host, behind=disk)


def priced(
    found: StateResidency, tiers: Tiers, work: Work, cluster: Cluster
) -> tuple[TierTraffic, TieredSeconds | None]:
    """Adds the bottleneck and the value of memory to the traffic; also returns the step time."""
    rates = tier_rates(tiers, cluster)
    if rates is None:
        return found.moved, None
    seconds = found.seconds(work, rates)
    more = max(tiers.limit // 4, 1) if tiers.limit < 2 * GIB else GIB
    with_more = find_residency(found.state, replace(tiers, limit=tiers.limit + more), work)
    saved = seconds.step - with_more.seconds(work, rates).step
    price = f"{size_text(more)} more saves {seconds_text(saved)} per step" if saved > 0 else ""
    return replace(found.moved, bottleneck=seconds.bottleneck, price=price), seconds


def chunk_sizes(whole: int) -> list[int]:
    """Chunk sizes to try, in bytes: powers of two that yield a reasonable number of chunks."""
    sizes = [2**power for power in range(12, 31)]
    return [size for size in sizes if FEW <= whole / size <= MANY] or sizes[:1]
