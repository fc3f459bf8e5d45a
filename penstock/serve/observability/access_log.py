"""The access log: one line at the end of each request."""

from __future__ import annotations

import logging

from penstock.serve.observability.logs import log_event
from penstock.serve.observability.request_record import RequestRecord

_log = logging.getLogger(__name__)


def log_request(record: RequestRecord, *, is_probe: bool = False) -> None:
    """Log a request that has ended. Probes are logged at level debug."""
    log_event(_log, logging.DEBUG if is_probe else logging.INFO, "request", **log_fields(record))


def log_fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of the log line. Unknown values are None. No field contains prompt or output text."""
    fields: dict[str, object] = {
        "id": record.request_id,
        "method": record.method,
        "route": record.route,
        "status": record.final_status,
        "outcome": record.outcome,
        "model": record.model,
        "stream": record.stream or None,
        "queue_s": _rounded_seconds(record.seconds_until(record.admitted_at)),
        "first_token_s": _rounded_seconds(record.seconds_until(record.first_token_at)),
        "total_s": _rounded_seconds(record.seconds_until(record.ended_at)),
        "user": record.user,
        "safety_identifier": record.safety_identifier,
        "metadata": record.metadata,
        **record.details,
    }
    if record.audio_seconds:
        fields["first_audio_s"] = _rounded_seconds(record.seconds_until(record.first_audio_at))
        fields["audio_s"] = _rounded_seconds(record.audio_seconds)
    if record.model is not None:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["completion_tokens"] = record.completion_tokens
    return fields


def _rounded_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
