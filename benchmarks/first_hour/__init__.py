"""The first hour on a GPU: what was only tried on an emulated one, in the order of what decides most.

- parts: what is tried, each in a process of its own, in less than ten minutes
- facts, suite, cards, repeats: what nothing else here measures
- page: what they found
"""
