"""Steps in native code: logits of transformers' own forward, and who runs its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import gulliver
from gulliver.errors import GulliverError
from gulliver.precision.int8.formats import from_int4, from_int8
from gulliver.precision.int8.layers import QuantizedLinear
from gulliver.quantize import save_quantized
from gulliver.serve import Batch, LocalRunner, Span
from gulliver.serve.decoder import FAMILIES, Unfit, in_huge_pages, native_problem, read_dense
from gulliver.serve.local import DenseRunner
from gulliver.serve.options import ModelOptions
from gulliver.serve.weights import SERVED, end_tokens, load_model
from tests.models.family_models import LAYERS, config_of

pytestmark = pytest.mark.skipif(native_problem() is not None, reason=str(native_problem()))
TABLES = ([3, 9, 1, 14, 7, 20, 11, 0, 22, 23, 24, 25], [5, 2, 8, 10, 4, 6])
PARTS = ((25, 3), (14, 4), (1, 10))
"""New tokens of two sequences in each of three batches."""
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def decoder_model(kind: str, **more: Any) -> Any:
    """A small model whose sizes native code takes, with norms and biases that matter."""
    sizes: dict[str, Any] = {"intermediate_size": 128, "hidden_size": 128, **more}
    if kind in ("qwen2", "smollm3", "phi3"):
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    else:
        sizes["head_dim"] = 16
    config = config_of("causal", kind, **sizes)
    config.initializer_range = 0.1
    for name in ("hidden_act", "hidden_activation"):
        if kind.startswith("gemma") and hasattr(config, name):
            setattr(config, name, "gelu_pytorch_tanh")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            mean = 0.0 if kind.startswith("gemma") or "bias" in name else 1.0
            parameter.normal_(mean, 0.3)
    return model


def run(model: Any, native: bool = True) -> list[Tensor]:
    """Logits of two sequences, computed in parts; asserts who has run them."""
    runner = LocalRunner(model, cache_tokens=256, block_size=4)
    assert runner.native == native
    return run_parts(runner)


def run_parts(runner: Any) -> list[Tensor]:
    texts = sequences()
    found: list[list[Tensor]] = [[], []]
    begun = [0, 0]
    for ticket, counts in enumerate(PARTS):
        spans = [
            Span(n, begun[n], texts[n][begun[n] : begun[n] + count], TABLES[n], count)
            for n, count in enumerate(counts)
        ]
        runner.submit(Batch(ticket, spans))
        for n, rows in enumerate(runner.collect().split(list(counts))):
            found[n].append(rows)
            begun[n] += counts[n]
    runner.close()
    return [torch.cat(rows) for rows in found]


def sequences() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (n,), generator=random).tolist() for n in (40, 17)]


def wanted(model: Any) -> list[Tensor]:
    return [model(torch.tensor([text])).logits[0].float() for text in sequences()]


def furthest(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, relative to the largest logit."""
    return max(float((g - w).abs().max() / w.abs().max()) for g, w in zip(got, want, strict=True))


def usual(got: list[Tensor], want: list[Tensor]) -> float:
    """The median difference."""
    return float((torch.cat(got) - torch.cat(want)).abs().median())


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in SERVED])
def test_each_family_has_the_logits_of_its_own_forward(kind: str) -> None:
    model = decoder_model(kind)
    got, want = run(model), wanted(model)
    assert furthest(got, want) < 1e-5
    assert all(torch.equal(g.argmax(-1), w.argmax(-1)) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_halves_are_computed_in_float32(dtype: torch.dtype) -> None:
    model = decoder_model("llama").to(dtype)
    # Of halves only keys and values are rounded as the step goes.
    assert furthest(run(model), wanted(copy.deepcopy(model).float())) < 2e-2


def with_floats(model: Any) -> Any:
    """The model with linear layers of the weights that its quantized ones stand for."""
    reference = decoder_model("llama")
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            back = from_int4 if layer.mode == "int4" else from_int8
            values = back(layer.weight, layer.weight_scale, torch.float32)
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            linear.weight = torch.nn.Parameter(values)
            reference.set_submodule(path, linear.requires_grad_(False))
    return reference


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantised_weights_are_multiplied_without_rounding_activations(mode: str) -> None:
    model = gulliver.replace_module(decoder_model("llama"), mode)
    assert furthest(run(model), wanted(with_floats(model))) < 1e-5


@pytest.mark.parametrize("mode", ["float32", "int8", "int8_dynamic", "int4"])
def test_layers_of_several_kinds_take_the_same_rows(mode: str) -> None:
    """The layers that take the same rows differ, at numbers of rows with other kernels."""
    model = decoder_model("llama")
    exclude = ["*.k_proj", "*.up_proj", "lm_head"]
    model = model if mode == "float32" else gulliver.replace_module(model, mode, exclude=exclude)
    reference, text = with_floats(model), torch.arange(3, 43).tolist()
    for rows, asked in ((n, of) for n in (3, 8, 18, 20, 22, 35) for of in (1, n)):
        runner = LocalRunner(model, cache_tokens=256)
        assert runner.native
        runner.submit(Batch(0, [Span(0, 0, text[:rows], range(16), asked)]))
        got = runner.collect()
        runner.close()
        want = reference(torch.tensor([text[:rows]])).logits[0, -asked:]
        assert furthest([got], [want]) < (0.1 if mode == "int8_dynamic" else 1e-5)


def rounded(x: Tensor) -> Tensor:
    """To bytes, with a scale per 32 values."""
    groups = x.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    return (torch.round(groups * (torch.tensor(127.0) / most)) * (most / 127)).flatten(-2)


@pytest.mark.parametrize("instructions", ["avx512-bf16", "avx512-vnni", "avx2"])
def test_int8_dynamic_rounds_activations_with_vnni(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GULLIVER_DECODER", instructions)
    native_problem.cache_clear()
    try:
        if native_problem() is not None:
            pytest.skip(str(native_problem()))
        model = gulliver.replace_module(decoder_model("llama"), "int8_dynamic")
        got = run(model)
    finally:
        monkeypatch.undo()
        native_problem.cache_clear()
    reference = with_floats(model)
    floats = wanted(reference)
    if instructions == "avx2":
        assert furthest(got, floats) < 1e-5
        return
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            linear = reference.get_submodule(path)
            linear.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
    want = wanted(reference)
    # A value between two bytes may be rounded to either, which changes some rows.
    assert usual(got, want) < 1e-5 < 1e-2 < usual(floats, want)
    assert furthest(got, want) < 0.5 * furthest(floats, want)


@pytest.mark.parametrize("embeddings", [False, True])
def test_folders_of_tied_models_have_the_quantised_weights(
    tmp_path: Path, embeddings: bool
) -> None:
    model = decoder_model("llama", tie_word_embeddings=True)
    gulliver.replace_module(model, "int8", embeddings=embeddings)
    found, _ = load_model(save_quantized(model, tmp_path / "written"), ModelOptions())
    ids = torch.arange(9)[None]
    assert furthest([found(ids).logits], [model(ids).logits]) < 1e-5


@pytest.mark.parametrize("change", ["float64", "hook", "gpt2", "sizes", "option"])
def test_other_models_run_their_own_forward(change: str) -> None:
    if change == "option":
        runner = LocalRunner(decoder_model("llama"), cache_tokens=64, decoder="torch")
        assert not runner.native
        runner.submit(Batch(0, [Span(0, 0, [3], range(4), 1)]))
        with pytest.raises(GulliverError, match="served"):  # not with what the batch left behind
            runner._model(torch.tensor([[3]]))
        runner.close()
        return
    more = {"intermediate_size": 52} if change == "sizes" else {}
    model = decoder_model("gpt2" if change == "gpt2" else "llama", **more)
    if change == "float64":
        model = model.double()
    if change == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    assert furthest(run(model, native=False), wanted(model)) < 1e-5


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def roped(kind: str, theta: float = 100.0) -> dict[str, Any]:
    """Configuration whose positions reach into all three ranges of wavelengths."""
    rope = {"rope_type": kind, "rope_theta": theta, **ROPES.get(kind, {})}
    return {"rope_parameters": rope, "max_position_embeddings": 256}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scaled_positions_are_those_of_float64(kind: str, rope: str) -> None:
    model, plain = (decoder_model(kind, **roped(one)) for one in (rope, "default"))
    got, want = run(model), wanted(copy.deepcopy(model).double())
    assert furthest(got, want) < 1e-5
    assert furthest(want, wanted(plain)) > 1e-3, "the scaling changes something"


def test_batches_of_many_rows_have_the_logits_of_few() -> None:
    for mode in (None, "int8", "int4"):
        model = decoder_model("qwen2")
        model = model if mode is None else gulliver.replace_module(model, mode)
        text = torch.randint(3, 60, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        found = []
        for size in (200, 100):
            runner = LocalRunner(model, cache_tokens=256)
            assert runner.native
            rows = []
            for start in range(0, 200, size):
                part = text[start : start + size]
                runner.submit(Batch(0, [Span(0, start, part, range(16), size)]))
                rows.append(runner.collect())
            runner.close()
            found.append(torch.cat(rows))
        assert furthest(found[:1], found[1:]) < 1e-5


@pytest.mark.parametrize("quantize", [None, "int8_dynamic", "int4"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", roped("llama3")),
        ("llama", roped("linear") | {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ALTERNATING}),
    ],
)
def test_files_are_read_as_transformers_reads_them(
    kind: str, more: dict[str, Any], quantize: Any, tmp_path: Path
) -> None:
    decoder_model(kind, **more).save_pretrained(tmp_path)
    options = ModelOptions(cache_tokens=256, quantize=quantize)
    dense, context, ends = read_dense(tmp_path, options, torch.float32)
    model, _ = load_model(tmp_path, options)
    assert (context, ends) == (model.config.max_position_embeddings, end_tokens(model, None))
    runner = DenseRunner(dense, context, options, 2)
    theirs = LocalRunner(model, cache_tokens=256)
    assert theirs.native
    for got, want in zip(run_parts(runner), run_parts(theirs), strict=True):
        assert furthest([got], [want]) < 1e-6


def test_weights_in_huge_pages_are_the_same(tmp_path: Path) -> None:
    decoder_model("llama", hidden_size=256, intermediate_size=2080).save_pretrained(tmp_path)
    dense = read_dense(tmp_path, ModelOptions(quantize="int4"), torch.float32)[0]
    copied = in_huge_pages(dense, 1 << 32)
    assert copied is not dense
    assert copied.tensors.keys() == dense.tensors.keys()
    for name, tensor in copied.tensors.items():
        assert tensor.dtype == dense.tensors[name].dtype
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, dense.tensors[name])
    assert in_huge_pages(dense, 1 << 20) is dense, "too large a part of the free memory"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral", {"sliding_window": 8}),
        ("llama", roped("yarn")),
        ("llama", None),
    ],
)
def test_other_files_are_left_to_transformers(
    kind: str, more: dict[str, Any] | None, tmp_path: Path
) -> None:
    decoder_model(kind, **(more or {})).save_pretrained(tmp_path)
    if more is None:  # a configuration of another size
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(Unfit):
        read_dense(tmp_path, ModelOptions(), torch.float32)
