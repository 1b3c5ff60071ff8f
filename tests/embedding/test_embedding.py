"""Cached tables compute what torch's EmbeddingBag computes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.embedding import CachedEmbeddingBag, LookAhead
from gulliver.errors import GulliverError
from tests.covering import grid
from tests.embedding.embedding_runs import OPTIMIZERS, cached, most_rows, steps, train, whole_run

ROWS = 60


@pytest.mark.parametrize(
    ("name", "mode", "ahead", "dim"),
    grid(list(OPTIMIZERS), ["sum", "mean", "max", "weighted"], [0, 1, 4], [1, 13, 16]),
)
def test_a_cached_run_is_that_of_the_whole_table_at_every_legal_size(
    name: str, mode: str, ahead: int, dim: int, tmp_path: Path
) -> None:
    weighted, mode = mode == "weighted", "sum" if mode == "weighted" else mode
    first = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(1))
    batches = steps(ROWS, dim, 14)
    outputs, table_state, optimizer_state = whole_run(mode, name, batches, first, weighted)
    assert not torch.equal(table_state["weight"], first)
    least = most_rows(batches)
    for slots in {least, least + 1, least + 3, (least + ROWS) // 2, ROWS}:
        disk = tmp_path if slots == least + 1 else None
        table, optimizer = cached(mode, name, first, slots, disk=disk)
        source: Any = LookAhead(batches, table, ahead, lambda s: s.ids) if ahead else iter(batches)
        found = train(table, optimizer, source, weighted)
        assert all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True)), slots
        assert torch.equal(table.state_dict()["weight"], table_state["weight"]), slots
        state = optimizer.state_dict()["state"]
        assert state.keys() == optimizer_state["state"].keys()
        for key, value in (optimizer_state["state"].get(0) or {}).items():
            assert _same(state[0][key], value), (slots, key)
        assert slots == ROWS or table.counts.misses > slots


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_padding_last_offsets_and_gradients_of_weights_are_torch_s() -> None:
    first = torch.randn(30, 8)
    options: dict[str, Any] = {"mode": "sum", "include_last_offset": True, "padding_idx": -3}
    whole = nn.EmbeddingBag(30, 8, sparse=True, _weight=first.clone(), **options)
    table = CachedEmbeddingBag(30, 8, _weight=first, cache=7, **options)
    pair = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (whole, table)]
    table.attach(pair[1][1])
    for seed in range(8):
        torch.manual_seed(seed)
        ids = torch.tensor([3, 1, 3, 2, 9, 3, 3, 1])[torch.randperm(8)] + 0 * seed
        ids[ids != 3] = (ids[ids != 3] + 5 * seed) % 30
        weights, gradient = torch.rand(8), torch.randn(3, 8)
        found = []
        for module, optimizer in pair:
            given = weights.clone().requires_grad_()
            output = module(ids, torch.tensor([0, 2, 2, 8]), given)
            output.backward(gradient)
            optimizer.step()
            optimizer.zero_grad()
            found.append((output.detach(), given.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(table.state_dict()["weight"], whole.weight)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_padding_is_left_out_of_means_and_maxima(mode: str) -> None:
    first = torch.randn(20, 4)
    whole = nn.EmbeddingBag(20, 4, mode=mode, _weight=first, padding_idx=0)
    table = CachedEmbeddingBag(20, 4, mode=mode, _weight=first, padding_idx=0, cache=9)  # type: ignore[arg-type]
    ids = torch.tensor([[0, 5, 0], [0, 0, 0], [7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(table(ids), whole(ids))


def test_rows_are_kept_within_a_norm_as_torch_does() -> None:
    first = torch.randn(20, 4) * 3
    whole = nn.EmbeddingBag(20, 4, max_norm=1.0, mode="sum", sparse=True, _weight=first.clone())
    table = CachedEmbeddingBag(20, 4, max_norm=1.0, mode="sum", _weight=first, cache=4)
    for begin in range(0, 16, 3):
        ids = torch.arange(begin, begin + 4)[None]
        with torch.no_grad():
            assert torch.equal(table(ids), whole(ids))
    assert torch.equal(table.state_dict()["weight"], whole.weight)


def test_batches_without_a_row_pass_the_look_ahead() -> None:
    torch.manual_seed(1)
    whole, table = (
        nn.EmbeddingBag(60, 4, mode="sum"),
        CachedEmbeddingBag(60, 4, cache=6, mode="sum"),
    )
    table.load_state_dict(whole.state_dict())
    pair = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, table)]
    table.attach(pair[1])
    rows = [[1, 2], [], [2], [], [7, 1]]
    batches = [(torch.tensor(ids, dtype=torch.long), torch.tensor([0])) for ids in rows]
    for ids, offsets in LookAhead(batches, table, 5, lambda batch: batch[0]):
        for module, optimizer in zip((whole, table), pair, strict=True):
            optimizer.zero_grad()
            module(ids, offsets).square().sum().backward()
            optimizer.step()
    assert torch.equal(table.state_dict()["weight"], whole.weight)


def test_several_tables_in_one_are_one_table_of_their_rows() -> None:
    sizes = {"user": 40, "item": 7, "place": 25}
    first = torch.randn(72, 8)
    whole = nn.EmbeddingBag(72, 8, mode="sum", sparse=True, _weight=first.clone())
    table = CachedEmbeddingBag(sizes, 8, mode="sum", _weight=first, cache=24)
    pair = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (whole, table)]
    table.attach(pair[1])
    firsts, limits = torch.tensor([0, 40, 47]), torch.tensor([40, 7, 25])
    batches = [(torch.rand(8, 3) * limits).long() for _ in range(12)]
    for ids in LookAhead(batches, table, 3, lambda ids: ids):
        gradient, found = torch.randn(8, 3, 8), []
        for module, optimizer in zip((whole, table), pair, strict=True):
            given = ids if module is table else (ids + firsts).view(-1, 1)
            optimizer.zero_grad()
            output = module(given).view(8, 3, 8)
            output.backward(gradient)
            optimizer.step()
            found.append(output)
        assert torch.equal(*found)
    assert torch.equal(table.state_dict()["weight"], whole.weight)


def test_tables_by_name_have_bags_of_their_own() -> None:
    first = torch.randn(30, 4)
    table = CachedEmbeddingBag({"a": 10, "b": 20}, 4, mode="mean", _weight=first, cache=12)
    given = {"a": torch.tensor([1, 2, 9]), "b": torch.tensor([0, 19, 19, 5])}
    offsets = {"a": torch.tensor([0, 2]), "b": torch.tensor([0, 0])}
    table.announce(given)
    with torch.no_grad():
        found = table(given, offsets)
        for place, (name, begin, stop) in enumerate((("a", 0, 10), ("b", 10, 30))):
            alone = nn.EmbeddingBag(stop - begin, 4, mode="mean", _weight=first[begin:stop])
            assert torch.equal(found[:, place], alone(given[name], offsets[name]))


def test_gradients_accumulate_over_batches_and_other_forwards_come_between() -> None:
    first = torch.randn(ROWS, 8)
    batches, checks = steps(ROWS, 8, 12), steps(ROWS, 8, 12, seed=5)
    whole = nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True, _weight=first.clone())
    reference = torch.optim.Adagrad(whole.parameters(), lr=0.1)
    table, optimizer = cached("sum", "adagrad", first, 40)
    optimizer.param_groups[0].update(lr=0.1, lr_decay=0)
    for state in (reference.state[whole.weight], optimizer.state[table.weight]):
        state["sum"].fill_(0.1)
    seen = LookAhead(batches, table, 2, lambda s: s.ids)
    for number, (step, check) in enumerate(zip(seen, checks, strict=True)):
        for module, stepper in ((whole, reference), (table, optimizer)):
            module(step.ids, step.offsets).backward(step.gradient)
            if number % 3 == 2:
                stepper.step()
                stepper.zero_grad()
        with torch.no_grad():
            assert torch.equal(table(check.ids, check.offsets), whole(check.ids, check.offsets))
    assert torch.equal(table.state_dict()["weight"], whole.weight)
    assert table.counts.misses > 40


def test_batches_that_are_left_out_do_not_matter() -> None:
    first = torch.randn(ROWS, 8)
    batches = steps(ROWS, 8, 15)
    kept = [step for number, step in enumerate(batches) if number % 4 != 1]
    outputs, state, _ = whole_run("sum", "adagrad", kept, first, False)
    table, optimizer = cached("sum", "adagrad", first, most_rows(batches) + 2)
    seen = LookAhead(batches, table, 3, lambda s: s.ids)
    shown = (step for number, step in enumerate(seen) if number % 4 != 1)
    found = train(table, optimizer, shown, False)
    assert all(torch.equal(a, b) for a, b in zip(found, outputs, strict=True))
    assert torch.equal(table.state_dict()["weight"], state["weight"])


def test_first_values_are_those_that_torch_draws() -> None:
    torch.manual_seed(4)
    whole = nn.EmbeddingBag(50, 6, padding_idx=2)
    torch.manual_seed(4)
    table = CachedEmbeddingBag(50, 6, padding_idx=2)
    assert torch.equal(table.state_dict()["weight"], whole.weight)


def test_a_frozen_table_is_not_written_back() -> None:
    first = torch.randn(40, 4)
    table = CachedEmbeddingBag.from_pretrained(first, cache=5, mode="sum")
    for begin in range(0, 35, 5):
        found = table(torch.arange(begin, begin + 5)[:, None])
        assert torch.equal(found, first[begin : begin + 5])
    assert table._store.moved.written == 0
    assert table._store.moved.clean == 30


def test_a_forward_without_gradients_goes_in_parts_where_that_was_chosen() -> None:
    first, ids = torch.randn(50, 4), torch.randint(0, 50, (40, 3))
    whole = nn.EmbeddingBag(50, 4, mode="sum", _weight=first)
    table = CachedEmbeddingBag(50, 4, mode="sum", _weight=first, cache=6, split=True)
    with torch.no_grad():
        assert torch.equal(table(ids), whole(ids))
        with pytest.raises(
            GulliverError, match="distinct rows does not fit into a cache of 6 slots"
        ):
            table(torch.arange(7)[None])


BAD: dict[str, tuple[Any, str]] = {
    "too large": (
        lambda t: t({"a": torch.tensor([1, 10]), "b": torch.tensor([0])}),
        "'a' has rows 0 to 9; id 10 at position 1",
    ),
    "negative": (lambda t: t(torch.tensor([[1, -2]])), "'b' has rows 0 to 19; id -2"),
    "unknown": (
        lambda t: t({"a": torch.tensor([[1]]), "c": torch.tensor([[1]])}),
        "unknown table 'c'",
    ),
    "missing": (lambda t: t({"a": torch.tensor([[1]])}), "'b' has no ids"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_ids_are_named_by_table(case: str) -> None:
    call, message = BAD[case]
    table = CachedEmbeddingBag({"a": 10, "b": 20}, 4, mode="sum", cache=5)
    with torch.no_grad(), pytest.raises(GulliverError, match=message) as caught:
        call(table)
    assert "\n" not in str(caught.value)


def _step(table: CachedEmbeddingBag, optimizer: Any, ids: Tensor) -> None:
    table(ids).sum().backward()
    optimizer.step()


def test_a_batch_larger_than_the_cache_names_the_smallest_and_changes_nothing() -> None:
    first = torch.randn(20, 4)
    table, _ = cached("sum", "sgd", first, 5)
    with pytest.raises(GulliverError, match="use at least 6"):
        table(torch.arange(6)[None])
    table(torch.arange(5)[None])
    with pytest.raises(GulliverError, match=r"\b5 rows that wait .*\b7$"):
        table(torch.arange(9, 11)[None])
    table.release()
    table(torch.arange(9, 11)[None])
    assert torch.equal(table.state_dict()["weight"], first)


def test_inexact_options_are_rejected() -> None:
    table = CachedEmbeddingBag(20, 4, mode="sum", cache=5)
    with pytest.raises(GulliverError, match="attach"):
        table(torch.tensor([[1]]))
    for optimizer, message in (
        (torch.optim.AdamW(table.parameters()), "AdamW is not known to be row-wise"),
        (torch.optim.SGD(table.parameters(), lr=1, momentum=0.9), r"SGD\(momentum=0.9\)"),
        (torch.optim.Adagrad(table.parameters(), weight_decay=1), r"weight_decay=1\)"),
        (
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1),
            "does not contain the table's weight",
        ),
    ):
        with pytest.raises(GulliverError, match=message):
            table.attach(optimizer)
    optimizer = torch.optim.SGD(table.parameters(), lr=1)
    table.attach(optimizer)
    _step(table, optimizer, torch.tensor([[1, 2]]))
    with pytest.raises(GulliverError, match="zero_grad"):
        _step(table, optimizer, torch.tensor([[3, 4]]))
    optimizer.zero_grad()
    table.weight.grad = torch.zeros_like(table.weight)
    with pytest.raises(GulliverError, match="dense"):
        optimizer.step()
    with pytest.raises(GulliverError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(GulliverError, match="cannot change its device"):
        table.double()


def test_inputs_that_would_be_misread_are_rejected() -> None:
    table = CachedEmbeddingBag(20, 4, mode="max", cache=5)
    with pytest.raises(GulliverError, match="float"):
        table(torch.tensor([[1.0, 2.7]]))
    with pytest.raises(GulliverError, match="per_sample_weights"):
        table(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
    with pytest.raises(GulliverError, match="mode"):
        CachedEmbeddingBag(20, 4, mode="summ")  # type: ignore[arg-type]
