"""Engines of real models' shapes over random weights made in place: no files, no quantization.

For scripts that measure speed, which does not depend on what the weights are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from make_random_checkpoint import config_of
from torch import Tensor

from lowbit.formats.activation_modes import HEAD_INPUTS, Activations, Inputs, inputs_of
from lowbit.formats.architectures import kind_of, prefix_of, read_config, tensor_table
from lowbit.formats.architectures.footprint import state_bytes
from lowbit.formats.kv_cache import BF16_CACHE, CacheType
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_linear import CpuLinear, prepare
from lowbit.runtime.engine.chunks import new_chunks
from lowbit.runtime.engine.draft.block import new_blocks
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.memory import snapshots_for
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.plan import OpenRow
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import Sequence as TokenSequence
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.experts.tiled import TiledExperts
from lowbit.runtime.kernels.linear.tiles import TILE, GpuLinear, TiledLinear, counters, rounding
from lowbit.runtime.models.architectures import BUILD, DRAFTER_BUILD, HEADS
from lowbit.runtime.models.selected_rows import SelectedRows
from lowbit.runtime.state.device_state import CacheSize, kv_pages
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear

GROUP = 128
CONTEXT = 8192
HEAD_BITS = 8
MOST_DENSE = 2**15  # rows; a head has more
# Linears that recipes leave dense: those with too few rows for tiles, and small ones of drafters.
DENSE = (
    *("in_proj_b", "_conv.kernel_projection", ".hidden_projection", ".down_h", ".down_g"),
    *("xpress_head.mlp.gate_proj", "xpress_head.mlp.down_proj"),
)
DRAFT_HEADS = ("markov_head.markov_w2", "xpress_head.w2", "embed_proj.2")


def bits_of(module: str, bits: int) -> int:
    """Bits of a linear by the recipe whose MLP has so many; of 4 or 8, all but heads."""
    if module in ("lm_head", *DRAFT_HEADS):
        return HEAD_BITS
    return bits + 1 if bits < 4 and "_attn." in module else bits


def packed(
    bits: int,
    N: int,
    K: int,
    paired: bool = False,
    inputs: Inputs = "exact",
    group: int = GROUP,
) -> TiledLinear:
    """Random codes, and scales that keep activations near one."""
    width = CODECS[bits]
    shape = (N // TILE, -(-K // width.STEP_K), width.LOADS, 8, 4, 4)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    scales = torch.randn(N // TILE, K // group, 8, 2, device="cuda") / (2 ** (bits - 1) * K**0.5)
    scales, sizes = scales.bfloat16(), (bits, group, N, K, paired)
    arrived = counters(words)
    if inputs == "exact":
        return TiledLinear(words, scales, *sizes, arrived=arrived)
    w = TiledLinear(words, scales, *sizes, arrived=arrived, remainders=inputs == "int16")
    return rounding(w, whole=inputs == "whole")


def packed_experts(
    bits: int, count: int, N: int, K: int, paired: bool, activations: Activations = "exact"
) -> TiledExperts:
    """Random codes and scales of several experts, in one buffer."""
    w = packed(bits, count * N, K, paired, activations)
    words = w.words.view(count, N // TILE, *w.words.shape[1:])
    scales = w.scales.view(count, N // TILE, *w.scales.shape[1:])
    bounds = None if w.rows is None else w.rows.view(count, N // TILE, 8, 2)
    return TiledExperts(words, scales, bits, GROUP, N, K, paired, activations, bounds)


def packed_on_cpu(
    bits: int, N: int, K: int, inputs: Inputs = "exact", group: int = GROUP
) -> CpuLinear:
    """Random weights on a CPU."""
    codes = torch.randint(-(2**31), 2**31, (N, K * bits // 32)).to(torch.int32)
    scales = torch.randn(N, K // group) / (2 ** (bits - 1) * K**0.5)
    w = PackedLinear(codes, scales.bfloat16(), bits, group)
    return prepare(w, torch.bfloat16, inputs)


def randn(*shape: int) -> Tensor:
    """Normal numbers in bfloat16, on the GPU."""
    return torch.randn(shape, device="cuda").bfloat16()


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """In place of `runtime.weights.weights.Weights`; see `bits_of`."""

    shapes: Mapping[str, tuple[int, ...]]
    bits: int
    device: str = "cuda"
    activations: Activations = "exact"  # inputs of packed linears; see `inputs_of`
    schemes: Mapping[str, Scheme] = field(default_factory=dict)  # of modules without `bits`
    head_rows: int = 0  # of a drafter's heads; 0 for all
    rotated: bool = False  # see `inputs_of`

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Small numbers of either sign; a decay rate is not negative."""
        x = 0.02 * torch.randn(self.shapes[name], device=self.device)
        return (x.abs() if name.endswith("A_log") else x).to(dtype or torch.bfloat16)

    def table(self, module: str) -> Tensor:
        """An embedding in BF16."""
        return self.tensor(f"{module}.weight")

    def dense(self, weight: Tensor, module: str = "") -> GpuLinear | CpuLinear:
        """A tied head, or a small linear of a drafter."""
        if len(weight) < MOST_DENSE:
            return DenseLinear(weight)
        inputs = HEAD_INPUTS[self.activations]
        return self.packed(HEAD_BITS, len(weight), weight.shape[1], inputs=inputs)

    def linear(
        self, *modules: str, paired: bool = False, head: bool = False, normed: bool = False
    ) -> GpuLinear | CpuLinear:
        """One linear over the rows of several modules."""
        shapes = [self.shapes[f"{module}.weight"] for module in modules]
        N, K = sum(rows for rows, _ in shapes), shapes[0][1]
        N = self.head_rows if head and self.head_rows else N
        if modules[0].endswith(DENSE):
            return DenseLinear(0.02 * torch.randn(N, K, device=self.device).bfloat16())
        scheme = self.schemes.get(modules[0], Scheme(bits_of(modules[0], self.bits), GROUP))
        inputs = inputs_of(self.activations, head, normed, self.rotated)
        return self.packed(scheme.bits, N, K, paired, inputs, scheme.group_size or K)

    def stack(
        self, experts: Sequence[Sequence[str]], paired: bool = False
    ) -> Sequence[GpuLinear | CpuLinear]:
        """One linear for each expert."""
        if self.device == "cpu":
            return [self.linear(*modules, paired=paired) for modules in experts]
        shapes = [self.shapes[f"{module}.weight"] for module in experts[0]]
        N, K = sum(rows for rows, _ in shapes), shapes[0][1]
        return packed_experts(self.bits, len(experts), N, K, paired, self.activations)

    def dense_rows(self, modules: Sequence[str]) -> Tensor:
        """Rows of a router."""
        return torch.cat([self.tensor(f"{module}.weight") for module in modules])

    def packed(
        self,
        bits: int,
        N: int,
        K: int,
        paired: bool = False,
        inputs: Inputs = "exact",
        group: int = GROUP,
    ) -> GpuLinear | CpuLinear:
        """A quantized linear of the device."""
        if self.device == "cpu":
            return packed_on_cpu(bits, N, K, inputs, group)
        return packed(bits, N, K, paired, inputs, group)


def random_engine(
    size: str,
    bits: int,
    context: int = CONTEXT,
    sequences: int = 1,
    tokens: int | None = None,
    cache_type: CacheType = BF16_CACHE,
    activations: Activations = "exact",
) -> Engine:
    """An engine of a size that `make_random_checkpoint` knows, in so many bits (`bits_of`).

    Args:
        size: of the model.
        bits: of its linears.
        context: most tokens of a sequence.
        sequences: decoded together.
        tokens: of the cache; None for as many as all sequences may have.
        cache_type: of keys and values.
        activations: inputs of packed linears.
    """
    asked = "cuda", context, sequences, tokens
    return engine_of(config_of(size), bits, *asked, cache_type=cache_type, activations=activations)


def engine_of(
    raw: Mapping[str, Any],
    bits: int,
    device: str,
    context: int,
    sequences: int = 1,
    tokens: int | None = None,
    drafts: int = 0,
    draft_rows: int = 0,
    cache_type: CacheType = BF16_CACHE,
    activations: Activations = "exact",
    schemes: Mapping[str, Scheme] = MappingProxyType({}),
) -> Engine:
    """An engine of a config.json, with the head for multi-token prediction if it has one.

    Args:
        raw: content of the config.json.
        bits: see `random_engine`, as the rest.
        device: `cpu` or `cuda`.
        context: see `random_engine`.
        sequences: see `random_engine`.
        tokens: see `random_engine`.
        drafts: that a step can verify.
        draft_rows: of the vocabulary, from which the head drafts; 0 for all.
        cache_type: see `random_engine`.
        activations: see `random_engine`.
        schemes: of linears that do not have `bits`, by module.
    """
    ops: Any = cpu
    if device == "cuda":
        from lowbit.runtime.backends import cuda

        ops = cuda
    torch.manual_seed(0)
    config = read_config(raw)
    shapes = {spec.name: spec.shape for spec in tensor_table(raw)}
    rotated = not getattr(config, "mtp_layers", 0)  # as lowbit-convert does by default
    weights: Any = RandomWeights(shapes, bits, device, activations, schemes, rotated=rotated)
    model_type = raw["model_type"]
    decoder: Any = BUILD[model_type](config, prefix_of(raw), weights, ops, context)
    if getattr(config, "mtp_layers", 0):
        decoder = HEADS[model_type](decoder, weights, None)
        if draft_rows:
            rows = random_rows(weights, draft_rows, config.vocab_size, config.hidden_size)
            decoder = replace(decoder, mtp=replace(decoder.mtp, rows=rows))
    pages = pages_for(tokens) if tokens else sequences * pages_for(context)
    state = state_bytes(config, torch.bfloat16.itemsize)
    snapshots = snapshots_for(pages, state, free_bytes("cpu"))
    cache = CacheSize(context, sequences, pages, snapshots, drafts)
    part = STEP_TOKENS if activations == "int8" else EXACT_TOKENS  # all linears are packed
    given = decoder, config.vocab_size, cache, torch.bfloat16, device
    return Engine(new_runner(*given, cache_type=cache_type, part_tokens=part))


def drafter_of(raw: Mapping[str, Any], size: int = 16) -> dict[str, Any]:
    """config.json of a DFlash drafter for a model's config.json, of the shape that z-lab publishes.

    Five layers with the widths of the model; it reads five layers, evenly spaced.

    Args:
        raw: content of the model's config.json.
        size: tokens of a block.
    """
    model = {**raw, **raw.get("text_config", {})}
    last = model["num_hidden_layers"] - 3
    taken = max(1, min(5, last))
    wide = model["hidden_size"] >= 1024
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    narrow = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "num_hidden_layers": 5 if wide else 2,
        "num_target_layers": model["num_hidden_layers"],
        "block_size": size,
        "dflash_config": {
            "mask_token_id": model["vocab_size"] - 1,
            "target_layer_ids": [1 + at * (last - 1) // max(1, taken - 1) for at in range(taken)],
        },
        **(heads if wide else narrow),
        **{key: model[key] for key in kept},
    }


def dspark_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a DSpark drafter for a model's config.json, as DeepSpec trains them."""
    found = drafter_of(raw, size=7)
    section = found.pop("dflash_config")
    own = {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "vanilla", "markov_rank": 256}
    return {**found, **section, **own}


def xpress_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of an xPress drafter for a model's config.json."""
    own = {"xpress_block_size": 16, "xpress_rank": 256, "xpress_mlp_hidden": 512}
    return {**drafter_of(raw), "architectures": ["Qwen3XPressModel"], **own}


def domino_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Domino drafter for a model's config.json, as SpecForge trains them."""
    found = drafter_of(raw)
    own = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1, "shift_label": True}
    section = {**found["dflash_config"], "projector_type": "domino", **own}
    return {**found, "dflash_config": section}


def dflash2_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a DFlash2 drafter for a model's config.json, as z-lab publishes."""
    found = drafter_of(raw, size=8)
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    section = {**found["dflash_config"], **own}
    return {**found, "architectures": ["DFlash2DraftModel"], "dflash_config": section}


def lilicorr_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a LiLiCorr drafter for a model's config.json, of a size that we chose."""
    found = drafter_of(raw)
    sizes = {"candidate_topk": 8, "hidden_size": 512, "num_layers": 2, "num_heads": 8}
    numbers = {"mlp_ratio": 2.0, "factor_dim": 128, "vector_eps": 1e-6, "logit_scale": 10.0}
    own = {f"lilicorr_{key}": value for key, value in (sizes | numbers).items()}
    section = {**found["dflash_config"], **own}
    return {**found, "architectures": ["LiLiCorrDraftModel"], "dflash_config": section}


def add_drafter(
    engine: Engine, raw: Mapping[str, Any], bits: int, device: str, draft_rows: int = 0
) -> None:
    """Give an engine a random drafter of a config.json, which reads all steps from now on.

    Args:
        engine: of the model.
        raw: content of the drafter's config.json.
        bits: of its linears.
        device: `cpu` or `cuda`.
        draft_rows: of the vocabulary, from which it drafts; 0 for all.
    """
    ops: Any = cpu
    if device == "cuda":
        from lowbit.runtime.backends import cuda

        ops = cuda
    runner = engine.runner
    config = read_config(raw)
    shapes = {spec.name: spec.shape for spec in tensor_table(raw)}
    weights: Any = RandomWeights(shapes, bits, device, head_rows=draft_rows)
    drafter: Any = DRAFTER_BUILD[kind_of(raw)](config, weights, ops, runner.context)
    pages = kv_pages(config, runner.state.pages.count, BF16_CACHE, device)
    rows: Any = None
    if draft_rows:
        rows = random_rows(weights, draft_rows, config.vocab_size, config.hidden_size)
    sizes = runner.tables.shape[0], torch.bfloat16
    runner.blocks = new_blocks(drafter, runner.decoder, pages, rows, *sizes)
    runner.chunks = new_chunks(runner.decoder, runner.each_layer, runner.tables, runner.graphs)


def random_rows(
    weights: RandomWeights, count: int, vocabulary: int, hidden: int
) -> SelectedRows[Any]:
    """So many rows of a head in INT4, of tokens all over the vocabulary."""
    ids = torch.arange(count, device=weights.device) * (vocabulary // count)
    return SelectedRows(
        ids, weights.packed(4, count, hidden, inputs=HEAD_INPUTS[weights.activations])
    )


def standing_sequences(
    engine: Engine, count: int, tokens: int, new_tokens: int
) -> list[TokenSequence]:
    """Sequences with so many tokens each in the cache, most of them zeros, ready for steps."""
    engine.forget()
    engine.runner.batch = []
    sequences, free = [], 1
    for row in range(1, 1 + count):
        sequence = TokenSequence(Request((0,) * tokens), count=new_tokens, seed=0)
        sequence.row, sequence.length = row, tokens
        sequence.pages = list(range(free, free + sequence.page_count))
        free += sequence.page_count
        engine.runner.apply([OpenRow(sequence, None, None)])
        sequences.append(sequence)
    return sequences
