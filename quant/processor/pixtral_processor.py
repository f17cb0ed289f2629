"""Pixtral's placeholders (Mistral 3, Pixtral) without torchvision, which transformers' class imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.processing_utils import ProcessorMixin


class PixtralProcessor(ProcessorMixin):
    """A row of placeholders for each row of merged patches, with a separator after each and an end token.

    Source: transformers' `processing_pixtral.py`, the part that reads images.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: Any = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.side = patch_size * spatial_merge_size
        self.image_token = image_token
        self.image_break_token, self.image_end_token = image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def _process_images(self, images: Any, **images_kwargs: Any) -> tuple[Any, list[str]]:
        return super()._process_images(images, **{**images_kwargs, "patch_size": self.side})

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_: Any) -> str:
        height, width = (int(side) // self.side for side in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width
        return self.image_break_token.join([row] * height) + self.image_end_token
