"""Mask strategies of Open-Sora, as text: which frames of a clip are given, and by which reference.

    loop,reference,reference_start,target_start,length,edit_ratio;...

Each rule puts `length` frames of a reference, from `reference_start`, into the clip of a loop, at
`target_start`. What is left out at the end of a rule is 0,0,0,0,1,0: the first frame of the first
reference becomes the first frame. Negative numbers count from the end. Frames are latent frames
(`gulliver.models.Autoencoder.latent_shape`). An edit ratio of 0 keeps the frames as they are; more
lets them be generated anew from that noise level on. Later rules replace what earlier ones put.

Short forms are those of Open-Sora 2.0: `i2v_head`, `i2v_tail` and `i2v_loop` give the first frame,
the last, or both, `v2v_head` and `v2v_tail` the beginning or the end of the clip.

Read `parse_mask_strategy`, then `place`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gulliver.errors import GulliverError, nearest

SHAPE = "loop,reference,reference_start,target_start,length,edit_ratio"
DEFAULTS = (0, 0, 0, 0, 1)

SHORT_FORMS: dict[str, str] = {
    "i2v_head": "0,0,0,0,1",
    "i2v_tail": "0,-1,-1,-1,1",
    "i2v_loop": "0,0,0,0,1;0,-1,-1,-1,1",
    "v2v_head": "0,0,0,0,9",
    "v2v_tail": "0,0,-9,-9,9",
    "v2v_head_easy": "0,0,0,0,17",
    "v2v_tail_easy": "0,0,-17,-17,17",
}
"""Condition types of Open-Sora 2.0, as rules."""


@dataclass(frozen=True)
class MaskRule:
    """One rule of a mask strategy; negative numbers count from the end."""

    loop: int = 0
    reference: int = 0
    reference_start: int = 0
    target_start: int = 0
    length: int = 1
    edit_ratio: float = 0.0

    def __str__(self) -> str:
        ends = (self.reference_start, self.target_start, self.length, f"{self.edit_ratio:g}")
        return ",".join(map(str, (self.loop, self.reference, *ends)))


@dataclass(frozen=True)
class FramePlacement:
    """Frames of a reference in a clip, all numbers from the start."""

    reference: int
    reference_start: int
    target_start: int
    length: int
    edit_ratio: float

    @property
    def targets(self) -> range:
        """Frames of the clip."""
        return range(self.target_start, self.target_start + self.length)


def parse_mask_strategy(text: str) -> tuple[MaskRule, ...]:
    """Reads a mask strategy, or a short form; an empty text has no rules."""
    text = text.strip()
    if not text:
        return ()
    text = SHORT_FORMS.get(text, text)
    if text[0].isalpha():
        raise GulliverError(
            f"unknown mask strategy {text!r}: {nearest(text, SHORT_FORMS)}, or write {SHAPE}"
        )
    return tuple(_rule(part.strip()) for part in text.split(";"))


def _rule(text: str) -> MaskRule:
    fields = text.split(",")
    try:
        if "_" in text or not text.isascii():  # Python reads 1_0 as 10.
            raise ValueError
        numbers = [int(field) for field in fields[:5]]
        ratios = [float(field) for field in fields[5:]]
    except ValueError:
        numbers, ratios = [], []
    if not numbers or len(ratios) > 1:
        raise GulliverError(
            f"mask strategy {text!r} is not {SHAPE}, such as 0,0,0,0,1,0: whole numbers, and a "
            "ratio at the end"
        )
    rule = MaskRule(*numbers, *DEFAULTS[len(numbers) :], edit_ratio=ratios[0] if ratios else 0.0)
    if not 0 <= rule.edit_ratio <= 1:
        raise GulliverError(
            f"mask strategy {text!r}: an edit ratio is between 0 (keep) and 1 (make anew), not "
            f"{rule.edit_ratio:g}"
        )
    for name, value, least in (("loop", rule.loop, 0), ("length", rule.length, 1)):
        if value < least:
            raise GulliverError(
                f"mask strategy {text!r}: {name} is {value}, it must be at least {least}"
            )
    return rule


def check_rules(rules: Sequence[MaskRule], references: int, loops: int) -> None:
    """Refuses rules of loops or references that are not there, and references without a rule."""
    if references and not rules:
        raise GulliverError(
            "references without a mask strategy: say where they go, such as i2v_head or "
            "0,0,0,0,1 for the first frame"
        )
    used = set()
    for rule in rules:
        for noun, number, least, count in (
            ("loop", rule.loop, 0, loops),
            ("reference", rule.reference, -references, references),
        ):
            if not least <= number < count:
                there = numbered(noun, count)
                raise GulliverError(
                    f"mask strategy '{rule}' names {noun} {number}: there is {there}"
                )
        used.add(rule.reference % references)
    if len(used) < references:
        idle = min(set(range(references)) - used)
        raise GulliverError(f"reference {idle} is in no rule of the mask strategy: leave it out")


def numbered(noun: str, count: int) -> str:
    """Says which numbers there are: no loop, loop 0 only, or loop 0 to 2."""
    if count < 2:
        return f"{noun} 0 only" if count else f"no {noun}"
    return f"{noun} 0 to {count - 1}"


def place(
    rules: Sequence[MaskRule],
    lengths: Sequence[int],
    frames: int,
    align: int | None = None,
) -> list[FramePlacement]:
    """Finds which frames the rules of a loop put where."""
    found = []
    for rule in rules:
        number = rule.reference % len(lengths)
        starts = [
            _start_in(what, size, start, rule, align)
            for what, size, start in (
                (f"reference {number}", lengths[number], rule.reference_start),
                ("the clip", frames, rule.target_start),
            )
        ]
        found.append(FramePlacement(number, starts[0], starts[1], rule.length, rule.edit_ratio))
    return found


def _start_in(what: str, size: int, start: int, rule: MaskRule, align: int | None) -> int:
    """Returns the frame of a reference, or of the clip, at which a rule begins."""
    begin = start + size if start < 0 else start
    if align is not None and 0 <= begin < size:
        begin = _aligned(begin, align, size)
    if not 0 <= begin < begin + rule.length <= size:
        aligned = f" (aligned: {begin})" if begin not in (start, start + size) else ""
        raise GulliverError(
            f"mask strategy '{rule}' names {rule.length} latent frames of {what} from "
            f"{start}{aligned} on: it has {size}"
        )
    return begin


def _aligned(start: int, align: int, size: int) -> int:
    """Returns the multiple of `align` nearest to `start` at which a whole block begins."""
    # Ties, and what is beyond the last whole block, go down, as in the public code.
    block = start // align
    if start % align > align / 2 and block < size // align - 1:
        block += 1
    return block * align


def cut_references(text: str, references: Sequence[Tensor], unit: int) -> list[Tensor]:
    """Cuts references to the frames that a short form takes of them; otherwise they stay whole."""
    form, found = text.strip(), list(references)
    if form not in SHORT_FORMS or not found:
        return found
    if form == "i2v_loop":
        return [found[0][:, :1], *found[1:-1], found[-1][:, -1:]]
    if form == "i2v_head":
        return [found[0][:, :1], *found[1:]]
    if form == "i2v_tail":
        return [*found[:-1], found[-1][:, -1:]]
    count = (16 if form.endswith("easy") else 8) * unit + 1
    if found[0].shape[1] < count:
        raise GulliverError(
            f"{form} gives {count} frames, the reference has {found[0].shape[1]}: write a mask "
            f"strategy with a shorter length, {SHAPE}"
        )
    found[0] = found[0][:, :count] if "head" in form else found[0][:, -count:]
    return found
