"""`PenstockServer`: the server class that runs Penstock as the engine of Ray Serve LLM (`ray.serve.llm`).

    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "chat", "model_source": "./model"},
        server_cls="penstock.ray.llm_server:PenstockServer",
        engine_kwargs={"max_length": 4096, "ray_cpus": 8},
    )
    serve.run(build_openai_app({"llm_configs": [config]}))

``engine_kwargs`` contains settings of the model, the server and Ray by their flat names
(docs/configuration.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from penstock.config import PipelineConfig, config_fields
from penstock.config.sources import collect_values
from penstock.errors import UnavailableError, UnsupportedFeatureError
from penstock.ray.config import RayConfig, ray_fields
from penstock.ray.deployment import Resources, engine_options, replica_config
from penstock.ray.local_server import LocalServer
from penstock.serve.batches.batch_dispatch import BATCH_CLIENT_ID
from penstock.serve.config import ServeConfig, serve_fields
from penstock.serve.http.internal_request import internal_request
from penstock.worker.engine_client import EngineClient

_HEADERS = ("x-request-id", "x-session-id")
"""Request headers that are passed to Penstock's routes.

API keys are not passed: Ray Serve LLM checks them.
"""


class PenstockServer:
    """Serves a model in a deployment of Ray Serve LLM, with Penstock's routes.

    Ray Serve LLM validates requests with its pydantic models, so a request can only have the fields of these
    models.

    Args:
        llm_config: the ``ray.serve.llm.LLMConfig``.
        engine: an engine client that has not been launched. The default runs the model in a worker process.

    Raises:
        ConfigError: ``engine_kwargs`` has an unknown name or an invalid value.
        CheckpointError: the model cannot be found.
    """

    def __init__(self, llm_config: Any, engine: EngineClient | None = None) -> None:
        self._llm_config = llm_config
        config, serve_config, ray_config = read_llm_config(llm_config)
        config = replica_config(config, Resources.of(config, ray_config))
        self._server = LocalServer(config, replace(serve_config, access_log=False), engine)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, object]:
        """Return the deployment options. Options in ``deployment_config`` replace Penstock's defaults."""
        config, serve_config, ray_config = read_llm_config(llm_config)
        options = engine_options(config, serve_config, ray_config, Resources.of(config, ray_config))
        options = {name: value for name, value in options.items() if name != "name"}
        user_options = dict(llm_config.deployment_config)
        if "num_replicas" in user_options or "autoscaling_config" in user_options:
            options.pop("num_replicas", None)
            options.pop("autoscaling_config", None)
        return {**options, **user_options, "user_config": user_options.get("user_config") or {}}

    async def reconfigure(self, user_config: object) -> None:
        """Load the model. Ray Serve calls this method before the replica gets requests."""
        await self.start()

    async def start(self) -> None:
        """Load the model."""
        await self._server.start()

    async def check_health(self) -> None:
        """Check that the worker is alive or is being restarted.

        Raises:
            UnavailableError: the worker has ended and is not restarted.
        """
        state = self._server.engine.state
        if state in ("stopping", "stopped"):
            raise UnavailableError(f"the worker is {state}")

    async def chat(self, request: object, raw_request_info: object = None) -> AsyncGenerator[object, None]:
        """Yield the response of ``/v1/chat/completions``, or the events of its stream."""
        async for chunk in self._answer(
            "/v1/chat/completions", "ChatCompletionResponse", request, raw_request_info
        ):
            yield chunk

    async def completions(
        self, request: object, raw_request_info: object = None
    ) -> AsyncGenerator[object, None]:
        """Yield the response of ``/v1/completions``, or the events of its stream."""
        async for chunk in self._answer("/v1/completions", "CompletionResponse", request, raw_request_info):
            yield chunk

    async def embeddings(
        self, request: object, raw_request_info: object = None
    ) -> AsyncGenerator[object, None]:
        """Yield the response of ``/v1/embeddings``."""
        async for chunk in self._answer("/v1/embeddings", "EmbeddingResponse", request, raw_request_info):
            yield chunk

    async def score(self, request: object, raw_request_info: object = None) -> AsyncGenerator[object, None]:
        """Yield the response of ``/v1/score``."""
        async for chunk in self._answer("/v1/score", "ScoreResponse", request, raw_request_info):
            yield chunk

    async def tokenize(
        self, request: object, raw_request_info: object = None
    ) -> AsyncGenerator[object, None]:
        """Yield the response of ``/tokenize``."""
        async for chunk in self._answer("/tokenize", "TokenizeResponse", request, raw_request_info):
            yield chunk

    async def detokenize(
        self, request: object, raw_request_info: object = None
    ) -> AsyncGenerator[object, None]:
        """Yield the response of ``/detokenize``."""
        async for chunk in self._answer("/detokenize", "DetokenizeResponse", request, raw_request_info):
            yield chunk

    async def transcriptions(
        self, request: object, raw_request_info: object = None
    ) -> AsyncGenerator[object, None]:
        """Yield an error response, because Penstock does not support transcription."""
        yield _error(400, "transcriptions are not supported", "invalid_request_error")

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        await self._server.engine.reset_prefix_cache()

    async def start_profile(self) -> None:
        """Start recording a profile of the worker. Requires ``profile_dir`` in ``engine_kwargs``."""
        await self._server.engine.start_profile()

    async def stop_profile(self) -> None:
        """Stop recording and write the profile."""
        await self._server.engine.stop_profile()

    async def sleep(self, **options: object) -> None:
        """Free memory. The option ``level`` is 1 for the KV cache, or 2 for the KV cache and the weights.

        Raises:
            UnsupportedFeatureError: the level or another option is not supported.
        """
        level = options.pop("level", 1)
        if options or level not in (1, 2):
            raise UnsupportedFeatureError(
                f"sleep with {options or level}", "the only option is level, 1 or 2"
            )
        await self._server.engine.sleep(level, self._server.services.config.shutdown_grace)

    async def wakeup(self, **options: object) -> None:
        """Load what `sleep` has freed and accept requests again.

        Raises:
            UnsupportedFeatureError: an option is given; there are no options.
        """
        if options:
            raise UnsupportedFeatureError(f"wakeup with {', '.join(options)}", "there are no options")
        await self._server.engine.wake_up()

    async def is_sleeping(self) -> bool:
        """Return whether the model is asleep."""
        return self._server.engine.state == "asleep"

    async def pause(self, **options: object) -> None:
        """Raise `UnsupportedFeatureError`: a worker supports only `sleep`."""
        raise UnsupportedFeatureError("pause", "use sleep")

    async def resume(self, **options: object) -> None:
        """Raise `UnsupportedFeatureError`: a worker supports only `wakeup`."""
        raise UnsupportedFeatureError("resume", "use wakeup")

    async def is_paused(self) -> bool:
        """Return False. `pause` is not supported."""
        return False

    async def llm_config(self) -> Any:
        """Return the ``LLMConfig`` of this server."""
        return self._llm_config

    async def stop(self) -> None:
        """Stop the worker. Without this call, the worker ends when the process of the replica ends."""
        await self._server.stop()

    async def _answer(
        self, path: str, response_class: str, request: Any, raw_request_info: Any
    ) -> AsyncIterator[Any]:
        """Run a route. Yield its response as an object of Ray Serve LLM, or its stream events as texts.

        If the route fails, yield an error as an object of Ray Serve LLM.

        Args:
            path: the path of the route.
            response_class: the name of the response class in Ray Serve LLM.
            request: a pydantic object of Ray Serve LLM.
            raw_request_info: has the headers of the HTTP request; None for no headers.
        """
        body = request.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        request_headers: Mapping[str, str] = {} if raw_request_info is None else raw_request_info.headers
        headers = {name: value for name, value in request_headers.items() if name.lower() in _HEADERS}
        async with internal_request(
            self._server.app, path, body, headers, client=BATCH_CLIENT_ID
        ) as response:
            if response.status != 200:
                error = msgspec.json.decode(await response.body())["error"]
                yield _error(response.status, error["message"], error.get("type") or "error")
            elif body.get("stream"):
                async for part in response.parts:
                    yield part.decode()
            else:
                content = msgspec.json.decode(await response.body())
                yield _response_types()[response_class].model_validate(content)


def read_llm_config(llm_config: Any) -> tuple[PipelineConfig, ServeConfig, RayConfig]:
    """Return the configurations of the model, the server and Ray for an ``LLMConfig``.

    Raises:
        ConfigError: ``engine_kwargs`` has an unknown name or an invalid value.
    """
    loading_config = llm_config.model_loading_config
    source = loading_config.model_source or loading_config.model_id
    flat = {
        "served_model_name": loading_config.model_id,
        **llm_config.engine_kwargs,
        "model_path": str(source),
    }
    fields = [*config_fields(), *serve_fields(), *ray_fields()]
    given_values = collect_values(fields, flat, "argument", {})
    return (
        PipelineConfig.from_given(given_values),
        ServeConfig.from_given(given_values),
        RayConfig.from_given(given_values),
    )


def _response_types() -> dict[str, Any]:
    """Return name -> response class of Ray Serve LLM. Its application checks the class of each response."""
    from ray.llm._internal.serve.core.configs import openai_api_models

    return dict(vars(openai_api_models))


def _error(status: int, message: str, error_type: str) -> Any:
    """Return an error as an object of Ray Serve LLM."""
    types = _response_types()
    return types["ErrorResponse"](error=types["ErrorInfo"](message=message, type=error_type, code=status))
