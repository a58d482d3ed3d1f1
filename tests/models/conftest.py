"""Makes the repository's ``models`` package importable whatever directory pytest starts in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
