"""Refuses values of a plan that contradict each other, or the world: told with both lines.

Only the plan is looked at. What a model does not allow is refused where there is one, in `booster`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from gulliver.errors import GulliverError, nearest
from gulliver.plan._plan import Plan, written
from gulliver.plan._tree import (
    AXES,
    MODEL_AXES,
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    PipelineLayout,
    TensorLayout,
    Tiers,
)
from gulliver.precision.wire import wire_format

LONGEST = 120
"""Most characters of a value that a message shows."""


def check_plan(plan: Plan, ranks: int) -> None:
    """Refuses a plan that cannot be run by so many ranks, whatever the model is.

    Raises:
        GulliverError: the values that contradict each other, with their lines where they have some.
    """
    if plan.operators is not None:
        for text in (*_mesh(plan, ranks), *_operators(plan)):
            raise GulliverError(text)
        return
    checks = _mesh(plan, ranks), _shards(plan), _unused(plan), _sequence(plan), _pipeline(plan)
    last = _tiers(plan), _step_in_backward(plan), _fp8(plan), _wire(plan)
    for contradictions in (*checks, *last):
        for text in contradictions:
            raise GulliverError(text)


def _mesh(plan: Plan, ranks: int) -> Iterator[str]:
    mesh = plan.mesh
    for name in mesh.axes:
        if name not in AXES:
            yield f"mesh.axes has no axis {name!r}: {nearest(name, AXES)}"
    if list(mesh.axes) != [name for name in AXES if name in mesh.axes]:
        yield f"mesh.axes are out of order: name them outer to inner, as in {', '.join(AXES)}"
    if mesh.size != ranks:
        yield (
            f"{_product(plan, 'mesh.axes')} make {mesh.size} ranks, and there are {ranks}: change "
            "an axis, or the number of ranks"
        )
    if mesh.torus and math.prod(mesh.torus.values()) != mesh.size:
        yield (
            f"{_product(plan, 'mesh.torus')} and {_product(plan, 'mesh.axes')} differ: a torus is "
            "all ranks of the mesh"
        )
    order = f"{plan.told('mesh.rank_order')}"
    if mesh.rank_order and sorted(mesh.rank_order) != list(range(mesh.size)):
        yield f"{order} must name each of the {mesh.size} ranks of mesh.axes once"
    if mesh.rank_order and not mesh.torus:
        yield f"{order} is of a torus, and mesh.torus is empty: name its axes"


def _operators(plan: Plan) -> Iterator[str]:
    """Yields choices that contradict operators which are shared one by one."""
    told = _section(plan, "operators")
    for name in ("zero", "ddp"):
        if getattr(plan, name) is not None:
            yield (
                f"{told} and {_section(plan, name)}: operators are shared over all ranks; right "
                f"would be {name}: null"
            )
    default = Plan()
    for name in ("tensor", "sequence", "pipeline", "recompute", "precision", "max_norm", "weights"):
        if getattr(plan, name) != getattr(default, name):
            line = plan.lines.get(name)
            place = f" (line {line})" if line else ""
            yield (
                f"{told} and {name}: given{place}: operators say themselves how they are cut and "
                f"what is computed again, and clipping is the loop's; leave {name} out"
            )
    if plan.mesh.torus:
        yield f"{told} and {plan.told('mesh.torus')}: axes of operators are those of mesh.axes"


def _shards(plan: Plan) -> Iterator[str]:
    if (plan.zero is None) == (plan.ddp is None):
        yield (
            f"{_section(plan, 'zero')} and {_section(plan, 'ddp')}: one of them shares the work of "
            "the replicas, the other one is null"
        )
    cutting = [f"mesh.axes.{name}" for name in ("pipeline", "sequence", "tensor")]
    cutting = [name for name in cutting if plan.mesh.of(name.rpartition(".")[2]) > 1]
    alone = {
        "ddp": plan.ddp is not None,
        "zero.tuning": plan.zero is not None and plan.zero.tuning != "off",
        "zero.broadcast_buffers": plan.zero is not None and plan.zero.broadcast_buffers,
        "mesh.torus": bool(plan.mesh.torus),
    }
    rights = {
        "ddp": "zero with stage 0 does as DDP does",
        "zero.tuning": "off, with zero.chunk_bytes",
        "zero.broadcast_buffers": "false",
        "mesh.torus": "{}",
    }
    for name, given in alone.items():
        if cutting and given:
            first = _section(plan, name) if name == "ddp" else plan.told(name)
            yield (
                f"{plan.told(cutting[0])} and {first}: the second is for whole models only; right "
                f"would be {rights[name]}"
            )
    if plan.ddp is not None and plan.precision.parameters != "none":
        yield (
            f"{_section(plan, 'ddp')} and {plan.told('precision.parameters')}: DDP has no float32 "
            "copies; take zero, or precision.autocast"
        )
    if plan.ddp is not None and plan.max_norm:
        yield (
            f"{_section(plan, 'ddp')} and {plan.told('max_norm')}: under DDP the loop clips; take "
            "zero, or max_norm: 0.0"
        )


def _unused(plan: Plan) -> Iterator[str]:
    """What is said of an axis of one rank, or of number formats that are not used."""
    for axis, default in (("pipeline", PipelineLayout()), ("tensor", TensorLayout())):
        layout = getattr(plan, axis)
        changed = {
            f"{axis}.{one.name}": getattr(default, one.name)
            for one in fields(default)
            if getattr(layout, one.name) != getattr(default, one.name)
        }
        if plan.mesh.of(axis) == 1 and changed:
            given = ", ".join(_short(plan, name) for name in changed)
            right = ", ".join(f"{name}: {written(value)}" for name, value in changed.items())
            yield (
                f"{plan.told(f'mesh.axes.{axis}')} and {given}: with one rank of the {axis} axis "
                f"this does nothing; right would be {right}"
            )
    if plan.precision.kept and plan.precision.parameters == "none":
        yield (
            f"{plan.told('precision.parameters')} and {plan.told('precision.kept')}: nothing is "
            "turned to 16 bits, so there is nothing to keep; right would be kept: []"
        )


def _short(plan: Plan, name: str) -> str:
    """A value with its line; without the entries where it would fill a screen."""
    told = plan.told(name)
    return told if len(told) <= LONGEST else f"{name}: ... {told[told.rfind('(line') :]}"


def _sequence(plan: Plan) -> Iterator[str]:
    sequence, size, tensor = plan.sequence, plan.mesh.of("sequence"), plan.mesh.of("tensor")
    mode, axis = plan.told("sequence.mode"), plan.told("mesh.axes.sequence")
    if sequence.degree != size:
        yield (
            f"{axis} and {plan.told('sequence.ulysses')}, {plan.told('sequence.outer')}, "
            f"{plan.told('sequence.inner')}: their product must be {size}"
        )
    if sequence.mode is None and size > 1:
        yield f"{axis} and {mode}: name a mode, one of {', '.join(SHARED_BY_SEQUENCE)}"
    if sequence.mode in (*SHARED_BY_SEQUENCE, "auto") and size == 1:
        yield f"{axis} and {mode}: this mode needs at least 2 ranks of a sequence, or be null"
    if sequence.mode in SHARED_BY_TENSOR and tensor == 1:
        yield (
            f"{plan.told('mesh.axes.tensor')} and {mode}: this mode needs at least 2 ranks of the "
            f"tensor axis; with ranks of its own take one of {', '.join(SHARED_BY_SEQUENCE)}"
        )
    if sequence.mode in SHARED_BY_TENSOR and size > 1:
        yield f"{axis} and {mode}: this mode has no ranks of its own"
    if sequence.mode == "all_to_all" and sequence.outer * sequence.inner > 1:
        yield (
            f"{mode} and {plan.told('sequence.inner')}: it has no ring; take mode ring_attn, or "
            "ulysses instead of inner and outer"
        )


def _pipeline(plan: Plan) -> Iterator[str]:
    pipeline, axis = plan.pipeline, plan.told("mesh.axes.pipeline")
    size = plan.mesh.of("pipeline")
    stages = size * pipeline.chunks_per_rank
    if size > 1 and pipeline.cut and stages and len(pipeline.cut) not in (stages, stages - 1):
        yield (
            f"{plan.told('pipeline.cut')} deals {len(pipeline.cut)} stages, {axis} and "
            f"{plan.told('pipeline.chunks_per_rank')} make {stages}"
        )


def _tiers(plan: Plan) -> Iterator[str]:
    tiers = None if plan.zero is None else plan.zero.tiers
    if plan.zero is None or tiers is None:
        return
    limit = plan.told("zero.tiers.limit")
    if plan.stage != 3:
        yield (
            f"{plan.told('zero.stage')} and {limit}: what is whole on every rank cannot leave its "
            "memory; take stage: 3, or tiers: null"
        )
    if plan.zero.tuning != "off":
        yield (
            f"{plan.told('zero.tuning')} and {limit}: the size of chunks is planned with the "
            "limit; right would be tuning: off, with zero.chunk_bytes"
        )
    disk, size = plan.told("zero.tiers.disk"), plan.told("zero.tiers.disk_bytes")
    if tiers.disk is None and tiers.disk_bytes:
        yield f"{disk} and {size}: name a folder, or give it 0 bytes"
    if tiers.disk is not None and not tiers.disk_bytes:
        yield f"{disk} and {size}: say how much may lie there, such as disk_bytes: 100GiB"
    if tiers.host and plan.mesh.device == "cpu":
        yield (
            f"{plan.told('mesh.device')} and {plan.told('zero.tiers.host')}: memory of the host is "
            f"what {limit} is of; right would be host: 0"
        )
    if tiers.offloaded and tiers.activations != "mixed":
        yield (
            f"{plan.told('zero.tiers.activations')} and {plan.told('zero.tiers.offloaded')}: it "
            "names blocks, as activations: mixed does"
        )
    for name in MODEL_AXES:
        if name in plan.mesh.axes and tiers.activations not in ("keep", "recompute"):
            yield (
                f"{plan.told(f'mesh.axes.{name}')} and {plan.told('zero.tiers.activations')}: "
                "activations of whole models can leave, and those of a cut one not yet; take "
                f"activations: keep, or recompute, or leave the axis {name} out"
            )
    yield from _shares(plan, tiers)


def _wire(plan: Plan) -> Iterator[str]:
    sizes = {kind: plan.mesh.of(kind) for kind in ("tensor", "sequence", "pipeline")}
    sizes |= {"gather": plan.mesh.replicas, "reduce": plan.mesh.replicas}
    packed = {k: f for k, f in plan.wire.formats.items() if wire_format(f).name != "identity"}
    for kind in packed:
        told = plan.told(f"wire.{kind}")
        if sizes[kind] == 1:
            axis = "data" if kind in ("gather", "reduce") else kind
            yield (
                f"{plan.told(f'mesh.axes.{axis}')} and {told}: with one rank nothing travels; "
                f"right would be wire.{kind}: identity"
            )
        if kind == "gather" and (plan.zero is None or plan.zero.stage == 0):
            yield (
                f"{told}: parameters are gathered from stage 1 of ZeRO on; right would be "
                "wire.gather: identity"
            )
        if kind == "gather" and wire_format(packed[kind]).rounding != "nearest":
            nearest = packed[kind].replace(":stochastic", "")
            yield (
                f"{told}: parameters are rounded to the nearest, for all ranks have to find the "
                f"same; right would be wire.gather: {nearest}, of a plugin "
                f"communication_dtype={packed | {kind: nearest}}"
            )
    if plan.wire.error_feedback and "reduce" not in packed:
        yield (
            f"{plan.told('wire.reduce')} and {plan.told('wire.error_feedback')}: gradients lose "
            "nothing that could be fed back; right would be error_feedback: false"
        )
    if plan.wire.error_feedback and plan.limited:
        yield (
            f"{plan.told('zero.tiers.limit')} and {plan.told('wire.error_feedback')}: what is fed "
            "back takes as much memory as all gradients; right would be error_feedback: false"
        )


def _step_in_backward(plan: Plan) -> Iterator[str]:
    if plan.zero is None or not (plan.zero.step_in_backward or plan.zero.steps_in_backward):
        return
    within = "" if plan.zero.tiers is None else "tiers."
    told = plan.told(f"zero.{within}step_in_backward")
    if not plan.zero.steps_in_backward:
        told = plan.told("zero.step_in_backward")
        yield (
            f"{told} and {plan.told('zero.tiers.step_in_backward')}: with tiers the second counts; "
            "say it there alone"
        )
    for name in MODEL_AXES:
        if name in plan.mesh.axes:
            yield (
                f"{plan.told(f'mesh.axes.{name}')} and {told}: whole models can be stepped during "
                f"backward, and a cut model not yet; leave the axis {name} out, or say false"
            )


def _fp8(plan: Plan) -> Iterator[str]:
    fp8 = plan.precision.fp8
    if fp8 is None:
        return
    scaling = plan.told("precision.fp8.scaling")
    if fp8.scaling == "delayed" and plan.mesh.size > 1:
        yield (
            f"{_product(plan, 'mesh.axes')} and {scaling}: each rank would have a history of its "
            "own; take tensorwise or rowwise"
        )
    if plan.sequence.mode in SHARED_BY_TENSOR:
        yield (
            f"{plan.told('sequence.mode')} and {scaling}: FP8 layers take whole sequences on "
            "tensor ranks; take mode: null, or one of " + ", ".join(SHARED_BY_SEQUENCE)
        )


def _shares(plan: Plan, tiers: Tiers) -> Iterator[str]:
    for name in ("shard_param", "offload_optim", "offload_param"):
        share = f"zero.tiers.{name}"
        if tiers.policy == "auto" and getattr(tiers, name) != 1:
            yield (
                f"{plan.told('zero.tiers.policy')} and {plan.told(share)}: auto finds the shares "
                f"itself; take policy: static, or {name}: 1.0"
            )
    if tiers.shard_param != 1:
        yield (
            f"{plan.told('zero.stage')} and {plan.told('zero.tiers.shard_param')}: stage 3 shards "
            "all parameters; right would be shard_param: 1.0"
        )


def _product(plan: Plan, name: str) -> str:
    sizes = plan.mesh.axes if name == "mesh.axes" else plan.mesh.torus
    line = plan.lines.get(name)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"{name}: {shown}" + (f" (line {line})" if line else "")


def _section(plan: Plan, name: str) -> str:
    line = plan.lines.get(name)
    given = "given" if getattr(plan, name) is not None else "null"
    return f"{name}: {given}" + (f" (line {line})" if line else "")
