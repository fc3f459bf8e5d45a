"""The outer application of a server with several models."""

from __future__ import annotations

from starlette.types import ASGIApp

from penstock.serve.app import create_app, make_middleware, task_for_path
from penstock.serve.batches import batch_routes
from penstock.serve.models.dispatch import ModelDispatcher
from penstock.serve.models.model_routes import model_router
from penstock.serve.models.registry import ModelRegistry


def make_front(registry: ModelRegistry) -> ASGIApp:
    """Create the application of each model. Return the outer application that dispatches requests to them.

    The outer application has the middleware, and it runs the requests of batches. The default model's
    application has the routes that concern all models.
    """
    services = registry.default.services
    assert services is not None
    config = services.config
    routes = model_router(registry)
    for model in registry:
        assert model.services is not None
        model.app = create_app(
            model.services, *([routes] if model is registry.default else []), is_inner=True
        )
    front: ASGIApp = ModelDispatcher(registry, task_for_path, config.max_body_size, config.body_timeout)
    for layer in reversed(make_middleware(services)):
        front = layer.cls(front, *layer.args, **layer.kwargs)
    if config.state_dir is not None:
        batch_routes.open_manager(services, front)
    return front
