"""Trial passes that show whether a transformers model is exact over the paged KV cache.

What a model declares does not say how often it calls its attention, under which mask, or what else
connects its rows. A few passes on eight tokens show it; `ModelError` says what is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from foresay.core.errors import ModelError, one_line
from foresay.core.worker.attention import AttentionMetadata, AttentionRules
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.transformers_attention import Attention, AttentionCall

# Keywords of attention calls that say nothing new: what masks and inputs hold already, or what
# concerns training and the form of the output.
_KNOWN_KEYWORDS = {"sliding_window", "position_ids", "dropout", "is_causal", "use_cache"}
_LENGTH, _SPLIT = 8, 5  # tokens of the trial text, and where it is cut in two
_FAR = 8192  # a far position, for a model without a limit
# Relative differences that rounding may cause. Rows that mix, or positions that are not heeded,
# cause differences of the order of one.
_TOLERANCE_FLOAT32, _TOLERANCE_LOW = 1e-3, 0.25


class Run(Protocol):
    """Runs the model on rows with an attention of the caller's."""

    def __call__(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [num_tokens]
        output_rows: torch.Tensor,  # [num_output_rows]
        attention: Attention,
    ) -> torch.Tensor:  # [num_output_rows, vocab_size]
        """Return the logits of `output_rows`."""
        ...


@dataclass(slots=True)
class _Recorder:
    """Notes every attention call; attends to nothing, so rows are connected by nothing else."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        num_tokens, num_heads, _ = call.query.shape
        return call.value.new_zeros(num_tokens, num_heads, call.value.shape[2])


@dataclass(frozen=True, slots=True)
class Findings:
    """What the trial passes found out."""

    kv_layout: list[LayerKV]
    num_heads: list[int]  # query heads, by layer
    windows: list[int | None]  # by layer; None: all earlier tokens are visible
    vocab_size: int
    capped: bool  # whether a layer's attention has a soft cap or sinks


class Probe:
    """The trial passes of one model."""

    def __init__(self, name: str, text_config: Any, run: Run, device: torch.device) -> None:
        self._name = name
        self._config = text_config
        self._run = run
        self._device = device
        ids = (torch.arange(_LENGTH) * 37 + 11) % text_config.vocab_size
        self._ids = ids.to(device)

    def refusal(self, reason: str) -> ModelError:
        """Word a reason why the model cannot be run."""
        return ModelError(f"{self._name} cannot be run over a paged KV cache: {reason}")

    def inspect(self, limit: int | None) -> Findings:
        """Look at the model's attention calls; run it under `PROBED`. `limit`: its positions."""
        positions = torch.arange(_LENGTH, device=self._device)
        logits, calls = self._trial(positions)
        if len(logits) != 2:
            raise self.refusal(f"asked for 2 rows of logits it gives {list(logits.shape)}")
        self._check_calls(calls)
        far = positions.clone()
        far[-1] = (limit or _FAR) - 1
        for near, other in zip(calls, self._trial(far)[1], strict=True):
            if _differ(near.key[:-1], other.key[:-1]):
                raise self.refusal(
                    f"in layer {near.layer} a row's keys depend on the other positions of its batch"
                )
        calls = sorted(calls, key=lambda call: int(call.layer))
        return Findings(
            kv_layout=[
                LayerKV(call.key.shape[1], call.key.shape[2], call.value.shape[2]) for call in calls
            ],
            num_heads=[call.query.shape[1] for call in calls],
            windows=[self._window(call) for call in calls],
            vocab_size=logits.shape[-1],
            capped=any(call.softcap is not None or call.sinks is not None for call in calls),
        )

    def check_pieces(
        self,
        layout: Sequence[LayerKV],
        attention: Callable[[KVCache, AttentionMetadata], Attention],
        rules: AttentionRules,
        dtype: torch.dtype,
    ) -> None:
        """Compare a text in one piece with the same in two, beside others; run under `PAGED`."""
        cache = KVCache(layout, 2, _LENGTH, dtype, self._device)
        whole, pieces = np.arange(_LENGTH), np.arange(_LENGTH, 2 * _LENGTH)
        for parts in ([(0, _LENGTH, whole), (0, _SPLIT, pieces)], [(_SPLIT, _LENGTH, pieces)]):
            metadata = AttentionMetadata.build(
                [np.arange(start, end) for start, end, _ in parts],
                [slots[:end] for _, end, slots in parts],
                np.concatenate([slots[start:end] for start, end, slots in parts]),
                cache.null_slot,
                rules,
                self._device,
            )
            ids = torch.cat([self._ids[start:end] for start, end, _ in parts])
            self._try(ids, metadata.positions, attention(cache, metadata))
        for number, layer in enumerate(cache.layers):
            for tensor in (layer.key, layer.value):
                if _differ(tensor[:_LENGTH], tensor[_LENGTH : 2 * _LENGTH]):
                    raise self.refusal(
                        f"layer {number} computes other keys and values for a text in two pieces "
                        "than for the same text in one"
                    )

    def _try(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        rows = torch.arange(2, device=self._device)
        try:
            return self._run(ids, positions, rows, attention)
        except Exception as error:
            raise self.refusal(f"a trial pass raised {one_line(error)}") from error

    def _trial(self, positions: torch.Tensor) -> tuple[torch.Tensor, list[AttentionCall]]:
        recorder = _Recorder()
        return self._try(self._ids, positions, recorder), recorder.calls

    def _check_calls(self, calls: Sequence[AttentionCall]) -> None:
        num_layers = self._config.num_hidden_layers
        if len(calls) < num_layers:
            raise self.refusal(
                f"{num_layers - len(calls)} of its {num_layers} layers never call the attention "
                "that transformers lets us replace"
            )
        layers = [call.layer for call in calls]
        if sorted(map(str, layers)) != sorted(map(str, range(len(calls)))):
            raise self.refusal(
                f"one pass calls the attention of layers {', '.join(map(str, layers))}: not of "
                "each layer once"
            )
        unknown = {
            key
            for call in calls
            for key, value in call.keywords.items()
            if not (key in _KNOWN_KEYWORDS or value is None or value is False)
        }
        if unknown:
            raise self.refusal(
                f"its attention takes {', '.join(map(repr, sorted(unknown)))}, which foresay's "
                "does not know"
            )

    def _window(self, call: AttentionCall) -> int | None:
        """Return a layer's sliding window, or None for full attention: what its mask says."""
        rule = getattr(call.mask, "rule", None)
        if rule is None:
            raise self.refusal(f"attention layer {call.layer} makes a mask of its own")
        declared = call.keywords.get("sliding_window")
        configured = getattr(self._config, "sliding_window", None)
        for window in dict.fromkeys((None, declared, configured)):
            if _is_causal(rule, window, self._device):
                return window
        raise self.refusal(
            f"attention layer {call.layer} sees something else than all earlier tokens or a "
            "sliding window of them (is the model an encoder?)"
        )


def _is_causal(rule: Callable[..., Any], window: int | None, device: torch.device) -> bool:
    """Whether a mask's rule is causal attention, with `window`, on near and far positions."""
    marks = {0, 1, 2, 3, 5}
    for power in range(3, 21):
        marks.update((2**power - 1, 2**power, 2**power + 1))
    if window is not None:
        marks.update(n * window + d for n in (1, 2) for d in (-1, 0, 1, 2))
    keys = torch.tensor(sorted(marks), device=device)
    queries = keys[:, None]
    first = torch.zeros((), dtype=torch.int64, device=device)
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    try:
        visible = torch.as_tensor(rule(first, first, queries, keys), device=device)
        return torch.equal(visible.expand(expected.shape), expected)
    except (IndexError, RuntimeError):  # a rule for the trial text's own positions
        return False


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ by more than rounding; what is not finite is no sign of it."""
    tolerance = _TOLERANCE_FLOAT32 if one.dtype == torch.float32 else _TOLERANCE_LOW
    one, other = (torch.nan_to_num(x.float(), 0.0, 0.0, 0.0) for x in (one, other))
    difference = torch.linalg.vector_norm(one - other)
    return bool(difference > tolerance * torch.linalg.vector_norm(one))
