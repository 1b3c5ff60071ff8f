"""Tensor parallelism for a model of your own: say how its modules are cut, by their names.

    python examples/custom_model.py
    torchrun --nproc-per-node 2 examples/custom_model.py

The model knows nothing of ranks. A rule's pattern is the end of a module's path. Norms stay whole;
another module that no rule names is refused. Columns make this rank's heads, rows join them again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.comm.world import init_world

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 48, 64, 2, 16, 16

RULES = {
    "embedding": "vocabulary",  # rows of the embedding
    "places": "replicate",  # whole on every rank
    **dict.fromkeys(("query", "key", "value"), "column by heads"),  # outputs, in whole heads
    "out": "row by heads",  # inputs; results are summed over the ranks
    "up": "column",
    "down": "row",
    "head": "head",  # outputs, gathered: every rank gets all logits
}


class Block(nn.Module):
    """Attention and a feed-forward layer; `num_heads` becomes the number that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, shape = self.norm1(x), (self.num_heads, -1)
        q, k, v = (f(h).unflatten(-1, shape) for f in (self.query, self.key, self.value))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(steps: int = 40) -> list[float]:
    """Trains; returns the losses, which are the same on all ranks."""
    world = init_world()
    torch.manual_seed(0)
    model = Model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rules = RULES if world.size > 1 else None
    booster = Booster(plugin=HybridParallelPlugin(tp_size=world.size, tensor_rules=rules))
    model, optimizer, *_ = booster.boost(model, optimizer)
    if world.is_main:
        for path, style in booster.plan.tensor.modules.items():
            print(f"{path:28} {style}")

    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)
        ids = ((start + torch.arange(LENGTH + 1)) % VOCABULARY).to(world.device)  # counting
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.is_main and step % 10 == 0:
            print(f"step {step:2}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
