"""The conformance suite: subclass `ProposerConformance` in a test, name your proposer, run pytest.

    from foresay.core.testing import ProposerConformance

    class TestConformance(ProposerConformance):
        proposer_name = "my_proposer"

Each test method is one rule of the proposer contract; its docstring says the rule, and its failure
what is wrong and what to do. They need no weights and no network: target models are tiny and
random. Imported by tests only; needs pytest.
"""

from __future__ import annotations

from foresay.core.testing.engine_rules import EngineRules
from foresay.core.testing.models import TINY_MODELS, tiny_gpt2, tiny_llama
from foresay.core.testing.spec_rules import SpecRules

__all__ = ["TINY_MODELS", "ProposerConformance", "tiny_gpt2", "tiny_llama"]


class ProposerConformance(EngineRules, SpecRules):
    """All rules. What a subclass may set:

    - `proposer_name` (must be set): the name that the plugin registers, "module:Class", or a class.
    - `settings`: the proposer's own settings, a dict; `drafter`: its weights, a registered name or
      a folder.
    - `learns_from_steps = True`: drafts depend by design on more than the history, for instance on
      how earlier drafts fared. What depends on the history alone is then not asked for.
    - `remembers_requests = True`: drafts depend by design on requests that ended, too. Then they
      need not be those of a proposer that saw no other request, but what is remembered must have
      a bound: choose `settings` under which 60 requests of 15 tokens reach it.
    - `models()`: how to build the target models, by name, if the tiny ones do not suit; the first
      is also what the proposer is shown without an engine.
    - `text(seed, length)`: histories to draft for; `prompts()`: prompts for whole engines, and
      `num_output_tokens`: how long the texts are that they get.
    """
