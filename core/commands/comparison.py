"""A drafter beside its target, as far as files tell: sizes, layer taps, lengths, vocabularies.

Knows numbers and tokens, not where they come from; that is `drafter_files`. It finds what speaks
against the pair, and does not judge it: how much of the drafts is accepted does (`verdict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the files of a model, or of a drafter, say of it. None: they do not."""

    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None  # of a drafter: its target's, as it was made for
    draft_vocab_size: int | None = None  # of a drafter that knows fewer tokens than its target
    num_parameters: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A token id that means one thing to the drafter and another to the target."""

    token_id: int
    drafter: str
    target: str


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """What the ids mean that two tokenizers both have."""

    num_compared: int
    num_different: int
    first: Difference | None  # the lowest id that differs; of ordinary tokens, if one does
    only_special: bool  # those that differ are end-of-text marks and the like


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drafter and a target."""

    drafter: Sizes
    target: Sizes
    vocabulary: VocabularyComparison | None
    no_vocabulary: str = ""  # why there is nothing to compare
    taps: tuple[int, ...] = ()  # residual streams of the target that the drafter takes
    takes_hidden_states: bool = False  # of the target, so that their sizes must agree
    made_for: str | None = None  # the target that it says it was made for

    def rows(self) -> list[list[str]]:
        """Return the sizes as rows: what, the drafter's, the target's."""
        own, theirs = self.drafter, self.target
        rows = [
            ["hidden size", _count(own.hidden_size), _count(theirs.hidden_size)],
            ["layers", _count(own.num_layers), _count(theirs.num_layers)],
            ["vocabulary", _count(own.vocab_size), _count(theirs.vocab_size)],
            ["draft vocabulary", _count(own.draft_vocab_size or own.vocab_size), ""],
            ["parameters", _count(own.num_parameters), _count(theirs.num_parameters)],
            ["longest text", _count(own.max_length), _count(theirs.max_length)],
        ]
        if self.taps:
            has = "n/a" if theirs.num_layers is None else f"0 to {theirs.num_layers}"
            rows.append(["layer taps", _listed(self.taps), has])
        return rows

    def vocabularies(self) -> str:
        """Say in a sentence how the vocabularies compare."""
        found = self.vocabulary
        if found is None:
            own, theirs = self.drafter.vocab_size, self.target.vocab_size
            if own is None or theirs is None:
                sizes = "nor do its files say how many tokens it knows"
            elif own == theirs:
                sizes = f"by size they agree ({own:,} tokens)"
            else:
                sizes = f"by size they differ ({own:,} tokens, and the target's {theirs:,})"
            return f"vocabularies: {self.no_vocabulary}; {sizes}"
        if found.first is None:
            return f"vocabularies: all {found.num_compared:,} ids that both have mean the same"
        but = "the same but for special tokens" if found.only_special else "another tokenizer"
        return f"vocabularies: {but}: {_differing(found)}"

    def missing_taps(self) -> tuple[int, ...]:
        """Return the streams that the target does not have."""
        most = self.target.num_layers
        return tuple(tap for tap in self.taps if tap < 0 or (most is not None and tap > most))

    def doubts(self) -> list[str]:
        """Return what speaks against the pair, the strongest first."""
        own, theirs = self.drafter, self.target
        doubts = []
        if self.takes_hidden_states and _differ(own.hidden_size, theirs.hidden_size):
            doubts.append(
                f"it was made for another model: its hidden size is {_count(own.hidden_size)}, the "
                f"target's is {_count(theirs.hidden_size)}"
            )
        if self.missing_taps():
            doubts.append(
                f"it was made for a deeper model: it takes the streams entering layers "
                f"{_listed(self.taps)}, and the target has {_count(theirs.num_layers)} layers"
            )
        found = self.vocabulary
        if found is not None and found.first is not None and not found.only_special:
            doubts.append(f"its tokenizer is not the target's: {_differing(found)}")
        elif found is None and _differ(own.vocab_size, theirs.vocab_size):
            doubts.append(
                f"it was made for a vocabulary of {_count(own.vocab_size)} tokens, and the "
                f"target's has {_count(theirs.vocab_size)}"
            )
        return doubts

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        found = self.vocabulary
        return {
            "drafter": asdict(self.drafter),
            "target": asdict(self.target),
            "layer_taps": list(self.taps),
            "missing_layer_taps": list(self.missing_taps()),
            "made_for": self.made_for,
            "vocabulary": None if found is None else asdict(found),
        }


def compare_vocabularies(
    own: Mapping[str, int], theirs: Mapping[str, int], special_ids: Collection[int]
) -> VocabularyComparison:
    """Compare two tokenizers' tokens by id. `special_ids`: of tokens that are special in either.

    Ids that only one of them has are no difference: vocabularies grow, and are padded.
    """
    own_by_id, their_by_id = _by_id(own), _by_id(theirs)
    shared = sorted(own_by_id.keys() & their_by_id.keys())
    differing = [i for i in shared if own_by_id[i] != their_by_id[i]]
    ordinary = [i for i in differing if i not in special_ids]
    first = next(iter(ordinary or differing), None)
    return VocabularyComparison(
        num_compared=len(shared),
        num_different=len(differing),
        first=None if first is None else Difference(first, own_by_id[first], their_by_id[first]),
        only_special=bool(differing) and not ordinary,
    )


def _by_id(tokens: Mapping[str, int]) -> dict[int, str]:
    return {token_id: token for token, token_id in tokens.items()}


def _differing(found: VocabularyComparison) -> str:
    assert found.first is not None
    return (
        f"id {found.first.token_id} is {found.first.drafter!r} in the drafter's and "
        f"{found.first.target!r} in the target's ({found.num_different:,} of "
        f"{found.num_compared:,} ids differ)"
    )


def _differ(own: int | None, theirs: int | None) -> bool:
    return own is not None and theirs is not None and own != theirs


def _count(number: int | None) -> str:
    return "n/a" if number is None else f"{number:,}"


def _listed(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))
