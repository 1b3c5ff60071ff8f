"""Defaults of a run that depend on model and data, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gulliver.finetune._job_config import FinetuneConfig

LEAST_STEPS = 100
"""Steps that a run should have: with fewer the learning rate cannot rise and fall."""
MOST_TOKENS = 32_768
"""Tokens of a step beyond which more steps teach more than larger ones."""
LR_FULL, FULL_SIZE = 2e-5, 7e9
"""Learning rate of full fine-tuning, and the parameters of the model that it is usual for."""
LORA_FACTOR = 10.0
"""Learning rate of adapters over that of all weights (https://thinkingmachines.ai/blog/lora/)."""
LR_MOST = 1e-3
WARMUP, MOST_WARMUP = 0.03, 100
EVALUATIONS = 10
SAMPLES = 3


@dataclass(frozen=True)
class Recipe:
    """The numbers of a run."""

    # ``fp32`` or ``bf16``.
    precision: str
    # Most tokens of a step, all ranks together.
    batch_tokens: int
    # Number of optimizer steps.
    steps: int = 0
    # Peak learning rate.
    learning_rate: float = 0.0
    # Steps of warm-up.
    warmup: int = 0
    # Steps between evaluations.
    eval_every: int = 0
    # Steps between checkpoints.
    save_every: int = 0
    # Reason of each, by name.
    reasons: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Lines for people: a choice, and why."""
        shown = {
            "precision": self.precision,
            "batch": f"{self.batch_tokens:,} tokens a step",
            "steps": f"{self.steps:,}",
            "learning rate": f"{self.learning_rate:.3g}",
            "warm-up": f"{self.warmup:,} steps",
            "evaluation": f"every {self.eval_every:,} steps",
            "checkpoints": f"every {self.save_every:,} steps",
        }
        width = max(map(len, shown))
        return [f"{n:<{width}}  {v}: {self.reasons.get(n, 'as asked')}" for n, v in shown.items()]


def choose_precision(config: FinetuneConfig, device: str) -> tuple[str, str]:
    """The dtype of weights in training, and why."""
    if config.precision != "auto":
        return config.precision, "as asked"
    if device == "cuda":
        return "bf16", "half the memory, and the GPU computes it faster"
    return "fp32", "CPUs compute it faster than bf16"


def choose_batch(config: FinetuneConfig, tokens: int, length: int) -> tuple[int, str]:
    """Tokens of an optimizer step, and why."""
    if config.batch_tokens is not None:
        least = max(config.batch_tokens, length)
        return least, "as asked" if least == config.batch_tokens else "the longest sequence"
    steps = config.steps or LEAST_STEPS
    wished = config.epochs * tokens // steps
    if wished >= MOST_TOKENS:
        return max(MOST_TOKENS, length), "what a step learns well from"
    chosen = max(length, wished // length * length)
    times = "once" if config.epochs == 1 else f"{config.epochs} times"
    why = f"{tokens:,} tokens, {times}, in about {steps} steps"
    return chosen, why if chosen > length else "one sequence of full length: there are few texts"


def complete(
    config: FinetuneConfig,
    precision: tuple[str, str],
    batch: tuple[int, str],
    steps_of_epoch: int,
    parameters: int,
    held_out: bool,
) -> Recipe:
    """The recipe of a run."""
    reasons = {"precision": precision[1], "batch": batch[1]}
    steps = config.steps
    if steps is None:
        steps = config.epochs * steps_of_epoch
        reasons["steps"] = f"{config.epochs} x {steps_of_epoch:,} of an epoch"
    rate = config.learning_rate
    if rate is None:
        rate, reasons["learning rate"] = _rate(config.method, parameters)
    warmup = config.warmup
    if warmup is None:
        warmup = max(1, min(MOST_WARMUP, round(WARMUP * steps)))
        reasons["warm-up"] = f"{WARMUP:.0%} of the run, {MOST_WARMUP} at most"
    every = config.eval_every
    if every is None:
        every = max(1, math.ceil(steps / EVALUATIONS))
        reasons["evaluation"] = (
            f"{math.ceil(steps / every)} in all"
            if held_out
            else "nothing is held out: none of them"
        )
    save = config.save_every
    if save is None:
        save, reasons["checkpoints"] = every, "as often as evaluations"
    return Recipe(precision[0], batch[0], steps, rate, warmup, every, save, reasons)


def _rate(method: str, parameters: int) -> tuple[float, str]:
    """Peak learning rate by method and size: that of full fine-tuning falls as the root of size."""
    full = min(LR_MOST, LR_FULL * math.sqrt(FULL_SIZE / parameters))
    size = f"{parameters / 1e9:.2g} B" if parameters >= 1e8 else f"{parameters / 1e6:.2g} M"
    why = f"{LR_FULL:g} of 7 B, by the root of the size, for {size} parameters"
    if method == "full":
        return full, why
    return min(10 * LR_MOST, LORA_FACTOR * full), f"{LORA_FACTOR:g} times all weights' ({why})"


def as_values(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, without its reasons."""
    return {k: v for k, v in vars(recipe).items() if k != "reasons"}
