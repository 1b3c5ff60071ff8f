"""Tensor and pipeline parallelism together: layers cut two ways, blocks dealt to two stages.

    python examples/tensor_pipeline.py
    torchrun --nproc-per-node 2 examples/tensor_pipeline.py       # two stages
    torchrun --nproc-per-node 4 examples/tensor_pipeline.py       # two stages of two ranks

All ranks of one model read the same batch, and `execute_pipeline` takes the place of the forward
and the backward. Any Hugging Face model that `gulliver capabilities` lists will do.
"""

from collections.abc import Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.comm.world import init_world

VOCABULARY, LENGTH, BATCH = 128, 32, 8


def batches(device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that repeat themselves after a random first half."""
    draw = torch.Generator().manual_seed(0)
    while True:
        half = torch.randint(VOCABULARY // 8, (BATCH, LENGTH // 4), generator=draw)
        ids = half.repeat(1, 4).to(device)
        yield {"input_ids": ids, "labels": ids}


def main(steps: int = 30) -> list[float]:
    """Trains; returns the losses, which are the same on all ranks."""
    world = init_world()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    stages = 2 if world.size > 1 else 1
    plugin = HybridParallelPlugin(
        tp_size=world.size // stages,
        pp_size=stages,
        num_microbatches=4 if stages > 1 else None,  # of two samples each
        max_norm=1.0,  # of the whole model's gradient
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)

    losses, data = [], batches(world.device)
    for step in range(steps):
        done = booster.execute_pipeline(data, model, None, optimizer)  # the model's own loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(done["loss"].item())
        if world.is_main and step % 5 == 0:
            print(f"step {step:2}  loss {losses[-1]:.4f}")
    held = sum(p.numel() for p in model.parameters())
    print(f"rank {world.rank} holds {held:,} of {booster.plan.model.parameters:,} parameters")
    return losses


if __name__ == "__main__":
    main()
