"""The process of a rank other than the first: it loads its shard and runs the first rank's tasks.

It ends when the other end of its socket closes, whatever has ended the first rank; and with that
process, too (see `start`), since a fork of it may hold the other end for longer.
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from lowbit.formats.errors import ResourceError
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.machine.system import explained
from lowbit.runtime.backends.exchange import Exchange, PartedError, meet
from lowbit.runtime.engine.memory import gigabytes
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel.gpus import meet_gpus
from lowbit.runtime.engine.parallel.link import GpuLink
from lowbit.runtime.engine.parallel.messages import (
    EXCHANGE_S,
    LOOK_S,
    MEET_S,
    Arrived,
    Failed,
    Met,
    Reading,
    Ready,
    Setup,
    decoded,
    encoded,
)
from lowbit.runtime.engine.plan import CHUNK, MOST_CHUNK
from lowbit.runtime.models.loader import OpenedModel, open_model
from lowbit.runtime.models.ranks import load_rank, load_rank_on_gpu, unsaid
from lowbit.runtime.models.shards import shard_of
from lowbit.runtime.models.shared_decoder import FollowedDecoder
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.state.snapshots import Snapshots

if TYPE_CHECKING:
    from lowbit.runtime.engine.parallel.followed import FollowedRunner
    from lowbit.runtime.kernels.ptx.peers import Peers


def run(number: int) -> int:
    """Follow the first rank, which has given this process a socket.

    Returns:
        Exit status of the process.
    """
    with Connection(number) as link:
        try:
            follow(link)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except PartedError:  # the first rank finds out which has ended
            return 1
        except Exception as error:  # of any kind: the first rank must hear of it
            return _report(link, error)
    return 0


def follow(link: Connection) -> None:
    """Load a shard and run tasks until the other end closes.

    Raises:
        EOFError: it has closed.
        PartedError: another rank has ended.
        LowbitError: the shard cannot be read.
    """
    setup: Setup = decoded(link.recv_bytes())
    torch.set_num_threads(setup.threads)
    link.send_bytes(encoded(Arrived()))
    exchange = meet(setup.share, setup.store, MEET_S, EXCHANGE_S)
    peers = meet_gpus(setup, exchange)
    link.send_bytes(encoded(Met()))
    if peers is None:
        followed: FollowedDecoder | FollowedRunner = loaded(setup, exchange, _reports(link))
    else:
        followed = loaded_on_gpu(setup, peers, _reports(link))
    link.send_bytes(encoded(Ready()))
    with torch.inference_mode():
        while True:
            followed.run(decoded(link.recv_bytes()))


def _reports(link: Connection) -> Callable[[str], None]:
    """Tells the first rank, now and then, of modules that have been read."""
    told_at = time.monotonic()

    def report(module: str) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= LOOK_S:
            told_at = time.monotonic()
            link.send_bytes(encoded(Reading(module)))

    return report


def loaded(
    setup: Setup, exchange: Exchange, progress: Callable[[str], None] = unsaid
) -> FollowedDecoder:
    """A rank's shard with the state of its sequences.

    progress: is told of each module that has been read.

    Raises:
        LowbitError: the folder cannot be read.
    """
    shard, cache = _shard(setup), setup.cache
    model = load_rank(shard, exchange, setup.dtype, cache.context, progress)
    sizes = cache.all_pages, cache.slots
    state = new_state(shard.config, *sizes, setup.dtype, "cpu", setup.cache_type)
    return FollowedDecoder(model, state, Snapshots(state.slots, cache.snapshots, staged=False))


def loaded_on_gpu(
    setup: Setup, peers: "Peers", progress: Callable[[str], None] = unsaid
) -> "FollowedRunner":
    """A rank's shard with the state of its sequences, on its GPU.

    progress: is told of each module that has been read.

    Raises:
        LowbitError: the folder cannot be read, or the GPU has no room or no kernel for the shard.
    """
    from lowbit.runtime.engine.parallel.followed import FollowedRunner
    from lowbit.runtime.kernels.exchange import exchange_first  # needs triton and a GPU

    check_memory(setup, free_bytes("cuda"))
    shard, cache = _shard(setup), setup.cache
    model = load_rank_on_gpu(shard, peers, setup.dtype, cache.context, MOST_CHUNK, progress)
    sizes = setup.vocabulary, cache, setup.dtype, "cuda", setup.cache_type
    runner = new_runner(model, *sizes, CHUNK, shard.part_tokens("cuda"))
    runner.link = GpuLink(partial(exchange_first, peers=peers))
    torch.cuda.synchronize()
    return FollowedRunner(runner)


def check_memory(setup: Setup, free: int | None) -> None:
    """Refuse a GPU with less free memory than a share of the model takes.

    Raises:
        ResourceError: naming both.
    """
    if free is not None and free < setup.gpu_bytes:
        raise ResourceError(
            f"GPU {setup.devices[setup.share.rank]} has {gigabytes(free)} free, where "
            f"{gigabytes(setup.gpu_bytes)} are needed on each",
            hint="end what else runs there, or choose a shorter context or fewer sequences",
        )


def _shard(setup: Setup) -> OpenedModel:
    options = setup.options
    rule: ScaleRule = "absmax" if options.method == "absmax" else "signed"
    opened = open_model(setup.folder, options.quantize, options.group_size, rule)
    # `with_activations` refuses a model without packed linears; the drafter may have the only ones.
    return shard_of(replace(opened, activations=options.activations), setup.share)


def _report(link: Connection, error: Exception) -> int:
    """Tell the first rank why this one ends; it may be why that one does."""
    found = explained(error)
    if found is None:
        traceback.print_exception(error)
        failed = Failed(f"{type(error).__name__}: {error}")
    else:
        failed = Failed(str(found), found.hint)
    try:
        link.send_bytes(encoded(failed))
    except OSError:  # it has ended
        return 0
    return 1
