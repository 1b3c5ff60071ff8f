"""Teaching a subject: words, prompts and files that would not be learnt as they were written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from diffusers import StableDiffusionPipeline

from gulliver.checkpoint.files import write_tensors
from gulliver.dreambooth import DreamboothConfig
from gulliver.dreambooth.config import check_dreambooth
from gulliver.dreambooth.diffusers_base import DiffusersBase
from gulliver.dreambooth.pictures import read_picture
from gulliver.dreambooth.trainer import dreambooth
from gulliver.dreambooth.words import check_texts
from gulliver.errors import GulliverError
from tests.dreambooth.tiny_pipelines import (
    LENGTH,
    WIDTH,
    make_tokenizer,
    save_sd,
    save_sd3,
    save_subject,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd(tmp_path_factory.mktemp("base") / "sd")


def _config(base: Path, folder: Path, **changes: Any) -> DreamboothConfig:
    subject = folder / "subject"
    if not subject.is_dir():
        save_subject(subject, 1)
    config = DreamboothConfig(
        model=base,
        subject=subject,
        out=folder / "out",
        steps=1,
        sampling_steps=1,
        validation_pictures=0,
        activations="keep",
    )
    return replace(config, **changes)


def _refused(config: DreamboothConfig) -> str:
    with pytest.raises(GulliverError) as error:
        dreambooth(config)
    assert "\n" not in str(error.value)
    assert not config.out.exists()
    return str(error.value)


def test_a_new_word_is_a_whole_word_and_means_the_same_in_diffusers(
    base: Path, tmp_path: Path
) -> None:
    taught = DiffusersBase(base)
    taught.add_token("ho", "dog")
    (tokenizer,) = taught.tokenizers.values()
    plain, new = make_tokenizer(), len(make_tokenizer())
    assert tokenizer("a photo")["input_ids"] == plain("a photo")["input_ids"]
    rows = tmp_path / "rows.safetensors"
    write_tensors(rows, {"ho": torch.zeros(1, WIDTH)}, {"format": "pt"})
    pipe = StableDiffusionPipeline.from_pretrained(base)
    pipe.load_textual_inversion(rows)
    for text in ("a ho dog", "Ho, ho's dog", "in the snow-ho"):
        ids = tokenizer(text)["input_ids"]
        assert new in ids
        assert pipe.tokenizer(text)["input_ids"] == ids
    assert pipe.tokenizer("a photo")["input_ids"] != plain("a photo")["input_ids"]


def test_unlearnable_tokens_are_rejected(base: Path, tmp_path: Path) -> None:
    config = _config(base, tmp_path, learn_token=True, initial="dog")
    told = _refused(replace(config, token="ho"))
    assert "--token ho is inside 'photo' (--prompt)" in told
    with pytest.raises(GulliverError, match=r"--token ho .*'shop' \(there\)"):
        check_texts([make_tokenizer()], "ho", True, {"here": "a ho", "there": "a shop"}, print)
    with pytest.raises(GulliverError, match="--token dog "):
        DiffusersBase(base).add_token("dog", None)
    flow = save_sd3(tmp_path / "sd3")
    told = _refused(replace(config, model=flow, token="<it>"))
    assert "--learn-token: diffusers cannot load" in told
    assert "StableDiffusion3Pipeline" in told
    # The whole pipeline is written with its tokenizer: words are found as they were in the run.
    tokenizers, said = [make_tokenizer()], list[str]()
    check_texts(tokenizers, "ho", False, {"--prompt": "a photo of ho"}, said.append)
    assert not said


def test_too_long_prompts_are_rejected_or_reported(base: Path, tmp_path: Path) -> None:
    config = _config(base, tmp_path, token="<it>", learn_token=True, initial="dog")
    assert config.subject is not None
    (config.subject / "0.txt").write_text("dog " * LENGTH + "{token}")
    assert "the caption of 0.png: <it> is beyond the 12 tokens" in _refused(config)
    said = list[str]()
    texts = {"here": "<it> " + "dog " * LENGTH, "there": "<it> dog"}
    check_texts([make_tokenizer()] * 2, "<it>", True, texts, said.append)
    assert said == ["here has 15 tokens; those beyond 12 are truncated"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt": "{token} {unknown}"}, "--prompt contains {unknown}"),
        ({"prompt": "the {class} {token}"}, "--prompt contains {class}"),
        (
            {"class_word": "dog", "prior_prompt": "a {class} {x} {left|right}"},
            "--prior-prompt contains {x}",
        ),
    ],
)
def test_braces_that_are_left_in_prompts_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(GulliverError) as error:
        check_dreambooth(_config(base, tmp_path, **changes))
    assert told in str(error.value)


def test_pictures_of_floats_are_scaled_by_their_range_or_refused(tmp_path: Path) -> None:
    shares = np.array([[0, 0.5], [0.25, 1]], np.float32)
    for levels in (shares, (shares * 255).round()):
        Image.fromarray(levels).save(tmp_path / "a.tif")
        assert read_picture(tmp_path / "a.tif")[..., 0].tolist() == [[0, 128], [64, 255]]
    for wrong in (shares - 0.5, shares * 1.5, shares * np.nan):
        Image.fromarray(wrong).save(tmp_path / "a.tif")
        with pytest.raises(GulliverError, match=r"has float values from \S+ to \S+"):
            read_picture(tmp_path / "a.tif")


def test_text_encoder_adapters_are_saved_and_tokens_reported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"text_encoder": True, "learn_token": True, "token": "<it>", "initial": "dog"}
    config = _config(base, tmp_path, **changes)
    result = dreambooth(config).result
    assert result is not None
    again = replace(config, out=tmp_path / "again", adapter=result)
    alone = replace(again, text_encoder=False)
    assert "has adapters for the text encoder; add --text-encoder" in _refused(alone)
    capsys.readouterr()
    assert dreambooth(again).finished
    captured = capsys.readouterr()
    assert "its token embedding is not continued" in " ".join((captured.out + captured.err).split())
