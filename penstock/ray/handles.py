"""`ServeReplicas`: calls the replicas of a Ray Serve deployment through its ``DeploymentHandle``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException

from penstock.errors import UnavailableError
from penstock.ray.engine import ReplicaLostError

_REPORT_TIMEOUT = 10.0
"""Maximum seconds to wait until all replicas have answered a call of ``report`` or ``reset_prefix_cache``."""
_POLL_SECONDS = 0.2
"""Seconds between two checks whether the handle lists a running replica."""


class ServeReplicas:
    """Implements `Replicas` for a Ray Serve deployment of `EngineReplica`.

    Args:
        handle: the ``DeploymentHandle`` of the deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._generate_handle = handle.options(method_name="generate", stream=True)
        self._preferred_handles: dict[str, Any] = {}  # name of the preferred replica -> handle

    async def generate(self, frames: Sequence[bytes], preferred_replica: str) -> AsyncIterator[bytes]:
        """Send a request to a replica and yield the results.

        ``preferred_replica`` is the name of a replica, or empty. The name is passed as the session id of the
        request, which `PreferredReplicaRouter` reads.

        Raises:
            ReplicaLostError: the replica has ended or cannot be reached.
            UnavailableError: the replica raised an exception, or the request was cancelled.
        """
        handle = self._generate_handle
        if preferred_replica:
            if preferred_replica not in self._preferred_handles:
                self._preferred_handles[preferred_replica] = handle.options(session_id=preferred_replica)
            handle = self._preferred_handles[preferred_replica]
        response = handle.remote(list(frames))
        try:
            async for data in response:
                yield data
        except (RayError, RayServeException) as error:
            raise _request_error(error) from error
        finally:
            response.cancel()

    async def reports(self, positions: Mapping[str, int]) -> list[bytes]:
        """Return the encoded reports of the running replicas. If none runs, wait until one runs.

        Reports of replicas that raised an exception are left out.

        Raises:
            ReplicaLostError: the reports cannot be requested, or do not arrive in time.
        """
        self._preferred_handles = {
            name: handle for name, handle in self._preferred_handles.items() if name in positions
        }
        try:
            while not self._handle.running_replicas_populated():
                await self._handle.report.remote(
                    {}
                )  # waits for a replica and updates the handle's replica list
                await asyncio.sleep(_POLL_SECONDS)
            response = self._handle.broadcast("report", dict(positions))
            results = await response.results_async(timeout_s=_REPORT_TIMEOUT, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise ReplicaLostError(str(error)) from error
        return [report for report in results if isinstance(report, bytes)]

    async def reset_prefix_caches(self) -> None:
        """Clear the prefix caches of all replicas.

        Raises:
            UnavailableError: a replica did not answer, or its reset failed.
        """
        try:
            await self._handle.broadcast("reset_prefix_cache").results_async(timeout_s=_REPORT_TIMEOUT)
        except (RayError, RayServeException, TimeoutError) as error:
            raise UnavailableError(f"a replica did not reset its cache: {error}") from error


def _request_error(error: Exception) -> Exception:
    """Return `UnavailableError` if the replica raised or was cancelled, else `ReplicaLostError`."""
    if isinstance(error, RayTaskError | TaskCancelledError):
        return UnavailableError(f"the replica failed: {str(error).strip().splitlines()[-1]}")
    return ReplicaLostError(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
