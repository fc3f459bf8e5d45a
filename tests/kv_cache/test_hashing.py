"""Digests of blocks, which identify cached prefixes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_cache.hashing import chain_digests, chain_root

ROOT = chain_root(None, None)
TOKENS = np.arange(12)


def compute_digests(
    tokens: np.ndarray = TOKENS, root: bytes = ROOT, overrides: dict[int, int] | None = None
) -> list[bytes]:
    return chain_digests(root, tokens, overrides or {}, range(len(tokens) // 4), 4)


def test_a_digest_covers_its_block_and_all_earlier_blocks() -> None:
    changed_tokens = TOKENS.copy()
    changed_tokens[5] = 99
    digests, changed_digests = compute_digests(), compute_digests(changed_tokens)
    assert digests[0] == changed_digests[0]
    assert digests[1] != changed_digests[1]
    assert digests[2] != changed_digests[2]


def test_digests_can_be_computed_block_by_block() -> None:
    full_digests, parent = compute_digests(), ROOT
    for block in range(3):
        (parent,) = chain_digests(parent, TOKENS, {}, range(block, block + 1), 4)
        assert parent == full_digests[block]


def test_only_full_blocks_have_digests() -> None:
    assert compute_digests(np.arange(11)) == compute_digests()[:2]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, ">i8"])
def test_digests_do_not_depend_on_the_dtype_of_the_tokens(dtype: str) -> None:
    assert compute_digests(TOKENS.astype(dtype)) == compute_digests()


def test_roots_differ_by_adapter_and_salt() -> None:
    roots = [chain_root(a, s) for a in (None, b"", b"a", b"ab") for s in (None, "", "a", "ba", "b")]
    assert len(set(roots)) == len(roots)


def test_an_override_differs_from_the_token_with_the_same_id() -> None:
    plain_digests, digests_77, digests_78 = (
        compute_digests(),
        compute_digests(overrides={5: 77}),
        compute_digests(overrides={5: 78}),
    )
    assert plain_digests[0] == digests_77[0]
    assert len({plain_digests[1], digests_77[1], digests_78[1]}) == 3
    assert compute_digests(overrides={5: 5})[1] != plain_digests[1]
    tokens_with_77 = TOKENS.copy()
    tokens_with_77[5] = 77
    assert compute_digests(tokens_with_77)[1] != digests_77[1]


@given(st.integers(-(2**70), 2**70))
def test_an_override_may_be_any_number(number: int) -> None:
    digest = compute_digests(overrides={0: number})[0]
    assert digest != compute_digests()[0]
    assert digest != compute_digests(overrides={0: number + 1})[0]


def test_hashing_does_not_change_the_tokens() -> None:
    tokens = TOKENS.copy()
    compute_digests(tokens, overrides={0: 1})
    np.testing.assert_array_equal(tokens, TOKENS)


def test_blocks_and_digests_are_the_same_in_every_process() -> None:
    script = """
from penstock.kv_cache import BlockPool
from penstock.kv_cache.hashing import chain_digests, chain_root
import numpy as np, sys
pool, log = BlockPool(9), []
for round in range(40):
    chain = chain_digests(chain_root(None, str(round % 3)), np.arange(16) // (1 + round % 5), {}, range(4), 4)
    known = [block for digest in chain if (block := pool.lookup(digest)) is not None]
    pool.retain(known)
    new = pool.allocate(4 - len(known))
    log.append((known, new))
    for block, digest in zip(new, (d for d in chain if pool.lookup(d) is None)):
        pool.register(block, digest)
    pool.release(known + new)
assert "torch" not in sys.modules
print(log)
"""
    logs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert logs[0] == logs[1]
    assert len(logs[0]) > 400
