"""GET /, the chat page, and /report, the quality report of the model."""

from pathlib import Path

from fastapi import APIRouter, Response
from starlette.requests import Request as HttpRequest

from lowbit.formats.file_names import HTML_FILE
from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.service import service_of

router = APIRouter(tags=["page"])
FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is one file that shows what a model wrote: its own styles and pictures, no scripts.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; sandbox"
)


@router.get("/", response_model=None)
async def index(http: HttpRequest) -> Response:
    """The page."""
    return _file(FOLDER / INDEX, PAGE_POLICY)


@router.get("/page/{name}", response_model=None)
async def part(http: HttpRequest, name: str) -> Response:
    """A file of the page."""
    known = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}
    if name not in known:
        raise ApiError(404, "the page has no such file")
    return _file(known[name], PAGE_POLICY)


@router.get("/report", response_model=None)
async def report(http: HttpRequest) -> Response:
    """The quality report of the model's folder, where it has one."""
    path = service_of(http).model.folder / HTML_FILE
    if not path.is_file():
        raise ApiError(404, f"the model's folder has no {HTML_FILE}")
    return _file(path, REPORT_POLICY)


def _file(path: Path, policy: str) -> Response:
    headers = page_headers(policy)
    return Response(path.read_bytes(), headers=headers, media_type=TYPES[path.suffix])


def page_headers(policy: str) -> dict[str, str]:
    """Headers of what a browser shows, under a policy on its content."""
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
