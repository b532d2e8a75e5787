"""How sure a drafter is of its drafts so far, and which drafts end for it (`min_confidence`).

Before token number s of a draft is picked, its logits are known. The confidence of token s is the
largest probability of their softmax: how likely the drafter holds its best guess to be right. The
*draft's* confidence is the product over the tokens 0 to s: roughly how likely all of them get
accepted, and so what verifying one more is worth. A draft ends before token s where this falls
below what its request asks for, which was set before the step drafts.

Why that is exact:

- A deterministic or a coupled draft is compared with what the target draws by itself. Any choice of
  drafts is exact, and the text depends on the seed alone, never on how long a draft is: greedy
  requests, and seeded ones under the `coupled` rule, stay replayable.
- A sampled draft whose probs are kept: whether x_s is verified may depend on the past, on x_<s and
  on the distributions up to that of x_s, but not on x_s itself. So it is decided before x_s is
  drawn, scanning forward, and for good: a draft that ended is never taken up again. To drop a token
  for its *own* probability, once it is drawn, would change how often the target's tokens come.

It knows logits and requests; not how a token is picked, nor whether it gets accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foresay.core.proposer import DraftRequest


class Confidence:
    """The confidence of one step's drafts, as far as they are made. `requests` are the batch's.

    Computes nothing for requests whose `min_confidence` is 0. A row of logits that is not finite
    has no confidence, NaN, and ends nothing here: it is left to who picks the token.
    """

    def __init__(self, requests: Sequence[DraftRequest]) -> None:
        self._least = {
            index: request.min_confidence
            for index, request in enumerate(requests)
            if request.min_confidence > 0
        }
        self._so_far = dict.fromkeys(self._least, 1.0)
        self._ended: set[int] = set()

    def has_ended(self, request: int) -> bool:
        """Whether a request's draft ended; `request` is its index in the batch."""
        return request in self._ended

    def going(self, logits: torch.Tensor, requests: Sequence[int]) -> list[int] | None:
        """Take in the logits of the next token of `requests`; say whose drafts go on.

        `logits` [len(requests), draft_vocab], any float dtype, only read. Returns indices into
        `requests`, ascending, without those whose draft ends here or ended before; None: all go on.
        """
        if not self._least:
            return None
        asking = [i for i, r in enumerate(requests) if r in self._least and r not in self._ended]
        if asking:
            rows = logits if len(asking) == len(requests) else logits[asking]
            rows = rows.to(torch.float32)
            best = (rows.amax(dim=-1) - rows.logsumexp(dim=-1)).exp()
            for i, confidence in zip(asking, best.tolist(), strict=True):
                request = requests[i]
                self._so_far[request] *= confidence
                if self._so_far[request] < self._least[request]:
                    self._ended.add(request)
        going = [i for i, request in enumerate(requests) if request not in self._ended]
        return None if len(going) == len(requests) else going
