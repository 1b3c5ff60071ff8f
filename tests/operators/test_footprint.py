"""Memory that is no model state: predicted, measured, and what a budget makes of it."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError
from gulliver.memory import BudgetController, Footprint, activation_peak
from gulliver.memory.budget import BudgetRule, ProcessGauge, smallest_limit, with_unseen
from gulliver.memory.buffers import GRADIENTS
from gulliver.memory.manager import Manager
from gulliver.memory.symbolic import ActivationPeak, MemoryPoint, StorageCounter, follow_step
from tests.patience import patient
from tests.programs import run_program, text

MIB = 1 << 20


class Block(nn.Module):
    """A block of a GPT, which may recompute itself."""

    def __init__(self, width: int, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)
        self.again = again

    def run(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)


class Gpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, width: int = 32, layers: int = 2, words: int = 64, again: bool = False):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, again) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Unet(nn.Module):
    """Convolutions down and up again, with attention between and a connection across."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width))
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.attend = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = nn.Upsample(scale_factor=2)
        self.leave = nn.Conv2d(3 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        across = F.silu(self.enter(x))
        y = F.relu(self.norm(self.down(across)), inplace=True)
        rows = y.flatten(2).transpose(1, 2)
        y = y + self.attend(rows, rows, rows)[0].transpose(1, 2).view_as(y)
        return self.leave(torch.cat([self.up(y), across], 1))


class Cached(nn.Module):
    """Changes itself as it runs, and uses all kinds of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept = F.dropout(self.norm(self.line(x)), 0.5)
        return self.kept * random.random() * np.random.rand()


def _tokens(words: int = 64) -> Tensor:
    return torch.randint(words, (2, 16))


def _hugging_face(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    size["intermediate_size"] = 64
    tokens = _tokens()
    if kind == "llama":
        config = hf.LlamaConfig(**size, num_key_value_heads=2)
        return hf.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
    if kind == "bert":
        model = hf.BertForSequenceClassification(hf.BertConfig(**size))
        return model, {"input_ids": tokens, "labels": torch.zeros(2, dtype=torch.long)}
    if kind == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(**size, image_size=16, patch_size=8))
        return model, {"pixel_values": torch.randn(2, 3, 16, 16)}
    config = hf.T5Config(
        num_layers=2, d_model=32, num_heads=4, d_kv=8, vocab_size=64, d_ff=64, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt": lambda: (Gpt(), {"tokens": _tokens()}),
    "gpt recomputed": lambda: (Gpt(again=True), {"tokens": _tokens()}),
    "gpt evaluated": lambda: (Gpt().eval(), {"tokens": _tokens()}),
    "gpt half frozen": lambda: (_half_frozen(Gpt()), {"tokens": _tokens()}),
    "unet": lambda: (Unet(), {"x": torch.randn(2, 3, 8, 8)}),
    "unet, gradient of input": lambda: (Unet(), {"x": torch.randn(2, 3, 8, 8).requires_grad_()}),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        {"src": torch.randn(2, 5, 16)},
    ),
    "mlp": lambda: (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), {"input": _x()}),
    "llama": lambda: _hugging_face("llama"),
    "bert": lambda: _hugging_face("bert"),
    "vit": lambda: _hugging_face("vit"),
    "t5": lambda: _hugging_face("t5"),
}


def _x() -> Tensor:
    return torch.randn(3, 8)


def _half_frozen(model: Gpt) -> Gpt:
    model.blocks[0].requires_grad_(False)
    return model


RARE = ("bert", "vit", "t5", "gpt evaluated", "transformer")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full) if c in RARE else c for c in CASES]
)
def test_a_step_is_predicted_byte_by_byte(case: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[case]()
    predicted = activation_peak(model, (), batch)
    assert predicted.reason == ""
    measured = follow_step(model, (), batch)
    assert predicted.bytes == measured.bytes
    assert predicted.curve == measured.curve
    assert predicted.kept == measured.kept
    assert predicted.where == measured.where


def test_autocast_is_predicted_byte_by_byte() -> None:
    batch = {"tokens": _tokens()}
    predicted = activation_peak(Gpt(), (), batch, autocast=torch.bfloat16)
    assert predicted.bytes == follow_step(Gpt(), (), batch, autocast=torch.bfloat16).bytes
    plain = activation_peak(Gpt(), (), batch).bytes
    assert predicted.bytes is not None
    assert plain is not None
    assert predicted.bytes < plain


def test_the_peak_of_two_layers_is_as_computed_by_hand() -> None:
    rows, width = 64, 32
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    found = activation_peak(model, (torch.randn(rows, width),), criterion=lambda out: out.sum())
    one = 4 * rows * width
    # The batch; in forward the outputs of all three, the last also held by the caller; the loss and
    # its gradient, a number each. As backward begins, the gradient of the output is that number
    # stretched; the gradient of ReLU's output is new, and with it the weight's.
    assert found.inputs == one
    assert found.kept["0"].output == found.kept["1"].output == one
    assert found.kept["0"].saved == found.kept["1"].saved == 0
    assert found.bytes is not None
    assert 5 * one <= found.bytes <= 6 * one + 4 * width * (width + 2)


def test_predicting_leaves_nothing_behind() -> None:
    torch.manual_seed(1)
    model = Cached()
    called: list[int] = []
    model.line.register_forward_hook(lambda *_: called.append(1))
    model.line.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    parameters, names = list(model.parameters()), set(vars(model))
    batch = (torch.randn(3, 4),)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert activation_peak(model, batch).bytes
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.line.weight.grad, torch.ones(4, 4))
    assert model.norm.weight.grad is None
    assert set(vars(model)) == names
    assert model.calls == 0
    assert model.kept is None
    assert not called
    assert activation_peak(model, batch, hooks=True).bytes
    assert called


class Branching(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) if x.sum() > 0 else x


def test_a_step_that_depends_on_data_or_does_not_run_has_a_reason_instead() -> None:
    found = activation_peak(Branching(), (torch.ones(2, 4),))
    assert found.bytes is None
    assert "data" in found.reason.lower()
    assert activation_peak(nn.Linear(3, 4), (torch.ones(2, 5),)).reason.startswith("RuntimeError")


def test_a_storage_counts_from_its_operation_until_its_last_view_is_gone() -> None:
    before = torch.zeros(100)
    with StorageCounter() as counter:
        before.add_(1)
        view = before[:10].view(2, 5)
        assert counter.live == 0
        made = torch.ones(50)
        part = made[10:20]
        del made
        assert counter.live == 200
        part = part + view.flatten()
        assert counter.live == 40
        part.untyped_storage().resize_(400)
        part.add_(1)
        assert counter.live == 400
        del part
    assert (counter.live, counter.peak) == (0, 400)


RESIDENT = """
import ctypes, sys, torch
from tests.operators.test_footprint import Gpt, Unet, MIB
from gulliver.memory import Footprint, activation_peak
from gulliver.memory.budget import FreedMemory
from gulliver.memory.symbolic import stand_in_loss
torch.set_num_threads(1)
freed = FreedMemory()
assert not freed.reason, freed.reason
for model, batch in (
    (Gpt(128, 3, 2048), torch.randint(2048, (8, 128))),
    (Unet(32), torch.randn(4, 3, 48, 48)),
):
    stand_in_loss(model(batch[:1])).backward()  # gradients, and what kernels keep for ever
    freed.trim()
    footprint = Footprint(lambda: 0, interval=5e-4)
    output = model(batch)
    stand_in_loss(output).backward()
    del output
    left = footprint.now()[0]
    print(activation_peak(model, (batch,)).bytes, footprint.end_step().other, left)
    footprint.close()
freed.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_resident_memory_of_a_step_is_the_predicted_one_and_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        predicted, seen, left = map(int, line.split())
        assert 0.9 * predicted < seen < with_unseen(predicted) + 4 * MIB
        assert left < seen / 2


class Tape:
    """A gauge that reads what is written to it."""

    def __init__(self, used: int = 0) -> None:
        self.value = self.peak = used

    def used(self) -> int:
        return self.value

    def most(self) -> int:
        most, self.peak = max(self.peak, self.value), 0
        return most

    def close(self) -> None:
        pass


def test_footprint_is_memory_outside_the_manager() -> None:
    tape, held = Tape(1000), [300]
    footprint = Footprint(lambda: held[0], interval=3600, gauge=tape)
    assert footprint.base == 700
    for value, now in ((1500, 300), (2500, 900), (1200, 100)):
        tape.value, held[0] = value, now
        footprint.now()
    step = footprint.end_step()
    assert (step.other, step.total) == (900, 1800)
    assert footprint.end_step() == type(step)(400, 500)
    footprint.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_gauge_of_the_process_sees_what_a_manager_holds() -> None:
    manager, gauge = Manager(64 * MIB, "cpu", None), ProcessGauge()
    before = gauge.used()
    manager.allocate_buffer(48 * MIB, torch.uint8, GRADIENTS).fill_(1)
    assert gauge.used() - before > 40 * MIB
    gauge.close()
    manager.close()


SIZES = st.integers(0, 400 * MIB)


@given(st.lists(SIZES, min_size=1, max_size=20), st.integers(0, 100 * MIB))
def test_a_budget_leaves_room_for_what_was_seen_and_is_never_below_the_minimum(
    peaks: list[int], minimum: int
) -> None:
    limit = 500 * MIB
    rules = [BudgetRule(limit, minimum) for _ in range(2)]
    for rule in rules:
        rule.begin(None)
    for number, peak in enumerate(peaks):
        before = rules[0].budget
        for rule in rules:
            rule.end_step(peak)
        rule = rules[0]
        room = limit - rule.margin - max(peaks[max(0, number - 7) : number + 1])
        assert rule.budget >= minimum
        # What differs by little is not worth a new schedule of all moves.
        steady = rule.margin // 4
        if abs(max(room, minimum) - before) <= steady:
            assert rule.budget == before
            continue
        assert rule.budget <= max(room, minimum)
        assert rule.budget - before <= max((room - before) // 4, steady)
        if room <= before:
            assert rule.budget == max(room, minimum)
    assert rules[0].changes == rules[1].changes
    assert all(change.before != change.after for change in rules[0].changes)


@given(st.integers(200 * MIB, 4000 * MIB), st.data())
def test_a_process_that_grows_by_half_a_margin_between_positions_keeps_its_limit(
    limit: int, data: st.DataObject
) -> None:
    rule = BudgetRule(limit)
    rule.begin(None)
    for _ in range(data.draw(st.integers(1, 4))):
        other = most = 0
        for at in range(data.draw(st.integers(1, 12))):
            other += data.draw(st.integers(0, rule.margin // 2))
            other = min(other, limit - rule.margin)
            total = rule.budget + other  # the manager fills its budget at once
            assert total <= limit
            rule.press(other, total, str(at))
            most = max(most, other)
        rule.end_step(most)


class Ledger:
    """What a controller sees of a manager."""

    def __init__(self, minimum: int = 0) -> None:
        self.minimum, self.pinned = minimum, 0
        self.budgets: list[int] = []

    def set_budget(self, nbytes: int) -> None:
        if nbytes < self.pinned:
            raise GulliverError("more is in use now")
        self.budgets.append(nbytes)


def _peak(nbytes: int) -> ActivationPeak:
    return ActivationPeak(nbytes, curve=(MemoryPoint("backward", "blocks.3", 0, nbytes),))


@given(st.integers(0, 3000 * MIB), st.integers(0, 3000 * MIB))
def test_the_smallest_limit_is_the_smallest(minimum: int, predicted: int) -> None:
    least = smallest_limit(minimum, predicted)
    assert BudgetRule(least, minimum).begin(_peak(predicted)) >= minimum
    with pytest.raises(GulliverError, match=r"memory limit.*too small"):
        BudgetRule(least - 1, minimum).begin(_peak(predicted))


def test_a_limit_that_is_too_small_ends_before_the_first_step_and_names_what_decides() -> None:
    ledger = Ledger(minimum=100 * MIB)
    with pytest.raises(GulliverError) as caught:
        BudgetController(150 * MIB, ledger, None, _peak(80 * MIB), decides="chunk 7")
    assert not ledger.budgets
    least = -(-smallest_limit(100 * MIB, 80 * MIB) // MIB)
    for told in ("150.0 MiB", "chunk 7", "backward of blocks.3", "106.0 MiB", f"{least}MiB"):
        assert told in str(caught.value)
    controller = BudgetController(least * MIB, ledger, None, _peak(80 * MIB), decides="chunk 7")
    controller.close()
    assert ledger.budgets[-1] >= 100 * MIB


def test_a_controller_lowers_the_budget_at_the_next_position_and_says_why() -> None:
    tape, ledger = Tape(), Ledger()
    footprint = Footprint(lambda: 0, interval=3600, gauge=tape)
    controller = BudgetController(1000 * MIB, ledger, footprint, _peak(160 * MIB))
    first = ledger.budgets[-1]
    assert first == 1000 * MIB - controller.rule.margin - 196 * MIB
    footprint.now()
    controller.check("forward a")
    assert ledger.budgets == [first]
    tape.value = 995 * MIB
    footprint.now()
    controller.check("forward b")
    assert ledger.budgets[-1] < first
    assert not footprint.alarmed
    tape.value = 0
    controller.end_step()
    assert ledger.budgets[-1] <= 1000 * MIB - 995 * MIB
    assert "forward b" in controller.explain()
    assert re.search(r"995\.0 MiB .*1000\.0 MiB", controller.explain())
    for _ in range(60):
        controller.end_step()
    # A smaller gap is not worth a new schedule.
    assert 0 <= 1000 * MIB - controller.rule.margin - ledger.budgets[-1] <= 8 * MIB
    controller.close()


def test_a_budget_below_what_is_pinned_waits_for_the_next_step() -> None:
    tape, ledger = Tape(), Ledger()
    footprint = Footprint(lambda: 0, interval=3600, gauge=tape)
    controller = BudgetController(100 * MIB, ledger, footprint, _peak(8 * MIB))
    ledger.pinned = ledger.minimum = 60 * MIB
    tape.value = 99 * MIB
    footprint.now()
    controller.check("backward a")
    assert ledger.budgets[1:] == [60 * MIB]
    ledger.pinned = 0
    controller.end_step()
    assert ledger.budgets[-1] == 60 * MIB
    controller.close()


def test_exceeded_limit_is_logged_once_with_sufficient_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tape, ledger = Tape(), Ledger()
    footprint = Footprint(lambda: 0, interval=3600, gauge=tape)
    controller = BudgetController(100 * MIB, ledger, footprint, minimum=60 * MIB)
    for used in (40, 70, 90):
        tape.value = used * MIB
        assert bool(caplog.messages) == (used > 70)
        controller.end_step()
    (told,) = caplog.messages
    for part in ("100.0 MiB", "60.0 MiB", "70.0 MiB", "136MiB"):
        assert part in told
    enough, short = BudgetRule(136 * MIB), BudgetRule(135 * MIB)
    assert enough.limit - enough.margin >= 130 * MIB > short.limit - short.margin
    controller.close()


def test_freed_memory_is_kept_where_steps_hardly_wait_and_it_fits() -> None:
    def ended(limit: int, other: int, *waits: float | None) -> BudgetRule:
        rule = BudgetRule(limit, 50 * MIB)
        rule.begin(None)
        for one in waits:
            rule.end_step(other, one)
        return rule

    kept = ended(500 * MIB, 100 * MIB, None, 0.02)
    assert kept.keeps is True
    kept.end_step(110 * MIB, 0.2)
    assert kept.keeps is True
    assert kept.budget <= 500 * MIB - kept.margin - 140 * MIB, "room for what does not fit"
    assert any("2%" in str(c) for c in kept.changes)
    for rule in (
        ended(500 * MIB, 100 * MIB, None),
        ended(500 * MIB, 100 * MIB, 0.12),
        ended(500 * MIB, 10 * MIB, 0.0),
        ended(210 * MIB, 100 * MIB, 0.0),
    ):
        assert rule.keeps is None
    kept.end_step(110 * MIB, 0.3)
    assert kept.keeps is False
    kept.end_step(110 * MIB, 0.0)
    assert kept.keeps is False, "given up for good"


FAULTS = """
import resource
import torch
from gulliver.memory.budget import FreedMemory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        (torch.ones(1 << 20) + 1).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
freed = FreedMemory()
faults()
back = faults()
freed.keep(True)
faults()
kept = faults()
freed.keep(False)
print(back, kept)
"""


MALLOC = """
from gulliver.memory.budget import FreedMemory
said = []
first, second = FreedMemory(), FreedMemory()
for freed in (first, second):
    class Libc:
        def mallopt(self, name, value):
            said.append((name, value))
    freed._libc = Libc()
first.close()
first.close()
assert not said, "the other is open"
second.close()
print(said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_last_close_restores_malloc_thresholds() -> None:
    for mapped, wanted in (("", 32 << 20), ("262144", 262144)):
        told = {"MALLOC_MMAP_THRESHOLD_": mapped, "MALLOC_TRIM_THRESHOLD_": ""}
        done = run_program(text, MALLOC, env=told)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str([(-3, wanted), (-1, 64 << 20)])


@pytest.mark.gpu
def test_memory_of_a_device_is_what_its_allocator_says() -> None:
    footprint = Footprint(lambda: 0, "cuda")
    big = torch.ones(32 * MIB, device="cuda")
    del big
    assert footprint.end_step().other == 128 * MIB
    small = torch.ones(MIB, device="cuda")
    assert footprint.end_step().other == 4 * MIB
    del small
    footprint.close()


def test_where_the_budget_cannot_grow_a_limit_is_named_with_which_it_can() -> None:
    controller = BudgetController(60 * MIB, Ledger(), None, _peak(8 * MIB))
    assert not controller.grow(58 * MIB)
    said = controller.least_limit(58 * MIB)
    least = int(said.rpartition(" ")[2].removesuffix("MiB"))
    assert 60 < least < 100
    assert BudgetController(least * MIB, Ledger(), None, _peak(8 * MIB)).grow(58 * MIB)
