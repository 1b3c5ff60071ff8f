"""What the page and the process that samples say to each other. Plain data, which is pickled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from gulliver.options import GUIDANCE, SEED, Options, Range


@dataclass(frozen=True)
class Source:
    """A model to sample with: a run, or the parts of a public one."""

    # Folder of the run; None where `model` is given.
    run: Path | None = None
    # Folder or file of a public transformer.
    model: Path | None = None
    # Folder or file of its autoencoder.
    autoencoder: Path | None = None
    # Folder of its T5.
    text_encoder: Path | None = None
    # Folder of its CLIP, where it reads one.
    clip: Path | None = None
    # Whether networks of public parts stay in memory once they are filled.
    keep: bool = False

    @property
    def name(self) -> str:
        """Path of the run or the transformer, for people."""
        return str(self.run or self.model)

    @property
    def options(self) -> dict[str, str]:
        """The options of `gulliver generate` that name it."""
        paths = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "keep"}
        return {name.replace("_", "-"): str(path) for name, path in paths.items() if path}


@dataclass(frozen=True)
class Settings(Options):
    """Settings of a clip: the same ones and the same model make the same clip, bit for bit.

    Attributes:
        prompt: sentence to show.
        negative_prompt: sentence to lead away from; empty: no caption.
        frames: length of the clip.
        height: rows in pixels.
        width: columns in pixels.
        steps: number of sampling steps.
        guidance: weight of the sentence.
        seed: seed of the noise.
        picture: file of the picture that becomes the first frame.
    """

    prompt: str
    negative_prompt: str = ""
    frames: Annotated[int, Range(1, 65535)] = 13
    height: Annotated[int, Range(8, 65535)] = 32
    width: Annotated[int, Range(8, 65535)] = 32
    steps: Annotated[int, Range(1, 100_000)] = 24
    guidance: Annotated[float, GUIDANCE] = 2.0
    seed: Annotated[int, SEED] = 0
    picture: Path | None = None


@dataclass(frozen=True)
class ClipJob:
    """A clip to make."""

    # Settings of the clip.
    settings: Settings
    # Mp4 file to write.
    path: Path


@dataclass(frozen=True)
class Stop:
    """Asks for an end of the present job. One that comes late finds no job, and does nothing."""


@dataclass(frozen=True)
class Waiting:
    """The job waits."""

    # Number of clips that are made before.
    before: int


@dataclass(frozen=True)
class Loading:
    """The model is being loaded."""


@dataclass(frozen=True)
class Sampling:
    """A sampling step is done."""

    # Number of steps done.
    done: int
    # Number of steps in all.
    steps: int
    # Seconds that the other steps will take, judged by those done.
    seconds_left: float
    # Animated GIF of the clip as it is expected to become; None: as before.
    frames: bytes | None = None


@dataclass(frozen=True)
class Made:
    """The clip is there."""

    path: Path
    # Name of the checkpoint, or of the public model.
    checkpoint: str
    # Frames per second of the file.
    fps: float
    # Times that each pixel is repeated in both directions.
    scale: int
    # Seconds that it took.
    seconds: float
    # What a user should know of it.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """There will be no clip."""

    # What is wrong, in a line.
    reason: str


@dataclass(frozen=True)
class Stopped:
    """The job was stopped as was asked."""


Event = Waiting | Loading | Sampling | Made | Failed | Stopped
End = Made | Failed | Stopped
