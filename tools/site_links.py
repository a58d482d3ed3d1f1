# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links that leave docs/ become plain text, since the site has the documents alone."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """The page's text without links out of docs/; `../` within decisions/ stays."""
    up = page.file.src_uri.count("/") + 1
    return re.sub(rf"!?\[([^\]]*)\]\((?:\.\./){{{up}}}[^)]*\)", r"\1", markdown)
