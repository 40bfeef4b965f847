"""GET /health, /metrics and /v1/models."""

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request as HttpRequest

from lowbit.formats.file_names import HTML_FILE
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.engine.stats import load_of
from lowbit.runtime.serve.errors import ApiError, cut
from lowbit.runtime.serve.metrics import Collector, new_registry
from lowbit.runtime.serve.service import Service, service_of

router = APIRouter()


@router.get("/health", tags=["server"], response_model=None)
async def health(http: HttpRequest) -> Response:
    """200 while answers can be made, 503 else: a step failed or hangs, or the server ends."""
    service = service_of(http)
    failed = service.draining or service.failing or service.worker.error is not None
    status = "draining" if service.draining else "failed" if failed else "ok"
    content = {
        "status": status,
        "auth": service.settings.api_key is not None,
        "activations": service.model.options.activations,
        "report": (service.model.folder / HTML_FILE).is_file(),
    }
    return JSONResponse(content, 503 if failed else 200)


@router.get("/metrics", tags=["server"], response_model=None)
async def metrics(http: HttpRequest) -> Response:
    """Metrics for Prometheus."""
    service = service_of(http)
    engine = service.model.engine
    memory = service.grammars.memory
    collector = Collector(
        service.metrics,
        lambda: load_of(engine),
        service.name,
        service.model.options.activations,
        positions=0 if engine.drafting is None else engine.drafting.most,
        grammars=lambda: (memory.used, memory.waiting),
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
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "lowbit",
        "root": service.name,
        "parent": None,
        "max_model_len": service.model.context,
        "sampling": {name: getattr(defaults, name) for name in SETTINGS},
    }
