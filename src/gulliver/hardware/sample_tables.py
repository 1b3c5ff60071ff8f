"""Costs of samples from a table of measured or computed seconds.

The table has seconds by shape, sequence parallel degree and batch size, with all blocks recomputed.
Between batch sizes, it interpolates linearly; beyond the last, it extrapolates up to the memory
limit.
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
"""Pixels per token side; frames per group and corresponding latent frames (Open-Sora 1.2)."""
Parts = Callable[[Any, int, int], tuple[float, float]]
"""Seconds of communication and of recomputation for (shape, degree, batch)."""


def no_parts(shape: str, degree: int, batch: int) -> tuple[float, float]:
    """Returns zeros, for tables with only total times."""
    return 0.0, 0.0


@dataclass(frozen=True)
class TableCosts:
    """Costs of samples from a table.

    Attributes:
        seconds: seconds of a micro-batch by shape, degree and batch, all blocks recomputed.
        lengths: tokens per sample of each shape.
        token_bytes: activation bytes per token with all blocks recomputed.
        memory: bytes per rank for activations.
        kinds: kinds of blocks whose activations can be kept; if empty, all blocks are recomputed.
        parts: returns components of the seconds; required with `kinds`.
        model: name of the model in files and saved states.
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
            raise GulliverError(
                "the memory per rank, and so the largest batch, is unknown; pass memory="
            )

    @classmethod
    def load(cls, path: Path | str, **changes: Any) -> TableCosts:
        """Reads a JSON file with `cost_table`, and with resolutions and frames in `cost_model`.

        Args:
            path: path to the file.
            changes: fields that are not in the file.

        Raises:
            GulliverError: the file has the wrong format, or its lengths contradict its seconds.
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
            raise GulliverError(f"cost table {path} cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GulliverError(
                f"{path} is not a cost table; it needs cost_table, by shape, degree and batch, "
                f"and cost_model with resolutions and cap_tokens_per_gpu ({error!r})"
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
        """Creates a table from functions of shapes, for training without measured costs.

        Args:
            shapes: shapes that occur.
            cost: seconds of forward and backward of one sample of a shape on one rank, or any
                number proportional to them.
            length: tokens per sample of a shape, or any number proportional to its memory.
            memory: number of tokens that fit on a rank, used in place of bytes.
            fixed: constant cost of a micro-batch.
            lost: fraction of a sample's cost that each rank of a group spends on communication.
            allowed: numbers of ranks that may share a sample.

        Raises:
            GulliverError: costs or lengths are not positive, or contradict each other.
        """
        costs = {shape: float(cost(shape)) for shape in shapes}
        degrees = [whole_number("a degree in allowed", degree) for degree in allowed]

        def sent(shape: Any, degree: int, batch: int) -> tuple[float, float]:
            return batch * costs[shape] * lost * (degree > 1), 0.0

        seconds = {
            # Two batch sizes: `batches` extrapolates the line through them.
            shape: {
                d: {b: fixed + b * each / d + sent(shape, d, b)[0] for b in (1, 2)} for d in degrees
            }
            for shape, each in costs.items()
        }
        lengths = {shape: math.ceil(length(shape)) for shape in costs}
        return cls(seconds, lengths, memory=memory, parts=sent)

    @property
    def room(self) -> str:
        """Describes a rank's memory: in tokens if their bytes are unknown."""
        return f"the {self.memory:,.0f} tokens" if self.token_bytes == 1 else size_text(self.memory)

    @property
    def identity(self) -> str:
        """Identifies the costs in saved states: the model."""
        return self.model

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Sequence parallel degrees in the table, up to a number of ranks."""
        found = {degree for row in self.seconds.values() for degree in row}
        return tuple(sorted(degree for degree in found if degree <= ranks))

    def tokens(self, shape: Any) -> int:
        self._known(shape)
        return self.lengths[shape]

    def batches(self, shape: Any, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        """Costs of micro-batches of a shape on a group of ranks.

        Args:
            shape: name of the shape.
            degree: number of ranks in the group.
            pac: whether to keep activations in spare memory; otherwise all blocks are recomputed.
            most: largest batch to consider.

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
    """Interpolates linearly; extrapolates the last segment, or the rate of a single point."""
    if len(sizes) == 1:
        return values[0] * at / sizes[0]
    found = np.interp(at, sizes, values)
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return np.where(at > sizes[-1], values[-1] + slope * (at - sizes[-1]), found)


def _nothing(kinds: int) -> BatchCosts:
    empty = np.zeros(0)
    return BatchCosts(empty, empty, empty, empty, np.zeros((0, kinds), dtype=np.int64))


def _tokens(shape: str, resolutions: Mapping[str, Sequence[int]]) -> int:
    name, _, frames = shape.partition("/")
    height, width = resolutions[name]
    count = int(frames)
    latents = 1 if count == 1 else count // STRIDE * LATENTS
    return -(-height // PATCH) * -(-width // PATCH) * latents


def _check(
    seconds: Mapping[str, Mapping[int, Mapping[int, float]]], lengths: Mapping[str, int]
) -> None:
    """Rejects tables in which more or longer samples take less time."""
    if not seconds:
        raise GulliverError("the cost table is empty; add seconds by shape, degree and batch")
    for shape, degrees in seconds.items():
        if lengths.get(shape, 0) < 1:
            raise GulliverError(f"shape {shape!r} has no tokens; set its length")
        for degree, row in degrees.items():
            for number in (degree, *row):
                whole_number(f"a degree or batch of shape {shape!r}", number)
            values = [row[batch] for batch in sorted(row)]
            if degree < 1 or min(row, default=1) < 1 or not all(map(_is_time, values)):
                raise GulliverError(
                    f"shape {shape!r} on {degree} ranks has invalid values; batches and seconds "
                    "must be above 0"
                )
            if values != sorted(values):
                raise GulliverError(
                    f"more samples of shape {shape!r} on {degree} ranks take less time in this "
                    "table; measure the costs again"
                )
    by_length: dict[int, list[tuple[int, float, str]]] = {}
    for shape, degrees in seconds.items():
        for degree, row in degrees.items():
            if 1 in row:
                by_length.setdefault(degree, []).append((lengths[shape], row[1], shape))
    for degree, found in by_length.items():
        found.sort()
        for (_, before, short), (_, after, long) in itertools.pairwise(found):
            # Aspect ratios and frames cause differences of a few percent between shapes of similar
            # length.
            if after < before / 2:
                raise GulliverError(
                    f"the table contradicts itself: {long!r} has more tokens than {short!r} but "
                    f"takes less ({after:.3g}, not {before:.3g} s on {degree} ranks); measure again"
                )


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0
