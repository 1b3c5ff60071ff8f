"""Scores in captions, word for word as the public versions write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gulliver.data import Bucket
from gulliver.data.records import with_scores
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError

SCORES = {"aes": 5.53, "flow": 10.0, "motion_score": 4.0, "cmotion": "pan left"}


def test_score_captions_match_each_version() -> None:
    text = "a cat"
    assert with_scores(text, SCORES, "none") == "a cat"
    assert with_scores(text, SCORES, "1.2") == (
        "a cat aesthetic score: 5.5. motion score: 10.0. camera motion: pan left."
    )
    assert with_scores(text, SCORES, "1.3") == (
        "a cat. The aesthetic score is good. The motion strength is very high. "
        "camera motion: pan left."
    )
    assert with_scores(text, SCORES, "2.0") == "a cat 4 motion score."
    for style in ("1.2", "1.3", "2.0"):
        told = with_scores("a cat.", SCORES, style)
        assert with_scores(told, SCORES, style) == told
        assert with_scores("a cat.", {"aes": None, "flow": None}, style) == "a cat."
    with pytest.raises(GulliverError, match="unknown style of scores"):
        with_scores(text, SCORES, "1.1")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            "aes",
            {3.99: "terrible", 4.0: "very poor", 4.5: "poor", 5.0: "fair", 5.5: "good"}
            | {6.0: "very good", 6.49: "very good", 6.5: "excellent"},
        ),
        (
            "flow",
            {0.49: "very low", 0.5: "low", 2.0: "fair", 5.0: "high", 10.0: "very high"}
            | {19.9: "very high", 20.0: "extremely high", 900.0: "extremely high"},
        ),
    ],
)
def test_words_change_at_the_published_thresholds(column: str, words: dict[float, str]) -> None:
    name = {"aes": "aesthetic score", "flow": "motion strength"}[column]
    for value, word in words.items():
        assert with_scores("x.", {column: value}, "1.3") == f"x. The {name} is {word}."


def test_a_caption_without_a_score_or_with_all_of_them_stays_as_it_is() -> None:
    nan = float("nan")
    for style in ("1.2", "1.3", "2.0"):
        told = with_scores("a cat", SCORES, style)
        told = told.removesuffix(".") if style == "1.3" else told
        assert with_scores(told, SCORES, style) == told
        for none in ({}, dict.fromkeys(SCORES, nan), dict.fromkeys(SCORES), {"cmotion": " "}):
            assert with_scores("a cat", none, style) == "a cat"
    assert with_scores("a cat", {"aes": 5, "flow": nan}, "1.2") == "a cat aesthetic score: 5.0."
    assert with_scores("a cat", {"aes": nan, "flow": 3}, "1.3") == (
        "a cat. The motion strength is fair."
    )


@pytest.mark.parametrize(
    ("style", "reads", "header", "cells", "extra"),
    [
        ("1.2", "aes, flow, cmotion", "motion_score,match", "5,3", ("cmotion", "pan")),
        ("1.3", "aes, flow, cmotion", "aes,match", ",3", ("flow", "3")),
        ("2.0", "motion_score", "aes,flow", "5,3", ("motion_score", "4")),
    ],
)
def test_a_table_without_the_scores_of_a_style_is_refused(
    style: str, reads: str, header: str, cells: str, extra: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "a.gif").write_bytes(b"never opened: the table states all")
    table, buckets = tmp_path / "clips.csv", [Bucket(1, 32, 32)]
    lines = [f"path,text,num_frames,height,width,fps,{header}", f"a.gif,a cat,1,32,32,8,{cells}"]
    table.write_text("\n".join(lines))
    for source, values in ((table, "path, text, num_frames"), (tmp_path, r"path, text\)$")):
        with pytest.raises(GulliverError, match=f"columns {reads}, .* values: {values}"):
            ClipTable(source, buckets, scores=style)
    table.write_text("\n".join(map(",".join, zip(lines, extra, strict=True))))
    assert ClipTable(table, buckets, scores=style).rows[0].text != "a cat"
