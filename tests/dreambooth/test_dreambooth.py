"""Teaching a subject: what a plain loop computes, under any plugin, and as diffusers loads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("diffusers")

from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from peft import LoraConfig, inject_adapter_in_model
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from gulliver.checkpoint.files import read_tensors
from gulliver.comm import World
from gulliver.dreambooth import DreamboothConfig
from gulliver.dreambooth.student import SampleOrder
from gulliver.dreambooth.trainer import DreamBoothTrainer, dreambooth
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.jobs.run_folder import RunFolder
from tests.dreambooth.tiny_pipelines import SIDE, save_sd, save_sd3, save_sdxl, unplanned
from tests.pool import Pool

STEPS, RATE, ROWS_RATE, GAMMA = 3, 1e-3, 1e-2, 2.0
UNET = ["to_k", "to_q", "to_v", "to_out.0"]
CLIP = ["q_proj", "k_proj", "v_proj", "out_proj"]
Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "sd": save_sd(folder / "sd"),
        "sd2": save_sd(folder / "sd2", "v_prediction"),
        "sdxl": save_sdxl(folder / "sdxl"),
        "sd3": save_sd3(folder / "sd3"),
    }


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of the size that is learnt, so that none is resized; one has a caption."""
    folder = tmp_path_factory.mktemp("subject")
    draw = np.random.default_rng(0)
    for number in range(3):
        pixels = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "1.txt").write_text("{token} in the snow\n")
    return folder


def taught(model: Path, subject: Path, out: Path, **changes: Any) -> DreamboothConfig:
    """A run of a few steps that does without validation pictures."""
    config = DreamboothConfig(
        model=model,
        subject=subject,
        out=out,
        class_word="dog",
        prior_pictures=2,
        prior_weight=0.7,
        steps=STEPS,
        batch=2,
        learning_rate=RATE,
        warmup=2,
        clip=0.5,
        sampling_steps=2,
        validation_pictures=0,
        save_every=STEPS,
        activations="keep",
        precision="fp64",
    )
    return replace(config, **changes)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with unplanned():
        yield


def _run(world: World, configs: list[DreamboothConfig]) -> list[Log]:
    with unplanned():
        return _run_here(configs)


def _run_here(configs: list[DreamboothConfig]) -> list[Log]:
    found = []
    for config in configs:
        dreambooth(config)
        found.append(RunFolder(config.out).log.read())
    return found


# A plain loop, which knows nothing of this library but the order of samples and their seeds.


class Reference:
    """Networks of a pipeline, and the loss of diffusers' scripts written out."""

    def __init__(self, config: DreamboothConfig, kind: str) -> None:
        self.config, self.kind = config, kind
        assert config.model is not None
        assert config.subject is not None
        model, exact = config.model, {"torch_dtype": torch.float64}
        denoiser = SD3Transformer2DModel if kind == "sd3" else UNet2DConditionModel
        name = "transformer" if kind == "sd3" else "unet"
        self._scheduler = model / "scheduler"
        self.denoiser: Any = denoiser.from_pretrained(model / name, **exact)
        both = (CLIPTextModel if kind == "sdxl" else CLIPTextModelWithProjection,)
        kinds = (CLIPTextModel,) if kind in ("sd", "sd2") else (*both, CLIPTextModelWithProjection)
        parts = ["text_encoder", "text_encoder_2"][: len(kinds)]
        self.encoders = nn.ModuleDict(
            {n: k.from_pretrained(model / n, dtype=torch.float64) for n, k in zip(parts, kinds)}  # noqa: B905
        )
        self.tokenizer = CLIPTokenizer.from_pretrained(model / "tokenizer")
        vae: Any = AutoencoderKL.from_pretrained(model / "vae", **exact)
        shown = [*sorted(config.subject.glob("*.png")), *sorted((config.out / "prior").iterdir())]
        pixels = [np.array(Image.open(p)) for p in shown if p.suffix == ".png"]
        pictures = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).double() / 127.5 - 1
        with torch.no_grad():
            self.drawn = vae.encode(pictures).latent_dist
        self.shift, self.scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
        usual, prior = "a photo of sks dog", "a photo of dog"
        self.texts = [usual, "sks in the snow", usual, prior, prior]
        self.rows = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self._learn()

    def _learn(self) -> None:
        config = self.config
        self.denoiser.requires_grad_(config.method == "full")
        self.encoders.requires_grad_(config.method == "full" and config.text_encoder)
        if config.trains_token:
            (encoder,) = self.encoders.values()
            table: Any = encoder.get_input_embeddings()  # type: ignore[operator]
            self.tokenizer.add_tokens(config.token)
            ids = self.tokenizer("dog", add_special_tokens=False)["input_ids"]
            self.rows = nn.Parameter(table.weight[ids].mean(0, keepdim=True).detach().clone())
            encoder.set_input_embeddings(_Longer(table, self))  # type: ignore[operator]
        if config.method == "lora":
            options = {"r": 4, "lora_alpha": 4}
            torch.manual_seed(derive(0, 0, 0))
            inject_adapter_in_model(LoraConfig(target_modules=UNET, **options), self.denoiser)
            if config.text_encoder:
                torch.manual_seed(derive(0, 0, 1))
                inject_adapter_in_model(LoraConfig(target_modules=CLIP, **options), self.encoders)

    def told(self, text: str) -> tuple[Tensor, Tensor]:
        ids = self.tokenizer(text, padding="max_length", return_tensors="pt")["input_ids"]
        out = [e(ids, output_hidden_states=True) for e in self.encoders.values()]  # type: ignore[operator]
        if self.kind in ("sd", "sd2"):
            return out[0].last_hidden_state, torch.zeros(())
        states = torch.cat([one.hidden_states[-2] for one in out], -1)
        if self.kind == "sdxl":
            return states, out[1].text_embeds
        states = torch.cat([states, states.new_zeros(1, 256, states.shape[-1])], 1)
        return states, torch.cat([one.text_embeds for one in out], -1)

    def loss(self, number: int, seed: int) -> Tensor:
        """The loss of one sample."""
        generator = torch.Generator().manual_seed(seed)
        mean, deviation = self.drawn.mean[number][None], self.drawn.std[number][None]
        noise = torch.randn(mean.shape, generator=generator).double()
        clean = ((mean - self.shift) + deviation * noise) * self.scale
        states, pooled = self.told(self.texts[number])
        if self.kind == "sd3":
            place = (torch.randn(1, generator=generator).sigmoid() * 1000).long()
            noise = torch.randn(mean.shape, generator=generator).double()
            levels: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(self._scheduler)
            sigma = levels.sigmas.double()[place]
            noisy = (1 - sigma) * clean + sigma * noise
            found = self.denoiser(noisy, states, pooled, levels.timesteps[place]).sample
            return (found - (noise - clean)).square().mean()
        place = torch.randint(1000, (1,), generator=generator)
        noise = torch.randn(mean.shape, generator=generator).double()
        levels = DDPMScheduler.from_pretrained(self._scheduler)
        level = levels.alphas_cumprod.double()[place]
        noisy = level.sqrt() * clean + (1 - level).sqrt() * noise
        more: dict[str, Any] = {}
        if self.kind == "sdxl":
            sizes = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]]).double()
            more = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes}}
        found = self.denoiser(noisy, place, states, **more).sample
        velocity = self.kind == "sd2"
        target = level.sqrt() * noise - (1 - level).sqrt() * clean if velocity else noise
        loss = (found - target).square().mean()
        if self.config.snr_gamma is None:
            return loss
        ratio = level / (1 - level)
        return loss * (ratio.clamp(max=GAMMA) / (ratio + 1 if velocity else ratio)).squeeze()

    def step_loss(self, step: int) -> Tensor:
        """Mean loss of the subject's samples, and of the prior ones by their weight."""
        samples = SampleOrder(self.config, 3, 2).samples(step)
        each = [self.loss(sample.number, sample.seed) for sample in samples]
        assert [sample.number >= 3 for sample in samples] == [False, False, True, True]
        return (each[0] + each[1]) / 2 + 0.7 * (each[2] + each[3]) / 2

    def train(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the run."""
        trained = [p for m in (self.denoiser, self.encoders) for p in m.parameters()]
        trained = [p for p in trained if p.requires_grad and p is not self.rows]
        groups: list[dict[str, Any]] = [{"params": trained, "lr": RATE, "weight_decay": 0.01}]
        if len(self.rows):
            groups += [{"params": [self.rows], "lr": ROWS_RATE, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups)
        rates, losses, norms = [group["lr"] for group in groups], [], []
        for step in range(STEPS):
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (0.5 if step == 0 else 1)
            loss = self.step_loss(step)
            loss.backward()
            every = [p for group in groups for p in group["params"]]
            norms.append(float(nn.utils.clip_grad_norm_(every, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, norms


class _Longer(nn.Module):
    def __init__(self, table: nn.Embedding, owner: Reference) -> None:
        super().__init__()
        self.table, self._owner = table.requires_grad_(False), (owner,)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.table.weight, self._owner[0].rows])[ids]


def _final(config: DreamboothConfig) -> dict[str, Tensor]:
    """Trained tensors of the last checkpoint."""
    from gulliver.dreambooth.trainer import SavedTensors

    newest = RunFolder(config.out).checkpoints.latest()
    assert newest is not None
    return {name.replace(".table.", "."): value for name, value in SavedTensors(newest).items()}


def _compare(config: DreamboothConfig, reference: Reference) -> None:
    expected = {f"trained.{n}": p for n, p in reference.denoiser.named_parameters()}
    expected |= {f"text.{n}": p for n, p in reference.encoders.named_parameters()}
    buffers = [f"trained.{name}" for name, _ in reference.denoiser.named_buffers()]
    found = {name: value for name, value in _final(config).items() if name not in buffers}
    for name, value in found.items():
        wanted = reference.rows if name.endswith(".rows") else expected[name]
        assert torch.allclose(value, wanted, rtol=1e-7, atol=1e-9), name
    learnt = [n for n, p in expected.items() if p.requires_grad and p.grad is not None]
    assert set(learnt) - set(found) == set()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adapters and a word": (
        "sd",
        {"text_encoder": True, "learn_token": True, "token_rate": ROWS_RATE},
    ),
    "all weights, velocity, Min-SNR": ("sd2", {"method": "full", "snr_gamma": GAMMA}),
    "all weights of three networks": ("sdxl", {"method": "full", "text_encoder": True}),
    "flow model": ("sd3", {}),
}
LONG = ("all weights of three networks", "flow model")
"""Cases of the full grid."""


def test_losses_gradients_and_weights_are_those_of_a_plain_loop(
    pool: Pool, tmp_path: Path, bases: dict[str, Path], subject: Path, full: bool
) -> None:
    names = [name for name in CASES if full or name not in LONG]
    ones, twos = list[DreamboothConfig](), list[DreamboothConfig]()
    for number, name in enumerate(names):
        kind, changes = CASES[name]
        folder, token = tmp_path / str(number), "<it>" if changes.get("learn_token") else "sks"
        config = taught(bases[kind], subject, folder / "one", token=token, **changes)
        # Two ranks, with a micro-batch that does not divide what each of them has.
        both = {"out": folder / "two", "micro_batch": 1, "prior_folder": folder / "one/prior"}
        both["plugin"] = "zero3" if kind == "sd2" else "auto"
        ones.append(config)
        twos.append(replace(config, **both))
    alone = _run_here(ones)
    beside = pool.run(_run, 2, twos)[0]
    for name, one, two, *logs in zip(names, ones, twos, alone, beside, strict=True):
        reference = Reference(one, CASES[name][0])
        reference.texts = [text.replace("sks", one.token) for text in reference.texts]
        losses, norms = reference.train()
        for log in logs:
            assert [line["loss"] for line in log] == pytest.approx(losses, rel=1e-8), name
            assert [line["grad_norm"] for line in log] == pytest.approx(norms, rel=1e-8), name
        for config in (one, two):
            _compare(config, reference)


def test_all_plugins_and_limits_train_equally(
    pool: Pool, tmp_path: Path, bases: dict[str, Path], subject: Path, full: bool
) -> None:
    base = taught(bases["sd"], subject, tmp_path / "plain", batch=3, precision="fp32", steps=2)
    base = replace(base, text_encoder=True, learn_token=True, token="<it>", validation_pictures=1)
    (expected,) = _run_here([base])
    base = replace(base, prior_folder=tmp_path / "plain" / "prior")
    limit = {"memory": "1GiB", "disk": f"{tmp_path}:1GiB"}
    ways: list[dict[str, Any]] = [
        {**limit, "activations": "auto" if full else "keep"},
        {"plugin": "ddp"},
        {"plugin": "zero1", "micro_batch": 2},
        {"plugin": "zero2", "activations": "recompute"},
        {"plugin": "zero3", "micro_batch": 1},
    ]
    ways = ways if full else ways[:1]  # of the others, zero3 is compared with a plain loop above
    configs = [replace(base, out=tmp_path / str(n), **way) for n, way in enumerate(ways)]
    shown = _samples(base)
    for config, log, way in zip(configs, pool.run(_run, 2, configs)[0], ways, strict=True):
        for name in ("loss", "prior_loss", "grad_norm"):
            wanted = [line[name] for line in expected]
            assert [line[name] for line in log] == pytest.approx(wanted, rel=2e-4), way
        assert np.abs(_samples(config) - shown).max() <= 1, way


def test_a_run_stays_within_the_least_limit_that_its_plan_states(
    tmp_path: Path, bases: dict[str, Path], subject: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries take more than a model of a few hundred KiB, at its first steps and save."""
    disk = {"disk": f"{tmp_path}:1GiB", "save_every": 1, "micro_batch": 4}
    config = taught(bases["sd"], subject, tmp_path / "run", precision="fp32", steps=2, **disk)
    with pytest.raises(GulliverError) as error:
        dreambooth(replace(config, memory="8MiB"))
    told = re.search(r"limit that works is (\d+MiB).* 16\.0 MiB", str(error.value))
    assert told is not None, error
    dreambooth(replace(config, memory=told[1]))
    assert "a step takes more than the memory limit" not in caplog.text


def _samples(config: DreamboothConfig) -> np.ndarray:
    newest = max((config.out / "samples").glob("*.png"))
    return np.array(Image.open(newest)).astype(int)


def _pictures(pipeline: Any, config: DreamboothConfig) -> np.ndarray:
    """What a pipeline of diffusers makes of the prompts and seeds of the last samples."""
    about = json.loads(max((config.out / "samples").glob("*.json")).read_text())
    pipeline.set_progress_bar_config(disable=True)
    rows = []
    for prompt in about["prompts"]:
        made = [
            pipeline(
                prompt,
                height=SIDE,
                width=SIDE,
                num_inference_steps=config.sampling_steps,
                guidance_scale=about["guidance"],
                generator=torch.Generator().manual_seed(seed),
                output_type="np",
            ).images[0]
            for seed in about["seeds"]
        ]
        rows.append(np.concatenate(made, axis=1))
    return (np.concatenate(rows) * 255).round().astype(int)


def _with_adapters(pipeline: Any, result: Path) -> None:
    pipeline.load_lora_weights(result)
    if (result / "learned_embeds.safetensors").is_file():
        pipeline.load_textual_inversion(result / "learned_embeds.safetensors")
    second = result / "learned_embeds_2.safetensors"
    if second.is_file():
        parts = {"text_encoder": pipeline.text_encoder_2, "tokenizer": pipeline.tokenizer_2}
        pipeline.load_textual_inversion(second, **parts)


def _rows_alone(config: DreamboothConfig, result: Path) -> None:
    """Nothing but the new word's row has learnt."""
    (tensor,) = read_tensors(result / "learned_embeds.safetensors").values()
    assert tensor.shape == (1, 16)
    assert list(_final(config)) == ["text.text_encoder.embeddings.token_embedding.rows"]
    names = ["gulliver.json", "learned_embeds.safetensors"]
    assert sorted(path.name for path in result.iterdir()) == names


LOADED: dict[str, tuple[str, dict[str, Any], Callable[[Any, Path], None] | None]] = {
    "adapters": ("sd", {"text_encoder": True, "lora_alpha": 8.0}, _with_adapters),
    "adapters and words": (
        "sdxl",
        {"learn_token": True, "token": "<it>", "text_encoder": True, "lora_alpha": 8.0},
        _with_adapters,
    ),
    "adapters of a transformer": ("sd3", {}, _with_adapters),
    "a word": ("sd", {"method": "token", "token": "<it>", "prior_pictures": 0}, None),
    "all weights": (
        "sd",
        {"method": "full", "text_encoder": True, "learn_token": True, "token": "<it>"},
        None,
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=[pytest.mark.full] if n == "adapters" else []) for n in LOADED],
)
def test_diffusers_loads_what_was_saved_and_makes_the_same_pictures(
    tmp_path: Path, bases: dict[str, Path], subject: Path, case: str
) -> None:
    kind, changes, load = LOADED[case]
    many = {"precision": "fp32", "validation_pictures": 2, "learning_rate": 0.02, "steps": 2}
    prompts = {"validation_prompt": ("a photo of {token} dog", "{token} in the snow")}
    told = {**many, **prompts, **changes}
    if "prior_pictures" in changes:
        told["prior_weight"] = 1.0
    config = taught(bases[kind], subject, tmp_path / "run", **told)
    result = dreambooth(config).result
    assert result is not None
    whole = result if config.method == "full" else bases[kind]
    absent = {"text_encoder_3": None, "tokenizer_3": None} if kind == "sd3" else {}
    pipeline = DiffusionPipeline.from_pretrained(whole, **absent)
    before = _pictures(pipeline, config)
    if load is not None:
        load(pipeline, result)
    elif config.method == "token":
        pipeline.load_textual_inversion(result / "learned_embeds.safetensors")
    found = _pictures(pipeline, config)
    assert np.abs(found - _samples(config)).max() <= 1
    if config.method != "full":
        assert np.abs(before - found).max() > 1  # it has learnt something
    if config.method == "token":
        _rows_alone(config, result)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, bases: dict[str, Path], subject: Path
) -> DreamboothConfig:
    """A run of adapters of both networks, from its first step to its last."""
    changes = {"text_encoder": True, "save_every": 2, "precision": "fp32", "lora_rank": 2}
    config = taught(bases["sd"], subject, tmp_path_factory.mktemp("whole") / "run", **changes)
    with unplanned():
        dreambooth(replace(config, steps=4))
    return replace(config, steps=4)


def test_a_run_that_is_ended_and_resumed_has_the_same_curve_and_bytes(
    tmp_path: Path, whole: DreamboothConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(whole, out=tmp_path / "ended", resume=True)
    step = DreamBoothTrainer._step
    for last in (1, 3):  # before the first checkpoint, and between two

        def ending(self: DreamBoothTrainer, *arguments: Any, last: int = last) -> bool:
            stopped = step(self, *arguments)
            if self.step_number == last:
                self.booster.wait()
                raise KeyboardInterrupt
            return stopped

        monkeypatch.setattr(DreamBoothTrainer, "_step", ending)
        with pytest.raises(KeyboardInterrupt):
            dreambooth(config)
    monkeypatch.setattr(DreamBoothTrainer, "_step", step)
    assert dreambooth(config).finished
    logs = [RunFolder(one.out).log.read() for one in (whole, config)]
    assert [_without_time(line) for line in logs[0]] == [_without_time(line) for line in logs[1]]
    one, other = (c.out / "result" / "pytorch_lora_weights.safetensors" for c in (whole, config))
    assert one.read_bytes() == other.read_bytes()


def _without_time(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}


def test_adapter_training_continues(tmp_path: Path, whole: DreamboothConfig) -> None:
    result = whole.out / "result"
    told = {"adapter": result, "learning_rate": 1e-9, "weight_decay": 0.0, "lora_rank": 4}
    second = dreambooth(replace(whole, out=tmp_path / "second", steps=1, **told)).result
    assert second is not None
    name = "pytorch_lora_weights.safetensors"
    before, after = (read_tensors(folder / name) for folder in (result, second))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[n], after[n], atol=1e-6) for n in before)
