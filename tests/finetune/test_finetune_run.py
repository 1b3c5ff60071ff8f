"""Fine-tuning runs: what a plain loop computes, on any ranks, under any limit, after any end."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gulliver.booster import limited as _limited
from gulliver.comm import World, init_world
from gulliver.errors import GulliverError
from gulliver.finetune import FinetuneConfig, finetune, make_example
from gulliver.finetune.base import Base
from gulliver.finetune.finetuner import Finetuner
from gulliver.finetune.prepare import FinetuneRun, prepare
from gulliver.finetune.step import FinetuneStep
from tests.finetune.finetune_killed import POINTS
from tests.finetune.finetune_runs import (
    STEPS,
    losses,
    plain_loop,
    run_in_world,
    saved_tensors,
    small,
)
from tests.models.family_models import config_of
from tests.pool import Pool
from tests.programs import module, run_program
from tests.serve.model_folders import with_scales

Example = tuple[Path, Path]


def save_llama(folder: Path, vocabulary: int, layers: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def _at_least(config: FinetuneConfig) -> FinetuneConfig:
    """The same run under the least limit that works."""
    # The size of chunks is chosen again under a limit: the least may be less then.
    for _ in range(2):
        moved = prepare(replace(config, dry_run=True), init_world()).planned.plan.predicted.moved
        assert moved is not None
        config = replace(config, memory=f"{moved.minimum}B")
    return config


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return make_example(tmp_path_factory.mktemp("finetune") / "example", rows=120)


def _limited_run(world: World, config: FinetuneConfig) -> list[dict[str, Any]]:
    # What else a process of tests holds, and gives back, is no business of this model.
    with patch.object(_limited, "Footprint", side_effect=OSError):
        return run_in_world(world, config)


def _moving_run(world: World, config: FinetuneConfig) -> tuple[list[dict[str, Any]], list[int]]:
    """The log of a run, and the bytes that each of its steps wrote to the disk."""
    moved, describe = list[int](), Finetuner.describe

    def describing(self: Finetuner, *arguments: Any) -> dict[str, str]:
        assert self.booster.moved is not None
        moved.append(self.booster.moved[1])
        return describe(self, *arguments)

    with patch.object(Finetuner, "describe", describing):
        return _limited_run(world, config), moved


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def _close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Distance over the distance that training has gone, which is small itself."""
    apart = sum(float((one[n] - other[n]).double().square().sum()) for n in other)
    size = sum(float(other[n].double().square().sum()) for n in other)
    return (apart / size) ** 0.5


@pytest.mark.parametrize(
    ("packing", "answers"),
    [("no", "auto"), ("yes", "auto"), pytest.param("yes", "no", marks=pytest.mark.full)],
    ids=str,
)
def test_losses_and_weights_are_those_of_a_plain_loop(
    pool: Pool, tmp_path: Path, example: Example, packing: str, answers: str, full: bool
) -> None:
    config = small(example, tmp_path / "one", packing=packing, answers_only=answers)
    expected, model = plain_loop(config, packing == "yes")
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"micro_tokens": 300}), (2, {"pp": 2})]
    for number, (ranks, way) in enumerate(ways if full else ways[:2]):
        one = replace(config, out=tmp_path / str(number), ranks=ranks, **way)
        log = pool.run(run_in_world, ranks, one)[0]
        assert losses(log) == pytest.approx(expected, rel=1e-6)
        assert _close(_weights(one.out / "model"), dict(model.state_dict())) < 1e-6


def test_axes_and_limits_change_nothing(
    pool: Pool, tmp_path: Path, example: Example, full: bool
) -> None:
    config = small(example, tmp_path / "plain", lora_rank=4, method="lora")
    expected = pool.run(run_in_world, 1, config)[0]
    limit = {"memory": "80MiB", "disk": f"{tmp_path}:1GiB", "activations": "keep"}
    ways: list[tuple[int, dict[str, Any]]] = [
        (2, {"tp": 2}),
        (2, {"tp": 2, **limit}),
        (2, limit),
        (2, {"pp": 2}),
        (2, {"pp": 2, **limit}),
        (2, {"sp": 2}),
        (2, {"sp": 2, **limit}),
        (1, limit),
    ]
    for number, (ranks, way) in enumerate(ways if full else ways[:3]):
        one = replace(config, out=tmp_path / str(number), **way)
        log = pool.run(_limited_run, ranks, one)[0]
        for name in ("loss", "held_out_loss"):
            assert losses(log, name) == pytest.approx(losses(expected, name), rel=1e-6), way


@pytest.mark.parametrize(
    "changes",
    [
        {"activations": "recompute"},
        {"activations": "keep", "method": "lora", "precision": "bf16"},
        pytest.param({"activations": "keep"}, marks=pytest.mark.full),
        pytest.param({"activations": "auto"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_under_the_least_limit_state_moves_and_changes_nothing(
    pool: Pool, tmp_path: Path, example: Example, changes: dict[str, Any]
) -> None:
    base = small(example, tmp_path / "plain", learning_rate=1e-3, micro_tokens=512, samples=0)
    config = replace(base, **changes)
    expected = pool.run(run_in_world, 1, config)[0]
    limited = replace(config, out=tmp_path / "limited", memory="1000GiB", disk=f"{tmp_path}:1GiB")
    log, moved = pool.run(_moving_run, 1, _at_least(limited))[0]
    for name in ("loss", "held_out_loss"):
        assert losses(log, name) == pytest.approx(losses(expected, name), rel=1e-6)
    assert min(moved) > 0


@pytest.mark.deadline(240)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, example: Example, full: bool
) -> None:
    points = POINTS if full else ("save 3",)
    program = ["tests.finetune.finetune_killed", *map(str, example), str(tmp_path)]
    ran = run_program(module, *program, *points, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["0", *[str(-signal.SIGKILL)] * len(points), "0"]
    whole, killed = (saved_tensors(tmp_path / name) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert [name for name in whole if not torch.equal(whole[name], killed[name])] == []
    logs = [FinetuneRun(tmp_path / name).log.read() for name in ("whole", "killed")]
    for log in logs:
        for line in log:
            line.pop("seconds", None)
    assert logs[0] == logs[1]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        adapters = [(tmp_path / run / "adapter" / name).read_bytes() for run in ("whole", "killed")]
        assert adapters[0] == adapters[1]


def test_an_adapter_loads_in_peft_and_its_merged_model_is_the_same(
    tmp_path: Path, example: Example
) -> None:
    config = small(example, tmp_path / "run", method="lora", merge=True, learning_rate=1e-2)
    outcome = finetune(config)
    assert outcome.finished
    assert outcome.result is not None
    assert outcome.result == config.out / "adapter"
    base = AutoModelForCausalLM.from_pretrained(example[0], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(outcome.result)).eval()
    merged = AutoModelForCausalLM.from_pretrained(config.out / "model", dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        theirs, ours = adapted(ids).logits, merged(ids).logits
        before = adapted.get_base_model()
        with adapted.disable_adapter():
            plain = before(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, theirs, atol=1e-3)
    card = (outcome.result / "README.md").read_text()
    assert "| steps | 4 of 4 |" in card
    assert "library_name: peft" in card

    again = small(example, tmp_path / "again", method="lora", adapter=outcome.result, steps=1)
    finetune(again)
    first, last = (FinetuneRun(out).log.read() for out in (config.out, again.out))
    reached = min(losses(first, "held_out_loss"))
    assert losses(last, "held_out_loss")[0] == pytest.approx(reached, rel=1e-6)


def test_the_best_evaluation_is_kept_and_ends_the_run_in_time(
    tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([3.0, 2.0, 2.5, 2.1, 2.2])
    monkeypatch.setattr(FinetuneStep, "judge", lambda self, batches: next(told))
    config = small(example, tmp_path / "run", steps=20, eval_every=1, patience=2)
    outcome = finetune(config)
    assert (outcome.finished, outcome.step, outcome.best) == (True, 3, 2.0)
    best = FinetuneRun(config.out).best.latest()
    assert best is not None
    assert best.name == "step-00000001"
    assert "step-00000001" in (config.out / "README.md").read_text()
    resumed = finetune(replace(config, resume=True))
    assert (resumed.finished, resumed.step) == (True, 3)


def test_finished_run_is_extended_by_more_steps(tmp_path: Path, example: Example) -> None:
    whole = small(example, tmp_path / "whole", schedule="constant", result="last")
    finetune(whole)
    short = replace(whole, out=tmp_path / "short", steps=STEPS // 2)
    assert finetune(short).step == STEPS // 2
    extended = finetune(replace(short, steps=STEPS, resume=True))
    assert (extended.step, extended.finished) == (STEPS, True)
    logs = [FinetuneRun(config.out).log.read() for config in (whole, short)]
    assert losses(logs[0]) == losses(logs[1])
    files = [config.out / "model" / "model.safetensors" for config in (whole, short)]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(GulliverError, match="--steps 1 is less"):
        finetune(replace(short, steps=1, resume=True))


def test_a_dry_run_plans_for_all_ranks_and_writes_nothing(
    tmp_path: Path, example: Example, capsys: pytest.CaptureFixture
) -> None:
    config = small(example, tmp_path / "run", dry_run=True, ranks=2)
    assert finetune(config).finished
    told = capsys.readouterr().err
    assert "LowLevelZeroPlugin, stage 1 on data 2" in told
    for word in ("parameters", "optimizer state", "learning rate", "per step predicted"):
        assert word in told
    finetune(replace(config, ranks=1, memory="80MiB", disk=f"{tmp_path}:1GiB"))
    assert "minimum" in capsys.readouterr().err
    finetune(replace(config, json=True))
    values = json.loads(capsys.readouterr().out)
    assert values["plan"]["zero"]["stage"] == 1
    assert values["memory"] > 0 < values["step_seconds"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GulliverError, match="--dry-run"):
        finetune(replace(config, json=True, dry_run=False))


def test_other_data_and_another_model_are_not_resumed(tmp_path: Path, example: Example) -> None:
    config = small(example, tmp_path / "run", steps=1)
    finetune(config)
    with pytest.raises(GulliverError, match="already holds a run"):
        finetune(config)
    rows = example[1].read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(rows[:-5]) + "\n")
    with pytest.raises(GulliverError, match="--data or the tokenizer"):
        finetune(replace(config, data=(other,), resume=True))
    model, _ = make_example(tmp_path / "example", rows=2, seed=1)
    with pytest.raises(GulliverError, match="--model is not the one"):
        finetune(replace(config, model=model, resume=True))
    with pytest.raises(GulliverError, match=r"learning_rate was 0.0001, is 0.1"):
        finetune(replace(config, learning_rate=0.1, resume=True))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, example: Example) -> None:
    config = small(example, tmp_path / "run", method="lora", steps=1, lora_rank=2)
    adapter = finetune(config).result
    assert adapter is not None
    model, _ = make_example(tmp_path / "example", rows=2, seed=1)
    other = replace(config, out=tmp_path / "other", adapter=adapter, model=model)
    with pytest.raises(GulliverError, match="trained on another model"):
        finetune(other)
    (adapter / "gulliver.json").unlink()  # of somebody else's adapter only shapes tell
    save_llama(model, 261, 2)
    with pytest.raises(GulliverError, match=r"--model: .*lora_A.weight is \(2, 64\)"):
        finetune(other)
    assert not other.out.exists()


def test_infeasible_run_is_rejected_before_reading_weights(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**changes: Any) -> str:
        with pytest.raises(GulliverError) as refused:
            finetune(replace(small(example, tmp_path / "run"), **changes))
        return str(refused.value)

    monkeypatch.setattr("gulliver.finetune.base.Base.load", lambda *_: pytest.fail("weights"))
    assert "the smallest limit that works is" in told(memory="1MiB", disk=f"{tmp_path}:1GiB")
    assert "/no does not exist" in told(memory="80MiB", disk=f"{tmp_path}/no:1GiB")
    assert "no linear layer of that name" in told(method="lora", lora_targets=("q_porj",))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in told(out=tmp_path / "file" / "run")
    # Room for checkpoints and result, and not for what leaves the memory as well.
    monkeypatch.setattr("gulliver.io.files._free", lambda _: 7_000_000)
    assert "nothing was changed" in told(memory="80MiB", disk=f"{tmp_path}:1GiB")
    monkeypatch.setattr("gulliver.io.files._free", lambda _: 1000)
    assert "nothing was changed" in told()
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((example[0] / name).read_bytes())
    assert "has no tokenizer" in told(model=bare)
    values = json.loads((bare / "config.json").read_text()) | {"model_type": "t5"}
    (bare / "config.json").write_text(json.dumps(values))
    assert "not a causal language model" in told(model=bare)


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(
    tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make_example(tmp_path / "example", rows=20)
    save_llama(model, 200, 1)
    monkeypatch.setattr("gulliver.finetune.base.Base.load", lambda *_: pytest.fail("weights"))
    with pytest.raises(
        GulliverError, match="has 200 embeddings, but its tokenizer produces token 2"
    ):
        finetune(small((model, data), tmp_path / "run"))


def test_steps_of_a_run_are_those_of_its_options(tmp_path: Path, example: Example) -> None:
    config = small(example, tmp_path / "run", steps=None, epochs=2, eval_every=None, samples=0)
    outcome = finetune(config)
    log = FinetuneRun(config.out).log.read()
    assert outcome.step == len(losses(log)) > STEPS
    epoch = sum(line["items"] for line in log if "items" in line) // 2
    assert epoch == json.loads((config.out / "config.json").read_text())["data"]["learnt"]


FOLDERS = ("gpt_neox", "mixtral", "fp8")


def _in_other_names(example: Example, root: Path, kind: str) -> tuple[Path, Path]:
    """A folder whose files have other tensors than the model, and one of the same values."""
    tokenizer = AutoTokenizer.from_pretrained(example[0])
    family = "llama" if kind == "fp8" else kind
    config = config_of("causal", family, vocab_size=len(tokenizer), max_position_embeddings=128)
    config.initializer_range, config.num_hidden_layers = 0.2, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    folder, exact = root / "folder", root / "exact"
    if kind == "fp8":
        with_scales(model, folder, exact)
    else:
        model.save_pretrained(folder)
        model.save_pretrained(exact)
    for path in (folder, exact):
        tokenizer.save_pretrained(path)
    return folder, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_model_is_loaded_as_transformers_does_with_and_without_a_limit(
    tmp_path: Path, example: Example, kind: str, dtype: torch.dtype
) -> None:
    folder, exact = _in_other_names(example, tmp_path, kind)
    wanted = AutoModelForCausalLM.from_pretrained(exact, dtype=dtype).state_dict()
    assert Base(folder).dtype == torch.float32
    for scratch, alone in ((None, True), (tmp_path, True), (tmp_path, False)):
        found = Base(folder).load(dtype, torch.device("cpu"), scratch, alone).state_dict()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), (name, scratch, alone)


@pytest.mark.deadline(240)
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "kind", ["gpt_neox", "fp8", pytest.param("mixtral", marks=pytest.mark.full)]
)
def test_renamed_weight_formats_are_trained_and_written(
    tmp_path: Path, example: Example, kind: str, method: str
) -> None:
    folder, exact = _in_other_names(example, tmp_path, kind)
    rows = example[1].read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[:16]))
    limit = {"memory": "200MiB", "disk": f"{tmp_path}:1GiB"}
    ways = [(exact, {}), (folder, limit)]
    results = []
    for number, (model, way) in enumerate(ways):
        config = small(
            (model, tmp_path / "rows.jsonl"), tmp_path / str(number), **way, steps=1, samples=0
        )
        merge = method == "lora"
        finetune(replace(config, method=method, merge=merge, learning_rate=1e-2, result="last"))
        written = json.loads((config.out / "model" / "config.json").read_text())
        assert "quantization_config" not in written
        results.append((_weights(config.out / "model"), losses(FinetuneRun(config.out).log.read())))
    before = _weights(exact)
    assert any(not torch.equal(value, before[name]) for name, value in results[0][0].items())
    for weights, loss in results[1:]:
        assert loss == results[0][1]
        for name, value in results[0][0].items():
            assert torch.equal(weights[name], value), name
    if method == "lora":
        plain = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
        merged = PeftModel.from_pretrained(
            plain, str(tmp_path / "1" / "adapter")
        ).merge_and_unload()
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(results[1][0][name], value, rtol=1e-5, atol=1e-6)
