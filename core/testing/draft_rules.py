"""Rules on single drafts: what a proposer returns for a step, whatever came before.

Each is tried on the proposer alone, without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing.driver import SEEDED, Ask, check, fail
from foresay.core.testing.memory import Reachable
from foresay.core.testing.subject import Subject, not_applicable

_NUM_TEXTS = 12


class DraftRules(Subject):
    """What is true of every draft."""

    def test_there_is_one_list_per_request(self) -> None:
        """A `Draft` holds a list of integers for each request of the batch, in its order."""
        for num_requests in (1, 2, 7):
            asks = [Ask(f"r{i}", self.text(i, 6 + 3 * i), self.most) for i in range(num_requests)]
            self.driver().step(*asks)  # which checks the form
        asks = [Ask("a", self.text(0), 0), Ask("b", self.text(1), self.most)]
        self.driver().step(*asks)

    def test_something_is_drafted(self) -> None:
        """The texts of this suite make the proposer draft: without drafts nothing is tested."""
        driver = self.driver()
        drafts = [driver.draft(Ask(f"r{i}", self.text(i), self.most)) for i in range(_NUM_TEXTS)]
        check(
            any(drafts),
            f"it drafted nothing for {_NUM_TEXTS} histories that repeat themselves. If it is "
            "meant to, override `text(seed, length)` to return histories that it drafts for, and "
            "`models()` to return target models that it was made for",
        )

    def test_draft_ids_are_tokens_of_the_target(self) -> None:
        """Every id is in range(vocab_size), also where the history holds its first and last id."""
        vocab_size = self.target.vocab_size
        ends = [[0, vocab_size - 1] * 5, [vocab_size - 1] * 8, [0] * 8, [vocab_size - 2] * 7]
        ends.append([*range(vocab_size - 6, vocab_size)])
        histories = [*ends, *(self.text(i) for i in range(_NUM_TEXTS))]
        for i, history in enumerate(histories):
            for token_id in self.driver().draft(Ask(f"r{i}", history[-self.room :], self.most)):
                check(
                    0 <= token_id < vocab_size,
                    f"after {history} it drafted {token_id}, which is no token of the target: ids "
                    f"are in range({vocab_size}) (`TargetView.vocab_size`). There are no padding "
                    "ids: a shorter list says that there is no more",
                )

    def test_k_is_honoured(self) -> None:
        """A draft has at most k tokens, and none where k is 0, whatever its neighbours' k are."""
        ks = range(self.most + 1)
        for i in range(_NUM_TEXTS // 2):
            text = self.text(i)
            batches = [[k] for k in ks]
            batches.append([self.most, 0, 1])
            batches.append([0, self.most])
            for batch in batches:
                asks = [Ask(f"r{j}", text, k) for j, k in enumerate(batch)]
                for ask, draft in zip(asks, self.driver().step(*asks), strict=True):
                    check(
                        len(draft) <= ask.k,
                        f"it drafted {len(draft)} tokens where k={ask.k} (the batch's ks: {batch}"
                        "); each request has its own `request.k`, and k=0 asks for none",
                    )

    def test_the_same_history_gets_the_same_draft(self) -> None:
        """Two fresh proposers, fed alike, draft alike: no clock, no generator without a seed."""
        for i in range(_NUM_TEXTS):
            text = self.text(i, 30)
            first, second = self.driver(), self.driver()
            for length in (len(text) // 2, len(text) // 2 + 1, len(text)):
                ask = Ask("a", text[:length], self.most)
                self.same(
                    second.draft(ask),
                    first.draft(ask),
                    f"two fresh proposers were shown {ask.history}",
                    "draw only through `batch.sampler`, or seed by what is drafted for",
                )

    def test_a_batch_changes_no_draft(self) -> None:
        """A request is drafted for as if it were alone: ragged batches, neighbours come and go."""
        most = self.most
        steps: list[dict[str, tuple[int, int]]] = [  # length and k, by request
            {"a": (12, most), "b": (9, most), "c": (15, 1), "e": (12, most)},
            {"a": (13, most), "b": (10, 0), "c": (16, most)},
            {"e": (13, most), "a": (15, 1), "c": (17, most), "d": (8, most)},
            {"d": (9, most), "b": (12, most), "e": (15, 1)},
            {"c": (19, most), "a": (18, most), "b": (13, most)},
        ]
        for seed in range(0, 4 * 4, 4):
            texts = {name: self.text(seed + i, 30) for i, name in enumerate("abcd")}
            texts["e"] = [*range(self.target.vocab_size)]  # nothing in it ever came before
            alone, batched = {name: self.driver() for name in texts}, self.driver()
            for step in steps:
                asks = [
                    Ask(name, texts[name][: min(length, self.room)], k)
                    for name, (length, k) in step.items()
                ]
                for ask, draft in zip(asks, batched.step(*asks), strict=True):
                    self.same(
                        draft,
                        alone[ask.name].draft(ask),
                        f"request {ask.name!r} was in a batch {[*step]}, and alone",
                        "drafts depend on one request's tokens, k and state only; a short draft is "
                        "not filled up to its neighbours' length",
                    )

    def test_rows_may_change_their_order(self) -> None:
        """State belongs to a `req_id`: the same requests in another order get the same drafts."""
        texts = {name: self.text(i, 30) for i, name in enumerate("abc")}
        still, moved = self.driver(), self.driver()
        for length, order in ((10, "abc"), (12, "cab"), (13, "bca"), (16, "cba")):
            asks = {name: Ask(name, text[:length], self.most) for name, text in texts.items()}
            expected = dict(zip(asks, still.step(*asks.values()), strict=True))
            got = dict(zip(order, moved.step(*(asks[name] for name in order)), strict=True))
            self.same(
                got,
                expected,
                f"the rows came in the order {', '.join(order)}, and always as a, b, c",
                "key your state by `request.req_id`, never by the row's index",
            )

    def test_steps_may_be_missed(self) -> None:
        """A request that was not in some batches is drafted for from its whole history."""
        if self.learns_from_steps:
            not_applicable("its drafts depend on the steps it took part in, as declared")
        for i in range(_NUM_TEXTS):
            text = self.text(i, 30)
            driver = self.driver()
            for start in (10, 16, 17):  # two tokens a step; those between are not shown
                driver.draft(Ask("a", text[:start], self.most))
            ask = Ask("a", text[:25], self.most, num_new_tokens=2)
            self.same(
                driver.draft(ask),
                self.driver().draft(ask),
                "a request missed some steps, and another proposer saw its history at once",
                "take what is new from `token_ids`, from where you stopped reading; "
                "`num_new_tokens` counts this step's only",
            )

    def test_an_incomplete_prompt_gets_no_draft(self) -> None:
        """Chunks of a prompt (k = 0, no new token) are not drafted for, and change no draft."""
        for i in range(_NUM_TEXTS // 2):
            text = self.text(i, 20)
            chunked = self.driver()
            for _ in range(3):
                draft = chunked.draft(Ask("a", text[:-1], 0, is_chunk=True))
                check(
                    not draft,
                    f"it drafted {draft} for a prompt that is not complete yet (k=0, "
                    "num_new_tokens=0): return an empty list",
                )
            self.same(
                chunked.draft(Ask("a", text, self.most)),
                self.driver().draft(Ask("a", text, self.most)),
                "a prompt came in chunks, and at once",
                "with `num_new_tokens` 0 nothing is new; beware of `token_ids[-0:]`, which is "
                "everything",
            )

    def test_the_shortest_history_is_drafted_for(self) -> None:
        """A prompt of one token and its first output token: there may be nothing to look at."""
        vocab_size = self.target.vocab_size
        for history in ([0, 0], [1 % vocab_size, 0], [vocab_size - 1, vocab_size - 1]):
            for k in {0, 1, self.most}:
                self.driver().draft(Ask("a", history, k))

    def test_the_longest_history_is_drafted_for(self) -> None:
        """Up to the last position of the target, or of `Needs.max_context`, every length works."""
        driver = self.driver()
        text = (self.text(0, self.longest) * self.longest)[: self.longest]
        for length in [*range(2, self.longest, 7), *range(self.longest - 6, self.longest)]:
            k = min(self.most, self.longest - length)
            if k > 0 and length >= 2:
                driver.draft(Ask("a", text[:length], k))
                self.driver().draft(Ask("b", text[:length], k))

    def test_the_input_is_only_read(self) -> None:
        """Tokens, requests and batch are as they were, even if they are lists that can change."""
        texts = [self.text(i) for i in range(4)]
        asks = [Ask(f"r{i}", text, self.most) for i, text in enumerate(texts)]
        driver = self.driver()
        driver.step(*asks)
        driver.step(*reversed(asks), as_lists=True)
        batch = driver.batch
        assert batch is not None
        check(
            [request.req_id[-2:] for request in batch.requests] == ["r3", "r2", "r1", "r0"],
            "propose() changed or reordered `batch.requests`: sort a copy",
        )
        check(
            [list(request.token_ids) for request in batch.requests] == texts[::-1],
            "propose() changed a request's `token_ids`, which are the engine's own: copy them "
            "before you append to them",
        )

    def test_the_batch_is_not_kept(self) -> None:
        """After the call nothing of the batch is held: it is the engine's, and goes on changing."""
        driver = self.driver()
        wanted: list[object] = []
        for length in (10, 12):
            driver.step(*(Ask(f"r{i}", self.text(i, length), self.most) for i in range(3)))
            batch, driver.batch = driver.batch, None
            assert batch is not None
            wanted += [batch, batch.requests, *batch.requests]
            wanted += [request.token_ids for request in batch.requests]
            wanted += [item for item in (batch.sampler,) if item is not None]
        reachable = Reachable(driver.proposer)
        kept = reachable.first_of(wanted)
        if kept is not None:
            fail(
                f"after propose() the proposer still holds {_described(kept)} "
                f"({reachable.path_to(kept)}). It changes with the engine's next step, and keeps "
                "memory: copy what you need, e.g. `list(request.token_ids)`"
            )

    def test_predictions_belong_to_their_requests(self) -> None:
        """Who declares `Needs(prediction=True)` uses each request's own `prediction_ids`."""
        if not self.needs.prediction:
            not_applicable("it reads no predictions")
        num_changed = 0
        for i in range(_NUM_TEXTS):
            expected = self.text(i + 100)
            history = [*self.text(i, 8), *expected[:2]][-self.room :]
            asks = [  # the same history, with what it goes on with, with nothing, with other text
                Ask("a", history, self.most, 8, prediction=expected),
                Ask("b", history, self.most, 8),
                Ask("c", history, self.most, 8, prediction=[*expected[:2], *self.text(i, 9)]),
            ]
            for ask, draft in zip(asks, self.driver().step(*asks), strict=True):
                check(
                    len(draft) <= ask.k,
                    f"it drafted {len(draft)} tokens from a prediction where k={ask.k}",
                )
                self.same(
                    draft,
                    self.driver().draft(ask),
                    f"request {ask.name!r} was in a batch with other predictions, and alone",
                    "each request has its own `prediction_ids`, most have none",
                )
                without = self.driver().draft(replace(ask, prediction=()))
                num_changed += draft != without
        check(
            num_changed > 0,
            "Needs(prediction=True) is declared, but no prediction changed a draft; drop it, or "
            "draft from `request.prediction_ids`",
        )

    def test_sampled_drafts_are_what_was_drawn(self) -> None:
        """Who declares `Needs(sampled=True)` returns what `batch.sampler` drew, in every mode."""
        if not self.needs.sampled:
            not_applicable("it does not sample its drafts")
        num_drawn = 0
        greedy = replace(SEEDED, temperature=0.0)
        coupled, rejection, block = (
            replace(SEEDED, verification=rule) for rule in ("coupled", "rejection", "block")
        )
        for sampling in (greedy, coupled, rejection, block):
            driver = self.driver(sampling=sampling)
            asks = [Ask(f"r{i}", self.text(i), min(i, self.most)) for i in range(4)]
            for row, draft in enumerate(driver.step(*asks)):
                drawn = driver.sampler.drawn(row)
                if drawn is None:
                    continue
                num_drawn += len(drawn)
                check(
                    draft == drawn,
                    f"it drew {drawn} and returned {draft} (temperature {sampling.temperature}, "
                    f"{sampling.verification}); what was drawn is the draft: return it as it is, "
                    "and stop before you draw, not after",
                )
        check(
            num_drawn > 0 or self.needs.tree,  # trees are made of `sampler.children`
            "Needs(sampled=True) is declared, but nothing was drawn through "
            "`batch.sampler.draw(logits, step, rows)`; drop it, or draw",
        )

    @property
    def room(self) -> int:
        """The longest history that leaves room for a whole draft."""
        return self.longest - self.most

    def same(self, got: object, expected: object, what: str, advice: str) -> None:
        """Fail unless two drafts, or sets of drafts, are equal."""
        __tracebackhide__ = True
        check(
            got == expected,
            f"{what}: it drafted {got} and {expected}. {advice[:1].upper()}{advice[1:]}",
        )


def _described(kept: object) -> str:
    if isinstance(kept, DraftInput):
        return "the batch"
    if isinstance(kept, DraftRequest):
        return f"request {kept.req_id!r}"
    if isinstance(kept, Sequence):
        return "a request's token_ids" if not isinstance(kept, tuple) else "batch.requests"
    return "the sampler"
