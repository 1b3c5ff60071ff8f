"""Writes the model card from a run's files: data, options and results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, write_json, write_tensors
from gulliver.checkpoint.huggingface import model_weights
from gulliver.checkpoint.interchange import write_untied
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.reader import fitted
from gulliver.checkpoint.weights import Weights, open_weights
from gulliver.comm.collectives import barrier
from gulliver.comm.world import World
from gulliver.finetune.adapters import CONFIG, FACTS, WEIGHTS, adapter_config, adapter_name, deltas
from gulliver.finetune.base import DTYPES
from gulliver.finetune.planning import as_values
from gulliver.finetune.prepare import FinetuneRun
from gulliver.io.files import write_text
from gulliver.jobs.display import console
from gulliver.memory.parts import Part

if TYPE_CHECKING:
    from gulliver.finetune.prepare import FinetuneJob


PACKAGES = ("gulliver", "torch", "transformers", "peft", "safetensors")
SHOWN_SAMPLES = 3


def model_card(job: FinetuneJob, run: FinetuneRun, step: int, which: str) -> str:
    log = run.log.read()
    evaluations = [line for line in log if "held_out_loss" in line]
    sections = [
        "\n".join([*_front(job), f"# {job.base.folder.name}, fine-tuned"]),
        _table("Result", _result(job, step, which, log, evaluations)),
        _table("Training", _training(job)),
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


def _training(job: FinetuneJob) -> list[tuple[str, Any]]:
    facts, config, plan = job.data.facts, job.config, job.planned.plan
    bad = ", ".join(f"{count:,} {reason}" for reason, count in facts["bad"].items()) or "none"
    rows: list[tuple[str, Any]] = [
        ("base model", f"{job.base.folder} (fingerprint {job.base.fingerprint})"),
        ("parameters", f"{plan.model.parameters:,}, {plan.model.trainable:,} trained"),
        ("files", f"{', '.join(map(str, config.data))} (fingerprint {job.data.fingerprint})"),
        *((name, facts[name]) for name in ("form", "texts", "tokens", "learnt", "longest")),
        ("bad rows skipped", bad),
        *as_values(job.recipe).items(),
        *((name, getattr(config, name)) for name in ("schedule", "beta2", "weight_decay", "seed")),
        ("packed", job.packing),
        ("ranks", f"{plan.mesh.size}, {plan.plugin}"),
    ]
    if config.method == "lora":
        own = f"rank {config.lora_rank}, dropout {config.lora_dropout}"
        rows.append(("adapters", f"those of {config.adapter}" if config.adapter else own))
    return rows


def _samples(run: FinetuneRun, step: int) -> str:
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
    # Quoted as code, so that texts are not interpreted as markup.
    text = "\n".join(lines)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    cells = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *cells])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


# Writes the result of a run: a PEFT adapter, a Hugging Face folder, and a model card.
#
# It is read from a checkpoint on disk, of the best evaluation or the last step. Checkpoints hold
# whole tensors for any parallelism, and are streamed without holding a model in memory. Rank 0
# writes each folder atomically, so an interrupted run can be resumed and writes the missing ones.


NO_BETTER = "no evaluation improved on the first"
CARRIED = ("generation_config.json",)  # files copied from the base model's folder to the result


def write_result(
    job: FinetuneJob, run: FinetuneRun, model: nn.Module, world: World, best: int
) -> Path:
    """Writes the result of a finished run on rank 0; called on every rank."""
    whole, adapter = run.folder / "model", run.folder / "adapter"
    if world.is_main:
        step, which = _chosen(job, run, best)
        number = best if step == job.base.folder else int(step.name.rpartition("-")[2])
        written = run.folder / "result.json"
        known = read_json(written) if written.is_file() else {}
        if whole.is_dir() and known.get("step", number) != number:
            shutil.rmtree(whole)  # of the run before it was extended
        if job.config.method == "lora":
            tensors = _trained(step)
            _write_adapter(job, model, tensors, adapter)
            if job.config.merge and not whole.is_dir():
                _write_merged(job, model, tensors, whole)
        elif not whole.is_dir():
            with model_weights(step, None) as weights:
                write_untied(weights, whole, config=_model_config(job), dtype=_dtype(job))
        if whole.is_dir():
            _carry(job, whole)
        card = model_card(job, run, number, which)
        for folder in (run.folder, *(f for f in (whole, adapter) if f.is_dir())):
            write_text(folder / "README.md", card)
        write_json(written, {"step": number})
        console().print(f"{which}: {adapter if job.config.method == 'lora' else whole}")
    barrier()  # no rank may report success before the result is written
    return adapter if job.config.method == "lora" else whole


def _chosen(job: FinetuneJob, run: FinetuneRun, best: int) -> tuple[Path, str]:
    if job.config.result == "best" and best >= 0:
        if best == 0 and job.config.method != "lora":
            return job.base.folder, f"the initial weights ({NO_BETTER})"
        more = "" if best else f"; {NO_BETTER}"
        if (found := run.best.latest()) is not None:
            return found, f"the best evaluation's weights ({found.name}{more})"
        last = step_folder(run.checkpoints.root)
        return last, f"the last weights ({last.name}; those of step {best} were not saved)"
    last = step_folder(run.checkpoints.root)
    return last, f"the last weights ({last.name})"


def _trained(step: Path) -> dict[str, Tensor]:
    with open_weights(step) as weights:
        infos = {name: info for name, info in weights.infos.items() if ".lora_" in name}
        made = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        weights.read({n: Part(value.view(-1), infos[n].shape) for n, value in made.items()})
    return {adapter_name(name): value for name, value in made.items()}


def _write_adapter(
    job: FinetuneJob, model: nn.Module, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    assert job.config.model is not None, "the adapter was checked"
    folder.mkdir(exist_ok=True)
    write_tensors(folder / WEIGHTS, dict(tensors), {"format": "pt"})
    write_json(folder / FACTS, {"base": job.base.fingerprint, "data": job.data.fingerprint})
    job.tokenizer.save_pretrained(folder)
    # Written last: a folder without it is not an adapter.
    write_text(folder / CONFIG, adapter_config(model, job.config.model.absolute()) + "\n")


def _write_merged(
    job: FinetuneJob, model: nn.Module, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    base, added, plain = job.base.folder, deltas(model, tensors), job.base.on_meta()
    with model_weights(base, plain) as weights:
        names = weights.sources
    if added.keys() <= names.keys():  # the file names that most programs expect
        added, plain = {names[name]: delta for name, delta in added.items()}, None
    with Merged(model_weights(base, plain), added) as weights:
        write_untied(weights, folder, config=_model_config(job), dtype=_dtype(job))


class Merged(Weights):
    """Base weights plus the updates of adapters."""

    def __init__(self, base: Weights, added: Mapping[str, Callable[[], Tensor]]) -> None:
        self.path, self.files, self.infos = base.path, base.files, base.infos
        self._base, self._added = base, added
        self._last: tuple[str, Tensor] | None = None

    def read(self, wanted: Mapping[str, Part]) -> None:
        self._base.read(wanted)
        for name, part in wanted.items():
            if name not in self._added:
                continue
            if self._last is None or self._last[0] != name:
                self._last = name, self._added[name]().reshape(-1)
            delta = self._last[1][part.start : part.stop]
            merged = part.value.float() + delta
            part.value.copy_(fitted(str(self.path), name, merged, part.value.dtype))

    def close(self) -> None:
        self._base.close()
        self._last = None


def _model_config(job: FinetuneJob) -> dict[str, Any]:
    values = dict(read_json(job.base.folder / "config.json"))
    values.pop("quantization_config", None)
    key = "dtype" if "dtype" in values else "torch_dtype"
    values[key] = str(_dtype(job)).removeprefix("torch.")
    return values


def _dtype(job: FinetuneJob) -> torch.dtype:
    wanted = job.config.save_dtype
    return job.base.dtype if wanted == "auto" else DTYPES[wanted]


def _carry(job: FinetuneJob, folder: Path) -> None:
    """Copies the tokenizer and the generation settings next to the weights."""
    job.tokenizer.save_pretrained(folder)
    for name in CARRIED:
        if (job.base.folder / name).is_file():
            write_text(folder / name, (job.base.folder / name).read_text(encoding="utf-8"))
