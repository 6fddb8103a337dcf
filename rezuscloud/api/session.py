"""Owns login over HTTP: a name and a password for a token.

What a password or a token is worth is decided in `access/identity.py`.
"""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from rezuscloud.access.identity import Sessions
from rezuscloud.http.body import read_document
from rezuscloud.http.errors import json_response
from rezuscloud.http.keys import TOLD
from rezuscloud.model.errors import Cause, Invalid
from rezuscloud.model.meta import format_time


class SessionRoutes:
    """The handlers of /api/v1/auth."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def login(self, request: web.Request) -> web.Response:
        """`{"username", "password"}` → `{"token", "expiresAt"}`."""
        request[TOLD].verb = "login"
        username, password = _credentials(await read_document(request))
        token, expires = await self._sessions.login(username, password, request.remote or "")
        return json_response(orjson.dumps({"token": token, "expiresAt": format_time(expires)}))


def _credentials(body: Any) -> tuple[str, str]:
    if not isinstance(body, dict):
        raise Invalid.of("Login", "", [Cause("", "must be an object with username and password")])
    causes = []
    for field in ("username", "password"):
        if field not in body:
            causes.append(Cause(field, "is required", "FieldValueRequired"))
        elif not isinstance(body[field], str):
            causes.append(Cause(field, "must be a string"))
    if causes:
        raise Invalid.of("Login", "", causes)
    return body["username"], body["password"]
