"""Exports: values fit, slices are read back, adapters are PEFT's; what has no memory is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.checkpoint import (
    AsyncCheckpointer,
    export_huggingface,
    load,
    save_huggingface,
)
from gulliver.checkpoint.weights import MemoryWeights
from gulliver.checkpoint.writing import write_single
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError


def wrappers() -> dict[str, Callable[[], Tensor]]:
    def fake() -> Tensor:
        with FakeTensorMode():
            return torch.empty(200, 200)

    def freed() -> Tensor:
        tensor = torch.rand(200, 200)
        tensor.untyped_storage().resize_(0)
        return tensor

    return {
        "two": lambda: TwoTensor(torch.rand(200, 200), torch.rand(200, 200)),
        "masked": lambda: torch.masked.masked_tensor(
            torch.rand(200, 200), torch.ones(200, 200, dtype=torch.bool)
        ),
        "fake": fake,
        "freed": freed,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(wrappers()))
def test_tensors_without_memory_are_named(tmp_path: Path, kind: str) -> None:
    tensor = wrappers()[kind]()
    with (
        AsyncCheckpointer(tmp_path / "run") as checkpointer,
        pytest.raises(GulliverError, match=r"layer\.w"),
    ):
        checkpointer.save(1, {"model": {"layer.w": tensor}})
    with AsyncCheckpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, {"model": {"layer.w": torch.rand(200, 200)}})
    with pytest.raises(GulliverError, match=r"layer\.w"):
        load(tmp_path / "other", {"model": {"layer.w": tensor}})
    with pytest.raises(GulliverError, match=r"layer\.w"):
        save_huggingface({"layer.w": tensor}, tmp_path / "hf")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(7e4, torch.float16), (3.4e38, torch.bfloat16), (500.0, torch.float8_e4m3fn)],
)
def test_every_export_refuses_what_would_become_infinite(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    weight = torch.randn(300, 200)
    for number, entry in ((1, 1.0), (2, value)):
        weight[250, 3] = entry
        with AsyncCheckpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(number, {"model": {"w": weight}})
    out, run = tmp_path / "out", tmp_path / "run"
    export_huggingface(run, tmp_path / "float")
    ways: list[Callable[[], object]] = [
        lambda: export_huggingface(run, out, dtype=dtype),
        lambda: export_huggingface(run, tmp_path / "out.safetensors", dtype=dtype),
        lambda: save_huggingface({"w": weight}, out, dtype=dtype),
        lambda: write_single(MemoryWeights({"w": weight}), {"w": "w"}, out, {"w": dtype}),
    ]
    for way in ways:
        with pytest.raises(GulliverError, match="'w'"):
            way()
        assert not list(tmp_path.glob("out*"))
    export_huggingface(run, out, dtype=dtype, step=1)
    weight[250, 3] = 1.0
    found = load_file(out / "model.safetensors")["w"]
    assert torch.equal(found.view(torch.uint8), weight.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("use_async", [False, True])
def test_a_model_with_adapters_is_written_as_peft_does(
    tmp_path: Path, stage: int, use_async: bool
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4)
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model: Any = peft.get_peft_model(base, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.3)
    booster = Booster(LowLevelZeroPlugin(stage, verbose=False))
    boosted, *_ = booster.boost(model, torch.optim.AdamW(trained))
    ids = torch.randint(64, (2, 8))
    with torch.no_grad():
        wanted = boosted.eval()(input_ids=ids).logits.clone()
    booster.save_huggingface(boosted, tmp_path / "adapter", use_async=use_async)
    booster.close()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, wanted)
    adopt_world(None)
