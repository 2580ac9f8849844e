"""Error replies."""

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """Error reply to a request, in OpenAI's format.

    Args:
        status: HTTP status code.
        message: the error message for the client.
        param: the request field at fault.
        code: OpenAI's error code, if there is one.
        headers: the response's extra headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        error = {
            "message": str(self),
            "type": self._type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def _type(self) -> str:
        """OpenAI's name for this kind of error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"
