"""CRC-32, which everybody has: zlib's, or the same number several times faster where Intel's ISA-L is installed."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
