"""What ends a process that waits for another one in vain."""

import os
import sys
import threading
import time
from typing import NoReturn

_START = "the start"
_LOOK_EVERY = 0.5  # seconds
_COORDINATOR_LINGERS = 3.0  # seconds


class Watchdog:
    """Ends this process, with a line that says in what it was, when that does not come to its end.

    A process that dies breaks its connections, and the others hear of it in their next collective. One that is frozen breaks none, and they
    would wait for ever; so would those who wait for a dead one in something else than a collective, such as the barrier of a save.

    Args:
      patience: seconds that anything may take.
      slow: seconds for what takes longer, such as starting up and compiling.
    """

    def __init__(self, patience: float, slow: float) -> None:
        self._patience, self._slow = patience, slow
        self._name, self._coordinates = "a process", False
        self._parent = os.getppid()
        self._over = threading.Lock()
        self.watch(_START, True)
        threading.Thread(target=self._run, daemon=True).start()

    def name(self, rank: int, processes: int) -> None:
        """Says which process this is."""
        self._name, self._coordinates = f"process {rank} of {processes}", rank == 0

    def watch(self, what: str, slow: bool) -> None:
        """Says what begins now; what was before has come to its end."""
        limit = self._slow if slow else self._patience
        self._now = what, limit, time.monotonic() + limit

    @property
    def started(self) -> bool:
        """Whether something has been watched since the start."""
        return self._now[0] != _START

    def end(self, why: str) -> NoReturn:
        """Ends the process at once: taking the interpreter down would wait for the others."""
        self._over.acquire()  # one line is enough; who comes second waits here for the end
        sys.stdout.flush()
        sys.stderr.write(f"{self._name}: {self._now[0]} {why}\n")
        sys.stderr.flush()
        if self._coordinates:
            time.sleep(_COORDINATOR_LINGERS)  # JAX aborts the others once it is gone: they have a line of their own to say first
        os._exit(1)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            _, limit, end = self._now
            if time.monotonic() > end:
                self.end(f"has not come to its end within {limit:g} s: most likely another process is frozen, or out of reach")
            if os.getppid() != self._parent:  # nobody is left who would say how this ended
                os._exit(1)
