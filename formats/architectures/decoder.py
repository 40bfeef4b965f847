"""Keys of config.json that every family of decoders shares, with their ranges.

Each bound is several times the largest published value, and low enough that the table of all
tensors is made in milliseconds.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lowbit.formats.architectures.rope import MAX_POSITIONS, POSITIONS
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_fields, read_ids, shown

FULL, LINEAR = "full_attention", "linear_attention"
OLDER_KINDS = {"attention": FULL, "mamba": LINEAR}  # names that transformers still reads
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 4096
TIED = "tie_word_embeddings"
TEXT = "text_config"  # key of the decoder's config where it is nested in a larger one

VOCABULARY = Field("vocab_size", least=1, most=2**22)
INNER = Field("intermediate_size", least=1, most=2**22)
SIZES = (  # INNER aside, which mixtures of experts do not have
    VOCABULARY,
    Field("hidden_size", least=1, most=2**20),
    Field("num_hidden_layers", least=1, most=MAX_LAYERS),
    Field("num_attention_heads", least=1, most=MAX_HEADS),
    Field(POSITIONS, least=1, most=MAX_POSITIONS),
    Field("rms_norm_eps", "number", least=1e-12, most=0.1),
)
KV_HEADS = Field("num_key_value_heads", least=1, most=MAX_HEADS)
HEAD_DIM = Field("head_dim", least=2, most=MAX_HEAD_DIM, even=True)
TIED_FIELD = Field(TIED, "flag", default=False)

# Keys that change the arithmetic in some engine, and the values that leave it as implemented here.
# None stands for null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_causal": (True,),
    "use_sliding_window": (False,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "kv_sharing_modes": (None,),
    "num_kv_shared_layers": (None, 0),
    "per_layer_config": (None,),
    "quantization": (None,),  # MLX weights have a layout of their own
}


def text_part(config: Mapping[str, Any]) -> Any:
    """The decoder's config in an unchecked `config.json`: the nested one, else the whole."""
    return config.get(TEXT, config)


def check_features(
    config: Mapping[str, Any],
    more: Mapping[str, tuple[Any, ...]],
    read: Collection[str] = (),
) -> None:
    """Refuse keys that ask for a feature which is not implemented.

    Args:
        config: config.json or its text_config.
        more: keys of the family, in the form of NEUTRAL.
        read: keys that the family implements.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    for key, neutral in {**NEUTRAL, **more}.items():
        if key not in config or key in read:
            continue
        value = config[key]
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise UnsupportedModelError(
                f"config.json: `{key}: {shown(value)}` is not implemented",
                hint=f"implemented: {' or '.join(map(shown, neutral)) or 'configs without it'}",
            )


def read_layer_types(
    config: Mapping[str, Any], layers: int, implemented: Collection[str]
) -> tuple[str, ...] | None:
    """Kinds of all layers as the config lists them; None without a list.

    Raises:
        UnsupportedModelError: a list of another length than `layers`, or with another kind than
            the `implemented` ones.
    """
    listed = config.get("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != layers:
        raise UnsupportedModelError(
            f"config.json: `layer_types` must be a list of {layers}, one for each of "
            f"`num_hidden_layers`, got {shown(listed)}"
        )
    kinds: list[str] = []
    for kind in listed:
        now = OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else ""
        if now not in implemented:
            raise UnsupportedModelError(
                f"config.json: layer type {shown(kind)} is not implemented",
                hint=f"implemented: {', '.join(implemented)}",
            )
        kinds.append(now)
    return tuple(kinds)


def read_token_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text, `eos_token_id`; begin and padding ids are checked too.

    Published configs have -1 for no begin or padding token; it is accepted, since prompts get
    neither from config.json. An id past the vocabulary is refused: transformers cannot build a
    model with such a padding id, and no text could end with such an end id.

    Raises:
        UnsupportedModelError: an id that the vocabulary does not have.
    """
    optional_id = Field("", least=-1, most=vocab_size - 1, default=None, nullable=True)
    names = ("bos_token_id", "pad_token_id")
    read_fields(config, [replace(optional_id, key=name) for name in names])
    return read_ids(config, "eos_token_id", vocab_size)


def check_multiple(sizes: Mapping[str, Any], key: str, unit: str) -> None:
    """Refuse a size that is not a multiple of another.

    Raises:
        UnsupportedModelError: naming both.
    """
    if sizes[key] % sizes[unit]:
        raise UnsupportedModelError(
            f"config.json: {key} = {sizes[key]} is not a multiple of {unit} = {sizes[unit]}"
        )
