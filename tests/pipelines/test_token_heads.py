"""The heads of BGE-M3, which compute sparse weights and a vector for each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.embedding_server import embedding_server
from support.encoders import open_encoder
from support.token_heads import BgeM3, write_bge_m3

from penstock import LLM
from penstock.errors import PenstockError
from penstock.pipelines.core import EmbeddingsResponse

TEXTS = [
    "the sky is blue the sky",
    "grass",
    "how many unheard colours has the green grass and the red sky",
    "</s> it <s> it",
]
ALL_OUTPUTS = ("dense", "sparse", "multi_vector")


@pytest.fixture(scope="module")
def bge_m3(tmp_path_factory: pytest.TempPathFactory) -> BgeM3:
    return write_bge_m3(tmp_path_factory.mktemp("bge-m3"), out_features=20)


@pytest.fixture(scope="module")
def llm(bge_m3: BgeM3) -> Iterator[LLM]:
    with LLM(str(bge_m3.folder), quantization_encoding="float32") as llm:
        yield llm


def sparse_weights(response: EmbeddingsResponse) -> dict[int, float]:
    assert response.sparse is not None
    return dict(zip(response.sparse.token_ids.tolist(), response.sparse.weights.tolist(), strict=True))


def test_all_outputs_of_a_batch_equal_the_reference(bge_m3: BgeM3, llm: LLM) -> None:
    assert llm.pipeline.outputs == ALL_OUTPUTS
    for text, response in zip(TEXTS, llm.encode(TEXTS, outputs=ALL_OUTPUTS, use_tqdm=False), strict=True):
        tokens = llm.tokenizer.backend.encode(text).ids
        np.testing.assert_allclose(response.embeddings, bge_m3.dense(tokens), atol=1e-5)
        expected = bge_m3.sparse_weights(tokens)
        result = sparse_weights(response)
        assert list(result) == sorted(expected), "the token ids ascend, and special tokens have no weight"
        assert result == pytest.approx(expected, abs=1e-5)
        assert response.multi_vector is not None
        assert response.multi_vector.shape == (len(tokens) - 1, 20)
        np.testing.assert_allclose(response.multi_vector, bge_m3.vectors(tokens), atol=1e-5)


def test_repeated_tokens_have_their_largest_weight(bge_m3: BgeM3, llm: LLM) -> None:
    num_checked = 0
    for word in range(4, 19):
        tokens = [0, word, word, 3, word, 2]
        with torch.inference_mode():
            weights = bge_m3.sparse(bge_m3.hidden_states(tokens)).relu()[[1, 2, 4], 0]
        if len(weights.unique()) == 3:
            [response] = llm.encode(tokens, outputs=("sparse",))
            assert sparse_weights(response) == pytest.approx({word: float(weights.max())}, abs=1e-5)
            num_checked += 1
    assert num_checked, "no word has three different weights"


def test_an_output_does_not_depend_on_other_requested_outputs(llm: LLM) -> None:
    [full_response] = llm.encode(TEXTS[:1], outputs=ALL_OUTPUTS)
    [sparse_response] = llm.encode(TEXTS[:1], outputs=("sparse",))
    assert sparse_weights(sparse_response) == sparse_weights(full_response)
    assert sparse_response.multi_vector is None
    assert not sparse_response.embeddings.size
    assert np.array_equal(llm.embed(TEXTS[0]), full_response.embeddings)


def test_scores_are_similarities_of_dense_embeddings(llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS), vectors @ vectors[0], atol=1e-5)


def test_without_its_file_a_head_is_missing(tmp_path: Path) -> None:
    write_bge_m3(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    pipeline = open_encoder(tmp_path)
    assert pipeline.outputs == ("dense", "multi_vector")
    assert pipeline.heads.vector_head is not None
    (tmp_path / "colbert_linear.pt").unlink()
    assert open_encoder(tmp_path).heads.vector_head is None


class MaliciousPickle:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("the file runs code",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, r"weight is \[1, 7\] .* needs \[1, 48\]"),
        ({"weight": torch.zeros(2, 48), "bias": torch.zeros(1)}, r"weight is \[2, 48\] .* needs \[1, 48\]"),
        ({"weight": torch.zeros(1, 48)}, "bias is missing"),
        ({"weight": torch.zeros(1, 48), "bias": torch.zeros(1), "x": torch.zeros(1)}, "x is unexpected"),
        ([torch.zeros(1)], "must contain a dictionary of tensors"),
        ({"weight": MaliciousPickle()}, "cannot be read as tensors"),
    ],
)
def test_a_malformed_head_is_refused_without_running_its_code(
    tmp_path: Path, content: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bge_m3(tmp_path)
    torch.save(content, tmp_path / "sparse_linear.pt")
    with pytest.raises(PenstockError, match=f"sparse_linear.pt.*{message}"):
        open_encoder(tmp_path)
    assert "the file runs code" not in capsys.readouterr().out


async def test_the_pooling_route_returns_all_outputs(bge_m3: BgeM3, llm: LLM) -> None:
    async with embedding_server(bge_m3.folder) as server:
        answer = await server.http.post("/pooling", json={"input": TEXTS, "outputs": list(ALL_OUTPUTS)})
        for text, entry in zip(TEXTS, answer.json()["data"], strict=True):
            [response] = llm.encode(text, outputs=ALL_OUTPUTS)
            np.testing.assert_allclose(entry["dense"], response.embeddings, atol=1e-6)
            result = dict(zip(entry["sparse"]["token_ids"], entry["sparse"]["weights"], strict=True))
            assert result == pytest.approx(sparse_weights(response), abs=1e-6)
            np.testing.assert_allclose(entry["multi_vector"], response.multi_vector, atol=1e-6)
