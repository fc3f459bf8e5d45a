"""`PreferredReplicaRouter`: makes Ray Serve send requests to the replicas that the ingress has chosen.

The ingress chooses replicas (`ReplicaChoice`) and names them as sessions. Ray Serve creates the router in the
process of the ingress, and asks it for replicas in the order of preference. Its queue limits, retries and
health checks are those of every deployment.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_NUM_OTHERS = 2
"""Replicas that Ray Serve compares if the preferred one is full or has ended: the shorter queue of two."""


class PreferredReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ranks the replica that is named as the session of a request first, and then two others."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates of a request in ranks; Ray Serve takes the first one that is not full."""
        name = pending_request.metadata.session_id if pending_request is not None else ""
        preferred = [
            replica for replica in candidate_replicas if name and replica.replica_id.unique_id == name
        ]
        others = [replica for replica in candidate_replicas if replica not in preferred]
        sample = random.sample(others, min(_NUM_OTHERS, len(others)))
        return [rank for rank in (preferred, sample) if rank]
