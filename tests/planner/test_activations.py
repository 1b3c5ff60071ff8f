"""Activations that a manager holds: bits, bytes and lifetimes; and the choice for each block."""

from __future__ import annotations

import copy
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError
from gulliver.memory import activation_peak, offload_activations
from gulliver.memory.activations import ActivationOffload
from gulliver.memory.buffers import ACTIVATIONS, PARAMETERS
from gulliver.memory.manager import Manager
from gulliver.memory.stores import DiskStore, ManagedTensor
from gulliver.memory.symbolic import block_activations
from gulliver.solve import Choice, choose_activations
from gulliver.solve.activations import BlockActivations, PassCosts, activations_peak, least_room
from tests.operators.test_footprint import Gpt

LEAST = 1 << 10


class Recording(Manager):
    """A manager that notes what is added and used."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.added, self.used = 0, list[int]()

    def add(self, *args: Any, **kwargs: Any) -> ManagedTensor:
        self.added += 1
        return super().add(*args, **kwargs)

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor:
        self.used.append(managed.number)
        return super().use(managed, write, fresh)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Recording]:
    """A manager with little room and a disk behind it."""
    made = Recording(96 << 10, "cpu", DiskStore(tmp_path, 64 << 20))
    yield made
    made.close()


def _held(manager: Manager) -> int:
    return manager.counter.live.get(ACTIVATIONS, 0)


def _gradients(run: Callable[[], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.grad = None
    torch.manual_seed(3)
    loss = run()
    loss.backward()
    return [loss.detach(), *[t.grad for t in tensors if t.grad is not None]]


def _same(run: Callable[[], Tensor], tensors: list[Tensor], manager: Manager) -> ActivationOffload:
    """Compares loss and gradients, bit by bit, with those of plain torch."""
    wanted = _gradients(run, tensors)

    def offloaded() -> Tensor:
        with offload_activations(manager, LEAST):
            return run()

    found = _gradients(offloaded, tensors)
    assert len(wanted) == len(found) > 1
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    with offload_activations(manager, LEAST) as offload:
        pass
    assert _held(manager) == 0
    return offload


def _unique_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of memory from `LEAST` on that autograd saves, parameters left out: by plain torch."""
    seen: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            seen[storage.data_ptr()] = tensor.detach(), storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(nbytes for _, nbytes in seen.values() if nbytes >= LEAST)


def test_a_model_has_the_bits_of_plain_torch_and_moves_each_memory_once(manager: Recording) -> None:
    torch.manual_seed(0)
    model, tokens = Gpt(), torch.randint(64, (2, 24))

    def run() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    wanted = _unique_bytes(run)
    offload = _same(run, list(model.parameters()), manager)
    assert offload.moved == wanted
    stats = manager.stats()
    assert stats["bytes_out"] > 0
    assert stats["bytes_in"] > 0
    manager.end_step()
    # The objects of the next step are those of this one, in the same order.
    count, before = manager.added, list(manager.used)
    assert count == len(set(before)) > 0
    for _ in range(2):
        manager.used.clear()
        _same(run, list(model.parameters()), manager)
        manager.end_step()
        assert manager.used == before
    assert manager.added == count


def _views(x: Tensor) -> Tensor:
    """Saves views, strides and stretched tensors of all kinds."""
    q, k, v = (x * 2).unflatten(1, (3, -1)).unbind(1)
    across = (x * 3).t()
    stretched = (x[:1] * 2).expand_as(x)
    every = (x + 1)[::2, 1:]
    swapped = (x.view(8, 4, 12) * 2).permute(2, 0, 1)
    return (
        (q * k * v).sum()
        + (across @ x).sum()
        + (stretched * x).pow(2).sum()
        + (every * every).sum()
        + (swapped.contiguous() * swapped).sum()
        + torch.complex(x, x + 1).abs().sum()
        + (x * x.detach().view(torch.int32).view(torch.float32)).sum()
    )


def test_views_and_strides_are_restored_as_they_were(manager: Manager) -> None:
    x = torch.randn(8, 48, requires_grad=True)
    offload = _same(lambda: _views(x), [x], manager)
    assert offload.moved > 0
    seen: list[tuple[object, ...]] = []
    made = (torch.randn(8, 96, requires_grad=True) * 2)[:, ::2].t()
    with offload_activations(manager, LEAST):
        kept = (made * made).grad_fn
    for tensor in (made, kept._saved_self, kept._saved_other):  # type: ignore[union-attr]
        seen.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.tolist()))
    assert seen[0] == seen[1] == seen[2]
    assert kept._saved_self.data_ptr() == kept._saved_other.data_ptr()  # type: ignore[union-attr]


def test_dropout_convolutions_and_norms_have_the_bits_of_plain_torch(manager: Manager) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten()
    )
    x = torch.randn(4, 3, 9, 9)
    _same(lambda: model(x).pow(2).mean(), list(model.parameters()), manager)


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_regions_inside_and_outside(manager: Manager, inside: bool) -> None:
    model, tokens = Gpt(again=inside), torch.randint(64, (2, 24))
    if inside:
        _same(lambda: model(tokens).square().mean(), list(model.parameters()), manager)
        return
    block, x = model.blocks[0], torch.randn(2, 24, 32)
    wanted = _gradients(lambda: block(x).square().mean(), list(block.parameters()))

    def blocked(x: Tensor) -> Tensor:
        with offload_activations(manager, LEAST):
            return block(x)

    run = lambda: checkpoint(blocked, x, use_reentrant=False).square().mean()  # noqa: E731
    found = _gradients(run, list(block.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_second_backward_of_a_kept_graph_and_a_backward_of_gradients(manager: Manager) -> None:
    x = torch.randn(32, 32, requires_grad=True)

    def twice() -> Tensor:
        y = (x @ x).tanh()
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        again = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        assert torch.equal(first, again)
        return (again * y).square().sum()

    _same(twice, [x], manager)


def test_missing_backward_and_exception_leak_nothing(manager: Manager) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with offload_activations(manager, LEAST):
        y = (x * 2) * (x + 1)
    assert _held(manager) > 0
    del y
    with pytest.raises(ZeroDivisionError), offload_activations(manager, LEAST):
        _ = (x * 2) * (x + 1), 1 / 0
    gc.collect()
    with offload_activations(manager, LEAST) as offload:
        pass
    assert _held(manager) == 0
    assert manager.store is not None
    assert manager.store.used == 0
    assert not offload._used


def test_several_batches_in_flight_in_any_order(manager: Manager) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.eval()
    batches = [torch.randint(64, (1, 24)) for _ in range(3)]
    wanted = _gradients(lambda: sum(model(b).square().mean() for b in batches), _p(model))  # type: ignore[arg-type, return-value]
    for parameter in model.parameters():
        parameter.grad = None
    losses = []
    for batch in batches:
        with offload_activations(manager, LEAST):
            losses.append(model(batch).square().mean())
    for number in (1, 0, 2):
        losses[number].backward()
    for mine, theirs in zip(_p(model), wanted[1:], strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-5, atol=1e-7)


def _p(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def test_hooks_inside_hooks_and_no_gradients(manager: Manager) -> None:
    x = torch.randn(32, 32, requires_grad=True)

    def nested() -> Tensor:
        y = (x * 2) * (x + 1)
        with save_on_cpu():
            y = y.tanh() * (x + 2)
        return (y * y).sum()

    _same(nested, [x], manager)
    with offload_activations(manager, LEAST) as offload:
        before = offload.moved
        with torch.no_grad():
            nested()
        with torch.inference_mode():
            (torch.ones(64, 64) * 2).tanh()
        assert offload.moved == before


def test_in_place_modification_raises_as_in_torch(manager: Manager) -> None:
    def modified(what: Callable[[Tensor, Tensor], Tensor], hooked: bool) -> str:
        x, weight = torch.randn(32, 32, requires_grad=True), nn.Parameter(torch.randn(32, 32))
        if hooked:
            with offload_activations(manager, LEAST):
                y = (x * 2).sigmoid()
                z = y @ weight
        else:
            y = (x * 2).sigmoid()
            z = y @ weight
        with torch.no_grad():
            what(y, weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            z.sum().backward()
        found = re.search(r"is at version \d+; expected version \d+", str(caught.value))
        assert found is not None
        return found[0]

    for change in (lambda y, w: y.add_(1), lambda y, w: y[0].zero_(), lambda y, w: w.mul_(2)):
        assert modified(change, True) == modified(change, False)
    # What is written into between two saves is copied twice: each has the value of its save.
    x = torch.randn(32, 32, requires_grad=True)
    with offload_activations(manager, LEAST):
        buffer = torch.ones(32, 32)
        y = x * buffer
        buffer += 1
        y = y + x * buffer
        del buffer
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((32, 32), 3.0))


def test_tensors_alive_elsewhere_are_not_offloaded(manager: Manager) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.register_buffer("table", torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.table

    model = Table()
    offload = ActivationOffload(manager, LEAST)
    offload.wrap(model, [""])
    x = torch.randn(32, 32, requires_grad=True)
    out = model(x)
    # The product; x is a leaf, the weight a parameter, the table a buffer.
    assert offload.moved == 0
    assert offload.kept > 0
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, model.table @ model.weight)  # type: ignore[operator]


def test_blocks_of_a_model_are_wrapped_by_path_compiled_or_not(manager: Manager) -> None:
    torch.manual_seed(0)
    model, tokens = Gpt(layers=3).eval(), torch.randint(64, (2, 24))
    twin = copy.deepcopy(model)
    twin.blocks[1].compile(backend="eager")
    wanted = _gradients(lambda: model(tokens).square().mean(), _p(model))
    for other in (model, twin):
        offload = ActivationOffload(manager, LEAST)
        offload.wrap(other, ["blocks.1"])
        found = _gradients(lambda other=other: other(tokens).square().mean(), _p(other))
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert offload.moved > 0
        offload.sweep()
    assert _held(manager) == 0


class _Handed(torch.autograd.Function):
    """Backward hands out as a gradient what forward has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None


def test_live_views_are_not_overwritten(manager: Manager) -> None:
    x, other = (torch.randn(32, 64, requires_grad=True) for _ in range(2))
    wanted = torch.randn(32, 64)
    with offload_activations(manager, LEAST):
        loss = _Handed.apply(x, wanted.clone()).sum()
    loss.backward()
    del loss
    with offload_activations(manager, LEAST):
        loss = other.exp().sum()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    loss.backward()
    assert torch.equal(x.grad, wanted)
    x.grad = None
    with offload_activations(manager, LEAST):
        assert _held(manager) == 0


def test_activations_and_parameters_share_a_budget(manager: Manager) -> None:
    parts = [manager.add(f"p{n}", PARAMETERS, 6 << 10, torch.float32) for n in range(5)]
    x = torch.randn(64, 64, requires_grad=True)
    with offload_activations(manager, LEAST):
        y = x
        for part in parts:
            with manager.using(part, write=True) as weight:
                y = (y + weight[: 64 * 64].view(64, 64)).tanh()
    y.sum().backward()
    assert sum(manager.counter.fullest.values()) <= 96 << 10
    twin = x.detach().requires_grad_()
    y = twin
    for _ in parts:
        y = y.tanh()
    y.sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad)


def test_tensors_beyond_budget_are_kept(tmp_path: Path) -> None:
    manager = Manager(8 << 10, "cpu", DiskStore(tmp_path, 1 << 20))
    x = torch.randn(64, 64, requires_grad=True)
    offload = _same(lambda: (x * 2).tanh().square().sum(), [x], manager)
    assert offload.moved == 0
    assert offload.kept > 0
    manager.close()


COUNTS = st.integers(0, 9)
BLOCKS = st.lists(
    st.builds(
        lambda saved, output, working, share, seconds: BlockActivations(
            saved, output, working, saved * share // 4, float(seconds)
        ),
        COUNTS,
        st.integers(0, 3),
        COUNTS,
        st.integers(0, 4),
        COUNTS,
    ),
    min_size=1,
    max_size=6,
)
SECONDS, RATES = st.integers(0, 30).map(float), st.sampled_from([0.5, 1, 2])
COSTS = st.builds(PassCosts, SECONDS, SECONDS, SECONDS, SECONDS, RATES, RATES)
CHOICES: tuple[Choice, ...] = ("keep", "recompute", "offload")


def _by_hand(blocks: list[BlockActivations], choices: tuple[Choice, ...]) -> int:
    """Most bytes at once, from the formula of the module."""
    most = 0
    for i, block in enumerate(blocks):
        below = 0
        for b, choice in zip(blocks[:i], choices, strict=False):
            left = {"keep": b.saved, "recompute": 0, "offload": b.saved - b.movable}[choice]
            below += b.output + left
        coming = blocks[i - 1].movable if i and choices[i - 1] == "offload" else 0
        most = max(most, below + coming + block.saved + block.working)
    return most


@given(BLOCKS, COSTS, st.integers(0, 60))
def test_the_choice_is_the_best_of_all(
    blocks: list[BlockActivations], costs: PassCosts, room: int
) -> None:
    best = None
    for choices in itertools.product(CHOICES, repeat=len(blocks)):
        if _by_hand(blocks, choices) > room:
            continue
        taken = list(zip(blocks, choices, strict=True))
        again = sum(b.recompute_s for b, c in taken if c == "recompute")
        moved = sum(b.movable for b, c in taken if c == "offload")
        out = max(costs.forward, costs.writes + moved * costs.write_s)
        back = max(costs.backward + again, costs.reads + moved * costs.read_s)
        best = out + back if best is None else min(best, out + back)
    if best is None:
        assert room < least_room(blocks)
        with pytest.raises(GulliverError, match=rf"\b{least_room(blocks)}\b"):
            choose_activations(blocks, room, costs)
        return
    assert room >= least_room(blocks)
    found = choose_activations(blocks, room, costs)
    assert found.exact
    assert found.seconds == pytest.approx(best)
    assert found.peak == _by_hand(blocks, found.choices) <= room
    assert found.peak == activations_peak(blocks, found.choices)


def test_blocks_are_taken_from_a_predicted_step_and_add_up_to_its_peak() -> None:
    model = Gpt(layers=4)
    found = activation_peak(model, (torch.randint(64, (4, 32)),))
    blocks = block_activations(found, [f"blocks.{n}" for n in range(4)], recompute_s=2.0)
    assert len(blocks) == 5
    assert activations_peak(blocks, ["keep"] * 5) == found.bytes
    assert [block.recompute_s for block in blocks[:4]] == [0.5] * 4
    again = activation_peak(Gpt(layers=4, again=True), (torch.randint(64, (4, 32)),))
    assert again.bytes is not None
    wanted = activations_peak(blocks, ["recompute"] * 4 + ["keep"])
    assert wanted == pytest.approx(again.bytes, rel=0.1)


def test_offloaded_bytes_are_predicted_exactly(manager: Recording) -> None:
    model, tokens = Gpt(width=64, layers=3).eval(), torch.randint(64, (8, 64))
    found = activation_peak(model, (tokens,), offloaded=("blocks.0", "blocks.2", ""))
    kept = activation_peak(model, (tokens,))
    assert found.bytes is not None
    assert kept.bytes is not None
    assert found.bytes < kept.bytes / 2
    manager.set_budget(32 << 20)
    takers = {path: ActivationOffload(manager) for path in found.taken}
    for path, taker in takers.items():
        taker.wrap(model, [path])
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert {path: taker.moved for path, taker in takers.items()} == {
        path: sum(taken) for path, taken in found.taken.items()
    }
    assert found.taken["blocks.0"] == found.taken["blocks.2"]


@pytest.mark.gpu
def test_activations_of_a_device_have_the_bits_of_plain_torch() -> None:
    manager = Manager(1 << 20, "cuda", None)
    model, tokens = Gpt().cuda().eval(), torch.randint(64, (2, 24), device="cuda")
    with torch.device("cuda"):
        _same(lambda: model(tokens).square().mean(), _p(model), manager)
