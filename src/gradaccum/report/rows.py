"""The lines of a source file, as Python reads and counts them."""

from __future__ import annotations

import io
import tokenize

__all__ = ["rows"]


def rows(data: bytes) -> list[str]:
    r"""The lines with their endings, in the encoding that the file declares.

    `str.splitlines` would also end a line at a form feed, at U+2028 and at others.

    Examples:
        >>> rows(b"# coding: latin-1\nx = 1  # caf\xe9 \x0c\n")
        ['# coding: latin-1\n', 'x = 1  # café \x0c\n']
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding, "replace")
    except (SyntaxError, LookupError):
        text = data.decode("utf-8", "replace")
    return io.StringIO(text, newline="").readlines()
