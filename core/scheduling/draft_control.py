"""How much to draft for whom: as much as pays, by what steps cost and how far drafts get.

The engine tells it what steps and drafts took, and what was accepted; before each step it asks
what to draft after it. The wish for a request (`DraftPlan`) says how many tokens each member of
the chain of proposers may draft; 0 for all of them is a plain step. It knows seconds and counts, no
tokens, blocks or models, and imports no torch.

The wish is made from the past alone, before anything of the draft exists. So drafts stay exact
under every rule of verification (see `worker.rejection_sampler`), and a seeded request's text,
which depends on no draft, stays what it is.

**What is sought** is the most tokens per second (`draft_choice`) for a request alone, and where
others wait: who ends makes room for the next. Where several run and nobody waits, the last one to
end sets the time of all, and tokens gained for others make its steps dearer. There a plan is
followed to its end (`drain`): chosen is what keeps small both the time until the last one has ended
and that until one has on average, of what is not later than plain decoding for the last one.

**What is not known must be tried.** At first drafts are as long as they may be, and some
steps are plain ones, until both are measured; later see `draft_trials`. A drafter that never gets
far is soon given up (`acceptance`), and what is spent on it from then on, trials and hope for new
requests, is a small part of all time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from foresay.core.messages import DraftPlan, DraftTokenIds, SchedulerOutput
from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.draft_choice import Choice, Chooser, Menu, Plan
from foresay.core.scheduling.draft_records import Records
from foresay.core.scheduling.draft_trials import Trials
from foresay.core.scheduling.drain import look_ahead, other_plans
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.step_cost import StepCost

_ENOUGH = 3  # plain steps that must be known
_LEARNING_PLAIN_EVERY, _ALONE_EVERY = 4, 2  # steps, until then; where one request runs
_HOPE = 0.1  # by how much a request alone is taken to be better than others, until it was tried
# Hope is for who can afford it: while all drafts together have not lost more than this part of all
# time. Of gains and of losses at most so many steps are remembered.
_FOR_HOPE, _MOST_BALANCE = 0.01, 2.0
# The gain in tokens per second from which drafting begins, and down to which it goes on.
_BEGIN_AT, _STAY_AT = 1.02, 1.0
_BEGIN_TOGETHER_AT, _STAY_TOGETHER_AT = 1.05, 1.02
# Where nobody waits, the times until all have ended, over those of plain decoding: of the last
# one, and of the last and the average one multiplied.
_BEGIN_LAST, _STAY_LAST = 0.98, 0.99
_BEGIN_BOTH, _STAY_BOTH = 0.95, 1.0
# Steps that go on as planned, without another look: of several requests with drafts and without;
# and plain ones of a request alone.
_MOST_KEPT, _MOST_PLAIN, _MOST_ALONE = 7, 15, 2
# Of what a trial is expected to gain whoever gains least, this part is reckoned with.
_CERTAIN = 0.7
_NEW = 0.125  # of the requests: if more are new, there is another look
_EVEN = 1.5  # lengths that differ less do not call for more drafts than most tokens a second do
_NEAR = 0.75  # rows so few times those known are taken to cost as much


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is done for the requests that may be drafted for."""

    choices: Sequence[Choice]
    confidence: tuple[float, ...] = ()  # by member, below which a draft should end
    may_stay: bool = False  # whether it may be kept for some steps
    trial: Sequence[Choice] | None = None  # in its place, for one step


class DraftControl:
    """Decides for one engine; not thread-safe."""

    def __init__(
        self,
        members: Sequence[tuple[str, int]],
        table: Mapping[int, int] | None = None,
        trees: Collection[str] = (),
        max_contexts: Mapping[str, int] | None = None,
    ) -> None:
        """`members`: the chain's names, each with its own most draft tokens.

        `table`: draft tokens by the number of requests in a step, instead of what pays; the entry
        of the largest number that is not above it counts, else the first one. Nothing is decided
        by what is learnt then: it is for whoever asks, and more is kept of it. `trees`: which
        members draft trees; their draft tokens are nodes, the best ones first. `max_contexts`: from
        how many tokens on a request is not drafted for, by the names of those with such a limit.
        """
        is_measuring = table is not None
        self.cost = StepCost(is_measuring=is_measuring, trees=trees)
        self._table = None if table is None else sorted(table.items())
        self._records = Records(members, trees, max_contexts or {}, is_measuring=is_measuring)
        self._members = self._records.members
        self._chooser = Chooser([name for name, _ in members], self.cost)
        self._trials = Trials(self._chooser, [(m.k, m.is_tree) for m in self._members])
        self._is_drafting = True  # whether to draft was found to be better
        self._num_since_plain = 0  # steps that drafted since the last that did not
        self._step_seconds = 0.0  # of the last step
        self._num_accepted = 0  # draft tokens, of the step that runs
        self._balance = 0.0  # what drafts gained, less what was spent on them, in plain steps
        self._kept: dict[str, DraftPlan] = {}  # what was decided last, by request
        self._trial: dict[str, DraftPlan] | None = None  # what is done once in its place
        self._plain = DraftPlan((0,) * len(members))
        self._nothing = Menu.of([m.history.rates() for m in self._members], [0] * len(members))
        self._num_kept = 0  # steps to come that go on so
        self._kept_for = (0, False)  # how many requests ran then, and whether others waited

    # -- What the engine tells --------------------------------------------------------------------

    def add_engine_step(
        self, scheduled: SchedulerOutput, drafts: DraftTokenIds | None, times: Sequence[float]
    ) -> None:
        """Take a step that ran.

        `times`: when it began, was scheduled, executed and committed, in seconds.
        """
        began, was_scheduled, executed, committed = times[:4]
        num_requests = len(scheduled.num_scheduled_tokens)
        # Not with parts of prompts: there a row is another thing, and drafters take all of them in.
        is_timed = num_requests > 0 and scheduled.num_scheduled_tokens == scheduled.num_output_rows
        seconds = {} if drafts is None else drafts.seconds
        self._step_seconds = 0.0
        if is_timed:
            num_rows = sum(scheduled.num_scheduled_tokens.values())
            around = was_scheduled - began + committed - executed
            self.cost.add_step(num_rows, num_requests, executed - was_scheduled, around)
            self._step_seconds = committed - began + sum(seconds.values())
            self._settle(num_rows, num_requests, sum(seconds.values()))
        self._num_accepted = 0
        everyone = tuple(member.k for member in self._members)
        plans = {}
        for req_id, k in scheduled.num_draft_tokens.items():
            plan = scheduled.draft_plans.get(req_id)
            wished = everyone if plan is None else plan.num_draft_tokens
            plans[req_id] = tuple(min(own, k) for own in wished)
        calls = self._records.add_drafts(plans, drafts)
        for number, (member, call) in enumerate(zip(self._members, calls, strict=True)):
            self._trials.add_called(number, called=call.num_requests > 0)
            if is_timed and call.num_requests and member.name in seconds:
                took = seconds[member.name]
                self.cost.add_drafting(member.name, call.num_requests, call.longest, took)

    def add_verified(self, req_id: str, num_judged: int, accepted: Sequence[int]) -> None:
        """Take how a request's draft did; `num_judged` of its tokens were verified.

        `accepted`: which of them were accepted, by their place, ascending.
        """
        self._num_accepted += len(accepted)
        number = self._records.add_verified(req_id, num_judged, accepted)
        if number is not None:
            enough = min(num_judged, 2) if self._members[number].is_tree else num_judged
            self._trials.add_verified(number, went_well=len(accepted) >= enough)

    def forget(self, req_id: str) -> None:
        """Forget a request; what its drafts said of the proposers stays, and how long it got."""
        self._records.forget(req_id)

    def _settle(self, num_rows: int, num_requests: int, drafting: float) -> None:
        """Set off what a step gained by drafts against what it and its drafting took for them."""
        plain = self.cost.step(num_requests, num_requests)
        full = self.cost.step(num_rows, num_requests)
        assert plain is not None
        assert full is not None
        if plain <= 0:  # a clock that stands still
            return
        gain = self._num_accepted / num_requests * plain - max(0.0, full - plain) - drafting
        balance = self._balance + gain / plain + _FOR_HOPE
        self._balance = max(-_MOST_BALANCE, min(balance, _MOST_BALANCE))

    # -- What it decides --------------------------------------------------------------------------

    def decide(self, requests: Sequence[Request], num_waiting: int = 0) -> None:
        """Set the `draft_plan` of the requests that may run in the next step.

        `num_waiting`: how many others wait for one of these to end.
        """
        drafting = [request for request in requests if request.may_draft]
        if not drafting:
            return
        if self._table is not None:
            self._look_up(drafting, len(requests))
            return
        if self._step_seconds:
            self._trials.add_step(self._step_seconds)
        if not self._goes_on(drafting, len(requests), num_waiting):
            self._look(requests, drafting, num_waiting)
        now, self._trial = self._trial or self._kept, None
        drafts = False
        for request in drafting:
            plan = now.get(request.req_id)
            if plan is None:
                self._records.know(request)
                plan = self._plain
            elif plan is not self._plain:
                drafts = True
            request.draft_plan = plan
        self._num_since_plain = self._num_since_plain + 1 if drafts else 0

    def _goes_on(self, drafting: Sequence[Request], num_requests: int, num_waiting: int) -> bool:
        """Whether this step goes on as the last one, without another look."""
        if not self._num_kept:
            return False
        before, others_waited = self._kept_for
        num_new = sum(request.req_id not in self._kept for request in drafting)
        if num_new > _NEW * num_requests or num_requests < before * (1 - _NEW):
            return False
        if others_waited != (num_waiting > 0):
            return False
        self._num_kept -= 1
        return True

    def _look(
        self, requests: Sequence[Request], drafting: Sequence[Request], num_waiting: int
    ) -> None:
        """Decide anew."""
        num_requests = len(requests)
        hope = _HOPE if num_requests == 1 and self._balance > 0 else 0.0
        is_draining = num_requests > 1 and not num_waiting
        menus = self._records.menus(drafting, hope, is_careful=is_draining)
        left = None
        if is_draining:
            others = [request for request in requests if not request.may_draft]
            left = [self._records.lengths.left(request) for request in (*drafting, *others)]
        untried = self._records.untried(drafting[0]) if num_requests == 1 else []
        decision = self._decide(menus, num_requests, left, untried)
        # A node or token less likely than a row is worth is left out, where that is exact: see
        # the chain of proposers.
        self._kept = self._plans(drafting, decision.choices, decision.confidence)
        if decision.trial is not None:
            self._trial = self._plans(drafting, decision.trial, decision.confidence)
        self._num_kept = 0
        if decision.may_stay:
            # What is done for requests of which little is known is looked at again soon.
            asked = [
                self._records.num_verified(request)
                for request, choice in zip(drafting, decision.choices, strict=True)
                if choice.rows
            ]
            most = min(_MOST_KEPT, *asked) if asked else _MOST_PLAIN
            self._num_kept = min(num_requests - 1, most)
            if num_requests == 1 and not asked and decision.trial is None:
                self._num_kept = _MOST_ALONE
        self._kept_for = (num_requests, num_waiting > 0)

    def _plans(
        self, requests: Sequence[Request], choices: Sequence[Choice], confidence: tuple[float, ...]
    ) -> dict[str, DraftPlan]:
        return {
            request.req_id: DraftPlan(choice.num_draft_tokens, confidence)
            if any(choice.num_draft_tokens)
            else self._plain
            for request, choice in zip(requests, choices, strict=True)
        }

    def expected(self, num_requests: int, k: int | None = None) -> Plan | None:
        """Return what drafting brings new requests at the best length, or at a given one.

        None: not enough was measured.
        """
        own = Menu.of([m.history.rates() for m in self._members], [m.k for m in self._members])
        if k is None:
            return self._chooser.best([own] * num_requests, num_requests)
        choice = own.choice([k] * len(self._members))
        return self._chooser.plan([choice] * num_requests, num_requests)

    @property
    def members(self) -> list[tuple[str, int]]:
        """The chain's names in their order, each with its own most draft tokens."""
        return [(member.name, member.k) for member in self._members]

    def rates(self, proposer: str) -> Rates:
        """Return how far a proposer's drafts get."""
        return self._members[self._records.numbers[proposer]].history.rates()

    def _look_up(self, requests: Sequence[Request], num_requests: int) -> None:
        assert self._table is not None
        k = self._table[0][1]
        for number, entry in self._table:
            if number <= num_requests:
                k = entry
        plan = DraftPlan(tuple(min(k, member.k) for member in self._members))
        for request in requests:
            self._records.know(request)
            request.draft_plan = plan

    def _decide(
        self,
        menus: Sequence[Menu],
        num_requests: int,
        left: Sequence[float] | None,
        untried: Sequence[int],
    ) -> _Decision:
        """Return what to do for each request.

        `left`: how many tokens each of all still gets; None: it does not matter. `untried`:
        members of which nothing is known with a request that runs alone.
        """
        nothing = [self._nothing.choice(self._plain.num_draft_tokens)] * len(menus)
        plain = self._chooser.plan(nothing, num_requests)
        if plain is None:  # at the very start
            everything = [menu.choice([member.k for member in self._members]) for menu in menus]
            return _Decision(everything if num_requests == 1 else nothing)
        learnt = self._knows_plain(num_requests)
        every = _ALONE_EVERY if num_requests == 1 else _LEARNING_PLAIN_EVERY
        if not learnt and self._num_since_plain >= every - 1:
            return _Decision(nothing)
        found = self._chooser.best(menus, num_requests)
        if found is None:
            return _Decision(nothing)
        if left is None:
            best, other, lost = self._most_tokens(plain, found, num_requests)
        else:
            best, other, lost = self._drain(menus, plain, found, left)
        trial = None
        if learnt:
            trial = self._trials.next(menus, best, other, lost, num_requests, untried)
        choices = self._short(menus, best.choices, num_requests) if best.drafts else nothing
        return _Decision(
            choices,
            self._chooser.confidence(
                found, [member.is_tree for member in self._members], num_requests
            ),
            may_stay=learnt and (choices is best.choices or not best.drafts),
            trial=None if trial is None else self._short(menus, trial.choices, num_requests),
        )

    def _most_tokens(
        self, plain: Plan, found: Plan, num_requests: int
    ) -> tuple[Plan, Plan, Callable[[Plan], float]]:
        """Return whether to draft or not, by tokens per second; the other; what a step loses."""
        begin, stay = _BEGIN_AT, _STAY_AT
        if num_requests > 1:
            begin, stay = _BEGIN_TOGETHER_AT, _STAY_TOGETHER_AT
        least = stay if self._is_drafting else begin
        self._is_drafting = found.rate >= least * plain.rate
        best, other = (found, plain) if self._is_drafting else (plain, found)

        def lost(trial: Plan) -> float:
            return trial.seconds - trial.tokens / best.rate

        return best, other, lost

    def _drain(
        self, menus: Sequence[Menu], plain: Plan, found: Plan, left: Sequence[float]
    ) -> tuple[Plan, Plan, Callable[[Plan], float]]:
        """Return the best plan and another one where nobody waits, and what a step of one loses."""
        chooser, num_requests = self._chooser, len(left)
        until = look_ahead(chooser, plain.choices, left)
        at_last = (_STAY_LAST if self._is_drafting else _BEGIN_LAST) * until.last
        at_both = (_STAY_BOTH if self._is_drafting else _BEGIN_BOTH) * until.cost
        best, best_until, best_cost = plain, until, at_both
        candidates = [found.choices]
        if found.rate > plain.rate or max(left) > _EVEN * min(left):
            candidates += other_plans(chooser, menus, left, found)
        for choices in candidates:
            then = look_ahead(chooser, choices, left)
            if then.last <= at_last and then.cost < best_cost:
                plan = found
                if choices is not found.choices:
                    weighed = chooser.plan(choices, num_requests)
                    assert weighed is not None
                    plan = weighed
                best, best_until, best_cost = plan, then, then.cost
        self._is_drafting = best.drafts

        def lost(trial: Plan) -> float:
            if trial is plain:
                return trial.seconds * (1 - best_until.last / until.last)
            # What matters is who ends last: that may be who gains least, or less than is expected.
            gains = min(choice.tokens for choice in trial.choices) if trial is found else 0.0
            return trial.seconds - best.seconds * (1 + _CERTAIN * gains)

        return best, found if best is plain else plain, lost

    def _knows_plain(self, num_requests: int) -> bool:
        """Whether the seconds of plain steps are known well enough."""
        verifying = self.cost.verifying
        if verifying.num_samples(num_requests) >= _ENOUGH:
            return True
        points = verifying.points()
        return num_requests > 1 and len(points) > 1 and points[0][0] * _NEAR <= num_requests

    def _short(
        self, menus: Sequence[Menu], choices: Sequence[Choice], num_requests: int
    ) -> Sequence[Choice]:
        """Have members draft less where what is planned is too much for what is known.

        A token each for a step now and then, where their time is known for one length only. And
        no more than twice as many rows as there ever were, where several requests run.
        """
        is_turn = self._num_since_plain % 3 == 1
        most = [
            1 if is_turn and not self.cost.knows_lengths(member.name, len(menus)) else member.k
            for member in self._members
        ]
        num_drafted = sum(choice.rows for choice in choices)
        room = max(2 * self.cost.verifying.most - num_requests, 1)
        if num_requests > 1 and num_drafted > room:
            longest = max(max(choice.num_draft_tokens) for choice in choices)
            most = [min(k, max(1, int(longest * room / num_drafted))) for k in most]
        if all(k == member.k for k, member in zip(most, self._members, strict=True)):
            return choices
        return [
            menu.choice([*map(min, choice.num_draft_tokens, most)])
            for menu, choice in zip(menus, choices, strict=True)
        ]
