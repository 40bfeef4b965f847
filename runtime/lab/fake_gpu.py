"""A program that compiles the kernels of a model for one kind of GPU, on a machine without one.

The model is built of tensors without data, and its steps are sent as on such a GPU: so shapes,
alignment, constants and launch options are those of real launches, and Triton itself makes the keys
that it will look for. Only Triton's driver is a stand-in, and nothing is launched.

It is a process of its own, since Triton knows one driver.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lowbit.formats.architectures import kind_of
from lowbit.formats.architectures.vision import VisionConfig
from lowbit.formats.generation import load_generation_config
from lowbit.formats.kv_cache import INT8_CACHE, plain_cache
from lowbit.formats.layout.packing import PACKED, SCALE, WORD_BITS, packed_words
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.machine.parent import end_with_parent
from lowbit.runtime.backends import cuda
from lowbit.runtime.engine.chunks import CHUNK_WIDTHS, PACK_WIDTHS, SHORT_WIDTHS, Chunks
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks, new_blocks
from lowbit.runtime.engine.draft.verify import Part, Verifier
from lowbit.runtime.engine.graphs import (
    STEP_WIDTHS,
    Graphs,
    fills_step,
    kv_lens,
    most_drafts,
    width_for,
)
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import Account, asked_cache, choose_cache_type
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.vision import open_vision
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.kernels.rotate_patches import rotate_patches
from lowbit.runtime.models.architectures import DRAFTER_BUILD
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.models.loader import (
    OpenedModel,
    build_decoder,
    open_model,
    with_activations,
    with_drafter,
    with_head_rows,
)
from lowbit.runtime.models.selected_rows import selected_rows
from lowbit.runtime.state.device_state import kv_pages
from lowbit.runtime.state.sampling_params import SamplingParams, sampling_defaults
from lowbit.runtime.state.step import Ending, StepPlan
from lowbit.runtime.text.tokenizer import load_tokenizer
from lowbit.runtime.thresholds import PACK_SEQUENCES, ROUND_SEQUENCES, SEQUENCE_TOKENS
from lowbit.runtime.weights.weights import WIDE_BITS, Weights

WARP = 32
DTYPE = torch.bfloat16
# First of four lengths of prompts in a row, one of each alignment, for every way of computing.
LENGTHS = (17, 33, 49, 65, 129, 300, 1021)
LOWEST = 19  # priority of a process


@dataclass(slots=True)
class Tally:
    """Kernels by name: how many were compiled, and how many were there already."""

    compiled: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)

    def note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Count a kernel; Triton calls this for each."""
        name = src.name.removeprefix("_").removesuffix("_kernel")
        (self.found if cache_hit else self.compiled)[name] += 1


Compile = Callable[[Any, tuple[int, ...], Numbers[Any], Mapping[str, Any]], object]


def compile_only(
    kernel: Any, grid: tuple[int, ...], arguments: Numbers[Any], named: Mapping[str, Any]
) -> None:
    """Compile a kernel as `kernel[grid](*arguments, **named)` would, or find it in the cache."""
    kernel.warmup(*arguments, grid=grid, **named)


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """Triton's driver for a card that is not there."""

    card: Card  # that kernels are chosen and compiled for
    # takes the place of every launch for tensors on `meta` (`launch.device.run`)
    compile: Compile = compile_only

    def get_current_target(self) -> GPUTarget:
        """The kind of GPU that kernels are compiled for."""
        major, minor = self.card.capability
        return GPUTarget("cuda", 10 * major + minor, WARP)

    def get_current_device(self) -> int:
        """Number of the only GPU."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Number of a stream that nothing is sent to."""
        return 0


class MetaWeights(Weights[Any]):
    """Weights of the right shapes, without numbers and without reading a file."""

    def _fill(self, name: str, out: Tensor) -> None:
        pass

    def _scales(self, module: str) -> Tensor:
        info = self.checkpoint.tensors[f"{module}.{SCALE}"]
        return torch.empty(info.shape, dtype=info.dtype, device=self.device)

    def _widened(self, modules: Iterable[str], scheme: Scheme) -> Tensor:
        shapes = [self.checkpoint.tensors[f"{module}.{PACKED}"].shape for module in modules]
        words = packed_words(shapes[0][1] * WORD_BITS // scheme.bits, WIDE_BITS)
        rows = sum(shape[0] for shape in shapes)
        return torch.empty(rows, words, dtype=torch.int32, device=self.device)


def fake_gpu(card: Card, compile: Compile = compile_only) -> Tally:
    """Make Triton compile for a card that need not be there; see `FakeGpu`."""
    tally = Tally()
    driver.set_active(FakeGpu(card, compile))
    triton.knobs.compilation.listener = tally.note
    return tally


def meta_runner(opened: OpenedModel, options: LoadOptions, vocabulary: int) -> Runner:
    """The runner that `load` would make, of tensors without data."""
    account = Account(opened, "cuda", DTYPE, plain_cache(DTYPE), vocabulary)
    drafts = options.most_drafts(recurrent=opened.config.linear_layers is not None)
    size = asked_cache(account, options, drafts)
    weights = MetaWeights(
        *(opened.checkpoint, opened.schemes, "meta", DTYPE, cuda.prepare, cuda.gathered),
        activations=opened.activations,
        rotated=opened.rotated,
    )
    decoder = build_decoder(opened, weights, cuda, size.context)
    kind = choose_cache_type(account, options).cache_type
    part = opened.part_tokens("cuda")
    return new_runner(decoder, vocabulary, size, DTYPE, "meta", kind, part_tokens=part)


def send_steps(runner: Runner, params: Iterable[SamplingParams], hopper: bool) -> None:
    """Send every kind of step that answers are made of, without drafts.

    A drafter of the runner reads them.
    """
    replayed = hopper and runner.decoder.config.experts is None
    chunks = Chunks(runner.decoder, runner.each_layer, runner.tables, Graphs(), replayed)
    lengths = list(kv_lens(runner.context))
    plans = [chunk_plan(width) for width in CHUNK_WIDTHS if replayed]
    plans += [chunk_plan(width, reach) for width in SHORT_WIDTHS for reach in lengths]
    if replayed:  # as on the card: it says whether prompts pass together
        runner.chunks = chunks
    if runner.pack_tokens:
        packed = [width for width in CHUNK_WIDTHS if width <= runner.pack_tokens]
        plans += [chunk_plan(width, sequences=2) for width in packed]
        short = [(width, reach) for width in PACK_WIDTHS for reach in lengths]
        plans += [chunk_plan(*each, sequences=2, prompt=False) for each in short]
    for plan in plans:
        chunks.forward(chunks.padded(plan), runner.shifts)
    for count in () if replayed else [first + n for first in LENGTHS for n in range(4)]:
        for reach in lengths:
            if count <= reach:
                send_chunk(runner, count, reach - count)
    widths = [width for width in STEP_WIDTHS if width <= width_for(runner.rows)]
    warm_up(runner, widths)
    for each in params:
        for masked in (False, True):
            runner.sampler.configure_row(1, each, [0], masked)
            send_first_tokens(runner)
            warm_up(runner, widths, lengths[:1])
            runner.sampler.clear_row(1)


def warm_up(runner: Runner, widths: Iterable[int], lengths: Iterable[int] | None = None) -> None:
    """Send plain steps, whole and in halves.

    Args:
        widths: tokens of a step.
        lengths: tokens of the longest sequence; None for each that steps are recorded for.
    """
    runner.kept.make_room()
    for M in widths:
        every = kv_lens(runner.context, M) if lengths is None else lengths
        plans = [StepPlan(M, M, max_kv_len, longest=1) for max_kv_len in every]
        for plan in plans:
            runner.run_unchosen(plan)
        runner.run_step(plans[0])
        runner.run_choice(plans[0])


def meta_blocks(opened: OpenedModel, options: LoadOptions, runner: Runner) -> Blocks:
    """The drafter that `load` would put beside a runner, of tensors without data."""
    own = opened.drafter
    if own is None:
        raise ValueError("the model was opened without a drafter")
    weights = with_head_rows(
        MetaWeights(
            *(own.checkpoint, own.schemes, "meta", DTYPE, cuda.prepare, cuda.gathered),
            activations=own.activations,
        ),
        opened.draft,
    )
    kind = INT8_CACHE if options.kv_cache == INT8_CACHE.name else plain_cache(DTYPE)
    pages = kv_pages(own.config, runner.state.pages.count, kind, "meta")
    build = DRAFTER_BUILD[kind_of(own.checkpoint.config)]
    drafter = build(own.config, weights, cuda, runner.context)
    rows = selected_rows(opened.draft, weights)
    return new_blocks(drafter, runner.decoder, pages, rows, runner.tables.shape[0], DTYPE)


def round_sizes(most: int, rows: int) -> Iterator[tuple[int, int]]:
    """Sequences of a round and drafts of each, up to `most`; see `BlockRounds.fitting`."""
    for B in range(1, 1 + min(rows, ROUND_SEQUENCES)):
        last = most_drafts(B, most)
        for k in range(1, 1 + last):
            if fills_step(B, k) or k == last:
                yield B, k


def send_rounds(
    runner: Runner, blocks: Blocks, most: int, params: Iterable[SamplingParams]
) -> None:
    """Send rounds of a drafter with up to `most` drafts, without penalties and with them."""
    rounds = BlockRounds(Verifier(runner), blocks)
    sequence = Sequence(Request((1,)), count=1, seed=0, row=1, length=1)
    sequence.output.append(1)
    for each in params:
        penalized = replace(each, presence_penalty=1.0)
        # Penalties change how tokens are chosen, whatever the length.
        for asked, most_lengths in ((each, None), (penalized, 1)):
            runner.sampler.configure_row(1, asked, [0], False)
            for B, k in round_sizes(min(most, len(rounds.guesses)), runner.rows):
                part = Part(sequence, (0,) * k, (1,) * (1 + k))
                rounds.parts = [part] * B
                M = width_for(B * (k + 1))
                for length in islice(kv_lens(runner.context, M), most_lengths):
                    rounds.round(M, B, k, length, ordered=asked.penalized)
                rounds.join(B, k)
            runner.sampler.clear_row(1)


def chunk_plan(
    tokens: int, max_kv_len: int = 0, sequences: int = 1, prompt: bool | None = None
) -> StepPlan:
    """Chunks of prompts, so many tokens in all, without their sequences."""
    prompt = tokens > SEQUENCE_TOKENS if prompt is None else prompt
    ending: Ending = "apart" if prompt else "together"
    return StepPlan(tokens, sequences, max_kv_len, longest=tokens, prompt=prompt, ending=ending)


def send_chunk(runner: Runner, count: int, first: int) -> None:
    """Send a chunk of a prompt whose tokens begin at position `first`."""
    sequence = Sequence(Request((0,) * (first + count)), count=1, seed=0, row=1, length=first)
    sequence.pages = list(range(1, 1 + runner.tables.shape[1]))
    last_of(runner.chunk([sequence]))


def send_first_tokens(runner: Runner) -> None:
    """Choose first tokens: after a prompt, at places of either alignment, and after packs."""
    most = min(runner.rows, PACK_SEQUENCES if runner.pack_tokens else 1)
    rows = [range(row, row + 1) for row in range(1, 1 + min(2, runner.rows))]
    for these in (*rows, *(range(1, 1 + count) for count in range(2, 1 + most))):
        shape = len(these), runner.decoder.config.hidden_size
        ended = [Sequence(Request((0,)), count=1, seed=0, row=row, length=1) for row in these]
        runner.begin(ended, torch.empty(shape, dtype=DTYPE, device="meta"))


def send_picture(config: VisionConfig) -> None:
    """Send what a vision tower has kernels of its own for; they are those of any picture."""
    qkv = torch.empty(1, 3, config.num_heads, config.head_dim, dtype=DTYPE, device="meta")
    cos, sin = torch.empty(2, 1, config.head_dim // 2, device="meta")
    rotate_patches(qkv, cos, sin)


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Compile what a task asks for.

    Returns:
        Numbers of kernels by name, `compiled` and `found`.
    """
    folder = Path(task["folder"])
    card = Card(divmod(int(task["capability"]), 10), int(task["multiprocessors"]))
    tally = fake_gpu(card)
    vocabulary = load_tokenizer(folder).vocabulary
    for sequences in task["sequences"]:
        options = LoadOptions(device="cuda", max_sequences=sequences, **task["options"])
        opened = open_model(folder, options.quantize, options.group_size)
        if options.drafter is not None:
            opened = with_drafter(opened, Path(options.drafter))
        opened = with_activations(opened, options.activations)
        runner = meta_runner(opened, options, min(vocabulary, opened.config.vocab_size))
        generation = load_generation_config(folder, opened.config.vocab_size)
        likeliest = SamplingParams()
        params = [likeliest, sampling_defaults(generation), replace(likeliest, logprobs=0)]
        blocks = None if opened.drafter is None else meta_blocks(opened, options, runner)
        runner.blocks = blocks
        send_steps(runner, params, hopper=card.is_hopper)
        if blocks is not None:
            recurrent = opened.config.linear_layers is not None
            send_rounds(runner, blocks, options.most_drafts(recurrent), params)
        vision, _ = open_vision(opened.checkpoint)
        if vision is not None:
            send_picture(vision.opened.config)
    return {"compiled": dict(tally.compiled), "found": dict(tally.found)}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    if "parent" in given:  # beside a server, whose answers come first
        if not end_with_parent(given["parent"]):
            os._exit(1)
        if sys.platform != "win32":
            os.nice(LOWEST)
    json.dump(work(given), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # Triton's bindings would list what they still hold
