"""The steps that cut a model over pipeline, tensor and sequence axes, in place.

`apply_plan` calls them in order. Parameters stay plain parameters with the model's own names; each
knows the region of the whole that it holds (`gulliver.memory.region_of`), which is all that norms
and checkpoints need. What cannot be cut is refused before, in `_checks.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gulliver.booster._blocks import recompute_blocks
from gulliver.booster._resolve import Stages
from gulliver.booster._states import CUT
from gulliver.booster.hybrid._batches import Vocabulary, watch_batches
from gulliver.booster.hybrid._capability import family_of
from gulliver.booster.hybrid._choice import use_measured_links
from gulliver.booster.hybrid._compiled import refuse_whole
from gulliver.booster.hybrid._degree import degree_of, readers
from gulliver.booster.hybrid._dropout import PositionDropout
from gulliver.booster.hybrid._mesh import HybridMesh, make_mesh
from gulliver.booster.hybrid._stdit import wire_stdit
from gulliver.booster.hybrid._transformers import wire_sequence
from gulliver.comm import RankGroup, broadcast, current_world
from gulliver.errors import GulliverError
from gulliver.families import SHARED_BY_TENSOR, hugging_face_of, is_hugging_face
from gulliver.parallel import ZeroOptimizer, named_groups, take_new_state
from gulliver.parallel.pipeline import Pipeline, Stage, checkpoint_blocks, make_stage
from gulliver.parallel.sequence import SequencePlan
from gulliver.parallel.tensor import TensorPlan, apply_tensor
from gulliver.plan import Plan
from gulliver.precision.wire import wire_format

SHORT = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor"}
"""Names of the grid's axes in the arguments of plugins."""


def sequence_plan(plan: Plan) -> SequencePlan:
    """How a sequence lies over its ranks."""
    s = plan.sequence
    layout: Any = s.layout
    return SequencePlan(s.ulysses, s.outer, s.inner, layout, wire_format(plan.wire.sequence))


def grid(plan: Plan) -> HybridMesh:
    """The groups of all axes; every rank of the world calls it."""
    sizes = {short: plan.mesh.of(name) for short, name in SHORT.items()}
    wires = wire_format(plan.wire.tensor), wire_format(plan.wire.pipeline)
    return make_mesh(sizes, sequence_plan(plan), plan.mesh.device, *wires)


def cut_stages(model: nn.Module, stages: Stages | None, mesh: HybridMesh | None) -> Stage | None:
    """Takes the blocks of other stages out."""
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
    """Lets attention, inputs and losses know that sequences and vocabularies are shared."""
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
    """Lets backward compute blocks again instead of keeping what they computed.

    Args:
        plan: names the blocks.
        model: what this rank has of it.
        stage: stage of the pipeline; None without one.
        offering: paths of all blocks that could be, of `recomputable`.
    """
    if not plan.recompute:
        return
    if stage is not None:
        checkpoint_blocks(stage, plan.recompute)
        return
    recompute_blocks(model, plan.recompute, offering)


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


class WholeModel:
    """What is remembered of a model from before it is cut.

    Args:
        model: whole model.
        optimizer: optimizer of its parameters.
        vocabulary: tokens that it knows.
        recomputable: paths of the blocks that backward can compute again.
        drops: whether its dropout is to be drawn by position.
        order: names of its parameters in the order of use, where chunks are to lie so.

    Attributes:
        groups: names of the trainable parameters of each group.
        given: names of all parameters of each group.
        aliases: first name of every parameter, by each of its names.
        trained: trainable parameters with their names.
        frozen: names of the parameters that the optimizer was given although they are frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        vocabulary: Vocabulary,
        recomputable: Sequence[str],
        drops: bool = False,
        order: Sequence[str] = (),
    ) -> None:
        self.vocabulary, self.recomputable, self.drops = vocabulary, recomputable, drops
        self.order = order
        self.groups = named_groups(model, optimizer)
        self.given = named_groups(model, optimizer, frozen=True)
        self.aliases = aliases_of(model)
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        named = dict(model.named_parameters())
        self.trained = {p: n for n, p in named.items() if p in stepped and p.requires_grad}
        self.frozen = {n for n, p in named.items() if p in stepped and not p.requires_grad}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def rewrite_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, whole: WholeModel
) -> dict[nn.Parameter, str]:
    """Puts what this rank has into the groups, in place of what the whole model had.

    Returns:
        This rank's trainable parameters, with the first names that the whole model has for them.
    """
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
    """Lets a cut model draw, read and save as one; a pipeline gets its schedule."""
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
    """Lets ranks that compute the same draw the same: at each call they take one seed."""
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
    """Lets neither the model nor a copy of it be written as if it were whole."""
    vars(model)[CUT] = True
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_saving


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise GulliverError(
        "each rank has a share of this model: booster.save_huggingface and save_model "
        "write it whole"
    )


def say() -> Callable[[str], None] | None:
    """Tells a rank group on the first rank; None on the others."""
    return (lambda line: print(line, file=sys.stderr)) if current_world().is_main else None
