"""One reader of model folders: whichever option reads it, values are those of transformers."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gulliver
from gulliver.booster import lazy_parameters
from gulliver.checkpoint import export_huggingface, load_huggingface
from gulliver.checkpoint.huggingface import model_weights
from gulliver.checkpoint.weights import is_step_or_run, open_weights
from gulliver.errors import GulliverError
from gulliver.memory import region_of
from gulliver.memory.parts import Part, Region, set_region
from gulliver.quantize import stream_quantized
from gulliver.serve import SamplingParams
from tests.models.family_models import config_of
from tests.serve.model_folders import with_scales
from tests.texts import tokenizer_of

transformers = pytest.importorskip("transformers")

SEEDS = 20
VISION = {
    "swin": {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
    "vit": {
        "image_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
    "clip_vision_model": {
        "image_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
}
CAUSAL = ("gpt_neox", "gpt2", "bloom", "llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@cache
def made(kind: str) -> Any:
    """A tiny random model; those of vision have no logits."""
    if kind in VISION:
        config = transformers.CONFIG_MAPPING[kind](**VISION[kind])
        model = transformers.AutoModel.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config_of("causal", kind))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def empty(kind: str) -> Any:
    with lazy_parameters():
        auto = transformers.AutoModel if kind in VISION else transformers.AutoModelForCausalLM
        return auto.from_config(made(kind).config)


def same(found: dict[str, Tensor], wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", [*CAUSAL, *VISION])
def test_every_reader_has_the_values_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    wanted = type(made(kind)).from_pretrained(tmp_path)
    model = empty(kind).to_empty(device="cpu")
    model.tie_weights()
    load_huggingface(model, tmp_path)
    assert model.state_dict().keys() == wanted.state_dict().keys()
    same(dict(model.state_dict()), wanted)
    streamed = stream_quantized(empty(kind), tmp_path, "int8", exclude=["*"])
    same(dict(streamed.state_dict()), wanted)


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "qwen3_moe", "swin"])
def test_any_region_of_a_converted_tensor_is_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    random = torch.Generator().manual_seed(5)
    wanted = made(kind).state_dict()

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=random))

    with model_weights(tmp_path, empty(kind)) as weights:
        names = [name for name in weights.infos if name in wanted and wanted[name].dim() > 1]
        for name in (names[draw(len(names))] for _ in range(SEEDS)):
            whole, dim = wanted[name], draw(wanted[name].dim())
            low = draw(whole.shape[dim])
            high = low + 1 + draw(whole.shape[dim] - low)
            region = Region(tuple(whole.shape), dim, ((low, high),))
            value = torch.empty(region.local_shape)
            weights.read({name: Part(value.view(-1), tuple(whole.shape), region=region)})
            assert torch.equal(value, whole.narrow(dim, low, high - low)), (name, dim, low, high)


def served(kind: str = "llama", **more: Any) -> Any:
    config = config_of("causal", kind, vocab_size=len(tokenizer_of()), **more)
    config.initializer_range = 0.2
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("fp8")
    with_scales(served(), root / "fp8", root / "exact")
    for name in ("fp8", "exact"):
        tokenizer_of().save_pretrained(root / name)
    return root / "fp8", root / "exact"


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["the quick brown", "write 123"]


def tokens(folder: Path, **ways: Any) -> list[list[int]]:
    with gulliver.LLM(folder, cache_tokens=512, **ways) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"memory": "1GiB"},
        {"memory": "1GiB", "quantize": "int8"},
        {"tensor": 2},
    ],
    ids=str,
)
def test_fp8_folders_answer_as_their_values_do(
    fp8: tuple[Path, Path], ways: dict[str, Any], tmp_path: Path
) -> None:
    if "memory" in ways:
        ways = {**ways, "disk": tmp_path}
    assert tokens(fp8[0], **ways) == tokens(fp8[1], **ways)


def test_fp8_blocks_at_an_edge_are_smaller(tmp_path: Path) -> None:
    config = config_of("causal", "llama", intermediate_size=40)  # 2.5 blocks
    model = transformers.AutoModelForCausalLM.from_config(config)
    with_scales(model, tmp_path / "fp8", tmp_path / "exact")
    found = transformers.AutoModelForCausalLM.from_config(config)
    load_huggingface(found, tmp_path / "fp8")
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    for name, value in found.state_dict().items():
        if name in exact:
            assert torch.equal(value, exact[name]), name


def test_fp8_that_is_converted_keeps_its_values(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    export_huggingface(fp8[0], tmp_path / "out", dtype=torch.float32)
    found, wanted = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", fp8[1])
    )
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def test_other_quantizations_are_refused(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(fp8[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(GulliverError, match="gptq"):
        gulliver.LLM(tmp_path / "model", cache_tokens=512)


@pytest.mark.parametrize("ways", [{}, {"memory": "1GiB"}, {"quantize": "int8"}], ids=str)
def test_of_two_models_in_a_folder_every_option_reads_that_of_transformers(
    tmp_path: Path, ways: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    new, old = served(), served()
    with torch.no_grad():
        old.model.layers[0].mlp.up_proj.weight.mul_(-1)
    old.save_pretrained(tmp_path / "both", max_shard_size="100KB")
    assert (tmp_path / "both" / "model.safetensors.index.json").exists()
    new.save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "both")
    for name in ("both", "new"):
        tokenizer_of().save_pretrained(tmp_path / name)
    if "memory" in ways:
        ways = {**ways, "disk": tmp_path}
    assert tokens(tmp_path / "both", **ways) == tokens(tmp_path / "new", **ways)


@pytest.mark.parametrize("name", ["latest", "manifest.json"])
def test_files_of_other_programs_do_not_make_a_model_a_run(tmp_path: Path, name: str) -> None:
    made("llama").save_pretrained(tmp_path)
    (tmp_path / name).write_text("{}")
    assert not is_step_or_run(tmp_path)
    with open_weights(tmp_path) as weights:
        assert len(weights.infos) > 4


def test_a_closed_model_does_not_answer(fp8: tuple[Path, Path]) -> None:
    llm = gulliver.LLM(fp8[1], cache_tokens=512)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(GulliverError, match="closed"):
        next(stream)
    with pytest.raises(GulliverError, match="closed"):
        llm.generate(PROMPTS[0])


def test_a_tensor_is_split_by_the_shapes_of_whole_parameters(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    words = {"vocab_size": 64, "additional_vocab_size": 8}
    config = transformers.CONFIG_MAPPING["molmo2_text"](**sizes, **heads, **words)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    wanted = transformers.AutoModel.from_pretrained(tmp_path).state_dict()
    with open_weights(tmp_path) as weights:
        assert "layers.0.self_attn.att_proj.weight" in weights.infos
    model = transformers.AutoModel.from_config(config)
    names = list(model.state_dict())
    del model.layers[0]  # as where another stage has it
    model.layers = nn.ModuleDict({"1": model.layers[0]})
    attention = model.layers["1"].self_attn
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        rows, columns = layer.weight.shape
        layer.weight = nn.Parameter(torch.empty(rows // 2, columns))
        set_region(layer.weight, Region((rows, columns), 0, ((rows // 2, rows),)))
    load_huggingface(model, tmp_path, elsewhere=names)
    for name, value in model.state_dict(keep_vars=True).items():
        region = region_of(value)
        right = wanted[name] if region is None else wanted[name][value.shape[0] :]
        assert torch.equal(value, right), name


@pytest.mark.parametrize("temperature", [1e-37, 1e-40, 5e-324])
def test_the_coldest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    from gulliver.serve.sampling import DrawRow, draw

    logits = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)) * 30
    cold = {"temperature": temperature}
    for more in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        rows = [DrawRow(SamplingParams(**cold, **more), 1, 0, n) for n in range(16)]
        drawn = [token.id for token in draw(logits, rows) if token is not None]
        assert drawn == logits.argmax(-1).tolist()
