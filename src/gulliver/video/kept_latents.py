"""Latents and caption embeddings stored by `gulliver data encode`, and their use in training.

FOLDER/
  settings.json              settings of the latents; written first
  shards/DIGEST.safetensors  latents of up to `shard_clips` windows of one bucket, [N, C, t, h, w]
  texts/                     caption embeddings, as stored by `CachedTextEncoder`
  buckets.*                  the bucket configuration, if there was one
  index.json                 rows of the table, location of each window, broken clips; written last
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json
from gulliver.data.buckets import BucketConfig
from gulliver.data.clips import Bucket
from gulliver.data.table import ClipTable, Probe, TableRow
from gulliver.errors import GulliverError
from gulliver.io.files import named_errors
from gulliver.options import Options

FORMAT = 1
PART = 1 << 16
"""Bytes of each part of a file that enters its digest."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SETTINGS, INDEX, SHARDS, TEXTS = "settings.json", "index.json", "shards", "texts"
AGAIN = "run gulliver data encode again"


# [Note: fingerprints] A window is identified by a digest of the file, the bucket and the first
# frame. Its latents depend on these and on the settings (weights of the autoencoder, frame
# interval, crop, dtype ...). Paths and times do not matter, so both folders may be moved. The
# digest of a clip covers its size and its first, middle and last 64 KiB (all of a small file):
# reading thousands of films completely just to find that nothing has changed would cost as much as
# encoding them. A video's index and sample table are at its start or end, and change with every
# encoding.
#
# Shards instead of a file per clip: file systems do not handle a million files well, and an
# interrupted rank loses at most one shard. They are read with `pread` and not mapped: a window is
# contiguous in a file, and a shard truncated during training is an error of one clip instead of a
# SIGBUS.
#
# Start with `LatentCache`, then `EncodedTable`. `preparation/encoding.py` writes the files.
class ClipWindow(NamedTuple):
    """A window of a clip: the digest of its file, its bucket, and its first frame."""

    clip: str
    bucket: str
    start: int


@dataclass(frozen=True)
class Settings(Options):
    """Settings on which latents depend, in addition to the clip."""

    autoencoder: str
    frame_interval: int = 1
    windows: int = 1
    dtype: str = "float32"
    shard_clips: int = 32
    crop: str = "scaled to cover, bilinear with antialias, center crop"
    pixels: str = "-1 to 1"
    posterior: str = "mean"
    normalisation: str = "the autoencoder's own"
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        return digest(json.dumps(asdict(self), sort_keys=True).encode())


def digest(*parts: bytes) -> str:
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    """Returns a digest of a file's size and its first, middle and last part."""
    with named_errors(path, "read"), path.open("rb") as file:
        size = file.seek(0, 2)
        starts = {0, PART, 2 * PART} if size <= 3 * PART else {0, (size - PART) // 2, size - PART}
        found = [str(size).encode()]
        for start in sorted(starts):
            file.seek(start)
            found.append(file.read(PART))
    return digest(*found)


def folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return digest(*(f"{path.name} {file_digest(path)}\n".encode() for path in files))


def weights_digest(autoencoder: Any) -> str:
    """Returns an autoencoder's class, and a digest of its weights and constants."""
    # Weights count as float32, which is used for encoding, whatever their dtype in the file.
    total = hashlib.blake2b(digest_size=16)
    constants = {n: v for n, v in vars(autoencoder).items() if n[0] != "_" and _is_plain(v)}
    constants.pop("training", None)
    total.update(json.dumps([constants, autoencoder.compression], sort_keys=True).encode())
    for name, value in sorted(autoencoder.state_dict().items()):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
        total.update(f"{name} {tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    module = (
        autoencoder.module
        if isinstance(autoencoder, nn.Module) and hasattr(autoencoder, "module")
        else autoencoder
    )
    return f"{type(module).__name__} {total.hexdigest()}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True)
class EncoderRecord:
    """Stored text encoder data: its fingerprint, and the digest of its files."""

    path: str
    files: str
    fingerprint: str
    channels: int
    max_length: int


class Shard(NamedTuple):
    """A shard: its file, bucket, tensor shape, and clip and first frame of each row."""

    # `sums` is the CRC-32 of each row.

    file: str
    bucket: str
    shape: list[int]
    members: list[list[Any]]
    sums: list[int]


class LatentCache:
    """A folder of stored latents, read by window."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / INDEX).is_file():
            begun = (folder / SETTINGS).is_file()
            problem = (
                f"is not finished; {AGAIN} to continue" if begun else "holds no stored latents"
            )
            raise GulliverError(f"--data.encoded {folder} {problem}")
        content = read_json(folder / INDEX)
        if not isinstance(content, dict) or content.get("settings", {}).get("format") != FORMAT:
            raise GulliverError(f"{folder / INDEX} is not an index of this version; {AGAIN}")
        self.settings = Settings(**content["settings"])
        self.content = content
        self.shards = [Shard(**shard) for shard in content["shards"]]
        self.broken = {ClipWindow(*sample): reason for *sample, reason in content["broken"]}
        self._places = {
            ClipWindow(clip, shard.bucket, start): (shard, row)
            for shard in self.shards
            for row, (clip, start) in enumerate(shard.members)
        }

    @property
    def text(self) -> EncoderRecord | None:
        return EncoderRecord(**self.content["text"]) if self.content["text"] else None

    @property
    def buckets_path(self) -> Path | None:
        name = self.content["buckets"]
        return self.folder / name if name else None

    def __contains__(self, sample: ClipWindow) -> bool:
        return sample in self._places

    def read(self, sample: ClipWindow) -> Tensor:
        """Reads the latents of a window, [C, t, h, w] in float32."""
        if sample not in self._places:
            raise GulliverError(self.broken.get(sample, f"no latents are stored in {self.folder}"))
        shard, row = self._places[sample]
        dtype = DTYPES[self.settings.dtype]
        size = prod(shard.shape[1:]) * dtype.itemsize
        path = self.folder / SHARDS / shard.file
        with named_errors(path, "read"), path.open("rb") as file:
            # A safetensors file of one tensor: header length, header, tensor.
            (header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if file.seek(0, 2) != 8 + header + shard.shape[0] * size:
                raise GulliverError(f"{path} is truncated or was replaced; {AGAIN}")
            file.seek(8 + header + row * size)
            found = bytearray(file.read(size))
        if zlib.crc32(found) != shard.sums[row]:
            raise GulliverError(
                f"{path} is damaged (wrong checksum of window {row}); remove it and {AGAIN}"
            )
        return torch.frombuffer(found, dtype=dtype).view(shard.shape[1:]).float()

    def refuse_differences(self, asked: dict[str, Any]) -> None:
        known = {**asdict(self.settings), "scores": self.content["scores"]}
        wrong = [
            f"{name} is {value} in this run, but {known[name]} in the latents"
            for name, value in asked.items()
            if value != known[name]
        ]
        if wrong:
            raise GulliverError(f"--data.encoded {self.folder} does not match: {'; '.join(wrong)}")


class EncodedTable(ClipTable):
    """Clips with stored latents: the `video` of a sample holds its latents."""

    # Rows, order and windows are those of the encoded `ClipTable`, so that training on latents uses
    # the same samples as training on clips.

    encoded = True

    def __init__(
        self,
        kept: LatentCache,
        buckets: Sequence[Bucket] | BucketConfig,
        seed: int,
        table: ClipTable | None = None,
    ) -> None:
        self.kept = kept
        if table is None:
            self._pop_rows(kept, buckets, seed)
        else:
            vars(self).update(vars(copy.copy(table)))
            paths = [row.path for row in self.rows]
            self.clips = dict(zip((row.name for row in self.rows), digests(paths), strict=True))
        self._refuse_missing()

    def _pop_rows(
        self, kept: LatentCache, buckets: Sequence[Bucket] | BucketConfig, seed: int
    ) -> None:
        self.table, self.frame_interval = kept.folder, kept.settings.frame_interval
        self.scores, self.windows, self.seed = kept.content["scores"], kept.settings.windows, seed
        self.buckets = buckets if isinstance(buckets, BucketConfig) else tuple(buckets)
        self.rows, self.clips, self._broken, self._misstated = [], {}, {}, {}
        self.skipped = [(name, reason) for name, reason in kept.content["skipped"]]
        for name, text, clip, *probe in kept.content["rows"]:
            row = TableRow(name, Path(name), text, Probe(*probe), None)
            try:
                self.rows.append(replace(row, bucket=self._choose(row.probe)))
            except GulliverError as error:
                self.skipped.append((name, str(error)))
            self.clips[name] = clip
        if not self.rows:
            raise GulliverError(f"{kept.folder} has no clip that fits the shapes of this run")
        self._deal_rows()

    def sample(self, index: int, bucket: Bucket, seed: int) -> ClipWindow:
        start = self.first_frame(index, bucket, seed)
        return ClipWindow(self.clips[self.rows[index].name], str(bucket), start)

    def _content(self, index: int, bucket: Bucket, seed: int) -> Tensor:
        return self.kept.read(self.sample(index, bucket, seed))

    def _refuse_missing(self) -> None:
        wanted = [
            (row.name, self.sample(index, *choice))
            for index, row in enumerate(self.rows)
            for choice in self.samples(index)
        ]
        kept, broken = self.kept, self.kept.broken
        missing = [one for one in wanted if one[1] not in kept and one[1] not in broken]
        if not missing:
            return
        clips = {sample.clip for sample in kept._places} | {sample.clip for sample in broken}
        strange = [name for name, sample in missing if sample.clip not in clips]
        which = f"{len(missing)} of {len(wanted)} windows of clips"
        if strange:
            problem = f"clip {strange[0]!r} is new or was changed"
        else:
            name, sample = missing[0]
            shapes = ", ".join(sorted({shard.bucket for shard in kept.shards}))
            problem = f"clip {name!r} is stored with other shapes than {sample.bucket} ({shapes})"
        raise GulliverError(
            f"--data.encoded {kept.folder} lacks latents of {which}: {problem}; {AGAIN}"
        )


def digests(paths: Iterable[Path], progress: Callable[[], None] | None = None) -> list[str]:
    """Computes digests of files in parallel; an unreadable file gets the digest of its name."""
    with ThreadPoolExecutor(8) as pool:
        found = []
        for one in pool.map(_digest_of_any, paths):
            found.append(one)
            if progress is not None:
                progress()
        return found


def _digest_of_any(path: Path) -> str:
    try:
        return file_digest(path)
    except GulliverError:
        return digest(b"unreadable", str(path).encode())
