"""What the loss is that a Hugging Face model computes itself when it is given labels.

Two things hang on it. Where logits are shared by several ranks, the loss is computed of the pieces,
which takes the place of the model's own: that must be the same loss. And a batch that is cut into
micro-batches has the mean of their losses, weighted by what each of them is a mean over.

What a forward calls can be read from its code object, without its source; `own_loss` believes only
what it knows. A forward of somebody's own, a `loss_function` that was put in, terms beside the
cross-entropy: all of these are "not known", and whoever asks gives such a model whole logits, or
refuses it.
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
    """A cross-entropy that is the mean over labels that are not ignored."""

    # The output of each token is compared with the next label.
    shifted: bool = False
    # Whether it divides by ``num_items_in_batch`` where that is given; None: not known.
    items: bool | None = False


FUNCTIONS = {
    "ForCausalLMLoss": ModelLoss(shifted=True, items=True),
    "ForMaskedLMLoss": ModelLoss(items=True),
    # Whether keyword arguments get as far as these differs from model to model.
    "ForTokenClassification": ModelLoss(items=None),
    "ForSequenceClassificationLoss": ModelLoss(items=None),
}
"""Functions of transformers that models call as ``self.loss_function``."""

DIRECT = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "Classification")
"""Ends of the names of classes that call torch's cross-entropy once, on unshifted labels, if none
of their variables is called a shifted one."""

CROSS_ENTROPIES = ({"CrossEntropyLoss"}, {"cross_entropy"})
CLASSIFIER = {"BCEWithLogitsLoss", "CrossEntropyLoss", "MSELoss"}
ROUTERS = {"load_balancing_loss_func", "router_aux_loss_coef", "aux_loss_coef", "aux_loss"}
"""Names in the forwards of mixtures of experts, which add a term if router logits are asked for."""


def hugging_face_of(model: nn.Module) -> nn.Module:
    """The model itself, or the one of transformers that PEFT has put its adapters into."""
    adapted = any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
    inner = getattr(model, "get_base_model", None) if adapted else None
    return inner() if inner is not None else model


def own_loss(model: nn.Module, routers: bool = False) -> ModelLoss | None:
    """The loss that a model computes of its labels; None where that is not known."""
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
    """Whether what runs when a model is called is a forward of transformers, not somebody's own."""
    return _known_forward(model)[1] is not None


def asks_routers(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call asks for its routers' logits, and so for their load-balancing loss."""
    known = getattr(getattr(model, "config", None), "output_router_logits", False)
    asked = given.get("output_router_logits")
    return bool(known if asked is None else asked)


def router_loss(model: Any, logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """The load-balancing loss of a mixture of experts, by the function that its class uses."""
    name = "load_balancing_loss_func"
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    function = next(f for m in modules if (f := getattr(m, name, None)) is not None)
    return function(logits, model.num_experts, model.num_experts_per_tok, mask)


def _known_forward(model: nn.Module) -> tuple[str, Any]:
    """The class whose forward a model has, and that forward's code; None for one's own."""
    owner = next((c for c in type(model).__mro__ if "forward" in vars(c)), None)
    if owner is None or "forward" in vars(model):
        return "", None
    forward = inspect.unwrap(vars(owner)["forward"])
    known = str(forward.__module__).startswith("transformers.")
    return owner.__name__, getattr(forward, "__code__", None) if known else None


def _of_function(model: nn.Module) -> ModelLoss | None:
    """The loss that a model's loss_function is, unless somebody put it there."""
    from transformers import PreTrainedModel

    theirs = inspect.getattr_static(PreTrainedModel, "loss_function")
    if inspect.getattr_static(type(model), "loss_function", None) is not theirs:
        return None
    function: Any = None if "_loss_function" in vars(model) else model.loss_function
    if not str(getattr(function, "__module__", "")).startswith("transformers."):
        return None
    return FUNCTIONS.get(function.__name__)
