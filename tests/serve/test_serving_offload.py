"""Weights beyond a limit of memory come from a disk, and the answers are the model's."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gulliver.errors import GulliverError
from gulliver.precision.int8.formats import from_int8
from gulliver.quantize import save_quantized
from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParams
from gulliver.serve.offload import look_ahead
from gulliver.serve.options import ModelOptions
from gulliver.serve.weights import QuantizedExperts, Source, build_on_meta, load, load_model
from tests.serve.serving_models import filled, one_by_one, prompts, tiny

COUNT = 8
CACHE = 128


def texts() -> list[list[int]]:
    return prompts((3, 22, 9), shared=16)


def served(runner: Any) -> list[list[int]]:
    """Greedy answers, with prompts in chunks, shared beginnings and little room."""
    engine = Engine(runner, options=EngineOptions(11, 4, True))
    asked = SamplingParams(max_tokens=COUNT, temperature=0)
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in texts()}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            made[event.request] += [token.id for token in event.tokens]
    return list(made.values())


def saved(kind: str, folder: Path) -> Path:
    tiny(kind).save_pretrained(folder)
    return folder


def limited(folder: Path, quantize: str | None, layers: float) -> tuple[Any, Any, int]:
    """A runner whose weights have room for so many of the largest layers, and its limit."""
    ways = ModelOptions(quantize=quantize, disk=folder, memory="1GiB")
    model, streamed = load_model(folder, ways)
    whole = LocalRunner(model, cache_tokens=CACHE, block_size=4, streamed=streamed)
    limit = int(streamed.least * layers) + CACHE * whole.measured.token_bytes
    whole.close()
    model, streamed = load_model(folder, replace(ways, memory=limit))
    runner = LocalRunner(model, cache_tokens=CACHE, block_size=4, streamed=streamed)
    return runner, streamed, limit


KINDS = ("mixtral",)
MORE = [
    pytest.param(k, marks=pytest.mark.full)
    for k in ("llama", "gpt2", "bloom", "qwen2", "qwen2_moe")
]


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_streamed_weights_give_the_tokens_of_transformers_within_the_limit(
    kind: str, tmp_path: Path
) -> None:
    runner, streamed, limit = limited(saved(kind, tmp_path), None, 1.5)
    assert served(runner) == [one_by_one(tiny(kind), text, COUNT)[0] for text in texts()]
    assert streamed.manager.stats()["bytes_in"] > streamed.whole, "weights came from the disk"
    assert 0 < streamed.peak <= limit
    assert streamed.manager.held + streamed.beside <= limit
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_int8_weights_are_those_that_stay(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    model = filled(folder, "int8_dynamic")
    assert any(isinstance(m, QuantizedExperts) for m in model.modules()) == (kind == "mixtral")
    whole = LocalRunner(model, cache_tokens=CACHE, block_size=4)
    runner, streamed, limit = limited(folder, "int8_dynamic", 1.5)
    assert served(runner) == served(whole)
    assert streamed.manager.stats()["bytes_in"] > 0
    assert streamed.peak <= limit
    runner.close()


def test_a_quantised_folder_is_streamed(tmp_path: Path) -> None:
    model = filled(saved("llama", tmp_path / "float"))
    from gulliver.precision.int8.replace import replace_module

    quantised = replace_module(model, "int8")
    save_quantized(quantised, tmp_path / "int8")
    want = served(LocalRunner(quantised, cache_tokens=CACHE, block_size=4))
    runner, streamed, _ = limited(tmp_path / "int8", None, 1.5)
    assert served(runner) == want
    assert streamed.manager.stats()["bytes_in"] > 0
    runner.close()


def test_int8_experts_compute_with_the_weights_that_their_values_stand_for(tmp_path: Path) -> None:
    quantised = filled(saved("mixtral", tmp_path), "int8")
    mine: Any = quantised.get_submodule("model.layers.1.mlp.experts")
    theirs: Any = copy.deepcopy(tiny("mixtral").get_submodule("model.layers.1.mlp.experts"))
    with torch.no_grad():
        for name, layers in (("gate_up_proj", mine.into), ("down_proj", mine.out)):
            for expert, layer in enumerate(layers):
                whole = from_int8(layer.weight, layer.weight_scale, torch.float32)
                right = getattr(theirs, name)[expert]
                assert (whole - right).abs().max() <= right.abs().max() / 127
                right.copy_(whole)
        tokens, index = torch.randn(9, 32), torch.rand(9, 4).argsort(-1)[:, :2]
        given = tokens, index, torch.rand(9, 2)
        torch.testing.assert_close(mine(*given), theirs(*given), atol=1e-5, rtol=0)


def test_evicted_weights_read_as_nan(tmp_path: Path) -> None:
    runner, streamed, _ = limited(saved("llama", tmp_path), None, 1.5)
    weight = runner._model.model.layers[0].mlp.up_proj.weight
    assert bool(weight.isnan().all())
    assert weight.untyped_storage().nbytes() == weight.element_size()
    runner.close()
    assert streamed.manager is not None


def test_limit_below_largest_layer_is_rejected(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(GulliverError, match=r"model\.layers\.0 alone takes .*memory_limit by \d"):
        load_model(folder, ModelOptions(memory=4096, disk=folder))


def test_a_disk_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    with pytest.raises(GulliverError, match="does not exist"):
        load_model(folder, ModelOptions(memory="1MiB", disk=tmp_path / "no"))


def test_formats_are_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(GulliverError, match="int9"):
        load(saved("llama", tmp_path), quantize="int9")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_neox"])
def test_files_of_other_names_and_experts_are_read_as_transformers_does(
    kind: str, tmp_path: Path
) -> None:
    folder = saved(kind, tmp_path)
    model = build_on_meta(folder, torch.float32)
    with Source(folder, model) as source:
        for name, right in tiny(kind).named_parameters():
            got = torch.full_like(right, float("nan"))
            source.fill(name, got)
            assert torch.equal(got, right), name


def test_a_layer_is_read_ahead_where_two_have_room() -> None:
    sizes = [2**20] * 12
    assert look_ahead(sizes, 12 * 2**20) == (0, "all of them stay in memory")
    ahead, why = look_ahead(sizes, 6 * 2**20)
    assert ahead == 1
    assert "8.0 MiB of 12.0 MiB" in why
    assert look_ahead(sizes, 2**20)[0] == 0
