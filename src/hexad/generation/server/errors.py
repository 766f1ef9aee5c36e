"""Errors in OpenAI's form."""

from __future__ import annotations

from starlette.responses import JSONResponse

from hexad.config import ConfigError, HexadError

_FIELDS = {"tokens:": "max_tokens:", "samples:": "n:", "schema:": "response_format:"}
"""The fields of requests for options of commands."""


class RequestError(Exception):
    """An error that answers a request.

    Args:
        status: of HTTP.
        text: the message.
        kind: the error's type.
        param: the field that it is about.
        code: for programs.
    """

    def __init__(
        self,
        status: int,
        text: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        param = None if param is None else encodable(param)
        self.document = {"message": encodable(text), "type": kind, "param": param, "code": code}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse({"error": self.document}, self.status, headers)


def encodable(text: str) -> str:
    """A text in which halves of surrogate pairs, which JSON may have and UTF-8 has not, are escaped."""
    return text.encode(errors="backslashreplace").decode()


class ContextExceeded(ConfigError):
    """A prompt and its answer that are longer than the model's context."""


def refusal(error: HexadError) -> RequestError:
    """The answer to a request that cannot be used."""
    code = "context_length_exceeded" if isinstance(error, ContextExceeded) else None
    error = error.worded(lambda name: _FIELDS.get(name, name))
    return RequestError(
        400, str(error), param=error.field if isinstance(error, ConfigError) else None, code=code
    )


def about(field: str, text: str) -> ConfigError:
    """An error about a field, with this message."""
    error = ConfigError(field, text.removeprefix(f"{field}: "))
    if text.startswith(f"{field}["):
        error.args = (text,)
    return error


def too_many(text: str) -> RequestError:
    """The answer to a request for which there is no room now."""
    return RequestError(429, f"{text}; try again", "rate_limit_error", code="rate_limit_exceeded")
