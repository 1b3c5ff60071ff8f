"""Costs of samples that were measured, or computed, elsewhere: a table of seconds.

A table has seconds by shape, sequence degree and size of batch, with all blocks recomputed. Between
its sizes lies a straight line; beyond the last, as far as memory goes, the last line goes on. It
has nothing for degrees and shapes that are not in it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.batch_costs import BatchCosts, BlockKind, keep_blocks
from gulliver.options import size_text, whole_number

PATCH, STRIDE, LATENTS = 16, 17, 5
"""Pixels of a token's side; frames that become so many latent frames (Open-Sora 1.2)."""
Parts = Callable[[Any, int, int], tuple[float, float]]
"""Seconds of communication and of repeated forwards of (shape, degree, batch)."""


def no_parts(shape: str, degree: int, batch: int) -> tuple[float, float]:
    """Says nothing of what the seconds of a table consist of."""
    return 0.0, 0.0


@dataclass(frozen=True)
class TableCosts:
    """Costs of samples from a table.

    Attributes:
        seconds: seconds of a micro-batch by shape, degree and batch, all blocks recomputed.
        lengths: tokens of a sample of each shape.
        token_bytes: bytes of a token on its rank, all blocks recomputed.
        memory: bytes of a rank for activations.
        kinds: kinds of blocks whose activations can be kept; none: all are always recomputed.
        parts: what the seconds consist of; `kinds` need it.
        model: name of the model, for files and states.
    """

    seconds: Mapping[str, Mapping[int, Mapping[int, float]]]
    lengths: Mapping[str, int]
    token_bytes: float = 1.0
    memory: float = math.inf
    kinds: tuple[BlockKind, ...] = ()
    parts: Parts = field(default=no_parts, compare=False)
    model: str = "table"

    def __post_init__(self) -> None:
        _check(self.seconds, self.lengths)
        if math.isinf(self.memory):
            raise GulliverError("a table without a memory has no largest batch: give memory=")

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> TableCosts:
        """Reads a JSON file with a `cost_table`, and resolutions and frames in its `cost_model`.

        Args:
            path: path to the file.
            changes: fields that the file says nothing of.

        Raises:
            GulliverError: the file is no such table, or its lengths contradict its seconds.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            model, table = values["cost_model"], values["cost_table"]
            seconds = {
                shape: {
                    int(degree): {int(batch): float(s) for batch, s in row.items()}
                    for degree, row in degrees.items()
                    if row
                }
                for shape, degrees in table.items()
            }
            lengths = {shape: _tokens(shape, model["resolutions"]) for shape in seconds}
            cap = float(model["cap_tokens_per_gpu"])
        except OSError as error:
            raise GulliverError(f"cost table {path}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GulliverError(
                f"{path} is no cost table: it needs cost_table, by shape, degree and batch, and "
                f"cost_model with resolutions and cap_tokens_per_gpu ({error!r})"
            ) from None
        token = float(changes.pop("token_bytes", 1.0))
        return cls(seconds, lengths, token, changes.pop("memory", cap * token), **changes)

    @classmethod
    def from_functions(
        cls,
        shapes: Iterable[Any],
        cost: Callable[[Any], float],
        length: Callable[[Any], int],
        memory: float,
        fixed: float = 0.0,
        lost: float = 0.05,
        allowed: Sequence[int] = (1,),
    ) -> TableCosts:
        """Makes a table from functions of shapes, for loops whose costs nobody has measured.

        Args:
            shapes: shapes that occur.
            cost: seconds of forward and backward of one sample of a shape on one rank, or any
                number in proportion to them.
            length: tokens of a sample of a shape, or whatever its memory is in proportion to.
            memory: tokens that fit on a rank at once; they stand for bytes.
            fixed: cost of a micro-batch whatever is in it.
            lost: share of a sample's cost that each rank of a group spends on messages.
            allowed: numbers of ranks that may share a sample.

        Raises:
            GulliverError: costs or lengths are not above 0, or contradict each other.
        """
        costs = {shape: float(cost(shape)) for shape in shapes}
        degrees = [whole_number("a degree in allowed", degree) for degree in allowed]

        def sent(shape: Any, degree: int, batch: int) -> tuple[float, float]:
            return batch * costs[shape] * lost * (degree > 1), 0.0

        seconds = {
            # Two sizes of batch: `batches` goes on along the line through them.
            shape: {
                d: {b: fixed + b * each / d + sent(shape, d, b)[0] for b in (1, 2)} for d in degrees
            }
            for shape, each in costs.items()
        }
        lengths = {shape: math.ceil(length(shape)) for shape in costs}
        return cls(seconds, lengths, memory=memory, parts=sent)

    @property
    def room(self) -> str:
        """The memory of a rank in words: tokens, where nothing says what bytes they have."""
        return f"the {self.memory:,.0f} tokens" if self.token_bytes == 1 else size_text(self.memory)

    @property
    def identity(self) -> str:
        """Name that a saved state is held against: the model."""
        return self.model

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Degrees that the table has, up to a number of ranks."""
        found = {degree for row in self.seconds.values() for degree in row}
        return tuple(sorted(degree for degree in found if degree <= ranks))

    def tokens(self, shape: Any) -> int:
        """Tokens of a sample of a shape."""
        self._known(shape)
        return self.lengths[shape]

    def batches(self, shape: Any, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        """Costs of micro-batches of a shape on a group of so many ranks.

        Args:
            shape: name of the shape.
            degree: ranks of the group.
            pac: keep activations where memory is left; else all blocks are recomputed.
            most: largest batch that is looked at.

        Raises:
            GulliverError: the table does not have the shape.
        """
        self._known(shape)
        row = self.seconds[shape].get(degree)
        tokens = self.lengths[shape] / degree
        largest = int(min(most, self.memory / (tokens * self.token_bytes) + 1e-9, 2**31))
        if not row or largest < 1:
            return _nothing(len(self.kinds))
        batches = np.arange(1, largest + 1)
        sizes = sorted(row)
        parts = np.array([self.parts(shape, degree, size) for size in sizes])
        total, sent, repeated = (
            _along(np.array(sizes), values, batches)
            for values in (np.array([row[n] for n in sizes]), parts[:, 0], parts[:, 1])
        )
        counts = np.tile([kind.count for kind in self.kinds], (largest, 1)).astype(np.int64)
        costs = BatchCosts(total, tokens * self.token_bytes * batches, sent, repeated, counts)
        if not pac:
            return costs
        return keep_blocks(costs, tokens, self.memory, self.kinds)

    def _known(self, shape: Any) -> None:
        if shape not in self.seconds:
            raise GulliverError(
                f"the cost table has no shape {shape!r}: {nearest(str(shape), self._names)}"
            )

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(map(str, self.seconds))


def _along(sizes: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Values on straight lines between points, the last line going on: of one point, its rate."""
    if len(sizes) == 1:
        return values[0] * at / sizes[0]
    found = np.interp(at, sizes, values)
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return np.where(at > sizes[-1], values[-1] + slope * (at - sizes[-1]), found)


def _nothing(kinds: int) -> BatchCosts:
    empty = np.zeros(0)
    return BatchCosts(empty, empty, empty, empty, np.zeros((0, kinds), dtype=np.int64))


def _tokens(shape: str, resolutions: Mapping[str, Sequence[int]]) -> int:
    """Tokens of a sample named resolution/frames."""
    name, _, frames = shape.partition("/")
    height, width = resolutions[name]
    count = int(frames)
    latents = 1 if count == 1 else count // STRIDE * LATENTS
    return -(-height // PATCH) * -(-width // PATCH) * latents


def _check(
    seconds: Mapping[str, Mapping[int, Mapping[int, float]]], lengths: Mapping[str, int]
) -> None:
    """Refuses tables that contradict themselves: more samples, or longer ones, in less time."""
    if not seconds:
        raise GulliverError("the cost table is empty: give seconds by shape, degree and batch")
    for shape, degrees in seconds.items():
        if lengths.get(shape, 0) < 1:
            raise GulliverError(f"shape {shape!r} has no tokens: give its length")
        for degree, row in degrees.items():
            for number in (degree, *row):
                whole_number(f"a degree or batch of shape {shape!r}", number)
            values = [row[batch] for batch in sorted(row)]
            if degree < 1 or min(row, default=1) < 1 or not all(map(_is_time, values)):
                raise GulliverError(
                    f"shape {shape!r} on {degree} ranks: batches and seconds must be above 0"
                )
            if values != sorted(values):
                raise GulliverError(
                    f"shape {shape!r} on {degree} ranks: more samples take less time in this "
                    "table: measure it again"
                )
    by_length: dict[int, list[tuple[int, float, str]]] = {}
    for shape, degrees in seconds.items():
        for degree, row in degrees.items():
            if 1 in row:
                by_length.setdefault(degree, []).append((lengths[shape], row[1], shape))
    for degree, found in by_length.items():
        found.sort()
        for (_, before, short), (_, after, long) in itertools.pairwise(found):
            # Aspect ratios and frames shift a few per cent between shapes of like length.
            if after < before / 2:
                raise GulliverError(
                    f"the table's lengths lie: {long!r} has more tokens than {short!r} and takes "
                    f"{after:.3g} s against {before:.3g} s on {degree} ranks"
                )


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0
