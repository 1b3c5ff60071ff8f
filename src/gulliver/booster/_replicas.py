"""How the ranks that hold the same parameters share the work: torch's DDP, or ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gulliver.booster._limited import LimitedManager, keep_to_limit
from gulliver.booster._model import RUNNING, broadcast_all, no_optimizer, unwrapped
from gulliver.booster._wires import BucketHook, zero_wires
from gulliver.booster.hybrid import HybridMesh, HybridOptimizer, WholeModel, say
from gulliver.comm import Torus, World
from gulliver.parallel import (
    BoostedOptimizer,
    BucketTuner,
    BufferSync,
    ZeroOptimizer,
    is_boosted,
    named_groups,
    named_trainables,
)
from gulliver.parallel.pipeline import Stage
from gulliver.plan import Plan


def share_ddp(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World
) -> tuple[nn.Module, BoostedOptimizer]:
    """Wraps the model with DDP; in a world of one, or not to be trained, it stays as it is."""
    assert plan.ddp is not None, "the plan is of DDP"
    hook: BucketHook | None = None
    plain, idle = unwrapped(model), optimizer is None
    names = {} if optimizer is None else named_trainables(plain, optimizer)
    optimizer = optimizer or no_optimizer()
    given = named_groups(plain, optimizer, frozen=True)
    if idle and world.size > 1:
        broadcast_all([*plain.parameters(), *plain.buffers()])
    elif world.size > 1 and plain is model:
        model = _DDP(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            find_unused_parameters=plan.ddp.find_unused_parameters,
            bucket_cap_mb=plan.ddp.bucket_mb,
            static_graph=plan.ddp.static_graph,
            gradient_as_bucket_view=True,
        )
        if plan.wire.reduce != "identity":
            hook = BucketHook(plan.wire, names)
            model.register_comm_hook(None, hook.reduce)
    boosted = _DDPOptimizer(optimizer, names, model)
    boosted.feedback = hook
    boosted.given_groups = given
    return model, boosted


def share_zero(
    plan: Plan,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    whole: WholeModel,
    mesh: HybridMesh | None,
    stage: Stage | None,
    manager: LimitedManager | None = None,
) -> ZeroOptimizer:
    """Moves parameters into chunks; the model stays the object that it was."""
    zero = plan.zero
    assert zero is not None, "the plan is of ZeRO"
    rest = {p: n for n, p in model.named_parameters() if p not in names and not is_boosted(p)}
    order = [name for chunk in zero.chunks for name in chunk.tensors]
    options: dict[str, Any] = {
        "chunk_bytes": zero.chunk_bytes,
        "max_norm": plan.max_norm or math.inf,
        "assume_elementwise": zero.assume_elementwise,
        "assume_per_parameter": zero.assume_per_parameter,
        "frozen": rest,
        "ahead": zero.gather_ahead,
        "overlap": zero.overlap,
        "manager": manager,
        "step_in_backward": zero.steps_in_backward,
        "order": list(dict.fromkeys([*order, *whole.order])),
        "wires": zero_wires(plan),
    }
    if mesh is not None:
        frozen = [p for p, name in rest.items() if whole.aliases[name] in whole.frozen]
        boosted: ZeroOptimizer = HybridOptimizer(
            inner, names, mesh, whole.groups, stage, zero.stage, frozen, **options
        )
    else:
        torus, order = plan.mesh.torus, plan.mesh.rank_order or None
        group = Torus(torus, order, plan.mesh.device) if torus else None
        boosted = ZeroOptimizer(inner, names, zero.stage, group=group, **options)
    boosted.given_groups = whole.given
    gate = boosted.shards.reducer.sender.gate
    boosted.taken.more.append(lambda: gate.checking)
    keep_to_limit(plan, boosted, manager)
    return boosted


def tune(plan: Plan, model: nn.Module, boosted: ZeroOptimizer, verbose: bool) -> None:
    """Keeps running statistics alike, and lets the first steps find the size of chunks."""
    zero = plan.zero
    assert zero is not None, "the plan is of ZeRO"
    if zero.broadcast_buffers and boosted.size > 1:
        boosted.buffers = BufferSync(model, boosted.group, RUNNING)
    if zero.tuning != "off" and boosted.size > 1 and boosted.names:
        folder = None if zero.report is None else Path(zero.report)
        report = say() if verbose else None
        again, early = zero.tuning == "again", boosted.steps_in_backward
        tuner = BucketTuner(boosted.shards, model, folder, report, again, early)
        boosted.taken.more.append(lambda: tuner.tuning)
        boosted.tune(tuner)


class _DDP(DistributedDataParallel):
    """DDP that lets the attributes of its module through, so that a loop need not know of it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _DDPOptimizer(BoostedOptimizer):
    """The user's optimizer beside a DDP model."""

    def __init__(self, inner: torch.optim.Optimizer, names: Any, model: nn.Module) -> None:
        super().__init__(inner, names)
        self._model = model

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._model.no_sync() if isinstance(self._model, _DDP) else super().no_sync()
