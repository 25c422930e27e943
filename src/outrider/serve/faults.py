"""What can go wrong with a request, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from ..errors import BadInput, OutOfMemory, OutriderError

INVALID = "invalid_request_error"


class Fault(Exception):
    """An answer that is an error. `code` and `param` as in OpenAI's errors, `retry_after` in seconds."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object to send."""
        return {"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        more = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        return more | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def kind(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status, INVALID)


def of(error: Exception) -> Fault:
    """What a user is told of an exception: all of it where it is theirs to mend, little where it is not."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, BadInput):
        return Fault(400, str(error), "invalid_value")
    if isinstance(error, OutOfMemory):
        return Fault(400, str(error), "context_length_exceeded")
    if isinstance(error, OutriderError):
        return Fault(500, str(error))
    return Fault(500, "the server made a mistake; its log has the details under this request's id", "internal_error")


def too_long(tokens: int, context: int) -> Fault:
    """A prompt that leaves no room for an answer."""
    message = f"the prompt has {tokens} tokens, but the context holds {context}, answer included; shorten the prompt"
    return Fault(400, message, "context_length_exceeded", "messages")
