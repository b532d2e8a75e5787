"""What a plugin author reads: the contract between the core and a proposer. Imports no torch.

A *proposer* drafts tokens; the target model verifies them, so a proposer can only change the time
a text takes, never the text. The smallest one is a class that is made with its settings, and has
`propose`:

    class Repeat:
        def __init__(self, config: ProposerConfig) -> None:
            self.config = config

        def propose(self, batch: DraftInput) -> Draft:
            return Draft([[request.token_ids[-1]] * request.k for request in batch.requests])

It knows nothing of the scheduler, the KV cache or the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch

    from foresay.core.training import TrainingSpec


class ProposerConfig(BaseModel):
    """Settings every proposer has; subclass it to add your own, each with a `description`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens to draft per step, of a tree nodes; None: the proposer's own "
        "best, at most 5, of a tree 16.",
    )
    drafter: str | None = Field(
        default=None, description="The drafter's weights: a folder or a registered name."
    )


@dataclass(frozen=True, slots=True)
class KVLayer:
    """An attention layer of a proposer's own, as far as its KV cache goes."""

    num_kv_heads: int
    head_dim: int  # of the keys
    value_dim: int | None = None  # of the values; None: as the keys


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer needs of the core: capabilities, never identity.

    Checked against the target before any weight is loaded; what cannot be provided is an error.
    """

    hidden_state: bool = False  # the target's last hidden states: the input of its lm_head
    # Residual streams *entering* these layers; the number of layers: the one leaving the last,
    # before the final norm.
    aux_layers: tuple[int, ...] = ()
    kv_layers: tuple[KVLayer, ...] = ()  # of the proposer's own, in the core's blocks
    # How many tokens behind a position what its KV layers hold there depends on, at most: 1 for a
    # drafter that takes the next token. With more it may store its last `kv_reach - 1` positions
    # again in the next step; the prefix cache leaves them out until then.
    kv_reach: int = 1
    embeddings: bool = False  # the target's input embeddings
    lm_head: bool = False  # the target's output head
    sampled: bool = False  # draws its drafts through `batch.sampler`
    prediction: bool = False  # reads `DraftRequest.prediction_ids`
    draft_slots: int = 0  # rows per request it adds to its own batch
    # Drafts may be trees (`Draft.parents`): `DraftRequest.k` counts their nodes then, and how long
    # a path may get is told apart, by `DraftRequest.max_depth`.
    tree: bool = False
    max_draft_tokens: int | None = None  # never more drafts, of a tree nodes, than this in one step
    max_context: int | None = None  # requests longer than this are not drafted for


@dataclass(frozen=True, slots=True)
class TargetView:
    """The target model as a proposer sees it; handed to `Proposer.load` once, before any step."""

    config: Any  # the target's transformers config
    vocab_size: int  # token ids are in range(vocab_size)
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # prompt and output together never exceed this
    checkpoint: Path | None  # the folder the weights came from; None for a model object
    tokenizer: Any  # a transformers tokenizer, or None: ids in, ids out
    embeddings: torch.Tensor | None = None  # [vocab_size or more, hidden_size], if needed
    # From hidden states [n, hidden_size] to logits [n, vocab_size], if needed.
    lm_head: Callable[[torch.Tensor], torch.Tensor] | None = None
    # From token ids [n] int64 to what gives their logits, weight [n, hidden_size] and bias [n] or
    # None, copied; if lm_head is needed. For a drafter over fewer tokens.
    lm_head_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None
    # Whether the products of a drafter's own weights should be in int8: see
    # `foresay.core.worker.drafter_linear.drafter_linear`. A proposer may ignore it.
    int8_drafter: bool = False


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request of this step.

    `token_ids` is a read-only view of the committed tokens, prompt and output. It only ever grows
    while `req_id` lives, except that `release(req_id)` starts it anew.
    """

    req_id: str
    token_ids: Sequence[int]
    num_new_tokens: int  # output tokens this step committed; 0: the prompt is not complete yet
    k: int  # most draft tokens wanted, of a tree nodes; 0: draft nothing
    # Text that the caller expects as output, tokenized; usually empty. For `Needs.prediction` only.
    prediction_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0  # the first of `token_ids`; what follows is output
    # The draft ends where the drafter's probability that it is right so far, known before the next
    # token is picked, falls below this: see `foresay.core.worker.confidence`. 0: draft k. A tree
    # leaves out nodes whose way from the root is less likely to be right than this. A proposer may
    # ignore it, but not cut a sampled draft for what was drawn: that is not exact.
    min_confidence: float = 0.0
    # Most draft tokens of a path from a tree's root to a leaf: what a step can commit. With k >= 1
    # it is at least 1; who did not declare `Needs.tree` has a k that is not above it.
    max_depth: int = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftChildren:
    """The best continuations of some nodes of trees, the best one first.

    `token_ids` [n, width] int64 target ids; a row's ids are distinct. `log_probs` [n, width]
    float32: how likely each is the token that follows, by the drafter and, where tokens are
    sampled, by the noise they are drawn with. What a row lacks has the id 0 and -inf.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor


class DraftSampler(Protocol):
    """Draws draft tokens from a drafter's logits as a request's sampling parameters ask.

    Drawing keeps acceptance up where texts are sampled: what a draft is drawn from is known
    exactly, so the target can accept it with the greatest probability there is. Declare
    `Needs(sampled=True)` to have one.
    """

    def draw(
        self,
        logits: torch.Tensor,
        step: int,
        rows: Sequence[int],
        draft_to_target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw the draft tokens number `step` (from 0) of the requests `rows`; return target ids.

        `logits` [len(rows), draft_vocab], any float dtype, only read. `rows` are indices into
        `DraftInput.requests`, of requests that still draft. `draft_to_target` [draft_vocab] int64
        gives each draft id's target id, None: they are the same; several draft ids of one target
        id count together. Returns [len(rows)] int64.

        What was drawn *is* the request's draft: return it as it is. A request may stop after any
        token, before the next is drawn. Greedy requests get the likeliest token. Raises
        `ValueError` for a step that a row has drawn already, skipped, or that exceeds its k.
        """
        ...

    def children(
        self,
        logits: torch.Tensor,
        depths: Sequence[int],
        rows: Sequence[int],
        width: int,
        draft_to_target: torch.Tensor | None = None,
    ) -> DraftChildren:
        """Return the `width` best children of n nodes of draft trees, without drawing anything.

        `logits` [n, draft_vocab] predict what follows each node; `depths` [n] is the number of
        draft tokens on the way to it, itself included (0: the root, which is the last committed
        token); `rows` [n] are indices into `DraftInput.requests`, which may repeat.
        `draft_to_target` as in `draw`. For greedy requests the best are the likeliest. Where
        tokens are sampled they are those with the largest sum of log probability and the very
        noise that the target's token is drawn with at that position: the first one is the coupled
        draw. A tree is verified by the deterministic rule, so this is exact. A request either
        draws its draft or has it made of these. Raises `ValueError` unless `Needs.tree` was
        declared.
        """
        ...


class KVRows(Protocol):
    """Rows that a proposer runs through its own attention layers: see `KVView.rows`."""

    @property
    def positions(self) -> torch.Tensor:
        """[num_rows] int64."""
        ...

    @property
    def last_rows(self) -> torch.Tensor:
        """[num_ranges] int64: the row where each range ends."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows, num_heads, head_dim], rope applied
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim], rope applied
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # [num_heads]
    ) -> torch.Tensor:
        """Store the rows' keys and values, then attend: [num_rows, num_heads, value_dim].

        `layer` is an index into `Needs.kv_layers`. A row at position p of a request attends to
        positions 0 to p of that request (within the window), as this layer last stored them.
        `softcap` bounds scores by softcap * tanh(score / softcap); `sinks` adds a logit per head to
        the softmax's denominator.
        """
        ...

    def store(
        self,
        layer: int,
        key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim], rope applied
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
    ) -> None:
        """Store the rows' keys and values as `attend` does, and attend to nothing."""
        ...

    def last(self) -> KVRows:
        """Lay out the rows `last_rows` alone; they attend to what is stored of the others by then.

        So rows of a layer whose output nobody takes, as all but the last of a prompt in a drafter's
        last layer, need no more than keys and values: `store` all, then run these.
        """
        ...


class KVView(Protocol):
    """The KV cache of a proposer's own layers, in the blocks of the requests."""

    def rows(self, requests: Sequence[int], positions: Sequence[range]) -> KVRows:
        """Lay out rows: for each of `requests` the positions of its range, request after request.

        `requests` are indices into `DraftInput.requests`. Positions go up to
        `len(token_ids) + k - 3 + draft_slots`: a drafter may store what it guesses there. It is
        overwritten when the features of these positions come.
        """
        ...

    def tree_rows(
        self,
        requests: Sequence[int],
        firsts: Sequence[int],
        parents: Sequence[Sequence[int]],
        num_new: Sequence[int],
    ) -> KVRows:
        """Lay out the newest nodes of trees: for `Needs.tree`.

        Request `requests[i]` has a tree of the nodes 0, 1, ... that are or were given rows;
        `parents[i][j]` is the parent of node j, an earlier node, or -1: a child of the position
        `firsts[i] - 1`. The rows are its last `num_new[i]` nodes, request after request; those
        before were rows of earlier calls. A node at depth d (0: no node above it) has the position
        `firsts[i] + d`; its keys and values lie where those of position `firsts[i] + j` would,
        within the limit that `rows` has. A row attends to the positions below `firsts[i]`, to the
        nodes above it and to itself. `last_rows` are the last rows of the requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A step's requests. Row order may change from step to step: key your state by `req_id`.

    The batch, its requests and their `token_ids` are valid during the call only: copy what you
    keep.

    For a proposer that declared the need, the *features* of committed positions come along: each
    position once, in order, from the first that is computed after the request was admitted (or
    resumed) to the end. Request i has the rows `row_starts[i]` to `row_starts[i + 1]`. With k >= 1
    they reach up to position `len(token_ids) - 2`: the last token was not computed yet. An
    unfinished prompt hands its chunk over with k = 0. Positions that the prefix cache held come to
    no one, unless the proposer has KV layers, which were then stored for them already.
    """

    requests: Sequence[DraftRequest]
    sampler: DraftSampler | None = None  # None unless `Needs.sampled` was declared
    hidden_states: torch.Tensor | None = None  # [num_rows, hidden_size]: `Needs.hidden_state`
    aux_hidden_states: torch.Tensor | None = None  # [num_rows, num_aux_layers, hidden_size]
    positions: torch.Tensor | None = None  # [num_rows] int64, if there are features
    row_starts: Sequence[int] | None = None  # num_requests + 1 of them, if there are features
    kv: KVView | None = None  # `Needs.kv_layers`


@dataclass(slots=True)
class Draft:
    """One list of draft token ids per request of the `DraftInput`, in its order.

    Any sequence of integers does: a list, a tuple, a numpy array, a torch tensor. Short, empty
    and ragged ones are normal: no padding, no dummy ids. The core cuts what is too long, stops at
    the first id that is no token of the target, and counts both as faults.

    A draft may be a tree, if `Needs.tree` was declared: `parents[i][j]` is then the index of the
    node above token j of request i, in the same draft, and -1 for a child of the root, which is
    the last committed token. A parent comes before its children; siblings differ; the most
    valuable nodes should come first, since what must be cut is cut from the end. A fault takes the
    node with all that hangs on it. None for a request, or altogether, means a chain.
    """

    token_ids: list[list[int]]
    parents: list[list[int] | None] | None = None


def draft_depths(parents: Sequence[int]) -> list[int]:
    """Return how deep each node of a draft tree lies, given its `parents`; 1: at the top."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@runtime_checkable
class Proposer(Protocol):
    """A drafting algorithm. `propose` is the only method it must have.

    Optional methods, called if they exist:
      `load(target: TargetView) -> Needs | None`   once, before any step. If it returns needs, they
          replace what the spec declared: only now it knows the target's tokenizer and its own
          weights.
      `dummy_run(batch: DraftInput) -> None`  after it, where passes over its KV layers can be
          captured as CUDA graphs: draft as `propose` does for this batch, which is nobody's and is
          released. Whoever has it says that all passes behind the first of a draft, as
          `foresay.core.worker.drafting` and `tree_drafting` make them, are alike: whatever the
          step, the model given there does the same, returns rows of the shape and dtype that it
          takes, and attends with as many heads in all layers; it reads no number back to the host,
          and makes no table longer, nor puts another tensor in the place of one, once it is loaded.
      `release(req_id: str) -> None`       the request ended or was preempted: forget it.
    """

    def propose(self, batch: DraftInput) -> Draft:
        """Return at most `request.k` draft token ids for each of `batch.requests`.

        Drafts follow `request.token_ids` directly. Raising is survived: the step drafts nothing.
        """
        ...


def _no_needs(_config: ProposerConfig, _target_config: Any) -> Needs:
    return Needs()


@dataclass(frozen=True, slots=True)
class ProposerSpec:
    """What `foresay_register_proposers` returns: a name and how to build the proposer.

    `needs(config, target_config)` may read a drafter's config.json, never weights. `build(config)`
    imports the heavy code; a plugin's `__init__` stays light.

    `drafter_is_model`: the drafter is a whole language model, so that besides a registered drafter
    a user may name it as the target model is named: an alias, a folder, a GGUF file, or a hub id.
    `ProposerConfig.drafter` is then the folder that an alias resolved to, or what the user wrote.

    `serves(folder)`, for a proposer whose weights may lie in the target's own checkpoint: given
    the target's folder, say why this proposer is what "auto" should take, or return None if there
    is nothing for it. It looks at files' names and headers only and imports no torch. Where
    something is there that cannot be used, it raises a `ForesayError` that says why: the choice
    goes on without it, and the reason is shown.

    `recognises(path)`, for a proposer that loads a drafter: given somebody's folder or file, say
    what it holds ("an EAGLE-3 head"), or return None if it is nothing of this proposer's kind. So
    `foresay check` finds whose drafter it is. It looks at config.json and the tensors' names only,
    and judges by what only its own kind has: others are asked as well. Whether the drafter can be
    used is not the question; `needs` and `load` tell. It may raise as `serves` does.

    `training`: how a drafter for this proposer is trained, for `foresay train`; see
    `foresay.core.training`.
    """

    name: str
    config_type: type[ProposerConfig]
    build: Callable[[Any], Proposer]
    needs: Callable[[Any, Any], Needs] = field(default=_no_needs)
    drafter_is_model: bool = False
    serves: Callable[[Path], str | None] | None = None
    recognises: Callable[[Path], str | None] | None = None
    training: TrainingSpec | None = None
