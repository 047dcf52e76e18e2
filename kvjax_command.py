"""The command `kvjax`, which Ctrl-C ends at any moment with exit code 130.

Python raises KeyboardInterrupt in its main thread once the code that runs there allows it. A
compiled program may take minutes before that, and in a callback of jaxlib the exception is lost
or crashes the process. So a thread waits for the signal here, and ends the process. Files are
written whole or not at all, so none is cut off. The module lies beside the package, because the
signal may come while the package and JAX are imported.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

INTERRUPTED = 130  # 128 + the number of the signal, as shells report it
SHOW_CURSOR = b"\033[?25h"  # which progress bars hide


def end_at_interrupt() -> None:
    """Makes SIGINT end the process with `INTERRUPTED`. Call it in the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        while reader.recv(1)[0] != signal.SIGINT:
            pass
        if os.isatty(2):
            os.write(2, SHOW_CURSOR)
        os._exit(INTERRUPTED)

    threading.Thread(target=wait, name="interrupt", daemon=True).start()
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)  # instead of KeyboardInterrupt


def main() -> int:
    end_at_interrupt()
    gc.disable()  # the objects that imports make stay; `kvjax.cli.terminal.collect_garbage` turns it on
    try:
        from kvjax.cli import main as run
        from kvjax.numerics.platforms import compile_for_own_devices
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compile_for_own_devices()
    return run()


def command() -> None:
    """`main`, at whose end the process ends at once: Python would first free models, caches and
    programs one by one.
    """
    code = main()
    if "--distributed" in sys.argv:  # where processes take leave of each other
        sys.exit(code)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
