"""Gradient penalties of models that ranks share, against one process of plain torch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.pool import Pool

MODES = None, "split_gather", "ring"


def _model(draw: random.Random, ranks: int) -> nn.Module:
    heads = draw.choice([n for n in (2, 3, 4, 6) if n >= ranks])
    vocabulary = draw.choice([31, 64])
    torch.manual_seed(draw.randrange(10**6))
    if draw.random() < 0.4:
        zero = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        gpt2 = GPT2Config(
            vocab_size=vocabulary,
            n_embd=4 * heads,
            n_head=heads,
            n_layer=draw.choice([1, 2]),
            n_positions=16,
            attn_implementation="eager",
            use_cache=False,
            **zero,
        )
        return GPT2LMHeadModel(gpt2).double()
    llama = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4 * heads,
        intermediate_size=draw.choice([20, 25, 36]),
        num_hidden_layers=draw.choice([1, 2]),
        num_attention_heads=heads,
        num_key_value_heads=draw.choice(
            [heads, heads // 2 if heads % 2 == 0 and heads >= 2 * ranks else heads]
        ),
        attention_bias=draw.random() < 0.5,
        tie_word_embeddings=draw.random() < 0.5,
        attn_implementation=draw.choice(["eager", "sdpa"]),
        use_cache=False,
    )
    return LlamaForCausalLM(llama).double()


def _total(
    model: Any, embeds: Tensor, ids: Tensor, own: bool, weight: float, cubed: bool
) -> Tensor:
    embeds = embeds.clone().requires_grad_()
    out = model(inputs_embeds=embeds, labels=ids if own else None)
    loss = out.loss
    if not own:
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (slope,) = torch.autograd.grad(loss, embeds, create_graph=True)
    return loss + weight * (slope.abs().pow(3).sum() if cubed else slope.square().sum())


def _worst(world: World, seeds: range) -> list[float]:
    """The largest relative error of a gradient in each random case, over what it may be."""
    found = []
    for seed in seeds:
        draw = random.Random(seed)
        reference, rows, tokens = (
            _model(random.Random(seed), world.size),
            draw.choice([1, 2]),
            draw.choice([7, 8]),
        )
        width = reference.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        sample = torch.Generator().manual_seed(seed)
        ids = torch.randint(31, (rows, tokens), generator=sample)
        embeds = torch.randn(rows, tokens, width, generator=sample, dtype=torch.float64)
        how = draw.random() < 0.5, draw.choice([1.0, 1e4]), draw.random() < 0.3
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            _total(reference, embeds, ids, *how).backward()
            want = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
            options: dict[str, Any] = {"zero_stage": draw.choice([0, 1, 3])}
            mode = draw.choice(MODES)
            if mode is not None:
                options["sequence_parallelism_mode"] = mode
            plugin = HybridParallelPlugin(tp_size=world.size, verbose=False, **options)
            model, booster = _model(random.Random(seed), world.size), Booster(plugin=plugin)
            model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model.train()
            booster.backward(_total(model, embeds, ids, *how), optimizer)
        got = optimizer.full_gradients()
        errors = [
            (got[n] - w).abs().max() / w.abs().max().clamp(min=1e-12) for n, w in want.items()
        ]
        # The models' own losses are computed in float32.
        found.append(float(max(errors)) / (1e-6 if how[0] else 1e-9))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_penalty_is_exact_under_tensor_parallelism(pool: Pool, ranks: int) -> None:
    for found in pool.run(_worst, ranks, range(6) if ranks == 2 else range(6, 10)):
        assert max(found) < 1, found


def _refused(world: World, mode: str) -> str:
    size = {"sp_size": world.size, "tp_size": 1}
    plugin = HybridParallelPlugin(sequence_parallelism_mode=mode, verbose=False, **size)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            use_cache=False,
        )
    )
    booster = Booster(plugin=plugin)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(GulliverError) as refused:
        _total(model, torch.randn(1, 8, 16), torch.randint(32, (1, 8)), True, 1.0, False)
    return str(refused.value)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_a_gradient_penalty_over_a_sharded_sequence_names_the_option(pool: Pool, mode: str) -> None:
    for text in pool.run(_refused, 2, mode):
        assert "sequence_parallelism_mode" in text
