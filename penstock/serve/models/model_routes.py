"""The routes that concern all models of a server: their list, liveness and readiness."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request

from penstock.errors import UnknownModelError
from penstock.serve.api.models import Model, ModelList, models_by_id, unloaded_model
from penstock.serve.api.ollama.ollama_routes import model_entries
from penstock.serve.api.operations import Status
from penstock.serve.http.openapi import responses
from penstock.serve.http.problems import RequestProblem
from penstock.serve.models.registry import ModelRegistry, ServedModel
from penstock.serve.services import Services


def model_router(registry: ModelRegistry) -> APIRouter:
    """Return the router for the default model's application.

    Its routes replace the routes of that application that have the same paths.
    """
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=responses(401, 421, 503))
    async def list_models() -> ModelList:
        """List the served models and their adapters, including models that are not loaded."""
        return ModelList(data=list(_models_by_name(registry).values()))

    @router.get("/v1/models/{model:path}", responses=responses(401, 404, 421, 503))
    async def retrieve_model(model: str) -> Model:
        """Return one model or adapter."""
        models = _models_by_name(registry)
        if model not in models:
            raise UnknownModelError(model[:200], models)
        return models[model]

    @router.get("/api/tags")
    async def tags() -> dict[str, object]:
        """List all models and adapters, in Ollama's format."""
        return {"models": _ollama_entries(registry)}

    @router.get("/api/ps")
    async def running() -> dict[str, object]:
        """List the loaded models, in Ollama's format."""
        return {"models": _ollama_entries(model for model in registry if model.is_loaded)}

    @router.get("/health", responses=responses(503))
    @router.get("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    async def health() -> Status:
        """Return 200 if a model has been loaded and each loaded model is alive, else 503 (liveness).

        A model is alive while at least one of its workers responds or sleeps.
        """
        for model in registry:
            if model.is_loaded and not model.engine.is_alive:
                raise RequestProblem(503, f"the worker of {model.name} is {model.engine.state}")
        if not any(model.was_loaded for model in registry):
            raise RequestProblem(503, "the first model is being loaded")
        return Status(status="ok")

    @router.get("/ready", responses=responses(503))
    async def ready(request: Request) -> Status:
        """Return 200 if the server accepts requests now, else 503 (readiness)."""
        gate = Services.of(request).gate
        if gate.refusal_reason:
            raise RequestProblem(503, gate.refusal_reason)
        return Status(status="ready")

    return router


def _models_by_name(registry: ModelRegistry) -> dict[str, Model]:
    """Return name -> description of all models, and of the adapters of models that have been loaded."""
    models_by_name: dict[str, Model] = {}
    for model in registry:
        assert model.services is not None
        if model.was_loaded:
            models_by_name |= models_by_id(model.services)
        else:
            models_by_name[model.name] = unloaded_model(model.services)
    return models_by_name


def _ollama_entries(models: Iterable[ServedModel]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for model in models:
        assert model.services is not None
        entries += model_entries(model.services, [model.name, *model.engine.adapters])
    return entries
