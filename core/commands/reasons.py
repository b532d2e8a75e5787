"""Why speculation helps or does not, in a sentence: what `foresay doctor` concludes.

Knows what was found, and words it; measures nothing. Where it does not help, the cause is what
would make it help if it were otherwise: if drafting were free, if rows were, or if every step had
a draft; if nothing of these would do, or hardly anything is accepted, it is the acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foresay.core.commands.diagnosis import Economy, Expected, Speed
from foresay.core.commands.verdict import in_words

Cause = Literal[
    "helps",
    "some_tasks",
    "acceptance",
    "drafting",
    "rows",
    "few_drafts",
    "no_drafts",
    "not_asked",
    "faults",
    "prompts",
    "unclear",
]

HELPS = 1.05  # times plain decoding: less is within what two runs of the same differ by
SLOWER = 0.97
_CLEARLY = 1.1  # of a task
_LOW = 0.3  # acceptance of the first draft token
_DEAR = 0.3  # of a plain step, for a row more of each request
_WORTH_TELLING = 0.005  # of a plain step
_SELDOM = 0.5  # steps that have a draft
_ENOUGH = 20  # drafts: with fewer, a rate says little
_FAR = 1.15  # between what is expected and what was measured
_WIDE = 1.2  # between the least and the most of the pairs
_REMEMBERS = 0.25  # more accepted of the same prompt, when it comes again


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found of a proposer with a model, on some prompts."""

    economy: Economy
    num_steps: int  # of requests, that drafts were allowed for
    num_drafts: int  # of these steps, those that verified one
    was_asked: bool  # whether the proposer was ever called
    faults: Mapping[str, int] = field(default_factory=dict)
    measured: Speed | None = None  # prompts included; None: it was not measured
    tasks: Mapping[str, Speed] = field(default_factory=dict)
    prompt_share: float = 0.0  # of plain decoding's time, that before the first token
    # How many first draft tokens a step were accepted when prompts came first, and when they came
    # again; None: it is not known.
    first_and_again: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, and what there is to add."""

    helps: bool
    cause: Cause
    text: str
    notes: tuple[str, ...] = ()


def judge(found: Findings) -> Verdict:
    """Say whether speculation helps, and why."""
    broken = _broken(found)
    if broken is not None:
        cause, why = broken
        return Verdict(False, cause, f"speculation does not help here, because {why}")
    economy, best = found.economy, found.economy.best()
    expected = economy.speedup(best)
    times = found.measured.median if found.measured is not None else expected
    good = {task: own for task, own in found.tasks.items() if _is_clear(own)}
    notes = tuple(_notes(found, best, expected))
    credible = expected if found.measured is None else found.measured.credible
    if credible >= HELPS:
        word = f"{times:.2f}x" + (" expected" if found.measured is None else "")
        text = f"speculation helps here: {word}, because {_why_it_helps(economy, best)}"
        return Verdict(True, "helps", text, notes)
    cause, why = _why_not(found, best, expected)
    shown = f" ({times:.2f}x)" if found.measured is not None else f" ({times:.2f}x expected)"
    if good:
        names = listed([f"{task} ({own.median:.2f}x)" for task, own in good.items()])
        text = f"speculation helps here for {names}, not over all tasks{shown}, because {why}"
        return Verdict(False, "some_tasks", text, notes)
    head = "speculation does not help here"
    if times < SLOWER:
        head = "speculation is slower than plain decoding here"
    return Verdict(False, cause, f"{head}{shown}, because {why}", notes)


def _broken(found: Findings) -> tuple[Cause, str] | None:
    """Say why there were no drafts; None: there were some, and the proposer is still there."""
    if "dropped" in found.faults:
        return "faults", (
            f"the proposer failed and was turned off ({in_words(found.faults)}): every step after "
            "that was a plain one"
        )
    if found.num_drafts:
        return None
    if found.faults:
        return "faults", f"no draft came of it but faults ({in_words(found.faults)})"
    if not found.was_asked:
        return "not_asked", (
            "the proposer was never asked for a draft: the prompts leave no room in the longest "
            "text that it takes"
        )
    return "no_drafts", f"the proposer never had a draft, in {found.num_steps} steps"


def _why_it_helps(economy: Economy, best: Expected) -> str:
    share, holds = economy.first(best.ks)
    if economy.speedup(best) < HELPS:
        return (
            f"foresay drafts only where that pays; up to {counted(best.k, economy.noun)} in every "
            f"step would be {economy.speedup(best):.2f}x"
        )
    accepted = f"{percent(holds)} of the {_firsts(economy)} are accepted"
    if share < 0.95:
        accepted = f"{percent(share)} of the steps have a draft, {accepted}"
    each = " of each request" if economy.num_requests > 1 else ""
    row = f"a row more{each} costs {percent(economy.row_share(best))} of a step"
    drafting = percent(best.drafting_seconds / economy.plain.seconds)
    return f"{accepted}, {row} and drafting up to {counted(best.k, economy.noun)} {drafting}"


def _why_not(found: Findings, best: Expected, expected: float) -> tuple[Cause, str]:
    economy = found.economy
    if expected >= HELPS:  # and yet it was measured not to
        return _lost_elsewhere(found, expected)
    share, holds = economy.first(best.ks)
    # What does not pay is compared with what would be needed at least.
    easiest = best if expected >= 1 else economy.easiest()
    candidates: dict[Cause, float] = {}
    if holds >= _LOW:
        candidates["drafting"] = economy.best_if(free_drafting=True)
        candidates["rows"] = economy.best_if(free_rows=True)
    if share < _SELDOM and expected >= 1:
        candidates["few_drafts"] = economy.best_if(always=True)
    cause: Cause = max(candidates, key=lambda name: candidates[name], default="acceptance")
    if candidates.get(cause, 0.0) < HELPS:
        cause = "acceptance"
        if easiest is None:
            rows = best.step_seconds - economy.plain.step_seconds
            cause = "rows" if rows > best.drafting_seconds else "drafting"
    if cause == "drafting":
        return cause, _drafting(economy, best, candidates.get(cause, 0.0))
    if cause == "rows":
        return cause, _rows(economy, best)
    if cause == "few_drafts":
        return cause, (
            f"only {percent(share)} of the steps have a draft; of those there are, "
            f"{percent(holds)} of the {_firsts(economy).replace('draft ', '')} are accepted"
        )
    assert easiest is not None
    return cause, _acceptance(economy, easiest)


def _lost_elsewhere(found: Findings, expected: float) -> tuple[Cause, str]:
    if _with_prompts(expected, found.prompt_share) < HELPS:
        return "prompts", (
            f"{percent(found.prompt_share)} of the time goes to the prompts, which drafts do not "
            f"make faster; after them {expected:.2f}x is expected"
        )
    return "unclear", (
        f"less was measured than costs and acceptance promise ({expected:.2f}x): the answers were "
        "too short or the machine is busy; measure longer (--limit, --max-tokens, --pairs)"
    )


def _acceptance(economy: Economy, step: Expected) -> str:
    has, needed = economy.found(step.ks) or 0.0, economy.break_even(step.ks) or 0.0
    each = " of each request" if economy.num_requests > 1 else ""
    drafting, row = step.drafting_seconds / economy.plain.seconds, economy.row_share(step)
    prices = []
    if drafting >= _WORTH_TELLING:
        prices.append(
            f"drafting ({percent(drafting)} of a step for {counted(step.k, economy.noun)})"
        )
    if row >= _WORTH_TELLING:
        prices.append(f"rows (a row more{each}: {percent(row)})")
    price = listed(prices) or "drafting and rows"
    if has >= needed:
        hardly = f", hardly more than the {percent(needed)} that pay for {price}" if prices else ""
        return f"{percent(has)} of {drafts_of(economy)} are accepted{hardly}"
    return (
        f"{percent(has)} of {drafts_of(economy)} are accepted, and {percent(needed)} would be "
        f"needed to pay for {price}"
    )


def _drafting(economy: Economy, best: Expected, if_free: float) -> str:
    """`if_free`: what the speedup would be then; it says so if that would help."""
    share = best.drafting_seconds / economy.plain.seconds
    takes = f"{percent(share)} of a plain step" if share < 1 else f"{share:.1f} plain steps"
    free = f"; if it took no time, it would be {if_free:.2f}x" if if_free >= HELPS else ""
    return (
        f"drafting takes too long: {counted(best.k, economy.noun)} {takes}, for "
        f"{best.tokens - 1:.2f} tokens more a step{free}"
    )


def _rows(economy: Economy, best: Expected) -> str:
    more = best.rows / economy.num_requests - 1
    number = f"{more:.1f}".removesuffix(".0")
    each = f" for each of {economy.num_requests} requests" if economy.num_requests > 1 else ""
    longer = best.step_seconds / economy.plain.seconds
    return (
        f"rows are what costs: {number} more{each} make{'s' if number == '1' else ''} a step "
        f"{longer:.2f} times as long, for {best.tokens:.2f} times the tokens"
    )


def _notes(found: Findings, best: Expected, expected: float) -> list[str]:
    notes = []
    measured, economy = found.measured, found.economy
    if measured is not None:
        if measured.most > _WIDE * measured.least:
            notes.append(
                f"the pairs of runs range from {measured.least:.2f}x to {measured.most:.2f}x: the "
                "machine is too busy for a firm answer"
            )
        if measured.median >= HELPS > measured.credible:
            notes.append(
                f"{measured.median:.2f}x was measured, which {measured.tokens_per_step:.2f} tokens "
                "a step cannot bring: the machine is too busy"
            )
        promised = _with_prompts(expected, found.prompt_share)
        if expected < SLOWER and expected < measured.median < HELPS:
            notes.append(
                f"foresay notices and drafts little: always to draft would be {expected:.2f}x at "
                "best"
            )
        elif max(promised, measured.median) > _FAR * min(promised, measured.median):
            notes.append(
                f"{promised:.2f}x would be expected, prompts included: drafts are better or worse "
                "from one text to the next, or times vary"
            )
    if found.faults:
        notes.append(f"faults of the proposer: {in_words(found.faults)}")
    weak = [f"{task} ({own.median:.2f}x)" for task, own in found.tasks.items() if _is_slow(own)]
    if weak and measured is not None and measured.median >= HELPS:
        notes.append(f"it is slower for {listed(weak)}")
    if found.num_drafts < _ENOUGH:
        notes.append(
            f"only {found.num_drafts} drafts were verified, too few for a firm answer: raise "
            "--max-tokens or --limit"
        )
    if found.first_and_again is not None:
        first, again = found.first_and_again
        if again - first > _REMEMBERS:
            notes.append(
                f"prompts came more than once, and then {percent(again)} of the first draft tokens "
                f"were accepted, {percent(first)} before: the proposer remembers answers. If yours "
                "do not come again, look at it without its memory (--set)"
            )
    if economy.most > 1 and best.k == economy.most and expected >= HELPS:
        before = economy.speedup(economy.expect([min(k, best.k - 1) for k in best.ks]))
        if expected > 1.02 * before:
            notes.append(f"the longest drafts did best: try a larger -k than {best.k}")
    if expected < HELPS and economy.num_requests > 1 and economy.row_share(best) > _DEAR:
        notes.append("with fewer requests a step, rows cost less: try a smaller --batch-size")
    return notes


def _with_prompts(speedup: float, prompt_share: float) -> float:
    """Return the speedup of whole answers, where only what follows the prompt becomes faster."""
    return 1 / (prompt_share + (1 - prompt_share) / speedup)


def _is_clear(own: Speed) -> bool:
    return own.credible >= _CLEARLY and own.least >= HELPS


def _is_slow(own: Speed) -> bool:
    return own.median < SLOWER


def drafts_of(economy: Economy) -> str:
    """Word what is drafted."""
    return "draft tokens" if economy.noun == "token" else "nodes"


def _firsts(economy: Economy) -> str:
    return "first draft tokens" if economy.noun == "token" else "best nodes"


def percent(part: float) -> str:
    """Word a part of something."""
    return "under 1%" if 0 < part < 0.005 else f"{part:.0%}"


def counted(number: int, noun: str) -> str:
    """Word a number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Word an enumeration."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
