"""The table of methods, and the policies of those that a server offers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from triptych.core.config import CompressorConfig
from triptych.core.config.stages import SEPARATOR, parts_of_name
from triptych.core.errors import ConfigError
from triptych.core.images import IMAGE, TEXT, Modality
from triptych.core.layout import FORMATS, page_format
from triptych.core.methods.composition import (
    OF_PROFILES,
    PROVIDED,
    WITH_PROFILE,
    Method,
    Need,
)
from triptych.core.methods.learned_files import LearnedFile, NetworkKind
from triptych.core.methods.modalities import by_modality
from triptych.core.plugins import POLICY_NAMES
from triptych.core.policy import KVRotation, Policy, chosen
from triptych.core.profile import Profile, Settings
from triptych.core.registry import Registry

METHODS: Registry[Method | Callable[[CompressorConfig, Profile | None], Policy]] = Registry(
    kind=POLICY_NAMES.kind,
    builtin={
        "uniform": "triptych.core.methods.uniform:METHOD",
        "diffkv": "triptych.core.methods.diffkv:METHOD",
        "leankv": "triptych.core.methods.leankv:METHOD",
        "learned:merge": "triptych.core.methods.learned:MERGE",
        "learned:paper": "triptych.core.methods.learned:PAPER",
        "learned:score": "triptych.core.methods.learned:SCORE",
        "kvmerger": "triptych.core.methods.kvmerger:METHOD",
        "saw_int4": "triptych.core.methods.codecs.saw_int4:METHOD",
        "fp8": "triptych.core.methods.codecs.fp8:METHOD",
        "kivi": "triptych.core.methods.codecs.kivi:METHOD",
        "kivi:2": "triptych.core.methods.codecs.kivi:TWO_BITS",
        "kvarn": "triptych.core.methods.codecs.kvarn:METHOD",
        "oscar": "triptych.core.methods.codecs.oscar:METHOD",
        "block_gtq": "triptych.core.methods.codecs.block_gtq:METHOD",
        "spherical": "triptych.core.methods.codecs.spherical:METHOD",
        "streaming_llm": "triptych.core.methods.retention.streaming_llm:METHOD",
        "knorm": "triptych.core.methods.retention.knorm:METHOD",
        "keydiff": "triptych.core.methods.retention.keydiff:METHOD",
        "h2o": "triptych.core.methods.retention.h2o:METHOD",
        "h2o:generate": "triptych.core.methods.retention.h2o:WHILE_GENERATING",
        "snapkv": "triptych.core.methods.retention.snapkv:METHOD",
        "pyramidkv": "triptych.core.methods.retention.pyramidkv:METHOD",
        "adakv": "triptych.core.methods.retention.adakv:METHOD",
        "tova": "triptych.core.methods.retention.tova:METHOD",
        "expected_attention": "triptych.core.methods.retention.expected_attention:METHOD",
        "cake": "triptych.core.methods.retention.cake:METHOD",
        "kvcrush": "triptych.core.methods.retention.kvcrush:METHOD",
        "tangram": "triptych.core.methods.retention.tangram:METHOD",
        "compresskv": "triptych.core.methods.retention.compresskv:METHOD",
        "epicache": "triptych.core.methods.epicache:METHOD",
    },
)
"""Methods by name. A plug-in may be a function that makes a policy of the settings, with ``policy``
resolved, and of the profile."""


def policy_of(
    config: CompressorConfig,
    profile: Profile | None = None,
    learned: Sequence[LearnedFile] = (),
) -> Policy:
    """The policy of the server's default method: ``auto`` is the value of the profile.

    ``learned``: files of networks for the model.

    Raises: ConfigError if it cannot run here, or its thresholds or formats are out of order
    """
    known = profile.settings if profile else Settings()
    name = known.policy if config.policy == "auto" else config.policy
    return _resolved(replace(config, policy=name), profile, learned)


def policies_of(
    config: CompressorConfig,
    profile: Profile | None = None,
    learned: Sequence[LearnedFile] = (),
) -> tuple[Policy, ...]:
    """The policies of all methods that a server offers, its default first.

    All store keys and values in the same coordinates, since a step rotates those of all requests
    together: a 16-bit format, which a rotation neither helps nor harms, has those of the others.

    Raises: ConfigError as ``policy_of``, or if two methods cannot share the pages of one pool
    """
    default = policy_of(config, profile, learned)
    listed = config.methods
    if config.adaptive and not listed and profile is not None:
        listed = tuple(profile.pareto)
    names = [name for name in dict.fromkeys(listed) if name != default.name]
    others = [_resolved(replace(config, policy=name), profile, learned) for name in names]
    return _together([default, *others])


def offered_methods(
    learned: Sequence[LearnedFile] = (), profile: Profile | None = None
) -> tuple[str, ...]:
    """Names of all methods that a server can offer, plug-ins left out.

    ``learned``: files of networks for the model; a method that needs another one is left out, and
    so is one that needs head budgets, retrieval heads, bases or an order of pairs which ``profile``
    does not have.
    """
    kinds = _networks_for(TEXT, learned).keys()
    uniform = [f"uniform:{form}" for form in FORMATS if page_format(form).suits_any_method]
    found = list[str]()
    for name in METHODS.builtin:
        method = METHODS.load(name)
        assert isinstance(method, Method)
        if _is_calibrated(method, profile) and all(
            part.network is None or part.network in kinds for part in method.parts
        ):
            found += uniform if name == "uniform" else [name]
    return tuple(found)


def _resolved(
    config: CompressorConfig, profile: Profile | None, learned: Sequence[LearnedFile]
) -> Policy:
    text, images = parts_of_name(config.policy)
    policy = _of_one_method(replace(config, policy=text), profile, learned)
    if not images:
        return policy
    share = chosen(config.image_keep_share, config.keep_share)
    config = replace(config, policy=images, keep_share=share)
    found = by_modality(
        f"{text}{SEPARATOR}{images}", policy, _of_one_method(config, profile, learned, IMAGE)
    )
    found.check()
    return found


def _of_one_method(
    config: CompressorConfig,
    profile: Profile | None,
    learned: Sequence[LearnedFile],
    modality: Modality = TEXT,
) -> Policy:
    name = config.policy
    found = METHODS.load("uniform" if name.startswith("uniform:") else name)
    if not isinstance(found, Method):
        policy = found(config, profile)
        policy.check()
        return policy
    networks = _networks_for(modality, learned)
    found.check_needs(_provided(profile), networks, modality)
    files = {part.role: networks[part.network] for part in found.parts if part.network}
    policy = replace(
        found.policy(config, profile),
        version=found.version,
        merger=files.get("merger"),
        scorer=files.get("scorer"),
    )
    policy.check()
    return policy


def _provided(profile: Profile | None) -> frozenset[Need]:
    """Needs of methods that a server with this profile meets."""
    if profile is None:
        return PROVIDED
    return WITH_PROFILE | _found_by_calibration(profile)


def _found_by_calibration(profile: Profile | None) -> frozenset[Need]:
    """Needs that only some profiles meet, and this one does."""
    return frozenset(need for need in OF_PROFILES if profile and getattr(profile, need))


def _is_calibrated(method: Method, profile: Profile | None) -> bool:
    """Whether the profile has what calibration finds for a method, if it needs anything."""
    wanted = method.needs & OF_PROFILES
    if wanted:
        return wanted <= _found_by_calibration(profile)
    return "calibration" not in method.needs or bool(profile and profile.spread)


def _networks_for(
    modality: Modality, learned: Sequence[LearnedFile]
) -> Mapping[NetworkKind, LearnedFile]:
    """Networks by kind. A scorer of text judges the tokens of images too."""
    return {
        file.kind: file for file in learned if file.modality == modality or file.kind == "scorer"
    }


def _together(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies in common coordinates.

    Raises: ConfigError naming two methods and what they cannot share
    """
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise ConfigError(f"compressor.methods={names}: expected different names")
    first, *rest = [policy for policy in policies if policy.compresses] or policies
    for policy in rest:
        if policy.kv_rotation != first.kv_rotation:
            raise ConfigError(
                f"compressor.methods: {first.name!r} and {policy.name!r} store keys and values in "
                "different coordinates (compressor.kv_rotation), and a decode step rotates those "
                "of all requests together: serve them apart"
            )
    scoring = [policy for policy in policies if policy.score_every]
    for policy in scoring[1:]:
        if policy.score_every != scoring[0].score_every:
            raise ConfigError(
                f"compressor.methods: {scoring[0].name!r} scores tokens every "
                f"{scoring[0].score_every} tokens and {policy.name!r} every {policy.score_every}: "
                "expected one interval for all"
            )
    return tuple(_in_coordinates(policy, first.kv_rotation) for policy in policies)


def _in_coordinates(policy: Policy, rotation: KVRotation) -> Policy:
    return policy if policy.kv_rotation == rotation else replace(policy, kv_rotation=rotation)
