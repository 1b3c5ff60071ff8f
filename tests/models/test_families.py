"""Hugging Face types in hybrid runs: one for each mechanism here, all of them in `--full`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.families import Family, Sequences, family_of, register
from gulliver.families.lookup import UNKNOWN, all_families
from gulliver.memory import region_of
from gulliver.parallel.tensor import STYLES, plan_tensor
from gulliver.parallel.tensor.apply import check_mode
from gulliver.planner.capability import MODES
from gulliver.planner.capability import family_of as record_name
from tests.covering import some
from tests.hybrid.hybrid_cells import BARS, COPIED_CELLS, LATER_CELLS, Cell, errors_of, largest
from tests.hybrid.hybrid_models import Precise
from tests.hybrid.hybrid_models import build as build_family
from tests.models.family_models import TASKS, batch, build, types
from tests.models.family_sweep import BAR, case, outcome

SOME = (
    ("mixtral", "tp"),  # experts in one tensor
    ("gpt_oss", "tp"),  # experts with biases, gate and up in turns; sinks
    ("deepseek_v3", "tp"),  # latent attention, shared experts
    ("gemma", "tp"),  # a scaled embedding, tied to the head
    ("diffllama", "tp"),  # parameters between columns and rows
    ("granite_swa", "tp"),  # sinks of a plan of its own
    ("roberta", "tp, logits"),  # no plan of its own
    ("mixtral", "pp"),  # blocks that choose by values
    ("jamba", "pp"),  # blocks of several kinds
)


def run_cases(world: World, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [case(world, "causal", kind, mode) for kind, mode in cases]


@pytest.mark.deadline(300)
def test_each_mechanism_gives_loss_and_gradients_of_one_process(pool: Any) -> None:
    pytest.importorskip("transformers")
    for rank in pool.run(run_cases, 2, list(SOME), deadline_s=280):
        for case_, found in zip(SOME, rank, strict=True):
            assert "unbuilt" not in found, case_
            assert max(found["loss"], found["gradients"]) < BAR, (case_, found)
            assert found["held"] < 0.75, (case_, "a real cut")


def run_cells(world: World, cells: tuple[Cell, ...], steps: int) -> dict[str, float]:
    """The largest error of loss, gradients and saved weights, by cell."""
    return {cell.name: max(errors_of(world, cell, torch.float64, steps).values()) for cell in cells}


BY_TURNS = tuple(
    cell
    for family, first in (("qwen3", 0), ("gemma2", 1), ("gemma3", 1), ("mixtral", 1))
    for cell in [cell for cell in LATER_CELLS if cell.family == family][first::2]
)
"""By default each family runs in half of its modes, and each mode with some family."""


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mixtral"])
@pytest.mark.parametrize("modes", some(["half", "all"], ["half"]))
@pytest.mark.deadline(300)
def test_family_matches_one_process_in_all_listed_modes(pool: Any, family: str, modes: str) -> None:
    pytest.importorskip("transformers")
    of = BY_TURNS if modes == "half" else LATER_CELLS
    cells = tuple(cell for cell in of if cell.family == family)
    for found in pool.run(run_cells, 2, cells, 1, deadline_s=280):
        assert max(found.values()) <= BARS[torch.float64], found


@pytest.mark.parametrize(
    "cell", some(COPIED_CELLS, COPIED_CELLS[:3:2]), ids=lambda cell: cell.grid.name
)
def test_more_tensor_ranks_than_key_value_heads_hold_copies_of_them(pool: Any, cell: Cell) -> None:
    pytest.importorskip("transformers")
    for errors in pool.run(errors_of, cell.grid.ranks, cell, torch.float64, steps=2):
        # The norm that clips adds 1e-6 before it divides.
        assert max(errors.values()) <= 1e-7, errors
        assert errors["gradients"] <= BARS[torch.float64], errors


def test_ranks_that_key_value_heads_cannot_be_shared_by_are_refused() -> None:
    pytest.importorskip("transformers")
    model = build_family("llama, 2 KV heads")
    assert {one.copies for one in plan_tensor(model, 4).modules.values()} == {1, 2}
    with pytest.raises(GulliverError, match=r"2 heads .* tp_size from 1 to 2, or 4 or 8"):
        plan_tensor(model, 3)


LORA_MODES: tuple[dict[str, Any], ...] = (
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    {"tp_size": 2, "sequence_parallelism_mode": "ring"},
    {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    {"pp_size": 2, "num_microbatches": 2},
)

READER = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/families.md").read_text(), re.S
)[0]
"""The example of the page about adding a family."""


def _as_one_process(world: World, arguments: dict[str, Any]) -> float:
    names: dict[str, Any] = {"__name__": "reader"}
    exec(READER, names)
    # A subclass is treated as what it derives from.
    kind = type("Rewritten", (names["Reader"],), {})
    torch.manual_seed(5)
    model = kind().double()
    ids = torch.randint(61, (4, 9))

    def criterion(logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    wanted = criterion(model(ids), {"ids": ids})
    wanted.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    booster = Booster(plugin=HybridParallelPlugin(**arguments, verbose=False))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if "pp_size" in arguments:
        done = booster.execute_pipeline(iter([{"ids": ids}]), model, criterion, optimizer)
        loss = done["loss"]
    else:
        loss = criterion(model(ids), {"ids": ids})
        booster.backward(loss, optimizer)
    error = largest(optimizer.full_gradients(), gradients)
    return max(error, abs(float(loss.detach()) - float(wanted.detach())))


@pytest.mark.parametrize("arguments", [*LORA_MODES[:3], {"pp_size": 2}], ids=str)
def test_the_example_of_the_page_trains_as_one_process(pool: Any, arguments: Any) -> None:
    assert max(pool.run(_as_one_process, 2, arguments)) <= BARS[torch.float64]


def test_a_family_is_found_along_the_class_hierarchy_by_all_who_ask() -> None:
    transformers = pytest.importorskip("transformers")

    class OwnConfig(transformers.LlamaConfig):
        model_type = "of_my_own"

    class Own(transformers.LlamaForCausalLM):
        config_class = OwnConfig

    class Wrapper(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

    llama = build_family("llama")
    llama.__class__, llama.config.__class__ = Own, OwnConfig
    llama.config.model_type = "of_my_own"
    assert family_of(llama).name == record_name(llama) == "llama"
    clip = build_family("stdit3")
    clip.__class__ = type("Other", (type(clip),), {})
    assert family_of(clip).name == record_name(clip) == "STDiT3"
    with pytest.raises(GulliverError, match="its own sequence modes"):
        check_mode(clip, plan_tensor(clip, 2), "split_gather")
    # What wraps a model has its layers, but no adapter is made for it.
    wrapped = Wrapper(build_family("gpt2"))
    assert family_of(wrapped).name == "gpt2"
    assert record_name(wrapped) is None
    assert family_of(nn.Linear(2, 2)) is UNKNOWN


def test_records_name_existing_modules() -> None:
    for family in all_families():
        tensors, known = family.tensors, family.sequences
        assert {*(tensors.rules.values() if tensors else ())} <= {*STYLES}
        assert {*(known.modes if known else ())} <= {*MODES}
    kinds = [kind for family in all_families() for kind in family.kinds]
    assert len(kinds) == len(set(kinds))


def test_invalid_family_is_rejected() -> None:
    with pytest.raises(GulliverError, match="need transformers attention"):
        register(Family("x", classes=("X",), sequences=Sequences()))


def test_little_sharding_warns_and_none_raises() -> None:
    pytest.importorskip("transformers")
    bamba = build("causal", "bamba")
    plan = plan_tensor(bamba, 2)
    assert plan.share_of(bamba) < 0.5
    llama = build("causal", "llama")
    assert plan_tensor(llama, 2).share_of(llama) > 0.9
    with pytest.raises(GulliverError, match=r"rules=\{pattern: style\}"):
        plan_tensor(build("causal", "mamba"), 2)
    with pytest.raises(GulliverError, match="weight per codebook"):
        plan_tensor(build("causal", "moshi"), 2)


def test_experts_do_not_get_pieces_of_a_sequence() -> None:
    pytest.importorskip("transformers")
    model = build("causal", "mixtral")
    plan = plan_tensor(model, 2)
    with pytest.raises(GulliverError, match=r"sequence_parallelism_mode='split_gather'.*experts"):
        check_mode(model, plan, "split_gather")
    assert not plan_tensor(build("causal", "llama"), 2).whole


def adapted() -> Any:
    import peft

    model = build("causal", "llama")
    names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=names, init_lora_weights=False)
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def lora_errors(world: World) -> list[tuple[float, float, int]]:
    """Errors of loss and gradients in each mode, and how many adapters' factors are cut."""
    found = []
    for arguments in LORA_MODES:
        model = adapted()
        data = batch("causal", model)
        with Precise():
            wanted = model(**data).loss
            wanted.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            gradients = {n: g.clone() for n, g in gradients.items()}
            model.zero_grad()
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            booster = Booster(plugin=HybridParallelPlugin(**arguments, verbose=False))
            model, optimizer, *_ = booster.boost(model, optimizer)
            if "pp_size" in arguments:
                loss = booster.execute_pipeline(iter([data]), model, None, optimizer)["loss"]
            else:
                loss = model(**data).loss
                booster.backward(loss, optimizer)
            own = optimizer.full_gradients()
        assert all("lora" in name for name in own)
        cut = sum("lora" in n and region_of(p) is not None for n, p in model.named_parameters())
        found.append((abs(float(loss) - float(wanted)), largest(own, gradients), cut))
    return found


@pytest.mark.deadline(300)
def test_lora_is_cut_with_the_layers_that_it_adapts(pool: Any) -> None:
    pytest.importorskip("peft")
    for rank in pool.run(lora_errors, 2, deadline_s=280):
        for arguments, (loss, gradients, cut) in zip(LORA_MODES, rank, strict=True):
            assert max(loss, gradients) < BAR, (arguments, loss, gradients)
            # One factor of each adapter: 5 in each of 4 blocks, and the head.
            assert cut == (21 if "tp_size" in arguments else 0), arguments


@pytest.mark.full
@pytest.mark.deadline(3600)
@pytest.mark.parametrize("task", TASKS)
def test_all_model_types_are_exact_or_rejected(pool: Any, task: str) -> None:
    pytest.importorskip("transformers")
    bad = []
    for kind in types(task):
        for mode in ("tp", "pp"):
            found = outcome(pool, task, kind, mode)
            if found["is"] in ("WRONG", "error"):
                bad.append((kind, mode, found))
    assert not bad, bad
