"""Measured costs of a program's ops: seconds, scratch memory and repeatability, from runs on synthetic inputs."""
