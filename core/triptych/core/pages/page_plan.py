"""The plan of a server: it resolves the settings that depend on the model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, FloorNotMet, UnknownMethod
from triptych.core.layout import Geometry
from triptych.core.methods.frontier import Measured, MeasuredMethod, check_max_kl, nearest
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.methods.table import policies_of
from triptych.core.pages.checks import (
    check_blocks,
    check_capacity,
    check_formats,
    check_selection,
)
from triptych.core.pages.sliding_windows import SlidingWindows
from triptych.core.profile import Profile

NEAR_SHARE = 0.8
"""Largest share of a GPU's memory beside the model for copies of the pool's pages; steps compute in
the rest."""


class PagePlan(SlidingWindows):
    """Which pages hold a request's keys and values: raw, recent, high and low pages.

    Prefill writes raw 16-bit pages. The compressor moves the tokens of a prompt to high and low
    pages, except the sink and the newest ones, which it moves to recent pages: small pages, so
    that a short prompt does not take a whole page for each head row. Decode writes new tokens to
    recent pages. When so many of them are older than the window that they free the bytes of a high
    page, or fill one that is encoded whole, they move to high and low pages. A 16-bit policy leaves
    all tokens in raw pages. If only high tokens have 16 bits, recent and high pages do too.

    Pages of a layer with a sliding window hold the tokens that later ones can read, and less than a
    page of older ones. Behind the recent window all of them are high, in pages that belong to the
    request alone. If layers have windows, a 16-bit policy moves tokens to high pages too, of 16
    bits, since raw pages have the same tokens in all layers.

    A server can offer several methods: this is the plan of its default one, and ``of_method`` has
    those of the others. They differ in the policy alone.
    """

    @classmethod
    def of(
        cls,
        config: AppConfig,
        geometry: Geometry,
        profile: Profile | None = None,
        *,
        is_plain: bool = False,
        learned: Sequence[LearnedFile] = (),
    ) -> "PagePlan":
        """Resolve the settings that depend on the model.

        ``is_plain``: whether its layers can be run a few at a time. ``learned``: files of networks
        for it.
        """
        page = config.pool.page_bytes
        default, *others = policies_of(config.compressor, profile, learned)
        for policy in (default, *others):
            check_selection(config, policy)
        plan = cls(
            geometry,
            geometry.page_bytes(on_disk=bool(config.pool.arena_path)) if page == "auto" else page,
            default,
            # Decode would read pages in host memory over the bus at each step.
            share_pages=config.pool.share_pages and config.pool.arena == "host",
            repeatable_prompts=config.pool.repeatable_prompts,
            keeps_answers=config.pool.keep_answers != "never",
            head_budgets=_head_budgets(config, profile),
            key_order="token" if config.decode.actor.num_gpus else "channel",
            reads_low_tokens=bool(config.decode.plugins)
            or config.decode.selection.method != "none",
            others=tuple(others),
        )
        plan = plan.with_measurements(config, profile, learned)
        for one in plan.by_method.values():
            check_formats(one)
            check_blocks(one)
        plan = replace(plan, prefix_bytes=plan.bytes_for_prefixes(config.pool))
        compress = any(one.compresses for one in plan.by_method.values())
        # A group of layers is encoded before its decode worker, and with it an arena, is chosen.
        in_parts = is_plain and config.pool.arena == "host"
        if in_parts and compress and not plan.prefix_bytes:
            chunk_tokens = config.prefill.max_num_batched_tokens
            layers = config.experimental.layers_at_once
            plan = replace(plan, chunk_tokens=chunk_tokens, layers_at_once=layers)
        check_capacity(plan, config.pool.kv_cache_memory_bytes - plan.prefix_bytes)
        return plan

    @cached_property
    def by_method(self) -> Mapping[str, "PagePlan"]:
        """The plan of each method that the server offers, its default first."""
        plans = {policy.name: replace(self, policy=policy, others=()) for policy in self.others}
        return {self.policy.name: self, **plans}

    def of_method(self, name: str) -> "PagePlan":
        """The plan of a method; of the default one for an empty name.

        Raises: UnknownMethod if the server does not offer it
        """
        if not name:
            return self
        if name not in self.by_method:
            raise UnknownMethod(name, tuple(self.by_method))
        return self.by_method[name]

    def with_measurements(
        self, config: AppConfig, profile: Profile | None, learned: Sequence[LearnedFile]
    ) -> "PagePlan":
        """The plan with what the profile knows of methods, and those to choose among.

        Raises: ConfigError if an adaptive server has no choice, or no method meets its floor
        """
        found = profile.fidelity_of(config, learned) if profile else {}
        times = profile.pareto if profile else {}
        measured = tuple(
            MeasuredMethod(name=name, fidelity=each, compress_us=times.get(name, 0.0))
            for name, each in found.items()
        )
        names = tuple(name for name in times if name in found and name in self.by_method)
        is_adaptive, limit = config.compressor.adaptive, config.compressor.max_kl
        if is_adaptive and len(names) < 2:
            raise ConfigError(
                f"compressor.adaptive: {len(names)} methods are offered that the profile has "
                "measured with these settings and has on its frontier, and a choice needs two: "
                "run 'triptych calibrate --pareto', set compressor.profile to its file, and leave "
                "the settings of methods, decode.selection and decode.plugins as it measured them"
            )
        plan = replace(self, measured=measured, adaptive=names if is_adaptive else ())
        try:
            check_max_kl(plan.fidelity, plan.adaptive or (self.policy.name,), limit, 0)
        except FloorNotMet as error:
            raise ConfigError(f"compressor.max_kl={limit:g}: {error}") from error
        return plan

    @cached_property
    def fidelity(self) -> Measured:
        """The measured fidelity of each method."""
        return {one.name: one.fidelity for one in self.measured}

    def kl_of(self, method: str, tokens: int) -> float | None:
        """Measured KL of a method near a length; None if nobody measured it."""
        found = nearest(self.fidelity.get(method, ()), tokens)
        return None if found is None else found.kl

    def may_lower(self, method: str, max_kl: float, tokens: int) -> bool:
        """Whether a request with a limit of KL meets it if all of its tokens are low.

        ``max_kl``: 0 is no limit.
        """
        low = self.of_method(method).policy.low_format
        kl = self.kl_of(f"uniform:{low}", tokens)
        return not max_kl or (kl is not None and kl <= max_kl)


def _head_budgets(config: AppConfig, profile: Profile | None) -> bytes:
    is_even = config.decode.selection.head_budgets == "even"
    return b"" if is_even or profile is None else profile.head_budget_codes
