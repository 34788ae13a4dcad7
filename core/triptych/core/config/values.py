"""What the settings of all parts have in common."""

from typing import Literal

from triptych.core.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20

Auto = Literal["auto"]


def require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` naming the field, the value and what was expected."""
    if not ok:
        raise ConfigError(f"{name}={value!r}: expected {expected}")
