"""KV blocks on paper: which block of the pool is whose, and which prefixes they hold.

Knows block tables, token ids and numbers of computed tokens. Does not know drafts, budgets, who
runs, or any KV value: the tensors are the worker's.

The prefix cache maps (the prefix before a block, the block's token ids, extra keys) to a block. A
prefix is named by a number that is given once and never again, so that the chain of keys is the
chained hash of the field, with Python's dict comparing keys in full: a hit is confirmed by token
ids at every block, and two prefixes never collide.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from foresay.core.errors import EngineError
from foresay.core.scheduling.request import Request

PrefixKey = tuple[int, tuple[int, ...], tuple[Hashable, ...]]

EMPTY_PREFIX_ID = 0  # the prefix before the first block


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix of a request: full blocks, and what each one's prefix is called."""

    block_ids: list[int]
    prefix_ids: list[int]  # of everything from the first token to the end of each block


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    block_id: int
    prefix_id: int  # names everything from the first token to the end of this block


class BlockManager:
    """A fixed pool of blocks with reference counts, an LRU free list and a prefix cache.

    A block in the free list may still hold a cached prefix; it leaves the cache when it is taken
    for something else. A cached or shared block is never written: requests write only at and
    after `num_computed_tokens`, and only blocks wholly below it are cached.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        kv_reach: int = 1,
    ) -> None:
        """`kv_reach`: how many tokens behind a position the proposers' KV depends on, at most."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_owners = [0] * num_blocks
        # Taken from the front. A block that holds a cached prefix goes to the back when it is
        # freed, any other to the front: nothing worth keeping is evicted while worthless blocks
        # are left. An OrderedDict is a doubly linked list: every operation on it is O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[PrefixKey, _CachedBlock] = {}
        self._key_of_block: dict[int, PrefixKey] = {}
        self._last_prefix_id = EMPTY_PREFIX_ID
        # Blocks whose slots the proposers' own layers have filled too, by their prefix and the
        # tokens after it: what a drafter stores at a position may depend on those behind it, and
        # for a block's last slots they are not the block's.
        self._kv_reach = kv_reach
        self._stored: dict[tuple[int, tuple[int, ...]], int] = {}
        self._stored_key_of_block: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Blocks of a request that ended on a non-finite row, still owned by others that run.
        self._tainted: set[int] = set()
        self._to_zero: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns, cached prefixes included."""
        return len(self._free)

    @property
    def has_blocks_to_zero(self) -> bool:
        """Whether `take_block_ids_to_zero` would return any."""
        return bool(self._to_zero)

    def num_blocks_for(self, num_slots: int) -> int:
        """Blocks that hold `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def find_prefix(self, request: Request, *, stored: bool = False) -> CachedPrefix:
        """Return the longest cached prefix of the committed tokens. Changes nothing.

        At most `num_tokens - 1` tokens hit: the last one must be computed to yield a row.
        `stored`: only blocks that hold the KV of the proposers' layers too, as it is before the
        tokens that follow here.
        """
        block_ids: list[int] = []
        prefix_ids: list[int] = []
        prefix_id = EMPTY_PREFIX_ID
        if self.enable_prefix_caching:
            for index in range((request.num_tokens - 1) // self.block_size):
                hit = self._cached.get(self._key(request, index, prefix_id))
                if hit is None:
                    break
                block_id, prefix_id = hit.block_id, hit.prefix_id
                if stored:
                    found = self._stored.get((prefix_id, self._tokens_behind(request, index)))
                    if found is None:
                        break
                    block_id = found
                block_ids.append(block_id)
                prefix_ids.append(prefix_id)
        return CachedPrefix(block_ids, prefix_ids)

    def allocate(
        self, request: Request, num_slots: int, prefix: CachedPrefix | None = None
    ) -> list[int] | None:
        """Extend the block table of `request` to `num_slots` slots; return the ids appended.

        `prefix`, from `find_prefix` just before, is shared as the first blocks; only a request
        without blocks may bring one. Returns None and changes nothing if the pool cannot give
        that many.
        """
        hits = prefix.block_ids if prefix is not None else []
        num_fresh = self.num_blocks_for(num_slots) - len(request.block_ids) - len(hits)
        num_revived = sum(1 for block_id in hits if not self._num_owners[block_id])
        if num_fresh + num_revived > len(self._free):
            return None
        if prefix is not None:
            for block_id in hits:
                if not self._num_owners[block_id]:
                    del self._free[block_id]
                self._num_owners[block_id] += 1
            request.prefix_ids = list(prefix.prefix_ids)
            request.num_stored_blocks = len(hits)
        appended = list(hits)
        for _ in range(num_fresh):
            block_id, _ = self._free.popitem(last=False)
            self._uncache(block_id)
            self._num_owners[block_id] = 1
            appended.append(block_id)
        request.block_ids.extend(appended)
        return appended

    def shrink(self, request: Request, num_slots: int) -> int:
        """Give back the blocks beyond `num_slots` slots; return how many are kept."""
        num_kept = min(self.num_blocks_for(num_slots), len(request.block_ids))
        self._release(reversed(request.block_ids[num_kept:]))
        del request.block_ids[num_kept:]
        return num_kept

    def free(self, request: Request, *, tainted: bool = False) -> None:
        """Give back every block of `request`.

        The last blocks of a text go first to the free list, so that they are evicted first. With
        `tainted` (it ended on a non-finite row) its blocks leave the prefix cache and are zeroed
        before reuse: at once those it owned alone, a shared one when its last owner frees it,
        since requests that still run read it.
        """
        if tainted:
            for block_id in request.block_ids:
                self._uncache(block_id)
            self._tainted.update(request.block_ids)
        self._release(reversed(request.block_ids))
        request.block_ids = []
        request.prefix_ids = []
        request.num_stored_blocks = 0

    def cache_computed_blocks(self, request: Request) -> None:
        """Offer the blocks wholly below `num_computed_tokens` to the prefix cache, each once.

        A prefix that is cached already stays where it is; the request keeps its own copy.
        """
        if not self.enable_prefix_caching:
            return
        num_full_blocks = request.num_computed_tokens // self.block_size
        prefix_ids = request.prefix_ids
        for index in range(len(prefix_ids), num_full_blocks):
            key = self._key(request, index, prefix_ids[-1] if prefix_ids else EMPTY_PREFIX_ID)
            cached = self._cached.get(key)
            if cached is None:
                self._last_prefix_id += 1
                cached = _CachedBlock(request.block_ids[index], self._last_prefix_id)
                self._cached[key] = cached
                self._key_of_block[cached.block_id] = key
            prefix_ids.append(cached.prefix_id)

    def mark_stored(self, request: Request, num_tokens: int) -> None:
        """Note that the proposers' layers hold the KV of the first `num_tokens` positions.

        The `kv_reach` tokens after them are committed. Of several blocks of one prefix and the
        same tokens after it the first stays known.
        """
        if not self.enable_prefix_caching:
            return
        num_full_blocks = min(num_tokens // self.block_size, len(request.prefix_ids))
        for index in range(request.num_stored_blocks, num_full_blocks):
            block_id = request.block_ids[index]
            key = (request.prefix_ids[index], self._tokens_behind(request, index))
            if key not in self._stored and block_id not in self._stored_key_of_block:
                self._stored[key] = block_id
                self._stored_key_of_block[block_id] = key
            request.num_stored_blocks = index + 1

    def _tokens_behind(self, request: Request, index: int) -> tuple[int, ...]:
        """Return the tokens after a block that its slots may depend on; fewer, if it ends there."""
        end = (index + 1) * self.block_size
        return tuple(request.token_ids[end : end + self._kv_reach])

    def take_block_ids_to_zero(self) -> list[int]:
        """Return, once, the blocks to zero before anything is written in this step."""
        block_ids, self._to_zero = self._to_zero, []
        return block_ids

    def zero_again(self, block_ids: Iterable[int]) -> None:
        """Take back ids whose delivery may have failed."""
        self._to_zero.extend(block_ids)

    def check_integrity(self, owners: Iterable[Request]) -> None:
        """Recount everything from the block tables of all `owners`; raise `EngineError`."""
        num_owners: Counter[int] = Counter()
        for request in owners:
            num_owners.update(request.block_ids)
            self._check_table(request)
        for block_id, num_counted in enumerate(self._num_owners):
            if num_owners[block_id] != num_counted:
                raise EngineError(
                    f"block {block_id} is in {num_owners[block_id]} block tables, "
                    f"its count says {num_counted}"
                )
            if (block_id in self._free) != (num_counted == 0):
                raise EngineError(
                    f"block {block_id} has {num_counted} owners and is "
                    f"{'' if block_id in self._free else 'not '}in the free list"
                )
        if len(num_owners) + len(self._free) != self.num_blocks:
            raise EngineError(
                f"{len(num_owners)} owned and {len(self._free)} free blocks do not add up to "
                f"{self.num_blocks}"
            )
        holders = {cached.block_id: key for key, cached in self._cached.items()}
        if len(holders) != len(self._cached) or holders != self._key_of_block:
            raise EngineError(
                f"{len(self._cached)} cached prefixes, {len(self._key_of_block)} blocks with one"
            )
        for prefix_id, token_ids, _ in self._cached:
            if len(token_ids) != self.block_size or prefix_id > self._last_prefix_id:
                raise EngineError(f"{token_ids!r} after prefix {prefix_id} is no cached block")
        if {block_id: key for key, block_id in self._stored.items()} != self._stored_key_of_block:
            raise EngineError(
                f"{len(self._stored)} stored prefixes, {len(self._stored_key_of_block)} blocks "
                "with one"
            )
        for block_id in self._tainted:
            if block_id in self._key_of_block or not self._num_owners[block_id]:
                raise EngineError(f"tainted block {block_id} is cached or free")
        for block_id in self._to_zero:
            if block_id in self._key_of_block:
                raise EngineError(f"block {block_id}, to be zeroed, is in the prefix cache")

    def _check_table(self, request: Request) -> None:
        if len(set(request.block_ids)) != len(request.block_ids):
            raise EngineError(f"{request!r} has a block twice: {request.block_ids!r}")
        if len(request.block_ids) < self.num_blocks_for(request.num_computed_tokens):
            raise EngineError(f"{request!r} computed more tokens than its blocks hold")
        num_full_blocks = request.num_computed_tokens // self.block_size
        if len(request.prefix_ids) > num_full_blocks:
            raise EngineError(f"{request!r} has {len(request.prefix_ids)} cached blocks")
        if request.num_stored_blocks > num_full_blocks:
            raise EngineError(f"{request!r} has {request.num_stored_blocks} stored blocks")
        for index, block_id in enumerate(request.block_ids):
            key = self._key_of_block.get(block_id)
            if key is not None and key[1:] != self._key(request, index, 0)[1:]:
                raise EngineError(f"block {block_id} of {request!r} is cached under other tokens")
            is_kept = key is not None or block_id in self._stored_key_of_block
            if index >= num_full_blocks and (is_kept or self._num_owners[block_id] > 1):
                raise EngineError(
                    f"{request!r} will write block {block_id}, which is cached or shared by "
                    f"{self._num_owners[block_id]}"
                )

    def _key(self, request: Request, index: int, prefix_id: int) -> PrefixKey:
        start = index * self.block_size
        token_ids = tuple(request.token_ids[start : start + self.block_size])
        return (prefix_id, token_ids, request.extra_keys)

    def _uncache(self, block_id: int) -> None:
        key = self._key_of_block.pop(block_id, None)
        if key is not None:
            del self._cached[key]
        stored_key = self._stored_key_of_block.pop(block_id, None)
        if stored_key is not None:
            del self._stored[stored_key]

    def _release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id]:
                continue
            self._free[block_id] = None
            if block_id not in self._key_of_block and block_id not in self._stored_key_of_block:
                self._free.move_to_end(block_id, last=False)
            if block_id in self._tainted:
                self._tainted.remove(block_id)
                self._to_zero.append(block_id)
