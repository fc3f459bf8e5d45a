"""`PreferredReplicaRouter`: a Ray Serve router that prefers the replica that the ingress has chosen.

The ingress chooses a replica (`ReplicaChoice`) and passes its name as the session id of the request. Ray
Serve creates the router in the process of the ingress. The router returns replicas in order of preference.
Ray Serve itself applies queue limits, retries and health checks.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

_NUM_FALLBACK_REPLICAS = 2
"""Maximum number of random replicas that the router offers besides the preferred replica.

If the preferred replica is full or has ended, Ray Serve uses the random replica with the shorter queue.
"""


class PreferredReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Returns the replica whose name is the session id of the request, then up to two random others."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in order of preference.

        Ray Serve uses the first group that has capacity.
        """
        name = pending_request.metadata.session_id if pending_request is not None else ""
        preferred_replicas = [
            replica for replica in candidate_replicas if name and replica.replica_id.unique_id == name
        ]
        other_replicas = [replica for replica in candidate_replicas if replica not in preferred_replicas]
        fallback_replicas = random.sample(other_replicas, min(_NUM_FALLBACK_REPLICAS, len(other_replicas)))
        return [group for group in (preferred_replicas, fallback_replicas) if group]
