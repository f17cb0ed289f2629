"""Images of conversations: fetched, decoded and prepared off the event loop, few prompts at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from ....quant.base.errors import BadInput
from ...multimodal.media import MediaLimits, decode_image, is_data_url, sent_bytes
from ..protocol.errors import ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...multimodal.processor import PreparedPrompt

NUM_FETCHES = 32
"""Downloads at a time: they wait for hosts."""
NUM_DECODES = 2
"""Prompts at a time whose images are decoded: with the pixels of a prompt that bounds memory."""


class PromptProcessor(Protocol):
    """What an engine has for images (`ImageSupport`)."""

    @property
    def processor(self) -> Any:
        """None if the model takes no images."""
        ...

    def prepare(
        self,
        prompt: str,
        images: Sequence[Image],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> PreparedPrompt: ...


class PromptImages:
    """Makes prompts of rendered texts and the URLs of their images.

    Args:
        support: of the engine.
        limits: of what clients may send.
        reason: why the model takes no images, for clients, who are told no paths of this machine.
        max_model_len: tokens of a prompt, beyond which its images are left.
    """

    def __init__(
        self,
        support: PromptProcessor,
        limits: MediaLimits,
        reason: str,
        max_model_len: int | None = None,
    ) -> None:
        self._support, self._limits, self._reason = support, limits, reason
        self._max_model_len = max_model_len
        self._fetching = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="llmopt-media")
        self._decoding = ThreadPoolExecutor(NUM_DECODES, thread_name_prefix="llmopt-images")

    @property
    def are_taken(self) -> bool:
        """Whether the model takes images."""
        return self._support.processor is not None

    def check(self, num_images: int) -> None:
        """Refuse a prompt by the number of its images.

        Raises:
            ApiError: the model takes no images.
            BadInput: too many.
        """
        if not self.are_taken:
            reason = f"messages: images are not taken: {self._reason}"
            raise ApiError(400, reason, param="messages", code="unsupported_model")
        self._limits.check_count(num_images)

    async def prepare(self, text: str, urls: Sequence[str]) -> PreparedPrompt:
        """The prompt of a rendered conversation, whose placeholders are in the order of `urls`.

        Raises:
            BadInput: an image that cannot be had or decoded, or that the model's processor refuses.
        """
        # An error cancels nothing: the fetches that have begun end at their deadline.
        sent = await asyncio.gather(*(self._sent(url) for url in urls))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, self._prepare, text, sent)

    async def _sent(self, url: str) -> str | bytes:
        """A data URL as it is, which waits for no host; else the bytes of the image."""
        if is_data_url(url):
            return url
        fetching = asyncio.get_running_loop().run_in_executor(
            self._fetching, sent_bytes, url, self._limits
        )
        # Resolving a name has no timeout of its own.
        seconds = self._limits.fetch_timeout_seconds
        try:
            return await asyncio.wait_for(fetching, seconds + 0.5)
        except TimeoutError as error:
            raise BadInput(f"an image did not arrive within {seconds:g} s") from error

    def _prepare(self, text: str, sent: Sequence[str | bytes]) -> PreparedPrompt:
        images: list[Image] = []
        num_pixels = 0
        for source in sent:
            data = sent_bytes(source, self._limits) if isinstance(source, str) else source
            images.append(decode_image(data, self._limits))
            num_pixels += images[-1].width * images[-1].height
            self._limits.check_prompt_pixels(num_pixels)
        return self._support.prepare(
            text, images, add_special_tokens=False, max_tokens=self._max_model_len
        )

    def close(self) -> None:
        """Shut down the worker threads."""
        for pool in (self._fetching, self._decoding):
            pool.shutdown(wait=False, cancel_futures=True)
