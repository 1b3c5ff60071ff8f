"""Long sequences: each rank has a part of every sequence, by ring attention or Ulysses.

    python examples/long_context.py
    torchrun --nproc-per-node 2 examples/long_context.py
    torchrun --nproc-per-node 2 examples/long_context.py all_to_all     # Ulysses

The loop passes the whole sequence, and gets the loss of the whole sequence. Activations, which
decide how long a sequence may be, are shared. ``auto`` chooses the mode by predicted time.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.comm.world import init_world

VOCABULARY, LENGTH = 64, 1024


def main(steps: int = 12, mode: str = "ring_attn") -> list[float]:
    """Trains; returns the losses, which are the same on all ranks."""
    world = init_world()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    shared = world.size > 1
    plugin = HybridParallelPlugin(
        sp_size=world.size if shared else None,
        sequence_parallelism_mode=mode if shared else None,
        verbose=False,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)

    tokens: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: tokens.append(output.shape[1])
    )
    losses = []
    for step in range(steps):
        # The same sequence on all ranks: the second half repeats the first, 512 tokens later.
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(8, (1, LENGTH // 2), generator=draw).repeat(1, 2).to(world.device)
        loss = model(input_ids=ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.is_main and step % 3 == 0:
            print(f"step {step:2}  loss {losses[-1]:.4f}")
    print(f"rank {world.rank}: {tokens[-1]} of {LENGTH} tokens in each layer")
    return losses


if __name__ == "__main__":
    main(mode=sys.argv[1] if len(sys.argv) > 1 else "ring_attn")
