"""The draft_model proposer: loads the draft model, compares the vocabularies, and drafts.

With the target's vocabulary, or one that begins alike, the drafter's KV lies in the core's blocks,
position by position beside the target's. With another one `translation` takes over.
"""

from __future__ import annotations

import sys

from foresay.core.errors import ModelError
from foresay.core.proposer import Draft, DraftInput, Needs, TargetView
from foresay.core.worker.drafting import draft
from foresay.core.worker.target import TargetModel
from foresay_draft_model import DraftModelConfig
from foresay_draft_model.drafter import LoopModel, load_drafter, needs_of, stand_ins
from foresay_draft_model.translation import Translator
from foresay_draft_model.vocabulary import Intersection, Vocabulary, added_bos


class DraftModelProposer:
    """Drafts with a language model of its own, token by token (Leviathan et al., 2023)."""

    def __init__(self, config: DraftModelConfig) -> None:
        self._config = config
        self._loop_model: LoopModel | None = None  # for a vocabulary like the target's
        self._translator: Translator | None = None  # for another one

    def load(self, target: TargetView) -> Needs:
        """Load the draft model, and say what is needed of the core now that it is known.

        Raises `ModelError` if it cannot be run, or if the vocabularies have nothing in common.
        """
        model = load_drafter(self._config, target)
        how = self._compare(model, target)
        print(
            f"foresay: draft model {self._config.drafter} ({model.description}); {how}",
            file=sys.stderr,
        )
        if self._translator is not None:
            return Needs(sampled=self._config.sample)
        model.reserve(min(model.max_model_len or target.max_model_len, target.max_model_len))
        return needs_of(self._config, model.kv_layers, model.max_model_len)

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request."""
        if self._translator is not None:
            return self._translator.propose(batch, sample=self._config.sample)
        assert self._loop_model is not None, "load() comes first"
        return draft(
            batch,
            self._loop_model,
            hidden=None,
            shifted=False,
            sample=self._config.sample,
            last_rows_only=True,
        )

    def release(self, req_id: str) -> None:
        """Forget a request; in the core's blocks there is nothing to forget."""
        if self._translator is not None:
            self._translator.release(req_id)

    def _compare(self, model: TargetModel, target: TargetView) -> str:
        """Settle how the drafter's tokens become the target's; return it in words."""
        own = Vocabulary.of(model.tokenizer, model.vocab_size)
        theirs = Vocabulary.of(target.tokenizer, target.vocab_size)
        if own is None or theirs is None:
            whose = "draft model" if own is None else "target"
            return self._share(
                model, target, f", which is taken on trust: the {whose} has no tokenizer"
            )
        difference = own.first_difference(theirs)
        if difference is None:
            return self._share(model, target, "")
        what = (
            f"the draft model {self._config.drafter!r} has another tokenizer than the target: "
            f"{difference}"
        )
        if self._config.vocabulary == "same":
            raise ModelError(
                f"{what}; take one of the target's family, or leave the setting 'vocabulary' at "
                "'auto'"
            )
        intersection = Intersection(own, theirs)
        if not intersection.draft_ids:
            raise ModelError(f"{what}; they have no token in common")
        self._translator = Translator(
            model,
            intersection,
            target_vocab_size=target.vocab_size,
            kv_tokens=self._config.kv_tokens,
            first_id=added_bos(model.tokenizer),
        )
        return f"another tokenizer ({difference}): {intersection.coverage}"

    def _share(self, model: TargetModel, target: TargetView, remark: str) -> str:
        """Draft in the target's ids, as far as both models have them."""
        num_shared = min(model.vocab_size, target.vocab_size)
        self._loop_model = LoopModel(
            model, to_draft=stand_ins(model, target.vocab_size), columns=num_shared
        )
        if model.vocab_size == target.vocab_size:
            return f"the target's vocabulary{remark}"
        return (
            f"its {model.vocab_size:,} tokens and the target's {target.vocab_size:,} are the same "
            f"up to {num_shared:,}{remark}"
        )
