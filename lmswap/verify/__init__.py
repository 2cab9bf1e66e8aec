"""Verification: bitwise comparison with eager mode and with graphs without swaps, and checksums of transfers."""
