"""An analysis is what a real step saves, computes and takes."""

from __future__ import annotations

import copy
import resource

import pytest
import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.hardware.costs import roofline_seconds
from gulliver.memory.symbolic import follow_step
from gulliver.plan.analysis import analyse
from gulliver.plan.analysis.records import OPAQUE
from tests.covering import some
from tests.models.analysis_cases import CASES, Block, Stack, counted_flops, saved_bytes

OTHERS = ("llama, eager", "gpt2", "vit", "stdit", "unet")
"""Models whose kinds of operators the other cases have as well."""


@pytest.mark.parametrize("case", some([*CASES], [c for c in CASES if c not in OTHERS]))
def test_an_analysis_is_what_a_real_step_counts(case: str) -> None:
    if case == "unet":
        pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model, batch = CASES[case]()
    found = analyse(model, batch)
    assert not found.opaque
    # Views of what is kept are taken for something that somebody keeps, in the UNet.
    assert not found.notes or case == "unet"
    assert vars(found.saved) == saved_bytes(copy.deepcopy(model), batch)
    assert found.flops == counted_flops(copy.deepcopy(model), batch)
    assert found.peak == follow_step(model, (), batch).bytes
    whole = analyse(model, batch, repeats=False)
    for name in ("flops", "saved", "peak", "peak_with_gradients", "gradients"):
        assert getattr(found, name) == getattr(whole, name), name
    for phase in ("forward", "recompute", "backward"):
        ours, theirs = found.cost(phase), whole.cost(phase)
        assert ours.flops == theirs.flops
        # Gradients that several blocks add up are counted with each block that is not followed.
        assert ours.read == pytest.approx(theirs.read, rel=0.01)
        assert ours.written == pytest.approx(theirs.written, rel=0.01)
    for path, costs in whole.modules.items():
        ours = found.module(path)
        assert (ours.kind, ours.saved, ours.flops) == (costs.kind, costs.saved, costs.flops), path
        assert ours.forward_peak == costs.forward_peak, path


class Looking(nn.Module):
    """Looks at its data, as a router that drops tokens does."""

    def __init__(self, width: int, wider: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(width, 2 * width if wider else width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Routed(nn.Module):
    """A block that has a module which looks at its data."""

    def __init__(self, wider: bool) -> None:
        super().__init__()
        self.look, self.back = Looking(8, wider), nn.Linear(16 if wider else 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.look(x))


@pytest.mark.parametrize("wider", [False, True])
def test_data_dependent_module_is_one_operator(wider: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Routed(wider), Routed(wider), nn.Linear(8, 4))
    batch = torch.randn(3, 8)
    found = analyse(model, batch)
    # Where it gives another width than it takes, the block around it is what is known.
    paths = ["1", "2"] if wider else ["1.look", "2.look"]
    assert [one.path for one in found.opaque] == paths
    assert "test_analysis.py:" in str(found.opaque[0])
    assert "is not sharded" in str(found.opaque[0])
    inside = [o.path for o in found.operators if o.name == OPAQUE]
    assert sorted(inside) == sorted(2 * paths)
    if not wider:
        assert found.flops == counted_flops(model, {"input": batch})


def test_replayed_blocks_connect() -> None:
    """Attention probabilities that BLOOM's blocks return besides go nowhere."""
    hf = pytest.importorskip("transformers")
    config = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4, use_cache=False)
    ids = torch.zeros(2, 16, dtype=torch.long)
    found = analyse(hf.BloomForCausalLM(config), {"input_ids": ids, "labels": ids})
    block = found.module("transformer.h.1")
    assert block.handed == 4 * 2 * 16 * 32
    assert found.module("lm_head").handed == found.module("lm_head").output


def test_values_of_a_mask_are_known_and_those_of_activations_are_not() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if bool(mask.logical_not().any()):
                x = x * mask[..., None]
            return self.line(x)

    for mask, operators in ((torch.ones(2, 3), 0), (torch.tensor([[1, 1, 0], [1, 1, 1]]), 1)):
        found = analyse(Masked(), (torch.randn(2, 3, 4), mask.bool()))
        assert not found.opaque
        names = [o.name for o in found.operators if o.phase == "forward"]
        assert names.count("aten::mul.Tensor") == operators


def test_a_model_that_does_not_run_is_refused_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))
    with pytest.raises(GulliverError, match=r"module '1' cannot run on this batch .*RuntimeError"):
        analyse(model, torch.ones(2, 3))


def test_a_block_that_keeps_what_it_computes_is_followed_each_time() -> None:
    class Keeping(Block):
        def __init__(self, kept: list[torch.Tensor]) -> None:
            super().__init__(32)
            self.kept = kept

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.run(x)
            self.kept.append(found * 2)
            return found

    model, kept = Stack(), list[torch.Tensor]()
    model.blocks = nn.ModuleList(Keeping(kept) for _ in range(4))
    found = analyse(model, {"x": torch.randn(2, 16, 8)})
    assert not found.alike
    assert "keeps its results" in found.notes[0]


def test_cuda_kernels_save_cuda_tensors() -> None:
    # B H S D in bfloat16; flash attention keeps the log-sum-exp of a row in float32.
    model = Stack(dropout=0.2).to(torch.bfloat16)
    x = torch.randn(2, 16, 8, dtype=torch.bfloat16)
    found = analyse(model, {"x": x}, kernels="cuda")
    names = [o.name for o in found.operators]
    assert names.count("aten::_scaled_dot_product_flash_attention") == 2
    dropped = [o for o in found.operators if o.name == "aten::native_dropout"]
    assert dropped[0].outputs[1].dtype == "bool"
    assert dropped[0].saved == 2 * 16 * 32
    half = analyse(model.float(), {"x": x.float()}, kernels="cuda")
    assert any("efficient_attention" in o.name for o in half.operators)
    assert found.flops == half.flops
    with pytest.raises(GulliverError, match="unknown kernels 'gpu'"):
        analyse(model, {"x": x}, kernels="gpu")


def test_operators_make_a_graph_with_seconds() -> None:
    found = analyse(Stack(), {"x": torch.randn(2, 16, 8)})
    device = described("8xh100-infiniband").device
    graph = found.graph("blocks.3")
    assert {o.path.split(".")[1] for o in graph} == {"1"}
    for index, operator in enumerate(found.operators):
        for value in operator.inputs:
            assert value.producer < index
            if value.producer >= 0:
                given = found.operators[value.producer].outputs
                # What a replayed call gives has the operator that gave it in the call followed.
                known = [v.storage for v in given], [v.shape for v in given]
                assert value.storage in known[0] or value.shape in known[1]
    product = next(o for o in graph if o.name == "aten::addmm" and o.phase == "forward")
    names = {value.name for value in product.inputs}
    assert {"blocks.1.qkv.weight", "blocks.1.qkv.bias"} <= names | {
        v.name for o in graph if o.view for v in o.inputs
    }
    assert product.count == 3
    assert product.flops == 2 * 32 * 32 * 96
    moved = 4 * (32 * 32 + 32 * 96 + 96 + 32 * 96)
    assert product.seconds_on(device) == pytest.approx(
        roofline_seconds(device, product.flops, moved, "float32")
    )
    parts = [found.seconds(device, phase) for phase in ("forward", "recompute", "backward")]
    assert found.seconds(device) == pytest.approx(sum(parts))
    assert found.seconds(device) == pytest.approx(
        sum(o.count * o.seconds_on(device) for o in found.operators)
    )
    with pytest.raises(GulliverError, match=r"no module 'blocks\.9' was called"):
        found.module("blocks.9")


@pytest.mark.parametrize("again", some([False, True], [True]))
def test_a_model_of_405_billion_parameters_is_analysed_without_memory(again: bool) -> None:
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, vocab_size=128256,
        num_attention_heads=128, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = analyse(model.train(), {"input_ids": ids, "labels": ids}, kernels="cuda")
    assert len(found.operators) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    assert len(found.alike) == 124
    assert found.parameters == 2 * 405_853_388_800
    # 6 FLOPs for a parameter and a token but the embedding's, and attention; 8 if recomputed.
    matrices = 405_853_388_800 - 128256 * 16384 - 253 * 16384
    attention = 126 * 2 * 2 * 8192**2 * 16384
    factors = (8, 4.5) if again else (6, 3.5)
    expected = factors[0] * 8192 * matrices + factors[1] * attention
    if again:  # it stops where nothing more is needed: before a block's last product, and the head
        expected -= 2 * 8192 * 16384 * (126 * 53248 + 128256)
    assert found.flops == pytest.approx(expected, rel=0.01)
