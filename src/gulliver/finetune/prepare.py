"""Prepares a fine-tuning run in its folder, without reading weights.

run/
  ...                  see `gulliver.jobs.RunFolder`
  best/step-*/         trained weights of the best evaluation
  adapter/, model/     the result, for PEFT and for transformers
  README.md            model card
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.checkpoint.folder import CheckpointFolder
from gulliver.comm.collectives import barrier
from gulliver.comm.launcher import default_ranks
from gulliver.comm.world import World
from gulliver.errors import GulliverError
from gulliver.finetune.adapters import adapt, check_adapter
from gulliver.finetune.base import Base
from gulliver.finetune.batches import make_batches, packing_support
from gulliver.finetune.config import MAY_CHANGE, FinetuneConfig
from gulliver.finetune.encode import load_tokenizer
from gulliver.finetune.planning import (
    SAMPLES,
    STATE,
    PlannedRun,
    Recipe,
    StepShape,
    choose_batch,
    choose_precision,
    complete,
    plan_run,
)
from gulliver.finetune.step import Prompt, prompts_of
from gulliver.finetune.texts import TextData, read_text
from gulliver.jobs.display import console
from gulliver.jobs.run_folder import RunFolder
from gulliver.memory.stores import check_disk_folder
from gulliver.options import differences, resolved

FINGERPRINTS = {
    "base": "--model is not the one that the run was started with",
    "data": "--data or the tokenizer is not the one that the run was started with",
}

WRITTEN = ("result", "save_dtype")  # options that apply only to a merged model


@dataclass(frozen=True)
class FinetuneRun(RunFolder):
    """Folder of a fine-tuning run."""

    may_change: frozenset[str] = MAY_CHANGE
    fingerprints: Mapping[str, str] = field(default_factory=lambda: FINGERPRINTS)

    @property
    def best(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder / "best", keep=1)

    def open(
        self, config: Any, fingerprints: Mapping[str, str] | None = None, step: int | None = None
    ) -> Path | None:
        newest = super().open(config, fingerprints, step)
        whole = self.folder / "model"
        if newest is not None and whole.is_dir():
            # A finished run only writes missing files, so changed options would have no effect.
            old, new = self.options(), resolved(config)
            changed = differences({k: old[k] for k in WRITTEN}, {k: new[k] for k in WRITTEN})
            if changed:
                raise GulliverError(
                    f"{whole} already exists, and {'; '.join(changed)}; move it away to write it "
                    "again"
                )
        return newest


# Prepares a run before weights are read: data, hyperparameters, plan and checks.
#
# Start with `prepare`. It writes nothing, and the model is on meta.


@dataclass(frozen=True)
class FinetuneJob:
    """A prepared run, before weights are read."""

    config: FinetuneConfig
    # Folder of the run.
    run: FinetuneRun
    # Base model.
    base: Base
    # Tokenizer of the model.
    tokenizer: Any
    # Texts as tokens.
    data: TextData
    # Whether to pack texts.
    packing: bool
    # Hyperparameters.
    recipe: Recipe
    # Plan.
    planned: PlannedRun
    # Prompts to sample continuations for at evaluations.
    prompts: list[Prompt]
    # Step to resume from; None for a new run.
    checkpoint: Path | None

    @property
    def length(self) -> int:
        """Tokens per row: the length of packed rows, or of the longest text."""
        return row_length(self.data, self.packing)

    def batches(self, place: int, held_out: bool = False) -> Any:
        return loader_of(
            self.config,
            self.data.held_out if held_out else self.data.train,
            self.recipe.batch_tokens,
            self.length,
            self.packing,
            shuffle=not held_out,
            accumulate=self.planned.accumulate,
            rank=place,
            ranks=self.planned.places,
        )


def row_length(data: TextData, packing: bool) -> int:
    if packing:
        return int(data.facts["length"])
    return max(map(len, (*data.train, *data.held_out)))


def loader_of(
    config: FinetuneConfig,
    examples: Any,
    tokens: int,
    length: int,
    packing: bool,
    **options: Any,
) -> Any:
    return make_batches(
        examples,
        tokens=tokens,
        length=length,
        packing=packing,
        seed=config.seed,
        # Zigzag layouts give each rank two pieces of a sequence.
        multiple=2 * config.sp_size if config.sp_size > 1 else 1,
        **options,
    )


def make_optimizer(
    model: nn.Module, config: FinetuneConfig, learning_rate: float
) -> torch.optim.AdamW:
    """AdamW for the trained parameters, with weight decay only on matrices."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if config.weight_decay:
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
    # The fused kernel cannot be selected for a model on meta.
    fused = not any(p.is_meta for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(0.9, config.beta2),
        weight_decay=0.0,
        fused=fused,
    )


def prepare(config: FinetuneConfig, world: World) -> FinetuneJob:
    """Reads configuration and data, and plans the run (on every rank); rank 0 prints the plan."""
    say = console().print if world.is_main else lambda _: None
    assert config.model is not None, "--model was validated"
    base, run = Base(config.model), FinetuneRun(config.out, config.keep)
    context, fingerprint = base.context, base.fingerprint
    if config.adapter is not None:
        check_adapter(config.adapter, fingerprint)
    tokenizer = load_tokenizer(config.model, config.chat_template)
    data = read_text(config, tokenizer, say, context=context)
    model = base.on_meta()
    parameters = sum(p.numel() for p in model.parameters())
    _check_vocabulary(config, data, model)
    model = adapt(model, config) if config.method == "lora" else model
    packing = _packing(config, model, data, say)
    checkpoint = run.open(config, {"base": fingerprint, "data": data.fingerprint})
    barrier()  # all ranks read before any rank writes
    # Values derived from the length of the run are kept when it is extended.
    chosen = run.values().get("chosen", {}) if checkpoint else {}
    begun = {k: chosen.get(k) for k in ("batch_tokens", "warmup") if getattr(config, k) is None}
    recipe = _recipe(replace(config, **begun), data, packing, parameters, world)
    planned = _plan(config, run, data, recipe, model, packing, world)
    if planned.disk is not None:
        check_disk_folder(planned.disk)
    for line in (*recipe.lines(), *planned.lines(recipe.steps)):
        say(line)
    prompts = _prompts(config, data, tokenizer, planned, say)
    job = FinetuneJob(
        config, run, base, tokenizer, data, packing, recipe, planned, prompts, checkpoint
    )
    if not config.dry_run:
        run.check_writable(_bytes_of_run(job))
    return job


def _check_vocabulary(config: FinetuneConfig, data: TextData, model: nn.Module) -> None:
    table = model.get_input_embeddings()  # type: ignore[operator]
    if data.facts["highest"] >= (rows := len(table.weight)):
        raise GulliverError(
            f"--model {config.model} has {rows:,} embeddings, but its tokenizer produces token "
            f"{data.facts['highest']:,}; use the matching tokenizer, or call "
            "model.resize_token_embeddings(len(tokenizer)) and save the model"
        )


def _packing(config: FinetuneConfig, model: nn.Module, data: TextData, say: Any) -> bool:
    if config.packing == "no":
        return False
    reason = packing_support(model, data.facts["length"])
    if reason is None and config.sp_size > 1:
        reason = "sequence parallelism does not support document masks"
    if reason is None:
        return True
    if config.packing == "yes":
        raise GulliverError(f"--packing yes is not possible: {reason}; leave --packing at auto")
    say(f"texts are batched by length instead of packed: {reason}")
    return False


def _recipe(
    config: FinetuneConfig,
    data: TextData,
    packing: bool,
    parameters: int,
    world: World,
) -> Recipe:
    length = row_length(data, packing)
    batch = choose_batch(config, sum(map(len, data.train)), length)
    loader = loader_of(config, data.train, batch[0], length, packing, rank=0, ranks=1)
    precision = choose_precision(config, world.device.type)
    return complete(config, precision, batch, len(loader), parameters, bool(data.held_out))


def _plan(
    config: FinetuneConfig,
    run: FinetuneRun,
    data: TextData,
    recipe: Recipe,
    model: nn.Module,
    packing: bool,
    world: World,
) -> PlannedRun:
    length, ranks = row_length(data, packing), world.size
    if config.dry_run and ranks == 1:
        ranks = config.ranks or max(default_ranks(), config.ranks_of_a_model)
    shape = StepShape(recipe.batch_tokens // length, length)
    # A resumed run splits its steps as before, because another order of summation changes the last
    # bits.
    known = run.values().get("chosen", {}) if config.resume else {}
    same = known.get("places") == ranks // config.ranks_of_a_model
    accumulate = known["accumulate"] if same and config.micro_tokens is None else None
    return plan_run(
        config,
        model,
        lambda m: make_optimizer(m, config, recipe.learning_rate),
        shape,
        recipe.precision,
        ranks,
        accumulate,
    )


def _prompts(
    config: FinetuneConfig, data: TextData, tokenizer: Any, planned: PlannedRun, say: Any
) -> list[Prompt]:
    if config.pp_size > 1:
        asked = "--samples and --prompt are ignored" if config.samples or config.prompt else ""
        say(
            "no samples, because pipeline parallelism does not support "
            f"generation{asked and ', ' + asked}"
        )
        return []
    count = config.samples
    if count is None:
        moved = planned.plan.predicted.moved
        away = moved is not None and moved.leaves.parameters > 0
        count = 0 if away else SAMPLES
        if away:
            say(
                "no samples, because each token would read all weights from disk; --samples 1 "
                "enables them"
            )
    return prompts_of(data.held_out or data.train, count, config.prompt, tokenizer)


def _bytes_of_run(job: FinetuneJob) -> int:
    plan, config = job.planned.plan, job.config
    # Each checkpoint has float32 weights and both moments of the trained parameters.
    weights = 4 * plan.model.trainable
    result = plan.model.parameters * 4 if config.merge or config.method == "full" else weights
    kept = (config.keep + 1) * 3 * weights
    behind, disk = 0, job.planned.disk
    if disk is not None and _device(disk) == _device(config.out):
        behind = plan.mesh.size * sum(getattr(plan.memory, kind) for kind in STATE)
    return kept + (2 * weights if job.data.held_out else 0) + result + behind


def _device(path: Path) -> int:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists()).stat().st_dev
