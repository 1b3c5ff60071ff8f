"""Splits a batch into micro-batches, and merges their losses and outputs.

Tensors are split along dim 0 as evenly as possible, so a short last batch is exact too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.collectives import all_gather
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError, nearest
from gulliver.families.loss import ModelLoss

IGNORED = -100
WEIGHTS = ("samples", "labels", "shifted_labels")
Batch = Mapping[str, Any] | Sequence[Any] | Tensor


# [Note: weighted losses] The mean of the micro-batches' mean losses is not the mean of the batch if
# they have different numbers of labels. So the batch's loss is their mean weighted by the number of
# terms of each: samples, or labels that are not ignored (`weigh`). Gradients are linear in the
# loss, so weighting each loss before its backward makes them exact as well.
@dataclass(frozen=True)
class MicroBatch:
    """A subset of a batch's samples."""

    given: Any  # Samples in the form of the batch, for the criterion
    samples: int  # Number of samples; 0 if it was not split from a batch

    @property
    def args(self) -> tuple[Any, ...]:
        if isinstance(self.given, Mapping):
            return ()
        return (self.given,) if isinstance(self.given, Tensor) else tuple(self.given)

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.given) if isinstance(self.given, Mapping) else {}

    def shapes(self) -> str:
        """Returns a string that is equal for micro-batches with equal message shapes."""
        return ";".join(f"{p}:{_shape(v)}" for p, v in leaves(self.given))


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.requires_grad}"
    return repr(value)


def split(batch: Batch, parts: int) -> list[MicroBatch]:
    """Splits a batch into micro-batches along dim 0."""
    rows = {path: len(v) for path, v in leaves(batch) if isinstance(v, Tensor) and v.ndim > 0}
    if not rows:
        raise GulliverError("the batch has no tensor to split into micro-batches along dim 0")
    path, samples = max(rows.items(), key=lambda entry: entry[1])
    for other, count in rows.items():
        if count not in (1, samples):
            raise GulliverError(
                f"{other!r} of the batch has {count} rows, but {path!r} has {samples}: tensors are "
                "split along dim 0, so each needs one row per sample, or a single row"
            )
    if samples < parts:
        raise GulliverError(
            f"a batch of {samples} samples cannot be split into {parts} micro-batches: use at "
            f"least {parts} samples, or num_microbatches={samples}"
        )
    sizes = [samples // parts + (n < samples % parts) for n in range(parts)]
    made, start = [], 0
    for size in sizes:
        made.append(MicroBatch(_rows(batch, start, start + size, samples), size))
        start += size
    return made


def _rows(value: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and len(value) == samples else value
    if isinstance(value, Mapping):
        return {key: _rows(entry, start, stop, samples) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_rows(entry, start, stop, samples) for entry in value)
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for number, entry in enumerate(value):
            yield from leaves(entry, f"{path}.{number}" if path else str(number))
    else:
        yield path, value


@dataclass(frozen=True)
class Weights:
    """Weights of the micro-batches' losses in the batch's loss."""

    own: list[float]  # Weights of the loss that the model computes itself
    # Weights of a criterion's loss; None if unknown, because it may count differently from the
    # model.
    given: list[float] | None


UNEVEN = "set weight= to 'labels', 'shifted_labels', 'samples' or a function of a micro-batch"


def weigh(
    micros: Sequence[MicroBatch],
    by: str | Callable[[Any], float] | None,
    own: ModelLoss | None,
    criterion: bool = False,
) -> Weights:
    samples = _normal([float(micro.samples) for micro in micros])
    found = _said(micros, by, samples)
    given = found or (samples if _even(micros, samples) else None)
    items = isinstance(micros[0].given, Mapping) and "num_items_in_batch" in micros[0].given
    if items and micros[0].given["num_items_in_batch"] is not None:
        if own is not None and own.items:
            # These losses are already divided by the items of the full batch, so they are only
            # summed.
            return Weights([1.0] * len(micros), given)
        if own is None or own.items is None:
            if not criterion:
                raise GulliverError(
                    "it is unknown whether the model's own loss divides by num_items_in_batch: "
                    "remove it from the batch of a pipeline"
                )
            own = None
    if found is not None:
        return Weights(found, found)
    if own is not None:
        return Weights(_normal(_counts_of(micros, own)), given)
    if given is None or not (criterion or _even(micros, samples, masks=True)):
        raise GulliverError(
            "the loss cannot be averaged over micro-batches with different numbers of labels; "
            f"{UNEVEN}"
        )
    return Weights(given, given)


def _said(
    micros: Sequence[MicroBatch], by: str | Callable[[Any], float] | None, samples: list[float]
) -> list[float] | None:
    if by is None or by == "samples":
        return None if by is None else samples
    if callable(by):
        return _normal([float(by(micro.given)) for micro in micros])
    if by not in WEIGHTS:
        raise GulliverError(f"weight={by!r} is not known: {nearest(by, WEIGHTS)}")
    counts = _label_counts(micros, "labels", shifted=by == "shifted_labels")
    if counts is None:
        raise GulliverError(f"weight={by!r} needs integer labels of that name in the batch")
    return _normal(counts)


def _even(micros: Sequence[MicroBatch], samples: list[float], masks: bool = False) -> bool:
    given = micros[0].given
    names = [n for n in given if isinstance(n, str)] if isinstance(given, Mapping) else []
    for name in names:
        labels = "label" in name or name.endswith("_positions")
        if not (labels or (masks and name == "attention_mask")):
            continue
        for shifted in (False, True):
            counts = _label_counts(micros, name, shifted)
            if counts is not None and not _close(_normal(counts), samples):
                return False
    return True


def _counts_of(micros: Sequence[MicroBatch], own: ModelLoss) -> list[float]:
    """Returns the numbers of labels that the model's loss averages over, or of samples."""
    given = micros[0].given
    ignored = given.get("ignore_index", IGNORED) if isinstance(given, Mapping) else IGNORED
    aligned = own.shifted and isinstance(given, Mapping) and given.get("shift_labels") is not None
    name = "shift_labels" if aligned else "labels"
    found = _label_counts(micros, name, own.shifted and not aligned, ignored)
    return [float(micro.samples) for micro in micros] if found is None else found


def _label_counts(
    micros: Sequence[MicroBatch], name: str, shifted: bool, ignored: int = IGNORED
) -> list[float] | None:
    """Returns each micro-batch's number of counted labels; None for non-integer labels."""
    counts = []
    for micro in micros:
        labels = micro.given.get(name) if isinstance(micro.given, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        counted = labels != ignored
        if name == "attention_mask":
            counted = labels != 0
        elif name.endswith("_positions"):
            # transformers ignores answers past the end of the text.
            text = micro.given.get("input_ids")
            counted = labels < text.shape[1] if isinstance(text, Tensor) else counted
        counted = counted[:, 1:] if shifted and labels.ndim > 1 else counted
        counts.append(float(counted.sum()))
    return counts


def _normal(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total else [1 / len(counts)] * len(counts)


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-12 for a, b in zip(first, second, strict=True))


def merge(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    # Tensors are concatenated along dim 0; 0-dim tensors, such as losses, are averaged by weight;
    # other values are dropped.
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.ndim == 0:
            # A mean over nothing is NaN, and has no weight.
            terms = [o.detach() * w for o, w in zip(outputs, weights, strict=True) if w]
            return torch.stack(terms).sum(0)
        return torch.cat([o.detach() for o in outputs])
    if isinstance(first, Mapping):
        made = {key: merge([o[key] for o in outputs], weights) for key in first}
        known = {key: value for key, value in made.items() if value is not None}
        return known if type(first) is dict else type(first)(**known)
    if isinstance(first, tuple | list):
        return type(first)(merge(entries, weights) for entries in zip(*outputs, strict=True))
    return None


# Weighted losses of a pipeline's micro-batches, added when the last stage's forwards end.


Criterion = Callable[[Any, Any], Tensor]


class Losses:
    """Accumulates the weighted losses of micro-batches on the last stage."""

    def __init__(
        self,
        micros: list[MicroBatch],
        weights: Weights,
        criterion: Criterion | None,
        scale: float,
        optional: bool,
    ) -> None:
        self._micros, self._weights = micros, weights
        self._criterion, self._scale, self._optional = criterion, scale, optional
        self._terms: list[Tensor] = []
        self.uncounted = False

    @property
    def given(self) -> list[float] | None:
        return self._weights.given

    def __call__(self, output: Any, number: Tensor) -> Tensor:
        micro = int(number)
        loss, weights = self._of(output, self._micros[micro].given)
        if loss is None:
            return torch.zeros(())
        weight = weights[micro]
        # A mean over nothing is NaN; without weight it has no gradient either.
        term = loss * weight if weight else _nothing(output, loss)
        self._terms.append(term.detach())
        return term * self._scale if self._scale != 1 else term

    def _of(self, output: Any, given: Any) -> tuple[Tensor | None, list[float]]:
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(output, Tensor) and not output.ndim:  # like `own_loss` without stages
            own = output
        if self._criterion is None:
            if own is None and not self._optional:
                raise GulliverError(
                    "the model's outputs have no loss: pass criterion(outputs, micro_batch), or "
                    "labels"
                )
            return own, self._weights.own
        loss = self._criterion(output, given)
        weights = self._weights.own if loss is own else self._weights.given
        if weights is None:
            self.uncounted, weights = True, self._weights.own
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise GulliverError("a criterion must return a scalar, the mean over a micro-batch")
        return loss, weights

    def total(self) -> Tensor | None:
        return torch.stack(self._terms).sum() if self._terms else None


def _nothing(output: Any, loss: Tensor) -> Tensor:
    """Returns a zero loss with zero gradients for all tensors of the output."""
    # Not a constant, because the schedule calls its backward and earlier stages wait for gradients.
    values = output.values() if isinstance(output, dict) else output
    entries = [output] if isinstance(output, Tensor) else [v for v in values if v is not None]
    for value in entries:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
            return value.sum() * 0
    # The only output is the loss itself, and it is a mean over nothing.
    return torch.where(loss.isnan(), 0.0, loss) * 0


# Check before a run: whether the ranks of a model read the same batch, and their states.
#
# One gather of two numbers per rank. Batches are compared by shapes, dtypes and a sample of their
# bytes, because every stage reads the full batch, and stages with different data would train on
# nonsense without an error. The other number distinguishes states in which a stage sends other
# tensors (training or not, frozen parameters, autocast), so that sender and receiver both know when
# new headers are needed.


PLAIN = (bool, int, float, str)
SAMPLED = 2**20
"""Bytes of a large tensor that are hashed, evenly spaced."""


def compare_batches(
    batch: Any,
    state: str,
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    check: bool,
) -> str:
    """Compares the batches of ranks that share a model (collective)."""
    seen, agreed, wrong = digest(batch) if check else 0, "", None
    shared = [rank_group for rank_group in rank_groups if rank_group.size > 1]
    for rank_group in shared:
        by_rank = _gathered(seen, _number(state.encode()), rank_group, device)
        first = rank_group.ranks[0]
        differing = (rank for rank in rank_group.ranks if by_rank[rank][0] != by_rank[first][0])
        # If an earlier axis found the difference, a rank's number stands for all ranks that share
        # its model there.
        wrong = wrong or next(((rank, first) for rank in differing), None)
        agreed = agreed or ",".join(str(by_rank[rank][1]) for rank in rank_group.ranks)
        seen = _number(str([by_rank[rank][0] for rank in rank_group.ranks]).encode())
    if wrong is not None:
        or_else = ", or a partner of it," if len(shared) > 1 else ""
        raise GulliverError(
            f"rank {wrong[0]}{or_else} has a different batch from rank {wrong[1]}, but they share "
            "one model: pass the same samples"
        )
    return agreed or state


def _gathered(
    seen: int, state: int, rank_group: RankGroup, device: torch.device
) -> dict[int, list[int]]:
    own = torch.tensor([seen, state], dtype=torch.int64, device=device)
    found = torch.empty(2 * rank_group.size, dtype=torch.int64, device=device)
    all_gather(found, own, rank_group.process_group)
    # A process group numbers its ranks in ascending order, but a rank group may not.
    return dict(zip(sorted(rank_group.ranks), found.view(-1, 2).tolist(), strict=True))


def digest(batch: Any) -> int:
    seen = hashlib.blake2b(digest_size=7)
    for path, value in leaves(batch):
        seen.update(path.encode())
        if isinstance(value, Tensor):
            seen.update(f"{value.dtype}{tuple(value.shape)}".encode())
            seen.update(_sample(value))
        elif value is None or isinstance(value, PLAIN):
            seen.update(repr(value).encode())
        else:
            # Other objects, such as a cache, only by class: their repr contains an address.
            seen.update(type(value).__name__.encode())
    return int.from_bytes(seen.digest(), "big")


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // SAMPLED)
    return flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes()
