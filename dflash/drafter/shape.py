"""What one must know of a drafter to build it and to serve it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dflash.config import LayerType
from dflash.drafter.blocks import Visibility


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Sizes and constants of a drafter; `target_layer_ids` are 0-based, "after layer i" of the target.

    Raises ValueError naming the field that contradicts another one.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    sliding_is_causal: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(_layer_type(name) for name in self.layer_types))
        if LayerType.sliding_attention not in self.layer_types:
            # One spelling of a drafter without windows, so that equal drafters have equal shapes.
            object.__setattr__(self, "sliding_window", None)
            object.__setattr__(self, "sliding_is_causal", True)
        self._check_sizes()
        self._check_layers()

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids)

    @property
    def feature_width(self) -> int:
        """Width F of the captured features: one hidden state of the target per target layer id."""
        return self.num_features * self.hidden_size

    @property
    def visibilities(self) -> Mapping[LayerType, Visibility]:
        """What each kind of layer in use lets a block see."""
        kinds = {
            LayerType.full_attention: Visibility(),
            LayerType.sliding_attention: Visibility(window=self.sliding_window, causal=self.sliding_is_causal),
        }
        return {kind: kinds[kind] for kind in dict.fromkeys(self.layer_types)}

    def _check_sizes(self) -> None:
        sizes = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "vocab_size",
            "num_target_layers",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: the anchor and one slot to predict")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary embedding")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )

    def _check_layers(self) -> None:
        if not self.layer_types:
            raise ValueError("layer_types must name at least one layer")
        slides = LayerType.sliding_attention in self.layer_types
        if slides and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding_window={self.sliding_window} must be at least 1 for sliding_attention layers")
        ids = self.target_layer_ids
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"target_layer_ids={list(ids)} must name at least one target layer, each once")
        for layer_id in ids:
            # The last layer is out: Transformers returns its output only after the final norm.
            if not 0 <= layer_id < self.num_target_layers - 1:
                raise ValueError(
                    f"target_layer_ids={list(ids)}: {layer_id} is not between 0 and {self.num_target_layers - 2}, "
                    f"the layers before the last of a target of {self.num_target_layers}"
                )


def _layer_type(name: str) -> LayerType:
    try:
        return LayerType(name)
    except ValueError:
        raise ValueError(
            f"layer_types: {name!r} is not a kind of layer, use one of {[str(k) for k in LayerType]}"
        ) from None
