"""Tiny random models that read images, and prompts as their processors make them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from toy_tokenizer import byte_tokenizer

__all__ = ["IMAGE", "MODELS", "make_model", "mllama", "prompt_with_image", "with_processor"]

VOCAB, IMAGE, BEGIN, END, VIDEO = 270, 262, 263, 264, 265  # the first 262 are those of toy_tokenizer.py
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 2,
}  # fmt: skip


def llava() -> PreTrainedModel:
    text = {"model_type": "llama", **TEXT}
    vision = {"model_type": "clip_vision_model", **VISION}
    sizes = {"image_token_index": IMAGE, "vision_feature_layer": -1}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, **sizes))


def gemma3() -> PreTrainedModel:
    """Some layers have a window, shorter than the prompts; the tokens of an image see each other."""
    text = {**TEXT, "head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8}
    text["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = Gemma3Config(
        text_config=text, vision_config={"model_type": "siglip_vision_model", **VISION}, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> PreTrainedModel:
    """Positions have three dimensions, and an image takes fewer of them than it has tokens."""
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": TEXT["hidden_size"], "patch_size": 2,
        "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=BEGIN,
        vision_end_token_id=END, video_token_id=VIDEO,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def mllama() -> PreTrainedModel:
    """Layers 1 and 3 attend to the image, and to no text. Not served with images."""
    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 16,
        "vision_output_dim": 32, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {**TEXT, "cross_attention_layers": [1, 3], "rope_parameters": rope}
    torch.manual_seed(3)
    return MllamaForConditionalGeneration(
        MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    ).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"gemma3": gemma3, "llava": llava, "qwen2_5_vl": qwen2_5_vl}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1:  # large enough that texts differ by image, and do not repeat one token
                weight.mul_(4)
            if path.endswith("mm_input_projection_weight"):  # zero at first
                weight.normal_()
    return model


def prompt_with_image(name: str, seed: int, before: int = 6, after: int = 9, images: int = 1) -> dict[str, Tensor]:
    """One prompt with random images and random words around them."""
    chance = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(3, 90, (count,), generator=chance).tolist()

    tokens_of_image = {"gemma3": 4, "llava": 16, "qwen2_5_vl": 6}[name]
    ids = [1]
    for _ in range(images):
        ids += [*words(before), BEGIN, *[IMAGE] * tokens_of_image, END]
    ids_1T = torch.tensor([ids + words(after)])
    prompt = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
    if name == "qwen2_5_vl":
        prompt["pixel_values"] = torch.randn(24 * images, 3 * 2 * 2, generator=chance)
        prompt["image_grid_thw"] = torch.tensor([[1, 4, 6]] * images)
        prompt["mm_token_type_ids"] = (ids_1T == IMAGE).int()
    else:
        prompt["pixel_values"] = torch.randn(images, 3, 8, 8, generator=chance)
    if name == "gemma3":
        prompt["token_type_ids"] = (ids_1T == IMAGE).int()
    return prompt


MESSAGES_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_processor(folder: Path) -> Path:
    """A folder with a Llava model and its processor."""
    make_model("llava").save_pretrained(folder)
    tokenizer = byte_tokenizer(MESSAGES_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    processor = LlavaProcessor(images, tokenizer, 2, "default", MESSAGES_TEMPLATE, num_additional_image_tokens=1)
    processor.save_pretrained(folder)
    return folder
