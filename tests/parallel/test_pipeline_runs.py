"""Batches through pipelines: any shape, dtype and model; what cannot be exact is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline import (
    STYLES,
    Pipeline,
    cut,
    make_stage,
    split,
    stack_of,
    stages_by_rank,
)
from gulliver.parallel.pipeline.schedules import predict
from gulliver.parallel.pipeline.stack import block_costs
from gulliver.parallel.pipeline.stage import checkpoint_blocks
from tests.hybrid import hybrid_models
from tests.parallel.pipelines import (
    BAR,
    batch_of,
    build,
    criterion,
    difference,
    grad_of,
    gradients_of,
    pipeline_of,
    plain,
    reference,
)
from tests.pool import Pool
from tests.programs import Program, rank_environment, text


def _many_runs(world: World, style: str) -> list[float]:
    """Batches of other sizes and lengths, training and evaluation in turns."""
    pipe = pipeline_of(world, build("llama", 4), style, 4)
    errors = []
    for seed, (size, length) in enumerate([(4, 12), (7, 7), (4, 12), (5, 16), (4, 16), (7, 7)]):
        data = batch_of("llama", size, seed, length)
        loss, wanted, outputs = reference("llama", 4, data)
        evaluated = pipe.run(data, criterion("llama"), forward_only=True, return_outputs=True)
        errors.append(difference(evaluated["loss"], loss))
        assert (evaluated["outputs"] is None) == (world.rank != pipe.stage.last_stage_rank)
        if evaluated["outputs"] is not None:
            assert not evaluated["outputs"].logits.requires_grad
            errors.append(difference(evaluated["outputs"].logits, outputs))
        found = pipe.run(data, criterion("llama"))
        errors.append(difference(found["loss"], loss))
        errors += [difference(g, wanted[n]) for n, g in gradients_of(pipe).items()]
        pipe.model.zero_grad()
    return errors


@pytest.mark.parametrize("style", STYLES)
def test_shapes_may_change_from_run_to_run_and_evaluation_is_exact(pool: Pool, style: str) -> None:
    for errors in pool.run(_many_runs, 2, style):
        assert max(errors) <= BAR


def _own_loss(world: World, family: str) -> list[float]:
    """The model's own loss is a mean over labels, of which micro-batches have different numbers."""
    data = hybrid_models.batch(family, 4, padded=True)
    labels = data["labels"]
    labels[1] = -100
    labels[2, 3:] = -100
    model = build(family, 2)
    wanted = model(**data)
    wanted.loss.backward()
    pipe = pipeline_of(world, build(family, 2), "gpipe", 4)
    found = pipe.run(data, return_outputs=True)
    errors = [difference(found["loss"], wanted.loss.detach())]
    gradients = dict(model.named_parameters())
    errors += [difference(g, grad_of(gradients[n])) for n, g in gradients_of(pipe).items()]
    if found["outputs"] is not None:
        errors.append(difference(found["outputs"].logits, wanted.logits.detach()))
        errors.append(difference(found["outputs"].loss, wanted.loss.detach()))
    again = pipe.run(data, lambda outputs, _: outputs.loss)["loss"]
    return [*errors, difference(again, wanted.loss.detach())]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "bert"])
def test_the_models_own_loss_counts_labels_that_are_not_ignored(pool: Pool, family: str) -> None:
    # Hugging Face computes the loss of a float64 model in float32.
    for errors in pool.run(_own_loss, 2, family):
        assert max(errors) <= 2e-6


class Table(nn.Module):
    """A model that no table knows: blocks return tuples and share what a module computes."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.ids, self.mix = nn.Embedding(11, 6), nn.Linear(1, 6)
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))
        self.skips = skips
        self.double()

    def forward(self, ids: Tensor, when: Tensor) -> Tensor:
        hidden, context = self.ids(ids) * self.scale, self.mix(when[:, None])
        first = hidden
        for block in self.blocks:
            hidden = block(hidden, context=context)[0]
        return self.head(hidden * self.scale + (first if self.skips else 0))


class TupleBlock(nn.Module):
    """Returns its hidden state and nothing else, in a tuple of two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, context: Tensor) -> tuple[Tensor, None]:
        return hidden + torch.tanh(self.inner(hidden) + context[:, None]), None


def _unknown(world: World, everywhere: tuple[str, ...], skips: bool = False) -> list[float]:
    torch.manual_seed(0)
    model, data = (
        Table(skips),
        (torch.arange(12).view(4, 3) % 11, torch.rand(4, dtype=torch.float64)),
    )
    loss = lambda outputs, _: outputs.square().mean()  # noqa: E731
    whole = loss(model(*data), data)
    whole.backward()
    wanted = {n: grad_of(p).clone() for n, p in model.named_parameters()}
    model.zero_grad()
    pipe = pipeline_of(world, model, "1f1b", 2, everywhere=everywhere)
    found = pipe.run(data, loss)
    assert "scale" in pipe.stage.tied, "what lies on the model itself may be used anywhere"
    errors = [difference(g, wanted[n]) for n, g in gradients_of(pipe).items()]
    return [difference(found["loss"], whole.detach()), *errors]


def test_a_model_that_no_table_knows_is_cut_or_refused_by_name(pool: Pool) -> None:
    for errors in pool.run(_unknown, 2, ("mix",)):
        assert max(errors) <= BAR
    with pytest.raises(GulliverError, match=r"argument 1.context of block 'blocks.2'"):
        pool.run(_unknown, 2, ())


def test_extra_inputs_of_the_head_are_kept_or_named(pool: Pool) -> None:
    for errors in pool.run(_unknown, 2, ("mix", "ids"), True):
        assert max(errors) <= BAR
    with pytest.raises(GulliverError, match=r"output is NaN.*'ids'"):
        pool.run(_unknown, 2, ("mix",), True)


def _crossing(world: World, dtype: torch.dtype, style: str) -> list[float]:
    data = batch_of("plain", 4).to(dtype)
    loss = lambda outputs, _: outputs.float().square().mean()  # noqa: E731
    model = plain(4, dtype)
    for part in data.split(1):
        (loss(model(part), None) / 4).backward()
    wanted = {n: grad_of(p) for n, p in model.named_parameters()}
    pipe = pipeline_of(world, plain(4, dtype), style, 4)
    pipe.run(data, loss)
    return [difference(g.float(), wanted[n].float()) for n, g in gradients_of(pipe).items()]


@pytest.mark.parametrize("style", ["gpipe", "zbv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_of_any_dtype_cross_stages(pool: Pool, dtype: torch.dtype, style: str) -> None:
    bar = 1e-6 if dtype == torch.float32 else 2e-2
    for errors in pool.run(_crossing, 2, dtype, style):
        assert max(errors) <= bar


def _frozen(world: World, style: str) -> list[Any]:
    """The first stage does not train, then it does."""
    model = plain(4)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    pipe = pipeline_of(world, model, style, 2, at=[2, 2] if style == "1f1b" else None)
    data, errors = batch_of("plain", 4), []
    for trains in (False, True):
        for number in (0, 1):
            pipe.model.get_submodule(str(number)).requires_grad_(trains)
        pipe.run(data, criterion("plain"))
        _, wanted, _ = reference("plain", 4, data)
        found = {n: grad_of(p) for n, p in pipe.stage.named_parameters().items() if p.requires_grad}
        errors += [difference(g, wanted[n]) for n, g in found.items()]
        pipe.model.zero_grad()
    return errors


@pytest.mark.parametrize("style", ["1f1b", "zero_bubble", "zbv"])
def test_a_stage_may_be_frozen_and_thawed(pool: Pool, style: str) -> None:
    for errors in pool.run(_frozen, 2, style):
        assert max(errors, default=0.0) <= BAR


def _hooks(world: World, style: str) -> tuple[list[int], float]:
    """Hooks on parameters: before accumulation, as tensor parallelism's, and after, as ZeRO's."""
    pipe = pipeline_of(world, plain(4), style, 4)
    after = {n: 0 for n, _ in pipe.model.named_parameters()}

    def count(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            after[name] += 1

        return hook

    for name, parameter in pipe.model.named_parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
        parameter.register_post_accumulate_grad_hook(count(name))
    data = batch_of("plain", 4)
    pipe.run(data, criterion("plain"))
    _, wanted, _ = reference("plain", 4, data)
    errors = [difference(g, 2 * wanted[n]) for n, g in gradients_of(pipe).items()]
    return sorted(set(after.values())), max(errors)


@pytest.mark.parametrize("style", STYLES)
def test_hooks_of_parameters_run_once_for_each_micro_batch(pool: Pool, style: str) -> None:
    for calls, error in pool.run(_hooks, 2, style):
        assert calls == [4]
        assert error <= BAR


def test_stages_keep_names_without_allocating_others() -> None:
    with torch.device("meta"):
        model = hybrid_models.MODELS["t5"](3)
    whole = dict(model.named_parameters())
    stack = stack_of(model)
    found = cut(model, stack, 2, at=[2, 4])
    blocks = [model.get_submodule(path) for path in stack.blocks]
    stage = make_stage(model, stack, found, RankGroup((0, 1), 1), stages_by_rank("1f1b", 2))
    mine = dict(model.named_parameters())
    assert all(p.is_meta and whole.get(n, p) is p for n, p in mine.items())
    assert {n for n in mine if ".block." in n} == {
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        *(n for n in whole if n.startswith("encoder.block.2.")),
        *(n for n in whole if n.startswith("decoder.block.")),
    }
    assert model.get_submodule("encoder.block.2") is blocks[2]
    assert type(blocks[2]).__name__ == "T5Block"
    assert set(stage.tied) == {
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    }
    assert set(stage.named_parameters()) <= set(whole)
    with pytest.raises(GulliverError, match="called directly"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), labels=torch.zeros(1, 2).long())


def _tied_values(world: World) -> float:
    model = build("gpt2", 2)
    with torch.no_grad():
        model.transformer.wte.weight.add_(world.rank)
    pipe = pipeline_of(world, model, "gpipe", 2)
    found = pipe.stage.named_parameters()["transformer.wte.weight"]
    return difference(found.detach(), build("gpt2", 2).transformer.wte.weight.detach())


def test_copies_of_a_tied_weight_begin_with_the_first_stages_values(pool: Pool) -> None:
    assert pool.run(_tied_values, 2) == [0.0, 0.0]


def test_the_cut_weighs_blocks_and_head() -> None:
    model = hybrid_models.build("llama", layers=8)
    stack = stack_of(model)
    costs = block_costs(model, stack)
    head = 2 * model.lm_head.weight.numel()
    assert costs[-1] == pytest.approx(costs[0] + head)
    even, headed = cut(model, stack, 2, costs=[1.0] * 8), cut(model, stack, 2)
    assert even.sizes == (4, 4)
    assert max(headed.times) <= max(sum(costs[:4]), sum(costs[4:]))
    assert cut(model, stack, 3, at=[2, 4]).bounds == (0, 2, 4, 8)
    assert cut(model, stack, 3, at=[2, 2, 4]).bounds == (0, 2, 4, 8)


@pytest.mark.parametrize(("samples", "parts"), [(7, 3), (6, 3), (3, 3), (100, 7)])
def test_micro_batches_are_as_even_as_can_be(samples: int, parts: int) -> None:
    rows = torch.arange(samples)
    data = {"x": rows, "inner": [rows.view(-1, 1), 3], "one": torch.zeros(1, 4), "flag": True}
    micros = split(data, parts)
    sizes = [micro.samples for micro in micros]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([m.kwargs["x"] for m in micros]), rows)
    assert all(m.kwargs["one"].shape == (1, 4) and m.kwargs["flag"] for m in micros)
    assert torch.equal(torch.cat([m.kwargs["inner"][0] for m in micros])[:, 0], rows)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: split(torch.zeros(3, 2), 4), "3 samples cannot be split into 4 micro-batches"),
        (
            lambda: split({"x": torch.zeros(4, 2), "offsets": torch.zeros(3)}, 2),
            "'offsets' of the batch has 3 rows, but 'x' has 4",
        ),
        (lambda: cut(plain(3), stack_of(plain(3)), 4), "3 blocks .* too few for 4 stages"),
        (lambda: cut(plain(3), stack_of(plain(3)), 2, at=[1, 1]), r"cut=\[1, 1\] .*3 blocks"),
    ],
)
def test_unsplittable_models_are_rejected(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(GulliverError, match=said):
        wrong()


def _dropping(world: World) -> list[float]:
    """Captions are dropped at random, and each stage embeds captions."""
    model = build("stdit3", 2)
    model.y_embedder.drop = 0.5
    pipe = pipeline_of(world, model, "1f1b", 2)
    data = hybrid_models.batch("stdit3", 8)
    torch.manual_seed(world.rank)
    losses = [float(pipe.run(data, criterion("stdit3"))["loss"]) for _ in range(3)]
    torch.manual_seed(0)
    whole = build("stdit3", 2)
    torch.manual_seed(0)
    dropped = [torch.rand(8) < 0.5 for _ in range(3)]
    wanted = [criterion("stdit3")(whole(**data, drop_caption=d), data).item() for d in dropped]
    return [abs(a - b) for a, b in zip(losses, wanted, strict=True)]


def test_random_choices_that_all_stages_need_are_made_once(pool: Pool) -> None:
    for errors in pool.run(_dropping, 2):
        assert max(errors) <= BAR


def _caching(world: World) -> tuple[float, str]:
    """Caches of keys and values are on by default in many configurations."""
    data = batch_of("llama", 4)
    loss, _, _ = reference("llama", 4, data)
    model = build("llama", 4)
    model.config.use_cache = True
    pipe = pipeline_of(world, model, "1f1b", 2)
    checkpoint_blocks(pipe.stage)
    found = pipe.run(data, criterion("llama"), return_outputs=True)
    assert found["outputs"] is None or "past_key_values" not in found["outputs"]
    with pytest.raises(GulliverError) as caught:
        pipe.run({**data, "output_attentions": True}, criterion("llama"))
    return difference(found["loss"], loss), str(caught.value)


def test_per_block_outputs_are_dropped_or_rejected(pool: Pool) -> None:
    for error, said in pool.run(_caching, 2):
        assert error <= BAR
        assert "output_attentions=True" in said


def _refused(world: World) -> list[str]:
    said = []

    def expect(run: Callable[[], Any]) -> None:
        with pytest.raises(GulliverError) as caught:
            run()
        said.append(str(caught.value))

    pipe = pipeline_of(world, plain(4), "1f1b", 3)
    good = batch_of("plain", 3)
    expect(lambda: pipe.run(batch_of("plain", 3, seed=world.rank), criterion("plain")))
    expect(lambda: pipe.run(batch_of("plain", 3 + world.rank), criterion("plain")))
    expect(lambda: pipe.run(batch_of("plain", 2), criterion("plain")))
    pipe.run(good, criterion("plain"))
    expect(lambda: Pipeline(pipe.stage, "1f1b", 1))
    expect(lambda: Pipeline(pipe.stage, "interleaved", 5))
    unknown = {"x": good, "labels": torch.tensor([1, -100, 1])}
    expect(lambda: pipe.run(unknown, criterion("plain")))
    return said


def test_wrong_runs_are_refused_by_name_on_every_rank(pool: Pool) -> None:
    for said in pool.run(_refused, 2):
        assert "rank 1 has a different batch from rank 0" in said[0]
        assert "rank 1 has a different batch from rank 0" in said[1]
        assert "2 samples cannot be split into 3 micro-batches" in said[2]
        assert "at least 2 micro-batches" in said[3]
        assert "5 micro-batches: use 4 or 6" in said[4]
        assert "different numbers of labels" in said[5]


def test_random_choices_that_stages_would_make_differently_are_refused() -> None:
    model = hybrid_models.MODELS["opt"](2).train()
    model.model.decoder.layerdrop = 0.1
    stack = stack_of(model)
    with pytest.raises(GulliverError, match="layerdrop"):
        make_stage(
            model, stack, cut(model, stack, 2), RankGroup((0, 1), 0), stages_by_rank("1f1b", 2)
        )


LOOP = """
import sys, torch
from gulliver.comm import init_world
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from tests.parallel.pipelines import batch_of, criterion, pipeline_of, plain
world = init_world(silence_s=4)
pipe = pipeline_of(world, plain(6), "1f1b", 6)
try:
    for step in range(100_000):
        pipe.run(batch_of("plain", 6), criterion("plain"))
        if step == 3:
            print("running", flush=True)
except GulliverError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(3)
"""


def _start(size: int) -> list[Program]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        Program(text, LOOP, env=rank_environment(rank, size, store.port)) for rank in range(size)
    ]
    processes[0].store = store  # type: ignore[attr-defined]
    for process in processes:
        assert process.stdout.readline() == "running\n"
    return processes


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [8, 16])
def test_predicted_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    """Stages of equal time, backward twice forward: in units of a stage's forward."""
    step, idle = 3 * micro_batches, ranks - 1
    longer = {"gpipe": 3 * idle, "1f1b": 3 * idle, "zero_bubble": idle}
    for style, extra in longer.items():
        found = predict(style, ranks, micro_batches, [1.0] * ranks)
        assert found.seconds == pytest.approx(step + extra)
        assert found.bubble == pytest.approx(extra / (step + extra))
    halves = predict("interleaved", ranks, micro_batches, [0.5] * 2 * ranks)
    assert halves.seconds == pytest.approx(step + 3 * idle / 2)


def test_the_slowest_stage_sets_the_predicted_pace() -> None:
    slow = predict("1f1b", 2, 100, [1.0, 2.0])
    assert slow.seconds == pytest.approx(100 * 6, rel=0.02)
    linked = predict("1f1b", 2, 4, [1.0, 1.0], link=0.5)
    assert linked.seconds > predict("1f1b", 2, 4, [1.0, 1.0]).seconds
