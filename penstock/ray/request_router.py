"""`PreferredReplicaRouter`: makes Ray Serve send requests to the replicas that the ingress has chosen.

The ingress chooses a replica (`ReplicaChoice`) and passes its name as the session id of the request. Ray
Serve creates the router in the process of the ingress, and calls it for a list of replicas in order of
preference. Queue limits, retries and health checks are those of Ray Serve.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_NUM_FALLBACK_REPLICAS = 2
"""Number of random replicas of which Ray Serve takes the one with the shorter queue, if the preferred replica
is full or has ended."""


class PreferredReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks the replica that the session id of a request names first, then two other replicas."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas by preference; Ray Serve takes the first that is not full."""
        name = pending_request.metadata.session_id if pending_request is not None else ""
        preferred = [
            replica for replica in candidate_replicas if name and replica.replica_id.unique_id == name
        ]
        others = [replica for replica in candidate_replicas if replica not in preferred]
        sample = random.sample(others, min(_NUM_FALLBACK_REPLICAS, len(others)))
        return [rank for rank in (preferred, sample) if rank]
