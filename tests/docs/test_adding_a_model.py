"""docs/adding-a-model.md: the page's checks pass with the page's files and fail with faulty files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_logits, write_checkpoint
from support.documents import ROOT
from support.networks import weight_bytes
from support.pipeline_steps import append_token, chunked_logits, make_context, random_tokens, step_logits

from penstock.pipelines import PipelineConfig, TextGenerationPipeline
from penstock.pipelines.core import TextContext
from penstock.pipelines.registry import PIPELINE_REGISTRY, PipelineRegistry

PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
MODEL = "architectures/vaultgemma/model.py"
DUO_MODEL = "architectures/duo/model.py"


def write_page_files(folder: Path, changes: dict[str, str] | None = None, changed_file: str = MODEL) -> None:
    """Write the files of the page, including one changed file."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for old, new in (changes or {}).items() if name == changed_file else ():
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)


def run_check(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = "check.py") -> dict[str, Any]:
    """Run a check of the page in ``folder`` and return its variables."""
    monkeypatch.chdir(folder)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile((folder / script).read_text(), script, "exec"), variables)
    return variables


def test_every_block_is_a_file_of_the_page() -> None:
    folders = ["architectures/duo", "architectures/vaultgemma"]
    files = [f"{folder}/{name}" for folder in folders for name in ("__init__.py", "model.py")]
    assert sorted(FILES) == [*files, "check.py", "check_duo.py"]
    assert PAGE.count("```") == 2 * len(FILES)
    assert not {"vaultgemma", "duo"} & {architecture.name for architecture in PIPELINE_REGISTRY.architectures}


@pytest.mark.parametrize("script", ["check.py", "check_duo.py"])
def test_the_checks_of_the_page_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    write_page_files(tmp_path)
    run_check(tmp_path, monkeypatch, script)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_offset=1.0,": ""},
        {'embedding_scale=config.integer("hidden_size") ** 0.5,': ""},
        {'attention_soft_cap=config.optional_number("attn_logit_softcapping", 50.0),': ""},
        {'"pre_feedforward_layernorm"': '"post_attention_layernorm"'},
        {"windows=layer_windows(config, layer_types(config, default), 4096),": ""},
    ],
    ids=str,
)
def test_the_check_detects_an_error(
    tmp_path: Path, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page_files(tmp_path, changes)
    with pytest.raises(Exception, match=r"missing|unexpected|has sliding_attention|\["):
        run_check(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        {"self.mlp(normed, step))": "self.mlp(x, step))"},
        {"return step.ops.add(x, update)": "return update"},
        {'gate_up=("gate", "up")': 'gate_up=("up", "gate")'},
    ],
    ids=str,
)
def test_the_check_detects_an_error_in_the_block(
    tmp_path: Path, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_page_files(tmp_path, changes, DUO_MODEL)
    with pytest.raises(AssertionError, match=r"\["):
        run_check(tmp_path, monkeypatch, "check_duo.py")


@pytest.fixture
def duo_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the variables of ``check_duo.py``, the check of the family with its own block."""
    write_page_files(tmp_path)
    return run_check(tmp_path, monkeypatch, "check_duo.py")


def test_logits_of_the_custom_block_agree_with_plain_torch(duo_variables: dict[str, Any]) -> None:
    """The logits of a request are bit-equal whether it is computed separately, in a batch or in chunks."""
    config = PipelineConfig.from_flat(
        {"model_path": "tiny-duo", "quantization_encoding": "float32", "deterministic": True}
    )
    pipeline = TextGenerationPipeline(config, duo_variables["architecture"].load_pipeline_model(), -1)
    tokens = random_tokens(70, 130, seed=1)
    expected = duo_variables["plain_logits"](duo_variables["weights"], torch.tensor(tokens))
    full_logits = chunked_logits(pipeline, make_echo_context(tokens), [70])
    torch.testing.assert_close(full_logits, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)
    for chunks, other_lengths in (([70], [13, 1]), ([16, 1, 53], []), ([33, 37], [5])):
        assert torch.equal(
            chunked_logits(pipeline, make_echo_context(tokens), chunks, other_lengths), full_logits
        )


def make_echo_context(tokens: list[int]) -> TextContext:
    """Return a context that computes the logits of all its tokens."""
    return make_context(tokens, log_probabilities_echo=True)


def test_the_memory_estimate_is_correct_for_tensor_names_of_the_page(duo_variables: dict[str, Any]) -> None:
    model: Any = duo_variables["pipeline"].model
    loaded_bytes = weight_bytes(duo_variables["pipeline"])
    assert 0.995 * loaded_bytes <= model.memory_plan.weights_size <= 1.3 * loaded_bytes
    headers = model.pipeline_config.model.tensor_headers
    names = model.tensor_names(model.huggingface_config)
    roles = {name: names.role(name) for name in headers}
    assert [name for name, role in roles.items() if role == "head"] == ["output.weight"]
    assert [name for name, role in roles.items() if role == "table"] == ["decoder.words.weight"]
    assert sum(role == "values" for role in roles.values()) == 3


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": True, "attn_logit_softcapping": None},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 24, "attention_bias": True},
    ],
    ids=str,
)
def test_logits_of_vaultgemma_agree_with_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    write_page_files(tmp_path)
    registry = PipelineRegistry([tmp_path / "architectures"])
    (architecture,) = (candidate for candidate in registry.architectures if candidate.name == "vaultgemma")
    assert architecture.tiny_config is not None
    folder = write_checkpoint(tmp_path / "tiny", architecture.tiny_config() | variant)
    config = PipelineConfig.from_flat({"model_path": str(folder), "quantization_encoding": "float32"})
    pipeline = TextGenerationPipeline(config, architecture.load_pipeline_model(), -1)
    tokens = random_tokens(80, 130, seed=1)
    expected = transformers_logits(load_in_transformers(folder), tokens)
    context = make_context(tokens[:60])
    logits = [step_logits(pipeline, [context])[0]]
    for token in tokens[60:]:
        append_token(pipeline, context, token)
        logits.append(step_logits(pipeline, [context])[0])
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(torch.cat(logits), expected, atol=tolerance, rtol=0)


def test_paths_on_the_page_exist() -> None:
    paths = re.findall(r"`((?:penstock|tests|kernels|examples)/[\w/]+\.py)`", PAGE)
    assert len(paths) >= 5
    for path in paths:
        assert (ROOT / path).is_file() or (ROOT / "penstock" / path).is_file(), path
