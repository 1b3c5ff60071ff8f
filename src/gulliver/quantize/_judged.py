"""Perplexity and speed of a language model."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int = 256, batch: int = 4) -> float:
    """Returns the perplexity of a text: e to the mean negative log-likelihood of a token."""
    length = min(length, len(tokens))
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    total = count = 0.0
    for rows in windows.split(batch):
        found: Any = model(rows)
        logits = getattr(found, "logits", found)[:, :-1].float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        )
        count += rows[:, 1:].numel()
    return math.exp(total / count)


@torch.no_grad()
def generation_seconds(
    model: Any, batch: int, prompt: int = 16, tokens: int = 16, turns: int = 3
) -> float:
    """Returns the median seconds in which a model continues prompts greedily."""
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=seed)
    found = []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])
