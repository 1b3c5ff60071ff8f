"""Small fine-tuning runs, and a plain loop of transformers that they are held against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gulliver.checkpoint import load
from gulliver.checkpoint.tree import split_state
from gulliver.comm import World
from gulliver.finetune import FinetuneConfig, finetune, load_tokenizer, make_batches, read_text
from gulliver.finetune.prepare import FinetuneRun

STEPS, TOKENS, RATE = 4, 1024, 1e-4


def small(example: tuple[Path, Path], out: Path, **changes: Any) -> FinetuneConfig:
    """A run of a few steps on the example's model and texts."""
    model, data = example
    config = FinetuneConfig(
        model=model,
        data=(data,),
        out=out,
        steps=STEPS,
        batch_tokens=TOKENS,
        learning_rate=RATE,
        warmup=2,
        length=128,
        packing="no",
        eval_every=2,
        save_every=1,
        samples=1,
        sample_tokens=4,
    )
    return replace(config, **changes)


def run_in_world(world: World, config: FinetuneConfig) -> list[dict[str, Any]]:
    """Runs on every rank of a pool; what was logged."""
    finetune(config)
    return FinetuneRun(config.out).log.read()


def losses(log: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in log if name in line]


def plain_loop(config: FinetuneConfig, packing: bool) -> tuple[list[float], nn.Module]:
    """Losses and the model of a loop that knows nothing of this library but the batches."""
    assert config.model is not None
    tokenizer = load_tokenizer(config.model)
    data = read_text(config, tokenizer, lambda _: None, context=256)
    longest = max(map(len, (*data.train, *data.held_out)))
    loader = make_batches(
        data.train,
        tokens=TOKENS,
        length=128 if packing else longest,
        packing=packing,
        seed=config.seed,
        padding=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    found = []
    for step, batch in zip(range(STEPS), loader, strict=False):
        fraction = [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5][step]  # warm-up of two, then a cosine of two
        for group in optimizer.param_groups:
            group["lr"] = RATE * fraction
        items = batch.pop("num_items")
        labels = batch.pop("labels")
        assert items == int((labels[:, 1:] != -100).sum())
        logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / items
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found, model


def saved_tensors(out: Path) -> dict[str, Tensor]:
    """All that the newest checkpoint holds, bit for bit."""
    newest = FinetuneRun(out).checkpoints.latest()
    assert newest is not None
    values = load(newest).values
    found: dict[str, Tensor] = {}
    for entry in ("model", "optimizer", "lr_scheduler", "run"):
        tensors, rest = split_state(values[entry])
        found |= {f"{entry}:{name}": value for name, value in tensors.items()}  # type: ignore[misc]
        found[f"rest of {entry}"] = torch.frombuffer(
            bytearray(repr(rest).encode()), dtype=torch.uint8
        )
    return found
