"""``gulliver data``: from a folder of clips to a table to train on. Options, then the actions.

Nothing here imports torch at its top: ``--help`` reads this module, and `filter` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from gulliver.options import Range
from gulliver.video import EncodeConfig

WORKERS = Range(0, 1024)
SHOWN = 10
"""Most files that are named on the terminal; all of them are in the list."""


@dataclass(frozen=True)
class Scan:
    """Makes a table of a folder's clips: what each file holds, and which cannot be used."""

    folder: tyro.conf.Positional[Path]
    """Folder of clips and pictures; folders in it count."""
    out: Path | None = None
    """Table to write, .parquet or .csv; by default clips.parquet in the folder."""
    decode: bool = False
    """Decode every frame, and not only where the header is in doubt."""
    again: bool = False
    """Look at all files anew, also those that the table has."""
    workers: Annotated[int, WORKERS] = 0
    """Threads; 0: one for each core."""


@dataclass(frozen=True)
class Filter:
    """Writes the rows of a table for which a condition holds."""

    table: tyro.conf.Positional[Path]
    """Table of clips, .parquet or .csv."""
    condition: tyro.conf.Positional[str]
    """SQL over columns, such as 'fps >= 12 and motion > 2'."""
    out: Path = Path("filtered.parquet")
    """Table to write."""


Action = (
    Annotated[Scan, tyro.conf.subcommand("scan", prefix_name=False)]
    | Annotated[Filter, tyro.conf.subcommand("filter", prefix_name=False)]
    | Annotated[EncodeConfig, tyro.conf.subcommand("encode", prefix_name=False)]
)


@dataclass(frozen=True)
class PrepareConfig:
    """Prepares clips for training: tables of what is in a folder, of what is good in it."""

    action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[Action]] = tyro.MISSING


def data_command(config: PrepareConfig, arguments: list[str]) -> int:
    """Runs one of the actions."""
    if isinstance(config.action, EncodeConfig):
        return encode_clips(config.action, arguments)
    return _COMMANDS[type(config.action)](config.action)


def scan_folder(options: Scan) -> int:
    """Scans; the exit code is 1 where no file can be used."""
    from gulliver.video.preparation import scan

    out = options.out or options.folder / "clips.parquet"
    found = scan(options.folder, out, options.decode, options.again, options.workers)
    seconds = sum(value or 0 for value in found.table.column("duration"))
    print(f"{out}: {_many(len(found.table), 'clip')}, {seconds / 60:.1f} minutes")
    notes = [
        (name, note)
        for name, note in zip(found.table.column("path"), found.table.column("note"), strict=True)
        if note
    ]
    _list(f"{_many(len(notes), 'clip')} with a note (column note)", notes)
    list_broken(out, found.broken)
    if found.ignored:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in found.ignored.most_common(8))
        print(f"{_many(found.ignored.total(), 'other file')} ignored: {kinds}")
    return 0 if len(found.table) else 1


def filter_rows(options: Filter) -> int:
    """Filters, and says how many rows are kept, dropped, and not known."""
    from gulliver.video.preparation import filter_file

    found = filter_file(options.table, options.condition, options.out)
    unknown = f", {found.unknown:,} unknown (a cell is empty)" if found.unknown else ""
    print(f"{options.out}: {_many(len(found.table), 'row')}; {found.dropped:,} dropped{unknown}")
    return 0


def encode_clips(options: EncodeConfig, arguments: list[str]) -> int:
    """Encodes, on ranks of this machine that are started where a launcher has not."""
    from gulliver.comm import default_ranks, launch, under_launcher
    from gulliver.video.preparation import check_encode, encode

    check_encode(options)
    ranks = options.ranks or default_ranks()
    if not under_launcher() and ranks > 1:
        return launch("gulliver.cli", ["data", *arguments], ranks)
    # Stopped by a signal: what was asked for is not there yet.
    return 0 if encode(options).finished else 143


def list_broken(table: Path, broken: Sequence[tuple[str, str]]) -> None:
    """Names the first of the files that could not be used, and where the others are listed."""
    from gulliver.video.preparation import broken_path

    _list(f"{_many(len(broken), 'file')} broken, listed in {broken_path(table)}", broken)


def _list(what: str, found: Sequence[tuple[str, str]]) -> None:
    if not found:
        return
    print(f"{what}:")
    for name, reason in found[:SHOWN]:
        print(f"  {name}: {reason}")
    if len(found) > SHOWN:
        print(f"  and {len(found) - SHOWN:,} more")


def _many(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


_COMMANDS: dict[type, Callable[[Any], int]] = {Scan: scan_folder, Filter: filter_rows}
