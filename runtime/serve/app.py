"""The application: all routes, and the layer around them that checks, counts and logs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from lowbit.formats.errors import LowbitError
from lowbit.runtime.serve.apis import (
    chat,
    completions,
    docs,
    messages,
    page,
    responses,
    status,
    tokens,
)
from lowbit.runtime.serve.apis.common import DirectRoute
from lowbit.runtime.serve.auth import check_access, client_of
from lowbit.runtime.serve.errors import ApiError, ClientLeftError, cut, of_lowbit
from lowbit.runtime.serve.logs import LEFT_OUT, REQUEST_ID, Record, id_of
from lowbit.runtime.serve.service import Service, record_of

log = logging.getLogger("lowbit.serve")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
APIS = (chat, completions, responses, messages, status, tokens, page, docs)
BODIES = (
    *(chat.ChatBody, completions.CompletionBody, responses.ResponsesBody),
    *(messages.MessagesBody, messages.CountBody),
    *(tokens.TokenizeBody, tokens.DetokenizeBody),
)
HANDLED = (ApiError, LowbitError, HTTPException, RequestValidationError, ClientLeftError)
V1 = "/v1"
SENT_PATH = "lowbit.path"  # key of a scope: the path as the client sent it
CLIENT_LEFT = 499  # nginx's status for a client that left; nobody reads the response


def build_app(service: Service) -> App:
    """Build the application that serves a model."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="lowbit",
        version=version("lowbit"),
        lifespan=lifespan,
        docs_url=None,  # their scripts would come from elsewhere; `apis.docs` has none
        redoc_url=None,
    )
    app.state.service = service
    for api in APIS:
        app.include_router(api.router)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    for kind in HANDLED:
        app.add_exception_handler(kind, _failed)
    app.add_middleware(Outermost, service=service)
    front = Front(app, service)
    if not service.settings.cors_origins:
        return front
    return CORSMiddleware(
        front,
        allow_origins=list(service.settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID.decode(), LEFT_OUT.decode()],
    )


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema = docs.with_schemas(found, *BODIES)
    return app.openapi_schema


async def _failed(request: HttpRequest, error: Exception) -> Response:
    """Answer with the error of an endpoint, as its API writes errors."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=CLIENT_LEFT)
    shown = _shown(request, error)
    record_of(request).error = shown.message
    return shown.response(request.scope["path"])


def _shown(request: HttpRequest, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LowbitError):
        return of_lowbit(error)
    if isinstance(error, HTTPException):
        method = f"{request.method} {cut(request.scope[SENT_PATH])}"
        message = f"{method}: {error.detail}" if isinstance(error.detail, str) else method
        return ApiError(error.status_code, message, headers=error.headers or {})
    return ApiError(400, str(error))


class Front:
    """The whole application: direct routes are called below `Outermost`, all else by FastAPI.

    FastAPI's layers, which look for the route, handle errors and pass each event on, take a tenth
    of a request.
    """

    def __init__(self, app: FastAPI, service: Service) -> None:
        """Wrap an application that has `Outermost` around it."""
        self._app = app
        self._routes = {
            route.path: route
            for api in APIS
            for route in api.router.routes
            if isinstance(route, DirectRoute) and route.methods == {"POST"}
        }
        self._outermost = Outermost(self._direct, service)
        own: list[str] = [route.path for api in APIS for route in api.router.routes]
        self._below = {path.split("/")[2] for path in own if path.startswith(V1)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the application's life."""
        if "path" in scope:
            scope[SENT_PATH] = scope["path"]
            scope["path"] = self._own_path(scope["path"])
        direct = scope.get("method") == "POST" and scope["path"] in self._routes
        await (self._outermost if direct else self._app)(scope, receive, send)

    def _own_path(self, path: str) -> str:
        """The path of a route that a client means.

        Clients put it behind a base URL that may lack `/v1`, or have it beside the client's own.
        """
        root, _, rest = path.removeprefix(V1).removeprefix(V1).partition("/")
        return f"{V1}/{rest}" if not root and rest.split("/")[0] in self._below else path

    async def _direct(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the endpoint of a direct route; errors are answered as FastAPI does."""
        route = scope["route"] = self._routes[scope["path"]]
        scope["app"] = self._app
        http = HttpRequest(scope, receive, send)
        try:
            response: Response = await route.endpoint(http)
            await response(scope, receive, send)
        except HANDLED as error:
            if record_of(http).status:
                raise RuntimeError("an error came when the response had begun") from error
            response = await _failed(http, error)
            await response(scope, receive, send)


class Outermost:
    """Outermost layer: checks the key, counts, logs, and answers 500 to a bug, without details.

    A HEAD is answered like a GET; the connection leaves its body out.
    """

    def __init__(self, app: App, service: Service) -> None:
        """Wrap an application."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        client = client_of(scope)
        record = scope["lowbit.record"] = Record(client, id_of(scope["headers"]))
        path, sent = scope["path"], scope[SENT_PATH]
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *record.headers]}
            await send(message)

        service.enter(client)
        try:
            check_access(path, scope["headers"], scope["http_version"], service.settings)
            if path.endswith("\n"):  # the end of a route's pattern matches before it
                raise ApiError(404, f"{scope['method']} {cut(sent)}: Not Found")
            if scope["method"] == "POST":
                service.check_pending(client)
            await self._app(asked, receive, noting)
        except ApiError as error:
            record.error = error.message
            await error.response(path)(scope, receive, noting)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # those of libraries in Rust are no Exceptions
            log.exception("%s %s failed", scope["method"], cut(sent))
            if record.status:
                raise
            # It tells nothing about the machine; the log has the rest.
            bug = ApiError(500, "the server failed; its log says why", "server_error")
            await bug.response(path)(scope, receive, noting)
        finally:
            route = getattr(asked.get("route"), "path", "other")
            try:  # a request is active until the log and the metrics have it
                self._count(scope, record, route, record.status or CLIENT_LEFT)
            finally:
                service.leave(client)

    def _count(self, scope: Scope, record: Record, route: str, status: int) -> None:
        metrics = self._service.metrics
        metrics.responses[route, status] += 1
        metrics.finished.update(record.reasons)
        if record.prompt_tokens:
            metrics.whole.observe(record.seconds)
        log.info("%s", record.line(scope["method"], scope[SENT_PATH], status))
        for text in record.text:
            log.info("%s", text)
