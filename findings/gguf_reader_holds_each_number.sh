#!/bin/sh
# gguf: the reader of a mapped file holds 650 bytes for each number of an array, 1,260 for each string.
#
# Guess before running: `GGUFReader` maps the file and makes views of it, so that it holds some kilobytes,
#   however long the lists and tensors are: an array of numbers lies in one piece, as a tensor does, and one
#   view is enough for either; of strings it holds their offsets.
# Seen: each number of an array has a `numpy.memmap` of its own, each string two, of its length and its
#   bytes, and each of those some 600 bytes of Python objects. So a list of 4-byte numbers takes 160 times
#   its size, one of 6-letter strings 90 times, made when the file is opened; a tensor of 1 MB takes
#   nothing. By that, looking up one key in the header of a model with 150,000 tokens, types and merges
#   costs some 480 MB and 750,000 objects, more than a small model's weights.
#
# Packages: gguf 0.19.0, numpy 2.4.6 (Python 3.11; other releases differ by some bytes).
# Output seen:
#   4000 strings: 14 bytes each in the file, 2.0 views and 1260 bytes in memory, 90 times
#   4000 numbers: 4 bytes each in the file, 1.0 views and 650 bytes in memory, 161 times
#   tensor of 256000 numbers: 4 bytes each in the file, 0.0 views and 0 bytes in memory, 0 times
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet gguf==0.19.0 numpy==2.4.6
cat > "$here/reader.py" <<'PYTHON'
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np

path = Path(sys.argv[1]) / "x.gguf"


def opened(add):
    """Bytes of a file, its views, and the bytes that a reader of it holds."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    reader = gguf.GGUFReader(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return np.array([path.stat().st_size, sum(len(field.parts) for field in reader.fields.values()), held])


COUNT, SIZE = 4000, 256_000
kinds = {
    f"{COUNT} strings": (COUNT, lambda writer: writer.add_token_list([f"{i:06d}" for i in range(COUNT)])),
    f"{COUNT} numbers": (COUNT, lambda writer: writer.add_token_types([1] * COUNT)),
    f"tensor of {SIZE} numbers": (SIZE, lambda writer: writer.add_tensor("w", np.zeros(SIZE, np.float32))),
}
opened(lambda writer: None)  # the first one also holds what is imported late
nothing = opened(lambda writer: None)
times = []
for name, (count, add) in kinds.items():
    size, views, held = (opened(add) - nothing) / count
    times.append(held / size)
    print(
        f"{name}: {size:.0f} bytes each in the file, {views:.1f} views and {round(held, -1):.0f} bytes in memory, "
        f"{times[-1]:.0f} times"
    )
assert times[0] > 50 and times[1] > 100 and times[2] < 0.1
PYTHON
"$here/venv/bin/python" "$here/reader.py" "$here"
echo "as stated"
