"""The application: routes, and what stands around all of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from lowbit.formats.errors import LowbitError
from lowbit.runtime.serve.answers import ClientLeftError
from lowbit.runtime.serve.auth import check_access
from lowbit.runtime.serve.endpoints import (
    chat,
    completions,
    health,
    messages,
    models,
    page,
    responses,
    tokens,
)
from lowbit.runtime.serve.errors import ApiError, internal, of_lowbit
from lowbit.runtime.serve.openapi import with_schemas
from lowbit.runtime.serve.record import Record, record_of
from lowbit.runtime.serve.schemas.chat import ChatBody
from lowbit.runtime.serve.schemas.completions import CompletionBody
from lowbit.runtime.serve.schemas.messages import CountBody, MessagesBody
from lowbit.runtime.serve.schemas.responses import ResponsesBody
from lowbit.runtime.serve.schemas.tokens import DetokenizeBody, TokenizeBody
from lowbit.runtime.serve.service import Service

log = logging.getLogger("lowbit.serve")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
FAMILIES = (chat, completions, responses, messages, models, tokens, health, page)
BODIES = (
    *(ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountBody),
    *(TokenizeBody, DetokenizeBody),
)
CLIENT_LEFT = 499  # as nginx logs it; nobody reads the response


def build_app(service: Service) -> FastAPI:
    """The application that serves a model."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    app = FastAPI(
        title="lowbit",
        lifespan=lifespan,
        docs_url=None,  # their scripts would come from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for family in FAMILIES:
        app.include_router(family.router)
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    for kind, handler in (
        (ApiError, _failed),
        (LowbitError, _failed),
        (HTTPException, _failed),
        (RequestValidationError, _failed),
        (ClientLeftError, _failed),
    ):
        app.add_exception_handler(kind, handler)
    app.add_middleware(Outermost, service=service)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema = with_schemas(found, *BODIES)
    return app.openapi_schema


async def _failed(request: Request, error: Exception) -> Response:
    """An exception that an endpoint expects, as the API writes errors."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=CLIENT_LEFT)
    shown = _shown(request, error)
    record_of(request).error = shown.message
    return shown.response(request.scope["path"])


def _shown(request: Request, error: Exception) -> ApiError:
    """The error that the client sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LowbitError):
        return of_lowbit(error)
    if isinstance(error, HTTPException):
        method = f"{request.method} {request.scope['path']}"
        message = f"{method}: {error.detail}" if isinstance(error.detail, str) else method
        return ApiError(error.status_code, message, headers=error.headers or {})
    return ApiError(400, str(error))


class Outermost:
    """Checks the key, counts, logs, and turns a bug into an answer that shows nothing."""

    def __init__(self, app: Callable[..., Awaitable[None]], service: Service) -> None:
        """Stand around an application."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        record = scope["lowbit.record"] = Record()
        status = 0
        path = scope["path"]

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        service.active += 1
        try:
            check_access(path, scope["headers"], scope["http_version"], service.settings)
            if scope["method"] == "POST":
                service.check_crowd()
            await self._app(scope, receive, noting)
        except ApiError as error:
            record.error = error.message
            await error.response(path)(scope, receive, noting)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # those of libraries in Rust are no Exceptions
            log.exception("%s %s failed", scope["method"], path)
            if status:
                raise
            await internal().response(path)(scope, receive, noting)
        finally:
            service.active -= 1
            self._count(scope, record, status or CLIENT_LEFT)

    def _count(self, scope: Scope, record: Record, status: int) -> None:
        metrics = self._service.metrics
        route = getattr(scope.get("route"), "path", "other")
        metrics.responses[route, status] += 1
        metrics.finished.update(record.reasons)
        if record.prompt_tokens:
            metrics.whole.observe(record.seconds)
        log.info("%s", record.line(scope["method"], scope["path"], status))
        for text in record.text:
            log.info("%s", text)
