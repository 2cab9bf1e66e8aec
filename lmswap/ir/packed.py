"""What does a gzip file hold? Its bytes, unless they are so many that it can only be meant to fill memory."""

from __future__ import annotations

import gzip
import io

# Programs and profilers' JSON pack to a 12th to a 17th; what packs better than this is no text of theirs. The format
# itself goes up to 1032.
_MOST_TIMES = 100
_PIECE_BYTES = 2**20


def unpack(data: bytes) -> bytes:
    """The bytes that the gzip file ``data`` holds.

    Raises:
        ValueError: they are more than 100 times as many as those of ``data``.
        OSError, EOFError, zlib.error: it is damaged.
    """
    most_bytes = _MOST_TIMES * len(data)
    content = bytearray()
    with gzip.open(io.BytesIO(data)) as file:
        while piece := file.read(_PIECE_BYTES):
            content += piece
            if len(content) > most_bytes:
                raise ValueError(f"it unpacks to more than {_MOST_TIMES} times its {len(data)} bytes")
    return bytes(content)
