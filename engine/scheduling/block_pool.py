"""Block pool of the paged KV cache: reference counts, LRU free list, eviction behind a window; and automatic
prefix caching: full blocks by the hash chain of their tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..base.image_input import content_key
from .request import Request

NULL_BLOCK = 0
"""The null block, which no sequence owns. Padding reads and writes it, so that padding needs no branch."""


class BlockPool:
    """`num_blocks` blocks with reference counts. Block 0 is the null block and is never allocated. A freed
    block keeps its content until it is allocated again, so that the prefix cache can revive it. Blocks
    without cached content are reused first; cached ones are evicted in LRU order.

    Attributes:
        cached_ids: blocks whose content the prefix cache has.
        on_reuse: called with the id of a cached block just before it is evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks = }: a pool needs the null block and one more")
        self._ref_counts = [0] * num_blocks
        # In the order of reuse. A hit of the prefix cache removes a block from anywhere in it, in O(1).
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self.cached_ids: set[int] = set()
        self.on_reuse: Callable[[int], None] = lambda block_id: None

    @property
    def num_usable(self) -> int:
        return len(self._ref_counts) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def kept_block_ids(self) -> list[int]:
        return [block_id for block_id in self._free if block_id in self.cached_ids]

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with reference count 1. The caller has checked `num_free`."""
        allocated = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            if block_id in self.cached_ids:
                self.on_reuse(block_id)
                self.cached_ids.remove(block_id)
            self._ref_counts[block_id] = 1
            allocated.append(block_id)
        return allocated

    def share(self, block_ids: Iterable[int]) -> None:
        """Increment reference counts, taking blocks that are free out of the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Release a sequence's blocks, tail first: it is evicted first, as the least likely shared prefix."""
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self.cached_ids:
                    self._free.move_to_end(block_id, last=False)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        num_owners = Counter(block_id for table in tables for block_id in table)
        assert NULL_BLOCK not in num_owners and NULL_BLOCK not in self._free, (
            "the null block is in use"
        )
        for block_id, count in enumerate(self._ref_counts):
            owners = num_owners[block_id]
            assert count == owners, f"block {block_id}: {count} holders, {owners} in tables"
        assert len(self._free) + len(num_owners) == self.num_usable, "blocks are lost"


@dataclass(frozen=True, slots=True)
class Window:
    """The visible window of every layer: the last `length` tokens, the new one included, and `sinks` first
    tokens of the sequence.

        |  sinks  |            evicted            |    length    |
        0                                 num_computed    ... the next token

    Blocks wholly in the middle are freed.
    """

    length: int
    sinks: int = 0

    @property
    def num_visible(self) -> int:
        return self.sinks + self.length

    def evicted(self, num_computed: int, block_size: int) -> range:
        """Indices of a block table that no later token attends to, after `num_computed` tokens."""
        first = -(-self.sinks // block_size)
        return range(first, max(first, (num_computed - self.length + 1) // block_size))

    def reach(self, num_computed: int, chunk: int) -> int:
        """Tokens that an admitted sequence gets blocks for: from there on it frees as many as it takes."""
        return max(num_computed, self.length - 1) + chunk

    def max_blocks(self, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of any length holds at once, with steps of `chunk` of its tokens."""
        first = -(-self.sinks // block_size)
        return first + (self.length + chunk + 2 * block_size - 3) // block_size


def evicted_places(block_ids: Sequence[int]) -> range:
    """Indices of a block table with the null block: one run, between the sinks and the window."""
    if NULL_BLOCK not in block_ids:
        return range(0)
    start = block_ids.index(NULL_BLOCK)
    end = bisect_left(block_ids, True, start, key=lambda block_id: block_id != NULL_BLOCK)
    return range(start, end)


def evict_blocks(block_ids: list[int], before: range, now: range) -> list[int]:
    """Put the null block at the indices `now`, where `before` have it; returns the evicted blocks."""
    first = max(now.start, before.stop)
    evicted = block_ids[first : now.stop]
    block_ids[first : now.stop] = [NULL_BLOCK] * len(evicted)
    return evicted


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
    """Hash of a full block (BLAKE2b, 128 bits): predecessor, tokens, `image_key` and the tenant's salt.
    Adapters and tenants have other salts; `image_key` tells placeholder tokens apart, which have one id."""
    key = salt if len(salt) <= 64 else blake2b(salt).digest()  # the longest key
    digest = blake2b(parent_hash, digest_size=16, key=key)
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    digest.update(image_key)
    return digest.digest()


class PrefixCache:
    """An index from the hash chain of a sequence's full blocks to blocks of the pool. A hit compares the
    tokens themselves, so a hash collision costs a miss and never a wrong result. Where content was computed
    twice, the second block is not inserted: running block tables never change."""

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
        """Cached blocks of the longest matching prefix of `request`; has no side effects. At least one token
        is left to compute, because a step needs logits to sample from."""
        hits: list[int] = []
        if not self._looks_up(request):
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
        if self._looks_up(request):
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
            self._pool.cached_ids.add(block_id)

    def forget(self, block_id: int) -> None:
        self._evict(block_id)
        self._pool.cached_ids.remove(block_id)

    def reset(self) -> None:
        self._pool.cached_ids.clear()
        self._by_hash.clear()
        self._hash_of.clear()
        self.num_queried_tokens = self.num_hit_tokens = 0

    def check_integrity(self) -> None:
        assert len(self._by_hash) == len(self._hash_of)
        for name, cached in self._by_hash.items():
            assert self._hash_of[cached.block_id] == name
            assert len(cached.token_ids) == self._block_size

    def _looks_up(self, request: Request) -> bool:
        """False if every token's state is needed, for prompt logprobs or in most ways of pooling."""
        pools_all = request.pooling is not None and request.pooling.reads_all
        return self._enabled and request.params.prompt_logprobs is None and not pools_all

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
