"""Random numbers as a function of (seed, position) alone: no generator is kept anywhere."""

from __future__ import annotations

import numpy as np

_GAMMA = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF


def splitmix64(seed: int, position: int) -> int:
    """Output number ``position`` of the splitmix64 generator started at ``seed`` (Steele et al. 2014).

    >>> hex(splitmix64(0, 0))
    '0xe220a8397b1dcdaf'
    """
    return int(_splitmix64(as_words([seed]), np.array([position], dtype=np.uint64))[0])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each (seed, position), from the upper 53 bits of `splitmix64`.

    Args:
        seeds: ``[R]`` uint64.
        positions: ``[R]`` integers.
    """
    bits = _splitmix64(seeds, positions.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def as_words(seeds: list[int]) -> np.ndarray:
    """Seeds of either sign as ``[R]`` uint64, modulo 2**64."""
    return np.array([seed & _WORD for seed in seeds], dtype=np.uint64)


def _splitmix64(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Vigna's public-domain finaliser over ``seed + (position + 1) * gamma``, all modulo 2**64."""
    with np.errstate(over="ignore"):
        z = seeds + (positions + np.uint64(1)) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = z ^ (z >> np.uint64(31))
        return mixed
