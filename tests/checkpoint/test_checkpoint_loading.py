"""Loading into a program's own objects: what does not match is found before anything changes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.checkpoint.reader import always_fits, first_unrepresentable
from gulliver.errors import GulliverError


class Counting(nn.Module):
    """A layer with state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.mean = nn.Linear(3, 3), 0, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "mean": self.mean, "more": [1, (2, None)]}

    def set_extra_state(self, state: Any) -> None:
        assert state["more"] == [1, (2, None)]
        self.seen, self.mean = state["seen"], state["mean"]


class Scaled(nn.Module):
    """A layer whose state is not its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}halved"] = self.weight.detach() / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:  # type: ignore[override]
        self.weight.data.copy_(state_dict[f"{prefix}halved"] * 2)


def model() -> Any:
    return nn.Sequential(Counting(), nn.BatchNorm1d(3), Counting())


def tree() -> dict[Any, Any]:
    ones = torch.ones
    return {"a": ones(3), "b": [ones(2) * 2, {"c": torch.tensor(3.0)}], 3: (ones(1),), "n": 5}


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A step, and what was saved in it."""
    torch.manual_seed(0)
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters())
    trained[0].mean += 7
    trained(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": trained,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "tree": tree(),
        "wide": {"big": torch.tensor([1, 2**40 + 1]), "hot": torch.tensor([1.0, 7e4])},
    }
    with AsyncCheckpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
    return tmp_path / "run", state


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    ours, theirs = ours | dict(one.named_buffers()), theirs | dict(other.named_buffers())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_extra_state_and_tensors_in_dicts_and_lists_come_back_in_place(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, state = run
    other, wanted = model(), state["model"]
    mine: dict[Any, Any] = {"a": torch.zeros(3), "b": [torch.zeros(2), {"c": torch.zeros(())}]}
    mine |= {3: (torch.zeros(1),), "n": None}
    loaded = load(folder, {"model": other, "tree": mine})
    assert str(loaded) == "everything matched"
    assert same(other, wanted)
    assert [m.seen for m in (other[0], other[2])] == [4, 4]
    assert [m.mean.tolist() for m in (other[0], other[2])] == [[7, 7], [0, 0]]
    assert mine["a"].tolist() == [1, 1, 1]
    assert (mine["b"][0].tolist(), mine["b"][1]["c"].item()) == ([2, 2], 3)
    assert mine[3][0].item() == 1
    found = loaded.values["tree"]
    assert found["a"] is mine["a"]
    assert found["b"][1]["c"] is mine["b"][1]["c"]
    assert found["n"] == 5
    # By a prefix, into a module whose tensors are views of others, and into one tensor.
    part = Counting()
    flat = nn.utils.parameters_to_vector(part.parameters()).detach()
    nn.utils.vector_to_parameters(flat, part.parameters())
    load(folder, {"model": part}, prefix="2.")
    assert same(part, wanted[2])
    assert part.seen == 4
    assert load(folder, {"tree": None}).values["tree"]["n"] == 5


def test_extra_state_is_passed_to_its_module(tmp_path: Path) -> None:
    saved, other = Scaled(), Scaled()
    saved.weight.data.fill_(6)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": saved})
    load(tmp_path, {"model": other})
    assert other.weight.tolist() == [6, 6, 6]


def _reversed(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(net.parameters())[::-1])


REFUSED: list[tuple[str, Callable[[nn.Module], dict[str, Any]]]] = [
    (r"Adam\b.*SGD", lambda m: {"optimizer": torch.optim.SGD(m.parameters())}),
    (r"Adam\b.*AdamW", lambda m: {"optimizer": torch.optim.AdamW(m.parameters())}),
    (
        "1 parameter groups.* 2",
        lambda m: {"optimizer": torch.optim.Adam([{"params": [p]} for p in [*m.parameters()][:2]])},
    ),
    (
        "group 0 has 6 parameters.* 1",
        lambda m: {"optimizer": torch.optim.Adam([next(m.parameters())])},
    ),
    (
        r"parameter 0 of group 0 .*\(3, 3\).* \(3,\)",
        lambda m: {"optimizer": _reversed(m)},
    ),
    (
        "state of StepLR, not of ExponentialLR",
        lambda m: {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(
                torch.optim.Adam(m.parameters()), 0.9
            )
        },
    ),
    (
        "'big' is int64.* 1099511627777 does not fit int32",
        lambda m: {"wide": {"big": torch.zeros(2, dtype=torch.int32), "hot": torch.zeros(2)}},
    ),
    (
        "'hot' is float32.* 70000.0 does not fit float16",
        lambda m: {
            "wide": {"big": torch.zeros(2).long(), "hot": torch.zeros(2, dtype=torch.float16)}
        },
    ),
    ("3 left over", lambda m: {"tree": {"a": torch.zeros(3)}}),
    (r"1 missing from it \(zz\)", lambda m: {"tree": {**tree(), "zz": torch.zeros(3)}}),
    (r"a is \(3,\).* \(4,\)", lambda m: {"tree": {**tree(), "a": torch.zeros(4)}}),
    (r"1 left over \(b.1\)", lambda m: {"tree": {**tree(), "b": [torch.zeros(2)]}}),
    (r"1 missing from it \(n\)", lambda m: {"tree": {**tree(), "n": torch.zeros(2)}}),
    (
        "entry 'model', is not the state of an optimizer",
        lambda m: {"model": torch.optim.AdamW(m.parameters())},
    ),
    (
        "entry 'model', is not the state of a scheduler",
        lambda m: {"model": StepLR(torch.optim.SGD(m.parameters()), 2)},
    ),
    ("expanded", lambda m: {"tree": {**tree(), "a": torch.zeros(1).expand(3)}}),
    ("'layer.weight' of the model is on meta", lambda m: {"model": Counting().to("meta")}),
    (
        "'a' is on meta.*to_empty",
        lambda m: {"tree": {**tree(), "a": torch.zeros(3, device="meta")}},
    ),
    (
        r"4 missing from it .*0\._extra_state\.mean",
        lambda m: {"model": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))},
    ),
]


def test_mismatch_is_rejected_before_loading(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = run
    for message, make in REFUSED:
        other = model()
        before = copy.deepcopy(other)
        given = make(other)
        with pytest.raises(GulliverError, match=message) as caught:
            load(folder, {"model": other, **given})
        assert "\n" not in str(caught.value), message
        assert same(other, before), message
        assert other[0].seen == 0, message
    with pytest.raises(GulliverError, match=r"step-0.* is step [0-9]+, not step 99"):
        load(next(folder.glob("step-*")), step=99)
    mine = {"a": torch.zeros(3), "other": torch.zeros(1)}
    loaded = load(folder, {"tree": mine}, strict=False)
    assert mine["a"].tolist() == [1, 1, 1]
    assert loaded.mismatches["tree"].missing == ["other"]
    assert loaded.mismatches["tree"].unexpected == ["b", "3", "n"]


def test_the_state_of_the_same_optimizer_loads_and_its_next_step_is_the_same(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, state = run
    other, wanted = model(), state["model"]
    optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    load(folder, {"model": other, "optimizer": optimizer})
    x = torch.randn(4, 3)
    for net, stepping in ((other, optimizer), (wanted, state["optimizer"])):
        stepping.zero_grad()
        net(x).square().sum().backward()
        stepping.step()
    assert same(other, wanted)


def test_two_values_for_one_parameter_are_refused(tmp_path: Path) -> None:
    def make(tied: bool) -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    for number, tied in enumerate((False, True)):
        with AsyncCheckpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(0, {"model": make(tied)})
    for ours in (make(True), Booster(LowLevelZeroPlugin(stage=1, verbose=False))):
        if isinstance(ours, Booster):
            model = make(True)
            ours.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loading = functools.partial(ours.load, model=model)
        else:
            model = ours
            loading = functools.partial(load, state={"model": model})
        before = model[0].weight.detach().clone()
        with pytest.raises(GulliverError, match=r"'1.weight' and '0.weight' are tied"):
            loading(tmp_path / "0")
        assert torch.equal(model[0].weight, before)
        loading(tmp_path / "1")
        assert torch.equal(model[0].weight, load(tmp_path / "1").values["model"]["0.weight"])


FITS = [
    ([1, 2**31 - 1], torch.int64, torch.int32, True),
    ([2**31], torch.int64, torch.int32, False),
    ([200], torch.uint8, torch.int8, False),
    ([-1], torch.int64, torch.uint64, False),
    ([2**63], torch.uint64, torch.int64, False),
    ([2], torch.int8, torch.bool, False),
    ([1, 0], torch.int64, torch.bool, True),
    ([2**24], torch.int64, torch.float32, True),
    ([2**24 + 1], torch.int64, torch.float32, False),
    ([2**63 - 1], torch.int64, torch.float64, False),
    ([1.5], torch.float32, torch.int64, False),
    ([3.0], torch.float32, torch.int8, True),
    ([2.0**63], torch.float64, torch.int64, False),
    ([float("nan")], torch.float32, torch.int32, False),
    ([1e-9, 0.1, float("inf"), float("nan")], torch.float32, torch.float16, True),
    ([65504.0, 65519.0], torch.float32, torch.float16, True),
    ([65520.0], torch.float32, torch.float16, False),
    ([3.4e38], torch.float32, torch.bfloat16, False),
    ([448.0], torch.float32, torch.float8_e4m3fn, True),
    ([500.0], torch.float32, torch.float8_e4m3fn, False),
    ([1 + 0j], torch.complex64, torch.float32, True),
    ([1 + 2j], torch.complex64, torch.float32, False),
    ([1e300 + 0j], torch.complex128, torch.complex64, False),
]


@pytest.mark.parametrize(("values", "saved", "target", "fits"), FITS)
def test_value_mismatches_are_detected(
    values: list[Any], saved: torch.dtype, target: torch.dtype, fits: bool
) -> None:
    tensor = torch.tensor(values, dtype=saved)
    assert (first_unrepresentable(tensor, target) is None) == fits
    assert always_fits(target, target)
    assert not always_fits(saved, target)


# What is broken, and who saved it


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _flip(place: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return flip


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("model.safetensors", _truncate, r"contains no complete.*model.safetensors, .*truncated"),
        ("model.safetensors", Path.unlink, r"contains no complete.*model.safetensors, .*not exist"),
        (
            "manifest.json",
            _flip(40),
            r"contains no complete.*manifest.json is (corrupted|truncated)",
        ),
        *(
            ("model.safetensors", _flip(place), r"model.safetensors, bytes 0 to .*: they are corr")
            for place in (0, 8, 30, 70)
        ),
        ("state.json", _flip(30), r"state.json, bytes 0 to .*: they are corrupted"),
    ],
)
def test_the_broken_file_of_the_only_step_is_named(
    run: tuple[Path, dict[str, Any]],
    name: str,
    spoil: Callable[[Path], None],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(run[0] / "step-00000001" / name)
    with pytest.raises(GulliverError, match=message) as caught:
        load(run[0], {"model": model()})
    assert "another checkpoint" not in str(caught.value) or "contains no" not in str(caught.value)
    assert "taking no other" not in caplog.text


def test_raw_load_says_that_a_booster_saved_an_optimizer(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    booster = Booster(LowLevelZeroPlugin(verbose=False))
    boosted, wrapped, *_ = booster.boost(plain, optimizer)
    booster.backward(boosted(torch.ones(1, 2)).sum(), wrapped)
    wrapped.step()
    booster.save(tmp_path, 1, boosted, wrapped)
    booster.close()
    other = nn.Linear(2, 2)
    state = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
    with pytest.raises(GulliverError, match=r"saved by a Booster.* use booster.load"):
        load(tmp_path, state)
    assert load(tmp_path, {"model": other}).step == 1
    assert torch.equal(other.weight, plain.weight)
