"""Options of `gulliver data encode`: a frozen dataclass, which is also the command line.

Nothing here imports torch at the top, nor may it: ``--help`` reads this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gulliver.options import AT_LEAST_1, RANKS, Options, Range


@dataclass(frozen=True)
class EncodeConfig(Options):
    """Keeps the latents of a table's clips, and what their captions say, for training."""

    table: tyro.conf.Positional[Path]
    """CSV or Parquet table of clips (columns path, text), or a folder of clips."""
    autoencoder: Path
    """Folder or file of the autoencoder."""
    out: Path
    """Folder for the latents; what an earlier call began there is continued."""
    text_encoder: Path | None = None
    """Folder of the T5 that reads captions; without one no texts are kept."""
    text_length: Annotated[int, Range(1, 4096)] = 300
    """Longest caption in tokens of --text-encoder."""
    shapes: tuple[str, ...] = ()
    """Clip shapes as frames x height x width, such as 17x64x64; in place of --buckets."""
    buckets: Path | None = None
    """Bucket configuration of a public trainer: every bucket that a clip may come to is kept."""
    frame_interval: Annotated[int, Range(1, 10_000)] = 1
    """Take every n-th frame of a video."""
    windows: Annotated[int, Range(1, 10_000)] = 1
    """Windows of each longer clip, evenly spread, one of which an epoch takes."""
    scores: Literal["none", "1.2", "1.3", "2.0"] = "none"
    """Put the table's scores into captions, as `gulliver train --data.scores`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the kept latents; float32 trains as clips do, the others take half the disk."""
    shard_clips: Annotated[int, AT_LEAST_1] = 32
    """Windows of a file; what is killed loses at most one file per rank."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU. Ignored under torchrun."""
