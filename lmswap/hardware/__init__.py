"""The machine: devices, memory, tiers and links, queried from the system or measured."""
