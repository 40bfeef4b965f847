#!/bin/sh
# Pillow: from 13 on a resize takes columns first where that is less work, and gives another picture.
#
# Guess before running: `Image.resize(..., BICUBIC)` gives one picture in every release, within one
#   of 255 of what torchvision (PyTorch's interpolate of bytes with antialias) gives.
# Seen: each pass rounds and clips to bytes, so that their order shows at sharp edges: by up to 12 of
#   255 here, by 27 in pictures with text. PyTorch and Pillow up to 12.3 take rows first. The two
#   image processors that transformers has for Qwen3.5, by torchvision and by Pillow, now differ.
#
# Packages: Pillow 12.3.0 and 13.0.0 with torch 2.13.0 (CPU) and numpy 2.4.6.
# Output seen:
#   Pillow 12.3.0, 752 x 203 to 768 x 192: 1, 736 x 192: 1, 768 x 224: 2, 736 x 224: 1
#   Pillow 13.0.0, 752 x 203 to 768 x 192: 12, 736 x 192: 1, 768 x 224: 2, 736 x 224: 1
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$here/resize.py" <<'PYTHON'
import random
import sys

import numpy as np
import PIL
import torch
from PIL import Image, ImageDraw

rng = random.Random(1)
image = Image.new("RGB", (752, 203), "white")
draw = ImageDraw.Draw(image)
for _ in range(60):
    x, y = rng.randrange(752), rng.randrange(203)
    color = tuple(rng.randrange(256) for _ in range(3))
    draw.rectangle((x, y, x + rng.randrange(40), y + rng.randrange(40)), fill=color)
channels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None]
found = []
for width, height in ((768, 192), (736, 192), (768, 224), (736, 224)):
    options = {"size": (height, width), "mode": "bicubic", "antialias": True}
    theirs = torch.nn.functional.interpolate(channels, **options)[0].permute(1, 2, 0).numpy()
    ours = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    found.append(f"{width} x {height}: {np.abs(theirs.astype(int) - ours).max()}")
print(f"Pillow {PIL.__version__}, 752 x 203 to", ", ".join(found))
PYTHON
for release in 12.3.0 13.0.0; do
  "$here/venv/bin/python" -m pip install --quiet --no-deps "pillow==$release"
  "$here/venv/bin/python" "$here/resize.py"
done
