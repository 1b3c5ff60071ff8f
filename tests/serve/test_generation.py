"""Clips from a trained run: files, seeds, given frames, judging, and the demonstration's report."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from gulliver.checkpoint.files import read_json, write_tensors
from gulliver.cli.dispatch import run as run_command
from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import DataConfig, Request, SamplingConfig, TrainConfig, VideoModel, extend
from gulliver.video import demo as _demo
from gulliver.video.config import AutoencoderConfig, DemoConfig, OptimizerConfig
from gulliver.video.demo import TASKS, demonstrate, evaluate, real_clips, requests_of
from gulliver.video.digits import MovingDigits
from gulliver.video.media import (
    SheetRow,
    contact_sheet,
    fit,
    read_frames,
    to_frames,
    write_clip,
)
from gulliver.video.planned_training import train
from gulliver.video.public_models import save_autoencoder
from tests.pool import Pool

QUICK = SamplingConfig(steps=3)
BUCKET = Bucket(9, 32, 32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps: its clips show nothing, but everything about them can be checked."""
    folder = tmp_path_factory.mktemp("generation")
    torch.manual_seed(0)
    save_autoencoder(folder / "a.safetensors", VideoAutoencoder(width=8))
    data = DataConfig(shapes=("9x32x32:2", "1x32x32:1"), batch_size=4, clips=40, held_out=("3:0",))
    config = TrainConfig(
        out=folder / "run",
        steps=4,
        data=data,
        autoencoder=AutoencoderConfig(path=folder / "a.safetensors"),
        optimizer=OptimizerConfig(warmup=1),
    )
    train(config)
    return config.out


@pytest.fixture(scope="module")
def model(run: Path) -> VideoModel:
    return VideoModel.load(run)


def request(seed: int = 0, prompt: str = "the digit 3 moving left", **changes) -> Request:
    return Request(prompt, changes.pop("bucket", BUCKET), seed, **changes)


def test_a_clip_depends_on_its_own_request_only(model: VideoModel) -> None:
    together = model.generate([request(1), request(2, "the digit 5 moving up"), request(1)], QUICK)
    alone = model.generate([request(2, "the digit 5 moving up")], QUICK)[0]
    assert together[0].shape == (3, 9, 32, 32)
    torch.testing.assert_close(together[1], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[0], together[2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)
    mixed = model.generate([request(1, bucket=Bucket(1, 32, 32)), request(1)], QUICK)
    assert mixed[0].shape == (3, 1, 32, 32)
    torch.testing.assert_close(mixed[1], together[0], rtol=1e-4, atol=1e-5)


def test_the_averaged_weights_are_used(run: Path, model: VideoModel) -> None:
    from gulliver.checkpoint import load
    from gulliver.video.run import Run

    saved = load(Run(run).newest_checkpoint()).values["ema"]
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, saved[name])


def test_a_given_picture_is_the_first_frame(model: VideoModel) -> None:
    picture = MovingDigits("heldout", 1, shapes={Bucket(1, 32, 32): 1.0})[0].video
    clip = model.generate([request(given=picture)], QUICK)[0]
    # What the autoencoder makes of the picture alone: later frames have no part in it.
    expected = model.autoencoder.decode(model.autoencoder.encode(picture[None]))[0].clamp(-1, 1)
    torch.testing.assert_close(clip[:, :1], expected.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(clip[:, 8], clip[:, 0], atol=1e-3)


def test_an_extension_begins_with_the_clip(model: VideoModel) -> None:
    clip = MovingDigits("heldout", 1, shapes={Bucket(5, 32, 32): 1.0})[0].video
    longer = extend(model, clip, "the digit 3 moving left", BUCKET, 5, sampling=QUICK)
    assert longer.shape == (3, 9, 32, 32)
    assert torch.equal(longer[:, :5], clip)
    with pytest.raises(GulliverError, match=r"\b9 frames .*\b5\b"):
        extend(model, clip, "x", BUCKET, 9, sampling=QUICK)
    with pytest.raises(GulliverError, match="4 k"):
        extend(model, clip, "x", BUCKET, 4, sampling=QUICK)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"bucket": Bucket(9, 30, 32)}, "32x32"),
        ({"bucket": Bucket(10, 32, 32)}, "4 k \\+ 1"),
        ({"given": torch.zeros(3, 9, 32, 32)}, "--frames"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    model: VideoModel, changes: dict, message: str
) -> None:
    with pytest.raises(GulliverError, match=message):
        model.generate([request(**changes)], QUICK)


def test_untrained_prompts_and_shapes_are_reported(model: VideoModel) -> None:
    assert model.remarks(request()) == []
    (words,) = model.remarks(request(prompt="a cat moving left"))
    assert "'a', 'cat'" in words
    (shape,) = model.remarks(request(bucket=Bucket(17, 32, 32)))
    assert re.search("17x32x32.*9x32x32, 1x32x32", shape)


def test_unknown_and_missing_checkpoints_are_named(run: Path, tmp_path: Path) -> None:
    import shutil

    with pytest.raises(GulliverError, match=tmp_path.name):
        VideoModel.load(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (step,) = (copy / "checkpoints").glob("step-*")
    tensors = {"a": torch.ones(2)}
    write_tensors(step / "ema.safetensors", tensors)
    with pytest.raises(GulliverError, match="no complete checkpoint"):
        VideoModel.load(copy)
    shutil.rmtree(copy)
    shutil.copytree(run, copy)
    config = read_json(copy / "config.json")
    config["model"]["size"] = "mini"
    (copy / "config.json").write_text(__import__("json").dumps(config))
    with pytest.raises(GulliverError, match=r"model\.size.*'tiny'"):
        VideoModel.load(copy)


@pytest.mark.parametrize("suffix", [".gif", ".mp4", ".png"])
def test_written_clips_read_back(tmp_path: Path, suffix: str) -> None:
    bucket = Bucket(1 if suffix == ".png" else 9, 32, 32)
    clip = MovingDigits("heldout", 1, shapes={bucket: 1.0})[0].video
    path = write_clip(tmp_path / f"x{suffix}", clip, fps=8, scale=3)
    found = read_frames(path)
    assert found.shape == (3, bucket.frames, 96, 96)
    expected = torch.from_numpy(to_frames(clip, 3)).permute(3, 0, 1, 2).float() / 127.5 - 1
    assert (found - expected).abs().mean() < {".png": 1e-6, ".gif": 0.02, ".mp4": 0.03}[suffix]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_odd_sizes_are_padded_for_video_and_wrong_outputs_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "odd.mp4", torch.zeros(3, 2, 7, 9), fps=8)
    assert read_frames(tmp_path / "odd.mp4").shape == (3, 2, 8, 10)
    for name, message in (("a.avi", "a.avi"), ("a.png", "2")):
        with pytest.raises(GulliverError, match=message):
            write_clip(tmp_path / name, torch.zeros(3, 2, 8, 8), fps=8)
    with pytest.raises(GulliverError, match=r"none.gif"):
        read_frames(tmp_path / "none.gif")
    (tmp_path / "bad.gif").write_bytes(b"GIF89a, not really")
    with pytest.raises(GulliverError, match=r"bad.gif"):
        read_frames(tmp_path / "bad.gif")


def test_pictures_are_scaled_and_cut_to_the_clip() -> None:
    picture = torch.zeros(3, 1, 20, 60)
    picture[:, :, :, 20:40] = 1
    assert (fit(picture, 20, 20) == 1).all()
    assert fit(picture, 32, 24).shape == (3, 1, 32, 24)


def test_a_sheet_holds_every_clip_in_its_place(tmp_path: Path) -> None:
    clips = [torch.full((3, 2, 8, 8), -1.0), torch.ones(3, 4, 8, 8)]
    clips[1][:, :, 0] = torch.linspace(-1, 1, 4)[:, None]  # readers join frames that are equal
    path = contact_sheet(tmp_path / "s.gif", [SheetRow("title", clips, ["a", "b"])], 8, scale=2)
    frames = to_frames(read_frames(path))
    assert len(frames) == 4
    assert np.abs(frames[0, 44:56, 14:26].astype(int)).max() < 8
    assert np.abs(frames[0, 46:56, 42:54].astype(int) - 255).max() < 8
    assert (tmp_path / "s.png").is_file()


def test_evaluation_counts_what_the_judges_see(model: VideoModel) -> None:
    figures = evaluate(model, samples=6, sampling=QUICK, show=False).figures()
    assert figures["ceiling"]["digit"] > 0.95
    assert figures["held_out"]
    assert figures["main"]["clips"] == figures["trained"]["clips"] == 6
    assert set(figures["shapes"]) == {"1x32x32"}
    assert set(figures["conditioned"]) == {task.name for task in TASKS}
    assert {scores["clips"] for scores in figures["conditioned"].values()} == {3}
    # Four steps teach nothing: a judge that saw digits here would be no judge.
    assert figures["main"]["both"] <= 0.5


def test_tasks_give_the_latent_frames_that_they_name(
    model: VideoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = model.flow.sample

    def sample(*args, given: torch.Tensor, mask: torch.Tensor, **kwargs):
        seen.append((given, mask))
        return plain(*args, given=given, mask=mask, **kwargs)

    monkeypatch.setattr(model.flow, "sample", sample)
    real = real_clips(2, BUCKET, seed=1)
    latents = model.autoencoder.encode(real.batch([0, 1]))
    by_name = {task.name: task for task in TASKS}
    for name, given in (("tail", [2]), ("every_second", [0, 2]), ("extension", [0, 1])):
        model.generate(requests_of(by_name[name], real, 4), QUICK)
        found, mask = seen.pop()
        assert (mask == 0).nonzero().tolist() == [[row, n] for row in (0, 1) for n in given]
        torch.testing.assert_close(found[:, :, given], latents[:, :, given])
    picture = requests_of(by_name["image_to_video"], real, 4)[0]
    begun = request(0, picture.prompt, given=real[0].video[:, :1])
    made, expected = model.generate([picture, begun], QUICK)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_the_command_line_makes_one_file_per_prompt(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from gulliver.cli.dispatch import main

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the digit 1 moving up\n\nthe zebra moving up\n")
    picture = tmp_path / "first.png"
    write_clip(picture, torch.zeros(3, 1, 48, 48), fps=8)
    options = ["--run", str(run), "--prompts", str(prompts), "--frames", "9", "--steps", "2"]
    options += ["--image", str(picture), "--out", str(tmp_path / "x.gif")]
    with pytest.raises(SystemExit) as stop:
        main(["generate", *options])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert "x-000.gif  the digit 1 moving up" in captured.out
    assert "'zebra'" in captured.err
    assert read_frames(tmp_path / "x-001.gif").shape == (3, 9, 128, 128)


def test_generate_has_an_option_for_every_request_field(
    run: Path, model: VideoModel, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from gulliver.cli.dispatch import main

    pictures = [tmp_path / "first.png", tmp_path / "last.png"]
    for number, picture in enumerate(pictures):
        write_clip(picture, torch.full((3, 1, 32, 32), number / 2), fps=8)
    fields = f'{{"reference_path": "{pictures[1]}", "mask_strategy": "i2v_head"}}'
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"|0|the digit 1 moving up|1|the digit 1\nthe digit 2 {fields}\n")
    options = ["--run", str(run), "--prompts", str(prompts), "--frames", "9", "--steps", "3"]
    options += ["--reference", *map(str, pictures), "--mask-strategy", "0;0,1,0,-1,1,0.5"]
    options += ["--loops", "2", "--condition-frames", "5", "--condition-edit", "0.25"]
    options += ["--negative-prompt", "the digit 9", "--guidance", "3", "--guidance-image", "2"]
    options += ["--guidance-oscillation", "1", "--guidance-image-oscillation", "1"]
    options += ["--guidance-image-decay", "--guidance-rescale", "0.7", "--align", "1"]
    # The encoder does not give equal bytes twice: what it is given is compared.
    with (
        patch("gulliver.cli.video.write_clip", side_effect=write_clip) as written,
        pytest.raises(SystemExit) as stop,
    ):
        main(["generate", *options, "--scale", "1", "--out", str(tmp_path / "x.mp4")])
    assert stop.value.code == 0, capsys.readouterr().err
    sampling = SamplingConfig(
        steps=3, guidance=3, guidance_image=2, guidance_oscillation=1,
        guidance_image_oscillation=1, guidance_image_decay=True, guidance_rescale=0.7,
    )  # fmt: skip
    first, last = (read_frames(picture) for picture in pictures)
    common = {"loops": 2, "condition_frames": 5, "condition_edit": 0.25, "align": 1}
    common["negative_prompt"] = "the digit 9"
    rules = {"references": (first, last), "mask_strategy": "0;0,1,0,-1,1,0.5"}
    says = "|0|the digit 1 moving up|1|the digit 1"
    expected = model.generate(
        [
            request(0, says, **common, **rules),
            request(1, "the digit 2", **common, references=(last,), mask_strategy="i2v_head"),
        ],
        sampling,
    )
    for number, clip in enumerate(expected):
        path, found = written.call_args_list[number].args[:2]
        assert path == tmp_path / f"x-00{number}.mp4"
        torch.testing.assert_close(found, clip, rtol=0, atol=1e-4)
        assert read_frames(path).shape == clip.shape == (3, 13, 32, 32)
    longer = ["--extend", str(tmp_path / "x-000.mp4"), "--loops", "2", "--prompt", "the digit 1"]
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "generate",
                "--run",
                str(run),
                *options[4:8],
                *longer,
                "--out",
                str(tmp_path / "y.mp4"),
            ]
        )
    assert stop.value.code == 0, capsys.readouterr().err
    assert read_frames(tmp_path / "y.mp4").shape[1] == 13 + 2 * 4


def _rank_of_a_command(world: World, arguments: list[str]) -> int:
    """Runs a command as one of the ranks that a launcher has started."""
    told = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    with patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        return run_command(arguments)


@pytest.mark.deadline(240)
def test_the_demonstration_leaves_its_report(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    if not full:

        def launched(name: str, arguments: list[str], ranks: int) -> int:
            assert name == "gulliver.cli"
            return max(pool.run(_rank_of_a_command, ranks, arguments))

        monkeypatch.setattr(_demo, "SamplingConfig", lambda steps: QUICK)
        monkeypatch.setattr(_demo, "launch", launched)
    config = DemoConfig(out=tmp_path, ranks=2, steps=6, autoencoder_steps=6, samples=5)
    figures = demonstrate(config)
    saved = read_json(tmp_path / "report.json")
    for key in ("digit", "direction", "both", "train_seconds", "total_seconds", "samples"):
        assert saved[key] == figures[key]
    assert saved["samples"] == 5
    assert 0 <= saved["both"] <= min(saved["digit"], saved["direction"]) <= 1
    assert 0 < saved["train_seconds"] < saved["total_seconds"]
    report = (tmp_path / "report.md").read_text()
    assert "MISSED" in report
    bars = {bar["name"]: bar["bar"] for bar in figures["bars"]}
    assert bars == {**_demo.BARS, **{task.name: 0.9 for task in TASKS}}
    assert "LowLevelZeroPlugin" in report
    for name in ("sheet.gif", "sheet.png", "loss.png"):
        assert (tmp_path / name).stat().st_size > 1000
    if not full:
        return
    # Called again it does not train again.
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert demonstrate(config)["digit"] == figures["digit"]
    assert (tmp_path / "run" / "log.jsonl").read_text() == log
