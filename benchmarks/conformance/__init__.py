"""Models that others wrote, trained under half of their activation memory: the same bits as without swapping?"""
