"""Reads the dataset of a fine-tuning run: rows, form, tokens and held-out split.

Start with `read_text`. Rows that are skipped, truncated or split are counted in `TextData.facts`
and reported.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gulliver.errors import GulliverError
from gulliver.finetune.config import LENGTH, DataConfig, check_data
from gulliver.finetune.encode import Encoder, Example
from gulliver.finetune.rows import BadRow, Form, Row, TextSample, read_rows, recognise

NAMES = {
    "messages": "conversations",
    "instruction": "instructions",
    "completion": "prompts with completions",
    "text": "plain texts",
}


Item = TypeVar("Item")


# [Note: held-out texts] The hash of a text's content decides whether it is held out, so duplicates
# are on the same side, and rows added later do not move others. A single text is divided by its
# windows.
@dataclass(frozen=True, eq=False)
class TextData:
    """A tokenized dataset."""

    train: list[Example]
    held_out: list[Example]
    bad: list[BadRow]
    facts: dict[str, Any]
    fingerprint: str

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def read_text(
    config: DataConfig,
    tokenizer: Any,
    say: Callable[[str], None] = print,
    *,
    context: int | None = None,
) -> TextData:
    """Reads a dataset, and reports its contents.

    Args:
        config: data options.
        tokenizer: tokenizer of the model, as returned by `load_tokenizer`.
        say: prints a line for the user.
        context: maximum sequence length of the model in tokens; None for no limit.

    Raises:
        GulliverError: a file or an option is invalid, rows have different forms, a row is bad and
            bad rows are not to be skipped, or no text is left.
    """
    check_data(config)
    length = _length(config, context)
    bad = _Bad(config.bad_rows == "skip")
    form, samples = _samples(config.data, config.form, bad)
    answers_only = config.answers_only != "no" and form.name != "text"
    if config.answers_only == "yes" and not answers_only:
        raise GulliverError(
            "--answers-only yes does not apply to plain texts, which have no answers; leave it at "
            "auto"
        )
    encoder = Encoder(tokenizer, length, answers_only, cut=config.long_chats == "cut")
    if isinstance(config.held_out, Path):
        _, apart = _samples([config.held_out], config.form, bad)
        known = {sample.content for sample in apart}
        parts = [sample for sample in samples if sample.content not in known], apart
    else:
        parts = divide(samples, config.held_out, lambda sample: sample.content.encode())
    (train, learnt), (held_out, kept) = _encoded(encoder, parts, bad)
    if not held_out and not isinstance(config.held_out, Path):
        # A single text, such as a book, is divided by its windows.
        train, held_out = divide(train, config.held_out, lambda one: one.ids.tobytes())
    if not train:
        first = f", the first is {bad.rows[0]}" if bad.rows else ""
        raise GulliverError(f"no training text is left: {len(bad.rows)} rows are bad{first}")
    facts = _facts(form, encoder, train, held_out, bad)
    facts["texts"] = {"train": learnt, "held_out": kept}
    found = TextData(train, held_out, bad.rows, facts, _fingerprint(encoder, train, held_out))
    for line in _lines(found):
        say(line)
    return found


class _Bad:
    """Collects bad rows, or raises an error for the first one."""

    def __init__(self, may_skip: bool) -> None:
        self.rows: list[BadRow] = []
        self._may_skip = may_skip

    def add(self, row: BadRow) -> None:
        if not self._may_skip:
            raise GulliverError(f"{row}; repair it, or skip such rows with --bad-rows skip")
        self.rows.append(row)


def _length(config: DataConfig, context: int | None) -> int:
    if config.seq_length is None:
        return min(LENGTH, context or LENGTH)
    if context is not None and config.seq_length > context:
        raise GulliverError(
            f"--seq-length {config.seq_length} exceeds the model's context of {context} tokens; "
            "use that or less"
        )
    return config.seq_length


def _samples(paths: Sequence[Path], form: str, bad: _Bad) -> tuple[Form, list[TextSample]]:
    rows: list[Row] = []
    for row in read_rows(paths):
        if isinstance(row, BadRow):
            bad.add(row)
        else:
            rows.append(row)
    if not rows and bad.rows:
        raise GulliverError(
            f"the data has no readable row: {len(bad.rows):,} rows are bad, and the first is "
            f"{bad.rows[0]}"
        )
    found = recognise(rows, form)
    samples: list[TextSample] = []
    for row in rows:
        sample = found.parse(row)
        if isinstance(sample, BadRow):
            bad.add(sample)
        else:
            samples.append(sample)
    return found, samples


def divide(
    items: Sequence[Item], share: float, content: Callable[[Item], bytes]
) -> tuple[list[Item], list[Item]]:
    """Splits texts into training and held-out texts by a hash of their content."""
    hashes = [_hash(content(item)) for item in items]
    ordered = sorted(set(hashes))
    if share == 0 or len(ordered) < 2:
        return list(items), []
    kept = {one for one in ordered if one < share} or {ordered[0]}
    kept -= {ordered[-1]}
    pairs = list(zip(items, hashes, strict=True))
    return [item for item, h in pairs if h not in kept], [item for item, h in pairs if h in kept]


def _hash(content: bytes) -> float:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _encoded(
    encoder: Encoder,
    parts: Sequence[Sequence[TextSample]],
    bad: _Bad,
) -> Iterator[tuple[list[Example], int]]:
    """Yields the sequences of each part, and the number of texts that they come from."""
    for part in parts:
        examples, texts = list[Example](), 0
        for found in encoder.encode(part):
            if isinstance(found, BadRow):
                bad.add(found)
            else:
                examples += found
                texts += 1
        yield examples, texts


def _facts(
    form: Form, encoder: Encoder, train: list[Example], held_out: list[Example], bad: _Bad
) -> dict[str, Any]:
    return {
        "form": form.name,
        "rows": form.rows,
        "bad": dict(Counter(row.reason for row in bad.rows).most_common()),
        "sequences": {"train": len(train), "held_out": len(held_out)},
        "tokens": sum(map(len, train)),
        "learnt": sum(one.learnt for one in train),
        "longest": max(map(len, train)),
        "highest": max(int(one.ids.max()) for one in (*train, *held_out)),
        "length": encoder.length,
        "answers_only": encoder.answers_only,
        "masks": encoder.masks if form.name == "messages" and encoder.answers_only else None,
        "end": encoder.end,
        **{name: encoder.counts[name] for name in ("cut", "split", "without answer", "apart")},
    }


def _lines(data: TextData) -> Iterator[str]:
    facts = data.facts
    texts, form = facts["texts"], NAMES[facts["form"]]
    kept = f"{texts['held_out']:,} held out"
    if data.held_out and not texts["held_out"]:
        kept = (
            f"{len(data.held_out):,} of {len(data.train) + len(data.held_out):,} windows held out"
        )
    yield f"data: {texts['train'] + texts['held_out']:,} {form}, {kept}"
    learnt = "all of them are trained"
    if facts["answers_only"]:
        how = f" (by {facts['masks']})" if facts["masks"] else ""
        learnt = f"{facts['learnt']:,} of them, the answers, are trained{how}"
    yield f"tokens: {facts['tokens']:,}; {learnt}; the longest sequence has {facts['longest']:,}"
    told = {
        "cut": f"conversations are longer than {facts['length']:,} tokens and were truncated",
        "split": f"texts are longer than {facts['length']:,} tokens and were split into windows",
        "without answer": "windows have no answer and were skipped",
        "apart": "prompts would share a token with their answer and were tokenized separately",
    }
    yield from (f"{facts[name]:,} {line}" for name, line in told.items() if facts[name])
    if not facts["end"] and facts["form"] != "messages":
        yield "the tokenizer has no EOS token, so the model will not learn where a text ends"
    if data.bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in facts["bad"].items())
        yield f"{len(data.bad):,} bad rows were skipped: {reasons}; the first is {data.bad[0]}"


def _fingerprint(encoder: Encoder, *parts: list[Example]) -> str:
    """Digest of all tokens and of the tokenizer."""
    tokenizer = encoder.tokenizer
    digest = hashlib.blake2b(digest_size=16)
    if tokenizer.is_fast:
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
    else:
        digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    for part in parts:
        digest.update(len(part).to_bytes(8))
        for one in part:
            digest.update(len(one).to_bytes(8) + one.ids.tobytes() + one.answer.tobytes())
    return digest.hexdigest()
