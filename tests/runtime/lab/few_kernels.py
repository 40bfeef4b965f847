"""`fake_gpu` as a program whose steps have few sizes, so that it compiles few kernels.

Each kernel takes seconds; `test_compile` of the kernels compiles the others.
"""

import json
import os
import sys

from lowbit.runtime.lab import fake_gpu

if __name__ == "__main__":
    vars(fake_gpu).update(SHORT_WIDTHS=(8,), LENGTHS=(17,))
    json.dump(fake_gpu.work(json.load(sys.stdin)), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # as `fake_gpu`
