"""Speed of a server under loads, one after another."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from lowbit.runtime.lab.http_load.clients import OfferedLoad, run_load
from lowbit.runtime.lab.http_load.connection import Address
from lowbit.runtime.lab.http_load.requests import Api
from lowbit.runtime.lab.http_load.result import LatencyLimits, LoadResult, load_result
from lowbit.runtime.lab.http_load.server import RequestSettings, open_target

Progressed = Callable[[str, int, int], None]  # title of a load, requests that have ended, of all


@dataclass(frozen=True, slots=True)
class ServerResult:
    """Figures of a server."""

    url: str
    model: str
    api: Api
    token_ids: bool  # prompts were ids of tokens
    prompt_tokens: int  # that were aimed at
    new_tokens: int  # that were asked for
    ignore_eos: bool  # the server was asked to go on behind an end
    seed: int  # of prompts and arrivals
    limits: LatencyLimits
    notes: tuple[str, ...]  # what of the wishes was not to be had
    loads: tuple[LoadResult, ...]


def bench_server(
    address: Address,
    asked: RequestSettings,
    loads: Sequence[OfferedLoad],
    seed: int,
    limits: LatencyLimits,
    on_progress: Progressed,
) -> ServerResult:
    """Put loads on a server, one after another.

    Args:
        seed: of prompts and arrivals. The same one asks the same again, which a server may then
            have in its cache.

    Raises:
        LowbitError: the server cannot be measured, as `open_target` says.
    """

    async def run() -> ServerResult:
        target = await open_target(address, asked, Random(f"{seed} before"))
        results = []
        for load in loads:
            title = load.title

            def progressed(done: int, total: int, title: str = title) -> None:
                on_progress(title, done, total)

            record = await run_load(target, load, Random(f"{seed} {title}"), on_progress=progressed)
            results.append(load_result(load, record, asked.new_tokens, limits))
        return ServerResult(
            url=address.root,
            model=target.shape.model,
            api=asked.api,
            token_ids=asked.token_ids,
            prompt_tokens=asked.prompt_tokens,
            new_tokens=asked.new_tokens,
            ignore_eos=target.shape.ignore_eos,
            seed=seed,
            limits=limits,
            notes=target.notes,
            loads=tuple(results),
        )

    return asyncio.run(run())
