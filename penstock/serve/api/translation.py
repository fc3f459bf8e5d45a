"""`Translation`: a client's request of another API, translated to a chat or completion request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.serve.api.conversation import Conversation
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services

_INDEXED_FIELD = re.compile(r"(messages|tools)\[(\d+)\](.*)", re.DOTALL)


@dataclass(frozen=True)
class Translation:
    """A client's request of another API, translated to a chat or completion request.

    Errors that name fields of the translated request are converted to errors that name the client's fields.
    """

    translated_body: Mapping[str, object]
    """The decoded body of the chat or completion request."""
    message_paths: Sequence[str]
    """The field of the client's request from which each message comes."""
    tool_paths: Sequence[str] = ()
    """The field of the client's request from which each tool comes."""
    client_field_names: Mapping[str, str] = field(default_factory=dict)
    """Field of `translated_body` -> field of the client's request, for fields with different names.

    The key ``tools.NAME`` is the field NAME of each tool.
    """

    def conversation(self, services: Services, request_id: str) -> Conversation:
        """Validate the chat request and render its prompt. Blocks: call it in a thread pool.

        Raises:
            RequestProblem: 400; the message names the invalid field of the client's request.
            UnknownModelError: the server has no model or adapter with the requested name.
        """
        with self.with_client_fields():
            return Conversation.of(services, self.translated_body, request_id)

    @contextmanager
    def with_client_fields(self) -> Iterator[None]:
        """Replace the field names in a `RequestProblem` of the ``with`` block by the client's field names."""
        try:
            yield
        except RequestProblem as problem:
            param = None if problem.param is None else self._client_path(problem.param)
            message = self._translated_message(problem.message, problem.param, param)
            raise RequestProblem(
                problem.status_code,
                message,
                param=param,
                code=problem.code,
                type=problem.type,
                headers=problem.headers,
            ) from problem

    def _client_path(self, param: str) -> str:
        if match := _INDEXED_FIELD.fullmatch(param):
            field_paths = self.message_paths if match[1] == "messages" else self.tool_paths
            index = int(match[2])
            field_path = (
                field_paths[index]
                if index < len(field_paths)
                else self.client_field_names.get(match[1], match[1])
            )
            return field_path + (self._tool_field(match[3]) if match[1] == "tools" else "")
        for name, client_field in self.client_field_names.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                return client_field + param[len(name) :]
        return param

    def _tool_field(self, path: str) -> str:
        name = path.removeprefix(".function").removeprefix(".")
        return f".{self.client_field_names.get(f'tools.{name}', name)}" if name else ""

    def _translated_message(self, message: str, param: str | None, field_path: str | None) -> str:
        if param is not None and field_path is not None:
            message = message.replace(param, field_path)
        for name, client_field in self.client_field_names.items():
            message = re.sub(rf"(?<![\w.\[]){re.escape(name)}(?!\w)", client_field, message)
        return message
