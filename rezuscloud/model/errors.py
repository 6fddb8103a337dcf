"""Owns the error tree: every failure that a client may be told of, with its HTTP code and reason.

    ApiError
    ├── BadRequest 400          ├── AlreadyExists 409     ├── Invalid 422
    ├── Unauthorized 401        ├── Conflict 409          ├── TooManyRequests 429
    ├── Forbidden 403           ├── Expired 410           ├── InternalError 500
    ├── NotFound 404            ├── TooLarge 413          ├── Unavailable 503
    ├── MethodNotAllowed 405    └── UnsupportedMediaType 415  └── InsufficientStorage 507

Each becomes a Kubernetes `Status` by `to_status()`.
It does not decide how HTTP carries them (`http/errors.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Cause:
    """One reason of an error, at a field path such as `spec.replicas`.

    `reason` is one of Kubernetes' words: FieldValueInvalid, FieldValueRequired, FieldValueNotSupported,
    FieldValueDuplicate, FieldValueForbidden.
    """

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class ApiError(Exception):
    """A failure with a name. `message` says what failed and what to do."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    def __init__(
        self,
        message: str,
        *,
        causes: Iterable[Cause] = (),
        kind: str = "",
        name: str = "",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.causes: Sequence[Cause] = tuple(causes)
        self.kind = kind
        self.name = name
        self.retry_after_s = retry_after_s

    def to_status(self) -> dict[str, Any]:
        """The Kubernetes Status object (core/v1, api-conventions "Response Status Kind")."""
        details: dict[str, Any] = {}
        if self.name:
            details["name"] = self.name
        if self.kind:
            details["kind"] = self.kind
        if self.causes:
            details["causes"] = [
                {"reason": cause.reason, "message": cause.message, "field": cause.field}
                for cause in self.causes
            ]
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if details:
            status["details"] = details
        return status


class BadRequest(ApiError):
    code, reason = 400, "BadRequest"


class Unauthorized(ApiError):
    code, reason = 401, "Unauthorized"


class Forbidden(ApiError):
    code, reason = 403, "Forbidden"


class NotFound(ApiError):
    code, reason = 404, "NotFound"


class MethodNotAllowed(ApiError):
    code, reason = 405, "MethodNotAllowed"


class AlreadyExists(ApiError):
    code, reason = 409, "AlreadyExists"


class Conflict(ApiError):
    code, reason = 409, "Conflict"


class Expired(ApiError):
    code, reason = 410, "Expired"


class TooLarge(ApiError):
    code, reason = 413, "RequestEntityTooLarge"


class UnsupportedMediaType(ApiError):
    code, reason = 415, "UnsupportedMediaType"


class Invalid(ApiError):
    code, reason = 422, "Invalid"

    @classmethod
    def of(cls, kind: str, name: str, causes: Iterable[Cause]) -> Invalid:
        """The usual sentence of Kubernetes, from its causes."""
        causes = tuple(causes)
        said = "; ".join(f"{cause.field}: {cause.message}" for cause in causes)
        return cls(f'{kind} "{name}" is invalid: {said}', causes=causes, kind=kind, name=name)


class TooManyRequests(ApiError):
    code, reason = 429, "TooManyRequests"


class InternalError(ApiError):
    code, reason = 500, "InternalError"


class Unavailable(ApiError):
    code, reason = 503, "ServiceUnavailable"


class InsufficientStorage(ApiError):
    code, reason = 507, "InsufficientStorage"
