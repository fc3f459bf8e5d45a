"""Semantic search over Markdown files with an embeddings model.

The script splits the files at their headings and embeds each section with the checkpoint's prompt for
documents. The script embeds the query with the checkpoint's prompt for queries, and prints the titles of the
sections with the highest similarity.

    python examples/semantic_search.py MODEL "how much memory does the KV cache take"

MODEL is the folder or the Hugging Face id of an embeddings model, such as
sentence-transformers/all-MiniLM-L6-v2. By default the files of docs/ are searched.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np

from penstock import LLM
from penstock.errors import PenstockError
from penstock.pipelines.core import PipelineTask

DOCS = Path(__file__).parents[1] / "docs"


def sections(folder: Path) -> list[tuple[str, str]]:
    """Return the titles and texts of the sections of the Markdown files in a folder. Skips empty sections."""
    titled_texts = []
    for path in sorted(folder.glob("*.md")):
        for part in re.split(r"^#+ ", path.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            heading, _, body = part.partition("\n")
            if body.strip():
                titled_texts.append((f"{path.name}: {heading}", f"{heading}\n{body.strip()}"))
    return titled_texts


def search(llm: LLM, query: str, texts: list[str], top_n: int) -> list[tuple[int, float]]:
    """Return the indices and the cosine similarities of the ``top_n`` best texts for a query, best first."""
    layout = llm.tokenizer.layout
    # Sections that exceed the maximum length of the model are cut, because their beginning names the topic.
    vectors = llm.embed(texts, normalize=True, truncate=True, prompt_name=layout.prompt_for("document"))
    query_vector = llm.embed(query, normalize=True, prompt_name=layout.prompt_for("query"))
    scores = vectors @ query_vector
    return [(int(i), float(scores[i])) for i in np.argsort(-scores)[:top_n]]


def main() -> None:
    """Print the similarity and the title of the best sections."""
    parser = argparse.ArgumentParser(description="Semantic search over Markdown files.")
    parser.add_argument("model", help="folder or Hugging Face id of an embeddings model")
    parser.add_argument("query")
    parser.add_argument("--folder", type=Path, default=DOCS, help="folder of Markdown files")
    parser.add_argument("--top-n", type=int, default=5)
    arguments = parser.parse_args()
    titled_texts = sections(arguments.folder)
    if not titled_texts:
        sys.exit(f"{arguments.folder} has no Markdown files with sections")
    try:
        with LLM(arguments.model) as llm:
            if llm.config.model.pipeline_task is not PipelineTask.EMBEDDINGS_GENERATION:
                sys.exit(f"{arguments.model} is not an embeddings model: use one, such as all-MiniLM-L6-v2")
            best = search(llm, arguments.query, [text for _, text in titled_texts], arguments.top_n)
    except PenstockError as error:
        sys.exit(f"{arguments.model} cannot be used for search: {error}")
    for i, score in best:
        print(f"{score:.3f}  {titled_texts[i][0]}")


if __name__ == "__main__":
    main()
