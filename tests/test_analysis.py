"""An analysis is what a real step saves, computes and takes."""

from __future__ import annotations

import copy

import pytest
import torch

from gulliver.memory import follow_step
from gulliver.plan.analysis import analyse
from tests.analysis_cases import CASES, counted_flops, saved_bytes


@pytest.mark.parametrize("case", CASES)
def test_an_analysis_is_what_a_real_step_counts(case: str) -> None:
    if case == "unet":
        pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model, batch = CASES[case]()
    found = analyse(model, batch)
    assert not found.opaque
    assert not found.notes
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
