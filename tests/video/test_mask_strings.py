"""Mask-strategy strings and prompts against a naive interpreter of their published meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.video.requests import (
    SHORT_FORMS,
    check_rules,
    cut_references,
    loop_prompts,
    parse_mask_strategy,
    place,
    read_prompt,
)

NUMBER = st.integers(-6, 7)
RULE = st.tuples(st.integers(0, 2), st.integers(-3, 3), NUMBER, NUMBER, st.integers(1, 4))
RATIO = st.sampled_from(["0", "0.25", "1", "1.0"])


def interpreted(
    text: str, loop: int, references: list[list[int]], frames: int, align: int | None
) -> list[tuple[int, float]] | None:
    """The clip as (frame of a reference, edit ratio), (-1, 1.0) where none is given; None: refused.

    A reference is a list of numbers that stand for its frames.
    """
    clip = [(-1, 1.0)] * frames
    for part in text.split(";"):
        values = (part.split(",") + ["0", "0", "0", "0", "1", "0"][part.count(",") + 1 :])[:6]
        of_loop, number, start, target, length = map(int, values[:5])
        if number >= len(references) or number < -len(references):
            return None
        if of_loop != loop:
            continue
        source = references[number]
        for what, size in (("start", len(source)), ("target", frames)):
            at = start if what == "start" else target
            at = at + size if at < 0 else at
            if not 0 <= at < size:
                return None
            if align:
                before = max(b for b in range(0, size, align) if b <= at)
                # Never up to a block that is not whole.
                after = [b for b in range(0, size - align + 1, align) if b > at]
                at = after[0] if after and after[0] - at < at - before else before
            start, target = (at, target) if what == "start" else (start, at)
        if start + length > len(source) or target + length > frames:
            return None
        for n in range(length):
            clip[target + n] = (source[start + n], float(values[5]))
    return clip


@given(
    st.lists(st.tuples(RULE, RATIO, st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 2),
    st.sampled_from([None, 1, 2, 3]),
)
@example([((0, 0, 0, -1, 1), "0", 6)], [4], 8, 0, None)
@example([((0, 0, 0, 5, 3), "0.25", 6)], [6], 8, 0, 3)
def test_mask_strings_are_parsed(
    rules: list, lengths: list[int], frames: int, loop: int, align: int | None
) -> None:
    parts = [",".join([*map(str, numbers), ratio][:shown]) for ((numbers), ratio, shown) in rules]
    text = ";".join(parts)
    references = [[100 * n + f for f in range(size)] for n, size in enumerate(lengths)]
    expected = interpreted(text, loop, references, frames, align)
    try:
        parsed = parse_mask_strategy(text)
        for rule in parsed:
            if not -len(lengths) <= rule.reference < len(lengths):
                raise GulliverError("no such reference")
        placed = place([r for r in parsed if r.loop == loop], lengths, frames, align)
    except GulliverError:
        assert expected is None
        return
    clip = [(-1, 1.0)] * frames
    for p in placed:
        for n in range(p.length):
            frame = references[p.reference][p.reference_start + n]
            clip[p.target_start + n] = (frame, p.edit_ratio)
    assert clip == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,0,0.5", "integers"),
        ("0,0,1_0", "integers"),
        ("0,0,0,0,1,1.5", "between 0 .* and 1 .*, not 1.5"),
        ("0,0,0,0,0", "length is 0, but must be at least 1"),
        ("i2v_haed", "did you mean 'i2v_head'"),
        ("2", "uses loop 2, but there are 2"),
        ("0,-2", "uses reference -2"),
        ("", "references need a mask strategy"),
    ],
)
def test_invalid_mask_strings_are_rejected(text: str, message: str) -> None:
    with pytest.raises(GulliverError, match=message):
        check_rules(parse_mask_strategy(text), references=1, loops=2)


def test_missing_frames_and_references_are_named() -> None:
    for text in ("0,0,3,0,1", "0,0,-4", "0,0,1,0,3"):
        with pytest.raises(GulliverError, match="latent frames of reference 0"):
            place(parse_mask_strategy(text), [3], 5)
    for text in ("0,0,0,4,2", "0,0,0,-1,2"):
        with pytest.raises(GulliverError, match="of the clip"):
            place(parse_mask_strategy(text), [3], 5)
    with pytest.raises(GulliverError, match="aligned: 4"):
        place(parse_mask_strategy("0,0,0,3,5"), [5], 8, align=4)
    with pytest.raises(GulliverError, match="reference 1 is not used"):
        check_rules(parse_mask_strategy("0"), references=2, loops=1)
    with pytest.raises(GulliverError, match="there are 0"):
        check_rules(parse_mask_strategy("0"), references=0, loops=1)


def test_short_forms_give_the_frames_that_their_names_say() -> None:
    def clip(start: int, frames: int) -> Tensor:
        return torch.arange(start, start + frames).view(1, -1, 1, 1).expand(3, -1, 1, 1).float()

    def given_by(form: str, references: list[Tensor], frames: int) -> dict[int, list[float]]:
        """The video frames that stand behind each latent frame of the clip, of 4 to one."""
        cut = cut_references(form, references, unit=4)
        lengths = [(r.shape[1] - 1) // 4 + 1 for r in cut]
        rules = parse_mask_strategy(form)
        check_rules(rules, len(cut), 1)
        found = {}
        for p in place(rules, lengths, frames):
            for n in range(p.length):
                at = p.reference_start + n
                shown = cut[p.reference][0, max(0, 4 * at - 3) : 4 * at + 1].flatten()
                found[p.target_start + n] = shown.tolist()
        return found

    one, two = clip(0, 37), clip(100, 5)
    assert given_by("i2v_head", [one], 4) == {0: [0]}
    assert given_by("i2v_tail", [one], 4) == {3: [36]}
    assert given_by("i2v_loop", [one], 4) == {0: [0], 3: [36]}
    assert given_by("i2v_loop", [one, two], 4) == {0: [0], 3: [104]}
    head, tail = given_by("v2v_head", [one], 11), given_by("v2v_tail", [one], 11)
    assert (list(head), list(tail)) == (list(range(9)), list(range(2, 11)))
    assert (head[0], head[8], tail[10]) == ([0], [29, 30, 31, 32], [33, 34, 35, 36])
    with pytest.raises(
        GulliverError, match="v2v_head_easy uses 65 frames, but the reference has 37"
    ):
        cut_references("v2v_head_easy", [one], unit=4)
    assert set(SHORT_FORMS) >= {"i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail"}


def test_prompts_of_loops() -> None:
    assert loop_prompts("up", 3) == ["up"] * 3
    assert loop_prompts("|0|up|2| left |3|down", 5) == ["up", "up", "left", "down", "down"]
    for prompt, message in (
        ("  ", "prompt is empty"),
        ("|0||1|up", "prompt is empty"),
        ("|1|up", r"has loops \[1\]"),
        ("|0|a|0|b", "must begin at 0"),
        ("|0|a|3|b", "uses loop 3"),
        ("|0", "is not |0|sentence|2|sentence"),
        ("|a|b", "is not |0|sentence|2|sentence"),
    ):
        with pytest.raises(GulliverError, match=message):
            loop_prompts(prompt, 3)


def test_json_in_prompts() -> None:
    assert read_prompt("a cat").text == "a cat"
    fields = {"reference_path": "a.png; b.mp4", "mask_strategy": "0;0,1,0,-1"}
    found = read_prompt(f"|0|up|1|down {json.dumps(fields)}")
    assert found.text == "|0|up|1|down"
    assert found.references == (Path("a.png"), Path("b.mp4"))
    assert found.mask_strategy == "0;0,1,0,-1"
    assert read_prompt('up {"mask_strategy": "0"}').references == ()
    for text, message in (
        ('up {"mask_strategie": "0"}', "'mask_strategie': did you mean 'mask_strategy'"),
        ('up {"mask_strategy": 0}', "must be text, not 0"),
        ('up {"mask_strategy": "0"', "ends in invalid JSON"),
    ):
        with pytest.raises(GulliverError, match=message):
            read_prompt(text)
