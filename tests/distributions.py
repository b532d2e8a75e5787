"""Writes small distributions that are as installed as pip would leave them: module and metadata."""

from __future__ import annotations

import textwrap
from pathlib import Path

OFFER_PROPOSER = """
    from foresay import hookimpl
    from foresay.core.proposer import ProposerConfig, ProposerSpec

    @hookimpl
    def foresay_register_proposers():
        return [ProposerSpec(name="{name}", config_type=ProposerConfig, build=object)]
"""


def write_distribution(
    site: Path,
    name: str,
    source: str,
    *,
    version: str = "1.0",
    entry_point: str | None = None,
    value: str | None = None,
) -> None:
    """Install distribution `name` with one module of that name (`-` as `_`) into `site`.

    Its entry point in the group `foresay` has the module's name and value unless told otherwise.
    """
    module = name.replace("-", "_")
    files = {
        f"{module}.py": textwrap.dedent(source),
        f"{module}-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        ),
        f"{module}-{version}.dist-info/entry_points.txt": (
            f"[foresay]\n{entry_point or module} = {value or module}\n"
        ),
        f"{module}-{version}.dist-info/INSTALLER": "pip\n",
    }
    files[f"{module}-{version}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    for path, text in files.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
