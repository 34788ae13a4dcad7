"""Parse options with comma-separated values."""

from triptych.core.errors import ConfigError


def names(text: str) -> list[str]:
    """Split ``a,b``; ignores blanks and empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names_or_none(text: str) -> tuple[str, ...]:
    """Split ``a,b``; ``none`` is an empty list."""
    return () if text.strip() == "none" else tuple(names(text))


def numbers(text: str) -> list[float]:
    """Parse ``0.5,2``.

    Raises: ConfigError unless each is a number above 0
    """
    values = numbers_or_zero(text)
    if 0 in values:
        raise ConfigError(f"{text!r}: expected numbers above 0")
    return values


def numbers_or_zero(text: str) -> list[float]:
    """Parse ``0,0.5``.

    Raises: ConfigError unless each is a number of at least 0
    """
    try:
        values = [float(name) for name in names(text)]
    except ValueError:
        raise ConfigError(f"{text!r}: expected numbers with commas between them") from None
    if any(not 0 <= value < 1e9 for value in values):
        raise ConfigError(f"{text!r}: expected numbers above 0")
    return values


def integers(text: str) -> list[int]:
    """Parse ``1,4,16``.

    Raises: ConfigError unless each is a whole number above 0
    """
    values = numbers(text)
    if any(value != int(value) for value in values):
        raise ConfigError(f"{text!r}: expected whole numbers, as in 1,4,16")
    return [int(value) for value in values]
