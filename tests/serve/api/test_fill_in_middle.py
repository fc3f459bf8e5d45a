"""Fill-in-the-middle completions: their prompts, and requests with a suffix."""

from __future__ import annotations

from typing import Any

import pytest
from support.in_process_server import run_in_process

from penstock.serve.api import fill_in_middle
from penstock.serve.api.fill_in_middle import FillInMiddleTokens, fill_in_prompt
from penstock.testing import FakePipeline, FakeTokenizer

PSM, SPM = FillInMiddleTokens("^", "~", "|"), FillInMiddleTokens("^", "~", "|", is_suffix_first=True)


@pytest.mark.parametrize(("family", "text"), [(PSM, "^ab~cd|"), (SPM, "~cd^ab")])
def test_each_family_orders_prefix_suffix_and_markers(
    family: FillInMiddleTokens, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_in_middle, "FIM_FAMILIES", (FillInMiddleTokens("<none>", "x", "y"), family))
    ids = fill_in_prompt(FakeTokenizer(), "ab", "cd", "suffix")
    assert bytes(ids).decode() == text


async def test_a_suffix_gives_a_fill_in_middle_prompt_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = FakePipeline.answering(lambda prompt: prompt + "!more")
    async with run_in_process(pipeline) as server:
        refusal_error = await server.expect_refusal("/v1/completions", prompt="a", suffix="b")
        assert (refusal_error["param"], refusal_error["code"]) == ("suffix", "unsupported_parameter")
        monkeypatch.setattr(fill_in_middle, "FIM_FAMILIES", (PSM,))
        monkeypatch.setattr(fill_in_middle, "FIM_END_TOKENS", ("!",))
        response = await server.complete(prompt=["ab", ""], suffix="cd", max_tokens=50)
        assert [choice["text"] for choice in response["choices"]] == ["^ab~cd|", "^~cd|"]
        assert [choice["finish_reason"] for choice in response["choices"]] == ["stop", "stop"]
        assert (await server.complete(prompt="ab", suffix="", max_tokens=2))["choices"][0]["text"] == "ab"
        ollama_body: Any = {"prompt": "ab", "suffix": "cd", "stream": False}
        assert (await server.post("/api/generate", **ollama_body)).json()["response"] == "^ab~cd|"
        for fields, param in (({"echo": True}, "echo"), ({"prompt": [1, 2]}, "suffix")):
            refusal_error = await server.expect_refusal(
                "/v1/completions", **{"prompt": "a", "suffix": "b", **fields}
            )
            assert refusal_error["param"] == param
