"""The vision-language model as a checkpoint: LLaVA around the default language model.

    python -m examples.vision.checkpoint /tmp/smollm2-vision
    triptych serve /tmp/smollm2-vision

The first command puts the vision tower and projector of this folder in front of the language model,
whose weights it does not change.
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from examples.vision.scenes import SIDE
from triptych.core.config import ModelConfig
from triptych.workers.models.store.model_store import resolve

VISION_FILE = Path(__file__).with_name("vision.safetensors")
PATCH = 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TOWER = SiglipVisionConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    image_size=SIDE,
    patch_size=PATCH,
    vision_use_head=False,
)
PLACEHOLDER = "<empty_output>"
"""A special token that the language model knows and chats never have: no row is added."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}" + PLACEHOLDER + "{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def language_model(name: str = ModelConfig().name) -> Path:
    """Directory of the language model; downloaded if it is missing."""
    return resolve(name, allow_download=True)


def processor(language: Path, tower: SiglipVisionConfig = TOWER) -> LlavaProcessor:
    """Chat template, tokenizer, and how a picture becomes pixel values."""
    side = {"height": tower.image_size, "width": tower.image_size}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=side),
        tokenizer=AutoTokenizer.from_pretrained(language, local_files_only=True),
        patch_size=tower.patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=PLACEHOLDER,
        chat_template=TEMPLATE,
    )


def new_model(language: Path, tower: SiglipVisionConfig = TOWER) -> LlavaForConditionalGeneration:
    """A vision tower and a projector, untrained, before the language model, in bfloat16."""
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig.from_pretrained(language, local_files_only=True),
        image_token_id=AutoTokenizer.from_pretrained(language).convert_tokens_to_ids(PLACEHOLDER),
        image_seq_length=(tower.image_size // tower.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).bfloat16()
    weights = load_file(language / "model.safetensors")
    missing = model.load_state_dict(
        {_name_in_llava(name): tensor for name, tensor in weights.items()}, strict=False
    )
    strays = missing.unexpected_keys or [
        name for name in missing.missing_keys if not is_vision(name) and name != "lm_head.weight"
    ]
    if strays:
        raise ValueError(f"{language}: no language model for this tower: {strays[:5]}")
    model.tie_weights()
    return model.eval()


def vision_weights(model: LlavaForConditionalGeneration) -> dict[str, Tensor]:
    """Weights of the tower and the projector."""
    return {
        name: tensor.detach().bfloat16().contiguous()
        for name, tensor in model.state_dict().items()
        if is_vision(name)
    }


def save_vision(model: LlavaForConditionalGeneration, path: Path) -> None:
    save_file(vision_weights(model), path)


def assemble(directory: Path, vision: Path = VISION_FILE, language: Path | None = None) -> Path:
    """Write the checkpoint that a server reads: language model and ``vision``.

    Raises: ValueError if the files do not fit together
    """
    text = language or language_model()
    model = new_model(text)
    weights = load_file(vision)
    if set(weights) != set(vision_weights(model)):
        raise ValueError(f"{vision}: not the tower and projector of this example")
    model.load_state_dict(weights, strict=False)
    model.generation_config.eos_token_id = model.config.text_config.eos_token_id
    model.save_pretrained(directory)
    processor(text).save_pretrained(directory)
    return directory


def _name_in_llava(name: str) -> str:
    return (
        "model.language_model." + name.removeprefix("model.") if name != "lm_head.weight" else name
    )


def is_vision(name: str) -> bool:
    """Whether a tensor is of the tower or the projector."""
    return name.startswith(("model.vision_tower.", "model.multi_modal_projector."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoint is written (270 MB)")
    parser.add_argument("--vision", type=Path, default=VISION_FILE)
    given = parser.parse_args()
    print(assemble(given.directory, given.vision))


if __name__ == "__main__":
    main()
