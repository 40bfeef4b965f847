"""Memory of large pictures, which a server gives back; in a process of its own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.commands

SIDE = 5000
CODE = f"""
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from PIL import Image
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.serve.server import return_large_blocks

def resident():
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").open()
                if line.startswith("VmRSS"))

return_large_blocks()
file = io.BytesIO()
Image.new("RGBA", ({SIDE}, {SIDE})).save(file, "PNG")
before = resident()
with ThreadPoolExecutor(2) as threads:
    for _ in range(3):
        list(threads.map(lambda _: decode_image(file.getvalue()).size, range(2)))
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory")
def test_memory_of_large_pictures_goes_back_to_the_system() -> None:
    """Two at once, three times: glibc alone keeps 300 to 450 MB, now 20 MB are left."""
    command = [sys.executable, "-c", CODE]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(found.stdout) < SIDE * SIDE * 4
