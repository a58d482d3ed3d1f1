# SPDX-License-Identifier: Apache-2.0
"""The other process: `convpool.ir.process` starts it with a connection's number, a script, and words for its class `Service`.

A request is the name of a method, whether bytes follow as its first argument, and the other arguments.  An answer is what became
of it and a value.
"""

import importlib.util
import os
import select
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

READY, DONE, FAILED, MEMORY = "ready", "done", "failed", "memory"


def load(name: str, path: str) -> Any:
    """The module of a file by itself."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(service: Any, pipe: Connection) -> None:
    """Answer a request; this may end the process.  Raises EOFError where there is none any more."""
    method, has_content, *arguments = pipe.recv()
    content = [pipe.recv_bytes()] if has_content else []
    try:
        answer = DONE, getattr(service, method)(*content, *arguments)
    except MemoryError:
        answer = MEMORY, ""
    except Exception as error:  # onnxruntime's exceptions share no base class
        answer = FAILED, str(error) or type(error).__name__
    pipe.send(answer)


def end_with_parent(pipe: int) -> None:
    """End this process, also in the middle of a request, once nobody can send more: nobody waits for C++ to clear up."""
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Answer requests until there are no more."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    pipe = Connection(int(sys.argv[1]))
    service = load("service", sys.argv[2]).Service(*sys.argv[3:])
    threading.Thread(target=end_with_parent, args=[pipe.fileno()], daemon=True).start()
    pipe.send(READY)
    try:
        while True:
            serve(service, pipe)
    except (EOFError, ConnectionError):
        os._exit(0)


if __name__ == "__main__":
    main()
