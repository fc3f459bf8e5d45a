"""Sums, growth and quantiles of the metrics page, computed by Node from texts of prometheus_client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from support.node import needs_node, run_node

CODE = """
import { Scrape, growth, quantile } from "./prometheus.js";
const [first, second] = TEXTS.map((text, i) => new Scrape(text, i));
console.log(JSON.stringify([
  second.sum("tokens_total"), growth(second, first, "tokens_total"), growth(first, second, "tokens_total"),
  [0.5, 0.95].map((part) => quantile(second, first, "wait_seconds", part)),
  quantile(second, null, "wait_seconds", 0.5), quantile(second, second, "wait_seconds", 0.5),
  quantile(second, null, "nothing", 0.5), second.sum("nothing"),
]));
"""


@needs_node
def test_the_page_computes_sums_growth_and_quantiles(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    tokens = Counter("tokens", "Tokens", ["model"], registry=registry)
    wait = Histogram("wait_seconds", "Wait", ["route"], buckets=(1, 2, 4), registry=registry)
    tokens.labels('a"} 7').inc(5)
    tokens.labels("b").inc(2)
    wait.labels("x").observe(0.5)
    texts = [generate_latest(registry).decode()]
    tokens.labels("b").inc(30)
    for value in (1.5, 3, 3, 3):  # the quantiles have ranks 2 and 3.8 of 4; three values are in (2, 4]
        wait.labels("y").observe(value)
    texts.append(generate_latest(registry).decode())
    (
        total,
        growth,
        growth_after_restart,
        recent_quantiles,
        median,
        empty_median,
        unknown_median,
        unknown_sum,
    ) = run_node(tmp_path, CODE.replace("TEXTS", json.dumps(texts)))
    assert (total, growth, growth_after_restart) == (37, 30, 7)
    assert recent_quantiles == pytest.approx([2 + 2 / 3, 2 + 2 * 2.8 / 3])
    assert median == pytest.approx(2 + 2 * 0.5 / 3)
    assert (empty_median, unknown_median, unknown_sum) == (None, None, 0)
