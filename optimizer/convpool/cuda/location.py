# SPDX-License-Identifier: Apache-2.0
"""Where libconvpool.so is: one file, the CUDA library and TensorRT's plugin library.

The environment variable CONVPOOL_LIBRARY names the file.  Without it, the distribution convpool-cuda brings the file, in the
version of this package.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from convpool.cuda.errors import LibraryError, NotBuiltError

VARIABLE = "CONVPOOL_LIBRARY"
DISTRIBUTION = "convpool-cuda"
INSTALLED = "convpool_cuda/libconvpool.so"
"""The file in the folder that the distribution is installed to."""
INSTALL = "run `pip install ./plugin` in convpool's repository"


def library_path() -> Path:
    """The library's file.  Raises LibraryError if it is not there, or of another version than this package."""
    if named := named_file("libconvpool", VARIABLE):
        return named
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise NotBuiltError(f"libconvpool: not built; got no {DISTRIBUTION}, expected it installed; {INSTALL}") from None
    _check_version(found.version)
    path = Path(str(found.locate_file(INSTALLED)))
    if not path.exists():
        raise LibraryError(f"libconvpool: not found; got {path}, expected the file of {DISTRIBUTION}; {INSTALL}")
    return path


def named_file(what: str, variable: str) -> Path | None:
    """The absolute path of the file that an environment variable names, or None.  Raises LibraryError where it is missing."""
    named = os.environ.get(variable)
    if not named:
        return None
    if not os.path.isfile(named):  # unlike Path's, it never raises
        raise LibraryError(f"{what}: not found; got {named}, expected the built library; {variable} names it")
    return Path(os.path.realpath(named))


def _check_version(library: str) -> None:
    try:
        package = distribution("convpool").version
    except PackageNotFoundError:  # used from the sources; the library's ABI version is compared when it is loaded
        return
    if library != package:
        raise LibraryError(f"{DISTRIBUTION}: another version; got {library}, expected convpool's {package}; {INSTALL}")
