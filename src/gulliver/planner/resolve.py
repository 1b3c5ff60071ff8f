"""Derives the results of a plan's choices for a model, without changing the model.

Plans from plugins and files are resolved in the same way, and the result does not depend on the
number of processes. Results stored in a file are recomputed, and differences are logged.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import nn

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Cluster
from gulliver.parallel.optimizer import named_trainables
from gulliver.parallel.pipeline.schedules import stages_by_rank, style_of
from gulliver.parallel.pipeline.stack import Stack, cut, stack_of
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.parallel.tensor.styles import TensorPlan, best_match
from gulliver.parallel.zero.chunks import TensorSize, ordered_layouts
from gulliver.parallel.zero.elementwise import is_boosted
from gulliver.parallel.zero.memory import held_bytes, ordinary_step, reduced_at_end
from gulliver.plan.plan import Plan
from gulliver.plan.reading import join
from gulliver.plan.results import MemoryPlan, Predicted
from gulliver.plan.tree import ChunkPlan, Model
from gulliver.planner.fp8 import weight_bytes, with_fp8
from gulliver.planner.model import (
    has_switch,
    modules_kept,
    no_optimizer,
    recomputable_blocks,
    unwrapped,
)
from gulliver.planner.ranks import (
    ResolvedPlan,
    Stages,
    largest_residency,
    places,
    rank_state,
    rank_work,
    state_bytes,
)
from gulliver.planner.residency import least_bytes


def cut_model(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> ResolvedPlan:
    """Shards a model by a plan's choices, without predicting costs."""
    return ResolvedPlan(plan, model, optimizer, plan_tensors(plan, model), plan_stages(plan, model))


def resolve(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cluster: Cluster | None = None,
) -> ResolvedPlan:
    """Resolves a plan for a model: shards, chunks and predicted bytes."""
    model = unwrapped(model)
    plan = replace(plan, model=_model(plan, model, optimizer))
    if plan.operators is not None:
        return ResolvedPlan(plan, model, optimizer)
    reasons: dict[str, str] = {}
    found = cut_model(plan, model, optimizer)
    tensor, stages = found.tensor, found.stages
    if tensor is not None:
        # A program's rules may be for many models; the plan keeps those that match this one.
        rules = {k: v for k, v in plan.tensor.rules.items() if k not in _unfit_rules(plan, model)}
        plan = replace(plan, tensor=replace(plan.tensor, rules=rules, modules=styles_of(tensor)))
        reasons["tensor"] = f"{tensor.share_of(model):.0%} of the parameters of the blocks are cut"
    if stages is not None:
        plan = _with_stages(plan, stages)
        how = "as given" if plan.pipeline.cut == stages[1].sizes else "by predicted cost"
        reasons["pipeline.cut"] = f"{how}: {stages[1]}"
    plan, why = with_fp8(plan, model, tensor, cluster)
    reasons |= why
    _check_kept(plan, model)
    if plan.precision.parameters != "none" and not (plan.lines or plan.precision.kept):
        plan = replace(plan, precision=replace(plan.precision, kept=modules_kept(model)))
    found = found.with_plan(plan)
    if plan.zero is not None:
        plan = _with_chunks(plan, model, found.sizes())
        if plan.stage and any(t.whole for t in found.sizes()):
            reasons["zero.chunks"] = (
                f"{plan.model.optimizer} reads full parameters: none may be sharded"
            )
    predicted = _of_fullest(found.with_plan(plan))
    plan = replace(plan, predicted=predicted, reasons={**plan.reasons, **reasons})
    return found.with_plan(plan)


def _of_fullest(resolved: ResolvedPlan) -> Predicted:
    plan, held = resolved.plan, dict[int, MemoryPlan]()
    tiers = plan.tiers
    if tiers is not None:
        states = {rank: rank_state(resolved, place) for place, rank in places(plan).items()}
        each = list(dict.fromkeys(states.values()))
        found = largest_residency(each, tiers, rank_work(resolved))
        fullest = max(states, key=lambda rank: least_bytes(states[rank], tiers))
        memory = MemoryPlan(**found.bytes)
        return replace(plan.predicted, bytes=memory, moved=found.moved, fullest=fullest)
    for place, rank in places(plan).items():
        sizes = resolved.sizes(place)
        memory = predict_memory(plan, resolved.model, sizes)
        copies = weight_bytes(plan, {t.name: t.numel for t in sizes})
        held[rank] = replace(memory, parameters=memory.parameters + copies)
    fullest = max(held, key=lambda rank: held[rank].total)
    return replace(plan.predicted, bytes=held[fullest], moved=None, fullest=fullest)


def _check_kept(plan: Plan, model: nn.Module) -> None:
    paths = dict(model.named_modules())
    own = {
        path
        for path, module in paths.items()
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))
    }
    for number, path in enumerate(plan.precision.kept):
        if path not in own:
            what = "has no direct parameters" if path in paths else "the model does not have"
            where = _lined(plan, f"precision.kept[{number}]")
            raise GulliverError(f"{where} names {path!r}, which {what}: {nearest(path, own)}")


def _model(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Model:
    trained = named_trainables(model, optimizer) if optimizer is not None else {}
    found = Model(
        type(model).__name__,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in trained),
        type(optimizer or no_optimizer()).__name__,
    )
    if plan.lines and plan.model.parameters not in (0, found.parameters):
        told = plan.describe_field("model.parameters")
        raise GulliverError(
            f"{told}, but the model has {found.parameters}; remove the section `model`"
        )
    return found


def plan_tensors(plan: Plan, model: nn.Module) -> TensorPlan | None:
    """Plans how tensors are sharded over the tensor axis; None if the mesh has none."""
    # Styles that differ from the known ones were edited by hand, and become rules.
    size, layout = plan.mesh.of("tensor"), plan.tensor
    if size == 1:
        return None
    # Dropout is rejected, or drawn, by the steps that follow: see `check_positions`.
    rest = layout.replicate_rest, True
    found = plan_tensor(model, size, layout.rules, *rest)
    _check_rules(plan, model)
    known = styles_of(found)
    edited = {path: style for path, style in layout.modules.items() if known.get(path) != style}
    if not edited:
        return found
    paths = dict(model.named_modules())
    lines = {path: plan.line_text(join("tensor.modules", path)) for path in edited}
    for path, style in edited.items():
        rule = best_match(path, layout.rules)
        if rule is not None:
            raise GulliverError(
                f"{_lined(plan, join('tensor.rules', rule))} is {layout.rules[rule]!r}, but "
                f"{join('tensor.modules', path)} is {style!r}{lines[path]}; remove one of them"
            )
        if path not in paths:
            where = f"tensor.modules names {path!r}{lines[path]}"
            raise GulliverError(f"{where}, which the model does not have: {nearest(path, paths)}")
    try:
        # All at once: column and row styles are right only together.
        found = plan_tensor(model, size, {**layout.rules, **edited}, *rest)
    except GulliverError as error:
        path = next((path for path in edited if path in str(error)), next(iter(edited)))
        raise GulliverError(
            f"{plan.describe_field('mesh.axes.tensor')} is not possible with "
            f"{join('tensor.modules', path)}={edited[path]!r}{lines[path]}: {error}"
        ) from error
    styles = styles_of(found)
    for path, style in edited.items():
        if styles.get(path) != style:
            where = f"tensor.modules[{path!r}]: {style!r}{lines[path]}"
            raise GulliverError(f"{where} cannot be applied; it resolves to {styles.get(path)!r}")
    return found


def _unfit_rules(plan: Plan, model: nn.Module) -> list[str]:
    paths = [path for path, _ in model.named_modules()]
    fits = {rule: any(best_match(p, {rule: ""}) for p in paths) for rule in plan.tensor.rules}
    return [rule for rule, found in fits.items() if not found]


def _check_rules(plan: Plan, model: nn.Module) -> None:
    for rule in _unfit_rules(plan, model) if plan.lines else ():
        ends = {path.rpartition(".")[2] for path, _ in model.named_modules() if path}
        where = _lined(plan, join("tensor.rules", rule))
        raise GulliverError(f"{where} matches no module of the model: {nearest(rule, ends)}")


def styles_of(plan: TensorPlan) -> dict[str, str]:
    cut = {path: placed.style for path, placed in plan.modules.items()}
    return cut | {path: "replicate" for path in plan.replicated if path not in cut}


def plan_stages(plan: Plan, model: nn.Module) -> Stages | None:
    """Returns the blocks of a model and their stages; None without a pipeline."""
    size, line = plan.mesh.of("pipeline"), plan.pipeline
    if size == 1:
        return None
    chunks = line.chunks_per_rank or style_of(line.schedule, line.chunks_per_rank or None).chunks
    stack = stack_of(
        model, line.blocks, extra=line.extra, after=line.after, everywhere=line.everywhere
    )
    _check_blocks(plan, model, stack)
    numbers, count = stages_by_rank(line.schedule, size, chunks), len(stack.blocks)
    if plan.lines and len(line.cut) == size * chunks and sum(line.cut) != count:
        told = plan.describe_field("pipeline.cut")
        raise GulliverError(f"{told} sums to {sum(line.cut)}, but the model has {count} blocks")
    return stack, cut(model, stack, size * chunks, at=line.cut or None), numbers


def _check_blocks(plan: Plan, model: nn.Module, stack: Stack) -> None:
    line = plan.pipeline
    known = stack_of(model, line.blocks).extra if line.extra != -1 else -1
    if known not in (-1, line.extra):
        told, kind = plan.describe_field("pipeline.extra"), type(model).__name__
        right = "null" if known is None else known
        raise GulliverError(f"{told}, but blocks of {kind} need {right}, or -1 to detect it")
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    for number, path in enumerate(line.after):
        inside = any(path == block or path.startswith(f"{block}.") for block in stack.blocks)
        if inside or model.get_submodule(path) is embedding:
            what = "is in the blocks" if inside else "embeds the input of the blocks"
            where = _lined(plan, f"pipeline.after[{number}]")
            raise GulliverError(f"{where} names {path!r}, which {what}")


def _with_stages(plan: Plan, stages: Stages) -> Plan:
    _, found, numbers = stages
    whole = sum(found.times) or 1.0
    pipeline = replace(
        plan.pipeline,
        cut=found.sizes,
        shares=tuple(round(time / whole, 4) for time in found.times),
        chunks_per_rank=len(numbers[0]),
        micro_batches=plan.pipeline.micro_batches or 2 * found.stages,
    )
    return replace(plan, pipeline=pipeline)


def _with_chunks(plan: Plan, model: nn.Module, sizes: list[TensorSize]) -> Plan:
    zero = plan.zero
    assert zero is not None, "there are chunks"
    known = dict(model.named_parameters())
    order = [name for chunk in zero.chunks for name in chunk.tensors]
    for number, chunk in enumerate(zero.chunks):
        for name in chunk.tensors:
            where = f"zero.chunks[{number}].tensors"
            if name not in known:
                told = f"{_lined(plan, where)} names {name!r}"
                raise GulliverError(f"{told}, which is not a parameter: {nearest(name, known)}")
            if order.count(name) > 1:
                raise GulliverError(
                    f"{_lined(plan, where)} names {name!r}, which occurs more than once"
                )
    found = ordered_layouts(sizes, order, zero.chunk_bytes, zero.stage, plan.mesh.replicas)
    chunks = tuple(
        ChunkPlan(
            tuple(slot.name for slot in layout.slots),
            layout.size * dtype.itemsize,
            layout.padding * dtype.itemsize,
            str(dtype).removeprefix("torch."),
        )
        for layout, dtype, _ in found
    )
    return plan.with_zero(chunks=chunks)


def _lined(plan: Plan, name: str) -> str:
    return f"{name}{plan.line_text(name)}"


def predict_memory(plan: Plan, model: nn.Module, sizes: list[TensorSize]) -> MemoryPlan:
    trained = [t for t in sizes if t.trained]
    zero = plan.zero
    if zero is None:
        held = sum(p.nbytes for p in model.parameters())
        gradients = sum(t.numel * t.dtype.itemsize for t in trained)
        state = sum(sum(t.states) * t.dtype.itemsize for t in trained)
        return MemoryPlan(held, gradients, state)
    state = state_bytes(plan, sizes)
    kept = sum(sum(moments) for moments in state.moments)
    events = list(ordinary_step(state.chunks, state.order)) if zero.stage == 3 else None
    found = held_bytes(state.chunks, zero.stage, state.parts, state.ahead, kept, events)
    if plan.mesh.of("pipeline") > 1 or zero.unequal:
        gathered = len(state.chunks) if zero.unequal else state.ahead + 2
        found = reduced_at_end(found, state.chunks, zero.stage, state.parts, gathered)
    outside = 0
    if zero.stage < 3:
        # Outside of chunks: frozen parameters, and those of another optimizer.
        inside = {t.name for t in trained}
        held = {t.name: t.numel * t.dtype.itemsize for t in sizes}
        others = [p.nbytes for p in model.parameters() if is_boosted(p)]
        outside = sum(count for name, count in held.items() if name not in inside) + sum(others)
    found["parameters"] += outside
    return MemoryPlan(**found)


RESULTS = ("model", "predicted", "reasons")


def differences(given: Plan, found: Plan) -> str | None:
    """Describes where results stored in a file differ from computed ones; None if they agree."""
    if not given.lines:
        return None
    names = [name for name in RESULTS if name in given.lines and _differ(given, found, name)]
    if given.pipeline.shares and given.pipeline.shares != found.pipeline.shares:
        names.append("pipeline.shares")
    if given.chunks and given.chunks != found.chunks:
        names.append("zero.chunks")
    if not names:
        return None
    told = ", ".join(_lined(given, name) for name in names)
    return f"plan: results depend on the choices and were recomputed: {told}"


def _differ(given: Plan, found: Plan, name: str) -> bool:
    one, other = getattr(given, name), getattr(found, name)
    if name == "predicted":
        # Seconds are not compared, as they depend on the machines at hand.
        return one.bytes != other.bytes
    if isinstance(one, dict):
        return one != other
    return any(getattr(one, f.name) != getattr(other, f.name) for f in fields(one))


def recomputable(plan: Plan, model: nn.Module, stages: Stages | None) -> tuple[str, ...]:
    # Blocks of the pipeline if there is one, otherwise those of `recomputable_blocks`.
    if stages is not None:
        return stages[0].blocks
    # In a sharded model, recomputation must repeat the ranks' communication and dropout.
    return recomputable_blocks(model) if has_switch(model) or not plan.mesh.names_model else ()
