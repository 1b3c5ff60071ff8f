"""`apply_plan`: a plan becomes a running model. Read it top to bottom.

Every plugin and every loaded plan runs through it. Steps that cut one model over several ranks are
in `booster.hybrid.steps`, and do nothing where their axis has one rank; how replicas share the rest
is in `booster.replicas`. What cannot be run is refused first, with nothing changed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from gulliver.booster._activations import take_activations
from gulliver.booster._fp8 import check_units, use_fp8
from gulliver.booster._limited import LimitedManager, manager_of
from gulliver.booster._meta import check_meta, fill_boosted, lend_shapes
from gulliver.booster._model import (
    HALVES,
    broadcast_all,
    check_modules,
    check_range,
    check_unstepped,
    convert,
    converted,
    no_optimizer,
)
from gulliver.booster._ranks import (
    ResolvedPlan,
    rank_state,
    rank_work,
    state_bytes,
)
from gulliver.booster._replicas import share_ddp, share_zero, tune
from gulliver.booster.hybrid import (
    HooksLast,
    WholeModel,
    check_cut,
    check_new,
    check_recompute,
    cut_stages,
    cut_tensors,
    fill,
    finish,
    grid,
    recompute,
    rewrite_groups,
    wire_sequences,
)
from gulliver.comm import World, current_world, raise_on_any_rank
from gulliver.errors import GulliverError
from gulliver.parallel import (
    BoostedOptimizer,
    check_by_chunk,
    check_optimizer,
    check_trainable,
    check_unshared,
    is_boosted,
    named_trainables,
)
from gulliver.plan import Plan


def apply_plan(
    resolved: ResolvedPlan, model: nn.Module, world: World, verbose: bool = True
) -> tuple[nn.Module, BoostedOptimizer]:
    """Runs a resolved plan: changes the model in place and wraps its optimizer; all ranks call it.

    What cannot be run so raises on all ranks, with nothing changed.
    """
    plan, optimizer = resolved.plan, resolved.optimizer
    tensor, stages = resolved.tensor, resolved.stages
    raise_on_any_rank(lambda: check_units(plan, model))
    if plan.operators is not None:
        from gulliver.booster.operators import check_operators, share_operators

        program = raise_on_any_rank(lambda: check_operators(plan, model, optimizer))
        return share_operators(plan, program, model, optimizer, world)
    if plan.ddp is not None:
        use_fp8(plan, model)
        return share_ddp(plan, model, optimizer, world)
    # While the model is whole, and on all ranks, so that none goes on where another cannot.
    raise_on_any_rank(lambda: _check_whole(resolved))
    manager = raise_on_any_rank(lambda: _manager(resolved))
    uses = state_bytes(plan, resolved.sizes(_place(plan))).order if plan.stage == 3 else ()
    inner = optimizer or no_optimizer()
    if plan.precision.parameters != "none":
        convert(model, HALVES[plan.precision.parameters], plan.precision.kept)
    if world.size > 1:
        broadcast_all(_unequal(plan, model, inner))
    whole, hooks = WholeModel(plan, model, inner, stages), HooksLast(model)
    mesh = grid(plan) if plan.mesh.names_model else None

    stage = cut_stages(model, stages, mesh)
    cut_tensors(plan, model, tensor, mesh)
    wire_sequences(plan, model, mesh, verbose)
    # Layers are converted as they are cut: their scales are shared over the ranks of these axes.
    use_fp8(plan, model, *(() if mesh is None else (mesh.tensor, mesh.sequence.all)))
    recompute(plan, model, stage, whole.recomputable)
    if mesh is not None:
        hooks.restore()
    empty = lend_shapes(model, world.device) if _is_streamed(plan) else []
    if plan.weights is not None and not _is_streamed(plan):
        fill(model, Path(plan.weights), whole.aliases, world.device)
    names = rewrite_groups(inner, model, whole) if mesh is not None else whole.trained

    boosted = share_zero(plan, model, inner, names, whole, mesh, stage, manager, uses)
    take_activations(plan, model, boosted, manager)
    if _is_streamed(plan):
        # Chunk by chunk, so that no more than a chunk of it is whole at any time.
        fill_boosted(boosted, model, empty, plan.weights)
    finish(plan, model, boosted, mesh, tensor, stage, whole)
    tune(plan, model, boosted, verbose)
    return model, boosted


def check_choices(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses what a plan cannot run, before it is known that all ranks have the same model."""
    check_modules(model, sharded=plan.zero is not None)
    if plan.operators is not None:
        from gulliver.booster.operators import check_operators  # few plans are of operators

        check_operators(plan, model, optimizer)
        return
    if plan.mesh.names_model:
        check_new(plan, model)
    if optimizer is not None:
        named_trainables(model, optimizer)
    half = plan.precision.parameters
    if half != "none" and plan.precision.autocast != "none":
        raise GulliverError(
            f"Booster(mixed_precision={plan.precision.autocast!r}) and "
            f"{plan.plugin}(precision={half!r}) exclude each other: the first computes in 16 bits "
            "and keeps float32 parameters, the second keeps 16"
        )
    if plan.zero is None:
        return
    if not plan.mesh.names_model:
        _check_second(plan, model, optimizer)
    if optimizer is not None:
        words = plan.zero.assume_elementwise, plan.zero.assume_per_parameter
        sizes = plan.mesh.of("tensor"), plan.mesh.of("pipeline")
        check_optimizer(optimizer, plan.zero.stage, *words, *sizes)
        tiers = plan.zero.tiers
        check_by_chunk(optimizer, plan.zero.stage, tiers is not None, plan.zero.steps_in_backward)
        if not plan.mesh.names_model:
            check_trainable(named_trainables(model, optimizer))
        check_unshared(model, optimizer)


def _manager(resolved: ResolvedPlan) -> LimitedManager | None:
    """Makes the manager of state under a memory limit, before anything is changed."""
    plan = resolved.plan
    if not plan.limited:
        return None
    state = rank_state(resolved, _place(plan))
    return manager_of(plan, state, rank_work(resolved), current_world().device)


def _place(plan: Plan) -> tuple[int, int]:
    """This rank's number on the pipeline axis, and on the tensor axis."""
    world, size = current_world(), plan.mesh.of("tensor")
    return world.rank * plan.mesh.of("pipeline") // world.size, world.rank % size


def _is_streamed(plan: Plan) -> bool:
    """Whether a model may be on meta and is filled when it is sharded."""
    return plan.stage == 3 and not plan.mesh.names_model


def _check_second(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses a second optimizer where the first one holds the whole model."""
    half = plan.precision.parameters
    if any(is_boosted(p) for p in model.parameters()) and (plan.stage == 3 or half == "fp16"):
        what = "stage 3 has sharded all of" if plan.stage == 3 else "fp16 has one loss scale for"
        raise GulliverError(
            f"a parameter is trained by another boosted optimizer, and {what} the model: make "
            "one optimizer with a group for each part; two kinds, such as Muon and AdamW, need "
            "stage 2 or less, and not fp16"
        )
    if half != "none" and optimizer is not None:
        check_unstepped(optimizer)


def _check_whole(resolved: ResolvedPlan) -> None:
    plan, model = resolved.plan, resolved.model
    if plan.mesh.names_model:
        check_cut(plan, model, resolved.optimizer, resolved.tensor, resolved.stages)
    elif _is_streamed(plan):
        check_meta(model, plan.weights, _checked_here(plan, model))
    if plan.precision.parameters != "none" and plan.weights is None:
        check_range(model, HALVES[plan.precision.parameters], plan.precision.kept)
    check_recompute(plan, model, resolved.stages)


def _checked_here(plan: Plan, model: nn.Module) -> dict[str, torch.dtype]:
    """Names whose values in a file this rank checks against the range of fp16."""
    if plan.precision.parameters != "fp16":
        return {}
    world, turned = current_world(), {t for _, t in converted(model, plan.precision.kept)}
    names = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor in turned]
    return dict.fromkeys(names[world.rank :: world.size], HALVES["fp16"])


def _unequal(plan: Plan, model: nn.Module, inner: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors that may differ between ranks, but those that chunks broadcast."""
    stepped = {p for group in inner.param_groups for p in group["params"] if p.requires_grad}
    cut = plan.mesh.names_model
    rest = [p for p in model.parameters() if cut or not (p in stepped or is_boosted(p))]
    return [*model.buffers(), *rest]
