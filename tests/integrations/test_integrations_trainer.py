"""transformers' Trainer with Gulliver's ranks and limits: the values of the plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.integrations.framework_runs import (
    EXACT,
    Case,
    distance,
    launched,
    limited,
    llama,
    logged,
    made_trainer,
    texts,
    train,
    weights,
)
from tests.pool import Pool

pytest.importorskip("accelerate")
Run = tuple[Any, dict[str, Tensor]]


def _same(ours: Run, plain: Run, tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    assert distance(ours[1], plain[1]) <= tolerance


UNCLIPPED = {"max_grad_norm": 0.0}
ONE_RANK = [
    UNCLIPPED,
    {**UNCLIPPED, "bf16": True, "gradient_checkpointing": True, "label_smoothing_factor": 0.1},
    {**UNCLIPPED, "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine"},
    {**UNCLIPPED, "torch_compile": True, "torch_compile_backend": "eager"},
]


def test_one_rank_has_the_bits_of_the_plain_trainer(pool: Pool, tmp_path: Path, full: bool) -> None:
    some = ONE_RANK if full else ONE_RANK[:-1]  # to compile takes seconds
    plain = pool.run(train, 1, tmp_path / "plain", [Case(args=a) for a in some])[0]
    ours = pool.run(train, 1, tmp_path / "ours", [Case({"stage": 1}, a) for a in some])[0]
    for args, one, other in zip(some, ours, plain, strict=True):
        assert [x["loss"] for x in one[0]] == [x["loss"] for x in other[0]], args
        assert distance(one[1], other[1]) == 0.0, args


def test_ranks_stages_and_limits_change_nothing(pool: Pool, tmp_path: Path, full: bool) -> None:
    plain = pool.run(train, 1, tmp_path / "plain", [Case()])[0][0]
    assert plain[0][0]["grad_norm"] > 1.0  # so that clipping does something
    cases = [Case({"stage": 2}), Case({"stage": 3})]
    if full:
        cases += [Case({"stage": 0}), Case({"stage": 1}), Case(limited(tmp_path))]
    for ranks in (1, 2) if full else (2,):
        for run in pool.run(train, ranks, tmp_path / str(ranks), cases):
            for one in run:
                _same(one, plain)


def _evaluated(world: World, folder: Path, cases: list[Case]) -> list[Any]:
    """Trains with evaluation inside, keeps the best, evaluates and predicts with what there is."""
    found = []
    for number, case in enumerate(cases):
        with launched(world):
            trainer = made_trainer(world, folder / str(number), case)
            trainer.train()
            metrics = trainer.evaluate(metric_key_prefix="eval")
            told = trainer.predict(texts(5))
            loss = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
            kept = sorted(p.name for p in (folder / str(number)).glob("checkpoint-*"))
            best = (
                trainer.state.best_metric,
                trainer.state.best_global_step,
                metrics["eval_right"],
            )
            found.append((loss, best, torch.tensor(told.predictions), weights(trainer), kept))
    return found


def _right(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    return {"right": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean())}


EVALUATED = {
    **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    **{"load_best_model_at_end": True, "save_total_limit": 2, "warmup_steps": 0},
    # The first step's loss is the highest: it has to be kept, and taken back.
    **{"metric_for_best_model": "loss", "greater_is_better": True},
}


def test_evaluation_prediction_and_the_best_model_are_those_of_the_plain_trainer(
    pool: Pool, tmp_path: Path, full: bool
) -> None:
    given = {"compute_metrics": _right}
    plain = Case(args=EVALUATED, given=given)
    # An evaluation's loss is a mean of the means of batches: it depends on their sizes.
    [wanted] = pool.run(_evaluated, 2, tmp_path / "plain", [plain])[0]
    assert wanted[1][1] == 1
    ways = [{"stage": 3}, limited(tmp_path)][: 1 + full]
    ours = [Case(options, EVALUATED, given=given) for options in ways]
    for run in pool.run(_evaluated, 2, tmp_path / "ours", ours):
        for loss, best, logits, held, kept in run:
            assert loss == pytest.approx(wanted[0], rel=1e-5)
            assert best == pytest.approx(wanted[1], rel=1e-5)
            assert float((logits - wanted[2]).abs().max()) < 1e-4
            assert distance(held, wanted[3]) < 1e-4
            assert kept == wanted[4]


SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
DROPPING = {"attention_dropout": 0.2}


def test_run_resumes_bitwise_and_on_other_ranks(pool: Pool, tmp_path: Path, full: bool) -> None:
    for options in ({"stage": 3}, {"stage": 2, "precision": "bf16"})[: 1 + full]:
        whole, resumed = tmp_path / "whole", tmp_path / "resumed"
        first = pool.run(train, 2, whole, [Case(options, SAVED, DROPPING)])[0][0]
        middle = str(whole / "0" / "checkpoint-2")
        again = Case(options, SAVED, DROPPING, resume=middle)
        later = pool.run(train, 2, resumed, [again])[0][0]
        assert later[0] == first[0]
        assert distance(later[1], first[1]) == 0.0
    first = pool.run(train, 2, tmp_path / "two", [Case({"stage": 3}, SAVED)])[0][0]
    middle = str(tmp_path / "two" / "0" / "checkpoint-2")
    for number, options in enumerate([{"stage": 1}, limited(tmp_path)][: 1 + full]):
        again = Case(options, SAVED, resume=middle)
        _same(pool.run(train, 1, tmp_path / str(number), [again])[0][0], first)


def _saved(world: World, folder: Path, cases: list[Case]) -> list[list[str]]:
    found = []
    for number, case in enumerate(cases):
        with launched(world):
            trainer = made_trainer(world, folder / str(number), case)
            trainer.train()
            trainer.save_model(str(folder / str(number) / "model"))
            found.append(sorted(p.name for p in (folder / str(number) / "model").iterdir()))
    return found


def test_saved_files_equal_plain_trainers(pool: Pool, tmp_path: Path, full: bool) -> None:
    from safetensors.torch import load_file

    names = ("model.safetensors", "adapter_model.safetensors")
    plain = pool.run(_saved, 1, tmp_path / "plain", [Case(), Case(lora=True)])[0]
    ours = [Case({"stage": 3}), Case({"stage": 3}, lora=True), Case(limited(tmp_path))][: 2 + full]
    files = pool.run(_saved, 2, tmp_path / "ours", ours)[0]
    assert files == [*plain, plain[0]][: 2 + full]
    for number, name in enumerate((*names, names[0])[: 2 + full]):
        mine = load_file(tmp_path / "ours" / str(number) / "model" / name)
        theirs = load_file(tmp_path / "plain" / str(number % 2) / "model" / name)
        assert distance(mine, theirs) < 1e-6
    loaded = type(llama()).from_pretrained(tmp_path / "ours" / "0" / "model")
    assert (
        distance(
            loaded.state_dict(),
            load_file(tmp_path / "ours/0/model" / names[0])
            | {"lm_head.weight": loaded.state_dict()["model.embed_tokens.weight"]},
        )
        == 0.0
    )


def test_adapters_and_modules_trained_whole_are_saved_under_a_limit(
    pool: Pool, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    given: dict[str, Any] = {"lora": True, "whole": ["lm_head"]}
    given |= {"model": {"tie_word_embeddings": False}}
    given |= {"args": {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}}
    pool.run(_saved, 1, tmp_path / "plain", [Case(**given)])
    pool.run(_saved, 2, tmp_path / "ours", [Case(limited(tmp_path), **given)])
    for folder in ("checkpoint-1", "model"):
        plain = load_file(tmp_path / "plain/0" / folder / "adapter_model.safetensors")
        assert any("lm_head" in name for name in plain)
        ours = load_file(tmp_path / "ours/0" / folder / "adapter_model.safetensors")
        assert distance(ours, plain) < 1e-6


REFUSED: dict[str, tuple[Case, str]] = {
    "deepspeed": (Case({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}), "deepspeed"),
    "fsdp": (Case({}, {"fsdp": "full_shard"}), "fsdp"),
    "compiled": (Case({"stage": 3}, {"torch_compile": True}), "torch_compile"),
    "in backward": (Case({"step_in_backward": True}), "step_in_backward"),
    "optimizer": (
        Case({"stage": 1}, given={"optimizer_cls_and_kwargs": (torch.optim.SparseAdam, {})}),
        "SparseAdam",
    ),
    "twice": (Case({"stage": 3}, {"gulliver": {"stage": 2}}), "gulliver="),
    "clipped twice": (Case({"max_norm": 0.1}), "max_grad_norm"),
}


def _refusals(world: World, folder: Path) -> dict[str, str]:
    found = {}
    for name, (case, _) in REFUSED.items():
        with launched(world):
            try:
                made_trainer(world, folder, case).train()
            except GulliverError as error:
                found[name] = str(error)
    return found


def test_incompatible_options_are_rejected(pool: Pool, tmp_path: Path) -> None:
    [told] = pool.run(_refusals, 1, tmp_path)
    for name, (_, text) in REFUSED.items():
        assert text in told.get(name, "nothing was said"), name


def _generated(world: World, folder: Path, gulliver: dict[str, Any] | None) -> Any:
    """Predictions of a sequence-to-sequence model by generation, and texts of each rank after."""
    import transformers

    from gulliver.integrations import trainer as ours

    with launched(world):
        torch.manual_seed(5)
        shape = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
        config = transformers.T5Config(**shape, num_heads=2, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
        module: Any = transformers if gulliver is None else ours
        options = {} if gulliver is None else {"gulliver": {**EXACT, **gulliver}}
        args = module.Seq2SeqTrainingArguments(
            str(folder),
            predict_with_generate=True,
            generation_max_length=6,
            per_device_train_batch_size=4 // world.size,
            per_device_eval_batch_size=4 // world.size,
            max_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **options,
        )
        ids = [torch.arange(3, 9) + row for row in range(8)]
        rows = [{"input_ids": x, "labels": x.flip(0)} for x in ids]
        trainer = module.Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows[:5])
        trainer.train()
        predictions = trainer.predict(rows[:5]).predictions
        # Ranks of other lengths: the last of them ends the others.
        model.eval()
        length = 4 + 3 * world.rank
        text = model.generate(
            input_ids=ids[world.rank][None], max_new_tokens=length, min_new_tokens=length
        )
        return predictions.tolist(), text.shape[1]


def test_generation_while_parameters_are_sharded(pool: Pool, tmp_path: Path) -> None:
    plain, _ = pool.run(_generated, 1, tmp_path / "plain", None)[0]
    for rank, (found, length) in enumerate(pool.run(_generated, 2, tmp_path, {"stage": 3})):
        assert [row[:6] for row in found[:5]] == [row[:6] for row in plain[:5]]
        assert length == 5 + 3 * rank


"""The fine-tuning page of transformers' documentation: classes of texts."""


def _from_meta(world: World, folder: Path) -> Run:
    """A model that no memory has held: filled from files when it is boosted."""
    from gulliver import lazy_parameters

    options = {**limited(folder), "weights": str(folder)}
    case = Case(options)
    with launched(world):
        with lazy_parameters():
            case.given["model"] = llama()
        trainer = made_trainer(world, folder / "run", case)
        trainer.train()
        trainer.save_model(str(folder / "result"))
        return logged(trainer), weights(trainer)


def test_a_model_on_meta_is_filled_within_the_limit(pool: Pool, tmp_path: Path, full: bool) -> None:
    from safetensors.torch import load_file

    llama().save_pretrained(tmp_path)
    plain = pool.run(train, 1, tmp_path / "plain", [Case()])[0][0]
    for one in pool.run(_from_meta, 1 + full, tmp_path):
        _same(one, plain)
    saved = load_file(tmp_path / "result" / "model.safetensors")
    assert distance({**plain[1], **saved}, plain[1]) < 1e-6
