"""Public checkpoints make the clips that their formulas say, one network in memory at a time."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.checkpoint import save_huggingface
from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.models import MMDiT, STDiT, STDiT2, STDiT3, VideoAutoencoder
from gulliver.video import Request, SamplingConfig, VideoPipeline
from gulliver.video import pipeline as pipelines
from gulliver.video import public_models as fitting
from gulliver.video.flows import IDDPM
from gulliver.video.media import read_frames
from gulliver.video.public_models import save_autoencoder
from gulliver.video.text_encoders import WordEncoder
from tests.models.test_text_encoders import WORDS, save_clip, save_t5
from tests.pool import Pool

BUCKET = Bucket(17, 32, 48)
LATENT = (8, 5, 8, 12)
"""Latents of that clip: channels, frames, rows and columns."""
SMALL = {
    "in_channels": 8, "hidden_size": 144, "depth": 1, "num_heads": 2, "caption_channels": 16,
    "model_max_length": 9,
}  # fmt: skip
WINDOWS = {"kernel_size": (8, 8, -1), "use_spatial_rope": True, "image_conditioning": True}
JOINT = {
    "in_channels": 32, "hidden_size": 24, "num_heads": 2, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": (4, 4, 4), "context_in_dim": 16, "vec_in_dim": 12, "model_max_length": 9,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "1.0": lambda: STDiT(**SMALL, input_size=LATENT[1:]),
    "1.1": lambda: STDiT2(**SMALL),
    "1.2": lambda: STDiT3(**SMALL),
    "1.3": lambda: STDiT3(**SMALL, **WINDOWS),
    "2.0": lambda: MMDiT(**JOINT, fused_qkv=False, use_liger_rope=True, cond_embed=True),
}
JOINT_FIELDS = {"axes_dim": (4, 4, 4), "model_max_length": 9}
OVERRIDES = {"1.0": {"input_size": LATENT[1:]}, "2.0": JOINT_FIELDS}
"""Fields that files without a configuration do not tell."""


def shaken(kind: str) -> nn.Module:
    """A model without zeros, in float64."""
    torch.manual_seed(0)
    model = KINDS[kind]().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "y_embedding" not in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny parts in the public formats: a transformer of each release, T5, CLIP, autoencoder."""
    root = tmp_path_factory.mktemp("public")
    for kind in KINDS:
        save_huggingface(shaken(kind), root / kind)
    save_t5(root / "t5")
    save_clip(root / "clip")
    torch.manual_seed(3)
    save_autoencoder(root / "vae.safetensors", VideoAutoencoder(latent_channels=8, width=8))
    return root


def loaded(root: Path, kind: str, **options: Any) -> VideoPipeline:
    clip = root / "clip" if kind == "2.0" else None
    options = {**OVERRIDES.get(kind, {}), **options}
    return VideoPipeline.load(root / kind, root / "vae.safetensors", root / "t5", clip, **options)


def noise_of(seed: int) -> Tensor:
    return torch.randn(LATENT, generator=torch.Generator().manual_seed(derive(seed, 4))).double()


def said(root: Path, caption: str, whole: bool) -> tuple[Tensor, Tensor]:
    """What transformers says of a caption: tokens [1, 1, L, 16] and a vector [1, 12]."""
    from transformers import CLIPTextModel, T5EncoderModel

    ids = [WORDS.index(word) for word in caption.split()] + [1]
    first, second = (torch.tensor([ids + [0] * (n - len(ids)) if whole else ids]) for n in (9, 8))
    t5 = T5EncoderModel.from_pretrained(root / "t5").double().eval()
    clip = CLIPTextModel.from_pretrained(root / "clip").double().eval()
    with torch.no_grad():
        return t5(input_ids=first).last_hidden_state[:, None], clip(input_ids=second).pooler_output


def packed(x: Tensor) -> Tensor:
    """Latents as tokens, square by square."""
    rows = [
        x[:, :, t, h : h + 2, w : w + 2].flatten(1)
        for t in range(x.shape[2])
        for h in range(0, x.shape[3], 2)
        for w in range(0, x.shape[4], 2)
    ]
    return torch.stack(rows, dim=1)


def unpacked(tokens: Tensor) -> Tensor:
    x = torch.empty(1, *LATENT, dtype=tokens.dtype)
    rows = iter(tokens.unbind(1))
    for t in range(LATENT[1]):
        for h in range(0, LATENT[2], 2):
            for w in range(0, LATENT[3], 2):
                x[:, :, t, h : h + 2, w : w + 2] = next(rows).view(1, 8, 2, 2)
    return x


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def ask(root: Path, kind: str, model: Any, shown: Tensor | None, caption: str | None) -> Any:
    """A function from latents and level to what a model says, called by its own forward.

    Args:
        root: folder of the parts.
        kind: release.
        model: model in float64.
        shown: latents of the first frame; None for a clip without.
        caption: caption; None for none.
    """
    y, vector = said(root, caption or "" if kind == "2.0" else "the cat runs", kind == "2.0")
    if kind != "2.0" and caption is None:
        y = model.y_embedder.y_embedding[: y.shape[2]].double()[None, None]
    sizes = {"height": one(32), "width": one(48), "fps": one(24)}
    cond, held = torch.zeros(1, *LATENT).double(), torch.zeros(1, 1, *LATENT[1:]).double()
    if shown is not None:
        cond[:, :, :1], held[:, :, :1] = shown, 1
    mask = None if shown is None else held[:, 0, :, 0, 0] == 0

    def call(x: Tensor, level: float) -> Tensor:
        if kind == "1.0":
            return model(x, one(level), y)
        if kind == "1.1":
            more = {"num_frames": one(17), "ar": one(32 / 48), "x_mask": mask}
            return model(x, one(level), y, **sizes, **more)
        if kind == "1.2":
            return model(x, one(level), y, **sizes, x_mask=mask)[:, :8]
        if kind == "1.3":
            given = {} if shown is None else {
                "cond": cond, "cond_mask": held.expand_as(cond), "mask_index": [0]
            }  # fmt: skip
            return model(x, one(level), y, **sizes, **given)[:, :8]
        places = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(6))[None]
        tokens = model(
            packed(x), places, y[0], torch.zeros(1, 9, 3).long(), one(level / 1000), vector,
            cond=packed(torch.cat([held, cond], dim=1)),
        )  # fmt: skip
        return -unpacked(tokens)

    return call


def warp(kind: str, t: float) -> float:
    ratio = {
        "1.2": math.sqrt(32 * 48 / 512**2) * math.sqrt(5),
        "1.3": math.sqrt(32 * 48 / 512**2) * math.sqrt(4),
        "2.0": (1 + 2 * (24 - 256) / 3840) * math.sqrt(5),
    }[kind]
    return ratio * t / (1 + (ratio - 1) * t)


@torch.no_grad()
def expected_latents(root: Path, kind: str, steps: int, picture: Tensor | None) -> Tensor:
    """Latents of a caption, with the guidance of `CASES`, written out."""
    model = shaken(kind)
    answers = [
        ask(root, kind, model, picture, "the cat runs"),
        ask(root, kind, model, picture, None),
    ]
    if kind == "2.0" and picture is not None:
        answers.append(ask(root, kind, model, None, None))
    x = noise_of(7)[None]
    first = torch.zeros(1, 1, 5, 1, 1, dtype=torch.bool)
    first[:, :, 0] = picture is not None
    among = kind in ("1.1", "1.2")
    given = torch.zeros_like(x)
    if picture is not None:
        given[:, :, :1] = picture
    if kind in ("1.0", "1.1"):
        x = torch.where(first, given, x)
        flow, taken = IDDPM(), [round(n * 999 / (steps - 1)) for n in range(steps)]
        kept = flow.process.kept[taken]
        for number in reversed(range(steps)):
            with_text, without = (answer(x, taken[number]) for answer in answers)
            noise, share = with_text.chunk(2, dim=1)
            noise[:, :3] = without[:, :3] + 7 * (noise - without[:, :8])[:, :3]
            a, before = kept[number], kept[number - 1] if number else torch.ones(()).double()
            x0 = (x - (1 - a).sqrt() * noise) / a.sqrt()
            beta = 1 - a / before
            moved = x0
            if number:
                variance = beta * (1 - before) / (1 - a)
                moved = (before.sqrt() * beta * x0 + (a / before).sqrt() * (1 - before) * x) / (
                    1 - a
                )
                log = (share + 1) / 2 * beta.log() + (1 - share) / 2 * variance.log()
                moved = moved + (log / 2).exp() * noise_of(derive(7, 6, number))
            x = torch.where(first, x, moved)
        return x
    scale = 7.5 if kind == "2.0" else 7.0
    for number in range(steps):
        level, after = (warp(kind, 1 - n / steps) for n in (number, number + 1))
        if among:
            x = torch.where(first, given, x)
        found = [answer(x, 1000 * level) for answer in answers]
        velocity = found[1] + scale * (found[0] - found[1])
        if len(found) == 3:
            velocity = found[2] + 3 * (found[1] - found[2]) + scale * (found[0] - found[1])
        x = x + (level - after) * velocity
    return torch.where(first, given, x)


@pytest.mark.parametrize(
    ("kind", "shown"), [("1.0", False), ("1.1", True), ("1.2", True), ("1.3", True), ("2.0", True)]
)
def test_a_public_checkpoint_makes_the_clip_that_its_formulas_say(
    folders: Path, kind: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = loaded(folders, kind)
    picture = torch.rand(3, 1, 32, 48) * 2 - 1 if shown else None
    steps = 3
    sampling = replace(pipeline.sampling, steps=steps)
    if kind == "2.0":
        sampling = replace(sampling, guidance_image=3.0)
    request = Request("the cat runs", BUCKET, 7, given=picture)
    other = Request("a cat on the roof", BUCKET, 8, given=picture)
    autoencoder = pipelines.load_autoencoder(folders / "vae.safetensors")
    decoded = list[Tensor]()

    def decode(latents: Tensor, frames: int) -> Tensor:
        assert frames == 17
        decoded.append(latents)
        return autoencoder.decode(latents.float())

    monkeypatch.setattr(pipeline.autoencoder, "decode", decode)
    found = pipeline.generate([other, request], sampling)[1]
    with torch.no_grad():
        both = None if picture is None else torch.stack([picture, picture])
        first = None if both is None else autoencoder.encode(both)[1:].double()
        expected = expected_latents(folders, kind, steps, first)
        clip = autoencoder.decode(decoded[1].float())[0].clamp(-1, 1)
    size = float(expected.abs().max())
    torch.testing.assert_close(decoded[1], expected, rtol=1e-8, atol=1e-8 * size)
    assert found.shape == (3, 17, 32, 48)
    assert torch.equal(found, clip)
    assert pipeline.described().startswith(f"{type(KINDS[kind]()).__name__} of Open-Sora {kind}")


def test_networks_are_filled_one_at_a_time_and_in_turn(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[str, Any] = {}
    filled = list[str]()

    def watched(name: str, load: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            gc.collect()
            assert [n for n, other in alive.items() if other() is not None] == []
            made = load(*arguments, **options)
            alive[name] = weakref.ref(made)
            filled.append(name)
            return made

        return call

    pipeline, kept = loaded(folders, "1.3"), loaded(folders, "1.2", keep=True)
    for name in ("load_model", "load_autoencoder"):
        monkeypatch.setattr(pipelines, name, watched(name, getattr(pipelines, name)))
    load_texts = watched("load_text_encoder", fitting.load_text_encoder)
    monkeypatch.setattr(fitting, "load_text_encoder", load_texts)
    picture = torch.zeros(3, 1, 32, 48)
    requests = [Request(f"a cat {word}", BUCKET, given=picture) for word in ("runs", "on a roof")]
    clips = pipeline.generate(requests, SamplingConfig(2, 1.0))
    assert len(clips) == 2
    order = ["load_text_encoder", "load_autoencoder", "load_model", "load_autoencoder"]
    assert filled == order
    filled.clear()
    monkeypatch.setattr(gc, "collect", alive.clear)
    for _ in range(2):
        kept.generate(requests[:1], SamplingConfig(2, 1.0))
    assert filled == ["load_text_encoder", "load_autoencoder", "load_model"]


def test_a_clip_that_does_not_fit_is_decoded_in_stretches(folders: Path) -> None:
    request, sampling = Request("a cat", BUCKET), SamplingConfig(2, 1.0)
    whole = loaded(folders, "1.2").generate([request], sampling)[0]
    tight = loaded(folders, "1.2", memory=1)
    asked = list[int]()
    decode = VideoAutoencoder.stream_decoder

    def counted(self: VideoAutoencoder, latents: Tensor) -> Tensor:
        asked.append(latents.shape[2])
        return decode(self, latents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoAutoencoder, "stream_decoder", counted)
        found = tight.generate([request], sampling)[0]
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert len(asked) == 5


def test_still_is_handled_and_captions_are_cached(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[dict[str, Any]]()
    forward = STDiT2.forward

    @functools.wraps(forward)
    def watched(self: STDiT2, *arguments: Any, **inputs: Any) -> Tensor:
        seen.append(inputs)
        return forward(self, *arguments, **inputs)

    monkeypatch.setattr(STDiT2, "forward", watched)
    pipeline = loaded(folders, "1.1", texts=tmp_path / "texts", fps=12.0)
    sampling = SamplingConfig(2, 2.0)
    picture, clip = pipeline.generate(
        [Request("a cat", Bucket(1, 32, 32)), Request("a cat", BUCKET, negative_prompt="the roof")],
        sampling,
    )
    assert (picture.shape, clip.shape) == ((3, 1, 32, 32), (3, 17, 32, 48))
    assert len(list((tmp_path / "texts").iterdir())) == 2
    told = [(x["fps"][0], x["num_frames"][0], round(float(x["ar"][0]), 4)) for x in seen]
    assert told[0] == (120, 1, 1)
    assert told[-1] == (12, 17, 0.6667)
    # Without a negative prompt the learnt null caption; with one, that.
    null = pipeline.outline.y_embedder.y_embedding
    assert null.is_meta
    assert torch.equal(seen[0]["y"][1, 0, 0], shaken("1.1").y_embedder.y_embedding[0])  # type: ignore[union-attr, index]
    said_of_roof = said(folders, "the roof", False)[0][0, 0]
    torch.testing.assert_close(seen[-1]["y"][1, 0, :3], said_of_roof)
    assert seen[-1]["mask"].tolist() == [[True] * 3, [True] * 3]


def test_incompatible_parts_are_rejected(folders: Path, tmp_path: Path) -> None:
    def refused(message: str, make: Any) -> None:
        with pytest.raises(GulliverError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)

    vae, t5, clip = folders / "vae.safetensors", folders / "t5", folders / "clip"
    save_t5(tmp_path / "wide", 24)
    save_autoencoder(tmp_path / "four.safetensors", VideoAutoencoder(latent_channels=4, width=8))
    load = VideoPipeline.load
    refused(
        r"wide holds a T5 of width 24, but this STDiT3 needs width 16",
        lambda: load(folders / "1.2", vae, tmp_path / "wide"),
    )
    refused(
        r"latents have 4 channels, but this STDiT3 of Open-Sora 1\.2 needs 8",
        lambda: load(folders / "1.2", tmp_path / "four.safetensors", t5),
    )
    save_huggingface(STDiT2(**{**SMALL, "in_channels": 4}), tmp_path / "published")
    refused(
        r"compresses by 4x4x4 .* this STDiT2 of Open-Sora 1\.1 needs 1x8x8",
        lambda: load(tmp_path / "published", tmp_path / "four.safetensors", t5),
    )
    refused("does not use a CLIP", lambda: load(folders / "1.2", vae, t5, clip))
    joint = {"axes_dim": (4, 4, 4)}
    refused("needs a CLIP of width 12", lambda: load(folders / "2.0", vae, t5, **joint))
    refused("t5 holds a T5 .* needs a CLIP", lambda: load(folders / "2.0", vae, t5, t5, **joint))
    refused("looks like a T5 text encoder", lambda: load(t5, vae, t5))
    refused(
        "width 10", lambda: VideoPipeline.of(shaken("1.2"), VideoAutoencoder(), WordEncoder(10, 8))
    )
    pipeline = loaded(folders, "1.2")
    assert pipeline.generate([]) == []
    refused("13 tokens .* limit of 9", lambda: pipeline.generate([Request("a " * 12, BUCKET)]))
    refused("prompt is empty", lambda: pipeline.generate([Request(" ", BUCKET)]))
    refused("32x50 does not fit", lambda: pipeline.generate([Request("a", Bucket(17, 32, 50))]))
    alone = loaded(folders, "1.0")
    refused(
        "this STDiT only generates clips of 20x32x48, not of 17x32x32",
        lambda: alone.generate([Request("a", Bucket(17, 32, 32))]),
    )
    given = {"given": torch.zeros(3, 1, 32, 48)}
    refused(
        "does not support given frames", lambda: alone.generate([Request("a", BUCKET, **given)])
    )
    edit = {"references": (torch.zeros(3, 1, 32, 48),), "mask_strategy": "0,0,0,0,1,0.5"}
    refused(
        r"edit ratios need a model of Open-Sora 1\.2; with Open-Sora 1\.3's STDiT3",
        lambda: loaded(folders, "1.3").generate([Request("a", BUCKET, **edit)]),
    )
    refused(
        "use multiples of 8 for the height and of 8 for the width",
        lambda: loaded(folders, "2.0").generate([Request("a", Bucket(17, 36, 32))]),
    )


def _share(world: World, root: Path, guidance_ranks: int) -> Tensor:
    pipeline = loaded(root, "1.1", device=world.device)
    pipeline.share(1, guidance_ranks)
    return pipeline.generate([Request("a cat", BUCKET, 3)], SamplingConfig(3, 3.0))[0]


def test_two_ranks_share_the_branches_of_guidance(pool: Pool, folders: Path) -> None:
    alone = loaded(folders, "1.1").generate([Request("a cat", BUCKET, 3)], SamplingConfig(3, 3.0))
    for found in pool.run(_share, 2, folders, 2):
        torch.testing.assert_close(found, alone[0], rtol=1e-6, atol=1e-6)
    with pytest.raises(GulliverError, match=r"tokens of Open-Sora 1\.1's STDiT2 cannot be"):
        pool.run(_refused_share, 2, folders)


def _refused_share(world: World, root: Path) -> None:
    loaded(root, "1.1", device=world.device).share(2, 1)


def test_the_command_line_makes_a_file_and_says_what_it_found(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "generate", "--model", folders / "1.3", "--autoencoder", folders / "vae.safetensors",
        "--text-encoder", folders / "t5", "--prompt", "the cat runs", "--frames", "17",
        "--resolution", "32", "--steps", "2", "--out", tmp_path / "clip.gif",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    with pytest.raises(SystemExit) as both:
        main([str(argument) for argument in [*arguments, "--run", "out/demo/run"]])
    assert both.value.code
    refusal = capsys.readouterr()
    assert "cannot be combined" in (refusal.out + refusal.err).replace("\n", " ")
    assert ended.value.code == 0, shown.err
    assert read_frames(tmp_path / "clip.gif").shape[1] == 17
    assert "STDiT3 of Open-Sora 1.3" in (shown.out + shown.err).replace("\n", " ")


def test_counts_are_those_of_the_last_call(folders: Path) -> None:
    pipeline, requests = loaded(folders, "1.2", keep=True), [Request("a cat", BUCKET)]
    sampling = SamplingConfig(3, 1.0, cache="broadcast:2,2,2@0-1000")
    pipeline.generate(requests, sampling)
    first = str(pipeline.counts)
    assert pipeline.counts.reused.total() > 0
    pipeline.generate(requests, sampling)
    assert str(pipeline.counts) == first
    pipeline.generate(requests, SamplingConfig(2, 1.0))
    assert pipeline.counts.reused.total() == pipeline.counts.nbytes == 0


@pytest.mark.parametrize("kind", ["1.3", "2.0"])
def test_first_loop_has_no_image_guidance(folders: Path, kind: str) -> None:
    # What the loop before gave guides the second one only: the first is as without the guidance.
    sampling = replace(loaded(folders, kind).sampling, steps=2)
    request = Request("a cat", BUCKET, loops=2, condition_frames=1)
    plain, guided = (
        loaded(folders, kind).generate([request], replace(sampling, guidance_image=scale))[0]
        for scale in (1.0, 3.0)
    )
    first = BUCKET.frames
    assert torch.equal(guided[:, :first], plain[:, :first])
    assert not torch.equal(guided[:, first:], plain[:, first:])
