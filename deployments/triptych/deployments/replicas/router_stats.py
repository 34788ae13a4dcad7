# Ray Serve's handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Collects the state of routers and workers for /health, /metrics, /profile and the dashboard."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from triptych.core.errors import Overloaded
from triptych.deployments.http import Health
from triptych.deployments.monitoring.dashboard_state import DashboardState, merge_states
from triptych.deployments.monitoring.status import Status
from triptych.router import Shards

ROUTER_ANSWER_S = 2.0
"""How long one of several routers may take to answer; less than the ingress's own callers wait."""

RouterHandle = DeploymentHandle[Any]
WorkerHandle = DeploymentHandle[Any]


class RouterStats:
    """Calls routers and workers through their Serve handles, and merges the answers of shards."""

    def __init__(
        self,
        shards: Shards,
        names: Sequence[str],
        routers: Sequence[RouterHandle] = (),
        workers: Sequence[WorkerHandle] = (),
    ) -> None:
        """``routers``: one of each shard in ``names``; ``workers``: one of each deployment."""
        self._shards, self._names = shards, names
        self._routers = dict(zip(names, routers, strict=False))
        self._workers = workers

    async def health(self) -> Health:
        """Whether any shard has a worker of each stage."""
        missing = [status.missing_stages for status in await self._statuses()]
        least = min(missing, key=len)
        return Health(ok=not least, reason=f"no {' and no '.join(least)} worker is running")

    async def gauges(self) -> Mapping[str, float]:
        """Metrics of routers, pools and workers, for /metrics."""
        return {**Status.of(await self._statuses()).gauges(), **self._shard_gauges()}

    async def dashboard(self) -> Mapping[str, object]:
        """State of routers, pools and workers, for the dashboard."""
        states = cast("dict[str, DashboardState]", await self._ask("dashboard_state"))
        return await asyncio.to_thread(
            lambda: merge_states([one.json() for one in states.values()])
        )

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        """The routers' decisions about a client's request, in the order of arrival."""
        answers = await self._ask("explain", client_id)
        if self._is_single:
            return answers["0"]
        traces = [{"shard": shard, **one} for shard, found in answers.items() for one in found]
        return sorted(traces, key=_came_s_ago, reverse=True)

    async def decision(self, client_id: str) -> str:
        """The decisions in one line; empty if no router answers."""
        try:
            answers = await self._ask("decision", client_id)
        except Overloaded:
            return ""
        if self._is_single:
            return str(answers["0"])
        return "; ".join(f"shard={shard}; {line}" for shard, line in answers.items() if line)

    async def profile(
        self, steps: int, seconds: float, *, trace: bool
    ) -> list[Mapping[str, object]]:
        """Profile the next steps of one replica of each deployment of workers.

        Raises: Overloaded if a profile is being taken already, or a worker does not answer
        """
        calls = [one.profile.remote(steps, seconds, trace=trace) for one in self._workers]
        try:
            profiles: list[Mapping[str, object] | None] = await asyncio.gather(*calls)
        except RayError as error:
            raise Overloaded("a worker does not answer") from error
        if None in profiles:
            raise Overloaded("another profile is being taken; try again when it is done")
        return [one for one in profiles if one is not None]

    @property
    def _is_single(self) -> bool:
        return len(self._names) == 1

    async def _statuses(self) -> list[Status]:
        return list((await self._ask("status")).values())

    async def _ask(self, method: str, *arguments: str) -> dict[str, Any]:
        """The routers' answers, by shard. Of several routers, those that are down are left out.

        Raises: Overloaded if none answers
        """
        asked = list(self._names) if self._is_single else self._shards.up
        answers = await asyncio.gather(
            *(self._ask_one(shard, method, arguments) for shard in asked), return_exceptions=True
        )
        found = dict[str, Any]()
        for shard, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[shard] = answer
            elif not isinstance(answer, RayError | TimeoutError):
                raise answer
        if not found:
            raise Overloaded("the router does not answer")
        return found

    async def _ask_one(self, shard: str, method: str, arguments: Sequence[str]) -> object:
        async with asyncio.timeout(None if self._is_single else ROUTER_ANSWER_S):
            return await getattr(self._routers[shard], method).remote(*arguments)

    def _shard_gauges(self) -> dict[str, float]:
        """How this ingress's requests are spread over shards; empty if there is only one."""
        if self._is_single:
            return {}
        held, chosen = self._shards.held_bytes, self._shards.counters
        return {
            "triptych_shards": float(len(held)),
            "triptych_shards_up": float(len(self._shards.up)),
            **{f'triptych_shard_bytes{{shard="{shard}"}}': float(held[shard]) for shard in held},
            **{
                f'triptych_shard_choices{{reason="{reason}"}}': float(count)
                for reason, count in chosen.items()
            },
        }


def _came_s_ago(trace: Mapping[str, Any]) -> float:
    return float(trace["came_s_ago"])
