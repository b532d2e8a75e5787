"""One process, or several under torchrun: who prepares, and how the others wait for it."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

# Answering prompts and keeping states takes as long as it takes; the others wait.
_PATIENCE = timedelta(days=30)


class Processes:
    """The processes of this training."""

    def __init__(self, device: str) -> None:
        """`device`: "auto", "cpu" or "cuda...", as the engine takes it."""
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        self._state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
        self.count: int = self._state.num_processes
        self.is_first: bool = self._state.is_main_process
        # With several GPUs each process has its own.
        has_own = self.count > 1 and not on_cpu
        self.device = str(self._state.device) if has_own else device

    def wait(self) -> None:
        """Return when all processes have come here."""
        self._state.wait_for_everyone()

    def end(self) -> None:
        """Let go of the others; alone, nothing happens."""
        if self.count > 1:
            self._state.destroy_process_group()
