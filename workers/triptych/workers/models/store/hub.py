"""Models of the Hugging Face hub, or of what its tools keep on this machine."""

from pathlib import Path

from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from triptych.core.errors import ModelError, ModelNotFetched
from triptych.workers.models.store.catalogue import KNOWN_MODELS

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
"""Weights only as safetensors: ``.bin`` and ``.pt`` are pickles, which run code when read."""
_OTHER_FILES = ["consolidated*", "original/*"]
"""The same weights once more, in the form of the author's own code."""


def from_hub(name: str, allow_download: bool) -> Path:
    """The directory of a model, downloaded if necessary.

    ``name``: ``organization/model``, with ``@`` and a branch, tag or commit if it is pinned.

    Raises: ModelError if it is not such a name; ModelNotFetched if the hub does not give it
    """
    model, _, revision = name.partition("@")
    try:
        path = snapshot_download(
            model,
            revision=revision or None,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_OTHER_FILES,
            local_files_only=not allow_download,
        )
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither a known model {sorted(KNOWN_MODELS)}, nor a directory, nor a "
            ".gguf file, nor a hub name"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFetched(
            f"{name!r} is not on this machine and the hub did not give it "
            f"({type(error).__name__}: {error}). Check the name and the connection, or download "
            "it elsewhere and give its directory as model.name"
        ) from error
    return Path(path)
