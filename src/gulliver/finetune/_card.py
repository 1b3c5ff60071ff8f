"""The model card: what was trained on what, how, and what came of it, as the run's files say."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gulliver.finetune._run import FinetuneRun

if TYPE_CHECKING:
    from gulliver.finetune._prepare import FinetuneJob

PACKAGES = ("gulliver", "torch", "transformers", "peft", "safetensors")
SHOWN_EVALUATIONS, SHOWN_SAMPLES = 12, 3


def model_card(job: FinetuneJob, run: FinetuneRun, step: int, which: str) -> str:
    """The text of README.md."""
    log = run.log.read()
    evaluations = [line for line in log if "held_out_loss" in line]
    sections = [
        "\n".join([*_front(job), f"# {job.base.folder.name}, fine-tuned"]),
        _table("Result", _result(job, step, which, log, evaluations)),
        _table("Data", _data(job)),
        _table("Training", _training(job)),
        _evaluations(evaluations),
        _samples(run, step),
        _table("Versions", [(name, _version(name)) for name in PACKAGES]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(job: FinetuneJob) -> list[str]:
    library = "peft" if job.config.method == "lora" else "transformers"
    return [
        "---",
        f"base_model: {job.base.folder.name}",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags: [gulliver]",
        "---",
        "",
    ]


def _result(
    job: FinetuneJob,
    number: int,
    which: str,
    log: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
) -> list[tuple[str, Any]]:
    steps = [line for line in log if "loss" in line]
    rows: list[tuple[str, Any]] = [("weights", which), ("method", job.config.method)]
    if steps:
        last = steps[-1]
        rows.append(("steps", f"{last['step']:,} of {job.recipe.steps:,}"))
        rows.append(("last loss", f"{last['loss']:.4f}"))
        rows.append(("hours of training", f"{last['seconds'] / 3600:.2f}"))
    if evaluations:
        losses = [line["held_out_loss"] for line in evaluations]
        rows.append(("held-out loss before", f"{losses[0]:.4f}"))
        rows.append(("held-out loss, best", f"{min(losses):.4f}"))
    own = [line["held_out_loss"] for line in evaluations if line["step"] == number]
    rows += [("held-out loss of these weights", f"{loss:.4f}") for loss in own[-1:]]
    return rows


def _data(job: FinetuneJob) -> list[tuple[str, Any]]:
    facts = job.data.facts
    files = ", ".join(str(path) for path in job.config.data)
    bad = ", ".join(f"{count:,} {reason}" for reason, count in facts["bad"].items()) or "none"
    return [
        ("files", files),
        ("form", facts["form"]),
        ("texts", f"{facts['texts']['train']:,}, and {facts['texts']['held_out']:,} held out"),
        ("tokens", f"{facts['tokens']:,}, of which {facts['learnt']:,} are learnt"),
        ("longest sequence", f"{facts['longest']:,} tokens"),
        ("bad rows left out", bad),
        ("fingerprint", job.data.fingerprint),
    ]


def _training(job: FinetuneJob) -> list[tuple[str, Any]]:
    recipe, config, plan = job.recipe, job.config, job.planned.plan
    rows: list[tuple[str, Any]] = [
        ("model to begin with", f"{job.base.folder} (fingerprint {job.base.fingerprint})"),
        ("parameters", f"{plan.model.parameters:,}, {plan.model.trainable:,} trained"),
        ("optimizer", f"AdamW, beta2 {config.beta2}, weight decay {config.weight_decay}"),
        ("learning rate", f"{recipe.learning_rate:.3g}, {config.schedule}"),
        ("warm-up", f"{recipe.warmup:,} steps"),
        ("batch", f"{recipe.batch_tokens:,} tokens, {'packed' if job.packing else 'by length'}"),
        ("precision", recipe.precision),
        ("ranks", f"{plan.mesh.size}, {plan.plugin}"),
        ("seed", config.seed),
    ]
    if config.method == "lora":
        own = f"rank {config.lora_rank}, dropout {config.lora_dropout}"
        rows.append(("adapters", f"those of {config.adapter}" if config.adapter else own))
    return rows


def _evaluations(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return ""
    every = max(1, -(-len(lines) // SHOWN_EVALUATIONS))
    shown = [*lines[:-1:every], lines[-1]]
    rows = [f"| {line['step']:,} | {line['held_out_loss']:.4f} |" for line in shown]
    return "\n".join(["## Evaluation", "", "| step | held-out loss |", "|---:|---:|", *rows])


def _samples(run: FinetuneRun, step: int) -> str:
    """What the model made of prompts before, and at the step that became the result."""
    found = run.samples.read()
    parts = []
    for number in dict.fromkeys((0, step)):
        for sample in [s for s in found if s["step"] == number][:SHOWN_SAMPLES]:
            parts.append(f"Step {number}:\n\n{_quoted(sample)}")
    return "\n\n".join(["## Samples", *parts]) if parts else ""


def _quoted(sample: dict[str, Any]) -> str:
    lines = [f"prompt:   {sample['prompt']}", f"made:     {sample['made']}"]
    if sample["expected"]:
        lines.append(f"expected: {sample['expected']}")
    # As code, so that nothing in a text is taken for markup of the card.
    text = "\n".join(lines)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    cells = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *cells])


def _version(name: str) -> str:
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
