"""Creates the FastAPI application with all routes and middleware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from penstock import __version__
from penstock.errors import PenstockError, TaskMismatchError
from penstock.pipelines.core import PipelineTask
from penstock.serve import playground
from penstock.serve.api import (
    adapters,
    chat,
    classification,
    completions,
    controls,
    embeddings,
    models,
    operations,
    rerank,
    scores,
    speech,
    tokenization,
)
from penstock.serve.api.llama_cpp import llama_cpp_routes
from penstock.serve.api.messages import message_routes
from penstock.serve.api.ollama import ollama_routes
from penstock.serve.api.responses import response_routes
from penstock.serve.batches import batch_routes
from penstock.serve.http import problems
from penstock.serve.http.middleware import AdmissionMiddleware, ObservabilityMiddleware
from penstock.serve.http.origins import OriginMiddleware
from penstock.serve.services import Services

TASK_ROUTERS: Mapping[PipelineTask, Sequence[APIRouter]] = {
    PipelineTask.TEXT_GENERATION: (
        chat.router,  # POST /v1/chat/completions, .../render
        completions.router,  # POST /v1/completions
        response_routes.router,  # POST, GET, DELETE /v1/responses
        message_routes.router,  # POST /v1/messages, .../count_tokens
        ollama_routes.text_router,  # POST /api/chat, /api/generate
        llama_cpp_routes.router,  # POST /completion, /infill
    ),
    PipelineTask.EMBEDDINGS_GENERATION: (
        embeddings.router,  # POST /v1/embeddings, /pooling
        rerank.router,  # POST /v1/rerank, /v2/rerank, /rerank
        scores.router,  # POST /v1/score, /score
        classification.router,  # POST /v1/classify, /classify
        ollama_routes.embedding_router,  # POST /api/embed
    ),
    PipelineTask.AUDIO_GENERATION: (speech.router,),  # POST /v1/audio/speech, GET /v1/audio/voices
}
"""Task -> routers of the routes that require a model for this task."""


def create_app(services: Services, *extra_routers: APIRouter, is_inner: bool = False) -> FastAPI:
    """Return the application that serves one model. The caller must start the engine.

    The application has ``/openapi.json``, but no documentation pages. Such pages would load scripts from
    other servers.

    Args:
        services: the objects that the routes use.
        *extra_routers: additional routes. They are matched before all other routes.
        is_inner: whether an outer application dispatches requests to this application. The outer application
            then applies the middleware and runs the batches.

    Raises:
        ConfigError: ``--state-dir`` cannot be used.
    """
    app = FastAPI(
        title="Penstock",
        version=__version__,
        summary="An OpenAI-compatible server for one model",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # redirects would go to the host in the Host header
        middleware=[] if is_inner else make_middleware(services),
        exception_handlers={
            PenstockError: problems.handle,
            HTTPException: problems.handle,
            RequestValidationError: problems.handle,
        },
    )
    app.state.services = services
    for router in extra_routers:
        app.include_router(router)
    for task, routers in TASK_ROUTERS.items():
        for router in routers:
            app.include_router(router, dependencies=[Depends(TaskCheck(task))])
    if services.config.state_dir is not None and services.task is PipelineTask.TEXT_GENERATION:
        response_routes.open_state(services)
    app.include_router(ollama_routes.router)  # /api/tags, /api/ps, /api/version, /api/show
    app.include_router(batch_routes.router)  # /v1/files, /v1/batches
    if services.config.state_dir is not None and not is_inner:
        batch_routes.open_manager(services, app)
    app.include_router(models.router)  # GET  /v1/models, /v1/models/{id}
    app.include_router(adapters.router)  # POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    app.include_router(tokenization.router)  # POST /tokenize, /detokenize
    app.include_router(controls.router)  # POST /sleep, /wake_up, /reload, /reset_prefix_cache, ..._profile
    app.include_router(operations.router)  # GET  /health, /ping, /load, /ready, /version, /metrics
    if services.config.playground:
        app.include_router(playground.router)  # GET  /, /playground/...
    return app


@dataclass(frozen=True)
class TaskCheck:
    """FastAPI dependency of the routes of one task. It refuses requests if the model has another task."""

    task: PipelineTask

    async def __call__(self, request: Request) -> None:
        """Raise a `TaskMismatchError` (400) if the model is loaded for another task."""
        served_task = Services.of(request).task
        if served_task is not self.task:
            raise TaskMismatchError(request.url.path, self.task.option, served_task.option)


def task_for_path(path: str) -> PipelineTask | None:
    """Return the task of the route at a path.

    None for paths of all tasks, paths with parameters such as ``/v1/responses/ID``, and unknown paths.
    """
    for task, routers in TASK_ROUTERS.items():
        for router in routers:
            if any(getattr(route, "path", None) == path for route in router.routes):
                return task
    return None


def make_middleware(services: Services) -> list[Middleware]:
    """Return the middleware of the application, outermost first."""
    layers = [
        Middleware(ObservabilityMiddleware, services=services),
        Middleware(OriginMiddleware, config=services.config),
        Middleware(AdmissionMiddleware, services=services),
    ]
    origins = services.config.cors_origins
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        layers.insert(1, cors)
    return layers
