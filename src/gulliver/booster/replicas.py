"""Data parallelism over replicas: torch's DDP or ZeRO."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gulliver.booster.hybrid.mesh import HybridMesh
from gulliver.booster.hybrid.optimizer import HybridOptimizer
from gulliver.booster.hybrid.steps import WholeModel, say
from gulliver.booster.limited import LimitedManager, keep_to_limit
from gulliver.comm.collectives import all_reduce, group_size
from gulliver.comm.torus import Torus
from gulliver.comm.world import World
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer, named_groups, named_trainables
from gulliver.parallel.pipeline.stage import Stage
from gulliver.parallel.zero.elementwise import is_boosted
from gulliver.parallel.zero.gate import GradientGate, ZeroWires
from gulliver.parallel.zero.optimizer import BufferSync, ZeroOptimizer
from gulliver.parallel.zero.tuner import BucketTuner
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Wire
from gulliver.planner.model import broadcast_all, no_optimizer, unwrapped
from gulliver.precision.wire.formats import wire_format


def share_ddp(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World
) -> tuple[nn.Module, BoostedOptimizer]:
    """Wraps the model with DDP, unless there is one rank or nothing to train."""
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
        model.watch_gradients(allreduce_hook if hook is None else hook.reduce)
    boosted = _DDPOptimizer(optimizer, names, model)
    boosted.feedback = hook
    boosted.checkpoint.describe_model(given_groups=given)
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
    uses: Sequence[str] = (),
) -> ZeroOptimizer:
    """Moves parameters into ZeRO chunks; the model stays the same object."""
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
        "uses": uses,
        "unequal": zero.unequal,
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
    boosted.checkpoint.describe_model(given_groups=whole.given)
    gate = boosted.shards.reducer.sender.gate
    if gate is not None:
        boosted.taken.more.append(lambda: gate.checking)
    keep_to_limit(plan, boosted, manager)
    return boosted


def tune(plan: Plan, model: nn.Module, boosted: ZeroOptimizer, verbose: bool) -> None:
    """Keeps buffers equal on all ranks, and tunes chunks in the first steps."""
    zero = plan.zero
    assert zero is not None, "the plan is of ZeRO"
    if zero.broadcast_buffers and boosted.size > 1:
        boosted.sync_buffers(BufferSync(model, boosted.group))
    if zero.tuning != "off" and boosted.size > 1 and boosted.names:
        folder = None if zero.report is None else Path(zero.report)
        report = say() if verbose else None
        again, early = zero.tuning == "again", boosted.steps_in_backward
        tuner = BucketTuner(boosted.shards, model, folder, report, again, early)
        boosted.taken.more.append(lambda: tuner.tuning)
        boosted.tune(tuner)


def zero_wires(plan: Plan) -> ZeroWires:
    wire = plan.wire
    reduce, gather = wire_format(wire.reduce), wire_format(wire.gather)
    return ZeroWires(reduce, gather, wire.error_feedback, wire.gate)


class BucketHook:
    """Reduces the buckets of torch's DDP in a wire format."""

    def __init__(self, wire: Wire, names: Mapping[Any, str]) -> None:
        self.wire, self.names = wire_format(wire.reduce), names
        self.feeds = wire.error_feedback
        self._lost: dict[int, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}
        self._given: dict[str, torch.Tensor] = {}
        self.gate = GradientGate(self.wire, wire.error_feedback, wire.gate)

    # No annotations: torch compares them with types, and accepts missing ones.
    def reduce(self, state, bucket):
        """Starts the reduction of a bucket; returns its future."""
        tensor, lost = bucket.buffer(), None
        cuda = tensor.is_cuda
        devices = [tensor.device] if cuda else None
        future: Any = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        if self.feeds:
            lost = self._lost_of(bucket, tensor)
        checking = self.gate.checking

        exact = tensor.clone() if checking else None
        if exact is not None:
            all_reduce(exact, "mean")
        packed = self.wire.of(tensor, tensor.numel() // group_size()).name != "identity"
        waits = cuda or checking or not packed
        handle = all_reduce(
            tensor,
            "mean",
            async_op=True,
            wire=self.wire,
            error=lost,
            finish=None if waits else lambda: future.set_result(tensor),
        )
        if waits:
            handle.wait()
            if exact is not None:
                self._compare(bucket, exact)
            future.set_result(tensor)
        return future

    def _lost_of(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> torch.Tensor:
        members = [self.names.get(p, "") for p in bucket.parameters()]
        views, lost = self._lost.get(bucket.index(), ({}, tensor))
        if list(views) != members:  # DDP rebuilds its buckets after a step
            self._given = self.lost()
            self._lost = {}
            lost, views = torch.zeros_like(tensor), {}
            runs = lost.split([g.numel() for g in bucket.gradients()])
            for name, run, gradient in zip(members, runs, bucket.gradients(), strict=True):
                views[name] = run.view(gradient.shape)
        for name in views.keys() & self._given.keys():
            views[name].copy_(self._given.pop(name))
        self._lost[bucket.index()] = views, lost
        return lost

    def lost(self) -> dict[str, torch.Tensor]:
        """Accumulated packing errors of this rank's gradients, by parameter."""
        found = dict(self._given)
        for views, _ in self._lost.values():
            found |= views
        return found

    def take_lost(self, found: Mapping[str, torch.Tensor]) -> None:
        self._lost, self._given = {}, dict(found) if self.feeds else {}

    def _compare(self, bucket: dist.GradBucket, exact: torch.Tensor) -> None:
        start = 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            run = slice(start, start + gradient.numel())
            self.gate.add(self.names.get(parameter, "a parameter"), gradient, exact[run])
            start += gradient.numel()
        if bucket.is_last():
            self.gate.end_step()


class _DDP(DistributedDataParallel):
    """DDP that forwards attributes to its module, so that loops work unchanged."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def watch_gradients(self, reduce: Callable[..., Any]) -> None:
        """Records which gradients this rank has accumulated since the last reduction."""
        # DDP reduces only in the backward of its own forward: not if a submodule was called
        # directly, nor inside `no_sync`. A bucket that it reduces contains all gradients so far.
        self.unreduced = unreduced = set[int]()  # by id: the hooks must not keep the parameters

        def reduced(state, bucket):  # torch compares annotations
            unreduced.difference_update(map(id, bucket.parameters()))
            return reduce(state, bucket)

        def added(parameter: Tensor) -> None:
            unreduced.add(id(parameter))

        self.register_comm_hook(None, reduced)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.watching = [p.register_post_accumulate_grad_hook(added) for p in trained]


class _DDPOptimizer(BoostedOptimizer):
    """The user's optimizer of a DDP model."""

    # [Note: what DDP does not reduce] The rest is reduced after backward, or before the step inside
    # `no_sync`: the mean over ranks is linear and does not change equal values, so a gradient may
    # already have been reduced in part. As with DDP, all ranks must make the same kinds of calls.

    def __init__(self, inner: torch.optim.Optimizer, names: Any, model: nn.Module) -> None:
        super().__init__(inner, names)
        self._model = model

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._model.no_sync() if isinstance(self._model, _DDP) else super().no_sync()

    @contextmanager
    def backward_pass(self) -> Iterator[float]:
        yield 1.0
        if isinstance(self._model, _DDP) and self._model.require_backward_grad_sync:
            self._reduce_rest()

    def _reduce_rest(self) -> None:
        """Reduces the gradients that DDP has not reduced."""
        model, mine = self._model, list(self.names)
        if not isinstance(model, _DDP) or model.unreduced.isdisjoint(map(id, mine)):
            return
        self._forget_added()
        sparse = [n for p, n in self.names.items() if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise GulliverError(
                f"the sparse gradient of {sparse[0]!r} was computed outside of the model's "
                "forward, or only inside no_sync; call the boosted model, or use an embedding "
                "with sparse=False"
            )
        used = torch.tensor([float(p.grad is not None) for p in mine], device=mine[0].device)
        all_reduce(used, "max")
        for parameter, anywhere in zip(mine, used.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = parameter.grad.detach()
            mean = own.contiguous()
            all_reduce(mean, "mean")
            own.copy_(mean)
        if model.will_sync_module_buffers():
            model._sync_buffers()

    def _step(self) -> None:
        self._reduce_rest()
        super()._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forget_added()
        super().zero_grad(set_to_none)

    def _forget_added(self) -> None:
        if isinstance(self._model, _DDP):
            self._model.unreduced.difference_update(map(id, self.names))

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        self._reduce_rest()
        return super().clip_grad_by_norm(max_norm, norm_type)

    def clip_grad_by_value(self, limit: float) -> None:
        self._reduce_rest()
        super().clip_grad_by_value(limit)

    def full_gradients(self) -> dict[str, Tensor]:
        self._reduce_rest()
        return super().full_gradients()

    def release(self, model: nn.Module) -> None:
        if isinstance(self._model, _DDP):
            for hook in self._model.watching:
                hook.remove()
        super().release(model)
