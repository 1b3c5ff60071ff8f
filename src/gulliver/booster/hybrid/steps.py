"""Steps of sharding a model, and the comparison of batches on ranks that share a model.

Batches are compared before the model runs, so that all ranks raise together and none waits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.checkpoint import CUT
from gulliver.booster.hybrid.checks import refuse_whole
from gulliver.booster.hybrid.dropout import PositionDropout, drops_by_position
from gulliver.booster.hybrid.mesh import HybridMesh, degree_of, make_mesh, readers
from gulliver.booster.hybrid.stdit import wire_stdit
from gulliver.booster.hybrid.transformers import wire_sequence
from gulliver.comm.collectives import broadcast
from gulliver.comm.groups import RankGroup
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError
from gulliver.families.lookup import is_hugging_face
from gulliver.families.loss import hugging_face_of, own_loss
from gulliver.families.record import SHARED_BY_TENSOR
from gulliver.parallel.optimizer import move_state_to_replacements, named_groups
from gulliver.parallel.pipeline.batches import compare_batches
from gulliver.parallel.pipeline.pipeline import Pipeline
from gulliver.parallel.pipeline.stage import Stage, checkpoint_blocks, make_stage
from gulliver.parallel.tensor.apply import apply_tensor
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.plan.plan import Plan
from gulliver.planner.capability import family_of, sequence_plan
from gulliver.planner.model import recompute_blocks
from gulliver.planner.ranks import order_of_use
from gulliver.planner.resolve import Stages, recomputable
from gulliver.precision.wire.formats import wire_format

TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class Vocabulary:
    """Valid ranges of a model's tokens and labels."""

    # Rows of the embedding; 0 if unknown.
    tokens: int = 0
    # Outputs of the head, if the loss compares them; 0 if unknown.
    labels: int = 0
    # Whether the first label of a sample is ignored.
    shifted: bool = False

    @classmethod
    def of(cls, model: Any) -> Vocabulary:
        if not is_hugging_face(model):
            return cls()
        try:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return cls()
        own = own_loss(model)
        compared = own is not None and isinstance(head, nn.Linear)
        tokens = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 0
        labels = head.out_features if compared else 0
        return cls(tokens, labels, own is not None and own.shifted)

    def check(self, batch: Any) -> None:
        """Rejects tokens and labels outside the vocabulary, as a single process would."""
        if not isinstance(batch, Mapping):
            return
        for name in TOKENS:
            ids = batch.get(name)
            if self.tokens and isinstance(ids, Tensor):
                self._check(name, "token", ids, (ids < 0) | (ids >= self.tokens), self.tokens)
        labels, ignored = batch.get("labels"), batch.get("ignore_index", -100)
        if not self.labels or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        labels = labels[..., 1:] if self.shifted else labels
        wrong = ((labels < 0) | (labels >= self.labels)) & (labels != ignored)
        self._check("labels", "label", labels, wrong, self.labels)

    def _check(self, name: str, what: str, values: Tensor, wrong: Tensor, count: int) -> None:
        if bool(wrong.any()):
            raise GulliverError(
                f"{name} has {what} {int(values[wrong][0])}, but the model's vocabulary has "
                f"{count} entries (0 to {count - 1})"
            )


def watch_batches(
    model: nn.Module, readers: Callable[[], Sequence[RankGroup]], vocabulary: Vocabulary
) -> None:
    """Makes every call check token ids, and compare inputs across the ranks that share a model."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = given[0].device if given else torch.device("cpu")
        compare_batches({"args": args, **kwargs}, "", readers(), device, check=True)
        names = inspect.signature(module.forward).parameters
        vocabulary.check({**dict(zip(names, args, strict=False)), **kwargs})

    # Before other hooks change the inputs.
    model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


# The steps that shard a model over pipeline, tensor and sequence axes, in place.
#
# `apply_plan` calls them in order. Parameters keep their names and stay plain parameters; each
# knows its region of the full tensor (`gulliver.memory.region_of`), which norms and checkpoints
# use.


# Names of the grid's axes, by their names in plugin arguments.
SHORT = {"pp": "pipeline", "dp": "data", "sp": "sequence", "tp": "tensor"}


def grid(plan: Plan) -> HybridMesh:
    """Creates the rank groups of all axes (collective over the world)."""
    sizes = {short: plan.mesh.of(name) for short, name in SHORT.items()}
    wires = wire_format(plan.wire.tensor), wire_format(plan.wire.pipeline)
    return make_mesh(sizes, sequence_plan(plan), plan.mesh.device, *wires)


def cut_stages(model: nn.Module, stages: Stages | None, mesh: HybridMesh | None) -> Stage | None:
    """Removes the blocks of other pipeline stages."""
    if stages is None or mesh is None:
        return None
    stack, found, numbers = stages
    return make_stage(model, stack, found, mesh.pipeline, numbers)


def cut_tensors(
    plan: Plan, model: nn.Module, tensor: TensorPlan | None, mesh: HybridMesh | None
) -> None:
    """Shards this stage's layers over the tensor axis."""
    if tensor is None or mesh is None:
        return
    shared = plan.sequence.mode if plan.sequence.mode in SHARED_BY_TENSOR else None
    apply_tensor(model, _remaining(tensor, model), mesh.tensor, shared)  # type: ignore[arg-type]


def wire_sequences(
    plan: Plan, model: nn.Module, mesh: HybridMesh | None, verbose: bool = True
) -> None:
    if mesh is None or mesh.sequence.plan.degree * mesh.tensor.size == 1:
        return
    if family_of(model) == "STDiT3":
        # Tensor ranks alone need it too, because they must all drop the same captions.
        mode = plan.sequence.mode
        known = mode if mode in ("all_to_all", "ring_attn") else "all_to_all"
        wire_stdit(model, mesh.sequence, known, mesh.tensor, show=say() if verbose else None)
    elif is_hugging_face(model):
        wire_sequence(hugging_face_of(model), mesh.sequence, mesh.tensor)


def recompute(plan: Plan, model: nn.Module, stage: Stage | None, offering: Sequence[str]) -> None:
    if not plan.recompute:
        return
    if stage is not None:
        checkpoint_blocks(stage, plan.recompute)
        return
    recompute_blocks(model, plan.recompute, offering)


def _remaining(plan: TensorPlan, model: nn.Module) -> TensorPlan:
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
    """Facts about the unsharded model that sharding needs."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stages: Stages | None,
    ) -> None:
        self.vocabulary = Vocabulary.of(model)
        # Paths of the blocks that backward can recompute.
        self.recomputable = recomputable(plan, model, stages)
        # Whether dropout is drawn by position.
        self.drops = drops_by_position(plan, model)
        # Names of the parameters in order of use, if chunks follow it.
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
        # Names of frozen parameters in the optimizer.
        self.frozen = {n for n, p in named.items() if p in stepped and not p.requires_grad}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Maps each name of a parameter to its first name (tied parameters have several)."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in named}


def rewrite_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, whole: WholeModel
) -> dict[nn.Parameter, str]:
    """Replaces the parameters in the optimizer's groups with this rank's shards."""
    present: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        present.setdefault(whole.aliases[name], parameter)
    for group, members in zip(optimizer.param_groups, whole.groups, strict=True):
        group["params"] = [present[name] for name in members if name in present]
    move_state_to_replacements(
        optimizer, {p: present.get(name) for p, name in whole.trained.items()}
    )
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
    """Sets up random draws, loading, saving and the pipeline schedule of a sharded model."""
    if mesh is None:
        return
    drops = None
    if plan.dropout == "alike":
        draw_alike(model, (mesh.sequence.all, mesh.tensor))
    elif whole.drops:
        drops = PositionDropout(model, mesh, tensor)

    # Only this attribute is captured, because `whole` refers to other stages' parameters.
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
    """Gives ranks that compute the same values the same random seed at each call."""
    device = current_world().device
    shared = [rank_group for rank_group in rank_groups if rank_group.size > 1]

    def seed(module: nn.Module, *_: Any) -> None:
        if not module.training:
            return
        drawn = torch.randint(2**62, (1,)).to(device)
        for rank_group in shared:
            # A process group numbers its ranks in ascending order, unlike a rank group.
            broadcast(
                drawn, sorted(rank_group.ranks).index(rank_group.ranks[0]), rank_group.process_group
            )
        torch.manual_seed(int(drawn))

    if shared:
        model.register_forward_pre_hook(seed)


def mark_cut(model: nn.Module) -> None:
    """Marks a sharded model, so that neither it nor a copy is saved as if it were complete."""
    vars(model)[CUT] = True
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = _refuse_saving


def _refuse_saving(*_: Any, **__: Any) -> None:
    raise GulliverError(
        "this model is sharded: save it with booster.save_huggingface or save_model"
    )


def say() -> Callable[[str], None] | None:
    """Returns a function that prints on rank 0; None on other ranks."""
    return (lambda line: print(line, file=sys.stderr)) if current_world().is_main else None
