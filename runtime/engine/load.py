"""Load a checkpoint folder into a model that answers requests."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError, ResourceError, UnsupportedModelError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.locate import locate
from lowbit.formats.kv_cache import plain_cache
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.machine.gpu import no_gpu
from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.runtime.backends.exchange import check_gloo
from lowbit.runtime.engine.constraints import ConstraintFactory
from lowbit.runtime.engine.draft.block import new_blocks
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import ANSWER_LENGTH, LoadKeywords, LoadOptions, Mode
from lowbit.runtime.engine.memory import (
    Account,
    ChosenType,
    Decided,
    choose_cache,
    choose_cache_type,
    choose_sequences,
)
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel.crew import Crew, load_shared
from lowbit.runtime.engine.parallel.link import GpuLink
from lowbit.runtime.engine.parallel.messages import Setup
from lowbit.runtime.engine.plan import CHUNK, MOST_CHUNK
from lowbit.runtime.engine.vision import Vision, open_vision
from lowbit.runtime.engine.vision_place import place_tower
from lowbit.runtime.models.input_power import calibration_ids, check_searched, input_power
from lowbit.runtime.models.loader import (
    Decoder,
    OpenedModel,
    load_decoder,
    load_drafter,
    open_model,
    with_activations,
    with_drafter,
    without_head,
)
from lowbit.runtime.models.shards import check_ranks, shard_of
from lowbit.runtime.state.device_state import CacheSize, kv_pages
from lowbit.runtime.state.sampling_params import SamplingParams, sampling_defaults
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer
from lowbit.runtime.weights.share import Share

if TYPE_CHECKING:
    from lowbit.runtime.kernels.launch.tuned import Launches
    from lowbit.runtime.models.loader import Drafter, Rows

CPU_LAYER_OPERATIONS = 16 * 10**9  # of a chunk: 0.2 s on two cores with AVX2
CPU_CHUNK_LEAST = 128  # tokens; for fewer, widening weights takes longer than products


def load(
    folder: str | Path, options: LoadOptions | None = None, **keywords: Unpack[LoadKeywords]
) -> Model:
    """Load a packed checkpoint (a plain BF16 one works too).

    Args:
        folder: with config.json, safetensors and tokenizer.json; or a Hub id, `org/name` or
            `org/name@revision`, which is fetched into the cache of huggingface_hub.
        options: see `LoadOptions`; None for its defaults.
        keywords: fields of `LoadOptions`, in place of those that `options` has.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: a packed file that breaks SPEC.md or uses a scheme that cannot be served; or
            damaged launches of `lowbit-run tune`.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented, or `mtp`
            for a model without that head.
        QuantizationError: `quantize` for a checkpoint that is quantized already or has NaN, or a
            recipe that does not fit it.
        ResourceError: no GPU, or too little memory.
        RequestError: an option out of its range, or a context or dtype that the model or device
            does not have.
    """
    asked = options = replace(options or LoadOptions(), **keywords)
    device = choose_device(options.device)  # before anything is fetched
    dtype = options.dtype or torch.bfloat16
    check_device(dtype, options, device)
    ranks = options.tensor_parallel
    if device != "cpu" and ranks > 1:
        options = replace(options, speculate=options.speculate or "off")
    folder = locate(str(folder)).folder
    drafter = None if options.drafter is None else locate(str(options.drafter)).folder
    started = time.perf_counter()
    undecided = options.speculate is None and device != "cpu"  # the head decides: `default_mode`
    opened = _open(folder, drafter, options, mtp_head=undecided)
    if options.measures_inputs:
        check_searched(opened)
    text = _load_text(folder, opened)
    # Those that were measured are for the sizes of a whole model.
    launches = _launches_here() if device != "cpu" and ranks == 1 else None
    check_ranks(opened, ranks)
    shard = shard_of(opened, Share(0, ranks))
    account = Account(shard, device, dtype, plain_cache(dtype), text.vocabulary, ranks=ranks)
    decided, vision, no_vision = _with_vision(account, options)
    if ranks == 1:
        opened = decided.account.opened
    loaded = _load_weights(folder, opened, decided, launches, text.tokenizer)
    engine = _new_engine(loaded, decided)
    if device != "cpu":
        torch.cuda.synchronize()
    return Model(
        folder=folder,
        options=asked,
        opened=loaded.opened,
        engine=engine,
        tokenizer=text.tokenizer,
        template=text.template,
        constraints=ConstraintFactory(
            text.tokenizer, text.template, text.vocabulary, text.stop_ids
        ),
        defaults=text.defaults,
        stop_ids=text.stop_ids,
        device=device,
        dtype=dtype,
        load_s=time.perf_counter() - started,
        cache=decided.cache,
        sequences=decided.sequences,
        kv_cache=decided.kv_cache,
        launches=launches,
        vision=vision,
        no_vision=no_vision,
        crew=loaded.crew,
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """Files of a model that say how it reads and writes text; names as in `Model`."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingParams
    stop_ids: frozenset[int]
    vocabulary: int  # tokens that may be chosen; rows of the head behind them have no text


def _load_text(folder: Path, opened: OpenedModel) -> _Text:
    """Load the tokenizer, the chat template and the model's own settings of sampling.

    Raises:
        CheckpointError: one of them is damaged.
    """
    config = opened.config
    generation = load_generation_config(folder, config.vocab_size)
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    if template is not None:
        template.prepare()  # while the weights are read
    config_stops = generation.eos_token_ids or config.eos_token_ids
    return _Text(
        tokenizer=tokenizer,
        template=template,
        defaults=sampling_defaults(generation),
        stop_ids=frozenset((*config_stops, *tokenizer.stop_ids())),
        vocabulary=min(tokenizer.vocabulary, config.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Weights of a model on their device."""

    opened: OpenedModel  # files that they were read from
    decoder: Decoder  # the first rank's
    target: Any  # the model as a drafter sees it, see `load_target`
    drafter: "tuple[Drafter, Rows | None] | None"  # and its rows of the head
    crew: Crew | None  # the other ranks; None for a model in one process


def _load_weights(
    folder: Path,
    opened: OpenedModel,
    decided: Decided,
    launches: "Launches | None",
    tokenizer: Tokenizer,
) -> _Loaded:
    """Load the weights of a model and of its drafter.

    Args:
        folder: of the model.
        opened: the whole model, whose first shard is `decided.account.opened`.
        tokenizer: of the text that inputs are measured on, where the options ask for that.

    Raises:
        LowbitError: see `load`.
    """
    account, options, context = decided.account, decided.options, decided.cache.context
    device, dtype = account.device, account.dtype
    drafter = None
    if opened.drafter is not None:  # before the model, which takes longer
        drafter = load_drafter(opened, device, dtype, context, launches)
    if options.measures_inputs:
        original = open_model(folder)
        power = input_power(original, calibration_ids(tokenizer, original), device, dtype)
        searched = _open(folder, None, options, power)
        opened = replace(searched, drafter=opened.drafter, draft=opened.draft)
    if account.ranks == 1:
        decoder = load_decoder(opened, device, dtype, context, launches)
        return _Loaded(opened, decoder, decoder, drafter, crew=None)
    setup = _setup_of(folder, opened.config.hidden_size, decided)
    crew, first, target = load_shared(setup, account.opened)
    return _Loaded(opened, first, target, drafter, crew)


def _new_engine(loaded: _Loaded, decided: Decided) -> Engine:
    """An engine without requests."""
    opened, decoder, crew = loaded.opened, loaded.decoder, loaded.crew
    account, options, cache = decided.account, decided.options, decided.cache
    device, dtype, kind = account.device, account.dtype, decided.kv_cache.cache_type
    chunk = CHUNK if device != "cpu" else cpu_chunk(opened.token_weights() // len(decoder.layers))
    tokens = chunk, opened.part_tokens(device)
    runner = new_runner(decoder, account.vocabulary, cache, dtype, device, kind, *tokens)
    runner.crew = crew
    if crew is not None and crew.peers is not None:
        from lowbit.runtime.kernels.exchange import exchange_first  # needs triton and a GPU

        runner.link = GpuLink(partial(exchange_first, peers=crew.peers), crew)
        runner.results.waiting = crew.waiting
    if loaded.drafter is not None:
        reader, rows = loaded.drafter
        pages = kv_pages(reader.config, cache.all_pages, kind, device)
        sizes = runner.tables.shape[0], dtype
        runner.blocks = new_blocks(reader, loaded.target, pages, rows, *sizes)
    drafts = options.most_drafts(recurrent=opened.config.linear_layers is not None)
    engine = Engine(runner, options.max_waiting, new_drafts(runner, options, drafts, device))
    if device == "cpu" and options.threads is not None:
        engine.threads = None  # no other number is tried
        torch.set_num_threads(options.threads)
    elif device == "cpu" and crew is not None:  # whose own thread has a number of its own
        engine.threads = None
    return engine


def _with_vision(account: Account, options: LoadOptions) -> tuple[Decided, Vision | None, str]:
    """Sizes that memory decides, the model's vision tower, and why there is none.

    Raises:
        RequestError, ResourceError: as `decide` and `place_tower`.
    """
    if not options.takes_images:
        return decide(account, options), None, "it was loaded without images"
    vision, missing = open_vision(account.opened.checkpoint)
    if vision is None:
        return decide(account, options), None, missing
    decided, place = place_tower(
        partial(vision.memories, account.dtype),
        options.vision_device,
        account.device,
        lambda needed: decide(replace(account, vision_bytes=needed), options),
    )
    return decided, Vision(vision.opened, vision.input, place, account.dtype), ""


def decide(account: Account, options: LoadOptions) -> Decided:
    """Sizes of the cache, and the source of drafts, where the options leave them to memory.

    Raises:
        RequestError, ResourceError: as `choose_cache`.
    """
    opened, sequences = account.opened, choose_sequences(account, options)
    if options.max_sequences is None:
        options = replace(options, max_sequences=sequences.count)
        if account.device != "cpu":
            tokens = sequences.count * ANSWER_LENGTH, options.context, options.cache_tokens
            account = replace(account, auto_tokens=max(each or 0 for each in tokens))
    if options.speculate is None:
        options = replace(options, speculate=default_mode(account, options))
        opened = opened if opened.drafts == options.mtp_head else without_head(opened)
        account = replace(account, opened=opened)
    drafts = options.most_drafts(recurrent=opened.config.linear_layers is not None)
    return Decided(account, options, sequences, *_cache_of(account, options, drafts))


def cpu_chunk(layer_weights: int) -> int:
    """Most tokens of a prompt that pass the layers together on a CPU, so that a layer is short.

    Other sequences decode between two layers. The number depends on the model alone, since the bits
    of a prompt depend on its chunks.
    """
    tokens = max(1, CPU_LAYER_OPERATIONS // (2 * max(1, layer_weights)))
    return max(CPU_CHUNK_LEAST, 1 << min(tokens, CHUNK).bit_length() - 1)


def _launches_here() -> "Launches | None":
    from lowbit.runtime.kernels.launch.tuned import card_here, read_launches  # needs triton

    return read_launches(card_here())


def check_device(dtype: torch.dtype, options: LoadOptions, device: str) -> None:
    """Refuse what runs on a CPU only.

    Raises:
        RequestError: naming it.
        ResourceError: GPUs that are not there, or that cannot share a model.
    """
    if device == "cpu":
        return
    if dtype == torch.float32:
        raise RequestError("float32 runs on the CPU only", hint="use device='cpu'")
    if options.tensor_parallel > 1:
        check_gloo()
        from lowbit.runtime.backends.symmetric import check_devices  # needs triton and a GPU

        check_devices(options.gpus)


def _setup_of(folder: Path, hidden: int, decided: Decided) -> Setup:
    """The setup of the ranks of a model whose hidden states have `hidden` numbers; see `Setup`."""
    account, options, cache = decided.account, decided.options, decided.cache
    threads = options.threads or max(1, torch.get_num_threads() // account.ranks)
    sizes = account.dtype, cache, decided.kv_cache.cache_type, threads
    setup = Setup(folder, options, account.opened.share, Path(), *sizes)
    if account.device == "cpu":
        return setup
    from lowbit.runtime.backends.symmetric import reach_each_other  # needs triton and a GPU

    return replace(
        setup,
        devices=options.gpus,
        vocabulary=account.vocabulary,
        gpu_bytes=account.follower.needed(cache, cache.all_pages),
        wide_values=MOST_CHUNK * hidden,
        through_host=not reach_each_other(options.gpus),
    )


def _open(
    folder: Path,
    drafter: Path | None,
    options: LoadOptions,
    power: Mapping[str, Tensor] | None = None,
    mtp_head: bool = False,
) -> OpenedModel:
    """A checkpoint whose headers fit the options, and its drafter."""
    rule: ScaleRule = "absmax" if options.method == "absmax" else "signed"
    head = mtp_head or options.mtp_head
    opened = open_model(folder, options.quantize, options.group_size, rule, power, head)
    if options.speculate == "mtp" and not opened.head:
        raise UnsupportedModelError(
            f"`{folder}` has no head for multi-token prediction", hint="use --speculate ngram"
        )
    if drafter is not None:
        opened = with_drafter(opened, drafter)
    return with_activations(opened, options.activations)


def default_mode(account: Account, options: LoadOptions) -> Mode:
    """Source of drafts where none is asked for.

    `auto` on a GPU for a model with a head that can be run, if the cache stays as large as without
    drafts; else `off`. On a CPU a round costs nearly as many steps as it checks tokens.

    Raises:
        RequestError, ResourceError: as `choose_cache`, without speculation.
    """
    opened = account.opened
    layers = getattr(opened.config, "mtp_layers", 0)
    if account.device == "cpu" or not opened.drafts or layers != 1:
        return "off"
    auto = replace(options, speculate="auto")
    drafts = auto.most_drafts(recurrent=opened.config.linear_layers is not None)
    plain, cache = _cache_of(replace(account, opened=without_head(opened)), options, 0)
    try:
        drafted, beside = _cache_of(account, auto, drafts)
    except ResourceError:  # there is room for the model alone
        return "off"
    same = (plain, cache.context, cache.pages) == (drafted, beside.context, beside.pages)
    return "auto" if same else "off"


def _cache_of(account: Account, options: LoadOptions, drafts: int) -> tuple[ChosenType, CacheSize]:
    chosen = choose_cache_type(account, options, drafts)
    return chosen, choose_cache(replace(account, cache_type=chosen.cache_type), options, drafts)


def choose_device(device: str | None) -> str:
    """`cpu` or `cuda`; for `auto` or None a GPU if there is one.

    Raises:
        ResourceError: a GPU was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise no_gpu()
    if device in ("cpu", "cuda"):
        return str(device)
    return "cuda" if available else "cpu"
