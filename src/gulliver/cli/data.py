"""`gulliver data`: turns a folder of clips into a training table, and suggests next commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from gulliver.cli.dispatch import STOPPED
from gulliver.options import Options, Range, part_of
from gulliver.video.config import CutSettings, EncodeConfig

if TYPE_CHECKING:
    from gulliver.video.config import TrainConfig


def hint(*words: object) -> None:
    print("next: gulliver " + shlex.join(map(str, words)), file=sys.stderr)


def after_train(config: TrainConfig) -> None:
    from gulliver.video.config import parse_shapes

    shape = next(iter(parse_shapes(config.data.shapes)))
    words = ["generate", "--run", config.out, "--prompt", "the digit 3 moving left"]
    if not config.data.made:
        words = [*words[:-1], "YOUR SENTENCE", "--frames", shape.frames]
        side = round((shape.height * shape.width) ** 0.5)
        words += ["--resolution", side, "--aspect-ratio", shape.aspect_ratio]
    hint(*words)
    hint("app", config.out)


# ``gulliver data``: turns a folder of clips into a training table. Options, then the actions.
#
# Nothing here imports torch at its top: ``--help`` reads this module, and `filter` needs none.

WORKERS = Range(0, 1024)
SCORERS = ("sharpness", "brightness", "motion", "text_share", "phash")
SHOWN = 10
"""Maximum number of unusable files shown on the terminal; the list file has all of them."""
Entries = Sequence[tuple[str, str]]
"""Files or clips, each with a reason."""


@dataclass(frozen=True)
class Scan(Options):
    """Creates a table of the clips in a folder: what each file contains, and which are unusable."""

    folder: tyro.conf.Positional[Path]
    """Folder of clips and images, searched recursively."""
    out: Path | None = None
    """Table to write, .parquet or .csv; by default clips.parquet in the folder."""
    decode: bool = False
    """Decode every frame of all files, not only of those with suspicious headers."""
    again: bool = False
    """Scan all files again, including those already in the table."""
    workers: Annotated[int, WORKERS] = 0
    """Number of threads; 0: one per core."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class OfTable(Options):
    """Options of commands that read a table of clips."""

    table: tyro.conf.Positional[Path]
    """Table of clips, .parquet or .csv."""
    workers: Annotated[int, WORKERS] = 0
    """Number of threads, processes or concurrent commands; 0: one per core."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Cut(CutSettings, OfTable):
    """Cuts videos into upright, silent clips of one scene each, at a constant frame rate."""

    out: Path = Path("cut.parquet")
    """Table to write; the clips go into a folder next to it, and unused parts are listed."""


@dataclass(frozen=True)
class Score(OfTable):
    """Adds a column for each scorer; rows that already have scores are skipped."""

    scorers: tuple[str, ...] = SCORERS
    """Names of scorers, built in or from plug-ins (entry points of the group gulliver.scorers)."""
    out: Path | None = None
    """Table to write; by default the input table."""
    again: bool = False
    """Score all rows again."""


@dataclass(frozen=True)
class Dedup(OfTable):
    """Removes duplicate clips, even re-encoded or rescaled ones; the best of them is kept."""

    out: Path = Path("unique.parquet")
    """Table to write; copies are listed in a file next to it."""
    alike: Annotated[float, Range(0.5, 1)] = 0.95
    """Minimum correlation of images at which clips count as duplicates."""


@dataclass(frozen=True)
class Caption(OfTable):
    """Writes captions with a command that prints a sentence, or with an image-captioning model."""

    command: str | None = None
    """Program and arguments; {path} is replaced by the clip's path, which is otherwise appended."""
    model: Path | None = None
    """Folder of a transformers model that describes images."""
    prompt: str = ""
    """Prompt for the model, or the beginning of its captions."""
    tokens: Annotated[int, Range(1, 4096)] = 64
    """Maximum number of tokens per caption."""
    seconds: Annotated[float, Range(0, 86400, open_below=True)] = 300
    """Time limit of the command for each clip, in seconds."""
    out: Path | None = None
    """Table to write; by default the input table."""
    again: bool = False
    """Replace existing captions."""


@dataclass(frozen=True)
class Show(OfTable):
    """Creates a web page of a table: histograms and images, in one file."""

    out: Path = Path("clips.html")
    """Page to write."""
    most: Annotated[int, Range(1, 100_000)] = 200
    """Maximum number of clips shown, evenly spaced."""


@dataclass(frozen=True)
class Filter(Options):
    """Writes the rows of a table that satisfy a condition."""

    table: tyro.conf.Positional[Path]
    """Table of clips, .parquet or .csv."""
    condition: tyro.conf.Positional[str]
    """SQL expression over columns, such as 'fps >= 12 and motion > 2'."""
    out: Path = Path("filtered.parquet")
    """Table to write."""
    json: bool = False
    """Print JSON."""


def scan_folder(options: Scan) -> int:
    """Scans; the exit code is 1 if no file can be used."""
    from gulliver.video.preparation.scanning import scan

    out = options.out or options.folder / "clips.parquet"
    found = scan(options.folder, out, options.decode, options.again, options.workers)
    seconds = sum(value or 0 for value in found.table.column("duration"))
    named = zip(found.table.column("path"), found.table.column("note"), strict=True)
    notes = [(name, note) for name, note in named if note]
    noted = f"{_many(len(notes), 'clip')} with a note (column note)", notes
    line = f"{out}: {_many(len(found.table), 'clip')}, {seconds / 60:.1f} minutes"
    counts = {"clips": len(found.table), "seconds": seconds, "ignored": found.ignored}
    broken = _broken(out, "scan", found.broken)
    _report(options.json, out, line, counts, notes=noted, broken=broken)
    if found.ignored and not options.json:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in found.ignored.most_common(8))
        print(f"{_many(found.ignored.total(), 'other file')} ignored: {kinds}")
    if len(found.table):
        hint("data", "cut", out, "--out", "clips/clips.parquet")
        hint("data", "score", out)
    return 0 if len(found.table) else 1


def cut_scenes(options: Cut) -> int:
    from gulliver.video.preparation.cutting import cut
    from gulliver.video.preparation.table import Table

    settings = part_of(options, CutSettings)
    found = cut(Table.read(options.table), options.out, settings, options.workers)
    heading = f"{_many(len(found.left_out), 'piece')} left out, listed in {found.listed}"
    left = heading, [(one.span, one.reason) for one in found.left_out]
    line = f"{options.out}: {_many(len(found.table), 'clip')} of {_many(found.sources, 'video')}"
    counts = {"clips": len(found.table), "videos": found.sources}
    _report(options.json, options.out, line, counts, left_out=left)
    if len(found.table):
        hint("data", "score", options.out)
    return 0 if len(found.table) else 1


def filter_rows(options: Filter) -> int:
    from gulliver.video.preparation.filtering import filter_file

    found = filter_file(options.table, options.condition, options.out)
    unknown = f", {found.unknown:,} unknown (a cell is empty)" if found.unknown else ""
    line = f"{options.out}: {_many(len(found.table), 'row')}; {found.dropped:,} dropped{unknown}"
    counts = {"rows": len(found.table), "dropped": found.dropped, "unknown": found.unknown}
    _report(options.json, options.out, line, counts)
    hint("data", "show", options.out)
    return 0


def score_clips(options: Score) -> int:
    from gulliver.video.preparation.scoring import score
    from gulliver.video.preparation.table import Table

    table, out = Table.read(options.table), options.out or options.table
    found = score(table, options.scorers, out, options.again, options.workers)
    line = _fresh_line(out, found.fresh, found.whole, len(found.table), "scored")
    counts = {"rows": len(found.table), "new": found.fresh, "scored": found.whole}
    _report(options.json, out, line, counts, broken=_broken(out, "score", found.broken))
    hint("data", "dedup", out, "--out", out.with_stem("unique"))
    return 0


def drop_copies(options: Dedup) -> int:
    from gulliver.video.preparation.deduplication import deduplicate
    from gulliver.video.preparation.table import Table

    found = deduplicate(Table.read(options.table), options.out, options.alike, options.workers)
    heading = f"{_many(len(found.pairs), 'copy', 'copies')} removed, listed in {found.listed}"
    copies = heading, [(pair.dropped, f"copy of {pair.kept}") for pair in found.pairs]
    line, counts = f"{options.out}: {_many(len(found.table), 'clip')}", {"clips": len(found.table)}
    broken = _broken(options.out, "dedup", found.broken)
    _report(options.json, options.out, line, counts, copies=copies, broken=broken)
    hint("data", "filter", options.out, "fps >= 12 and motion > 2")
    return 0


def caption_clips(options: Caption) -> int:
    from gulliver.video.preparation.captions import caption
    from gulliver.video.preparation.table import Table

    table, out = Table.read(options.table), options.out or options.table
    settings = options.command, options.model, options.prompt, options.tokens, options.seconds
    found = caption(table, out, *settings, options.again, options.workers)
    done = found.fresh - len(found.broken)
    line = _fresh_line(out, found.fresh, done, len(found.table), "captioned")
    counts = {"rows": len(found.table), "new": found.fresh, "captioned": done}
    _report(options.json, out, line, counts, broken=_broken(out, "caption", found.broken))
    hint("data", "show", out)
    return 0


def show_clips(options: Show) -> int:
    from gulliver.video.preparation.pages import show
    from gulliver.video.preparation.table import Table

    table = Table.read(options.table)
    shown = show(table, options.out, options.most, options.workers)
    line = f"{options.out}: {shown:,} of {_many(len(table), 'clip')}, open it in a browser"
    _report(options.json, options.out, line, {"clips": len(table), "shown": shown})
    hint("train", "--data.table", options.table, "--data.shapes", "17x64x64", "--out", "runs/mine")
    return 0


def _fresh_line(out: Path, fresh: int, whole: int, rows: int, done: str) -> str:
    before = f" ({rows - fresh:,} had it before: --again replaces)" if fresh < rows else ""
    return f"{out}: {whole:,} of {_many(rows, 'clip')} {done}{before}"


def encode_clips(options: EncodeConfig, arguments: list[str]) -> int:
    """Encodes, starting ranks on this machine if no launcher has done so."""
    from gulliver.comm.launcher import default_ranks, launch, under_launcher
    from gulliver.video.preparation.encoding import check_encode, encode

    check_encode(options)
    ranks = options.ranks or default_ranks()
    if not under_launcher() and ranks > 1:
        code = launch("gulliver.cli", arguments, ranks)
    else:
        # Stopped by a signal: the result is not complete.
        code = 0 if encode(options).finished else STOPPED
    if code == 0 and not under_launcher():
        hint("train", "--data.encoded", options.out, "--out", "runs/mine")
    return code


def _broken(table: Path, step: str, broken: Entries) -> tuple[str, Entries]:
    from gulliver.video.preparation.table import broken_path

    heading = f"{_many(len(broken), 'file')} that {step} cannot use, listed in {broken_path(table)}"
    return heading, broken


def _report(
    as_json: bool, out: Path, line: str, counts: Mapping[str, object], **lists: tuple[str, Entries]
) -> None:
    from gulliver.jobs.display import print_json

    if as_json:
        plain = {k: [{"name": a, "reason": b} for a, b in v] for k, (_, v) in lists.items()}
        print_json({"out": out, **counts, **plain})
        return
    print(line)
    for heading, entries in lists.values():
        if entries:
            print(f"{heading}:")
        for name, reason in entries[:SHOWN]:
            print(f"  {name}: {reason}")
        if len(entries) > SHOWN:
            print(f"  and {len(entries) - SHOWN:,} more")


def _many(count: int, name: str, several: str | None = None) -> str:
    return f"{count:,} {name if count == 1 else several or name + 's'}"
