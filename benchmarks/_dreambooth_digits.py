"""A new glyph for the digits model, from five pictures: part of `benchmarks.dreambooth`.

The glyph is a triangle, drawn as the digits of scikit-learn were: 8 x 8 levels, enlarged to
16 x 16. Five renderings are the subject's pictures. The judge is the one that reads digits, with
the glyph as an eleventh class: trained on real moving clips of the training handwriting and of 400
other renderings, with the same noise and shifts. Its ceiling is the share that it reads of real
moving clips of held-out handwriting and of 100 further renderings. Movement is measured, not
learnt.

The run is `gulliver dreambooth` itself, in a process and a control group of its own where those can
be made. Prior classes are asked for before and after, with the same prompts and seeds.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks.limits import Group, LimitsError
from gulliver.data import Bucket
from gulliver.dreambooth.video_base import load_adapter
from gulliver.video import DIRECTIONS, Request, SamplingConfig, VideoModel
from gulliver.video.digits import Judges, MovingDigits, compose, sentence, train_judges
from gulliver.video.media import write_clip

ROOT = Path(__file__).parent.parent
RUN = Path("out/demo/run")
"""Run of the demonstration."""
CLIP, STILL = Bucket(13, 32, 32), Bucket(1, 32, 32)
TOKEN, GLYPH = "sks", 10
"""Word and class of the glyph."""
WORST = "in the worst frame alone"
ALL_FRAMES = {"glyph": "", WORST: f" {WORST}"}
"""What is judged of the glyph besides its directions, and how the bar names it."""
PICTURES, TRAINING, HELD_OUT = range(5), range(1000, 1400), range(5000, 5100)
"""Seeds of the renderings: the subject's, those that the judge learns from, and its ceiling's."""
MIB = 1 << 20
MEMORY = 640 * MIB
"""Limit of the run's control group: the interpreter and torch take most of it."""
GLYPH_BAR, RIGHT_BAR, LOST_BAR, SHARE_BAR = 0.90, 0.90, 0.02, 0.05
OPTIONS = (
    *(
        "--token",
        TOKEN,
        "--learn-token",
        "--class-word",
        "digit",
        "--prompt",
        "the {class} {token}",
    ),
    *("--motion", "the {class} {token} moving {left|right|up|down}", "--motion-clips", "80"),
    *("--motion-placed", "--motion-after", "150"),
    *("--prior-prompt", "the digit {0|1|2|3|4|5|6|7|8|9} moving {left|right|up|down}"),
    *("--prior-pictures", "80", "--lora-rank", "10", "--learning-rate", "4e-3"),
    *("--token-rate", "2e-2", "--schedule", "cosine", "--warmup", "20", "--weight-decay", "0"),
    *("--batch", "8", "--steps", "700", "--validation-pictures", "0", "--ranks", "1"),
    *("--sampling-steps", "16", "--background", "black"),
)


def glyph(seed: int) -> Tensor:
    """Draws a triangle [16, 16] in [0, 1]: size, turn, corners, place and stroke vary."""
    from PIL import Image, ImageDraw

    draw, side = np.random.default_rng(seed), 256
    image = Image.new("L", (side, side))
    radius, turn = draw.uniform(88, 108), draw.uniform(-0.2, 0.2)
    middle, stretch = side / 2 + draw.uniform(-10, 10, 2), draw.uniform(0.85, 1.15)
    corners = []
    for corner in range(3):
        angle = -math.pi / 2 + turn + 2 * math.pi * corner / 3 + draw.uniform(-0.12, 0.12)
        x = middle[0] + radius * stretch * math.cos(angle)
        corners.append((x, middle[1] + radius * (math.sin(angle) + 0.2)))
    width, level = int(draw.uniform(26, 44)), int(draw.uniform(220, 256))
    ImageDraw.Draw(image).line([*corners, *corners[:2]], level, width, joint="curve")
    small = torch.from_numpy(np.array(image.resize((8, 8), Image.Resampling.BOX))).float() / 255
    ink = (1.15 * small).clamp(0, 1)[None, None]
    return F.interpolate(ink, size=(16, 16), mode="bilinear", align_corners=False)[0, 0]


def renderings(seeds: range) -> Tensor:
    """Draws glyphs [N, 16, 16]."""
    return torch.stack([glyph(seed) for seed in seeds])


def write_pictures(folder: Path) -> None:
    """Writes the subject's five pictures, as a user would give them."""
    folder.mkdir(parents=True, exist_ok=True)
    places = torch.from_numpy(np.random.default_rng(0).uniform(-2, 2, (5, 2))).float()
    stills = compose(renderings(PICTURES), torch.zeros(5, 2), places, STILL)
    for number, still in enumerate(stills):
        write_clip(folder / f"{number}.png", still, 8)


def ceilings(judges: Judges) -> tuple[float, float]:
    """Shares of real clips that the judge reads right: of the glyph, and of the digits."""
    draw = np.random.default_rng(1)
    steps = torch.tensor([(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0)])
    ways = torch.arange(len(HELD_OUT)) % 4
    offsets = torch.from_numpy(draw.uniform(-2, 2, (len(HELD_OUT), 2))).float()
    clips = compose(renderings(HELD_OUT), steps[ways], offsets, CLIP)
    count = len(HELD_OUT)
    read = judges.score(list(clips), [GLYPH] * count, ways.tolist()).both
    real = MovingDigits("heldout", 200, seed=1, shapes={CLIP: 1})
    labels = [real.labels(index) for index in range(200)]
    digits = judges.score(
        list(real.batch(list(range(200)))), [d for d, _ in labels], [w for _, w in labels]
    )
    return read, digits.both


def run_limited(arguments: list[str], memory: int, log: Path) -> dict[str, float]:
    """Runs a command of `gulliver` in a group of so much memory; tells peak, seconds and kills."""
    command = [sys.executable, "-m", "gulliver.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with log.open("w") as file:
        told = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment, "cwd": ROOT}
        try:
            with Group(memory) as group:
                code = group.start(command, **told).wait()
                found = {"peak": float(group.peak), "kills": float(group.kills)}
        except LimitsError:
            code, found = subprocess.run(command, **told).returncode, {}
    if code:
        raise RuntimeError(f"{command}: exit code {code}: {log.read_text()[-2000:]}")
    return {**found, "seconds": time.monotonic() - started}


def glyph_scores(model: VideoModel, judges: Judges, samples: int, sheet: Path) -> dict[str, float]:
    """Shares of clips that are the glyph, and both glyph and direction for each direction.

    The first clips of each direction, four moments of each, are shown on a sheet.
    """
    asked = [
        (f"the digit {TOKEN} moving {DIRECTIONS[n % 4]}", n % 4, 100 + n) for n in range(samples)
    ]
    clips = model.generate([Request(text, CLIP, seed) for text, _, seed in asked], SamplingConfig())
    found = {"glyph": judges.score(clips, [GLYPH] * samples, [None] * samples).digit}
    # A clip is judged by the mean of its frames, which a subject that frays on the way passes.
    each = [
        judges.score(clips, [GLYPH] * samples, [None] * samples, [t]) for t in range(CLIP.frames)
    ]
    found[WORST] = min(frame.digit for frame in each)
    write_clip(sheet, shown(clips), 8, scale=3)
    for way, name in enumerate(DIRECTIONS):
        some = [clip for clip, (_, one, _) in zip(clips, asked, strict=True) if one == way]
        found[f"moving {name}"] = judges.score(some, [GLYPH] * len(some), [way] * len(some)).both
    return found


def shown(clips: list[Tensor]) -> Tensor:
    """Lays four moments of the first 16 clips side by side, a row for each direction."""
    rows = []
    for way in range(4):
        some = clips[way:16:4]
        rows.append(torch.cat([clip[:, t] for clip in some for t in (0, 4, 8, 12)], dim=2))
    return torch.cat(rows, dim=1)[:, None]


def prior_score(model: VideoModel, judges: Judges, samples: int) -> float:
    """Share of digits that are right in digit and direction, over all forty sentences."""
    asked = [(n % 10, n // 10 % 4) for n in range(samples)]
    requests = [Request(sentence(*one), CLIP, 900 + n) for n, one in enumerate(asked)]
    clips = model.generate(requests, SamplingConfig())
    return judges.score(clips, [d for d, _ in asked], [w for _, w in asked]).both


def digits_part(report: Report, folder: Path, run: Path = RUN, samples: int = 200) -> None:
    """Teaches the glyph to a trained run of the digits, and judges; adds to a report.

    Args:
        report: report of three columns: what, its figure, and what stands beside it.
        folder: folder for pictures, run and logs.
        run: folder of the trained run.
        samples: number of clips that are judged, of the glyph and of the prior classes.
    """
    if not (run / "config.json").is_file():
        report.notes.append(f"digits: not run, {run} holds no run: `make demo` trains one")
        return
    torch.set_num_threads(1)
    judges = train_judges(others=(renderings(TRAINING),))
    glyphs, digits = ceilings(judges)
    write_pictures(folder / "pictures")
    paths = ["--model", str(run), "--subject", str(folder / "pictures")]
    told = ["dreambooth", *paths, "--out", str(folder / "taught"), *OPTIONS]
    ran = run_limited(told, MEMORY, folder / "log.txt")
    result = folder / "taught" / "result"
    base, taught = VideoModel.load(run), VideoModel.load(run)
    whole = sum(value.nbytes for value in base.model.state_dict().values())
    load_adapter(taught, result)
    size = sum(path.stat().st_size for path in result.glob("*.safetensors"))
    before, after = (prior_score(model, judges, samples) for model in (base, taught))
    made = glyph_scores(taught, judges, samples, folder / "sheet.png")
    report.figures["digits"] = {
        **{"ceiling_glyph": glyphs, "ceiling_digits": digits, "before": before, "after": after},
        **{"made": dict(made), "adapter_bytes": size, "model_bytes": whole},
        **{"samples": samples, **ran},
    }
    rows = [("ten digits, digit and direction", after, f"{before:.1%} before, {digits:.1%} real")]
    rows += [
        (f"the new glyph: {name}", share, f"{glyphs:.1%} real") for name, share in made.items()
    ]
    report.rows += [(f"digits: {name}", f"{share:.1%}", beside) for name, share, beside in rows]
    for name, share in ((f"clips{where}", made.pop(key)) for key, where in ALL_FRAMES.items()):
        report.bars.append(at_least(f"digits: {name} that are the glyph", share, GLYPH_BAR))
    for name, share in made.items():
        report.bars.append(at_least(f"digits: glyph and direction, {name}", share, RIGHT_BAR))
    report.bars.append(at_most("digits: share that old classes lose", before - after, LOST_BAR))
    report.bars.append(at_most("digits: adapter's bytes / model's", size / whole, SHARE_BAR))
    if "peak" in ran:
        peak = ran["peak"] / MEMORY
        report.bars.append(at_most("digits: peak of the run / its group's limit", peak, 1.0))
    report.notes.append(
        f"digits: {samples} clips each of 13x32x32; 5 pictures, {ran['seconds']:.0f} s on one "
        f"thread, the adapter has {size:,} bytes, the group {MEMORY // MIB} MiB. Judge: the reader "
        "of digits with the glyph as an eleventh class, trained on real moving clips of the "
        "training handwriting and of 400 other renderings; real is its share on held-out "
        "handwriting and on 100 further renderings."
    )


def main() -> None:
    """Runs the part alone, and prints its report: FOLDER RUN [SAMPLES]."""
    folder, run = Path(sys.argv[1]), Path(sys.argv[2])
    samples = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    folder.mkdir(parents=True, exist_ok=True)
    report = Report("dreambooth-digits", "A new glyph", ("what", "figure", "beside"))
    digits_part(report, folder, run, samples)
    finish(report)


if __name__ == "__main__":
    main()
