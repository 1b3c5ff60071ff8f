"""Applies an operator plan: parameters become DTensors, and calls run as planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from gulliver.comm.world import World
from gulliver.errors import GulliverError
from gulliver.memory.activations import wrap_call
from gulliver.operators.plans import Program, axes_of, form_of, program_of
from gulliver.operators.recompute import SavedCalls
from gulliver.operators.rules import placements
from gulliver.operators.run import OperatorMode, changed, local_of, spread, whole_of
from gulliver.parallel.optimizer import (
    BoostedOptimizer,
    OptimizerCheckpoint,
    has_stepped,
    move_state_to_replacements,
    named_groups,
    named_trainables,
)
from gulliver.parallel.zero.elementwise import check_optimizer
from gulliver.plan.plan import Plan
from gulliver.planner.model import broadcast_all, no_optimizer


def check_operators(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Program:
    """Rejects unsupported models and plans without changing them; returns the program."""
    if optimizer is not None:
        check_optimizer(optimizer, 1)
        named_trainables(model, optimizer)
        if has_stepped(optimizer):
            raise GulliverError(
                "the optimizer has stepped before boost: call boost before the first step"
            )
    half = [n for n, b in model.named_buffers() if b.requires_grad]
    if half:
        raise GulliverError(f"buffer {half[0]!r} requires gradients: make it a parameter")
    return program_of(plan, model)


def share_operators(
    plan: Plan,
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
) -> tuple[nn.Module, OperatorOptimizer]:
    """Applies the program of `check_operators` to a model and its optimizer."""
    if world.size > 1:
        broadcast_all([*model.parameters(), *model.buffers()])
    axes = axes_of(plan.mesh)
    mesh = init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    inner = optimizer or no_optimizer()
    given = named_groups(model, inner, frozen=True) if optimizer is not None else []
    swapped = _distribute(model, program, mesh)
    for group in inner.param_groups:
        group["params"] = [swapped.get(p, p) for p in group["params"]]
    move_state_to_replacements(inner, swapped)
    names = named_trainables(model, inner) if optimizer is not None else {}
    engine = _Engine(plan, program, mesh)
    wrap_call(model, engine.call)
    boosted = OperatorOptimizer(inner, names, engine)
    boosted.checkpoint.describe_model(given_groups=given)
    return model, boosted


def _distribute(
    model: nn.Module, program: Program, mesh: DeviceMesh
) -> dict[nn.Parameter, nn.Parameter]:
    """Replaces parameters with DTensors; returns the new parameter of each old one."""
    known: dict[nn.Parameter, nn.Parameter] = {}
    names = {p: n for n, p in model.named_parameters()}
    whole = (Replicate(),) * mesh.ndim
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in known:
                layout = program.parameters.get(names[parameter])
                wanted = whole if layout is None else placements(layout)
                there = changed(spread(parameter.detach(), mesh, whole), wanted)
                own = spread(local_of(there).clone(), mesh, wanted, parameter.shape)
                known[parameter] = nn.Parameter(own, parameter.requires_grad)
            module._parameters[key] = known[parameter]
    return known


class _Engine:
    def __init__(self, plan: Plan, program: Program, mesh: DeviceMesh) -> None:
        assert plan.operators is not None, "the plan is of operators"
        self.program, self.mesh = program, mesh
        self._form = plan.operators.batch

    def call(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        form = form_of((args, kwargs))
        if form != self._form:
            raise GulliverError(
                f"the plan is for the batch {_described(self._form)}, but this batch is "
                f"{_described(form)}; plan again for it, or pad it"
            )
        program = self.program
        again = SavedCalls(program.runs, program.stays) if program.runs else None
        trace = program.graph.trace
        mode = OperatorMode(program.calls, trace, self.mesh, again)
        if again is not None:
            again.runner = mode
        with mode:
            out = forward(*args, **kwargs)
        mode.end()
        layouts = {v: g for c in program.calls for v, g in zip(c.call.gives, c.gives, strict=True)}
        numbers = iter(trace.outputs)

        def left(tensor: Tensor) -> Tensor:
            number = next(numbers)
            return mode.left(tensor, number, layouts.get(number, ()))

        return pytree.tree_map_only(Tensor, left, out)


def _described(form: dict[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in form.items())


class OperatorCheckpoint(OptimizerCheckpoint):
    """Rejects saving, because model files cannot contain DTensor parameters."""

    @property
    def has_whole_model(self) -> bool:
        return False

    def model_leaves(self, model: nn.Module) -> Any:
        raise _unsaved()

    def state_leaves(self) -> Any:
        raise _unsaved()


class OperatorOptimizer(BoostedOptimizer):
    """The user's optimizer on DTensor parameters."""

    spreads_state = True

    def __init__(self, inner: torch.optim.Optimizer, names: Any, engine: _Engine) -> None:
        super().__init__(inner, names)
        self.checkpoint = OperatorCheckpoint(self)
        self.engine = engine

    def gradient_bytes(self) -> int:
        return sum(local_of(_spread(p.grad)).nbytes for p in self.names if p.grad is not None)

    def parameter_bytes(self, model: nn.Module) -> int:
        return sum(local_of(_spread(p)).nbytes for p in model.parameters())

    def full_gradients(self) -> dict[str, Tensor]:
        found = {n: p.grad for p, n in self.names.items() if p.grad is not None}
        return {name: whole_of(grad, self.engine.mesh) for name, grad in found.items()}

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        self.check_norm(max_norm, norm_type)
        if norm_type != 2:
            raise GulliverError(
                f"norm_type={norm_type} is not supported by a plan of operators; use 2"
            )
        squares = torch.zeros((), dtype=torch.float64)
        grads = [_spread(p.grad) for p in self.names if p.grad is not None]
        for grad in grads:
            own = torch.linalg.vector_norm(local_of(grad), dtype=torch.float64).square()
            copies = 1
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                copies *= size if isinstance(placement, Replicate) else 1
            squares = squares.to(own.device) + own / copies
        for axis in range(self.engine.mesh.ndim):
            torch.distributed.all_reduce(squares, group=self.engine.mesh.get_group(axis))
        norm = squares.sqrt()
        if max_norm != float("inf"):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads:
                local_of(grad).mul_(scale.to(grad.dtype))
        return norm

    def export_state(self, keep: bool = True) -> Any:
        raise _unsaved()

    def release(self, model: nn.Module) -> None:
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in known:
                        whole = whole_of(parameter, self.engine.mesh).clone()
                        known[parameter] = nn.Parameter(whole, parameter.requires_grad)
                    module._parameters[key] = known[parameter]
        vars(model).pop("forward", None)


def _spread(tensor: Any) -> DTensor:
    assert isinstance(tensor, DTensor), "parameters of a plan of operators are DTensors"
    return tensor


def _unsaved() -> GulliverError:
    return GulliverError(
        "a model with sharded operators cannot be saved: call booster.release(model) first, or "
        "use torch.distributed.checkpoint"
    )
