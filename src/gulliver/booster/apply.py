"""Applies plans; a model larger than memory starts on meta and is filled chunk by chunk.

A meta parameter is replaced by an expanded NaN, which takes no memory, until its chunk is created;
then it is loaded from a folder or initialized by the module's ``reset_parameters``, in the order
of `nn.Module.modules`. At any time, memory holds at most the limit plus one chunk of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gulliver.booster.checkpoint_io import read_sharded
from gulliver.booster.hybrid.checks import (
    TrailingHooks,
    check_cut,
    check_new,
    check_recompute,
    fill,
)
from gulliver.booster.hybrid.steps import (
    WholeModel,
    cut_stages,
    cut_tensors,
    finish,
    grid,
    recompute,
    rewrite_groups,
    wire_sequences,
)
from gulliver.booster.limited import LimitedManager, manager_of
from gulliver.booster.replicas import share_ddp, share_zero, tune
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.comm.collectives import broadcast_object, raise_on_any_rank
from gulliver.comm.world import World, current_world
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer, named_trainables
from gulliver.parallel.zero.elementwise import (
    check_by_chunk,
    check_optimizer,
    check_trainable,
    is_boosted,
)
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.plan.plan import Plan
from gulliver.planner.activations import manage_activations
from gulliver.planner.fp8 import check_units, use_fp8
from gulliver.planner.model import (
    HALVES,
    broadcast_all,
    check_modules,
    check_range,
    check_unstepped,
    convert,
    converted,
    no_optimizer,
)
from gulliver.planner.ranks import ResolvedPlan, rank_state, rank_work, state_bytes


def check_meta(
    model: nn.Module, weights: str | None, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Rejects meta tensors that neither `weights` nor ``reset_parameters`` can fill."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise GulliverError(
                f"buffer {name!r} is on meta and has no values; build the model under "
                "gulliver.booster.lazy_parameters(), which puts only parameters on meta"
            )
    if weights is not None:
        load_huggingface(model, weights, dtypes=dtypes, fill=False)
        return
    owners: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            other = owners.setdefault(parameter, name)
            if parameter.is_meta and other != name:
                # In memory, the tie determines which values remain; on meta there are none.
                raise GulliverError(
                    f"parameters {other!r} and {name!r} are tied and on meta, so it is unclear "
                    "which module's reset_parameters() initializes them; pass weights=folder"
                )
        empty = [name for name, p in module.named_parameters(path, recurse=False) if p.is_meta]
        if empty and not hasattr(module, "reset_parameters"):
            raise GulliverError(
                f"parameter {empty[0]!r} is on meta, and {type(module).__name__} has no "
                "reset_parameters() to initialize it: add one, or pass weights=folder"
            )


def lend_shapes(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Replaces meta parameters with expanded NaNs on a device, which take no memory."""
    # Parameters stay the same objects, so that an optimizer keeps them. Modules are listed before
    # any parameter moves: as in torch, each module that shares a parameter initializes it.
    found = [m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
    for parameter in [p for p in model.parameters() if p.is_meta]:
        value = math.nan if parameter.is_floating_point() else 0
        there = torch.full((), value, dtype=parameter.dtype, device=device)
        other = nn.Parameter(there.expand(parameter.shape), parameter.requires_grad)
        vars(other).update(vars(parameter))
        torch.utils.swap_tensors(parameter, other)
    return found


def fill_boosted(
    optimizer: ZeroOptimizer, model: nn.Module, empty: Sequence[nn.Module], weights: str | None
) -> None:
    """Fills a boosted model chunk by chunk (collective)."""
    if weights is not None:
        read_sharded(optimizer, model, Path(weights), strict=True, checked=True)
    elif empty:
        _initialise(empty)
        optimizer.shards.take_writes()


def _initialise(modules: Sequence[nn.Module]) -> None:
    """Initializes modules on all ranks with rank 0's random numbers."""
    own = _random_state()
    first = broadcast_object(own)
    _set_random_state(first)
    for module in modules:
        module.reset_parameters()  # type: ignore[operator]
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(own, first, strict=True)):
        _set_random_state(own)  # ranks with other random states keep them


def _random_state() -> list[torch.Tensor]:
    device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *device]


def _set_random_state(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


# `apply_plan` turns a plan into a running model. Read it top to bottom.
#
# All plugins and loaded plans use it. The steps that shard one model over several ranks are in
# `booster.hybrid.steps`, and do nothing if their axis has one rank; `booster.replicas` shards the
# rest over replicas. Unsupported plans are rejected first, before anything is changed.


def apply_plan(
    resolved: ResolvedPlan, model: nn.Module, world: World, verbose: bool = True
) -> tuple[nn.Module, BoostedOptimizer]:
    """Applies a resolved plan: changes the model in place and wraps its optimizer (collective)."""
    plan, optimizer = resolved.plan, resolved.optimizer
    tensor, stages = resolved.tensor, resolved.stages
    raise_on_any_rank(lambda: check_units(plan, model))
    if plan.operators is not None:
        from gulliver.operators.apply import check_operators, share_operators

        program = raise_on_any_rank(lambda: check_operators(plan, model, optimizer))
        return share_operators(plan, program, model, optimizer, world)
    if plan.ddp is not None:
        use_fp8(plan, model)
        return share_ddp(plan, model, optimizer, world)
    # Checked on all ranks before sharding, so that either all ranks continue or none.
    raise_on_any_rank(lambda: _check_whole(resolved))
    manager = raise_on_any_rank(lambda: _manager(resolved))
    uses = state_bytes(plan, resolved.sizes(_place(plan))).order if plan.stage == 3 else ()
    inner = optimizer or no_optimizer()
    if plan.precision.parameters != "none":
        convert(model, HALVES[plan.precision.parameters], plan.precision.kept)
    if world.size > 1:
        broadcast_all(_unequal(plan, model, inner))
    whole, hooks = WholeModel(plan, model, inner, stages), TrailingHooks(model)
    mesh = grid(plan) if plan.mesh.names_model else None

    stage = cut_stages(model, stages, mesh)
    cut_tensors(plan, model, tensor, mesh)
    wire_sequences(plan, model, mesh, verbose)
    # Converted when sharded: layers share their scales over the ranks of these axes.
    use_fp8(plan, model, *(() if mesh is None else (mesh.tensor, mesh.sequence.all)))
    recompute(plan, model, stage, whole.recomputable)
    if mesh is not None:
        hooks.restore()
    empty = lend_shapes(model, world.device) if _is_streamed(plan) else []
    if plan.weights is not None and not _is_streamed(plan):
        fill(model, Path(plan.weights), whole.aliases, world.device)
    names = rewrite_groups(inner, model, whole) if mesh is not None else whole.trained

    boosted = share_zero(plan, model, inner, names, whole, mesh, stage, manager, uses)
    manage_activations(plan, model, boosted, manager)
    if _is_streamed(plan):
        # Chunk by chunk, so that at most one chunk is unsharded at any time.
        fill_boosted(boosted, model, empty, plan.weights)
    finish(plan, model, boosted, mesh, tensor, stage, whole)
    tune(plan, model, boosted, verbose)
    return model, boosted


def check_choices(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Rejects plans that cannot run, before models are compared across ranks."""
    check_modules(model, sharded=plan.zero is not None)
    if plan.operators is not None:
        from gulliver.operators.apply import check_operators  # few plans have operators

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
            f"{plan.plugin}(precision={half!r}) cannot be combined: the first keeps float32 "
            "parameters and computes in 16 bits, and the second also stores parameters in 16 bits"
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
    plan = resolved.plan
    if not plan.limited:
        return None
    state = rank_state(resolved, _place(plan))
    return manager_of(plan, state, rank_work(resolved), current_world().device)


def _place(plan: Plan) -> tuple[int, int]:
    """Returns this rank's index on the pipeline axis and on the tensor axis."""
    world, size = current_world(), plan.mesh.of("tensor")
    return world.rank * plan.mesh.of("pipeline") // world.size, world.rank % size


def _is_streamed(plan: Plan) -> bool:
    """Whether a model may be on meta and is filled while it is sharded."""
    return plan.stage == 3 and not plan.mesh.names_model


def _check_second(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    half = plan.precision.parameters
    if any(is_boosted(p) for p in model.parameters()) and (plan.stage == 3 or half == "fp16"):
        what = "stage 3 has sharded all of" if plan.stage == 3 else "fp16 has one loss scale for"
        raise GulliverError(
            f"another boosted optimizer already trains one of the parameters, and {what} the "
            "model; use one optimizer with several parameter groups, or, for two kinds such as "
            "Muon and AdamW, stage 2 or less without fp16"
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
    """Returns the tensors, by name, whose saved values this rank checks against fp16's range."""
    if plan.precision.parameters != "fp16":
        return {}
    world, turned = current_world(), {t for _, t in converted(model, plan.precision.kept)}
    names = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor in turned]
    return dict.fromkeys(names[world.rank :: world.size], HALVES["fp16"])


def _unequal(plan: Plan, model: nn.Module, inner: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the tensors that are not broadcast with the chunks."""
    stepped = {p for group in inner.param_groups for p in group["params"] if p.requires_grad}
    cut = plan.mesh.names_model
    rest = [p for p in model.parameters() if cut or not (p in stepped or is_boosted(p))]
    return [*model.buffers(), *rest]


# Distinct tensors of a model that share memory: moving a parameter would separate them.
#
# Sharding moves every parameter into a chunk. A parameter with two names moves as one; two
# parameters on the same memory would be trained separately afterwards.


def check_unshared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rejects a trained parameter that shares memory with another parameter or a buffer."""
    trained = {id(p) for p in named_trainables(model, optimizer)}
    parameters = {n: p for n, p in model.named_parameters() if not is_boosted(p)}
    buffers = dict(model.named_buffers())
    found = [(*_extent(t), name, t) for name, t in [*parameters.items(), *buffers.items()]]
    open_: list[tuple[int, str, Tensor]] = []
    for begin, end, name, tensor in sorted(found, key=lambda item: item[:3]):
        open_ = [item for item in open_ if item[0] > begin]
        for _, other_name, other in open_:
            moved = id(tensor) in trained or id(other) in trained
            if moved and _overlap(tensor, other):
                raise _refused(other_name, name, parameters)
        if end > begin:
            open_.append((end, name, tensor))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the address range of a tensor's memory, which may have gaps; empty on meta."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + _span(tensor) * tensor.itemsize


def _span(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element; disjoint columns of one matrix share none."""
    if one.device != other.device:
        return False
    size = one.itemsize
    apart = one.data_ptr() - other.data_ptr()
    if not apart or size != other.itemsize or apart % size:
        return True
    shift = apart // size
    begin = min(0, shift)
    taken = torch.zeros(max(_span(other), shift + _span(one)) - begin, dtype=torch.bool)
    taken.as_strided(other.shape, other.stride(), -begin).fill_(True)
    return bool(taken.as_strided(one.shape, one.stride(), shift - begin).any())


def _refused(first: str, second: str, parameters: dict[str, nn.Parameter]) -> GulliverError:
    both = first in parameters and second in parameters
    if not both and second in parameters:
        first, second = second, first
    kind = "parameter" if both else "buffer"
    remedy = (
        f"tie the parameters themselves, model.{second} = model.{first}"
        if both
        else "clone the buffer, or read the parameter in its place"
    )
    return GulliverError(
        f"{kind} {second!r} shares its memory with parameter {first!r}, and sharding would "
        f"separate them: {remedy} (TorchDDPPlugin runs the model as it is)"
    )
