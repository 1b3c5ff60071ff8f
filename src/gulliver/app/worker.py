"""The sampling process: receives jobs through a pipe and sends events back.

It holds the model, so that a device fault or an out-of-memory kill does not crash the page.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError
from gulliver.options import GUIDANCE, SEED, Options, Range
from gulliver.video.config import SamplingConfig
from gulliver.video.digits import FPS
from gulliver.video.media import read_frames, to_frames, write_clip, write_gif
from gulliver.video.pipeline import VideoPipeline, open_run
from gulliver.video.requests import Request
from gulliver.video.run import Run

# Messages between the page and the sampling process: plain data, pickled.


@dataclass(frozen=True)
class Source:
    """The model to sample from: that of a run, or a public model with its encoders."""

    # Run folder; None if `model` is given.
    run: Path | None = None
    # Folder or file of a public transformer.
    model: Path | None = None
    # Folder or file of its autoencoder.
    autoencoder: Path | None = None
    # Folder of its T5.
    text_encoder: Path | None = None
    # Folder of its CLIP, if it uses one.
    clip: Path | None = None
    # Whether networks of public parts stay in memory after loading.
    keep: bool = False

    @property
    def name(self) -> str:
        return str(self.run or self.model)

    @property
    def options(self) -> dict[str, str]:
        paths = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "keep"}
        return {name.replace("_", "-"): str(path) for name, path in paths.items() if path}


@dataclass(frozen=True)
class Settings(Options):
    """Settings of a clip; equal settings and models give bitwise equal clips."""

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
    """A clip to generate."""

    # Settings of the clip.
    settings: Settings
    # Mp4 file to write.
    path: Path


@dataclass(frozen=True)
class Stop:
    """Cancels the current job; ignored if it has already finished."""


@dataclass(frozen=True)
class ClipQueued:
    """The job is queued."""

    # Number of clips ahead of it.
    before: int


@dataclass(frozen=True)
class Loading:
    """The model is being loaded."""


@dataclass(frozen=True)
class Sampling:
    """A sampling step has finished."""

    # Number of finished steps.
    done: int
    # Total number of steps.
    steps: int
    # Estimated seconds for the remaining steps.
    seconds_left: float
    # Animated GIF preview of the clip; None: unchanged.
    frames: bytes | None = None


@dataclass(frozen=True)
class ClipMade:
    """The clip is finished."""

    path: Path
    # Name of the checkpoint or of the public model.
    checkpoint: str
    # Frames per second of the file.
    fps: float
    # Integer upscaling factor of the pixels.
    scale: int
    # Seconds of sampling.
    seconds: float
    # Warnings for the user.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """The job failed."""

    # Error message in one line.
    reason: str


@dataclass(frozen=True)
class ClipStopped:
    """The job was cancelled."""


Event = ClipQueued | Loading | Sampling | ClipMade | Failed | ClipStopped
End = ClipMade | Failed | ClipStopped


# Main loop: generates clips until the page is closed.


PREVIEWS = 8
"""Maximum number of previews of a clip: decoding one may take as long as several steps."""
PREVIEW_SIDE = 256
"""Maximum pixels of a preview's longer side."""
SHOWN_SIDE = 256
"""Small clips are upscaled to this side by pixel repetition, because browsers would blur."""

Post = Callable[[Any], None]


class _StopAsked(Exception):
    pass


def work(connection: Connection, source: Source) -> None:
    """Generates clips until the other end of the pipe is closed."""
    # Ctrl+C reaches all processes of a terminal: the page stops this one when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    maker = ClipMaker(source)
    # The page is gone, and with it all waiting users.
    with suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            if isinstance(job, ClipJob):
                connection.send(_result(maker, job, connection))


def _result(
    maker: ClipMaker, job: ClipJob, connection: Connection
) -> ClipMade | Failed | ClipStopped:
    try:
        # Messages during a job ask to stop it.
        return maker.make(job, connection.send, connection.poll)
    except _StopAsked:
        connection.recv()
        return ClipStopped()
    except GulliverError as error:
        return Failed(str(error))
    except ConnectionError:
        raise
    except Exception as error:
        # Out of memory or an invalid picture: the next job may succeed.
        lines = str(error).strip().splitlines() or [""]
        return Failed(f"{type(error).__name__}: {lines[0][:300]}")


class ClipMaker:
    """Generates clips with the newest checkpoint of a run, or with a public model."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._model: Any = None
        self._checkpoint = ""

    def make(self, job: ClipJob, post: Post, stop_asked: Callable[[], bool]) -> ClipMade:
        started = time.monotonic()
        model = self._ready(post)
        request = request_of(job.settings)
        sampling = sampling_of(model, job.settings)
        notes = tuple(model.remarks(request))
        watch = _Watch(self._preview(request), post, stop_asked)
        video = model.generate([request], sampling, preview=watch)[0]
        fps = model.fps
        scale = max(1, SHOWN_SIDE // max(request.bucket.height, request.bucket.width))
        write_clip(job.path, video, fps, scale)
        seconds = round(time.monotonic() - started, 2)
        return ClipMade(job.path, self._checkpoint, fps, scale, seconds, notes)

    def _ready(self, post: Post) -> Any:
        """Returns the model; reloads it if there is a newer checkpoint."""
        run, source = self._source.run, self._source
        if run is None:
            if self._model is None:
                post(Loading())
                paths = source.model, source.autoencoder, source.text_encoder, source.clip
                self._model = VideoPipeline.load(*paths, keep=source.keep)  # type: ignore[arg-type]
                self._checkpoint = source.name
            return self._model
        newest = Run(run).newest_checkpoint().name
        if newest != self._checkpoint:
            post(Loading())
            # Never hold two models in memory.
            self._model, self._checkpoint = None, ""
            self._model = open_run(run)
            self._checkpoint = newest
        return self._model

    def _preview(self, request: Request) -> Callable[[Any], bytes] | None:
        """Returns the preview function; None if the autoencoder is not kept in memory."""
        if self._source.run is None and not self._source.keep:
            return None
        autoencoder, frames = self._model.autoencoder, request.bucket.frames

        def drawn(latents: Any) -> bytes:
            return animated(to_frames(autoencoder.decode(latents[:1], frames)[0]))

        return drawn


class _Watch:
    """Reports steps to the page, and ends sampling on request."""

    def __init__(
        self, draw: Callable[[Any], bytes] | None, post: Post, stop_asked: Callable[[], bool]
    ) -> None:
        self._draw, self._post, self._stop_asked = draw, post, stop_asked
        self._started = time.monotonic()

    def __call__(self, done: int, steps: int, latents: Any) -> None:
        if self._stop_asked():
            raise _StopAsked
        frames = None
        if self._draw is not None and done % -(-steps // PREVIEWS) == 0:
            frames = self._draw(latents)
        left = (time.monotonic() - self._started) / done * (steps - done)
        self._post(Sampling(done, steps, left, frames))


def request_of(settings: Settings) -> Request:
    bucket = Bucket(settings.frames, settings.height, settings.width)
    given = None if settings.picture is None else read_frames(settings.picture, 1)
    return Request(settings.prompt, bucket, settings.seed, given, settings.negative_prompt)


def sampling_of(model: Any, settings: Settings) -> SamplingConfig:
    """Returns sampling options; defaults are those of the model's release."""
    return replace(model.sampling, steps=settings.steps, guidance=settings.guidance)


def animated(frames: Any) -> bytes:
    """Encodes uint8 frames [T, H, W, 3] as a small animated GIF."""
    stride = -(-max(frames.shape[1:3]) // PREVIEW_SIDE)
    file = BytesIO()
    write_gif(file, frames[:, ::stride, ::stride], FPS)
    return file.getvalue()
