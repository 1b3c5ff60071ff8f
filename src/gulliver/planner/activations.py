"""Keeps, recomputes or offloads activations under a memory limit.

`gulliver.solve.choose_activations` decides per block under several activation budgets; model state
uses the remaining memory. The budget with the shortest predicted step wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from gulliver._compat import is_compiled
from gulliver.errors import GulliverError, nearest
from gulliver.hardware.offload import TierRates, seconds_text
from gulliver.memory.activations import ActivationOffload
from gulliver.memory.budget import BudgetRule, room_without_unseen, with_unseen
from gulliver.memory.manager import Manager
from gulliver.options import size_text
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Tiers, Work
from gulliver.planner.model import NO_BLOCKS, recomputable_blocks
from gulliver.planner.replay import Replay
from gulliver.planner.residency import state_needs
from gulliver.planner.state_bytes import BACKWARD, FORWARD, StateBytes
from gulliver.solve.activations import (
    ActivationChoice,
    BlockActivations,
    Choice,
    PassCosts,
    choose_activations,
    least_room,
)

MOSTLY = 0.5  # recompute all blocks if their activations exceed this share of the limit
ROOMS = 6  # number of activation budgets to try, in addition to the smallest one
STEPS = 3  # number of replayed steps; the last one predicts state traffic


def plan_activations(
    plan: Plan, model: nn.Module, state: Callable[[], StateBytes], rates: TierRates | None
) -> Plan:
    """Chooses which blocks are kept, recomputed or offloaded, unless the plan specifies it."""
    tiers = _tiers(plan)
    if tiers.activations == "auto":
        plan = _chosen(plan, model, state(), rates) if plan.work.blocks else _by_share(plan, model)
        tiers = _tiers(plan)
    if tiers.activations == "recompute" and not plan.recompute:
        blocks = recomputable_blocks(model)
        if not blocks:
            raise GulliverError(NO_BLOCKS)
        plan = replace(plan, recompute=blocks)
    if tiers.takes_activations:
        _check_offload(tiers, model)
    return plan


def _tiers(plan: Plan) -> Tiers:
    assert plan.tiers is not None, "the plan has a limit"
    return plan.tiers


def _decided(plan: Plan, mode: str, reason: str, offloaded: tuple[str, ...] = ()) -> Plan:
    tiers = replace(_tiers(plan), activations=mode, offloaded=offloaded)
    reasons = {**plan.reasons, "zero.tiers.activations": f"{mode}: {reason}"}
    return replace(plan.with_zero(tiers=tiers), reasons=reasons)


def _check_offload(tiers: Tiers, model: nn.Module) -> None:
    if tiers.disk is None and not tiers.host:
        raise GulliverError(
            f"activations={tiers.activations!r} needs a slower tier; set disk, or host_limit on a "
            "GPU"
        )
    if is_compiled(model):
        raise GulliverError(
            f"activations={tiers.activations!r} does not support a model that is compiled as one "
            "graph; compile its blocks separately"
        )
    paths = dict(model.named_modules())
    for path in tiers.offloaded:
        if path not in paths:
            raise GulliverError(
                f"zero.tiers.offloaded names {path!r}, which the model does not have: "
                f"{nearest(path, paths)}"
            )


def _by_share(plan: Plan, model: nn.Module) -> Plan:
    work, limit = plan.work, _tiers(plan).limit
    known = work.peak or work.activations
    mode = "recompute" if known > limit * MOSTLY and recomputable_blocks(model) else "keep"
    told = f"{size_text(known)} of {size_text(limit)}"
    if not known:
        told = "no sample was given"
    elif work.unfollowed:
        told += f", as far as could be measured ({work.unfollowed})"
    return _decided(plan, mode, told)


def _chosen(plan: Plan, model: nn.Module, state: StateBytes, rates: TierRates | None) -> Plan:
    tiers, work = _tiers(plan), plan.work
    again = set(recomputable_blocks(model))
    paths = [block.path for block in work.blocks if block.path]
    allowed: tuple[Choice, ...] = ("keep", "recompute", "offload")
    allowed = allowed if rates is not None else allowed[:2]
    again_s = {b.path: b.forward_s if b.path in again else math.inf for b in work.blocks}
    again_s[""] = math.inf  # activations outside of blocks are kept
    blocks = [
        BlockActivations(b.saved, b.output, b.working, b.movable, again_s[b.path])
        for b in work.blocks
    ]
    found = _best(blocks, state, tiers, work, rates, allowed)
    if found is None:
        whole = {"keep": work.peak, "recompute": work.peak_recomputed}
        whole |= {"offload": work.peak_offloaded} if rates is not None else {}
        mode = min((m for m in whole if whole[m]), key=lambda m: whole[m])
        return _decided(plan, mode, f"the minimum, {size_text(whole[mode])}")
    seconds, choice = found
    chosen: dict[str, tuple[str, ...]] = {
        kind: tuple(p for p, c in zip(paths, choice.choices, strict=False) if c == kind)
        for kind in allowed
    }
    counts = [f"{len(names)} {kind}" for kind, names in chosen.items() if names]
    mode = next((k for k, names in chosen.items() if len(names) == len(paths)), "mixed")
    told = (
        f"{', '.join(counts)} of {len(paths)} blocks, {seconds_text(seconds)} of forward, backward "
        f"and moves, {size_text(choice.peak)} at once; all kept they take {size_text(work.peak)}"
    )
    plan = replace(plan, work=replace(work, peak_mixed=choice.peak if mode == "mixed" else 0))
    plan = replace(plan, recompute=chosen["recompute"])
    return _decided(plan, mode, told, chosen.get("offload", ()) if mode == "mixed" else ())


def _best(
    blocks: Sequence[BlockActivations],
    state: StateBytes,
    tiers: Tiers,
    work: Work,
    rates: TierRates | None,
    allowed: Sequence[Choice],
) -> tuple[float, ActivationChoice] | None:
    rule = BudgetRule(tiers.limit)
    whole = tiers.limit - rule.margin
    least, _, most = state_needs(state, tiers)
    needed = least if rates is not None else most
    tried = list[tuple[float, int, ActivationChoice]]()
    # Offloaded activations are loaded while the state in use stays.
    extra = {allowed: max(block.movable for block in blocks), allowed[:2]: 0}
    for some, more in extra.items() if rates is not None else [(allowed, 0)]:
        least, most = least_room(blocks, some), room_without_unseen(whole - needed - more)
        most = min(most, work.peak)
        for part in range(ROOMS + 1) if most >= least else ():
            room = least + (most - least) * part // ROOMS
            costs, update = _pass_costs(state, tiers, whole - with_unseen(room), work, rates)
            found = choose_activations(blocks, room, costs, some)
            if math.isfinite(found.seconds):
                tried.append((found.seconds + update, found.peak, found))
    if not tried:
        return None
    # Among equals, the choice that keeps the most activations.
    seconds, _, found = min(tried, key=lambda t: (t[0], -t[1]))
    return seconds, found


def _pass_costs(
    state: StateBytes, tiers: Tiers, budget: int, work: Work, rates: TierRates | None
) -> tuple[PassCosts, float]:
    backward = work.backward_s + (work.update_s if tiers.step_in_backward else 0.0)
    if rates is None:
        return PassCosts(work.forward_s, backward), 0.0
    replay = Replay(state, budget, True, tiers, "farthest")
    visits = [replay.step() for _ in range(STEPS)][-1]
    busy = dict.fromkeys(("forward", "backward", "rest"), 0.0)
    for seen in visits:
        phase = seen.phase if seen.phase in (FORWARD, BACKWARD) else "rest"
        for move in seen.moves:
            rate = rates.write_rate if move.write else rates.read_rate
            busy[phase] += rates.latency_s + move.nbytes / rate
    update = 0.0 if tiers.step_in_backward else work.update_s
    return (
        PassCosts(
            work.forward_s,
            backward,
            busy[FORWARD],
            busy[BACKWARD],
            1 / rates.write_rate,
            1 / rates.read_rate,
        ),
        max(update, busy["rest"]),
    )


def manage_activations(
    plan: Plan, model: nn.Module, optimizer: ZeroOptimizer, manager: Manager | None
) -> None:
    """Registers the modules whose activations the plan offloads with the memory manager."""
    tiers = plan.tiers
    if manager is None or tiers is None:
        return
    paths = ("",) if tiers.activations == "offload" else tiers.offloaded
    if not paths:
        return
    shards = optimizer.shards
    hooks = (lambda t: shards.gatherer.pack(t)), (lambda saved: shards.gatherer.unpack(saved))
    offload, others = ActivationOffload(manager, outer=hooks), manager.release_idle

    def release_idle() -> None:
        offload.sweep()  # a chunk is stepped in backward, right after a node has ended
        if others is not None and not offload.saves:
            others()

    manager.release_with(release_idle)
    offload.wrap(model, paths)
