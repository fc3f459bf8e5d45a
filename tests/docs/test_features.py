"""Each combination of two features works, is refused or is impossible, as docs/features.md states."""

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
BANNED_TOKEN = 13
IMPOSSIBLE_PAIRS = {frozenset(("n", "stream")), frozenset(("beams", "stream"))}
"""Pairs of features that belong to different methods, so no call can combine them."""

Check = Callable[[LLM, list[GenerationOutput]], None]


@dataclass(frozen=True)
class Feature:
    """The arguments that select a feature, and a check that it was applied."""

    config: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Check = lambda llm, outputs: None


def assert_no_banned_tokens(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert not any(BANNED_TOKEN in output.token_ids for output in outputs)


def assert_log_probabilities(llm: LLM, outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        assert output.log_probabilities is not None
        assert len(output.log_probabilities.token_log_probabilities) == len(output.token_ids) > 0


def assert_prompt_log_probabilities(llm: LLM, outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        assert output.prompt_log_probabilities is not None
        count = len(output.prompt_log_probabilities.token_log_probabilities)
        assert count == len(output.prompt_token_ids) - 1


def assert_grammar(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert all(re.fullmatch("[a-c]{5}", output.text) for output in outputs)


def assert_proposer(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert llm.pipeline.proposer is not None


def assert_lora_manager(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert llm.pipeline.model.lora_manager is not None


def assert_two_outputs(llm: LLM, outputs: list[GenerationOutput]) -> None:
    assert [output.index for output in outputs] == [0, 1]


def assert_prefix_hits(llm: LLM, outputs: list[GenerationOutput]) -> None:
    has_cached_tokens = [output.num_cached_tokens > 0 for output in outputs]
    # Log probabilities of the prompt prevent prefix hits. Only the first output has them.
    assert has_cached_tokens[0] == (outputs[0].prompt_log_probabilities is None)


FEATURES = {
    "sampling": Feature(
        params={
            "temperature": 0.8,
            "top_k": 0,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.1,
            "banned_token_ids": [BANNED_TOKEN],
            "logit_bias": {20: 1.5},
            "seed": 1,
        },
        check=assert_no_banned_tokens,
    ),
    "logprobs": Feature(options={"logprobs": 2}, check=assert_log_probabilities),
    "echo": Feature(options={"prompt_logprobs": 0}, check=assert_prompt_log_probabilities),
    "grammar": Feature(options={"grammar": Grammar("regex", "[a-c]{5}")}, check=assert_grammar),
    "speculation": Feature(config={"speculative_method": "ngram"}, check=assert_proposer),
    "lora": Feature(config={"lora": "tone"}, options={"adapter": "tone"}, check=assert_lora_manager),
    "n": Feature(options={"n": 2}, check=assert_two_outputs),
    "stream": Feature(),
    "prefix": Feature(check=assert_prefix_hits),
    "deterministic": Feature(config={"deterministic": True}),
    "beams": Feature(),
}
BEAM_OPTIONS = {"n": {"num_return_sequences": 2}, "logprobs": {}}
"""Feature -> the arguments of `LLM.beam_search` that select it; empty if each beam search has the feature."""
FEATURE_PAIRS = [*combinations(FEATURES, 2)]


@pytest.fixture(scope="module")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLM]]:
    """Return a function that opens the demo model, once for each configuration."""
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "tone")
    models: dict[str, LLM] = {}

    def open_cached_llm(**config: Any) -> LLM:
        if "lora" in config:
            config["lora"] = [f"tone={adapter}"]
        key = json.dumps(config)
        if key not in models:
            models[key] = LLM("demo", **config)
        return models[key]

    yield open_cached_llm
    for llm in models.values():
        llm.close()


def table_cell(first_name: str, second_name: str) -> str:
    """Return the page's cell for two features."""
    table = PAGE.partition("## What combines with what")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    header, body = rows[0], {row[0]: row for row in rows[1:]}
    assert set(header[1:]) | set(body) == set(FEATURES)
    return body[second_name][header.index(first_name)]


@pytest.mark.parametrize(("first_name", "second_name"), FEATURE_PAIRS)
def test_a_combination_behaves_as_the_table_states(
    first_name: str, second_name: str, open_model: Callable[..., LLM]
) -> None:
    cell = table_cell(first_name, second_name)
    if cell == "n/a":
        is_beam_search = second_name == "beams"
        assert frozenset((first_name, second_name)) in IMPOSSIBLE_PAIRS or (
            is_beam_search and is_unsupported_by_beams(first_name)
        )
        return
    features = [FEATURES[first_name], FEATURES[second_name]]
    llm = open_model(**{name: value for feature in features for name, value in feature.config.items()})
    if cell == "refused":
        with pytest.raises(UnsupportedFeatureError):
            generate_outputs(llm, (first_name, second_name))
        return
    assert cell.startswith("yes"), cell
    num_runs = 2 if "prefix" in (first_name, second_name) else 1
    for _ in range(num_runs):
        outputs = generate_outputs(llm, (first_name, second_name))
    for feature in features:
        feature.check(llm, outputs)


def is_unsupported_by_beams(name: str) -> bool:
    accepted_options = inspect.signature(LLM.beam_search).parameters
    required_options = {*FEATURES[name].options, *(("sampling_params",) if FEATURES[name].params else ())}
    return bool(required_options) and not required_options & set(accepted_options)


def generate_outputs(llm: LLM, names: tuple[str, str]) -> list[GenerationOutput]:
    features = [FEATURES[name] for name in names]
    options = {name: value for feature in features for name, value in feature.options.items()}
    if "beams" in names:
        for name in names:
            if name in BEAM_OPTIONS:
                options = BEAM_OPTIONS[name]
        return llm.beam_search(PROMPT, num_beams=2, max_new_tokens=6, **options)
    fields = {name: value for feature in features for name, value in feature.params.items()}
    params = SamplingParams(**{"max_new_tokens": 12, **fields})
    if "stream" in names:
        stream = llm.stream(PROMPT, params, **options)
        assert "".join(stream) == stream.output.text
        return [stream.output]
    return llm.generate(PROMPT, params, **options)


def test_the_table_of_features_links_to_each_section_but_the_first() -> None:
    _, _, remainder = PAGE.partition("| feature |")
    table = remainder.partition("\n\n")[0]
    sections = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    linked_sections = re.findall(r"^\| \[([^\]]*)\]\(#([^)]*)\)", table, flags=re.MULTILINE)
    assert [name for name, _ in linked_sections] == [
        section[0].lower() + section[1:] if section != "LoRA" else section for section in sections
    ]
    for name, anchor in linked_sections:
        assert anchor == name.lower().replace(" ", "-")


def test_every_pair_of_features_is_tested() -> None:
    assert len(FEATURE_PAIRS) == len(FEATURES) * (len(FEATURES) - 1) // 2 == 55
