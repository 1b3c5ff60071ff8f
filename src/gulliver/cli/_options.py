"""What the commands are told: frozen dataclasses, which are also the command line.

Nothing here imports torch, nor may it: ``--help`` reads this page. `train` and `demo` have theirs
in `gulliver.video._config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gulliver.options import AT_LEAST_0, GUIDANCE, RANKS, SEED, Range


@dataclass(frozen=True)
class GenerateConfig:
    """Makes clips with a trained run."""

    run: Path = Path("out/demo/run")
    """Folder of the training run."""
    prompt: tuple[str, ...] = ()
    """What to show; several make several clips."""
    prompts: Path | None = None
    """A text file with a prompt on each line."""
    out: Path = Path("clip.gif")
    """File to write (.mp4, .gif, .png); for several clips a number is put before the suffix."""
    frames: Annotated[int, Range(1, 65535)] = 13
    """Length (4 k + 1); 1 makes a picture."""
    aspect_ratio: str = "1:1"
    """Width to height, such as 1:1, 5:3 or 3:5."""
    resolution: Annotated[int, Range(8, 65535)] = 32
    """Side in pixels of the square with as many pixels as the clip."""
    image: Path | None = None
    """First frame: a picture that starts to move."""
    extend: Path | None = None
    """A clip to go on with; --frames counts the conditioning frames too."""
    condition_frames: Annotated[int | None, Range(1, 65535)] = None
    """With --extend: how many of its last frames are given (4 k + 1); 5 by default."""
    seed: Annotated[int, SEED] = 0
    """Noise of the first clip; the next clips take the next seeds."""
    steps: Annotated[int, Range(1, 100_000)] = 24
    """Sampling steps."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Weight of the sentence; 1 turns guidance off."""
    scale: Annotated[int, Range(1, 64)] = 4
    """Repeat every pixel so many times in the file."""
    fps: Annotated[float, Range(0, 1000, open_below=True)] = 8.0
    """Frames per second of the file."""
    sequence: Annotated[int, RANKS] = 0
    """Ranks that share each clip's tokens; 0: all that guidance leaves."""
    guidance_ranks: Annotated[int, Range(0, 2)] = 0
    """2: with and without the sentence on ranks of their own; 0: where that is possible."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: --sequence x --guidance-ranks. Ignored under torchrun."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Judges what a run trained on the moving digits shows."""

    run: Path = Path("out/demo/run")
    """Folder of the training run."""
    samples: Annotated[int, Range(1, 1_000_000)] = 200
    """Prompts."""
    steps: Annotated[int, Range(1, 100_000)] = 24
    """Sampling steps."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Weight of the sentence."""
    out: Path | None = None
    """Write the figures there as JSON."""


@dataclass(frozen=True)
class ProbeConfig:
    """Measures what this machine can do; under torchrun the links between the ranks too."""

    out: Path | None = None
    """File to write; by default the measurement is kept in the cache, one file per machine."""
    folder: Path = Path(".")
    """Whose disk is measured."""
    again: bool = False
    """Measure although there is a measurement of this machine."""


@dataclass(frozen=True)
class DoctorConfig:
    """Says what runs here: the I/O engine and why, versions, memory, and how fast the disk is."""

    folder: Path = Path(".")
    """Whose disk is measured, by a file that is removed again."""
    mib: Annotated[int, Range(1, 2**20)] = 512
    """MiB that are written and read at most; a few seconds at most."""


@dataclass(frozen=True)
class CapabilitiesConfig:
    """Shows what may be combined: sequence modes, masks and dtypes by family of models."""


@dataclass(frozen=True)
class Ls:
    """Lists the steps of a run, or what a step, a file or a Hugging Face folder holds."""

    folder: tyro.conf.Positional[Path]
    """Of a run, of a step, or of Hugging Face's; or a file."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Show this step of a run."""
    tensors: bool = False
    """List all tensors."""


@dataclass(frozen=True)
class Verify:
    """Reads every byte of a step and checks it against its checksum."""

    folder: tyro.conf.Positional[Path]
    """Of a run or of a step."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Of a run; by default the newest."""
    all: bool = False
    """Every step of the run."""


@dataclass(frozen=True)
class Diff:
    """Compares two checkpoints; the exit code is 1 where they differ."""

    a: tyro.conf.Positional[Path]
    """A run, a step, a safetensors file or a Hugging Face folder."""
    b: tyro.conf.Positional[Path]
    """The other."""
    entry: str = "model"
    """Of steps; all for all of them, with what is no tensor."""
    tolerance: Annotated[float, AT_LEAST_0] = 0.0
    """How far elements may be apart."""
    relative: Annotated[float, AT_LEAST_0] = 0.0
    """How far they may be apart in terms of the larger one."""
    any_dtype: bool = False
    """Other dtypes are no difference."""
    step_a: Annotated[int | None, AT_LEAST_0] = None
    """Step of the first, if that is a run."""
    step_b: Annotated[int | None, AT_LEAST_0] = None
    """Step of the second, if that is a run."""
    show: Annotated[int, AT_LEAST_0] = 20
    """Lines of each kind of difference; 0 for all."""


@dataclass(frozen=True)
class Convert:
    """Makes a Hugging Face folder or a safetensors file of a step, or a step of one of these."""

    source: tyro.conf.Positional[Path]
    """A run, a step, a safetensors file or a Hugging Face folder."""
    target: tyro.conf.Positional[Path]
    """A folder or file.safetensors to make; for a step, the folder of a run."""
    to: Literal["auto", "huggingface", "step"] = "auto"
    """auto: the one that the source is not."""
    step: Annotated[int | None, AT_LEAST_0] = None
    """Of a run; by default the newest. Where a step is made, its number: 0 by default."""
    entry: str = "model"
    """Of the step."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Convert floating-point tensors to it."""
    prefix: str = ""
    """Only tensors whose names begin with it, and without it."""
    max_shard_gb: Annotated[float, Range(0, 1e6, open_below=True)] = 5.0
    """Gigabytes of tensors in a file."""
    model_config: Path | None = None
    """A config.json to put beside the weights."""


Action = (
    Annotated[Ls, tyro.conf.subcommand("ls", prefix_name=False)]
    | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[Diff, tyro.conf.subcommand("diff", prefix_name=False)]
    | Annotated[Convert, tyro.conf.subcommand("convert", prefix_name=False)]
)


@dataclass(frozen=True)
class CheckpointConfig:
    """Lists, verifies, compares and converts checkpoints."""

    action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[Action]] = tyro.MISSING
