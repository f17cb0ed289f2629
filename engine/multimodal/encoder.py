"""The vision encoder, a model's tower and projector without its language model, and the embeddings' cache."""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from ...base.errors import BadInput, first_line
from ..base.image_input import ImageInput


class EncodingError(BadInput):
    """The vision tower failed on the image of this `content_hash`; others may be encoded."""

    def __init__(self, image: ImageInput, cause: Exception) -> None:
        super().__init__(
            f"the vision tower fails on an image of {image.num_tokens} tokens: {first_line(cause)}"
        )
        self.content_hash = image.content_hash


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """A row for each embedded token of an image, [num_embeddings, hidden]; `deepstack` by layer."""

    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.embeddings, *self.deepstack))


class VisionEncoder:
    """Embeddings `hidden_size` wide by `get_image_features` of `model`, images of equal shape together."""

    max_images_per_pass = 8
    """Bounds the memory of the tower's activations."""

    def __init__(
        self, model: Any, hidden_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._features = model.get_image_features
        self._project = getattr(model, "multi_modal_projector", None)
        self._hidden_size, self.device, self._dtype = hidden_size, device, dtype
        self._takes = frozenset(inspect.signature(self._features).parameters)
        self.bytes_held = sum(weight.nbytes for weight in model.parameters())

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageInput]) -> list[EncodedImage]:
        """Embeddings of images. EncodingError: the tower fails, or gives another number."""
        by_shape = sorted(range(len(images)), key=lambda index: _shapes(images[index]))
        encoded: dict[int, EncodedImage] = {}
        for _, same in groupby(by_shape, key=lambda index: _shapes(images[index])):
            indices = list(same)
            for first in range(0, len(indices), self.max_images_per_pass):
                group = indices[first : first + self.max_images_per_pass]
                results = self._encode_apart([images[index] for index in group])
                encoded.update(zip(group, results, strict=True))
        return [encoded[index] for index in range(len(images))]

    def _encode_apart(self, images: Sequence[ImageInput]) -> list[EncodedImage]:
        """The images in one pass; where it fails, one by one, to tell which of them is the cause."""
        try:
            return self._encode_together(images)
        except torch.AcceleratorError:
            raise  # a CUDA context is unusable after it
        except Exception as error:  # the towers of transformers may fail in any way
            if len(images) == 1:
                raise EncodingError(images[0], error) from error
        return [encoded for image in images for encoded in self._encode_apart([image])]

    def _encode_together(self, images: Sequence[ImageInput]) -> list[EncodedImage]:
        arguments = {}
        for name in self._takes & images[0].tensors.keys():
            tensor = torch.cat([image.tensors[name] for image in images])
            dtype = self._dtype if tensor.is_floating_point() else None
            arguments[name] = tensor.to(self.device, dtype)
        output = self._features(**arguments, return_dict=True)
        counts = [image.num_embeddings for image in images]
        features = getattr(output, "pooler_output", output)
        rows = _joined(output.last_hidden_state if features is None else features)
        if rows.shape[1] != self._hidden_size and self._project is not None:
            rows = self._project(rows)  # Llama 4 projects outside `get_image_features`
        rows = rows.to(self._dtype)
        if len(rows) != sum(counts):
            raise BadInput(
                f"the vision tower gives {len(rows)} embeddings for {sum(counts)} placeholder tokens: "
                "the checkpoint's processor does not match its model"
            )
        levels = getattr(output, "deepstack_features", None) or ()
        deepstack = [_joined(part).split(counts) for part in levels]
        return [
            EncodedImage(part.clone(), tuple(level[index].clone() for level in deepstack))
            for index, part in enumerate(rows.split(counts))
        ]


def _joined(features: Any) -> torch.Tensor:
    """Rows [tokens, hidden] of all images, of features that may be a tensor for each."""
    if isinstance(features, list | tuple):
        features = torch.cat([part.reshape(-1, part.shape[-1]) for part in features])
    return features.reshape(-1, features.shape[-1])


def _shapes(image: ImageInput) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(image.tensors.items()))


@dataclass(slots=True)
class EncoderStats:
    """Counters of an encoder cache since its start."""

    num_queries: int = 0
    num_hits: int = 0
    num_evicted: int = 0
    encode_seconds: float = 0.0


class EncoderCache:
    """Embeddings of images, up to `max_bytes`; what was dropped, or alone exceeds that, is encoded anew."""

    def __init__(self, encoder: VisionEncoder, max_bytes: int) -> None:
        self.encoder, self.max_bytes = encoder, max_bytes
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self.num_bytes = 0
        self.stats = EncoderStats()

    def __len__(self) -> int:
        return len(self._kept)

    @torch.inference_mode()
    def embeddings(self, images: Sequence[ImageInput]) -> dict[bytes, EncodedImage]:
        """The embeddings of a step's images, by content hash; each distinct one is encoded at most once."""
        wanted = {image.content_hash: image for image in images}
        results = {name: self._kept[name] for name in wanted if name in self._kept}
        self.stats.num_queries += len(wanted)
        self.stats.num_hits += len(results)
        for name in results:
            self._kept.move_to_end(name)
        missing = [image for name, image in wanted.items() if name not in results]
        if missing:
            began = time.perf_counter()
            encoded = self.encoder.encode(missing)
            if self.encoder.device.type == "cuda":
                torch.cuda.synchronize(self.encoder.device)
            self.stats.encode_seconds += time.perf_counter() - began
            for image, embeddings in zip(missing, encoded, strict=True):
                results[image.content_hash] = embeddings
                if embeddings.num_bytes <= self.max_bytes:
                    self._kept[image.content_hash] = embeddings
                    self.num_bytes += embeddings.num_bytes
                while self.num_bytes > self.max_bytes:
                    _, dropped = self._kept.popitem(last=False)
                    self.num_bytes -= dropped.num_bytes
                    self.stats.num_evicted += 1
        return results

    def reset(self) -> None:
        self._kept.clear()
        self.num_bytes, self.stats = 0, EncoderStats()
