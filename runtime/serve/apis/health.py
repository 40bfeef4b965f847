"""GET /health and /metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from lowbit.formats.file_names import HTML_FILE
from lowbit.runtime.engine.stats import load_of
from lowbit.runtime.serve.metrics import Collector, new_registry
from lowbit.runtime.serve.service import service_of

router = APIRouter(tags=["server"])


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while answers can be made, 503 else: a step failed or hangs, or the server ends."""
    service = service_of(request)
    failed = service.draining or service.failing or service.worker.error is not None
    status = "draining" if service.draining else "failed" if failed else "ok"
    content = {
        "status": status,
        "auth": service.settings.api_key is not None,
        "report": (service.model.folder / HTML_FILE).is_file(),
    }
    return JSONResponse(content, 503 if failed else 200)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service = service_of(request)
    engine = service.model.engine
    memory = service.grammars.memory
    collector = Collector(
        service.metrics,
        lambda: load_of(engine),
        service.name,
        positions=0 if engine.drafting is None else engine.drafting.most,
        grammars=lambda: (memory.used, memory.waiting),
    )
    return Response(generate_latest(new_registry(collector)), media_type=CONTENT_TYPE_LATEST)
