"""The block manager alone: pool, prefix cache, and what it refuses to do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest

from foresay.core.errors import EngineError
from foresay.core.messages import SamplingData
from foresay.core.scheduling.block_manager import BlockManager
from foresay.core.scheduling.request import Request

GREEDY = SamplingData(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=()
)


def make_request(
    token_ids: Sequence[int], req_id: str = "r", extra_keys: tuple[Hashable, ...] = ()
) -> Request:
    return Request(req_id, token_ids, sampling=GREEDY, max_tokens=100, extra_keys=extra_keys)


def make_manager(num_blocks: int = 8, block_size: int = 4, caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=caching)


def admit(blocks: BlockManager, request: Request) -> int:
    """Give a request its prompt's blocks as the scheduler does; return the tokens that hit."""
    prefix = blocks.find_prefix(request)
    assert blocks.allocate(request, request.num_tokens, prefix) is not None
    request.num_computed_tokens = len(prefix.block_ids) * blocks.block_size
    return request.num_computed_tokens


def compute(blocks: BlockManager, request: Request, num_tokens: int | None = None) -> None:
    """As if `num_tokens` (all) tokens had been computed."""
    request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
    blocks.cache_computed_blocks(request)


def test_allocate_gives_as_many_blocks_as_the_slots_need() -> None:
    blocks = make_manager(num_blocks=8, block_size=4)
    request = make_request(range(9))
    assert len(blocks.allocate(request, 9) or []) == 3
    assert blocks.allocate(request, 12) == []
    appended = blocks.allocate(request, 13)
    assert appended == request.block_ids[3:]
    assert len(request.block_ids) == 4
    assert blocks.num_free_blocks == 4
    blocks.check_integrity([request])


def test_allocate_that_does_not_fit_changes_nothing() -> None:
    blocks = make_manager(num_blocks=4, block_size=4)
    first = make_request(range(8), "first")
    admit(blocks, first)
    compute(blocks, first)
    # Two blocks are free; with the first block shared, 17 tokens need four more.
    second = make_request([*range(4), *range(50, 63)], "second")
    prefix = blocks.find_prefix(second)
    assert prefix.block_ids == first.block_ids[:1]
    assert blocks.allocate(second, 17, prefix) is None
    assert second.block_ids == []
    assert blocks.num_free_blocks == 2
    assert blocks.find_prefix(second) == prefix
    blocks.check_integrity([first])


def test_cached_blocks_that_nobody_owns_count_against_the_pool_when_they_hit() -> None:
    blocks = make_manager(num_blocks=4, block_size=4)
    first = make_request(range(8), "first")
    admit(blocks, first)
    compute(blocks, first)
    blocks.free(first)
    # Four blocks are free; two of them hit, and two more are needed: exactly four. A fifth is not
    # there, although "five needed, two hit" would leave one free.
    fits = make_request([*range(8), *range(50, 58)], "fits")
    too_long = make_request([*range(8), *range(50, 59)], "too long")
    assert blocks.allocate(too_long, 17, blocks.find_prefix(too_long)) is None
    assert admit(blocks, fits) == 8
    assert blocks.num_free_blocks == 0
    blocks.check_integrity([fits])


@pytest.mark.parametrize(
    ("num_computed", "num_hit"),
    [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12)],
    ids=lambda value: str(value),
)
def test_only_blocks_wholly_below_the_computed_tokens_are_cached(
    num_computed: int, num_hit: int
) -> None:
    blocks = make_manager()
    first = make_request(range(12), "first")
    admit(blocks, first)
    compute(blocks, first, num_computed)
    blocks.check_integrity([first])
    assert admit(blocks, make_request(range(16), "second")) == num_hit


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_at_most_all_but_the_last_token_hit(num_tokens: int, num_hit: int) -> None:
    blocks = make_manager()
    first = make_request(range(12), "first")
    admit(blocks, first)
    compute(blocks, first)
    second = make_request(range(num_tokens), "second")
    assert admit(blocks, second) == num_hit
    blocks.check_integrity([first, second])


def test_a_hit_shares_blocks_and_what_is_recomputed_goes_to_fresh_ones() -> None:
    blocks = make_manager()
    first, second = make_request(range(8), "first"), make_request(range(8), "second")
    admit(blocks, first)
    compute(blocks, first)
    assert admit(blocks, second) == 4
    assert second.block_ids[0] == first.block_ids[0]
    assert second.block_ids[1] != first.block_ids[1]
    blocks.check_integrity([first, second])


@pytest.mark.parametrize(
    ("other", "num_hit"),
    [
        ([1, 2, 3, 4, 9, 9, 9, 9, 5], 4),
        ([9, 9, 9, 9, 5, 6, 7, 8, 5], 0),
        ([5, 6, 7, 8, 1, 2, 3, 4, 5], 0),
        ([5, 6, 7, 8, 5, 6, 7, 8, 5], 0),
        ([1, 2, 3, 4, 1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 5, 5, 6, 7, 8, 5], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 5], 8),
    ],
    ids=["tail", "same second block", "swapped", "second twice", "first twice", "one id", "equal"],
)
def test_a_block_hits_only_after_the_same_prefix(other: list[int], num_hit: int) -> None:
    blocks = make_manager()
    first = make_request([1, 2, 3, 4, 5, 6, 7, 8], "first")
    admit(blocks, first)
    compute(blocks, first)
    assert admit(blocks, make_request(other, "second")) == num_hit


def test_equal_hashes_do_not_make_a_hit() -> None:
    """In CPython -1 and -2 have one hash, and so have tuples that differ in nothing else."""
    blocks = make_manager()
    first = make_request([-1, -1, -1, -1, 7], "first")
    second = make_request([-2, -2, -2, -2, 7], "second")
    assert hash(tuple(first.token_ids)) == hash(tuple(second.token_ids))
    admit(blocks, first)
    compute(blocks, first)
    assert admit(blocks, second) == 0
    compute(blocks, second)
    assert blocks.find_prefix(first).block_ids == first.block_ids[:1]
    assert blocks.find_prefix(second).block_ids == second.block_ids[:1]


def test_extra_keys_keep_equal_tokens_apart() -> None:
    blocks = make_manager()
    first = make_request(range(9), "first", extra_keys=("salt",))
    admit(blocks, first)
    compute(blocks, first)
    assert admit(blocks, make_request(range(9), "other", extra_keys=("pepper",))) == 0
    assert admit(blocks, make_request(range(9), "same", extra_keys=("salt",))) == 8


def test_without_prefix_caching_nothing_hits() -> None:
    blocks = make_manager(caching=False)
    first = make_request(range(9), "first")
    admit(blocks, first)
    compute(blocks, first)
    assert admit(blocks, make_request(range(9), "second")) == 0


def test_a_shared_block_stays_until_its_last_owner_frees_it() -> None:
    blocks = make_manager(num_blocks=4)
    first, second = make_request(range(5), "first"), make_request(range(5), "second")
    admit(blocks, first)
    compute(blocks, first)
    admit(blocks, second)
    shared = first.block_ids[0]
    blocks.free(first)
    blocks.check_integrity([second])
    assert blocks.num_free_blocks == 2
    other = make_request(range(20, 28), "other")
    admit(blocks, other)
    assert shared not in other.block_ids
    blocks.check_integrity([second, other])
    blocks.free(second)
    assert blocks.num_free_blocks == 2


def test_worthless_blocks_are_taken_before_the_least_recently_freed_prefix() -> None:
    blocks = make_manager(num_blocks=6, block_size=4)
    old, new = make_request(range(8), "old"), make_request(range(10, 18), "new")
    for request in (old, new):
        admit(blocks, request)
        compute(blocks, request)
    old_ids, new_ids = old.block_ids, new.block_ids
    blocks.free(old)
    blocks.free(new)
    worthless = make_request(range(20, 28), "worthless")
    assert blocks.allocate(worthless, 8) is not None
    worthless_ids = worthless.block_ids
    blocks.free(worthless)
    taken = make_request(range(30, 54), "taken")
    assert blocks.allocate(taken, 24) is not None
    assert set(taken.block_ids[:2]) == set(worthless_ids)
    # Of a text, the last block goes first.
    assert taken.block_ids[2:] == [old_ids[1], old_ids[0], new_ids[1], new_ids[0]]
    blocks.check_integrity([taken])


def test_a_hit_makes_a_prefix_recently_used() -> None:
    blocks = make_manager(num_blocks=4, block_size=4)
    first, second = make_request(range(5), "first"), make_request(range(10, 15), "second")
    for request in (first, second):
        admit(blocks, request)
        compute(blocks, request)
    for request in (first, second):
        blocks.free(request)
    again = make_request(range(5), "again")
    assert admit(blocks, again) == 4
    blocks.free(again)
    admit(blocks, make_request(range(30, 42), "filler"))
    assert len(blocks.find_prefix(make_request(range(5))).block_ids) == 1
    assert blocks.find_prefix(make_request(range(10, 15))).block_ids == []


def test_an_evicted_prefix_does_not_hit_and_can_be_cached_again() -> None:
    blocks = make_manager(num_blocks=3, block_size=4)
    first = make_request(range(9), "first")
    admit(blocks, first)
    compute(blocks, first)
    blocks.free(first)
    filler = make_request(range(50, 62), "filler")
    admit(blocks, filler)
    blocks.free(filler)
    assert admit(blocks, first) == 0
    compute(blocks, first)
    blocks.check_integrity([first])
    blocks.free(first)
    assert admit(blocks, make_request(range(9), "again")) == 8


def test_a_request_that_gave_its_blocks_back_starts_anew() -> None:
    blocks = make_manager(num_blocks=3, block_size=4)
    request = make_request(range(9))
    admit(blocks, request)
    compute(blocks, request)
    blocks.free(request)
    request.num_computed_tokens = 0
    assert blocks.allocate(request, 9) is not None  # takes all three: nothing is cached any more
    compute(blocks, request)
    blocks.check_integrity([request])
    assert blocks.find_prefix(make_request(range(9))).block_ids == request.block_ids[:2]


def test_a_prefix_computed_twice_is_cached_once_and_continued_by_both() -> None:
    blocks = make_manager(num_blocks=8, block_size=2)
    first, second = make_request([1, 2, 3, 4], "first"), make_request([1, 2, 5, 6], "second")
    admit(blocks, first)
    admit(blocks, second)
    assert first.block_ids[0] != second.block_ids[0]
    compute(blocks, first)
    compute(blocks, second)
    blocks.check_integrity([first, second])
    hit = blocks.find_prefix(make_request([1, 2, 5, 6, 7]))
    assert hit.block_ids == [first.block_ids[0], second.block_ids[1]]


def test_a_request_continues_the_prefix_that_it_hit() -> None:
    blocks = make_manager(block_size=2)
    first = make_request([1, 2, 3], "first")
    admit(blocks, first)
    compute(blocks, first)
    second = make_request([1, 2, 5, 6, 7], "second")
    assert admit(blocks, second) == 2
    compute(blocks, second)
    hit = blocks.find_prefix(make_request([1, 2, 5, 6, 9]))
    assert hit.block_ids == second.block_ids[:2]
    assert blocks.find_prefix(make_request([5, 6, 9])).block_ids == []


@pytest.mark.parametrize(
    ("behind", "num_hit"),
    [
        ([8, 9, 10], 2),  # the two tokens behind the second block are those it was stored before
        ([8, 9], 2),
        ([8], 1),  # the second one of them is not there
        ([8, 0, 0], 1),
        ([0, 9, 10], 1),
        ([], 1),
    ],
)
def test_what_proposers_stored_hits_before_the_same_tokens_only(
    behind: list[int], num_hit: int
) -> None:
    blocks = BlockManager(16, 4, enable_prefix_caching=True, kv_reach=2)
    first = make_request(range(12), "first")
    admit(blocks, first)
    compute(blocks, first)
    blocks.mark_stored(first, 10)
    second = make_request([*range(8), *behind], "second")

    assert blocks.find_prefix(second, stored=True).block_ids == first.block_ids[:num_hit]
    blocks.check_integrity([first])


def test_shrink_gives_back_what_is_beyond_the_slots() -> None:
    blocks = make_manager(num_blocks=4, block_size=4)
    request = make_request(range(5))
    blocks.allocate(request, 16)
    kept = request.block_ids[:2]
    assert blocks.shrink(request, 5) == 2
    assert request.block_ids == kept
    assert blocks.num_free_blocks == 2
    assert blocks.shrink(request, 100) == 2
    blocks.check_integrity([request])


def test_tainted_blocks_leave_the_cache_and_are_zeroed_once() -> None:
    blocks = make_manager()
    request = make_request(range(9))
    admit(blocks, request)
    compute(blocks, request)
    block_ids = set(request.block_ids)
    blocks.free(request, tainted=True)
    blocks.check_integrity([])
    assert blocks.find_prefix(request).block_ids == []
    assert blocks.has_blocks_to_zero
    assert set(blocks.take_block_ids_to_zero()) == block_ids
    assert not blocks.has_blocks_to_zero
    assert blocks.take_block_ids_to_zero() == []


def test_a_tainted_block_others_still_read_is_zeroed_when_the_last_one_frees_it() -> None:
    blocks = make_manager()
    first, second = make_request(range(6), "first"), make_request(range(6), "second")
    admit(blocks, first)
    compute(blocks, first)
    admit(blocks, second)
    shared, own = first.block_ids
    blocks.free(first, tainted=True)
    assert blocks.take_block_ids_to_zero() == [own]
    assert blocks.find_prefix(make_request(range(6))).block_ids == []
    blocks.check_integrity([second])
    blocks.free(second)
    assert blocks.take_block_ids_to_zero() == [shared]
    blocks.check_integrity([])


def test_two_owners_that_fail_together_zero_their_shared_block_once() -> None:
    blocks = make_manager()
    first, second = make_request(range(6), "first"), make_request(range(6), "second")
    admit(blocks, first)
    compute(blocks, first)
    admit(blocks, second)
    expected = sorted({*first.block_ids, *second.block_ids})
    blocks.free(first, tainted=True)
    blocks.free(second, tainted=True)
    assert sorted(blocks.take_block_ids_to_zero()) == expected
    blocks.check_integrity([])


def lose_a_block(blocks: BlockManager, request: Request) -> None:
    request.block_ids.pop()


def hold_a_block_twice(blocks: BlockManager, request: Request) -> None:
    request.block_ids.append(request.block_ids[0])


def take_a_free_block(blocks: BlockManager, request: Request) -> None:
    request.block_ids.append(next(iter(blocks._free)))


def change_a_cached_token(blocks: BlockManager, request: Request) -> None:
    request.token_ids[0] += 1


def write_a_cached_block(blocks: BlockManager, request: Request) -> None:
    request.num_computed_tokens -= 5


def compute_beyond_the_blocks(blocks: BlockManager, request: Request) -> None:
    request.num_computed_tokens += 100


def free_an_owned_block(blocks: BlockManager, request: Request) -> None:
    blocks._free[request.block_ids[0]] = None


def forget_which_block_is_cached(blocks: BlockManager, request: Request) -> None:
    del blocks._key_of_block[request.block_ids[0]]


@pytest.mark.parametrize(
    "harm",
    [
        lose_a_block,
        hold_a_block_twice,
        take_a_free_block,
        change_a_cached_token,
        write_a_cached_block,
        compute_beyond_the_blocks,
        free_an_owned_block,
        forget_which_block_is_cached,
    ],
    ids=lambda harm: harm.__name__,
)
def test_check_integrity_notices(harm: Callable[[BlockManager, Request], None]) -> None:
    blocks = make_manager()
    request = make_request(range(9))
    admit(blocks, request)
    compute(blocks, request)
    blocks.check_integrity([request])
    harm(blocks, request)
    with pytest.raises(EngineError):
        blocks.check_integrity([request])
