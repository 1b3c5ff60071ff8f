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
    check_rows(decoder, name)
    check_forward(decoder, name)


def quantised(outputs: int, inputs: int, kind: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values as stored, their scales, and the weights they stand for (4: int4, others int8)."""
    if kind != 4:
        values = draw.integers(-127, 128, (outputs, inputs), dtype=np.int8)
        scale = draw.uniform(0.5, 1, outputs).astype(np.float32)
        return values, scale, values * scale[:, None]
    codes = draw.integers(0, 16, (outputs, inputs // 32, 32))
    low, high = np.split(codes, 2, axis=2)
    pairs = draw.uniform(0.5, 1, (outputs, inputs // 32, 2)).astype(np.float16)
    known = pairs.astype(np.float64)
    weight = (codes * known[..., :1] - known[..., 1:]).reshape(outputs, inputs)
    pairs[..., 1] *= -1
    return (low | high << 4).astype(np.uint8), pairs, weight


def check_rows(decoder: Any, name: str) -> None:
    for count, outputs, kind in itertools.product(
        (1, 2, 5, 6, 7, 13, 35), (1, 6, 131), (0, 2, 3, 4, 5)
    ):
        inputs = {4: 288, 5: 320}.get(kind, 80)
        x, bias, scale = normal(count, inputs), normal(outputs), np.zeros(0, np.float32)
        values = weight = normal(outputs, inputs)
        if kind == 2:
            values = halved(weight)
            weight = whole(values)
        elif kind:
            values, scale, weight = quantised(outputs, inputs, kind)
        out = np.zeros((count, outputs), np.float32)
        matrix = [*(a.ctypes.data for a in (values, scale, bias)), outputs, inputs, kind]
        decoder.multiply(name, x.ctypes.data, out.ctypes.data, count, matrix, 2)
        if kind == 5 and name in ("avx512-vnni", "avx512-bf16") and outputs >= 12:
            x = rounded(x)
        if kind == 2 and name == "avx512-bf16" and outputs >= 12:
            x = whole(halved(x))
        want = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-5 * np.abs(want).max())


def rounded(x: np.ndarray) -> np.ndarray:
    """To bytes, with a scale per 32 values; in float32 as the kernels round."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(2, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / most))
    return (codes.astype(np.float64) * (most.astype(np.float64) / 127)).reshape(x.shape)


def check_products(kernels: Any, name: str) -> None:
    table = kernels.Table(name)
    for count, outputs in itertools.product((1, 3, 9), (1, 6, 130)):
        x = normal(count, 200)
        x[0, 3] = 20.0  # an outlier, above the threshold
        bias, out = normal(outputs), np.zeros((count, outputs), np.float32)
        values, scale, weight = quantised(outputs, 200, 3)
        sums, given = values.sum(1, dtype=np.int32), (x, out)
        table.run(
            *(*(array.ctypes.data for array in given), count, 200, outputs),
            *(array.ctypes.data for array in (values, scale, sums, bias)),
            *(0, 6.0),
        )
        outliers = np.abs(x) >= 6.0
        largest = np.abs(np.where(outliers, 0, x)).max(1, keepdims=True)
        # In float32 as the kernels round.
        codes = np.rint(x * (np.float32(127) / largest))
        rounded = np.where(outliers, x, codes * (largest.astype(np.float64) / 127))
        want = rounded.astype(np.float64) @ weight.T.astype(np.float64) + bias
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-2)


def check_forward(decoder: Any, name: str) -> None:
    """One layer over two sequences, whose blocks are mixed, against its definition."""
    hidden, heads, kv_heads, dim, inner, words, size = 32, 4, 2, 16, 48, 40, 4
    tables = [[3, 9, 1, 14, 7, 20, 11], [5, 2, 8, 10, 4, 6, 12, 13]]
    starts, counts = (19, 24), (5, 1)
    places = [*range(19, 24), 24]
    sides = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden)]
    sides += [(hidden, heads * dim), (inner, hidden), (inner, hidden), (hidden, inner)]
    q, k, v, o, gate, up, down = weights = [normal(*side) / 4 for side in sides]
    embedding, head, norms = normal(words, hidden), normal(words, hidden), normal(3, hidden)
    tokens = draw.integers(0, words, 6)
    for half, window in itertools.product((False, True), (0, 6)):
        kept = [normal(24, kv_heads, size, dim) for _ in range(2)]
        kept = [halved(t) if half else t for t in kept]
        made = decoder.Decoder(
            *(name, [hidden, heads, kv_heads, dim, inner, words, dim, size, 2 * half, 0]),
            *([1e-6, 0.3, 1.0], plain(embedding), plain(head), norms[2].ctypes.data),
            [([0.0] * (dim // 2), 1.0)],
        )
        before = [norms[0].ctypes.data, norms[1].ctypes.data, 0, 0, 0, 0]
        made.add_layer(
            [plain(w) for w in weights], before, window, 0, *(t.ctypes.data for t in kept)
        )
        sequences = decoder.Sequences([0, 5], counts, starts, tables, places, [[], []])
        out = np.zeros((6, words), np.float32)
        made.run(sequences, tokens.tolist(), list(range(6)), out.ctypes.data, 2)
        # Positions do not turn here. The decoder has written the new keys and values.
        x = embedding[tokens].astype(np.float64)
        query = (normed(x, norms[0]) @ q.T).reshape(6, heads, dim)
        attended = np.zeros((6, heads, dim))
        for token, one in itertools.product(range(6), range(heads)):
            blocks, length = tables[int(token == 5)], places[token] + 1
            seen = slice(max(0, length - window) if window else 0, length)
            keys, values = (
                np.concatenate(list(whole(t)[blocks, one // 2])).astype(np.float64)[seen]
                for t in kept
            )
            scores = np.exp(0.3 * (keys @ query[token, one]))
            attended[token, one] = scores @ values / scores.sum()
        x += attended.reshape(6, -1) @ o.T
        between = normed(x, norms[1])
        wide = between @ gate.T
        x += (wide / (1 + np.exp(-wide)) * (between @ up.T)) @ down.T
        np.testing.assert_allclose(out, normed(x, norms[2]) @ head.T, rtol=1e-3, atol=1e-3)
        new = normed(embedding[tokens].astype(np.float64), norms[0])
        for t, w in zip(kept, (k, v), strict=True):
            got = whole(t)[tables[1][6], :, 0].reshape(-1)
            np.testing.assert_allclose(got, new[5] @ w.T, rtol=1e-2 if half else 1e-5, atol=1e-2)


def plain(weight: np.ndarray) -> list[int]:
    return [weight.ctypes.data, 0, 0, *weight.shape, 0]


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


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
