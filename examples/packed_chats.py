"""Fine-tune on conversations in a loop of your own: answers only, packed, the same on any ranks.

    python examples/packed_chats.py
    torchrun --nproc-per-node 2 examples/packed_chats.py

``gulliver finetune`` does all of this and more. Here are its parts: a tiny model, a tokenizer and
conversations are written first, so that nothing is downloaded. The task: words in capitals.
"""

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.comm import barrier
from gulliver.comm.world import init_world
from gulliver.finetune import (
    DataConfig,
    load_tokenizer,
    make_batches,
    make_example,
    packing_support,
    read_text,
)

LENGTH = 128


def main(steps: int = 200, folder: Path | str = "out/packed_chats") -> list[float]:
    """Trains; returns this rank's parts of the losses, whose mean is the loss of the step."""
    world, folder = init_world(), Path(folder)
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        make_example(folder)
    barrier()  # the other ranks wait for the folder

    tokenizer = load_tokenizer(folder / "model")
    say = print if world.is_main else lambda line: None
    data = read_text(DataConfig((folder / "capitals.jsonl",), length=LENGTH), tokenizer, say)
    model = AutoModelForCausalLM.from_pretrained(folder / "model").to(world.device)
    model.config.use_cache = False
    loader = make_batches(
        data.train,
        tokens=16 * LENGTH,  # of a step, over all ranks
        length=LENGTH,
        packing=packing_support(model) is None,
        rank=world.rank,
        ranks=world.size,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
    model, optimizer, *_ = booster.boost(model, optimizer)

    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            # Learnt tokens of the whole step: ranks with more of them count for more.
            items, labels = batch.pop("num_items"), batch.pop("labels").to(world.device)
            batch = {name: tensor.to(world.device) for name, tensor in batch.items()}
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            loss = total / items * world.size  # the ranks' gradients are averaged
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if world.is_main and len(losses) % 40 == 1:
                print(f"step {len(losses):3}  loss {loss.item():.3f}")
            if len(losses) == steps:
                break
    return losses


if __name__ == "__main__":
    main()
