"""Mistakes of users of fine-tuning: odd files, folders in each other's way, sums that agree."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from gulliver.errors import GulliverError
from gulliver.finetune import finetune, make_example
from gulliver.finetune.config import check_finetune
from gulliver.finetune.prepare import FinetuneRun
from gulliver.finetune.result import NO_BETTER
from gulliver.finetune.step import FinetuneStep
from gulliver.memory import activation_peak
from gulliver.memory.symbolic import follow_step
from tests.covering import some
from tests.finetune.finetune_runs import small
from tests.finetune.test_finetune_data import read

Example = tuple[Path, Path]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return make_example(tmp_path_factory.mktemp("finetune") / "example", rows=40)


def test_row_with_duplicate_keys_is_bad(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "response": "c"},
        {"prompt": "a", "completion": None, "response": "c"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data, _ = read(tmp_path / "b.jsonl")
    assert [row.why for row in data.bad] == [
        "two columns for the same field: completion and response"
    ]
    assert len(data.train) == 1


def test_a_run_folder_is_not_that_of_the_model_or_the_data(
    tmp_path: Path, example: Example
) -> None:
    model, data = example
    config = small(example, tmp_path / "run")
    link = tmp_path / "link"
    link.symlink_to(model)
    for changes, message in (
        ({"out": model}, "is --model"),
        ({"out": link}, "is --model"),
        ({"out": model / "run"}, "or inside it"),
        ({"out": model.parent}, "contains --model"),
        ({"out": data}, "is --data"),
        ({"out": data.parent / "run", "data": (data.parent,)}, "is --data"),
        ({"out": data, "data": (model / "config.json",), "held_out": data}, "is --held-out"),
        (
            {"out": tmp_path, "method": "lora", "adapter": tmp_path / "adapter"},
            "contains --adapter",
        ),
    ):
        with pytest.raises(GulliverError, match=message):
            check_finetune(replace(config, **changes))
    check_finetune(config)


@pytest.mark.parametrize("method", some(["full", "lora"], ["lora"]))
def test_result_is_initial_model_if_it_was_best(
    tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    told = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(FinetuneStep, "judge", lambda self, batches: next(told))
    config = small(example, tmp_path / "run", method=method, eval_every=1, patience=2, merge=False)
    config = replace(config, merge=method == "lora", learning_rate=1e-2)
    outcome = finetune(config)
    assert (outcome.step, outcome.best) == (2, 1.0)
    result, base = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (config.out / "model", example[0])
    )
    assert all(torch.equal(result[name], base[name]) for name in base)
    card = (config.out / "README.md").read_text()
    assert NO_BETTER in card
    assert "| held-out loss of these weights | 1.0000 |" in card
    resumed = finetune(replace(config, resume=True))
    assert resumed.best == 1.0
    with pytest.raises(GulliverError, match="model already exists, and save_dtype was 'auto'"):
        finetune(replace(config, resume=True, save_dtype="bf16"))
    (config.out / "model").rename(tmp_path / "away")
    finetune(replace(config, resume=True, save_dtype="bf16"))
    assert AutoModelForCausalLM.from_pretrained(config.out / "model", dtype="auto").dtype == (
        torch.bfloat16
    )


def test_experts_are_traced_in_float32() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_local_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    ids = torch.arange(32)[None] % 64
    batch = {"input_ids": ids, "labels": ids}
    found, run = activation_peak(model, kwargs=batch), follow_step(model, (), batch)
    assert found.reason == ""
    assert found.bytes is not None
    assert run.bytes is not None
    assert run.bytes <= found.bytes < 1.1 * run.bytes
    model.bfloat16()  # of which torch knows the shapes by itself
    ours = activation_peak(model, kwargs=batch)
    with patch("gulliver.memory.symbolic.GROUPED", ""):
        assert activation_peak(model, kwargs=batch) == ours


class _Unfit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_untraceable_model_gives_reason_without_traceback() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        found = activation_peak(_Unfit(), (torch.ones(2, 3),))
    finally:
        logger.removeHandler(handler)
    assert found.bytes is None
    assert found.reason
    assert records == []
    assert not logger.disabled


def test_adapter_continues_unchanged(tmp_path: Path, example: Example) -> None:
    config = small(example, tmp_path / "run", method="lora", steps=1, lora_rank=2, samples=0)
    adapter = finetune(config).result
    again = replace(config, out=tmp_path / "again", adapter=adapter)
    for changes, message in (
        ({"lora_rank": 8}, r"--lora-rank is 8, but --adapter .* has 2"),
        ({"lora_targets": ("q_proj",)}, "--lora-targets is"),
    ):
        with pytest.raises(GulliverError, match=message):
            finetune(replace(again, **changes))
    assert not again.out.exists()
    finetune(again)
    assert f"those of {adapter}" in (again.out / "README.md").read_text()
    assert FinetuneRun(again.out).log.read()
