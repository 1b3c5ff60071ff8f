"""`ApiError`: an error as clients of OpenAI's interface read it."""

from __future__ import annotations

import math
from typing import Any


class ApiError(Exception):
    """Ends a request with a status and a body that says why."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        # Seconds after which asking again may help.
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """JSON of the answer."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else _WRONG)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        made = {}
        if self.retry_after is not None:
            made["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 408:
            # The rest of the body would be taken for a request. That of one that is too large is
            # read and dropped for a while instead: closed at once, its client would see no answer.
            made["connection"] = "close"
        if self.status == 401:
            made["www-authenticate"] = "Bearer"
        return made


_WRONG = "invalid_request_error"
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Makes the error of a request that cannot be answered as it is."""
    return ApiError(400, message, param, code)


def overloaded(message: str, seconds: float) -> ApiError:
    """Makes the error of a request that comes at a bad time."""
    return ApiError(429, message, code="overloaded", retry_after=seconds)
