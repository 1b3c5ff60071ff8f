"""Fine-tuning compared with transformers' Trainer and a plain loop, and in 4 GiB.

`python -m benchmarks.finetune` runs each contestant in a process and a control group of its own, so
it needs root, and a disk. *beside*: a small Llama on conversations, ours, the Trainer and a plain
loop on the same batches, and ours under a limit of half the Trainer's peak. *1b* and *3b*, which
`--full` adds: all weights of a 1-B-shaped Llama, adapters of a 3-B-shaped one, each in a group of
4 GiB that the kernel ends at its limit, with the seconds that `--dry-run` predicts. With `--ledger
FILE` a run that was ended goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks._harness import Report, Spread, at_least, at_most, finish
from benchmarks._memory_jobs import GB, GIB, MIB, TEXTS, Job, Ledger, Outcome, run
from benchmarks.limits import LimitsError, check_limits

ROOT = Path(__file__).parent.parent
Part = Literal["beside", "1b", "3b"]
USUAL: tuple[Part, ...] = ("beside",)
LARGE: tuple[Part, ...] = ("1b", "3b")
CONSTANT = 512 * MIB
"""What the interpreter, torch and transformers need beside tensors, of a group's limit."""
SPARE = 128 * MIB
"""What a run needs beside its limit and what the process held before: 91 to 122 MiB were seen."""
SPEED_BAR, PEAK_BAR, LOSS_BAR, PREDICTED_BAR = 0.97, 0.5, 1e-6, 0.25
"""Of speeds 3 % are noise: two turns of one contestant are as far apart."""
OURS, PLAIN, TRAINER, LIMITED = "ours", "plain loop", "Trainer", "ours, limited"
PACKED = {"length": 256, "packing": "yes"}
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
    """Options of the benchmark."""

    parts: tuple[Part, ...] = ()  # By default beside, with --full all
    full: bool = False  # The 1-B and 3-B shapes in 4 GiB, too; needs 50 GB of disk
    turns: int = 2  # Turns of each contestant beside the others
    steps: int = 5  # Timed steps of the small model in a turn
    large_steps: int = 3  # Timed steps of the large ones
    folder: Path = Path("out")  # Folder on the disk that is used; what is written there is removed
    minutes: float = 0.0
    """Minutes after which what runs is ended and what is left is left out; 0 for no end."""
    ledger: Path | None = None  # File of outcomes: jobs that are in it are not run again
    keep: bool = False  # Write benchmarks/results


@dataclass(frozen=True)
class Bench:
    """Runner of jobs, with the outcomes of those that have run."""

    options: Options  # options of the command
    folder: Path  # folder of this run
    ledger: Ledger  # outcomes so far

    def make(self, name: str, shape: Shape, dtype: str = "float32") -> None:
        """Writes a model of random weights and conversations, unless they are there.

        It is a process of its own, whose memory goes with it.
        """
        if (self.folder / name).exists():
            return
        code = (
            "import sys, json; from pathlib import Path; from benchmarks._finetune_worker import *;"
            "write(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])"
        )
        command = [sys.executable, "-c", code, str(self.folder / name), json.dumps(shape), dtype]
        say(f"{name}: writing a model")
        subprocess.run(command, check=True, cwd=ROOT)

    def run(self, job: Job) -> Outcome:
        """Runs a job, unless it is known."""
        return run(job, self.ledger, say)


def say(line: str) -> None:
    """Tells what goes on, beside the tables."""
    print(line, file=sys.stderr, flush=True)


def job_of(bench: Bench, runs: str, model: str, data: str, **changes: Any) -> Job:
    """A job on a model that lies in the folder of this run."""
    tokens = changes["options"]["config"]["batch_tokens"]
    job = Job(runs, TEXTS, folder=str(bench.folder), warm_up=1, batch=1, length=tokens)
    options = {"runs": runs, "model": model, "data": data, "out": f"{model}-{runs}"}
    return replace(job, **{**changes, "options": {**options, **changes["options"]}})


def tokens_of(outcome: Outcome) -> list[int]:
    """Tokens of each timed step, with padding."""
    return [outcome.facts[f"tokens {step.number}"] for step in outcome.steps]


def rate_of(outcome: Outcome) -> float:
    """Tokens per second of the timed steps."""
    return sum(tokens_of(outcome)) / max(1e-9, sum(step.seconds for step in outcome.steps))


def apart(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Largest relative difference of losses; endless where they are of other steps."""
    if one.keys() != other.keys() or not one:
        return math.inf
    return max(abs(one[step] / other[step] - 1) for step in one)


def beside(bench: Bench) -> Report:
    """Ours, with and without a limit, the Trainer and a plain loop, on the same batches."""
    options = bench.options
    found: dict[str, list[Outcome]] = {name: [] for name in (OURS, PLAIN, TRAINER, LIMITED)}
    for turn in range(options.turns):
        names = list(found)
        for name in names if turn % 2 == 0 else reversed(names):
            config: dict[str, Any] = {"batch_tokens": 2048, "micro_tokens": 1024, **PACKED}
            changes: dict[str, Any] = {"steps": options.steps, "cap_s": 300.0}
            if name == LIMITED:
                config["memory"] = f"{half_of(found) // MIB}MiB"
                changes["disk"] = 4 * GIB
            runs = OURS if name == LIMITED else name
            more = {"runs": runs, "config": config, "out": f"small-{name}-{turn}"}
            data = ("small/model", "small/capitals.jsonl")
            job = job_of(bench, name, *data, **changes, options={**more, "turn": turn})
            if bench.ledger.get(job) is None:
                bench.make("small", SMALL)
            found[name].append(bench.run(job))
    return beside_report(found, options)


def half_of(found: dict[str, list[Outcome]]) -> int:
    """The limit for which a process is at half the Trainer's peak; 1 GiB where that is unknown."""
    trainer, ours = found[TRAINER], found[OURS]
    if not (trainer and trainer[0].anonymous and ours and ours[0].facts.get("base")):
        return GIB
    return int(PEAK_BAR * trainer[0].anonymous) - ours[0].facts["base"] - SPARE


def beside_report(found: dict[str, list[Outcome]], options: Options) -> Report:
    """Table and bars of *beside*."""
    columns = ("", "ended", "tokens/s", "s a step", "peak MiB", "GB read, written")
    title = f"Fine-tuning a Llama of 44 M, {options.steps} steps of 2,048 tokens, turn by turn"
    made = Report("finetune-beside", title, columns)
    rates = {name: Spread(tuple(map(rate_of, runs))).median for name, runs in found.items()}
    peaks = {name: max(one.anonymous for one in runs) for name, runs in found.items()}
    for name, runs in found.items():
        spread = Spread(tuple(step.seconds for one in runs for step in one.steps) or (0.0,))
        shown = [f"{rates[name]:,.0f}", spread.shown()]
        moved = f"{runs[0].read / GB:.2f}, {runs[0].written / GB:.2f}"
        ended = ", ".join(dict.fromkeys(one.told or one.end for one in runs))
        made.rows.append([name, ended, *shown, f"{peaks[name] / MIB:,.0f}", moved])
        losses = [list(one.losses.values()) for one in runs]
        made.figures[name] = {"tokens_per_s": rates[name], "peak": peaks[name], "losses": losses}
        made.figures[name]["facts"] = runs[0].facts
    if all(one.end == "done" for runs in found.values() for one in runs):
        plain = found[PLAIN][0].losses
        for name in (OURS, TRAINER, LIMITED):
            off = max(apart(one.losses, plain) for one in found[name])
            made.bars.append(at_most(f"losses of {name}, off the plain loop's", off, LOSS_BAR))
        for name in (TRAINER, PLAIN):
            made.bars.append(at_least(f"tokens/s, ours / {name}", *_over(rates, OURS, name)))
        share = peaks[LIMITED] / peaks[TRAINER]
        made.bars.append(at_most("peak, limited / Trainer", share, PEAK_BAR))
    made.notes = [
        "Peaks are of anonymous memory of the whole process, the interpreter included, looked at "
        "every 50 ms. Ours saves a checkpoint of the last step, which the others do not: without a "
        "limit that is a copy of weights and moments. The limit is what is left of half the "
        "Trainer's peak beside the interpreter."
    ]
    return made


def _over(rates: dict[str, float], one: str, other: str) -> tuple[float, float]:
    return rates[one] / max(1e-9, rates[other]), SPEED_BAR


def large(bench: Bench, part: Part) -> Report:
    """A model whose states are several times a group's 4 GiB."""
    name, shape, more = {
        "1b": ("1 B, all weights", ONE_B, {}),
        "3b": ("3 B, adapters", THREE_B, {"method": "lora", "precision": "bf16"}),
    }[part]
    memory = f"{(4 * GIB - CONSTANT) // MIB}MiB"
    batches = {"batch_tokens": 512, **PACKED}
    job = job_of(
        bench,
        OURS,
        f"{part}/model",
        f"{part}/capitals.jsonl",
        steps=bench.options.large_steps,
        limit=4 * GIB,
        disk=24 * GIB,
        cap_s=1500.0,
        options={"config": {"memory": memory, **batches, **more}, "out": f"{part}/run"},
    )
    if bench.ledger.get(job) is None:
        bench.make(part, shape, "bfloat16")
        probe(bench.folder)
    found = bench.run(job)
    predicted, seconds = found.facts.get("predicted_s", 0.0), found.seconds
    columns = ("", "ended", "tokens/s", "s a step", "predicted s", "GB read, written")
    made = Report(f"finetune-{part}", f"Fine-tuning in a group of 4 GiB: {name}", columns)
    made.columns = (*columns, "anonymous MiB", "peak MiB")
    rate = rate_of(found) if found.ran else 0.0
    shown = [f"{rate:,.1f}", f"{seconds:.1f}", f"{predicted:.1f}"]
    moved = f"{found.read / GB:.2f}, {found.written / GB:.2f}"
    memories = [f"{nbytes / MIB:,.0f}" for nbytes in (found.anonymous, found.peak)]
    made.rows.append([name, found.told or found.end, *shown, moved, *memories])
    made.figures[part] = {"tokens_per_s": rate, "step_s": seconds, "predicted_s": predicted}
    made.figures[part]["facts"] = found.facts
    made.bars.append(at_least(f"{name}: it ran in 4 GiB", float(found.end == "done"), 1))
    if found.ran and predicted:
        error = abs(predicted / seconds - 1)
        made.bars.append(at_most(f"{name}: error of the prediction", error, PREDICTED_BAR))
    made.notes = [
        f"Weights are random, written by transformers in bf16. The limit is {memory}, the rest of "
        "the group for the interpreter and libraries; peak is what the kernel charged, page cache "
        "included. Predicted by --dry-run from what gulliver probe measured just before. Seconds "
        "and bytes are of steps after the first, which makes the optimizer's state; the group also "
        "holds the run's start, its checkpoint and its result."
    ]
    return made


def probe(folder: Path) -> None:
    """Measures this machine and the disk, as a user would before a prediction."""
    command = [sys.executable, "-m", "gulliver.cli", "probe", "--folder", str(folder), "--again"]
    say("probing the machine")
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    parts = options.parts or (*USUAL, *(LARGE if options.full else ()))
    try:
        check_limits()
        options.folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(options.ledger, 60 * options.minutes or math.inf)
        prefix, place = "gulliver-finetune-", options.folder.absolute()
        with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
            bench = Bench(options, Path(name), ledger)
            os.environ["GULLIVER_CACHE"] = str(bench.folder / "cache")
            for part in parts:
                report = large(bench, part) if part in LARGE else beside(bench)
                finish(report, options.keep)
    except LimitsError as error:
        sys.exit(f"benchmarks.finetune: {error}")


if __name__ == "__main__":
    main()
