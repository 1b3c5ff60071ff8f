"""The process of a job of `benchmarks.finetune`: ours, or transformers' Trainer on its batches."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.finetune import MARK, Job, Shape
from gulliver.finetune import FinetuneConfig, _prepare, finetune, make_example

RATE = 1e-4


def write(folder: Path, shape: Shape, dtype: str) -> None:
    """Writes conversations, a tokenizer and a Llama of a shape; its weights are random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, _ = make_example(folder, rows=1500)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    made = LlamaForCausalLM(LlamaConfig(max_position_embeddings=512, **shape))
    made.save_pretrained(model)


def config_of(job: Job) -> FinetuneConfig:
    """Options of a run without evaluation, so that steps alone are timed."""
    return FinetuneConfig(
        model=Path(job.model),
        data=(Path(job.data),),
        out=Path(job.out),
        steps=job.steps,
        learning_rate=RATE,
        warmup=0,
        schedule="constant",
        held_out=0.0,
        packing="no",
        samples=0,
        save_every=10**6,
        **job.options,
    )


def ours(job: Job) -> dict[str, Any]:
    """Runs `finetune`; what its log says."""
    kept = dict[str, float]()
    inner = _prepare.plan_run

    def planned(*arguments: Any, **options: Any) -> Any:
        found = inner(*arguments, **options)
        kept["predicted"] = found.seconds
        return found

    _prepare.plan_run = planned
    finetune(config_of(job))
    log = (Path(job.out) / "log.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, log) if "loss" in line]
    ends = [0.0, *(line["seconds"] for line in lines)]
    return {
        "seconds": [b - a for a, b in itertools.pairwise(ends)],
        "losses": [line["loss"] for line in lines],
        "tokens": [line["tokens"] for line in lines],
        "predicted": kept["predicted"],
    }


def trainer(job: Job) -> dict[str, Any]:
    """Runs transformers' Trainer on the batches of `finetune`."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from gulliver.comm import init_world

    prepared = _prepare.prepare(config_of(job), init_world())
    loader = prepared.batches(0)
    accumulate = prepared.planned.accumulate
    batches = [{n: v for n, v in batch.items() if n != "num_items"} for batch in loader]
    found: dict[str, list[Any]] = {"seconds": [], "losses": [], "tokens": []}

    parts = list[float]()

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

        def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
            loss = super().training_step(*given, **more)
            parts.append(float(loss))  # what it logs is rounded
            return loss

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["seconds"].append(time.monotonic() - self.begun)
            found["losses"].append(sum(parts))
            parts.clear()

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=job.out,
        max_steps=job.steps,
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
    sizes = [batch["input_ids"].numel() for batch in batches]
    found["tokens"] = [
        sum(sizes[(n * accumulate + m) % len(sizes)] for m in range(accumulate))
        for n in range(len(found["seconds"]))
    ]
    return {**found, "predicted": 0.0}


def main() -> None:
    """Runs the job of the command line."""
    job = Job(**json.loads(sys.argv[1]))
    outcome = {"ours": ours, "trainer": trainer}[job.contestant](job)
    print(MARK + json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
