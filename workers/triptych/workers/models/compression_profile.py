"""Finds the compression profile of a model: a file, or one of the packaged profiles."""

from pathlib import Path

from triptych.core.config import AppConfig
from triptych.core.profile import Profile
from triptych.workers.models.facts import ModelFacts

PACKAGED = Path(__file__).parent / "known_profiles"
"""A file per known model, named by the hash of its weights."""


def find_profile(config: AppConfig, facts: ModelFacts) -> Profile | None:
    """The profile that the settings name; None if there is none for the model.

    Raises: ConfigError if the file is not a profile, or one of another model
    """
    name = config.compressor.profile
    if name == "none":
        return None
    path = PACKAGED / f"{facts.weights}.json" if name == "auto" else Path(name)
    if name == "auto" and not path.is_file():
        return None
    profile = Profile.read(path)
    profile.check_model(facts.weights, facts.geometry, path, facts.config)
    return profile
