"""Memory limits: the manager of a plan's state, and the memory budget of a process.

The plan sets the bytes for state; the budget then adapts to the additional memory that steps need.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gulliver.memory.budget import BudgetController, Footprint, FreedMemory
from gulliver.memory.buffers import ACTIVATIONS
from gulliver.memory.host import HostDiskStore, HostStore
from gulliver.memory.manager import Manager
from gulliver.memory.stores import DiskStore, ManagedTensor, Store
from gulliver.memory.symbolic import ActivationPeak
from gulliver.memory.traffic import BufferStillReferenced
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Work
from gulliver.planner.residency import find_residency, other_bytes
from gulliver.planner.state_bytes import Shares, StateBytes
from gulliver.solve.replacement import Action, InsufficientMemory

# Divisor of the budget: freed memory is returned after this fraction of it has been added.
TRIMMED = 16

# Divisor of the state: host memory has this fraction in reserve, as slabs are powers of two.
SLACK = 4


class LimitedManager(Manager):
    """Keeps a plan's resident state on the device, with a budget that adapts to measurements."""

    def __init__(
        self,
        *arguments: Any,
        shares: Shares | None = None,
        other: int = 0,
        spare: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        # Shares of state that never leave the device; None lets the manager choose.
        self.shares = shares
        # Bytes that a step is predicted to need in addition to state; 0 if unknown.
        self.other = other
        # Bytes of the store that are left for activations.
        self.spare = spare
        # Sets the budget of the next step.
        self.controller: BudgetController | None = None
        self._kept = set[ManagedTensor]()
        # Memory of moved parameters is returned at once, as both copies may exceed the limit.
        self._freed, self._added = FreedMemory(), 0
        weakref.finalize(self, self._freed.close)
        # Bytes read and written by the last step.
        self.step_moved: tuple[int, int] = (0, 0)
        # The same between host memory and the disk behind it; None without a disk.
        self.disk_moved: tuple[int, int] | None = None
        self._before: dict[str, tuple[int, int]] = {}
        self._clock = (0.0, 0.0)

    def add(self, name: str, kind: str, *arguments: Any, **options: Any) -> ManagedTensor:
        """Adds an object, which is never evicted if the plan keeps it on the device."""
        placed = super().add(name, kind, *arguments, **options)
        if kind == ACTIVATIONS:
            self.spare -= placed.size
            if self.spare < 0:
                self.remove(placed)
                raise InsufficientMemory(
                    f"{name} does not fit: the rest of the host or disk tier is reserved for state"
                )
            return placed
        self._added += placed.nbytes
        if self._added > self.budget // TRIMMED:
            self._freed.trim()
            self._added = 0
        shares = None if placed.brief else self.shares
        if shares is not None and shares.keeps(kind, placed.nbytes):
            self.use(placed, write=True)
            self._kept.add(placed)
        return placed

    def remove(self, managed: ManagedTensor) -> None:
        if managed in self._kept:
            self._kept.remove(managed)
            self.done(managed)
        self.spare += managed.size if managed.kind == ACTIVATIONS else 0
        super().remove(managed)

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor:
        """Loads an object onto the device; lowers the budget first if memory is scarce."""
        if self.controller is not None:
            self.controller.check(managed.name)
        try:
            return super().use(managed, write, fresh)
        except BufferStillReferenced as error:  # views of recomputed blocks, in their graph
            if self.controller is None:
                raise
            self._grow(self.controller, str(error), error.budget)
        return super().use(managed, write, fresh)

    def _decided(self, decide: Callable[[], list[Action]]) -> list[Action]:
        """Decides moves; raises the budget if more activations are loaded back than planned."""
        try:
            return super()._decided(decide)
        except InsufficientMemory as error:
            if self.controller is None:
                raise
            self._grow(self.controller, str(error), error.budget)
        return super()._decided(decide)

    @staticmethod
    def _grow(controller: BudgetController, text: str, needed: int) -> None:
        """Raises the budget to the bytes needed; fails if that exceeds the limit."""
        if not controller.grow(needed):
            raise InsufficientMemory(f"{text}; {controller.least_limit(needed)}", needed) from None

    def end_step(self) -> None:
        super().end_step()
        stats = self.stats()
        self.step_moved = self._since("", stats)
        if stats["behind"]:
            self.disk_moved = self._since("behind", stats["behind"])
        if self.controller is not None:
            now, waited = time.perf_counter(), stats["seconds_waited"]
            began, waited_before = self._clock
            self._clock = now, waited
            # The first step creates all state, so it does not predict the next one.
            self.controller.end_step((waited - waited_before) / (now - began) if began else None)

    def _since(self, tier: str, stats: dict[str, Any]) -> tuple[int, int]:
        """Bytes that a tier has read and written since the last step."""
        moved = stats["bytes_in"], stats["bytes_out"]
        before = self._before.get(tier, (0, 0))
        self._before[tier] = moved
        return moved[0] - before[0], moved[1] - before[1]


def manager_of(
    plan: Plan, state: StateBytes, work: Work, device: torch.device
) -> LimitedManager | None:
    """Creates the manager of a plan's memory tiers, with its store; None without tiers."""
    tiers = None if plan.zero is None else plan.zero.tiers
    if tiers is None:
        return None
    found = find_residency(state, tiers, work)
    store = _store(plan, state, device)
    spare = 0 if store is None else store.capacity - replace(state, activations=()).reserved
    return LimitedManager(
        found.budget,
        device,
        store,
        ahead=tiers.ahead or None,
        shares=Shares.of(tiers),
        other=other_bytes(tiers, work),
        spare=spare,
    )


def _store(plan: Plan, state: StateBytes, device: torch.device) -> Store | None:
    assert plan.zero is not None, "only ZeRO has tiers"
    tiers = plan.zero.tiers
    assert tiers is not None, "there are tiers"
    # Memory is reserved at once, so no more than can be needed, if that is known.
    unknown = tiers.takes_activations and not plan.work.blocks
    if tiers.disk is not None:
        needed = tiers.disk_bytes if unknown else state.reserved
        disk = DiskStore(tiers.disk, min(tiers.disk_bytes, needed))
        return HostDiskStore(tiers.host, disk, device) if tiers.host else disk
    needed = tiers.host if unknown else state.reserved + state.reserved // SLACK
    return HostStore(min(tiers.host, needed), device) if tiers.host else None


def keep_to_limit(plan: Plan, optimizer: ZeroOptimizer, manager: LimitedManager | None) -> None:
    """Adapts a manager's budget to the memory that steps need in addition to state."""
    tiers = None if plan.zero is None else plan.zero.tiers
    if manager is None or tiers is None:
        return
    moved, known = plan.predicted.moved, weakref.ref(manager)

    def held() -> int:
        there = known()
        return 0 if there is None else there.held

    try:
        footprint = Footprint(held, manager.device)
    except OSError:
        footprint = None  # no /proc: the prediction is used
    manager.controller = BudgetController(
        tiers.limit,
        manager,
        footprint,
        ActivationPeak(manager.other or None, reason="the plan was made without a sample"),
        0 if moved is None else moved.needed,
        "" if moved is None else moved.decides,
        tiers.keep_freed,
    )
    weakref.finalize(optimizer, manager.controller.close)
