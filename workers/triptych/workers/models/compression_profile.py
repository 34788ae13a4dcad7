"""Where the profile of a model is: in a file, among those that come with Triptych, or nowhere."""

from pathlib import Path

from triptych.core.config import AppConfig
from triptych.core.profile import Profile
from triptych.workers.models.facts import ModelFacts

PACKAGED = Path(__file__).parent / "known_profiles"
"""One file for each known model, named after its weights."""


def find_profile(config: AppConfig, facts: ModelFacts) -> Profile | None:
    """The profile that the settings name; none if the model has none.

    Raises: ConfigError if the file is not a profile, or one of another model
    """
    asked = config.compressor.profile
    if asked == "none":
        return None
    path = PACKAGED / f"{facts.weights}.json" if asked == "auto" else Path(asked)
    if asked == "auto" and not path.is_file():
        return None
    profile = Profile.read(path)
    profile.check_model(facts.weights, facts.geometry, path)
    return profile
