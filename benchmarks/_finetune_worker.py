"""The process of a job of `benchmarks.finetune`: ours, or a loop of transformers on our batches.

It is started inside its control group. Every event is a line, as of `_memory_worker.py`, so that
what was done is known even of a process that is killed.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks._memory_jobs import MIB, Job, Step
from benchmarks._memory_worker import disk_counter, say
from gulliver.comm import init_world
from gulliver.errors import GulliverError
from gulliver.finetune import FinetuneConfig, finetune, make_example
from gulliver.finetune import prepare as preparing
from gulliver.finetune.finetuner import Finetuner

RATE = 1e-4


def write(folder: Path, shape: dict[str, Any], dtype: str) -> None:
    """Writes conversations, a tokenizer and a Llama of a shape; its weights are random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, _ = make_example(folder, rows=1500)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    made = LlamaForCausalLM(LlamaConfig(max_position_embeddings=1024, **shape))
    (model / "model.safetensors").unlink()  # of the example
    # Each file is written from a copy of its tensors: of small ones, the model is there once.
    made.save_pretrained(model, max_shard_size="500MB")


def config_of(job: Job) -> FinetuneConfig:
    """Options of a run; steps alone are timed unless it asks for evaluation."""
    folder, options = Path(job.folder), dict(job.options["config"])
    paths = {name: folder / job.options[name] for name in ("model", "data", "out")}
    defaults: dict[str, Any] = {
        "learning_rate": RATE,
        "warmup": 0,
        "schedule": "constant",
        "held_out": 0.0,
        "packing": "no",
        "samples": 0,
        "save_every": 10**6,
        "keep": 1,
    }
    if job.disk:
        options["disk"] = f"{folder}:{job.disk // MIB}MiB"
    return FinetuneConfig(
        model=paths["model"],
        data=(paths["data"],),
        out=paths["out"],
        steps=job.warm_up + job.steps,
        **{**defaults, **options},
    )


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


class Steps:
    """Tells of steps as they end."""

    def __init__(self, job: Job) -> None:
        self.job, self.count = job, disk_counter()
        self.number, self.before = 0, self.count()

    def tell(self, seconds: float, loss: float, tokens: int) -> None:
        after = self.count()
        moved = after[0] - self.before[0], after[1] - self.before[1]
        timed = self.number >= self.job.warm_up
        say("facts", facts={f"tokens {self.number}": tokens})
        say("step", timed=timed, step=asdict(Step(seconds, loss, *moved, self.number)))
        self.number, self.before = self.number + 1, after


def ours(job: Job) -> None:
    """Runs `finetune`, after what it would take has been predicted."""
    config = config_of(job)
    planned = preparing.prepare(replace(config, dry_run=True), init_world()).planned
    moved = planned.plan.predicted.moved
    say("ready")
    facts = {"predicted_s": planned.seconds, "base": anonymous(), "accumulate": planned.accumulate}
    if moved is not None:
        facts |= {"least": moved.minimum, "told": config.memory_limit}
    say("facts", facts=facts)
    steps, describe = Steps(job), Finetuner.describe

    def describing(self: Finetuner, line: dict[str, Any], batch: Any, seconds: float) -> Any:
        shown = describe(self, line, batch, seconds)
        steps.tell(seconds, line["loss"], line["tokens"])
        if self.booster.moved is not None:
            say("facts", facts={"moved": list(self.booster.moved)})
        return shown

    with patch.object(Finetuner, "describe", describing):
        finetune(config)


def _fed(job: Job) -> tuple[list[dict[str, Any]], int, list[int], nn.Module]:
    """Batches of the run and tokens of the whole step of each, micro-batches of a step, a model."""
    from transformers import AutoModelForCausalLM

    config = config_of(job)
    prepared = preparing.prepare(config, init_world())
    accumulate, batches = prepared.planned.accumulate, list[dict[str, Any]]()
    while len(batches) < config.steps * accumulate:  # type: ignore[operator]
        batches += list(prepared.batches(0))
    items = [batch.pop("num_items") for batch in batches]
    model = AutoModelForCausalLM.from_pretrained(prepared.base.folder, dtype=torch.float32)
    model.config.use_cache = False  # packed texts are told apart without one only
    return batches, accumulate, items, model


def plain(job: Job) -> None:
    """Runs a loop that anybody would write."""
    batches, accumulate, items, model = _fed(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    model.train()
    say("ready")
    steps = Steps(job)
    for number in range(job.warm_up + job.steps):
        begun, loss, tokens = time.monotonic(), 0.0, 0
        for place in range(number * accumulate, (number + 1) * accumulate):
            found = model(**batches[place], num_items_in_batch=items[place]).loss
            found.backward()
            loss += float(found.detach())
            tokens += batches[place]["input_ids"].numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.tell(time.monotonic() - begun, loss, tokens)


def trainer(job: Job) -> None:
    """Runs transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    batches, accumulate, _, model = _fed(job)
    parts, tokens = list[float](), list[int]()

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

        def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            tokens.append(inputs["input_ids"].numel())
            loss = super().training_step(model, inputs, *more, **options)
            parts.append(float(loss))  # what it logs is rounded
            return loss

    class Timed(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            say("ready")
            self.steps = Steps(job)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps.tell(time.monotonic() - self.begun, sum(parts), sum(tokens))
            parts.clear()
            tokens.clear()

    arguments = TrainingArguments(
        output_dir=str(Path(job.folder) / job.options["out"]),
        max_steps=job.warm_up + job.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1.0,
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    Fed(model, arguments, train_dataset=batches, callbacks=[Timed()]).train()  # type: ignore[arg-type]


CONTESTANTS: dict[str, Callable[[Job], None]] = {
    "ours": ours,
    "plain loop": plain,
    "Trainer": trainer,
}


def main(text: str) -> int:
    job = Job(**json.loads(text))
    try:
        CONTESTANTS[job.options["runs"]](job)
    except GulliverError as error:
        say("error", end="refused", told=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
