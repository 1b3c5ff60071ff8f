"""What a request asks for beyond a sentence: references, masks, loops, connection, negatives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gulliver.cli.options import GenerateConfig
from gulliver.cli.video import generate_command
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.models import STDiT3, VideoAutoencoder
from gulliver.video import (
    Guidance,
    Request,
    SamplingConfig,
    TrainConfig,
    VideoModel,
    connect,
    extend,
    loop_seed,
)
from gulliver.video.generation import latent_noise
from gulliver.video.media import write_clip
from tests.data.test_sampling import Asked, naive

BUCKET = Bucket(9, 16, 16)
QUICK = SamplingConfig(steps=7)
SAYS = "the digit 3 moving left"


@pytest.fixture(scope="module")
def model() -> VideoModel:
    """A model that was never trained."""
    torch.manual_seed(0)
    transformer = STDiT3(
        in_channels=8,
        hidden_size=32,
        depth=1,
        num_heads=2,
        caption_channels=64,
        model_max_length=8,
        input_sq_size=32,
        zero_init_temporal=False,
        temporal_positions=True,
        class_dropout_prob=0.0,
    )
    return VideoModel(TrainConfig(), transformer, VideoAutoencoder(width=8))


def clip_of(frames: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(3, frames, 16, 16, generator=draw) * 2 - 1


def sampled(
    model: VideoModel,
    request: Request,
    asked: Asked,
    given: Tensor | None = None,
) -> Tensor:
    """The clip of a request with one loop, by the loops of `naive`.

    `given` are the latents of given frames [C, T, H, W], where `asked.ratios` says there are.
    """
    noise = latent_noise(request.seed, model.autoencoder.latent_shape(9, 16, 16))

    def told(text: str) -> dict[str, Tensor]:
        y, mask = model.text.encode([text])
        sides = {name: torch.tensor([16.0]) for name in ("height", "width")}
        return {"y": y, "mask": mask, "fps": torch.tensor([8.0]), **sides}

    inputs, null = told(request.prompt), told(request.negative_prompt or request.prompt)
    if not request.negative_prompt:
        null["y"] = model.model.y_embedder.y_embedding[None, None, : null["y"].shape[2]]
    asked = replace(asked, warp={"shift": 3.0})
    shown = torch.zeros_like(noise) if given is None else given
    with torch.no_grad():
        latents = naive(asked, model.model, noise[None], [[inputs, null, null]], shown[None])
        return model.autoencoder.decode(latents)[0].clamp(-1, 1)


def encoded(model: VideoModel, clip: Tensor) -> Tensor:
    with torch.no_grad():
        return model.autoencoder.encode(clip[None])[0]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_negative_prompt_stands_where_no_caption_did(model: VideoModel) -> None:
    requests = [
        Request(SAYS, BUCKET, 1),
        Request(SAYS, BUCKET, 1, negative_prompt="the digit 8"),
        Request("the digit 5", BUCKET, 2, negative_prompt="a b c d e f g h"),
    ]
    sampling = replace(QUICK, guidance=3.0, guidance_oscillation=2, guidance_rescale=0.7)
    asked = Asked(text=3.0, text_oscillation=2, rescale=0.7)
    clips = model.generate(requests, sampling)
    for clip, request in zip(clips, requests, strict=True):
        same(clip, sampled(model, request, asked))
    assert (clips[0] - clips[1]).abs().max() > 1e-2


def test_rules_place_latents_of_references_with_their_ratios(model: VideoModel) -> None:
    picture, clip = clip_of(1, 1), clip_of(9, 2)
    rules = "0,1,-1,0,1,0.4;0,0,0,-1"
    request = Request(SAYS, BUCKET, 3, references=(picture, clip), mask_strategy=rules)
    sampling = replace(QUICK, guidance_image=1.7, guidance_image_decay=True)
    (found,) = model.generate([request], sampling)
    latents = torch.zeros(8, 3, 4, 4)
    latents[:, 0], latents[:, 2] = encoded(model, clip)[:, 2], encoded(model, picture)[:, 0]
    asked = Asked(text=2.0, image=1.7, decay=True, ratios=[[0.4, 1.0, 0.0]])
    same(found, sampled(model, request, asked, latents))
    # Beside others of the batch it is the same clip.
    other = Request(SAYS, BUCKET, 4, given=clip_of(5, 3))
    same(model.generate([other, request], sampling)[1], found)
    # What is given by itself is given in full, beside what rules put elsewhere.
    both = replace(request, given=picture, references=(picture,), mask_strategy="0,0,0,-1")
    alone = replace(request, references=(picture,), mask_strategy="0,0,0,-1;0")
    same(model.generate([both], QUICK)[0], model.generate([alone], QUICK)[0])


@pytest.mark.parametrize("condition", [1, 5])
def test_a_clip_of_loops_is_that_of_calls_made_one_by_one(
    model: VideoModel, condition: int
) -> None:
    says = f"|0|{SAYS}|2|the digit 3 moving up"
    request = Request(
        says, BUCKET, 6, references=(clip_of(1),), mask_strategy="0;1,0,0,-1,1,0.5", loops=3,
        condition_frames=condition, negative_prompt="the digit 1",
    )  # fmt: skip
    other = Request("the digit 2", BUCKET, 7)
    found, alone = model.generate([request, other], QUICK)
    assert found.shape == (3, condition + 3 * (9 - condition), 16, 16)
    same(alone, model.generate([other], QUICK)[0])
    one = replace(request, prompt=SAYS, mask_strategy="0", loops=1, condition_frames=None)
    clip = model.generate([one], QUICK)[0]
    # The second loop ends with the picture as well as it begins with the first one's end.
    head = clip[:, -condition:]
    two = replace(
        one, seed=loop_seed(6, 1), references=(clip_of(1), head),
        mask_strategy="0,0,0,-1,1,0.5;0,1,0,0," + str((condition - 1) // 4 + 1),
    )  # fmt: skip
    clip = torch.cat([clip, model.generate([two], QUICK)[0][:, condition:]], dim=1)
    clip = extend(
        model, clip, "the digit 3 moving up", BUCKET, condition, loop_seed(6, 2), QUICK,
        "the digit 1",
    )  # fmt: skip
    same(found, clip)
    seeds = {loop_seed(seed, loop) for seed in range(5) for loop in range(5)}
    assert len(seeds) == 25
    assert loop_seed(6, 0) == 6


def test_condition_frames_may_be_made_anew_in_part(model: VideoModel) -> None:
    one = Request(SAYS, BUCKET, 8)
    request = replace(one, loops=2, condition_frames=5, condition_edit=0.5)
    found = model.generate([request], QUICK)[0]
    begun = model.generate([one], QUICK)[0]
    rules = "0,0,0,0,2,0.5"
    piece = Request(SAYS, BUCKET, loop_seed(8, 1), references=(begun[:, -5:],), mask_strategy=rules)
    same(found, torch.cat([begun, model.generate([piece], QUICK)[0][:, 5:]], dim=1))


def test_two_pictures_are_connected(model: VideoModel) -> None:
    first, last = clip_of(1, 1), clip_of(1, 2)
    found = connect(model, first, last, SAYS, BUCKET, 3, QUICK)
    request = Request(SAYS, BUCKET, 3, references=(first, last), mask_strategy="i2v_loop")
    same(found, model.generate([request], QUICK)[0])
    latents = torch.zeros(8, 3, 4, 4)
    latents[:, 0], latents[:, 2] = encoded(model, first)[:, 0], encoded(model, last)[:, 0]
    asked = Asked(text=2.0, ratios=[[0.0, 1.0, 0.0]])
    same(found, sampled(model, request, asked, latents))
    with pytest.raises(GulliverError, match="3 latent frames of loop 0"):
        connect(model, clip_of(5), last, SAYS, BUCKET, 3, QUICK)


def test_references_are_converted_to_the_dtype_of_the_autoencoder(model: VideoModel) -> None:
    picture = clip_of(1).bfloat16()
    for given in (picture.double(), picture, picture.half()):
        request = Request(SAYS, BUCKET, given=given)
        plain = replace(request, given=picture.float())
        assert torch.equal(*(model.generate([one], QUICK)[0] for one in (request, plain)))
    longer = extend(model, clip_of(5).double(), SAYS, BUCKET, 5, sampling=QUICK)
    assert torch.equal(longer, extend(model, clip_of(5), SAYS, BUCKET, 5, sampling=QUICK))
    with pytest.raises(GulliverError, match=r"clip.*int64"):
        extend(model, clip_of(5).long(), SAYS, BUCKET, 5, sampling=QUICK)


def test_a_clip_is_no_first_frame(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.gif", clip_of(6), fps=8)
    with pytest.raises(GulliverError, match=r"--image .*clip\.gif.* --extend.* --re"):
        generate_command(GenerateConfig(prompt=("x",), image=clip), [])


REFUSED = [
    ({"negative_prompt": "a b c d e f g h i"}, {}, "9 words"),
    ({"negative_prompt": "x"}, {"guidance": 1.0}, "guidance 1"),
    ({}, {"guidance_image": 2.0}, "image guidance 2"),
    ({}, {"guidance": 1.0, "guidance_oscillation": 3}, "--guidance-oscillation"),
    ({}, {"guidance": 1.0, "guidance_rescale": 0.7}, "--guidance-rescale"),
    ({}, {"guidance_oscillation": 6}, "--guidance-oscillation 6 .*--steps 7.* 6"),
    ({"loops": 0}, {}, "loops=0"),
    ({"loops": 2}, {}, "--condition-frames"),
    ({"loops": 2, "condition_frames": 9}, {}, "condition_frames=9"),
    ({"loops": 2, "condition_frames": 4}, {}, "4 frames"),
    ({"condition_frames": 5}, {}, "condition frames"),
    ({"prompt": "|0|a|1|b"}, {}, "uses loop 1"),
    ({"references": (clip_of(1),)}, {}, "mask strategy"),
    ({"mask_strategy": "0"}, {}, "uses reference 0"),
    ({"references": (clip_of(1),), "mask_strategy": "0,0,0,3"}, {}, r"starting at 3, but it has 3"),
    ({"references": (clip_of(4),), "mask_strategy": "0"}, {}, "reference 0: 4 frames"),
    ({"references": (clip_of(9),), "mask_strategy": "0,0,0,0,3"}, {}, "--frames"),
    ({"align": 2}, {}, "align=2"),
    ({"given": clip_of(9)}, {}, "--frames"),
    ({"given": clip_of(1), "references": (clip_of(1),), "mask_strategy": "0"}, {},
     "'0,0,0,0,1,0' .*frames 0 to 0.* 0 to 0 of loop 0"),
    ({"loops": 2, "condition_frames": 5, "references": (clip_of(1),), "mask_strategy": "1,0,0,1"},
     {}, "frames 1 to 1.* 0 to 1 of loop 1"),
    ({"references": (clip_of(1), clip_of(5)), "mask_strategy": "0;0,1,0,0,2"}, {},
     "reference 0"),
    ({"given": clip_of(1).byte()}, {}, r"uint8.*\[-1, 1\]"),
    ({"given": clip_of(1) * 255}, {}, r"-2\d\d.* 2\d\d"),
    ({"references": (clip_of(1) * torch.nan,), "mask_strategy": "0"}, {}, "NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sampling", "message"), REFUSED)
def test_invalid_requests_are_rejected_before_encoding(
    model: VideoModel, monkeypatch: pytest.MonkeyPatch, changes: dict, sampling: dict, message: str
) -> None:
    monkeypatch.setattr(model.autoencoder, "encode", None)
    monkeypatch.setattr(model, "flow", None)
    request = replace(Request(SAYS, BUCKET), **changes)
    with pytest.raises(GulliverError, match=message) as error:
        model.generate([request], replace(QUICK, **sampling))
    assert "\n" not in str(error.value)


def test_guidance_options_are_the_sampler_s(model: VideoModel) -> None:
    from gulliver.video.diffusion import guidance_of

    options = SamplingConfig(
        guidance=7.5, guidance_image=3.0, guidance_oscillation=10, guidance_image_oscillation=9,
        guidance_image_decay=True, guidance_rescale=0.7,
    )  # fmt: skip
    assert guidance_of(options) == Guidance(7.5, 3.0, 10, 9, True, 0.7)
    assert [Guidance(1).branches, Guidance(2).branches, Guidance(1, 2).branches] == [1, 2, 3]
