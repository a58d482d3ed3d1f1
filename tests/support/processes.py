# SPDX-License-Identifier: Apache-2.0
"""Programs that are killed, and the processes that they had started."""

import os
import subprocess
import sys
import time


def wait_for_the_process_of(code: str) -> None:
    """Run a program that prints the number of a process and ends itself; the process ends too, within half a minute."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    for _ in range(600):
        if not os.path.exists(f"/proc/{int(done.stdout)}/exe"):
            return
        time.sleep(0.05)
    raise AssertionError("it goes on")
