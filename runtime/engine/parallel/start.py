"""The start of a rank's process: it ends with the first rank even while its libraries are imported.

So nothing here imports them, which takes seconds.
"""

import os
import signal
import sys
import threading
import time

LOOK_S = 0.5  # between two looks if the parent is still there


def main() -> None:
    """Prepare this process, then follow the first rank; see `follower`."""
    threading.Thread(target=end_with, args=[int(sys.argv[2])], daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # both may come to the whole group
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    from lowbit.runtime.engine.parallel.follower import run

    status = run(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # threads of a group whose ranks have ended may wait for them


def end_with(parent: int) -> None:
    """End this process once another one is its parent."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    main()
