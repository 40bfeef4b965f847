"""Convert the bundled model to INT4 and tell a story with it, from Python.

python examples/quickstart.py
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import lowbit.runtime
from lowbit.convert import Request, convert

SOURCE = Path(__file__).parent / "models" / "tiny-qwen3"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "tiny-qwen3-int4"
        # INT4 in a second. Without a request, the best that minutes buy.
        done = convert(SOURCE, packed, Request(effort="low")).conversion
        worst = max(done.weights, key=lambda row: row.relative_l2)
        print(f"{done.plan.bits_per_weight:.2f} bits per weight in {done.seconds:.1f} s, ", end="")
        print(f"by {done.plan.method}")
        print(f"largest relative error {worst.relative_l2:.3f}, in {worst.name}\n")

        model = lowbit.runtime.load(packed, device="cpu")
        sampling = replace(model.defaults, temperature=0.8, seed=1)
        stream = model.stream("Once upon a time", raw=True, sampling=sampling, max_new_tokens=60)
        for piece in stream:
            print(piece, end="", flush=True)
        speed = stream.generation.timings.decode_tokens_per_s
        print(f"\n\n{speed:.0f} tokens per second")


if __name__ == "__main__":
    main()
