"""A program in place of `fake_gpu`: it compiles nothing, and leaves the task that it was given."""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    task = json.load(sys.stdin)
    found = {"task": task, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}
    Path(os.environ["NOTED_TASK"]).write_text(json.dumps(found))
    if "FAILS" in os.environ:
        sys.exit("Traceback\nOSError: no room on the disk")
    json.dump({"compiled": {"gemv_one": 4, "embed": 1}, "found": {"digits": 2}}, sys.stdout)
