"""Chooses the compression method of requests that name none, by the load at their arrival."""

from dataclasses import dataclass, field, replace
from math import inf

from triptych.core.messages import MethodChoice, Request
from triptych.core.methods.frontier import MeasuredMethod, nearest
from triptych.core.pages import PagePlan
from triptych.router.passes.growth import Growth
from triptych.router.passes.slo_admission import SloAdmission
from triptych.router.policies.method_choice import Choice, Load, Position, Rung, choose, ladder
from triptych.router.state.cluster_state import ClusterState
from triptych.router.state.request_table import State

ANSWER_TOKENS = 200
"""Tokens that an answer is taken to have until some have ended."""


@dataclass
class AdaptiveMethod:
    """Gathers what ``choose`` needs, and keeps the rung on which the ladder stands.

    It is the first answer to scarce memory: new requests take fewer bytes as less is free. The next
    ones, for requests that run, are those of ``Growth``. Both obey ``Request.max_kl``.
    """

    cluster: ClusterState
    plan: PagePlan
    growth: Growth
    slo_admission: SloAdmission
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self._candidates = [one for one in self.plan.measured if one.name in self.plan.adaptive]

    def resolve(self, request: Request, before: Request | None, now: float) -> Request:
        """The request with its method, if the router is to choose that.

        ``before``: a request of the same client's request, whose choice holds for an equal prompt.
        An attempt after the first one keeps the method of the first.
        """
        if not request.adapts or not self._candidates:
            return request
        choice = request.choice
        if choice is None and before is not None and before.prompt == request.prompt:
            choice = before.choice
        if choice is None:
            choice = self._choose(request, now)
        is_default = choice.method == self.plan.policy.name
        return replace(request, method="" if is_default else choice.method, choice=choice)

    def _choose(self, request: Request, now: float) -> MethodChoice:
        costs = self.cluster.method_costs
        waiting = 1 + self.cluster.requests.count(State.WAITING)
        base_s = self.slo_admission.forecast(request, now, now).total_s
        load = Load(free_bytes=self.growth.spare_bytes() // waiting, base_s=base_s)
        rungs = ladder([self._rung(one, request, now) for one in self._candidates])
        found = choose(rungs, load, self.position, now, self._limit(request))
        self.position = found.position
        is_linked = found.rung.transfer_s > 0
        return _told(found, load, costs.link_bytes_s if is_linked else 0.0)

    def _limit(self, request: Request) -> float:
        """The largest KL that a request allows.

        With the floor ``high`` it is that of the default method's high format.
        """
        limit, tokens = request.max_kl or inf, request.known_tokens
        if request.floor == "high":
            kl = self.plan.kl_of(f"uniform:{self.plan.policy.high_format}", tokens)
            limit = min(limit, 0.0 if kl is None else kl)
        return limit

    def _rung(self, method: MeasuredMethod, request: Request, now: float) -> Rung:
        """The bytes and seconds that the request would take with a method."""
        tokens, costs = request.known_tokens, self.cluster.method_costs
        measured = nearest(method.fidelity, tokens)
        assert measured is not None
        left = request.sampling.max_tokens - len(request.output_tokens)
        usual = int(self.cluster.latency.answer_tokens.at(now)) or ANSWER_TOKENS
        grown = tokens + max(0, min(left, usual))
        travels = round(measured.bytes_ratio * self.plan.raw_bytes(tokens))
        return Rung(
            method.name,
            measured.kl,
            round(measured.bytes_ratio * self.plan.raw_bytes(grown)),
            costs.compress_s(method.name, method.compress_us, tokens),
            costs.transfer_s(travels),
        )


def _told(found: Choice, load: Load, link_bytes_s: float) -> MethodChoice:
    rung = found.rung
    return MethodChoice(
        method=rung.method,
        reason=found.reason,
        kl=rung.kl,
        stored_bytes=rung.stored_bytes,
        free_bytes=load.free_bytes,
        link_bytes_s=link_bytes_s,
        predicted_s=round(load.base_s + rung.seconds, 6),
    )
