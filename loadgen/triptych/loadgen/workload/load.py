"""A load: generated sessions of one workload, or a recorded trace."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from triptych.loadgen.workload.arrivals import arrivals_s
from triptych.loadgen.workload.shapes import Means, shape_named
from triptych.loadgen.workload.turns import Segment, Session, Turn, requests_of


@dataclass(frozen=True, kw_only=True)
class Load:
    """Parameters of a load. The same seed gives the same sessions at the same times."""

    shape: str = "uniform"
    """A name in ``SHAPES``, or ``trace`` for the sessions of ``trace``."""
    prompt_tokens: int = 512
    output_tokens: int = 64
    pause_s: float = 0.0
    burstiness: float = 1.0
    """Gamma shape of the gaps between sessions; 1: Poisson process."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length; longer prompts are truncated. None: no limit."""
    max_output_tokens: int | None = None
    seed: int = 0
    trace: tuple[Session, ...] = ()

    @classmethod
    def means_of(cls, shape: str) -> Means:
        """Default means of a workload."""
        return shape_named(shape).means

    def sessions(
        self, requests: int, *, rate_per_s: float | None = None, scope: int = 0
    ) -> list[Session]:
        """Sessions with ``requests`` requests in total; the last session may be shortened.

        ``rate_per_s``: requests per second of the whole; None: all are due at once, or, in a
        trace, when they came. ``scope`` keeps the prompts of one call apart from another's.
        """
        found, missing = list[Session](), requests
        for session in self._endless(scope):
            turns = tuple(
                turn.limited(self.max_prompt_tokens, self.max_output_tokens)
                for turn in session.turns[:missing]
            )
            found.append(replace(session, turns=turns))
            missing -= len(turns)
            if missing <= 0:
                break
        if rate_per_s is None:
            return found
        rate = rate_per_s * len(found) / requests_of(found)
        times = arrivals_s(len(found), rate, f"{self.seed}/{scope}", self.burstiness)
        return [replace(one, start_s=at) for one, at in zip(found, times, strict=True)]

    def turn(self, index: int) -> Turn:
        """A single request of mean length, for warm-up and calibration."""
        prompt = min(self.prompt_tokens, self.max_prompt_tokens or self.prompt_tokens)
        output = min(self.output_tokens, self.max_output_tokens or self.output_tokens)
        found = Turn((Segment(f"single{index}", prompt),), output)
        shape = None if self.trace else shape_named(self.shape)
        if shape is None or not shape.has_images:
            return found
        return replace(found, images=(f"single{index}/image",))

    def _endless(self, scope: int) -> Iterator[Session]:
        if self.trace:
            yield from (_within(scope, session) for session in self.trace)
            return
        shape, means = (
            shape_named(self.shape),
            Means(self.prompt_tokens, self.output_tokens, self.pause_s),
        )
        for index in count():
            name = f"{scope}/{index}"
            yield Session(shape.make(Random(f"{self.seed}/{name}"), name, str(scope), means))


def _within(scope: int, session: Session) -> Session:
    """A trace session with prompts of its own scope, so that a second round has no cache hits."""
    turns = tuple(
        replace(
            turn,
            segments=tuple(Segment(f"{scope}/{one.key}", one.tokens) for one in turn.segments),
        )
        for turn in session.turns
    )
    return replace(session, turns=turns)
