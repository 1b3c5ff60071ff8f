"""Kept latents: the same bytes after any end, and the training of clips that are encoded anew."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint import read_tensors, save_huggingface
from gulliver.comm import World
from gulliver.data import Bucket, BucketConfig, ClipTable
from gulliver.errors import GulliverError
from gulliver.models import STDiT3, VideoAutoencoder
from gulliver.video import (
    AutoencoderConfig,
    DataConfig,
    EncodeConfig,
    FlowConfig,
    KeptLatents,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
    load_autoencoder,
    save_autoencoder,
    train,
)
from gulliver.video._kept_latents import Sample, file_digest
from gulliver.video._run import Run
from gulliver.video.preparation import Encoded, encode
from tests.patience import patient
from tests.pool import Pool
from tests.test_data import write_table, write_video
from tests.test_text_encoders import save_t5

SHAPES = ("5x32x32", "9x16x16", "1x32x32")
CAPTIONS = ("a cat", "the cat runs", "a cat on the roof")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder, and a table of clips longer than a window, a broken one and a twin."""
    root = tmp_path_factory.mktemp("parts")
    for seed in (3, 4):
        torch.manual_seed(seed)
        save_autoencoder(root / f"vae{seed}.safetensors", VideoAutoencoder(width=8))
    rows = []
    for number in range(9):
        frames, side = ((8, 32), (12, 16), (1, 32))[number % 3]
        write_video(root / f"{number}.mp4", frames + number // 3, side, side)
        rows.append({"path": f"{number}.mp4", "text": CAPTIONS[number % 3]})
    shutil.copy(root / "0.mp4", root / "twin.mp4")
    (root / "broken.mp4").write_bytes((root / "3.mp4").read_bytes()[:900])
    stated = {"num_frames": "9", "height": "32", "width": "32", "fps": "8"}
    empty = dict.fromkeys(stated, "")
    rows = [row | empty for row in rows]
    rows.append({"path": "twin.mp4", "text": "a cat"} | empty)
    rows.append({"path": "broken.mp4", "text": "the cat"} | stated)
    write_table(root, rows)
    return root


def options(parts: Path, out: Path, **changes: Any) -> EncodeConfig:
    config = EncodeConfig(
        table=parts / "clips.csv",
        autoencoder=parts / "vae3.safetensors",
        out=out,
        shapes=SHAPES,
        windows=3,
        shard_clips=2,
    )
    return replace(config, **changes)


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def kept(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "kept"
    encode(options(parts, out))
    return out


def test_what_is_kept_is_what_the_autoencoder_says_of_each_window(parts: Path, kept: Path) -> None:
    latents, coder = KeptLatents(kept), load_autoencoder(parts / "vae3.safetensors")
    buckets = [Bucket(5, 32, 32), Bucket(9, 16, 16), Bucket(1, 32, 32)]
    seen = 0
    for number in range(9):
        bucket = buckets[number % 3]
        table = ClipTable(parts / "clips.csv", [bucket])
        index = next(n for n, row in enumerate(table.rows) if row.name == f"{number}.mp4")
        last = table.rows[index].probe.frames - bucket.frames
        for start in {0, last // 2, last}:
            clip: Any = table.read(index, start)
            with torch.no_grad():
                wanted = coder.encode(clip.video[None])[0]
            sample = Sample(file_digest(parts / f"{number}.mp4"), str(bucket), start)
            assert torch.equal(latents.read(sample), wanted)
            seen += 1
    # The twin has the windows of its first; one cannot be read, in each of its windows.
    assert sum(len(shard.members) for shard in latents.shards) == seen
    assert {sample.clip for sample in latents.broken} == {file_digest(parts / "broken.mp4")}


def _encode(world: World, config: EncodeConfig) -> Encoded:
    return encode(config)


def test_any_number_of_ranks_and_a_call_after_the_end_leave_the_same_bytes(
    pool: Pool, parts: Path, kept: Path, tmp_path: Path
) -> None:
    whole = bytes_of(kept)
    for ranks in (2, 3):
        outcomes = pool.run(_encode, ranks, options(parts, tmp_path / str(ranks)))
        assert bytes_of(tmp_path / str(ranks)) == whole
        assert len({outcome.made for outcome in outcomes}) == 1
    again = encode(options(parts, kept))
    assert bytes_of(kept) == whole
    assert [name for name, _ in again.broken] == ["broken.mp4"] * len(again.broken)
    assert again.made == len(again.broken)  # tried again, and nothing else


def _start(config: EncodeConfig, kill_after: int) -> subprocess.Popen:
    """Starts a call that is to be killed when it has made so many shards."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from gulliver.options import from_plain\n"
        "from gulliver.video.preparation import EncodeConfig, _encode as room\n"
        "write, left = room.write_tensors, [int(sys.argv[2])]\n"
        "def counted(*told):\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    left[0] -= 1; write(*told)\n"
        "room.write_tensors = counted\n"
        "room.encode(eval(sys.argv[1], {**vars(room), **vars(__import__('pathlib'))}))\n"
    )
    command = [sys.executable, "-c", code, repr(config), str(kill_after)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
