"""One test per name of `gulliver._compat` and `_compat_attention`."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from gulliver import _compat, _compat_attention
from gulliver.comm import World
from tests.pool import Pool
from tests.worlds import run_threads


def _flat(world: World) -> tuple[list[float], list[float], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathered = torch.empty(2 * world.size)
        _compat.all_gather_flat(gathered, torch.full((2,), float(world.rank)))
        part = torch.empty(2)
        _compat.reduce_scatter_flat(part, torch.arange(2.0 * world.size))
    return gathered.tolist(), part.tolist(), sum(w.category is FutureWarning for w in caught)


def test_flat_collectives_work_without_a_warning(pool: Pool) -> None:
    for rank, (gathered, part, warned) in enumerate(pool.run(_flat, 2)):
        assert gathered == [0, 0, 1, 1]
        assert part == [4.0 * rank, 2 + 4.0 * rank]
        assert warned == 0


def _gloo(world: World) -> tuple[bool, bool]:
    cpu = torch.device("cpu")
    part = torch.distributed.new_group([0, 1])
    return _compat.is_gloo(None, cpu), _compat.is_gloo(part, cpu)


def test_gloo_is_known_from_groups_of_threads(pool: Pool) -> None:
    assert pool.run(_gloo, 2) == [(True, True)] * 2
    assert run_threads(_gloo, 2) == [(False, False)] * 2


ATTENTION_OPS = {
    "_scaled_dot_product_flash_attention_for_cpu": 7,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 10,
    "_scaled_dot_product_flash_attention": 7,
    "_scaled_dot_product_flash_attention_backward": 15,
    "_scaled_dot_product_efficient_attention": 8,
    "_scaled_dot_product_efficient_attention_backward": 13,
}


def test_torch_has_the_attention_operators_with_the_arguments_that_are_passed() -> None:
    for name, arguments in ATTENTION_OPS.items():
        op = _compat_attention.attention_op(name)
        assert op is not None
        assert len(op._schema.arguments) == arguments, op._schema  # type: ignore[attr-defined]
    assert _compat_attention.attention_op("_no_such_operator") is None


def _parts_of_attention(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device=device).manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=dtype)  # noqa: E731
    return make(2, 4, 32, 16), make(2, 4, 32, 16), make(2, 4, 32, 16), make(2, 4, 32, 16)


def _by_hand(q, k, v, grad, scale: float, causal: bool) -> list[torch.Tensor]:
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    logits = q @ k.mT * scale
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    out = logits.softmax(-1) @ v
    return [out.detach(), logits.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("causal", [False, True])
def test_the_cpu_kernel_gives_output_log_sum_exp_and_gradients(causal: bool) -> None:
    q, k, v, grad = _parts_of_attention("cpu", torch.float64)
    out, lse = _compat_attention.cpu_flash_forward(q, k, v, 0.3, causal, None)
    grads = _compat_attention.cpu_flash_backward(grad, q, k, v, out, lse, 0.3, causal, None)
    for found, expected in zip(
        (out, lse, *grads), _by_hand(q, k, v, grad, 0.3, causal), strict=True
    ):
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_the_gpu_kernels_give_output_log_sum_exp_and_gradients(name: str, causal: bool) -> None:
    q, k, v, grad = _parts_of_attention("cuda", torch.bfloat16)
    rest = (0.3, causal, None) if name == "efficient" else (0.3, causal)
    out, lse = getattr(_compat_attention, f"cuda_{name}_forward")(q, k, v, *rest)
    grads = getattr(_compat_attention, f"cuda_{name}_backward")(grad, q, k, v, out, lse, *rest)
    for found, expected in zip(
        (out, lse, *grads), _by_hand(q, k, v, grad, 0.3, causal), strict=True
    ):
        assert (found.double() - expected).abs().max() < 0.03 * expected.abs().max()


def _torch_ring(world: World, rotate: str) -> float:
    """The largest error of this rank's parts."""
    whole = [t.float() for t in _parts_of_attention("cpu", torch.float64)]
    q, k, v, grad = (t.chunk(world.size, 2)[world.rank].contiguous() for t in whole)

    def op(query, key, value, **_):
        return _compat_attention.cpu_flash_forward(query, key, value, 0.3, False, None)

    def op_backward(grad_out, query, key, value, out, logsumexp, **_):
        given = grad_out, query, key, value, out, logsumexp
        return _compat_attention.cpu_flash_backward(*given, 0.3, False, None)

    forward, backward = _compat_attention.context_parallel_ring(rotate)
    group = torch.distributed.group.WORLD
    out, lse = forward(group, 2, op, q, k, v)[:2]
    named = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, "is_causal": False}
    grads = backward(group, 2, op_backward, grad_out=grad, grad_out_name="grad_out", **named)
    expected = _by_hand(*whole, 0.3, False)
    parts = (t.chunk(world.size, 2)[world.rank] for t in (expected[0], *expected[2:]))
    return max(float((a - b).abs().max()) for a, b in zip((out, *grads[:3]), parts, strict=True))


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_the_ring_of_torch_is_attention(pool: Pool, rotate: str) -> None:
    assert max(pool.run(_torch_ring, 2, rotate)) < 1e-5


def test_hooks_are_listed_shared_and_ordered() -> None:
    old, new, ran = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []
    handle = old.register_forward_hook(lambda *_: ran.append("first"))
    old.register_forward_hook(lambda *_, **__: ran.append("second"), with_kwargs=True)
    old.register_forward_pre_hook(lambda *_: ran.append("before"))
    old.register_full_backward_hook(lambda *_: None)
    old.weight.register_hook(lambda gradient: gradient)
    old.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(_compat.hooks_of(old)) == 4
    assert len(_compat.hooks_of(old, forward=False)) == 1
    assert len(_compat.hooks_of(old.weight)) == 2
    assert not _compat.hooks_of(new)
    assert not _compat.hooks_of(new.weight)
    _compat.share_forward_hooks(old, new)
    _compat.order_outputs_hooks(new, list(_compat.outputs_hooks(new))[:1])
    new(torch.ones(2))
    handle.remove()
    new(torch.ones(2))
    assert ran == ["before", "second", "first", "before", "second"]


def test_batch_norms_are_known() -> None:
    assert _compat.is_batch_norm(torch.nn.SyncBatchNorm(2))
    assert not _compat.is_batch_norm(torch.nn.LayerNorm(2))


def test_nodes_are_numbered_as_they_are_made_and_hooks_are_told() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    number = _compat.newest_node()
    assert y.grad_fn is not None
    assert number == y.grad_fn._sequence_nr()
    seen = list[int]()
    y.register_hook(lambda _: seen.append(_compat.running_node()))
    assert _compat.running_node() == -1
    y.sum().backward()
    assert seen[0] >= -1
    assert _compat.saving_hooks() is None
    pack, unpack = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert _compat.saving_hooks() == (pack, unpack)


def test_fake_tensors_have_no_data() -> None:
    real = torch.arange(3)
    with _compat.fake_mode():
        fake = torch.empty(3)
        with pytest.raises(RuntimeError) as raised:
            fake.sum().item()
        with _compat.without_modes():
            assert real.sum().item() == 3
    assert _compat.needs_data(raised.value)
    assert not _compat.needs_data(ValueError("no"))


def test_torch_multiplies_fp8() -> None:
    a, b = torch.eye(16).to(torch.float8_e5m2), torch.eye(16).to(torch.float8_e4m3fn)
    two, rows = torch.tensor(2.0), torch.full((16, 1), 2.0)
    for scales in ((two, two), (rows, rows.t())):
        found = _compat.scaled_matmul(a, b.t(), *scales, torch.bfloat16, fast=False)
        assert torch.equal(found, 4 * torch.eye(16, dtype=torch.bfloat16))


def test_functions_kept_out_of_graphs_import_no_compiler_until_they_are_called() -> None:
    code = (
        "import sys, gulliver.serve.llm, gulliver._compat as c\n"
        "twice = c.uncompiled(lambda x: 2 * x)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert twice(3) == 6\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
