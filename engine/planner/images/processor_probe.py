"""Probe of an image's tokens: what the processor of transformers counts for a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

from ....quant.families.family import ImageTokens


def probed_image_tokens(folder: Path, width: int, height: int) -> ImageTokens | None:
    """The count of the checkpoint's own processor; None where transformers cannot build it, or it cannot
    count without an image."""
    if not (folder / "preprocessor_config.json").is_file():
        return None
    try:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        counted = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        count, tiles = counted["num_image_tokens"][0], counted["num_image_patches"][0]
    except Exception:  # transformers may fail in any way here
        return None
    return ImageTokens(count, count, tiles, f"{type(processor).__name__} of transformers")
