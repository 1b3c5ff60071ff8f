"""The GPU's part of the sequence benchmark: its counting, on the CPU's kernel."""

from __future__ import annotations

import pytest
import torch
from benchmarks._harness import Report
from benchmarks._sequence_gpu import Sizes, one_block, one_call, report_gpu, report_kernel
from benchmarks._sequence_shared import Options

SMALL = Sizes(heads=2, head_dim=16, length=256, blocks=(64, 128), dtype=torch.float32)


def _report() -> Report:
    return Report("sequence", "attention", ("part", "of", "found", "of what", "ratio"))


def test_operations_are_those_of_the_products() -> None:
    assert SMALL.operations(64, 32, False) == 2 * (2 * 64 * 32 * 16) * 2
    assert SMALL.operations(64, 32, True) == 2.5 * SMALL.operations(64, 32, False)


@pytest.mark.parametrize("kernel", ["cpu flash", "reference"])
def test_each_block_length_has_a_forward_and_a_backward(kernel: str) -> None:
    report = _report()
    report_kernel(SMALL, kernel, "cpu", 2, report)
    assert len(report.rows) == 4
    assert all(value > 0 for value in report.figures.values())
    assert len(report.figures) == 6


def test_what_is_timed_computes() -> None:
    for make in (one_block, one_call):
        forward, backward = make(SMALL, "cpu flash", "cpu", 64)
        forward()
        backward()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so() -> None:
    report = _report()
    report_gpu(Options(), report)
    assert report.rows == []
    assert "no CUDA device" in report.notes[0]
    assert report.figures == {}


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    report = _report()
    report_gpu(Options(quick=True, rounds=2), report)
    assert report.rows
