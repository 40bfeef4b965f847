"""Options for loading a checkpoint, from the command line to the engine, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.formats.layout.recipes import GROUP_SIZE, Base
from lowbit.formats.sequence_counts import MOST_SEQUENCES
from lowbit.runtime.thresholds import MOST_RANKS

if TYPE_CHECKING:
    import torch

Method = Literal["rtn", "absmax", "weighted"]
METHODS: tuple[Method, ...] = get_args(Method)
DEVICES = (None, "auto", "cpu", "cuda")
SEQUENCES = 16  # decoded together, for a file of prompts and by default on a CPU
ANSWER_LENGTH = 2048  # of prompt and answer, for which each of them then has room in the cache
FEW_SEQUENCES = 4  # of fewer, one client of a server may have all
SHORT = 128  # new tokens of an answer that no client's share holds back

Mode = Literal["off", "ngram", "mtp", "dflash", "auto"]  # who drafts
MODES: tuple[Mode, ...] = get_args(Mode)
DRAFTER_MODES: tuple[Mode, ...] = ("dflash", "auto")  # that use a `drafter`
KVCache = Literal["bf16", "int8", "auto"]
KV_CACHES: tuple[KVCache, ...] = get_args(KVCache)
DEFAULT_KV_CACHE: KVCache = "bf16"  # of the commands and of `load`
DEFAULT_ACTIVATIONS: Activations = "exact"  # likewise
VisionDevice = Literal["auto", "cuda", "cpu"]  # of the tower that reads images
VISION_DEVICES: tuple[VisionDevice, ...] = get_args(VisionDevice)
DEFAULT_VISION_DEVICE: VisionDevice = "auto"
MOST_DRAFTS = 15  # with the last token SEQUENCE_TOKENS
RECURRENT_DRAFTS = 7  # by default with linear layers: each draft takes a recurrent state


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a checkpoint.

    Attributes:
        device: `cpu` or `cuda`; `auto` or None takes a GPU if there is one.
        dtype: of activations and dense weights; None for bfloat16. float32, on the CPU only, is
            the checked mode: exact dequantized weights.
        threads: CPU threads of this process; None for PyTorch's number, or fewer where decode
            steps are faster.
        context: most tokens of prompt and output; None for min(max_position, 8192, what fits).
        max_sequences: requests that are decoded together, up to 256; others wait. None for 16 on a
            CPU, and on a GPU for as many, up to 64, as its memory has a cache of 2,048 tokens for;
            for fewer where more would shorten the context that one has.
            Of more than 64 a step runs in parts of 64, unless `activations` are `int8`.
        cache_tokens: size of the cache, for running requests and kept conversations; None for
            `max_sequences` times `context`, or what fits.
        kv_cache: type of the keys and values in the cache: `bf16` (float32 where activations are),
            `int8`, which takes half the memory and rounds, or `auto`: `bf16` while all that is
            asked for fits and, on a GPU, the context is at most 8192 and `max_sequences` at most
            64, else `int8`.
        activations: inputs of the packed linears other than the head. `exact` takes them as they
            are; `int8` rounds them to eight bits, with a scale for each token and 128 inputs, or
            for each token behind the norms of a rotated folder. A linear then gives a token the
            same bits in any company, in prompts and in steps, and on Hopper takes 4 tokens and
            more faster. The head keeps 16 bits on a GPU, and takes its inputs as they are on a
            CPU. Refused where no linear is packed.
        quantize: recipe (int4, int8, int3, int2) of a BF16, F16 or F32 checkpoint: quantized
            as it is read, with the codes and scales that lowbit-convert writes.
        group_size: weights that share a scale, with `quantize`; where it does not divide a row,
            the next smaller one of 32, 64, 128, 256 that does.
        method: choice of scales, with `quantize`: `rtn` searches for the least error,
            `weighted` weights it by the input's power on a bundled text, which runs through the
            original first, and `absmax` does not search.
        max_waiting: requests that may wait for a place; a further one is refused. None for any
            number.
        speculate: source of the draft tokens that a step verifies together: `off`, `ngram`, which
            copies what followed the same tokens before, `mtp`, the model's head for multi-token
            prediction, `dflash`, a drafter, or `auto` for all that there are, as long as they
            pay. None for `auto` on a GPU where the model has a head and the cache stays as large,
            else `off`. The output does not depend on it.
        draft_tokens: most drafts of a sequence in a step; None for as many as suit the model.
        drafter: folder or Hub id of a drafter for this model (DFlash, DSpark, xPress, Domino,
            DFlash2 or LiLiCorr), packed or BF16, read as it is stored; it stands in for the
            model's head.
        allow_control_tokens: control tokens that a message, a tool or an argument of the template
            spells, such as `<|im_end|>`, are these tokens, so that a message may end its turn and
            begin another. By default they are plain text. Raw prompts are taken as they are.
        tensor_parallel: processes that share the model, each with some of its heads and a part of
            its widths, and on a GPU of its own; the numbers that fit depend on the model. Where
            tokens are drafted, the first one makes all drafts.
        devices: number of the GPU of each of them; None for the first ones.
        vision_device: where the vision tower runs, which is read at the first image. `auto` takes
            the GPU of the model, of several the first, if the cache stays as large beside the tower
            and an image, streams the tower's weights onto it if that leaves room, and else takes
            the CPU; of sequences that memory chooses, a quarter may go, or all but four before the
            CPU is taken. `cuda` makes the cache smaller if it must.
        takes_images: False for a model that is shown none, so that its tower takes no memory.
        refuse_late_system: refuse system messages that the chat template refuses; by default, those
            at the beginning become one, and later ones become marked text of the user's.
    """

    device: str | None = None
    dtype: "torch.dtype | None" = None
    threads: int | None = None
    context: int | None = None
    max_sequences: int | None = 4
    cache_tokens: int | None = None
    kv_cache: KVCache = DEFAULT_KV_CACHE
    activations: Activations = DEFAULT_ACTIVATIONS
    quantize: Base | None = None
    group_size: int = GROUP_SIZE
    method: Method = "rtn"
    max_waiting: int | None = None
    speculate: Mode | None = None
    draft_tokens: int | None = None
    drafter: str | Path | None = None
    allow_control_tokens: bool = False
    refuse_late_system: bool = False
    tensor_parallel: int = 1
    devices: tuple[int, ...] | None = None
    vision_device: VisionDevice = DEFAULT_VISION_DEVICE
    takes_images: bool = True

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            RequestError: an option out of its range, by name.
        """
        if self.device not in DEVICES:
            raise RequestError(f"device must be auto, cpu or cuda, got `{self.device}`")
        if self.dtype is not None and str(self.dtype) not in ("torch.bfloat16", "torch.float32"):
            raise RequestError(f"dtype must be bfloat16 or float32, got {self.dtype}")
        _check_least("threads", self.threads, 1)
        _check_least("max_sequences", self.max_sequences, 1, MOST_SEQUENCES)
        _check_least("max_waiting", self.max_waiting, 0)
        if self.method not in METHODS:
            raise _unknown("method", METHODS, self.method)
        if self.kv_cache not in KV_CACHES:
            raise _unknown("kv_cache", KV_CACHES, self.kv_cache)
        if self.activations not in ACTIVATIONS:
            raise _unknown("activations", ACTIVATIONS, self.activations)
        if self.vision_device not in VISION_DEVICES:
            raise _unknown("vision_device", VISION_DEVICES, self.vision_device)
        if self.speculate not in (None, *MODES):
            raise _unknown("speculate", MODES, self.speculate)
        self._check_tensor_parallel()
        drafts = self.draft_tokens
        if drafts is not None and (type(drafts) is not int or not 1 <= drafts <= MOST_DRAFTS):
            raise RequestError(f"`draft_tokens` must be 1 to {MOST_DRAFTS}, got {shown(drafts)}")
        if self.speculate == "dflash" and self.drafter is None:
            raise RequestError("`speculate` dflash needs a `drafter`")
        if self.drafter is not None and self.speculate not in DRAFTER_MODES:
            raise RequestError(
                f"`drafter` needs `speculate` {' or '.join(DRAFTER_MODES)}, "
                f"got {self.speculate or 'none'}"
            )

    def _check_tensor_parallel(self) -> None:
        ranks = self.tensor_parallel
        if type(ranks) is not int or not 1 <= ranks <= MOST_RANKS:
            raise RequestError(f"`tensor_parallel` must be 1 to {MOST_RANKS}, got {shown(ranks)}")
        if self.devices is not None and (len(self.devices) != ranks or self.devices[0] != 0):
            raise RequestError(
                f"`devices` must name a GPU for each of {ranks} processes, the first one 0, got "
                f"{shown(self.devices)}"
            )
        if ranks > 1 and self.measures_inputs:
            raise RequestError(
                "`method` weighted does not work with `tensor_parallel` yet",
                hint="what works: rtn or absmax; or a folder that lowbit-convert has made",
            )

    @property
    def gpus(self) -> tuple[int, ...]:
        """Number of the GPU of each process."""
        return self.devices or tuple(range(self.tensor_parallel))

    @property
    def measures_inputs(self) -> bool:
        """True if the unquantized model runs over a calibration text first."""
        return self.quantize is not None and self.method == "weighted"

    @property
    def mtp_head(self) -> bool:
        """True if the model's own head drafts, where it has one."""
        return self.speculate in ("mtp", "auto") and self.drafter is None

    def most_drafts(self, recurrent: bool) -> int:
        """Most drafts of a sequence in a step; `recurrent` for a model with linear layers."""
        if self.speculate in (None, "off"):
            return 0
        return self.draft_tokens or (RECURRENT_DRAFTS if recurrent else MOST_DRAFTS)


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions`, as keywords of `load`."""

    device: str | None
    dtype: "torch.dtype | None"
    threads: int | None
    context: int | None
    max_sequences: int | None
    cache_tokens: int | None
    kv_cache: KVCache
    activations: Activations
    quantize: Base | None
    group_size: int
    method: Method
    max_waiting: int | None
    speculate: Mode | None
    draft_tokens: int | None
    drafter: str | Path | None
    allow_control_tokens: bool
    refuse_late_system: bool
    tensor_parallel: int
    devices: tuple[int, ...] | None
    vision_device: VisionDevice
    takes_images: bool


def _check_least(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is not None and value < least:
        raise RequestError(f"`{name}` must be at least {least}, got {value}")
    if value is not None and most is not None and value > most:
        raise RequestError(f"`{name}` must be at most {most}, got {value}")


def _unknown(name: str, known: tuple[str, ...], value: Any) -> RequestError:
    return RequestError(f"`{name}` must be one of {', '.join(known)}, got {shown(value)}")
