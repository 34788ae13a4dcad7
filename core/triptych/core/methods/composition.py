"""A compression method as a composition of parts, and the rules by which parts fit together.

A method is data: which part does what, what it needs, and which parts it cannot stand beside. So a
composition that cannot work is refused with the reason before anything runs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from triptych.core.config import CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.images import IMAGE, TEXT, Modality
from triptych.core.methods.learned_files import NetworkKind

if TYPE_CHECKING:
    from triptych.core.policy import Policy
    from triptych.core.profile import Profile

Role = Literal["scorer", "budget", "merger", "basis", "codec"]
"""``scorer``: how much a token matters; ``budget``: which tokens are kept, and in which class;
``merger``: how several tokens become one; ``basis``: the coordinates that are stored; ``codec``:
how a token becomes bytes."""
Granularity = Literal["model", "layer", "head", "token", "page"]
"""The smallest unit about which a part decides, or which it encodes."""
Need = Literal[
    "attention_sums",
    "queries",
    "attention_moments",
    "query_statistics",
    "retrieval_heads",
    "bases",
    "pair_order",
    "calibration",
    "training",
]
"""``attention_sums``: the attention that each prompt token received; ``queries``: its attention
from the last queries of the prompt alone; ``attention_moments``: mean and variance of that;
``query_statistics``: mean and covariance of the prompt's queries before RoPE; ``retrieval_heads``:
a compression profile that names heads which retrieve; ``bases``: one with bases of keys and values
of each head; ``pair_order``: one with the RoPE pairs of each head by energy; ``calibration``: a
compression profile;
``training``: an artefact of a training run."""
Trait = Literal[
    "drops_tokens",
    "requantizes_tokens",
    "merges_tokens",
    "places_merged_tokens",
    "mixes_channels",
    "mixes_segments",
    "codes_by_channel",
    "codes_whole_pages",
    "codes_pairs",
    "bits_by_energy",
    "scale_normalized",
]
"""What the rules ask about a part.

``places_merged_tokens``: a merged token has a position; ``mixes_channels``: a rotation;
``mixes_segments``: one of channels with equal bits alone;
``codes_by_channel``: scales belong to channels; ``codes_whole_pages``: a token of a page cannot be
written alone; ``codes_pairs``: a code is of the two channels that RoPE rotates together;
``bits_by_energy``: channels have bits by their energy; ``scale_normalized``: codes
do not depend on the norm of a vector.
"""
PROVIDED: frozenset[Need] = frozenset(
    {"attention_sums", "queries", "attention_moments", "query_statistics"}
)
"""What every server provides; prefill measures only what a method needs. Statistics of queries need
the RoPE frequencies of the model, which are known for plain layers."""
WITH_PROFILE: frozenset[Need] = PROVIDED | frozenset[Need]({"calibration"})
"""What a server with a compression profile provides."""
OF_PROFILES: frozenset[Need] = frozenset({"retrieval_heads", "bases", "pair_order"})
"""What it provides as well if its profile has it: names of fields."""
TRAIN: Mapping[Modality, str] = {TEXT: "triptych train", IMAGE: "triptych train compressor --chats"}
"""Commands that train networks."""
WAYS_OUT: Mapping[Need, str] = {
    "training": "run '{train}' for this model, and name the file in compressor.learned",
    "calibration": "run 'triptych calibrate' for this model",
    "retrieval_heads": "run 'triptych retrieval' for this model",
    "bases": "run 'triptych calibrate --bases' for this model",
    "pair_order": "run 'triptych calibrate --pair-order' for this model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a method: what it does, at which granularity, and what it needs for that."""

    role: Role
    name: str
    granularity: Granularity
    needs: frozenset[Need] = frozenset()
    traits: frozenset[Trait] = frozenset()
    network: NetworkKind | None = None
    """The kind of learned network that does its work; None: it needs none."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two traits that no method may have together, or one that needs another."""

    first: Trait
    second: Trait
    reason: str
    is_needed: bool = False
    """Whether ``second`` must be there where ``first`` is, instead of the opposite."""

    def concerns(self, traits: frozenset[Trait]) -> bool:
        """Whether parts with these traits violate the rule."""
        return self.first in traits and (self.second in traits) != self.is_needed


RULES = (
    Conflict(
        "codes_whole_pages",
        "requantizes_tokens",
        "a codec of whole pages cannot store one token of a page with fewer bits",
    ),
    Conflict(
        "codes_whole_pages",
        "drops_tokens",
        "a codec of whole pages cannot drop one token of a page",
    ),
    Conflict(
        "mixes_channels",
        "codes_by_channel",
        "a rotation mixes the channels, so scales of channels mean nothing after it",
    ),
    Conflict(
        "mixes_channels",
        "codes_pairs",
        "a rotation mixes the channels, so radius and angle of a pair mean nothing after it",
    ),
    Conflict(
        "mixes_channels",
        "bits_by_energy",
        "a rotation spreads the energy over all channels, so bits by energy mean nothing after it",
    ),
    Conflict(
        "bits_by_energy",
        "scale_normalized",
        "bits by energy need a scale-normalized codec; with ranges they add error",
        is_needed=True,
    ),
    Conflict(
        "merges_tokens",
        "places_merged_tokens",
        "keys are stored after RoPE, so a merged token needs a position",
        is_needed=True,
    ),
    Conflict(
        "merges_tokens",
        "requantizes_tokens",
        "a merged token has a logit bias in the place of its score, so nothing can classify it",
    ),
)
"""Which traits exclude or need each other.

Source: KIVI (scales of channels over whole pages); QuaRot (rotations); Block-GTQ (bits by energy);
        FastCache (merged tokens). Measured for bits by energy with a codec of ranges: 1.3 to 2.1
        times the error of logits
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way of making keys and values smaller: its parts, and the policy that they resolve to.

    ``version`` changes when the same settings give other bytes or other tokens; it is part of the
    key of cached prefixes. ``policy`` makes the policy of the settings and the profile.

    Raises: ConfigError if its parts cannot stand together
    """

    name: str
    idea: str
    """One sentence for the list of methods."""
    policy: "Callable[[CompressorConfig, Profile | None], Policy]"
    paper: str = ""
    """Whose idea it is; empty: ours, or nobody's in particular."""
    version: int = 1
    scorer: Part | None = None
    """None: no token matters more than another."""
    budget: Part
    merger: Part | None = None
    """None: no token is merged."""
    basis: Part
    codec: Part

    def __post_init__(self) -> None:
        for role in ("scorer", "budget", "merger", "basis", "codec"):
            part: Part | None = getattr(self, role)
            if part is not None and part.role != role:
                text = f"method {self.name!r}: {part.name!r} is a {part.role}, not a {role}"
                raise ConfigError(text)
        for reason in self.faults():
            raise ConfigError(f"method {self.name!r}: {reason}")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its parts, in the order of the work."""
        every = (self.scorer, self.budget, self.merger, self.basis, self.codec)
        return tuple(part for part in every if part is not None)

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of all of its parts."""
        return frozenset(need for part in self.parts for need in part.needs)

    @property
    def traits(self) -> frozenset[Trait]:
        """The traits of all of its parts."""
        return frozenset(trait for part in self.parts for trait in part.traits)

    def faults(self) -> Iterator[str]:
        """Why its parts cannot stand together; nothing if they can."""
        named = {trait: part.name for part in self.parts for trait in part.traits}
        for rule in RULES:
            if rule.concerns(self.traits):
                with_part = "" if rule.is_needed else f" and {named[rule.second]!r}"
                yield f"{named[rule.first]!r}{with_part}: {rule.reason}"

    def check_needs(
        self,
        provided: frozenset[Need],
        networks: Collection[NetworkKind] = (),
        modality: Modality = TEXT,
    ) -> None:
        """Raise ConfigError if something that a part needs is not there.

        ``networks``: kinds of which there is a trained file for the model, and for tokens of
        ``modality``.
        """
        for part in self.parts:
            trained: frozenset[Need] = frozenset({"training"} if part.network in networks else ())
            missing = part.needs - provided - trained
            # First what a command for the profile has an option for: that makes the profile, too.
            for need in sorted(missing, key=lambda need: (need not in OF_PROFILES, need)):
                way_out = (
                    f": {WAYS_OUT[need]}".format(train=TRAIN[modality]) if need in WAYS_OUT else ""
                )
                of = f" for tokens of modality {modality!r}" if part.network else ""
                raise ConfigError(
                    f"method {self.name!r}: {part.role} {part.name!r} needs {need}{of}, which this "
                    f"server does not have (it has {', '.join(sorted(provided))}){way_out}"
                )
