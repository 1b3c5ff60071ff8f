"""Requests for clips, and Open-Sora's mask strategies: which frames are given by which reference.

    loop,reference,reference_start,target_start,length,edit_ratio;...

Each rule copies `length` frames of a reference, from `reference_start`, into the clip of a loop, at
`target_start`. Omitted values at the end of a rule default to 0,0,0,0,1,0: the first frame of the
first reference becomes the first frame. Negative numbers count from the end. Frames are latent
frames (`gulliver.models.Autoencoder.latent_shape`). An edit ratio of 0 keeps the frames unchanged;
larger ones regenerate them from that noise level. Later rules override earlier ones.

Short forms are those of Open-Sora 2.0: `i2v_head`, `i2v_tail` and `i2v_loop` give the first frame,
the last, or both, `v2v_head` and `v2v_tail` the beginning or the end of the clip.

Start with `parse_mask_strategy`, then `place`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from gulliver.data.clips import Bucket
from gulliver.data.records import read_utf8
from gulliver.errors import GulliverError, nearest
from gulliver.jobs.display import Display
from gulliver.jobs.log import derive
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.video.config import SamplingConfig
from gulliver.video.diffusion import guidance_of
from gulliver.video.media import check_pixels, fit

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
    """Frames of a reference in a clip, with non-negative indices."""

    reference: int
    reference_start: int
    target_start: int
    length: int
    edit_ratio: float

    @property
    def targets(self) -> range:
        return range(self.target_start, self.target_start + self.length)


def parse_mask_strategy(text: str) -> tuple[MaskRule, ...]:
    """Parses a mask strategy or a short form; an empty text has no rules."""
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
        if "_" in text or not text.isascii():  # Python parses 1_0 as 10.
            raise ValueError
        numbers = [int(field) for field in fields[:5]]
        ratios = [float(field) for field in fields[5:]]
    except ValueError:
        numbers, ratios = [], []
    if not numbers or len(ratios) > 1:
        raise GulliverError(
            f"mask strategy {text!r} is not {SHAPE}; use for example 0,0,0,0,1,0: integers, and a "
            "ratio at the end"
        )
    rule = MaskRule(*numbers, *DEFAULTS[len(numbers) :], edit_ratio=ratios[0] if ratios else 0.0)
    if not 0 <= rule.edit_ratio <= 1:
        raise GulliverError(
            f"mask strategy {text!r}: the edit ratio must be between 0 (keep) and 1 (regenerate), "
            f"not {rule.edit_ratio:g}"
        )
    for name, value, least in (("loop", rule.loop, 0), ("length", rule.length, 1)):
        if value < least:
            raise GulliverError(
                f"mask strategy {text!r}: {name} is {value}, but must be at least {least}"
            )
    return rule


def check_rules(rules: Sequence[MaskRule], references: int, loops: int) -> None:
    """Raises an error for unknown loops or references, and for references without a rule."""
    if references and not rules:
        raise GulliverError(
            "references need a mask strategy, such as i2v_head or 0,0,0,0,1 for the first frame"
        )
    used = set()
    for rule in rules:
        for noun, number, least, count in (
            ("loop", rule.loop, 0, loops),
            ("reference", rule.reference, -references, references),
        ):
            if not least <= number < count:
                raise GulliverError(
                    f"mask strategy '{rule}' uses {noun} {number}, but there are {count}, numbered "
                    "from 0"
                )
        used.add(rule.reference % references)
    if len(used) < references:
        idle = min(set(range(references)) - used)
        raise GulliverError(f"reference {idle} is not used by the mask strategy; omit it")


def place(
    rules: Sequence[MaskRule],
    lengths: Sequence[int],
    frames: int,
    align: int | None = None,
) -> list[FramePlacement]:
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
    """Returns the first frame of a rule's range in a reference or in the clip."""
    begin = start + size if start < 0 else start
    if align is not None and 0 <= begin < size:
        begin = _aligned(begin, align, size)
    if not 0 <= begin < begin + rule.length <= size:
        aligned = f" (aligned: {begin})" if begin not in (start, start + size) else ""
        raise GulliverError(
            f"mask strategy '{rule}' needs {rule.length} latent frames of {what}, starting at "
            f"{start}{aligned}, but it has {size}"
        )
    return begin


def _aligned(start: int, align: int, size: int) -> int:
    """Returns the nearest multiple of `align` to `start` at which a whole block fits."""
    # Ties, and starts beyond the last whole block, are rounded down, as in the reference code.
    block = start // align
    if start % align > align / 2 and block < size // align - 1:
        block += 1
    return block * align


def cut_references(text: str, references: Sequence[Tensor], unit: int) -> list[Tensor]:
    """Truncates references to the frames that a short form uses; otherwise they are unchanged."""
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
            f"{form} uses {count} frames, but the reference has {found[0].shape[1]}; write a mask "
            f"strategy with a shorter length, {SHAPE}"
        )
    found[0] = found[0][:, :count] if "head" in form else found[0][:, -count:]
    return found


# Open-Sora's prompt syntax: sentences for later loops, and JSON.
#
#     |0|the digit 3 moving left|2|the digit 3 moving up
#     the digit 3 moving left {"reference_path": "three.png", "mask_strategy": "0"}
#
# A sentence applies from the loop whose number precedes it. The JSON holds references and their
# mask strategy (`requests.py`).


FIELDS = ("reference_path", "mask_strategy")
"""Fields of a prompt's JSON."""


@dataclass(frozen=True)
class Prompt:
    """A prompt without its JSON, and the fields of that JSON."""

    text: str
    references: tuple[Path, ...] = ()
    mask_strategy: str = ""


def read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise GulliverError(f"{path} does not exist; pass a text file with one prompt per line")
    prompts = [line for line in read_utf8(path).splitlines() if line.strip()]
    if not prompts:
        raise GulliverError(f"{path} has no prompts; write one per line")
    return prompts


def read_prompt(text: str) -> Prompt:
    sentence, brace, rest = text.partition("{")
    if not brace:
        return Prompt(text)
    try:
        fields = json.loads(brace + rest)
    except ValueError as error:
        raise GulliverError(
            f"the prompt {text[:60]!r} ends in invalid JSON ({error}); write for example "
            '{"reference_path": "a.png", "mask_strategy": "0"}'
        ) from None
    for name, value in fields.items():
        if name not in FIELDS:
            raise GulliverError(
                f"the JSON of a prompt has the unknown field {name!r}: {nearest(name, FIELDS)}"
            )
        if not isinstance(value, str):
            raise GulliverError(f"{name} in the JSON of a prompt must be text, not {value!r}")
    paths = [
        Path(path.strip()) for path in fields.get("reference_path", "").split(";") if path.strip()
    ]
    return Prompt(sentence.strip(), tuple(paths), fields.get("mask_strategy", ""))


def loop_prompts(prompt: str, loops: int) -> list[str]:
    if not prompt.startswith("|"):
        _check_sentence(prompt)
        return [prompt] * loops
    parts = prompt.split("|")[1:]
    starts, sentences = parts[::2], [part.strip() for part in parts[1::2]]
    if len(starts) != len(sentences) or not all(start.strip().isdecimal() for start in starts):
        raise GulliverError(
            f"the prompt {prompt[:60]!r} is not |0|sentence|2|sentence; put a loop number before "
            "each sentence"
        )
    numbers = [int(start) for start in starts]
    if numbers[0] != 0 or any(a >= b for a, b in pairwise(numbers)):
        raise GulliverError(
            f"the prompt {prompt[:60]!r} has loops {numbers}, which must begin at 0 and increase"
        )
    if numbers[-1] >= loops:
        raise GulliverError(
            f"the prompt {prompt[:60]!r} uses loop {numbers[-1]}, but there are {loops}, numbered "
            "from 0"
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
        raise GulliverError("the prompt is empty; write for example 'the digit 3 moving left'")


# Generation requests: a clip from a sentence, with given frames, negative prompt and loops.
#
# A `Request` is one clip, generated in *loops*: each loop samples a `ClipPiece` of the bucket's
# length, which begins with the last frames of the clip so far; so a clip of L loops has c + L (F -
# c) frames, with F frames per bucket and c condition frames. The given frames of a piece follow
# from the mask strategy (`requests.py`), `given` and the condition.
#
# Nothing here depends on a model: `made_by_loops` takes a sampling function, and `given_latents` an
# autoencoder. Start with `Request`, `piece_of`, `made_by_loops`, `given_latents`.


@dataclass(frozen=True)
class Request:
    """One clip to generate.

    Pictures and clips are floats [3, T, H, W] in [-1, 1], of any height and width: they are scaled
    and cropped to the clip's size, and converted to the autoencoder's dtype.

    Attributes:
        prompt: sentence that describes the clip, or ``|0|sentence|2|sentence`` with the loop from
            which each sentence applies.
        bucket: shape of the clip, or of each loop's piece of it.
        seed: seed of the noise; `loop_seed` derives those of later loops.
        given: picture, or beginning of the clip (4 k + 1 frames).
        negative_prompt: negative prompt; empty: no caption.
        references: pictures and clips used by the mask strategy.
        mask_strategy: rules ``loop,reference,reference_start,target_start,length,edit_ratio;...``
            or a short form such as ``i2v_head``.
        align: rules begin at multiples of this many latent frames; None: anywhere.
        loops: number of pieces of the clip.
        condition_frames: number of final frames (4 k + 1) that the next loop begins with.
        condition_edit: edit ratio of these frames.
    """

    prompt: str
    bucket: Bucket
    seed: int = 0
    given: Tensor | None = None
    negative_prompt: str = ""
    references: tuple[Tensor, ...] = ()
    mask_strategy: str = ""
    align: int | None = None
    loops: int = 1
    condition_frames: int | None = None
    condition_edit: float = 0.0


@dataclass(frozen=True)
class ClipPiece:
    """The part of a request that one loop samples."""

    # Sentence that describes the piece.
    prompt: str
    # Negative prompt; empty: no caption.
    negative_prompt: str
    bucket: Bucket
    seed: int
    # Pictures and clips used by the rules.
    references: tuple[Tensor, ...] = ()
    rules: tuple[MaskRule, ...] = ()
    # Rules begin at multiples of this many latent frames; None: anywhere.
    align: int | None = None
    # Frames that the piece begins with, or None; not part of any rule.
    head: Tensor | None = None
    # Edit ratio of the head.
    head_edit: float = 0.0

    @property
    def conditioned(self) -> bool:
        return bool(self.rules) or self.head is not None


def loop_seed(seed: int, loop: int) -> int:
    """Returns the noise seed of a loop; loop 0 uses the request's seed."""
    return derive(seed, 5, loop) if loop else seed


def piece_of(request: Request, loop: int, clip: Tensor | None, unit: int) -> ClipPiece:
    rules = [rule for rule in parse_mask_strategy(request.mask_strategy) if rule.loop == loop]
    head = request.given if clip is None else clip[:, -(request.condition_frames or 1) :]
    return ClipPiece(
        prompt=loop_prompts(request.prompt, request.loops)[loop],
        negative_prompt=request.negative_prompt,
        bucket=request.bucket,
        seed=loop_seed(request.seed, loop),
        references=tuple(cut_references(request.mask_strategy, request.references, unit)),
        rules=tuple(rules),
        align=request.align,
        head=head,
        head_edit=0.0 if clip is None else request.condition_edit,
    )


def made_by_loops(
    requests: Sequence[Request],
    sample: Callable[[list[ClipPiece]], list[Tensor]],
    batch_size: int,
    unit: int,
    show: bool = False,
) -> list[Tensor]:
    clips: list[Tensor] = []
    with Display("generating", sum(r.loops for r in requests), enabled=show) as display:
        for loop in range(max((r.loops for r in requests), default=0)):
            going = [n for n, request in enumerate(requests) if loop < request.loops]
            pieces = [piece_of(requests[n], loop, clips[n] if loop else None, unit) for n in going]
            made = _in_batches(pieces, sample, batch_size, display.advance)
            if not loop:
                clips = made
                continue
            for n, piece in zip(going, made, strict=True):
                clips[n] = torch.cat([clips[n], piece[:, requests[n].condition_frames :]], dim=1)
    return clips


def _in_batches(
    pieces: list[ClipPiece],
    sample: Callable[[list[ClipPiece]], list[Tensor]],
    batch_size: int,
    advance: Callable[[int], None],
) -> list[Tensor]:
    groups: dict[tuple[Bucket, bool], list[int]] = {}
    for index, piece in enumerate(pieces):
        groups.setdefault((piece.bucket, piece.conditioned), []).append(index)
    clips: dict[int, Tensor] = {}
    for members in groups.values():
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            clips.update(zip(part, sample([pieces[index] for index in part]), strict=True))
            advance(len(part))
    return [clips[index] for index in range(len(pieces))]


def given_latents(
    pieces: Sequence[ClipPiece], autoencoder: VideoAutoencoder, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Encodes the given frames and puts their latents at the requested positions."""
    if not pieces[0].conditioned:
        return None, None
    bucket = pieces[0].bucket
    shape = autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
    latents = torch.zeros(len(pieces), *shape, device=device)
    mask = torch.ones(len(pieces), shape[1], device=device)
    clips = [[*p.references, *([] if p.head is None else [p.head])] for p in pieces]
    encoded = iter(_encoded([clip for some in clips for clip in some], bucket, autoencoder, device))
    for number, (piece, some) in enumerate(zip(pieces, clips, strict=True)):
        found = [next(encoded) for _ in some]
        for p in _placements(piece, [latent.shape[1] for latent in found], shape[1]):
            source = slice(p.reference_start, p.reference_start + p.length)
            target = slice(p.target_start, p.target_start + p.length)
            latents[number, :, target] = found[p.reference][:, source]
            mask[number, target] = p.edit_ratio
    return latents, mask


def _placements(piece: ClipPiece, lengths: Sequence[int], frames: int) -> list[FramePlacement]:
    references = len(piece.references)
    found = place(piece.rules, lengths[:references], frames, piece.align)
    if piece.head is not None:
        found.append(FramePlacement(references, 0, 0, lengths[-1], piece.head_edit))
    return found


def _encoded(
    clips: Sequence[Tensor], bucket: Bucket, autoencoder: VideoAutoencoder, device: torch.device
) -> list[Tensor]:
    weight = next(autoencoder.parameters()) if isinstance(autoencoder, torch.nn.Module) else None
    dtype = torch.float32 if weight is None else weight.dtype
    # Scale in float32 or higher: half precision would round pixel positions.
    wide = torch.promote_types(dtype, torch.float32)
    found: dict[int, Tensor] = {}
    for frames in {clip.shape[1] for clip in clips}:
        members = [n for n, clip in enumerate(clips) if clip.shape[1] == frames]
        fitted = [fit(clips[n].to(wide), bucket.height, bucket.width) for n in members]
        batch = torch.stack(fitted).to(device, dtype)
        found.update(zip(members, autoencoder.encode(batch), strict=True))
    return [found[n] for n in range(len(clips))]


def check_request(request: Request, sampling: SamplingConfig) -> None:
    guidance = guidance_of(sampling)
    loop_prompts(request.prompt, request.loops if request.loops > 0 else 1)
    rules = parse_mask_strategy(request.mask_strategy)
    check_rules(rules, len(request.references), request.loops)
    for number, clip in enumerate(request.references):
        check_pixels(f"reference {number}", clip)
    if request.given is not None:
        check_pixels("the given picture or clip", request.given)
    if request.align is not None and request.align < 1:
        raise GulliverError(f"align={request.align} must be at least 1")
    if request.align is not None and not rules:
        raise GulliverError(f"align={request.align} has no effect without a mask strategy")
    if request.negative_prompt and guidance.text == 1:
        raise GulliverError(
            f"the negative prompt {request.negative_prompt[:60]!r} has no effect with guidance 1; "
            "use a --guidance such as 3"
        )
    conditioned = request.given is not None or bool(rules) or request.loops > 1
    if guidance.image != 1 and not conditioned:
        raise GulliverError(
            f"image guidance {guidance.image:g} has no effect without given frames; pass a picture "
            "or references"
        )
    _check_loops(request)


def _check_loops(request: Request) -> None:
    loops, condition, edit = request.loops, request.condition_frames, request.condition_edit
    if loops < 1:
        raise GulliverError(f"loops={loops} must be at least 1")
    if loops == 1 and (condition is not None or edit):
        raise GulliverError(
            "condition frames have no effect with a single loop; omit them, or use more loops"
        )
    if loops > 1 and condition is None:
        raise GulliverError(
            f"{loops} loops need frames that condition each loop on the previous one; set "
            "--condition-frames, such as 5"
        )
    if not 0 <= edit <= 1:
        raise GulliverError(
            f"the edit ratio of condition frames must be between 0 and 1, not {edit:g}"
        )
    if condition is not None and not 1 <= condition < request.bucket.frames:
        raise GulliverError(
            f"condition_frames={condition} for loops of {request.bucket.frames} frames must be "
            f"between 1 and {request.bucket.frames - 1}"
        )


def check_frames(request: Request, autoencoder: VideoAutoencoder) -> None:
    bucket = request.bucket
    if request.given is not None and request.given.shape[1] >= bucket.frames:
        raise GulliverError(
            f"{request.given.shape[1]} frames are given, which leaves no frames to generate in a "
            f"clip of {bucket.frames}; use more --frames"
        )

    def latent(frames: int, what: str) -> int:
        try:
            return autoencoder.latent_shape(frames, bucket.height, bucket.width)[1]
        except GulliverError as error:
            raise GulliverError(f"{what}: {error}") from None

    frames = latent(bucket.frames, "the clip")
    clip, shown = torch.empty(3, bucket.frames, 0, 0), set[int]()
    for loop in range(request.loops):
        piece = piece_of(request, loop, clip if loop else None, autoencoder.compression[0])
        lengths = [latent(r.shape[1], f"reference {n}") for n, r in enumerate(piece.references)]
        if piece.head is not None:
            lengths.append(latent(piece.head.shape[1], "given frames"))
        placements = _placements(piece, lengths, frames)
        if piece.head is not None:
            _check_head(piece, placements, loop)
        on_top = {frame: p for p in placements for frame in p.targets}
        if len(on_top) == frames and all(p.edit_ratio == 0 for p in on_top.values()):
            raise GulliverError(
                f"all {frames} latent frames of loop {loop} are given, which leaves no frames to "
                "generate; use more --frames, or pass fewer given frames"
            )
        shown.update(p.reference for p in on_top.values() if p.edit_ratio < 1)
    for number in range(len(request.references)):
        if number not in shown:
            raise GulliverError(
                f"reference {number} has no effect because later rules replace it or its edit "
                "ratio is 1 (regenerate); omit it"
            )


def _check_head(piece: ClipPiece, placements: Sequence[FramePlacement], loop: int) -> None:
    """Raises an error for rules that would silently replace the first frames of a piece."""
    *placed, head = placements
    for rule, p in zip(piece.rules, placed, strict=True):
        if p.target_start < head.length:
            whose = "taken over from the previous loop" if loop else "the given picture or clip"
            raise GulliverError(
                f"mask strategy '{rule}' covers latent frames {p.targets[0]} to {p.targets[-1]}, "
                f"but latent frames 0 to {head.length - 1} of loop {loop} are {whose}; begin at "
                f"{head.length} or later"
            )


def described(request: Request) -> tuple[object, ...]:
    def plain(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(plain(one) for one in value)
        if isinstance(value, Tensor):
            # As bytes, because numpy has no bfloat16; flattened first, because a single pixel
            # counts as contiguous with any strides.
            plain_bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = plain_bytes.numpy().tobytes()
            return tuple(value.shape), hashlib.sha256(content).hexdigest()
        return value

    return tuple(plain(getattr(request, field.name)) for field in fields(request))
