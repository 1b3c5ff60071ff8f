"""What the plugin does with a model: five steps, in place.

1. pipeline: blocks of other stages are taken out;
2. tensor: the rest is cut over the tensor axis;
3. sequence: attention, inputs and losses are wired;
4. the optimizer's groups are given what this rank has now;
5. ZeRO over the data and sequence axes.

Parameters stay plain parameters with the model's own names; each knows the region of the whole
that it holds (`gulliver.memory.region_of`), which is all that norms and checkpoints need.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gulliver.booster._checkpoint import agreed
from gulliver.booster._plugins import (
    HALVES,
    MIB,
    _broadcast_any,
    _convert,
    _plan,
    chunk_plans,
    no_optimizer,
)
from gulliver.booster._states import CUT
from gulliver.booster.hybrid._batches import Vocabulary, watch_batches
from gulliver.booster.hybrid._capability import (
    SHARED_BY_TENSOR,
    hugging_face_of,
    is_hugging_face,
)
from gulliver.booster.hybrid._choice import use_measured_links
from gulliver.booster.hybrid._compiled import check_compiled, refuse_whole
from gulliver.booster.hybrid._dropout import PositionDropout, check_positions
from gulliver.booster.hybrid._inside import (
    HooksLast,
    check_batch_norms,
    check_embeddings,
    check_hooks,
    check_virtual_tokens,
)
from gulliver.booster.hybrid._lazy import check_lazy, fill
from gulliver.booster.hybrid._mesh import HybridMesh, make_mesh
from gulliver.booster.hybrid._optimizer import HybridOptimizer
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._transformers import check_sequence, wire_sequence
from gulliver.comm import Line, World, broadcast, current_world
from gulliver.errors import GulliverError
from gulliver.parallel import asks_routers, named_groups, named_trainables
from gulliver.parallel.pipeline import (
    Cut,
    Pipeline,
    Stack,
    Stage,
    check_counts,
    check_stages,
    checkpoint_blocks,
    cut,
    deal,
    idle_places,
    make_stage,
    stack_of,
    style_of,
)
from gulliver.parallel.sequence import SequencePlan
from gulliver.parallel.tensor import (
    TensorPlan,
    apply_tensor,
    check_mode,
    dropouts_of,
    plan_tensor,
)
from gulliver.plan import MemoryPlan, Plan

if TYPE_CHECKING:
    from gulliver.booster.hybrid._plugin import HybridParallelPlugin


def make_equal(model: nn.Module) -> None:
    """Gives all ranks rank 0's values, of parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_meta:
                _broadcast_any(tensor)


def apply(
    plugin: HybridParallelPlugin,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    precision: str,
    sizes: Mapping[str, int],
    sequence: SequencePlan,
    family: str | None,
) -> tuple[nn.Module, HybridOptimizer, Plan]:
    """Cuts a model and its optimizer as a plugin says; every rank calls it with the same model.

    Raises:
        GulliverError: something that cannot be cut so, named.
    """
    # While the model is whole, and on all ranks, so that none goes on where another cannot.
    agreed(lambda: _check(plugin, model, optimizer, sequence, family))
    idle = optimizer is None
    optimizer = optimizer or no_optimizer()
    if plugin.precision:
        _convert(model, optimizer, HALVES[plugin.precision])
        precision = f"{plugin.precision} with float32 copies"
    make_equal(model)
    groups, aliases = named_groups(model, optimizer), _aliases(model)
    asleep = _asleep(model, optimizer)
    total = sum(p.numel() for p in model.parameters())
    trained = 0 if idle else sum(p.numel() for p in named_trainables(model, optimizer))
    vocabulary = Vocabulary.of(model)
    mesh = make_mesh(sizes, sequence, world.device.type)
    hooks = HooksLast(model)
    tensor = _tensor_plan(plugin, model) if plugin.tp_size > 1 else None
    stage = _make_stage(plugin, model, mesh) if plugin.pp_size > 1 else None
    if tensor is not None:
        tensor = _remaining(tensor, model)
        use_measured_links(world, plugin.tp_size)
        shared = plugin.mode if plugin.mode in SHARED_BY_TENSOR else None
        apply_tensor(model, tensor, mesh.tensor, shared)  # type: ignore[arg-type]
    _wire(plugin, model, mesh, family, stage)
    hooks.restore()
    if plugin.weights is not None:
        fill(model, plugin.weights, aliases, world.device)
    names = _rewrite_groups(optimizer, model, groups, aliases)
    rest = {p: name for name, p in model.named_parameters() if p not in names}
    boosted = HybridOptimizer(
        optimizer,
        names,
        mesh,
        groups,
        stage,
        zero_stage=plugin.zero_stage,
        chunk_bytes=int(plugin.chunk_mb * MIB),
        max_norm=plugin.max_norm or math.inf,
        frozen=rest,
        asleep=[p for p, name in rest.items() if aliases[name] in asleep],
        ahead=plugin.gather_ahead,
        assume_elementwise=plugin.assume_elementwise,
    )
    if mesh.shards.size > 1:
        _mark(model)
    drops = None
    if plugin.dropout == "alike":
        _draw_alike(model, (mesh.sequence.all, mesh.tensor), world.device)
    elif _drops_by_position(plugin, model):
        drops = PositionDropout(model, mesh, tensor)
    if stage is not None:
        boosted.pipeline = Pipeline(
            stage,
            plugin.pp_style,
            plugin.num_microbatches,
            readers=mesh.model,
            check_batch=plugin.check_batches,
            look=lambda batch: _look(batch, plugin.check_batches and vocabulary, drops),
            before=drops.before if drops is not None else None,
        )
    elif plugin.check_batches:
        watch_batches(model, mesh.model, vocabulary)
    if mesh.shards.size > 1:
        refuse_whole(model)  # before all other hooks
    plan = _plan(
        plugin,
        model,
        names,
        optimizer,
        world,
        precision,
        plugin.zero_stage,
        MemoryPlan(**boosted.memory()),
        chunk_plans(boosted),
    )
    plan = replace(
        plan,
        mesh={_AXES[name]: size for name, size in sizes.items() if size > 1} or {"data": 1},
        parameters=total,
        trainable=trained,
        tensor={path: placed.style for path, placed in tensor.modules.items()} if tensor else {},
        sequence=_described(plugin, sequence),
        stages=tuple(_stage_lines(stage)) if stage is not None else (),
        schedule=_scheduled(boosted.pipeline) if boosted.pipeline is not None else "",
    )
    return model, boosted, plan


_AXES = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor"}


def _tensor_plan(plugin: HybridParallelPlugin, model: nn.Module) -> TensorPlan:
    # Dropout is the plugin's matter: see `check_positions`.
    return plan_tensor(model, plugin.tp_size, plugin.tensor_rules, plugin.replicate_rest, True)


LEAST_SHARE = 0.5
"""Of the parameters of the blocks: where less of them is cut, that is said."""


def _remaining(plan: TensorPlan, model: nn.Module) -> TensorPlan:
    """A plan of the whole model, for what a stage has of it."""
    paths = dict(model.named_modules(remove_duplicate=False))

    def held(path: str) -> bool:
        return any(True for _ in paths[path].parameters()) if path in paths else False

    return replace(
        plan,
        modules={path: placed for path, placed in plan.modules.items() if held(path)},
        attention={path: count for path, count in plan.attention.items() if held(path)},
        sites=tuple(path for path in plan.sites if held(path)),
        stacks=tuple(path for path in plan.stacks if held(path)),
        sliced={path: names for path, names in plan.sliced.items() if held(path)},
        replicated=tuple(path for path in plan.replicated if held(path)),
    )


def _make_stage(plugin: HybridParallelPlugin, model: nn.Module, mesh: HybridMesh) -> Stage:
    """Takes the blocks of other stages out."""
    stack, found, numbers = _stages(plugin, model)
    stage = make_stage(model, stack, found, mesh.pipeline, numbers)
    if plugin.checkpoint_activations:
        checkpoint_blocks(stage)
    return stage


def _stages(
    plugin: HybridParallelPlugin, model: nn.Module
) -> tuple[Stack, Cut, tuple[tuple[int, ...], ...]]:
    """The blocks of a model, how they are cut, and which stages each rank has."""
    chunks = plugin.num_model_chunks or style_of(plugin.pp_style, plugin.num_model_chunks).chunks
    stack = stack_of(
        model,
        plugin.blocks,
        extra=plugin.extra,
        after=plugin.after,
        everywhere=plugin.everywhere,
    )
    numbers = deal(plugin.pp_style, plugin.pp_size, chunks)
    return stack, cut(model, stack, plugin.pp_size * chunks, at=plugin.cut), numbers


def _wire(
    plugin: HybridParallelPlugin,
    model: nn.Module,
    mesh: HybridMesh,
    family: str | None,
    stage: Stage | None,
) -> None:
    """Lets attention, inputs and losses know that sequences and vocabularies are shared."""
    if family == "STDiT3":
        if mesh.sequence.plan.degree * mesh.tensor.size > 1:
            # Tensor ranks alone need it too: captions are dropped alike on all of them.
            mode = plugin.mode if plugin.mode in ("all_to_all", "ring_attn") else "all_to_all"
            wire_stdit(model, mesh.sequence, mode, mesh.tensor, show=_say(plugin))
    elif is_hugging_face(model) and mesh.sequence.plan.degree * mesh.tensor.size > 1:
        wire_sequence(hugging_face_of(model), mesh.sequence, mesh.tensor)
    if plugin.checkpoint_activations and stage is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


def _aliases(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def _rewrite_groups(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
) -> dict[nn.Parameter, str]:
    """Puts what this rank has into the groups, in place of what the whole model had.

    Returns:
        This rank's trainable parameters, with the first names that the whole model has for them.
    """
    present: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        present.setdefault(aliases[name], parameter)
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [present[name] for name in members if name in present]
    members = {name for group in groups for name in group}
    return {p: name for name, p in present.items() if name in members}


def _check(
    plugin: HybridParallelPlugin,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sequence: SequencePlan,
    family: str | None,
) -> None:
    """Refuses what cannot be done, before anything is; it looks only."""
    if plugin.tp_size * plugin.pp_size * plugin.sp_size > 1:
        check_virtual_tokens(model)
    check_batch_norms(model, plugin.pp_size, plugin.mode)
    check_embeddings(model, sequence.degree, plugin.pp_size)
    if optimizer is not None and optimizer.state:
        raise GulliverError(
            "the optimizer has stepped before boost: boost cuts the model, so boost first"
        )
    if optimizer is not None:
        named_trainables(model, optimizer)  # refuses an optimizer of another model
    check_lazy(model, plugin.weights)
    if plugin.weights is not None and not plugin.weights.is_dir():
        raise GulliverError(f"weights={str(plugin.weights)!r} is no folder")
    _check_outputs(plugin, model)
    plan = _tensor_plan(plugin, model) if plugin.tp_size > 1 else None
    if plugin.tp_size * plugin.pp_size > 1:
        lists = _stages(plugin, model)[0].lists if plugin.pp_size > 1 else ()
        lists = (*lists, *(plan.stacks if plan is not None else ()))
        check_compiled(model, plan, lists, plugin.pp_style, plugin.mode)
    check_hooks(model, plan, plugin.mode)
    if plugin.dropout != "alike" and _drops_by_position(plugin, model):
        check_positions(model, plan)
    if plan is not None:
        _check_share(plugin, model, plan)
        check_mode(model, plan, plugin.mode if plugin.mode in SHARED_BY_TENSOR else None)
    if plugin.pp_size > 1:
        _check_stages(plugin, model, optimizer)
    if family != "STDiT3" and is_hugging_face(model) and sequence.degree > 1:
        check_sequence(hugging_face_of(model))
    enables = hasattr(model, "gradient_checkpointing_enable")
    if plugin.checkpoint_activations and plugin.pp_size == 1 and not enables:
        raise GulliverError(
            "checkpoint_activations needs a model with gradient_checkpointing_enable, or a "
            "pipeline: wrap the blocks with torch.utils.checkpoint before boost"
        )


def _check_share(plugin: HybridParallelPlugin, model: nn.Module, plan: TensorPlan) -> None:
    """Refuses a cut that leaves the blocks whole; says where it leaves most of them so."""
    share = plan.share_of(model)
    if share == 0 and not plugin.tensor_rules:
        raise GulliverError(
            f"tp_size={plugin.tp_size} would cut nothing of the blocks of {type(model).__name__}: "
            "give tensor_rules, or take pp_size"
        )
    if share < LEAST_SHARE and current_world().is_main:
        kept = 1 - share * (1 - 1 / plugin.tp_size)
        warnings.warn(
            f"tp_size={plugin.tp_size} cuts {share:.0%} of the parameters of the blocks of "
            f"{type(model).__name__}, so each rank keeps {kept:.0%} of them: give tensor_rules "
            "for the rest, or take pp_size",
            stacklevel=2,
        )


def _check_outputs(plugin: HybridParallelPlugin, model: nn.Module) -> None:
    """Refuses losses of routers that each rank would have a part of."""
    if plugin.mode not in SHARED_BY_TENSOR and plugin.pp_size == 1:
        return
    if asks_routers(model, {}):
        raise GulliverError(
            "output_router_logits=True adds a loss of all tokens of all blocks, and a rank has "
            "some of them: set it to False in the configuration, or leave pp_size and "
            "sequence_parallelism_mode out"
        )


def check_new(model: nn.Module) -> None:
    """Refuses what was boosted before, while all ranks still have the same."""
    if any("_boosted" in vars(p) for p in model.parameters()) or CUT in vars(model):
        raise GulliverError("the model is boosted already: boost each model once, or build it anew")


def _drops_by_position(plugin: HybridParallelPlugin, model: nn.Module) -> bool:
    """Whether there is dropout that is to be drawn as one process would draw it."""
    shared = plugin.tp_size * plugin.pp_size * plugin.sp_size > 1
    return (shared or plugin.dropout == "exact") and bool(dropouts_of(model))


def _look(batch: Any, vocabulary: Vocabulary | bool, drops: PositionDropout | None) -> None:
    """What is done with each batch of a pipeline, on all ranks that have it."""
    if isinstance(vocabulary, Vocabulary):
        vocabulary.check(batch)
    if drops is not None:
        drops.begin()


def _draw_alike(model: nn.Module, lines: Sequence[Line], device: torch.device) -> None:
    """Lets ranks that compute the same draw the same: at each call they take one seed."""
    shared = [line for line in lines if line.size > 1]

    def seed(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        drawn = torch.randint(2**62, (1,)).to(device)
        for line in shared:
            # A group numbers its ranks in ascending order, a line need not.
            broadcast(drawn, sorted(line.ranks).index(line.ranks[0]), line.group)
        torch.manual_seed(int(drawn))

    if shared:
        model.register_forward_pre_hook(seed)


def _mark(model: nn.Module) -> None:
    """Lets neither the model nor a copy of it be written as if it were whole."""
    vars(model)[CUT] = True
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_saving


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise GulliverError(
        "each rank has a share of this model: booster.save_huggingface and save_model "
        "write it whole"
    )


def _check_stages(
    plugin: HybridParallelPlugin, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuses blocks that cannot be run in stages, and stages with nothing to train."""
    stack, found, numbers = _stages(plugin, model)
    check_stages(model, stack)
    micro_batches = plugin.num_microbatches or 2 * found.stages
    check_counts(plugin.pp_style, found.stages, plugin.pp_size, micro_batches)
    if optimizer is None:
        return
    trained, first = set(named_trainables(model, optimizer).values()), _aliases(model)
    names = [name for name in first if first[name] in trained]
    idle = idle_places(model, stack, found, numbers, names)
    if idle:
        stages = " and ".join(str(place) for place in idle)
        raise GulliverError(
            f"place {stages} of the pipeline (counted from 0) has no trainable parameter: cut it "
            "otherwise, or use fewer stages"
        )


def _asleep(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the parameters that the optimizer was given although they are frozen."""
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    return {n for n, p in model.named_parameters() if p in stepped and not p.requires_grad}


def _say(plugin: HybridParallelPlugin) -> Callable[[str], None] | None:
    """Where what was chosen on the way is told: once, by the first rank."""
    if not plugin.verbose or not current_world().is_main:
        return None
    return lambda line: print(line, file=sys.stderr)


def _described(plugin: HybridParallelPlugin, plan: SequencePlan) -> str:
    if plugin.mode is None:
        return ""
    if plugin.mode in SHARED_BY_TENSOR:
        return f"{plugin.mode}, sharded over the tensor axis between attentions"
    return f"{plugin.mode}, {plan}"


def _stage_lines(stage: Stage) -> list[str]:
    bounds = stage.cut.bounds
    return [
        f"blocks {begin} to {end - 1} ({100 * time / sum(stage.cut.times):.0f} % of the work)"
        for begin, end, time in zip(bounds, bounds[1:], stage.cut.times, strict=False)
    ]


def _scheduled(pipeline: Pipeline) -> str:
    return f"pipeline {pipeline.style} of {pipeline.micro_batches} micro-batches"
