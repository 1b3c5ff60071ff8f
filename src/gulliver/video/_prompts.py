"""What the prompts of Open-Sora say besides a sentence: other sentences for later loops, and JSON.

    |0|the digit 3 moving left|2|the digit 3 moving up
    the digit 3 moving left {"reference_path": "three.png", "mask_strategy": "0"}

A sentence holds from the loop before it on. The JSON names references and their mask strategy
(`_mask_strings.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gulliver.data import read_utf8
from gulliver.errors import GulliverError, nearest
from gulliver.video._mask_strings import numbered

FIELDS = ("reference_path", "mask_strategy")
"""Fields that the JSON of a prompt may have."""


@dataclass(frozen=True)
class Prompt:
    """A prompt without its JSON, and what that said."""

    text: str
    references: tuple[Path, ...] = ()
    mask_strategy: str = ""


def read_prompts(path: Path) -> list[str]:
    """Reads a text file with a prompt on each line."""
    if not path.is_file():
        raise GulliverError(f"{path} does not exist: name a text file with a prompt on each line")
    prompts = [line for line in read_utf8(path).splitlines() if line.strip()]
    if not prompts:
        raise GulliverError(f"{path} holds no prompt: write one on each line")
    return prompts


def read_prompt(text: str) -> Prompt:
    """Reads a prompt with the JSON at its end, if there is one."""
    sentence, brace, rest = text.partition("{")
    if not brace:
        return Prompt(text)
    try:
        pairs = json.loads(brace + rest, object_pairs_hook=list)
    except ValueError as error:
        raise GulliverError(
            f"the prompt {text[:60]!r} ends in no JSON ({error}): write such as "
            '{"reference_path": "a.png", "mask_strategy": "0"}'
        ) from None
    fields = dict[str, str]()
    for name, value in pairs:
        if name not in FIELDS:
            raise GulliverError(
                f"the JSON of a prompt has the unknown field {name!r}: {nearest(name, FIELDS)}"
            )
        if not isinstance(value, str):
            raise GulliverError(f"{name} in the JSON of a prompt must be text, not {value!r}")
        if name in fields:
            raise GulliverError(
                f"the JSON of a prompt says {name} twice, {fields[name]!r} and {value!r}: say it "
                "once, with semicolons between several"
            )
        fields[name] = value
    paths = [p.strip() for p in fields[FIELDS[0]].split(";")] if FIELDS[0] in fields else []
    if not all(paths):
        raise GulliverError(
            f"reference_path {fields[FIELDS[0]]!r} in the JSON of a prompt has an empty entry: "
            "write such as a.png;b.png, or leave the field out"
        )
    return Prompt(sentence.strip(), tuple(map(Path, paths)), fields.get(FIELDS[1], ""))


def loop_prompts(prompt: str, loops: int) -> list[str]:
    """Returns the sentence of each loop."""
    if not prompt.startswith("|"):
        _check_sentence(prompt)
        return [prompt] * loops
    parts = prompt.split("|")[1:]
    starts, sentences = parts[::2], [part.strip() for part in parts[1::2]]
    if len(starts) != len(sentences) or not all(start.strip().isdecimal() for start in starts):
        raise GulliverError(
            f"the prompt {prompt[:60]!r} is not |0|sentence|2|sentence, with a loop before each"
        )
    numbers = [int(start) for start in starts]
    if numbers[0] != 0 or any(a >= b for a, b in pairwise(numbers)):
        raise GulliverError(
            f"the prompt {prompt[:60]!r} names loops {numbers}: they begin at 0 and ascend"
        )
    if numbers[-1] >= loops:
        raise GulliverError(
            f"the prompt {prompt[:60]!r} names loop {numbers[-1]}: there is "
            f"{numbered('loop', loops)}"
        )
    for sentence in sentences:
        _check_sentence(sentence)
    ends = [*numbers[1:], loops]
    return [
        sentence
        for sentence, start, end in zip(sentences, numbers, ends, strict=True)
        for _ in range(start, end)
    ]


def _check_sentence(sentence: str) -> None:
    if not sentence.strip():
        raise GulliverError(
            "the prompt is empty: write something such as 'the digit 3 moving left'"
        )
