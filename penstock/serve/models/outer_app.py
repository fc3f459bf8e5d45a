"""The outer application of a server with several models."""

from __future__ import annotations

from starlette.types import ASGIApp

from penstock.serve.app import create_app, make_middleware, task_for_path
from penstock.serve.batches import batch_routes
from penstock.serve.models.dispatch import ModelDispatcher
from penstock.serve.models.model_routes import model_router
from penstock.serve.models.registry import ModelRegistry


def make_outer_app(registry: ModelRegistry) -> ASGIApp:
    """Create one application per model, and return the outer application that dispatches each request.

    The outer application has the middleware, and also receives the requests of batches. The default model's
    application has the routes that concern all models.

    Raises:
        ConfigError: ``--state-dir`` cannot be used.
    """
    services = registry.default.services
    assert services is not None
    config = services.config
    all_models_router = model_router(registry)
    for model in registry:
        assert model.services is not None
        model.app = create_app(
            model.services, *([all_models_router] if model is registry.default else []), is_inner=True
        )
    outer_app: ASGIApp = ModelDispatcher(registry, task_for_path, config.max_body_size, config.body_timeout)
    for layer in reversed(make_middleware(services)):
        outer_app = layer.cls(outer_app, *layer.args, **layer.kwargs)
    if config.state_dir is not None:
        batch_routes.open_manager(services, outer_app)
    return outer_app
