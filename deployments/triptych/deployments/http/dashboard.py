"""The dashboard: one self-contained HTML page, and the snapshots that it draws."""

import base64
import hashlib
import re
import secrets
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from starlette.responses import Response

from triptych.deployments.http.interfaces import ModelCard
from triptych.deployments.http.json_frames import JsonResponse
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.snapshots import Snapshot

DashboardSource = Callable[[], Awaitable[Mapping[str, object]]]
"""Fetches the state of routers, pools and workers, as JSON of bounded size."""

MAX_AGE_S = 0.5
"""Age up to which a snapshot is reused: routers are asked once per interval for all viewers."""

PAGE = Path(__file__).with_name("dashboard.html")


async def no_dashboard() -> Mapping[str, object]:
    """The default of ``create_app``: the page shows only the ingress."""
    return {}


def content_policy(page: str) -> str:
    """A Content-Security-Policy that allows only the scripts and styles of the page itself.

    Source: Content Security Policy Level 3 (hashes of inline scripts and styles)
    """
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def shown_to(tenant: str | None, state: Mapping[str, object]) -> dict[str, object]:
    """The part of a snapshot that a tenant may see; None: an operator, who sees all.

    Sums over all tenants stay.
    """
    rows = cast("Sequence[Mapping[str, object]]", state.get("requests") or ())
    mine = [row for row in rows if tenant is None or row.get("tenant") == tenant]
    shown = dict(state)
    if "requests" in state:
        shown["requests"] = [{k: v for k, v in row.items() if k != "tenant"} for row in mine]
    if tenant is not None and state.get("map"):
        numbers = {cast("int", row["number"]) % 2**16 for row in mine}
        shown["map"] = _without_others(cast("Mapping[str, Any]", state["map"]), numbers)
    return shown


def _without_others(page_map: Mapping[str, Any], numbers: Set[int]) -> dict[str, object]:
    """The map of pages without the numbers of requests that are not in ``numbers``."""
    stock = page_map["kinds"].index("stock")  # its owners are workers
    owners = array("H", base64.b64decode(page_map["owner_of"]))
    if sys.byteorder == "big":
        owners.byteswap()
    kinds = base64.b64decode(page_map["kind_of"])
    kept = (
        owner if kind == stock or owner in numbers else 0
        for owner, kind in zip(owners, kinds, strict=True)
    )
    data = array("H", kept)
    if sys.byteorder == "big":
        data.byteswap()
    return {**page_map, "owner_of": base64.b64encode(data.tobytes()).decode("ascii")}


@dataclass
class Dashboard:
    """Serves the page and its snapshots."""

    source: DashboardSource
    metrics: IngressMetrics
    model: ModelCard
    clock: Callable[[], float] = time.monotonic
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """Identifies this ingress replica, since each has counters of its own."""

    def __post_init__(self) -> None:
        self._snapshot = Snapshot(self._take, MAX_AGE_S, self.clock)
        page = PAGE.read_text(encoding="utf-8")
        self._page = page.encode()
        self._headers = {
            "content-security-policy": content_policy(page),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def page(self) -> Response:
        """The page itself. It holds no data, so it needs no key."""
        return Response(self._page, media_type="text/html", headers=self._headers)

    async def state(self, tenant: str | None = None) -> Response:
        """The current snapshot, at most ``MAX_AGE_S`` old.

        ``tenant``: show the requests of this tenant only, and no other tenant's pages in the map;
        None: all.

        Raises: Overloaded if the router does not answer
        """
        shown = shown_to(tenant, await self._snapshot.get())
        return JsonResponse(shown, headers={"cache-control": "no-store"})

    async def _take(self) -> Mapping[str, object]:
        state = await self.source()
        return {
            **state,
            "time": time.time(),
            "model": self.model.name,
            "context_tokens": self.model.max_model_len,
            "version": version("triptych"),
            "ingress": {"name": self.name, **self.metrics.snapshot()},
        }
