"""Names of the compression policies, which the settings are checked against.

The table from names to functions is ``policy.COMPRESSION_POLICIES``: policies read settings, so
settings do not import policies.
"""

from triptych.core.registry import PluginNames

POLICY_NAMES = PluginNames(kind="compression_policies", builtin=("uniform", "diffkv", "leankv"))
