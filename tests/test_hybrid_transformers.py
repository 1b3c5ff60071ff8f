"""Hugging Face models on shared sequences are what they are on one rank, loop and all."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster.hybrid._transformers import keep_logits, wire_sequence
from gulliver.comm import World, all_reduce
from gulliver.errors import GulliverError
from gulliver.parallel.sequence import SequencePlan, make_groups
from tests.hybrid_models import DECODERS, batch, build, precise_loss
from tests.pool import Pool

pytest.importorskip("transformers")

WIRED = ("llama", "mistral", "qwen2", "gpt2", "opt", "bert", "vit")
CAUSAL = ("llama", "mistral", "qwen2", "gpt2", "opt")
PLANS = {
    "Ulysses 2": SequencePlan(2, layout="zigzag"),
    "ring 2": SequencePlan(inner=2, layout="zigzag"),
    "ring 3": SequencePlan(inner=3, layout="zigzag"),
    "ring 2 x 2": SequencePlan(outer=2, inner=2, layout="contiguous"),
    "ring 4": SequencePlan(inner=4, layout="zigzag"),
    "Ulysses 2 x ring 2": SequencePlan(2, inner=2, layout="zigzag"),
}
BARS = {torch.float64: 1e-10, torch.float32: 1e-5}


def make(family: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model whose norms compute in its own dtype: transformers' round to float32."""
    model = build(family, dtype)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and dtype == torch.float64:
            module.forward = partial(_rms_norm, module)
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def averaged(model: nn.Module, groups: Any) -> dict[str, Tensor]:
    """Gradients as they are after their mean over the ranks of the sequence."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        all_reduce(grad, group=groups.all.group)
        found[name] = grad / groups.all.size
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    # Of keys' biases, whose gradient is zero but for rounding, the rounding is not compared.
    scale = max(float(g.abs().max()) for g in wanted.values())
    return max(
        float((found[n] - wanted[n]).abs().max()) / max(float(wanted[n].abs().max()), 1e-3 * scale)
        for n in wanted
    )


def _trained(
    world: World, family: str, plan: SequencePlan, dtype: torch.dtype
) -> dict[str, float]:
    """Errors of losses and gradients of batches of several shapes, and of logits in evaluation."""
    groups = make_groups(plan)
    model, twin = make(family, dtype), make(family, dtype)
    wire_sequence(model, groups)
    errors: dict[str, float] = {}
    for step, (size, length, padded) in enumerate([(2, 12, False), (1, 17, False), (3, 11, True)]):
        data = batch(family, size, step, length, dtype, padded and family != "vit")
        model.zero_grad()
        twin.zero_grad()
        out = model(**data)
        out.loss.backward()
        logits = twin(**{k: v for k, v in data.items() if k != "labels"}).logits
        loss = precise_loss(family, logits, data)
        loss.backward()
        errors[f"loss {step}"] = relative(out.loss, loss)
        errors[f"gradients {step}"] = worst(averaged(model, groups), gradients(twin))
        with torch.no_grad():
            found = model.eval()(**data).logits
            model.train()
        errors[f"logits {step}"] = relative(found, logits)
    return errors


CELLS = [
    *(("llama", plan) for plan in PLANS),
    *((family, plan) for family in WIRED[1:] for plan in ("ring 3", "Ulysses 2 x ring 2")),
]


@pytest.mark.parametrize(("family", "plan"), CELLS, ids=str)
def test_loss_gradients_and_logits_are_those_of_one_process(
    pool: Pool, family: str, plan: str
) -> None:
    for errors in pool.run(_trained, PLANS[plan].degree, family, PLANS[plan], torch.float64):
        assert max(errors.values()) <= 1e-12, errors


def test_float32_is_as_exact_as_float32_is(pool: Pool) -> None:
    for errors in pool.run(_trained, 4, "llama", PLANS["Ulysses 2 x ring 2"], torch.float32):
        assert max(errors.values()) <= 1e-5, errors
