"""The native kernels against numpy, without torch, for a processor that is emulated.

    python -m tests.native_kernels OPENMP CORE KERNELS DECODER

The arguments are files: the OpenMP library that torch brings, and the extensions. Prints the sets
of instructions that ran. Importing torch takes minutes under an emulator, and numpy a second.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
import zlib
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np

draw = np.random.default_rng(0)


def loaded(file: str) -> Any:
    name = Path(file).name.partition(".")[0]
    spec = importlib.util.spec_from_file_location(
        name, file, loader=ExtensionFileLoader(name, file)
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(*shape: int) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def halved(x: np.ndarray) -> np.ndarray:
    """bfloat16 as the upper 16 bits; to the nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def whole(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def check_checksums(core: Any) -> None:
    data = draw.integers(0, 256, 5000, dtype=np.uint8)
    for start, nbytes in itertools.product((0, 1, 7), (*range(0, 300, 7), 1024, 4096, 4993)):
        part = data[start : start + nbytes]
        for tables in (False, True):
            assert core.crc32(part.ctypes.data, nbytes, 77, tables) == zlib.crc32(part, 77)


def check_decoder(decoder: Any, name: str) -> None:
    check_rows(decoder.Kernel(name))
    check_attention(decoder, decoder.Kernel(name))


def check_rows(kernel: Any) -> None:
    for count, outputs in itertools.product((1, 2, 5, 6, 7, 13), (1, 6, 131)):
        x, weight, bias = normal(count, 80), normal(outputs, 80), normal(outputs)
        out = np.zeros((count, outputs), np.float32)
        matrix = [weight.ctypes.data, 0, bias.ctypes.data, outputs, 80, 0]
        kernel.multiply(x.ctypes.data, out.ctypes.data, count, matrix, 2)
        want = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
        np.testing.assert_allclose(out, want, atol=2e-5)


def check_products(kernels: Any, name: str) -> None:
    table = kernels.Table(name)
    for count, (kind, inputs), outputs, half in itertools.product(
        (1, 3, 9), ((0, 200), (1, 200), (2, 256)), (1, 6, 130), (False, True)
    ):
        x = normal(count, inputs)
        x[0, 3] = 20.0  # an outlier, above the threshold
        given = halved(x) if half else x
        x = whole(given)
        bias, out = normal(outputs), np.zeros((count, outputs), given.dtype)
        if kind == 2:
            codes = draw.integers(-8, 8, (outputs, inputs // 128, 128))
            low, high = np.split(codes + 8, 2, axis=2)
            values = (low | high << 4).astype(np.uint8)
            scale = draw.uniform(0.5, 1, (outputs, inputs // 128)).astype(np.float32)
            weight = (codes * scale[..., None]).reshape(outputs, inputs)
            sums = None
        else:
            values = draw.integers(-127, 128, (outputs, inputs), dtype=np.int8)
            scale = draw.uniform(0.5, 1, outputs).astype(np.float32)
            weight, sums = values * scale[:, None], values.sum(1, dtype=np.int32)
        threshold = np.inf if kind == 1 else 6.0
        table.run(
            *(kind, given.ctypes.data, out.ctypes.data, half, count, inputs, outputs),
            *(values.ctypes.data, scale.ctypes.data, 0 if sums is None else sums.ctypes.data),
            *(bias.ctypes.data, 0, float(threshold)),
        )
        if kind != 1:
            outliers = np.abs(x) >= threshold
            largest = np.abs(np.where(outliers, 0, x)).max(1, keepdims=True)
            # In float32 as the kernels round: of bfloat16 many quotients are ties.
            codes = np.rint(x * (np.float32(127) / largest))
            x = np.where(outliers, x, codes * (largest.astype(np.float64) / 127))
        want = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
        np.testing.assert_allclose(whole(out), want, rtol=5e-3 if half else 1e-4, atol=2e-2)


def check_attention(decoder: Any, kernel: Any) -> None:
    heads, kv_heads, dim, size = 4, 2, 16, 4
    tables = [[3, 9, 1, 14, 7, 20, 11], [5, 2, 8, 10, 4, 6, 12, 13]]
    places = [*range(19, 24), 24]
    sequences = decoder.Sequences([0, 5], [5, 1], [19, 24], tables, places, [[], []])
    for half, window in itertools.product((False, True), (0, 6)):
        query, out = normal(heads, 6, dim), np.zeros((6, heads, dim), np.float32)
        keys, values = (normal(24, kv_heads, size, dim) for _ in range(2))
        keys, values = (halved(t) if half else t for t in (keys, values))
        kernel.attend(
            *(sequences, *(array.ctypes.data for array in (query, out, keys, values))),
            *([2 * half, 6 * dim, dim, heads, kv_heads, dim, size], 0.3, window, 0, 2),
        )
        want = np.zeros((6, heads, dim))
        for token, head in itertools.product(range(6), range(heads)):
            blocks, length = tables[int(token == 5)], places[token] + 1
            seen = slice(max(0, length - window) if window else 0, length)
            k, v = (
                np.concatenate(list(whole(t)[blocks, head // 2])).astype(np.float64)[seen]
                for t in (keys, values)
            )
            scores = np.exp(0.3 * (k @ query[head, token]))
            want[token, head] = scores @ v / scores.sum()
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def main(openmp: str, core: str, kernels: str, decoder: str) -> None:
    # The extensions find their OpenMP in what the process has loaded, as they find that of torch.
    ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    check_checksums(loaded(core))
    print("checksums")
    for file, check in ((kernels, check_products), (decoder, check_decoder)):
        extension = loaded(file)
        for name in extension.instructions():
            check(extension, name)
            print(Path(file).name.partition(".")[0], name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
