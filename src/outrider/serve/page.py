"""The page at `/`: one file, which asks for nothing from anywhere else."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> APIRouter:
    """A route that gives the page."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def show() -> Response:
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        return HTMLResponse(text, headers=headers)

    return router
