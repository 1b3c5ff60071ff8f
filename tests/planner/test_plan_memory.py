"""Plans of cut models state the memory of the fullest rank, and which one it is."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.comm import World
from gulliver.hardware import described
from tests.pool import Pool

COPIES = 4
"""A parameter, its gradient, and two moments of AdamW, all of them float32."""


def llama(layers: int, vocabulary: int = 64, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **heads, use_cache=False))


def t5(layers: int, vocabulary: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": vocabulary}
    count = {"num_layers": layers, "num_decoder_layers": layers, "decoder_start_token_id": 0}
    config = T5Config(**sizes, **count, dropout_rate=0.0, use_cache=False)
    return T5ForConditionalGeneration(config)


def random_cut(draw: random.Random, layers: int, stages: int) -> list[int]:
    ends = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    return [b - a for a, b in itertools.pairwise(ends)]


def planned(model: nn.Module, stages: int, cut: list[int], **options: Any) -> Any:
    chosen = {"pp_size": stages, "num_microbatches": 2 * stages, "cut": cut, "verbose": False}
    plugin = HybridParallelPlugin(**chosen, **options)
    cluster = described("8xh100-infiniband").resized(stages * options.get("tp_size", 1))
    return plugin.make_plan(model, torch.optim.AdamW(model.parameters()), cluster)


def stage_elements(model: Any, cut: list[int]) -> list[int]:
    """Elements of each stage of a Llama, counted by hand."""
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    found = [count * block for count in cut]
    found[0] += model.model.embed_tokens.weight.numel()
    found[-1] += model.model.norm.weight.numel() + model.lm_head.weight.numel()
    return found


def test_random_uneven_cuts_state_the_bytes_of_the_fullest_stage(full: bool) -> None:
    draw = random.Random(0)
    for number in range(200 if full else 10):
        stages, layers = draw.randint(2, 4), draw.randint(4, 12)
        model = llama(layers, draw.choice((16, 64, 512, 4096)), tied=draw.random() < 0.3)
        cut = random_cut(draw, layers, stages)
        options = draw.choice(({}, {}, {"zero_stage": 1}, {"precision": "bf16"}))
        plan = planned(model, stages, cut, **options)
        elements = stage_elements(model, cut)
        # In bf16 gradients of micro-batches are summed in float32, and float32 copies are kept.
        each = 2 + 2 + 4 + 12 if options.get("precision") else 4 * COPIES
        bound = pytest.approx(each * max(elements), rel=0.03)
        assert plan.memory.total == bound, (number, cut, elements, options)
        assert elements[plan.predicted.fullest] == max(elements), (number, cut)
        assert f"rank {plan.predicted.fullest}, the fullest" in plan.summary()


def test_tensor_ranks_are_named_in_plan() -> None:
    model = llama(8)
    plan = planned(model, 2, [2, 6], tp_size=2)
    assert plan.predicted.fullest in (2, 3)
    assert planned(llama(8), 2, [6, 2], tp_size=2).predicted.fullest in (0, 1)


def held(world: World, kind: str, layers: int, vocabulary: int, cut: list[int]) -> Any:
    """Bytes that a rank holds after a step, and what the plan states of the fullest."""
    model = llama(layers, vocabulary) if kind == "llama" else t5(layers, vocabulary)
    options = {"pp_size": world.size, "num_microbatches": 4, "verbose": False}
    booster = Booster(plugin=HybridParallelPlugin(cut=cut, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(0, vocabulary, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    booster.execute_pipeline(iter([batch]), model, None, optimizer)
    optimizer.step()
    own: dict[int, Tensor] = {id(p): p for p in model.parameters() if not p.is_meta}
    plan = booster.plan
    return sum(p.nbytes for p in own.values()), plan.memory.total, plan.predicted.fullest


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_stated_rank_holds_what_the_plan_states(pool: Pool, kind: str, full: bool) -> None:
    draw = random.Random(1)
    for _ in range(8 if full else 2):
        layers, vocabulary = draw.randint(2, 5), draw.choice((64, 1024))
        cut = random_cut(draw, layers if kind == "llama" else 2 * layers, 2)
        found = pool.run(held, 2, kind, layers, vocabulary, cut)
        sizes = [COPIES * nbytes for nbytes, _, _ in found]
        assert {(total, rank) for _, total, rank in found} == {found[0][1:]}
        assert found[0][1] == pytest.approx(max(sizes), rel=0.03), (cut, sizes)
        assert sizes[found[0][2]] == max(sizes)
