"""Refuses models that cannot be cut as a plan says, while they are whole."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from gulliver.booster._blocks import NO_BLOCKS, check_uncompiled
from gulliver.booster._resolve import Stages, recomputable
from gulliver.booster._states import CUT
from gulliver.booster.hybrid._capability import check_family, check_sizes, family_of
from gulliver.booster.hybrid._compiled import check_compiled
from gulliver.booster.hybrid._dropout import check_positions, drops_by_position
from gulliver.booster.hybrid._inside import (
    check_batch_norms,
    check_embeddings,
    check_hooks,
    check_virtual_tokens,
)
from gulliver.booster.hybrid._lazy import check_lazy
from gulliver.booster.hybrid._transformers import check_sequence
from gulliver.comm import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.families import SHARED_BY_TENSOR, asks_routers, hugging_face_of, is_hugging_face
from gulliver.parallel import has_stepped, named_trainables
from gulliver.parallel.pipeline import check_counts, check_stages
from gulliver.parallel.tensor import TensorPlan, check_mode
from gulliver.plan import Plan

# Least share of the parameters of the blocks that is cut without a warning.
LEAST_SHARE = 0.5


def check_new(plan: Plan, model: nn.Module) -> None:
    """Refuses models that were boosted before, and adapters that no plan supports."""
    if plan.mesh.cuts_model:
        check_virtual_tokens(model)
    if any("_boosted" in vars(p) for p in model.parameters()) or CUT in vars(model):
        raise GulliverError(
            "the model is boosted already: boost it once here, or build it anew; two optimizers of "
            "one model, such as Muon and AdamW, need LowLevelZeroPlugin below stage 3"
        )


def check_cut(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensor: TensorPlan | None,
    stages: Stages | None,
) -> None:
    """Refuses what a plan cannot do to a model, before anything is changed."""
    family, mode = family_of(model), plan.sequence.mode
    sizes = plan.mesh.of("tensor"), plan.mesh.of("sequence")
    check_sizes(mode, *sizes)
    check_family(family, mode, max(sizes))
    check_batch_norms(model, plan.mesh.of("pipeline"), mode)
    check_embeddings(model, plan.sequence.degree, plan.mesh.of("pipeline"))
    # State of whole parameters would have to be cut, too, which no optimizer says how to do.
    if optimizer is not None and has_stepped(optimizer):
        raise GulliverError(
            "the optimizer has stepped before boost: boost cuts the model, so boost first"
        )
    if optimizer is not None:
        named_trainables(model, optimizer)  # refuses an optimizer of another model
    weights = None if plan.weights is None else Path(plan.weights)
    check_lazy(model, weights)
    if weights is not None and not weights.is_dir():
        raise GulliverError(f"weights={plan.weights!r} is no folder")
    _check_outputs(plan, model)
    if tensor is not None or stages is not None:
        lists = (*(stages[0].lists if stages else ()), *(tensor.stacks if tensor else ()))
        check_compiled(model, tensor, lists, plan.pipeline.schedule, mode)
    if drops_by_position(plan, model):
        check_positions(model, tensor, plan.recompute if stages is None else ())
    check_hooks(model, tensor, mode)
    if tensor is not None:
        _check_share(plan, model, tensor)
        check_mode(model, tensor, mode if mode in SHARED_BY_TENSOR else None)
    if stages is not None:
        _check_stages(plan, model, stages)
    if family != "STDiT3" and is_hugging_face(model) and plan.sequence.degree > 1:
        check_sequence(hugging_face_of(model))


def check_recompute(plan: Plan, model: nn.Module, stages: Stages | None) -> None:
    """Refuses blocks that cannot be recomputed."""
    known = recomputable(plan, model, stages) if plan.recompute else ()
    if plan.recompute and not known:
        raise GulliverError(NO_BLOCKS)
    for number, path in enumerate(plan.recompute):
        if path not in known:
            line = plan.line_text(f"recompute[{number}]") or plan.line_text("recompute")
            raise GulliverError(
                f"recompute names {path!r}{line}, which is no block "
                f"of the model: {nearest(path, known)}"
            )
    if plan.mesh.of("pipeline") == 1:
        check_uncompiled(model, plan.recompute)


def _check_share(plan: Plan, model: nn.Module, tensor: TensorPlan) -> None:
    """Refuses a cut that leaves the blocks whole; says where it leaves most of them so."""
    share, size = tensor.share_of(model), tensor.size
    if share == 0 and not plan.tensor.rules:
        raise GulliverError(
            f"tp_size={size} would cut nothing of the blocks of {type(model).__name__}: "
            "give tensor_rules, or take pp_size"
        )
    if share < LEAST_SHARE and current_world().is_main:
        kept = 1 - share * (1 - 1 / size)
        warnings.warn(
            f"tp_size={size} cuts {share:.0%} of the parameters of the blocks of "
            f"{type(model).__name__}, so each rank keeps {kept:.0%} of them: give tensor_rules "
            "for the rest, or take pp_size",
            stacklevel=2,
        )


def _check_outputs(plan: Plan, model: nn.Module) -> None:
    """Refuses losses of routers that each rank would have a part of."""
    if plan.sequence.mode not in SHARED_BY_TENSOR and plan.mesh.of("pipeline") == 1:
        return
    if asks_routers(model, {}):
        raise GulliverError(
            "output_router_logits=True adds a loss of all tokens of all blocks, and a rank has "
            "some of them: set it to False in the configuration, or leave pp_size and "
            "sequence_parallelism_mode out"
        )


def _check_stages(plan: Plan, model: nn.Module, stages: Stages) -> None:
    """Refuses blocks that cannot be run in stages."""
    stack, found, numbers = stages
    check_stages(model, stack)
    line = plan.pipeline
    check_counts(line.schedule, found.stages, len(numbers), line.micro_batches)
