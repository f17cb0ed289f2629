"""Automatic prefix caching: full KV blocks by the hash chain of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..base.image_input import content_key
from .block_pool import NULL_BLOCK, BlockPool
from .request import Request


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The content of a cached block: its tokens and images, and the hash of everything before them."""

    block_id: int
    parent_hash: bytes
    token_ids: tuple[int, ...]
    image_key: bytes = b""


def hash_block(
    parent_hash: bytes, token_ids: Sequence[int], salt: bytes, image_key: bytes = b""
) -> bytes:
    """The hash of a full block: of its tokens, the hash of its predecessor, and the salt (BLAKE2b, 128 bits).

    The salt separates what must not be shared: adapters, tenants. `image_key` says which images its
    placeholder tokens are, which all have the same id.
    """
    digest = blake2b(parent_hash, digest_size=16, key=salt[:64])
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    digest.update(image_key)
    return digest.digest()


class PrefixCache:
    """An index from the hash chain of a sequence's full blocks to blocks of the pool.

    Only blocks whose tokens have been computed enter, and a hit compares the tokens themselves, so a
    hash collision costs a miss and never a wrong result. Where the same content was computed twice, the
    second block is not inserted: block tables of running sequences never change.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._hash_of: dict[int, bytes] = {}
        pool.on_reuse = self._evict
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def match(self, request: Request) -> list[int]:
        """Cached blocks of the longest matching prefix of `request`; has no side effects.

        At least one token is left to compute, because a step needs logits to sample from. Prompt logprobs
        need the logits of every token, and most ways of pooling its states, so such a request never hits.
        """
        hits: list[int] = []
        pools_all = request.pooling is not None and request.pooling.reads_all
        if not self._enabled or request.params.prompt_logprobs is not None or pools_all:
            return hits
        self._extend_chain(request, request.num_known_tokens)
        parent = b""
        for index in range((request.num_tokens - 1) // self._block_size):
            name = request.block_hashes[index]
            cached = self._by_hash.get(name)
            if cached is None or cached != self._content(request, index, cached.block_id, parent):
                break
            hits.append(cached.block_id)
            parent = name
        return hits

    def count(self, request: Request, num_hit_blocks: int) -> None:
        """Count a query and its hits, when a request is admitted."""
        if self._enabled:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_hit_blocks * self._block_size

    def insert(self, request: Request, start: int, end: int) -> None:
        """Insert the blocks of `request` that its tokens from `start` to `end` filled."""
        if not self._enabled:
            return
        self._extend_chain(request, end)
        for index in range(start // self._block_size, end // self._block_size):
            name, block_id = request.block_hashes[index], request.block_ids[index]
            if name in self._by_hash or block_id in self._hash_of or block_id == NULL_BLOCK:
                continue
            parent = request.block_hashes[index - 1] if index else b""
            self._by_hash[name] = self._content(request, index, block_id, parent)
            self._hash_of[block_id] = name
            self._pool.set_cached(block_id, True)

    def forget(self, block_id: int) -> None:
        """Drop the entry of a block that its only owner is about to overwrite."""
        self._evict(block_id)
        self._pool.set_cached(block_id, False)

    def reset(self) -> None:
        """Drop all entries and counters; running sequences keep their blocks."""
        for block_id in self._hash_of:
            self._pool.set_cached(block_id, False)
        self._by_hash.clear()
        self._hash_of.clear()
        self.num_queried_tokens = self.num_hit_tokens = 0

    def check_integrity(self) -> None:
        """Assert that the two directions of the index agree."""
        assert len(self._by_hash) == len(self._hash_of)
        for name, cached in self._by_hash.items():
            assert self._hash_of[cached.block_id] == name
            assert len(cached.token_ids) == self._block_size

    def _evict(self, block_id: int) -> None:
        del self._by_hash[self._hash_of.pop(block_id)]

    def _content(
        self, request: Request, index: int, block_id: int, parent_hash: bytes
    ) -> CachedBlock:
        tokens, images = self._tokens(request, index), self._image_key(request, index)
        return CachedBlock(block_id, parent_hash, tokens, images)

    def _image_key(self, request: Request, index: int) -> bytes:
        if not request.images:
            return b""
        start = index * self._block_size
        end = start + self._block_size
        return content_key(request.images, start, end, request.bidirectional_images)

    def _tokens(self, request: Request, index: int) -> tuple[int, ...]:
        return tuple(request.token_ids[index * self._block_size : (index + 1) * self._block_size])

    def _extend_chain(self, request: Request, num_tokens: int) -> None:
        """Hash the full blocks of the first `num_tokens` tokens that are not hashed yet."""
        chain = request.block_hashes
        for index in range(len(chain), num_tokens // self._block_size):
            parent = chain[-1] if chain else b""
            tokens, images = self._tokens(request, index), self._image_key(request, index)
            chain.append(hash_block(parent, tokens, request.cache_salt, images))
