"""``kvarn``: rotated pages whose tokens and channels are scaled to equal deviation."""

from triptych.core.config import CompressorConfig
from triptych.core.methods.codecs.rotation import check_rotated
from triptych.core.methods.composition import Method, Part
from triptych.core.methods.parts import EVERY_TOKEN, HADAMARD
from triptych.core.methods.uniform import one_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile


def kvarn(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """Keys of 4 bits by channel, values of 2 bits by token, of balanced pages.

    Raises: ConfigError if the rotation is turned off
    """
    check_rotated(config, rotated=True)
    return one_format(config, profile, "kvarn")


METHOD = Method(
    name="kvarn",
    idea="rotated pages scaled to equal deviation of tokens and channels, K4V2",
    paper="KVarN",
    policy=kvarn,
    budget=EVERY_TOKEN,
    basis=HADAMARD,
    codec=Part(
        role="codec",
        name="balanced_pages",
        granularity="page",
        traits=frozenset({"codes_whole_pages"}),
    ),
)
