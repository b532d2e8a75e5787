"""Under which paddings a row of attention has the same bits in every batch: probed at load.

A row's sums over its keys are split by the library's kernels at places that depend on shapes. What
is relied on is measured here, on the machine itself, with the very heads that a model has. Knows
kernels, numbers of rows and numbers of keys; no requests, no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

# Up to this many query rows the heads that share a key head are folded into rows of one matrix.
FOLD_BELOW = 33
# The fused CPU kernel takes query rows in blocks of 32, 64 or 256, and keys in blocks of 512.
_QUERY_BLOCK = 32
_MIN_ROWS = 8
_KEY_BLOCK = 512
_KEY_STEP = 64
# A kernel's sums run in so many interleaved parts, or in a divisor of it.
LANE = 16
_TREE_DEPTH = 6  # of the paths that are tried


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Paddings under which the kernels give each row the same bits in every batch.

    On a CPU: at least 8 query rows in the last block of rows too, an additive mask always, and keys
    padded so that the last block's length is one at which the product sums as over a whole block.
    """

    min_rows: int = 1  # rows in every block of query rows, at least
    query_group_size: int = 1  # query heads per key head: rows per token where they are folded
    key_lens: tuple[int, ...] = (16,)  # allowed lengths of the last key block, ascending
    compute_dtype: torch.dtype | None = None  # attend in this dtype; None: the inputs' own
    # Within blocks of so many columns a key may lie `LANE` columns, or a multiple, behind its
    # position; 0: nowhere but at it; None: rows need not keep their bits. See `tree_columns`.
    tree_block: int | None = None
    own_kernels: bool = False  # foresay's own attend (`cpu_kernels`), for which nothing is padded

    def padded_query_len(self, query_len: int) -> int:
        """Return the length that a request's query rows are padded to."""
        fold = self.query_group_size if query_len < FOLD_BELOW else 1
        while 0 < query_len * fold % _QUERY_BLOCK < self.min_rows:
            query_len += 1
        return query_len

    def padded_key_len(self, num_keys: int) -> int:
        """Return the length that `num_keys` keys are padded to."""
        block = self.key_lens[-1]
        whole, rest = divmod(num_keys, block)
        if rest == 0:
            return num_keys
        return whole * block + next(length for length in self.key_lens if rest <= length)

    @staticmethod
    def choose(
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        row_invariant: bool,
        capped: bool = False,
        own_kernels: bool = False,
    ) -> AttentionRules:
        """Return the rules for a device and a model's heads; on a CPU they are probed.

        capped: with a soft cap or sinks. What attends then is no fused kernel, and splits its sums
        by lengths: keys of trees stay where they are. own_kernels: whether foresay's own serve all
        of the model's layers, but for caps and sinks.
        """
        if own_kernels and not capped:
            return AttentionRules(own_kernels=True)
        compute = compute_dtype if compute_dtype != dtype else None
        if device.type != "cpu" or not row_invariant:
            return AttentionRules(compute_dtype=compute)
        key_lens = _safe_key_lens(compute_dtype, _MIN_ROWS, num_kv_heads, head_dim)
        rules = AttentionRules(_MIN_ROWS, num_heads // num_kv_heads, key_lens, compute, 0)
        if capped:
            return rules
        block = _tree_block(rules, compute_dtype, num_kv_heads, head_dim)
        return replace(rules, tree_block=block)


def _safe_key_lens(
    dtype: torch.dtype, num_rows: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Return the key lengths up to one block whose results equal the whole block's, bit for bit.

    A matrix product splits long sums, at places that depend on their length; masked keys add exact
    zeros, so a length is safe if it splits the real keys as the whole block does. Tried with few
    and many query rows, and with as many real keys as each length can have.
    """
    generator = torch.Generator().manual_seed(0)
    safe: list[int] = []
    for length in range(_KEY_STEP, _KEY_BLOCK, _KEY_STEP):
        shorter = safe[-1] if safe else 0
        tried = [
            (rows, real) for rows in (num_rows, 5 * num_rows) for real in (length, shorter + 1)
        ]
        if all(
            _same_bits(dtype, rows, num_kv_heads, head_dim, real, length, generator)
            for rows, real in tried
        ):
            safe.append(length)
    return (*safe, _KEY_BLOCK)


def _same_bits(
    dtype: torch.dtype,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    num_keys: int,
    length: int,
    generator: torch.Generator,
) -> bool:
    """Whether `num_keys` keys padded to `length` give the same bits as padded to a whole block.

    On random inputs; and on values that cancel out under equal weights, of which another order of
    summing leaves another remainder. What is rounded to a narrow dtype hides it otherwise: of sums
    in bfloat16 that differ in float32, three in four random trials showed nothing.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query = random(1, num_kv_heads, num_rows, head_dim).to(dtype)
    keys, values = (random(1, _KEY_BLOCK, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    sizes = torch.exp2(torch.randint(-9, 10, values.shape, generator=generator).float())
    cancelling = _cancelling(random(*values.shape) * sizes, num_keys, generator)
    mask = torch.zeros(1, 1, num_rows, _KEY_BLOCK, dtype=dtype)
    mask[..., num_keys:] = float("-inf")
    for asked, given in ((query, values), (torch.zeros_like(query), cancelling.to(dtype))):
        padded, whole = (
            F.scaled_dot_product_attention(
                asked,
                keys[:, :size].contiguous().transpose(1, 2),
                given[:, :size].contiguous().transpose(1, 2),
                attn_mask=mask[..., :size].contiguous(),
            )
            for size in (length, _KEY_BLOCK)
        )
        if not torch.equal(padded, whole):
            return False
    return True


def _cancelling(values: torch.Tensor, num_keys: int, generator: torch.Generator) -> torch.Tensor:
    """Return `values` [1, K, Hkv, D] with the first `num_keys` made to add up to zero."""
    order = torch.randperm(num_keys, generator=generator)
    half = num_keys // 2
    values = values.clone()
    values[:, order[half : 2 * half]] = -values[:, order[:half]]
    values[:, order[2 * half :]] = 0
    return values


def _tree_block(rules: AttentionRules, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> int:
    """Return the largest block of columns within which keys may change lanes; 0: there is none.

    Tried with paths before, behind and across every border that a kernel may have: they lie at
    multiples of 32.
    """
    generator = torch.Generator().manual_seed(0)
    ends = [*range(32, _KEY_BLOCK + 1, 32), _KEY_BLOCK + 32]
    shape = (1, max(ends), min(num_kv_heads, 2), head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(1, shape[2], 5 * rules.min_rows, head_dim, generator=generator).to(dtype)
    sizes = torch.exp2(torch.randint(-9, 10, shape, generator=generator).float())
    block = _KEY_BLOCK
    while block > LANE:
        firsts = (end - back for back in (31, 8, 3) for end in ends)
        if all(
            _lanes_keep_bits(rules, query, keys, values, sizes, first, block, generator)
            for first in firsts
        ):
            return block
        block //= 2
    return 0


def _lanes_keep_bits(
    rules: AttentionRules,
    query: torch.Tensor,  # [1, Hkv, Q, D]
    keys: torch.Tensor,  # [1, K, Hkv, D] float32
    values: torch.Tensor,  # [1, K, Hkv, D] float32
    sizes: torch.Tensor,  # [1, K, Hkv, D] what values that cancel out are multiplied by
    first: int,
    block: int,
    generator: torch.Generator,
) -> bool:
    """Whether random ways from position `first` on through lanes give the bits of lane 0.

    Each lane holds the same keys and values, so all rows see the same text. With few and many
    query rows, and on the inputs of `_same_bits`.
    """
    num_rows, dtype = query.shape[2], query.dtype
    end = min(first + _TREE_DEPTH, keys.shape[1])
    positions = torch.arange(first, end)
    room = (block - 1 - positions % block) // LANE  # lanes besides lane 0
    # Lanes may only rise along a path: the last position of a block has the fewest.
    room = torch.where(positions // block == positions[-1] // block, room[-1], 0)
    num_lanes = int(room.max()) + 1
    if num_lanes == 1:
        return True
    chosen = torch.randint(num_lanes, (num_rows, end - first), generator=generator)
    chosen[0] = num_lanes - 1
    ways = positions + LANE * chosen.sort(dim=1).values.minimum(room)  # [Q, depth]
    lanes = LANE * torch.arange(num_lanes)[:, None]
    cancelling = _cancelling(values * sizes, end, generator)
    for asked, given in ((query, values), (torch.zeros_like(query), cancelling)):
        layouts = []
        for seen, copies in ((positions.expand(num_rows, -1), 1), (ways, num_lanes)):
            columns = (positions + lanes[:copies]).ravel()
            length = rules.padded_key_len(int(columns.max()) + 1)
            mask = torch.full((1, 1, num_rows, length), float("-inf"), dtype=dtype)
            mask[..., :first] = 0
            mask[0, 0].scatter_(1, seen, 0.0)
            laid = [torch.zeros(1, length, *keys.shape[2:], dtype=dtype) for _ in range(2)]
            for out, x in zip(laid, (keys, given), strict=True):
                out[:, :first] = x[:, :first]
                out[:, columns] = x[:, first:end].repeat(1, copies, 1, 1).to(dtype)
            layouts.append((*(x.transpose(1, 2) for x in laid), mask))
        for n in (rules.min_rows, num_rows):
            plain, in_lanes = (
                F.scaled_dot_product_attention(
                    asked[:, :, :n], key, value, attn_mask=mask[:, :, :n]
                )
                for key, value, mask in layouts
            )
            if not torch.equal(plain, in_lanes):
                return False
    return True
