"""Runs transformers' own modules over the paged KV cache: every model the fast decoder does not.

The model's attention is replaced through transformers' `AttentionInterface`; embeddings, norms,
MLPs and heads stay what they are, but for packed weights on a CPU. A model that would not be exact
this way is refused, see `probe`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foresay.core.errors import ModelError, one_line
from foresay.core.proposer import KVRows
from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention import AttentionMetadata, AttentionRules
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.linear import Linear, compute_dtype
from foresay.core.worker.packed_modules import PackedLinear, pack_linears
from foresay.core.worker.probe import Probe
from foresay.core.worker.transformers_attention import (
    PAGED,
    PROBED,
    Attention,
    PagedAttention,
    RowsAttention,
)

# What model classes call the norm after the last layer.
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class TransformersDecoder:
    """A transformers causal LM over the paged KV cache.

    `model` is changed (its attention, its rope) and must belong to nobody else: see
    `private_copy`. `limit` is the model's own length limit. `max_model_len`, if above longrope's
    original length, chooses longrope's long form; `max_model_len` the attribute is the limit that
    remains. `linear` makes the products on a CPU. Raises `ModelError` if the model cannot be run
    exactly.
    """

    min_rows = 1

    def __init__(
        self,
        model: Any,
        *,
        limit: int | None = None,
        max_model_len: int | None = None,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        self._model = model
        self._linear = linear
        self._text_config = model.config.get_text_config(decoder=True)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        for config in (model.config, self._text_config):
            config.return_dict = True
            config.output_attentions = config.output_hidden_states = False
            # Else each pass looks for it, to advise a mask. Some configs would check the type.
            object.__setattr__(config, "pad_token_id", None)
        probe = Probe(type(model).__name__, self._text_config, self._run, model.device)
        self.max_model_len = self._fix_rope(limit, max_model_len, probe)
        with torch.inference_mode():
            self._set_attention(PROBED, probe)
            findings = probe.inspect(self.max_model_len)
            self._windows = findings.windows
            self.kv_layout = findings.kv_layout
            self.vocab_size = findings.vocab_size
            heads = {
                (number, kv.num_kv_heads, kv.head_dim)
                for number, kv in zip(findings.num_heads, self.kv_layout, strict=True)
            }
            num_heads, num_kv_heads, head_dim = max(heads)
            self.attention_rules = AttentionRules.choose(
                model.device,
                model.dtype,
                compute_dtype(model.dtype, model.device),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                row_invariant=row_invariant and len(heads) == 1,  # rules are for one shape
                capped=findings.capped,
                own_kernels=cpu_kernels.serves(model.dtype, model.device)
                and all(
                    cpu_kernels.attends(number, kv.num_kv_heads, kv.head_dim, kv.value_dim)
                    for number, kv in zip(findings.num_heads, self.kv_layout, strict=True)
                ),
            )
            self._set_attention(PAGED, probe)
            self._check(probe)

    def _check(self, probe: Probe) -> None:
        """Check the model as it will run: on a CPU with packed weights, if it works with them."""
        unpack = None
        if self._model.device.type == "cpu":
            unpack = pack_linears(self._model, self._linear)
        arguments = (self.kv_layout, self._paged, self.attention_rules, self._model.dtype)
        try:
            probe.check_pieces(*arguments)
        except ModelError:
            if unpack is None:
                raise
            unpack()  # the model may read the weights of its layers itself
            probe.check_pieces(*arguments)

    @property
    def is_half(self) -> bool:
        """Whether any product's weight is kept in float16."""
        return any(isinstance(m, PackedLinear) and m.is_half for m in self._model.modules())

    @property
    def embeddings(self) -> torch.Tensor:
        """The input embeddings as they are stored, [vocab_size or more, hidden_size]."""
        weight: torch.Tensor = self._model.get_input_embeddings().weight
        return weight.detach()

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output head's product: [n, hidden_size] to [n, vocab_size]."""
        head: Callable[[torch.Tensor], torch.Tensor] = self._model.get_output_embeddings()
        return head

    def lm_head_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output head's weight and bias for token ids; see `TargetView`."""
        head = self._model.get_output_embeddings()
        if isinstance(head, PackedLinear):
            return head.rows(ids)
        bias = getattr(head, "bias", None)
        return head.weight.detach()[ids], None if bias is None else bias.detach()[ids]

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        output_rows: torch.Tensor,  # [num_output_rows], indices into the rows
        cache: KVCache,
        metadata: AttentionMetadata,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """Return logits [num_output_rows, vocab_size]; fill `capture`."""
        return self._run(
            input_ids, metadata.positions, output_rows, self._paged(cache, metadata), capture
        )

    def forward_rows(
        self, input_ids: torch.Tensor, output_rows: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Return the same as `forward`, over a proposer's own KV layers."""
        attention = RowsAttention(rows, self._windows)
        return self._run(input_ids, rows.positions, output_rows, attention)

    def _paged(self, cache: KVCache, metadata: AttentionMetadata) -> PagedAttention:
        return PagedAttention(cache, metadata, self._windows)

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        output_rows: torch.Tensor,
        attention: Attention,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        # Through the causal LM, not its base model and head: caps and scales of logits are there.
        keywords: dict[str, Any] = {"logits_to_keep": output_rows} if self._takes_rows else {}
        if capture is not None:
            keywords["output_hidden_states"] = True
        with self._last_stream(capture):
            output = self._model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                paged=attention,
                **keywords,
            )
        if capture is not None:
            self._fill(capture, output.hidden_states)
        logits: torch.Tensor = output.logits[0]
        return logits if self._takes_rows else logits.index_select(0, output_rows)

    def _fill(self, capture: Capture, hidden_states: Any) -> None:
        """Hand over what the pass captured: the stream entering each layer, and the lm_head's."""
        num_layers = len(self.kv_layout)
        if hidden_states is None or len(hidden_states) != num_layers + 1:
            raise ModelError(
                f"{type(self._model).__name__} does not show the hidden states of its "
                f"{num_layers} layers, which the proposer needs"
            )
        for layer, stream in enumerate(hidden_states[:-1]):
            capture.put_stream(layer, stream[0])
        if capture.hidden_state:
            capture.put_hidden(hidden_states[-1][0])

    @contextlib.contextmanager
    def _last_stream(self, capture: Capture | None) -> Iterator[None]:
        """Capture what enters the final norm, which hidden states don't show, if it is wanted."""
        num_layers = len(self.kv_layout) if capture is not None else 0
        if capture is None or num_layers not in capture.layers:
            yield
            return
        decoder = self._model.get_decoder()
        norms = [getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name)]
        if len(norms) != 1:
            raise ModelError(
                f"{type(self._model).__name__} has no final norm of a known name "
                f"({', '.join(_FINAL_NORMS)}), and the proposer needs the hidden states before it"
            )

        def put(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            capture.put_stream(num_layers, inputs[0].reshape(-1, inputs[0].shape[-1]))

        handle = norms[0].register_forward_pre_hook(put)
        try:
            yield
        finally:
            handle.remove()

    def _set_attention(self, name: str, probe: Probe) -> None:
        self._model.set_attn_implementation(name)
        if self._text_config._attn_implementation != name:
            raise probe.refusal("transformers does not replace its attention")

    def _fix_rope(self, limit: int | None, max_model_len: int | None, probe: Probe) -> int | None:
        """Make rotary frequencies a function of the position alone; returns the model's limit.

        "dynamic" ones depend on the longest text of the batch, and are refused. Longrope has a
        short and a long form, and transformers takes one by the longest text of the batch. Here
        the form is fixed: the short one, which transformers takes up to the original length, and
        that length is the limit; or the long one for every text, if `max_model_len` is above it.
        """
        for module in self._model.modules():
            types = getattr(module, "rope_type", None)
            by_layer_type = types if isinstance(types, dict) else {None: types}
            for layer_type, rope_type in by_layer_type.items():
                if rope_type is not None and "dynamic" in rope_type:
                    raise probe.refusal(
                        f"with rope type {rope_type!r} a row's logits depend on the other texts "
                        "of its batch"
                    )
                if rope_type == "longrope":
                    original, is_long = _fix_longrope(module, layer_type, max_model_len)
                    limit = limit if is_long else min(limit or original, original)
        return limit


def private_copy(model: Any) -> Any:
    """Return a copy of a model that shares its weights and nothing else.

    Modules, config and small buffers are new: the copy's attention and rope can be replaced, and
    a later `model.to(...)` or `model.train()` does not reach it.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        plain = type(parameter) is torch.nn.Parameter
        memo[id(parameter)] = (
            torch.nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
        )
    kept = model.state_dict(keep_vars=True)
    memo.update((id(buffer), buffer) for name, buffer in model.named_buffers() if name in kept)
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:
        raise ModelError(
            f"the {type(model).__name__} object cannot be copied ({one_line(error)}), and foresay "
            "does not change a model that is not its own; save it and give the folder"
        ) from error


def _fix_longrope(
    module: Any, layer_type: str | None, max_model_len: int | None
) -> tuple[int, bool]:
    """Make both forms of a longrope module the same; returns the original length, and if long."""
    config = module.config
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = int(rope["original_max_position_embeddings"])
    is_long = max_model_len is not None and max_model_len > original
    chosen, other = ("long", "short") if is_long else ("short", "long")
    for what in ("factor", "mscale"):
        if f"{chosen}_{what}" in rope:
            rope[f"{other}_{what}"] = rope[f"{chosen}_{what}"]
    prefix = "" if layer_type is None else f"{layer_type}_"
    by_type = {} if layer_type is None else {"layer_type": layer_type}
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, **by_type)
    for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):
        setattr(module, f"{prefix}{name}", frequencies.clone())
    return original, is_long
