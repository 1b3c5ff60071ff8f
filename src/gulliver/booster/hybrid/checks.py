"""Rejects features that would silently change results in a sharded model.

User hooks, norms with batch statistics, embedding options, PEFT's virtual tokens: each is either
preserved or rejected before the model is sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import (
    compiled_call,
    hooks_of,
    is_batch_norm,
    is_compiled,
    order_outputs_hooks,
    outputs_hooks,
)
from gulliver.booster.checkpoint import CUT
from gulliver.booster.hybrid.dropout import check_positions, drops_by_position
from gulliver.booster.hybrid.transformers import check_sequence
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.comm.collectives import raise_on_any_rank
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError, nearest
from gulliver.families.lookup import is_hugging_face
from gulliver.families.loss import asks_routers, hugging_face_of
from gulliver.families.record import SHARED_BY_TENSOR
from gulliver.parallel.optimizer import has_stepped, named_trainables
from gulliver.parallel.pipeline.schedules import check_counts, style_of
from gulliver.parallel.pipeline.stage import check_stages
from gulliver.parallel.tensor.apply import check_mode, materialize
from gulliver.parallel.tensor.styles import TensorPlan
from gulliver.plan.plan import Plan
from gulliver.planner.capability import check_family, check_sizes, family_of
from gulliver.planner.model import NO_BLOCKS, check_uncompiled
from gulliver.planner.resolve import Stages, recomputable

# Libraries whose own hooks are allowed, because they work on shards as on full tensors.
LIBRARIES = ("torch", "transformers", "peft", "gulliver")

# Kinds of sharding that keep the module object.
STAYS = ("summed", "experts", "parameters", "latent")


def check_hooks(model: nn.Module, plan: TensorPlan | None, mode: str | None) -> None:
    """Rejects user hooks that would be lost or would see only a shard of their tensor."""
    if plan is not None:
        _check_replaced(model, plan)
        _check_beneath(model, plan.sites, "would see only one rank's features or heads")
    piece = f"would see only part of the sequence under sequence_parallelism_mode={mode!r}"
    if plan is not None and mode in SHARED_BY_TENSOR:
        _check_beneath(model, plan.stacks, piece)
    elif mode is not None and mode not in SHARED_BY_TENSOR:
        inner = hugging_face_of(model)
        paths = [path for path, module in model.named_modules() if module is inner]
        _check_beneath(model, paths, piece)


def _check_replaced(model: nn.Module, plan: TensorPlan) -> None:
    for path, placed in plan.modules.items():
        module, how = model.get_submodule(path), placed.how
        for name in placed.dims:
            if _users(hooks_of(module._parameters[name])):
                raise GulliverError(
                    f"{path}.{name} has hooks, but tp_size={plan.size} shards this parameter: "
                    "register them after boost, or omit tp_size"
                )
        if how.kind in STAYS:
            continue
        whole = how.kind == "vocabulary" or (how.kind == "embedding" and how.gather)
        hooks = _users(hooks_of(module, forward=not whole))
        if hooks or "forward" in vars(module):
            what = "hooks" if hooks else "a custom forward"
            raise GulliverError(
                f"{path} has {what}, but tp_size={plan.size} replaces this module: "
                f"{'register them' if hooks else 'set it'} after boost, where the module sees only "
                "this rank's shard, or omit tp_size"
            )


def _check_beneath(model: nn.Module, paths: Iterable[str], why: str) -> None:
    starts = tuple(f"{path}." if path else "" for path in paths)
    for path, module in model.named_modules():
        if path and path.startswith(starts) and _users(hooks_of(module)):
            raise GulliverError(
                f"{path} has hooks, which {why}; register them after boost if that is intended, or "
                "omit this parallelism"
            )


def _users(hooks: Iterable[Any]) -> list[Any]:
    return [hook for hook in hooks if _module_of(hook).partition(".")[0] not in LIBRARIES]


def _module_of(hook: Any) -> str:
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


class TrailingHooks:
    """Keeps a user's output hooks running after ours, although ours are registered later.

    Our hooks gather logits and compute losses.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(module, outputs_hooks(module)) for module in model.modules()]
        self.known = [
            (module, [key for key, hook in hooks.items() if _users([hook])])
            for module, hooks in found
            if hooks
        ]

    def restore(self) -> None:
        for module, hooks in self.known:
            order_outputs_hooks(module, hooks)


def check_batch_norms(model: nn.Module, pp_size: int, mode: str | None) -> None:
    """Rejects norms whose statistics would cover only part of the batch."""
    for path, module in model.named_modules() if pp_size > 1 or mode is not None else ():
        counts = isinstance(getattr(module, "running_mean", None), Tensor)
        if module.training and (counts or is_batch_norm(module)):
            part = "each micro-batch" if pp_size > 1 else "each rank's part"
            raise GulliverError(
                f"{path} ({type(module).__name__}) computes batch statistics, but would only see "
                f"{part}; call its eval() before boost, use per-sample norms, or omit "
                f"{'pp_size' if pp_size > 1 else 'sequence_parallelism_mode'}"
            )


def check_embeddings(model: nn.Module, degree: int, pp_size: int) -> None:
    """Rejects embedding options that count or renormalize lookups over the full batch."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if degree > 1 and (module.max_norm is not None or module.sparse):
            option = "sparse gradients" if module.max_norm is None else "max_norm"
        elif degree * pp_size > 1 and module.scale_grad_by_freq:
            option = "scale_grad_by_freq"
        else:
            continue
        raise GulliverError(
            f"{path} is an embedding with {option}, which would only see the part of the batch "
            f"{'on one rank' if degree > 1 else 'in a micro-batch'}; use an embedding without it"
        )


def check_virtual_tokens(model: nn.Module) -> None:
    if hugging_face_of(model) is model:
        return
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise GulliverError(
                f"adapter {name!r} ({type(config).__name__}) adds virtual tokens to the sequence, "
                "which tp_size, pp_size and sp_size do not support: use LoRA, or omit these options"
            )


# Compiled blocks of a sharded model.


BLOCKS = "compile its blocks separately with block.compile(...)"


# [Note: compiled first, sharded later] ``block.compile()`` replaces the block's call by a compiled
# one and traces nothing yet. Sharding replaces modules inside the block but keeps the block, so the
# first run traces the block as it is on this rank. Column and row layers, whose messages no
# compiler can move, run eagerly between compiled parts. A full model cannot be compiled this way,
# because a stage leaves its forward by an exception.
def check_compiled(
    model: nn.Module, plan: TensorPlan | None, lists: Iterable[str], style: str, mode: str | None
) -> None:
    for path, module in model.named_modules():
        if is_compiled(module):
            name = path.removesuffix("._orig_mod") or "the model"
            raise GulliverError(f"{name} is the result of torch.compile(module): {BLOCKS}")
        if compiled_call(module) is None:
            continue
        if not path or any(f"{inside}.".startswith(f"{path}.") for inside in lists):
            raise GulliverError(
                f"{path or 'the model'} is compiled together with its blocks: {BLOCKS}"
            )
        placed = plan.modules.get(path) if plan is not None else None
        if placed is not None and placed.how.kind not in STAYS:
            raise GulliverError(f"{path} is compiled, but sharding replaces it: {BLOCKS}")
        if mode in SHARED_BY_TENSOR:
            raise GulliverError(
                f"{path} is compiled, but sequence_parallelism_mode={mode!r} passes it tensors "
                "whose communication is pending; do not compile it, or use another mode"
            )
        if style_of(style).splits:
            raise GulliverError(
                f"{path} is compiled, so its backward cannot be split as pp_style={style!r} needs: "
                "use pp_style='1f1b'"
            )


def refuse_whole(model: nn.Module) -> None:
    """Makes a sharded model raise if it is compiled as one graph after boost."""
    refuse: Callable[[bool], None] = torch.compiler.disable(_refuse)  # pyright: ignore

    def before(*_: Any) -> None:
        # Constant in traced code.
        refuse(torch.compiler.is_compiling())

    model.register_forward_pre_hook(before, prepend=True)


def _refuse(traced: bool) -> None:
    if traced:
        raise GulliverError(f"the sharded model was compiled as one graph: {BLOCKS}")


# Models that are never complete in memory: built on meta, and filled with each rank's part.
#
# Build the model under `lazy_parameters`, create its optimizer, and boost both with
# ``HybridParallelPlugin(weights=folder)``.


def check_lazy(model: nn.Module, weights: Path | None) -> None:
    """Rejects meta buffers, and meta parameters if there is no folder to load them from."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise GulliverError(
                f"buffer {name!r} is on meta, and no file has its values: build the model under "
                "gulliver.booster.lazy_parameters(), which puts only parameters on meta"
            )
    if weights is not None:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise GulliverError(
                f"parameter {name!r} is on meta; use HybridParallelPlugin(weights=folder) to load "
                "its values"
            )


def fill(model: nn.Module, weights: Path, aliases: Mapping[str, str], device: torch.device) -> None:
    """Loads this rank's part of a Hugging Face folder (collective)."""
    materialize(model, device)
    tied = {name: first for name, first in aliases.items() if name != first}
    raise_on_any_rank(
        lambda: load_huggingface(model, weights, elsewhere=list(aliases), aliases=tied)
    )


# Rejects models that cannot be sharded as planned, while they are unsharded.


# Minimum share of the blocks' parameters that is sharded without a warning.
LEAST_SHARE = 0.5


def check_new(plan: Plan, model: nn.Module) -> None:
    if plan.mesh.cuts_model:
        check_virtual_tokens(model)
    if any("_boosted" in vars(p) for p in model.parameters()) or CUT in vars(model):
        raise GulliverError(
            "the model is already boosted; boost it once, or build a new one. Two optimizers of "
            "one model, such as Muon and AdamW, need LowLevelZeroPlugin below stage 3"
        )


def check_cut(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    tensor: TensorPlan | None,
    stages: Stages | None,
) -> None:
    family, mode = family_of(model), plan.sequence.mode
    sizes = plan.mesh.of("tensor"), plan.mesh.of("sequence")
    check_sizes(mode, *sizes)
    check_family(family, mode, max(sizes))
    check_batch_norms(model, plan.mesh.of("pipeline"), mode)
    check_embeddings(model, plan.sequence.degree, plan.mesh.of("pipeline"))
    # Optimizer state of full parameters would have to be sharded, and no optimizer describes how.
    if optimizer is not None and has_stepped(optimizer):
        raise GulliverError(
            "the optimizer has stepped before boost: boost shards the parameters, so it must come "
            "first"
        )
    if optimizer is not None:
        named_trainables(model, optimizer)  # rejects the optimizer of another model
    weights = None if plan.weights is None else Path(plan.weights)
    check_lazy(model, weights)
    if weights is not None and not weights.is_dir():
        raise GulliverError(f"weights={plan.weights!r} is not a folder")
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
    known = recomputable(plan, model, stages) if plan.recompute else ()
    if plan.recompute and not known:
        raise GulliverError(NO_BLOCKS)
    for number, path in enumerate(plan.recompute):
        if path not in known:
            line = plan.line_text(f"recompute[{number}]") or plan.line_text("recompute")
            raise GulliverError(
                f"recompute names {path!r}{line}, which is not a block of the model: "
                f"{nearest(path, known)}"
            )
    if plan.mesh.of("pipeline") == 1:
        check_uncompiled(model, plan.recompute)


def _check_share(plan: Plan, model: nn.Module, tensor: TensorPlan) -> None:
    """Rejects tensor parallelism that would shard no block; warns if it shards few parameters."""
    share, size = tensor.share_of(model), tensor.size
    if share == 0 and not plan.tensor.rules:
        raise GulliverError(
            f"tp_size={size} would shard no parameters in the blocks of {type(model).__name__}; "
            "pass tensor_rules, or use pp_size instead"
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
    """Rejects router losses if each rank would compute only part of them."""
    if plan.sequence.mode not in SHARED_BY_TENSOR and plan.mesh.of("pipeline") == 1:
        return
    if asks_routers(model, {}):
        raise GulliverError(
            "output_router_logits=True adds a loss over all tokens and blocks, but a rank has "
            "only some of them; set it to False in the configuration, or omit pp_size and "
            "sequence_parallelism_mode"
        )


def _check_stages(plan: Plan, model: nn.Module, stages: Stages) -> None:
    stack, found, numbers = stages
    check_stages(model, stack)
    line = plan.pipeline
    check_counts(line.schedule, found.stages, len(numbers), line.micro_batches)
