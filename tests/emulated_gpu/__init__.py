"""Tests of tools/emulated_gpu."""
