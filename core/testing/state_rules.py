"""Rules on what a proposer remembers: preemption, the end of requests, other proposers.

Each is tried on the proposer alone, without an engine.
"""

from __future__ import annotations

from typing import Any

import torch

from foresay.core.testing.draft_rules import DraftRules
from foresay.core.testing.driver import Ask, Driver, check
from foresay.core.testing.memory import Reachable
from foresay.core.testing.subject import not_applicable

_REQUESTS_A_ROUND = 60
_BYTES_A_REQUEST = 8  # fewer than the smallest thing that could be kept of a request: a pointer


class StateRules(DraftRules):
    """What is forgotten, and when."""

    def test_a_preempted_request_starts_anew(self) -> None:
        """After `release` the same id comes again with its whole history, its output included."""
        self._must_forget()
        for i in range(6):
            text = self.text(i, 30)
            preempted = self.driver()
            for length in (12, 14, 15):
                preempted.draft(Ask("a", text[:length], self.most))
            preempted.release("a")
            resumed = Ask("a", text[:16], self.most, num_prompt_tokens=11, num_new_tokens=1)
            later = Ask("a", text[:18], self.most)
            fresh = self.driver()
            for ask in (resumed, later):
                self.same(
                    preempted.draft(ask),
                    fresh.draft(ask),
                    "a request was preempted and came back, and another proposer saw it only then",
                    "`release(req_id)` must forget all there is of the request",
                )

    def test_a_released_id_may_be_used_again(self) -> None:
        """After `release` an id may belong to another request, with quite another history."""
        self._must_forget()
        for i in range(6):
            driver = self.driver()
            driver.draft(Ask("a", self.text(i, 20), self.most))
            driver.release("a")
            ask = Ask("a", self.text(i + 50, 9), self.most)
            self.same(
                driver.draft(ask),
                self.driver().draft(ask),
                "a released id came back with another history, and a fresh proposer saw it",
                "`release(req_id)` must forget all there is of the request",
            )

    def test_a_second_request_finds_nothing_of_the_first(self) -> None:
        """Two requests in a row, also with the same prompt: the second is drafted for afresh."""
        self._must_forget()
        for i in range(6):
            text = self.text(i, 30)
            driver = self.driver()
            for length in (10, 14, 20):
                driver.draft(Ask("first", text[:length], self.most))
            driver.release("first")
            for ask in (Ask("second", text[:10], self.most), Ask("third", text[9:17], self.most)):
                self.same(
                    driver.draft(ask),
                    self.driver().draft(ask),
                    "a request came after another one, and to a fresh proposer",
                    "keep what you learn of a request under its `req_id`, and drop it in "
                    "`release`: drafts that depend on other requests cannot be reproduced",
                )

    def test_a_session_again_gets_the_same_drafts(self) -> None:
        """Two fresh proposers that see the same requests come and go, in order, draft alike."""
        first, second = self.driver(), self.driver()
        for i in (0, 1, 0, 2):
            for length in (12, 15, 18):
                ask = Ask("a", self.text(i, 24)[:length], self.most)
                self.same(
                    second.draft(ask),
                    first.draft(ask),
                    f"two fresh proposers were shown the same requests, the last {ask.history}",
                    "a draft may depend on what the proposer was shown, never on a clock or on "
                    "chance without a seed",
                )
            first.release("a")
            second.release("a")

    def test_any_request_may_be_released(self) -> None:
        """`release` is called for requests that were never drafted for, too."""
        driver = self.driver()
        driver.release("never seen")
        driver.draft(Ask("a", self.text(0), self.most))
        driver.release("a")
        driver.release("a")
        driver.draft(Ask("b", self.text(1), self.most))

    def test_released_requests_leave_nothing_behind(self) -> None:
        """Many requests come and go, and the proposer grows no larger."""
        driver = self.driver()
        sizes = [Reachable(driver.proposer).footprint()]
        for number in range(3):  # caches fill, tables reach their size
            self._come_and_go(driver, number)
            sizes.append(Reachable(driver.proposer).footprint())
        growth = sizes[3].num_bytes - sizes[2].num_bytes
        if self.remembers_requests:
            # What is full holds now this, now that: it need not stay the same to the byte.
            check(
                2 * growth < sizes[1].num_bytes - sizes[0].num_bytes,
                f"{_REQUESTS_A_ROUND} requests of 15 tokens came and went three times, and "
                f"{' then '.join(str(size.num_bytes) for size in sizes)} bytes were held: what is "
                "remembered must have a bound. If it has one, choose `settings` under which so "
                "many requests reach it",
            )
            return
        check(
            growth < _REQUESTS_A_ROUND * _BYTES_A_REQUEST,
            f"{_REQUESTS_A_ROUND} requests came and went, and {growth} bytes in "
            f"{sizes[3].num_objects - sizes[2].num_objects} objects more are held than before: a "
            "server would run out of memory. Give the proposer a `release(self, req_id)` that "
            "drops all there is of a request, e.g. `self.states.pop(req_id, None)`",
        )

    def _come_and_go(self, driver: Driver, number: int) -> None:
        for first in range(0, _REQUESTS_A_ROUND, 4):
            # Who remembers requests may know that these were there before: show it new ones.
            seed = number * _REQUESTS_A_ROUND + first if self.remembers_requests else 0
            named = {f"{number}.{first + i}": self.text(seed + i, 15) for i in range(4)}
            for length in (12, 15):
                driver.step(*(Ask(name, text[:length], self.most) for name, text in named.items()))
            for name in named:
                driver.release(name)
        driver.batch = None

    def _must_forget(self) -> None:
        """Leave out what is true only of a proposer that forgets requests."""
        if self.remembers_requests:
            not_applicable("its drafts depend on earlier requests, as declared")

    def test_two_proposers_share_nothing(self) -> None:
        """Two engines in one process use the same request ids: state is an instance's own."""
        for number in range(8):  # a leak need not show in every pair of texts
            text, other = self.text(number, 20), self.text(number + 1, 5 + number)
            first, second = self.driver(same_ids=True), self.driver(same_ids=True)
            first.draft(Ask("0", text, self.most))
            ask = Ask("0", other, self.most)
            self.same(
                second.draft(ask),
                self.driver().draft(ask),
                "two proposers drafted for a request '0' each, and one had no neighbour",
                "keep state in `self`, set in `__init__`; a dict in the class body or the module "
                "is shared by all",
            )
            first.release("0")
            second.release("0")

    def test_the_target_is_only_looked_at(self) -> None:
        """Loading and drafting leave the target's config and weights as they were."""
        target = self.target
        config = _facts(target.config)
        embeddings = target.embeddings
        weights = None if embeddings is None else embeddings.clone()
        self.driver().draft(Ask("a", self.text(0), self.most))
        check(
            _facts(target.config) == config,
            "the target's config changed while the proposer loaded or drafted; it is the engine's "
            "own: work on `copy.deepcopy(target.config)`",
        )
        check(
            embeddings is None or weights is None or torch.equal(weights, embeddings),
            "the target's embeddings changed while the proposer loaded or drafted; they are the "
            "target's own: work on `target.embeddings.clone()`",
        )

    def test_nothing_global_is_changed(self) -> None:
        """Loading and drafting leave torch's settings for the whole process as they were."""
        before = _torch_settings()
        driver = self.driver()
        driver.draft(Ask("a", self.text(0), self.most))
        changed = {
            name: f"{value} to {_torch_settings()[name]}"
            for name, value in before.items()
            if _torch_settings()[name] != value
        }
        check(
            not changed,
            f"the proposer changed torch's settings for everybody: {changed}; pass `dtype=` and "
            "`device=` where you make tensors, or use a `with` block",
        )


def _facts(config: Any) -> str:
    private = {name: value for name, value in vars(config).items() if name.startswith("_attn")}
    return f"{config!r} {private!r}"


def _torch_settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
