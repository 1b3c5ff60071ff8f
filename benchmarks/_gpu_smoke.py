"""Smoke parts of `benchmarks.gpu`: each package with device code against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks._gpu_run import GpuRun, PartSkipped, apart, blocks
from benchmarks._models import GPT, VOCABULARY
from gulliver.booster import Booster, GeminiPlugin, LowLevelZeroPlugin, Plugin

EXACT = 1e-4  # Largest relative difference in float32: sums in another order
STEPS = 4


def trained(run: GpuRun, plugin: Plugin | None, count: int, width: int) -> tuple[Any, Any]:
    """Trains some steps of AdamW, with a plugin or plain; returns losses and weights."""
    model: Any = blocks(count, width, run.device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6)
    batch = torch.linspace(-1, 1, 8 * width, device=run.device).view(8, width)
    booster = None if plugin is None else Booster(plugin=plugin)
    if booster is not None:
        model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = (model(batch) - 1).square().mean()
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = torch.cat([p.detach().flatten().cpu() for p in model.state_dict().values()])
    return torch.stack(losses).cpu(), weights


def zero(run: GpuRun) -> None:
    """Streams and collectives of ZeRO."""
    width = run.sized(1024, 64)
    losses, weights = trained(run, None, 6, width)
    for stage in (1, 2, 3):
        found = trained(run, LowLevelZeroPlugin(stage=stage, verbose=False), 6, width)
        run.check(f"stage {stage}: losses", apart(found[0], losses), EXACT)
        run.check(f"stage {stage}: weights", apart(found[1], weights), EXACT)


def loader(run: GpuRun) -> None:
    """Copies ahead of use on a stream of their own."""
    from gulliver.data import DataLoader

    data = [torch.full((3, 8, 32, 32), float(number)) for number in range(64)]
    found = DataLoader(data, 4, device=run.device)
    wrong = 0.0
    for number, batch in enumerate(found):
        assert batch.device.type == run.device.type
        wanted = torch.arange(4.0).add(4 * number).view(4, 1, 1, 1, 1)
        wrong = max(wrong, float((batch.cpu() - wanted).abs().max()))
    run.check("batches", wrong, 0.0)


def gemini(run: GpuRun) -> None:
    """State in page-locked host memory, and on a disk."""
    count, width = 12, run.sized(2048, 512)
    losses, weights = trained(run, None, count, width)
    # Weights, gradients and moments are 768 MiB on a GPU, 48 MiB in a dry run.
    limit, room = ("32MiB", "1GiB") if run.dry else ("480MiB", "4GiB")
    disk = f"{run.folder}:{room}"
    tiers: dict[str, dict[str, str]] = {"disk": {"disk": disk}}
    if not run.dry:  # a CPU's memory is the host's: there the option is refused
        tiers = {"host": {"host_limit": room}, **tiers}
        tiers["host and disk"] = {"host_limit": "128MiB", "disk": disk}
    for name, options in tiers.items():
        plugin = GeminiPlugin(limit, verbose=False, **options)  # pyright: ignore[reportArgumentType]
        results: list[Any] = []

        def train(plugin: Plugin = plugin, results: list[Any] = results) -> None:
            results.extend(trained(run, plugin, count, width))

        run.figure(f"{name}: peak bytes", run.peak_bytes(train))
        run.check(f"{name}: losses", apart(results[0], losses), EXACT)
        run.check(f"{name}: weights", apart(results[1], weights), EXACT)


def fp8(run: GpuRun) -> None:
    """Products through `torch._scaled_mm`, with torch's fused optimizer."""
    from gulliver.precision.fp8 import convert_to_fp8
    from gulliver.precision.fp8.conversion import has_units

    if not run.dry and not has_units(run.device):
        raise PartSkipped("the device has no FP8 units")
    width = run.sized(1024, 64)
    batch = torch.randn(64, width, device=run.device, dtype=torch.bfloat16)
    target = torch.randn_like(batch)
    for scaling in (None, "tensorwise", "rowwise"):
        model = blocks(3, width, run.device).bfloat16()
        wanted = model(batch)
        if scaling is not None:
            convert_to_fp8(model, scaling, emulate=run.dry)
            run.check(f"{scaling}: output", apart(model(batch), wanted), 0.15)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        losses = []
        for _ in range(40):
            loss = (model(batch) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        run.figure(f"{scaling or 'bf16'}: losses", [losses[0], losses[-1]])
        run.check(f"{scaling or 'bf16'}: loss last to first", losses[-1] / losses[0], 0.9)


def checkpoint(run: GpuRun) -> None:
    """A save is the state of its step although the device goes on."""
    from gulliver.checkpoint import AsyncCheckpointer, load

    width = run.sized(1024, 64)
    for mode in ("shadow", "ring"):
        model = blocks(8, width, run.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        batch = torch.ones(8, width, device=run.device)

        def step(model: Any = model, optimizer: Any = optimizer, batch: Any = batch) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        wrong = 0
        with AsyncCheckpointer(run.folder / mode, mode=mode) as checkpointer:
            for number in range(3):
                step()
                before = {n: t.detach().clone() for n, t in model.state_dict().items()}
                checkpointer.save(number, {"model": model, "optimizer": optimizer})
                step()
                step()
                checkpointer.wait()
                saved = load(run.folder / mode, step=number).values["model"]
                wrong += sum(not torch.equal(saved[n], t.cpu()) for n, t in before.items())
        run.check(f"{mode}: tensors of another step", float(wrong), 0.0)


def flash(run: GpuRun) -> None:
    """Kernels of attention against float64, forward and backward."""
    from gulliver.parallel.sequence import Mask, SequencePlan, attention, make_groups
    from gulliver.parallel.sequence.kernels import KERNELS, requirements_of

    length, heads, dim = run.sized(1024, 64), 4, 64
    names = ("cpu flash", "reference") if run.dry else ("cuda flash", "cuda efficient")
    dtype = torch.float32 if run.dry else torch.bfloat16
    q, k, v, grad = torch.randn(4, 1, heads, length, dim, device=run.device, dtype=dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    query, key, value = exact
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    for name in names:
        reason = KERNELS[name].lacks(requirements_of(q, v, "causal"))
        if reason:
            run.figure(f"{name}: absent", str(reason))
            continue
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        groups = make_groups(SequencePlan())
        out = attention(given[0], given[1], given[2], groups, mask=Mask(causal=True), kernel=name)
        found = [out, *torch.autograd.grad(out, given, grad)]
        worst = max(apart(a, b) for a, b in zip(found, wanted, strict=True))
        run.check(f"{name}: output and gradients", worst, 1e-4 if run.dry else 0.05)


def llama(run: GpuRun, width: int, layers: int) -> Any:
    """Returns a Llama of transformers with random weights."""
    try:
        import transformers
    except ImportError as error:
        raise PartSkipped(f"transformers is not installed ({error})") from error
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        max_position_embeddings=1024,
        initializer_range=0.2 if width < 512 else 0.02,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model.eval().to(run.device)


def serving(run: GpuRun) -> None:
    """Greedy tokens against transformers' own, in float32."""
    from gulliver.serve import LLM, SamplingParams

    model = llama(run, 128, 2)
    prompts = [torch.randint(1, 1024, (n,)).tolist() for n in (5, 19, 40)]
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=run.device)
        made = model.generate(ids, max_new_tokens=24, do_sample=False)
        wanted.append(made[0, len(prompt) :].tolist())
    with LLM(model, cache_tokens=1024) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
    wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
    run.check("answers unlike transformers'", float(wrong), 0.0)


@torch.no_grad()
def autoencoder(run: GpuRun) -> None:
    """Convolutions in pieces give what whole ones give."""
    from gulliver.models import VideoAutoencoder
    from gulliver.parallel.convolution import chunk_convolutions

    torch.manual_seed(0)
    model, side = VideoAutoencoder(width=run.sized(32, 16)).to(run.device), run.sized(128, 32)
    clip = torch.randn(1, 3, 5, side, side, device=run.device)
    latents = model.encode(clip)
    wanted = model.decode(latents)
    host = copy.deepcopy(model).cpu()
    run.check("device and host", apart(wanted, host.decode(latents.cpu())), 1e-2)
    chunked = chunk_convolutions(model, budget="1MiB")
    run.check("in pieces", apart(model.decode(latents), wanted), 1e-3)
    chunked.off()


def embedding(run: GpuRun) -> None:
    """A cached table against torch's whole one."""
    from gulliver.embedding import CachedEmbeddingBag, LookAhead

    rows, dim = run.sized(100_000, 2_000), 16
    weight = torch.randn(rows, dim)
    ours = CachedEmbeddingBag(
        rows, dim, mode="sum", _weight=weight.clone(), cache=0.2, device=run.device
    )
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.05)
    ours.attach(optimizer)
    plain = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight.to(run.device))
    other = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    batches = [torch.randint(0, rows, (64, 4)) for _ in range(16)]
    worst = 0.0
    for ids in LookAhead(batches, ours, batches=4, ids=lambda ids: ids):
        there, pairs = ids.to(run.device), []
        for table, steps in ((ours, optimizer), (plain, other)):
            steps.zero_grad()
            out = table(there)
            out.square().mean().backward()
            steps.step()
            pairs.append(out)
        worst = max(worst, apart(pairs[0], pairs[1]))
    run.check("output", worst, 1e-5)
    run.figure("hit rate", ours.counts.hit_rate)


def gpt(run: GpuRun) -> tuple[nn.Module, torch.Tensor]:
    """Returns a GPT that fills the device with work, and a batch of ids."""
    width, depth, length = (1536, 16, 1024) if not run.dry else (64, 2, 32)
    torch.manual_seed(0)
    model = GPT(width, depth, length).to(run.device)
    return model, torch.randint(VOCABULARY, (run.sized(8, 2), length), device=run.device)
