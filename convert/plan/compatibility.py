"""Readers that could load a result, told from its plan, and group sizes that had to shrink."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.convert.plan.parts import and_more
from lowbit.convert.plan.plan import Plan
from lowbit.formats.architectures import is_carried, is_drafter, kind_of
from lowbit.formats.architectures.decoder import TEXT
from lowbit.formats.architectures.names import MTP_PREFIX, expert_of
from lowbit.formats.architectures.table import is_embedding
from lowbit.formats.layout.quantization_config import unserved
from lowbit.formats.layout.scheme import COMMON_BITS, SERVED_BITS, Scheme, of_most_weights

LOSS_OF_FEW_BITS = {3: "2", 2: "6 to 7"}  # mean KL, of that at 4 bits
PACKED_DRAFTER = (
    "lowbit-run loads a packed drafter; SGLang is reported to load such without an error and to "
    "accept 1.00 token a round (its issue 39087), and vLLM has not been tried: give these the "
    "drafter in BF16"
)
SIGNED_SCALES = (
    "scales may be negative, which weight-only kernels read as they are; vLLM's kernels with INT8 "
    "activations (Marlin) read scales of groups as unsigned and give nonsense (vLLM issue 48905): "
    "leave those off, or convert with --positive-scales"
)
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")  # model types of the wrapped form
QWEN3_5_TEXT = ("qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True)
class VllmUse:
    """Way in which vLLM loads a folder that it can load."""

    # Oldest release that does, `0.20`; None where all do from 0.16 on, the oldest known
    release: str | None = None
    reason: str = ""  # why an older one does not; empty without a release
    options: tuple[str, ...] = ()  # of `vllm serve`

    def __str__(self) -> str:
        """`from 0.20 on (quantized lm_head), with --language-model-only`; may be empty."""
        parts = [f"from {self.release} on ({self.reason})"] if self.release else []
        parts += [f"with {' '.join(self.options)}"] if self.options else []
        return ", ".join(parts)


def packed_drafter(config: Mapping[str, Any], schemes: Iterable[Scheme | None]) -> str | None:
    """Sentence on engines that take a packed drafter; None for models and for one that is not."""
    return PACKED_DRAFTER if is_drafter(config) and any(schemes) else None


def signed_scales(rule: str | None, schemes: Iterable[Scheme | None]) -> str | None:
    """Warning of the paths of vLLM that misread negative scales of groups; None without such.

    Args:
        rule: by which scales were, or will be, chosen; None where that is not known.
    """
    grouped = any(scheme is not None and scheme.group_size is not None for scheme in schemes)
    return SIGNED_SCALES if rule == "signed" and grouped else None


def smaller_groups(plan: Plan) -> str | None:
    """Sentence that counts the linears whose rows the recipe's group size does not divide."""
    wanted = plan.recipe.group_size
    if wanted is None:
        return None
    sizes = Counter(
        step.scheme.group_size
        for step in plan.steps
        if step.scheme is not None and step.scheme.group_size and step.source.shape[1] % wanted
    )
    if not sizes:
        return None
    parts = [f"{count} get groups of {size}" for size, count in sizes.most_common()]
    given = f"they get groups of {min(sizes)}" if len(sizes) == 1 else ", ".join(parts)
    rows = f"{sizes.total()} linears" if sizes.total() > 1 else "1 linear"
    return f"group size {wanted} does not divide the rows of {rows}: {given}"


def few_bits(plan: Plan) -> str | None:
    """Sentence on the loss if most weights of the layers get 2 or 3 bits; None if they do not.

    The losses are those of published files of Qwen3.8-27B, EXL3 and GGUF, beside 4 bits.
    """
    bits = of_most_weights(
        (step.scheme.bits, math.prod(step.source.shape))
        for step in plan.steps
        if step.scheme is not None and not _is_outer(step.module)
    )
    if bits not in LOSS_OF_FEW_BITS:
        return None
    return (
        f"most weights of the layers get {bits} bits: good files of a 27B model lose "
        f"{LOSS_OF_FEW_BITS[bits]} times what they lose at 4 bits, smaller models far more; "
        "many are of no use, so read the verdict of --report first"
    )


def vllm_use(config: Mapping[str, Any], packed_head: bool, tower: bool) -> VllmUse:
    """Release and options that vLLM needs for a folder, as its registry and loaders have them.

    The wrapped form of Qwen3.5 came with 0.17, its text-only form with 0.27, packed heads with
    0.20. Where the tensors of the vision tower are missing, every release up to 0.33 starts with a
    random tower unless it is told to leave it out.

    Args:
        packed_head: whether `lm_head` is quantized.
        tower: whether the folder holds a vision tower.
    """
    kind = kind_of(config)
    alone = kind in QWEN3_5 and TEXT in config and not tower
    options = ("--language-model-only",) if alone else ()
    if kind in QWEN3_5_TEXT:
        return VllmUse("0.27", "text-only Qwen3.5")
    if packed_head:
        return VllmUse("0.20", "quantized lm_head", options)
    return VllmUse("0.17", "Qwen3.5", options) if kind in QWEN3_5 else VllmUse()


def use_by_vllm(plan: Plan) -> VllmUse:
    """Release and options that vLLM needs for the result of a plan."""
    tower = any(
        step.fate != "dropped" and is_carried(plan.config, step.source.name) for step in plan.steps
    )
    return vllm_use(plan.config, plan.schemes.get("lm_head") is not None, tower)


def vllm_verdict(plan: Plan) -> list[str]:
    """Reasons why vLLM could not load the result; empty where it can."""
    reasons = vllm_reasons(
        (step.module, step.source.shape, step.scheme)
        for step in plan.steps
        if step.scheme is not None and step.module is not None
    )
    return [*reasons, *_mixed_experts(plan.schemes)]


def transformers_verdict(plan: Plan) -> str | None:
    """Reason why transformers would load another model, without an error; None where it does not.

    It unpacks all experts by the scheme of one group, and drops those that are not packed.
    """
    present = {
        scheme
        for module, scheme in plan.schemes.items()
        if expert_of(module) is not None and not module.startswith(MTP_PREFIX)
    }
    names = sorted(str(scheme) for scheme in present if scheme is not None)
    if None in present and any(plan.schemes.values()):
        return "experts that are not quantized beside linears that are: it leaves them random"
    if len(names) > 1:
        return f"experts in several schemes ({', '.join(names)}): it reads all of them by one"
    return None


def _mixed_experts(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Layers whose experts are not all of one scheme; vLLM computes them in one kernel."""
    layers: dict[str, set[Scheme | None]] = {}
    for module, scheme in schemes.items():
        if expert_of(module) is not None:
            layers.setdefault(module.partition(".experts.")[0], set()).add(scheme)
    mixed = [f"{layer}.experts" for layer, per_layer in layers.items() if len(per_layer) > 1]
    return (
        [f"experts of one layer in several schemes: `{mixed[0]}`{and_more(mixed)}"] if mixed else []
    )


def vllm_reasons(linears: Iterable[tuple[str, tuple[int, ...], Scheme]]) -> list[str]:
    """Reasons why vLLM could not load packed linears; empty where it can.

    vLLM serves `pack-quantized` through Marlin: symmetric 4 or 8 bits, groups of 32, 64 or 128 or
    whole rows, N a multiple of 64 and K of 128. Experts that are not wider than a group load, but
    release 0.26 then takes the scales of gate and up in the order of whole rows, and its tokens
    make no sense.

    Args:
        linears: module, [N, K] and scheme of each.
    """
    reasons: dict[str, list[str]] = {}
    for module, (N, K), scheme in linears:
        if is_embedding(module):
            reasons.setdefault("a packed embedding", []).append(module)
            continue
        if scheme.bits not in COMMON_BITS:
            reasons.setdefault(f"{scheme.bits}-bit weights", []).append(module)
        if not scheme.symmetric:
            reasons.setdefault("asymmetric weights", []).append(module)
        if scheme.group_size not in (None, 32, 64, 128):
            reasons.setdefault(f"group size {scheme.group_size}", []).append(module)
        if N % 64:
            reasons.setdefault(f"N = {N} is not a multiple of 64", []).append(module)
        if K % 128:
            reasons.setdefault(f"K = {K} is not a multiple of 128", []).append(module)
        narrow = module.endswith(".down_proj") and (scheme.group_size or 0) >= K
        if narrow and expert_of(module) is not None:
            why = f"experts of {K} channels in groups of {scheme.group_size}, which 0.26 garbles"
            reasons.setdefault(why, []).append(module)
    return [f"{reason}: `{names[0]}`{and_more(names)}" for reason, names in reasons.items()]


def why_not_exported(plan: Plan) -> str | None:
    """Reason why no export takes the result; None where one does."""
    for module, scheme in plan.schemes.items():
        if scheme is None:
            continue
        if is_embedding(module):
            return f"a packed embedding: `{module}`"
        if scheme.bits not in COMMON_BITS:
            return f"{scheme.bits}-bit weights: `{module}`"
    return None


def one_scheme_misfits(plan: Plan) -> list[str]:
    """Kinds of linears that GPTQ or AWQ has no place for, `lm_head (INT8 g128)`.

    Both state one scheme for all linears, and AWQ expects the head unquantized. Neither gets
    multi-token prediction.
    """
    weights: list[tuple[Scheme, int]] = []
    kinds: dict[tuple[str, Scheme], None] = {}
    for step in plan.steps:
        if step.scheme is None or step.module is None or step.module.startswith(MTP_PREFIX):
            continue
        kinds.setdefault((step.module.rpartition(".")[2], step.scheme))
        if not _is_outer(step.module):
            weights.append((step.scheme, math.prod(step.source.shape)))
    main = of_most_weights(weights)
    outer = ("lm_head", "embed_tokens")
    return [f"{kind} ({own})" for kind, own in kinds if own != main or kind in outer]


def _is_outer(module: str | None) -> bool:
    """Tell if a packed module is the head or the embedding, not a linear of a layer."""
    return module == "lm_head" or (module is not None and is_embedding(module))


def runtime_verdict(plan: Plan) -> str | None:
    """Reason why lowbit-run could not serve the result; None where it can."""
    for module, scheme in plan.schemes.items():
        reason = scheme and unserved(scheme, SERVED_BITS)
        if reason:
            return f"{reason}: `{module}`"
    return None
