"""Seconds of a model that nobody has loaded, from its blocks run one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gulliver.hardware import described
from gulliver.hardware.probe import forget_seconds
from gulliver.planner import measure as _timed_blocks
from gulliver.planner.measure import estimate_work

LAYERS, WIDTH, LENGTH, WORDS = 3, 64, 32, 256
ROOM = 1 << 30


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_CACHE", str(tmp_path))


def _llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    config: Any = LlamaConfig(max_position_embeddings=LENGTH, **sizes, **heads)
    config.use_cache = False
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _watched(monkeypatch: pytest.MonkeyPatch, forward: float, backward: float) -> list[Any]:
    """Lets the timing of a block take given seconds; returns the calls that were timed."""
    calls = list[Any]()

    def timed(call: nn.Module, args: Any, _: Any) -> tuple[float, float]:
        output = call(*args)
        output.float().square().mean().backward()
        calls.append((call, args, output))
        return forward, backward

    monkeypatch.setattr(_timed_blocks, "timed", timed)
    return calls


def _work(model: nn.Module, activations: str = "keep", room: int = ROOM) -> Any:
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    device = described("cpu-loopback").device
    return estimate_work(model, optimizer, device, 2, LENGTH, "bf16", activations, room)


def test_a_block_of_a_kind_is_run_with_inputs_as_it_will_get_and_stands_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _watched(monkeypatch, 0.5, 1.25)
    work = _work(_llama(), "auto")
    assert len(calls) == _timed_blocks.TURNS + 1
    call, args, output = calls[0]
    assert output.shape == args[0].shape == (2, LENGTH, WIDTH)
    assert output.dtype is torch.bfloat16
    assert args[0].requires_grad
    assert all(p.grad is not None for p in call.parameters())
    assert [block.forward_s for block in work.blocks] == [0.5] * LAYERS + [0.0]
    # The head is what is left: it takes its share of the products.
    blocks = LAYERS * (WIDTH * (2 * WIDTH + WIDTH) + 6 * WIDTH * WIDTH)
    rest = LAYERS * 0.5 * WORDS * WIDTH / blocks
    assert work.forward_s == pytest.approx(LAYERS * 0.5 + rest)
    assert work.backward_s == pytest.approx(LAYERS * 1.25 + 2 * rest)
    assert work.share_blocks == pytest.approx(LAYERS * 0.5 / work.forward_s)
    _work(_llama())
    assert len(calls) == _timed_blocks.TURNS + 1, "they are kept"
    forget_seconds()
    _work(_llama())
    assert len(calls) == 2 * (_timed_blocks.TURNS + 1)


def test_frozen_weights_get_no_gradients_and_blocks_without_room_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _watched(monkeypatch, 0.5, 1.25)
    model = _llama()
    counted = _work(model, room=1 << 10)
    assert not calls
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    _work(model)
    call, *_ = calls[0]
    assert [p.grad is None for p in call.parameters()] == [p.ndim > 1 for p in call.parameters()]
    frozen = _work(model, room=1 << 10)
    assert frozen.forward_s == counted.forward_s
    assert frozen.backward_s == pytest.approx(counted.backward_s / 2, rel=0.01)
