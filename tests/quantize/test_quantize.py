"""Checkpoints quantised as they are read: shards are one rank's model, files come back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import gulliver
from gulliver.booster import lazy_parameters
from gulliver.checkpoint import save_huggingface
from gulliver.cli.dispatch import main
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.precision.int8 import report_of
from gulliver.precision.int8.replace import model_bytes
from gulliver.quantize import (
    load_pipeline,
    load_quantized,
    quantize_folder,
    quantize_pipeline,
    replace_calibrated,
    save_quantized,
    stream_quantized,
)
from gulliver.quantize.job import perplexity
from tests.hybrid.hybrid_models import build
from tests.parallel.tensor_cells import rank_group_of
from tests.pool import Pool

FAMILIES = ("llama", "gpt2", "bloom")
PROMPT = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])


def on_meta(family: str) -> Any:
    with lazy_parameters():
        return build(family, torch.float32)


def continued(model: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits = model(PROMPT).logits
        model.generation_config.pad_token_id = 0
        given = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False}
        return logits, model.generate(PROMPT, max_new_tokens=6, min_new_tokens=6, **given)


def streamed_on(world: World, folder: str, modes: tuple[str, ...]) -> dict[Any, Any]:
    found = {}
    for family in FAMILIES:
        for mode in modes:
            model = on_meta(family)
            stream_quantized(model, Path(folder, family), mode, rank_group_of(world))
            found[family, mode] = (*continued(model), model_bytes(model))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        model = build(family, torch.float32)
        save_huggingface(model, made / family)
        model.config.save_pretrained(made / family)
    return made


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_stream_their_slices_say_what_one_rank_says(
    pool: Pool, folder: Path, ranks: int
):
    modes = ("int8", "int8_dynamic")
    alone = {}
    for family in FAMILIES:
        for mode in modes:
            whole = gulliver.replace_module(build(family, torch.float32).eval(), mode=mode)
            alone[family, mode] = (*continued(whole), model_bytes(whole))
    for found in pool.run(streamed_on, ranks, str(folder), modes):
        for case, (logits, tokens, nbytes) in found.items():
            torch.testing.assert_close(logits, alone[case][0], atol=2e-4, rtol=1e-4)
            assert torch.equal(tokens, alone[case][1]), case
            assert nbytes < 0.9 * alone[case][2]


def wide(hidden: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 67, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).float()


def int4_streamed_on(world: World, folder: str, hidden: int, group: str) -> Any:
    with lazy_parameters():
        model = wide(hidden)
    given: Any = {"torch": torch.distributed.group.WORLD, "none": None, "wrong": 3}[group]
    try:
        stream_quantized(model, Path(folder), "int4", given)
    except GulliverError as error:
        return str(error)
    with torch.no_grad():
        return model(PROMPT).logits, {n.path: n.format for n in report_of(model).replaced}


@torch.no_grad()
@pytest.mark.parametrize("group", ["torch", "none"])
def test_int4_over_ranks_has_the_groups_of_one_rank(pool: Pool, tmp_path: Path, group: str):
    save_huggingface(wide(256), tmp_path)
    whole = gulliver.replace_module(wide(256).eval(), mode="int4")
    wanted = {layer.path: layer.format for layer in report_of(whole).replaced}
    for logits, formats in pool.run(int4_streamed_on, 2, str(tmp_path), 256, group):
        assert formats == wanted
        torch.testing.assert_close(logits, whole(PROMPT).logits, atol=1e-5, rtol=1e-4)


def test_ranks_that_would_cut_a_group_of_int4_are_refused_by_name(pool: Pool, tmp_path: Path):
    save_huggingface(wide(96), tmp_path)
    for told in pool.run(int4_streamed_on, 2, str(tmp_path), 96, "torch"):
        assert "self_attn.o_proj has 96 inputs, which 2 ranks" in told
    for told in pool.run(int4_streamed_on, 2, str(tmp_path), 96, "wrong"):
        assert "rank_group is a int" in told


@torch.no_grad()
@pytest.mark.parametrize("mode", ["int8_dynamic", "int4"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_quantised_folder_comes_back_bit_for_bit(
    folder: Path, tmp_path: Path, mode: str, embeddings: bool
):
    streamed = stream_quantized(on_meta("gpt2"), folder / "gpt2", mode, embeddings=embeddings)
    whole = build("gpt2", torch.float32).eval()
    gulliver.replace_module(whole, mode=mode, embeddings=embeddings)
    assert torch.equal(streamed(PROMPT).logits, whole(PROMPT).logits)
    save_quantized(streamed, tmp_path / "saved")
    for other in (build("gpt2", torch.float32), on_meta("gpt2")):
        load_quantized(other, tmp_path / "saved")
        assert torch.equal(other(PROMPT).logits, whole(PROMPT).logits)
        assert model_bytes(other) == model_bytes(whole)
        with pytest.raises(GulliverError, match="already quantized"):
            load_quantized(other, tmp_path / "saved")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_files_of_another_model_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(GulliverError, match="not quantized"):
        load_quantized(build("gpt2", torch.float32), folder / "gpt2")
    save_quantized(gulliver.replace_module(build("gpt2", torch.float32)), tmp_path / "gpt2")
    with pytest.raises(GulliverError, match="another model"):
        load_quantized(build("llama", torch.float32), tmp_path / "gpt2")
    with pytest.raises(GulliverError, match=r"shape|other"):
        load_quantized(_longer(), tmp_path / "gpt2")
    with pytest.raises(GulliverError, match="call replace_module"):
        save_quantized(build("gpt2", torch.float32), tmp_path / "other")
    with pytest.raises(GulliverError, match="lazy_parameters"):
        stream_quantized(build("gpt2", torch.float32), folder / "gpt2")
    with pytest.raises(GulliverError, match=r"has no .*q_proj|has no .*embed"):
        stream_quantized(on_meta("llama"), folder / "gpt2")


def test_a_folder_that_is_quantised_is_not_quantised_again(folder: Path, tmp_path: Path):
    small = tmp_path / "small"
    save_quantized(gulliver.replace_module(build("llama", torch.float32), mode="int8"), small)
    with pytest.raises(GulliverError, match="is already quantized"):
        stream_quantized(on_meta("llama"), small)
    for report in (False, True):
        with pytest.raises(GulliverError, match="is already quantized"):
            quantize_folder(small, tmp_path / "again", report=report)
    assert not (tmp_path / "again").exists()


def _longer() -> nn.Module:
    import transformers

    config = build("gpt2", torch.float32).config
    config.n_inner = 99
    return transformers.AutoModelForCausalLM.from_config(config)


def test_perplexity_is_that_of_the_uniform_guess_for_a_model_that_knows_nothing():
    class Nothing(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 50)

    assert abs(perplexity(Nothing(), torch.randint(50, (600,)), 64) - 50) < 1e-3


def ran(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_pipeline_is_quantised_pictured_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from tests.dreambooth.tiny_pipelines import save_sd

    folder, out = save_sd(tmp_path / "sd"), tmp_path / "small"
    words = ("--prompts", "a dog", "--steps", "2", "--exclude", "conv_out", "--mode", "int8")
    assert ran(str(folder), "--out", str(out), "--report", *words) == 0
    said = capsys.readouterr().out
    assert "unet, int8: " in said
    assert "text_encoder, int8: " in said
    assert "conv_out" in said
    assert "memory: " in said
    found = re.search(r"picture 'a dog': PSNR ([0-9.]+) dB, largest difference ([0-9.e-]+)", said)
    assert found is not None, said
    assert "unet.mid_block" in said
    with Image.open(out / "picture-1.png") as picture:
        assert picture.width == 2 * picture.height
    # By hand: the pictures of the folder and of what was written, of the same seed.
    from diffusers import StableDiffusionPipeline

    pictures = []
    for made in (StableDiffusionPipeline.from_pretrained(folder), load_pipeline(out)):
        made.set_progress_bar_config(disable=True)
        draw = torch.Generator().manual_seed(0)
        told: Any = made(prompt="a dog", num_inference_steps=2, generator=draw, output_type="pt")
        pictures.append(told.images[0].double())
    apart = pictures[1] - pictures[0]
    assert float(found[1]) == pytest.approx(-10 * apart.square().mean().log10().item(), abs=0.06)
    assert float(found[2]) == pytest.approx(apart.abs().max().item(), rel=0.01)
    with pytest.raises(GulliverError, match="already quantized"):
        quantize_pipeline(out, tmp_path / "other")
    with pytest.raises(GulliverError, match="not quantized"):
        load_pipeline(folder)
    with pytest.raises(GulliverError, match=r"no module of .*unet.* matches 'con_out'"):
        quantize_pipeline(folder, tmp_path / "other", exclude=["con_out"])
    assert not (tmp_path / "other").exists()


def test_gptq_of_a_folder_is_that_of_the_model_and_errs_less(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
):
    model = build("gpt2", torch.float32)
    ids = torch.arange(600) * 7 % model.config.vocab_size
    monkeypatch.setattr("gulliver.quantize.job._tokens", lambda *given: ids)
    text, out = tmp_path / "text", tmp_path / "small"
    told = ("--calibration-tokens", "512", "--mode", "int4", "--report", "--text", str(text))
    where = (str(folder / "gpt2"), "--out", str(out))
    assert ran(*where, "--rounding", "gptq", "--calibration", str(text), *told) == 0
    said = capsys.readouterr().out
    assert "block 1 of " in said
    assert "perplexity: " in said
    batches = list(ids[None, :512].split(model.config.n_positions, 1))
    whole = replace_calibrated(model, batches, "int4")
    loaded = load_quantized(on_meta("gpt2"), out)
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, whole(PROMPT).logits)
    # From what was written no half is left where something is refused.
    for words, why in ((("--rounding", "gptq"), "set --calibration FILE"),):
        assert ran(str(folder / "gpt2"), "--out", str(tmp_path / "no"), *words) == 1
        assert why in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
