"""Which residual streams of the target an EAGLE-3 head takes. Knows configs and layer numbers."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.core.errors import ConfigError, ModelError
from foresay_eagle.layout import HeadLayout

_FIELD = "eagle_aux_hidden_state_layer_ids"


def aux_layers(layout: HeadLayout, asked: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input streams the head takes; none for EAGLE-1 heads.

    `asked`: the setting, None for what config.json says. `num_layers` of the target.

    Published ids count the streams that enter layers. Some trainers number by the layer that a
    stream leaves: their default, (1, L/2 - 1, L - 4), is the usual (2, L/2, L - 3), and is read so.
    """
    if layout.variant != "eagle3":
        if asked is not None:
            raise ConfigError(
                f"aux_layers={tuple(asked)}: {layout.folder!r} holds an EAGLE-1 head, which takes "
                "the target's last hidden state only"
            )
        return ()
    default = _default(num_layers)
    if asked is not None:
        found, source = tuple(asked), "the setting aux_layers"
    elif layout.aux_layer_ids is not None:
        found, source = layout.aux_layer_ids, f"{_FIELD} of {layout.folder!r}"
        if found == tuple(layer - 1 for layer in default):
            found = default
    else:
        found, source = default, "EAGLE-3's default"
    if not found or not all(0 <= layer <= num_layers for layer in found):
        kind = ConfigError if asked is not None else ModelError
        raise kind(
            f"{source}: residual streams entering the layers {', '.join(map(str, found))}; the "
            f"target model has {num_layers} layers, so expected one number at least, each from 0 "
            f"to {num_layers}: was the head made for another model? "
            "Set aux_layers to say which streams it was trained with"
        )
    return found


def training_layers(asked: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input streams a new head takes. Raises `ConfigError`."""
    found = _default(num_layers) if asked is None else tuple(asked)
    if not all(0 <= layer <= num_layers for layer in found):
        raise ConfigError(
            f"aux_layers: residual streams entering the layers {', '.join(map(str, found))}; the "
            f"target model has {num_layers} layers, so expected numbers from 0 to {num_layers}"
        )
    return found


def _default(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's."""
    return (2, num_layers // 2, num_layers - 3)
