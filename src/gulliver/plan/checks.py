"""Rejects plans whose values contradict each other or the launch; errors name the lines.

Conflicts with the model are rejected when a plan is resolved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from gulliver.errors import GulliverError, nearest
from gulliver.plan.plan import Plan, written
from gulliver.plan.tree import (
    AXES,
    MODEL_AXES,
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    PipelineLayout,
    TensorLayout,
)
from gulliver.precision.wire.formats import wire_format

LONGEST = 120
SECTIONS = ("zero", "ddp", "operators")
WHOLE_MODELS = {
    "ddp": "zero with stage 0, which is equivalent",
    "zero.tuning": "off, with zero.chunk_bytes",
    "zero.broadcast_buffers": "false",
    "mesh.torus": "{}",
}
"""Options that need an unsharded model, each with the valid value for a sharded one."""


def check_plan(plan: Plan, ranks: int) -> None:
    """Rejects a plan that cannot run on this number of ranks, regardless of the model."""
    checks = [_mesh(plan, ranks)]
    if plan.operators is not None:
        checks.append(_operators(plan))
    else:
        checks += [_shards(plan), _unused(plan), _sequence(plan), _pipeline(plan), _tiers(plan)]
        checks += [_step_in_backward(plan), _fp8(plan), _wire(plan)]
    for contradictions in checks:
        for text in contradictions:
            raise GulliverError(text)


def _clash(plan: Plan, *names: str, why: str) -> str:
    """Formats an error that names conflicting values, their lines and the reason."""
    return f"{' and '.join(_shown(plan, name) for name in names)}: {why}"


def _shown(plan: Plan, name: str) -> str:
    if name in SECTIONS:
        value = "null" if getattr(plan, name) is None else "given"
    elif name in ("mesh.axes", "mesh.torus"):
        sizes = plan.mesh.axes if name == "mesh.axes" else plan.mesh.torus
        value = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    else:
        told = plan.describe_field(name)
        return told if len(told) <= LONGEST else f"{name}: ... {told[told.rfind('(line') :]}"
    return f"{name}: {value}{plan.line_text(name)}"


def _mesh(plan: Plan, ranks: int) -> Iterator[str]:
    mesh = plan.mesh
    for name in mesh.axes:
        if name not in AXES:
            yield f"mesh.axes has no axis {name!r}: {nearest(name, AXES)}"
    if list(mesh.axes) != [name for name in AXES if name in mesh.axes]:
        yield f"mesh.axes are out of order: name them outer to inner, as in {', '.join(AXES)}"
    if mesh.size != ranks:
        yield f"{_shown(plan, 'mesh.axes')} make {mesh.size} ranks, but there are {ranks}"
    if mesh.torus and math.prod(mesh.torus.values()) != mesh.size:
        yield _clash(plan, "mesh.torus", "mesh.axes", why="a torus must have all ranks of the mesh")
    if mesh.rank_order and sorted(mesh.rank_order) != list(range(mesh.size)):
        yield _clash(
            plan, "mesh.rank_order", why=f"it must name each of the {mesh.size} ranks once"
        )
    if mesh.rank_order and not mesh.torus:
        yield _clash(plan, "mesh.rank_order", "mesh.torus", why="set the axes of the torus")


def _operators(plan: Plan) -> Iterator[str]:
    """Yields choices that conflict with per-operator sharding."""
    for name in ("zero", "ddp"):
        if getattr(plan, name) is not None:
            yield _clash(plan, "operators", name, why=f"use {name}: null")
    default = Plan()
    for name in ("tensor", "sequence", "pipeline", "recompute", "precision", "max_norm", "weights"):
        if getattr(plan, name) != getattr(default, name):
            given = f"{name}: given{plan.line_text(name)}"
            yield f"{_shown(plan, 'operators')} and {given}: operators determine it; omit it"
    if plan.mesh.torus:
        yield _clash(plan, "operators", "mesh.torus", why="operators must match mesh.axes")


def _shards(plan: Plan) -> Iterator[str]:
    zero = plan.zero
    if (zero is None) == (plan.ddp is None):
        yield _clash(plan, "zero", "ddp", why="exactly one of them must be set")
    given = {
        "ddp": plan.ddp is not None,
        "zero.tuning": zero is not None and zero.tuning != "off",
        "zero.broadcast_buffers": zero is not None and zero.broadcast_buffers,
        "mesh.torus": bool(plan.mesh.torus),
    }
    cutting = [f"mesh.axes.{name}" for name in MODEL_AXES if plan.mesh.of(name) > 1]
    for name, right in WHOLE_MODELS.items():
        if cutting and given[name]:
            why = f"the second needs an unsharded model; use {right}"
            yield _clash(plan, cutting[0], name, why=why)
    if plan.ddp is not None and plan.precision.parameters != "none":
        why = "DDP has no float32 master weights; use zero, or precision.autocast"
        yield _clash(plan, "ddp", "precision.parameters", why=why)
    if plan.ddp is not None and plan.max_norm:
        yield _clash(
            plan, "ddp", "max_norm", why="under DDP the training loop clips; use max_norm: 0.0"
        )


def _unused(plan: Plan) -> Iterator[str]:
    """Yields values without effect, of an axis with one rank or of unused number formats."""
    for axis, default in (("pipeline", PipelineLayout()), ("tensor", TensorLayout())):
        layout = getattr(plan, axis)
        changed = {
            f"{axis}.{one.name}": getattr(default, one.name)
            for one in fields(default)
            if getattr(layout, one.name) != getattr(default, one.name)
        }
        if plan.mesh.of(axis) == 1 and changed:
            given = ", ".join(_shown(plan, name) for name in changed)
            right = ", ".join(f"{name}: {written(value)}" for name, value in changed.items())
            size = _shown(plan, f"mesh.axes.{axis}")
            yield f"{size} and {given}: has no effect with one rank; use {right}"
    if plan.precision.kept and plan.precision.parameters == "none":
        why = "nothing is converted to 16 bits; use kept: []"
        yield _clash(plan, "precision.parameters", "precision.kept", why=why)


def _sequence(plan: Plan) -> Iterator[str]:
    sequence, size = plan.sequence, plan.mesh.of("sequence")
    own, both = ", ".join(SHARED_BY_SEQUENCE), ("mesh.axes.sequence", "sequence.mode")
    if sequence.degree != size:
        names = ("mesh.axes.sequence", "sequence.ulysses", "sequence.outer", "sequence.inner")
        yield _clash(plan, *names, why=f"the product of the last three must be {size}")
    if sequence.mode is None and size > 1:
        yield _clash(plan, *both, why=f"set a mode, one of {own}")
    if sequence.mode in (*SHARED_BY_SEQUENCE, "auto") and size == 1:
        yield _clash(
            plan,
            *both,
            why="this mode needs at least 2 ranks per sequence; otherwise use mode: null",
        )
    if sequence.mode in SHARED_BY_TENSOR and plan.mesh.of("tensor") == 1:
        why = f"this mode needs at least 2 ranks on the tensor axis; otherwise use one of {own}"
        yield _clash(plan, "mesh.axes.tensor", "sequence.mode", why=why)
    if sequence.mode in SHARED_BY_TENSOR and size > 1:
        yield _clash(plan, *both, why="this mode has no separate sequence ranks")
    if sequence.mode == "all_to_all" and sequence.outer * sequence.inner > 1:
        why = "this mode has no ring; use ring_attn, or ulysses instead of inner and outer"
        yield _clash(plan, "sequence.mode", "sequence.inner", why=why)


def _pipeline(plan: Plan) -> Iterator[str]:
    pipeline, size = plan.pipeline, plan.mesh.of("pipeline")
    stages = size * pipeline.chunks_per_rank
    if size > 1 and pipeline.cut and stages and len(pipeline.cut) not in (stages, stages - 1):
        names = ("pipeline.cut", "mesh.axes.pipeline", "pipeline.chunks_per_rank")
        yield _clash(plan, *names, why=f"{len(pipeline.cut)} stages, not {stages}")


def _tiers(plan: Plan) -> Iterator[str]:
    zero, tiers = plan.zero, plan.tiers
    if zero is None or tiers is None:
        return
    limit, disk = "zero.tiers.limit", ("zero.tiers.disk", "zero.tiers.disk_bytes")
    if plan.stage != 3:
        why = "unsharded state cannot be offloaded; use stage: 3, or tiers: null"
        yield _clash(plan, "zero.stage", limit, why=why)
    if zero.tuning != "off":
        why = "chunks are planned under a limit; use tuning: off, with zero.chunk_bytes"
        yield _clash(plan, "zero.tuning", limit, why=why)
    if tiers.disk is None and tiers.disk_bytes:
        yield _clash(plan, *disk, why="set a folder, or 0 bytes")
    if tiers.disk is not None and not tiers.disk_bytes:
        yield _clash(plan, *disk, why="set the bytes to use there, such as disk_bytes: 100GiB")
    if tiers.host and plan.mesh.device == "cpu":
        why = "the limit is that of host memory itself; use host: 0"
        yield _clash(plan, "mesh.device", "zero.tiers.host", why=why)
    if tiers.offloaded and tiers.activations != "mixed":
        why = "blocks need activations: mixed"
        yield _clash(plan, "zero.tiers.activations", "zero.tiers.offloaded", why=why)
    for name in MODEL_AXES:
        if name in plan.mesh.axes and tiers.activations not in ("keep", "recompute"):
            why = f"for a sharded model use keep or recompute, or omit the axis {name}"
            yield _clash(plan, f"mesh.axes.{name}", "zero.tiers.activations", why=why)
    for name in ("offload_optim", "offload_param"):
        if tiers.policy == "auto" and getattr(tiers, name) != 1:
            why = f"auto chooses the fractions itself; use policy: static, or {name}: 1.0"
            yield _clash(plan, "zero.tiers.policy", f"zero.tiers.{name}", why=why)


def _wire(plan: Plan) -> Iterator[str]:
    sizes = {kind: plan.mesh.of(kind) for kind in ("tensor", "sequence", "pipeline")}
    sizes |= {"gather": plan.mesh.replicas, "reduce": plan.mesh.replicas}
    packed = {k: f for k, f in plan.wire.formats.items() if wire_format(f).name != "identity"}
    for kind in packed:
        name = f"wire.{kind}"
        if sizes[kind] == 1:
            axis = "data" if kind in ("gather", "reduce") else kind
            why = f"with one rank there are no messages; use {name}: identity"
            yield _clash(plan, f"mesh.axes.{axis}", name, why=why)
        if kind == "gather" and (plan.zero is None or plan.zero.stage == 0):
            why = "only ZeRO stages 1 to 3 gather parameters; use wire.gather: identity"
            yield _clash(plan, name, why=why)
    if plan.wire.error_feedback and "reduce" not in packed:
        why = "gradients have no packing error; use error_feedback: false"
        yield _clash(plan, "wire.reduce", "wire.error_feedback", why=why)
    if plan.wire.error_feedback and plan.limited:
        why = "it needs as much memory as all gradients; use error_feedback: false"
        yield _clash(plan, "zero.tiers.limit", "wire.error_feedback", why=why)


def _step_in_backward(plan: Plan) -> Iterator[str]:
    if plan.zero is None or not (plan.zero.step_in_backward or plan.zero.steps_in_backward):
        return
    plain, limited = "zero.step_in_backward", "zero.tiers.step_in_backward"
    if not plan.zero.steps_in_backward:
        yield _clash(
            plan, plain, limited, why="with tiers only the second has an effect; set only that"
        )
    for name in MODEL_AXES:
        if name in plan.mesh.axes:
            why = f"only unsharded models can be stepped in backward; omit the axis {name}"
            yield _clash(plan, f"mesh.axes.{name}", limited if plan.limited else plain, why=why)


def _fp8(plan: Plan) -> Iterator[str]:
    fp8, scaling = plan.precision.fp8, "precision.fp8.scaling"
    if fp8 is None:
        return
    if plan.sequence.mode in SHARED_BY_TENSOR:
        modes = ", ".join(SHARED_BY_SEQUENCE)
        why = f"FP8 layers need full sequences on tensor ranks; use mode: null, or one of {modes}"
        yield _clash(plan, "sequence.mode", scaling, why=why)
