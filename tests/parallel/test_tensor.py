"""A model cut over tensor ranks is the model; what cannot be exact is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.memory import region_of
from gulliver.memory.parts import Region
from gulliver.parallel.tensor import (
    apply_tensor,
    cross_entropy,
    entry,
    plan_tensor,
    split,
    split_evenly,
)
from gulliver.parallel.tensor.apply import materialize
from gulliver.parallel.tensor.collectives import gather, gather_partial, reduce_split, share
from gulliver.parallel.tensor.layers import ColumnLinear
from gulliver.parallel.tensor.styles import best_match
from tests.covering import some
from tests.hybrid.hybrid_models import batch, build
from tests.models.family_models import build as build_type
from tests.parallel.tensor_cells import (
    BARS,
    Cell,
    cells,
    compare,
    errors_of,
    part,
    rank_group_of,
    relative,
)
from tests.pool import Pool

EXACT = 1e-12
MODES = (None, "split_gather", "ring")


# Layers, of a model that nobody knows.


class Attention(nn.Module):
    """Grouped heads, fused keys and values, a norm of each head."""

    def __init__(self, width: int, heads: int, kv_heads: int, head: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head = heads, kv_heads, head
        self.q, self.kv = nn.Linear(width, heads * head), nn.Linear(width, 2 * kv_heads * head)
        self.q_norm = nn.LayerNorm(head)
        self.out = nn.Linear(heads * head, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.shape[:-1]
        q = self.q_norm(self.q(hidden_states).view(*rows, -1, self.head)).transpose(1, 2)
        k, v = self.kv(hidden_states).chunk(2, -1)
        k, v = (t.reshape(*rows, -1, self.head).transpose(1, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(*rows, -1))


class Block(nn.Module):
    """Attention, then an MLP with a gate, one column of which may go unused."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 10, 5, 3)
        self.mlp = nn.ModuleDict({n: nn.Linear(width, wide) for n in ("gate", "up", "unused")})
        self.down = nn.Linear(wide, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.attention(self.norm(hidden_states))
        h = self.norm(x)
        self.mlp["unused"](h)
        return x + self.down(F.silu(self.mlp["gate"](h)) * self.mlp["up"](h))


class Model(nn.Module):
    """Ids to logits; the head shares the embedding."""

    def __init__(self, width: int = 7, wide: int = 11, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=6)
        self.blocks = nn.ModuleList(Block(width, wide) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = {
    "attention.q": "column by heads",
    "attention.kv": "k; v by heads",
    "attention.q_norm": "summed",
    "attention.out": "row by heads",
    "mlp.*": "column",
    "down": "row",
    "embed": "vocabulary",
    "head": "head",
}


def _model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(3)
    return Model().to(dtype)


def _ids(length: int = 9) -> Tensor:
    return torch.randint(0, 13, (2, length), generator=torch.Generator().manual_seed(length))


def _train(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad()
    out = model(ids)
    out.square().mean().backward()
    return out.detach()


def _worst(model: nn.Module, whole: nn.Module, ids: Tensor) -> float:
    """The largest error of outputs and gradients of this rank."""
    expected, found = _train(whole, ids), _train(model, ids)
    errors = [float((found - expected).abs().max())]
    wholes = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        grad = wholes[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None and parameter.grad is not None:
            own = part(grad, region_of(parameter))
            errors.append(float((parameter.grad - own).abs().max()))
    return max(errors)


def _cut_unknown(world: World, mode: Any, frozen: str = "") -> list[float]:
    whole, model = _model(), _model()
    for each in (whole, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), mode)
    return [_worst(model, whole, _ids(length)) for length in (9, 12, 5)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_model_cut_by_rules_is_the_model(pool: Pool, size: int, mode: Any) -> None:
    """Uneven heads, features, vocabulary and lengths; a tied head; an unused column."""
    assert max(max(errors) for errors in pool.run(_cut_unknown, size, mode)) <= EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["weight", "embed", "gate.weight"])
def test_frozen_parameters_stay_frozen(pool: Pool, frozen: str, mode: Any) -> None:
    assert max(max(errors) for errors in pool.run(_cut_unknown, 2, mode, frozen)) <= EXACT


def _thawed(world: World) -> float:
    whole, model = _model(), _model()
    model.requires_grad_(False)
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "split_gather")
    model.requires_grad_(True)
    return _worst(model, whole, _ids())


def test_parameters_may_be_thawed_later(pool: Pool) -> None:
    assert max(pool.run(_thawed, 2)) <= EXACT


def _copied(world: World) -> list[Any]:
    whole, model = _model(), _model()
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "ring")
    twin = copy.deepcopy(model)
    same = torch.equal(_train(twin, _ids()), _train(model, _ids()))
    for own, copied in zip(model.parameters(), twin.parameters(), strict=True):
        if own.grad is not None and copied.grad is not None:
            same &= torch.equal(own.grad, copied.grad)
        same &= (own.grad is None) == (copied.grad is None)
    return [same, model.head.weight is model.embed.weight, _worst(model, whole, _ids())]


def test_a_cut_model_can_be_copied_and_tied_parts_are_one(pool: Pool) -> None:
    for same, tied, error in pool.run(_copied, 2):
        assert same
        assert tied
        assert error <= EXACT


def _in_two_stages(world: World) -> list[float]:
    """Two passes forward, then their gradients, of other lengths."""
    whole, model = _model(), _model()
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "split_gather")
    for each in (whole, model):
        each.zero_grad()
        losses = [each(_ids(length)).square().mean() for length in (8, 9)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
    wholes = dict(whole.named_parameters())
    return [
        float((p.grad - part(wholes[n].grad, region_of(p))).abs().max())  # pyright: ignore
        for n, p in model.named_parameters()
        if p.grad is not None
    ]


def test_passes_may_be_in_flight_and_be_run_backward_twice(pool: Pool) -> None:
    assert max(max(errors) for errors in pool.run(_in_two_stages, 3)) <= EXACT


def _kept(world: World, mode: Any) -> tuple[int, int]:
    """Elements that an MLP keeps of its input, over those of the rank's piece and of the whole."""
    torch.manual_seed(0)
    width, wide, length = 40, 8, 16
    line = rank_group_of(world)
    shared = entry.SequenceCut(1, split_evenly(length, world.size), mode == "ring")
    columns = [ColumnLinear(nn.Parameter(torch.randn(wide, width)), None, line) for _ in range(2)]
    x = torch.randn(2, length // world.size, width, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == width and tensor.dim() == 3:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        entered = entry.enter(x, line, shared)
        y = columns[0](entered) + columns[1](entered)
    del entered
    y.sum().backward()
    return sum(kept.values()), x.nbytes


@pytest.mark.parametrize("mode", ["split_gather", "ring"])
def test_what_is_kept_for_the_backward_pass_is_the_piece(pool: Pool, mode: str) -> None:
    for kept, piece in pool.run(_kept, 4, mode):
        assert kept == piece


def _looked_at(world: World) -> float:
    """Something else than columns uses the gathered input too, and a column what comes of it."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    weight = torch.randn(8, 5, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    (F.linear(whole, weight).sin() + F.linear(whole.exp().cumsum(1), weight)).sum().backward()
    assert whole.grad is not None
    line, worst = rank_group_of(world), 0.0
    ((start, stop),) = share(8, 8, world.size, world.rank)
    ((a, b),) = share(9, 9, world.size, world.rank)
    for ring in (False, True):
        for column_first in (False, True):
            piece = x[:, a:b].clone().requires_grad_()
            column = ColumnLinear(nn.Parameter(weight[start:stop].clone()), None, line)
            entered = entry.enter(
                piece, line, entry.SequenceCut(1, split_evenly(9, world.size), ring)
            )
            assert entered.shape == x.shape
            first = column(entered).sin() if column_first else 0
            looked = column(entered.exp().cumsum(1))
            ((first if column_first else column(entered).sin()) + looked).sum().backward()
            assert piece.grad is not None
            worst = max(worst, float((piece.grad - whole.grad[:, a:b]).abs().max()))
    return worst


def test_an_input_under_way_can_be_used_by_any_operation(pool: Pool) -> None:
    assert max(pool.run(_looked_at, 3)) <= EXACT


def _autocast(world: World, mode: Any) -> tuple[float, float]:
    whole, model = _model(torch.float32), _model(torch.float32)
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), mode)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = _train(whole, _ids()), _train(model, _ids())
    assert found.dtype == expected.dtype == torch.bfloat16
    name = "blocks.0.down.weight"
    own, grad = whole.get_parameter(name).grad, model.get_parameter(name).grad
    assert own is not None
    assert grad is not None
    own = part(own, region_of(model.get_parameter(name)))
    return relative(found, expected), relative(grad, own)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_computes_in_16_bits(pool: Pool, mode: Any) -> None:
    """Within a few roundings of bfloat16."""
    for errors in pool.run(_autocast, 2, mode):
        assert max(errors) <= 0.02, errors


def _on_meta(world: World) -> float:
    whole = _model()
    with torch.device("meta"):
        model = Model().double()
    model.head.weight = model.embed.weight
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "split_gather")
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "cpu")
    assert model.head.weight is model.embed.weight
    wholes = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(wholes[name], region_of(parameter)))
    return _worst(model, whole, _ids())


def test_parameters_stay_on_meta_and_are_filled_with_their_region(pool: Pool) -> None:
    assert max(pool.run(_on_meta, 3)) <= EXACT


def _gathered(world: World) -> float:
    torch.manual_seed(1)
    whole = nn.Sequential(
        nn.Embedding(9, 7), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5)
    ).double()
    model = copy.deepcopy(whole)
    rules = {"0": "embedding, gathered", "1": "column, gathered", "3": "row, split"}
    apply_tensor(model, plan_tensor(model, world.size, rules), rank_group_of(world))
    return _worst(model, whole, torch.arange(9).view(3, 3))


def test_gathered_columns_and_split_rows(pool: Pool) -> None:
    for size in (2, 3, 4):
        assert max(pool.run(_gathered, size)) <= EXACT


def _conjugates(world: World) -> float:
    """Every collective's backward is the transpose of its forward."""
    line, lengths = rank_group_of(world), split_evenly(7, world.size)
    (start, stop), worst = share(7, 7, world.size, world.rank)[0], 0.0
    whole = torch.arange(42, dtype=torch.float64).view(2, 7, 3)
    own = whole[:, start:stop].clone().requires_grad_()
    all_of_it = whole.clone().requires_grad_()
    factor = 1.0 + world.rank
    total = sum(1.0 + r for r in range(world.size))
    for found, expected in (
        (gather(own, 1, lengths, line), whole),
        (gather_partial(own, 1, lengths, line), whole),
        (split(all_of_it, 1, lengths, line), whole[:, start:stop]),
        (reduce_split(all_of_it * factor, 1, lengths, line), whole[:, start:stop] * total),
    ):
        worst = max(worst, float((found - expected).abs().max()))
    found = torch.autograd.grad((gather_partial(own, 1, lengths, line) * factor).sum(), own)[0]
    worst = max(worst, float((found - total).abs().max()))
    found = torch.autograd.grad((gather(own, 1, lengths, line) * 2).sum(), own)[0]
    worst = max(worst, float((found - 2).abs().max()))
    ranks = torch.tensor([r for r, n in enumerate(lengths) for _ in range(n)]).view(1, 7, 1)
    expected = (ranks + 1.0).expand_as(whole).double()
    for piece in (split(all_of_it, 1, lengths, line), reduce_split(all_of_it, 1, lengths, line)):
        found = torch.autograd.grad((piece * factor).sum(), all_of_it)[0]
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def test_collectives_and_their_gradients(pool: Pool) -> None:
    assert max(pool.run(_conjugates, 3)) <= EXACT


# The loss.


def _loss(world: World, dtype: torch.dtype, scale: float) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(2, 6, 13, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, 13, (2, 6), generator=generator)
    labels[0, :2] = -100
    weights = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    start, stop = share(13, 13, world.size, world.rank)[0]
    own = logits[..., start:stop].clone().requires_grad_()
    found = cross_entropy(own, labels, rank_group_of(world), (start, stop))
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    (found * weights.to(found.dtype)).sum().backward()
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(2, 6)
    (expected * weights).sum().backward()
    assert own.grad is not None
    assert whole.grad is not None
    errors = (found - expected, own.grad - whole.grad[..., start:stop])
    return [float(e.detach().abs().max()) if e.isfinite().all() else float("inf") for e in errors]


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize(
    ("dtype", "bar"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_cross_entropy_of_columns(pool: Pool, dtype: torch.dtype, bar: float, scale: float) -> None:
    for size in (2, 3):
        assert max(max(e) for e in pool.run(_loss, size, dtype, scale)) <= bar


def _labels_out_of_range(world: World) -> str:
    start, stop = share(5, 5, world.size, world.rank)[0]
    logits = torch.zeros(3, stop - start)
    with pytest.raises(GulliverError) as raised:
        cross_entropy(logits, torch.tensor([2, 5, -100]), rank_group_of(world), (start, stop))
    return str(raised.value)


def test_out_of_range_label_is_named_on_every_rank(pool: Pool) -> None:
    for said in pool.run(_labels_out_of_range, 2):
        assert "label 5 is not in the vocabulary" in said


def _ids_out_of_range(world: World) -> str:
    model = _model()
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world))
    with pytest.raises(IndexError) as raised:
        model.embed(torch.tensor([[13]]))
    return str(raised.value)


def test_an_id_out_of_the_vocabulary_is_named_on_every_rank(pool: Pool) -> None:
    for said in pool.run(_ids_out_of_range, 2):
        assert "token 13 is not in the vocabulary" in said


# Models.


SMALL = [c for c in cells(ranks=(2, 3)) if c.ranks == 2 or c.family in ("t5", "stdit3")]
FOUR = [Cell(f, m, 4) for f, m in (("llama", "ring"), ("bloom", "split_gather"), ("gpt2", None))]


@pytest.mark.parametrize("cell", some(SMALL + FOUR, SMALL[::2] + FOUR), ids=str)
def test_models_are_exact(pool: Pool, cell: Cell) -> None:
    """Output, loss and every gradient, over two lengths, one of them padded."""
    for errors in pool.run(errors_of, cell.ranks, cell.family, cell.mode, torch.float64):
        assert max(errors.values()) <= BARS[torch.float64], errors


def _own_plan(world: World, kind: str, mode: Any) -> float:
    """A causal model that the table does not know, by its own plan."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2, "vocab_size": 67}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
    if kind == "GPTNeoX":
        heads.pop("num_key_value_heads")
        heads |= {"hidden_dropout": 0.0}
    if kind == "Phi3":
        heads |= {"pad_token_id": 0}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
        models.append(getattr(transformers, f"{kind}ForCausalLM")(config).double())
    whole, model = models
    apply_tensor(model, plan_tensor(model, world.size), rank_group_of(world), mode)
    return max(compare(model, whole, "llama", batch("llama", length=11)).values())


@pytest.mark.parametrize("mode", [None, "ring"])
@pytest.mark.parametrize("kind", ["Qwen3", "Olmo2", "Phi3", "GPTNeoX"])
def test_other_models_are_cut_by_their_own_plan(pool: Pool, kind: str, mode: Any) -> None:
    """Norms of heads, gathered columns and split rows, packed columns, fused projections."""
    assert max(pool.run(_own_plan, 3, kind, mode)) <= EXACT


@pytest.mark.parametrize("family", ["llama", "opt", "t5", "vit"])
@pytest.mark.parametrize("mode", ["split_gather", "ring"])
def test_blocks_may_be_computed_again(pool: Pool, family: str, mode: str) -> None:
    for errors in pool.run(errors_of, 2, family, mode, torch.float64, checkpointing=True):
        assert max(errors.values()) <= BARS[torch.float64], errors


def _checkpoints_in_flight(world: World, family: str) -> float:
    """Two passes of other lengths, both recomputed after both ran."""
    whole, model = build(family), build(family)
    apply_tensor(model, plan_tensor(model, world.size), rank_group_of(world), "split_gather")
    model.gradient_checkpointing_enable()
    for each in (whole, model):
        losses = [each(**batch(family, length=n)).logits.square().mean() for n in (8, 9)]
        sum(losses).backward()  # pyright: ignore[reportAttributeAccessIssue]
    wholes = dict(whole.named_parameters())
    return max(
        float((p.grad - part(wholes[n].grad, region_of(p))).abs().max())
        for n, p in model.named_parameters()
    )


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_checkpoints_of_other_lengths_may_be_in_flight(pool: Pool, family: str) -> None:
    assert max(pool.run(_checkpoints_in_flight, 2, family)) <= EXACT


def _generated(world: World, mode: Any) -> list[bool]:
    whole, model = build("llama").eval(), build("llama").eval()
    apply_tensor(model, plan_tensor(model, world.size), rank_group_of(world), mode)
    ids = batch("llama")["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    expected = whole.generate(ids, **asked)
    return [torch.equal(model.generate(ids, **asked), expected)]


@pytest.mark.parametrize("mode", MODES)
def test_generation_is_the_same(pool: Pool, mode: Any) -> None:
    """One token at a time is shorter than there are ranks: it is not cut."""
    assert pool.run(_generated, 2, mode) == [[True]] * 2


# Plans and refusals.


@settings(deadline=None)
@given(
    units=st.integers(1, 12),
    width=st.integers(1, 5),
    blocks=st.integers(1, 3),
    size=st.integers(1, 9),
)
def test_shares_are_even_and_make_the_whole(units: int, width: int, blocks: int, size: int) -> None:
    total = units * width * blocks
    shares = [share(total, units, size, place, blocks) for place in range(size)]
    sizes = [sum(stop - start for start, stop in runs) for runs in shares]
    assert max(sizes) - min(sizes) <= width * blocks
    found = sorted(i for runs in shares for start, stop in runs for i in range(start, stop))
    assert found == list(range(total))
    for runs in shares:
        assert Region((total, 2), 0, runs).numel == 2 * sum(b - a for a, b in runs)


def test_the_longest_pattern_decides() -> None:
    patterns = {"output.dense": 1, "attention.output.dense": 2, "layer.*.output.dense": 3}
    assert best_match("bert.layer.0.attention.output.dense", patterns) == "attention.output.dense"
    assert best_match("bert.layer.0.output.dense", patterns) == "layer.*.output.dense"
    assert best_match("dense", patterns) is None


def test_unknown_modules_are_named() -> None:
    with pytest.raises(GulliverError, match=r"no rule .*blocks\.0\.attention\.q"):
        plan_tensor(_model(), 2)
    with pytest.raises(GulliverError, match=r"no rule .*(down, head|blocks\.0\.down)"):
        plan_tensor(_model(), 2, {k: v for k, v in RULES.items() if k not in ("down", "head")})
    plan = plan_tensor(nn.Sequential(nn.Linear(2, 2)), 2, replicate_rest=True)
    assert plan.replicated == ("0",)


def test_module_between_column_and_row_needs_a_rule() -> None:
    rules = {k: v for k, v in RULES.items() if "norm" not in k}
    with pytest.raises(GulliverError, match=r"q_norm.* between column and row"):
        plan_tensor(_model(), 2, rules)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(GulliverError, match=r"4 heads .*5 tensor ranks.* from 1 to 4"):
        plan_tensor(build("llama"), 5)
    with pytest.raises(GulliverError, match=r"8 heads .* from 1 to 8"):
        plan_tensor(build("gpt2"), 9)


def test_dropout_is_refused_by_name() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9)
    )
    with pytest.raises(GulliverError, match=r"dropout .*transformer\.drop\.p = 0\.1"):
        plan_tensor(model, 2)
    assert plan_tensor(model, 2, allow_dropout=True).size == 2


def test_wrong_rules_are_refused() -> None:
    with pytest.raises(GulliverError, match=r"unknown style 'colum': did you mean 'column'"):
        plan_tensor(_model(), 2, {**RULES, "down": "colum"})
    with pytest.raises(GulliverError, match=r"are tied"):
        plan_tensor(_model(), 2, {**RULES, "embed": "replicate"})


class GatedLayer(nn.Module):
    """An MLP whose gate is the first half of one projection, and a norm of what it returns."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12 * (1 + packed)), nn.Linear(12, 8)
        self.norm, self.packed = nn.LayerNorm(8), packed

    def forward(self, x: Tensor) -> Tensor:
        gate, *up = self.up(x).chunk(1 + self.packed, -1)
        return self.norm(x + self.down(gate.sigmoid() * (up[0] if up else 1)))


class Gated(nn.Module):
    """Blocks that nobody knows, and logits."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedLayer(packed) for _ in range(2))
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


FIT = {"up": "column", "down": "row", "head": "head"}
UNFIT: list[tuple[dict[str, str], str]] = [
    (
        {"norm": "summed"},
        r"blocks.0.norm is 'summed'.* 'replicate'",
    ),
    (
        {"head": "column, packed"},
        r"head \('column, packed', 6 outputs\) .* no row layer consumes them",
    ),
    ({"up": "column, packed"}, r"0.up \('column, packed', 12 .*0.down \('row', 12 .* 'column'"),
    ({"up": "latent", "down": "row, split"}, r"up is 'latent', but is not the first projection"),
    ({"up": "replicate"}, r"down \('row', 12 inputs\) .* no column layer .* 'row, split'"),
    ({"down": "replicate"}, r"up \('column', 12 outputs\) .* no row layer .* 'column, gathered'"),
]
UNFIT_LLAMA = [
    ({"model.norm": "summed"}, r"model.norm is 'summed'"),
    (
        {"gate_proj": "column, packed"},
        r"gate_proj \('column, packed', 52 .* is 'column' in this model's plan",
    ),
    ({"q_proj": "column, packed"}, r"q_proj .* is 'column by heads' in this model's plan"),
    ({"gate_proj": "column, gathered"}, r"gate_proj .* full outputs"),
    ({"down_proj": "row, split"}, r"gate_proj \('column', 52 outputs\) .* no row layer"),
]
UNFIT_HEADS = [
    ({"attention.q": "column"}, r"q \('column', 30 outputs\) would be split within heads"),
    ({"attention.q": "k; v by heads"}, r"attention.q .* 'column by heads'"),
    ({"mlp.gate": "column, packed"}, r"mlp.gate .*0.down"),
    ({"norm": "summed"}, r"blocks.0.norm is 'summed'"),
]


def test_styles_that_do_not_fit_their_neighbours_are_refused_by_name() -> None:
    """Each would train wrong, most without a word: shapes agree where features do not."""
    llama = build_type("causal", "llama")
    cases: list[tuple[nn.Module, dict[str, str], str]] = [
        *((Gated(), {**FIT, **rules}, line) for rules, line in UNFIT),
        *((Model(wide=12), {**RULES, **rules}, line) for rules, line in UNFIT_HEADS),
        *((llama, rules, line) for rules, line in UNFIT_LLAMA),
        (Gated(packed=True), FIT, r"up \('column', 24 outputs\) .* 'column, packed'"),
        (
            build_type("causal", "gpt2"),
            {"c_attn": "column by heads"},
            r"c_attn .* 'q; k; v by heads'",
        ),
        (
            build_type("causal", "phi3"),
            {"gate_up_proj": "column by heads", "mlp.down_proj": "row"},
            r"gate_up_proj .* 'column, packed'",
        ),
    ]
    for model, rules, line in cases:
        with pytest.raises(GulliverError, match=line):
            plan_tensor(model, 2, rules, replicate_rest=True)


def _fitting(world: World) -> list[float]:
    found: list[float] = []
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for packed, rules in (
        (False, FIT),
        (False, {**FIT, "up": "column, gathered", "down": "row, split"}),
        (False, {**FIT, "up": "replicate", "down": "row, split", "head": "column, gathered"}),
        (True, {**FIT, "up": "column, packed"}),
    ):
        torch.manual_seed(2)
        whole = Gated(packed).double()
        model = copy.deepcopy(whole)
        apply_tensor(model, plan_tensor(model, world.size, rules), rank_group_of(world))
        found.append(_worst(model, whole, x))
    for rules in (
        # A person's rules of a known model: as it is, gathered around, more of it whole.
        {"gate_proj": "column", "up_proj": "column", "down_proj": "row", "model.norm": "replicate"},
        {"gate_proj": "column, gathered", "up_proj": "column, gathered", "down_proj": "row, split"},
        {"o_proj": "row", "layers.0.mlp.down_proj": "replicate"},
    ):
        whole, model = build("llama"), build("llama")
        apply_tensor(model, plan_tensor(model, world.size, rules), rank_group_of(world))
        found.append(max(compare(model, whole, "llama", batch("llama")).values()))
    return found


def test_rules_that_fit_train_exactly(pool: Pool) -> None:
    assert max(max(errors) for errors in pool.run(_fitting, 2)) <= EXACT


def test_a_plan_is_for_its_line_and_modes_are_known() -> None:
    plan = plan_tensor(_model(), 2, RULES)
    with pytest.raises(GulliverError, match=r"the plan is for 2 ranks, but .* has 1"):
        apply_tensor(_model(), plan, RankGroup())
    wrong: Any = "split"
    with pytest.raises(GulliverError, match="did you mean 'split_gather'"):
        apply_tensor(_model(), plan, RankGroup((0, 1), 0, None), wrong)


def test_the_stdit_is_not_cut_between_blocks() -> None:
    model = build("stdit3")
    with pytest.raises(GulliverError, match="its own sequence modes"):
        apply_tensor(model, plan_tensor(model, 2), RankGroup((0, 1), 0, None), "ring")


def test_one_rank_changes_nothing() -> None:
    model = _model()
    before = dict(model.named_modules())
    apply_tensor(model, plan_tensor(model, 1, RULES), RankGroup(), "ring")
    assert dict(model.named_modules()) == before


def _too_short(world: World) -> str:
    model = _model()
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "split_gather")
    try:
        model(_ids(2))
    except GulliverError as error:
        return str(error)
    return ""


def test_fewer_tokens_than_ranks_are_refused_in_training(pool: Pool) -> None:
    for message in pool.run(_too_short, 3):
        assert "2 tokens cannot be sharded over 3 tensor ranks" in message


def _unknown_arguments(world: World) -> str:
    model = _model()
    apply_tensor(model, plan_tensor(model, world.size, RULES), rank_group_of(world), "split_gather")
    model.blocks[0].forward = lambda x, other: x  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.blocks[0](torch.zeros(1, 4, 7), torch.zeros(1, requires_grad=True))
    except GulliverError as error:
        return str(error)
    return ""


def test_other_differentiable_arguments_of_blocks_are_refused(pool: Pool) -> None:
    assert "its hidden states" in pool.run(_unknown_arguments, 2)[0]
