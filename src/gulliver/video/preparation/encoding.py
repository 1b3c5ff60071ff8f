"""Encodes the clips of a table once, and stores latents and caption embeddings for training.

    parts = {"table": Path("clips.csv"), "autoencoder": Path("vae"), "out": Path("kept")}
    outcome = encode(EncodeConfig(**parts, shapes=("17x64x64",)))

The work is planned first: windows that are not stored yet, ordered by bucket and table, and split
into shards. A shard's name is a digest of the settings and its content, so an existing file is
always complete and correct: any number of ranks can continue an interrupted call, with bitwise
equal results. Clips are encoded one at a time, so that latents do not depend on other clips.

Start with `encode`, then `_Job`. The folder format and reading are in
`gulliver.video.kept_latents`.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gulliver.checkpoint.files import read_json, read_metadata, write_json, write_tensors
from gulliver.comm.collectives import any_rank, barrier, broadcast_object, gather_objects
from gulliver.comm.world import World, guard, init_world, together
from gulliver.data.clips import BrokenClip, Bucket
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError
from gulliver.io.files import atomic_file, hold, named_errors, remove_leftovers
from gulliver.jobs.display import Display, console
from gulliver.jobs.stop import StopRequest
from gulliver.models.autoencoders import Autoencoder
from gulliver.options import size_text
from gulliver.video.batches import OF_NO_SAMPLE, listing
from gulliver.video.config import DataConfig, EncodeConfig
from gulliver.video.kept_latents import (
    DTYPES,
    INDEX,
    SETTINGS,
    SHARDS,
    TEXTS,
    ClipWindow,
    EncoderRecord,
    LatentCache,
    Settings,
    Shard,
    digest,
    digests,
    folder_digest,
    weights_digest,
)
from gulliver.video.public_models import load_autoencoder
from gulliver.video.sources import make_dataset
from gulliver.video.text_encoders import CachedTextEncoder, load_text_encoder

AHEAD = 3
"""Number of clips decoded ahead."""
KEY = "gulliver"
Item = TypeVar("Item")
Made = TypeVar("Made")


class PlannedWindow(NamedTuple):
    """A window to encode: row of the table, bucket, and seed of the window."""

    row: int
    bucket: Bucket
    seed: int


@dataclass(frozen=True)
class PlannedShard:
    """A shard to write: its file, and its windows, all of one bucket."""

    file: str
    windows: list[tuple[ClipWindow, PlannedWindow]]


@dataclass(frozen=True)
class Encoded:
    """Result of `encode`."""

    # Number of stored windows of the table.
    windows: int
    # Number of windows that this call has tried to encode, on all ranks.
    made: int
    # Name and reason of each unreadable clip.
    broken: list[tuple[str, str]] = field(default_factory=list)
    # Whether everything is done; False after a signal.
    finished: bool = True


def encode(config: EncodeConfig) -> Encoded:
    """Stores latents and caption embeddings of a table; called on every rank.

    Raises:
        GulliverError: nothing can be encoded, the folder has other settings or is being written by
            another call, or the disk is full. Finished shards remain valid.
    """
    check_encode(config)
    world = init_world()
    with guard(), ExitStack() as held:
        autoencoder = load_autoencoder(config.autoencoder, dtype=torch.float32)
        job = _Job(config, autoencoder.to(world.device).eval(), world)
        with together():
            if world.is_main:
                _open_folder(config, job.settings, held)
        barrier()
        with StopRequest().listening() as stop:
            return job.run(stop)


def check_encode(config: EncodeConfig) -> EncodeConfig:
    if bool(config.shapes) == (config.buckets is not None):
        raise GulliverError(
            "neither or both of --shapes and --buckets are set; set exactly one of them, such as "
            "--shapes 17x64x64"
        )
    return config


def _open_folder(config: EncodeConfig, settings: Settings, held: ExitStack) -> None:
    """Creates the folder, or opens that of an earlier call, and locks it."""
    out = config.out
    with named_errors(out):
        (out / SHARDS).mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(hold(out))
    except BlockingIOError:
        raise GulliverError(f"{out} is being written by another call; wait until it ends") from None
    begun = read_json(out / SETTINGS) if (out / SETTINGS).is_file() else asdict(settings)
    differing = [
        f"{name} was {begun.get(name)}, is {value}"
        for name, value in asdict(settings).items()
        if begun.get(name) != value
    ]
    if differing:
        raise GulliverError(
            f"{out} has latents with other settings ({'; '.join(differing)}); choose another --out"
        )
    for folder in (out, out / SHARDS, out / TEXTS):
        remove_leftovers(folder)
    write_json(out / SETTINGS, asdict(settings))


class _Job:
    """A call of `encode` on one rank."""

    def __init__(self, config: EncodeConfig, autoencoder: Autoencoder, world: World) -> None:
        self.config, self.autoencoder, self.world = config, autoencoder, world
        self.settings = Settings(
            weights_digest(autoencoder),
            config.frame_interval,
            config.windows,
            config.dtype,
            config.shard_clips,
        )
        with together():
            self.table: ClipTable = broadcast_object(self._read_table() if world.is_main else None)
        with together():
            self.clips = self._digests()
        self.wanted = self._wanted()

    def _read_table(self) -> Any:
        """Opens the table on one rank, because the other ranks could see a changed folder."""
        config = self.config
        data = DataConfig(
            table=config.table,
            shapes=config.shapes or DataConfig.shapes,
            buckets=config.buckets,
            frame_interval=config.frame_interval,
            scores=config.scores,
            windows=config.windows,
        )
        return make_dataset(data, None, True, 0, self.autoencoder)

    def _digests(self) -> list[str]:
        """Returns the digest of each row's file; each rank reads its share."""
        rank, ranks = self.world.rank, self.world.size
        paths = [row.path for row in self.table.rows[rank::ranks]]
        with Display("reading clips", len(paths), enabled=self.world.is_main) as display:
            shares = gather_objects(digests(paths, display.advance))
        found = [""] * len(self.table)
        for number, share in enumerate(shares):
            found[number::ranks] = share
        return found

    def _wanted(self) -> dict[ClipWindow, PlannedWindow]:
        """Returns all distinct windows of the table, in the order of buckets and rows."""
        windows = [
            PlannedWindow(row, bucket, seed)
            for row in range(len(self.table))
            for bucket, seed in self.table.samples(row)
        ]
        windows.sort(key=lambda window: (window.bucket, window.row, window.seed))
        found: dict[ClipWindow, PlannedWindow] = {}
        for window in windows:
            start = self.table.first_frame(window.row, window.bucket, window.seed)
            found.setdefault(ClipWindow(self.clips[window.row], str(window.bucket), start), window)
        return found

    def run(self, stop: StopRequest) -> Encoded:
        with together():
            todo = broadcast_object(self._plan() if self.world.is_main else None)
        planned, old, missing = todo
        self._report_size(missing)
        with together():
            made = self._encode(missing[self.world.rank :: self.world.size], stop)
            text = self._encode_texts(stop)
        stopped = any_rank(stop.wanted, self.world.device)
        made = sum(gather_objects(made))
        outcome = Encoded(0, made, finished=False)
        with together():
            if self.world.is_main and not stopped:
                outcome = self._write_index(planned, old, text, made)
        outcome = broadcast_object(outcome)
        if self.world.is_main:
            self._report_end(outcome)
        return outcome

    def _plan(self) -> tuple[list[PlannedShard], list[Shard], list[PlannedShard]]:
        """Plans new shards; returns all shards, existing ones, and missing ones."""
        old: list[Shard] = []
        if (self.config.out / INDEX).is_file():
            kept = LatentCache(self.config.out)
            old = [shard for shard in kept.shards if _read_shard(self._file(shard.file))]
        known = {ClipWindow(clip, one.bucket, start) for one in old for clip, start in one.members}
        by_bucket: dict[Bucket, list[tuple[ClipWindow, PlannedWindow]]] = {}
        for sample, window in self.wanted.items():
            if sample not in known:
                by_bucket.setdefault(window.bucket, []).append((sample, window))
        size = self.config.shard_clips
        planned = [
            PlannedShard(self._name(part), part)
            for windows in by_bucket.values()
            for part in (windows[start : start + size] for start in range(0, len(windows), size))
        ]
        return planned, old, [one for one in planned if not _read_shard(self._file(one.file))]

    def _name(self, windows: list[tuple[ClipWindow, PlannedWindow]]) -> str:
        content = json.dumps([self.settings.fingerprint, [sample for sample, _ in windows]])
        return f"{digest(content.encode())}.safetensors"

    def _file(self, name: str) -> Path:
        return self.config.out / SHARDS / name

    def _encode(self, shards: list[PlannedShard], stop: StopRequest) -> int:
        total, made = sum(len(shard.windows) for shard in shards), 0
        ranks = self.world.size
        title = "encoding clips" if ranks == 1 else f"encoding clips, share of 1 of {ranks} ranks"
        with Display(title, total, enabled=self.world.is_main) as display:
            for shard in shards:
                if stop.wanted:
                    break
                try:
                    self._make(shard, display)
                except GulliverError as error:
                    raise GulliverError(
                        f"{error}; {made} of {total} windows of rank {self.world.rank} are "
                        "complete and kept; free some space and run the same command to continue"
                    ) from None
                made += len(shard.windows)
        return made

    @torch.no_grad()
    def _make(self, shard: PlannedShard, display: Display) -> None:
        rows: list[Tensor] = []
        members, broken = [], []
        dtype = DTYPES[self.settings.dtype]
        for (sample, _), clip in _ahead(self._read, shard.windows):
            display.advance()
            if isinstance(clip, BrokenClip):
                broken.append([sample.clip, sample.start, clip.reason])
                continue
            latents = self.autoencoder.encode(clip.video[None].to(self.world.device))
            rows.append(latents[0].to(dtype).cpu())
            members.append([sample.clip, sample.start])
        bucket = shard.windows[0][1].bucket
        latents = torch.stack(rows) if rows else torch.zeros(0, dtype=dtype)
        sums = [
            zlib.crc32(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for row in rows
        ]
        told = {"bucket": str(bucket), "members": members, "broken": broken, "sums": sums}
        write_tensors(self._file(shard.file), {"latents": latents}, {KEY: json.dumps(told)})

    def _read(self, item: tuple[ClipWindow, PlannedWindow]) -> Any:
        window = item[1]
        return self.table.read(window.row, window.seed, window.bucket)

    def _encode_texts(self, stop: StopRequest) -> EncoderRecord | None:
        folder = self.config.text_encoder
        if folder is None:
            return None
        encoder = load_text_encoder(folder, self.config.text_length, self.world.device)
        kept = CachedTextEncoder(encoder, self.config.out / TEXTS)
        captions = sorted({row.text for row in self.table.rows} | {OF_NO_SAMPLE})
        captions = captions[self.world.rank :: self.world.size]
        with Display("encoding captions", len(captions), enabled=self.world.is_main) as display:
            for caption in captions:
                if stop.wanted:
                    break
                kept.encode([caption])
                display.advance()
        files, path = folder_digest(folder), str(folder.absolute())
        return EncoderRecord(path, files, kept.fingerprint, kept.channels, kept.max_length)

    def _write_index(
        self, planned: list[PlannedShard], old: list[Shard], text: EncoderRecord | None, made: int
    ) -> Encoded:
        shards, broken = list(old), []
        for plan in planned:
            told = _read_shard(self._file(plan.file))
            assert told is not None, "a rank has written it"
            if told["members"]:
                shape = [len(told["members"]), *self._latent_shape(plan.windows[0][1].bucket)]
                shards.append(
                    Shard(plan.file, told["bucket"], shape, told["members"], told["sums"])
                )
            broken += [[clip, told["bucket"], start, why] for clip, start, why in told["broken"]]
        out, rows = self.config.out, self.table.rows
        buckets = self.config.buckets
        if buckets is not None:
            with atomic_file(out / f"buckets{buckets.suffix}") as partial:
                shutil.copyfile(buckets, partial)
        content = {
            "settings": asdict(self.settings),
            "autoencoder": str(self.config.autoencoder.absolute()),
            "scores": self.config.scores,
            "shapes": self.config.shapes,
            "buckets": None if buckets is None else f"buckets{buckets.suffix}",
            "text": None if text is None else asdict(text),
            "rows": [
                [row.name, row.text, clip, *asdict(row.probe).values()]
                for row, clip in zip(rows, self.clips, strict=True)
            ],
            "skipped": self.table.skipped,
            "broken": broken,
            "shards": [shard._asdict() for shard in shards],
        }
        write_json(out / INDEX, content, indent=None)
        named = {shard.file for shard in shards}
        for path in (out / SHARDS).iterdir():
            if path.name not in named:
                # Left by an interrupted call for another table, or has unreadable clips only.
                path.unlink()
        names = {
            rows[self.wanted[ClipWindow(clip, bucket, start)].row].name: why
            for clip, bucket, start, why in broken
        }
        return Encoded(len(self.wanted) - len(broken), made, sorted(names.items()))

    def _latent_shape(self, bucket: Bucket) -> tuple[int, ...]:
        return self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)

    def _report_size(self, missing: list[PlannedShard]) -> None:
        count = [(len(plan.windows), plan.windows[0][1].bucket) for plan in missing]
        itemsize = DTYPES[self.settings.dtype].itemsize
        needed = sum(n * prod(self._latent_shape(bucket)) * itemsize for n, bucket in count)
        free = shutil.disk_usage(self.config.out).free
        if self.world.is_main and needed > free:
            console().print(
                f"the latents need {size_text(needed)}, but only {size_text(free)} are free; "
                "encoding will stop when the disk is full, and can be continued"
            )

    def _report_end(self, outcome: Encoded) -> None:
        out, made = self.config.out, outcome.made
        if not outcome.finished:
            console().print(f"stopped after {made} windows; the same command continues in {out}")
            return
        console().print(f"{outcome.windows} windows are stored in {out}, {made} were encoded now")
        if outcome.broken:
            console().print(listing(set(outcome.broken)))


def _read_shard(path: Path) -> dict[str, Any] | None:
    """Reads a shard's metadata; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(read_metadata(path)[KEY])
    except (GulliverError, KeyError, ValueError):
        return None


def _ahead(function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[tuple[Item, Made]]:
    waiting: deque[tuple[Item, Any]] = deque()
    with ThreadPoolExecutor(AHEAD) as pool:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > AHEAD:
                first, made = waiting.popleft()
                yield first, made.result()
        for item, made in waiting:
            yield item, made.result()
