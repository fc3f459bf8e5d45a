"""A server of a tiny embeddings model in this process, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from support.in_process_server import InProcessServer, run_in_process

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.serve.config import serve_fields


def embedder_config(folder: Path, **fields: Any) -> PipelineConfig:
    """Return the configuration that serves a saved encoder as the model ``tiny``."""
    values = {"model_path": str(folder), "quantization_encoding": "float32", "served_model_name": "tiny"}
    return PipelineConfig.from_flat(values | {"num_threads": 1} | fields)


@asynccontextmanager
async def embedding_server(folder: Path, **fields: Any) -> AsyncIterator[InProcessServer]:
    """Run a server of a saved encoder. `fields` are fields of `PipelineConfig` and `ServeConfig`."""
    serve_values = {
        name: fields.pop(name) for name in [field.name for field in serve_fields()] if name in fields
    }
    config = embedder_config(folder, **fields)
    tokenizer = load_tokenizer(config)
    make_runtime = partial(load_runtime, config)
    async with run_in_process(
        make_runtime=make_runtime, tokenizer=tokenizer, pipeline_config=config, **serve_values
    ) as server:
        tokenizer.max_length = server.services.worker.info.max_length
        yield server
