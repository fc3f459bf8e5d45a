"""The routes ``/v1/models``, the adapter that a request names, and the fingerprint in responses."""

from __future__ import annotations

import time
from hashlib import blake2b

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from penstock import __version__
from penstock.errors import UnknownModelError
from penstock.serve.http.openapi import responses
from penstock.serve.services import Services

router = APIRouter(tags=["models"])

_START_TIME = int(time.time())


class Model(BaseModel):
    """A model or an adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    """The path from which the model or adapter was loaded."""
    parent: str | None = None
    """The id of the model to which an adapter belongs. None for a model."""
    max_model_len: int
    """Maximum total number of tokens of prompt and output."""
    task: str
    """The task that the model is loaded for, such as ``text-generation``."""
    input_modalities: list[str]
    """The content types of messages: ``text``, and ``image`` if the model reads images."""
    outputs: list[str]
    """The outputs that a request to an embeddings model may choose, the default first. Empty for other
    models, and if the model is not loaded."""


class ModelList(BaseModel):
    """All models and adapters that a request may name."""

    object: str = "list"
    data: list[Model] = Field(default_factory=list)


@router.get("/v1/models", responses=responses(401, 421, 503))
async def list_models(request: Request) -> ModelList:
    """List the served model and its adapters."""
    return ModelList(data=list(models_by_id(Services.of(request)).values()))


@router.get("/v1/models/{model:path}", responses=responses(401, 404, 421, 503))
async def retrieve_model(model: str, request: Request) -> Model:
    """Return one model or adapter. The name may contain slashes."""
    models = models_by_id(Services.of(request))
    if model not in models:
        raise UnknownModelError(model[:200], models)
    return models[model]


def requested_adapter(services: Services, model: str) -> str | None:
    """Return the adapter that a request names in its field ``model``; None if it names the model itself.

    Raises:
        UnknownModelError: the server has no model or adapter with this name.
    """
    if model == services.model_name:
        return None
    if model in services.worker.adapters:
        return model
    raise UnknownModelError(model[:200], [services.model_name, *services.worker.adapters])


def system_fingerprint(services: Services) -> str:
    """Return a fingerprint of the version of Penstock, the model, its revision and its encoding.

    If one of them changes, the output for a fixed seed may change.
    """
    model = services.pipeline_config.model
    parts = (__version__, model.model_path, model.revision, model.quantization_encoding or "")
    return f"fp_{blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"


def unloaded_model(services: Services) -> Model:
    """Return the entry of a model that is not loaded.

    Its maximum length is that of the tokenizer, or 0 if the tokenizer has none.
    """
    return Model(
        id=services.model_name,
        root=services.pipeline_config.model.model_path,
        created=_START_TIME,
        max_model_len=services.tokenizer.max_length or 0,
        task=services.task.option,
        input_modalities=["text", "image"] if services.tokenizer.reads_images else ["text"],
        outputs=[],
    )


def models_by_id(services: Services) -> dict[str, Model]:
    """Return id -> entry for a loaded model and its adapters."""
    base_model, info = unloaded_model(services), services.worker.info
    base_model = base_model.model_copy(update={"max_model_len": info.max_length, "outputs": info.outputs})
    models = {base_model.id: base_model}
    for adapter, path in services.worker.adapters.items():
        models[adapter] = base_model.model_copy(update={"id": adapter, "root": path, "parent": base_model.id})
    return models
