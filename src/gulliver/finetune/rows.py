"""Reads rows of JSON Lines, JSON, Parquet, CSV, TSV and plain text, with their positions.

Files may have byte order marks, CRLF, blank lines, truncated lines or invalid UTF-8. An unreadable
row becomes a `BadRow` with its file and line, not an exception, and the caller decides whether to
skip it. A file that is unreadable as a whole (a truncated list, UTF-16) raises an error.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra
from gulliver.io.files import named_errors

MARK, WIDE_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-8, and of UTF-16 and UTF-32."""
PARQUET_ROWS = 1024
LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """A row as values by column, with its file and line."""

    values: dict[str, Any]
    source: str


@dataclass(frozen=True)
class BadRow:
    """An unusable row, with a reason and, after a colon, details."""

    source: str
    why: str

    @property
    def reason(self) -> str:
        return self.why.partition(": ")[0]

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


Rows = Iterator[Row | BadRow]


def read_rows(paths: Iterable[Path]) -> Rows:
    for path in paths:
        for file in _files(Path(path)):
            with named_errors(file, "read"):
                reader = READERS.get(file.suffix.lower(), _text)
                if reader not in (_text, _parquet):
                    _check_encoding(file)
                yield from reader(file)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise GulliverError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not _is_hidden(file.relative_to(path))
    ]
    if not found:
        raise GulliverError(f"folder {path} has no files; add some or pass another folder")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _check_encoding(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(2) in WIDE_MARKS:
            raise GulliverError(
                f"{file} is UTF-16 or UTF-32 according to its first bytes; save it as UTF-8"
            )


def _decoded(content: bytes, source: str) -> str | BadRow:
    if b"\0" in content:
        return BadRow(source, f"NUL byte: at byte {content.index(0)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(source, f"invalid UTF-8: 0x{content[error.start]:02x} at byte {error.start}")


def _text(file: Path) -> Rows:
    text = _decoded(file.read_bytes(), str(file))
    # Universal newlines, as Python reads text.
    yield text if isinstance(text, BadRow) else Row({"text": _lines(text)}, str(file))


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_lines(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            source = f"{file}:{number}"
            text = _decoded(line, source)
            if isinstance(text, BadRow):
                yield text
            elif text.strip():
                yield _object(text, source)


def _object(text: str, source: str) -> Row | BadRow:
    try:
        return _row(json.loads(text), source)
    except (ValueError, RecursionError) as error:
        return BadRow(source, f"invalid JSON: {error}")


def _row(value: Any, source: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, source)
    return BadRow(source, f"not a JSON object: a {type(value).__name__}")


def _json(file: Path) -> Rows:
    with file.open("rb") as opened:
        start = opened.read(64).removeprefix(MARK).lstrip()
    if not start.startswith(b"["):
        yield from _json_lines(file)
        return
    text = _decoded(file.read_bytes(), str(file))
    if isinstance(text, BadRow):
        raise GulliverError(f"{text}, so the list cannot be read; repair it or use JSON Lines")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GulliverError(f"{file} is not a JSON list, or is truncated: {error}") from None
    for number, value in enumerate(values, 1):
        yield _row(value, f"{file}#{number}")


def _table(delimiter: str) -> Callable[[Path], Rows]:
    """Reads a table with a header; quoted fields may contain line breaks."""

    def read(file: Path) -> Rows:
        text = _decoded(file.read_bytes(), str(file))
        if isinstance(text, BadRow):
            raise GulliverError(f"{text}; save the table as UTF-8")
        # The csv module's default limit is meant for cells, not for texts.
        csv.field_size_limit(LONGEST_FIELD)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        columns: list[str] = []
        while True:
            source = f"{file}:{reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                lost = f"{error}, in lines up to {reader.line_num}; check for an unclosed quote"
                yield BadRow(source, f"not a table row: {lost}")
                continue
            if not cells:
                continue
            if not columns:
                columns = _header(file, cells)
            elif len(cells) == len(columns):
                values = {name: _lines(cell) for name, cell in zip(columns, cells, strict=True)}
                yield Row(values, source)
            else:
                yield BadRow(
                    source, f"wrong number of fields: {len(cells)}, the header has {len(columns)}"
                )

    return read


def _header(file: Path, columns: list[str]) -> list[str]:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise GulliverError(f"{file} has two columns {twice[0]!r}; remove one of them")
    return columns


def _parquet(file: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("reading Parquet files needs pyarrow", "finetune") from None
    try:
        opened = parquet.ParquetFile(file)
        _header(file, opened.schema_arrow.names)
        number = 0
        for batch in opened.iter_batches(PARQUET_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{file}#{number}")
    except pyarrow.ArrowException as error:
        raise GulliverError(f"{file} is not a readable Parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}
# Row formats: conversation, instruction, prompt and completion, or plain text.
#
# A data set has one form, detected from the columns; if several match, the richest one is used,
# because some tables repeat the whole prompt in a column ``text``. Instructions are rendered as
# prompts with the Alpaca wording, and a plain text is a completion of an empty prompt. The result
# is `TextSample`s, either with messages or with a prompt and an answer.


COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("conversations",)),
    "instruction": (("instruction", "output"),),
    "completion": (("prompt", "completion"), ("prompt", "response")),
    "text": (("text",),),
}
"""Columns of each form, from the richest to the simplest form."""
KNOWN = "messages; instruction and output; prompt and completion; or text"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Aliases of roles in conversations with `from` and `value`."""

# Wording of Alpaca (Taori et al. 2023), known to models tuned on such data.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class TextSample:
    """Content of a row: messages, or an answer with a (possibly empty) prompt."""

    source: str
    prompt: str = ""
    answer: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: list[Any] | None = None

    @property
    def content(self) -> str:
        """Full content as one text, for comparing rows."""
        return json.dumps(
            [self.prompt, self.answer, self.messages, self.tools], sort_keys=True, default=str
        )


@dataclass(frozen=True)
class Form:
    """The schema of a dataset: its name and columns."""

    name: str
    rows: int

    def parse(self, row: Row) -> TextSample | BadRow:
        given = [c for c in COLUMNS[self.name] if all(row.values.get(n) is not None for n in c)]
        if len(given) > 1:
            names = " and ".join(columns[-1] for columns in given)
            return BadRow(row.source, f"two columns for the same field: {names}")
        columns = given[0] if given else _columns_of(row, self.name)
        if columns is None:
            return BadRow(row.source, f"not of the form {self.name}: it has {_named(row)}")
        try:
            return _PARSERS[self.name](row, columns)
        except _Unusable as error:
            return BadRow(row.source, str(error))


class _Unusable(Exception):
    """An invalid value in a row."""


def recognise(rows: Iterable[Row], form: str = "auto") -> Form:
    """Detects the form of all rows."""
    counts: Counter[str] = Counter()
    first: dict[str, Row] = {}
    unknown: Row | None = None
    for row in rows:
        fits = [name for name in COLUMNS if _columns_of(row, name, filled=True)]
        fits += [name for name in COLUMNS if _columns_of(row, name)]
        if form != "auto":
            fits = [name for name in fits if name == form]
        if fits:
            counts[fits[0]] += 1
            first.setdefault(fits[0], row)
        else:
            unknown = unknown or row
    if not counts:
        _refuse_unknown(unknown, form)
    if len(counts) > 1:
        told = ", ".join(f"{n} of {name} (first {first[name].source})" for name, n in _most(counts))
        raise GulliverError(
            f"the data has rows of {len(counts)} forms: {told}; use files of one form, or select "
            "one with --form NAME, which skips the others"
        )
    return Form(*_most(counts)[0])


def _most(counts: Counter[str]) -> list[tuple[str, int]]:
    return counts.most_common()


def _refuse_unknown(row: Row | None, form: str) -> None:
    wanted = KNOWN if form == "auto" else " and ".join(COLUMNS[form][0])
    if row is None:
        raise GulliverError(f"the data has no readable row; add rows with {wanted}")
    raise GulliverError(
        f"no row has a known form: {row.source} has {_named(row)}; use the columns {wanted}"
    )


def _columns_of(row: Row, form: str, filled: bool = False) -> tuple[str, ...] | None:
    """Returns a row's columns for a form, or None if any is missing (or empty, with `filled`)."""
    for columns in COLUMNS[form]:
        # A table has a column for all rows, with None where a row has no value.
        empty = filled and any(row.values.get(name) is None for name in columns)
        if not empty and all(name in row.values for name in columns):
            return columns
    return None


def _named(row: Row) -> str:
    names = sorted(map(str, row.values))
    return f"the columns {', '.join(names[:8])}" if names else "no columns"


def _text_of(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise _Unusable(f"not text: {column} is a {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unusable(f"not text: {column} has half a surrogate pair") from None
    return value


def _answer_of(value: Any, column: str) -> str:
    text = _text_of(value, column)
    if not text.strip():
        raise _Unusable(f"empty answer: {column}")
    return text


def _plain(row: Row, columns: tuple[str, ...]) -> TextSample:
    text = _text_of(row.values[columns[0]], columns[0])
    if not text.strip():
        raise _Unusable(f"empty text: {columns[0]}")
    return TextSample(row.source, answer=text)


def _completion(row: Row, columns: tuple[str, ...]) -> TextSample:
    prompt, answer = columns
    return TextSample(
        row.source,
        prompt=_text_of(row.values[prompt], prompt),
        answer=_answer_of(row.values[answer], answer),
    )


def _instruction(row: Row, columns: tuple[str, ...]) -> TextSample:
    more = row.values.get("input")
    given = {
        "instruction": _text_of(row.values["instruction"], "instruction"),
        "input": "" if more is None else _text_of(more, "input"),
    }
    words = WITH_INPUT if given["input"].strip() else WITHOUT_INPUT
    answer = _answer_of(row.values["output"], "output")
    return TextSample(row.source, prompt=words.format(**given), answer=answer)


def _messages(row: Row, columns: tuple[str, ...]) -> TextSample:
    given = _from_json(row.values[columns[0]], columns[0])
    if not isinstance(given, list) or not given:
        raise _Unusable(f"not a list of messages: {columns[0]} is a {type(given).__name__}")
    messages = tuple(_message(one, number) for number, one in enumerate(given, 1))
    answers = [(n, one) for n, one in enumerate(messages, 1) if one["role"] == "assistant"]
    if not answers:
        raise _Unusable("no answer: no message has the role assistant")
    for number, one in answers:
        if not one.get("content", "").strip() and not one.get("tool_calls"):
            raise _Unusable(f"empty answer: message {number}")
    tools = _from_json(row.values.get("tools") or None, "tools")
    if tools is not None and not isinstance(tools, list):
        raise _Unusable(f"not a list of tools: tools is a {type(tools).__name__}")
    return TextSample(row.source, messages=messages, tools=tools)


def _from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"invalid JSON in {column}: {error}") from None


def _message(given: Any, number: int) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _Unusable(f"not a message: message {number} is a {type(given).__name__}")
    # Tables have every message field in every message, with None if it is missing.
    found = {name: value for name, value in given.items() if value is not None}
    if "from" in found and "role" not in found:
        found["role"] = ROLES.get(str(found["from"]), found["from"])
        found["content"] = found.pop("value", None)
        del found["from"]
    role = found.get("role")
    if not isinstance(role, str) or not role:
        raise _Unusable(f"message without role: message {number}")
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if content is None:
        if not found.get("tool_calls"):
            raise _Unusable(f"message without content: message {number}")
        found.pop("content", None)
        return found
    return {**found, "content": _text_of(content, f"message {number}")}


def _part(part: Any, number: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise _Unusable(f"message with content other than text: message {number}")
    return part["text"]


_PARSERS = {
    "messages": _messages,
    "instruction": _instruction,
    "completion": _completion,
    "text": _plain,
}
