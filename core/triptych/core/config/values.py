"""Checks and units that the settings of all parts use."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Literal, cast

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


_UNITS = {"": 1, "k": 1000} | {
    prefix + end: base**power
    for power, prefix in enumerate("KMGT", 1)
    for end, base in (("", 1000), ("i", 1024))
}


def parse_bytes(text: str) -> int | None:
    """The bytes of a size such as ``4GiB``, ``512M`` or ``1e9``; None if it is none.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 Gi"), parse_bytes("80G"), parse_bytes("many")
    (4294967296, 1610612736, 80000000000, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kKMGT]?i?)B?", text.strip())
    if found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


def with_sizes(data: Mapping[str, object], path: str = "") -> dict[str, object]:
    """The same settings with sizes such as ``4GiB`` as numbers.

    Raises: ConfigError for a text that is neither a size nor ``auto``
    """
    found = dict(data)
    for key, value in data.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            found[key] = with_sizes(cast("Mapping[str, Any]", value), name)
        elif isinstance(value, str) and str(key).endswith(("_bytes", "_bytes_s")):
            nbytes = parse_bytes(value)
            fits = nbytes is not None or value == "auto"
            require(fits, name, value, "bytes, or a size such as 4GiB")
            found[key] = value if nbytes is None else nbytes
    return found
