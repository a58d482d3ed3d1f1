# SPDX-License-Identifier: Apache-2.0
from convpool.cli.optimize import main

if __name__ == "__main__":
    main()
