# SPDX-License-Identifier: Apache-2.0
"""Doing something in a child process first, because it may end the process that does it.

onnx's shape inference is C++ that trusts the model: sizes that fit no operator end the process, by an assertion or a memory
fault, and sizes beyond memory make it run for hours.  A fork has all that is loaded already, and takes milliseconds where a new
process takes a fifth of a second.  It is safe here: whoever forks holds Python's lock, and onnx keeps that lock while it works,
so that no other thread can be inside onnx; the child does nothing else and ends without any clean-up.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import warnings
from collections.abc import Callable

CPU_S = 30
"""Of processor time: hundreds of times what the largest known models take."""
GROWTH_BYTES = 2 * 2**30
"""Of memory beside what the process has: shapes take far less."""
COPIES = 6
_DONE, _MEMORY = 0, 3  # exit statuses


def rehearse(action: Callable[[], object], size_bytes: int = 0) -> str | None:
    """Do `action` in a child process.  Returns what it does to the process, in words; None for nothing: then do it here.

    size_bytes: of what it works on, of which it may make some copies.  What `action` changes stays in the child.  Where no child
    can be made, nothing is known, and None is returned.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 and JAX warn of forks beside threads
            child = os.fork()
    except OSError:
        return None
    if child == 0:
        _perform(action, GROWTH_BYTES + COPIES * size_bytes)
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # this process ignores SIGCHLD, so that no status is kept
        return None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"takes longer than {CPU_S} s"
    if code == _MEMORY:
        return f"takes more than {GROWTH_BYTES // 2**30} GiB of memory"
    return f"ends the process with {signal.Signals(-code).name}" if code < 0 else None


def _perform(action: Callable[[], object], growth_bytes: int) -> None:
    """What the child does; it does not return."""
    status = _DONE
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        faulthandler.disable()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        with open("/proc/self/statm") as memory:
            size_bytes = int(memory.read().split()[0]) * resource.getpagesize()
        for what, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, CPU_S),
            (resource.RLIMIT_AS, size_bytes + growth_bytes),
        ):
            soft, hard = resource.getrlimit(what)
            least = min(limit for limit in (most, soft, hard) if limit != resource.RLIM_INFINITY)
            resource.setrlimit(what, (least, hard))
        action()
    except MemoryError:
        status = _MEMORY
    except BaseException:  # the parent meets it too, and says it
        pass
    finally:
        os._exit(status)
