"""The similarity page of the playground, run by Node with a fake page and a fake server.

A further test checks that the server serves all modules, and that the page has the elements they use.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.node import PLAYGROUND, needs_node, run_node

from penstock.serve.playground.assets import assets

FAKE_PAGE = Path(__file__).parent / "fake_page.js"
SETUP_CODE = """
import { byId, cells, requests, serve } from "./fake_page.js";
import { SimilarityView, cosines, textsOf } from "./similarity.js";
const errors = [];
const view = new SimilarityView({ onerror: (error) => errors.push(error.status) });
byId("model").value = "minilm";
const vectors = { a: [2, 0], b: [0, 3], c: [3, 4] };
const answer = ({ input }) => [200, {
  data: input.map((text, index) => ({ index, embedding: vectors[text] })).reverse(),
  usage: { prompt_tokens: 9 },
}];
"""


def run_page(tmp_path: Path, code: str) -> Any:
    """Run the code and return the JSON that it prints."""
    return run_node(tmp_path, SETUP_CODE + code, FAKE_PAGE)


@needs_node
def test_the_page_splits_texts_and_computes_cosines(tmp_path: Path) -> None:
    result = run_page(
        tmp_path,
        'console.log(JSON.stringify([cosines([[2, 0], [3, 4], [0, 0]]), textsOf(" a \\n\\n b\\r\\n")]));',
    )
    assert result == [[[1, 0.6, 0], [0.6, 1, 0], [0, 0, 0]], ["a", "b"]]


@needs_node
def test_the_matrix_is_shown(tmp_path: Path) -> None:
    result = run_page(
        tmp_path,
        """
        serve(answer);
        byId("similarity-texts").value = "a\\nb\\nc";
        await view.compare();
        const [table] = byId("similarity-matrix").children;
        const shade = table.children[1].children[0].children[3].attributes["style --part"];
        const note = byId("similarity-note").textContent;
        const busy = byId("similarity").attributes["aria-busy"];
        console.log(JSON.stringify({ rows: cells(table), shade, note, busy, requests, errors }));
        """,
    )
    assert result["rows"] == [
        ["", "1", "2", "3"],
        ["1  a", "1.00", "0.00", "0.60"],
        ["2  b", "0.00", "1.00", "0.80"],
        ["3  c", "0.60", "0.80", "1.00"],
    ]
    assert float(result["shade"]) == pytest.approx(0.6)
    assert result["note"] == "Cosine similarity, 2 dimensions, 9 tokens."
    assert result["busy"] == "false"
    [request] = result["requests"]
    assert request == {
        "url": "http://host/prefix/v1/embeddings",
        "body": {"model": "minilm", "input": ["a", "b", "c"], "encoding_format": "float"},
        "authorization": "Bearer secret",
    }
    assert result["errors"] == []


@needs_node
def test_errors_are_shown(tmp_path: Path) -> None:
    result = run_page(
        tmp_path,
        """
        const messages = [];
        serve(() => [401, { error: { message: "no key", code: "invalid_api_key" } }]);
        for (const text of ["a", "a\\n".repeat(21), "a\\nb"]) {
          byId("similarity-texts").value = text;
          await view.compare();
          messages.push(byId("similarity-error").textContent);
        }
        console.log(JSON.stringify([messages, errors, requests.length]));
        """,
    )
    assert result == [
        [
            "Enter 2 to 20 texts, one per line; there are 1.",
            "Enter 2 to 20 texts, one per line; there are 21.",
            "no key",
        ],
        [401],
        1,
    ]


def test_all_modules_and_elements_are_served() -> None:
    paths = {f"/playground/{path.name}" for path in PLAYGROUND.glob("*.js")}
    assert paths <= set(assets())
    page = assets()["/"].content.decode()
    ids = set(re.findall(r'id="([\w-]+)"', page))
    pages = (PLAYGROUND / "pages.js").read_text()
    id_lists = re.findall(r"^  \w+: (\[.*\]),$", pages, flags=re.MULTILINE)
    assert len(id_lists) == 6
    assert {element_id for id_list in id_lists for element_id in json.loads(id_list)} <= ids
    for path in PLAYGROUND.glob("*.js"):
        assert set(re.findall(r'byId\("([\w-]+)"\)', path.read_text())) <= ids, path.name
