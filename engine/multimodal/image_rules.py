"""Positions and masks that a language model has for the tokens of images, beside their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...quant.base.errors import BadInput, first_line
from ..base.image_input import Images
from ..model.spec import ImageSpec
from ..scheduling.request import RopePositions

_IMAGE = 1
"""Token type of an image's tokens (`mm_token_type_ids`)."""


class ImageRules:
    """M-RoPE positions of a prompt by transformers' own function, and the images that see all of themselves.

    Args:
        raw: the checkpoint's `config.json`.
        streams: whether the engine has attention sinks (StreamingLLM).
    """

    def __init__(self, spec: ImageSpec, raw: Mapping[str, Any], *, streams: bool) -> None:
        self._spec, self._raw, self._streams = spec, raw, streams

    def rope_positions(self, token_ids: Sequence[int], images: Images) -> RopePositions | None:
        """Positions of a prompt with `images`; None: they are its indices.

        Raises:
            BadInput: positions cannot be computed, as where nothing is between two images, or the model
                cannot take them.
        """
        if not images or not hasattr(self._model, "get_rope_index"):
            return None
        if not self._spec.has_mrope:
            raise BadInput(
                "this model's images have positions in time, height and width (M-RoPE), which transformers' "
                "modules take none of here: send text"
            )
        if self._streams:
            raise BadInput(
                "attention sinks rotate by places in the cache, images of this model by their grid (M-RoPE): "
                "leave out window and attention_sinks, or send text"
            )
        types = torch.zeros(1, len(token_ids), dtype=torch.int32)
        for image in images:
            positions, _ = image.embedded_positions(image.offset, image.end)
            types[0, positions] = _IMAGE
        try:
            positions, deltas = self._model.get_rope_index(
                torch.tensor([list(token_ids)]),
                mm_token_type_ids=types,
                image_grid_thw=torch.tensor([image.grid for image in images]),
            )
        except Exception as error:  # transformers' function checks nothing
            raise BadInput(
                f"{len(images)} images: transformers cannot place them ({first_line(error)}): each needs its "
                "own placeholder, with text between them"
            ) from error
        temporal, height, width = positions[:, 0].tolist()
        return RopePositions((temporal, height, width), int(deltas[0]))

    def bidirectional(self, images: Images) -> tuple[range, ...]:
        """Positions of the images whose tokens attend to each other; those without text between are one."""
        if not self._spec.is_bidirectional:
            return ()
        spans: list[range] = []
        for image in images:
            start = image.offset
            if spans and spans[-1].stop == start:
                start = spans.pop().start
            spans.append(range(start, image.end))
        return tuple(spans)

    @cached_property
    def _model(self) -> Any:
        """The model's class as an instance without weights, which `get_rope_index` does not read; None: the
        model is unknown to transformers."""
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        from ...quant.model.auto import read_config

        config = read_config(self._raw)
        kind: Any = MODEL_MAPPING.get(type(config), None)
        if kind is None:
            return None
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        model.config = config
        return model
