"""Click logs in the format of Criteo: read in batches, and made where there are none.

A line is a label, 13 whole numbers and 26 categories in hexadecimal, with tabs between; what is
missing is empty. A category's id in a table of n rows is its number modulo n - 1, plus 1; row 0 is
for what is missing.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import atomic_file

NUMBERS, CATEGORIES = 13, 26
CHUNK = 4096


@dataclass(frozen=True)
class Clicks:
    """A batch of a click log.

    Attributes:
        labels: 1 where it was clicked, (samples,).
        numbers: logarithms of the whole numbers, (samples, 13).
        ids: a row of each table, (samples, 26).
    """

    labels: Tensor
    numbers: Tensor
    ids: Tensor


class CriteoFile:
    """Batches of a file in the format of Criteo, plain or gzip.

    Args:
        path: file.
        rows: rows of the 26 tables.
        batch: samples of a batch; the last one of the file may be smaller.

    Raises:
        GulliverError: there is no such file, or there are not 26 tables of at least two rows.
    """

    def __init__(self, path: Path | str, rows: Sequence[int], batch: int) -> None:
        self._path, self._rows, self._batch = Path(path), list(rows), batch
        if not self._path.is_file():
            raise GulliverError(f"there is no click log {path}: write_criteo makes one to try with")
        if len(self._rows) != CATEGORIES or min(self._rows) < 2:
            raise GulliverError(f"a click log has {CATEGORIES} tables of at least 2 rows each")
        if batch < 1:
            raise GulliverError(f"batch={batch}: give at least 1 sample")

    def __iter__(self) -> Iterator[Clicks]:
        lines: list[list[str]] = []
        number = 0
        opened = gzip.open if self._path.suffix == ".gz" else open
        with opened(self._path, "rt", encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\n").split("\t")
                if len(fields) != 1 + NUMBERS + CATEGORIES:
                    raise GulliverError(
                        f"{self._path}, line {number}: {len(fields)} fields, not a label, "
                        f"{NUMBERS} numbers and {CATEGORIES} categories"
                    )
                lines.append(fields)
                if len(lines) == self._batch:
                    yield self._made(lines, number)
                    lines = []
        if lines:
            yield self._made(lines, number)

    def _made(self, lines: list[list[str]], last: int) -> Clicks:
        try:
            numbers = [[int(text or 0) for text in line[1 : 1 + NUMBERS]] for line in lines]
            ids = [
                [int(text, 16) % (rows - 1) + 1 if text else 0 for text, rows in pairs]
                for pairs in (zip(line[1 + NUMBERS :], self._rows, strict=True) for line in lines)
            ]
            labels = [float(line[0]) for line in lines]
        except ValueError as error:
            first = last - len(lines) + 1
            raise GulliverError(f"{self._path}, lines {first} to {last}: {error}") from None
        return Clicks(
            torch.tensor(labels),
            torch.tensor(numbers).clamp_min(0).float().log1p(),
            torch.tensor(ids),
        )


def write_criteo(path: Path | str, samples: int, rows: Sequence[int], seed: int = 0) -> Path:
    """Makes a click log whose categories follow a power law and say something of the label.

    Args:
        path: file to write.
        samples: number of lines.
        rows: rows of the 26 tables, whose ids occur.
        seed: seed of all that is drawn.
    """
    draw = np.random.default_rng(seed)
    effects = [draw.normal(0, 0.5, min(count, 1 << 20)) for count in rows]
    with atomic_file(Path(path)) as partial, partial.open("wb") as file:
        for begin in range(0, samples, CHUNK):
            count = min(CHUNK, samples - begin)
            ids = [power_law(draw, limit - 1, count, 1.05) for limit in rows]
            numbers = draw.poisson(3, (count, NUMBERS))
            logits = sum(e[i % len(e)] for e, i in zip(effects, ids, strict=True))
            logits = logits + 0.2 * (numbers[:, 0] - 3) - 1.0
            labels = draw.random(count) < 1 / (1 + np.exp(-logits))
            for place in range(count):
                categories = (f"{ids[table][place]:08x}" for table in range(CATEGORIES))
                fields = (str(int(labels[place])), *map(str, numbers[place]), *categories)
                file.write(("\t".join(fields) + "\n").encode())
    return Path(path)


def power_law(
    draw: np.random.Generator, rows: int, count: int, exponent: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Draws numbers below `rows`, the n-th as often as n to the power of minus `exponent`."""
    # The density over a continuous range is inverted, so that no table of all rows is needed.
    uniform = draw.random(count)
    if exponent == 1.0:
        found = np.exp(uniform * np.log(rows + 1))
    else:
        top = (rows + 1.0) ** (1 - exponent)
        found = (1 + uniform * (top - 1)) ** (1 / (1 - exponent))
    return np.minimum(found.astype(np.int64) - 1, rows - 1)
