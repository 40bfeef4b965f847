"""Thousands of requests that schemathesis makes of our OpenAPI document: none may end in a 5xx.

Run: python examples/maintenance/fuzz_serve.py URL [--requests 10000] [--seed 1]
The server is one of `lowbit-run serve MODEL --context 256 --request-timeout 60`, so that answers
without a limit are short. Half of the requests fit the document, the other half do not.
"""

import sys
from collections import Counter
from typing import Any

import click
import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

STUCK_S = 90


@click.command()
@click.argument("url")
@click.option("--requests", default=10_000, show_default=True)
@click.option("--seed", "first", default=1, show_default=True)
def main(url: str, requests: int, first: int) -> None:
    """Send requests to the server at URL."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [result.ok() for result in document.get_all_operations() if isinstance(result, Ok)]
    [model, *_] = httpx2.get(f"{url}/v1/models").json()["data"]
    posts = [operation for operation in found if operation.method == "post"]
    statuses: Counter[tuple[str, int]] = Counter()
    failed: list[str] = []
    for number, operation in enumerate(posts):
        for mode in GenerationMode:

            @seed(first + number)
            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=max(1, requests // (2 * len(posts))),
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def check(case: Any) -> None:
                if isinstance(case.body, dict) and "model" in case.body:
                    case.body["model"] = model["id"]  # or all would end there
                answer = case.call(timeout=STUCK_S)
                statuses[case.path, answer.status_code] += 1
                if answer.status_code >= 500:
                    failed.append(f"{case.path} {answer.status_code} {case.body!r:.500}")

            check()
        print(f"{operation.path}: {sum(statuses.values()):,} requests so far", flush=True)
    for (path, status), count in sorted(statuses.items()):
        print(f"{path:28} {status} {count:6,}")
    print("\n".join(failed[:20]) or "no 5xx")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
