"""Packed batches against each sequence alone: logits, loss and every gradient, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.finetune import Example, make_batches, packing_support
from tests.hybrid.hybrid_models import Precise
from tests.models.family_models import build, types

LENGTHS = [5, 1, 9, 3, 7, 8, 2]
ROW = 18
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral")
"""Types of `docs/parity.md` whose documents sequence parallelism keeps apart."""
APART = ("bloom", "opt", "falcon", "mamba", "gpt_oss", "lfm2_moe")
"""Types that mix the sequences of a row: each in a way of its own."""
BAR = 1e-9


def examples() -> list[Example]:
    draw = np.random.default_rng(5)
    return [
        Example(draw.integers(5, 60, n), np.arange(n) > 0, f"text {number}")
        for number, n in enumerate(LENGTHS)
    ]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def alone(model: Any, texts: list[Example]) -> tuple[dict[bytes, Tensor], Tensor]:
    """Logits of each text by its tokens, and the sum of all losses; gradients are in the model."""
    logits, total = {}, torch.zeros((), dtype=torch.float64)
    for text in texts:
        ids = torch.from_numpy(text.ids)[None]
        found = model(input_ids=ids).logits
        logits[text.ids.tobytes()] = found[0].detach()
        total = total + summed(found, ids) if len(text) > 1 else total
    total.backward()
    return logits, total.detach()


def packed(model: Any, texts: list[Example]) -> tuple[dict[bytes, Tensor], Tensor]:
    """The same of packed batches."""
    logits, total, items = {}, torch.zeros((), dtype=torch.float64), 0
    for batch in make_batches(texts, tokens=2 * ROW, length=ROW, packing=True, padding=3):
        items += batch.pop("num_items")
        labels, positions = batch.pop("labels"), batch["position_ids"]
        found = model(**batch).logits
        total = total + summed(found, labels)
        for row, places in enumerate(positions.tolist()):
            starts = [n for n, place in enumerate(places) if place == 0] + [len(places)]
            for start, end in pairwise(starts):
                ids = batch["input_ids"][row, start:end].numpy().astype(texts[0].ids.dtype)
                logits.setdefault(ids.tobytes(), found[row, start:end].detach())
    total.backward()
    assert items == sum(n - 1 for n in LENGTHS)
    return logits, total.detach()


def difference(kind: str, attention: str = "eager", **options: Any) -> float:
    """The largest relative difference of logits, loss and gradients."""
    torch.set_num_threads(1)
    texts = examples()
    with Precise():
        model = build("causal", kind, attn_implementation=attention, **options)
        wanted, loss = alone(model, texts)
        by_text = gradients(model)
        found, total = packed(model, texts)
        in_rows = gradients(model)
    worst = float((total - loss).abs() / loss)
    for ids, logits in wanted.items():
        worst = max(worst, float((found[ids] - logits).abs().max() / logits.abs().max()))
    largest = max(float(g.abs().max()) for g in by_text.values())
    for name, gradient in by_text.items():
        off = float((in_rows.get(name, torch.zeros(())) - gradient).abs().max())
        worst = max(worst, off / max(float(gradient.abs().max()), 1e-6 * largest))
    return worst


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, "eager") for kind in FAMILIES), ("llama", "sdpa"), ("gemma3_text", "sdpa")],
)
def test_a_packed_sequence_has_the_logits_loss_and_gradients_that_it_has_alone(
    kind: str, attention: str
) -> None:
    assert packing_support(build("causal", kind, attn_implementation=attention)) is None
    assert difference(kind, attention) < BAR


@pytest.mark.parametrize("kind", APART)
def test_a_type_that_mixes_sequences_is_refused(kind: str) -> None:
    reason = packing_support(build("causal", kind))
    assert reason is not None
    assert kind in reason
    assert difference(kind) > 1e-4


@pytest.mark.full
@pytest.mark.deadline(600)
def test_listed_types_pack_exactly() -> None:
    tried = 0
    for kind in types("causal"):
        try:
            reason = packing_support(build("causal", kind))
        except Exception as error:
            # Some have no tiny model; those that are said to be exact all have one.
            reason = f"{type(error).__name__}: {error}"
            assert kind not in FAMILIES
        if reason is None:
            assert difference(kind) < BAR, kind
            tried += 1
    assert tried == 81


def test_a_model_with_a_cache_mixes_sequences_and_is_refused() -> None:
    model = build("causal", "llama")
    model.config.use_cache = True
    assert "use_cache" in (packing_support(model) or "")
    assert difference("llama", use_cache=True) > 1e-4


def test_untested_types_are_rejected() -> None:
    model = build("causal", "mixtral")
    model.config.output_router_logits = True
    assert "output_router_logits" in (packing_support(model) or "")
    model = build("causal", "qwen3")
    model.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in (packing_support(model) or "")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = build("causal", "llama", rope_parameters=rope, max_position_embeddings=8)
    assert "rotary frequencies" in (packing_support(model) or "")
    assert "rotary frequencies" in (packing_support(model, 9) or "")
    assert packing_support(model, 8) is None
    # A row with one sequence of nine tokens turns the others, too.
    assert difference("llama", rope_parameters=rope, max_position_embeddings=8) > 1e-6
    model = build("causal", "qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"] * 2
    assert "linear_attention" in (packing_support(model) or "")
    assert "Linear is not known" in (packing_support(torch.nn.Linear(2, 2)) or "")


def test_packing_support_looks_inside_peft_models() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        build("causal", "llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    assert packing_support(adapted) is None
