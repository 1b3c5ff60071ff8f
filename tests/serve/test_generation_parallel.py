"""A clip made by several ranks together is the clip that one process makes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import (
    DataConfig,
    Guidance,
    RectifiedFlow,
    Request,
    SamplingConfig,
    TrainConfig,
    VideoModel,
    extend,
)
from gulliver.video.config import AutoencoderConfig, OptimizerConfig
from gulliver.video.generation import share, split_ranks
from gulliver.video.media import read_frames, to_frames
from gulliver.video.planned_training import train
from gulliver.video.public_models import save_autoencoder
from tests.covering import some
from tests.parallel.test_stdit_parallel import Case, build, inputs_of
from tests.patience import patient
from tests.pool import Pool

QUICK = SamplingConfig(steps=3)
SPLITS = ((2, 1), (1, 2), (2, 2), (3, 1), (4, 1))
"""Ranks of a sequence, and of guidance."""


def _sampled(model: Any, case: Case, guidance: float | Guidance) -> Tensor:
    """A clip in float64, its first frame given where the case says so."""
    inputs = inputs_of(case)
    noise, null = inputs.pop("x").detach(), torch.zeros_like(inputs["y"])
    del inputs["timestep"]
    mask = inputs.pop("x_mask")
    inputs["y"] = inputs["y"].detach()
    return RectifiedFlow(shift=3.0).sample(
        model,
        noise,
        inputs,
        null_inputs={"y": null},
        steps=4,
        cfg_scale=guidance,
        given=None if mask is None else noise.cos(),
        mask=mask,
    )


CASES = (Case(4, 6, 6), Case(5, 4, 6, given=True), Case(1, 6, 4, (3,)))


def _same_in_float64(world: World, sequence: int, guidance_ranks: int) -> list[float]:
    alone = build().eval()
    shared = share(copy.deepcopy(alone), sequence, guidance_ranks)
    errors = []
    for case in CASES:
        guidance: float | Guidance = 2.5 if guidance_ranks == 2 else 1.0
        if guidance_ranks == 1 and case.given:
            guidance = Guidance(2.5, 1.5, 1, 2, image_decay=True, rescale=0.7)
        found, expected = (_sampled(m, case, guidance) for m in (shared.model, alone))
        errors.append(float((found - expected).abs().max() / expected.abs().max()))
    return errors


@pytest.mark.parametrize(("sequence", "guidance_ranks"), SPLITS)
def test_latents_in_float64_are_those_of_one_process(
    pool: Pool, sequence: int, guidance_ranks: int
) -> None:
    ranks = sequence * guidance_ranks
    for errors in pool.run(_same_in_float64, ranks, sequence, guidance_ranks):
        assert max(errors) <= 1e-11, errors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps: its clips show nothing, but they can be compared."""
    folder = tmp_path_factory.mktemp("shared")
    torch.manual_seed(0)
    save_autoencoder(folder / "a.safetensors", VideoAutoencoder(width=8))
    config = TrainConfig(
        out=folder / "run",
        steps=4,
        data=DataConfig(shapes=("9x32x32:2", "1x32x32:1"), batch_size=4, clips=40),
        autoencoder=AutoencoderConfig(path=folder / "a.safetensors"),
        optimizer=OptimizerConfig(warmup=1),
    )
    train(config)
    return config.out


def _requests() -> list[Request]:
    picture = torch.linspace(-1, 1, 3 * 32 * 32).view(3, 1, 32, 32)
    moving = Bucket(9, 32, 32)
    return [
        Request("the digit 3 moving left", moving, 1),
        Request("the digit 7", Bucket(1, 32, 32), 2),
        Request("the digit 5 moving up", Bucket(9, 24, 40), 3, picture),
        Request("the digit 4 moving down", moving, 4),
        Request(
            "|0|the digit 5|1|the digit 6",
            moving,
            5,
            negative_prompt="the digit 8",
            references=(picture,),
            mask_strategy="0,0,0,-1,1,0.5;1,0,0,-1",
            loops=2,
            condition_frames=1,
        ),
    ]


def _made(world: World, run: Path, sequence: int, guidance_ranks: int) -> list[Tensor]:
    model = VideoModel.load(run, torch.device("cpu"))
    model.share(sequence, guidance_ranks)
    clips = model.generate(_requests(), QUICK)
    longer = extend(model, clips[0], "the digit 3", Bucket(9, 32, 32), 5, sampling=QUICK)
    return [*clips, longer]


@pytest.mark.parametrize(("sequence", "guidance_ranks"), [(1, 2), (2, 2), (3, 1)])
def test_frames_are_at_most_a_level_from_those_of_one_process(
    pool: Pool, run: Path, sequence: int, guidance_ranks: int
) -> None:
    expected = pool.run(_made, 1, run, 1, 1)[0]
    results = pool.run(_made, sequence * guidance_ranks, run, sequence, guidance_ranks)
    for clips in results:
        for clip, other, first in zip(clips, expected, results[0], strict=True):
            torch.testing.assert_close(clip, other, rtol=1e-4, atol=1e-4)
            levels = abs(to_frames(clip).astype(int) - to_frames(other).astype(int))
            assert levels.max() <= 1
            assert (levels > 0).mean() < 1e-3
            assert torch.equal(clip, first), "all ranks have the same bits"


def _decoded(world: World, run: Path) -> tuple[list[Tensor], list[list[str]]]:
    """Clips of one request, by what is cut to decode them, and what is told of it."""
    clips, told = [], []
    for dim in ("off", "auto", "height", "samples"):
        model, said = VideoModel.load(run, torch.device("cpu")), []
        model.model.double()
        model.autoencoder.double()
        model.share(2, 1, show=said.append, autoencoder=dim)
        latents = torch.linspace(-1, 1, 2 * 8 * 3 * 8 * 8).double().view(2, 8, 3, 8, 8)
        with torch.no_grad():
            clips.append(model.autoencoder.decode(latents, 9))
        told.append([line for line in said if "decoder" in line])
    return clips, told


def test_ranks_decode_together_what_each_would_by_itself(pool: Pool, run: Path) -> None:
    (clips, told), (others, told_others) = pool.run(_decoded, 2, run)
    assert told_others == [[], [], [], []]
    for clip, other in zip(clips, others, strict=True):
        assert torch.equal(clip, other)
        torch.testing.assert_close(clip, clips[0], rtol=0, atol=1e-10)
    assert told[0] == []
    assert told[1][0].endswith("with a part of the samples of 2x3x8x8x8")
    assert told[2][0].endswith("with a part of the height of 2x3x8x8x8")


def _refused(world: World, run: Path) -> list[str]:
    said = []

    def note(function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(GulliverError) as error:
            function(*args, **kwargs)
        said.append(str(error.value))

    model = VideoModel.load(run, torch.device("cpu"))
    note(model.share, 2, 2)
    model.share(1, 2)
    note(model.generate, _requests()[:4], SamplingConfig(steps=1, guidance=1.0))
    moved = [r for r in _requests() if r.given is not None]
    note(model.generate, moved, SamplingConfig(steps=1, guidance_image=2.0))
    other = [Request("the digit 1", Bucket(9, 32, 32), dist.get_rank())]
    note(model.generate, other, QUICK)
    return said


def test_unsupported_joint_generation_is_rejected_on_all_ranks(pool: Pool, run: Path) -> None:
    for said in pool.run(_refused, 2, run):
        wanted = (
            "--sp-size 2 x --guidance-ranks 2 = 4 ranks",
            "guidance_ranks=1",
            "image guidance",
            "rank 1 has different requests than rank 0",
        )
        for told, line in zip(wanted, said, strict=True):
            assert told in line


@given(st.integers(1, 12), st.integers(0, 6), st.integers(0, 2), st.booleans(), st.booleans())
def test_ranks_are_split_into_the_world_or_refused(
    world: int, sequence: int, guidance_ranks: int, guided: bool, image_guided: bool
) -> None:
    possible = [
        (s, g)
        for g in ((1, 2) if guided and not image_guided else (1,))
        for s in range(1, world + 1)
        if s * g == world and sequence in (0, s) and guidance_ranks in (0, g)
    ]
    if not possible:
        with pytest.raises(GulliverError, match=r"--sequence|--guidance-ranks"):
            split_ranks(world, sequence, guidance_ranks, guided, image_guided)
    else:
        # Guidance on two ranks where nothing speaks against it.
        best = max(possible, key=lambda split: split[1])
        found = split_ranks(world, sequence, guidance_ranks, guided, image_guided)
        assert found == best


@pytest.mark.parametrize("guidance_ranks", some(["1", "2"], ["1"]))
def test_the_command_line_starts_the_ranks_and_writes_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, guidance_ranks: str
) -> None:
    base = ["generate", "--run", str(run)]
    base += ["--prompt", "the digit 3 moving left", "--frames", "9", "--steps", "2"]

    def called(*options: str) -> tuple[object, str]:
        """In this process, where no ranks are started: the exit code and what was said."""
        with pytest.raises(SystemExit) as stop:
            main([*base, *options])
        return stop.value.code, capsys.readouterr().err

    alone, shared = tmp_path / "alone.gif", tmp_path / "shared.gif"
    assert called("--out", str(alone))[0] == 0
    command = [sys.executable, "-m", "gulliver.cli", *base, "--out", str(shared)]
    made = subprocess.run(
        [*command, "--sequence", "2", "--guidance-ranks", guidance_ranks],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("shared.gif") == 1
    assert "places cut" in made.stderr
    levels = abs(to_frames(read_frames(alone)).astype(int) - to_frames(read_frames(shared)))
    assert levels.max() <= 1
    code, said = called("--out", str(shared), "--ranks", "4", "--sp-size", "3")
    assert code == 2
    assert said.count("gulliver:") == 1
    assert "--sp-size 3 x --guidance-ranks 1" in said
