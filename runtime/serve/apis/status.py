"""GET /health, /metrics and /v1/models."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request as HttpRequest

from lowbit.formats.errors import LowbitError
from lowbit.formats.file_names import HTML_FILE
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.serve.errors import ApiError, cut
from lowbit.runtime.serve.metrics import Collector, new_registry
from lowbit.runtime.serve.service import Service, service_of

router = APIRouter()
LOAD_S = 5.0  # until the engine must have said its load, and other processes their counts


@router.get("/health", tags=["server"], response_model=None)
async def health(http: HttpRequest) -> Response:
    """200 while answers can be made, 503 else: a step failed or hangs, or the server ends."""
    service = service_of(http)
    failed = service.draining or service.failing or service.engine.problem is not None
    status = "draining" if service.draining else "failed" if failed else "ok"
    content = {
        "status": status,
        "auth": service.settings.api_key is not None,
        "activations": service.model.activations,
        "report": (service.model.folder / HTML_FILE).is_file(),
    }
    return JSONResponse(content, 503 if failed else 200)


@router.get("/metrics", tags=["server"], response_model=None)
async def metrics(http: HttpRequest) -> Response:
    """Metrics for Prometheus; 503 where another process does not say its part."""
    service = service_of(http)
    try:
        async with asyncio.timeout(LOAD_S):
            found = await service.engine.load()
    except (LowbitError, TimeoutError):
        raise ApiError(503, "the engine does not answer", "server_error") from None
    try:
        async with asyncio.timeout(LOAD_S):
            counts = await service.all_metrics()
    except TimeoutError:
        raise ApiError(503, "another HTTP process does not answer", "server_error") from None
    collector = Collector(
        counts,
        found,
        service.name,
        service.model.activations,
        service.model.positions,
    )
    return Response(generate_latest(new_registry(collector)), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", tags=["models"], response_model=None)
async def list_models(http: HttpRequest) -> dict[str, Any]:
    """The model, under each of its names."""
    service = service_of(http)
    found = [_model(service, name) for name in service.settings.names]
    return {
        "object": "list",
        "data": found,
        "has_more": False,
        "first_id": found[0]["id"],
        "last_id": found[-1]["id"],
    }


@router.get("/v1/models/{name:path}", tags=["models"], response_model=None)
async def get_model(http: HttpRequest, name: str) -> dict[str, Any]:
    """The model, by one of its names."""
    service = service_of(http)
    if not service.has_name(name):
        raise ApiError(404, f"the model `{cut(name)}` does not exist", code="model_not_found")
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    defaults = service.model.defaults
    inputs = ["text"] if service.model.prompts.images is None else ["text", "image"]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        # Names of Anthropic's API
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "max_input_tokens": service.model.context,
        "max_tokens": service.model.context,
        "owned_by": "lowbit",
        "root": service.name,
        "parent": None,
        "max_model_len": service.model.context,
        "architecture": {"input_modalities": inputs, "output_modalities": ["text"]},
        "sampling": {name: getattr(defaults, name) for name in SETTINGS},
    }
