"""Reads the sampling defaults of a model's ``generation_config.json``, without transformers."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from triptych.core.errors import ModelError

logger = logging.getLogger(__name__)

NAMES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "max_new_tokens": (1, 1 << 31),
}
"""Settings that are taken, and the least and the greatest value that requests may have."""


def read_sampling_defaults(path: Path) -> Mapping[str, float]:
    """Sampling defaults by the names of requests; empty without the file.

    Values that requests could not have are left out, with a line in the log.

    Raises: ModelError if the file is not a JSON object
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        settings = dict(cast("Mapping[str, object]", given))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    found = dict[str, float]()
    for name, (least, most) in NAMES.items():
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            logger.warning("%s: %s=%r is not a number, and ignored", file, name, value)
        elif not least <= value <= most:
            logger.warning("%s: %s=%r is not in %s to %s: ignored", file, name, value, least, most)
        else:
            found["max_tokens" if name == "max_new_tokens" else name] = value
    return found
