"""What users bring to a plan: recurrent layers, own losses, floats, odd sizes, few ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gulliver.cli.dispatch import main
from gulliver.errors import GulliverError
from gulliver.hardware.probe import named_cluster
from gulliver.plan import analyse
from gulliver.planner.search.facts import facts_of
from gulliver.planner.search.grids import least_bytes, minimum_resources, search_grids

transformers = pytest.importorskip("transformers")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.rnn(x)[0]).flatten(0, 1), torch.zeros(24).long())


def kept_by(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes that autograd really saves, but for parameters and inputs."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *inputs)}
    saved = dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            held.append(tensor)
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    held = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sum(saved.values())


def test_an_lstm_that_returns_its_loss_keeps_what_a_real_one_does() -> None:
    model, rows = Recurrent(), torch.randn(2, 12, 16)
    found = analyse(model, rows)
    assert found.saved.activations == kept_by(model, rows)
    assert analyse(model, rows, kernels="cuda").notes[0].startswith("rnn: traced token by token")


def test_floats_of_a_batch_are_planned_as_a_run_turns_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    device = named_cluster("h100").device
    facts = facts_of(model, None, torch.randn(2, 3, 8, 8), device, "bf16")
    assert facts.analysis.inputs == 2 * 3 * 8 * 8 * 2
    assert next(model.parameters()).dtype == torch.float32
    lazy = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(GulliverError, match=r"'0.weight' of a LazyLinear has no shape"):
        facts_of(lazy, None, torch.randn(2, 4), device, "bf16")


def test_rows_of_experts_that_torch_refuses_are_refused_by_path() -> None:
    sizes = {"hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(GulliverError, match=r"layers.0.mlp.experts.*rows of 280 bytes"):
        analyse(model, {"input_ids": ids, "labels": ids})
    with pytest.raises(RuntimeError, match="strides should be multiple of 16"):
        model(input_ids=ids)


@pytest.mark.parametrize("limit", [2500, 6000, 60_000])
def test_the_fewest_ranks_are_the_first_of_all_numbers_that_fit(limit: int) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    cluster = named_cluster("a100x6")
    optimizer = torch.optim.AdamW(model.parameters())
    found = search_grids(model, optimizer, torch.randn(1, 32), cluster, 6, limit)

    def fits(ranks: int) -> bool:
        try:
            return least_bytes(found.facts, cluster.resized(ranks), 6)[0] <= limit
        except GulliverError:
            return False

    first = next((n for n in range(1, 25) if fits(n)), 0)
    told = minimum_resources(found, 6)
    assert told.ranks == first
    assert told.unlooked is None


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["plan", *arguments])
    shown = capsys.readouterr()
    return shown.err + shown.out


def test_configurations_get_a_batch_or_say_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_model": 32, "vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    file, asked = tmp_path / "config.json", ("--cluster", "h100", "--batch", "2", "--seq", "8")
    file.write_text(json.dumps({**whisper, **sizes, **heads, **layers}))
    shown = told(capsys, str(file), *asked, "--json")
    answer = json.loads(shown[shown.index("{") :])  # after the progress on stderr
    assert answer["best"]
    assert "input" in answer["not_counted"]
    sound = {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 32}
    file.write_text(json.dumps({**sound, "num_attention_heads": 2, "num_hidden_layers": 1}))
    assert "pass a module:function" in told(capsys, str(file), *asked)
    assert "names no function" in told(capsys, "some_module:", *asked)
    for name, option, why in (
        ("some_module:made", "--seq", "example batch"),
        ("llama-3-8b", "--frames", "no clips"),
        ("STDiT3-XL/2", "--seq", "video model"),
    ):
        refused = told(capsys, name, "--cluster", "h100", option, "8")
        assert option in refused
        assert why in refused
