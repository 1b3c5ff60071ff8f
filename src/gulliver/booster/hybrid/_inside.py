"""Refuses what would silently compute something else in a cut model.

Hooks of the user, norms with statistics of the batch, options of embeddings, virtual tokens of
PEFT: each is refused by name while the model is whole, or carried over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gulliver._compat import hooks_of, is_batch_norm, order_outputs_hooks, outputs_hooks
from gulliver.errors import GulliverError
from gulliver.families import SHARED_BY_TENSOR, hugging_face_of
from gulliver.parallel.tensor import TensorPlan

# Libraries whose own hooks are not looked at: they work on a piece as on the whole.
LIBRARIES = ("torch", "transformers", "peft", "gulliver")

# Kinds of which the module stays itself.
STAYS = ("summed", "experts", "parameters", "latent")


def check_hooks(model: nn.Module, plan: TensorPlan | None, mode: str | None) -> None:
    """Refuses a user's hooks that would be lost, or would see a part of what they saw."""
    if plan is not None:
        _check_replaced(model, plan)
        _check_beneath(model, plan.sites, "would see the features or heads of one rank")
    piece = f"would see a piece of the sequence under sequence_parallelism_mode={mode!r}"
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
                    f"{path}.{name} has hooks, and tp_size={plan.size} cuts this parameter: "
                    "register them on the model's parameters after boost, or leave tp_size out"
                )
        if how.kind in STAYS:
            continue
        whole = how.kind == "vocabulary" or (how.kind == "embedding" and how.gather)
        hooks = _users(hooks_of(module, forward=not whole))
        if hooks or "forward" in vars(module):
            what = "hooks" if hooks else "a forward of its own"
            raise GulliverError(
                f"{path} has {what}, and tp_size={plan.size} replaces this module: "
                f"{'register them' if hooks else 'put it there'} after boost, where the module "
                "sees what one rank has, or leave tp_size out"
            )


def _check_beneath(model: nn.Module, paths: Iterable[str], why: str) -> None:
    """Refuses hooks of modules that lie beneath some."""
    starts = tuple(f"{path}." if path else "" for path in paths)
    for path, module in model.named_modules():
        if path and path.startswith(starts) and _users(hooks_of(module)):
            raise GulliverError(
                f"{path} has hooks, which {why}: register them after boost, if that is what they "
                "are to see, or leave that parallelism out"
            )


def _users(hooks: Iterable[Any]) -> list[Any]:
    """The hooks that the user has registered, not a library for its own ends."""
    return [hook for hook in hooks if _module_of(hook).partition(".")[0] not in LIBRARIES]


def _module_of(hook: Any) -> str:
    while hasattr(hook, "func"):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


class HooksLast:
    """Runs a user's hooks on outputs after ours, which are registered later.

    Logits are brought together, and losses computed, by hooks of ours.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(module, outputs_hooks(module)) for module in model.modules()]
        self.known = [
            (module, [key for key, hook in hooks.items() if _users([hook])])
            for module, hooks in found
            if hooks
        ]

    def restore(self) -> None:
        """Moves them behind the others."""
        for module, hooks in self.known:
            order_outputs_hooks(module, hooks)


def check_batch_norms(model: nn.Module, pp_size: int, mode: str | None) -> None:
    """Refuses norms whose statistics would be of a part of the batch."""
    for path, module in model.named_modules() if pp_size > 1 or mode is not None else ():
        counts = isinstance(getattr(module, "running_mean", None), Tensor)
        if module.training and (counts or is_batch_norm(module)):
            part = "of each micro-batch" if pp_size > 1 else "of each rank's piece"
            raise GulliverError(
                f"{path} ({type(module).__name__}) takes statistics of the batch, and would take "
                f"those {part}: call its eval() before boost, use norms of each sample, or leave "
                f"{'pp_size' if pp_size > 1 else 'sequence_parallelism_mode'} out"
            )


def check_embeddings(model: nn.Module, degree: int, pp_size: int) -> None:
    """Refuses options of embeddings that count or renormalize what the whole batch looks up."""
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
            f"{path} is an embedding with {option}, which would go by the part of the batch that a "
            f"{'rank' if degree > 1 else 'micro-batch'} has: only plain ones are supported here"
        )


def check_virtual_tokens(model: nn.Module) -> None:
    """Refuses PEFT's prompt and prefix tuning in a model that is cut."""
    if hugging_face_of(model) is model:
        return
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise GulliverError(
                f"adapter {name!r} ({type(config).__name__}) adds virtual tokens to the sequence, "
                "which tp_size, pp_size and sp_size do not cut: use LoRA, or leave them out"
            )
