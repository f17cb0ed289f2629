"""Capabilities of a served checkpoint other than text: images, embeddings, scores, and output by a grammar.

Images are fetched and decoded, and grammars compiled, on worker threads, few at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from ....base.errors import BadInput
from ....quant.gguf.container import GgufFile
from ....quant.gguf.keys import SAMPLING, UNREAD_SAMPLING, stored_sampling
from ....quant.model.checkpoint import gguf_file_of, read_json
from ...base.image_input import MediaLimits
from ...base.logits import TokenMask
from ...base.sampling_params import POOLING_MODES, PoolingParams, SamplingParams
from ...core.engine import Engine
from ...execution.pooling import Pooling, Scorer, read_pooling, read_scorer
from ...multimodal.media import is_data_url, load_images, num_pixels, sent_bytes
from ..protocol.errors import ApiError, TooMany, Unavailable, bad_field
from ..protocol.structure import MAX_GRAMMAR_CHARACTERS, Constraint

if TYPE_CHECKING:
    from ...multimodal.open import ImageSupport
    from ...multimodal.processor import PreparedPrompt
    from ...sampling.grammar import GrammarCompiler


T = TypeVar("T")
_log = logging.getLogger(__name__)

NUM_FETCHES = 32
"""Downloads at a time: they wait for hosts."""
SMALL_PIXELS = 1 << 21
"""Pixels of a prompt whose images do not wait for those of larger prompts."""


class SizedPool:
    """Two worker threads: one for work up to the size `small`, one for larger work, the smallest first. Work
    that has not begun is dropped when its caller stops waiting."""

    def __init__(self, name: str, small: int) -> None:
        prefixes = (f"llmopt-{name}", f"llmopt-large-{name}")
        self._threads = [ThreadPoolExecutor(1, prefix) for prefix in prefixes]
        self._small = small
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._is_busy = False

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`."""
        loop = asyncio.get_running_loop()
        if size <= self._small:
            return await loop.run_in_executor(self._threads[0], work)
        turn = loop.create_future()
        heappush(self._waiting, (size, next(self._order), turn))
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just begun
                self._end()
            raise
        working = loop.run_in_executor(self._threads[1], work)
        working.add_done_callback(self._end)
        return await working

    def _begin_next(self) -> None:
        while self._waiting and not self._is_busy:
            turn = heappop(self._waiting)[2]
            if not turn.done():
                self._is_busy = True
                turn.set_result(None)

    def _end(self, _: object = None) -> None:
        self._is_busy = False
        self._begin_next()

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


class PromptImages:
    """Makes prompts of rendered texts and the URLs of their images. `reason` says why the model takes no
    images, for clients, who see no paths of this machine. Beyond `max_model_len` tokens of a prompt its
    images are left."""

    def __init__(
        self,
        support: ImageSupport,
        limits: MediaLimits,
        reason: str,
        max_model_len: int | None = None,
    ) -> None:
        self._support, self._limits, self._reason = support, limits, reason
        self._max_model_len = max_model_len
        self._fetching = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="llmopt-media")
        self._decoding = SizedPool("images", SMALL_PIXELS)

    @property
    def are_taken(self) -> bool:
        return self._support.processor is not None

    def check(self, num_images: int) -> None:
        """Refuse a prompt by the number of its images. Raises `ApiError`: the model takes no images;
        `BadInput`: too many."""
        if not self.are_taken:
            problem = f"images are not taken: {self._reason}"
            raise bad_field("messages", problem, "unsupported_model")
        self._limits.check_count(num_images)

    async def prepare(self, text: str, urls: Sequence[str]) -> PreparedPrompt:
        """The prompt of a rendered conversation, whose placeholders are in the order of `urls`. Raises
        `BadInput`: an image that cannot be had or decoded, or that the model's processor refuses."""
        # An error cancels nothing: the fetches that have begun end at their deadline.
        sent = await asyncio.gather(*(self._sent(url) for url in urls))
        encoded = await self._decoding.run(0, lambda: [_encoded(s, self._limits) for s in sent])

        def prepare() -> PreparedPrompt:
            images = load_images([data for data, _ in encoded], self._limits)
            how: dict[str, Any] = {"add_special_tokens": False, "max_tokens": self._max_model_len}
            return self._support.required().prepare(text, images, **how)

        return await self._decoding.run(sum(num_pixels for _, num_pixels in encoded), prepare)

    async def _sent(self, url: str) -> str | bytes:
        """A data URL as it is, which waits for no host; else the bytes of the image."""
        if is_data_url(url):
            return url
        loop, seconds = asyncio.get_running_loop(), self._limits.fetch_timeout_seconds
        fetching = loop.run_in_executor(self._fetching, sent_bytes, url, self._limits)
        try:  # resolving a name has no timeout of its own
            return await asyncio.wait_for(fetching, seconds + 0.5)
        except TimeoutError as error:
            raise BadInput(f"an image did not arrive within {seconds:g} s") from error

    def close(self) -> None:
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._decoding.close()


def _encoded(sent: str | bytes, limits: MediaLimits) -> tuple[bytes, int]:
    """Bytes of an image, and its pixels by its header. Raises `BadInput`: as the functions that it calls."""
    data = sent if isinstance(sent, bytes) else sent_bytes(sent, limits)
    return data, num_pixels(data, limits)


@dataclass(frozen=True, slots=True)
class PoolingTasks:
    """The model's pooling and scorer, or the reason why there is none.

    Attributes:
        scored_by: the scorer, or the reason; None: pairs are scored by their embeddings.
    """

    model_name: str = ""
    pooling: Pooling | str = "the checkpoint has no pooling"
    scored_by: Scorer | str | None = None

    def embedder(self) -> Pooling:
        """Raises `ApiError` where the model gives no embeddings."""
        if isinstance(self.pooling, str):
            raise self._cannot(f"gives no embeddings: {self.pooling}")
        return self.pooling

    def scorer(self) -> Scorer | None:
        """The model's own scorer; None where pairs are scored by their embeddings. Raises `ApiError`: there
        are neither."""
        if isinstance(self.scored_by, str):
            raise self._cannot(f"gives no scores: {self.scored_by}")
        if self.scored_by is None and isinstance(self.pooling, str):
            raise self._cannot(f"gives no scores: it is no reranker, and {self.pooling}")
        return self.scored_by

    def check_generates(self) -> None:
        """Raises `ApiError` for a sequence classifier, which has no language head."""
        if isinstance(self.scored_by, Scorer) and self.scored_by.head is not None:
            raise self._cannot("is a sequence classifier and generates no text: ask /v1/score")

    def _cannot(self, reason: str) -> ApiError:
        return ApiError(400, f"{self.model_name} {reason}", param="model", code="unsupported_model")


def pooling_tasks(engine: Engine, model_name: str, pooling_type: str | None) -> PoolingTasks:
    """The tasks of an engine's checkpoint; `pooling_type` takes the place of the checkpoint's pooling."""
    pooling: Pooling | str
    scorer: Scorer | str | None
    try:
        pooling = _pooling(engine, pooling_type)
    except BadInput as error:
        pooling = str(error)
    try:
        scorer = read_scorer(engine.folder, engine.model_config, engine.tokenizer)
    except BadInput as error:
        scorer = str(error)
    return PoolingTasks(model_name, pooling, scorer)


def _pooling(engine: Engine, pooling_type: str | None) -> Pooling:
    if engine.runner.decoder.hidden_size is None:
        raise BadInput("it runs through transformers' modules, which give no hidden states to pool")
    if pooling_type is not None:
        return Pooling(PoolingParams(pooling_type.lower()), normalize=True)
    pooling = read_pooling(engine.folder)
    if pooling is None:
        raise BadInput(
            "the checkpoint has no pooling (1_Pooling/config.json); --pooling-type chooses one: "
            + ", ".join(POOLING_MODES)
        )
    return pooling


def default_sampling(model: Path) -> dict[str, float]:
    """Read the sampling that a model's generation_config.json asks for, or else the keys of its GGUF file.
    Raises `BadInput`: the config is no JSON object, or values are out of range."""
    file = gguf_file_of(model)
    metadata = {} if file is None else GgufFile(file).metadata
    stored: dict[str, Any] = {} if file is None else stored_sampling(file, metadata)
    if unread := [key for key in UNREAD_SAMPLING if metadata.get(f"general.sampling.{key}")]:
        _log.warning("%s asks for %s, which is not sampled by here", file, " and ".join(unread))
    path = (model if file is None else file.parent) / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    given = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    for source, values in ((file, stored), (path, given)):
        try:
            SamplingParams(**values)
        except (BadInput, TypeError) as error:
            raise BadInput(f"{source}: {error}") from error
    return stored | given


class FairPool:
    """Worker threads of which a client may use `per_key` at a time, so that a large request of one does not
    hold up the others. Work that has not begun is dropped when its caller stops waiting."""

    def __init__(self, name: str, num_threads: int, per_key: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"llmopt-{name}")
        self._permits = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(per_key))

    async def run(self, key: int, work: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of `work`, which came with the API key of that index. Raises `TimeoutError`: it
        has begun, or could have, and is not done after `seconds`; `TooMany`: other work of the key was not
        done before."""
        loop, permits = asyncio.get_running_loop(), self._permits[key]
        try:
            await asyncio.wait_for(permits.acquire(), seconds)
        except TimeoutError:
            problem = "other requests of this key take all its worker threads: try again later"
            raise TooMany(problem, {"Retry-After": "1"}) from None
        try:
            working: Future[T] = self._threads.submit(work)
        except RuntimeError as error:
            permits.release()
            raise Unavailable("the server is stopping") from error

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the server was forced to stop
                loop.call_soon_threadsafe(permits.release)

        # Not when the wait ends: a thread that has begun goes on all the same.
        working.add_done_callback(leave)
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(working)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


COMPILE_SECONDS = 10.0
NUM_COMPILERS, COMPILERS_PER_KEY = 4, 2


class Constrainer:
    """Compiles grammar token masks on worker threads, because large schemas take long; llguidance compiles
    without Python's lock."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._parts = tokenizer, vocab_size, end_token_ids
        self._workers = FairPool("grammar", NUM_COMPILERS, COMPILERS_PER_KEY)
        self._lock = Lock()
        self._compiler: GrammarCompiler | None = None

    async def mask(self, constraint: Constraint, num_sequences: int, key: int = 0) -> TokenMask:
        """Compile the token mask of one request, which came with the API key of that index. Raises
        `ApiError`: 400, with the request field and the invalid place in it, or because it is too large or
        takes too long."""
        compile_mask = partial(self._mask, constraint, num_sequences)
        try:
            return await self._workers.run(key, compile_mask, COMPILE_SECONDS)
        except TimeoutError:
            problem = f"not compiled after {COMPILE_SECONDS:g} s: simplify it"
            raise bad_field(constraint.field, problem) from None
        except BadInput as error:
            field, separator = constraint.field, "" if str(error).startswith("/") else ": "
            raise ApiError(400, f"{field}{separator}{error}", param=field) from error

    def close(self) -> None:
        self._workers.close()

    def _mask(self, constraint: Constraint, num_sequences: int) -> TokenMask:
        from ...sampling import grammar

        if constraint.num_characters > MAX_GRAMMAR_CHARACTERS:
            raise BadInput(f"more than {MAX_GRAMMAR_CHARACTERS} characters")
        with self._lock:
            if self._compiler is None:
                self._compiler = grammar.GrammarCompiler(*self._parts)
        compiler, value = self._compiler, constraint.value
        if constraint.kind == "json_schema":
            return compiler.json_schema_mask(value, num_sequences)
        if constraint.kind == "structural_tag":
            return compiler.structural_tag_mask(value, num_sequences)
        if constraint.kind == "choice":
            return compiler.choice_mask(value, num_sequences)
        make = grammar.regex if constraint.kind == "regex" else grammar.context_free
        return compiler.mask(make(value), num_sequences)
