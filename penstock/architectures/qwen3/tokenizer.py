"""The tokenizer of Qwen 3 embedders and rerankers, with the prompt of Qwen3-Reranker's model card."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Unpack

from penstock.config.huggingface import HuggingFaceConfig
from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer
from penstock.text.pair_template import PairTemplate
from penstock.text.sentence_transformers import read_layout
from penstock.text.tokenizer import TokenizerOptions

TEMPLATE = PairTemplate(
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)


class Qwen3EmbeddingsTokenizer(EmbeddingsTokenizer):
    """The tokenizer of Qwen 3 embedders and rerankers.

    Args:
        checkpoint: the checkpoint's folder.
        **options: see `EmbeddingsTokenizer`.
    """

    def __init__(self, checkpoint: Path, **options: Unpack[TokenizerOptions]) -> None:
        super().__init__(checkpoint, **options)
        self._checkpoint = Path(checkpoint)

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        return None if answer_ids(self._checkpoint) is None else TEMPLATE


def answer_ids(checkpoint: Path) -> tuple[int, int] | None:
    """Return the ids of the tokens "no" and "yes" if the checkpoint is a reranker, otherwise None.

    A reranker is a causal language model without a sentence-transformers layout, whose ``tokenizer.json`` has
    both tokens.
    """
    names = HuggingFaceConfig.from_checkpoint(checkpoint).texts("architectures") or ("",)
    path = checkpoint / "tokenizer.json"
    if not names[0].endswith("ForCausalLM") or read_layout(checkpoint).is_present or not path.is_file():
        return None
    vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
    if not {"yes", "no"} <= set(vocabulary):
        return None
    return vocabulary["no"], vocabulary["yes"]
