"""`SpeculativeConfig`: the method and maximum drafts in effect, and invalid or contradictory settings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import PipelineConfig, SpeculativeConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "method", "max_drafts"),
    [
        ({}, None, 0),
        ({"speculative_method": "ngram"}, "ngram", 8),
        ({"draft_model_path": "demo"}, "draft_model", 8),
        ({"speculative_method": "draft_model", "draft_model_path": "demo"}, "draft_model", 8),
        ({"speculative_method": "ngram", "num_speculative_tokens": 3}, "ngram", 3),
    ],
)
def test_method_and_maximum_drafts_follow_from_the_settings(
    values: dict[str, Any], method: str | None, max_drafts: int
) -> None:
    config = PipelineConfig.from_flat(values).speculative
    assert (config.method, config.max_drafts) == (method, max_drafts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_method": "magic"}, "one of ngram, draft_model, was 'magic'"),
        ({"speculative_method": "draft_model"}, "needs the path of a draft model"),
        ({"speculative_method": "ngram", "draft_model_path": "x"}, "ngram uses no draft model"),
        ({"ngram_min": 3, "ngram_max": 2}, r"at least ngram_min \(3\), was 2"),
        ({"num_speculative_tokens": 0}, "from 1 to 64, was 0"),
        ({"num_speculative_tokens": 65}, "from 1 to 64, was 65"),
    ],
)
def test_invalid_and_contradictory_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**values)
