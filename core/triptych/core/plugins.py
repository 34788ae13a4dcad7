"""Names of the compression policies, which the settings are checked against.

The table from names to methods is ``methods.table.METHODS``: methods read settings, so settings do
not import methods.
"""

from triptych.core.registry import PluginNames

POLICY_NAMES = PluginNames(
    kind="compression_policies",
    builtin=(
        "uniform",
        "diffkv",
        "leankv",
        "learned:merge",
        "learned:paper",
        "learned:score",
        "kvmerger",
        "saw_int4",
        "fp8",
        "kivi",
        "kivi:2",
        "kvarn",
        "oscar",
        "block_gtq",
        "spherical",
        "streaming_llm",
        "knorm",
        "keydiff",
        "h2o",
        "h2o:generate",
        "snapkv",
        "pyramidkv",
        "adakv",
        "tova",
        "expected_attention",
        "cake",
        "kvcrush",
        "tangram",
        "compresskv",
        "epicache",
    ),
)
