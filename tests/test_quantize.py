"""Checkpoints quantised as they are read: shards are one rank's model, files come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gulliver
from gulliver.booster import lazy_parameters
from gulliver.checkpoint import save_huggingface
from gulliver.cli._main import main
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.precision.int8 import model_bytes, report_of
from gulliver.quantize import load_quantized, perplexity, save_quantized, stream_quantized
from tests.hybrid_models import build
from tests.pool import Pool
from tests.tensor_cells import rank_group_of

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


def test_files_of_another_model_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(GulliverError, match="not quantised: gulliver quantize"):
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


def _longer() -> nn.Module:
    import transformers

    config = build("gpt2", torch.float32).config
    config.n_inner = 99
    return transformers.AutoModelForCausalLM.from_config(config)


def test_the_command_writes_a_folder_and_a_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "small"
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder / "llama"), "--out", str(out), "--report"])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    assert (out / "config.json").is_file()
    assert "relative error" in said
    assert "tokens/s at batch 1" in said
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folder / "llama"), "--out", str(out)])
    assert ended.value.code == 1
    assert "exists" in capsys.readouterr().err


def test_errors_of_weights_are_told_where_asked_for(folder: Path):
    model = stream_quantized(on_meta("llama"), folder / "llama", "int8", errors=True)
    errors = [layer.error for layer in report_of(model).replaced]
    assert all(error is not None and 1e-4 < error < 2e-2 for error in errors)


def test_perplexity_is_that_of_the_uniform_guess_for_a_model_that_knows_nothing():
    class Nothing(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.zeros(*ids.shape, 50)

    assert abs(perplexity(Nothing(), torch.randint(50, (600,)), 64) - 50) < 1e-3
