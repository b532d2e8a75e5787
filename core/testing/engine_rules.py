"""Rules on a proposer in an engine: the texts are plain decoding's, in all conditions.

The engine runs tiny models and is strict: a proposer's fault stops it. Texts are compared with
plain decoding's, drafts with those of a run without the condition: a wrong draft changes no text,
so texts alone would not show a proposer that goes astray.
"""

from __future__ import annotations

from collections.abc import Sequence

from foresay import SamplingParams
from foresay.core.testing.driver import check
from foresay.core.testing.models import MAX_MODEL_LEN
from foresay.core.testing.state_rules import StateRules
from foresay.core.testing.subject import Drafts, Prompts, Run, Texts, not_applicable

_MAX_LENGTH = 72
_CHUNK = 3
_ADVICE = "A draft depends on its request's own tokens and state, which `release` forgets"


class EngineRules(StateRules):
    """What is true of a proposer in use."""

    def prompts(self) -> Prompts:
        """Return the prompts that the engine is run on: different ones, all repeat themselves."""
        return [self.text(i, length) for i, length in enumerate((9, 4, 7, 21))]

    def test_greedy_texts_are_plain_decodings(self) -> None:
        """At temperature 0 every model's texts are those of plain decoding, token for token."""
        for model in self.models():
            self.run_and_compare(model, self.prompts(), self.greedy(len(self.prompts())))

    def test_seeded_texts_are_plain_decodings(self) -> None:
        """At temperature 1 a seed gives the text that it gives in plain decoding."""
        for model in self.models():
            self.run_and_compare(model, self.prompts(), self.seeded(len(self.prompts())))

    def test_unseeded_requests_are_served(self) -> None:
        """At temperature 1 without a seed, under every rule of verification, nothing goes wrong."""
        own = SamplingParams(temperature=1.0, max_tokens=self.num_output_tokens)
        params = [own] * len(self.prompts())
        for rule in ("coupled", "rejection", "block") if self.needs.sampled else ("auto",):
            self.run(self.first_model, self.prompts(), params, verification=rule)

    def test_prompt_chunks_change_nothing(self) -> None:
        """A prompt computed in chunks gets no draft before it is complete, then the same ones."""
        prompts = self.prompts()
        params = self.both(len(prompts))
        whole = self.run_and_compare(self.first_model, prompts, params)
        chunked = self.run_and_compare(
            self.first_model, prompts, params, chunked_prefill_size=_CHUNK
        )
        check(
            not any(chunked.chunk_drafts),
            f"it drafted {chunked.chunk_drafts} for prompts that were not complete; k was 0",
        )
        self.same_drafts(
            chunked.drafts, whole.drafts, f"prompts came in chunks of {_CHUNK}, and at once"
        )

    def test_a_prefix_hit_changes_nothing(self) -> None:
        """The same prompts again, found in the prefix cache: the same texts and drafts."""
        prompts = self.prompts()
        params = self.both(len(prompts))
        plain = self.plain(self.first_model, prompts, params)
        run = self.run(self.first_model, prompts, params, rounds=2)
        check(run.stats.num_cached_tokens > 0, "the second round found no cached prefix")
        self.same_texts(run.texts, [*plain, *plain], "the prompts came twice")
        for (history, k), drafts in run.drafts.items():
            check(
                len(drafts) == 1 or self.remembers_requests,
                f"the same prompts came twice: after {[*history]}, k={k}, it drafted "
                f"{' and '.join(map(str, drafts))}. {_ADVICE}",
            )

    def test_preemption_changes_nothing(self) -> None:
        """In a pool too small for all, requests are preempted and resumed: the same texts."""
        prompts = [self.text(i, 12) for i in range(4)]
        params = self.both(len(prompts))
        length = 12 + self.num_output_tokens
        ample = self.run_and_compare(self.first_model, prompts, params, max_model_len=length)
        small = self.run_and_compare(
            self.first_model, prompts, params, max_model_len=length, num_blocks=length // 4 + 3
        )
        check(small.stats.num_preemptions > 0, "nothing was preempted")
        if not self.learns_from_steps:
            common = ample.drafts.keys() & small.drafts.keys()  # it came by other histories, too
            self.same_drafts(
                {key: small.drafts[key] for key in common},
                {key: ample.drafts[key] for key in common},
                "requests were preempted and resumed, and not",
            )

    def test_a_mixed_batch_changes_nothing(self) -> None:
        """Greedy and seeded requests, short ones, ones that want no drafts or few: as if alone."""
        prompts = [*self.prompts(), self.text(9)]
        common = {"max_tokens": self.num_output_tokens}
        params = [
            SamplingParams(temperature=0.0, **common),
            SamplingParams(temperature=1.0, seed=5, **common),
            SamplingParams(temperature=0.0, num_speculative_tokens=0, **common),
            SamplingParams(temperature=0.7, top_k=8, seed=6, num_speculative_tokens=1, **common),
            SamplingParams(temperature=0.7, seed=6, max_tokens=1),
        ]
        together = self.run_and_compare(self.first_model, prompts, params)
        alone = self.run_and_compare(self.first_model, prompts, params, one_by_one=True)
        self.same_drafts(together.drafts, alone.drafts, "requests ran together, and each alone")

    def test_texts_go_to_the_last_position(self) -> None:
        """A request may fill the target's last position, and drafts never go past it."""
        prompts = [self.text(i, _MAX_LENGTH - 18 - i) for i in range(2)]
        params = SamplingParams(temperature=0.0, max_tokens=_MAX_LENGTH, ignore_eos=True)
        run = self.run_and_compare(
            self.first_model, prompts, [params] * 2, max_model_len=_MAX_LENGTH
        )
        lengths = [len(prompt) + len(text) for prompt, text in zip(prompts, run.texts, strict=True)]
        check(lengths == [_MAX_LENGTH] * 2, f"the texts end at positions {lengths}")

    def test_a_prediction_changes_no_text(self) -> None:
        """With the text itself as the prediction, or another one: the texts are the same."""
        if not self.needs.prediction:
            not_applicable("it reads no predictions")
        prompts = self.prompts()
        plain_params = self.both(len(prompts))
        texts = self.plain(self.first_model, prompts, plain_params)
        for predictions in (texts, texts[1:] + texts[:1], [text[4:] for text in texts]):
            params = [
                one.model_copy(update={"prediction": tuple(ids) or None})
                for one, ids in zip(plain_params, predictions, strict=True)
            ]
            run = self.run(self.first_model, prompts, params)
            self.same_texts(run.texts, texts, "requests came with predictions")

    def run_and_compare(
        self,
        model: str,
        prompts: Prompts,
        params: Sequence[SamplingParams],
        *,
        one_by_one: bool = False,
        **settings: int,
    ) -> Run:
        """Run the prompts, and fail unless the texts are those of plain decoding."""
        __tracebackhide__ = True
        length = settings.get("max_model_len", MAX_MODEL_LEN)
        plain = self.plain(model, prompts, params, max_model_len=length)
        run = self.run(model, prompts, params, one_by_one=one_by_one, **settings)
        self.same_texts(run.texts, plain, f"model {model}, {settings or 'usual settings'}")
        return run

    def same_texts(self, got: Texts, expected: Texts, what: str) -> None:
        """Fail unless the texts are equal."""
        __tracebackhide__ = True
        for i, (text, plain) in enumerate(zip(got, expected, strict=True)):
            check(
                text == plain,
                f"{what}: text {i} is {text}, plain decoding gives {plain}. Drafts cannot do that: "
                "the proposer has changed something that is not its own, such as the target's "
                "config or weights, or a global setting of torch's",
            )

    def same_drafts(self, got: Drafts, expected: Drafts, what: str) -> None:
        """Fail unless two runs made the same drafts for the same histories.

        Who remembers requests may draft otherwise where they end in another order.
        """
        __tracebackhide__ = True
        if self.remembers_requests:
            return
        for history, k in sorted(got.keys() | expected.keys()):
            drafts = got.get((history, k)), expected.get((history, k))
            self.same(*drafts, f"{what}; after {[*history]}, k={k}", _ADVICE)

    def greedy(self, num_requests: int) -> list[SamplingParams]:
        """Return parameters for so many greedy requests."""
        return [SamplingParams(temperature=0.0, max_tokens=self.num_output_tokens)] * num_requests

    def seeded(self, num_requests: int) -> list[SamplingParams]:
        """Return parameters for so many requests at temperature 1, each with its own seed."""
        return [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=self.num_output_tokens)
            for seed in range(num_requests)
        ]

    def both(self, num_requests: int) -> list[SamplingParams]:
        """Return parameters for so many requests, greedy and seeded by turns."""
        pairs = zip(self.greedy(num_requests), self.seeded(num_requests), strict=True)
        return [pair[i % 2] for i, pair in enumerate(pairs)]
