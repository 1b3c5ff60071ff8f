"""Seeds that depend on what they are for."""

from __future__ import annotations

import hashlib


def derive(*parts: int) -> int:
    """A 63-bit seed from several numbers: streams that differ in any of them are independent."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
