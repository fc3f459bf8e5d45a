"""Measure the time of grammars per decode step: token bitmasks of a batch, and the search for forced tokens.

    python benchmarks/grammar_masks.py TOKENIZER                  # a folder, best with a large vocabulary
    python benchmarks/grammar_masks.py TOKENIZER --batch 32 --steps 200 --json out.json
    python benchmarks/grammar_masks.py TOKENIZER --backends llguidance   # without the extra xgrammar

No model runs. The next token of each context comes from a document that the context's JSON schema allows. The
contexts start at different positions of their documents, as in a batch of a running server. The grammar back
ends run one after another. llguidance fills the bitmasks of a batch with up to four threads. The machine
should be idle.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from against_transformers import describe_machine

from penstock.config import StructuredOutputConfig
from penstock.grammar import GrammarCompiler, forced_tokens, grammar_bitmask
from penstock.pipelines import TextTokenizer
from penstock.pipelines.core import Grammar, TextContext

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WORKLOADS: list[tuple[dict[str, Any], Any]] = [
    (
        {
            "properties": {"name": STRING, "age": INTEGER, "tags": {"type": "array", "items": STRING}},
            "required": ["name", "age", "tags"],
        },
        {"name": "Anna Maria Lund, of the house by the sea", "age": 37, "tags": ["one", "two words"]},
    ),
    ({}, {"name": "Anna Maria Lund, of the house by the sea", "age": 37, "tags": [1.5, {"a": None}]}),
    (
        {
            "properties": {
                "id": {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"},
                "date": {"type": "string", "format": "date-time"},
            },
            "required": ["id", "date"],
        },
        {"id": "abc-1234", "date": "2024-02-03T10:11:12Z"},
    ),
    (
        {
            "properties": {
                "text": {"type": "string", "minLength": 5, "maxLength": 200},
                "kind": {"enum": ["alpha", "beta", "gamma delta"]},
            },
            "required": ["text", "kind"],
        },
        {"text": "some text of a bounded length, with words", "kind": "gamma delta"},
    ),
]
"""Pairs of a JSON schema and a document that it allows."""


def main() -> None:
    """Measure the back ends that the command line selects, and print the quantiles of each time in ms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backends", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = TextTokenizer(options.tokenizer, max_length=4096)
    print(f"{describe_machine()}\n{options.batch} rows, vocabulary of {tokenizer.vocab_size}, milliseconds")
    report: dict[str, Any] = {"machine": describe_machine(), "batch": options.batch}
    for backend in options.backends:
        report[backend] = {}
        for name, values in _measure(tokenizer, backend, options.batch, options.steps).items():
            p50, p90, p99 = (1000 * float(np.quantile(values, level)) for level in (0.5, 0.9, 0.99))
            report[backend][name] = [p50, p90, p99]
            print(f"{backend:10} {name:8} p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def _measure(tokenizer: TextTokenizer, backend: str, batch: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each operation.

    ``compile`` has one value per grammar except the first. ``masks`` and ``forced`` have one value per decode
    step.
    """
    config = StructuredOutputConfig(compile_timeout=600.0, backend=backend)
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, config=config)
    seconds: dict[str, list[float]] = {"compile": [], "masks": [], "forced": []}
    replays = []
    for index in range(batch):
        start = time.perf_counter()
        replays.append(_DocumentReplay(tokenizer, grammars, index))
        # The first compilation also reads the tokenizer. Later contexts find their grammar in a cache.
        if 0 < index < len(WORKLOADS):
            seconds["compile"].append(time.perf_counter() - start)
    contexts, sequences = [replay.context for replay in replays], np.arange(batch)
    for _ in range(steps):
        start = time.perf_counter()
        grammar_bitmask(contexts, sequences, tokenizer.vocab_size)
        masks_end = time.perf_counter()
        for context in contexts:
            forced_tokens(context, 64, tokenizer.vocab_size)
        seconds["forced"].append(time.perf_counter() - masks_end)
        seconds["masks"].append(masks_end - start)
        for replay in replays:
            replay.step()
    return seconds


class _DocumentReplay:
    """A context whose matcher accepts the tokens of a document repeatedly.

    Args:
        tokenizer: encodes the document.
        grammars: compiles the JSON schema.
        index: the index in the batch, which selects the document and the position where the replay starts.
    """

    def __init__(self, tokenizer: TextTokenizer, grammars: GrammarCompiler, index: int) -> None:
        schema, document = WORKLOADS[index % len(WORKLOADS)]
        text = json.dumps({"type": "object"} | schema)
        self.context = TextContext(
            prompt=[1],
            max_length=4096,
            tokens=np.array([1]),
            grammar=Grammar("json_schema", text),
            eos_token_ids=tokenizer.eos_token_ids,
        )
        while not grammars.ready(self.context):
            time.sleep(0.001)
        self._tokens = tokenizer.encode_text(json.dumps(document), add_special_tokens=False).tolist()
        self._next_index = 0
        for _ in range(3 * (index // len(WORKLOADS))):
            self.step()

    def step(self) -> None:
        """Accept the next token of the document, or reset the matcher at the end of the document."""
        matcher = self.context.matcher
        assert matcher is not None
        if self._next_index == len(self._tokens):
            matcher.reset()
            self._next_index = 0
        else:
            assert matcher.accept_token(self._tokens[self._next_index])
            self._next_index += 1


if __name__ == "__main__":
    main()
