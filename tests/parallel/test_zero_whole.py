"""Optimizers that look at whole parameters, as Muon and Adafactor do: no parameter is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gulliver.booster import (
    Booster,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
)
from gulliver.comm import World, gather_objects
from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.memory.buffers import plan_chunks
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.elementwise import check_optimizer, optimizer_table
from tests.covering import some
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool
from tests.tiers import boosted, differing, manager_of, model_of, plain, result, steps

CHUNK_MB = 0.0003
SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=40)


@settings(deadline=None)
@given(SIZES, st.integers(1, 600), st.integers(1, 5), st.sampled_from([1, 16]))
def test_no_tensor_is_cut_and_the_order_of_use_is_kept(
    sizes: list[int], capacity: int, parts: int, align: int
) -> None:
    tensors = [(f"t{n}", size) for n, size in enumerate(sizes)]
    layouts = plan_chunks(tensors, capacity, parts, align, whole=True)
    slots = [slot for layout in layouts for slot in layout.slots]
    assert [(slot.name, slot.numel) for slot in slots] == tensors
    for layout in layouts:
        pieces = [piece for part in range(parts) for piece in layout.pieces(part)]
        held = {piece.name: piece.numel for piece in pieces}
        assert held == {slot.name: slot.numel for slot in layout.slots if slot.numel}
        assert len(pieces) == len(held)
        assert all(piece.start % align == 0 for piece in pieces)
        runs = [0] * layout.size
        for slot in layout.slots:
            for element in range(slot.start, slot.end):
                runs[element] += 1
        assert max(runs) <= 1
        assert sum(layout.cuts()) == layout.size
        assert all(not any(runs[start:end]) for start, end in layout.gaps())
    # Whoever has the plan of the chunks gets the same chunks.
    assert plan_chunks(tensors, capacity, parts, align, whole=True) == layouts


def test_chunks_of_whole_tensors_are_padded_little_where_the_model_allows_it() -> None:
    width = 64 * 64
    block = [*[("square", width)] * 4, *[("wide", 4 * width)] * 2]
    tensors = [(f"{n}.{name}", size) for n in range(12) for name, size in block]
    for parts in (2, 4, 8):
        layouts = plan_chunks(tensors, width, parts, whole=True)
        padding = sum(one.padding for one in layouts) / sum(one.size for one in layouts)
        assert padding < 0.15
        assert len(layouts) >= 24 // parts


class Net(nn.Module):
    """A tied weight, a parameter of three dims, and two branches of which one may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.stem.weight
        self.a, self.b = nn.Linear(6, 10), nn.Linear(6, 3)
        self.mix = nn.Parameter(torch.randn(2, 3, 6))
        self.double()

    def forward(self, x: Tensor, branch: str = "a") -> Tensor:
        h = torch.tanh(self.out(torch.tanh(self.stem(x))))
        found = getattr(self, branch)(h).square().sum()
        return found + torch.einsum("abc,nc->abn", self.mix, h).square().sum()


class Trust(torch.optim.Optimizer):
    """Scales each update by norms of its parameter, and keeps what is no tensor of its shape."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(sums=p.new_zeros(len(p)), calls=0, basis=None)
                state["sums"] = state["sums"] + p.grad.reshape(len(p), -1).square().sum(1)
                state["calls"] += 1
                trust = p.norm() / (p.grad.norm() + 1e-6) / state["calls"]
                rows = (1 + state["sums"]).sqrt().view(-1, *[1] * (p.ndim - 1))
                p.sub_(group["lr"] * trust * p.grad / rows)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": []}, {"params": [], "lr": 0.02, "foreach": True}]
    for number, p in enumerate(model.parameters()):
        groups[number % 2]["params"].append(p)
    return [torch.optim.Adafactor(groups, lr=0.1)]


def hugging_face_of(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    options = {"lr": 0.05, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1}
    return Adafactor(parameters, **options)


def hugging_face(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [hugging_face_of(model.parameters())]


MAKE: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "Muon and AdamW": muon,
    "Adafactor": adafactor,
    "Adafactor of transformers": hugging_face,
    "a stranger": lambda model: [Trust(model.parameters())],
}
STEPS = 6


def data(step: int, rank: int, micro: int) -> Tensor:
    seed = 97 * step + 10 * rank + micro
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()


def branch(step: int, rank: int) -> str:
    """On the second step ranks differ in what they use; until then nobody uses one branch."""
    return "b" if (step == 1 and rank == 0) or step == 4 else "a"


def micro_batches(step: int) -> int:
    return 2 if step in (2, 3) else 1


def reference(make: Callable[[nn.Module], list[torch.optim.Optimizer]], size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    optimizers, parameters = make(model), list(model.parameters())
    for step in range(STEPS):
        total: list[Any] = [None] * len(parameters)
        for rank in range(size):
            for micro in range(micro_batches(step)):
                loss = model(data(step, rank, micro), branch(step, rank))
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                pairs = zip(total, found, strict=True)
                total = [a if b is None else b if a is None else a + b for a, b in pairs]
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = None if gradient is None else gradient / size
        for optimizer in optimizers:
            if step == 3:
                members = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(members, 0.5)
            optimizer.step()
    return model


def check_whole(optimizer: ZeroOptimizer) -> None:
    """Every parameter lies with one rank, in its own shape."""
    if optimizer.shards.parts == 1 or not optimizer.shards.whole:
        return
    mine = []
    for sharded in optimizer.chunks:
        for piece, owned in sharded.pieces:
            assert owned.shape == sharded.chunk.shapes[piece.name]
            mine.append(piece.name)
    every = gather_objects(mine)
    assert sorted(name for found in every for name in found) == sorted(optimizer.names.values())
    assert sum(map(bool, every)) > 1


def trained(world: World, make: Callable[..., Any], stage: int) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    plugin = LowLevelZeroPlugin(
        stage, chunk_mb=CHUNK_MB, assume_per_parameter=True, verbose=False, broadcast_buffers=False
    )
    booster, optimizers = Booster(plugin), list[Any]()
    for inner in make(model):
        _, optimizer, *_ = booster.boost(model, inner)
        optimizers.append(optimizer)
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            if step in (2, 4):
                names = list(optimizer.names.values())
                relayout(optimizer.shards, names[:: 3 - step], 10**6 if step == 4 else 500 + number)
            check_whole(optimizer)
        last = micro_batches(step) - 1
        for micro in range(last + 1):
            with ExitStack() as stack:
                for optimizer in optimizers if micro < last else ():
                    stack.enter_context(optimizer.no_sync())
                loss = model(data(step, world.rank, micro), branch(step, world.rank))
                booster.backward(loss, optimizers[0])
        for optimizer in optimizers:
            if step == 3:
                optimizer.clip_grad_by_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _against_one_process(world: World, stages: Sequence[int]) -> list[str]:
    wrong = []
    for name, make in MAKE.items():
        twin = reference(make, world.size)
        for stage in stages:
            if stage == 3 and name == "Muon and AdamW":
                continue  # two optimizers of one model: below stage 3
            model = trained(world, make, stage)
            for (path, found), wanted in zip(
                model.named_parameters(), twin.parameters(), strict=True
            ):
                error = float((found.detach() - wanted.detach()).abs().max())
                if not error <= 1e-12:
                    wrong.append(f"{name}, stage {stage}: {path} is off by {error}")
    return wrong


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_whole_parameters_are_stepped_as_in_one_process(pool: Pool, ranks: int) -> None:
    stages = (0, 1, 2, 3) if ranks == 2 else (1, 2)
    assert pool.run(_against_one_process, ranks, stages) == [[]] * ranks


def _matrices(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 4, bias=False)).to(dtype)


ONE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.05),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def _halves(world: World) -> list[str]:
    wrong = []
    for name, make in ONE.items():
        twin, masters = _matrices(torch.bfloat16), list(_matrices().parameters())
        for master, p in zip(masters, twin.parameters(), strict=True):
            master.data = p.detach().float()
        stepper = make(masters)
        plugin = LowLevelZeroPlugin(2, CHUNK_MB, precision="bf16", verbose=False)
        booster = Booster(plugin)
        model, optimizer, *_ = booster.boost(module := _matrices(), make(module.parameters()))
        for step in range(4):
            x = torch.randn(world.size, 3, 8, generator=torch.Generator().manual_seed(step))
            losses = [twin(x[r].bfloat16()).square().sum() for r in range(world.size)]
            found = [torch.autograd.grad(loss, list(twin.parameters())) for loss in losses]
            for master, *gradients in zip(masters, *found, strict=True):
                master.grad = sum(g.float() for g in gradients) / world.size
            stepper.step()
            for master, p in zip(masters, twin.parameters(), strict=True):
                p.data.copy_(master.detach())
            booster.backward(model(x[world.rank]).square().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if not all(map(torch.equal, model.parameters(), twin.parameters())):
            wrong.append(name)
    return wrong


def test_parameters_of_16_bits_are_stepped_through_whole_masters_to_the_bit(pool: Pool) -> None:
    assert pool.run(_halves, 2) == [[], []]


class Run:
    """A boosted model of one optimizer, whose ranks all see the same batch."""

    def __init__(self, kind: str, plugin: Plugin) -> None:
        model = _matrices(torch.float64)
        self.booster = Booster(plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, ONE[kind](model.parameters()))

    def train(self, begin: int, end: int) -> list[Tensor]:
        for step in range(begin, end):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).double()
            self.booster.backward(self.model(x).square().sum(), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [p.detach().clone() for p in self.model.parameters()]


def zero(stage: int, chunk_mb: float = CHUNK_MB) -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(stage, chunk_mb, verbose=False)


def _save(world: World, plugin: Plugin, folder: Path) -> dict[str, list[Tensor]]:
    found = {}
    for kind in ONE:
        run = Run(kind, plugin)
        run.train(0, 3)
        run.booster.save(folder / kind, 3, run.model, run.optimizer)
        run.booster.save_model(run.model, folder / kind / "model.safetensors")
        run.booster.save_optimizer(run.optimizer, folder / kind / "optimizer")
        found[kind] = run.train(3, 6)
        run.booster.close()
    return found


def _resume(world: World, plugins: dict[str, Plugin], folder: Path, wanted: Any) -> list[str]:
    wrong = []
    for name, plugin in plugins.items():
        for kind in ONE:
            for whole in (True, False):
                run = Run(kind, plugin)
                if whole:
                    run.booster.load(folder / kind, run.model, run.optimizer)
                else:
                    run.booster.load_model(run.model, folder / kind / "model.safetensors")
                    run.booster.load_optimizer(run.optimizer, folder / kind / "optimizer")
                if not all(map(torch.equal, run.train(3, 6), wanted[kind])):
                    wrong.append(f"{kind}, {name}, {'step' if whole else 'optimizer'}")
    return wrong


def test_whole_state_is_resumed_to_the_bit_at_any_ranks_and_stage(
    pool: Pool, tmp_path: Path
) -> None:
    ddp = TorchDDPPlugin(verbose=False)
    wanted = pool.run(_save, 2, zero(2), tmp_path / "sharded")[0]
    alone = pool.run(_save, 1, ddp, tmp_path / "plain")[0]
    assert all(all(map(torch.equal, alone[kind], wanted[kind])) for kind in ONE)
    several = {"stage 1": zero(1, 1.0), "stage 0": zero(0), "stage 3": zero(3)}
    for folder, ranks, plugins in (
        ("sharded", 1, {"DDP": ddp, "stage 1": zero(1)}),
        ("sharded", 4, several),
        ("plain", 2, several),
    ):
        found = pool.run(_resume, ranks, plugins, tmp_path / folder, wanted)
        assert found == [[]] * ranks, (ranks, folder)


def _planned(world: World) -> list[tuple[Any, dict[str, tuple[float, float]]]]:
    found = []
    for name in ("Adafactor", "Adafactor of transformers"):
        for stage in (1, 2):
            model = Net()
            booster = Booster(zero(stage))
            _, optimizer, *_ = booster.boost(model, *MAKE[name](model))
            plan = booster.plan
            for _ in range(2):
                booster.backward(model(data(0, 0, 0)) + model(data(0, 0, 0), "b"), optimizer)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.gatherer.finish_all()
            rows = [row for row in booster.compare().rows if row.unit == "bytes"]
            found.append((plan, {row.kind: (row.predicted, row.measured) for row in rows}))
    return found


def test_the_plan_of_one_process_has_the_chunks_and_bytes_of_the_run(pool: Pool) -> None:
    first, second = pool.run(_planned, 2)
    cluster = described("cpu-loopback").resized(2)
    for number, ((plan, rows), (other, _)) in enumerate(zip(first, second, strict=True)):
        make = MAKE["Adafactor" if number < 2 else "Adafactor of transformers"]
        model = Net()
        made = zero(1 + number % 2).make_plan(model, make(model)[0], cluster)
        assert made.chunks == plan.chunks == other.chunks
        assert made.memory == plan.memory
        assert len(plan.chunks) > 1
        assert "zero.chunks: Adafactor" in plan.summary()
        for kind in ("parameters", "optimizer_state"):
            predicted, measured = rows[kind]
            assert predicted == measured, (kind, number)


def _staged(world: World, plugin: Plugin | None, folder: Path) -> dict[str, Tensor]:
    """Trains in stages and saves, or takes the last step of that in one process."""
    model = build("llama")
    booster = Booster(plugin or TorchDDPPlugin(verbose=False))
    model, optimizer, *_ = booster.boost(model, ONE["Adafactor"](model.parameters()))
    for step in range(3):
        samples = batch("llama", 4, seed=step)
        if plugin is None and step < 2:
            continue
        if plugin is None:
            booster.load(folder / "run", model, optimizer)
            booster.load_optimizer(optimizer, folder / "optimizer")
            booster.backward(model(**samples).loss, optimizer)
        else:
            booster.execute_pipeline(iter([samples]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            booster.save(folder / "run", step, model, optimizer)
            booster.save_optimizer(optimizer, folder / "optimizer")
    booster.close()
    return {name: p.detach().clone() for p, name in optimizer.names.items()}


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_save_factors_that_one_process_goes_on_with(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    plugin = HybridParallelPlugin(pp_size=2, zero_stage=stage, num_microbatches=2, verbose=False)
    found = pool.run(_staged, 4, plugin, tmp_path)
    (wanted,) = pool.run(_staged, 1, None, tmp_path)
    assert set().union(*found) == wanted.keys()
    for held in found:
        for name, value in held.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)


def _in_tiers(name: str, early: bool) -> list[str]:
    make = ONE.get(name, hugging_face_of)
    model = model_of()
    with manager_of(model, 0.4) as manager:
        optimizer = boosted(model, make, manager, step_in_backward=early)
        steps(model, optimizer)
        assert manager.stats()["bytes_out"] > 0
        return differing(result(model, optimizer), plain(make))


def test_factors_go_through_tiers_of_memory_to_the_bit() -> None:
    assert _in_tiers("Adafactor", early=False) == []
    assert _in_tiers("Adafactor of transformers", early=True) == []


def test_the_table_of_optimizers_says_what_is_refused() -> None:
    weight = [nn.Parameter(torch.ones(2, 2))]
    kinds: list[tuple[Any, dict[str, bool]]] = [
        (torch.optim.AdamW, {}),
        (torch.optim.Muon, {}),
        (Trust, {"assume_elementwise": True}),
        (Trust, {"assume_per_parameter": True}),
        (Trust, {}),
    ]
    for (make, words), (_, cut, *sizes) in zip(kinds, optimizer_table(), strict=True):
        for stage, tp, pp in itertools.product((0, 1, 3), (1, 2), (1, 2)):
            fits = [size == 1 or most == "any" for size, most in zip((tp, pp), sizes, strict=True)]
            accepted = all(fits) and (stage == 0 or cut != "refused")
            with nullcontext() if accepted else pytest.raises(GulliverError):
                check_optimizer(make(weight), stage, tp_size=tp, pp_size=pp, **words)


def test_conflicting_optimizer_assumptions_are_rejected() -> None:
    model = Net()
    both = {"assume_elementwise": True, "assume_per_parameter": True}
    with pytest.raises(GulliverError, match="assume_per_parameter"):
        Booster(LowLevelZeroPlugin(**both, verbose=False)).boost(model, Trust(model.parameters()))
