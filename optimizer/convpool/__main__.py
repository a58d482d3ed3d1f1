# SPDX-License-Identifier: Apache-2.0
"""`python -m convpool` is the command convpool."""

from convpool.cli.group import main

if __name__ == "__main__":
    main()
