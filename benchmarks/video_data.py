"""Data preparation on a mess of clips, with the truth known: what it finds, loses, and costs.

`tests/video/messy_clips.py` makes the mess: real and generated scenes joined, copied, broken,
turned, of variable rate, in odd codecs. *cuts*: where scenes begin, against where they were joined,
and whether each frame of each file ends in a clip or in the list of what is left out. *dedup*:
copies, against what was copied. *filter*: a table of 100,000 rows through the command, compared
with pandas and a loop over PyArrow's rows. Thresholds are defaults.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tests.video.messy_clips import Mess, make_mess

from benchmarks._harness import Report, alternate, at_least, at_most, finish
from gulliver.data.clips import upright_frames
from gulliver.errors import GulliverError
from gulliver.video.config import CutSettings
from gulliver.video.preparation import Table, cut, scan
from gulliver.video.preparation.cutting import CutReport
from gulliver.video.preparation.deduplication import deduplicate

Part = Literal["cuts", "dedup", "filter"]
PARTS: tuple[Part, ...] = ("cuts", "dedup", "filter")
NEAR = 2  # Frames that a cut may be found too early or too late
RIGHT = 0.95
FILTER_S = 2.0
CONDITION = "fps >= 12 and motion > 2 and text like '%7%'"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    parts: tuple[Part, ...] = PARTS  # Parts to run
    clips: int = 200  # Files of the mess
    seed: int = 1000  # Seed of the mess
    rows: int = 100_000  # Rows of the table that is filtered
    rounds: int = 3  # Turns of each contestant
    workers: int = 0  # Processes or threads; 0: one for each core
    folder: Path = Path("out")  # Folder on the disk that is used; what is written there is removed
    keep: bool = False  # Write benchmarks/results


@dataclass(frozen=True)
class Bench:
    """Options, the folder of this run, and the mess in it."""

    options: Options
    folder: Path

    def mess(self) -> Mess:
        """Makes the mess, once."""
        folder = self.folder / "mess"
        if folder not in _made:
            _made[folder] = make_mess(folder, self.options.clips, self.options.seed)
        return _made[folder]


_made: dict[Path, Mess] = {}


# --- cuts ----------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Cuts of all files: true ones, found ones, true ones that were found, and those exactly."""

    true: int = 0
    found: int = 0
    met: int = 0
    exact: int = 0

    def add(self, true: tuple[int, ...], found: list[int]) -> None:
        """Adds a file; a found cut meets one true one at most."""
        self.true, self.found = self.true + len(true), self.found + len(found)
        left = list(found)
        for cut_at in true:
            near = [at for at in left if abs(at - cut_at) <= NEAR]
            if near:
                best = min(near, key=lambda at: abs(at - cut_at))
                left.remove(best)
                self.met, self.exact = self.met + 1, self.exact + (best == cut_at)

    @property
    def recall(self) -> float:
        """Share of the true cuts that were found."""
        return self.met / max(1, self.true)

    @property
    def precision(self) -> float:
        """Share of the found cuts that are true."""
        return self.met / max(1, self.found)


def spans_of(report: CutReport) -> dict[str, list[tuple[int, int]]]:
    """Returns first frame and end of all that became of each file; of what is broken, none."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in report.table.data.to_pylist():
        name = Path(row["source"]).name
        spans.setdefault(name, []).append((row["source_first"], row["source_end"]))
    for one in report.left_out:
        whole = spans.setdefault(one.path, [])
        if one.first is not None and one.end is not None:
            whole.append((one.first, one.end))
    return {name: sorted(found) for name, found in spans.items()}


def lost(mess: Mess, spans: dict[str, list[tuple[int, int]]]) -> int:
    """Counts files of which a frame is neither in a clip nor in the list."""
    count = 0
    for clip in mess.clips:
        held = np.zeros(clip.frames, bool)
        for first, end in spans.get(clip.path, []):
            held[first:end] = True
        count += clip.path not in spans or not held.all()
    return count


def wrong_files(report: CutReport) -> int:
    """Counts clips that hold other numbers of frames, or sizes, than the table says."""
    count = 0
    for row in report.table.data.to_pylist():
        try:
            found = list(upright_frames(report.table.path.parent / row["path"]))
            size = found[0].height, found[0].width
            count += (len(found), *size) != (row["num_frames"], row["height"], row["width"])
        except (GulliverError, IndexError):
            count += 1
    return count


def cuts(bench: Bench) -> Report:
    made = Report("video_data-cuts", "Scenes of a mess of clips", ())
    made.columns = ("detector", "true cuts", "found", "recall", "precision", "on the frame")
    mess = bench.mess()
    for detector in ("adaptive", "content"):
        settings = CutSettings(detector=detector)
        out = bench.folder / f"{detector}.parquet"
        report = cut(Table.read(mess.table), out, settings, bench.options.workers)
        spans, counts = spans_of(report), Counts()
        for clip in mess.whole:
            counts.add(clip.cuts, [first for first, _ in spans.get(clip.path, []) if first > 0])
        shares = [f"{share:.4f}" for share in (counts.recall, counts.precision)]
        on_frame = f"{counts.exact / max(1, counts.met):.4f}"
        made.rows.append((detector, str(counts.true), str(counts.found), *shares, on_frame))
        figures = {"clips": len(report.table), "left out": len(report.left_out), **vars(counts)}
        made.figures[detector] = figures
        if detector == "adaptive":
            broken = sum(bool(clip.broken) for clip in mess.clips)
            listed = sum(one.first is None for one in report.left_out)
            made.bars = [
                at_least(f"cuts found within {NEAR} frames", counts.recall, RIGHT),
                at_least("found cuts that are true", counts.precision, RIGHT),
                at_most("files lost silently", lost(mess, spans), 0),
                at_most("clips that are not as the table says", wrong_files(report), 0),
                at_most("broken files not listed, or others listed", abs(listed - broken), 0),
            ]
    made.notes = [
        f"{len(mess.clips)} files of seed {bench.options.seed}, "
        f"{sum(bool(clip.broken) for clip in mess.clips)} of them broken. Thresholds are those of "
        "PySceneDetect: on seeds 0 to 4 the best of twenty settings was 0.5 % better."
    ]
    return made


# --- dedup ---------------------------------------------------------------------------------------


def dedup(bench: Bench) -> Report:
    mess, workers = bench.mess(), bench.options.workers
    table = scan(mess.folder, bench.folder / "dedup.parquet", workers=workers).table
    found = deduplicate(table, bench.folder / "unique.parquet", workers=workers)
    original = {clip.path: clip.original for clip in mess.clips}
    pairs = [(Path(pair.kept).name, Path(pair.dropped).name) for pair in found.pairs]
    right = sum(original[kept] == original[dropped] for kept, dropped in pairs)
    groups = {clip.original for clip in mess.whole}
    copies = len(mess.whole) - len(groups)
    known = {Path(name).name for name in table.column("path")}
    broken = {Path(name).name for name, _ in found.broken}
    stay = {Path(name).name for name in found.table.column("path")}
    gone = known - stay - broken - {dropped for _, dropped in pairs}
    made = Report("video_data-dedup", "Copies in a mess of clips", ())
    made.columns = ("files", "copies", "left out", "of these copies")
    made.rows = [(str(len(mess.clips)), str(copies), str(len(pairs)), str(right))]
    made.figures = {"copies": copies, "dropped": len(pairs), "right": right}
    made.bars = [
        at_least("copies found", right / max(1, copies), RIGHT),
        at_least("left out that are copies", right / max(1, len(pairs)), RIGHT),
        at_most("files lost silently", len(gone), 0),
        at_most("whole files that scan does not know", _unknown(mess, known), 0),
    ]
    return made


def _unknown(mess: Mess, known: set[str]) -> int:
    return sum(clip.path not in known for clip in mess.whole)


# --- filter --------------------------------------------------------------------------------------


def filter_rows(bench: Bench) -> Report:
    path, rows = bench.folder / "large.parquet", bench.options.rows
    write_large(path, rows)
    command = [sys.executable, "-m", "gulliver.cli", "data", "filter", str(path), CONDITION]
    kept: dict[str, int] = {}

    def ours() -> float:
        out, begun = bench.folder / "ours.parquet", time.perf_counter()
        run = [*command, "--out", str(out)]
        subprocess.run(run, check=True, capture_output=True)
        seconds = time.perf_counter() - begun
        kept["ours"] = len(Table.read(out))
        return seconds

    def peer(name: str, code: str) -> Callable[[], float]:
        def run() -> float:
            out, begun = bench.folder / f"{name}.parquet", time.perf_counter()
            subprocess.run([sys.executable, "-c", code, str(path), str(out)], check=True)
            seconds = time.perf_counter() - begun
            kept[name] = len(Table.read(out))
            return seconds

        return run

    contestants = {"ours": ours, **{name: peer(name, code) for name, code in PEERS.items()}}
    times = alternate(contestants, bench.options.rounds)
    made = Report("video_data-filter", f"A table of {rows:,} rows, filtered by a command", ())
    made.columns = ("way", "median", "quartiles", "rows kept")
    for name, spread in times.items():
        quartiles = f"{spread.low:.2f} to {spread.high:.2f} s"
        made.rows.append((name, f"{spread.median:.2f} s", quartiles, f"{kept[name]:,}"))
    made.figures = {name: spread.values for name, spread in times.items()}
    made.bars = [
        at_most("seconds of the command", times["ours"].median, FILTER_S),
        at_most("rows kept that differ from the peers", len(set(kept.values())) - 1, 0),
    ]
    made.notes = [f"From the start of a process to its end: {CONDITION}."]
    return made


PEERS = {
    "pandas": """
import sys, pandas
data = pandas.read_parquet(sys.argv[1])
kept = data[(data.fps >= 12) & (data.motion > 2) & data.text.str.contains("7", regex=False)]
kept.to_parquet(sys.argv[2])
""",
    "loop over rows": """
import sys, pyarrow
from pyarrow import parquet
data = parquet.read_table(sys.argv[1])
kept = [r for r in data.to_pylist() if r["fps"] >= 12 and r["motion"] > 2 and "7" in r["text"]]
parquet.write_table(pyarrow.Table.from_pylist(kept, data.schema), sys.argv[2])
""",
}
"""Programs that do the same."""


def write_large(path: Path, rows: int) -> None:
    """Writes a table of so many rows, as a scan and scorers leave it."""
    draw = np.random.default_rng(0)
    names = [f"clips/{number:06}.mp4" for number in range(rows)]
    sizes = draw.integers(64, 1080, (2, rows))
    cells = {
        "path": names,
        "text": [f"a clip of the number {number}" for number in draw.integers(0, 10_000, rows)],
        "num_frames": draw.integers(1, 500, rows),
        "height": sizes[0],
        "width": sizes[1],
        "aspect_ratio": sizes[0] / sizes[1],
        "resolution": sizes[0] * sizes[1],
        "fps": draw.choice([8.0, 12.0, 15.0, 24.0, 25.0, 30.0], rows),
        "motion": draw.gamma(2.0, 2.0, rows),
        "sharpness": draw.gamma(3.0, 40.0, rows),
    }
    records = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    Table.of_rows(records, path, list(cells)).write()


RUN: dict[Part, Callable[[Bench], Report]] = {"cuts": cuts, "dedup": dedup, "filter": filter_rows}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    options.folder.mkdir(parents=True, exist_ok=True)
    prefix, place = "gulliver-video-data-", options.folder.absolute()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
        bench = Bench(options, Path(name))
        for part in options.parts:
            finish(RUN[part](bench), options.keep)


if __name__ == "__main__":
    main()
