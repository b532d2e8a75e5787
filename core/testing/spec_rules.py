"""Rules on a proposer's face: its spec, its settings, and what importing its plugin costs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

from foresay.core.plugins import GROUP
from foresay.core.proposer import ProposerConfig
from foresay.core.testing.driver import check, fail
from foresay.core.testing.subject import Subject, not_applicable

_HEAVY = ("torch", "transformers", "triton")


class SpecRules(Subject):
    """What is true of a proposer before it drafts anything."""

    def plugin_module(self) -> str | None:
        """Return the module that the plugin's entry point names; None for a bare class."""
        offering = [
            record for record in self.plugins().records if self.spec.name in record.proposers
        ]
        named = {record.entry_point for record in offering}
        found = [entry.module for entry in entry_points(group=GROUP) if entry.name in named]
        return found[0] if found else None

    def test_the_spec_is_sound(self) -> None:
        """A spec names a config type, says what it needs as a `Needs`, and builds a proposer."""
        config_type: object = self.spec.config_type
        check(
            isinstance(config_type, type) and issubclass(config_type, ProposerConfig),
            f"config_type is {config_type!r}; it must be ProposerConfig or a subclass of it",
        )
        for limit in ("max_draft_tokens", "max_context"):
            value = getattr(self.needs, limit)
            check(
                value is None or (isinstance(value, int) and value >= 1),
                f"Needs.{limit} is {value!r}; it must be at least 1, or None for no limit",
            )
        proposer = self.fresh()
        check(
            callable(getattr(proposer, "propose", None)),
            f"build(config) returned {proposer!r}, which has no method propose(self, batch)",
        )
        check(
            self.needs == self.spec.needs(self.config, self.model(self.first_model).config),
            "needs(config, target_config) gave two answers to one question; it must depend on its "
            "arguments alone",
        )

    def test_a_misspelt_setting_is_refused(self) -> None:
        """A setting that does not exist is an error, not ignored; so is changing one later."""
        known = {**self.settings, "num_speculativ_tokens": 3}
        try:
            self.spec.config_type(**known)
        except ValueError:
            pass
        else:
            fail(
                "the setting 'num_speculativ_tokens', which does not exist, was accepted: a user's "
                "typing error would go unnoticed. Leave ProposerConfig's model_config as it is "
                "(extra='forbid')"
            )
        try:
            self.config.num_speculative_tokens = 1
        except ValueError:
            return
        fail(
            "a setting could be changed after the config was built: leave ProposerConfig's "
            "model_config as it is (frozen=True)"
        )

    def test_every_setting_is_described(self) -> None:
        """Each setting has a description: it feeds the help and the error messages."""
        missing = [
            name
            for name, field in self.spec.config_type.model_fields.items()
            if not (field.description or "").strip()
        ]
        check(
            not missing,
            f"settings without a description: {', '.join(missing)}; give each one "
            '`Field(..., description="...")`',
        )

    def test_importing_the_plugin_imports_no_torch(self) -> None:
        """`foresay --help` loads every plugin: its module and its hooks must stay light."""
        module = self.plugin_module()
        if module is None:
            not_applicable("a bare class has no plugin module")
        code = (
            f"import sys, {module}\n"
            f"hook = getattr({module}, 'foresay_register_proposers', None)\n"
            "if hook: list(hook())\n"
            f"print(*sorted(set({_HEAVY!r}) & set(sys.modules)))"
        )
        done = subprocess.run(  # noqa: S603  # our own interpreter and code
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        check(done.returncode == 0, f"importing {module} failed: {done.stderr.strip()}")
        check(
            not done.stdout.strip(),
            f"importing {module} imports {done.stdout.strip()}, so `foresay --help` takes seconds: "
            "import them in the module that the spec's `build` imports",
        )
