"""The loss that a Hugging Face model computes from labels.

It matters in two cases. If logits are sharded over ranks, the loss is computed from the shards and
must equal the model's own. If a batch is split into micro-batches, its loss is the weighted mean of
theirs, with weights that depend on the number of labels that each one averages over.

The functions that a forward calls can be read from its code object, without its source; `own_loss`
only accepts known ones. A custom forward, a replaced `loss_function`, or terms in addition to the
cross-entropy make the loss unknown, and callers then give the model full logits or reject it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class ModelLoss:
    """A cross-entropy averaged over labels that are not ignored."""

    # The output of each token predicts the next label.
    shifted: bool = False
    # Whether it divides by ``num_items_in_batch`` if given; None: unknown.
    items: bool | None = False


FUNCTIONS = {
    "ForCausalLMLoss": ModelLoss(shifted=True, items=True),
    "ForMaskedLMLoss": ModelLoss(items=True),
    # Whether keyword arguments reach these differs between models.
    "ForTokenClassification": ModelLoss(items=None),
    "ForSequenceClassificationLoss": ModelLoss(items=None),
}
"""Functions of transformers that models call as ``self.loss_function``."""

DIRECT = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "Classification")
"""Suffixes of class names that call torch's cross-entropy once, on unshifted labels, unless a
variable name indicates shifted ones.
"""

CROSS_ENTROPIES = ({"CrossEntropyLoss"}, {"cross_entropy"})
CLASSIFIER = {"BCEWithLogitsLoss", "CrossEntropyLoss", "MSELoss"}
ROUTERS = {"load_balancing_loss_func", "router_aux_loss_coef", "aux_loss_coef", "aux_loss"}
"""Names in the forward of mixtures of experts, which add a term if router logits are requested."""


def hugging_face_of(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside a PEFT model, or the model itself."""
    adapted = any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
    inner = getattr(model, "get_base_model", None) if adapted else None
    return inner() if inner is not None else model


def own_loss(model: nn.Module, routers: bool = False) -> ModelLoss | None:
    """Returns the loss that a model computes from labels; None if unknown."""
    model = hugging_face_of(model)
    owner, code = _known_forward(model)
    if code is None:
        return None
    names = {n for n in code.co_names if "loss" in n.lower() or n == "cross_entropy"}
    if names & ROUTERS and not routers and asks_routers(model, {}):
        return None
    names -= ROUTERS
    if names == {"loss_function"}:
        return _of_function(model)
    terms = [n for n in code.co_varnames if n.endswith("_loss")]
    plain = len(terms) < 2 and not any("shift" in n for n in code.co_varnames)
    if not plain or not owner.endswith(DIRECT):
        return None
    return ModelLoss() if names in CROSS_ENTROPIES or names == CLASSIFIER else None


def has_known_forward(model: nn.Module) -> bool:
    """Whether a model's forward is an unmodified one of transformers."""
    return _known_forward(model)[1] is not None


def asks_routers(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call requests router logits, and thus the load-balancing loss."""
    known = getattr(getattr(model, "config", None), "output_router_logits", False)
    asked = given.get("output_router_logits")
    return bool(known if asked is None else asked)


def router_loss(model: Any, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Computes the load-balancing loss of a mixture of experts, using transformers' function."""
    name = "load_balancing_loss_func"
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    function = next(f for m in modules if (f := getattr(m, name, None)) is not None)
    return function(logits, model.num_experts, model.num_experts_per_tok, mask)


def _known_forward(model: nn.Module) -> tuple[str, Any]:
    """Names the class that defines a model's forward; also returns its code, None if custom."""
    owner = next((c for c in type(model).__mro__ if "forward" in vars(c)), None)
    if owner is None or "forward" in vars(model):
        return "", None
    forward = inspect.unwrap(vars(owner)["forward"])
    known = str(forward.__module__).startswith("transformers.")
    return owner.__name__, getattr(forward, "__code__", None) if known else None


def _of_function(model: nn.Module) -> ModelLoss | None:
    """Returns the loss of a model's `loss_function`; None if it was replaced."""
    from transformers import PreTrainedModel

    theirs = inspect.getattr_static(PreTrainedModel, "loss_function")
    if inspect.getattr_static(type(model), "loss_function", None) is not theirs:
        return None
    function: Any = None if "_loss_function" in vars(model) else model.loss_function
    if not str(getattr(function, "__module__", "")).startswith("transformers."):
        return None
    return FUNCTIONS.get(function.__name__)
