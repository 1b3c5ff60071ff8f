"""What the tests of the page share: a tiny run, and a process that does as its prompts say."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gulliver.app.worker import ClipMade, ClipStopped, Source
from gulliver.models import VideoAutoencoder
from gulliver.video import DataConfig, TrainConfig
from gulliver.video.config import AutoencoderConfig, OptimizerConfig
from gulliver.video.planned_training import train
from gulliver.video.public_models import save_autoencoder
from tests.references import FOLDER, computed_once


def make_run(folder: Path) -> Path:
    """Copies a run of one step: its clips show nothing, but everything about them is there."""
    return Path(shutil.copytree(_run(), folder / "run"))


@computed_once
def _run() -> Path:
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="gulliver-tests-")) / "app"
    folder.mkdir()
    torch.manual_seed(0)
    save_autoencoder(folder / "a.safetensors", VideoAutoencoder(width=8))
    config = TrainConfig(
        out=folder / "run",
        steps=1,
        data=DataConfig(shapes=("5x32x32", "1x32x32"), batch_size=1, clips=4),
        autoencoder=AutoencoderConfig(path=folder / "a.safetensors"),
        optimizer=OptimizerConfig(warmup=0),
    )
    train(config)
    return config.out


def obedient(connection: Connection, source: Source) -> None:
    """Takes jobs like the real one: prompts are "hold" until stopped, "die", or names of clips.

    A clip's seconds are the number of jobs that were done before.
    """
    done = 0
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        prompt = getattr(getattr(job, "settings", None), "prompt", None)
        if prompt == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif prompt == "hold":
            connection.recv()
            connection.send(ClipStopped())
        elif prompt is not None:
            connection.send(ClipMade(job.path, prompt, 8.0, 1, float(done)))
            done += 1


def stillborn(connection: Connection, source: Source) -> None:
    """Ends at once."""
    os._exit(3)
