"""The application: all routes and middleware."""

from __future__ import annotations

from typing import Any

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


def create_app(services: Services, *more: APIRouter) -> FastAPI:
    """Return the application that serves one model. The caller starts the engine.

    Args:
        services: the objects that the routes use.
        more: additional routes, matched before the others.

    The application has ``/openapi.json`` but no documentation pages, which would load scripts from other
    servers.
    """
    app = FastAPI(
        title="Penstock",
        version=__version__,
        summary="An OpenAI-compatible server for one language model",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # redirects would go to the host in the Host header
        middleware=_middleware(services),
        exception_handlers={
            PenstockError: problems.handle,
            HTTPException: problems.handle,
            RequestValidationError: problems.handle,
        },
    )
    app.state.services = services
    for router in more:
        app.include_router(router)
    text = [_needs(PipelineTask.TEXT_GENERATION)]
    app.include_router(chat.router, dependencies=text)  # POST /v1/chat/completions, .../render
    app.include_router(completions.router, dependencies=text)  # POST /v1/completions
    app.include_router(response_routes.router, dependencies=text)  # POST, GET, DELETE /v1/responses
    app.include_router(message_routes.router, dependencies=text)  # POST /v1/messages, .../count_tokens
    if services.config.state_dir is not None and services.task is PipelineTask.TEXT_GENERATION:
        response_routes.open_state(services)
    app.include_router(ollama_routes.text_router, dependencies=text)  # POST /api/chat, /api/generate
    app.include_router(llama_cpp_routes.router, dependencies=text)  # POST /completion, /infill
    embedder = [_needs(PipelineTask.EMBEDDINGS_GENERATION)]
    app.include_router(embeddings.router, dependencies=embedder)  # POST /v1/embeddings, /pooling
    app.include_router(rerank.router, dependencies=embedder)  # POST /v1/rerank, /v2/rerank, /rerank
    app.include_router(scores.router, dependencies=embedder)  # POST /v1/score, /score
    app.include_router(classification.router, dependencies=embedder)  # POST /v1/classify, /classify
    app.include_router(ollama_routes.embedding_router, dependencies=embedder)  # POST /api/embed
    app.include_router(ollama_routes.router)  # /api/tags, /api/ps, /api/version, /api/show
    app.include_router(batch_routes.router)  # /v1/files, /v1/batches
    if services.config.state_dir is not None:
        batch_routes.open_manager(services, app)
    speaker = [_needs(PipelineTask.AUDIO_GENERATION)]
    app.include_router(speech.router, dependencies=speaker)  # POST /v1/audio/speech, GET /v1/audio/voices
    app.include_router(models.router)  # GET  /v1/models, /v1/models/{id}
    app.include_router(adapters.router)  # POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    app.include_router(tokenization.router)  # POST /tokenize, /detokenize
    app.include_router(controls.router)  # POST /sleep, /wake_up, /reload, /reset_prefix_cache, ..._profile
    app.include_router(operations.router)  # GET  /health, /ready, /version, /metrics
    if services.config.playground:
        app.include_router(playground.router)  # GET  /, /playground/...
    return app


def _needs(task: PipelineTask) -> Any:
    """Return the dependency of routes that only a model of this task can serve; others answer 400."""

    async def check(request: Request) -> None:
        served = Services.of(request).task
        if served is not task:
            raise TaskMismatchError(request.url.path, task.option, served.option)

    return Depends(check)


def _middleware(services: Services) -> list[Middleware]:
    """Return the middleware, the outermost first."""
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
