"""Checkpoints with one adapter per task, such as Jina Embeddings v3 as published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.embedding_server import embedding_server
from support.encoders import open_encoder
from support.task_adapters import INSTRUCTIONS, TASKS, JinaV3, mean_embedding, write_jina_v3

from penstock import LLM
from penstock.config import LoRAConfig
from penstock.errors import CheckpointError, InputError, PenstockError

TEXTS = ["the sky is blue", "grass", "how many colours has the green grass and the red sky"]


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> JinaV3:
    folder = tmp_path_factory.mktemp("jina")
    return write_jina_v3(folder / "published", folder / "plain")


@pytest.fixture(scope="module")
def llm(jina: JinaV3) -> Iterator[LLM]:
    with LLM(str(jina.folder), quantization_encoding="float32") as llm:
        yield llm


def merged_embeddings(
    jina: JinaV3, llm: LLM, task: str | None, folder: Path, instruction: str = ""
) -> np.ndarray:
    """Return the embeddings of `TEXTS` from transformers, with the task's adapter merged into the weights."""
    model = jina.load_merged(task, folder)
    tokens = [llm.tokenizer.backend.encode(instruction + text).ids for text in TEXTS]
    return np.stack([mean_embedding(model, sequence).numpy() for sequence in tokens])


@pytest.mark.parametrize("task", [None, *TASKS])
def test_vectors_of_each_task_equal_those_of_merged_weights(
    jina: JinaV3, llm: LLM, task: str | None, tmp_path: Path
) -> None:
    expected = merged_embeddings(jina, llm, task, tmp_path / "merged", INSTRUCTIONS.get(task or "", ""))
    np.testing.assert_allclose(llm.embed(TEXTS, task=task), expected, atol=2e-5)
    if task is not None:
        assert np.abs(expected - llm.embed(TEXTS)).max() > 0.05, "the adapters must change the vectors"


def test_a_batch_of_several_tasks_equals_single_requests(llm: LLM) -> None:
    adapters = [None, *TASKS, None]
    batch_vectors = llm.embed([TEXTS[2]] * 7, adapter=adapters)
    for vector, adapter in zip(batch_vectors, adapters, strict=True):
        assert np.array_equal(vector, llm.embed(TEXTS[2], adapter=adapter))
    assert len(np.unique(batch_vectors.round(4), axis=0)) == 6


def test_tasks_apply_their_prompts(llm: LLM) -> None:
    query_vector = llm.embed(TEXTS[0], task="retrieval.query")
    assert np.array_equal(llm.embed(TEXTS[0], prompt_name="retrieval.query"), query_vector)
    assert np.array_equal(llm.embed("query how " + TEXTS[0], adapter="retrieval.query"), query_vector)
    passage_prompt_vector = llm.embed(TEXTS[0], task="retrieval.query", prompt_name="retrieval.passage")
    assert np.array_equal(passage_prompt_vector, llm.embed("passage " + TEXTS[0], adapter="retrieval.query"))
    ids = llm.tokenizer.backend.encode("query how " + TEXTS[0]).ids
    assert np.array_equal(llm.embed(ids, task="retrieval.query"), query_vector), (
        "no prompt is added to token ids"
    )
    scores = llm.score(TEXTS[0], TEXTS)
    passage_vectors = llm.embed(TEXTS, task="retrieval.passage")
    np.testing.assert_allclose(scores, passage_vectors @ query_vector, atol=1e-6)
    assert llm.embed(TEXTS[0], task="separation", dimensions=8).shape == (8,)


def test_unknown_tasks_and_changes_of_task_adapters_are_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task 'search' is unknown: the checkpoint has retrieval"):
        llm.embed("grass", task="search")
    with pytest.raises(InputError, match="task selects an adapter, and adapter is also given"):
        llm.embed("grass", task="separation", adapter="classification")
    with pytest.raises(PenstockError, match="absent"):
        llm.embed("grass", adapter="absent")
    manager = llm.pipeline.lora_manager
    assert [name for name, _ in manager.names()] == list(TASKS)
    with pytest.raises(InputError, match="'separation' is a task adapter of the checkpoint: it cannot be un"):
        manager.unload("separation")
    with pytest.raises(InputError, match="cannot be named 'separation'"):
        manager.load("separation", str(tmp_path))


def test_task_adapters_do_not_change_the_planned_activation_size(jina: JinaV3) -> None:
    plan, plain_plan = (open_encoder(folder).memory_plan for folder in (jina.folder, jina.plain_folder))
    assert plan.activation_size == plain_plan.activation_size


def test_user_adapters_and_task_adapters_run_in_one_batch(jina: JinaV3, tmp_path: Path) -> None:
    name = "base_model.model.encoder.layers.1.mixer.out_proj"
    torch.manual_seed(4)
    shapes = {"A": (2, 48), "B": (48, 2)}
    tensors = {f"{name}.lora_{matrix}.weight": torch.randn(shape) for matrix, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    options = {"quantization_encoding": "float32", "lora": [f"own={tmp_path}"], "max_loras": 1}
    with LLM(str(jina.folder), **options) as llm:
        names = ["own", *TASKS]
        vectors = llm.embed(["grass"] * 6, adapter=names)
        assert len(np.unique(vectors.round(4), axis=0)) == 6
        assert np.array_equal(vectors[0], llm.embed("grass", adapter="own"))


def test_limits_are_raised_for_the_task_adapters() -> None:
    default_config = LoRAConfig().with_checkpoint_adapters(5, 4)
    assert (default_config.max_loras, default_config.max_loaded_loras, default_config.max_lora_rank) == (
        5,
        5,
        4,
    )
    raised_config = LoRAConfig(
        enable_lora=True, max_loras=2, max_loaded_loras=3, max_lora_rank=8
    ).with_checkpoint_adapters(5, 4)
    assert (raised_config.max_loras, raised_config.max_loaded_loras, raised_config.max_lora_rank) == (7, 8, 8)
    assert LoRAConfig().with_checkpoint_adapters(0, 0) == LoRAConfig()


def test_adapters_that_do_not_match_the_tasks_are_refused(jina: JinaV3, tmp_path: Path) -> None:
    shutil.copytree(jina.folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_adaptations": ["one"]}))
    with pytest.raises(CheckpointError, match="holds 5 adapters for 1 tasks"):
        open_encoder(tmp_path / "model")
    file.write_text(json.dumps(config | {"lora_adaptations": "one"}))
    with pytest.raises(CheckpointError, match="lora_adaptations must be a list of names"):
        open_encoder(tmp_path / "model")
    shutil.copy(jina.plain_folder / "model.safetensors", tmp_path / "model")
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no adapters for its tasks"):
        open_encoder(tmp_path / "model")


async def test_the_server_applies_the_task_of_a_request(jina: JinaV3, llm: LLM) -> None:
    async with embedding_server(jina.folder) as server:

        async def request_vectors(**body: object) -> np.ndarray:
            answer = (await server.http.post("/v1/embeddings", json={"input": TEXTS, **body})).json()
            return np.array([entry["embedding"] for entry in answer["data"]])

        query_vectors = llm.embed(TEXTS, task="retrieval.query")
        for body in (
            {"task": "retrieval.query"},
            {"prompt_name": "retrieval.query"},
            {"input_type": "query"},
        ):
            np.testing.assert_allclose(await request_vectors(**body), query_vectors, atol=1e-6)
        np.testing.assert_allclose(await request_vectors(), llm.embed(TEXTS), atol=1e-6)
        passage_vectors = llm.embed(TEXTS, task="retrieval.passage")
        np.testing.assert_allclose(await request_vectors(input_type="document"), passage_vectors, atol=1e-6)
        unknown_task_response = await server.http.post(
            "/v1/embeddings", json={"input": "grass", "task": "search"}
        )
        assert unknown_task_response.status_code == 400
        assert "task 'search' is unknown" in unknown_task_response.json()["error"]["message"]
        conflict_response = await server.http.post(
            "/v1/embeddings", json={"input": "grass", "task": "separation", "input_type": "query"}
        )
        assert conflict_response.status_code == 400
        assert conflict_response.json()["error"]["param"] == "input_type"
