"""Where an output stands in the text that it is expected to be, token by token.

It knows token ids only. All that it holds is a function of the two texts and of what a rival would
have said; nothing depends on what was drafted, so a draft may have been wanted at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from foresay_ngram.edits import Edit, Edits
from foresay_ngram.occurrences import Occurrences

# Chosen on random edits of other texts than the README measures; halved or doubled, each of them
# changes the tokens per step by less than 1 %.
_CONFIRMED = 8  # tokens in a row after which a place in the text is taken for certain
_NEAR = 8  # a single token is looked for no further ahead than this
_SHORTEST_BEFORE = 3  # fewest tokens that must match to go back in the text
_LONGEST_EDIT = 8  # longer insertions, deletions and replacements are not expected again
_REJOINED = 2  # tokens in a row after which an edit is taken to be over
_MOST_TRUST = 4
_FIRST_TRUST = 1  # a prediction's first token may differ for having been tokenized alone


class Alignment:
    """A cursor in the expected text that follows the output.

    While they agree the cursor moves on. At a difference it looks for where the output rejoins the
    text: the longest match of the last few tokens after the last place that is certain (of equally
    long ones the nearest: edits keep the order), or, for a block that was moved, a longer match
    before it. Only tokens since that place count: those before it are explained already. Without a
    match the difference is taken for a replaced token, and the cursor moves on.

    A rival source of drafts is watched as well: `prefers` compares how much of the output matches
    in either, and which one was right lately where they disagreed. So an expected text that is of
    no use costs little of what the rival gains. A new token costs at most one search.
    """

    __slots__ = (
        "_anchor",
        "_before",
        "_changed",
        "_changed_from",
        "_cursor",
        "_edit",
        "_edits",
        "_last",
        "_longest",
        "_num_done",
        "_num_uncertain",
        "_occurrences",
        "_recent",
        "_run",
        "_run_from",
        "_text",
        "_trust",
    )

    def __init__(self, text: Sequence[int], longest: int) -> None:
        """`longest`: most tokens compared when the output rejoins the text."""
        self._text = list(text)
        self._occurrences = Occurrences(self._text, longest)
        self._edits = Edits(self._text)
        self._longest = longest
        self._recent: deque[int] = deque(maxlen=longest)  # the output's last tokens
        self._cursor = 0  # the output should go on with text[cursor], or with the edit there
        self._edit: Edit | None = None  # expected to replace what is at the cursor
        self._num_done = 0  # tokens of `_edit.new` that the output has
        # Tokens in a row that were as expected; 0: the cursor is a guess. A beginning is certain.
        self._run = longest
        self._run_from = 0  # where in the text they began
        # How many tokens of match the text is worth more than the rival, or less: up when it alone
        # was right about a token, down when the rival alone was, or it alone was wrong.
        self._trust = _FIRST_TRUST
        self._anchor = 0  # the last certain position
        self._num_uncertain = 0  # output tokens since
        self._changed_from = -1  # where the difference that is not over began; -1: there is none
        self._changed: list[int] = []  # output tokens since then
        self._before: int | None = None  # the output token before them
        self._last: int | None = None  # the output's last token

    def prefers(self, rival_match: int) -> bool:
        """Return whether to draft from the text, not from a rival that matches so many tokens."""
        if self._run == 0:
            return rival_match == 0 and self._trust >= 0
        if rival_match == 0:
            return self._run + self._trust > 0
        return min(self._run, self._longest) + self._trust >= rival_match

    @property
    def match_length(self) -> int:
        """How many tokens in a row were as expected, at most `longest`; 0: the place is a guess."""
        return min(self._run, self._longest)

    def continuation(self, k: int) -> list[int]:
        """Return up to `k` tokens that should come next, known edits applied; none at the end."""
        draft: list[int] = []
        at, edit, num_done = self._cursor, self._edit, self._num_done
        while len(draft) < k:
            if edit is not None:
                draft += edit.new[num_done:]
                at += len(edit.old)
                num_done = 0
            if at >= len(self._text):
                break
            draft.append(self._text[at])
            at += 1
            edit = self._edits.expected(at)
        return draft[:k]

    def append(self, token: int, rival_token: int | None) -> None:
        """Append a token to the output, in whose place the rival expected `rival_token`, if any."""
        self._recent.append(token)
        self._num_uncertain += 1
        if self._changed_from >= 0:
            self._changed.append(token)
            if len(self._changed) > _LONGEST_EDIT + _REJOINED:
                self._changed_from = -1
        expected, edit = self._expected(), self._edit
        if expected is not None and self._run:
            self._weigh(expected == token, None if rival_token is None else rival_token == token)
        if token == expected:
            if edit is not None and self._num_done < len(edit.new):
                self._follow(edit)
            else:
                deleted = 0 if edit is None else len(edit.old)
                self._move(self._cursor + deleted + 1, self._run + 1)
        elif edit is not None and self._num_done == 0 and token == self._text[self._cursor]:
            self._edits.forget(self._cursor, edit)  # this time the text was kept
            self._move(self._cursor + 1, self._run + 1)
        else:
            self._differ(token)
        self._last = token

    def _expected(self) -> int | None:
        """Return the token that should come next; None at the end of the text."""
        at = self._cursor
        if self._edit is not None:
            if self._num_done < len(self._edit.new):
                return self._edit.new[self._num_done]
            at += len(self._edit.old)
        return self._text[at] if at < len(self._text) else None

    def _weigh(self, right: bool, rival_right: bool | None) -> None:
        """Count who was right about a token; `rival_right` None: it expected nothing."""
        if right and not rival_right:
            self._trust = min(self._trust + 1, _MOST_TRUST)
        elif not right and rival_right is not False:
            self._trust = max(self._trust - 1, -_MOST_TRUST)

    def _follow(self, edit: Edit) -> None:
        """One more token of the edit at the cursor came."""
        self._run += 1
        self._num_done += 1
        if self._num_done == len(edit.new):
            self._cursor += len(edit.old)  # where no other edit is expected: this was it
            self._edit = None
            self._num_done = 0

    def _move(self, cursor: int, run: int) -> None:
        """Go to a position, `run` tokens before which were as expected."""
        self._cursor = cursor
        self._run = run
        self._num_done = 0
        if run >= _CONFIRMED:
            self._anchor = cursor
            self._num_uncertain = 0
        if self._changed_from >= 0 and run >= _REJOINED:
            self._learn()
        self._edit = self._edits.expected(cursor)

    def _differ(self, token: int) -> None:
        """Look for where the output goes on in the text, now that it left the cursor."""
        if self._run and self._changed_from < 0 and self._cursor < len(self._text):
            self._changed_from = self._cursor
            done = () if self._edit is None else self._edit.new[: self._num_done]
            self._changed = [*done, token]
            # An edit begins where output and text agree, or are taken to.
            self._before = self._text[self._cursor - 1] if done else self._last
        after, before = self._occurrences.find(self._recent, self._anchor, self._num_uncertain)
        if before.length >= _SHORTEST_BEFORE and before.length > after.length:
            cursor, run = before
        elif after.length > 1 or (
            after.length == 1 and after.end - max(self._anchor, self._cursor) <= _NEAR
        ):
            cursor, run = after
        else:
            cursor, run = min(self._cursor + 1, len(self._text)), 0
        self._run_from = cursor - run
        self._move(cursor, run)

    def _learn(self) -> None:
        """The difference is over: remember it, if it is one short edit."""
        start, stop = self._changed_from, self._run_from
        num_new = len(self._changed) - self._run
        if start <= stop <= start + _LONGEST_EDIT and num_new >= 0 and (num_new or stop > start):
            edit = Edit(tuple(self._text[start:stop]), tuple(self._changed[:num_new]))
            self._edits.learn(self._before, edit)
        self._changed_from = -1
