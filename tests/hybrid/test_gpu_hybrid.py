"""Pieces of hybrid parallelism that one GPU can show; skips by itself without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World, all_gather, all_reduce
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.comm.world import adopt_world
from gulliver.parallel.pipeline.batches import compare_batches
from gulliver.parallel.sequence import Mask, SequencePlan, attention, make_groups
from gulliver.parallel.sequence.kernels import KERNELS, KernelRequirements, requirements_of, select
from gulliver.parallel.tensor import cross_entropy
from tests.hybrid.hybrid_models import batch, build
from tests.parallel.test_sequence_virtual import (
    HALVES,
    NAMES,
    ROUNDING,
    Case,
    expected,
    mean_errors,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[World]:
    """A world of one rank that has a process group of NCCL all the same."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    world = World(0, 1, 0, torch.device("cuda", 0))
    adopt_world(world)
    yield world
    adopt_world(None)
    dist.destroy_process_group()


def test_fastest_supported_kernel_is_selected() -> None:
    arch = torch.cuda.get_device_capability()
    if arch < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")

    def name(dtype: torch.dtype, **more) -> str:
        return select(KernelRequirements("cuda", dtype, 64, 64, arch=arch, **more)).name

    assert name(torch.bfloat16) == name(torch.float16, kind="causal") == "cuda flash"
    assert name(torch.bfloat16, kind="masked") == name(torch.float32) == "cuda efficient"
    assert name(torch.float64) == "reference"
    assert name(torch.bfloat16, deterministic=True) == "cuda flash"
    assert name(torch.float32, deterministic=True) == "reference"
    assert select(KernelRequirements("cuda", torch.bfloat16, 60, 60, arch=arch)).name == "reference"


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("kernel", [None, "cuda flash", "cuda efficient"])
def test_attention_of_one_rank_is_attention(dtype: torch.dtype, kernel: str | None) -> None:
    case = HALVES["causal of 4"]
    q, k, v, grad = case.tensors(dtype, "cuda")
    if kernel is not None:
        reason = KERNELS[kernel].lacks(requirements_of(q, v, "causal"))
        if reason:
            pytest.skip(reason)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    alone = make_groups(SequencePlan())
    out = attention(inputs[0], inputs[1], inputs[2], alone, mask=case.mask, kernel=kernel)
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    assert all(t.dtype == dtype and t.is_cuda for t in found)
    errors = mean_errors(found, expected(case, [q, k, v, grad]))
    assert max(errors[name] for name in NAMES) <= 4 * ROUNDING[dtype], errors


def test_autocast_reaches_the_kernel() -> None:
    case = Case(1, 256, Mask())
    q, k, v, _ = case.tensors(torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, k, v, make_groups(SequencePlan()), kernel="cuda efficient")
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["stdit3", "bert"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_hybrid_run_of_one_gpu_is_that_of_the_host(
    nccl: World, family: str, zero_stage: int
) -> None:
    if family != "stdit3":
        pytest.importorskip("transformers")
    model = build(family)
    twin = copy.deepcopy(model)
    given = batch(family)
    plain = torch.optim.AdamW(twin.parameters(), 1e-3, eps=1e-6)
    model = model.cuda()
    inner = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6)
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=zero_stage, verbose=False))
    model, optimizer, *_ = booster.boost(model, inner)
    moved = {name: value.cuda() for name, value in given.items()}
    for _ in range(3):
        loss, other = _loss(model(**moved)), _loss(twin(**given))
        assert loss.item() == pytest.approx(other.item(), rel=1e-9)
        booster.backward(loss, optimizer)
        other.backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_keep_float32_copies_on_a_gpu(nccl: World, precision: str) -> None:
    model = build("stdit3", torch.float32).cuda()
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    plugin = HybridParallelPlugin(zero_stage=1, precision=precision, verbose=False)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, inner)
    given = {name: value.cuda() for name, value in batch("stdit3", dtype=torch.float32).items()}
    losses = []
    for _ in range(8):
        loss = _loss(model(**given).float())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {p.dtype for p in model.parameters()} == {half}
    assert losses[-1] < losses[0]


def _loss(out) -> torch.Tensor:
    return out.loss if hasattr(out, "loss") else out.square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_all_columns_is_torchs(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, 67, generator=draw).to("cuda", dtype).requires_grad_()
    labels = torch.randint(0, 67, (4, 9), generator=draw).cuda()
    labels[0, 0] = -100
    losses = cross_entropy(logits, labels, ALONE, (0, 67))
    twin = logits.detach().double().requires_grad_()
    other = F.cross_entropy(twin.flatten(0, 1), labels.flatten(), reduction="none")
    bar = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(losses.double().flatten(), other, rtol=bar, atol=bar)
    found = torch.autograd.grad(losses.sum(), logits)[0]
    torch.testing.assert_close(
        found.double(), torch.autograd.grad(other.sum(), twin)[0], rtol=bar, atol=bar
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *ROUNDING], ids=str)
def test_collectives_of_one_rank_are_identity(nccl: World, dtype: torch.dtype) -> None:
    values = torch.arange(12, device="cuda").to(dtype)
    summed, gathered = values.clone(), torch.zeros_like(values)
    all_reduce(summed, "mean")
    all_gather(gathered, values)
    assert torch.equal(summed, values)
    assert torch.equal(gathered, values)


def test_batches_on_a_gpu_are_compared(nccl: World) -> None:
    rank_group = RankGroup((0,), 0, dist.group.WORLD)
    given = {"x": torch.ones(3, device="cuda", dtype=torch.bfloat16)}
    assert compare_batches(given, "training", [rank_group], nccl.device, check=True)
