"""The plan of a conversion, made from headers and config alone: nothing is decided later."""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from lowbit.convert.original.rotation import Role, rotation_roles, why_not_rotated
from lowbit.convert.plan.choice_of_method import check_method
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.parts import SourceParts, parts_of
from lowbit.convert.plan.recipe import Recipe, check_tied_embedding
from lowbit.formats.architectures import (
    Part,
    is_carried,
    is_drafter,
    is_tied,
    kind_of,
    never_quantized,
    part_of,
    read_config,
    untied,
    without_mtp,
)
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.draft_head import BITS as DRAFT_BITS
from lowbit.formats.draft_head import draft_head_size
from lowbit.formats.errors import CheckpointError, QuantizationError
from lowbit.formats.files.reading import MAX_TEXT_BYTES
from lowbit.formats.frequent_rows import BITS as FREQUENT_BITS
from lowbit.formats.frequent_rows import frequent_rows_size
from lowbit.formats.hub.ids import HUB_ID
from lowbit.formats.layout.manifest import MANIFEST_FILE, Fate, SourceTensor, json_bytes
from lowbit.formats.layout.packing import packed_shapes
from lowbit.formats.layout.quantization_config import (
    KEY,
    method_of,
    runs_as_stored,
    write_quantization_config,
)
from lowbit.formats.layout.scheme import Scheme, fitting_group_size
from lowbit.formats.packed import OUTPUT_DTYPES
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, MAX_CONFIG_BYTES, TensorInfo
from lowbit.formats.safetensors.shards import Shard, lay_out
from lowbit.formats.weight_bits import bits_per_weight, count_parameters

DEFAULT_SHARD_BYTES = 5_000_000_000
RECORD_BYTES = 260  # of a tensor in lowbit.json, its name aside
NAME_OR_PATH = "_name_or_path"  # transformers writes there what a model was loaded from
LARGE_VOCABULARY = 100_000  # from which on a draft head pays, unless the recipe says otherwise
DRAFT_ROWS = 32_768

Output = tuple[str, torch.dtype, tuple[int, ...]]
# Chooses a method by the scheme of every linear and the names of the tensors that are written.
MethodChooser = Callable[[Mapping[str, Scheme | None], Collection[str]], Method]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One source tensor and its fate."""

    source: TensorInfo  # where it is read
    fate: Fate  # quantized, copied, written in a rotated basis, or dropped
    reason: str  # why it is dropped or left as it is
    # Its linear (a tied embedding's is lm_head), or the packed embedding; None for others.
    module: str | None
    scheme: Scheme | None  # None unless quantized
    outputs: tuple[Output, ...]  # tensors written, (name, dtype, shape)
    rereads: bool = False  # True where another step reads the same tensor and accounts for it

    @property
    def output_bytes(self) -> int:
        """Bytes this step writes."""
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.outputs)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole conversion."""

    config: Mapping[str, Any]  # config.json of the result
    recipe: Recipe  # rules that decided the schemes; it names the method
    method: Method  # of the recipe, chosen where the request named none
    # Decoder in the order of the forward pass, head, multi-token prediction, vision; a tied head
    # that is quantized reads the embedding a second time.
    steps: tuple[TensorPlan, ...]
    shards: tuple[Shard, ...]  # the files to be
    schemes: Mapping[str, Scheme | None]  # of every linear module, and of a packed embedding
    # Parts of the tensors that a rotation changes, by name in the result.
    rotated: Mapping[str, Role]
    draft_rows: int  # rows of the draft head; 0 without one
    frequent_rows: int = 0  # rows of the head in INT8 beside one of fewer bits

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors, each counted once."""
        return sum(step.source.nbytes for step in self.steps if not step.rereads)

    @property
    def written(self) -> set[str]:
        """Names of the source tensors that are not dropped."""
        return {step.source.name for step in self.steps if step.fate != "dropped"}

    @property
    def vision_steps(self) -> tuple[TensorPlan, ...]:
        """Tensors of the vision tower; none without one."""
        return tuple(step for step in self.steps if is_carried(self.config, step.source.name))

    @property
    def output_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft head's file."""
        if not self.draft_rows:
            return 0
        hidden = read_config(self.config).hidden_size
        return draft_head_size(self.draft_rows, hidden, draft_scheme(self.config, self.recipe))

    @property
    def frequent_bytes(self) -> int:
        """Bytes of the file of frequent rows."""
        if not self.frequent_rows:
            return 0
        hidden = read_config(self.config).hidden_size
        scheme = frequent_scheme(self.config, self.recipe)
        return frequent_rows_size(self.frequent_rows, hidden, scheme)

    @property
    def weight_bytes(self) -> int:
        """Bytes that bits per weight count: of all shards, and of frequent rows."""
        return self.output_bytes + self.frequent_bytes

    @property
    def parameters(self) -> dict[Part, int]:
        """Weights of the source by part, a stale copy of a tied embedding left out."""
        counts: dict[Part, int] = {}
        for step in self.steps:
            part = part_of(self.config, step.source.name)
            if not step.rereads and not (part == "decoder" and step.fate == "dropped"):
                counts[part] = counts.get(part, 0) + math.prod(step.source.shape)
        return counts

    @property
    def bits_per_weight(self) -> float:
        """Bits of the weight files over the parameters they hold."""
        return bits_per_weight(self.weight_bytes, self.written_parameters)

    @property
    def written_parameters(self) -> int:
        """Weights of the source that are in the result, a tied head's counted once."""
        return count_parameters((s.source.name, s.source.shape, s.fate) for s in self.steps)

    def digest(self) -> str:
        """Identifies recipe, source headers, layout and release: equal in a resumed run."""
        content = {
            "lowbit": version("lowbit"),
            "recipe": self.recipe.to_json(),
            "config": dict(self.config),
            "sources": [
                [step.source.name, step.source.dtype_name, step.source.shape, step.fate]
                for step in self.steps
            ],
            "shards": [hashlib.sha256(shard.header).hexdigest() for shard in self.shards],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_rows(plan: Plan, hashes: Mapping[int, str]) -> tuple[SourceTensor, ...]:
    """The source's tensors as lowbit.json lists them; hashes by the numbers of their steps."""
    return tuple(
        SourceTensor(
            name=step.source.name,
            dtype=step.source.dtype_name,
            shape=step.source.shape,
            fate=step.fate,
            reason=step.reason,
            sha256=hashes[number],
            bits=step.scheme.bits if step.scheme else None,
            group_size=step.scheme.group_size if step.scheme else None,
        )
        for number, step in enumerate(plan.steps)
        if not step.rereads
    )


def make_plan(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    recipe: Recipe,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    choose: MethodChooser | None = None,
) -> Plan:
    """Decide the fate of every tensor of a source.

    Args:
        recipe: rules for the bits; its method may be left open.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        CheckpointError: a tensor is missing, extra, misshapen or of an unexpected dtype; or the
            result's config.json would be longer than readers allow.
        QuantizationError: the source is quantized already, or the recipe does not fit.
    """
    _check_recipe(config, recipe)
    parts, tied = parts_of(config, tensors, recipe), is_tied(config)
    schemes = recipe.schemes(parts.table)
    packed = next((s.module for s in parts.table if s.is_embedding and s.module in schemes), None)
    if tied and schemes["lm_head"] is None:
        check_tied_embedding(packed)
        del schemes["lm_head"]  # it stays the embedding
    method = recipe.method
    if method is None:
        if choose is None:
            raise QuantizationError("the recipe names no method", hint="name one, as `rtn`")
        method = choose(schemes, parts.written)
    rotated = _rotated(config, schemes, parts.written, method)
    if tied and packed is not None and not rotated and schemes["lm_head"] == schemes[packed]:
        del schemes["lm_head"]  # the same codes serve both; a rotated head has another gain
    steps = [
        *_steps(parts.table, tensors, tied, schemes, rotated),
        *_steps_aside(parts, tensors, recipe.drop_vision, rotated),
    ]
    outputs = [output for step in steps for output in step.outputs]
    _check_records([name for name, _, _ in outputs] + [step.source.name for step in steps])
    kept = [step.source.name for step in steps if step.fate != "dropped"]
    drafts = any(part_of(config, name) == "mtp" for name in kept)
    out_config = _output_config(config, schemes, kept, drafts)
    shards = lay_out(outputs, max_shard_bytes)
    rows = draft_rows(config, recipe, drafts)
    frequent = _frequent_rows(config, recipe, schemes.get("lm_head"))
    final = replace(recipe, method=method, frequent_rows=frequent)
    written = tuple(steps), tuple(shards)
    return Plan(out_config, final, method, *written, schemes, rotated, rows, frequent)


def _check_recipe(config: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a source that is quantized, and a recipe that no tensor could make fit."""
    packed_by = method_of(config)
    if packed_by is not None:
        raise QuantizationError(
            f"the source is already quantized (`{packed_by}`)",
            hint="convert from the BF16 checkpoint; lowbit-run "
            + ("may run it as it is" if runs_as_stored(config) else "does not run it either"),
        )
    if recipe.method is not None:
        check_method(recipe.method, read_config(config).experts is not None, is_drafter(config))
    check_drafter(config, recipe)


def _rotated(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme | None],
    written: Collection[str],
    method: Method,
) -> dict[str, Role]:
    """Parts of the tensors that a method rotates, by name; empty where it rotates none."""
    if not method.rotate:
        return {}
    obstacle = why_not_rotated(config, schemes, written)
    if obstacle is not None:
        raise QuantizationError(
            f"method `{method}`: this model cannot be rotated: {obstacle}",
            hint="leave out +rotate",
        )
    return rotation_roles(config, written)


def _output_config(
    config: Mapping[str, Any],
    schemes: Mapping[str, Scheme | None],
    kept: Sequence[str],
    drafts: bool,
) -> dict[str, Any]:
    """The result's config.json.

    Args:
        kept: tensors of the source of which something is in the result.
        drafts: a head for multi-token prediction is among them.
    """
    made = untied(config) if schemes.get("lm_head") else config
    made = _published(made if drafts else without_mtp(made))
    made[KEY] = write_quantization_config(schemes, never_quantized(config, kept))
    _check_length(made)
    return made


def _check_length(config: Mapping[str, Any]) -> None:
    """Refuse a config.json that no reader would take: indented it is longer than the source's."""
    length = len(json_bytes(config))
    if length > MAX_CONFIG_BYTES:
        raise CheckpointError(
            f"{CONFIG_FILE} of the result would have {length} bytes, expected at most "
            f"{MAX_CONFIG_BYTES}",
            hint=f"remove from {CONFIG_FILE} the keys that do not describe the model",
        )


def _check_records(names: Sequence[str]) -> None:
    length = sum(len(name) + RECORD_BYTES for name in names)
    if length > MAX_TEXT_BYTES:
        raise CheckpointError(
            f"{MANIFEST_FILE} of the result would have about {length / 1e6:.0f} MB, expected at "
            f"most {MAX_TEXT_BYTES / 1e6:.0f} MB: {len(names):,} tensors before and after",
        )


def _published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without paths of the machine that saved it; a Hub id stays."""
    kept = {}
    for key, value in config.items():
        named = isinstance(value, str) and value != "" and not HUB_ID.fullmatch(value)
        if key != NAME_OR_PATH or not named:
            kept[key] = _published(value) if isinstance(value, dict) else value
    return kept


def _steps(
    table: Sequence[TensorSpec],
    tensors: Mapping[str, TensorInfo],
    tied: bool,
    schemes: Mapping[str, Scheme | None],
    rotated: Collection[str],
) -> list[TensorPlan]:
    embedding = next((spec.name for spec in table if spec.role == "embedding"), None)
    steps = []
    for spec in table:
        if spec.role != "head" or not tied:
            step = _step(tensors[spec.name], spec, schemes.get(spec.module), rotated)
            if spec.name == embedding and tied and "lm_head" not in schemes:
                # A packed tensor is written under the name of its module.
                module = "lm_head" if step.scheme is None else step.module
                step = replace(step, module=module, reason="embedding and tied head")
            steps.append(step)
            continue
        if spec.name in tensors:
            reason = "tied: the embedding is used"
            steps.append(TensorPlan(tensors[spec.name], "dropped", reason, spec.module, None, ()))
        if embedding is not None and spec.module in schemes:
            step = _step(tensors[embedding], spec, schemes[spec.module], rotated)
            reason = "tied to the embedding, untied to be quantized"
            steps.append(replace(step, reason=reason, rereads=True))
    return steps


def _step(
    source: TensorInfo, spec: TensorSpec, scheme: Scheme | None, rotated: Collection[str]
) -> TensorPlan:
    if scheme is None:
        reason = "as the recipe says" if spec.quantizable else f"{spec.role}: never quantized"
        outputs: tuple[Output, ...] = ((spec.name, source.dtype, source.shape),)
        module = spec.module if spec.quantizable else None
        return TensorPlan(source, _stored(source, rotated), reason, module, None, outputs)
    N, K = source.shape
    outputs = tuple(
        (f"{spec.module}.{suffix}", OUTPUT_DTYPES[suffix], shape)
        for suffix, shape in packed_shapes(N, K, scheme, spec.module).items()
    )
    return TensorPlan(source, "quantized", "", spec.module, scheme, outputs)


def _stored(source: TensorInfo, rotated: Collection[str]) -> Fate:
    return "rotated" if source.name in rotated else "copied"


def _steps_aside(
    parts: SourceParts,
    tensors: Mapping[str, TensorInfo],
    drop_vision: bool,
    rotated: Collection[str],
) -> list[TensorPlan]:
    """Steps of the tensors that are not in the table."""
    steps = [_drop(info, "multi-token prediction") for info in parts.dropped_mtp.values()]
    steps += [
        TensorPlan(tensors[name], "dropped", reason, None, None, ())
        for name, reason in parts.unneeded.items()
        if name not in parts.dropped_mtp and name not in parts.carried
    ]
    carried = [parts.carried[name] for name in sorted(parts.carried)]
    return steps + [_carry(info, drop_vision, rotated) for info in carried]


def _carry(source: TensorInfo, dropped: bool, rotated: Collection[str]) -> TensorPlan:
    """A tensor of the vision tower, whatever it is."""
    if dropped:
        return _drop(source, "vision tower")
    outputs = ((source.name, source.dtype, source.shape),)
    reason = "vision tower: carried unchecked"
    return TensorPlan(source, _stored(source, rotated), reason, None, None, outputs)


def _drop(source: TensorInfo, part: str) -> TensorPlan:
    return TensorPlan(source, "dropped", f"{part}: as the recipe says", None, None, ())


def check_drafter(config: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse settings of a head for a drafter, which takes that of its target.

    Raises:
        QuantizationError: naming the option.
    """
    given = {
        "--lm-head": recipe.head,
        "--draft-vocabulary": recipe.draft_vocabulary,
        "--frequent-rows": recipe.frequent_rows,
    }
    for option, value in given.items():
        if value and is_drafter(config):
            raise QuantizationError(
                f"a drafter ({kind_of(config)}) has no output head", hint=f"leave out {option}"
            )


def draft_rows(config: Mapping[str, Any], recipe: Recipe, drafts: bool) -> int:
    """Rows of the draft head; 0 without one.

    Args:
        recipe: may name their number.
        drafts: the result has a head for multi-token prediction.

    Raises:
        QuantizationError: more rows than the vocabulary has others.
    """
    vocabulary = read_config(config).vocab_size
    if recipe.draft_vocabulary is None:
        return DRAFT_ROWS if drafts and vocabulary > LARGE_VOCABULARY else 0
    if recipe.draft_vocabulary >= vocabulary:
        raise QuantizationError(
            f"a draft vocabulary of {recipe.draft_vocabulary} tokens, expected fewer than the "
            f"model's {vocabulary}",
            hint="give a smaller --draft-vocabulary, or 0 to draft with the whole head",
        )
    return recipe.draft_vocabulary


def _frequent_rows(config: Mapping[str, Any], recipe: Recipe, head: Scheme | None) -> int:
    """Frequent rows that a recipe asks for; `head` is the scheme of the head beside them."""
    if not recipe.frequent_rows:
        return 0
    if head is None or head.bits >= FREQUENT_BITS:
        raise QuantizationError(
            f"frequent rows in INT8 beside a head in {head or 'its stored dtype'}, which loses "
            "nothing that they bring back",
            hint="give the head fewer bits with --lm-head int4, or leave out --frequent-rows",
        )
    vocabulary = read_config(config).vocab_size
    if recipe.frequent_rows >= vocabulary:
        raise QuantizationError(
            f"{recipe.frequent_rows} frequent rows, expected fewer than the model's {vocabulary}",
            hint="give a smaller --frequent-rows, or --lm-head int8",
        )
    return recipe.frequent_rows


def frequent_scheme(config: Mapping[str, Any], recipe: Recipe) -> Scheme:
    """INT8 in the recipe's groups, or the next smaller ones that fit."""
    return Scheme(
        FREQUENT_BITS, fitting_group_size(read_config(config).hidden_size, recipe.group_size)
    )


def draft_scheme(config: Mapping[str, Any], recipe: Recipe) -> Scheme:
    """INT4 in the recipe's groups, or the next smaller ones that fit."""
    return Scheme(
        DRAFT_BITS, fitting_group_size(read_config(config).hidden_size, recipe.group_size)
    )
