"""Random numbers as functions of seed and position, without a generator that has state."""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_ONE, _DROPPED_BITS = np.uint64(1), np.uint64(11)
_UINT64_MASK = 0xFFFFFFFFFFFFFFFF


def splitmix64(seed: int, position: int) -> int:
    """Return output number ``position`` of the splitmix64 generator with this seed (Steele et al. 2014).

    >>> hex(splitmix64(0, 0))
    '0xe220a8397b1dcdaf'
    """
    return int(_splitmix64(as_uint64([seed]), np.array([position], dtype=np.uint64))[0])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a float64 in [0, 1) for each (seed, position), from the upper 53 bits of `splitmix64`.

    Args:
        seeds: ``[R]`` uint64.
        positions: ``[R]`` integers.
    """
    bits = _splitmix64(seeds, positions.astype(np.uint64))
    return (bits >> _DROPPED_BITS).astype(np.float64) * 2.0**-53


def as_uint64(seeds: list[int]) -> np.ndarray:
    """Return positive or negative seeds as ``[R]`` uint64, modulo 2**64."""
    return np.array([seed & _UINT64_MASK for seed in seeds], dtype=np.uint64)


def _splitmix64(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Apply Vigna's public-domain finaliser to ``seed + (position + 1) * gamma``, all modulo 2**64."""
    z = seeds + (positions + _ONE) * _GAMMA
    z = (z ^ (z >> _SHIFTS[0])) * _MIXERS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _MIXERS[1]
    mixed: np.ndarray = z ^ (z >> _SHIFTS[2])
    return mixed
