"""The walk of docs/adding-a-model.md, followed: its files written, its check run, and its mistakes seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import oracle, oracle_logits, write_checkpoint
from support.documents import ROOT
from support.running import context_of, feed, random_tokens, step_logits

from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.registry import PIPELINE_REGISTRY, PipelineRegistry

PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
MODEL = "architectures/exaone4/model.py"


def follow(folder: Path, changes: dict[str, str] | None = None) -> None:
    """Writes the page's files, with changes made to its model."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for old, new in (changes or {}).items() if name == MODEL else ():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile((folder / "check.py").read_text(), "check.py", "exec"), {"__name__": "__main__"})


def test_every_block_is_a_file_of_the_walk() -> None:
    assert sorted(FILES) == ["architectures/exaone4/__init__.py", MODEL, "check.py"]
    assert PAGE.count("```") == 2 * len(FILES)
    assert "exaone4" not in {architecture.name for architecture in PIPELINE_REGISTRY.architectures}


def test_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(tmp_path)
    check(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "mistake",
    [
        {'block_norms="after",': ""},
        {'head_norms="each",': ""},
        {"else None for kind in types": "else 0 for kind in types"},
        {"windows=windows_of(config, types, 4096, is_used=has_windows),": ""},
    ],
    ids=str,
)
def test_a_wrong_turn_is_seen(
    tmp_path: Path, mistake: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(tmp_path, mistake)
    with pytest.raises(Exception, match=r"missing|unexpected|has sliding_attention|\["):
        check(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 16},
    ],
    ids=str,
)
def test_logits_of_the_walks_family(tmp_path: Path, variant: dict[str, Any]) -> None:
    follow(tmp_path)
    registry = PipelineRegistry([tmp_path / "architectures"])
    (architecture,) = (one for one in registry.architectures if one.name == "exaone4")
    assert architecture.tiny_config is not None
    folder = write_checkpoint(tmp_path / "tiny", architecture.tiny_config() | variant)
    config = PipelineConfig.from_flat({"model_path": str(folder), "quantization_encoding": "float32"})
    pipeline = TextGenerationPipeline(config, architecture.load_pipeline_model(), -1)
    tokens = random_tokens(80, 130, seed=1)
    expected = oracle_logits(oracle(folder), tokens)
    context = context_of(tokens[:60])
    ours = [step_logits(pipeline, [context])[0]]
    for token in tokens[60:]:
        feed(pipeline, context, token)
        ours.append(step_logits(pipeline, [context])[0])
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(torch.cat(ours), expected, atol=tolerance, rtol=0)


def test_the_names_that_the_page_points_at_exist() -> None:
    paths = re.findall(r"`((?:penstock|tests|kernels|examples)/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 5
    for path in paths:
        assert (ROOT / path).is_file() or (ROOT / "penstock" / path).is_file(), path
