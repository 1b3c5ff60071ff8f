"""Seconds and bytes per sample, from analytic terms with a few measured rates.

The cost of a micro-batch of b samples in a model of L blocks, on a group of d ranks, with all
blocks recomputed, is

    seconds = fixed + L call + b (4 L F / rate + token N + pixel P) / d + messages
    F       = 2 weights N + 4 hidden pairs + 4 hidden N text           (one forward of one block)
    bytes   = states + b N (token + L block) / d

N is the number of tokens, P of pixels encoded by an autoencoder, and 4 F covers forward,
recomputation and backward (two forwards). Measurements at two depths and two batch sizes determine
all rates; more points allow an error estimate. Messages are the four head exchanges of Ulysses in
each of three passes. With tensor parallelism, blocks take proportionally less time and their
outputs are summed in each pass; everything else is replicated.

Start reading with `fit_samples`, then `SampleCosts.batches`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware.batch_costs import BatchCosts, BlockKind, keep_blocks
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.costs import ITEM_BYTES, all_reduce_seconds, all_to_all_seconds
from gulliver.hardware.probe import machine_facts
from gulliver.io.files import write_text

PASSES, EXCHANGES = 4, 4
"""Compute of a recomputed step, in forward passes; head exchanges per pass (q, k, v, output)."""


@dataclass(frozen=True)
class SampleShape:
    """Sizes of a sample that determine its costs.

    Attributes:
        tokens: number of tokens.
        pairs: query-key pairs per block, averaged over blocks.
        text: number of text tokens that every token attends to.
        pixels: number of pixels that the autoencoder encodes during training; 0 for stored latents.
        name: name for error messages.
    """

    tokens: int
    pairs: float
    text: int = 0
    pixels: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.pairs < 0 or self.text < 0 or self.pixels < 0:
            raise GulliverError(
                f"sample shape {self.name or self.tokens} is invalid; tokens must be at least 1, "
                "and the other sizes at least 0"
            )

    @classmethod
    def clip(
        cls, frames: int, rows: int, columns: int, text: int = 0, pixels: int = 0
    ) -> SampleShape:
        """Shape of a video clip's tokens, for alternating spatial and temporal blocks."""
        place = rows * columns
        tokens = frames * place
        name = f"{frames}x{rows}x{columns}"
        return cls(tokens, tokens * (place + frames) / 2, text, pixels, name)

    @classmethod
    def document(cls, length: int, causal: bool = True) -> SampleShape:
        return cls(length, length * length / (2 if causal else 1), name=f"{length} tokens")

    def __str__(self) -> str:
        return self.name or f"{self.tokens} tokens"


@dataclass(frozen=True)
class SampleModel:
    """Sizes of a model that determine the costs of samples."""

    # Name of the model; files of other models are rejected.
    name: str
    # Mean number of matrix elements per block.
    weights: int
    # Hidden size.
    hidden: int
    # Kinds of blocks; their counts add up to the depth.
    kinds: tuple[BlockKind, ...]
    # Dtype of activations.
    dtype: str = "float32"

    @property
    def depth(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def forward_flops(self, shape: SampleShape) -> float:
        linear = 2.0 * self.weights * shape.tokens
        return linear + 4.0 * self.hidden * (shape.pairs + shape.tokens * shape.text)


@dataclass(frozen=True)
class SamplePoint:
    """A measurement on one rank with all blocks recomputed."""

    # Shape of the samples.
    shape: SampleShape
    # Number of samples.
    batch: int
    # Number of blocks that ran.
    depth: int
    # Median seconds of forward and backward.
    seconds: float
    # Peak bytes, including the model's states.
    bytes: int


@dataclass(frozen=True)
class SampleFit:
    """Rates fitted to measurements."""

    # Constant seconds of a micro-batch.
    fixed_s: float
    # Constant seconds of a block.
    call_s: float
    # Seconds per FLOP of a block.
    flop_s: float
    # Seconds per token outside of the blocks.
    token_s: float
    # Seconds per pixel in the autoencoder.
    pixel_s: float
    # Bytes of parameters, gradients and optimizer states.
    states: float
    # Bytes per token outside of the blocks.
    token_bytes: float
    # Bytes per token in one recomputed block.
    block_bytes: float
    # Median relative leave-one-out error of the seconds; that of the fitted points if there are as
    # many rates as points.
    error: float = 0.0
    # Maximum of those errors.
    worst: float = 0.0


@dataclass(frozen=True)
class SampleCosts:
    """Costs of micro-batches of any shape, batch and degree.

    Attributes:
        model: sizes of the model.
        fit: rates of this machine.
        memory: bytes per rank.
        cluster: ranks and links; None if groups have only one rank.
        allowed: degrees that the model supports, such as divisors of its heads; None for all.
        encoded_alike: whether every rank of a group encodes all pixels of its samples rather than
            its share.
        tensor: tensor parallel size; each rank here represents that many. Bytes are those without
            tensor parallelism, an upper bound.
    """

    model: SampleModel
    fit: SampleFit
    memory: float
    cluster: Cluster | None = None
    allowed: tuple[int, ...] | None = None
    encoded_alike: bool = False
    tensor: int = 1

    @property
    def alone(self) -> SampleCosts:
        """Costs without tensor parallelism, used to choose the samples of a step."""
        return replace(self, tensor=1)

    @property
    def identity(self) -> str:
        """Identifies the costs in saved states: model and dtype."""
        return f"{self.model.name}, {self.model.dtype}"

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks, in the order in which recomputed blocks are counted."""
        return self.model.kinds

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Degrees up to a number of ranks, limited by links and heads."""
        most = min(ranks, self.cluster.size if self.cluster else 1)
        return tuple(d for d in range(1, most + 1) if self.allowed is None or d in self.allowed)

    def tokens(self, shape: SampleShape) -> int:
        return shape.tokens

    def batches(
        self, shape: SampleShape, degree: int, pac: bool = True, most: int = 4096
    ) -> BatchCosts:
        """Costs of micro-batches of 1, 2, ... samples that fit on a group of ranks."""
        fit, model = self.fit, self.model
        tokens = shape.tokens / degree
        each = tokens * (fit.token_bytes + model.depth * fit.block_bytes)
        room = self.memory - fit.states
        largest = max(0, min(most, int(room / each + 1e-9))) if each > 0 else most
        size = np.arange(1, largest + 1)
        blocks = model.depth * model.forward_flops(shape) * fit.flop_s
        repeated = size * blocks / (degree * self.tensor)
        encoders = 1 if self.encoded_alike else degree
        around = size * (
            fit.token_s * shape.tokens / degree + fit.pixel_s * shape.pixels / encoders
        )
        sent = self._messages(tokens, degree, size) + self._sums(shape, tokens, size)
        fixed = fit.fixed_s + model.depth * fit.call_s
        counts = np.tile([kind.count for kind in model.kinds], (largest, 1)).astype(np.int64)
        seconds = fixed + PASSES * repeated + around + sent
        costs = BatchCosts(seconds, fit.states + each * size, sent, repeated, counts)
        if not pac:
            return costs
        return keep_blocks(costs, tokens, self.memory, model.kinds)

    def _messages(self, tokens: float, degree: int, size: np.ndarray) -> np.ndarray:
        if degree == 1 or not len(size):
            return np.zeros(len(size))
        assert self.cluster is not None, "degrees() gives one rank without a cluster"
        axes = self.cluster.crossed(self.tensor, degree)
        unit = tokens * self.model.hidden * ITEM_BYTES[self.model.dtype]
        count = EXCHANGES * (PASSES - 1) * self.model.depth
        ends = [all_to_all_seconds(axes, int(n * unit)) for n in (1, max(2, len(size)))]
        return count * np.interp(size, [1, max(2, len(size))], ends)

    def _sums(self, shape: SampleShape, tokens: float, size: np.ndarray) -> np.ndarray:
        if self.tensor == 1 or not len(size):
            return np.zeros(len(size))
        if self.cluster is None:
            raise GulliverError(
                f"tensor={self.tensor} needs a cluster; pass the one that these ranks run on"
            )
        axes = self.cluster.crossed(1, self.tensor)
        unit = tokens * self.model.hidden * ITEM_BYTES[self.model.dtype]
        # After attention and MLP, and after cross-attention if there is any.
        count = (2 + (shape.text > 0)) * (PASSES - 1) * self.model.depth
        ends = [all_reduce_seconds(axes, int(n * unit)) for n in (1, max(2, len(size)))]
        return count * np.interp(size, [1, max(2, len(size))], ends)


def fit_samples(
    model: SampleModel,
    points: Sequence[SamplePoint],
    states: float | None = None,
) -> SampleFit:
    """Fits rates to measured points.

    Raises:
        GulliverError: there are too few points, or points are not positive.
    """
    if len({p.depth for p in points}) < 2 or len({(p.shape, p.batch) for p in points}) < 2:
        raise GulliverError(
            "sample costs need at least two depths and two batch sizes; measure more points"
        )
    if any(not (math.isfinite(p.seconds) and p.seconds > 0 and p.bytes > 0) for p in points):
        raise GulliverError(
            "sample costs need points with seconds and bytes above 0; measure them again"
        )
    rows = np.array([_terms(model, point) for point in points])
    seconds = np.array([point.seconds for point in points])
    # Relative errors; otherwise only the longest samples would count.
    rates = _not_negative(rows / seconds[:, None], np.ones(len(points)))
    errors = np.abs(rows @ rates / seconds - 1)
    # With as many rates as points a fit has no error; left-out points show its quality.
    if len(points) > rows.shape[1]:
        errors = np.array([_left_out(rows, seconds, n) for n in range(len(points))])
    size = np.array([point.bytes for point in points], dtype=float)
    memory = np.array([_byte_terms(point) for point in points], dtype=float)
    held = _not_negative(memory / size[:, None], np.ones(len(points)))
    whole = held[0] + held[1] * model.depth if states is None else states
    fixed, call, flop, token, pixel = map(float, rates)
    told = float(np.median(errors)), float(np.max(errors))
    return SampleFit(
        fixed, call, flop, token, pixel, float(whole), float(held[2]), float(held[3]), *told
    )


def measure_samples(
    run: Callable[[SampleShape, int, int], tuple[float, int]],
    shapes: Iterable[SampleShape],
    batches: Sequence[int] = (1, 2),
    depths: Sequence[int] = (1, 2),
    repeats: int = 3,
) -> list[SamplePoint]:
    """Measures the costs of samples; `run(shape, batch, depth)` returns seconds and peak bytes."""
    points = []
    for shape, batch, depth in itertools.product(shapes, batches, depths):
        run(shape, batch, depth)
        found = [run(shape, batch, depth) for _ in range(repeats)]
        seconds = statistics.median(second for second, _ in found)
        points.append(SamplePoint(shape, batch, depth, seconds, max(size for _, size in found)))
    return points


def _terms(model: SampleModel, point: SamplePoint) -> list[float]:
    batch, shape = point.batch, point.shape
    flops = PASSES * batch * point.depth * model.forward_flops(shape)
    return [1.0, point.depth, flops, batch * shape.tokens, batch * shape.pixels]


def _byte_terms(point: SamplePoint) -> list[float]:
    tokens = point.batch * point.shape.tokens
    return [1.0, point.depth, tokens, tokens * point.depth]


def _left_out(rows: np.ndarray, seconds: np.ndarray, place: int) -> float:
    others = np.arange(len(seconds)) != place
    scaled = rows[others] / seconds[others, None]
    rates = _not_negative(scaled, np.ones(int(others.sum())))
    return float(abs(rows[place] @ rates / seconds[place] - 1))


def _not_negative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fits non-negative rates by least squares, removing negative terms one at a time."""
    # FLOPs and numbers of calls differ by ten orders of magnitude.
    scale = np.abs(rows).max(axis=0)
    used = [column for column in range(rows.shape[1]) if scale[column] > 0]
    found = np.zeros(rows.shape[1])
    while used:
        part = np.linalg.lstsq(rows[:, used] / scale[used], values, rcond=None)[0]
        worst = int(np.argmin(part))
        if part[worst] >= -1e-12:
            found[used] = np.maximum(part, 0.0) / scale[used]
            break
        used.pop(worst)
    return found


# Files of sample costs, valid for one machine, model, dtype and torch version.
#
# The file records them, and `load_samples` raises an error that names any difference.


FORMAT = 2
WORDS = {"machine": "another machine", "model": "another model", "dtype": "another dtype"}


@dataclass(frozen=True)
class SavedSamples:
    """Sample costs read from a file, for any machine."""

    # Sizes of the model.
    model: SampleModel
    fit: SampleFit
    # Description of the machine.
    machine: str
    # Shapes of the samples that it was measured for; empty if unknown.
    shapes: tuple[SampleShape, ...]


def sample_fingerprint(model: SampleModel) -> dict[str, Any]:
    machine = {name: str(value) for name, value in machine_facts().items()}
    version = machine.pop("torch")
    kinds = [[kind.name, kind.count] for kind in model.kinds]
    sizes = {"name": model.name, "weights": model.weights, "hidden": model.hidden, "kinds": kinds}
    return {"machine": machine, "model": sizes, "dtype": model.dtype, "torch": version}


def save_samples(
    path: Path | str, model: SampleModel, fit: SampleFit, shapes: Iterable[SampleShape] = ()
) -> None:
    """Writes sample costs, with the conditions of their measurement."""
    values = {
        "format": FORMAT,
        "fingerprint": sample_fingerprint(model),
        "fit": asdict(fit),
        "kinds": [asdict(kind) for kind in model.kinds],
        "shapes": [asdict(shape) for shape in shapes],
    }
    write_text(Path(path), json.dumps(values, indent=1))


def load_samples(path: Path | str, model: SampleModel) -> SampleFit:
    """Reads sample costs measured on this machine for this model."""
    values = _read(path)
    expected = json.loads(json.dumps(sample_fingerprint(model)))
    found = values["fingerprint"]
    for name, value in expected.items():
        if found.get(name) != value:
            raise GulliverError(
                f"{path} is for {WORDS.get(name, 'another version of torch')} "
                f"({_told(found.get(name))}, but {_told(value)} here); measure the costs again"
            )
    return _fit(path, values["fit"])


def read_samples(path: Path | str) -> SavedSamples:
    values = _read(path)
    found = values["fingerprint"]
    try:
        sizes = found["model"]
        kinds = tuple(BlockKind(**kind) for kind in values["kinds"])
        model = SampleModel(sizes["name"], sizes["weights"], sizes["hidden"], kinds, found["dtype"])
        shapes = tuple(SampleShape(**shape) for shape in values.get("shapes", ()))
        machine = _told(found["machine"])
    except (KeyError, TypeError, ValueError) as error:
        raise GulliverError(f"{path} has no sample costs ({error!r})") from None
    return SavedSamples(model, _fit(path, values["fit"]), machine, shapes)


def holds_samples(path: Path | str) -> bool:
    """Whether a file looks like sample costs, rather than a cost table or something else."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "fit" in values and "fingerprint" in values


def _read(path: Path | str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        format_, found = values["format"], values["fingerprint"]
        whole = isinstance(found, Mapping) and isinstance(values["fit"], Mapping)
    except OSError as error:
        raise GulliverError(f"sample costs {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise GulliverError(f"{path} has no sample costs ({error!r})") from None
    if not whole:
        raise GulliverError(f"{path} has no sample costs (fingerprint or fit is missing)")
    if format_ != FORMAT:
        raise GulliverError(
            f"{path} has format {format_}, but this version reads {FORMAT}; measure it again"
        )
    return values


def _fit(path: Path | str, rates: Mapping[str, Any]) -> SampleFit:
    try:
        fit = SampleFit(**{name: float(rate) for name, rate in rates.items()})
    except (TypeError, ValueError) as error:
        raise GulliverError(f"{path} has no sample costs ({error})") from None
    if any(not (math.isfinite(rate) and rate >= 0) for rate in vars(fit).values()):
        raise GulliverError(f"{path} has rates that are negative or not finite; measure it again")
    return fit


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)
