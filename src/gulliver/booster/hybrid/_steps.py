"""The steps that cut a model over pipeline, tensor and sequence axes, in place.

`apply_plan` calls them in order. Parameters stay plain parameters with the model's own names; each
knows the region of the whole that it holds (`gulliver.memory.region_of`), which is all that norms
and checkpoints need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gulliver.booster._blocks import recompute_blocks
from gulliver.booster._ranks import order_of_use
from gulliver.booster._resolve import Stages, recomputable
from gulliver.booster._states import CUT
from gulliver.booster.hybrid._batches import Vocabulary, watch_batches
from gulliver.booster.hybrid._capability import family_of
from gulliver.booster.hybrid._choice import sequence_plan, use_measured_links
from gulliver.booster.hybrid._compiled import refuse_whole
from gulliver.booster.hybrid._degree import degree_of, readers
from gulliver.booster.hybrid._dropout import PositionDropout, drops_by_position
from gulliver.booster.hybrid._mesh import HybridMesh, make_mesh
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._transformers import wire_sequence
from gulliver.comm import RankGroup, broadcast, current_world
from gulliver.errors import GulliverError
from gulliver.families import SHARED_BY_TENSOR, hugging_face_of, is_hugging_face
from gulliver.parallel import ZeroOptimizer, named_groups, take_new_state
from gulliver.parallel.pipeline import Pipeline, Stage, checkpoint_blocks, make_stage
from gulliver.parallel.tensor import TensorPlan, apply_tensor
from gulliver.plan import Plan
from gulliver.precision.wire import wire_format

# Names of the grid's axes in the arguments of plugins.
SHORT = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor"}


def grid(plan: Plan) -> HybridMesh:
    """The groups of all axes; every rank of the world calls it."""
    sizes = {short: plan.mesh.of(name) for short, name in SHORT.items()}
    wires = wire_format(plan.wire.tensor), wire_format(plan.wire.pipeline)
    return make_mesh(sizes, sequence_plan(plan), plan.mesh.device, *wires)


def cut_stages(model: nn.Module, stages: Stages | None, mesh: HybridMesh | None) -> Stage | None:
    """Removes the blocks of other stages."""
    if stages is None or mesh is None:
        return None
    stack, found, numbers = stages
    return make_stage(model, stack, found, mesh.pipeline, numbers)


def cut_tensors(
    plan: Plan, model: nn.Module, tensor: TensorPlan | None, mesh: HybridMesh | None
) -> None:
    """Cuts what this stage has over the tensor axis."""
    if tensor is None or mesh is None:
        return
    use_measured_links(current_world(), tensor.size)
    shared = plan.sequence.mode if plan.sequence.mode in SHARED_BY_TENSOR else None
    apply_tensor(model, _remaining(tensor, model), mesh.tensor, shared)  # type: ignore[arg-type]


def wire_sequences(
    plan: Plan, model: nn.Module, mesh: HybridMesh | None, verbose: bool = True
) -> None:
    """Wires attention, inputs and losses for shared sequences and vocabularies."""
    if mesh is None or mesh.sequence.plan.degree * mesh.tensor.size == 1:
        return
    if family_of(model) == "STDiT3":
        # Tensor ranks alone need it too: captions are dropped alike on all of them.
        mode = plan.sequence.mode
        known = mode if mode in ("all_to_all", "ring_attn") else "all_to_all"
        wire_stdit(model, mesh.sequence, known, mesh.tensor, show=say() if verbose else None)
    elif is_hugging_face(model):
        wire_sequence(hugging_face_of(model), mesh.sequence, mesh.tensor)


def recompute(plan: Plan, model: nn.Module, stage: Stage | None, offering: Sequence[str]) -> None:
    """Recomputes blocks in backward instead of keeping their activations."""
    if not plan.recompute:
        return
    if stage is not None:
        checkpoint_blocks(stage, plan.recompute)
        return
    recompute_blocks(model, plan.recompute, offering)


def _remaining(plan: TensorPlan, model: nn.Module) -> TensorPlan:
    """Restricts a plan of the whole model to what a stage has."""
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


class WholeModel:
    """What a cut needs to know of the whole model."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stages: Stages | None,
    ) -> None:
        self.vocabulary = Vocabulary.of(model)
        # Paths of the blocks that backward can compute again.
        self.recomputable = recomputable(plan, model, stages)
        # Whether its dropout is drawn by position.
        self.drops = drops_by_position(plan, model)
        # Names of its parameters in the order of use, where chunks are to lie so.
        self.order = order_of_use(plan, model)
        # Names of the trainable parameters of each group.
        self.groups = named_groups(model, optimizer)
        # Names of all parameters of each group.
        self.given = named_groups(model, optimizer, frozen=True)
        # First name of every parameter, by each of its names.
        self.aliases = aliases_of(model)
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        named = dict(model.named_parameters())
        # Trainable parameters with their names.
        self.trained = {p: n for n, p in named.items() if p in stepped and p.requires_grad}
        # Names of the parameters that the optimizer was given although they are frozen.
        self.frozen = {n for n, p in named.items() if p in stepped and not p.requires_grad}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def rewrite_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, whole: WholeModel
) -> dict[nn.Parameter, str]:
    """Replaces the parameters in the groups by those that this rank has."""
    present: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        present.setdefault(whole.aliases[name], parameter)
    for group, members in zip(optimizer.param_groups, whole.groups, strict=True):
        group["params"] = [present[name] for name in members if name in present]
    take_new_state(optimizer, {p: present.get(name) for p, name in whole.trained.items()})
    trained = {name for group in whole.groups for name in group}
    return {p: name for name, p in present.items() if name in trained}


def finish(
    plan: Plan,
    model: nn.Module,
    boosted: ZeroOptimizer,
    mesh: HybridMesh | None,
    tensor: TensorPlan | None,
    stage: Stage | None,
    whole: WholeModel,
) -> None:
    """Makes a cut model draw, read and save as one; a pipeline gets its schedule."""
    if mesh is None:
        return
    drops = None
    if plan.dropout == "alike":
        draw_alike(model, (mesh.sequence.all, mesh.tensor))
    elif whole.drops:
        drops = PositionDropout(model, mesh, tensor)

    # Not all of `whole`, which has the parameters of other stages.
    vocabulary = whole.vocabulary

    def look(batch: Any) -> None:
        if plan.check_batches:
            vocabulary.check(batch)
        if drops is not None:
            drops.begin()

    if stage is not None:
        boosted.pipeline = Pipeline(
            stage,
            plan.pipeline.schedule,
            plan.pipeline.micro_batches,
            readers=lambda: readers(model, mesh.model, mesh.tensor, mesh.pipeline),
            check_batch=plan.check_batches,
            look=look,
            before=None if drops is None else drops.before,
        )
    elif plan.check_batches and mesh.model.size > 1:
        watch_batches(model, lambda: readers(model, mesh.model, mesh.tensor), whole.vocabulary)
    degree = degree_of(model)
    if degree is not None:
        degree.staged = stage is not None
        degree.fixed = "" if drops is None else "dropout is drawn by position"
    if mesh.shards.size > 1:
        mark_cut(model)
        refuse_whole(model)  # before all other hooks


def draw_alike(model: nn.Module, rank_groups: Sequence[RankGroup]) -> None:
    """Gives ranks that compute the same one seed at each call."""
    device = current_world().device
    shared = [rank_group for rank_group in rank_groups if rank_group.size > 1]

    def seed(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        drawn = torch.randint(2**62, (1,)).to(device)
        for rank_group in shared:
            # A group numbers its ranks in ascending order, a rank group need not.
            broadcast(
                drawn, sorted(rank_group.ranks).index(rank_group.ranks[0]), rank_group.process_group
            )
        torch.manual_seed(int(drawn))

    if shared:
        model.register_forward_pre_hook(seed)


def mark_cut(model: nn.Module) -> None:
    """Marks a model so that neither it nor a copy is written as if it were whole."""
    vars(model)[CUT] = True
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_saving


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise GulliverError(
        "each rank has a share of this model: booster.save_huggingface and save_model "
        "write it whole"
    )


def say() -> Callable[[str], None] | None:
    """Returns a function that prints on rank 0; None on other ranks."""
    return (lambda line: print(line, file=sys.stderr)) if current_world().is_main else None
