#!/bin/sh
# compressed-tensors: three-bit codes lie in other words from 0.18 on, under the same format's name.
#
# Guess before running: `pack-quantized` names one layout, so codes of every width that one release
#   packs are the same words in the next, as those of 2, 4 and 8 bits are.
# Seen: 0.17, which vLLM 0.33 pins, puts ten codes of three bits into a word and leaves two bits;
#   0.18 and 0.20 let codes cross words, 64 of them in 6 words where 0.17 has 7. Nothing in the file
#   tells them apart: 0.20 unpacks words of 0.17 to 48 other codes of 64 without an error, 0.17 fails
#   on words of 0.20 by their number.
#
# Packages: compressed-tensors 0.17.0 and 0.20.0 with torch 2.13.0.
# Output seen:
#   0.17.0: 2 bits 4 words, 3 bits 7 words, 4 bits 8 words, 8 bits 16 words
#   0.20.0: 2 bits 4 words, 3 bits 6 words, 4 bits 8 words, 8 bits 16 words
#   words alike: 2, 4, 8 bits
#   0.20.0 reads 3 bits of 0.17.0: 48 of 64 codes differ
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 pydantic loguru transformers==5.17.0 psutil
for release in 0.17.0 0.20.0; do
  "$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/$release" "compressed-tensors==$release"
done
cat > "$here/pack.py" <<'PYTHON'
import sys
from pathlib import Path

import torch

release, here = sys.argv[1], Path(sys.argv[2])
try:
    from compressed_tensors.compressors.pack_quantized import helpers
except ImportError:
    from compressed_tensors.compressors.quantized_compressors import pack_quantized as helpers
widths = {}
for bits in (2, 3, 4, 8):
    codes = (torch.arange(64) % 2**bits - 2 ** (bits - 1)).to(torch.int8)[None]
    words = helpers.pack_to_int32(codes, bits)
    assert torch.equal(helpers.unpack_from_int32(words, bits, codes.shape), codes)
    torch.save((codes, words), here / f"{release}-{bits}.pt")
    widths[bits] = words.shape[1]
print(f"{release}:", ", ".join(f"{bits} bits {count} words" for bits, count in widths.items()))
if release == "0.20.0":
    alike = []
    for bits in (2, 3, 4, 8):
        (codes, old), (_, new) = (torch.load(here / f"{r}-{bits}.pt") for r in ("0.17.0", release))
        if old.shape == new.shape and torch.equal(old, new):
            alike.append(bits)
        else:
            read = helpers.unpack_from_int32(old, bits, codes.shape)
            print(f"{release} reads {bits} bits of 0.17.0: {int((read != codes).sum())} of 64 codes differ")
            assert bits == 3 and int((read != codes).sum()) == 48
    print("words alike:", ", ".join(map(str, alike)), "bits")
    assert alike == [2, 4, 8] and widths == {2: 4, 3: 6, 4: 8, 8: 16}
else:
    assert widths == {2: 4, 3: 7, 4: 8, 8: 16}
PYTHON
for release in 0.17.0 0.20.0; do
  PYTHONPATH="$here/$release" "$here/venv/bin/python" "$here/pack.py" "$release" "$here"
done
echo "as stated"
