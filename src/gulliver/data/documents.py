"""Prepares texts for data-centric steps: few distinct shapes, and rows without padding.

Plans group samples of one shape, but nearly every document has a different length. So lengths are
rounded up, for planning only; `pack_documents` concatenates the documents of a micro-batch without
padding, with positions that restart at 0 for each document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.hardware.samples import SampleShape
from gulliver.options import whole_number

STEPS = 8
"""Number of planned lengths per power of two; they exceed the real ones by at most an eighth."""
SHORTEST = 16
IGNORED = -100
FIELDS = ("input_ids", "labels", "attention_mask")  # allowed fields of a text


def document_shapes(lengths: Iterable[int], causal: bool = True) -> list[SampleShape]:
    """Returns shapes of texts for planning, with few distinct lengths.

    Lengths are rounded up by at most an eighth, and to at least 16 tokens.

    Args:
        lengths: number of tokens of each text.
        causal: whether attention is causal.

    Raises:
        GulliverError: a text has no tokens, or a length is not an integer.
    """
    made = dict[int, SampleShape]()
    found = []
    for number, given in enumerate(lengths):
        length = whole_number(f"the length of text {number}", given)
        if length < 1:
            raise GulliverError(f"document {number} has {length} tokens; omit empty documents")
        length = max(length, SHORTEST)
        unit = max(1, (1 << (length.bit_length() - 1)) // STEPS)
        planned = -(-length // unit) * unit
        found.append(made.setdefault(planned, SampleShape.document(planned, causal)))
    return found


def pack_documents(documents: Sequence[Any], least: int = 1) -> dict[str, Tensor]:
    """Concatenates texts into one row for transformers models.

    Args:
        documents: token ids of each text, ``[length]``; or mappings with ``input_ids`` and,
            optionally, unshifted ``labels`` of the same length and an ``attention_mask`` of ones.
        least: minimum number of tokens in the row; missing tokens become a separate text without
            labels.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each ``[1, sum of lengths]``. The first
        token of each text is not a label, because it would be predicted from the previous text.

    Raises:
        GulliverError: there are no texts, a text is empty, ids are not integers, labels have
            a different shape, tokens are masked, or a field cannot be packed.
    """
    rows: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for document in documents:
        ids, labels = _ids_and_labels(document)
        labels[0] = IGNORED
        rows["input_ids"].append(ids)
        rows["labels"].append(labels)
        rows["position_ids"].append(torch.arange(len(ids)))
    missing = least - sum(map(len, rows["input_ids"]))
    if missing > 0:
        rows["input_ids"].append(rows["input_ids"][0].new_zeros(missing))
        rows["labels"].append(rows["labels"][0].new_full((missing,), IGNORED))
        rows["position_ids"].append(torch.arange(missing))
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}


def _ids_and_labels(document: Any) -> tuple[Tensor, Tensor]:
    """Token ids and a modifiable copy of the labels of a text, both [length]."""
    fields = document if isinstance(document, Mapping) else {"input_ids": document}
    others = fields.keys() - FIELDS
    if "input_ids" not in fields or others:
        why = f"unknown fields {sorted(map(str, others))}" if others else "no input_ids"
        raise GulliverError(f"a document has {why}; pass only {', '.join(FIELDS)}")
    found = {}
    for name in FIELDS:
        given = fields.get(name)
        if given is None and name != "input_ids":
            given = found["input_ids"]
        try:
            found[name] = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise GulliverError(
                f"the {name} of a document are a {type(given).__name__}; pass integers"
            ) from None
    ids, labels = found["input_ids"], found["labels"].clone()
    if ids.dim() != 1 or not len(ids) or labels.shape != ids.shape:
        raise GulliverError(
            f"a document has ids of shape {tuple(ids.shape)} and labels of shape "
            f"{tuple(labels.shape)}; expected one dim and equal lengths of at least 1"
        )
    # Padding would be trained as text, and counted in length-based weights.
    if fields.get("attention_mask") is not None and not bool(found["attention_mask"].all()):
        raise GulliverError("a document has tokens masked by its attention_mask; remove padding")
    return ids, labels
