"""Teaching a subject: pictures of all kinds, options that do not go together, other bases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("diffusers")

from peft import LoraConfig, inject_adapter_in_model

from gulliver.cli.dispatch import run
from gulliver.dreambooth import DreamboothConfig
from gulliver.dreambooth.config import check_dreambooth
from gulliver.dreambooth.pictures import read_picture, read_pictures
from gulliver.dreambooth.student import SampleOrder, shares
from gulliver.dreambooth.trainer import dreambooth
from gulliver.errors import GulliverError
from gulliver.planner.model import recomputable_blocks
from tests.dreambooth.tiny_pipelines import save_sd, save_subject, tiny_unet, unplanned


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sd(tmp_path_factory.mktemp("base") / "sd")


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs without a plan, but for the tests of plans."""
    with nullcontext() if "plan" in request.node.name else unplanned():
        yield


def _config(base: Path, subject: Path, out: Path, **changes: Any) -> DreamboothConfig:
    config = DreamboothConfig(
        model=base,
        subject=subject,
        out=out,
        steps=1,
        sampling_steps=2,
        validation_pictures=0,
        activations="keep",
    )
    return replace(config, **changes)


def _read(config: DreamboothConfig) -> tuple[list[Any], list[str]]:
    told = list[str]()
    return read_pictures(config, told.append), told


def test_a_broken_picture_is_named_and_refused_or_skipped(tmp_path: Path, base: Path) -> None:
    subject = save_subject(tmp_path / "subject")
    whole = (subject / "1.png").read_bytes()
    (subject / "1.png").write_bytes(whole[: len(whole) // 2])
    (subject / "3.jpg").write_bytes(b"no picture")
    (subject / "notes.md").write_text("no pictures either")
    config = _config(base, subject, tmp_path / "out")
    with pytest.raises(GulliverError, match=r"1\.png .*3\.jpg .*--on-broken"):
        dreambooth(config)
    assert not (tmp_path / "out").exists()
    found, told = _read(replace(config, on_broken="skip"))
    assert [one.path.name for one in found] == ["0.png", "2.png"]
    assert [line.split()[1] for line in told] == ["1.png", "3.jpg", "notes.md"]


def test_a_folder_without_pictures_is_refused(tmp_path: Path, base: Path) -> None:
    (tmp_path / "subject").mkdir()
    with pytest.raises(GulliverError, match="has no picture"):
        _read(_config(base, tmp_path / "subject", tmp_path / "out"))
    (tmp_path / "subject" / "a.png").write_bytes(b"")
    with pytest.raises(GulliverError, match=r"no pictures .*\(a\.png"):
        _read(_config(base, tmp_path / "subject", tmp_path / "out", on_broken="skip"))


def test_pictures_are_upright_opaque_and_have_eight_bits(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[0, 0] = 255  # the sensor's first corner
    turned = Image.fromarray(pixels)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = read_picture(tmp_path / "turned.png")
    assert upright.shape == (8, 4, 3)
    assert upright[0, 3].tolist() == [255] * 3
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = (10, 20, 30, 255)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    over = read_picture(tmp_path / "clear.png", 128)
    assert over[0, 0].tolist() == [10, 20, 30]
    assert over[1, 1].tolist() == [128] * 3
    deep = np.array([[0, 65535], [32768, 128]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert read_picture(tmp_path / "deep.png")[..., 0].tolist() == [[0, 255], [128, 0]]
    Image.fromarray(pixels[..., 0]).convert("P").save(tmp_path / "palette.gif")
    assert read_picture(tmp_path / "palette.gif").shape == (4, 8, 3)


def test_captions_beside_pictures_are_taken(tmp_path: Path, base: Path) -> None:
    subject = save_subject(tmp_path / "subject")
    (subject / "0.txt").write_text("a {token} in the snow\n")
    (subject / "1.txt").write_text("a dog\n")
    (subject / "2.txt").write_text(" \n")
    found, told = _read(_config(base, subject, tmp_path / "out"))
    assert [one.text for one in found] == ["a sks in the snow", "a dog", None]
    assert told == ["1.txt does not name sks; the picture is trained without it"]


@pytest.mark.parametrize(
    ("part", "values", "told"),
    [
        ("model_index.json", {"_class_name": "KandinskyPipeline"}, "is a KandinskyPipeline"),
        ("unet/config.json", {"in_channels": 9}, "has 9 input and 4 output channels"),
        ("scheduler/scheduler_config.json", {"prediction_type": "sample"}, "prediction_type"),
        ("vae/config.json", {"_class_name": "AutoencoderTiny"}, "AutoencoderTiny"),
        ("model_index.json", {"text_encoder_3": ["transformers", "T5EncoderModel"]}, "(T5)"),
    ],
)
def test_unsupported_base_models_are_rejected(
    tmp_path: Path, base: Path, part: str, values: dict[str, Any], told: str
) -> None:
    other = tmp_path / "other"
    for name in ("model_index.json", "unet", "scheduler", "vae"):
        path = base / name
        file = path if path.is_file() else next(path.glob("*config.json"))
        target = other / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(file.read_text())
        if str(file.relative_to(base)) == part:
            content |= values
        target.write_text(json.dumps(content))
    with pytest.raises(GulliverError) as error:
        dreambooth(_config(other, save_subject(tmp_path / "s", 1), tmp_path / "out"))
    assert told in str(error.value)
    with pytest.raises(GulliverError, match="is not a folder"):
        check_dreambooth(_config(tmp_path / "none", tmp_path / "s", tmp_path / "out"))


def test_prior_images_are_reused_only_for_same_settings(tmp_path: Path, base: Path) -> None:
    subject, kept = save_subject(tmp_path / "subject", 1), tmp_path / "kept"
    told = {"class_word": "dog", "prior_pictures": 2, "prior_folder": kept}
    config = _config(base, subject, tmp_path / "one", **told)
    dreambooth(config)
    times = {path: path.stat().st_mtime_ns for path in kept.glob("*.png")}
    assert len(times) == 2
    (kept / "prior-00000.png").unlink()
    dreambooth(replace(config, out=tmp_path / "two"))
    last = kept / "prior-00001.png"
    assert last.stat().st_mtime_ns == times[last]
    with pytest.raises(GulliverError, match=r"guidance was None, is 3\.0.*--prior-folder"):
        dreambooth(replace(config, out=tmp_path / "three", guidance=3.0))
    with pytest.raises(GulliverError, match="already holds a run"):
        dreambooth(config)
    with pytest.raises(GulliverError, match="lora_rank was 4, is 2"):
        dreambooth(replace(config, resume=True, lora_rank=2))
    save_subject(subject, 2)
    with pytest.raises(GulliverError, match="--subject or the prior pictures are not those"):
        dreambooth(replace(config, resume=True))


def test_an_adapter_of_another_base_is_refused_with_the_tensor_that_differs(
    tmp_path: Path, base: Path
) -> None:
    subject = save_subject(tmp_path / "subject", 1)
    wide = save_sd(tmp_path / "wide", unet={"block_out_channels": (16, 16)})
    same = save_sd(tmp_path / "same", unet={"seed": 7})
    result = dreambooth(_config(base, subject, tmp_path / "one")).result
    assert result is not None
    with pytest.raises(
        GulliverError, match=r"does not match --model: trained\.down_blocks\.0\.\S+ is"
    ):
        dreambooth(_config(wide, subject, tmp_path / "two", adapter=result))
    with pytest.raises(GulliverError, match="trained on another base"):
        dreambooth(_config(same, subject, tmp_path / "two", adapter=result))
    with pytest.raises(GulliverError, match="is not a diffusers adapter"):
        dreambooth(_config(base, subject, tmp_path / "two", adapter=subject))
    assert not (tmp_path / "two").exists()


def test_each_picture_is_shown_once_before_one_is_shown_again() -> None:
    config = DreamboothConfig(batch=2, class_word="dog", prior_pictures=3)
    order = SampleOrder(config, 4, 3)
    shown = [sample.number for step in range(6) for sample in order.samples(step)[:2]]
    assert all(sorted(shown[start : start + 4]) == [0, 1, 2, 3] for start in (0, 4, 8))
    priors = [sample.number - 4 for step in range(3) for sample in order.samples(step)[2:]]
    assert all(sorted(priors[start : start + 3]) == [0, 1, 2] for start in (0, 3))
    samples = order.samples(0)
    cut = [shares(samples, place, 3, 1) for place in range(3)]
    assert {len(batches) for batches in cut} == {2}
    weights = [s.weight for batches in cut for batch in batches for s in batch]
    assert sum(weights) == pytest.approx(sum(s.weight for s in samples))


def test_layers_with_adapters_are_no_blocks_of_their_own() -> None:
    unet = tiny_unet()
    before = recomputable_blocks(unet)
    inject_adapter_in_model(LoraConfig(target_modules=["to_k", "to_q", "to_v", "to_out.0"]), unet)
    assert recomputable_blocks(unet) == before


def test_the_plan_of_a_command_needs_no_weights(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outline = tmp_path / "outline"
    for file in base.rglob("*.json"):
        target = outline / file.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    plan = ["dreambooth", "--model", str(outline), "--plan", "--batch", "16"]
    assert run([*plan, "--method", "full"]) == 0
    told = capsys.readouterr().err
    assert "micro-batches of 16 of 16 x 16" in told
    assert f"{sum(p.numel() for p in tiny_unet().parameters()):,} of" in told
    assert run([*plan, "--memory", "1GiB", "--activations", "keep"]) == 0
    assert "minimum" in capsys.readouterr().err
