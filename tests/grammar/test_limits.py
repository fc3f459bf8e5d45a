"""Limits of costly grammars: a request above a limit fails with an error and affects no other request.

Also tests the two grammar libraries, and the output of processes with grammars.
"""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.grammars import EOS, make_grammar_context, new_compiler, wait_until_ready

from penstock.errors import InputError
from penstock.grammar import grammar_bitmask
from penstock.grammar.llguidance_backend import LLGuidanceMatcher
from penstock.pipelines.core import TextContext

pytest.importorskip("llguidance")
DOUBLING_RULES = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30 ::= "c"'
NESTED_COUNTS = "([a-z]{0,100}[0-9]{0,100}){0,100}"
LARGE_NESTED_COUNTS = {"type": "string", "pattern": "^([a-z]{0,1000}[0-9]{0,1000}){0,1000}$"}


def generate_text(context: TextContext, text: str) -> None:
    """Compute the mask and update the context for each byte, as in generation."""
    for token in text.encode():
        grammar_bitmask([context], np.array([0]), EOS + 1)
        context.update(token)


@pytest.mark.parametrize(
    ("kind", "grammar", "text"),
    [
        ("ebnf", DOUBLING_RULES, "c" * 100),
        ("regex", NESTED_COUNTS, "abc123" * 3),
        ("json_schema", LARGE_NESTED_COUNTS, '"' + "abc123" * 3),
    ],
)
def test_costly_grammars_below_the_limits_are_matched(kind: str, grammar: object, text: str) -> None:
    context = wait_until_ready(new_compiler(), make_grammar_context(kind, grammar))
    generate_text(context, text)
    assert context.generated_tokens.tolist() == list(text.encode())


AMBIGUOUS_RULES = 'root ::= e\ne ::= e e | [a-z] | "(" e ")"'


def test_a_mask_above_the_limit_ends_only_its_request_and_the_error_names_the_grammar() -> None:
    grammars = new_compiler(mask_items=200)
    costly_context = wait_until_ready(grammars, make_grammar_context("ebnf", AMBIGUOUS_RULES))
    other_context = wait_until_ready(grammars, make_grammar_context("regex", "[ab]*"))
    expected = grammar_bitmask([other_context], np.array([0]), EOS + 1)
    assert expected is not None
    for _ in range(300):
        mask = grammar_bitmask([costly_context, other_context], np.array([0, 1]), EOS + 1)
        assert mask is not None
        assert mask[1].tolist() == expected[0].tolist()
        other_context.update(ord("a"))
        try:
            costly_context.update(ord("a"))
        except InputError as error:
            message = str(error)
            break
    assert message.startswith("the ebnf grammar 'root ::= e")
    assert "too complex" in message
    assert "--grammar-mask-items" in message
    assert isinstance(costly_context.matcher, LLGuidanceMatcher)
    assert costly_context.matcher.failure is not None
    mask = torch.zeros((1, EOS // 32 + 1), dtype=torch.int32)
    costly_context.matcher.fill_next_token_bitmask(mask)  # a batch with a failed matcher must not raise
    assert mask.all()


def test_a_grammar_that_has_reached_a_limit_is_compiled_again() -> None:
    """All requests of a compiled grammar share one count of lexer states. Compiling again resets it."""
    grammars = new_compiler(max_states=400)
    pattern, rng = "[ab]*a[ab]{30}", random.Random(0)
    for _ in range(2):
        context = wait_until_ready(grammars, make_grammar_context("regex", pattern))
        with pytest.raises(InputError, match="too complex"):
            generate_text(context, "".join(rng.choices("ab", k=480)))
        assert len(context.generated_tokens) > 10


def test_a_grammar_with_too_many_symbols_is_refused() -> None:
    grammar = 'root ::= "(" root ")" | "x" | ' + " | ".join(f'"{number}" root' for number in range(300))
    with pytest.raises(InputError, match="too complex"):
        wait_until_ready(new_compiler(max_symbols=100), make_grammar_context("ebnf", grammar))
    wait_until_ready(new_compiler(), make_grammar_context("ebnf", grammar))


def test_the_end_token_is_accepted_only_after_a_complete_output() -> None:
    context = wait_until_ready(new_compiler(), make_grammar_context("regex", "(?:.|\n)*x"))
    assert context.matcher is not None
    assert not context.matcher.accept_token(EOS)
    assert context.matcher.accept_token(ord("x"))
    assert context.matcher.accept_token(EOS)
    assert context.matcher.is_terminated()
    context.matcher.rollback(2)
    assert not context.matcher.is_completed()


def test_matchers_of_both_libraries_can_share_a_batch() -> None:
    xgr = pytest.importorskip("xgrammar")
    vocabulary = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    tokenizer_info = xgr.TokenizerInfo(
        vocabulary, xgr.VocabType.RAW, vocab_size=EOS + 1, stop_token_ids=[EOS]
    )
    compiled_grammar = xgr.GrammarCompiler(tokenizer_info, cache_enabled=False).compile_grammar(
        'root ::= "ab"'
    )
    context = TextContext(prompt=[1], max_length=50, tokens=np.array([1]))
    context.set_matcher(xgr.GrammarMatcher(compiled_grammar))
    mask = grammar_bitmask(
        [context, wait_until_ready(new_compiler(), make_grammar_context("regex", "c"))],
        np.array([0, 1]),
        EOS + 1,
    )
    assert mask is not None
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, bitorder="little")[:, : EOS + 1]
    assert [np.flatnonzero(row).tolist() for row in bits] == [[ord("a")], [ord("c")]]
    context.update(ord("a"))


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_the_backend_setting_selects_the_library(backend: str) -> None:
    pytest.importorskip(backend)
    context = wait_until_ready(new_compiler(backend=backend), make_grammar_context("regex", "ab"))
    assert type(context.matcher).__module__.startswith("penstock" if backend == "llguidance" else "xgrammar")
    generate_text(context, "ab")


def test_a_process_with_a_grammar_prints_nothing_at_exit_and_does_not_import_xgrammar() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.grammars import *\n"
        "context = wait_until_ready(new_compiler(), make_grammar_context('regex', 'ab'))\n"
        "print(sorted({'xgrammar', 'triton', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_warm_cache_prints_nothing_on_standard_error() -> None:
    """If triton is installed, an import of torch._dynamo would print leak reports at exit."""
    command = [sys.executable, "-m", "penstock", "warm-cache", "--model-path", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert "tokenizer" in result.stdout
