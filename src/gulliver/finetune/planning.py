"""Finds the fastest plan that fits, without reading weights.

Start with `plan_run`. A step is traced on the meta device with the largest micro-batch. Without a
memory limit, the lowest ZeRO stage that fits is used; smaller micro-batches are tried before a
higher stage, because accumulation costs nothing, but a higher stage communicates more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.errors import GulliverError
from gulliver.finetune.config import FinetuneConfig
from gulliver.hardware.offload import seconds_text
from gulliver.hardware.probe import current_cluster, memory_bytes
from gulliver.options import byte_size, size_at_least, size_text
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Work
from gulliver.planner.measure import estimate_work

CHUNK_MB = 4.0  # ZeRO chunk size; tuning it would not converge for steps of many different lengths
USABLE = 0.9
"""Fraction of the memory that a plan without a limit may use; the interpreter needs the rest."""
HOST_SHARE = "70%"
"""Default share of host memory for a GPU with a memory limit, if no disk is given."""
UNMEASURED = "for a typical machine of this kind (gulliver probe measures this one)"
AGAIN = {"keep": (False,), "recompute": (True,), "auto": (False, True)}
"""Recomputation settings to try, in order, if ranks share a model."""
STATE = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class StepShape:
    """The largest step of a run."""

    # Sequences of full length per step, over all ranks and micro-batches.
    rows: int
    # Tokens of such a sequence.
    length: int

    def per_micro(self, places: int, accumulate: int) -> int:
        """Maximum number of rows in a rank's micro-batch."""
        return math.ceil(self.rows / (places * accumulate))


@dataclass(frozen=True)
class PlannedRun:
    """A plan, and the micro-batches of a step."""

    # Plan to run.
    plan: Plan
    # Number of data-parallel ranks.
    places: int
    # Micro-batches per optimizer step.
    accumulate: int
    # Whether to enable transformers' own gradient checkpointing.
    recompute: bool
    # Bytes of memory that a rank needs, including activations.
    needed: int
    # Bytes of activations in that; 0 if unknown.
    activations: int
    # Description of the machine for which seconds are predicted.
    rates: str = ""

    @property
    def disk(self) -> Path | None:
        tiers = self.plan.zero.tiers if self.plan.zero is not None else None
        return Path(tiers.disk) if tiers is not None and tiers.disk is not None else None

    @property
    def seconds(self) -> float:
        one = self.plan.predicted.seconds
        return self.accumulate * (one.step - one.update) + one.update

    def lines(self, steps: int) -> list[str]:
        plan, moved = self.plan, self.plan.predicted.moved
        stage = "" if plan.stage is None else f", stage {plan.stage}"
        found = [
            f"plan: {plan.plugin}{stage} on {_axes(plan)}, {plan.model.trainable:,} of "
            f"{plan.model.parameters:,} parameters trained, {_counted(self.accumulate)} per step"
        ]
        for kind in STATE:
            most = size_text(getattr(plan.memory, kind))
            told = f"  {kind.replace('_', ' '):<16} {most:>12} in memory"
            if moved is not None:
                behind = getattr(moved.leaves, kind)
                told += f", {size_text(behind):>12} swapped" if behind else ""
            found.append(told)
        # Unknown values are not printed as 0: limits derived from them would be too small.
        unknown = plan.work.unfollowed if not self.activations else ""
        most = f"unknown: {unknown}" if unknown else f"{size_text(self.activations):>12} in memory"
        found.append(f"  activations      {most}")
        more = ", and activations" if unknown else ""
        found.append(f"  total            {size_text(self.needed):>12} on each rank{more}")
        if moved is not None:
            assert plan.zero is not None, "the moves belong to ZeRO"
            assert plan.zero.tiers is not None, "the moves belong to tiers"
            times = self.accumulate
            found.append(
                f"  limit {size_text(plan.zero.tiers.limit)}, minimum "
                f"{size_at_least(moved.minimum)}{more}; a step reads up to "
                f"{size_text(times * moved.read)} and writes {size_text(times * moved.written)}; "
                f"{moved.price or 'more memory saves nothing'}"
            )
        found.append(
            f"  {seconds_text(self.seconds)} per step predicted {self.rates}, "
            f"{seconds_text(self.seconds * steps)} in total without evaluation"
        )
        return found


def _counted(batches: int) -> str:
    return "1 micro-batch" if batches == 1 else f"{batches:,} micro-batches"


def _axes(plan: Plan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.axes.items() if size > 1)
    return axes or "one rank"


def plan_run(
    config: FinetuneConfig,
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    shape: StepShape,
    precision: str,
    ranks: int,
    accumulate: int | None = None,
) -> PlannedRun:
    """Plans a run without loading weights or starting ranks."""
    cluster, places = current_cluster(ranks), ranks // config.ranks_of_a_model
    rates = f"on {cluster.name}" if cluster.measured else UNMEASURED
    made, refusal, works = optimizer(model), GulliverError(""), dict[int, Work]()
    room = _room(config, ranks)
    for plugin in _plugins(config, precision, ranks):
        for times in [accumulate] if accumulate else _splits(config, shape, places):
            if times not in works:
                size = shape.per_micro(places, times), shape.length
                options = cluster.device, *size, precision, config.activations, room
                works[times] = estimate_work(
                    model, made, *options, limited=config.memory_limit is not None
                )
            try:
                plan = plugin.make_plan(model, made, cluster, work=works[times])
                return replace(fitting(config, plan, places, times), rates=rates)
            except GulliverError as error:
                refusal = error
    raise refusal


def _splits(config: FinetuneConfig, shape: StepShape, places: int) -> Iterator[int]:
    most = shape.per_micro(places, 1)
    if config.micro_tokens is not None:
        yield math.ceil(most / max(1, config.micro_tokens // shape.length))
        return
    accumulate = 1
    while True:
        yield accumulate
        if shape.per_micro(places, accumulate) == 1:
            return
        accumulate *= 2


def _plugins(config: FinetuneConfig, precision: str, ranks: int) -> Iterator[Plugin]:
    half = None if precision == "fp32" else precision
    limit: dict[str, Any] = {"memory_limit": config.memory_limit, "disk": config.disk}
    if config.memory_limit is not None and config.disk is None and torch.cuda.is_available():
        limit["host_limit"] = HOST_SHARE
    if config.ranks_of_a_model > 1:
        for again in AGAIN[config.activations]:
            yield HybridParallelPlugin(
                tp_size=config.tp_size,
                pp_size=config.pp_size,
                sp_size=config.sp_size,
                sequence_parallelism_mode="auto" if config.sp_size > 1 else None,
                zero_stage=1 if config.memory_limit is None else 3,
                precision=half,
                checkpoint_activations=again,
                chunk_mb=CHUNK_MB if config.memory_limit is None else "auto",
                verbose=False,
                **limit,
            )
    elif config.memory_limit is not None:
        yield GeminiPlugin(**limit, precision=half, activations=config.activations, verbose=False)
    elif ranks == 1 and half is None:
        yield TorchDDPPlugin(verbose=False)
    else:
        # From stage 2 on, gradients of micro-batches are accumulated in float32, as under a limit;
        # with other ranks each of them would be communicated.
        for stage in (1, 2, 3) if ranks > 1 else (2,):
            yield LowLevelZeroPlugin(stage, CHUNK_MB, precision=half, verbose=False)


def _room(config: FinetuneConfig, ranks: int) -> int | None:
    """Bytes of memory available for timing blocks; None if ranks share the machine."""
    if ranks > 1:
        return None
    whole = memory_bytes("cuda" if torch.cuda.is_available() else "cpu")
    return (
        whole
        if config.memory_limit is None
        else byte_size("--memory-limit", config.memory_limit, whole)
    )


def fitting(config: Any, plan: Plan, places: int, accumulate: int) -> PlannedRun:
    memory, work = plan.memory, plan.work
    state = sum(getattr(memory, kind) for kind in STATE)
    if plan.limited:
        assert plan.zero is not None, "a limit needs ZeRO"
        assert plan.zero.tiers is not None, "a limit needs tiers"
        needed = min(state + memory.activations, plan.zero.tiers.limit)
        return PlannedRun(plan, places, accumulate, False, needed, memory.activations)
    shared = config.ranks_of_a_model > 1
    # Ranks of a machine have a GPU each, or share the host's memory.
    sharing = plan.mesh.size if plan.mesh.device == "cpu" else 1
    room = USABLE * memory_bytes(plan.mesh.device) / sharing
    recompute = bool(plan.recompute) if shared else config.activations == "recompute"
    # Ranks that share a model also share its computation, each mode in its own way.
    peak = work.peak // config.ranks_of_a_model
    again = work.peak_recomputed // config.ranks_of_a_model
    if config.activations == "auto" and again and not shared and state + peak > room:
        recompute = True
    needed = state + (again if recompute and again else peak)
    if needed > room:
        raise GulliverError(
            f"each rank needs {size_text(needed)} (state {size_text(state)}, activations "
            f"{size_text(needed - state)}), but only {size_text(room)} is available; use "
            f"--memory-limit {size_at_least(int(room))} --disk FOLDER:SIZE, --method lora, or more "
            "--ranks"
        )
    own = recompute and not shared
    return PlannedRun(plan, places, accumulate, own, needed, needed - state)


# Defaults of a run that depend on model and data, each with its reason.


LEAST_STEPS = 100  # minimum number of steps for the learning rate to rise and decay
MOST_TOKENS = 32_768  # tokens per step above which more steps are better than larger ones
LR_FULL, FULL_SIZE = 2e-5, 7e9
"""Learning rate of full fine-tuning, and the model size for which it is typical."""
LORA_FACTOR = 10.0
"""Ratio of the learning rate of adapters to that of full fine-tuning
(https://thinkingmachines.ai/blog/lora/).
"""
LR_MOST = 1e-3
WARMUP, MOST_WARMUP = 0.03, 100
EVALUATIONS = 10
SAMPLES = 3


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run."""

    # ``fp32`` or ``bf16``.
    precision: str
    # Maximum tokens per step, over all ranks.
    batch_tokens: int
    # Number of optimizer steps.
    steps: int = 0
    # Peak learning rate.
    learning_rate: float = 0.0
    # Warm-up steps.
    warmup: int = 0
    # Steps between evaluations.
    eval_every: int = 0
    # Steps between checkpoints.
    save_every: int = 0
    # Reason for each choice, by name.
    reasons: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        shown = {
            "precision": self.precision,
            "batch": f"{self.batch_tokens:,} tokens per step",
            "steps": f"{self.steps:,}",
            "learning rate": f"{self.learning_rate:.3g}",
            "warm-up": f"{self.warmup:,} steps",
            "evaluation": f"every {self.eval_every:,} steps",
            "checkpoints": f"every {self.save_every:,} steps",
        }
        width = max(map(len, shown))
        return [f"{n:<{width}}  {v}: {self.reasons.get(n, 'as asked')}" for n, v in shown.items()]


def choose_precision(config: FinetuneConfig, device: str) -> tuple[str, str]:
    if config.dtype != "auto":
        return config.dtype, "as requested"
    if device == "cuda":
        return "bf16", "half the memory, and faster on GPUs"
    return "fp32", "faster than bf16 on CPUs"


def choose_batch(config: FinetuneConfig, tokens: int, length: int) -> tuple[int, str]:
    if config.batch_tokens is not None:
        least = max(config.batch_tokens, length)
        return least, "as requested" if least == config.batch_tokens else "the longest sequence"
    steps = config.steps or LEAST_STEPS
    wished = config.epochs * tokens // steps
    if wished >= MOST_TOKENS:
        return max(MOST_TOKENS, length), "enough for a good gradient"
    chosen = max(length, wished // length * length)
    times = "once" if config.epochs == 1 else f"{config.epochs} times"
    why = f"{tokens:,} tokens, {times}, in about {steps} steps"
    return (
        chosen,
        why if chosen > length else "one sequence of full length, because there are few texts",
    )


def complete(
    config: FinetuneConfig,
    precision: tuple[str, str],
    batch: tuple[int, str],
    steps_of_epoch: int,
    parameters: int,
    held_out: bool,
) -> Recipe:
    reasons = {"precision": precision[1], "batch": batch[1]}
    steps = config.steps
    if steps is None:
        steps = config.epochs * steps_of_epoch
        reasons["steps"] = f"{config.epochs} x {steps_of_epoch:,} per epoch"
    rate = config.learning_rate
    if rate is None:
        rate, reasons["learning rate"] = _rate(config.method, parameters)
    warmup = config.warmup
    if warmup is None:
        warmup = max(1, min(MOST_WARMUP, round(WARMUP * steps)))
        reasons["warm-up"] = f"{WARMUP:.0%} of the run, at most {MOST_WARMUP}"
    every = config.eval_every
    if every is None:
        every = max(1, math.ceil(steps / EVALUATIONS))
        reasons["evaluation"] = (
            f"{math.ceil(steps / every)} in total"
            if held_out
            else "none, because no texts are held out"
        )
    save = config.save_every
    if save is None:
        save, reasons["checkpoints"] = every, "as for evaluations"
    return Recipe(precision[0], batch[0], steps, rate, warmup, every, save, reasons)


def _rate(method: str, parameters: int) -> tuple[float, str]:
    """Peak learning rate by method, falling with the square root of the size, and the reason."""
    full = min(LR_MOST, LR_FULL * math.sqrt(FULL_SIZE / parameters))
    size = f"{parameters / 1e9:.2g} B" if parameters >= 1e8 else f"{parameters / 1e6:.2g} M"
    why = f"{LR_FULL:g} at 7 B, scaled by the square root of the size, for {size} parameters"
    if method == "full":
        return full, why
    return min(
        10 * LR_MOST, LORA_FACTOR * full
    ), f"{LORA_FACTOR:g} times that of full fine-tuning ({why})"


def as_values(recipe: Recipe) -> dict[str, Any]:
    """Converts a recipe to a dict, without the reasons."""
    return {k: v for k, v in vars(recipe).items() if k != "reasons"}
