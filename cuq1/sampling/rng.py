"""Counter-based random numbers: Philox4x32-10.

A number is a pure function of (request seed, token position, purpose). Nothing
that ran before, no batch layout and no rank can change it, and every rank of a
tensor-parallel run draws the same one without a broadcast.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011); the constants and the known answers of the tests are Random123's.
"""

import secrets
from enum import IntEnum

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

SEED_LIMIT = 1 << 64


class Purpose(IntEnum):
    """What a number decides about the token at its position: each decision has a stream of its own."""

    DRAFT = 0  # which token the draft proposes
    ACCEPT = 1  # whether the proposal is accepted
    TARGET = 2  # the token drawn from the target: first token, replacement or bonus


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox on four 32-bit counter words and two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) for one decision about the token at `position`.

    It is a multiple of 2**-24, exact in FP32, so that every engine compares the
    same value whatever precision it compares in.
    """
    word = philox4x32(
        (position & _MASK, position >> 32, int(purpose), 0),
        (seed & _MASK, seed >> 32),
    )[0]
    return (word >> 8) * 2.0**-24


def fresh_seed() -> int:
    """An unpredictable 64-bit seed, for a request that names none."""
    return secrets.randbits(64)
