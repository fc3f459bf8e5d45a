"""The table of combinations of features: each cell is tried on the embedded model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
from support.documents import ROOT, write_adapter

from penstock import LLM, GenerationOutput, SamplingParams
from penstock.errors import UnsupportedFeatureError
from penstock.pipelines.core import Grammar

PAGE = (ROOT / "docs" / "features.md").read_text()
PROMPT = "Once upon a time there was a little dog named Max. " * 6
BANNED = 13
NOT_OFFERED = {frozenset(("n", "stream")), frozenset(("beams", "stream"))}
"""Pairs of features that different methods offer, so that no call can combine them."""

Check = Callable[[LLM, list[GenerationOutput]], None]


@dataclass(frozen=True)
class Feature:
    """The arguments that request a feature, and a check that it was applied."""

    config: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Check = lambda llm, outputs: None


def has_no_banned(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert not any(BANNED in output.token_ids for output in outputs)


def has_logprobs(llm: LLM, outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        assert output.log_probabilities is not None
        assert len(output.log_probabilities.token_log_probabilities) == len(output.token_ids) > 0


def has_prompt_logprobs(llm: LLM, outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        assert output.prompt_log_probabilities is not None
        count = len(output.prompt_log_probabilities.token_log_probabilities)
        assert count == len(output.prompt_token_ids) - 1


def fits_the_grammar(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert all(re.fullmatch("[a-c]{5}", output.text) for output in outputs)


def drafts(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert llm.pipeline.proposer is not None


def adapts(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert llm.pipeline.model.lora_manager is not None


def are_two(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert [output.index for output in outputs] == [0, 1]


def is_cached(llm: LLM, outputs: list[GenerationOutput]) -> None:
    cached = [output.num_cached_tokens > 0 for output in outputs]
    # Without log probabilities of the prompt; of several outputs only the first one has them.
    assert cached[0] == (outputs[0].prompt_log_probabilities is None)


FEATURES = {
    "sampling": Feature(
        params={
            "temperature": 0.8,
            "top_k": 0,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.1,
            "banned_token_ids": [BANNED],
            "logit_bias": {20: 1.5},
            "seed": 1,
        },
        check=has_no_banned,
    ),
    "logprobs": Feature(options={"logprobs": 2}, check=has_logprobs),
    "echo": Feature(options={"prompt_logprobs": 0}, check=has_prompt_logprobs),
    "grammar": Feature(options={"grammar": Grammar("regex", "[a-c]{5}")}, check=fits_the_grammar),
    "speculation": Feature(config={"speculative_method": "ngram"}, check=drafts),
    "lora": Feature(config={"lora": "tone"}, options={"adapter": "tone"}, check=adapts),
    "n": Feature(options={"n": 2}, check=are_two),
    "stream": Feature(),
    "prefix": Feature(check=is_cached),
    "deterministic": Feature(config={"deterministic": True}),
    "beams": Feature(),
}
OF_BEAMS = {"n": {"num_return_sequences": 2}, "logprobs": {}}
"""Feature -> the arguments of `LLM.beam_search` that request it; empty if beam search always has it."""
CELLS = [*combinations(FEATURES, 2)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLM]]:
    """Opens the embedded model, each configuration once."""
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "tone")
    models: dict[str, LLM] = {}

    def open_model(**config: Any) -> LLM:
        if "lora" in config:
            config["lora"] = [f"tone={adapter}"]
        return models.setdefault(json.dumps(config), LLM("demo", **config))

    yield open_model
    for llm in models.values():
        llm.close()


def cell_of(first: str, second: str) -> str:
    """Return the page's cell for two features."""
    table = PAGE.partition("## What combines with what")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    header, body = rows[0], {row[0]: row for row in rows[1:]}
    assert set(header[1:]) | set(body) == set(FEATURES)
    return body[second][header.index(first)]


@pytest.mark.parametrize(("first", "second"), CELLS)
def test_a_cell(first: str, second: str, opened: Callable[..., LLM]) -> None:
    said = cell_of(first, second)
    if said == "n/a":
        is_beams = second == "beams"
        assert frozenset((first, second)) in NOT_OFFERED or (is_beams and is_no_parameter_of_beams(first))
        return
    parts = [FEATURES[first], FEATURES[second]]
    llm = opened(**{name: value for part in parts for name, value in part.config.items()})
    if said == "refused":
        with pytest.raises(UnsupportedFeatureError):
            answers(llm, (first, second))
        return
    assert said.startswith("yes"), said
    times = 2 if "prefix" in (first, second) else 1
    for _ in range(times):
        outputs = answers(llm, (first, second))
    for part in parts:
        part.check(llm, outputs)


def is_no_parameter_of_beams(name: str) -> bool:
    offered = inspect.signature(LLM.beam_search).parameters
    wanted = {*FEATURES[name].options, *(("sampling_params",) if FEATURES[name].params else ())}
    return bool(wanted) and not wanted & set(offered)


def answers(llm: LLM, names: tuple[str, str]) -> list[GenerationOutput]:
    parts = [FEATURES[name] for name in names]
    options = {name: value for part in parts for name, value in part.options.items()}
    if "beams" in names:
        for name in names:
            if name in OF_BEAMS:
                options = OF_BEAMS[name]
        return llm.beam_search(PROMPT, num_beams=2, max_new_tokens=6, **options)
    given = {name: value for part in parts for name, value in part.params.items()}
    params = SamplingParams(**{"max_new_tokens": 12, **given})
    if "stream" in names:
        stream = llm.stream(PROMPT, params, **options)
        assert "".join(stream) == stream.output.text
        return [stream.output]
    return llm.generate(PROMPT, params, **options)


def test_each_feature_has_a_row_and_a_section() -> None:
    _, _, rest = PAGE.partition("| feature |")
    table = rest.partition("\n\n")[0]
    sections = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    linked = re.findall(r"^\| \[([^\]]*)\]\(#([^)]*)\)", table, flags=re.MULTILINE)
    assert [name for name, _ in linked] == [
        section[0].lower() + section[1:] if section != "LoRA" else section for section in sections
    ]
    for name, anchor in linked:
        assert anchor == name.lower().replace(" ", "-")


def test_every_cell_is_tried() -> None:
    assert len(CELLS) == len(FEATURES) * (len(FEATURES) - 1) // 2 == 55
