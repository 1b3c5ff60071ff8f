"""Texts for fine-tuning: rows of odd files, their form, which tokens are learnt, what is kept."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.finetune import DataConfig, Example, Row, load_tokenizer, read_text, split
from gulliver.finetune.encode import Encoder
from gulliver.finetune.rows import BadRow, TextSample, read_rows, recognise
from gulliver.finetune.texts import TextData
from tests.texts import FORGETFUL, MARKED, PLAIN, STRICT, tokenizer_of

CHAT = [
    {"role": "user", "content": "the answer is?"},
    {"role": "assistant", "content": "forty-two!"},
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "sleeps."},
]


def written(folder: Path, rows: list[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, tokenizer: Any = None, **options: Any) -> tuple[TextData, list[str]]:
    said: list[str] = []
    config = DataConfig(**{"data": (path,), "held_out": 0.0, **options})
    return read_text(config, tokenizer or tokenizer_of(), said.append), said


def learnt_text(tokenizer: Any, example: Example) -> str:
    return tokenizer.decode(example.ids[example.answer])


# --- rows ---------------------------------------------------------------------------------------


def test_lines_of_json_survive_marks_line_ends_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \n{"text": "two"}\n{"text": "cut o\n'
        b'{"text": "n\x00l"}\n{"text": "\xff"}\n[1, 2]\n\xef\xbb\xbf\n{"text": "last"}'
    )
    rows = list(read_rows([path]))
    good = [(row.values["text"], row.source) for row in rows if isinstance(row, Row)]
    assert good == [("one", f"{path}:1"), ("two", f"{path}:4"), ("last", f"{path}:10")]
    bad = [(row.source[-2:], row.reason) for row in rows if isinstance(row, BadRow)]
    assert bad == [
        (":5", "invalid JSON"),
        (":6", "NUL byte"),
        (":7", "invalid UTF-8"),
        (":8", "not a JSON object"),
    ]


def test_a_table_has_quotes_line_breaks_and_rows_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"\xef\xbb\xbfprompt,completion\r\n"
        b'"a, ""b""","two\r\nlines"\r\n'
        b"\r\n"
        b"one field\r\n"
        b"three,fields,here\r\n"
        b'good,row\r\n"open,never closed\r\nmore,rows\r\n'
    )
    rows = list(read_rows([path]))
    good = [(row.values, row.source) for row in rows if isinstance(row, Row)]
    assert good == [
        ({"prompt": 'a, "b"', "completion": "two\nlines"}, f"{path}:2"),
        ({"prompt": "good", "completion": "row"}, f"{path}:7"),
    ]
    bad = [(row.source, row.reason) for row in rows if isinstance(row, BadRow)]
    assert bad == [
        (f"{path}:5", "wrong number of fields"),
        (f"{path}:6", "wrong number of fields"),
        (f"{path}:8", "not a table row"),
    ]


texts = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\r"))


@settings(max_examples=60)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_written_table_round_trips(tmp_path_factory: Any, rows: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("tables") / "a.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_ALL)
        writer.writerows([("prompt", "completion"), *rows])
    found = [tuple(row.values.values()) for row in read_rows([path]) if isinstance(row, Row)]
    assert found == rows


def test_a_parquet_file_has_nested_messages(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # Structs of a table have all fields in each row: those that are absent are None.
    odd = [*CHAT[:1], {"role": "assistant", "content": "forty-two!", "name": "deep thought"}]
    table = pyarrow.Table.from_pylist([{"messages": CHAT, "text": None}, {"messages": odd}])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    data, _ = read(path)
    twice, _ = read(written(tmp_path, [{"messages": CHAT}, {"messages": odd}]))
    assert [one.ids.tolist() for one in data.train] == [one.ids.tolist() for one in twice.train]
    assert data.train[1].source == f"{path}#2"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(GulliverError, match=r"b\.parquet is not a readable Parquet file"):
        list(read_rows([tmp_path / "b.parquet"]))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    inner = tmp_path / "b"
    inner.mkdir()
    (inner / "x.py").write_bytes(b"print(1)\r\n")
    (tmp_path / "a.md").write_text("# first")
    (tmp_path / ".hidden").write_text("no")
    (inner / "__pycache__").mkdir()
    (inner / "__pycache__" / "x.pyc").write_bytes(b"\0")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\r\n\0")
    rows = list(read_rows([tmp_path]))
    assert [row.values["text"] for row in rows if isinstance(row, Row)] == ["# first", "print(1)\n"]
    assert [str(row) for row in rows if isinstance(row, BadRow)] == [
        f"{tmp_path / 'c.png'}: NUL byte: at byte 6"
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(GulliverError, match="has no files"):
        list(read_rows([tmp_path / "empty"]))


def test_a_list_in_a_json_file_is_rows(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_text(' [{"text": "a"}, 5, {"text": "b"}]')
    rows = list(read_rows([path]))
    assert [row.source for row in rows] == [f"{path}#1", f"{path}#2", f"{path}#3"]
    assert isinstance(rows[1], BadRow)


# --- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}], "id": 3}, "messages"),
        ({"instruction": "a", "input": "", "output": "b", "text": "all of it"}, "instruction"),
        ({"prompt": "a", "response": "b"}, "completion"),
        ({"text": "a", "prompt": None, "completion": None}, "text"),
        ({"prompt": "a", "completion": None}, "completion"),
    ],
)
def test_a_form_is_recognised_by_its_columns(values: dict[str, Any], form: str) -> None:
    assert recognise([Row(values, "a:1"), Row({"other": 1}, "a:2")]).name == form


def test_rows_of_several_forms_are_refused_with_counts_and_sources() -> None:
    rows = [
        Row({"text": "a"}, "a:1"),
        Row({"prompt": "a", "completion": "b"}, "a:2"),
        Row({"messages": CHAT}, "b:1"),
        Row({"text": "b"}, "b:2"),
    ]
    with pytest.raises(GulliverError, match="3 forms") as refused:
        recognise(rows)
    for told in (
        "2 of text (first a:1)",
        "1 of completion (first a:2)",
        "1 of messages (first b:1",
    ):
        assert told in str(refused.value)
    assert recognise(rows, "text").rows == 2
    with pytest.raises(
        GulliverError, match=r"a:1 has the columns text; use the columns instruction"
    ):
        recognise(rows, "instruction")


def test_bad_rows_are_counted_listed_and_skipped_or_refused(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "a"}
    bad: list[Any] = [
        [],
        "no JSON {",
        [{"content": "who?"}],
        [ask],
        [ask, {"role": "assistant", "content": "  "}],
        [ask, {"role": "assistant", "content": None}],
        [ask, {"role": "assistant", "content": 5}],
        [ask, {"role": "assistant", "content": [{"type": "image"}]}],
        ["hello"],
        7,
        [{"role": "assistant", "content": "first"}],
        [ask, {"role": "assistant", "content": "half \ud800"}],
    ]
    path = written(tmp_path, [{"messages": CHAT}, *({"messages": one} for one in bad)])
    path.write_text(path.read_text() + '{"other": 1}\n{"mess')
    data, said = read(path)
    assert len(data.train) == 1
    lines = [int(row.source.rpartition(":")[2]) for row in data.bad]
    assert lines == [15, *range(2, 12), 13, 14, 12]
    assert data.facts["bad"] == {
        "invalid JSON": 1,
        "not a list of messages": 2,
        "invalid JSON in messages": 1,
        "message without role": 1,
        "no answer": 1,
        "empty answer": 1,
        "message without content": 1,
        "not text": 2,
        "message with content other than text": 1,
        "not a message": 1,
        "not of the form messages": 1,
        "it begins with an answer, without a message before it": 1,
    }
    assert "14 bad rows were skipped" in said[-1]
    with pytest.raises(GulliverError, match=r":15: .*--bad-rows skip"):
        read(path, bad_rows="refuse")
    only = written(tmp_path, [{"messages": one} for one in bad[2:4]], "only.jsonl")
    with pytest.raises(
        GulliverError, match=r"no training text is left.*2 rows are bad.*message without"
    ):
        read(only)


@pytest.mark.parametrize("form", ["instruction", "completion", "text"])
def test_empty_answers_and_values_that_are_no_text_are_bad(tmp_path: Path, form: str) -> None:
    ask, answer = {
        "instruction": ("instruction", "output"),
        "completion": ("prompt", "completion"),
        "text": ("more", "text"),
    }[form]
    values = [("q", "a"), ("q", ""), ("q", " \n"), ("q", None), ("q", ["a"])]
    path = written(tmp_path, [{ask: q, answer: a} for q, a in values])
    data, _ = read(path)
    assert len(data.train) == 1
    empty = "empty text" if form == "text" else "empty answer"
    assert data.facts["bad"] == {empty: 2, "not text": 2}


def test_an_instruction_is_written_as_alpaca_does(tmp_path: Path) -> None:
    row = {"instruction": "add {them}", "input": "1 and 2", "output": "3"}
    tokenizer = tokenizer_of()
    data, said = read(written(tmp_path, [row, {**row, "input": ""}]), tokenizer)
    whole = tokenizer.decode(data.train[0].ids)
    assert whole.startswith("<s>Below is an instruction that describes a task, paired with")
    assert whole.endswith(
        "### Instruction:\nadd {them}\n\n### Input:\n1 and 2\n\n### Response:\n3</s>"
    )
    assert "Input" not in tokenizer.decode(data.train[1].ids)
    assert [learnt_text(tokenizer, one) for one in data.train] == ["3</s>"] * 2
    assert said[0] == "data: 2 instructions, 0 held out"


# --- masks --------------------------------------------------------------------------------------


def naive_mask(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Writes the conversation message by message, as `PLAIN` says, and looks who is speaking."""
    ids, learnt = [tokenizer.bos_token_id], [False]
    for message in messages:
        is_answer = message["role"] == "assistant"
        content = tokenizer.encode(message["content"], add_special_tokens=False)
        ids += [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>"), *content]
        learnt += [False] + [is_answer] * len(content)
        ends = [tokenizer.convert_tokens_to_ids("<|end|>")]
        ends += tokenizer.encode("\n", add_special_tokens=False)
        ids, learnt = ids + ends, learnt + [is_answer] * len(ends)
    return ids, learnt


words = st.sampled_from(["the", " dog", "fox!", "\n\n", "42", "é", " ", "THE END", "{{ x }}"])
said_by = st.lists(words, min_size=1, max_size=4).map("".join).filter(str.strip)
turns = st.lists(st.tuples(said_by, said_by), min_size=1, max_size=3)


@settings(max_examples=50)
@given(turns, st.booleans())
def test_the_mask_of_a_conversation_is_the_naive_one(
    told: list[tuple[str, str]], marked: bool
) -> None:
    messages = [{"role": "system", "content": "be brief"}] if len(told) % 2 else []
    for question, answer in told:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    tokenizer = tokenizer_of("merging", MARKED if marked else PLAIN)
    ids, learnt = naive_mask(tokenizer, messages)
    found, mask = chat_tokens(tokenizer, messages)
    assert found == ids
    if marked:
        # The template's marks end before the line break.
        breaks = tokenizer.encode("\n", add_special_tokens=False)
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        learnt = [
            is_learnt and not (token in breaks and ids[n - 1] == end)
            for n, (token, is_learnt) in enumerate(zip(ids, learnt, strict=True))
        ]
    assert mask == learnt


def chat_tokens(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    (found,) = Encoder(tokenizer, 5000, True).encode([TextSample("a:1", messages=tuple(messages))])
    assert isinstance(found, list)
    return found[0].ids.tolist(), found[0].answer.tolist()


def test_a_template_that_rewrites_earlier_answers_is_refused_by_name(tmp_path: Path) -> None:
    thinking = [dict(one) for one in CHAT]
    thinking[1]["content"] = "<think>hm</think>forty-two!"
    tokenizer = tokenizer_of(template=FORGETFUL)
    # Where nothing is dropped, and in conversations of one answer, it is as good as any.
    read(written(tmp_path, [{"messages": CHAT}, {"messages": thinking[:2]}]), tokenizer)
    path = written(tmp_path, [{"messages": CHAT}, {"messages": thinking}])
    with pytest.raises(GulliverError, match=r"jsonl:2: the chat template renders.*generation"):
        read(path, tokenizer)
    data, _ = read(path, tokenizer, answers_only="no")
    assert [one.learnt for one in data.train] == [len(one) - 1 for one in data.train]


def test_a_token_that_reaches_into_an_answer_is_refused_by_name(tmp_path: Path) -> None:
    reaching = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "the dog"}]
    path = written(tmp_path, [{"messages": chat}])
    with pytest.raises(GulliverError, match=r"jsonl:1: before and in message 2.*special token"):
        read(path, tokenizer_of(template=reaching))


def test_a_template_that_is_missing_is_refused_and_can_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, [{"messages": CHAT}])
    with pytest.raises(GulliverError, match=r"no chat template.*--chat-template"):
        read(path, tokenizer_of(template=None))
    folder = tmp_path / "model"
    tokenizer_of(template=None).save_pretrained(folder)
    (tmp_path / "template.jinja").write_text(MARKED)
    data, said = read(path, load_tokenizer(folder, tmp_path / "template.jinja"))
    tokenizer = tokenizer_of()
    assert learnt_text(tokenizer, data.train[0]) == "forty-two!<|end|>sleeps.<|end|>"
    assert "template marks" in said[1]
    with pytest.raises(GulliverError, match=r"--chat-template .*none"):
        load_tokenizer(folder, tmp_path / "none")


def test_leading_assistant_message_is_not_learned(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": "good day!"}
    path = written(tmp_path, [{"messages": [greeting, *CHAT]}])
    tokenizer = tokenizer_of(template=PLAIN)
    data, _ = read(path, tokenizer)
    assert not data.bad
    assert learnt_text(tokenizer, data.train[0]) == "forty-two!<|end|>\nsleeps.<|end|>\n"
    assert "good day!" in tokenizer.decode(data.train[0].ids)
    everything, _ = read(path, tokenizer, answers_only="no")
    assert everything.train[0].learnt == len(everything.train[0]) - 1


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    strange = [{"role": "system", "content": "a"}, *CHAT]
    path = written(tmp_path, [{"messages": CHAT}, {"messages": strange}])
    data, _ = read(path, tokenizer_of(template=STRICT))
    assert [str(row) for row in data.bad] == [
        f"{path}:2: the chat template rejects it: the user begins"
    ]


@settings(max_examples=80)
@given(said_by, said_by, st.sampled_from(["merging", "metaspace"]))
def test_a_prompt_is_read_as_it_is_asked_and_its_completion_is_learnt(
    prompt: str, answer: str, kind: str
) -> None:
    tokenizer = tokenizer_of(kind)
    encoder = Encoder(tokenizer, 500, answers_only=True)
    (found,) = encoder.encode([TextSample("a:1", prompt, answer)])
    assert isinstance(found, list)
    asked = tokenizer(prompt)["input_ids"]
    assert found[0].ids[: len(asked)].tolist() == asked
    assert found[0].answer.tolist() == [n >= len(asked) for n in range(len(found[0]))]
    assert found[0].ids[-1] == tokenizer.eos_token_id
    if kind == "merging":
        assert tokenizer.decode(found[0].ids[1:-1]) == prompt + answer
        together = tokenizer.encode(prompt + answer, add_special_tokens=False)
        assert encoder.counts["apart"] == (together != found[0].ids[1:-1].tolist())


# --- lengths ------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(2, 12))
def test_windows_learn_each_token_but_the_first_once(learnt: list[bool], length: int) -> None:
    ids = list(range(100, 100 + len(learnt)))
    windows = split(ids, np.array(learnt), length, "a:1")
    assert all(1 <= len(one) <= length for one in windows)
    found = [int(t) for one in windows for t in one.ids[one.answer]]
    assert found == [t for t, is_learnt in zip(ids[1:], learnt[1:], strict=True) if is_learnt]
    for before, after in pairwise(windows):
        assert before.ids[-1] == after.ids[0]
        assert len(before) == length


def test_long_texts_are_split_and_long_conversations_cut_or_skipped(tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    long = {"prompt": "the fox", "completion": "jumps over the lazy dog" * 9}
    data, said = read(written(tmp_path, [long]), tokenizer, length=20)
    whole = tokenizer(long["prompt"] + long["completion"])["input_ids"]
    assert sum(one.learnt for one in data.train) == len(whole) + 1 - len(
        tokenizer("the fox")["input_ids"]
    )
    assert max(map(len, data.train)) == 20
    assert "1 texts are longer than 20 tokens and were split into windows" in said
    chat = [*CHAT[:3], {"role": "assistant", "content": "x" * 60}]
    late = [{"role": "user", "content": "y" * 60}, CHAT[1]]
    path = written(tmp_path, [{"messages": CHAT}, {"messages": chat}, {"messages": late}])
    data, said = read(path, tokenizer, length=40)
    assert [len(one) <= 40 for one in data.train] == [True, True]
    assert data.facts["cut"] == 1, "the one that is left out is not counted"
    assert "1 conversations are longer than 40 tokens and were truncated" in said
    assert data.facts["bad"] == {"no answer within the length": 1}
    data, _ = read(path, tokenizer, length=40, long_chats="skip")
    assert data.facts["bad"] == {"conversation too long": 2}
    context = "--seq-length 40 exceeds the model's context of 30 tokens"
    with pytest.raises(GulliverError, match=context):
        read_text(DataConfig((path,), length=40), tokenizer, print, context=30)


# --- what is kept for evaluation ----------------------------------------------------------------


def test_a_text_that_occurs_twice_is_on_one_side_with_both(tmp_path: Path) -> None:
    rows = [{"text": f"text {n % 40}"} for n in range(120)]
    data, said = read(written(tmp_path, rows), held_out=0.2)
    sides = [{one.ids.tobytes() for one in part} for part in (data.train, data.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 40
    assert 2 <= len(sides[1]) <= 16
    assert said[0] == f"data: 120 plain texts, {len(data.held_out)} held out"
    # Rows that are added move none of the others.
    new = [{"text": f"new {n}"} for n in range(50)]
    more, _ = read(written(tmp_path, [*new, *rows]), held_out=0.2)
    known = sides[0] | sides[1]
    assert {one.ids.tobytes() for one in more.held_out} & known == sides[1]


@pytest.mark.parametrize("share", [1e-9, 0.999999])
def test_a_small_share_holds_out_one_text_and_a_large_one_leaves_one(
    tmp_path: Path, share: float
) -> None:
    rows = [{"text": f"text {n}"} for n in range(6)]
    data, _ = read(written(tmp_path, rows), held_out=share)
    assert {len(data.train), len(data.held_out)} == {1, 5}
    alone, _ = read(written(tmp_path, rows[:1]), held_out=share)
    assert not alone.held_out


def test_of_a_single_text_windows_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"sentence {n} of the book." for n in range(300)))
    data, said = read(path, length=50, held_out=0.2)
    together = len(data.train) + len(data.held_out)
    assert 0.05 < len(data.held_out) / together < 0.4
    assert said[0] == f"data: 1 plain texts, {len(data.held_out)} of {together} windows held out"
    assert not read(path, length=50)[0].held_out


def test_a_file_is_held_out_and_what_is_in_it_is_not_learnt(tmp_path: Path) -> None:
    path = written(tmp_path, [{"text": f"text {n}"} for n in range(9)])
    other = written(tmp_path, [{"text": "text 3"}, {"text": "text 99"}], "other.jsonl")
    data, _ = read(path, held_out=other)
    assert data.facts["texts"] == {"train": 8, "held_out": 2}
    assert not {o.ids.tobytes() for o in data.held_out} & {o.ids.tobytes() for o in data.train}


def test_the_fingerprint_is_of_data_tokenizer_and_form(tmp_path: Path) -> None:
    rows = [{"prompt": f"a {n}", "completion": "b"} for n in range(9)]
    path = written(tmp_path, rows)
    usual = read(path)[0].fingerprint
    assert read(path)[0].fingerprint == usual
    others = [
        read(path, answers_only="no")[0],
        read(path, held_out=0.3)[0],
        read(path, length=2)[0],
        read(path, tokenizer_of("metaspace"))[0],
        read(written(tmp_path, rows[:8], "b.jsonl"))[0],
    ]
    assert len({usual, *(one.fingerprint for one in others)}) == 6


# --- bad input ----------------------------------------------------------------------------------
