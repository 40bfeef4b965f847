"""Sizes of a decoder that other rooms ask for, under the same names in every family."""

from dataclasses import dataclass, field

from lowbit.formats.architectures.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Sizes of the gated DeltaNet layers of a decoder."""

    count: int  # number of these layers
    key_heads: int  # Hk, of q and of k
    value_heads: int  # Hv, a multiple of Hk
    key_head_dim: int  # Dk
    value_head_dim: int  # Dv
    taps: int  # width of the convolution

    @property
    def key_dim(self) -> int:
        """Rows of q, and of k: Hk * Dk."""
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Rows of v, and of z: Hv * Dv."""
        return self.value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts, which is in every layer."""

    count: int  # experts of a layer
    chosen: int  # how many of them every token passes through
    inner: int  # width of an expert
    shared_inner: int | None  # width of the expert that all tokens pass through; None without one
    # the shares of a token's chosen experts sum to one; else each is its share in a softmax over
    # all experts
    normed: bool = True


@dataclass(frozen=True, slots=True)
class BlockDrafts:
    """Blocks of a drafter, which proposes tokens of another model, the target."""

    size: int  # tokens of a block: the last known one, then mask tokens
    mask_token: int  # id that stands in the place of drafts
    # layers of the target whose outputs it reads, in the order of its input
    target_layers: tuple[int, ...]
    first: int = 1  # place in the block whose output is the first draft
    target_depth: int | None = None  # layers of the target; None if config.json does not say
    keeps_context: bool = False  # its head reads what `fc` gives at the position before a block

    @property
    def drafts(self) -> int:
        """Drafts that a block gives."""
        return self.size - self.first


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a decoder; h = hidden_size, I = intermediate_size, D = head_dim."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP, or of an expert where there are experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # most positions, with YaRN those that it gives
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = field(default=None, kw_only=True)  # None for plain rotations
    # tokens that end a text, unless generation_config.json names others
    eos_token_ids: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return self.head_dim

    @property
    def rope_sections(self) -> tuple[int, ...] | None:
        """Pairs of rotated dimensions by axis of position; None in a family of one axis."""
        return None

    @property
    def kv_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_hidden_layers

    @property
    def linear_layers(self) -> LinearLayers | None:
        """Layers with a recurrent state; None in a family without them."""
        return None

    @property
    def block_drafts(self) -> BlockDrafts | None:
        """Blocks of a drafter; None in a family of models that answer by themselves."""
        return None

    @property
    def experts(self) -> Experts | None:
        """Sizes of the experts; None in a family with a dense MLP in every layer."""
        return None
