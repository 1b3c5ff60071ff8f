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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gulliver._compat import compiled_call, is_compiled
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
from gulliver.booster.hybrid._batches import watch_batches
from gulliver.booster.hybrid._capability import SHARED_BY_TENSOR, is_hugging_face
from gulliver.booster.hybrid._lazy import check_lazy, fill
from gulliver.booster.hybrid._mesh import HybridMesh, make_mesh
from gulliver.booster.hybrid._optimizer import HybridOptimizer
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._transformers import wire_sequence
from gulliver.comm import World, current_world, gather_objects
from gulliver.errors import GulliverError
from gulliver.parallel import named_groups, named_trainables
from gulliver.parallel.pipeline import (
    Pipeline,
    Stage,
    checkpoint_blocks,
    cut,
    deal,
    make_stage,
    stack_of,
    style_of,
)
from gulliver.parallel.sequence import SequencePlan
from gulliver.parallel.tensor import TensorPlan, apply_tensor, plan_tensor
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
    _check_dropout(plugin, model)
    idle = optimizer is None
    optimizer = optimizer or no_optimizer()
    if optimizer.state:
        raise GulliverError(
            "the optimizer has stepped before boost: boost cuts the model, so boost first"
        )
    if plugin.precision:
        _convert(model, optimizer, HALVES[plugin.precision])
        precision = f"{plugin.precision} with float32 copies"
    check_lazy(model, plugin.weights)
    make_equal(model)
    groups, aliases = named_groups(model, optimizer), _aliases(model)
    asleep = _asleep(model, optimizer)
    total = sum(p.numel() for p in model.parameters())
    trained = 0 if idle else sum(p.numel() for p in named_trainables(model, optimizer))
    mesh = make_mesh(sizes, sequence, world.device.type)
    # Before anything is cut: what cannot be done is refused while the model is whole.
    tensor = _tensor_plan(plugin, model) if plugin.tp_size > 1 else None
    stage = _make_stage(plugin, model, mesh) if plugin.pp_size > 1 else None
    if tensor is not None:
        tensor = _remaining(tensor, model)
        shared = plugin.mode if plugin.mode in SHARED_BY_TENSOR else None
        apply_tensor(model, tensor, mesh.tensor, shared)  # type: ignore[arg-type]
    _wire(plugin, model, mesh, family, stage)
    if plugin.weights is not None:
        fill(model, plugin.weights, aliases, world.device)
    names = _rewrite_groups(optimizer, model, groups, aliases)
    if not idle:
        _check_trained(names, mesh)
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
    if stage is not None:
        boosted.pipeline = Pipeline(
            stage,
            plugin.pp_style,
            plugin.num_microbatches,
            readers=mesh.model,
            check_batch=plugin.check_batches,
        )
    elif plugin.check_batches:
        watch_batches(model, mesh.model)
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


DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_AXES = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor"}


def _tensor_plan(plugin: HybridParallelPlugin, model: nn.Module) -> TensorPlan:
    return plan_tensor(model, plugin.tp_size, plugin.tensor_rules, plugin.replicate_rest)


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
    style = style_of(plugin.pp_style, plugin.num_model_chunks)
    chunks = plugin.num_model_chunks or style.chunks
    stack = stack_of(model)
    numbers = deal(plugin.pp_style, plugin.pp_size, chunks)
    found = cut(model, stack, plugin.pp_size * chunks, at=plugin.cut)
    stage = make_stage(model, stack, found, mesh.pipeline, numbers)
    if plugin.checkpoint_activations:
        checkpoint_blocks(stage)
    return stage


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
        wire_sequence(model, mesh.sequence, mesh.tensor)
    if plugin.checkpoint_activations and stage is None:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise GulliverError(
                "checkpoint_activations needs a model with gradient_checkpointing_enable, or a "
                "pipeline: wrap the blocks with torch.utils.checkpoint before boost"
            )
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


def check_new(plugin: HybridParallelPlugin, model: nn.Module) -> None:
    """Refuses what was boosted or compiled before, while all ranks still have the same."""
    if any("_boosted" in vars(p) for p in model.parameters()) or CUT in vars(model):
        raise GulliverError("the model is boosted already: boost each model once, or build it anew")
    compiled = next((name for name, m in model.named_modules() if _is_compiled(m)), None)
    if compiled is not None and plugin.tp_size * plugin.pp_size > 1:
        raise GulliverError(
            f"{compiled or 'the model'} is compiled, and what is compiled cannot be cut: leave "
            "torch.compile out with tp_size and pp_size"
        )


def _check_dropout(plugin: HybridParallelPlugin, model: nn.Module) -> None:
    """Refuses masks that ranks would draw for their own tokens, another than one process draws."""
    drops = [n for n, m in model.named_modules() if isinstance(m, DROPOUTS) and m.p > 0]
    if drops and plugin.sp_size > 1:
        raise GulliverError(
            f"{', '.join(drops[:3])}{', ...' if len(drops) > 3 else ''} drop at random, and ranks "
            "that share a sequence would draw other masks than one: set dropouts to 0 in the "
            "model's configuration"
        )


def _is_compiled(module: nn.Module) -> bool:
    return compiled_call(module) is not None or is_compiled(module)


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


def _check_trained(names: Mapping[nn.Parameter, str], mesh: HybridMesh) -> None:
    """Refuses stages with nothing to train, on all ranks: those of others would wait for it."""
    idle = {place for place, count in gather_objects((mesh.place["pp"], len(names))) if not count}
    if idle:
        stages = " and ".join(str(place) for place in sorted(idle))
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
