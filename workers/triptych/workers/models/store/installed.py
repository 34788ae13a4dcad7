# huggingface_hub leaves some of its cache untyped.
# pyright: reportUnknownMemberType=false
"""Models on this machine: converted ones, and those of the Hugging Face cache."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from triptych.core.errors import ModelError
from triptych.workers.models.store.catalogue import KNOWN_MODELS
from triptych.workers.models.store.model_store import models_dir
from triptych.workers.models.store.safe_files import is_sealed


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that is served without a download."""

    name: str
    """As ``model.name`` takes it; of a converted GGUF the name of its directory."""
    source: Literal["known", "gguf", "hub"]
    size_bytes: int
    path: Path
    _delete: Callable[[], None] = field(repr=False, compare=False)

    def delete(self) -> None:
        """Delete its files."""
        self._delete()


def installed_models() -> list[InstalledModel]:
    """All models on this machine, by name."""
    return sorted([*_converted(), *_from_hub()], key=lambda model: model.name)


def find_installed(name: str) -> InstalledModel:
    """Raises: ModelError if there is no such model here"""
    found = installed_models()
    for model in found:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in found) or "none"
    raise ModelError(f"{name} is not on this machine (models here: {names})")


def _converted() -> list[InstalledModel]:
    known = {model.directory: model.name for model in KNOWN_MODELS.values()}
    found = list[InstalledModel]()
    for path in models_dir().glob("*") if models_dir().is_dir() else ():
        if path.name.startswith(".") or not is_sealed(path):
            continue
        size = sum(file.stat().st_size for file in path.iterdir())
        found.append(
            InstalledModel(
                known.get(path.name, path.name),
                "known" if path.name in known else "gguf",
                size,
                path,
                lambda path=path: shutil.rmtree(path),
            )
        )
    return found


def _from_hub() -> list[InstalledModel]:
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    found = list[InstalledModel]()
    for repo in cache.repos:
        files = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type != "model" or not any(name.endswith(".safetensors") for name in files):
            continue
        strategy = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
        found.append(
            InstalledModel(repo.repo_id, "hub", repo.size_on_disk, repo.repo_path, strategy.execute)
        )
    return found
