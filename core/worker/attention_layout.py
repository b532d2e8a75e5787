"""How a step's rows lie in attention's calls: groups of requests, their keys, and who sees what.

A step's rows are put into a few groups of requests with similar lengths, each one call on padded
queries and gathered keys. Everything that depends on lengths and trees only is computed here, once
per step. Knows positions, slots and parents; neither tensors of keys nor what a draft is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from foresay.core.worker.attention_backend import triton_backend
from foresay.core.worker.attention_rules import AttentionRules
from foresay.core.worker.cpu_kernels import CPURows
from foresay.core.worker.dense_kv import DenseCopies, DensePlan
from foresay.core.worker.tree_columns import Columns, tree_columns

if TYPE_CHECKING:
    from foresay.core.worker.triton_attention import TritonMetadata

# Groups: requests whose query lengths fall between the same two of these share a call.
_QUERY_BUCKETS = (8, 32, 128, 512)
# Up to this many rows of a request read dense copies. The many rows of a prompt pay for gathering,
# and the next step reads the keys from elsewhere.
_DENSE_ROWS = 32


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A request whose last slots hold the nodes of a tree instead of a text.

    `slots[:first]` of the request are positions 0 to first - 1; `slots[first + i]` holds node i,
    whose position is `first` and the number of nodes above it.
    """

    first: int
    parents: np.ndarray  # [num_nodes] the node above each, an earlier one; -1: position first - 1
    # [num_query_rows] the node that each query row is, -1: a position below `first`, which sees
    # what a row of a text sees. A node sees all positions below `first`, the nodes above it and
    # itself.
    nodes: np.ndarray


@dataclass(slots=True)
class _Member:
    """Rows that share their keys: a request, or some rows of one with a tree."""

    rows: np.ndarray  # [n] token index of each query row
    positions: np.ndarray  # [n]
    slots: np.ndarray  # [k] by column
    tree: Columns | None = None  # None: column c holds position c, and rows see what is not ahead
    nodes: np.ndarray | None = None  # [n] with a tree: the node that each row is, or -1
    is_rest: bool = False  # rows of a tree that found no room in its first member: often very few
    owner: Hashable = None  # whose keys they are, if that is known


@dataclass(slots=True)
class Group:
    """Members attended to in one call: B of them, Q query rows and K keys each, padded."""

    query_rows: torch.Tensor | None  # [B * Q] token index of each padded row; None: all, in order
    taken: torch.Tensor | None  # [n] which of the B * Q rows are real; None: all
    tokens: torch.Tensor | None  # [n] the token each of them belongs to; None: all, in order
    query_positions: torch.Tensor  # [B, Q]
    num_requests: int  # B
    query_len: int
    key_len: int
    key_slots: torch.Tensor | None = None  # [B * K] where the keys are gathered from, or
    dense: DensePlan | None = None  # where they are already
    hidden: torch.Tensor | None = None  # [B, Q, K] bool; None: keys ahead of a row are
    key_positions: torch.Tensor | None = None  # [B, K]; None: the number of the column
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    _folds: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    _unfolds: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def folded(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Return the rows' queries with the heads of a key head side by side, padding included.

        From [num_tokens, num_heads, D] to [B, Hkv, Q * fold, D], in one operation.
        """
        num_tokens, num_heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1) or query.stride(0) % head_dim:
            query = query.contiguous()
        step = query.stride(0) // head_dim  # from a row to the next, in heads
        key = (num_kv_heads, num_heads, step)
        if key not in self._folds:
            self._folds[key] = self._fold(*key)
        heads = query.as_strided(((num_tokens - 1) * step + num_heads, head_dim), (head_dim, 1))
        query = heads.index_select(0, self._folds[key])
        return query.view(self.num_requests, num_kv_heads, -1, head_dim)

    def _fold(self, num_kv_heads: int, num_heads: int, step: int) -> torch.Tensor:
        """Return where each of the rows [B, Hkv, Q, fold] lies, flat."""
        if self.query_rows is None:
            rows = torch.arange(self.num_requests * self.query_len, device=self.device)
        else:
            rows = self.query_rows
        heads = torch.arange(num_heads, device=self.device).view(1, num_kv_heads, 1, -1)
        return (rows.view(self.num_requests, 1, self.query_len, 1) * step + heads).flatten()

    def unfolded(self, out: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return the real rows of [B, Hkv, Q * fold, Dv] in order: [n, num_heads, Dv]."""
        num_kv_heads, value_dim = out.shape[1], out.shape[3]
        key = (num_kv_heads, num_heads)
        if key not in self._unfolds:
            self._unfolds[key] = self._unfold(*key)
        heads = out.transpose(1, 2).reshape(-1, value_dim)  # [B, Q, fold, Hkv], as they lie
        return heads.index_select(0, self._unfolds[key]).view(-1, num_heads, value_dim)

    def _unfold(self, num_kv_heads: int, num_heads: int) -> torch.Tensor:
        """Return where each head of the real rows lies among [B, Q, fold, Hkv], flat."""
        if self.taken is None:
            rows = torch.arange(self.num_requests * self.query_len, device=self.device)
        else:
            rows = self.taken
        heads = torch.arange(num_heads, device=self.device).view(-1, num_kv_heads).t().flatten()
        return (rows[:, None] * num_heads + heads).flatten()

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.query_positions.device

    def mask(self, window: int | None, fold: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [B, 1, Q * fold, K], made once per window and step."""
        key = (window, fold)
        if key not in self.masks:
            position = self.query_positions[:, :, None]  # [B, Q, 1]
            keys = torch.arange(self.key_len, device=position.device)
            if self.key_positions is not None:
                keys = self.key_positions[:, None]
            hidden = keys > position if self.hidden is None else self.hidden  # [B, Q, K]
            if window is not None:
                hidden = hidden | (keys <= position - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=position.device)
            mask.masked_fill_(hidden, float("-inf"))
            if fold > 1:
                mask = mask.repeat_interleave(fold, dim=1)
            self.masks[key] = mask[:, None]
        return self.masks[key]


@dataclass(slots=True)
class AttentionMetadata:
    """A step's batch as attention sees it. Rows are flat: request after request.

    `positions` [num_tokens] and `slot_mapping` [num_tokens] are int64 on the model's device.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    rules: AttentionRules
    triton: TritonMetadata | None  # for the layers that the Triton kernels serve, if any can be
    cpu: CPURows | None  # for those that the CPU's own kernels serve
    _lay_out: Callable[[], list[Group]]
    _groups: list[Group] | None = None

    @property
    def groups(self) -> list[Group]:
        """The calls of the torch path, laid out when they are first asked for."""
        if self._groups is None:
            self._groups = self._lay_out()
        return self._groups

    @staticmethod
    def build(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        slot_mapping: np.ndarray,
        null_slot: int,
        rules: AttentionRules,
        device: torch.device,
        trees: Sequence[TreeLayout | None] | None = None,
        *,
        owners: Sequence[Hashable] | None = None,
        dense_copies: DenseCopies | None = None,
    ) -> AttentionMetadata:
        """Lay out one step.

        positions: per request the positions of its query rows, ascending; of a tree in any order.
        slots: per request the slots of positions 0, 1, ... up to its last query position; with a
            tree see `TreeLayout`.
        slot_mapping: [num_tokens] where each row's key and value are written.
        trees: per request its tree, None: a text. None altogether: texts only.
        owners: per request a name that it keeps from step to step, all different; with it
            the torch path reads keys from `dense_copies`, of the cache the pass will run over. A
            cache that has them must be given in every pass that writes to it.
        """
        if dense_copies is not None:
            dense_copies.begin(slot_mapping)
        backend = triton_backend(device)
        metadata = AttentionMetadata(
            positions=_tensor(np.concatenate(positions), device),
            slot_mapping=_tensor(slot_mapping, device),
            rules=rules,
            triton=backend and backend.TritonMetadata.build(positions, slots, trees, device),
            cpu=CPURows.build(positions, slots, trees) if rules.own_kernels else None,
            _lay_out=partial(
                _groups, positions, slots, null_slot, rules, device, trees, owners, dense_copies
            ),
        )
        if metadata.triton is None and metadata.cpu is None:
            _ = metadata.groups  # what can't be laid out is told here
        return metadata


def _groups(
    positions: Sequence[np.ndarray],
    slots: Sequence[np.ndarray],
    null_slot: int,
    rules: AttentionRules,
    device: torch.device,
    trees: Sequence[TreeLayout | None] | None,
    owners: Sequence[Hashable] | None,
    dense_copies: DenseCopies | None,
) -> list[Group]:
    """Lay out the calls of the torch path; arguments as those of `AttentionMetadata.build`."""
    members: list[_Member] = []
    start = 0
    for index, (of_rows, of_keys) in enumerate(zip(positions, slots, strict=True)):
        rows = np.arange(start, start + len(of_rows))
        start += len(of_rows)
        tree = None if trees is None else trees[index]
        first = len(members)
        if tree is None:
            members.append(_Member(rows, of_rows, of_keys))
        else:
            members += _tree_members(rows, of_rows, of_keys, null_slot, tree, rules)
        if owners is not None:
            for part, member in enumerate(members[first:]):
                member.owner = (owners[index], part)
    buckets: dict[tuple[int, int], list[_Member]] = {}
    fewest = rules.padded_query_len(1)
    for member in members:
        query_len = len(member.rows)
        query_bucket = next((b for b in _QUERY_BUCKETS if query_len <= b), query_len)
        if member.is_rest and query_len <= fewest:
            query_bucket = fewest
        key_bucket = (rules.padded_key_len(len(member.slots)) - 1).bit_length()
        buckets.setdefault((query_bucket, key_bucket), []).append(member)
    groups = []
    for (query_bucket, key_bucket), of_bucket in buckets.items():
        copy = None
        if dense_copies is not None and owners is not None and query_bucket <= _DENSE_ROWS:
            found = dense_copies.arrange([m.owner for m in of_bucket], 1 << key_bucket)
            if found is not None:
                copy, order = found
                of_bucket = [of_bucket[place] for place in order]
        group, key_slots = _group(of_bucket, null_slot, rules, device, whole=len(buckets) == 1)
        if dense_copies is not None and copy is not None:
            group.dense = dense_copies.plan(copy, key_slots)
        else:
            group.key_slots = _tensor(key_slots.ravel(), device)
        groups.append(group)
    return groups


def _tree_members(
    rows: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    null_slot: int,
    tree: TreeLayout,
    rules: AttentionRules,
) -> list[_Member]:
    """Return the members that a request with a tree becomes; its plain rows are in the first."""
    if len(tree.nodes) != len(rows):
        raise ValueError(f"{len(tree.nodes)} nodes for {len(rows)} query rows: give one for each")
    members: list[_Member] = []
    for columns in tree_columns(tree.first, tree.parents, tree.nodes, rules):
        mine = columns.computed[tree.nodes]  # -1 is the last place: plain rows
        by_column = np.full(columns.num_columns, null_slot, dtype=np.int64)
        by_column[: tree.first] = slots[: tree.first]
        by_column[columns.columns] = slots[tree.first + columns.nodes]
        nodes = tree.nodes[mine]
        members.append(
            _Member(rows[mine], positions[mine], by_column, columns, nodes, bool(members))
        )
    return members


def _group(
    members: Sequence[_Member],
    null_slot: int,
    rules: AttentionRules,
    device: torch.device,
    *,
    whole: bool,
) -> tuple[Group, np.ndarray]:
    """Lay out one group, and the slots of its keys [B, K]; `whole`: it is the only one."""
    lens = [len(member.rows) for member in members]
    query_len = rules.padded_query_len(max(lens))
    key_len = rules.padded_key_len(max(len(member.slots) for member in members))
    # A padding row repeats token 0 at position 0: it sees one key, so it stays finite.
    rows = np.zeros((len(members), query_len), dtype=np.int64)
    row_positions = np.zeros((len(members), query_len), dtype=np.int64)
    key_slots = np.full((len(members), key_len), null_slot, dtype=np.int64)
    for at, member in enumerate(members):
        rows[at, : lens[at]] = member.rows
        row_positions[at, : lens[at]] = member.positions
        key_slots[at, : len(member.slots)] = member.slots
    taken = np.concatenate([np.arange(n) + at * query_len for at, n in enumerate(lens)])
    tokens = rows.ravel()[taken]
    in_order = whole and bool((tokens[1:] > tokens[:-1]).all())
    if whole and not in_order:  # the rows of a tree may be spread over several members
        taken = taken[np.argsort(tokens)]
    padded = min(lens) != query_len
    group = Group(
        query_rows=None if in_order and not padded else _tensor(rows.ravel(), device),
        taken=_tensor(taken, device) if padded or (whole and not in_order) else None,
        tokens=None if whole else _tensor(tokens, device),
        query_positions=_tensor(row_positions, device),
        num_requests=len(members),
        query_len=query_len,
        key_len=key_len,
    )
    if any(member.tree is not None for member in members):
        key_positions = np.tile(np.arange(key_len), (len(members), 1))
        hidden = np.arange(key_len) > row_positions[:, :, None]
        for at, member in enumerate(members):
            if member.tree is not None and member.nodes is not None:
                key_positions[at, member.tree.columns] = member.tree.positions
                is_node = np.flatnonzero(member.nodes >= 0)
                hidden[at, is_node, member.tree.first :] = True
                hidden[at, is_node[:, None], member.tree.columns] = ~member.tree.seen[
                    member.nodes[is_node]
                ]
        group.hidden = _tensor(hidden, device)
        group.key_positions = _tensor(key_positions, device)
    return group, key_slots


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
