"""Fine-tuning beside transformers' Trainer: tokens per second, peak memory, and the same losses.

`python -m benchmarks.finetune` trains a small Llama of random weights on conversations that it
makes, each contestant in a control group of its own that counts what it is charged with: ours
without a limit, the Trainer, and ours under a limit with a disk. All read the same batches.
`--full` adds a 1-B-shaped Llama, trained as a whole, and adapters of a 3-B-shaped one, each in a
group of 4 GiB that the kernel ends at its limit; predicted seconds stand beside measured ones.
It needs root, and a disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks.limits import Group, LimitsError, check_limits

GIB, MIB = 1 << 30, 1 << 20
ROOT = Path(__file__).parent.parent
MARK = "@outcome "
LOOK_S = 0.05
CONSTANT = 512 * MIB
"""What the interpreter, torch and transformers need beside tensors, of a group's limit."""
SPEED_BAR, PEAK_BAR, LOSS_BAR, PREDICTED_BAR = 1.0, 0.5, 1e-6, 0.25
Shape = dict[str, Any]
SMALL: Shape = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
ONE_B: Shape = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
THREE_B: Shape = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class Options:
    """What is run."""

    full: bool = False
    """The 1-B and 3-B shapes in 4 GiB, too; needs 60 GB of disk, and hours."""
    steps: int = 12
    """Steps of the small model."""
    large_steps: int = 3
    """Steps of the large ones."""
    folder: Path = Path("out")
    """Folder on the disk that is used; what is written there is removed."""
    keep: bool = False
    """Write benchmarks/results."""


@dataclass(frozen=True)
class Job:
    """A contestant on a model.

    Attributes:
        contestant: ``ours`` or ``trainer``.
        model: folder of the model.
        data: file of conversations.
        out: folder of the run.
        steps: optimizer steps.
        options: options of `FinetuneConfig`, of which the Trainer takes its own.
    """

    contestant: Literal["ours", "trainer"]
    model: str
    data: str
    out: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        told: the last line of its output where it failed; empty where it did not.
        seconds: seconds of each step.
        losses: loss of each step.
        tokens: tokens of each step, with padding.
        peak: most bytes of anonymous memory that were seen.
        predicted: predicted seconds of a step; 0 where nobody predicts.
    """

    told: str = ""
    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    peak: int = 0
    predicted: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, the first two steps aside: they make states and record accesses."""
        skipped = 2 if len(self.seconds) > 3 else 1
        return sum(self.tokens[skipped:]) / max(1e-9, sum(self.seconds[skipped:]))

    @property
    def step_s(self) -> float:
        """Seconds of a step, the mean, without the first."""
        return sum(self.seconds[1:]) / max(1, len(self.seconds) - 1)


def run(job: Job, limit: int | None, folder: Path) -> Outcome:
    """Runs a job in a control group of its own."""
    with Group(limit, None, None, disk=folder) as group, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "benchmarks._finetune_worker", json.dumps(vars(job))]
        process = group.start(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        peak = 0
        while process.poll() is None:
            peak = max(peak, group.anonymous)
            time.sleep(LOOK_S)
        kills = group.kills
        log.seek(0)
        lines = log.read().splitlines()
    found = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not found:
        told = "killed by its limit" if kills else (lines or ["it said nothing"])[-1][:200]
        return Outcome(told, peak=peak)
    values = json.loads(found[-1])
    named: dict[str, Any] = {n: tuple(values[n]) for n in ("seconds", "losses", "tokens")}
    return Outcome(peak=peak, predicted=values["predicted"], **named)


def make_model(folder: Path, shape: Shape, dtype: str = "float32") -> tuple[Path, Path]:
    """Writes a Llama of random weights, in a process whose memory goes with it."""
    code = (
        "import sys, json; from pathlib import Path; from benchmarks._finetune_worker import write;"
        "write(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(folder), json.dumps(shape), dtype]
    subprocess.run(command, check=True, cwd=ROOT, env=dict(os.environ))
    return folder / "model", folder / "capitals.jsonl"


def row(name: str, outcome: Outcome) -> list[str]:
    """A line of the table."""
    if outcome.told:
        return [name, outcome.told, "", "", ""]
    predicted = f"{outcome.predicted:.3g}" if outcome.predicted else ""
    shown = [f"{outcome.rate:,.0f}", f"{outcome.step_s:.3g}", predicted]
    return [name, *shown, f"{outcome.peak / MIB:,.0f}"]


COLUMNS = ("", "tokens/s", "s a step", "predicted", "peak MiB")


def beside(options: Options, folder: Path) -> Report:
    """Ours, with and without a limit, and the Trainer, on the same batches."""
    model, data = make_model(folder / "small", SMALL)
    common = {"batch_tokens": 2048, "micro_tokens": 1024}
    limited = {"memory": "384MiB", "disk": f"{folder}:4GiB", "activations": "recompute"}
    made = Report(
        "finetune-beside", f"Fine-tuning of a Llama, {options.steps} steps of 2,048 tokens", COLUMNS
    )
    found = dict[str, Outcome]()
    for name, contestant, more in (
        ("ours", "ours", {}),
        ("Trainer", "trainer", {}),
        ("ours, 384 MiB", "ours", limited),
    ):
        out = folder / name.replace(" ", "-").replace(",", "")
        where = str(model), str(data), str(out)
        found[name] = run(
            Job(contestant, *where, options.steps, {**common, **more}),  # type: ignore[arg-type]
            None,
            folder,
        )
        made.rows.append(row(name, found[name]))
        made.figures[name] = {"tokens_per_s": found[name].rate, "peak": found[name].peak}
    ours, trainer, small = found.values()
    if all(not outcome.told for outcome in found.values()):
        for name, outcome in (("ours", ours), ("ours, limited", small)):
            pairs = zip(outcome.losses, trainer.losses, strict=True)
            apart = max(abs(a / b - 1) for a, b in pairs)
            made.bars.append(at_most(f"losses of {name} beside the Trainer's", apart, LOSS_BAR))
        made.bars.append(at_least("tokens/s, ours / Trainer", ours.rate / trainer.rate, SPEED_BAR))
        made.bars.append(at_most("peak, limited / Trainer", small.peak / trainer.peak, PEAK_BAR))
    made.notes = [
        "Peaks are of anonymous memory of the whole process, looked at every 50 ms. Ours saves a "
        "checkpoint of the last step while it goes on, which the Trainer does not: without a limit "
        "that is a copy of weights and moments.",
    ]
    return made


def large(options: Options, folder: Path) -> Report:
    """Models whose states are several times a group's 4 GiB."""
    made = Report("finetune-4gib", "Fine-tuning in a control group of 4 GiB", COLUMNS)
    memory = f"{(4 * GIB - CONSTANT) // MIB}MiB"
    common = {"memory": memory, "disk": f"{folder}:40GiB", "batch_tokens": 512, "length": 256}
    for name, shape, more in (
        ("1 B, all weights", ONE_B, {}),
        ("3 B, adapters", THREE_B, {"method": "lora", "precision": "bf16"}),
    ):
        place = folder / name.split(",")[0].replace(" ", "-")
        model, data = make_model(place, shape, "bfloat16")
        where = str(model), str(data), str(place / "run")
        job = Job("ours", *where, options.large_steps, {**common, **more})
        outcome = run(job, 4 * GIB, folder)
        made.rows.append(row(name, outcome))
        made.figures[name] = {**vars(outcome), "tokens_per_s": outcome.rate}
        made.bars.append(at_least(f"{name}: it ran", float(not outcome.told), 1))
        if not outcome.told and outcome.predicted:
            error = abs(outcome.predicted / outcome.step_s - 1)
            made.bars.append(at_most(f"{name}: error of the prediction", error, PREDICTED_BAR))
    return made


def main() -> None:
    """Runs what the options say."""
    options = tyro.cli(Options, description=__doc__)
    try:
        check_limits()
    except LimitsError as error:
        sys.exit(f"benchmarks.finetune: {error}")
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gulliver-finetune-", dir=options.folder) as name:
        folder = Path(name).absolute()
        finish(beside(options, folder), options.keep)
        if options.full:
            finish(large(options, folder), options.keep)


if __name__ == "__main__":
    main()
