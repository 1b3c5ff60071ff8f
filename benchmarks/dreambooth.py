"""Teaching a subject: Stable Diffusion 2's UNet, next to diffusers' script, and loaded by it.

`python -m benchmarks.dreambooth` runs the parts that are named, all of them by default. *unet*
prints the plan of Stable Diffusion 2 at batch 16 and 512 x 512, and trains one of a quarter of its
width under a memory limit, in a control group that the kernel ends (it needs root). *peer* runs the
loop of diffusers' own script and ours in turns, with the same samples and noise. *load* lets
diffusers load what was saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks._dreambooth_base import PARAMETERS, write_base, write_outline
from benchmarks._dreambooth_worker import config_of
from benchmarks._harness import Report, Spread, at_least, at_most, finish, turns
from benchmarks.limits import Group, LimitsError

Part = Literal["unet", "peer", "load"]
ALL: tuple[Part, ...] = ("unet", "peer", "load")
MIB = 1 << 20
SPEED_BAR, PEAK_BAR, LOSS_BAR, LEVELS = 1.1, 1.1, 1e-4, 1
LIMIT, CONSTANT = 384 * MIB, 700 * MIB
"""Memory that the quarter-width UNet is given, and what the interpreter, torch, diffusers,
transformers and the autoencoder need besides."""


@dataclass(frozen=True)
class Options:
    """Teaching a subject."""

    part: tuple[Part, ...] = ALL  # Parts to run
    rounds: int = 3  # Turns of each contestant beside diffusers' script
    steps: int = 6  # Steps of a run; the first is not counted
    keep: bool = False  # Keep the result in benchmarks/results


def main() -> None:
    options = tyro.cli(Options)
    report = Report("dreambooth", "Teaching a subject", ("what", "figure", "beside"))
    parts: dict[Part, Callable[[Report, Path, Options], None]] = {
        "unet": _unet,
        "peer": _peer,
        "load": _load,
    }
    for name in options.part:
        with tempfile.TemporaryDirectory(prefix="gulliver-dreambooth-") as folder:
            parts[name](report, Path(folder), options)
    finish(report, options.keep)


def _worker(who: str, folder: Path, name: str, group: Group | None = None, **told: Any) -> Any:
    """Runs a contestant in a process of its own; None where it was ended."""
    command = [sys.executable, "-m", "benchmarks._dreambooth_worker", who, str(folder), name]
    command.append(json.dumps(told))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        start = subprocess.Popen if group is None else group.start
        process = start(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        out, _ = process.communicate()
        if process.returncode:
            log.seek(0)
            print(log.read()[-2000:], file=sys.stderr)
            return None
    return json.loads(out.splitlines()[-1])


def _unet(report: Report, folder: Path, options: Options) -> None:
    outline = write_outline(folder / "sd2")
    for method in ("full", "lora"):
        plan = ["--model", str(outline), "--plan", "--batch", "16", "--micro-batch", "16"]
        command = [sys.executable, "-m", "gulliver.cli", "dreambooth", *plan, "--method", method]
        told = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        lines = [line for line in told.splitlines() if "Casting" not in line]
        report.notes += [f"Stable Diffusion 2, batch 16, 512 x 512, --method {method}:", *lines]
        if method == "full":
            counted = int(f"{PARAMETERS:,} of {PARAMETERS:,} parameters" in told)
            report.bars.append(at_least("the public UNet's parameters in the plan", counted, 1))
    base = write_base(folder / "narrow", divisor=4, side=32)
    config = config_of(base, "once", steps=1)
    from gulliver.dreambooth.trainer import dreambooth

    dreambooth(config)  # the prior pictures, outside of the group
    limits = {"memory": f"{LIMIT // MIB}MiB", "disk": f"{folder}:4GiB", "steps": options.steps}
    try:
        with Group(LIMIT + CONSTANT) as group:
            found = _worker("ours", base, "limited", group, **limits)
            peak, kills = group.peak, group.kills
    except LimitsError as error:
        report.notes.append(f"the quarter-width UNet was not run: {error}")
        return
    plain = _worker("ours", base, "plain", steps=options.steps)
    if found is None or plain is None:
        report.bars.append(at_most("quarter-width UNet: ended by its limit", 1, 0))
        return
    apart = _apart(found["losses"], plain["losses"])
    report.rows += [
        ("quarter-width UNet, all weights, peak", f"{found['peak'] / MIB:,.0f} MiB", f"without "
         f"a limit {plain['peak'] / MIB:,.0f} MiB"),
        ("its control group's peak", f"{peak / MIB:,.0f} MiB", f"limit {group_limit() / MIB:,.0f}"),
    ]  # fmt: skip
    report.figures["unet"] = {"peak": found["peak"], "plain": plain["peak"], "loss": apart}
    report.bars += [
        at_most("quarter-width UNet: ended by its limit", kills, 0),
        at_most("its losses beside those without a limit", apart, LOSS_BAR),
    ]


def group_limit() -> int:
    """Bytes of the control group that the narrow UNet is trained in."""
    return LIMIT + CONSTANT


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def _peer(report: Report, folder: Path, options: Options) -> None:
    base = write_base(folder / "base", divisor=8, side=32)
    found: dict[str, list[Any]] = {"ours": [], "peer": []}
    # The first makes the prior pictures, which both learn.
    for number, who in turns(("ours", "peer"), options.rounds):
        ran = _worker(who, base, f"{who}-{number}", steps=options.steps)
        assert ran is not None, f"{who} ran"
        found[who].append(ran)
    timed = {who: [s for ran in runs for s in ran["seconds"][1:]] for who, runs in found.items()}
    seconds = {who: Spread(tuple(each)) for who, each in timed.items()}
    peaks = {w: Spread(tuple(r["peak"] for r in runs)).median for w, runs in found.items()}
    apart = _apart(found["ours"][0]["losses"], found["peer"][0]["losses"])
    speed, memory = seconds["ours"].median / seconds["peer"].median, peaks["ours"] / peaks["peer"]
    for who, spread in seconds.items():
        times = f"{spread.shown('.3f')} s a step"
        report.rows.append((f"{who}: whole UNet, prior", times, f"{peaks[who] / MIB:,.0f} MiB"))
    report.figures["peer"] = {"speed": speed, "memory": memory, "loss": apart}
    report.bars += [
        at_most("seconds of a step over those of diffusers' script", speed, SPEED_BAR),
        at_most("peak memory over that of diffusers' script", memory, PEAK_BAR),
        at_most("losses beside diffusers' script", apart, LOSS_BAR),
    ]


def _load(report: Report, folder: Path, options: Options) -> None:
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image

    from gulliver.dreambooth.trainer import dreambooth

    base, side = write_base(folder / "base", divisor=8, side=16), 128
    for method in ("lora", "full"):
        told = {"method": method, "text_encoder": True, "learn_token": True, "token": "<it>"}
        more = {"steps": 3, "learning_rate": 1e-3, "validation_pictures": 2}
        config = config_of(base, method, **told, **more)
        result = dreambooth(config).result
        assert result is not None, "it is over"
        whole = base / "base" if method == "lora" else result
        pipeline: Any = DiffusionPipeline.from_pretrained(whole)
        if method == "lora":
            pipeline.load_lora_weights(result)
            pipeline.load_textual_inversion(result / "learned_embeds.safetensors")
        pipeline.set_progress_bar_config(disable=True)
        samples = config.out / "samples"
        about = json.loads(max(samples.glob("*.json")).read_text())
        ways = {"num_inference_steps": config.sampling_steps, "guidance_scale": about["guidance"]}
        made = [
            pipeline(
                about["prompts"][0],
                height=side,
                width=side,
                generator=torch.Generator().manual_seed(seed),
                output_type="np",
                **ways,
            ).images[0]
            for seed in about["seeds"]
        ]
        wanted = np.asarray(Image.open(max(samples.glob("*.png")))).astype(int)
        apart = int(np.abs((np.concatenate(made, 1) * 255).round() - wanted).max())
        name = "pipeline" if method == "full" else "LoRA and token"
        report.rows.append((f"diffusers loads the {name}", f"{apart} of 255", "largest difference"))
        report.bars.append(at_most(f"pictures of the {name} in diffusers", apart, LEVELS))


if __name__ == "__main__":
    main()
