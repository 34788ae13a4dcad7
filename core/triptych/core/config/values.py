"""Checks and units that the settings of all parts use."""

import re
from ipaddress import ip_address
from typing import Literal

from triptych.core.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20

Auto = Literal["auto"]

HOST = "an IP address, or a host name; no port, and no brackets"
"""What is expected where ``is_host`` is false."""


def require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` naming the field, the value and what was expected."""
    if not ok:
        raise ConfigError(f"{name}={value!r}: expected {expected}")


def is_host(text: str) -> bool:
    """Whether a text is an IP address (IPv6 without brackets) or can be a host name.

    >>> is_host("::1"), is_host("node-1.local"), is_host("[::1]"), is_host("localhost:8000")
    (True, True, False, False)
    """
    try:
        ip_address(text)
    except ValueError:
        label = r"[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?"
        return re.fullmatch(rf"{label}(\.{label})*\.?", text) is not None
    return True
