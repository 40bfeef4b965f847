"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter, Request

from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.serve.errors import ApiError, cut
from lowbit.runtime.serve.service import Service, service_of

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> dict[str, Any]:
    """The model, under each of its names."""
    service = service_of(request)
    found = [_model(service, name) for name in service.settings.names]
    return {
        "object": "list",
        "data": found,
        "has_more": False,
        "first_id": found[0]["id"],
        "last_id": found[-1]["id"],
    }


@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """The model, by one of its names."""
    service = service_of(request)
    if not service.settings.has_name(name):
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
