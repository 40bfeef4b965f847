"""A checkpoint folder becomes a model that answers requests."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lowbit.formats.errors import RequestError, ResourceError, UnsupportedModelError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.locate import locate
from lowbit.formats.layout.recipes import GROUP_SIZE, Base
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.text.template import load_chat_template
from lowbit.runtime.engine.bounds import Bounds
from lowbit.runtime.engine.drafting import new_drafting
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.input_power import Method, calibration_ids, check_searched, input_power
from lowbit.runtime.engine.memory import choose_cache
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.widths import drafts_together
from lowbit.runtime.models.drafter import load_drafter, open_drafter
from lowbit.runtime.models.loader import check_device, load_decoder, open_model
from lowbit.runtime.speculation.modes import DEFAULT_MODE, Mode
from lowbit.runtime.speculation.settings import Speculation
from lowbit.runtime.state.sampling import sampling_defaults
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer


def load(
    folder: str | Path,
    *,
    device: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    context: int | None = None,
    max_sequences: int = 4,
    cache_tokens: int | None = None,
    quantize: Base | None = None,
    group_size: int = GROUP_SIZE,
    method: Method = "rtn",
    max_waiting: int | None = None,
    speculate: Mode = DEFAULT_MODE,
    draft_tokens: int | None = None,
    drafter: str | Path | None = None,
    allow_control_tokens: bool = False,
) -> Model:
    """Load a packed checkpoint (a plain BF16 one works too).

    Args:
        folder: with config.json, safetensors and tokenizer.json; or a Hub id, `org/name` or
            `org/name@revision`, which is fetched into the cache of huggingface_hub.
        device: `cpu` or `cuda`; `auto` or None takes a GPU if there is one.
        dtype: of activations and dense weights. float32, on the CPU only, is the checked mode:
            exact dequantized weights.
        context: tokens of prompt and output; None for min(max_position, 8192, what fits).
        max_sequences: requests that are decoded together; others wait.
        cache_tokens: of all requests together, and of conversations that are kept; None for
            `max_sequences` times `context`, or what fits.
        quantize: recipe (int4, int8, mixed) for a BF16, F16 or F32 checkpoint: quantized as it is
            read, with the codes and scales that lowbit-convert writes.
        group_size: weights that share a scale, with `quantize`; where it does not divide a row, the
            next smaller one of 32, 64, 128, 256 that does.
        method: how scales are chosen, with `quantize`: `rtn` searches for the least error,
            `weighted` weights it by the input's power on a bundled text, which runs through the
            original first, and `absmax` does not search.
        max_waiting: requests that may wait beside those that are decoded together; a further one
            is refused. None for any number.
        speculate: what proposes tokens that a step checks together: `off`, `ngram`, which copies
            what followed the same tokens before, `mtp`, the model's head for multi-token
            prediction, `dflash`, a drafter, or `auto` for all that there is. The output does not
            depend on it.
        draft_tokens: of a step at most; None for as many as suit the model.
        drafter: folder or Hub id of a DFlash drafter for this model, packed or BF16, read as it is
            stored; it stands in for the model's head. On the CPU only.
        allow_control_tokens: control tokens that a message, a tool or an argument of the template
            spells, such as `<|im_end|>`, are these tokens, so that a message may end its turn and
            begin another. By default they are plain text. Raw prompts are taken as they are.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        FormatError: a packed file that breaks SPEC.md or uses a scheme that cannot be served.
        UnsupportedModelError: the architecture, or a feature of it, is not implemented, or `mtp`
            for a model without that head.
        QuantizationError: `quantize` for a checkpoint that is quantized already or has NaN, or a
            recipe that does not fit it.
        ResourceError: no GPU, or too little memory.
        RequestError: a context or dtype that the model or device does not have, a negative
            `max_waiting`, or an unknown `speculate` or number of drafts.
    """
    if max_waiting is not None and max_waiting < 0:
        raise RequestError(f"`max_waiting` must be at least 0, got {max_waiting}")
    speculation = Speculation(speculate, draft_tokens, drafter is not None)
    device = choose_device(device)  # before anything is fetched
    folder = locate(str(folder)).folder
    drafter = None if drafter is None else locate(str(drafter)).folder
    started = time.perf_counter()
    rule: ScaleRule = "absmax" if method == "absmax" else "signed"
    opened = open_model(folder, quantize, group_size, rule, head=speculation.head)
    if speculation.mode == "mtp" and not opened.head:
        raise UnsupportedModelError(
            f"`{folder}` has no head for multi-token prediction", hint="use --speculate ngram"
        )
    if drafter is not None:
        opened = replace(opened, drafter=open_drafter(Path(drafter), opened))
    weighted = quantize is not None and method == "weighted"
    if weighted:
        check_searched(opened)
    generation = load_generation_config(folder, opened.config.vocab_size)
    config_stops = generation.eos_token_ids or opened.config.eos_token_ids
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder)
    if template is not None:
        template.prepare()  # while the weights are read
    check_device(opened, device)
    if dtype not in (torch.bfloat16, torch.float32):
        raise RequestError(f"dtype must be bfloat16 or float32, got {dtype}")
    if dtype == torch.float32 and device != "cpu":
        raise RequestError("float32 runs on the CPU only", hint="use device='cpu'")
    drafts = speculation.most_drafts(recurrent=opened.config.linear_layers is not None)
    together = drafts_together(drafts, max(1, max_sequences))
    cache = choose_cache(opened, device, dtype, context, max_sequences, cache_tokens, together)
    beside = None
    if opened.drafter is not None:  # before the model, which takes longer
        beside = load_drafter(opened.drafter, dtype, cache.context)
    if weighted:
        power = _measured_power(folder, tokenizer, device, dtype)
        opened = replace(
            open_model(folder, quantize, group_size, rule, power, speculation.head),
            drafter=opened.drafter,
        )
    decoder = load_decoder(opened, device, dtype, cache.context)
    vocabulary = min(tokenizer.vocabulary, opened.config.vocab_size)
    runner = new_runner(decoder, vocabulary, cache, dtype, device, beside)
    engine = Engine(runner, max_waiting, new_drafting(runner, speculation, drafts, device))
    stop_ids = frozenset((*config_stops, *tokenizer.stop_ids()))
    if device != "cpu":
        torch.cuda.synchronize()
    return Model(
        folder=folder,
        opened=opened,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        bounds=Bounds(tokenizer, template, vocabulary, stop_ids),
        defaults=sampling_defaults(generation),
        stop_ids=stop_ids,
        device=device,
        dtype=dtype,
        load_s=time.perf_counter() - started,
        cache=cache,
        quantized_at_load=quantize,
        allow_control_tokens=allow_control_tokens,
    )


def _measured_power(
    folder: Path, tokenizer: Tokenizer, device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Power of every linear's input channels on the bundled text; see `input_power`."""
    original = open_model(folder)
    return input_power(original, calibration_ids(tokenizer, original), device, dtype)


def choose_device(device: str | None) -> str:
    """`cpu` or `cuda`: what was asked for if it is there; for `auto` or None a GPU if there is one.

    Raises:
        RequestError: another name.
        ResourceError: a GPU was asked for and there is none.
    """
    if device not in (None, "auto", "cpu", "cuda"):
        raise RequestError(f"device must be auto, cpu or cuda, got `{device}`")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ResourceError("no CUDA device was found", hint="use --device cpu")
    if device in ("cpu", "cuda"):
        return str(device)
    return "cuda" if available else "cpu"
