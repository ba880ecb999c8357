"""The page at /: one HTML file, style and script inside, which may load nothing and talk to this server alone."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response


@cache
def _page() -> tuple[str, str]:
    """The file, and a Content-Security-Policy that lets its own script and style run and no others."""
    text = resources.files("cuq1.serve").joinpath("page.html").read_text(encoding="utf-8")
    allowed = {
        tag: " ".join(f"'sha256-{_hash(body)}'" for body in re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
        for tag in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def _hash(body: str) -> str:
    return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()


async def page(_request: Request) -> Response:
    """The route's handler."""
    text, policy = _page()
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )
