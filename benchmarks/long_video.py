"""16 seconds at 720p: the whole grid of latents through a narrow model, under a limit of memory.

`python -m benchmarks.long_video` trains, samples and decodes on the grid of 408 frames of 720x1280
(120 x 90 x 160 latents, 432,000 tokens), each in a process of its own, as root in a control group
that the kernel keeps to the limit and what interpreter and torch take. The model has one pair of
blocks and one head of the 16 of the published model, as wide as there; so shapes, positions and
attention are what they will be, and the rest is narrower. Memory and seconds are predicted before,
from shapes alone and the cost model (its seconds scaled by a run of an eighth of the frames), and
stand beside what is measured. The same formulas then
predict the published models on clusters that are described.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks._harness import Report, at_most, finish, markdown_table
from benchmarks._long_video_costs import Tokens, cost
from benchmarks._long_video_worker import Done, Job
from benchmarks.limits import Group, LimitsError, check_limits
from gulliver.booster import HybridParallelPlugin, LowLevelZeroPlugin
from gulliver.cli.models import needs
from gulliver.cli.options import ModelsConfig
from gulliver.hardware import Cluster, described
from gulliver.hardware.costs import all_to_all_seconds
from gulliver.models import CONFIGURATIONS, STDiT3, build
from gulliver.options import size_text
from gulliver.plan.tree import Work

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "video-long.md"
GIB, MIB = 1 << 30, 1 << 20
GRID = (120, 90, 160)
CLIP = (408, 720, 1280)
MODELS = {"STDiT3-XL/2": 30, "MMDiT-11B": 50, "MMDiT-11B-DC": 50}
"""Published models, and the Euler steps that are usual with each."""
RANKS = (1, 8, 32)
PUBLISHED = {("STDiT3-XL/2", 1): 547.97}
"""Seconds of sampling that the report of Open-Sora 1.2 gives for such a clip on one H100."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    limit: float = 3.5
    """Memory of each process beside interpreter and torch, in GiB."""
    constant: float = 0.75
    """Memory of interpreter and torch that the control group has besides, in GiB."""
    width: int = 72
    """Channels of the model: one head of the published ones."""
    words: int = 300
    """Caption tokens."""
    train_steps: int = 2
    """Steps of training."""
    sample_steps: int = 2
    """Euler steps of sampling, with guidance."""
    activations: str = "offload"
    """What is done with activations in training: keep, recompute, offload or auto."""
    disk: float = 16.0
    """Disk that activations may take, in GiB."""
    folder: Path = Path(".")
    """Folder on that disk."""
    stretch: int = 4
    """Latent frames that are decoded at once."""
    channels: int = 16
    """Channels of the narrow decoder."""
    parts: tuple[str, ...] = ("train", "sample", "decode", "predict")
    """What to run."""
    grid: tuple[int, int, int] = GRID
    """Latent frames, rows and columns; smaller to see that it runs."""
    cap: float = 400.0
    """Seconds after which a process is ended."""
    keep: bool = False
    """Write the result file, and the tables of docs/video-long.md."""


def job_of(part: str, options: Options) -> Job:
    """Returns the job of a process."""
    return Job(
        part=part,
        grid=options.grid,
        width=options.width,
        words=options.words,
        steps=options.train_steps if part == "train" else options.sample_steps,
        limit=int(options.limit * GIB),
        activations=options.activations,
        disk=int(options.disk * GIB),
        folder=str(options.folder.resolve()),
        stretch=options.stretch,
        channels=options.channels,
    )


def run(job: Job, options: Options) -> tuple[Done | None, str]:
    """Runs a process under the limit, and returns what it told, or how it ended."""
    group = limited(options)
    command = [sys.executable, "-m", "benchmarks._long_video_worker", json.dumps(asdict(job))]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes["env"] = {**os.environ, "PYTHONPATH": paths}
    with group or nullcontext():
        start = subprocess.Popen if group is None else group.start
        process = start(command, **pipes)
        try:
            out, error = process.communicate(timeout=options.cap)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, f"not done after {options.cap:g} s"
        killed = group is not None and group.kills > 0
    if killed:
        return None, "killed by the limit"
    if process.returncode:
        return None, (error.strip().splitlines() or ["failed"])[-1]
    return Done(**json.loads(out.strip().splitlines()[-1])), ""


def limited(options: Options) -> Group | None:
    """A control group with the limit; None where there can be none."""
    try:
        place = check_limits()
    except LimitsError:
        return None
    return Group(int((options.limit + options.constant) * GIB), place=place)


def report_part(part: str, options: Options, report: Report) -> None:
    """The line of a process, and its bars."""
    done, failure = run(job_of(part, options), options)
    if done is None:
        report.rows.append((part, failure, *[""] * 5))
        report.bars.append(at_most(f"{part}: processes that failed", 1, 0))
        return
    # The first step of training takes pages that later ones have.
    seconds = min(done.seconds) if part != "decode" else sum(done.seconds)
    row = [size_text(done.plain), size_text(done.predicted), size_text(done.peak)]
    row += [f"{done.predicted_s:.1f}" if done.predicted_s else "", f"{seconds:.1f}"]
    ratio = f"{seconds / done.predicted_s:.2f}" if done.predicted_s else ""
    report.rows.append((part, *row, ratio))
    report.figures[part] = {**asdict(done), "seconds": seconds}
    limit = int(options.limit * GIB)
    report.bars += [
        at_most(f"{part}: bytes to the limit", done.peak / limit, 1.0),
        at_most(f"{part}: bytes measured to predicted", done.peak / max(1, done.predicted), 1.25),
    ]


@dataclass(frozen=True)
class Real:
    """A published model on ranks of a cluster.

    Attributes:
        shared: ranks that share a clip.
        state: bytes of parameters, gradients and optimizer on each rank.
        activations: bytes that a step of training needs besides, blocks recomputed.
        step: seconds of a step of training of one clip for every `shared` ranks.
        sample_bytes: bytes of a rank in sampling.
        sample: seconds of sampling a clip with guidance.
    """

    shared: int
    state: int
    activations: int
    step: float
    sample_bytes: int
    sample: float


def predict(name: str, ranks: int, cluster: Cluster) -> Real:
    """Predicts a published model for the clip of 16 seconds.

    An STDiT3 shares a clip between up to eight ranks in training, and between all in sampling, half
    of them for each branch of guidance. An MMDiT has no such way: every rank has a clip of its own.
    """
    device, configuration = cluster.device, CONFIGURATIONS[name]
    with torch.device("meta"):
        model: Any = build(name)
    clip = CLIP if configuration.chunk else (409, *CLIP[1:])
    frames, rows, columns = configuration.latent(*clip)
    patch = 2 if isinstance(model, STDiT3) else model.patch_size
    words = 300 if isinstance(model, STDiT3) else model.model_max_length
    tokens = Tokens(1, frames, -(-rows // patch) * -(-columns // patch), words)
    one = cost(model, tokens, device, "bfloat16")
    asked = needs(name, clip, ModelsConfig(precision="bf16"))
    optimizer = torch.optim.AdamW(model.parameters())
    alone = LowLevelZeroPlugin(stage=1, precision="bf16", verbose=False).make_plan(
        model, optimizer, cluster.resized(1)
    )
    activations = asked.train_recomputed - alone.memory.total
    working = asked.sample - 2 * asked.parameters
    shared = min(8, ranks) if isinstance(model, STDiT3) else 1
    work = Work(
        samples=1,
        tokens=tokens.all,
        forward_s=one.forward,
        backward_s=one.backward,
        hidden_bytes=2 * tokens.all * model.hidden_size,
    )
    plan = plugin_of(shared, ranks).make_plan(model, optimizer, cluster, work=work)
    halves = max(1, ranks // 2) if shared > 1 else 1
    return Real(
        shared=shared,
        state=plan.memory.total,
        activations=activations // shared,
        # Every block is computed once more.
        step=plan.predicted.seconds.step + one.forward / shared,
        sample_bytes=2 * asked.parameters
        + working // (2 * halves if ranks > 1 and shared > 1 else 1),
        sample=MODELS[name] * sampled(model, tokens, halves, ranks, cluster, shared),
    )


def sampled(
    model: Any, tokens: Tokens, halves: int, ranks: int, cluster: Cluster, shared: int
) -> float:
    """Seconds of an Euler step with guidance of one clip."""
    batch = 1 if shared > 1 else 2
    clip = Tokens(batch, tokens.frames, tokens.spatial, tokens.words)
    forward = cost(model, clip, cluster.device, "bfloat16").forward / halves
    if halves == 1:
        return forward
    links = cluster.resized(halves).links()
    nbytes = 2 * tokens.all * model.hidden_size // halves
    return forward + 2 * model.depth * all_to_all_seconds(links, nbytes)


def plugin_of(shared: int, ranks: int) -> Any:
    """The plugin that trains so."""
    if shared == 1:
        return LowLevelZeroPlugin(stage=3 if ranks > 1 else 1, precision="bf16", verbose=False)
    return HybridParallelPlugin(
        sp_size=shared,
        sequence_parallelism_mode="all_to_all",
        zero_stage=2,
        precision="bf16",
        verbose=False,
    )


def report_predictions(report: Report) -> list[str]:
    """Lines of a table of their own: published models on described clusters."""
    base = described("8xh100-infiniband")
    lines = [
        "| model | GPUs | share a clip | state | + activations | fits 80 GB | train step, s | "
        "sample, s | bytes of sampling |",
        "| --- " * 9 + "|",
    ]
    for name in MODELS:
        for ranks in RANKS:
            found = predict(name, ranks, base.resized(ranks))
            whole = found.state + found.activations
            fits = "yes" if whole <= base.device.memory_bytes else "no"
            cells = (
                *(name, f"{ranks}", f"{found.shared}", size_text(found.state)),
                *(size_text(found.activations), fits, f"{found.step:.1f}", f"{found.sample:.0f}"),
                size_text(found.sample_bytes),
            )
            lines.append(f"| {' | '.join(cells)} |")
            report.figures[f"{name} on {ranks}"] = asdict(found)
            published = PUBLISHED.get((name, ranks))
            if published is not None:
                report.figures["published_to_predicted"] = published / found.sample
    return lines


def main(options: Options) -> None:
    """Runs the parts."""
    report = Report(
        "long_video",
        f"16 s at 720p: {math.prod(options.grid) // 4:,} tokens through a narrow STDiT3",
        ("", "plain", "predicted", "measured", "predicted, s", "measured, s", "ratio"),
    )
    for part in options.parts:
        if part != "predict":
            report_part(part, options, report)
    grid = "x".join(map(str, options.grid))
    group = limited(options)
    kept = "a control group" if group is not None else "no control group here"
    report.notes = [
        f"{grid} latents; {options.width} channels, one pair of blocks, {options.words} caption "
        f"tokens, float32, {torch.get_num_threads()} threads. Limit {options.limit:g} GiB beside "
        f"interpreter and torch ({kept} of {options.limit + options.constant:g} GiB). train: a "
        f"step of rectified flow with AdamW, activations: {options.activations}; sample: an Euler "
        "step with guidance, two clips in a batch; decode: all latents in stretches of "
        f"{options.stretch}, to {4 * options.grid[0] - 3} frames, by a decoder of "
        f"{options.channels} channels. plain: bytes with nothing done about them. Bytes are beside "
        "what the process held before."
    ]
    predicted = report_predictions(report) if "predict" in options.parts else []
    report.notes += ["", *predicted, "", HOW] if predicted else []
    if options.keep:
        fill_page({"measured": [markdown_table(report.columns, report.rows)], "real": predicted})
    finish(report, options.keep)


def fill_page(tables: dict[str, list[str]]) -> None:
    """Writes tables between the page's marks; those that were not made stay as they are."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, lines in tables.items():
        if lines:
            pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
            table = "\n".join(lines)
            text = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)
    PAGE.write_text(text, encoding="utf-8")


HOW = (
    "Published models at data-sheet rates (a floor), bf16, blocks recomputed, ZeRO over all ranks; "
    "one clip for every ranks that share one. The report of Open-Sora 1.2 gives 547.97 s for "
    "sampling on one H100: what is measured there takes that much more than the floor."
)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
